"""What the scheduler is sent of cards and regions."""

import re
from dataclasses import replace
from functools import partial

import pytest
from doubles.cards import AFU, PREFIX, TOO_HOT, device, make_card
from doubles.slices import Effect, Slice, Taint
from hypothesis import given
from hypothesis import strategies as st
from ledger_support import MemoryJournal, doubt_owners, found, make_ledger, reopened, scrub, start
from test_dra_steps import POD, owner

from fpga_plugin.allocation.journal.records import CLEAN, Condition
from fpga_plugin.dra.desired import Form, desired_slices
from fpga_plugin.dra.names import device_name, parse_device_name
from fpga_plugin.hardware.faults import Fault, FaultKind
from fpga_plugin.ids import DeviceId, RegionId
from fpga_plugin.kubernetes.names import ClaimUid, ResourceName
from fpga_plugin.settings.settings import Advertise, ScrubPolicy

CARD = make_card(1, nodes=(0, 1), clears_memory=True)
OTHER = make_card(2, nodes=(2, 3), numa_node=1)
P0, P1, BOARD = device(CARD, 0), device(CARD, 1), device(CARD)
R0, R1 = RegionId(P0), RegionId(P1)
NEW = Form()
OLD = Form(counters=False, taints=False)


def wanted(ledger, advertise=Advertise.BOTH, scrub_policy=ScrubPolicy.REQUIRED):
    required = scrub_policy is ScrubPolicy.REQUIRED
    ledger.obstacles.offered = frozenset({Condition.BLANK}) if required else CLEAN
    ledger.obstacles._dra = True
    desired = partial(desired_slices, ledger, driver=PREFIX, advertise=advertise)
    return lambda form: tuple(map(Slice.of, desired(form)))


def told(ledger, form=NEW, **given):
    """Devices by name."""
    return {one.name: one for part in wanted(ledger, **given)(form) for one in part.devices}


def names(ledger, form=NEW, **given):
    return list(told(ledger, form, **given))


def taints(ledger, device_id, form=NEW, **given):
    return told(ledger, form, **given)[device_name(device_id)].taints


def keys(ledger, device_id, **given):
    return [one.key for one in taints(ledger, device_id, **given)]


def own(ledger, device_id):
    """A ResourceClaim of its own has it."""
    ledger.dra.take(owner(ClaimUid(f"claim-{device_id}"), device_id), [POD])


def test_a_card_takes_every_counter_of_which_each_region_takes_one() -> None:
    ledger, _ = make_ledger(CARD, OTHER)
    counters, devices = wanted(ledger)(Form())
    assert [one.name for one in counters.counter_sets] == [
        device_name(device(CARD)),
        device_name(device(OTHER)),
    ]
    assert counters.devices == ()
    assert devices.counter_sets == ()
    of_card = {one.name: one.counters for one in counters.counter_sets}
    # Regions first: first-fit takes devices in this order.
    assert [one.name for one in devices.devices] == [
        device_name(one)
        for one in (P0, P1, device(OTHER, 0), device(OTHER, 1), BOARD, device(OTHER))
    ]
    for card in (CARD, OTHER):
        by_name = {one.name: one for one in devices.devices}
        name = device_name(device(card))
        assert by_name[name].consumes == {name: of_card[name]}
        parts = [by_name[device_name(device(card, port))].consumes[name] for port in (0, 1)]
        assert sum(parts, ()) == of_card[name]


def test_attributes_say_what_claims_choose_by() -> None:
    ledger, _ = make_ledger(CARD, OTHER)
    region = told(ledger)[device_name(device(OTHER, 0))]
    assert region.attributes == {
        "type": "region",
        "card": device_name(device(OTHER)),
        "interfaceID": OTHER.interface_id,
        "family": "dfl",
        "resource.kubernetes.io/pciBusID": str(OTHER.address),
        "resource.kubernetes.io/numaNode": 1,
        "afuID": "",
    }
    whole = told(ledger)[device_name(BOARD)]
    assert whole.attributes["type"] == "card"
    assert whole.attributes["regions"] == 2
    root = "resource.kubernetes.io/pcieRoot"
    assert root not in whole.attributes, "it is not known"
    other, _ = make_ledger(replace(CARD, numa_node=None, pcie_root="pci0000:3a"))
    attributes = told(other)[device_name(BOARD)].attributes
    assert "resource.kubernetes.io/numaNode" not in attributes
    assert attributes[root] == "pci0000:3a"
    assert "firmware" not in attributes, "it is not known"


