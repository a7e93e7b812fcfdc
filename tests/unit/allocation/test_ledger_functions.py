"""Nodes that switch between regions and preprogrammed functions, under owners, crashes and reboots.

Three kinds of images, told by their ids: the blank one, the operator's functions, and tenants'.
What must hold whatever happens in which order: no tenant's image is ever advertised as a function,
a device is on one list, an owner's on his own, and a free one is Healthy only when it was reset.
"""

import contextlib

from doubles.cards import BLANK, INTERFACE, PREFIX, REGIONS, make_card
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ledger_support import MemoryJournal, make_lists, remembered, shown

from fpga_plugin.allocation.journal.doubt import doubted
from fpga_plugin.allocation.journal.records import CLEAN, Condition, TenantImage
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.names import function_name
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.ids import AfuId, DeviceId, RegionId, Resource, ResourceKind
from fpga_plugin.kubernetes.names import ResourceName
from fpga_plugin.settings.settings import Advertise, ScrubPolicy

CARD = make_card(nodes=(0, 1))
IDS = [region.id for region in CARD.regions]
FUNCTIONS = [AfuId(f"{n}" * 32) for n in (1, 2)]
TENANTS = [AfuId(f"{n}" * 32) for n in (7, 8)]

regions = st.sampled_from(IDS)
functions = st.sampled_from(FUNCTIONS)
tenants = st.sampled_from(TENANTS)
tolerated = contextlib.suppress(FpgaPluginError)


def name(afu_id: AfuId) -> ResourceName:
    return Resource(PREFIX, ResourceKind.AF, INTERFACE, afu_id).name


def open_ledger(journal: MemoryJournal, advertise: Advertise, *, boot: int = 1) -> Ledger:
    return Ledger(
        prefix=PREFIX,
        journal=journal,
        snapshot=journal.snapshot,
        boot_id=f"boot {boot}",
        functions=advertise is Advertise.AF,
    )


