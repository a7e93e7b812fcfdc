"""What is on this node, for those who only look: `card list`, `card show`, FPGA_PLUGIN_OBSERVE.

One look reads the hardware, the store, the journal and kubelet's checkpoint. It needs no privilege,
writes nothing and works beside a running plugin, whose own view is `observability/view.py`.
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

from fpga_plugin.allocation.exposure import memory_state
from fpga_plugin.allocation.journal.journal import JournalError
from fpga_plugin.allocation.journal.peek import Peek, peek
from fpga_plugin.allocation.journal.records import Ownership
from fpga_plugin.allocation.names import FUNCTIONS_HINT, function_name, resource_names
from fpga_plugin.allocation.reconcile.foreign import entries_of, foreign_entries
from fpga_plugin.bitstreams.id_names import Names
from fpga_plugin.bitstreams.places import place_for
from fpga_plugin.bitstreams.store import Store
from fpga_plugin.bitstreams.trust import Trust
from fpga_plugin.build import exposure, names_interfaces, names_shells, open_hardware, open_trust
from fpga_plugin.cards.blanks import VENDORS, WITHOUT
from fpga_plugin.errors import BitstreamNotFoundError, FpgaPluginError
from fpga_plugin.hardware.backend import Backend
from fpga_plugin.hardware.image import Image
from fpga_plugin.hardware.model import Card, CardProblem, PciFunction, Region
from fpga_plugin.ids import AfuId, Alias, InterfaceId, ours
from fpga_plugin.kubernetes.kubelet.checkpoint import (
    FILE_NAME,
    Checkpoint,
    CheckpointEntry,
    read_checkpoint,
)
from fpga_plugin.kubernetes.names import ResourceName
from fpga_plugin.observability.schema import FunctionView
from fpga_plugin.settings.settings import Advertise, ScrubPolicy, Settings


@dataclass(frozen=True, slots=True)
class NodeRegion:
    """One region.

    Attributes:
        region: as the hardware shows it.
        afu_id: what is on it; empty where it cannot be read.
        afu_error: why it cannot be read; else empty.
        ownership: FREE, CLAIMED or STARTED by the journal; empty where that cannot be read.
        condition: by the journal; empty where it does not know the region.
        reason: why it is in this condition; may be empty.
        in_use: the journal or kubelet's checkpoint says that a pod has it, or its card.
    """

    region: Region
    afu_id: str
    afu_error: str
    ownership: str
    condition: str
    reason: str
    in_use: bool


@dataclass(frozen=True, slots=True)
class NodeCard:
    """One card.

    Attributes:
        card: as the hardware shows it.
        left_alone: why the plugin would not serve it; empty where it would.
        alias: what the store's manifest calls its interface id.
        memory: how it stands with what earlier tenants left in its memory, by the journal;
            `not known` where the journal has nothing of the card.
        exposed: what is refused of the card because it exposes data, and why; empty: nothing.
        no_blank: why its regions cannot be blanked; empty where they can, or need not be.
        without_blank: what becomes of them then.
        foreign: what pods hold of it that another plugin gave them.
        regions: in the order of their ports.
    """

    card: Card
    left_alone: str
    alias: Alias | None
    memory: str
    exposed: str
    no_blank: str
    without_blank: str
    foreign: tuple[CheckpointEntry, ...]
    regions: tuple[NodeRegion, ...]


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Everything.

    Attributes:
        cards: in the order of their addresses.
        problems: cards that cannot be served.
        aliases: what the store's manifest calls bitstreams, by interface id and bitstream id.
        journal_error: why the journal cannot be read; else empty.
        checkpoint_error: why kubelet's checkpoint cannot be read; else empty.
    """

    cards: tuple[NodeCard, ...]
    problems: tuple[CardProblem, ...]
    aliases: Mapping[tuple[str, str], Alias]
    journal_error: str
    checkpoint_error: str


