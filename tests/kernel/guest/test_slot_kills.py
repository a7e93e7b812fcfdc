"""SIGKILL at each step that a slot's work takes on the real drivers, then a restart.

Beside the slot another pod has a region of another card, and holds its node open through all of it.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import mortal
import pytest
import rack
from daemon_support import (
    AFU,
    AFU_2,
    AFU_3,
    BLANK,
    CARD,
    CARD_2,
    CARDS,
    HEALTHY,
    P0,
    REGIONS,
    Node,
    eventually,
    request,
)

pytestmark = pytest.mark.skipif(not rack.DEBUGFS.exists(), reason="the guest's: make test-kernel")

Q0 = f"{CARD_2}-p0"
FIRST, SECOND = rack.FUNCTIONS

IN_PRESTART = (
    "after override",
    "after bind",
    "after group",
    "before pr",
    "after pr",
    "after read-back",
)
IN_RELEASE = (
    "after group",
    "after reset",
    "after pr",
    "after read-back",
    "before unbind",
    "after unbind",
    "after no-override",
)
"""Of the first call of that kind: of two functions the second is then still as it was."""


@pytest.fixture
def node() -> Iterator[Node]:
    with Node("1x1+ofs,1x1") as it:
        it.settings |= {mortal.DEATH: str(death(it)), mortal.LOG: str(it.folder / "log")}
        it.up()
        eventually(lambda: rack.drivers() == ["", ""], "drivers given back")
        kubelet = it.kubelet
        kubelet.allocate(Q0)
        kubelet.prestart(Q0, env=request(AFU_3))
        neighbour = os.open(rack.node(Q0), os.O_RDWR)
        try:
            yield it
            assert it.afu(Q0) == AFU_3
            assert not it.steps(Q0)
        finally:
            os.close(neighbour)


def death(node: Node) -> Path:
    """Where the plugin may read it: it is confined."""
    return node.state_dir / "die"


def die(node: Node, where: str) -> None:
    death(node).with_suffix(".new").write_text(where)
    death(node).with_suffix(".new").replace(death(node))


def dead(node: Node, where: str) -> None:
    """It died there and nowhere else."""
    assert node.plugin.exit_code() == -signal.SIGKILL
    death(node).unlink()
    last = (node.folder / "log").read_text().splitlines()[-1]
    assert last.endswith(f"KILL hardware {where.replace(' ', '-')}")
    assert node.afu(Q0) == AFU_3


def ends_well(node: Node, drivers: Sequence[str]) -> None:
    """Nobody has the slot any more: it becomes clean, and its functions what they were."""
    node.kubelet.until(CARDS, {CARD: HEALTHY})
    assert node.afu(P0) == BLANK
    eventually(lambda: rack.drivers() == [*drivers], f"drivers {drivers}")
    assert node.afu(Q0) == AFU_3
    assert node.kubelet.listed(REGIONS) == {P0: HEALTHY, Q0: HEALTHY}


def test_killed_at_each_step_of_a_prestart_the_slot_stays_its_owners(node: Node):
    kubelet = node.kubelet
    for where in IN_PRESTART:
        print(f"--- {where} ---")  # noqa: T201  # pytest shows it with a failure
        kubelet.allocate(P0)
        die(node, where)
        call = kubelet.begin_prestart(P0, env=request())
        dead(node, where)
        call.cancel()
        node.restarted()
        assert kubelet.listed(REGIONS) == {P0: HEALTHY, Q0: HEALTHY}
        kubelet.prestart(P0, env=request(AFU_2))
        assert node.afu(P0) == AFU_2
        kubelet.deallocate(P0)
        ends_well(node, ["", ""])


def test_killed_at_each_step_of_a_release_the_slot_is_clean_before_it_is_offered(node: Node):
    kubelet = node.kubelet
    # One function is the operator's: it stays what it is.
    (rack.PCI / SECOND / "driver_override").write_text("vfio-pci")
    (rack.VFIO / "bind").write_text(SECOND)
    for where in IN_RELEASE:
        print(f"--- {where} ---")  # noqa: T201  # pytest shows it with a failure
        kubelet.allocate(P0)
        kubelet.prestart(P0, env=request(AFU))
        assert node.afu(P0) == AFU
        die(node, where)
        kubelet.deallocate(P0)
        dead(node, where)
        node.restarted()
        first = kubelet.endpoints[REGIONS].lists[0]
        assert first[P0] != HEALTHY or "override" in where or "unbind" in where
        ends_well(node, ["", "vfio-pci"])
