"""The ledger's steps for ResourceClaims: one owner a device, in memory and in the journal alike."""

from dataclasses import replace

import pytest
from doubles.cards import AFU, OTHER_INTERFACE, PREFIX, REGIONS, device, make_card
from ledger_support import MemoryJournal, former, make_ledger, reopened, scrub

from fpga_plugin.allocation.dra_steps import DeviceOwnedError
from fpga_plugin.allocation.journal.journal import JournalError
from fpga_plugin.allocation.journal.records import Change, ClaimOwner, Condition
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.errors import RefusedError, UnknownDeviceError
from fpga_plugin.hardware.model import Card
from fpga_plugin.ids import DeviceId, RegionId
from fpga_plugin.kubernetes.names import ClaimUid, PodUid

A, B = ClaimUid("claim-a"), ClaimUid("claim-b")
POD, LATER = PodUid("pod-1"), PodUid("pod-2")


def owner(uid: ClaimUid, *devices: DeviceId) -> ClaimOwner:
    return ClaimOwner(
        uid=uid,
        namespace="n",
        name="c",
        devices=devices,
        requests=dict.fromkeys(devices, ("fpga",)),
        driver=PREFIX,
    )


def prepare(ledger: Ledger, card: Card, port: int, uid: ClaimUid = A) -> RegionId:
    """What a Prepare does, as far as the ledger sees it."""
    region = card.regions[port].id
    ledger.dra.take(owner(uid, DeviceId(region)), [POD])
    ledger.work.working([region])
    ledger.work.programmed(region, AFU)
    ledger.dra.prepared(uid, {})
    return region


def test_a_prepared_claim_survives_a_restart_and_not_a_reboot():
    card = make_card()
    ledger, journal = make_ledger(card)
    region = prepare(ledger, card, 0)
    assert ledger.dra.is_prepared(ledger.claim_owners[A])
    again = reopened(journal, card)
    assert again.dra.is_prepared(again.claim_owners[A])
    assert again.allocations[DeviceId(region)].started
    after = reopened(journal, card, boot_id="another")
    assert not after.dra.is_prepared(after.claim_owners[A])
    assert after.record(region).condition is Condition.DIRTY


def test_a_device_has_one_claim_and_a_card_excludes_its_regions():
    card = make_card()
    ledger, _ = make_ledger(card)
    prepare(ledger, card, 0)
    with pytest.raises(DeviceOwnedError) as held:
        ledger.dra.take(owner(B, device(card, 0)), [POD])
    assert held.value.owner == A
    with pytest.raises(DeviceOwnedError):
        ledger.dra.take(owner(B, device(card)), [POD])
    ledger.dra.take(owner(B, device(card, 1)), [POD])


def test_a_claim_has_a_card_or_its_regions_not_both():
    card = make_card()
    ledger, _ = make_ledger(card)
    with pytest.raises(RefusedError, match="as a whole and by region"):
        ledger.dra.take(owner(A, device(card, 0), device(card)), [POD])
    assert ledger.allocations == {}


def test_a_claim_of_the_device_plugin_is_in_the_way_too():
    card = make_card()
    ledger, _ = make_ledger(card)
    ledger.device_plugin.allocate(
        ledger.naming.device_resource(device(card, 0)) or "", [device(card, 0)]
    )
    with pytest.raises(DeviceOwnedError, match="a pod of the device plugin") as held:
        ledger.dra.take(owner(A, device(card, 0)), [POD])
    assert held.value.owner is None


def test_what_ends_leaves_its_regions_dirty_and_its_pods_former_owners():
    card = make_card()
    ledger, _ = make_ledger(card)
    region = prepare(ledger, card, 0)
    ledger.dra.join({A: [LATER]})
    ledger.dra.end_claim(A)
    assert ledger.record(region).condition is Condition.DIRTY
    assert former(ledger, region) == {POD, LATER}
    assert ledger.claim_owners[A].ended
    assert DeviceId(region) not in ledger.allocations
    assert ledger.dra.end_claim(A) == ()
    scrub(ledger, card)
    ledger.dra.forget_claim(A)
    assert ledger.claim_owners == {}


def test_a_claim_that_was_never_prepared_leaves_nobody_and_a_clean_region():
    card = make_card()
    ledger, _ = make_ledger(card)
    region = card.regions[0].id
    ledger.dra.take(owner(A, device(card, 0)), [POD])
    assert ledger.pods_of([device(card, 0)]) == {POD}
    ledger.dra.end_claim(A)
    assert former(ledger, region) == set()
    assert ledger.record(region).condition is Condition.BLANK
    assert not ledger.tenancies


