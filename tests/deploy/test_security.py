"""docs/security.md's table of privileges is complete: it names what the chart's pod gets."""

import re

import pytest
from test_charts import ROOT, TOOLS, mounts, pod_spec, rendered

pytestmark = pytest.mark.skipif(
    not (TOOLS / "helm").exists(), reason="helm is not built: make test-deploy"
)

PAGE = (ROOT / "docs/security.md").read_text()
TABLE = PAGE.partition("\n| what | why | with less |\n")[2].partition("\n\n")[0]
FIRST = [line.split(" | ")[0] for line in TABLE.splitlines()]
"""What each row is about."""

EVERYTHING = ("mode=dra", "events=true", "settings.FPGA_PLUGIN_CDI_DEVICES=*=vendor.com/opencl=a")

CALLED = {
    "/host/dev": "`/dev` as `/host/dev`, read-only",
    "/host/sys": "`/sys` as `/host/sys`, writable",
    "/host/cgroup": "`/sys/fs/cgroup`, read-only",
    "/var/lib/kubelet": "kubelet's root directory, read-only",
    "/var/lib/kubelet/pod-resources": "`/var/lib/kubelet/pod-resources`, `pods-api`, read-only",
    "/var/lib/kubelet/pods-api": "`/var/lib/kubelet/pod-resources`, `pods-api`, read-only",
    "/var/lib/kubelet/plugins/fpga.intel.com": "`plugins/<driver>` in it",
    "/var/lib/kubelet/plugins_registry": "`plugins_registry` in it",
}
"""How the page calls what it does not call by its path alone."""


def rows(about: str) -> list[str]:
    return [first for first in FIRST if first.removeprefix("| ") == about]


def test_each_directory_of_the_node_has_its_row_and_the_row_says_if_it_is_only_read() -> None:
    made = mounts(rendered(*EVERYTHING)).items()
    given = {path: write for path, (of, write) in made if "hostPath" in of}
    assert len(given) == 12
    for path, write in given.items():
        plain = f"`{path}`" if write else f"`{path}`, read-only"
        about = CALLED.get(path, plain)
        assert len(rows(about)) == 1, f"{path}: no row {about}"
        assert write is not about.endswith("read-only"), path


def test_each_right_at_the_api_server_has_its_row() -> None:
    role = rendered(*EVERYTHING)["ClusterRole", "fpga-plugin"]
    assert len(role["rules"]) == 5
    for rule in role["rules"]:
        (resource,) = rule["resources"]
        about = [
            part[0]
            for first in FIRST
            for part in re.finditer(r"((?:`[a-z]+`(?:, )?)+) on ([a-z]+)", first)
            if part[2] == resource
        ]
        assert len(about) == 1, f"{resource}: {about}"
        assert re.findall(r"`([a-z]+)`", about[0]) == rule["verbs"]


def test_what_is_privileged_or_shared_with_the_node_has_its_row() -> None:
    spec = pod_spec(rendered(*EVERYTHING))
    (container,) = spec["containers"]
    assert container["securityContext"]["privileged"] is True
    assert container["securityContext"]["runAsUser"] == 0
    assert rows("`privileged: true`")
    assert rows("user 0")
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
