"""What the ledger takes up at its start, and who hears of what, one fact after the other.

All orders of steps are in test_ledger_steps.py.
"""

from dataclasses import replace

import pytest
from doubles.cards import AFU, BLANK, INTERFACE, PREFIX, REGIONS, WHOLE, make_card
from ledger_support import MemoryJournal, found, gone, make_ledger, reopened, tenancy, trouble
from test_dra_steps import A, owner

from fpga_plugin.allocation import debug_holds
from fpga_plugin.allocation.journal.records import (
    AliasBinding,
    Allocation,
    Change,
    Condition,
    DebugHold,
    Fact,
    RegionRecord,
    TenantImage,
)
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.names import function_name
from fpga_plugin.errors import RefusedError
from fpga_plugin.hardware.grant import Grant
from fpga_plugin.ids import DeviceId
from fpga_plugin.kubernetes.names import PodUid, ResourceName
from fpga_plugin.settings.settings import ScrubPolicy

CARD = make_card(1)
OTHER = make_card(2, nodes=(2, 3))
R0, R1 = (region.id for region in CARD.regions)
R2 = OTHER.regions[0].id
GONE = make_card(3).regions[0].id
POD = PodUid("pod-1")


# ------------------------------------------------------------------ at the start


def test_poststops_that_are_awaited_are_forgotten_in_another_boot() -> None:
    """None comes any more: an allocation's containers would never count as stopped."""
    journal = MemoryJournal(Change(facts={Fact.BOOT: "boot"}, pending_poststops={DeviceId(R0): 3}))
    assert reopened(journal).pending_poststops == {R0: 3}
    assert not reopened(journal, boot_id="another").pending_poststops
    assert not journal.snapshot.pending_poststops


def test_allocations_of_an_earlier_life_differ_from_each_other_and_from_later_ones() -> None:
    """Else the result of work for one owner would be taken for the next one's."""
    ledger, journal = make_ledger(CARD)
    ledger.device_plugin.allocate(REGIONS, [R0])
    ledger.device_plugin.allocate(REGIONS, [R1])
    again = reopened(journal, CARD)
    numbers = {allocation.number for allocation in again.allocations.values()}
    again.device_plugin.release([R0])
    again.device_plugin.allocate(REGIONS, [R0])
    numbers |= {allocation.number for allocation in again.allocations.values()}
    assert len(numbers) == 3


@pytest.mark.parametrize(
    ("until", "owned", "boot", "stays"),
    [
        (0.0, True, "boot", True),
        (0.0, False, "boot", True),
        (1e9, True, "boot", False),
        (1e9, False, "boot", True),
        (1e9, False, "another", False),
        (0.0, True, "another", False),
    ],
)
def test_what_is_kept_for_debugging_stays_over_a_restart_until_somebody_has_it(
    *, until: float, owned: bool, boot: str, stays: bool
) -> None:
    """Whether a running container's region is to be kept has to be known when it fails."""
    ledger, journal = make_ledger(CARD)
    if owned:
        ledger.device_plugin.allocate(REGIONS, [R0])
    debug = DebugHold(R0, POD, "space", "name", (), 600.0, "", until)
    ledger.commit(Change(debug_holds={R0: debug}))
    again = reopened(journal, CARD, boot_id=boot)
    assert again.debug_holds == ({R0: debug} if stays else {})


def epochs_after(ledger: Ledger) -> str:
    """Of the first region's allocation, after another PreStart."""
    ledger.device_plugin.prestart_seen([DeviceId(R0)])
    return ledger.allocations[DeviceId(R0)].instance


