"""What is advertised, derived from the ledger by the table in docs/architecture.md.

Every small change asks for lists of a thousand devices. So each card's share is kept, and only a
changed share is derived again. An unchanged list stays the same object: most changes of the ledger
change no list, and noticing that must not need a comparison of a thousand devices.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fpga_plugin.allocation.journal.records import CardMode
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.names import card_of
from fpga_plugin.allocation.obstacles import Stops
from fpga_plugin.hardware.model import Card
from fpga_plugin.ids import CardId, DeviceId, ResourceKind, device_order
from fpga_plugin.kubernetes.names import ResourceName
from fpga_plugin.settings.settings import Advertise


@dataclass(frozen=True, slots=True)
class AdvertisedDevice:
    """What the plugin sends kubelet about a device: one entry of a resource's list.

    Attributes:
        id: card or region.
        healthy: whether kubelet may give it to a pod.
        numa_node: None where the kernel does not know it.
    """

    id: DeviceId
    healthy: bool
    numa_node: int | None


class DeviceLists:
    """The device list of each resource."""

    def __init__(self, ledger: Ledger, *, advertise: Advertise) -> None:
        self._ledger = ledger
        self._shares: dict[CardId, dict[ResourceName, tuple[AdvertisedDevice, ...]]] = {}
        self._stale: set[CardId] = set(ledger.cards) | {card_of(d) for d in ledger.allocations}
        self._kinds = {
            Advertise.BOTH: frozenset({ResourceKind.REGION, ResourceKind.WHOLE}),
            Advertise.REGION: frozenset({ResourceKind.REGION}),
            Advertise.WHOLE: frozenset({ResourceKind.WHOLE}),
            Advertise.AF: frozenset({ResourceKind.AF}),
        }[advertise]
        self._lists: dict[ResourceName, tuple[AdvertisedDevice, ...]] = {}
        self._registered: set[ResourceName] = set()
        ledger.subscribe(self._changed)

    def _changed(self, card: CardId | None) -> None:
        if card is not None:
            self._stale.add(card)

    def subscribe(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed` after every change of resources or lists; returns how to stop that."""
        return self._ledger.subscribe(lambda _: changed())

    def resources(self) -> tuple[ResourceName, ...]:
        """The resources to register; asked at each change.

        A resource may be of a kind that FPGA_PLUGIN_ADVERTISE leaves out, have another prefix, or
        another name than its interface id has now (`ledger.aliases`). Such a resource is registered
        only if it has an allocation, so that kubelet re-admits its pods, or if it was registered in
        this run.

        Derives no list: kubelet waits for its Allocate meanwhile.
        """
        self._registered |= {one.resource for one in self._ledger.allocations.values()}
        self._registered |= set(filter(self._wanted, self._ledger.resources - self._registered))
        return tuple(sorted(self._registered))

    def _wanted(self, name: ResourceName) -> bool:
        resource = self._ledger.naming.resource(name)
        if resource is None or not (resource.shell or resource.kind in self._kinds):
            return False
        if resource.kind is ResourceKind.AF:
            return resource.domain in self._ledger.naming.domains
        return self._ledger.naming.lists(resource)

    def devices(self, resource: ResourceName) -> tuple[AdvertisedDevice, ...]:
        """One resource's list, in device order."""
        for card in self._stale:
            self._renew(card)
        self._stale.clear()
        if (known := self._lists.get(resource)) is not None:
            return known
        listed: list[AdvertisedDevice] = []
        for card in sorted(self._shares, key=device_order):
            listed += self._shares[card].get(resource, ())
        self._lists[resource] = tuple(listed)
        return self._lists[resource]

    def _renew(self, card: CardId) -> None:
        """Derive a card's share again, and forget the lists that it changes."""
        before, share = self._shares.get(card, {}), self._share(card)
        for resource in before.keys() | share.keys():
            if before.get(resource) != share.get(resource):
                self._lists.pop(resource, None)
        self._shares[card] = share

    def _share(self, card_id: CardId) -> dict[ResourceName, tuple[AdvertisedDevice, ...]]:
        ledger, card = self._ledger, self._ledger.cards.get(card_id)
        numa = None if card is None else card.numa_node
        entries = [(c.resource, c.device, Stops.OWNER) for c in ledger.allocations_on(card_id)]
        if card is not None and card_id not in ledger.drained:
            entries += [(name, device, Stops.OFFER) for device, name in self._free(card)]
        listed: defaultdict[ResourceName, list[AdvertisedDevice]] = defaultdict(list)
        for resource, device, what in sorted(entries, key=lambda entry: device_order(entry[1])):
            healthy = ledger.obstacles.first(device, what) is None
            listed[resource].append(AdvertisedDevice(device, healthy, numa))
        return {resource: tuple(devices) for resource, devices in listed.items()}

    def _free(self, card: Card) -> Iterator[tuple[DeviceId, ResourceName]]:
        """A card's devices without an owner, with the resource by which pods may ask for them."""
        ledger, mode = self._ledger, self._ledger.mode(card.id)
        devices = [] if mode is CardMode.WHOLE else [DeviceId(each.id) for each in card.regions]
        if mode is CardMode.FREE:
            devices.append(DeviceId(card.id))
        for device in devices:
            name = None if device in ledger.allocations else ledger.naming.present_resource(device)
            if name is not None and self._wanted(name):
                yield device, name