def test_which_static_part_a_card_has_is_told_of_it_and_of_its_regions() -> None:
    ledger, _ = make_ledger(replace(CARD, firmware="0x23000410010309"), OTHER)
    found = {name: one.attributes.get("firmware") for name, one in told(ledger).items()}
    mine = {device_name(one) for one in (P0, P1, BOARD)}
    assert {name for name, text in found.items() if text == "0x23000410010309"} == mine
    assert {found[name] for name in found.keys() - mine} == {None}


def test_what_a_card_is_is_told_as_far_as_it_is_known() -> None:
    ledger, _ = make_ledger(
        replace(CARD, family="xrt", vendor="amd", model="AMD Alveo U55C", serial="XFL1")
    )
    for one in told(ledger).values():
        assert {
            "family": "xrt",
            "vendor": "amd",
            "model": "AMD Alveo U55C",
            "serialNumber": "XFL1",
        }.items() <= one.attributes.items()


def test_a_pods_life_changes_nothing() -> None:
    ledger, _ = make_ledger(CARD)
    want = wanted(ledger)
    before = want(Form())
    own(ledger, P0)
    assert want(Form()) == before
    ledger.work.dirty([R0], "x")
    ledger.work.working([R0])
    assert want(Form()) == before
    start(ledger, P0)
    assert want(Form()) == before
    ledger.work.set_memory_clear_pending(
        CARD.id, open_=True
    )  # a neighbour is gone, this one still uses the memory
    assert want(Form()) == before
    ledger.dra.end_claim(ClaimUid(f"claim-{P0}"))
    assert keys(ledger, P0) == ["not-clean"]
    assert keys(ledger, BOARD) == ["memory-not-cleared", "not-clean"]
    assert keys(ledger, P1) == []
    scrub(ledger, CARD, 0)
    assert want(Form()) == before


def test_best_effort_gives_out_a_region_that_was_only_reset() -> None:
    ledger, _ = make_ledger(CARD)
    ledger.work.working([R0])
    ledger.work.clean(R0, AFU, blank=False)
    assert keys(ledger, P0) == ["not-clean"]
    assert keys(ledger, P0, scrub_policy=ScrubPolicy.BEST_EFFORT) == []


def test_a_faulted_region_taints_itself_and_its_card_with_the_word_for_it() -> None:
    ledger, _ = make_ledger(CARD)
    ledger.hardware.set_failing(
        CARD.id, {R0: Fault(FaultKind.TRANSIENT, "thermal: AP6 has shut down region x")}
    )
    expected = (Taint("faulted", "thermal"),)
    assert taints(ledger, P0) == expected
    assert taints(ledger, BOARD) == expected
    assert taints(ledger, P1) == ()
    ledger.hardware.set_failing(CARD.id, {})
    assert keys(ledger, P0) == ["not-clean"], "whatever happened meanwhile is scrubbed off first"
    scrub(ledger, CARD)
    assert taints(ledger, P0) == ()
    ledger.work.working([R1])
    ledger.work.faulted(R1, "PR failed: error register 0x1")
    assert taints(ledger, P1) == (Taint("faulted", ""),)


def test_a_pod_that_cannot_start_on_broken_hardware_is_evicted_and_no_other() -> None:
    ledger, _ = make_ledger(CARD)
    own(ledger, P0)
    ledger.work.working([R0])
    ledger.work.faulted(R0, "x")
    assert taints(ledger, P0)[0].effect is Effect.NO_EXECUTE
    assert taints(ledger, BOARD)[0].effect is Effect.NO_SCHEDULE
    started, _ = make_ledger(CARD)
    own(started, P0)
    start(started, P0)
    started.work.faulted(R0, "x")
    assert taints(started, P0)[0].effect is Effect.NO_SCHEDULE


