"""What the store has, for people: each bitstream's name, size, and whether it would be programmed.

The store is read in a thread, at most every `FRESH` seconds. No caller waits longer than
`WAIT_SECONDS` for it: a store that hangs costs its names, not the status.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from fpga_plugin.bitstreams.manifest import InterfaceAliases
from fpga_plugin.bitstreams.reader import StoreReader
from fpga_plugin.bitstreams.store import StoreEntry
from fpga_plugin.errors import FpgaPluginError, quote
from fpga_plugin.ids import Alias, BitstreamId, InterfaceId
from fpga_plugin.observability.fresh import Fresh

FRESH: Final = 15.0
"""Seconds for which the store is not read again."""

WAIT_SECONDS: Final = 1.0
"""How long the status waits for the store; what was known before serves until it answers."""

MOST: Final = 1000
"""Bitstreams that are shown; the first by path."""

MOST_NAMES: Final = 3
"""Of bitstreams with one AFU id."""

_Aliases: TypeAlias = Mapping[tuple[InterfaceId, BitstreamId], Alias]

BLANK_NAME: Final = "blank"


@dataclass(frozen=True, slots=True)
class Listed:
    """A bitstream of the store.

    Attributes:
        interface_id: the directory that it is in.
        bitstream_id: what a pod asks for; empty for a blank bitstream.
        afu_id: what a port reads once it is programmed; empty where the file cannot be used.
        name: for people; foreign text, empty where it has none.
        size: in bytes; None where it could not be read.
        problem: why the plugin would not program it; empty where it would.
        examined: whether the plugin has verified it.
    """

    interface_id: str
    bitstream_id: str
    afu_id: str
    name: str
    size: int | None
    problem: str
    examined: bool


@dataclass(frozen=True, slots=True)
class _Store:
    """What is known of the store; nothing of one that cannot be read."""

    listed: tuple[Listed, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    interfaces: InterfaceAliases = field(default_factory=dict)


class Catalogue:
    """The store's bitstreams as status and page show them."""

    def __init__(self) -> None:
        self._store = Fresh(_Store(), seconds=FRESH, wait=WAIT_SECONDS)

    async def refresh(self, reader: StoreReader) -> None:
        """Read the store again, unless that was just done; returns in time, whatever it does."""
        await self._store.get(lambda: _read(reader))

    @property
    def listed(self) -> tuple[Listed, ...]:
        """The store's bitstreams, in order of path."""
        return self._store.last.listed

    def interface_alias(self, interface_id: InterfaceId) -> str:
        """What people call an interface id; empty where the store does not say."""
        return self._store.last.interfaces.get(interface_id, "")

    def name(self, afu_id: str) -> str:
        """What people call what a port shows; empty where the store does not say."""
        return self._store.last.names.get(afu_id, "")


async def _read(reader: StoreReader) -> _Store:
    try:
        entries = await reader.headers()
        names = await reader.names()
    except FpgaPluginError:
        return _Store()  # the log has said so; there is no bitstream to be named
    aliases = names.by_id
    listed = tuple(_listed(reader, entry, aliases) for entry in entries[:MOST])
    return _Store(listed, _names(entries, aliases), names.interfaces)


def _names(entries: Sequence[StoreEntry], aliases: _Aliases) -> Mapping[str, str]:
    """By AFU id; files that a port cannot tell apart share their names."""
    names: dict[str, list[str]] = {}
    for entry in entries:
        if entry.contents is not None:
            of_afu = names.setdefault(entry.contents.afu_id, [])
            name = BLANK_NAME if entry.blank else _name(entry, aliases)
            if name and name not in of_afu and len(of_afu) < MOST_NAMES:
                of_afu.append(name)
    return {afu_id: " / ".join(of_afu) for afu_id, of_afu in names.items()}


def _name(entry: StoreEntry, aliases: _Aliases) -> str:
    """Its name in the manifest; else its title in quotes, by which no pod can ask for it.

    The title is its accelerator's name in the file: who built that chose it.
    """
    if entry.interface_id is not None and entry.bitstream_id is not None:
        alias = aliases.get((entry.interface_id, entry.bitstream_id))
        if alias is not None:
            return alias
    return "" if entry.contents is None else quote(entry.contents.name)


def _listed(reader: StoreReader, entry: StoreEntry, aliases: _Aliases) -> Listed:
    verdict = reader.library.verdicts.get(reader.library.store.relative(entry.path))
    problem = entry.problem
    if problem is None and verdict is not None:
        problem = verdict.problem
    return Listed(
        interface_id=entry.interface_id or "",
        bitstream_id="" if entry.blank else entry.bitstream_id or "",
        afu_id=entry.contents.afu_id if entry.contents is not None else "",
        name=BLANK_NAME if entry.blank else _name(entry, aliases),
        size=entry.size,
        problem="" if problem is None else str(problem),
        examined=verdict is not None,
    )