def test_of_an_allocation_of_an_earlier_life_containers_may_stop_that_nobody_counted() -> None:
    """Whatever is written of it meanwhile; of the next allocation all are counted (invariant 7)."""
    ledger, journal = make_ledger(CARD)
    ledger.device_plugin.allocate(REGIONS, [R0])
    assert epochs_after(ledger) == "life 1"
    again = reopened(journal, CARD)
    again.device_plugin.bind_pod([DeviceId(R0)], POD)
    assert epochs_after(again) == ""
    assert epochs_after(again) == ""
    again.device_plugin.allocate(
        REGIONS, [R0]
    )  # its next owner, though nobody said that the first is gone
    assert epochs_after(again) == "life 1"
    again = reopened(journal, CARD)
    again.device_plugin.release([DeviceId(R0)])
    again.device_plugin.allocate(REGIONS, [R0])
    assert epochs_after(again) == "life 1"


def test_a_region_that_a_lost_journal_may_have_known_is_doubted_whatever_tells_of_it() -> None:
    """Its card may come later, and its allocation have ended by then."""
    lost = Change(facts={Fact.BOOT: "boot", Fact.LOST: "the journal"})
    ledger = reopened(MemoryJournal(lost))
    ledger.commit(Change(regions={R2: RegionRecord(R2, Condition.DIRTY, "so")}))
    assert ledger.images == {R2: {None}}


def test_what_a_restart_and_a_reboot_leave_of_conditions_and_counts() -> None:
    """Invariant 9: what is clean stays so over a restart, and nothing is worked on by nobody."""
    ledger, journal = make_ledger(CARD, OTHER)
    ledger.device_plugin.allocate(REGIONS, [R0])
    ledger.device_plugin.prestart_seen([DeviceId(R0)])
    ledger.device_plugin.poststop_seen([DeviceId(R0)])
    ledger.work.working([R2])
    again = reopened(journal)
    found_there = [again.record(each).condition for each in (R1, R2)]
    assert found_there == [Condition.BLANK, Condition.DIRTY]
    assert again.allocations[DeviceId(R0)].prestarts == 1
    rebooted = reopened(journal, boot_id="another")
    assert rebooted.record(R1).condition is Condition.DIRTY
    allocation = rebooted.allocations[DeviceId(R0)]
    assert (allocation.prestarts, allocation.poststops, allocation.missed_prestart) == (0, 0, True)


def test_what_was_not_blanked_is_dirty_where_a_blank_is_required_now_and_a_blank_is_not() -> None:
    regions = {
        R0: RegionRecord(R0, Condition.BLANK, "", BLANK),
        R1: RegionRecord(R1, Condition.UNBLANKED, "", AFU),
    }
    journal = MemoryJournal(Change(facts={Fact.BOOT: "boot"}, regions={**regions}))
    ledger = Ledger(
        prefix=PREFIX,
        journal=journal,
        snapshot=journal.snapshot,
        boot_id="boot",
        scrub=ScrubPolicy.REQUIRED,
    )
    assert ledger.record(R0) == regions[R0]
    assert ledger.record(R1).condition is Condition.DIRTY


def test_of_the_names_of_another_prefix_nothing_is_listed_any_more() -> None:
    mine, others = (ResourceName(f"{each}/region-fast") for each in (PREFIX, "fpga.example.com"))
    meaning = AliasBinding(INTERFACE, current=True)
    journal = MemoryJournal(
        Change(facts={Fact.BOOT: "boot"}, alias_bindings={mine: meaning, others: meaning})
    )
    ledger = Ledger(
        prefix=PREFIX, journal=journal, snapshot=journal.snapshot, boot_id="boot", aliases=True
    )
    assert ledger.alias_bindings == {mine: meaning}


# ------------------------------------------------------------------ who hears of it


