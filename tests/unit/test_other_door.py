"""Whose pods keep a node from changing its door."""

import asyncio
from collections.abc import Collection
from types import SimpleNamespace
from unittest import mock

import pytest
from doubles.cards import PREFIX, REGIONS, device, make_card
from fpga_plugin.claims.other_door import OtherDoorError, leave_device_plugin, leave_dra
from ledger_support import make_ledger

from fpga_plugin.claims import other_door
from fpga_plugin.ids import ClaimUid, PodUid, ResourceName
from fpga_plugin.ledger.ledger import Ledger
from fpga_plugin.ledger.records import Holder
from fpga_plugin.pods.cgroup import PodPresence
from fpga_plugin.pods.checkpoint import Checkpoint, CheckpointEntry
from fpga_plugin.pods.dra_record import RecordedClaim, RecordUnreadableError

CARD = make_card()
P0, P1 = device(CARD, 0), device(CARD, 1)
POD_A, POD_B = PodUid("pod-a"), PodUid("pod-b")
UID = ClaimUid("0b1a1e5e-0000-4000-8000-000000000001")


def leave(resource: str, *ids: str) -> None:
    """A pod runs that has these devices, and DRA is to serve."""

    async def checkpoint() -> Checkpoint:
        entry = CheckpointEntry(PodUid("a"), "main", ResourceName(resource), frozenset(ids))
        return Checkpoint(entries=(entry,))

    ledger, _ = make_ledger(CARD)
    cgroups = SimpleNamespace(state=lambda _: PodPresence.ALIVE)
    pods = SimpleNamespace(checkpoint=checkpoint)
    asyncio.run(leave_device_plugin(ledger, cgroups, pods, prefix=PREFIX))  # type: ignore[arg-type]


def test_another_vendors_pod_does_not_keep_dra_from_serving() -> None:
    leave("acme.example/fpga-large", "serial-17")
    leave("acme.example/fpga-large")


@pytest.mark.parametrize(
    ("resource", "ids"),
    [
        (f"{PREFIX}/fpga-large", ["serial-17"]),
        (f"{PREFIX}/anything", ["serial-17"]),
        (REGIONS.replace(PREFIX, "old.example"), ["serial-17"]),
        ("old.example/region-board", [P0]),
        ("old.example/region-board", ["serial-17", P0]),
    ],
    ids=[
        "our alias",
        "our prefix",
        "an id of another prefix",
        "an alias of another prefix",
        "one of ours among others",
    ],
)
def test_a_pod_that_may_have_one_of_ours_does(resource: str, ids: list[str]) -> None:
    with pytest.raises(OtherDoorError, match="pod a"):
        leave(resource, *ids)


def pods_of(*living: PodUid) -> SimpleNamespace:
    """The cgroups of these pods are there, and of no others."""

    def may_live(uid: PodUid) -> bool:
        assert isinstance(uid, str), "there is no cgroup to ask about"
        return uid in living

    return SimpleNamespace(
        state=lambda uid: PodPresence.ALIVE if uid in living else PodPresence.GONE,
        may_live=may_live,
    )


def to_dra(ledger: Ledger, *living: PodUid, entries: Collection[CheckpointEntry] = ()) -> None:
    async def checkpoint() -> Checkpoint:
        return Checkpoint(entries=tuple(entries))

    pods = SimpleNamespace(checkpoint=checkpoint)
    asyncio.run(leave_device_plugin(ledger, pods_of(*living), pods, prefix=PREFIX))  # type: ignore[arg-type]


def holder(*devices: str, ended: bool = False) -> Holder:
    requests = dict.fromkeys(devices, ("fpga",))
    return Holder(UID, "space", "claim", devices, requests, ended=ended)  # type: ignore[arg-type]


def owned(*, pod: PodUid | None = POD_A) -> Ledger:
    ledger, _ = make_ledger(CARD)
    ledger.allocate(REGIONS, [P0])
    if pod is not None:
        ledger.bind_pod([P0], pod)
    return ledger


@pytest.mark.parametrize("pod", [POD_A, None])
def test_what_pods_that_are_gone_had_by_the_device_plugin_ends(pod: PodUid | None) -> None:
    """Of a claim whose pod was never known, kubelet's checkpoint is the word."""
    ledger = owned(pod=pod)
    to_dra(ledger, POD_B)
    assert not ledger.claims
    assert ledger.ends["released"] == 1