def test_nothing_but_the_fault_evicts_a_pod_that_cannot_start() -> None:
    ledger, _ = make_ledger(CARD)
    own(ledger, P0)
    ledger.work.working([R0])
    ledger.work.faulted(R0, "x")
    ledger.hardware.set_drained(CARD.id, drained=True)
    assert {one.key: one.effect for one in taints(ledger, P0)} == {
        "faulted": Effect.NO_EXECUTE,
        "drained": Effect.NO_SCHEDULE,
    }


def test_a_card_with_one_region_shares_its_counter_with_it() -> None:
    card = make_card(3, nodes=(7,))
    ledger, _ = make_ledger(card)
    (region, whole) = told(ledger).values()
    assert region.consumes == whole.consumes != {}


def test_a_drained_card_keeps_its_devices_under_a_taint() -> None:
    ledger, _ = make_ledger(CARD, OTHER)
    own(ledger, P0)
    ledger.hardware.set_drained(CARD.id, drained=True)
    for one in (P0, P1, BOARD):
        assert keys(ledger, one) == ["drained"]
    assert keys(ledger, device(OTHER, 0)) == []


def test_what_another_holds_is_held_back_unless_it_is_owned() -> None:
    ledger, _ = make_ledger(CARD)
    own(ledger, P0)
    ledger.hardware.set_foreign({CARD.id: "x"})
    assert taints(ledger, P1) == (Taint("held", "another-plugin"),)
    assert keys(ledger, BOARD) == ["held"]
    assert keys(ledger, P0) == []


def test_an_owned_device_stays_while_its_card_is_gone() -> None:
    ledger, _ = make_ledger(CARD, OTHER)
    own(ledger, P0)
    own(ledger, device(OTHER))
    for card in (CARD, OTHER):
        ledger.hardware.card_gone(card.id)
    for form in (Form(), OLD):
        assert set(told(ledger, form)) == {device_name(P0), device_name(device(OTHER))}
    assert keys(ledger, P0) == keys(ledger, device(OTHER)) == ["gone"]
    assert told(ledger)[device_name(P0)].attributes["interfaceID"] == CARD.interface_id
    ledger.dra.end_claim(ClaimUid(f"claim-{P0}"))
    assert set(told(ledger)) == {device_name(device(OTHER))}


def test_a_card_without_all_of_its_ports_is_not_given_out_whole() -> None:
    ledger, _ = make_ledger(replace(CARD, regions=CARD.regions[:1]))
    assert keys(ledger, BOARD) == ["incomplete"]
    assert keys(ledger, P0) == []


@pytest.mark.parametrize(
    ("advertise", "types"),
    [(Advertise.REGION, {"region"}), (Advertise.WHOLE, {"card"})],
)
def test_one_kind_alone_takes_no_counters(advertise, types) -> None:
    ledger, _ = make_ledger(CARD)
    (only,) = wanted(ledger, advertise)(Form())
    assert {one.attributes["type"] for one in only.devices} == types
    assert all(not one.consumes for one in only.devices)


def test_an_owned_device_of_a_kind_that_is_left_out_still_excludes_the_other_kind() -> None:
    ledger, _ = make_ledger(CARD)
    own(ledger, BOARD)
    counters, devices = wanted(ledger, Advertise.REGION)(Form())
    assert len(counters.counter_sets) == 1
    assert len(devices.devices) == 3


def test_without_counters_the_two_kinds_of_a_card_never_stand_side_by_side() -> None:
    ledger, _ = make_ledger(CARD, OTHER)
    regions = [device_name(device(card, port)) for card in (CARD, OTHER) for port in (0, 1)]
    assert names(ledger, OLD) == regions
    own(ledger, BOARD)
    assert names(ledger, OLD) == [*regions[2:], device_name(BOARD)]
    ledger.dra.end_claim(ClaimUid(f"claim-{BOARD}"))
    scrub(ledger, CARD)
    assert names(ledger, OLD) == regions
    (only,) = wanted(ledger)(OLD)
    assert all(not one.consumes for one in only.devices)