class Switching(RuleBasedStateMachine):
    @initialize(advertise=st.sampled_from([Advertise.AF, Advertise.REGION]), afu=functions)
    def begin(self, advertise, afu) -> None:
        self.journal = MemoryJournal()
        self.boot = 1
        self.shows = dict.fromkeys(IDS, afu)
        self.blank = True
        self.reset: set[RegionId] = set()
        self.open(advertise)

    def open(self, advertise: Advertise) -> None:
        self.advertise = advertise
        self.ledger = open_ledger(self.journal, advertise, boot=self.boot)
        self.lists = make_lists(self.ledger, advertise=advertise, scrub=ScrubPolicy.BEST_EFFORT)
        blank = BLANK if self.blank and advertise is not Advertise.AF else None
        self.ledger.hardware.card_found(CARD, dict(self.shows), blank)
        self.ledger.reconciled([CARD.id])

    # ---------------------------------------------------------------- owners

    @rule(region=regions)
    def allocate(self, region) -> None:
        device = DeviceId(region)
        if (resource := self.ledger.naming.device_resource(device)) is not None:
            with tolerated:
                self.ledger.device_plugin.allocate(resource, [device])

    @rule(region=regions, image=tenants, dies=st.sampled_from([None, None, "before", "after"]))
    def prestart(self, region, image, dies) -> None:
        """As `Preparer` does it: scrubbed, then programmed for regions, read for functions."""
        allocation = self.ledger.allocations.get(DeviceId(region))
        if allocation is None:
            return
        self.ledger.device_plugin.prestart_seen([allocation.device])
        if self.ledger.record(region).condition not in CLEAN | {Condition.PROGRAMMED}:
            self.scrub(region)
        function = Resource.parse(allocation.resource).afu_id
        self.ledger.work.working([region], image=image if function is None else None)
        if dies == "before":
            self.open(self.advertise)
            return
        if function is None:
            self.shows[region] = image
        if dies == "after":
            self.open(self.advertise)
            return
        if function not in {None, self.shows[region]}:
            self.ledger.work.dirty([region], "it holds another")
            return
        self.ledger.work.programmed(region, self.shows[region])
        self.ledger.device_plugin.started([allocation])
        self.reset.discard(region)

    @rule(region=regions)
    def release(self, region) -> None:
        self.ledger.device_plugin.release([DeviceId(region)])

    # ---------------------------------------------------------------- work

    @rule(region=regions)
    def scrubbed(self, region) -> None:
        """As `Scrubber` does it: what is dirty, and used by nobody."""
        allocation = self.ledger.region_allocation(region)
        dirty = self.ledger.record(region).condition is Condition.DIRTY
        if dirty and (allocation is None or not allocation.used):
            self.scrub(region)

    def scrub(self, region: RegionId) -> None:
        keep = self.ledger.naming.keeps(region)
        self.ledger.work.working([region])
        if self.blank and not keep:
            self.shows[region] = BLANK
        self.ledger.work.clean(region, self.shows[region], blank=self.blank and not keep)
        self.reset.add(region)

    @rule()
    def look(self) -> None:
        self.ledger.hardware.verify(CARD.id, self.shows)

    # ---------------------------------------------------------------- others

    @rule(region=regions, afu=functions)
    def flashed(self, region, afu) -> None:
        self.shows[region] = afu

    @rule(there=st.booleans())
    def installed(self, there) -> None:
        self.blank = there

    @rule(advertise=st.sampled_from([Advertise.AF, Advertise.REGION]))
    def restart(self, advertise) -> None:
        self.open(advertise)

    @rule(advertise=st.sampled_from([Advertise.AF, Advertise.REGION]), power=st.booleans())
    def reboot(self, advertise, power) -> None:
        self.boot += 1
        self.reset.clear()
        if power:
            self.shows = dict.fromkeys(IDS, FUNCTIONS[0])
        self.open(advertise)

    # ---------------------------------------------------------------- what always holds

    def listed(self) -> dict[ResourceName, dict[DeviceId, bool]]:
        names = {REGIONS, *(c.resource for c in self.ledger.allocations.values())}
        names |= {name(afu) for afu in (*FUNCTIONS, *TENANTS, BLANK)}
        return {each: shown(self.lists, each) for each in names}

    @invariant()
    def no_tenants_image_is_a_function(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for tenant in TENANTS:
            assert not shown(self.lists, name(tenant))
            assert name(tenant) not in self.ledger.resources
            for region in IDS:
                assert self.ledger.naming.device_resource(DeviceId(region)) != name(tenant)

    @invariant()
    def each_device_is_on_one_list_and_an_owners_on_his(self) -> None:
        if not hasattr(self, "ledger"):
            return
        lists = self.listed()
        for region in IDS:
            on = [each for each, devices in lists.items() if DeviceId(region) in devices]
            allocation = self.ledger.allocations.get(DeviceId(region))
            if allocation is not None:
                assert on == [allocation.resource]
                assert allocation.resource in self.lists.resources()
            else:
                assert len(on) <= 1

    @invariant()
    def what_is_healthy_and_free_was_reset_and_holds_what_its_list_says(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for resource, devices in self.listed().items():
            for device, healthy in devices.items():
                region = RegionId(device)
                if not healthy or device in self.ledger.allocations:
                    continue
                assert self.ledger.record(region).condition in CLEAN
                assert region in self.reset
                function = Resource.parse(resource).afu_id
                assert function in {None, self.ledger.record(region).afu_id}
                assert (function is None) is (self.advertise is Advertise.REGION)

    @precondition(lambda self: hasattr(self, "ledger"))
    @invariant()
    def the_journal_knows_what_memory_knows(self) -> None:
        assert remembered(self.ledger, f"boot {self.boot}") == self.journal.snapshot


TestSwitching = Switching.TestCase


# ------------------------------------------------------------------ one by one


def test_a_function_that_changes_under_its_owner_stays_on_his_list_and_moves_at_the_end():
    journal = MemoryJournal()
    ledger = open_ledger(journal, Advertise.AF)
    lists = make_lists(ledger, advertise=Advertise.AF)
    one, two = FUNCTIONS
    (region, other), device = IDS, DeviceId(IDS[0])
    ledger.hardware.card_found(CARD, dict.fromkeys(IDS, one), None)
    ledger.reconciled([CARD.id])
    ledger.work.working(IDS)
    for each in IDS:
        ledger.work.clean(each, one, blank=False)
    ledger.device_plugin.allocate(name(one), [device])
    ledger.hardware.verify(CARD.id, {region: two, other: one})
    assert shown(lists, name(one)) == {device: True, DeviceId(other): True}
    ledger.device_plugin.release([device])
    assert shown(lists, name(one)) == {DeviceId(other): True}
    assert shown(lists, name(two)) == {device: False}
    ledger.work.working([region])
    ledger.work.clean(region, two, blank=False)
    assert shown(lists, name(two)) == {device: True}
    assert set(lists.resources()) == {name(one), name(two)}


def test_of_a_damaged_journal_no_region_that_can_be_programmed_is_a_function():
    journal = MemoryJournal()
    ledger = open_ledger(journal, Advertise.AF)
    ledger.hardware.card_found(CARD, dict.fromkeys(IDS, FUNCTIONS[0]), None)
    snapshot = doubted(journal.snapshot, "a row")
    assert snapshot.images == {TenantImage(region, None): True for region in IDS}
    again = open_ledger(MemoryJournal(snapshot), Advertise.AF)
    again.hardware.card_found(CARD, dict.fromkeys(IDS, FUNCTIONS[0]), None)
    assert again.naming.function_resource(IDS[0]) is None
    # A verified blank ends it, and nobody ever programmed a card that cannot be programmed.
    again.work.working([IDS[0]])
    again.work.clean(IDS[0], BLANK, blank=True)
    assert again.naming.function_resource(IDS[0]) == name(BLANK)
    fixed = make_card(nodes=(0, 1), reprogrammable=False)
    again.hardware.card_found(fixed, dict.fromkeys(IDS, FUNCTIONS[0]), None)
    assert again.naming.function_resource(IDS[1]) == function_name(
        PREFIX, fixed.interface_id, FUNCTIONS[0]
    )


def test_a_region_with_an_owners_image_is_no_function_whichever_id_it_shows():
    card = make_card(nodes=(0, 1))
    journal = MemoryJournal()
    ledger = open_ledger(journal, Advertise.REGION)
    ledger.hardware.card_found(card, dict.fromkeys(IDS, FUNCTIONS[0]), None)
    ledger.work.working([IDS[0]], image=TENANTS[0])
    again = open_ledger(journal, Advertise.AF)
    lists = make_lists(again, advertise=Advertise.AF, scrub=ScrubPolicy.BEST_EFFORT)
    again.hardware.card_found(card, dict.fromkeys(IDS, FUNCTIONS[0]), None)
    again.reconciled([card.id])
    again.work.working(IDS)
    again.work.clean(IDS[0], FUNCTIONS[1], blank=False)  # mislabelled, or it changed what it shows
    again.work.clean(IDS[1], FUNCTIONS[0], blank=False)
    assert shown(lists, name(FUNCTIONS[0])) == {DeviceId(IDS[1]): True}
    assert shown(lists, name(FUNCTIONS[1])) == {}
    assert name(FUNCTIONS[1]) not in again.resources
    again.work.working([IDS[0]])
    again.work.clean(IDS[0], BLANK, blank=True)
    assert name(BLANK) in again.resources
    assert shown(lists, name(BLANK)) == {DeviceId(IDS[0]): True}


def test_a_card_that_cannot_be_programmed_is_neither_a_card_nor_regions():
    card = make_card(nodes=(0, 1), reprogrammable=False)
    ledger = open_ledger(MemoryJournal(), Advertise.REGION)
    lists = make_lists(ledger)
    ledger.hardware.card_found(card, dict.fromkeys(IDS, FUNCTIONS[0]), None)
    ledger.reconciled([card.id])
    assert not ledger.resources
    assert shown(lists) == {}
    assert all(ledger.naming.device_resource(DeviceId(one)) is None for one in (card.id, *IDS))
    assert all(map(ledger.naming.keeps, IDS))


def test_a_card_that_came_back_and_does_not_tell_what_it_holds_is_on_no_list():
    ledger = open_ledger(MemoryJournal(), Advertise.AF)
    lists = make_lists(ledger, advertise=Advertise.AF)
    ledger.hardware.card_found(CARD, dict.fromkeys(IDS, FUNCTIONS[0]), None)
    ledger.hardware.card_gone(CARD.id)
    ledger.hardware.card_found(CARD, {IDS[0]: None, IDS[1]: FUNCTIONS[1]}, None)
    assert shown(lists, name(FUNCTIONS[0])) == {}
    assert shown(lists, name(FUNCTIONS[1])) == {DeviceId(IDS[1]): False}


def test_what_stays_on_a_region_its_owners_resource_says_whatever_the_node_serves_by_now():
    journal = MemoryJournal()
    ledger = open_ledger(journal, Advertise.AF)
    ledger.hardware.card_found(CARD, dict.fromkeys(IDS, FUNCTIONS[0]), None)
    ledger.reconciled([CARD.id])
    assert all(map(ledger.naming.keeps, IDS))
    ledger.device_plugin.allocate(name(FUNCTIONS[0]), [IDS[0]])
    later = open_ledger(journal, Advertise.REGION)
    later.hardware.card_found(CARD, dict.fromkeys(IDS, FUNCTIONS[0]), BLANK)
    later.reconciled([CARD.id])
    assert [later.naming.keeps(region) for region in IDS] == [True, False]
    later.device_plugin.allocate(REGIONS, [IDS[1]])
    again = open_ledger(journal, Advertise.AF)
    again.hardware.card_found(CARD, dict.fromkeys(IDS, FUNCTIONS[0]), None)
    assert [again.naming.keeps(region) for region in IDS] == [True, False]
