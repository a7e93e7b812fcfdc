"""The ledger's steps for ResourceClaims: one owner a device, in memory and in the journal alike."""

from dataclasses import replace

import pytest
from doubles.cards import AFU, OTHER_INTERFACE, REGIONS, device, make_card
from ledger_support import MemoryJournal, make_ledger, reopened, scrub

from fpga_plugin.errors import RefusedError
from fpga_plugin.hardware.model import Card
from fpga_plugin.ids import ClaimUid, DeviceId, PodUid, RegionId
from fpga_plugin.ledger.holders import HeldError
from fpga_plugin.ledger.journal import JournalError
from fpga_plugin.ledger.ledger import Ledger
from fpga_plugin.ledger.records import Condition, Holder

A, B = ClaimUid("claim-a"), ClaimUid("claim-b")
POD, LATER = PodUid("pod-1"), PodUid("pod-2")


def holder(uid: ClaimUid, *devices: DeviceId, pods: tuple[PodUid, ...] = (POD,)) -> Holder:
    return Holder(
        uid=uid,
        namespace="n",
        name="c",
        devices=devices,
        requests=dict.fromkeys(devices, ("fpga",)),
        pods=frozenset(pods),
    )


def prepare(ledger: Ledger, card: Card, port: int, uid: ClaimUid = A) -> RegionId:
    """What a Prepare does, as far as the ledger sees it."""
    region = card.regions[port].id
    ledger.take(holder(uid, DeviceId(region)))
    ledger.working([region])
    ledger.programmed(region, AFU)
    ledger.prepared(uid)
    return region


def test_a_prepared_claim_survives_a_restart_and_not_a_reboot():
    card = make_card()
    ledger, journal = make_ledger(card)
    region = prepare(ledger, card, 0)
    assert ledger.is_prepared(ledger.holders[A])
    again = reopened(journal, card)
    assert again.is_prepared(again.holders[A])
    assert again.claims[DeviceId(region)].started
    after = reopened(journal, card, boot_id="another")
    assert not after.is_prepared(after.holders[A])
    assert after.record(region).condition is Condition.DIRTY


def test_a_device_has_one_claim_and_a_card_excludes_its_regions():
    card = make_card()
    ledger, _ = make_ledger(card)
    prepare(ledger, card, 0)
    with pytest.raises(HeldError) as held:
        ledger.take(holder(B, device(card, 0)))
    assert held.value.holder == A
    with pytest.raises(HeldError):
        ledger.take(holder(B, device(card)))
    ledger.take(holder(B, device(card, 1)))


def test_a_claim_has_a_card_or_its_regions_not_both():
    card = make_card()
    ledger, _ = make_ledger(card)
    with pytest.raises(RefusedError, match="as a whole and by region"):
        ledger.take(holder(A, device(card, 0), device(card)))
    assert ledger.claims == {}


def test_a_claim_of_the_first_door_is_in_the_way_too():
    card = make_card()
    ledger, _ = make_ledger(card)
    ledger.allocate(ledger.device_resource(device(card, 0)) or "", [device(card, 0)])
    with pytest.raises(HeldError, match="a pod of the device plugin") as held:
        ledger.take(holder(A, device(card, 0)))
    assert held.value.holder is None


def test_what_ends_leaves_its_regions_dirty_and_its_pods_former_owners():
    card = make_card()
    ledger, _ = make_ledger(card)
    region = prepare(ledger, card, 0)
    ledger.users(A, [LATER])
    ledger.end_holder(A)
    record = ledger.record(region)
    assert (record.condition, record.former) == (Condition.DIRTY, {POD, LATER})
    assert ledger.holders[A].ended
    assert DeviceId(region) not in ledger.claims
    assert ledger.end_holder(A) == ()
    scrub(ledger, card)
    ledger.forget_holder(A)
    assert ledger.holders == {}


def test_a_claim_that_never_began_leaves_its_pods_as_former_owners():
    card = make_card()
    ledger, _ = make_ledger(card)
    ledger.take(holder(A, device(card, 0)))
    ledger.end_holder(A)
    assert ledger.record(card.regions[0].id).former == {POD}


def test_what_is_prepared_anew_is_not_as_it_was_until_then():
    card = make_card()
    ledger, _ = make_ledger(card)
    region = prepare(ledger, card, 0)
    ledger.take(replace(holder(A, DeviceId(region)), pods=frozenset({LATER})))
    assert not ledger.is_prepared(ledger.holders[A])
    assert ledger.holders[A].pods == {POD, LATER}
    assert ledger.record(region).condition is Condition.DIRTY
    ledger.take(holder(A, device(card, 1)))  # allocated anew: the first device is let go
    assert set(ledger.claims) == {device(card, 1)}


