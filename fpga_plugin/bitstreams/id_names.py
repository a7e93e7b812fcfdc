"""What the store's manifest calls ids, put beside them wherever words for people have one.

One place finds ids in a finished message by their digits, so that no message has to know of names.
The id stays, in brackets, since it names the file and the policy's rules. Ids inside something else
keep no name: a path, a resource's name, and what a message quotes of a tenant.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from fpga_plugin.bitstreams.manifest import Aliases, InterfaceAliases
from fpga_plugin.errors import FpgaPluginError, NotFinishedError
from fpga_plugin.ids import Alias, BitstreamId, InterfaceId, with_name

E = TypeVar("E", bound=FpgaPluginError)


_ID = re.compile(
    r"(?<!\w)'[^']*'(?!\w)|(?<![\w/.'(=-])([0-9a-f]{40}|[0-9a-f]{32})(?![\w/'=-])(?!\.\w)",
    re.ASCII,
)
"""What is quoted, as a whole; or an id that stands by itself, in the spelling of messages."""

_MOST = 3
"""Names of one bitstream id that are shown: each interface id may call it something else."""


@dataclass(frozen=True, slots=True)
class Names:
    """Of one manifest.

    Attributes:
        bitstreams: by interface id and name.
        interfaces: by interface id.
        counts: there is a manifest, and it may say so.
        by_id: what bitstreams are called, by interface id and bitstream id.
    """

    bitstreams: Aliases = field(default_factory=dict)
    interfaces: InterfaceAliases = field(default_factory=dict)
    counts: bool = False
    by_id: Mapping[tuple[InterfaceId, BitstreamId], Alias] = field(init=False, compare=False)
    _shown: Mapping[str, str] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        by_id: dict[tuple[InterfaceId, BitstreamId], Alias] = {}
        names: dict[str, list[str]] = {}
        for (interface_id, name), bitstream_id in self.bitstreams.items():
            by_id.setdefault((interface_id, bitstream_id), name)
            of_id = names.setdefault(bitstream_id, [])
            if name not in of_id and len(of_id) < _MOST:
                of_id.append(name)
        shown = {of: " / ".join(some) for of, some in names.items()}
        object.__setattr__(self, "by_id", by_id)
        object.__setattr__(self, "_shown", shown | dict(self.interfaces))

    def bitstream(self, interface_id: InterfaceId, bitstream_id: BitstreamId) -> str:
        """What a bitstream is called; empty: nothing."""
        return self.by_id.get((interface_id, bitstream_id), "")

    def put(self, text: str) -> str:
        """The same text with names beside the ids that have one."""
        return _ID.sub(lambda found: self._with_name(found[1]) if found[1] else found[0], text)

    def error(self, error: E) -> E:
        """The same error in these words; of work that goes on, itself."""
        return error if isinstance(error, NotFinishedError) else error.reworded(self.put)

    def _with_name(self, of: str) -> str:
        return with_name(of, self._shown.get(of, ""))
