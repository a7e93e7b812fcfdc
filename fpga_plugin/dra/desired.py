"""The desired ResourceSlices: the ledger as devices, counters and taints.

The device plugin's lists hide a card while its regions are owned. Here nothing is hidden: a card
and its regions share counters, and the scheduler, which does all accounting, keeps them apart. So
the slices do not show owners, and a pod's life costs no write. A device that must not be given out
is tainted and stays on the list, and an owned device is always on it (invariant 3).

A server that does not know counters or taints silently drops them. For it there is a simpler
`Form`: regions or cards, not both; and a device that would be tainted is left out unless it is
owned.

The limits are those of resource.k8s.io/v1 (types.go).
"""

import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.names import card_of, is_card
from fpga_plugin.allocation.obstacles import FAILED, ObstacleKind
from fpga_plugin.dra.attributes import Value, attributes
from fpga_plugin.dra.names import device_name
from fpga_plugin.hardware.model import Card, Region
from fpga_plugin.ids import (
    CardId,
    DeviceId,
    InterfaceId,
    RegionId,
    ResourceKind,
    device_order,
)
from fpga_plugin.settings.settings import Advertise

MAX_DEVICES: Final = 64
"""Of a slice with taints or counters; 128 without, but a taint must not move devices about."""

MAX_SETS: Final = 8
"""Counter sets of a slice."""

MAX_COUNTERS: Final = 32
"""Counters of a set."""

MAX_CONSUMED: Final = 2
"""Counter sets of which one device may take."""

_WHOEVER_OWNS_IT: Final = FAILED | {
    *(ObstacleKind.GONE, ObstacleKind.INCOMPLETE),
    *(ObstacleKind.DRAINED, ObstacleKind.EXPOSED, ObstacleKind.POD),
}
"""What the scheduler is sent of a device that has an owner, too."""

_WORD = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?(?=:|$)", re.ASCII)

_T = TypeVar("_T")


class Effect(enum.StrEnum):
    """What a taint does."""

    NO_SCHEDULE = "NoSchedule"
    """No claim gets the device from now on."""
    NO_EXECUTE = "NoExecute"
    """And the pods of the claim that has it are deleted, so that their controllers make others."""


@dataclass(frozen=True, order=True, slots=True)
class Taint:
    """Why a device is not given out; the key without its domain."""

    key: str
    value: str = ""
    effect: Effect = Effect.NO_SCHEDULE


@dataclass(frozen=True, slots=True)
class CounterSet:
    """The counters that the devices of one card share: one of each."""

    name: str
    counters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Device:
    """A card or region.

    Attributes:
        name: in the slice.
        attributes: what claims choose by; those without a domain are the driver's.
        consumes: the counters that it takes, one of each, by counter set.
        taints: why it is not to be given out.
    """

    name: str
    attributes: Mapping[str, Value]
    consumes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()


@dataclass(frozen=True, slots=True)
class Slice:
    """The content of one ResourceSlice: counter sets or devices, never both."""

    counter_sets: tuple[CounterSet, ...] = ()
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True, slots=True)
class Form:
    """What the server understands.

    Attributes:
        counters: shared counters (by default since Kubernetes 1.36).
        taints: device taints (the same).
    """

    counters: bool = True
    taints: bool = True


class DesiredDevices:
    """The desired content of this node's slices.

    Args:
        ledger: knows the cards and their owners.
        advertise: which kind of devices there are; an owned one of the other kind is listed too.
    """

    def __init__(self, ledger: Ledger, *, advertise: Advertise) -> None:
        self._ledger = ledger
        self._kinds = {
            Advertise.BOTH: frozenset({ResourceKind.REGION, ResourceKind.WHOLE}),
            Advertise.REGION: frozenset({ResourceKind.REGION}),
            Advertise.WHOLE: frozenset({ResourceKind.WHOLE}),
            Advertise.AF: frozenset[ResourceKind](),  # functions are the device plugin API's
        }[advertise]

    def __call__(self, form: Form) -> tuple[Slice, ...]:
        """The slices, in order; at least one, so that an empty pool is reported as well."""
        ledger = self._ledger
        cards = sorted(
            ledger.cards.keys() | {card_of(device) for device in ledger.allocations},
            key=device_order,
        )
        sets: list[CounterSet] = []
        regions: list[Device] = []
        whole: list[Device] = []
        for card in cards:
            one = _CardView(ledger, card)
            of_card, of_regions = one.listed(self._kinds, form)
            counters = _counter_sets(one) if form.counters and of_card and of_regions else ()
            sets += counters
            regions += (one.region(region, counters, form) for region in of_regions)
            whole += (one.whole(counters, form) for _ in of_card)
        counter_slices = (Slice(counter_sets=part) for part in _parts(sets, MAX_SETS))
        # First-fit takes them in this order: regions, the smaller thing, come first.
        device_slices = [Slice(devices=part) for part in _parts(regions + whole, MAX_DEVICES)]
        return (*counter_slices, *(device_slices or [Slice()]))


