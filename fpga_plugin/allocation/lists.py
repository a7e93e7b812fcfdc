"""What is advertised, derived from the ledger by the table in docs/architecture.md.

Every small change asks for lists of a thousand devices. So each card's share is kept, and only a
changed share is derived again. An unchanged list stays the same object: most changes of the ledger
change no list, and noticing that must not need a comparison of a thousand devices.
"""

from collections.abc import Callable, Iterator

from fpga_plugin.allocation.devices import AdvertisedDevice
from fpga_plugin.allocation.journal.records import CardMode
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.names import card_of
from fpga_plugin.allocation.obstacles import Stops
from fpga_plugin.hardware.model import Card
from fpga_plugin.ids import CardId, DeviceId, ResourceKind, device_order
from fpga_plugin.kubernetes.names import ResourceName
from fpga_plugin.settings.settings import Advertise


class DeviceLists:
    """The device list of each resource."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        advertise: Advertise,
    ) -> None:
        self._ledger = ledger
        self._shares: dict[CardId, dict[ResourceName, tuple[AdvertisedDevice, ...]]] = {}
        self._stale: set[CardId] = set(ledger.cards) | {card_of(d) for d in ledger.allocations}
        self._order: list[CardId] | None = None
        self._kinds = {
            Advertise.BOTH: frozenset({ResourceKind.REGION, ResourceKind.WHOLE}),
            Advertise.REGION: frozenset({ResourceKind.REGION}),
            Advertise.WHOLE: frozenset({ResourceKind.WHOLE}),
            Advertise.AF: frozenset({ResourceKind.AF}),
        }[advertise]
        self._lists: dict[ResourceName, tuple[AdvertisedDevice, ...]] = {}
        # Resources that had an allocation in this run.
        self._owned: set[ResourceName] = {c.resource for c in ledger.allocations.values()}
        self._registered: tuple[ResourceName, ...] = ()
        self._counted = (0, 0, 0)
        ledger.subscribe(self._changed)

    def _changed(self, card: CardId | None) -> None:
        if card is not None:
            self._stale.add(card)
            self._owned.update(
                allocation.resource for allocation in self._ledger.allocations_on(card)
            )

    def subscribe(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed` after every change of resources or lists; returns how to stop that."""
        return self._ledger.subscribe(lambda _: changed())

    def resources(self) -> tuple[ResourceName, ...]:
        """The resources to register.

        A resource may be of a kind that FPGA_PLUGIN_ADVERTISE leaves out, have another prefix, or
        another name than its interface id has now (`ledger.aliases`). Such a resource is registered
        only if it has, or had in this run, an allocation, so that kubelet re-admits its pods, or if
        it was registered in this run.

        Derives no list: kubelet waits for its Allocate meanwhile.
        """
        ledger = self._ledger
        counted = (len(ledger.resources), len(self._owned), ledger.renamed)  # all only grow
        if counted != self._counted:
            self._counted = counted
            self._registered = tuple(
                name
                for name in sorted(ledger.resources | self._owned)
                if self._wanted(name) or name in self._owned or name in self._registered
            )
        return self._registered

    def _wanted(self, name: ResourceName) -> bool:
        resource = self._ledger.naming.resource(name)
        if resource is None or not (resource.shell or resource.kind in self._kinds):
            return False
        if resource.kind is ResourceKind.AF:
            return resource.domain in self._ledger.naming.domains
        return self._ledger.naming.lists(resource)

    def devices(self, resource: ResourceName) -> tuple[AdvertisedDevice, ...]:
        """One resource's list, in device order."""
        self._renew()
        if (known := self._lists.get(resource)) is not None:
            return known
        if self._order is None:
            self._order = sorted(self._shares, key=device_order)
        listed: list[AdvertisedDevice] = []
        for card in self._order:
            listed += self._shares[card].get(resource, ())
        self._lists[resource] = tuple(listed)
        return self._lists[resource]

    def _renew(self) -> None:
        """Derive again what changed."""
        for card in self._stale:
            self._renew_card(card)
        self._stale.clear()

    def _renew_card(self, card: CardId) -> None:
        """Derive a card's share again, and forget the lists that it changes."""
        before, share = self._shares.get(card, {}), self._share(card)
        for resource in before.keys() | share.keys():
            if before.get(resource) != share.get(resource):
                self._lists.pop(resource, None)
        if bool(before) != bool(share):
            self._order = None
        if share:
            self._shares[card] = share
        else:
            self._shares.pop(card, None)

    def _share(self, card_id: CardId) -> dict[ResourceName, tuple[AdvertisedDevice, ...]]:
        ledger = self._ledger
        card = ledger.cards.get(card_id)
        listed: dict[ResourceName, dict[DeviceId, AdvertisedDevice]] = {}
        numa = None if card is None else card.numa_node
        for allocation in ledger.allocations_on(card_id):
            listed.setdefault(allocation.resource, {})[allocation.device] = AdvertisedDevice(
                allocation.device, self._healthy(allocation.device, Stops.OWNER), numa
            )
        if card is not None and card_id not in ledger.drained:
            for resource, device in self._free(card):
                listed.setdefault(resource, {})[device.id] = device
        return {
            resource: tuple(devices[d] for d in sorted(devices, key=device_order))
            for resource, devices in listed.items()
        }

    def _free(self, card: Card) -> Iterator[tuple[ResourceName, AdvertisedDevice]]:
        """A card's devices without an owner, by the resource under which pods may ask for them."""
        ledger, mode, numa = self._ledger, self._ledger.mode(card.id), card.numa_node
        free = [region for region in card.regions if DeviceId(region.id) not in ledger.allocations]
        if ResourceKind.AF in self._kinds:
            for region in free if mode is not CardMode.WHOLE else ():
                if (resource := ledger.naming.function_resource(region.id)) is not None:
                    device = DeviceId(region.id)
                    healthy = self._healthy(device, Stops.OFFER)
                    yield resource, AdvertisedDevice(device, healthy, numa)
            return
        if not card.reprogrammable:
            return
        of_regions, of_card = ledger.naming.resources_of(card)
        if mode is not CardMode.WHOLE and self._wanted(of_regions):
            for region in free:
                device = DeviceId(region.id)
                healthy = self._healthy(device, Stops.OFFER)
                yield of_regions, AdvertisedDevice(device, healthy, numa)
        if mode is CardMode.FREE and of_card is not None and self._wanted(of_card):
            whole = DeviceId(card.id)
            yield of_card, AdvertisedDevice(whole, self._healthy(whole, Stops.OFFER), numa)

    def _healthy(self, device: DeviceId, what: Stops) -> bool:
        return self._ledger.obstacles.first(device, what) is None