def test_what_is_prepared_anew_is_not_as_it_was_until_then():
    card = make_card()
    ledger, _ = make_ledger(card)
    region = prepare(ledger, card, 0)
    ledger.dra.take(owner(A, DeviceId(region)), [LATER])
    assert not ledger.dra.is_prepared(ledger.claim_owners[A])
    assert ledger.pods_of([DeviceId(region)]) == {POD, LATER}
    assert ledger.record(region).condition is Condition.DIRTY
    ledger.dra.take(owner(A, device(card, 1)), [POD])  # allocated again: the first device is let go
    assert set(ledger.allocations) == {device(card, 1)}


def test_what_a_claim_leaves_is_dirty_and_free_and_the_rest_stays_its_own():
    card = make_card()
    ledger, journal = make_ledger(card)
    first, second = device(card, 0), device(card, 1)
    ledger.dra.take(owner(A, first, second), [POD])
    ledger.dra.prepared(A, {})
    assert ledger.dra.leave(A, {first, second}) == ()
    assert ledger.dra.is_prepared(ledger.claim_owners[A])
    assert ledger.dra.leave(A, {second}) == (card.id,)
    again = reopened(journal, card)  # it may die here
    kept = again.claim_owners[A]
    assert (kept.devices, {*kept.requests}, again.dra.is_prepared(kept)) == (
        (second,),
        {second},
        False,
    )
    assert set(again.allocations) == {second}
    assert again.record(RegionId(first)).condition is Condition.DIRTY
    assert former(again, RegionId(first)) == {POD}
    again.dra.take(owner(B, first), [POD])


def test_of_a_claim_that_left_all_it_had_no_row_is_kept():
    card = make_card()
    ledger, journal = make_ledger(card)
    region = prepare(ledger, card, 0)
    assert ledger.dra.leave(A, {device(card, 1)}) == (card.id,)
    again = reopened(journal, card)
    assert (again.claim_owners, again.allocations) == ({}, {})
    assert former(again, region) == {POD}
    assert again.dra.leave(A, set()) == ()
    again.dra.take(owner(A, device(card, 1)), [POD])


def test_a_claim_that_ended_leaves_nothing_more():
    card = make_card()
    ledger, _ = make_ledger(card)
    prepare(ledger, card, 0)
    ledger.dra.end_claim(A)
    assert ledger.dra.left_behind(A, set()) == ()
    assert ledger.dra.leave(A, set()) == ()
    assert ledger.claim_owners[A].ended


def test_a_claim_that_is_prepared_anew_has_its_device_under_the_cards_present_name():
    card, now = make_card(), make_card(interface_id=OTHER_INTERFACE)
    ledger, journal = make_ledger(card)
    prepare(ledger, card, 0)
    again = reopened(journal, now, boot_id="another")
    (claim,) = again.dra.take(again.claim_owners[A], [POD])
    assert claim.resource == REGIONS.replace(card.interface_id, OTHER_INTERFACE)


def test_an_adopted_claim_keeps_its_device_and_is_not_prepared():
    card = make_card()
    ledger, _ = make_ledger(card)
    ledger.dra.adopt_claim(owner(A, device(card, 0)), [POD])
    assert not ledger.dra.is_prepared(ledger.claim_owners[A])
    assert ledger.allocations[device(card, 0)].missed_prestart
    assert ledger.record(card.regions[0].id).condition is Condition.DIRTY
    with pytest.raises(DeviceOwnedError):
        ledger.dra.adopt_claim(owner(B, device(card, 0)), [POD])


def test_what_is_adopted_of_a_claim_takes_nothing_from_what_is_known_of_it():
    """Further pods may start with all of it: its file stays."""
    card = make_card()
    ledger, journal = make_ledger(card)
    ledger.dra.take(owner(A, device(card, 0), device(card, 1)), [POD])
    ledger.dra.prepared(A, {})
    del journal.snapshot.allocations[device(card, 1)]
    again = reopened(journal, card)
    known = again.allocations[device(card, 0)]
    (adopted,) = again.dra.adopt_claim(again.claim_owners[A], [POD])
    assert adopted.device == device(card, 1)
    assert again.allocations[device(card, 0)] == replace(known, missed_prestart=True)
    again.dra.join({A: [LATER]})
    assert {one.pod for one in again.tenancies.values() if one.used} == {POD, LATER}


@pytest.mark.parametrize("step", ["take", "prepared", "end"])
def test_a_step_that_cannot_be_written_did_not_happen(step):
    card = make_card()
    ledger, journal = make_ledger(card)
    if step != "take":
        ledger.dra.take(owner(A, device(card, 0)), [POD])
    before = dict(ledger.claim_owners), dict(ledger.allocations)
    journal.failing = 1
    steps = {
        "take": lambda: ledger.dra.take(owner(A, device(card, 0)), [POD]),
        "prepared": lambda: ledger.dra.prepared(A, {}),
        "end": lambda: ledger.dra.end_claim(A),
    }
    with pytest.raises(JournalError):
        steps[step]()
    assert (dict(ledger.claim_owners), dict(ledger.allocations)) == before