def test_what_a_claim_leaves_is_dirty_and_free_and_the_rest_stays_its_own():
    card = make_card()
    ledger, journal = make_ledger(card)
    first, second = device(card, 0), device(card, 1)
    ledger.take(holder(A, first, second))
    ledger.prepared(A)
    assert ledger.leave(A, {first, second}) == ()
    assert ledger.is_prepared(ledger.holders[A])
    assert ledger.leave(A, {second}) == (card.id,)
    again = reopened(journal, card)  # it may die here
    kept = again.holders[A]
    assert (kept.devices, {*kept.requests}, again.is_prepared(kept)) == ((second,), {second}, False)
    assert set(again.claims) == {second}
    record = again.record(RegionId(first))
    assert (record.condition, record.former) == (Condition.DIRTY, {POD})
    again.take(holder(B, first))


def test_of_a_claim_that_left_all_it_had_no_row_is_kept():
    card = make_card()
    ledger, journal = make_ledger(card)
    region = prepare(ledger, card, 0)
    assert ledger.leave(A, {device(card, 1)}) == (card.id,)
    again = reopened(journal, card)
    assert (again.holders, again.claims) == ({}, {})
    assert again.record(region).former == {POD}
    assert again.leave(A, set()) == ()
    again.take(holder(A, device(card, 1)))


def test_a_claim_that_ended_leaves_nothing_more():
    card = make_card()
    ledger, _ = make_ledger(card)
    prepare(ledger, card, 0)
    ledger.end_holder(A)
    assert ledger.left_behind(A, set()) == ()
    assert ledger.leave(A, set()) == ()
    assert ledger.holders[A].ended


def test_a_claim_that_is_prepared_anew_has_its_device_under_the_cards_present_name():
    card, now = make_card(), make_card(interface_id=OTHER_INTERFACE)
    ledger, journal = make_ledger(card)
    prepare(ledger, card, 0)
    again = reopened(journal, now, boot_id="another")
    (claim,) = again.take(again.holders[A])
    assert claim.resource == REGIONS.replace(card.interface_id, OTHER_INTERFACE)


def test_an_adopted_claim_keeps_its_device_and_is_not_prepared():
    card = make_card()
    ledger, _ = make_ledger(card)
    ledger.adopt_holder(holder(A, device(card, 0)))
    assert not ledger.is_prepared(ledger.holders[A])
    assert ledger.claims[device(card, 0)].exposed
    assert ledger.record(card.regions[0].id).condition is Condition.DIRTY
    with pytest.raises(HeldError):
        ledger.adopt_holder(holder(B, device(card, 0)))


def test_what_is_adopted_of_a_claim_takes_nothing_from_what_is_known_of_it():
    card = make_card()
    ledger, journal = make_ledger(card)
    ledger.take(holder(A, device(card, 0), device(card, 1)))
    ledger.prepared(A)
    del journal.snapshot.claims[device(card, 1)]
    again = reopened(journal, card)
    known = again.claims[device(card, 0)]
    (adopted,) = again.adopt_holder(again.holders[A])
    assert adopted.device == device(card, 1)
    assert again.claims[device(card, 0)] is known


@pytest.mark.parametrize("step", ["take", "prepared", "end"])
def test_a_step_that_cannot_be_written_did_not_happen(step):
    card = make_card()
    ledger, journal = make_ledger(card)
    if step != "take":
        ledger.take(holder(A, device(card, 0)))
    before = dict(ledger.holders), dict(ledger.claims)
    journal.failing = 1
    steps = {
        "take": lambda: ledger.take(holder(A, device(card, 0))),
        "prepared": lambda: ledger.prepared(A),
        "end": lambda: ledger.end_holder(A),
    }
    with pytest.raises(JournalError):
        steps[step]()
    assert (dict(ledger.holders), dict(ledger.claims)) == before


def test_the_journal_of_a_claim_is_whole_or_not_there():
    card = make_card()
    ledger, journal = make_ledger(card)
    prepare(ledger, card, 0)
    assert isinstance(journal, MemoryJournal)
    assert journal.snapshot.holders.keys() == {A}
    assert journal.snapshot.claims.keys() == {device(card, 0)}
    ledger.end_holder(A)
    assert not any(journal.snapshot.claims.values())
    ledger.forget_holder(A)
    assert not any(journal.snapshot.holders.values())
