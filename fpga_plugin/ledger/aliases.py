"""Resources by what people call their interface id: `region-<alias>` in place of `region-<id>`.

The store's manifest gives the aliases, the operator says whether resources have them
(FPGA_PLUGIN_INTERFACE_ALIASES). Free devices are listed under one name at a time, the alias where
there is one. A claim keeps the name under which it was granted, and so its place on that list, for
kubelet admits its pod again by it.

What an alias stands for is in the journal: a claim's resource has to mean the same interface id for
as long as the claim lives, whatever the manifest says by then, and while the store does not answer.
So an alias that some pod has for one interface id is given to another only after that pod.
"""

from collections.abc import Mapping
from dataclasses import replace

from fpga_plugin.ids import Alias, InterfaceId, ResourceName
from fpga_plugin.ledger.names import interface_names
from fpga_plugin.ledger.records import Change, Meaning
from fpga_plugin.ledger.state import LedgerState


class InterfaceAliases(LedgerState):
    """The ledger's steps on the side of the store's manifest."""

    def call_interfaces(
        self, aliases: Mapping[InterfaceId, Alias]
    ) -> Mapping[InterfaceId, tuple[Alias, ResourceName]]:
        """From now on free devices of these interface ids are listed by their aliases.

        Those of other ids are listed by the id. May be repeated.

        Returns:
            What could not be given, each with the resource that a pod still has for another id.

        Raises:
            JournalError: nothing has changed.
        """
        held = {claim.resource for claim in self.claims.values()}
        waiting: dict[InterfaceId, tuple[Alias, ResourceName]] = {}
        meant: dict[ResourceName, InterfaceId] = {}
        for interface_id, alias in aliases.items():
            names = interface_names(self._prefix, interface_id, alias)
            others = [name for name in names if name in held and self._means(name) != interface_id]
            if others:
                waiting[interface_id] = (alias, others[0])
            else:
                meant |= dict.fromkeys(names, interface_id)
        change = Change()
        for name, meaning in self.meanings.items():
            if name not in meant:
                kept = replace(meaning, current=False) if name in held else None
                if kept != meaning:
                    change.meanings[name] = kept
        for name, interface_id in meant.items():
            if self.meanings.get(name) != (meaning := Meaning(interface_id, current=True)):
                change.meanings[name] = meaning
        called = {interface_id: aliases[interface_id] for interface_id in meant.values()}
        for card in self.cards.values():
            if card.reprogrammable and not self.serves_functions:
                names = interface_names(
                    self._prefix, card.interface_id, called.get(card.interface_id)
                )
                change.resources |= dict.fromkeys(set(names) - self.resources, True)
        self._commit(change)
        return waiting

    def _means(self, name: ResourceName) -> InterfaceId | None:
        return None if (known := self.resource(name)) is None else known.interface_id