def test_the_journal_of_a_claim_is_whole_or_not_there():
    card = make_card()
    ledger, journal = make_ledger(card)
    prepare(ledger, card, 0)
    assert isinstance(journal, MemoryJournal)
    assert journal.snapshot.claim_owners.keys() == {A}
    assert journal.snapshot.allocations.keys() == {device(card, 0)}
    ledger.dra.end_claim(A)
    assert not any(journal.snapshot.allocations.values())
    ledger.dra.forget_claim(A)
    assert not any(journal.snapshot.claim_owners.values())


# ------------------------------------------------------------------ what `make mutants` found


def test_what_ended_or_was_prepared_in_no_known_boot_is_not_prepared():
    card = make_card()
    ledger, _ = make_ledger(card)
    prepare(ledger, card, 0)
    known = ledger.claim_owners[A]
    assert ledger.dra.is_prepared(known)
    assert not ledger.dra.is_prepared(replace(known, ended=True)), "whatever else its row says"
    nowhere, _ = make_ledger(card, boot_id="")  # the kernel did not say the boot's id
    nowhere.dra.take(owner(A, device(card, 0)), [POD])
    assert not nowhere.dra.is_prepared(nowhere.claim_owners[A])
    nowhere.dra.prepared(A, {})
    assert not nowhere.dra.is_prepared(nowhere.claim_owners[A]), "it may have been in another boot"


def test_of_a_prepared_claim_whose_row_was_lost_nothing_stands():
    card = make_card()
    ledger, journal = make_ledger(card)
    prepare(ledger, card, 0)
    del journal.snapshot.allocations[device(card, 0)]
    again = reopened(journal, card)
    assert (
        again.dra.preparation_error(again.claim_owners[A]) == f"it does not have {device(card, 0)}"
    )


def test_a_claim_that_is_prepared_again_after_its_end_takes_nothing_from_the_next():
    """Invariant 1: what it had then is somebody else's now."""
    card = make_card()
    ledger, _ = make_ledger(card)
    prepare(ledger, card, 0)
    ledger.dra.end_claim(A)
    scrub(ledger, card)
    ledger.dra.take(owner(B, device(card, 0)), [POD])
    ledger.dra.take(owner(A, device(card, 1)), [LATER])
    assert ledger.claim_owner_of(device(card, 0)).uid == B
    assert set(ledger.allocations) == {device(card, 0), device(card, 1)}
    assert ledger.pods_of([device(card, 1)]) == {LATER}


def test_a_device_that_is_not_there_is_given_to_nobody():
    card = make_card()
    ledger, _ = make_ledger(card)
    with pytest.raises(UnknownDeviceError):
        ledger.dra.take(owner(A, DeviceId(f"{card.id}-p7")), [POD])
    ledger.hardware.card_gone(card.id)
    with pytest.raises(UnknownDeviceError):
        ledger.dra.take(owner(A, device(card, 0)), [POD])
    assert (ledger.allocations, ledger.claim_owners) == ({}, {})


@pytest.mark.parametrize("why", ["drained", "foreign"])
def test_a_card_that_is_out_of_service_goes_to_nobody_new(why):
    card = make_card()
    ledger, _ = make_ledger(card)
    prepare(ledger, card, 0)
    if why == "drained":
        ledger.hardware.set_drained(card.id, drained=True)
    else:
        ledger.hardware.set_foreign({card.id: "another plugin's pods have it"})
    with pytest.raises(RefusedError):
        ledger.dra.take(owner(B, device(card, 1)), [POD])
    if why == "drained":
        ledger.dra.take(owner(A, device(card, 0)), [POD])  # who has it keeps it


def test_a_region_whose_present_node_another_pod_was_given_goes_to_nobody():
    """Invariant 10: the cards came back with their numbers swapped."""
    one, two = make_card(1, nodes=(0,)), make_card(2, nodes=(1,))
    ledger, journal = make_ledger(one, two)
    prepare(ledger, one, 0)
    now = make_card(1, nodes=(1,)), make_card(2, nodes=(0,))
    again = reopened(journal, *now)
    with pytest.raises(RefusedError, match="also open to the pod that was given"):
        again.dra.take(owner(B, device(now[1], 0)), [POD])
    assert B not in again.claim_owners


def test_the_end_of_a_claim_is_counted():
    card = make_card()
    ledger, _ = make_ledger(card)
    ledger.dra.take(owner(A, device(card, 0), device(card, 1)), [POD])
    ledger.dra.end_claim(A)
    assert ledger.ends["released"] == 2


