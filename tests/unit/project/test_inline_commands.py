"""Commands within the documents' sentences: ours exist, others are run or have a reason.

What the pages' `sh` blocks have is run by tests/integration/test_document_commands.py.
"""

import re
import shlex
from collections.abc import Iterator

import pytest
from test_docs import PAGES, parsed, tokens

from fpga_plugin.commands.main import main

PROGRAMS = frozenset({
    "apt-get", "bash", "chmod", "chown", "cp", "curl", "cut", "docker", "echo", "fpga-plugin",
    "fpga-plugin-probe", "fuser", "git", "grep", "helm", "jq", "kubectl", "kustomize", "ln",
    "lspci", "make", "modprobe", "mount", "mv", "openssl", "oras", "pip", "podman", "python",
    "rm", "sed", "spin", "sudo", "sysctl", "systemctl", "tar",
})  # fmt: skip
"""How a command begins, as the documents have any."""

HISTORY = "CHANGELOG.md"
"""It reports commands as they were."""

BY_A_TEST = {
    "kubectl label node NODE feature.node": "tests/kubelet/test_install.py",
    "kubectl delete -k site": "tests/kubelet/test_install.py",
    "kubectl cordon NODE": "tests/kubelet/test_install.py",
    "kubectl uncordon NODE": "tests/kubelet/test_install.py",
    "kubectl label node NODE fpga.intel.com/plugin-configuration-": "tests/kubelet/test_install.py",
    "kubectl get nodes": "its block in docs/install.md",
    "helm test": "its block in docs/install.md",
    "helm template": "tests/deploy/test_charts.py",
    "helm package": "tests/image/test_publish.py",
    "helm upgrade": "its block in docs/install.md",
    "helm rollback fpga-plugin --namespace": "tests/kubelet/test_chart_life.py",
    "fpga-plugin-probe ": "tests/integration/test_http.py",
    "openssl pkeyutl -verify": "tests/image/test_publish.py",
    "make": "tests/unit/project/test_docs.py looks for the target",
    ".venv/bin/python -m pytest tests/unit/project/test_versions.py": "runs with the others",
    ".venv/bin/python tests/fuzz --keep": "test_fuzz_seeds.py holds what it writes",
}
NOT_RUN = {
    "docker pull debian:bookworm-slim": "needs an engine and a registry",
    "docker save": "needs an engine",
    "modprobe --dry-run dfl-pci": "reports the host's kernel",
    "lspci ": "reports the host's hardware",
    "fuser ": "reports the host's processes",
    "apt-get install": "changes the machine",
    "sudo apt-get install": "changes the machine",
    "grep -rnE 'nvariants": "for people to read",
    "chown -hR root:root": "changes the host's store",
    "chmod go-w": "not a whole command",
    "grep -E 'Cap": "of a node's own process; tests/integration/test_sandbox.py reads the same",
    "git tag --sign": "takes the releaser's key",
    "helm rollback": "in docs/bitstreams.md as in docs/upgrade.md",
    "kubectl describe pod": "for people to read",
    "kubectl describe node": "the same",
    "kubectl drain": "evicts the only node's pods",
    "kubectl uncordon": "without the node: the way back from kubectl drain",
    "echo 1 >": "takes a card off its host; in a report to another project",
}
"""How a command begins that is not run by a test, and why."""


def inline(page: str) -> list[str]:
    """The commands within a page's sentences."""
    spans = (
        " ".join(token.content.split()) for token in tokens(page) if token.type == "code_inline"
    )
    return [one for one in spans if " " in one and _program(one) in PROGRAMS]


def _program(command: str) -> str:
    return command.split(maxsplit=1)[0].rpartition("/")[2]


def every() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        if page != HISTORY:
            yield from ((page, command) for command in inline(page))


@pytest.mark.parametrize("page", sorted(set(PAGES) - {HISTORY}))
def test_a_command_of_ours_is_one(page, capsys):
    for command in sorted(set(inline(page))):
        if _program(command) == "fpga-plugin":
            _is_one(command, capsys)


def _is_one(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command)[1:]
    named = []
    for word in words:
        if not re.fullmatch(r"[a-z]+", word):
            break  # a placeholder or an option
        named.append(word)
    options = [word for word in words if re.fullmatch(r"--[a-z][a-z-]*", word)]
    with pytest.raises(SystemExit) as ended:
        main([*named, "--help"])
    assert ended.value.code == 0, command
    told = capsys.readouterr().out
    assert f"fpga-plugin {' '.join(named)}".strip() in told, command
    assert not [option for option in options if option not in told], command


def test_every_other_command_is_run_by_a_test_or_says_why_not():
    others = [(page, one) for page, one in every() if _program(one) != "fpga-plugin"]
    known = (*BY_A_TEST, *NOT_RUN)
    assert [(page, one) for page, one in others if not one.startswith(known)] == []
    unused = [begin for begin in known if not any(one.startswith(begin) for _, one in others)]
    assert unused == []


def test_no_command_hides_in_a_block_that_is_not_run():
    hidden = [
        (page, line)
        for page in PAGES
        for token in parsed(page)
        if token.type in {"fence", "code_block"} and token.info.strip() != "sh"
        for line in token.content.splitlines()
        if line.strip() and _program(line) in PROGRAMS and not line.startswith(" ")
    ]
    assert hidden == []
