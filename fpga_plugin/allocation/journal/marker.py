"""The marker: what served this kubelet last, and how far its journal had come.

SQLite takes a write-ahead log that is lost, truncated or damaged for one that ends there: it opens
the database as it was some transactions ago, without an error, and each row of it makes sense. So
does a state directory that was put back from a copy, or another one. A region that was programmed
since reads as journalled clean then. So each journal has an id, and every transaction counts itself
in the journal, and after the commit here: beside the lock below kubelet's directory, which does not
travel with the state directory. What that says of a journal, `journal` says.

The process may die between commit and count: then the journal is ahead, which is no loss. The file
is not synced, as the journal is not: after a reboot nothing that the journal says about conditions
holds.
"""

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import structlog

from fpga_plugin.host.atomic_file import replace_file
from fpga_plugin.settings.values import ServedApi

log = structlog.get_logger()

MARKER_FILE: Final = "marker"
"""In `<kubelet dir>/fpga-plugin`."""

_DIGITS: Final = 20
"""Of the count, in a line of its own: a write changes one page and needs no room on the disk."""

_MAX_LENGTH: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Served:
    """How a run of the plugin served kubelet.

    Attributes:
        api: `device-plugin` or `dra` (FPGA_PLUGIN_MODE).
        state_dir: where its journal was.
        journal: the journal's id.
        claims: ResourceClaims may have devices, by this API or an earlier one: their end was not
            seen in the journal.
        boot: of the node, in which it did; empty: not known.
    """

    api: str = ""
    state_dir: str = ""
    journal: str = ""
    claims: bool = False
    boot: str = ""


class Marker:
    """`<kubelet dir>/fpga-plugin/marker`: a line with the count, and one with the rest.

    Attributes:
        path: the file.
        last: what served last; None where that is not known.
        counted: how many transactions its journal had committed by then.
    """

    def __init__(self, path: str, now: Served = Served()) -> None:  # it is frozen
        """Read the file; `now` is what serves from now on, but for the journal's id."""
        self.path = path
        self.last: Served | None = None
        self.counted = 0
        self._now = now
        self._failed = False
        with suppress(OSError, ValueError), open(path, "rb", opener=_open) as file:
            count, _, rest = os.read(file.fileno(), _MAX_LENGTH).partition(b"\n")
            if len(count) == _DIGITS and count.isdigit():  # else no plugin wrote it
                self.last, self.counted = _DECODER.decode(rest), int(count)

    @property
    def served_otherwise(self) -> bool:
        """Whether another API served last, or nobody knows what did."""
        return self.last is None or self.last.api != self._now.api

    @property
    def left_dra(self) -> bool:
        """Whether DRA served last, and does not now."""
        return (self.last or Served()).api == ServedApi.DRA.value != self._now.api

    @property
    def boot(self) -> str:
        """The boot in which the plugin served last; where nobody knows, this one."""
        return (self.last or Served()).boot or self._now.boot

    @property
    def may_have_claims(self) -> bool:
        """Whether ResourceClaims may have devices that a journal in doubt lacks."""
        last = self.last or Served()
        # With DRA, too: the plugin may end before it reads kubelet's record of them.
        return last.claims or ServedApi.DRA.value in {last.api, self._now.api}

    def begin(self, journal: str, count: int, *, claims: bool) -> None:
        """From now on this life serves, with this journal; `claims` as in `Served`."""
        self._now = replace(self._now, journal=journal, claims=claims)
        self.count(count, whole=True)

    def count(self, count: int, *, whole: bool = False) -> None:
        """The journal has committed so many transactions.

        What keeps it from being written is logged once; the transaction stands.

        Args:
            count: how many.
            whole: write all of it: somebody may have put another file in its place.
        """
        line = b"%0*d\n" % (_DIGITS, count)
        try:
            if whole or not os.path.lexists(self.path):
                replace_file(self.path, [line, _ENCODER.encode(self._now), b"\n"])
            else:  # opened each time, as somebody may have removed it
                with open(self.path, "r+b", buffering=0, opener=_open) as file:
                    os.pwrite(file.fileno(), line, 0)
        except OSError as error:
            if not self._failed:
                log.warning(
                    "the journal's marker cannot be written",
                    file=self.path,
                    error=error.strerror,
                    hint="the next start doubts the journal, and scrubs every region that nobody"
                    " owns: see why the file cannot be written",
                )
            self._failed = True
        else:
            self._failed = False


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


# Made at import: see kubernetes/kubelet/checkpoint.py.
_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(Served)
