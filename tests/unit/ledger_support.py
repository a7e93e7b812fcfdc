"""Ledgers and journals for tests of the ledger and of the life of an allocation."""

from collections.abc import Mapping
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

from doubles.cards import AFU, BLANK, PREFIX, REGIONS

from fpga_plugin.allocation import debug_holds
from fpga_plugin.allocation.journal.doubt import unasked
from fpga_plugin.allocation.journal.journal import JournalError
from fpga_plugin.allocation.journal.records import (
    CLEAN,
    Change,
    Condition,
    Fact,
    RegionRecord,
    Tenancy,
    TenancyKey,
    TenantImage,
)
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.lists import DeviceLists
from fpga_plugin.allocation.names import card_of, is_card, resource_names
from fpga_plugin.allocation.obstacles import FAILED, ObstacleKind
from fpga_plugin.hardware.model import Card, Region
from fpga_plugin.ids import AfuId, CardId, DeviceId, RegionId
from fpga_plugin.kubernetes.names import PodUid, ResourceName
from fpga_plugin.settings.settings import Advertise, ScrubPolicy


class ProcessDiedError(BaseException):
    """The plugin's process is no more; nothing but the world outside may see this."""


class MemoryJournal:
    """A journal that outlives its process, fails when it is told to, and dies on request.

    Attributes:
        failing: how many writes fail, with nothing written.
        dies_in: the process dies at this write, counted from 1; None: it lives.
        dies_after: whether that last write is durable.
        died: the process died at a write.
    """

    doubt = ""
    marker = SimpleNamespace(last=None)

    def __init__(self, snapshot: Change | None = None) -> None:
        self.snapshot = Change() if snapshot is None else snapshot
        self.failing = 0
        self.dies_in: int | None = None
        self.dies_after = False
        self.died = False
        self.writes = 0

    def write(self, change: Change) -> None:
        if self.dies_in is not None:
            self.dies_in -= 1
            if self.dies_in <= 0:
                self.died = True
                if self.dies_in == 0 and self.dies_after and not self.failing:
                    self.snapshot = applied(self.snapshot, change)
                raise ProcessDiedError
        if self.failing:
            self.failing -= 1
            raise JournalError("journal /state/journal.sqlite3: database or disk is full")
        self.writes += 1
        self.snapshot = applied(self.snapshot, change)


def applied(snapshot: Change, change: Change) -> Change:
    """What a change makes of the journal's content: the meaning of `JournalWriter.write`."""
    result = Change()
    for kind in fields(Change):
        merged = getattr(snapshot, kind.name) | getattr(change, kind.name)
        setattr(result, kind.name, {key: value for key, value in merged.items() if value})
    return result


def remembered(ledger: Ledger, boot_id: str) -> Change:
    """What the ledger has in memory, as the journal ought to have it."""
    facts = {
        Fact.BOOT: boot_id,
        Fact.KUBELET: ledger.kubelet_instance,
        Fact.ENVIRONMENT: ledger.env_instance,
        Fact.LOST: ledger.lost,
    }
    return Change(
        facts={instance: told for instance, told in facts.items() if told},
        allocations=dict(ledger.allocations),
        regions=dict(ledger.regions),
        memory_clear_pending=dict.fromkeys(ledger.memory_clear_pending, True),
        drained=dict.fromkeys(ledger.drained, True),
        rebinding=dict.fromkeys(ledger.rebinding, True),
        unreconciled=dict.fromkeys(ledger.unreconciled, True),
        tenancies=dict(ledger.tenancies),
        resources=dict.fromkeys(ledger.resources, True),
        pending_poststops=dict(ledger.pending_poststops),
        debug_holds=dict(ledger.debug_holds),
        images={TenantImage(r, one): True for r, of in ledger.images.items() for one in of},
        alias_bindings=dict(ledger.alias_bindings),
    )


def make_ledger(
    *cards: Card,
    snapshot: Change | None = None,
    boot_id: str = "boot",
    blank: bool = True,
    dra: bool = False,
) -> tuple[Ledger, MemoryJournal]:
    """A ledger that has found `cards`, their regions BLANK unless told otherwise."""
    journal = MemoryJournal(snapshot)
    ledger = Ledger(
        prefix=PREFIX, journal=journal, snapshot=journal.snapshot, boot_id=boot_id, dra=dra
    )
    ledger.device_plugin.kubelet_found("life 1")
    for card in cards:
        found(ledger, card)
        if blank:
            scrub(ledger, card)
    return ledger, journal


def doubt_owners(journal: MemoryJournal) -> None:
    """Somebody else may have served since: the next life asks who the owners are."""
    journal.snapshot = unasked(journal.snapshot)


def hold(ledger: Ledger, region: RegionId, **facts: Any) -> None:
    """Something is found out about a region's debug hold, if it has one."""
    if (present := ledger.debug_holds.get(region)) is not None:
        debug_holds.put(ledger, replace(present, **facts))


def reopened(journal: MemoryJournal, *cards: Card, boot_id: str = "boot") -> Ledger:
    """The ledger after the plugin's restart."""
    ledger = Ledger(prefix=PREFIX, journal=journal, snapshot=journal.snapshot, boot_id=boot_id)
    for card in cards:
        found(ledger, card)
    return ledger


def found(ledger: Ledger, card: Card, afu: AfuId | None = BLANK) -> None:
    """The card is there, every region reads `afu`, and kubelet's records name no more owners."""
    ledger.hardware.card_found(card, {r.id: afu for r in card.regions}, BLANK)
    ledger.reconciled([card.id])