@pytest.mark.parametrize(
    "change",
    [
        Change(images={TenantImage(R0, AFU): True}),
        tenancy(GONE, POD, "/dev/dfl-port.0"),
        Change(claim_owners={A: owner(A, DeviceId(R0))}),
        Change(regions={R0: RegionRecord(R0, Condition.DIRTY, "so")}),
        Change(memory_clear_pending={CARD.id: True}),
    ],
    ids=["image", "tenancy", "claim owner", "region", "memory"],
)
def test_the_list_of_a_card_is_looked_at_whatever_changes_of_it(change: Change) -> None:
    """A device whose node another pod has would stay Healthy."""
    assert "/dev/dfl-port.0" in CARD.regions[0].grant.nodes
    ledger, _ = make_ledger(CARD, OTHER)
    told: list[object] = []
    ledger.subscribe(told.append)
    ledger.commit(change)
    assert CARD.id in told
    assert OTHER.id not in told


# ------------------------------------------------------------------ nodes that move


def lent(ledger: Ledger, node: str) -> None:
    ledger.commit(tenancy(R1, POD, node))


def test_a_node_that_two_cards_show_for_a_moment_is_not_forgotten_with_one_of_them() -> None:
    """Invariant 10: a pod that runs on has the number, and what it leads to is dirty at its end."""
    node = OTHER.regions[0].grant.nodes[0]
    twin = make_card(3, nodes=(2,))
    ledger, _ = make_ledger(OTHER, twin)
    lent(ledger, node)
    ledger.hardware.card_gone(twin.id)
    gone(ledger, POD)
    assert ledger.record(R2).condition is Condition.DIRTY
    assert not ledger.tenancies


def test_a_node_that_a_card_had_before_leads_nowhere_when_the_card_is_gone() -> None:
    node = CARD.regions[0].grant.nodes[0]
    moved = replace(
        CARD,
        regions=(replace(CARD.regions[0], grant=Grant(("/dev/dfl-port.9",))), CARD.regions[1]),
    )
    ledger, _ = make_ledger(CARD, OTHER)
    lent(ledger, node)
    found(ledger, moved)
    ledger.hardware.card_gone(CARD.id)
    gone(ledger, POD)
    assert not ledger.tenancies
    assert ledger.record(R2).condition is Condition.BLANK


def test_a_faulted_region_stays_so_when_those_who_had_its_node_are_gone() -> None:
    ledger, _ = make_ledger(OTHER)
    faulted = RegionRecord(R2, Condition.FAULTED, "poisoned")
    ledger.commit(Change(regions={R2: faulted}))
    lent(ledger, OTHER.regions[0].grant.nodes[0])
    gone(ledger, POD)
    assert ledger.record(R2) == faulted


def test_a_node_that_two_pods_have_is_still_one_pods_when_the_other_is_gone() -> None:
    """Invariant 10: the region that has it now is given to nobody."""
    third = make_card(3, nodes=(5,))
    ledger, _ = make_ledger(CARD, third)
    grant = third.regions[0].grant
    ledger.commit(tenancy(R0, POD, *grant.nodes))
    ledger.commit(tenancy(R1, "pod-2", *grant.nodes))
    gone(ledger, POD)
    assert [one.pod for one in ledger.strangers(third.regions[0])] == ["pod-2"]
    gone(ledger, "pod-2")
    assert ledger.strangers(third.regions[0]) == []


def test_a_region_whose_node_a_pod_had_while_it_was_scrubbed_is_dirty_when_the_pod_is_gone() -> (
    None
):
    ledger, _ = make_ledger(OTHER)
    lent(ledger, OTHER.regions[0].grant.nodes[0])
    ledger.commit(tenancy(R2, POD))
    ledger.work.dirty([R2], "so")
    ledger.work.working([R2])
    ledger.work.clean(R2, BLANK, blank=True)
    assert [one.region for one in ledger.strangers(OTHER.regions[0])] == [R1]
    gone(ledger, POD)
    assert ledger.record(R2).condition is Condition.DIRTY


