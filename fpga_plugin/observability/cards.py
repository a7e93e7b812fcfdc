"""The cards and regions as of now: status, page and metrics show what stands here.

Pods' names are foreign text: the code that shows them makes them safe for a terminal or a page.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from fpga_plugin.allocation import debug_holds
from fpga_plugin.allocation.exposure import memory_state
from fpga_plugin.allocation.journal.records import Allocation, Condition, DebugHold, RegionRecord
from fpga_plugin.allocation.names import card_of
from fpga_plugin.allocation.obstacles import FAILED, Obstacle, ObstacleKind, Stops
from fpga_plugin.cards import functions
from fpga_plugin.hardware.model import Card, Readings, Region
from fpga_plugin.ids import CardId, DeviceId, InterfaceId
from fpga_plugin.observability.device_owners import by_device, who
from fpga_plugin.observability.schema import (
    CardView,
    ClockView,
    KeptView,
    OwnerView,
    RefusalView,
    RegionView,
)
from fpga_plugin.observability.status_context import StatusContext
from fpga_plugin.observability.unusable import unusable
from fpga_plugin.plugin import Plugin
from fpga_plugin.settings.settings import Advertise

_ON_THE_CARD: Final = frozenset({ObstacleKind.GONE, ObstacleKind.FOREIGN, ObstacleKind.INCOMPLETE})
"""What a card's note says for all its regions."""

_PASSING: Final = frozenset({ObstacleKind.REBINDING, ObstacleKind.UNRECONCILED})
"""The same, of what passes by itself."""

_IN_OTHER_WORDS: Final = frozenset(
    {ObstacleKind.EXPOSED, ObstacleKind.MEMORY, ObstacleKind.DRAINED}
)
"""What else a card's row says."""


def look(
    context: StatusContext,
    plugin: Plugin,
    readings: Mapping[CardId, Readings],
    refusals: Iterable[RefusalView] = (),
) -> list[CardView]:
    """Every card that is there, or that is gone and still has an owner; in order of their ids."""
    ledger = plugin.ledger
    of = _Cards(context, plugin, readings, refusals)
    gone = {card_of(device) for device in ledger.allocations} - ledger.cards.keys()
    return [of.card(card_id) for card_id in sorted(ledger.cards.keys() | gone)]


