"""Whose pods keep a node from changing its door."""

import asyncio
from types import SimpleNamespace

import pytest
from doubles.cards import PREFIX, REGIONS, device, make_card
from ledger_support import make_ledger

from fpga_plugin.claims.other_door import OtherDoorError, leave_device_plugin
from fpga_plugin.ids import PodUid, ResourceName
from fpga_plugin.pods.cgroup import PodPresence
from fpga_plugin.pods.checkpoint import Checkpoint, CheckpointEntry

CARD = make_card()
P0 = device(CARD, 0)


def leave(resource: str, one: str) -> None:
    """A pod runs that has this device, and DRA is to serve."""

    async def checkpoint() -> Checkpoint:
        entry = CheckpointEntry(PodUid("a"), "main", ResourceName(resource), frozenset({one}))
        return Checkpoint(entries=(entry,))

    ledger, _ = make_ledger(CARD)
    cgroups = SimpleNamespace(state=lambda _: PodPresence.ALIVE)
    pods = SimpleNamespace(checkpoint=checkpoint)
    asyncio.run(leave_device_plugin(ledger, cgroups, pods, prefix=PREFIX))  # type: ignore[arg-type]


def test_another_vendors_pod_does_not_keep_dra_from_serving() -> None:
    leave("acme.example/fpga-large", "serial-17")


@pytest.mark.parametrize(
    ("resource", "one"),
    [
        (f"{PREFIX}/fpga-large", "serial-17"),
        (f"{PREFIX}/anything", "serial-17"),
        (REGIONS.replace(PREFIX, "old.example"), "serial-17"),
        ("old.example/region-board", P0),
    ],
    ids=["our alias", "our prefix", "an id of another prefix", "an alias of another prefix"],
)
def test_a_pod_that_may_have_one_of_ours_does(resource: str, one: str) -> None:
    with pytest.raises(OtherDoorError, match="pod a"):
        leave(resource, one)