def look(settings: Settings) -> NodeFacts:
    """Look at the node; blocks while it reads.

    Raises:
        FpgaPluginError: the hardware cannot be looked at.
    """
    backend = open_hardware(settings, owner=False).backend
    inventory = backend.scan()
    journal, journal_error = _journal(settings)
    checkpoint, checkpoint_error = _checkpoint(settings)
    foreign = foreign_entries(checkpoint)
    held: set[str] = {device for entry in checkpoint.entries for device in entry.devices}
    if journal is not None:
        held |= journal.owners.keys()
    cards = sorted(inventory.cards.values(), key=lambda card: card.address)
    held_by_others = {card.id: entries_of(card, foreign) for card in cards}
    left_alone = {c.id: _left_alone(settings, c, held_by_others[c.id]) for c in cards}
    # Elsewhere none is needed.
    blanks = settings.advertise is not Advertise.AF
    blanked = [card for card in cards if blanks and not left_alone[card.id]]
    trust = open_trust(settings, owner=False)
    names = Names()
    with contextlib.suppress(FpgaPluginError):  # nothing of such a store is used, as is reported
        names = trust.names()
    store = Store(settings.bitstream_dir)
    no_blank = _no_blank(store, trust, {card.interface_id: card.takes for card in blanked})
    exposed = exposure(settings)
    return NodeFacts(
        cards=tuple(
            NodeCard(
                card=card,
                left_alone=left_alone[card.id],
                alias=names.interfaces.get(card.interface_id),
                memory=_memory(card, journal),
                exposed=exposed.note(card),
                no_blank=no_blank[card.interface_id] if card in blanked else "",
                without_blank="its regions would only be reset, and given out (best-effort)"
                if settings.scrub is ScrubPolicy.BEST_EFFORT
                else f"its regions would be Unhealthy; {VENDORS}; {WITHOUT}",
                foreign=held_by_others[card.id],
                regions=tuple(
                    _region(backend, region, journal, in_use=bool(held & {region.id, card.id}))
                    for region in card.regions
                ),
            )
            for card in cards
        ),
        problems=tuple(inventory.problems.values()),
        aliases=dict(names.by_id.items()),
        journal_error=journal_error,
        checkpoint_error=checkpoint_error,
    )


def resources(settings: Settings, seen: NodeCard) -> tuple[ResourceName, ...]:
    """The resources under which a card, or something of it, would be advertised."""
    prefix = settings.prefix_of(seen.card.family)
    if settings.advertise is not Advertise.AF:
        if not seen.card.reprogrammable:
            return ()
        if names_shells(settings) and seen.card.vendor_resource:
            return (ResourceName(seen.card.vendor_resource),)
        alias = seen.alias if names_interfaces(settings) else None
        return resource_names(prefix, seen.card, alias)
    found = {AfuId(each.afu_id) for each in seen.regions if each.afu_id}
    return tuple(function_name(prefix, seen.card, one) for one in sorted(found))


def function_view(one: PciFunction) -> FunctionView:
    """A PCI function as it is shown."""
    return {
        "address": str(one.address),
        "role": one.role,
        "driver": one.driver,
        "group": one.group,
        "translation": one.translation,
    }


def _left_alone(settings: Settings, card: Card, foreign: tuple[CheckpointEntry, ...]) -> str:
    """Why the plugin would not serve a card; names no pod, as the text may go to others."""
    if not settings.cards.selects(card.id):
        return "FPGA_PLUGIN_CARDS leaves it out"
    if foreign:
        return "another plugin's pods have devices of it (docs/migration.md)"
    if not card.reprogrammable and settings.advertise is not Advertise.AF:
        return f"it cannot be reprogrammed: {FUNCTIONS_HINT}"
    return ""


def _journal(settings: Settings) -> tuple[Peek | None, str]:
    try:
        return peek(settings.state_dir), ""
    except JournalError as error:
        return None, str(error)


def _checkpoint(settings: Settings) -> tuple[Checkpoint, str]:
    try:
        path = os.path.join(settings.kubelet_dir, FILE_NAME)
        return read_checkpoint(path, ours(settings.resource_prefix)), ""
    except FpgaPluginError as error:
        return Checkpoint(), str(error)


def _no_blank(
    store: Store, trust: Trust, wanted: Mapping[InterfaceId, type[Image]]
) -> Mapping[InterfaceId, str]:
    """Why there is no blank bitstream to use, for each interface id; empty where there is one.

    Args:
        store: which has to have one.
        trust: of the store.
        wanted: by interface id what its cards' driver reads.
    """
    reasons: dict[InterfaceId, str] = {}
    for interface_id, takes in wanted.items():
        place = place_for(interface_id, None, takes)
        try:
            store.check(place)
            trust.check_file(place.path)
            reasons[interface_id] = ""
        except BitstreamNotFoundError:
            reasons[interface_id] = f"no blank bitstream at {store.at(place)}"
        except FpgaPluginError as error:
            reasons[interface_id] = str(error)
    return reasons


def _memory(card: Card, journal: Peek | None) -> str:
    """What the journal says of a card's memory; one that no plugin has served has no entry."""
    if card.never_cleared:
        return memory_state(card, pending=False)
    if journal is None or not any(one.id in journal.conditions for one in card.regions):
        return "not known"
    return memory_state(card, pending=card.id in journal.memory_clear_pending)


def _region(backend: Backend, region: Region, journal: Peek | None, *, in_use: bool) -> NodeRegion:
    afu_id, afu_error = "", ""
    try:
        afu_id = backend.afu_id(region)
    except FpgaPluginError as error:
        afu_error = error.message
    ownership, condition, reason = "", "", ""
    if journal is not None:
        owners = journal.owners
        ownership = owners.get(region.id) or owners.get(region.card) or Ownership.FREE
        condition, reason = journal.conditions.get(region.id, ("", ""))
    return NodeRegion(region, afu_id, afu_error, ownership, condition, reason, in_use)
