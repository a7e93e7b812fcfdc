"""Why a device is not given out, not started, not scrubbed or not rebound: each reason, once.

One function gives every reason that stands against a device (`Obstacles.of`), as values. The kind
of each says what it stops (`Stops`). Lists, Allocate, Prepare, taints, scrubs, recovery, the
operator's commands and status ask here and nowhere else; docs/architecture.md has the table, which
is made from `ObstacleKind`.

One reason depends on processes: `ObstacleKind.TENANCY` names pods whose processes may still have a
region, and `CardOperations.living` says whether they do.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Self, TypeAlias

from fpga_plugin.allocation import debug_holds
from fpga_plugin.allocation.exposure import ExposurePolicy
from fpga_plugin.allocation.journal.records import Allocation, Condition
from fpga_plugin.allocation.names import (
    DELETE_THE_POD,
    FUNCTIONS_HINT,
    LEAVE_DRA,
    MAY_COME_BACK,
    NOT_READ,
    card_of,
    is_card,
)
from fpga_plugin.allocation.naming import Naming
from fpga_plugin.allocation.state import State
from fpga_plugin.errors import ASK_THE_OPERATOR, RefusedError
from fpga_plugin.hardware.grant import Grant
from fpga_plugin.hardware.model import Region
from fpga_plugin.ids import CardId, DeviceId, RegionId

AnyId: TypeAlias = DeviceId | RegionId | CardId
"""A region's id and a card's are those of their devices."""

ANOTHER_POD: Final = "the pod's controller makes a new pod, which is placed again"
NEW_POD: Final = f"{DELETE_THE_POD}, or {ASK_THE_OPERATOR}"
OPERATOR_ENDS_IT: Final = f"{ANOTHER_POD}; or {ASK_THE_OPERATOR}, who can end that"
RUNBOOK: Final = "see docs/runbook.md"
STATUS: Final = "see `fpga-plugin status`"
LOG_SAYS: Final = "the plugin's log says what keeps it from reading them"
PROCESSES: Final = "see why that pod's processes do not end"


class Stops(enum.Flag):
    """The operations that an obstacle stops. It stops no others."""

    OFFER = enum.auto()
    """A free device is Healthy on its list; with DRA, it has no taint."""
    OWNER = enum.auto()
    """A device that has an owner is Healthy on its list; with DRA, it has no taint."""
    ALLOCATE = enum.auto()
    """Somebody new is given the device: a free one, or by an implied release."""
    REPEAT = enum.auto()
    """Allocate of a device that has an owner: to the same pod, or to its successor."""
    CLAIM = enum.auto()
    """A ResourceClaim is given the device."""
    PREPARE = enum.auto()
    """A ResourceClaim that has the device is prepared again."""
    START = enum.auto()
    """A container is handed the device."""
    SCRUB = enum.auto()
    """The region is scrubbed or programmed."""
    REBIND = enum.auto()
    """The driver of the card is taken off and put on again, or its functions come or go."""
    BY_HAND = enum.auto()
    """`fpga-plugin card program`."""


_ANY: Final = Stops.OFFER | Stops.ALLOCATE | Stops.REPEAT
_CARD: Final = _ANY | Stops.CLAIM | Stops.PREPARE | Stops.BY_HAND
_WORK: Final = Stops.START | Stops.SCRUB | Stops.BY_HAND


class ObstacleKind(enum.Enum):
    """Which obstacle: what it stops, and its taint with DRA (key=value)."""

    GONE = _CARD | _WORK | Stops.OWNER, "gone"
    """The card or the region is not there, or not served."""
    INCOMPLETE = _ANY | Stops.OWNER | Stops.CLAIM | Stops.PREPARE | Stops.START, "incomplete"
    """Of a whole card: some of its ports have no driver."""
    KEPT = _ANY | _WORK | Stops.CLAIM | Stops.REBIND, "faulted=kept"
    """Nobody owns the region, and it is kept for debugging as its container left it."""
    FAULTED = _ANY | _WORK | Stops.OWNER, "faulted"
    """Work on the region failed."""
    FAILING = _ANY | _WORK | Stops.OWNER, "faulted"  # noqa: PIE796  # see `__new__`
    """The region's hardware fails."""
    HUNG = _ANY | Stops.OWNER, "faulted"
    """The region's hardware fails, and a scrub may cure it."""
    STRANGER = _CARD | _WORK | Stops.REBIND, "held=tenancy"
    """A pod was given a node of the region as another region's (invariant 10)."""
    RESOURCE_CLAIM = _ANY | Stops.OWNER | Stops.START
    """A ResourceClaim has the device, and the device plugin API serves."""
    POD = Stops(0), "held=device-plugin"
    """A pod has the device by the device plugin API, and DRA serves."""
    FOREIGN = _CARD | _WORK | Stops.REBIND, "held=another-plugin"
    """Another plugin's pods have the card."""
    REBINDING = _CARD | Stops.OWNER, "held=rebinding"
    """The driver of the card is being rebound."""
    UNRECONCILED = _CARD | Stops.SCRUB | Stops.REBIND, "held=owners-unknown"
    """Who has the card is not known yet."""
    DRAINED = Stops.ALLOCATE | Stops.CLAIM, "drained"
    """The operator takes the card out of service: what is free of it is on no list."""
    EXPOSED = _ANY | Stops.CLAIM, "exposed"
    """The operator gives nobody a card that exposes memory."""
    MODE = Stops.ALLOCATE | Stops.REPEAT
    """The card is in use in the other mode: the device is on no list."""
    NOT_CLEAN = Stops.OFFER, "not-clean"
    """The region was not scrubbed since its last owner."""
    MEMORY = Stops.OFFER, "memory-not-cleared"
    """Of a whole card: its memory may hold an earlier tenant's data."""
    UNDECIDED = Stops.SCRUB | Stops.REBIND
    """The region will be kept for debugging if its container failed."""
    TENANCY = _WORK | Stops.REBIND
    """Pods that had the region may still run: `CardOperations.living` says whether they do."""
    OWNED = Stops.REBIND | Stops.BY_HAND
    """It has an owner. (For its own container the owner's card is rebound nevertheless.)"""
    FIXED = Stops.BY_HAND
    """What is on the region is handed over as it is."""

    stops: Stops
    taint: str

    def __new__(cls, stops: Stops, taint: str = "") -> Self:
        """Each is a kind of its own, even if it stops the same as another."""
        kind = object.__new__(cls)
        kind._value_ = len(cls.__members__)
        kind.stops, kind.taint = stops, taint
        return kind