def scrub(ledger: Ledger, card: Card, *ports: int) -> None:
    """What a release does to regions, as far as the ledger sees it."""
    regions = [r.id for r in card.regions if not ports or r.port_id in ports]
    ledger.work.working(regions)
    for region in regions:
        ledger.work.clean(region, BLANK, blank=True)
    ledger.work.set_memory_clear_pending(card.id, open_=False)


def start(ledger: Ledger, *devices: DeviceId, program: bool = True) -> None:
    """What a successful PreStart does, as far as the ledger sees it."""
    ledger.device_plugin.prestart_seen(devices)
    allocations = [ledger.allocations[d] for d in devices]
    for allocation in allocations:
        for region in allocation.grants:
            if program:
                ledger.work.working([region])
                ledger.work.programmed(region, AFU)
    ledger.device_plugin.started(allocations)


def make_lists(
    ledger: Ledger,
    *,
    advertise: Advertise = Advertise.BOTH,
    scrub: ScrubPolicy = ScrubPolicy.REQUIRED,
) -> DeviceLists:
    """`scrub`: for all lists of this ledger."""
    unblanked = advertise is Advertise.AF or scrub is ScrubPolicy.BEST_EFFORT
    ledger.obstacles.offered = CLEAN if unblanked else frozenset({Condition.BLANK})
    return DeviceLists(ledger, advertise=advertise)


def trouble(ledger: Ledger, region: RegionId) -> str:
    """Why a region is given to nobody, whatever is on it; empty if nothing is wrong."""
    why = FAILED | {ObstacleKind.KEPT}
    return next((one.cause for one in ledger.obstacles.of(region) if one.kind in why), "")


def shown(lists: DeviceLists, resource: ResourceName = REGIONS) -> dict[DeviceId, bool]:
    """A resource's devices and whether they are Healthy."""
    return {d.id: d.healthy for d in lists.devices(resource)}


def table(
    ledger: Ledger,
    *,
    advertise: Advertise = Advertise.BOTH,
    scrub: ScrubPolicy = ScrubPolicy.REQUIRED,
) -> Mapping[ResourceName, Mapping[DeviceId, bool]]:
    """What docs/architecture.md says is advertised, row by row, without the ledger's indexes."""
    expected: dict[ResourceName, dict[DeviceId, bool]] = {}
    given = [each for one in ledger.allocations.values() for each in one.grants.items()]
    granted = [(region, node) for region, grant in given for node in grant.nodes]
    granted += [(one.region, node) for one in ledger.tenancies.values() for node in one.nodes]
    good = {Condition.BLANK} | (
        {Condition.UNBLANKED} if scrub is ScrubPolicy.BEST_EFFORT else set()
    )

    def sound(region: Region) -> bool:
        record = ledger.regions.get(region.id, RegionRecord(region.id, Condition.DIRTY))
        return (
            record.condition is not Condition.FAULTED
            and region.id not in ledger.failing
            and card_of(region.id) not in ledger.rebinding
        )

    def free_and_healthy(card: Card, region: Region) -> bool:
        record = ledger.regions.get(region.id, RegionRecord(region.id, Condition.DIRTY))
        bound_by_plugin = any(node in region.grant.nodes and r != region.id for r, node in granted)
        return (
            record.condition in good
            and sound(region)
            and card.id not in ledger.foreign
            and card.id not in ledger.unreconciled
            and not bound_by_plugin
        )

    for allocation in ledger.allocations.values():
        card = ledger.cards.get(card_of(allocation.device))
        present = {} if card is None else {r.id: r for r in card.regions}
        expected.setdefault(allocation.resource, {})[allocation.device] = all(
            region in present and sound(present[region]) for region in allocation.grants
        )
    for card in ledger.cards.values():
        if card.id in ledger.drained:
            continue
        alias = ledger.aliases.get(card.interface_id)
        of_regions, of_card = resource_names(PREFIX, card.interface_id, alias)
        allocations = [c for c in ledger.allocations.values() if card_of(c.device) == card.id]
        whole = any(is_card(c.device) for c in allocations)
        if not whole and advertise is not Advertise.WHOLE:
            for region in card.regions:
                if DeviceId(region.id) not in ledger.allocations:
                    expected.setdefault(of_regions, {})[DeviceId(region.id)] = free_and_healthy(
                        card, region
                    )
        if not allocations and advertise is not Advertise.REGION:
            expected.setdefault(of_card, {})[DeviceId(card.id)] = (
                card.complete
                and card.id not in ledger.memory_clear_pending
                and all(free_and_healthy(card, region) for region in card.regions)
            )
    return expected


def listed(ledger: Ledger, lists: DeviceLists) -> Mapping[ResourceName, Mapping[DeviceId, bool]]:
    """All lists, as `table` gives them."""
    resources = {*ledger.resources, *(c.resource for c in ledger.allocations.values())}
    every = {resource: shown(lists, resource) for resource in resources}
    return {resource: devices for resource, devices in every.items() if devices}


def former(ledger: Ledger, region: RegionId) -> set[PodUid | None]:
    """Pods whose allocation of a region ended, and whose processes may run on."""
    return {one.pod for one in ledger.tenancies.left(region)}


def tenancy(
    region: RegionId, pod: str, *nodes: str, allocation: int = 1 << 40, left: bool = True
) -> Change:
    """A pod has these nodes; where its allocation ended, it may run on."""
    key = TenancyKey(region, allocation, PodUid(pod))
    return Change(tenancies={key: Tenancy(key, nodes, used=True, left=left)})


def gone(ledger: Ledger, *pods: str) -> None:
    """The processes of these pods have ended: what was left to them ends."""
    ledger.work.end_tenancies([one for one in ledger.tenancies.values() if one.pod in pods])


def cards_of(ledger: Ledger) -> set[CardId]:
    return set(ledger.cards)