def test_without_taints_what_must_not_be_given_out_is_left_out_unless_it_is_owned() -> None:
    ledger, _ = make_ledger(CARD)
    own(ledger, P0)
    ledger.hardware.set_drained(CARD.id, drained=True)
    form = Form(counters=True, taints=False)
    assert names(ledger, form) == [device_name(P0)]
    assert taints(ledger, P0, form) == ()


def test_an_empty_node_publishes_an_empty_slice() -> None:
    ledger, _ = make_ledger()
    assert wanted(ledger)(Form()) == (Slice(),)


@pytest.mark.parametrize("cards", [1, 8, 9, 40])
@pytest.mark.parametrize("ports", [1, 31, 33, 64, 65])
def test_no_slice_exceeds_the_limits_of_the_api(cards: int, ports: int) -> None:
    many = [
        make_card(bus, nodes=range(bus * ports, (bus + 1) * ports)) for bus in range(1, cards + 1)
    ]
    ledger, _ = make_ledger(*many)
    slices = wanted(ledger)(Form())
    sets = [one for part in slices for one in part.counter_sets]
    devices = [one for part in slices for one in part.devices]
    for part in slices:
        assert bool(part.counter_sets) != bool(part.devices)
        assert len(part.counter_sets) <= 8
        assert len(part.devices) <= 64
    assert len({one.name for one in sets}) == len(sets)
    assert len({one.name for one in devices}) == len(devices)
    known = {(one.name, counter) for one in sets for counter in one.counters}
    assert all(len(one.counters) <= 32 for one in sets)
    for one in devices:
        assert len(one.consumes) <= 2
        assert {(name, c) for name, of in one.consumes.items() for c in of} <= known
        assert all(len(text) <= 63 for text in (one.name, *one.consumes))
    whole = [one for one in devices if one.attributes["type"] == "card"]
    if ports == 65:  # two sets are not enough: nothing would keep card and regions apart
        assert not whole
        assert not sets
    else:
        assert len(whole) == cards
        assert {
            (name, c) for one in whole for name, of in one.consumes.items() for c in of
        } == known
    assert len(devices) == cards * ports + len(whole)


NAMES = st.from_regex(r"\A[0-9a-f]{4}-[0-9a-f]{2}-[01][0-9a-f]\.[0-7](-p(0|[1-9][0-9]?))?\Z")


@given(NAMES)
def test_names_are_dns_labels_and_lead_back(text: str) -> None:
    name = device_name(DeviceId(text))
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name)
    assert parse_device_name(name) == text