def test_a_claim_may_have_one_card_as_a_whole_and_a_region_of_another():
    one, two = make_card(1, nodes=(0, 1)), make_card(2, nodes=(2, 3))
    ledger, _ = make_ledger(one, two)
    ledger.dra.take(owner(A, device(one), device(two, 0)), [POD])
    assert set(ledger.allocations) == {device(one), device(two, 0)}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Condition.BLANK, Condition.DIRTY),
        (Condition.FAULTED, Condition.FAULTED),
    ],
)
def test_what_is_adopted_is_believed_less_and_never_more(before, after):
    """Invariant 4: a region that cannot be cleaned is not one that is only dirty."""
    card = make_card()
    ledger, _ = make_ledger(card)
    region = card.regions[0].id
    if before is Condition.FAULTED:
        ledger.work.working([region])
        ledger.work.faulted(region, "it does not answer")
    ledger.dra.adopt_claim(owner(A, DeviceId(region)), [POD])
    assert ledger.record(region).condition is after


def test_a_device_that_is_not_there_is_not_adopted():
    card = make_card()
    ledger, _ = make_ledger(card)
    with pytest.raises(UnknownDeviceError):
        ledger.dra.adopt_claim(owner(A, DeviceId(f"{card.id}-p7")), [POD])
    assert (ledger.allocations, ledger.claim_owners) == ({}, {})


def test_pods_of_a_claim_that_is_not_known_are_nobodys():
    ledger, journal = make_ledger(make_card())
    ledger.dra.join({A: [POD]})
    assert (ledger.claim_owners, journal.snapshot.claim_owners) == ({}, {})
    assert not ledger.tenancies


def test_what_a_claim_leaves_is_counted_as_released():
    card = make_card()
    ledger, _ = make_ledger(card)
    ledger.dra.take(owner(A, device(card, 0), device(card, 1)), [POD])
    ledger.dra.leave(A, {device(card, 1)})
    assert ledger.ends["released"] == 1


def test_poststops_of_the_other_apis_claims_are_none_of_a_claims():
    """A node that changes its api: what may still come is not kept for whoever comes later."""
    card = make_card()
    ledger, _ = make_ledger(card)
    one = device(card, 0)
    ledger.commit(Change(pending_poststops={one: 2}))
    ledger.dra.take(owner(A, one), [POD])
    assert one not in ledger.pending_poststops


def test_only_what_has_ended_is_forgotten():
    card = make_card()
    ledger, _ = make_ledger(card)
    prepare(ledger, card, 0)
    ledger.dra.forget_claim(A)
    ledger.dra.forget_claim(B)
    assert set(ledger.claim_owners) == {A}, "its devices are its own"


def test_a_claim_is_not_adopted_over_a_pod_of_the_device_plugin():
    card = make_card()
    ledger, _ = make_ledger(card)
    ledger.device_plugin.allocate(REGIONS, [device(card, 0)])
    ledger.device_plugin.bind_pod([device(card, 0)], POD)
    with pytest.raises(DeviceOwnedError, match="a pod of the device plugin"):
        ledger.dra.adopt_claim(owner(A, device(card, 0)), [LATER])
    assert ledger.pods_of([device(card, 0)]) == {POD}


def test_who_may_run_with_a_claim_that_was_never_adopted_is_waited_for_and_scrubbed_after():
    card = make_card()
    ledger, _ = make_ledger(card)
    region = card.regions[0].id
    assert ledger.record(region).condition is Condition.BLANK
    ledger.dra.left_by([device(card, 0)], [POD])
    assert former(ledger, region) == {POD}
    assert ledger.record(region).condition is Condition.DIRTY


def test_who_joins_an_adopted_claim_may_have_used_it():
    """Whether it was prepared is not known."""
    card = make_card()
    ledger, _ = make_ledger(card)
    ledger.dra.adopt_claim(owner(A, device(card, 0)), [POD])
    ledger.dra.join({A: [LATER]})
    assert {one.pod for one in ledger.tenancies.values() if one.used} == {POD, LATER}


def test_who_joins_again_stays_as_it_is():
    card = make_card()
    ledger, journal = make_ledger(card)
    prepare(ledger, card, 0)
    writes = journal.writes
    ledger.dra.join({A: [POD]})
    assert journal.writes == writes


def test_who_comes_back_to_a_claim_that_was_never_prepared_used_nothing():
    card = make_card()
    ledger, _ = make_ledger(card)
    ledger.dra.take(owner(A, device(card, 0)), [POD])
    ledger.dra.part(A, [])
    ledger.dra.join({A: [POD]})
    (one,) = ledger.tenancies.values()
    assert (one.used, one.left) == (False, False)


def test_who_parted_does_not_part_again():
    card = make_card()
    ledger, journal = make_ledger(card)
    prepare(ledger, card, 0)
    ledger.dra.part(A, [])
    writes = journal.writes
    ledger.dra.part(A, [])
    assert journal.writes == writes