def test_a_pod_that_lives_and_that_kubelet_forgot_keeps_its_region_and_the_door() -> None:
    ledger = owned()
    ledger.allocate(REGIONS, [P1])
    with pytest.raises(OtherDoorError, match="pods have devices by the device plugin: pod pod-a: "):
        to_dra(ledger, POD_A)
    assert set(ledger.claims) == {P0, P1}, "all of it stays as it is"


@pytest.mark.parametrize("presence", [PodPresence.UNKNOWN, PodPresence.ALIVE])
def test_a_pod_of_which_nothing_is_known_keeps_the_door(presence: PodPresence) -> None:
    ledger, _ = make_ledger(CARD)
    entry = CheckpointEntry(POD_A, "main", REGIONS, frozenset({P0}))

    async def checkpoint() -> Checkpoint:
        return Checkpoint(entries=(entry,))

    cgroups = SimpleNamespace(state=lambda _: presence)
    pods = SimpleNamespace(checkpoint=checkpoint)
    with pytest.raises(OtherDoorError, match="pod-a"):
        asyncio.run(leave_device_plugin(ledger, cgroups, pods, prefix=PREFIX))  # type: ignore[arg-type]


def test_a_pod_of_the_checkpoint_that_is_gone_keeps_no_door() -> None:
    """Kubelet rewrites its checkpoint only for a device plugin."""
    ledger, _ = make_ledger(CARD)
    to_dra(ledger, entries=[CheckpointEntry(POD_A, "main", REGIONS, frozenset({P0}))])


def test_what_claims_have_is_theirs_when_their_own_door_opens() -> None:
    ledger, _ = make_ledger(CARD)
    ledger.take(holder(P0), [POD_A])
    to_dra(ledger, POD_A)
    assert set(ledger.claims) == {P0}


# ------------------------------------------------------------------ from DRA to the device plugin


def to_device_plugin(ledger: Ledger, *living: PodUid, record: object = None) -> None:
    def read(_root: str, _driver: str):
        if isinstance(record, Exception):
            raise record
        return record or {}

    with mock.patch.object(other_door, "read_record", read):
        asyncio.run(leave_dra(ledger, pods_of(*living), root="/nowhere", driver="fpga"))  # type: ignore[arg-type]


def test_a_claim_whose_pods_are_gone_ends_and_its_devices_are_scrubbed() -> None:
    ledger, _ = make_ledger(CARD)
    ledger.take(holder(P0), [POD_A])
    to_device_plugin(ledger, POD_B)
    assert not ledger.holders
    assert not ledger.claims


def test_a_claim_one_of_whose_pods_lives_keeps_its_devices_and_the_door() -> None:
    ledger, _ = make_ledger(CARD)
    ledger.take(holder(P0), [POD_A, POD_B])
    with pytest.raises(OtherDoorError, match="by DRA: claim space/claim: "):
        to_device_plugin(ledger, POD_B)
    assert set(ledger.holders) == {UID}
    assert set(ledger.claims) == {P0}


def test_a_claim_that_kubelet_ended_keeps_no_door_though_its_pod_lives() -> None:
    """Its region waits for the pod as any former owner's does."""
    ledger, _ = make_ledger(CARD)
    ledger.take(holder(P0), [POD_A])
    ledger.end_holder(UID)
    to_device_plugin(ledger, POD_A)
    assert not ledger.holders


def recorded(name: str, *devices: str) -> RecordedClaim:
    return RecordedClaim(
        ClaimUid(name),
        "space",
        name,
        frozenset({POD_A}),
        dict.fromkeys(devices, ("fpga",)),  # type: ignore[arg-type]
    )


def test_kubelets_record_keeps_the_door_where_it_names_our_devices() -> None:
    ledger, _ = make_ledger(CARD)
    mine, other = recorded("mine", P0), recorded("other")
    to_device_plugin(ledger, record={other.uid: other})
    with pytest.raises(OtherDoorError, match="by DRA: claim space/mine: "):
        to_device_plugin(ledger, record={mine.uid: mine, other.uid: other})


def test_a_node_that_shows_no_record_changes_its_door() -> None:
    ledger, _ = make_ledger(CARD)
    to_device_plugin(ledger, record=RecordUnreadableError("no such file"))


@pytest.mark.parametrize(
    ("number", "told"), [(4, "c3: "), (5, "c3 and 1 more: "), (6, "and 2 more: ")]
)
def test_of_many_claims_four_are_named(number: int, told: str) -> None:
    ledger, _ = make_ledger(CARD)
    many = [recorded(f"c{n}", P0) for n in range(number)]
    with pytest.raises(OtherDoorError, match=told):
        to_device_plugin(ledger, record={one.uid: one for one in many})
