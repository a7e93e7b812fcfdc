"""Every command in the documents is run, as it is written, but for a few with a reason.

The commands are taken out of the pages' `sh` blocks, and each page's are run one after the other in
a shell, in a folder that is made as the pages say, beside a plugin on simulated cards. The
project's own program is the real one; `doubles/operator_tools.py` stands in for a cluster.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_support import AFU, CARD, ID, LIMIT, ROOT, STORE, Node
from doubles.bitstreams import gbs
from doubles.xclbins import xclbin

pytestmark = pytest.mark.long

TOOLS = ROOT / "tests/doubles/operator_tools.py"

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "bitstreams/*.md", "deploy/**/*.md", "docs/**/*.md")
    for path in ROOT.glob(pattern)
)

NOT_RUN = {
    "packager ": "OPAE's tool is not here",
    "sudo apt-get install": "changes the machine",
    "docker push": "needs an engine and a registry",
    "(cd store && oras push": "needs oras and a registry",
    "printf": "needs an engine: tests/dra/test_chart_store.py",
    "docker inspect": "needs an engine: tests/dra/test_chart_store.py",
    "fpga-plugin fleet": "needs a cluster: tests/integration/test_fleet.py",
    "fpga-plugin card release": "nothing is kept there: tests/integration/test_kept_regions.py",
    "rsync ": "needs a node",
    "ssh ": "needs a node",
    "kind ": "needs Docker: tests/kubelet/test_chart_life.py plays the rest of docs/kind.md",
    "docker exec": "needs kind: tests/kubelet/test_chart_life.py",
    "docker cp": "needs kind",
    "git clone": "needs the repository's address",
    ".venv/bin/python -m pytest": "a test run in a test run",
    ".venv/bin/python bitstreams/sources/build.py": "writes the samples: test_bitstream_command.py",
    "spin ": "needs spin, which CI lacks; test_ledger_model.py replays what it printed",
    "echo 0 > /sys/bus/pci": "needs a card with virtual functions",
    "echo 3 > /sys/bus/pci": "needs a card with virtual functions",
    "FPGA_PLUGIN_BACKEND=simulated FPGA_PLUGIN_BITSTREAM_DIR=$PWD/bitstreams sudo -E"
    " .venv/bin/fpga-plugin run": "serves until it is ended: daemon_support starts it so",
}
"""How commands begin that are not run, and why."""

LASTING = re.compile(r"fpga-plugin [^#]*(--watch|--serve)")
"""Commands that go on until Ctrl-C: one answer of theirs is enough."""


def commands(page: str) -> list[str]:
    """What a page's shell blocks have, a command each; what is split over lines is joined."""
    found: list[str] = []
    for block in re.findall(r"(?ms)^ *```sh\n(.*?)^ *```", (ROOT / page).read_text()):
        begun = ""
        for line in re.sub(r"\\\n *", "", block).splitlines():
            if not begun and (not line.strip() or line.lstrip().startswith("#")):
                continue
            begun = f"{begun}\n{line}" if begun else line.strip()
            try:
                shlex.split(begun, comments=True)
            except ValueError:
                continue  # a quoted text goes on in the next line
            found.append(begun)
            begun = ""
        assert not begun, f"{page}: a quote is never closed: {begun}"
    return found


def left_out(command: str) -> str:
    """Why a command is not run; empty: it is."""
    return next((why for begin, why in NOT_RUN.items() if command.startswith(begin)), "")


def watched(command: str, environment: dict[str, str], folder: Path) -> None:
    """What goes on until Ctrl-C gives an answer before, and ends well."""
    words = shlex.split(command, comments=True)
    with subprocess.Popen(
        words, env=environment, cwd=folder, stdout=subprocess.PIPE, process_group=0
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)
        process.stdout.read()
    assert process.returncode in {0, 130}, command


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Node("1x3", http_address="127.0.0.1:0", status_page="true") as node:
        yield node.up()


def place(folder: Path, node: Node) -> dict[str, str]:
    """What the pages take for granted, in a folder; returns the environment of its shell."""
    for name in ("deploy", "bitstreams", "docs"):
        (folder / name).symlink_to(ROOT / name)
    store = folder / "store"
    (store / ID).mkdir(parents=True)
    (store / ID / "blank.gbs").write_bytes((STORE / ID / "blank.gbs").read_bytes())
    (folder / "null_a10.gbs").write_bytes((STORE / ID / "blank.gbs").read_bytes())
    (folder / "policy.yaml").write_text((ROOT / "deploy/admission/policy.yaml").read_text())
    image = bytes.fromhex(AFU) + bytes(4096)
    (folder / "hello_afu.gbs").write_bytes(gbs(image, AFU, interface=ID))
    (folder / "vadd.xclbin").write_bytes(xclbin())
    tools = folder / "bin"
    tools.mkdir()
    for name in ("helm", "kubectl", "curl", "make", "sudo"):
        (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} {TOOLS} {name} "$@"\n')
        (tools / name).chmod(0o755)
    program = f'#!/bin/sh\nexec {sys.executable} -m fpga_plugin "$@"\n'
    own = folder / ".venv/bin"
    own.mkdir(parents=True)
    for path in (tools / "fpga-plugin", own / "fpga-plugin"):
        path.write_text(program)
        path.chmod(0o755)
    (folder / "log").write_text("uid POD-UID 0000-10-00.0-p0\n")
    ((address,),) = (line["addresses"] for line in node.plugin.logged("serving metrics"))
    others = {k: v for k, v in os.environ.items() if not k.startswith("FPGA_PLUGIN_")}
    return others | node.settings | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "FPGA_PLUGIN_BITSTREAM_DIR": str(store),
        "TOOLS_HERE": str(folder),
        "TOOLS_ROOT": str(ROOT),
        "TOOLS_HTTP": address,
    }  # fmt: skip


@pytest.mark.needs("jq", "openssl")
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_a_pages_commands_do_what_they_say(page: str, node: Node, tmp_path: Path):
    node.plugin.until_logged("serving metrics")
    environment = place(tmp_path, node)
    for command in commands(page):
        if left_out(command):
            continue
        if LASTING.search(command):
            watched(command, environment, tmp_path)
            continue
        # Of the simulated node.
        ours = command.replace("0000-3b-00.0", CARD).replace("NAMESPACE/POD", CARD)
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", ours],
            env=environment, cwd=tmp_path, capture_output=True, text=True, check=False,
            timeout=3 * LIMIT,
        )  # fmt: skip
        assert done.returncode == 0, f"{page}: {command}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        if ".spec..limits" in command:
            assert done.stdout.split() == ["team/app", "team/init"], "init containers count too"


def test_what_is_left_out_is_still_in_the_documents():
    every = [command for page in PAGES for command in commands(page)]
    assert len(every) > 90
    unused = [begin for begin in NOT_RUN if not any(c.startswith(begin) for c in every)]
    assert not unused
