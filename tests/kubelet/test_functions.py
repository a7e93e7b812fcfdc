"""Pods of the Intel plugin's default mode (`-mode af`) on the real kubelet, as they are.

Its examples (demo/test-fpga-preprogrammed.yaml, demo/intelfpga-job.yaml) ask for one device of a
function and for a processor, add IPC_LOCK, run once, and set no FPGA_* variable; its webhook writes
the resource's name. They ask for huge pages too, which this test leaves out: a node without them
would refuse the pod whatever its devices are.
"""

from collections.abc import Callable

from daemon_support import FACTORY, P0
from machine import STAY, until
from node import Node, container

INTEL_ID = "69528db6eb31577a8c3668f9faa081f6"
INTEL_AF = "fpga.intel.com/af-695.d84.aVKNtusxV3qMNmj5-qCB9thCTcSko8QT-J5DNoP5BAs"
"""`arria10.dcp1.2-nlb0` as the Intel plugin spells it."""

CARDS = f"1x1+no-pr@{INTEL_ID}"
EXAMPLE = {
    "resources": {"cpu": 1, INTEL_AF: 1},
    "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
}


def test_a_pod_of_the_intel_plugins_default_mode_runs_unchanged(
    make_node: Callable[..., Node],
) -> None:
    node = make_node(CARDS, advertise="af")
    node.until_offered(INTEL_AF, [P0])
    command = 'exec 3<>/dev/dfl-port.0 && echo "opened; $(env | grep -c "^FPGA_[RAB]")"; '
    pod = node.pod(
        "test-fpga-preprogrammed",
        container("test-container", command=command + STAY, **EXAMPLE),
        restartPolicy="Never",
    )
    pod.until_running("test-container")
    assert pod.devices("test-container") == {INTEL_AF: [P0]}
    until(lambda: pod.output("test-container") == "opened; 0", "the container has its port")
    assert node.afu(P0) == FACTORY
    mark = node.plugin.mark
    pod.delete()
    done = node.plugin.until_logged("region scrubbed", mark, region=P0, error=None)
    assert done["condition"] == "UNBLANKED"
    assert list(done["steps"])[:2] == ["quiesce", "clear errors"]
    node.until_offered(INTEL_AF, [P0])
    assert node.afu(P0) == FACTORY
    lines = [line for life in node.lives for line in life.lines]
    assert not [line for line in lines if "program" in line.get("steps", ())]


def test_a_pod_that_asks_for_another_accelerator_than_its_resource_is_told_so(
    make_node: Callable[..., Node],
) -> None:
    node = make_node(CARDS, advertise="af")
    other = {"FPGA_REGION_1": INTEL_ID, "FPGA_AFU_1": "f7" * 16}
    pod = node.pod("other", container(env=other, **EXAMPLE), restartPolicy="Never")
    message = pod.until_waiting("CreateContainerConfigError")
    assert "but the region holds" in message
    assert FACTORY in message
    assert node.afu(P0) == FACTORY
