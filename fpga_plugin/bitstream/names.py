"""What the store's manifest calls ids, put beside them wherever words for people have one.

In one place, so that no message has to know of names: an id is told by its digits. The id stays,
in brackets, since it names the file and what the policy is asked about. Left alone are ids that are
part of something else, such as a path or a resource's name, and what a message quotes of a tenant.
"""

import re
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from fpga_plugin.bitstream.manifest import Aliases, InterfaceAliases
from fpga_plugin.errors import FpgaPluginError, NotFinishedError
from fpga_plugin.ids import BitstreamId, InterfaceId

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
    """

    bitstreams: Aliases = field(default_factory=dict)
    interfaces: InterfaceAliases = field(default_factory=dict)

    def bitstream(self, interface_id: InterfaceId, bitstream_id: BitstreamId) -> str:
        """What a bitstream is called; empty: nothing."""
        wanted = (interface_id, bitstream_id)
        found = (name for (of, name), id_ in self.bitstreams.items() if (of, id_) == wanted)
        return next(found, "")

    def put(self, text: str) -> str:
        """The same text with names beside the ids that have one."""
        return _ID.sub(lambda found: self._with_name(found[1]) if found[1] else found[0], text)

    def error(self, error: E) -> E:
        """The same error in these words; of work that goes on, itself."""
        return error if isinstance(error, NotFinishedError) else error.reworded(self.put)

    def _with_name(self, of: str) -> str:
        name = self.interfaces.get(InterfaceId(of), "")
        if not name:
            names = dict.fromkeys(each for (_, each), id_ in self.bitstreams.items() if id_ == of)
            name = " / ".join(islice(names, _MOST))
        return f"{name} ({of})" if name else of