class _Cards:
    """What is the same for all of them is looked up once."""

    def __init__(
        self,
        context: StatusContext,
        plugin: Plugin,
        readings: Mapping[CardId, Readings],
        refusals: Iterable[RefusalView],
    ) -> None:
        self._context, self._plugin, self._ledger = context, plugin, plugin.ledger
        self._readings = readings
        api = plugin.device_plugin
        self._listed = (
            None
            if api is None
            else {
                device.id: device.healthy
                for name in plugin.link.status
                for device in api.lists.devices(name)
            }
        )
        self._refused = {
            (device, one["claim"]): one["message"]
            for one in refusals
            if one["open"] and one["method"] != "Allocate"
            for device in one["devices"]
        }
        self._claims = by_device(plugin.ledger)

    def card(self, card_id: CardId) -> CardView:
        ledger = self._ledger
        card = ledger.cards.get(card_id)
        readings = self._readings.get(card_id, Readings())
        note, passing = self._note(card_id, card), self._passing(card_id, card)
        return {
            "card": card_id,
            "interface_id": "" if card is None else card.interface_id,
            "interface_alias": "" if card is None else self._alias(card.interface_id),
            "description": "" if card is None else card.description,
            "numa_node": None if card is None else card.numa_node,
            "present": card is not None,
            "mode": ledger.mode(card_id).value,
            "drained": card_id in ledger.drained,
            "memory": ""
            if card is None
            else memory_state(card, pending=card_id in ledger.memory_clear_pending),
            "untested": "" if card is None else card.untested,
            "iommu": "" if card is None else card.iommu.value,
            "note": note,
            "passing": passing,
            "temperatures": dict(readings.temperatures),
            "power": dict(readings.power),
            "regions": [
                self._region(region, f"{note}; {passing}") for region in self._shown(card_id, card)
            ],
        }

    def _alias(self, interface_id: InterfaceId) -> str:
        """What people call it: as resources do, else as the store's manifest does now."""
        return self._ledger.aliases.get(interface_id) or self._context.catalogue.interface_alias(
            interface_id
        )

    def _shown(self, card_id: CardId, card: Card | None) -> list[Region]:
        """The card's regions, and those that are gone and still have an owner."""
        present = () if card is None else card.regions
        known = {region.id for region in present}
        gone = [
            Region(card_id, int(region.rpartition("-p")[2]), grant)
            for allocation in self._ledger.allocations_on(card_id)
            for region, grant in allocation.grants.items()
            if region not in known
        ]
        return [*present, *gone]

    def _note(self, card_id: CardId, card: Card | None) -> str:
        ledger = self._ledger
        notes = self._obstacles(card_id, _ON_THE_CARD)
        if card is None:
            return "; ".join((*notes, "its owner is still there"))
        notes += filter(None, (ledger.obstacles.exposure.note(card), functions.note(ledger, card)))
        if problem := self._plugin.blanks.problem(card.interface_id):
            notes.append(f"no-blank-image: {problem}")
        return "; ".join(notes)

    def _passing(self, card_id: CardId, card: Card | None) -> str:
        """What needs no action: it passes by itself."""
        if card is None:
            return ""
        notes = self._obstacles(card_id, _PASSING)
        if card_id in self._ledger.memory_clear_pending:
            notes.append("its memory is not cleared yet" + self._memory_waits_for(card_id))
        return "; ".join(notes)

    def _obstacles(self, card_id: CardId, kinds: frozenset[ObstacleKind]) -> list[str]:
        """The obstacles of some kinds, as text."""
        return [one.message for one in self._ledger.obstacles.of(card_id) if one.kind in kinds]

    def _memory_waits_for(self, card_id: CardId) -> str:
        if self._ledger.allocations_on(card_id):
            return ", because a region of it is in use"
        left = {one.pod for one in self._ledger.left_on(card_id) if one.pod is not None}
        if left:
            return (
                f", because pod {', '.join(sorted(left))}, which had a region of it, may still run"
            )
        return ""

    def _region(self, region: Region, of_card: str) -> RegionView:
        """One region; `of_card` is what its card's row says."""
        ledger = self._ledger
        record = ledger.record(region.id)
        allocation = ledger.region_allocation(region.id)
        obstacles = list(ledger.obstacles.of(region.id))
        kept = debug_holds.in_force(ledger, region.id)
        device = self._device(region, allocation)
        free = allocation is None
        stopped = ledger.obstacles.first(device, Stops.OFFER if free else Stops.OWNER)
        use = Stops.ALLOCATE if free else Stops.START
        against = stopped or ledger.obstacles.first(device, use)
        why = unusable(self._plugin, self._context.settings.scrub, region)
        return {
            "region": region.id,
            "node": str(region.grant),
            "ownership": ledger.ownership(region.id).value,
            "condition": record.condition.value,
            "reason": self._reason(record, obstacles, against, of_card),
            "failed": any(one.kind in FAILED for one in obstacles),
            "unusable": "" if why is None else why.value,
            "afu_id": record.afu_id or "",
            "bitstream": self._context.catalogue.name(record.afu_id or ""),
            "clock": self._clock(record),
            "healthy": self._healthy(device, stopped),
            "refused": "" if allocation is None else self._refusal(allocation),
            "kept": None if kept is None else self._kept(kept),
            "owner": None if allocation is None else self._owner(allocation),
        }

    def _device(self, region: Region, allocation: Allocation | None) -> DeviceId:
        """Which device a region is shown as: its card, where cards alone are listed."""
        if allocation is not None:
            return allocation.device
        whole = self._context.settings.advertise is Advertise.WHOLE
        return DeviceId(region.card if whole else region.id)

    def _healthy(self, device: DeviceId, stopped: Obstacle | None) -> bool:
        """Whether a region's device is Healthy for kubelet, or with DRA for the scheduler."""
        return stopped is None if self._listed is None else self._listed.get(device, False)

    def _reason(
        self,
        record: RegionRecord,
        obstacles: Sequence[Obstacle],
        against: Obstacle | None,
        of_card: str,
    ) -> str:
        """Why a region is as it is, what its scrub waits for, and what else is against its device.

        Each thing once: not what the card's row says, nor what the condition says.
        """
        if cause := next((one.told for one in obstacles if one.cause), ""):
            return cause
        reason = record.reason
        if record.condition is Condition.DIRTY:
            scrub = self._ledger.obstacles.first(record.region, Stops.SCRUB)
            if scrub is None:
                waits = self._plugin.scrubber.waits_for(record.region)
            else:
                waits = f"{scrub.message} ({scrub.operator})" if scrub.operator else scrub.message
            reason = "; its scrub waits: ".join(filter(None, (reason, waits)))
        if (
            against is None
            or against.kind in _IN_OTHER_WORDS
            or against.message in f"{reason}; {of_card}"
            or (against.kind is ObstacleKind.NOT_CLEAN and against in obstacles)
        ):
            return reason
        return "; ".join(filter(None, (reason, against.message)))

    def _refusal(self, allocation: Allocation) -> str:
        """Why the owner's container was not started; empty: it was not refused."""
        use = self._claims.get(allocation.device)
        return self._refused.get(
            (allocation.device, "" if use is None else use.claim.full_name), ""
        )

    def _kept(self, kept: DebugHold) -> KeptView:
        return {
            "pod_uid": kept.pod,
            "namespace": kept.namespace,
            "pod": kept.name,
            "failure": kept.failure,
            "seconds_left": self._plugin.debugging.left(kept),
        }

    def _clock(self, record: RegionRecord) -> ClockView | None:
        plan = self._plugin.operations.clocks.get(record.region)
        if plan is None or record.condition is not Condition.PROGRAMMED:
            return None
        return {"state": plan.state.value, "detail": plan.detail}

    def _owner(self, allocation: Allocation) -> OwnerView:
        return {
            **who(allocation.device, allocation.pod, self._claims, self._plugin.node.pods.known),
            "device": allocation.device,
            "resource": allocation.resource,
            "ownership": allocation.ownership.value,
            "since": allocation.since or None,
        }