class _CardView:
    """One card as the ledger has it, present or only owned."""

    def __init__(self, ledger: Ledger, card_id: CardId) -> None:
        self.id = card_id
        self.card: Card | None = ledger.cards.get(card_id)
        self._ledger = ledger
        self._present: dict[RegionId, Region] = (
            {} if self.card is None else {region.id: region for region in self.card.regions}
        )
        allocations = ledger.allocations_on(card_id)
        self._owned = {allocation.device for allocation in allocations}
        granted = {region for allocation in allocations for region in allocation.grants}
        self.regions: tuple[RegionId, ...] = tuple(
            sorted(self._present.keys() | granted, key=device_order)
        )

    def listed(
        self, kinds: frozenset[ResourceKind], form: Form
    ) -> tuple[tuple[CardId, ...], tuple[RegionId, ...]]:
        """The card, if it is listed, and its listed regions."""
        whole_owned = DeviceId(self.id) in self._owned
        programs = self.card is not None and self.card.reprogrammable
        whole = whole_owned or (ResourceKind.WHOLE in kinds and programs)
        regions = [
            region
            for region in self.regions
            if DeviceId(region) in self._owned
            or (ResourceKind.REGION in kinds and programs and region in self._present)
        ]
        countable = form.counters and len(self.regions) <= MAX_CONSUMED * MAX_COUNTERS
        if whole and regions and not countable:
            # Nothing would keep them apart. What is owned stays, the smaller thing else.
            if whole_owned:
                regions = [region for region in regions if DeviceId(region) in self._owned]
            else:
                whole = False
        if not form.taints:
            regions = [
                region
                for region in regions
                if DeviceId(region) in self._owned or not self._taints(DeviceId(region))
            ]
            whole = whole and (whole_owned or not self._taints(DeviceId(self.id)))
        return (self.id,) if whole else (), tuple(regions)

    def region(self, region: RegionId, counters: Sequence[CounterSet], form: Form) -> Device:
        counter = _counter(region)
        return Device(
            device_name(DeviceId(region)),
            self._attributes(ResourceKind.REGION) | {"afuID": ""},
            {one.name: (counter,) for one in counters if counter in one.counters},
            self._taints(DeviceId(region)) if form.taints else (),
        )

    def whole(self, counters: Sequence[CounterSet], form: Form) -> Device:
        return Device(
            device_name(DeviceId(self.id)),
            self._attributes(ResourceKind.WHOLE) | {"regions": len(self.regions)},
            {one.name: one.counters for one in counters},
            self._taints(DeviceId(self.id)) if form.taints else (),
        )

    def _attributes(self, kind: ResourceKind) -> dict[str, Value]:
        return attributes(self.id, kind, self._interface(), self.card)

    def _interface(self) -> InterfaceId | None:
        """The present card's; of one that is gone, what its owners asked for."""
        if self.card is not None:
            return self.card.interface_id
        resources = (
            self._ledger.naming.resource(allocation.resource)
            for allocation in self._ledger.allocations_on(self.id)
        )
        return next((one.interface_id for one in resources if one is not None), None)

    def _taints(self, device: DeviceId) -> tuple[Taint, ...]:
        """The taints of a device; of one key and effect the most telling.

        An owned device has only those that no scrub mends, and the operator's: its owner keeps it,
        and after the owner's end no write has to come before the next claim.
        """
        ledger, found = self._ledger, dict[tuple[str, Effect], Taint]()
        owner = ledger.region_allocation(RegionId(device))  # its own, or its card's
        stuck = cannot_start(ledger, device)
        for one in ledger.obstacles.of(device):
            key, _, value = one.kind.taint.partition("=")
            if not key or not (owner is None or one.kind in _WHOEVER_OWNS_IT):
                continue
            failed = stuck and one.kind is ObstacleKind.FAULTED
            effect = Effect.NO_EXECUTE if failed else Effect.NO_SCHEDULE
            found.setdefault((key, effect), Taint(key, value or _word(one.cause), effect))
        return tuple(sorted(found.values()))


def cannot_start(ledger: Ledger, device: DeviceId) -> bool:
    """Whether the pod that is to have a device will not start here, and is better elsewhere."""
    owner = ledger.region_allocation(RegionId(device))
    return (
        owner is not None
        and not owner.started
        and card_of(device) not in ledger.rebinding
        and any(one.kind is ObstacleKind.FAULTED for one in ledger.obstacles.of(device))
    )


def _counter_sets(card: _CardView) -> tuple[CounterSet, ...]:
    """One of each region; a set has its card's name, a second one a suffix."""
    name = device_name(DeviceId(card.id))
    return tuple(
        CounterSet(
            name if number == 0 else f"{name}-{number}", tuple(_counter(region) for region in part)
        )
        for number, part in enumerate(_parts(card.regions, MAX_COUNTERS))
    )


def _counter(region: RegionId) -> str:
    """Of card `c`, region `c-p3`: `region-3`."""
    assert not is_card(DeviceId(region))
    return f"region-{region.rpartition('-p')[2]}"


def _parts(things: Sequence[_T], size: int) -> Iterator[tuple[_T, ...]]:
    for begin in range(0, len(things), size):
        yield tuple(things[begin : begin + size])


def _word(reason: str) -> str:
    """A taint's value: the word with which a reason begins (`thermal: ...`), if it is one."""
    match = _WORD.match(reason)
    return "" if match is None else match[0]
