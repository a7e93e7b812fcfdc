"""The ledger: who has what, and what is on it. Pure state, no I/O but the journal's.

Every method is one step: it checks, and makes one change. A change that takes trust away holds at
once; one that gives trust holds once it is written (`trust`). So memory is never less strict than
what a restart would read. All methods belong to the event loop and take microseconds.

The ledger keeps an allocation for each device id. A region's ownership follows from the allocations
on it and on its card; its condition is a separate fact (docs/architecture.md, "Two facts for each
region").

`Ledger` is the `State` with its parts. Four parts make steps: for the device plugin API
(`device_plugin`), for ResourceClaims (`dra`), for work on regions (`work`) and for hardware
(`hardware`). `obstacles` gives every reason against a device, and `naming` the resources' names.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from msgspec import UNSET

from fpga_plugin.allocation import debug_holds
from fpga_plugin.allocation.device_plugin_steps import DevicePluginSteps
from fpga_plugin.allocation.dra_steps import DraSteps
from fpga_plugin.allocation.exposure import ExposurePolicy
from fpga_plugin.allocation.hardware_steps import HardwareSteps
from fpga_plugin.allocation.journal.doubt import unasked
from fpga_plugin.allocation.journal.journal import JournalWriter
from fpga_plugin.allocation.journal.records import (
    CLEAN,
    Change,
    Condition,
    Fact,
    RegionRecord,
)
from fpga_plugin.allocation.names import is_shells
from fpga_plugin.allocation.naming import Naming
from fpga_plugin.allocation.obstacles import Obstacles
from fpga_plugin.allocation.state import State
from fpga_plugin.allocation.work_steps import WorkSteps
from fpga_plugin.settings.settings import ScrubPolicy


class Ledger(State):
    """The state with its parts, as the journal had it at the start.

    Args:
        prefix: of resources.
        prefixes: for families of cards that have their own.
        snapshot: what the journal held at the start.
        boot_id: of the node, now.
        scrub: whether a region may be given out without a blank bitstream.
        exposure: which exposed cards the operator gives out.
        functions: regions are handed over with the preprogrammed functions that are on them.
        aliases: resources may be called by aliases of interface ids.
        shells: cards are given out by the names that their vendor's plugin has for them.
        dra: DRA serves; else the device plugin API does.
    """

    def __init__(
        self,
        *,
        prefix: str,
        journal: JournalWriter,
        snapshot: Change,
        boot_id: str,
        scrub: ScrubPolicy = ScrubPolicy.BEST_EFFORT,
        exposure: ExposurePolicy = ExposurePolicy(),  # noqa: B008  # it is frozen
        functions: bool = False,
        aliases: bool = False,
        shells: bool = False,
        dra: bool = False,
        prefixes: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start from what the journal held.

        A region that was left unblanked is DIRTY if `scrub` now requires a blank, unless regions
        are served by their preprogrammed `functions`. If `aliases` or `shells` are wanted,
        resources keep their journalled names until the store's manifest, or a card, says otherwise.

        In another boot the journalled conditions do not hold, and no earlier container runs.
        Allocations stay, but count as not started: kubelet re-admits its pods with the devices of
        its checkpoint, without an Allocate.
        """
        super().__init__(journal)
        self.boot_id = boot_id
        unblanked = functions or scrub is ScrubPolicy.BEST_EFFORT
        self.naming = Naming(
            self, prefix=prefix, prefixes=prefixes, functions=functions, shells=shells
        )
        self.obstacles = Obstacles(
            self,
            exposure=exposure,
            offered=CLEAN if unblanked else frozenset({Condition.BLANK}),
            naming=self.naming,
            dra=dra,
        )
        self.device_plugin = DevicePluginSteps(self, self.obstacles, self.naming)
        self.dra = DraSteps(self, self.obstacles, self.naming, boot_id=boot_id)
        self.work = WorkSteps(self, self.naming)
        self.apply(snapshot)
        # Allocations of an earlier run of the plugin: PreStarts may have failed while it was away.
        self.inherited = set(self.allocations)
        self._take_up(snapshot, unblanked=unblanked, aliases=aliases, shells=shells)
        if self.resource_claims_unknown:
            self.unreconciled |= unasked(snapshot).unreconciled.keys()
        self.hardware = HardwareSteps(self, self.naming)

    def _take_up(self, snapshot: Change, *, unblanked: bool, aliases: bool, shells: bool) -> None:
        """Correct what no longer holds in this boot or with these settings."""
        same_boot = snapshot.facts.get(Fact.BOOT, "") == self.boot_id
        change = Change() if same_boot else self._booted()
        for record in self.regions.values():
            taken_up = _record_at_start(record, unblanked=unblanked, same_boot=same_boot)
            if taken_up != record:
                change.regions[record.region] = taken_up
        change.debug_holds = debug_holds.over_at_start(self, same_boot=same_boot)
        held = {allocation.resource for allocation in self.allocations.values()}
        for name, meaning in self.alias_bindings.items():
            domain = name.partition("/")[0]
            wanted = shells if is_shells(name) else aliases and domain in self.naming.domains
            if not wanted:
                change.alias_bindings[name] = (
                    replace(meaning, current=False) if name in held else None
                )
        self.commit(change)

    def _booted(self) -> Change:
        """In another boot no earlier process runs; a device still allocated may be used unseen.

        No container uses a ResourceClaim's devices before it is prepared in this boot.
        """
        change = Change(
            facts={Fact.BOOT: self.boot_id},
            pending_poststops=dict.fromkeys(self.pending_poststops, 0),
            tenancies=dict.fromkeys(self.tenancies),
        )
        for device, allocation in self.allocations.items():
            unseen = self.claim_owner_of(device) is None
            change.allocations[device] = replace(
                allocation,
                started=False,
                prestart_seen=False,
                missed_prestart=unseen,
                prestarts=0,
                poststops=0,
            )
            for one in self.tenancies.users(allocation):
                change.tenancies[one.key] = replace(
                    one, used=unseen, left=False, cgroups=(), numbers=UNSET
                )
        return change


def _record_at_start(record: RegionRecord, *, unblanked: bool, same_boot: bool) -> RegionRecord:
    reason = ""
    if not same_boot:
        reason = "the node booted"
    elif record.condition is Condition.SCRUBBING:
        reason = "the plugin ended while it worked on the region"
    elif record.condition is Condition.UNBLANKED and not unblanked:
        reason = "a blank bitstream is required now"
    if not reason:
        return record
    return replace(record, condition=Condition.DIRTY, reason=reason, afu_id=None)