def test_what_a_pod_was_given_has_to_lead_to_its_own_regions_all_of_them_and_to_no_others() -> None:
    """Invariant 10."""
    ledger, _ = make_ledger(CARD)
    grants = {region.id: region.grant for region in CARD.regions}
    whole = Allocation(DeviceId(CARD.id), WHOLE, grants)
    ledger.obstacles.check_grants(whole)
    with pytest.raises(RefusedError, match=f"{R1} was not there"):
        ledger.obstacles.check_grants(replace(whole, grants={R0: grants[R0]}))
    with pytest.raises(RefusedError, match="device numbering changed"):
        ledger.obstacles.check_grants(replace(whole, grants={R0: grants[R1], R1: grants[R1]}))
    with pytest.raises(RefusedError, match="gone now"):
        ledger.obstacles.check_grants(replace(whole, grants={**grants, R2: grants[R1]}))
    ledger.commit(tenancy(R2, POD, *grants[R1].nodes, left=False))
    with pytest.raises(RefusedError, match="is also open to the pod"):
        ledger.obstacles.check_grants(whole)


# ------------------------------------------------------------------ questions


def test_an_allocation_that_ended_has_no_device() -> None:
    ledger, _ = make_ledger(CARD)
    has = owner(A, DeviceId(R0))
    ledger.commit(Change(claim_owners={A: has}))
    assert ledger.claim_owner_of(DeviceId(R0)) == has
    assert ledger.claim_owner_of(DeviceId(R1)) is None
    ledger.commit(Change(claim_owners={A: replace(has, ended=True)}))
    assert ledger.claim_owner_of(DeviceId(R0)) is None


def test_a_faulted_region_is_in_trouble_though_nobody_wrote_why() -> None:
    """Invariant 4: it would be given out else."""
    ledger, _ = make_ledger(CARD)
    ledger.commit(Change(regions={R0: RegionRecord(R0, Condition.FAULTED, "")}))
    assert trouble(ledger, R0)
    assert not trouble(ledger, R1)


def test_of_a_card_that_is_gone_there_is_no_region() -> None:
    ledger, _ = make_ledger(CARD)
    assert ledger.region(R0) == CARD.regions[0]
    with pytest.raises(RefusedError, match="is gone from its card"):
        ledger.obstacles.regions_of(DeviceId(f"{CARD.id}-p7"))
    ledger.hardware.card_gone(CARD.id)
    assert ledger.region(R0) is None


def test_a_region_is_kept_for_nobody_while_it_has_an_owner() -> None:
    ledger, _ = make_ledger(CARD)
    debug = DebugHold(R0, POD, "space", "name", (), 600.0, "it failed", 1e9)
    ledger.commit(Change(debug_holds={R0: debug}))
    assert debug_holds.in_force(ledger, R0) == debug
    assert debug_holds.in_force(ledger, R1) is None
    ledger.commit(Change(allocations={DeviceId(R0): Allocation(DeviceId(R0), REGIONS, {})}))
    assert debug_holds.in_force(ledger, R0) is None


# ------------------------------------------------------------------ functions


def functions(journal: MemoryJournal) -> Ledger:
    return Ledger(
        prefix=PREFIX,
        journal=journal,
        snapshot=journal.snapshot,
        boot_id="boot",
        scrub=ScrubPolicy.REQUIRED,
        functions=True,
    )


def test_a_region_of_which_a_lost_journal_may_have_told_is_no_function_and_its_neighbour_is() -> (
    None
):
    """An owner's image shows what id it likes: it becomes no resource by itself."""
    known = RegionRecord(R0, Condition.UNBLANKED, "so", AFU)
    journal = MemoryJournal(
        Change(facts={Fact.BOOT: "boot", Fact.LOST: "the journal"}, regions={R0: known})
    )
    ledger = functions(journal)
    ledger.hardware.card_found(CARD, {R0: AFU, R1: BLANK}, None)
    assert ledger.resources == {function_name(PREFIX, CARD.interface_id, AFU)}
    assert ledger.images == {R1: {None}}