@pytest.mark.parametrize(
    "text", ["", "x", "0000-3b-00.0", "0000-3b-00-0-p", "0000-3b-00-0-p00", "0000-3B-00-0",
             "0000-3b-00-0-p0-p0", "0000-3b-00-8", "0000-3b-00-0\n"],
)  # fmt: skip
def test_other_names_are_nobodys(text: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        parse_device_name(text)


def test_found_again_a_card_is_as_before() -> None:
    ledger, _ = make_ledger(CARD)
    before = wanted(ledger)(Form())
    ledger.hardware.card_gone(CARD.id)
    assert told(ledger) == {}
    found(ledger, CARD)
    scrub(ledger, CARD)
    assert wanted(ledger)(Form()) == before


def test_functions_and_cards_that_cannot_be_programmed_are_offered_by_the_device_plugin_api_alone():
    fixed = make_card(nodes=(0, 1), reprogrammable=False)
    ledger, _ = make_ledger(fixed)
    assert not [device for one in wanted(ledger)(Form()) for device in one.devices]
    ledger, _ = make_ledger(make_card(nodes=(0, 1)))
    assert not [d for one in wanted(ledger, Advertise.AF)(Form()) for d in one.devices]


def test_what_another_pod_may_have_is_held_back_with_the_reason() -> None:
    """The scheduler knows nothing of these owners: it would give the device to a second one."""
    ledger, journal = make_ledger(CARD)
    again = reopened_unreconciled(journal)
    for one in (P0, P1, BOARD):
        assert taints(again, one) == (Taint("held", "owners-unknown"),)
    again.reconciled([CARD.id])
    assert taints(again, P0) == ()
    ledger.hardware.set_rebinding(CARD.id, rebinding=True)
    for one in (P0, P1, BOARD):
        assert taints(ledger, one) == (Taint("held", "rebinding"),)


def reopened_unreconciled(journal: MemoryJournal):
    doubt_owners(journal)
    ledger = reopened(journal)
    ledger.hardware.card_found(CARD, {R0: AFU, R1: AFU}, None)
    scrub(ledger, CARD)
    return ledger


def test_a_region_whose_node_a_pod_has_for_another_is_held_back_and_so_is_its_card() -> None:
    """The number of a node that went is given to the next device (invariant 1)."""
    ledger, _ = make_ledger(CARD, OTHER)
    own(ledger, P0)
    ledger.hardware.card_gone(CARD.id)
    found(ledger, make_card(2, nodes=(0, 3), numa_node=1))
    scrub(ledger, OTHER)
    lent = (Taint("held", "tenancy"),)
    assert taints(ledger, device(OTHER, 0)) == taints(ledger, device(OTHER)) == lent
    assert taints(ledger, device(OTHER, 1)) == ()
    ledger.dra.end_claim(ClaimUid(f"claim-{P0}"))
    assert taints(ledger, device(OTHER, 0)) == taints(ledger, device(OTHER)) == ()


def test_an_owned_card_is_not_held_back_from_its_owner() -> None:
    ledger, _ = make_ledger(CARD)
    own(ledger, BOARD)
    ledger.hardware.set_foreign({CARD.id: "x"})
    assert taints(ledger, BOARD) == ()


def test_of_an_owned_card_a_region_that_went_is_told_and_is_no_device_of_its_own() -> None:
    ledger, _ = make_ledger(CARD)
    own(ledger, BOARD)
    found(ledger, replace(CARD, regions=CARD.regions[:1]))
    assert keys(ledger, BOARD) == ["incomplete"]
    assert names(ledger) == [device_name(P0), device_name(BOARD)]


def test_a_fault_that_passes_or_comes_of_a_rebind_evicts_nobody() -> None:
    """The pod of a claim that has not started yet waits for the card: it need not be deleted."""
    ledger, _ = make_ledger(CARD)
    own(ledger, P0)
    ledger.hardware.set_failing(CARD.id, {R0: TOO_HOT})
    assert [one.effect for one in taints(ledger, P0)] == [Effect.NO_SCHEDULE]
    ledger.hardware.set_failing(CARD.id, {})
    ledger.work.working([R0])
    ledger.work.faulted(R0, "x")
    ledger.hardware.set_rebinding(CARD.id, rebinding=True)
    assert [one.effect for one in taints(ledger, P0)] == [Effect.NO_SCHEDULE]


def test_whole_cards_alone_need_no_counters_to_be_told() -> None:
    ledger, _ = make_ledger(CARD)
    assert names(ledger, OLD, advertise=Advertise.WHOLE) == [device_name(BOARD)]


def test_without_taints_a_sound_card_is_listed_and_an_owned_one_has_none() -> None:
    form = Form(counters=True, taints=False)
    ledger, _ = make_ledger(CARD)
    assert device_name(BOARD) in names(ledger, form)
    own(ledger, BOARD)
    ledger.hardware.set_drained(CARD.id, drained=True)
    assert taints(ledger, BOARD, form) == ()


def test_of_an_owner_whose_alias_nothing_explains_any_more_the_device_is_told_nevertheless() -> (
    None
):
    ledger, journal = make_ledger(CARD)
    own(ledger, P0)
    (claim,) = ledger.allocations.values()
    lost = replace(claim, resource=ResourceName(f"{PREFIX}/region-lost"))
    snapshot = replace(journal.snapshot, allocations={P0: lost})
    (only,) = told(reopened(MemoryJournal(snapshot))).values()
    assert only.name == device_name(P0)
    assert "interfaceID" not in only.attributes