FAILED: Final = frozenset({ObstacleKind.FAULTED, ObstacleKind.FAILING, ObstacleKind.HUNG})
"""Kinds that the operator sees as a failure of a region."""


class RefusedForNowError(RefusedError):
    """What refuses passes by itself, in seconds if all is well (`Obstacle.passing`)."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """One reason.

    Attributes:
        kind: decides what it stops.
        message: the reason as one sentence, whose subject is a card, a region or a node.
        tenant: what the pod's owner can do.
        operator: what the node's operator can do; empty: nothing but what the pod's owner can.
        cause: for a fault, what the hardware reports.
        device: for a reason that lies in an owner, the owner's device.
        passing: it passes by itself, in seconds if all is well. A Prepare waits for that; no call
            of the device plugin API does.
    """

    kind: ObstacleKind
    message: str
    tenant: str = ANOTHER_POD
    operator: str = ""
    cause: str = ""
    device: DeviceId | None = None
    passing: bool = False

    @property
    def told(self) -> str:
        """The cause, and what the operator can do beside docs/runbook.md, for the operator."""
        known = self.kind not in FAILED or self.operator == RUNBOOK
        return self.cause if known else f"{self.cause}; {self.operator}"

    def refusal(self, *, operator: bool = False) -> RefusedError:
        """The error of a tenant's call, or of an operator's own."""
        hint = self.operator or (STATUS if operator else self.tenant)
        kind = RefusedForNowError if self.passing else RefusedError
        return kind(self.message, hint=hint, tenant=self.tenant)


class Obstacles:
    """Every reason that stands against devices.

    Args:
        exposure: which exposed cards the operator gives out.
        offered: the conditions in which a free region is given out.
        naming: whether regions are handed over with what is on them.
        dra: DRA serves; else the device plugin API does.
    """

    def __init__(
        self,
        state: State,
        *,
        exposure: ExposurePolicy,
        offered: frozenset[Condition],
        naming: Naming,
        dra: bool,
    ) -> None:
        self._state = state
        self.exposure = exposure
        self.offered = offered
        self._naming = naming
        self._dra = dra

    def against(self, what: Stops, device: AnyId) -> Iterator[Obstacle]:
        """Obstacles that stop this; `CardOperations.living` has the last word on tenancies."""
        for one in self.of(device):
            if what in one.kind.stops and one.kind is not ObstacleKind.TENANCY:
                yield one

    def first(self, device: AnyId, what: Stops) -> Obstacle | None:
        """The most telling obstacle that stops this; None: nothing does."""
        return next(self.against(what, device), None)

    def check(self, device: AnyId, what: Stops) -> None:
        """Refuse an operation to a tenant if an obstacle stops it.

        Raises:
            RefusedError: something stops it.
        """
        if (obstacle := self.first(device, what)) is not None:
            raise obstacle.refusal()

    def regions_of(self, device: DeviceId) -> tuple[Region, ...]:
        """The present regions that a device stands for.

        Raises:
            RefusedError: its card, or one of its regions, is gone, or its card is not served.
        """
        for obstacle in self._of_presence(device):
            raise obstacle.refusal()
        return self.present_regions(device)

    def present_regions(self, device: DeviceId) -> tuple[Region, ...]:
        """Those of its regions that are there, be it served or not."""
        card = self._state.cards.get(card_of(device))
        there = () if card is None else card.regions
        return tuple(r for r in there if is_card(device) or DeviceId(r.id) == device)

    def grants_of(self, device: DeviceId) -> dict[RegionId, Grant]:
        """What its present regions grant; raises as `regions_of`."""
        return {region.id: region.grant for region in self.regions_of(device)}

    def check_grants(self, allocation: Allocation) -> None:
        """Invariant 10: the pod's nodes still lead to these regions, and to no others.

        Raises:
            RefusedError: they do not.
        """
        regions = self.regions_of(allocation.device)
        present = {region.id: region.grant for region in regions}
        for region_id in sorted(present.keys() | allocation.grants.keys()):
            now, then = present.get(region_id), allocation.grants.get(region_id)
            if now is None or then is None or not now.reaches(then):
                raise RefusedError(
                    f"device numbering changed since the pod was admitted: {region_id} was"
                    f" {then or 'not there'} and is {now or 'gone'} now",
                    hint="delete the pod",
                )
        for region in regions:
            for obstacle in self._of_nodes(region):
                raise obstacle.refusal()

    def of(self, device: AnyId) -> Iterator[Obstacle]:
        """All obstacles against a device now, the most telling first."""
        device = DeviceId(device)
        state, whole = self._state, is_card(device)
        card = state.cards.get(card_of(device))
        regions = self.present_regions(device)
        yield from self._of_mode(device)
        yield from self._of_presence(device)
        for region in regions:
            yield from self._of_hardware(region)
        for region in regions:
            yield from self._of_nodes(region)
        yield from self._of_owner(device)
        yield from self._of_card(card_of(device))
        if card is None:
            return
        if why := self.exposure.refusal(card, whole=whole):
            yield Obstacle(
                ObstacleKind.EXPOSED,
                f"card {card.id} is not given {'as a whole' if whole else 'by region'}: {why}",
                tenant=f"the operator allows it by that setting; {ANOTHER_POD}",
                operator="change that setting (docs/security.md)",
            )
        for region in regions:
            yield from self._of_contents(region)
        if whole and card.id in state.memory_clear_pending and not state.allocations_on(card.id):
            why = f"card {card.id} has memory that is not cleared yet"
            yield Obstacle(ObstacleKind.MEMORY, why)
        if not card.reprogrammable:
            why = f"card {card.id} cannot be reconfigured partially: its image is in its flash"
            yield Obstacle(ObstacleKind.FIXED, why, operator=FUNCTIONS_HINT)
        elif self._naming.serves_functions:
            yield Obstacle(
                ObstacleKind.FIXED,
                f"card {card.id} holds functions, which are handed over as they are"
                " (FPGA_PLUGIN_ADVERTISE=af)",
                operator="set another FPGA_PLUGIN_ADVERTISE to program its regions",
            )

    def _of_mode(self, device: DeviceId) -> Iterator[Obstacle]:
        card, whole = card_of(device), is_card(device)
        in_use = [c.device for c in self._state.allocations_on(card) if is_card(c.device) != whole]
        if in_use:
            why = "by region: the whole card is in use"
            if whole:
                why = f"as a whole: its regions {', '.join(sorted(in_use))} are in use"
            tenant = f"kubelet's view was out of date; {ANOTHER_POD}"
            yield Obstacle(ObstacleKind.MODE, f"card {card} cannot be given {why}", tenant)

    def _of_presence(self, device: DeviceId) -> Iterator[Obstacle]:
        card = self._state.cards.get(card_of(device))
        if card is None:
            problem = self._state.problems.get(card_of(device))
            why, tenant, operator = "is gone", MAY_COME_BACK, ""
            if problem is not None:
                why, tenant, operator = f"is not served: {problem.message}", NEW_POD, problem.hint
            # A rebind, or a reset, takes it away for a moment.
            passing = card_of(device) in self._state.rebinding
            why = f"card {card_of(device)} {why}"
            yield Obstacle(ObstacleKind.GONE, why, tenant, operator, passing=passing)
        elif is_card(device) and not card.complete:
            yield Obstacle(
                ObstacleKind.INCOMPLETE,
                f"card {card.id} shows {len(card.regions)} of its {card.ports} regions",
                "wait until its driver has bound all ports",
            )
        elif not self.present_regions(device):
            why = f"region {device} is gone from its card"
            yield Obstacle(ObstacleKind.GONE, why, MAY_COME_BACK)

    def _of_hardware(self, region: Region) -> Iterator[Obstacle]:
        state, subject = self._state, f"region {region.id}"
        if (hold := debug_holds.in_force(state, region.id)) is not None:
            why = debug_holds.words(hold)
            yield Obstacle(
                ObstacleKind.KEPT,
                f"{subject} is {why}",
                OPERATOR_ENDS_IT,
                f"`fpga-plugin card release {region.card}` ends that",
                cause=why,
            )
        record, fault = state.record(region.id), state.failing.get(region.id)
        if record.condition is Condition.FAULTED:
            yield _faulted(ObstacleKind.FAULTED, subject, record.reason or "faulted")
        elif fault is not None:
            kind = ObstacleKind.FAILING if fault.stops_work else ObstacleKind.HUNG
            yield _faulted(kind, subject, fault.message, fault.hint)

    def _of_nodes(self, region: Region) -> Iterator[Obstacle]:
        if not (strangers := self._state.strangers(region)):
            return
        # A pod that still has an allocation can be deleted.
        one = min(strangers, key=lambda each: each.left)
        node = next((node for node in one.nodes if node in region.grant.nodes), "the device number")
        who = f"the pod that was given {one.region} before the device numbers changed"
        hint = f"delete the pod that holds {one.region}"
        if one.left:
            who = f"pod {one.pod}, which was given it as {one.region} and may still run"
            hint = PROCESSES
        why = f"{node} of region {region.id} is also open to {who}"
        yield Obstacle(ObstacleKind.STRANGER, why, hint, hint)

    def _of_owner(self, device: DeviceId) -> Iterator[Obstacle]:
        state, whole = self._state, is_card(device)
        card = card_of(device)
        for allocation in state.allocations_on(card):
            if not whole and allocation.device not in {device, DeviceId(card)}:
                continue
            subject, owner = allocation.device, state.claim_owner_of(allocation.device)
            if owner is not None and not self._dra:
                why = f"{subject} belongs to ResourceClaim {owner.full_name}"
                yield Obstacle(ObstacleKind.RESOURCE_CLAIM, why, LEAVE_DRA, LEAVE_DRA)
            elif owner is None and self._dra:
                why = f"{subject} belongs to a pod by the device plugin API"
                yield Obstacle(ObstacleKind.POD, why)
            yield Obstacle(ObstacleKind.OWNED, f"{subject} has an owner", device=subject)

    def _of_card(self, card: CardId) -> Iterator[Obstacle]:
        state, subject = self._state, f"card {card}"
        if (why := state.foreign.get(card)) is not None:
            yield Obstacle(ObstacleKind.FOREIGN, f"{subject} is left alone: {why}", "")
        present = state.cards.get(card)
        if card in state.rebinding and not (present is not None and present.resets):
            why = f"the driver of {subject} is being rebound"
            yield Obstacle(ObstacleKind.REBINDING, why, passing=True)
        # For an owned device too: in a damaged journal, the allocation may have ended long ago.
        if card in state.unreconciled:
            why, tenant, operator = NOT_READ, ANOTHER_POD, LOG_SAYS
            if state.resource_claims_unknown and not self._dra:
                why, tenant, operator = state.resource_claims_unknown, LEAVE_DRA, LEAVE_DRA
            why = f"who has {subject} is not known: {why}"
            yield Obstacle(ObstacleKind.UNRECONCILED, why, tenant, operator, passing=True)
        if card in state.drained:
            yield Obstacle(
                ObstacleKind.DRAINED,
                f"{subject} is being taken out of service",
                OPERATOR_ENDS_IT,
                f"`fpga-plugin card undrain {card}` ends that",
            )

    def _of_contents(self, region: Region) -> Iterator[Obstacle]:
        state, subject = self._state, f"region {region.id}"
        allocation, record = state.region_allocation(region.id), state.record(region.id)
        free = allocation is None
        if free and record.condition not in self.offered | {Condition.FAULTED}:
            why = f": {record.reason}" if record.reason else ""
            yield Obstacle(ObstacleKind.NOT_CLEAN, f"{subject} is not clean yet{why}")
        if debug_holds.pending(state, region.id):
            yield Obstacle(
                ObstacleKind.UNDECIDED,
                f"{subject} is to be kept for debugging, if its container failed",
                operator=f"`fpga-plugin card release {region.card}` ends that",
                device=None if allocation is None else allocation.device,
            )
        if pods := sorted({one.pod for one in state.tenancies.left(region.id) if one.pod}):
            why = f"{subject} may still be used by pod {', '.join(pods)}, which had it"
            yield Obstacle(ObstacleKind.TENANCY, why, operator=PROCESSES)


def _faulted(kind: ObstacleKind, subject: str, cause: str, hint: str = "") -> Obstacle:
    return Obstacle(kind, f"{subject} is faulted: {cause}", NEW_POD, hint or RUNBOOK, cause)
