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

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.names import card_of, is_card
from fpga_plugin.allocation.obstacles import FAILED, ObstacleKind
from fpga_plugin.dra.attributes import as_json, attributes
from fpga_plugin.dra.names import device_name
from fpga_plugin.hardware.model import Card
from fpga_plugin.ids import CardId, DeviceId, InterfaceId, RegionId, device_order
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

Spec: TypeAlias = dict[str, Any]
"""A part of a ResourceSlice as resource.k8s.io/v1 has it."""


@dataclass(frozen=True, slots=True)
class Form:
    """What the server understands.

    Attributes:
        counters: shared counters (by default since Kubernetes 1.36).
        taints: device taints (the same).
    """

    counters: bool = True
    taints: bool = True


def desired_slices(
    ledger: Ledger, form: Form, *, driver: str, advertise: Advertise
) -> tuple[Spec, ...]:
    """This node's slices, in order; at least one, so that an empty pool is reported as well.

    Each has counter sets or devices, never both.

    Args:
        ledger: knows the cards and their owners.
        form: what the server understands.
        driver: its name, the domain of taints.
        advertise: which kind of devices there are; an owned one of the other kind is listed too.
    """
    cards = sorted(
        ledger.cards.keys() | {card_of(device) for device in ledger.allocations},
        key=device_order,
    )
    sets: list[Spec] = []
    regions: list[Spec] = []
    whole: list[Spec] = []
    for card in cards:
        one = _CardView(ledger, card, driver, form)
        listed = one.listed(advertise)
        counters = one.counters() if form.counters and one.mixed(listed) else {}
        sets += ({"name": name, "counters": _each(of)} for name, of in counters.items())
        for device in listed:
            (whole if is_card(device) else regions).append(one.device(device, counters))
    counter_slices = ({"sharedCounters": part} for part in _parts(sets, MAX_SETS))
    # First-fit takes them in this order: regions, the smaller thing, come first.
    device_slices = [{"devices": part} for part in _parts(regions + whole, MAX_DEVICES)]
    return (*counter_slices, *(device_slices or [{}]))


class _CardView:
    """One card as the ledger has it, present or only owned."""

    def __init__(self, ledger: Ledger, card_id: CardId, driver: str, form: Form) -> None:
        self.id = card_id
        self.card: Card | None = ledger.cards.get(card_id)
        self._ledger = ledger
        self._driver = driver
        self._form = form
        self._present = {region.id for region in self.card.regions} if self.card else set()
        allocations = ledger.allocations_on(card_id)
        self._owned = {allocation.device for allocation in allocations}
        granted = {region for allocation in allocations for region in allocation.grants}
        self.regions: list[RegionId] = sorted(self._present | granted, key=device_order)

    def listed(self, advertise: Advertise) -> list[DeviceId]:
        """The devices of the card that are listed, regions first."""
        offered: set[DeviceId] = set()
        if self.card is not None and self.card.reprogrammable:
            if advertise in {Advertise.BOTH, Advertise.WHOLE}:
                offered.add(DeviceId(self.id))
            if advertise in {Advertise.BOTH, Advertise.REGION}:
                offered.update(map(DeviceId, self._present))
        owned = self._owned
        devices = [*map(DeviceId, self.regions), DeviceId(self.id)]
        listed = [one for one in devices if one in owned or one in offered]
        countable = self._form.counters and len(self.regions) <= MAX_CONSUMED * MAX_COUNTERS
        if self.mixed(listed) and not countable:
            # Nothing would keep them apart. What is owned stays, the smaller thing else.
            whole_owned = DeviceId(self.id) in owned
            listed = [one for one in listed if one in owned or not (whole_owned or is_card(one))]
        if not self._form.taints:
            listed = [one for one in listed if one in owned or not self._taints(one)]
        return listed

    def mixed(self, listed: Collection[DeviceId]) -> bool:
        """Whether the card stands among them beside its regions."""
        return len(listed) > 1 and DeviceId(self.id) in listed

    def counters(self) -> dict[str, list[str]]:
        """The counters that its devices share, one of each region, by counter set.

        A set has its card's name, a second one a suffix.
        """
        name = device_name(DeviceId(self.id))
        return {
            name if number == 0 else f"{name}-{number}": [_counter(region) for region in part]
            for number, part in enumerate(_parts(self.regions, MAX_COUNTERS))
        }

    def device(self, device: DeviceId, counters: Mapping[str, Collection[str]]) -> Spec:
        """A device, which takes one of each of its counters."""
        consumed, told = counters, attributes(device, self._interface(), self.card)
        if is_card(device):
            told |= {"regions": len(self.regions)}
        else:
            told |= {"afuID": ""}
            own = _counter(RegionId(device))
            consumed = {name: [own] for name, of in counters.items() if own in of}
        spec: Spec = {
            "name": device_name(device),
            "attributes": {name: as_json(value) for name, value in told.items()},
        }
        if consumed:
            spec["consumesCounters"] = [
                {"counterSet": name, "counters": _each(of)} for name, of in consumed.items()
            ]
        if self._form.taints and (taints := self._taints(device)):
            spec["taints"] = taints
        return spec

    def _interface(self) -> InterfaceId | None:
        """The present card's; of one that is gone, what its owners asked for."""
        if self.card is not None:
            return self.card.interface_id
        for allocation in self._ledger.allocations_on(self.id):
            if (resource := self._ledger.naming.resource(allocation.resource)) is not None:
                return resource.interface_id
        return None

    def _taints(self, device: DeviceId) -> list[Spec]:
        """The taints of a device; of one key and effect the most telling.

        An owned device has only those that no scrub mends, and the operator's: its owner keeps it,
        and after the owner's end no write has to come before the next claim.
        """
        ledger, found = self._ledger, dict[tuple[str, str], str]()
        owner = ledger.region_allocation(RegionId(device))  # its own, or its card's
        stuck = cannot_start(ledger, device)
        for one in ledger.obstacles.of(device):
            key, _, value = one.kind.taint.partition("=")
            if not key or not (owner is None or one.kind in _WHOEVER_OWNS_IT):
                continue
            failed = stuck and one.kind is ObstacleKind.FAULTED
            # By NoExecute the pods of its claim are deleted, so that their controllers make others.
            effect = "NoExecute" if failed else "NoSchedule"
            found.setdefault((f"{self._driver}/{key}", effect), value or _word(one.cause))
        return [
            {"key": key, "effect": effect} | ({"value": value} if value else {})
            for (key, effect), value in sorted(found.items())
        ]


def cannot_start(ledger: Ledger, device: DeviceId) -> bool:
    """Whether the pod that is to have a device will not start here, and is better elsewhere."""
    owner = ledger.region_allocation(RegionId(device))
    return (
        owner is not None
        and not owner.started
        and card_of(device) not in ledger.rebinding
        and any(one.kind is ObstacleKind.FAULTED for one in ledger.obstacles.of(device))
    )


def _each(counters: Iterable[str]) -> Spec:
    return {counter: {"value": "1"} for counter in counters}


def _counter(region: RegionId) -> str:
    """Of card `c`, region `c-p3`: `region-3`."""
    return f"region-{region.rpartition('-p')[2]}"


def _parts(things: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    for begin in range(0, len(things), size):
        yield things[begin : begin + size]


def _word(reason: str) -> str:
    """A taint's value: the word with which a reason begins (`thermal: ...`), if it is one."""
    match = _WORD.match(reason)
    return "" if match is None else match[0]