def test_a_card_that_is_gone_has_no_function_though_its_journal_tells_of_one() -> None:
    known = RegionRecord(R0, Condition.UNBLANKED, "so", AFU)
    ledger = functions(MemoryJournal(Change(facts={Fact.BOOT: "boot"}, regions={R0: known})))
    assert ledger.naming.function_resource(R0) is None
    assert ledger.record(R0) == known, "no blank is required where functions are served"
    ledger.hardware.card_found(CARD, {R0: AFU, R1: None}, None)
    assert ledger.naming.function_resource(R0) == function_name(PREFIX, CARD.interface_id, AFU)
    assert ledger.naming.function_resource(R1) is None
    assert ledger.naming.present_resource(DeviceId(CARD.id)) is None


def test_of_a_region_that_its_card_does_not_have_now_there_is_no_function() -> None:
    known = RegionRecord(R1, Condition.UNBLANKED, "so", AFU)
    ledger = functions(MemoryJournal(Change(facts={Fact.BOOT: "boot"}, regions={R1: known})))
    ledger.hardware.card_found(replace(CARD, regions=CARD.regions[:1]), {R0: AFU}, None)
    assert ledger.naming.present_resource(DeviceId(R0))
    assert ledger.naming.present_resource(DeviceId(R1)) is None
    change = Change()
    ledger.naming.name_function(change, R2, BLANK)
    assert not change.resources, "nor of one whose card is gone"


def test_an_owners_image_is_withheld_though_the_card_is_gone() -> None:
    ledger, _ = make_ledger(CARD)
    ledger.commit(Change(images={TenantImage(R2, AFU): True}))
    assert ledger.naming.withheld(R2)
    assert not ledger.naming.withheld(R1)


# ------------------------------------------------------------------ a card's other regions


def test_the_former_owners_of_a_cards_other_regions_are_its_own() -> None:
    """The memory is the card's: those of another card are no reason to wait (invariant 7)."""
    ledger, _ = make_ledger(CARD, OTHER)
    for region, uid in ((R0, "a"), (R1, "b"), (R2, "c")):
        ledger.commit(tenancy(region, uid))
    assert {one.pod for one in ledger.left_on(CARD.id)} == {"a", "b"}
    assert {one.pod for one in ledger.left_on(CARD.id, but=[R0])} == {"b"}
    assert {one.pod for one in ledger.left_on(OTHER.id, but=[R0])} == {"c"}


def test_a_cards_memory_is_clean_when_all_that_could_write_it_is() -> None:
    ledger, _ = make_ledger(CARD)
    assert ledger.others_clean(CARD, [])
    ledger.commit(Change(regions={R1: RegionRecord(R1, Condition.DIRTY, "so")}))
    assert not ledger.others_clean(CARD, [])
    assert not ledger.others_clean(CARD, [R0])
    assert ledger.others_clean(CARD, [R1])
    assert ledger.others_clean(CARD, [R0, R1])
    assert not ledger.others_clean(replace(CARD, ports=3), [R0, R1]), "one of it is not seen"


def test_an_alias_that_the_journal_lost_is_told_by_an_allocations_card_that_is_there() -> None:
    """One that is gone says nothing, and is no reason to ask no other."""
    name = ResourceName(f"{PREFIX}/region-fast-ce489693")
    ledger, _ = make_ledger(OTHER)
    another = Allocation(DeviceId(OTHER.regions[1].id), REGIONS, {})
    ledger.commit(Change(allocations={another.device: another}))
    assert ledger.naming.resource(name) is None, (
        "an allocation of another resource says nothing of this one"
    )
    allocations = {each: Allocation(each, name, {}) for each in (DeviceId(R0), DeviceId(R2))}
    ledger.commit(Change(allocations={**allocations}))
    assert ledger.naming.named_resource(name).interface_id == OTHER.interface_id
    ledger.hardware.card_gone(OTHER.id)
    with pytest.raises(RefusedError, match="nothing reports which"):
        ledger.naming.named_resource(name)
