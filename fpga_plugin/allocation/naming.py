"""A device's resource, and the function that a region may be handed over with.

A resource's name may use the alias of its interface id: `region-<alias>` in place of
`region-<id>`. The store's manifest gives the aliases, the operator says whether resources have them
(FPGA_PLUGIN_INTERFACE_ALIASES). Free devices are listed under one name at a time, the alias where
there is one. An allocation keeps the name under which it was granted, and so its place on that
list, for kubelet admits its pod again by it.

Cards of AMD's may be given out by the names that AMD's own plugin has for them
(FPGA_PLUGIN_XRT_SHELL_RESOURCES): one for each shell, of which each region is a device, in place of
both. Such a name is bound to its interface id as an alias is, by the card that has it.

The journal holds what an alias stands for: an allocation's resource has to mean the same interface
id for as long as the allocation lives, even if the manifest changes or the store does not answer.
So an alias that a pod has for one interface id is given to another only after that pod.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from fpga_plugin.allocation.journal.records import AliasBinding, Change, TenantImage
from fpga_plugin.allocation.names import (
    DELETE_THE_POD,
    card_of,
    function_name,
    is_card,
    is_function,
    is_shells,
    resource_names,
)
from fpga_plugin.allocation.state import State
from fpga_plugin.errors import RefusedError, UnknownDeviceError, quote
from fpga_plugin.hardware.model import Card
from fpga_plugin.ids import (
    AfuId,
    Alias,
    DeviceId,
    InterfaceId,
    RegionId,
    Resource,
    aliased_name,
    device_order,
    is_device_id,
    known_resource,
)
from fpga_plugin.kubernetes.names import ResourceName


class Naming:
    """The names of resources, and what they mean.

    Args:
        prefix: of resources.
        prefixes: for families of cards that have their own.
        functions: whether regions are handed over with the functions that are on them.
        shells: whether cards are given out by the names that their vendor's plugin has for them.
    """

    def __init__(
        self,
        state: State,
        *,
        prefix: str,
        prefixes: Mapping[str, str],
        functions: bool,
        shells: bool,
    ) -> None:
        self._state = state
        self.prefix = prefix
        self._prefixes = prefixes
        self.serves_functions = functions
        self._shells = shells

    def prefix_of(self, card: Card) -> str:
        """The domain of a card's resources."""
        return self._prefixes.get(card.family, self.prefix)

    @property
    def domains(self) -> frozenset[str]:
        """The domains of all resources."""
        return frozenset({self.prefix, *self._prefixes.values()})

    def keeps(self, region: RegionId) -> bool:
        """Whether a region keeps its image: nothing is programmed, not even a blank.

        The owner's resource decides; without an owner, how the node's cards are served. An image
        that came with a card's whole image always stays.
        """
        card = self._state.cards.get(card_of(region))
        if card is not None and not card.reprogrammable:
            return True
        allocation = self._state.region_allocation(region)
        return self.serves_functions if allocation is None else is_function(allocation.resource)

    def withheld(self, region: RegionId) -> bool:
        """Whether a region may hold an earlier tenant's image, or the present one's.

        A card that cannot be programmed holds none. Elsewhere only a blank removes it: an image
        chooses the id that it shows. It may differ from the file's, and may change.
        """
        return self._owners_image(region, self._state.images.get(region, ()))

    def _owners_image(self, region: RegionId, images: Collection[object]) -> bool:
        card = self._state.cards.get(card_of(region))
        return bool(images) and (card is None or card.reprogrammable)

    def function_resource(self, region: RegionId) -> ResourceName | None:
        """The resource of the preprogrammed function that a region may be handed over with.

        None if the region's image is unknown, or was programmed for an owner and not blanked since:
        an earlier tenant's image is no function.
        """
        afu_id = self._state.functions.get(region)
        card = self._state.cards.get(card_of(region))
        if afu_id is None or card is None or self.withheld(region):
            return None
        return function_name(self.prefix_of(card), card.interface_id, afu_id)

    def name_function(self, change: Change, region: RegionId, afu_id: AfuId) -> None:
        """A function that a region turned out to hold is a resource from now on."""
        card = self._state.cards.get(card_of(region))
        known = {TenantImage(region, one): True for one in self._state.images.get(region, ())}
        images = [one for one, on in (known | change.images).items() if on and one.region == region]
        if card is None or not self.serves_functions or self._owners_image(region, images):
            return
        name = function_name(self.prefix_of(card), card.interface_id, afu_id)
        if name not in self._state.resources:
            change.resources[name] = True

    def resources_of(self, card: Card) -> tuple[ResourceName, ResourceName | None]:
        """The resources under which a card's regions, and the whole card, are given out now."""
        if (name := self._vendors_name(card)) is not None:
            meaning = self._state.alias_bindings.get(name)
            if meaning == AliasBinding(card.interface_id, current=True):
                return name, None
        alias = self._state.aliases.get(card.interface_id)
        return resource_names(self.prefix_of(card), card.interface_id, alias)

    def _vendors_name(self, card: Card) -> ResourceName | None:
        named = self._shells and card.vendor_resource
        return ResourceName(card.vendor_resource) if named else None

    def name_card(self, change: Change, card: Card) -> None:
        """A card is found: from now on there are its resources.

        The name of the vendor's plugin is bound to the card's interface id, unless a pod or another
        card has it for another one: then the card is given out by its interface id.
        """
        names: set[ResourceName | None]
        name, meaning = self._vendors_name(card), AliasBinding(card.interface_id, current=True)
        if name is not None and self._may_mean(name, card.interface_id):
            if self._state.alias_bindings.get(name) != meaning:
                change.alias_bindings[name] = meaning
            names = {name}
        else:
            names = set(self.resources_of(card))
        change.resources |= {n: True for n in names if n and n not in self._state.resources}

    def _may_mean(self, name: ResourceName, interface_id: InterfaceId) -> bool:
        meaning = self._state.alias_bindings.get(name)
        return (
            meaning is None
            or meaning.interface_id == interface_id
            or not (
                any(each.resource == name for each in self._state.allocations.values())
                or any(name in self.resources_of(card) for card in self._state.cards.values())
            )
        )

    def lists(self, resource: Resource) -> bool:
        """Whether free regions or cards may be listed under a resource, or only owned ones."""
        if resource.shell:
            meaning = self._state.alias_bindings.get(ResourceName(resource.name))
            return self._shells and meaning is not None and meaning.current
        return (
            resource.domain in self.domains
            and resource.alias == self._state.aliases.get(resource.interface_id)
            and not self._by_shells_alone(resource.interface_id)
        )

    def _by_shells_alone(self, interface_id: InterfaceId) -> bool:
        cards = [c for c in self._state.cards.values() if c.interface_id == interface_id]
        if cards:
            return all(self.resources_of(card)[1] is None for card in cards)
        return any(
            is_shells(name) and meaning == AliasBinding(interface_id, current=True)
            for name, meaning in self._state.alias_bindings.items()
        )

    def resource(self, name: ResourceName) -> Resource | None:
        """Parse a resource's name; None: not this plugin's, or its alias is unknown.

        If the journal lost what an alias stood for, the card of an allocation shows it.
        """
        parts = aliased_name(name)
        if parts is None:
            return known_resource(name)
        if (meaning := self._state.alias_bindings.get(name)) is not None:
            return parts.of(meaning.interface_id)
        for allocation in self._state.allocations.values():
            card = self._state.cards.get(card_of(allocation.device))
            if allocation.resource == name and card is not None:
                return parts.of(card.interface_id)
        return None

    def named_resource(self, name: ResourceName) -> Resource:
        """The same, for the resource of an allocation.

        Raises:
            RefusedError: its alias is unknown.
        """
        if (resource := self.resource(name)) is None:
            raise RefusedError(
                f"nothing reports which interface id {name} stands for", hint=DELETE_THE_POD
            )
        return resource

    def device_resource(self, device: DeviceId) -> ResourceName | None:
        """A device's resource: its allocation's, else its card's."""
        if (allocation := self._state.allocations.get(device)) is not None:
            return allocation.resource
        return self.present_resource(device)

    def present_resource(self, device: DeviceId) -> ResourceName | None:
        """The resource under which a device would be given out now, owned or not."""
        card, whole = self._state.cards.get(card_of(device)), is_card(device)
        if card is None or not (whole or any(DeviceId(r.id) == device for r in card.regions)):
            return None
        if self.serves_functions:
            return None if whole else self.function_resource(RegionId(device))
        return self.resources_of(card)[whole] if card.reprogrammable else None

    def check_devices(self, resource: ResourceName, ids: Sequence[str]) -> tuple[DeviceId, ...]:
        """The devices of a call, in device order, each once.

        Raises:
            UnknownDeviceError: the resource has no such device.
        """
        for text in ids:
            if not is_device_id(text) or self.device_resource(DeviceId(text)) != resource:
                raise UnknownDeviceError(
                    f"{resource} has no device {quote(text)}",
                    hint="its card was removed, or never was on this node; " + DELETE_THE_POD,
                )
        return tuple(sorted(set(map(DeviceId, ids)), key=device_order))

    def call_interfaces(
        self, aliases: Mapping[InterfaceId, Alias]
    ) -> Mapping[InterfaceId, tuple[Alias, ResourceName]]:
        """List free devices of these interface ids by their aliases from now on.

        Those of other ids are listed by the id. May be repeated.

        Returns:
            The aliases not given, each with the resource that a pod still has for another id.

        Raises:
            JournalError: nothing has changed.
        """
        held = {allocation.resource for allocation in self._state.allocations.values()}
        waiting: dict[InterfaceId, tuple[Alias, ResourceName]] = {}
        meant: dict[ResourceName, InterfaceId] = {}
        domains = {self.prefix, *map(self.prefix_of, self._state.cards.values())}
        for interface_id, alias in aliases.items():
            named = [n for each in domains for n in resource_names(each, interface_id, alias)]
            others = [name for name in named if name in held and self._means(name) != interface_id]
            if others:
                waiting[interface_id] = (alias, others[0])
            else:
                meant |= dict.fromkeys(named, interface_id)
        known = self._state.alias_bindings
        bindings: dict[ResourceName, AliasBinding | None] = {
            name: replace(meaning, current=False) if name in held else None
            for name, meaning in known.items()
            if not is_shells(name)
        }
        bindings |= {name: AliasBinding(of, current=True) for name, of in meant.items()}
        change = Change(
            alias_bindings={name: now for name, now in bindings.items() if known.get(name) != now}
        )
        called = {interface_id: aliases[interface_id] for interface_id in meant.values()}
        for card in self._state.cards.values():
            by_shell = self.resources_of(card)[1] is None
            if card.reprogrammable and not by_shell and not self.serves_functions:
                names = resource_names(
                    self.prefix_of(card), card.interface_id, called.get(card.interface_id)
                )
                change.resources |= dict.fromkeys(set(names) - self._state.resources, True)
        self._state.commit(change)
        return waiting

    def _means(self, name: ResourceName) -> InterfaceId | None:
        return None if (known := self.resource(name)) is None else known.interface_id
