"""How many transactions the journal has committed, in a file of its own beside it.

SQLite takes a write-ahead log that is lost, truncated or damaged for one that ends there: it opens
the database as it was some transactions ago, without an error, and each row of it makes sense. A
region that was programmed since reads as journalled clean then. So every transaction counts itself
in the journal, and after the commit here. A journal whose count is lower than this one lacks
transactions, and is treated like a damaged one (`fpga_plugin.ledger.salvage`).

The process may die between the two: then the journal is ahead, which is no loss. The file is not
synced, as the journal is not: after a reboot nothing that the journal says about conditions holds.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import structlog

log = structlog.get_logger()

_MODE: Final = 0o600
_LENGTH: Final = 21
"""Digits and a newline, always as many: a write changes one page and needs no room on the disk."""


class CommitCount:
    """`<state dir>/journal.commits`, one number.

    Attributes:
        path: the file.
        found: what it said when it was first read; None where it was missing or no number.
    """

    def __init__(self, path: str) -> None:
        """Read the file.

        Raises:
            OSError: it is there and cannot be read.
        """
        self.path = path
        self._failed = False
        self.found: int | None = None
        with suppress(FileNotFoundError), _opened(path, os.O_RDONLY) as file:
            os.fchmod(file, _MODE)
            self.found = _parsed(os.read(file, _LENGTH + 1))

    def write(self, count: int) -> None:
        """Say how many were committed; what keeps it from being said is logged once.

        The transaction stands: the next start then notices a loss only as far as the last number
        that could be written. The file is opened each time, as somebody may have removed it.
        """
        try:
            with _opened(self.path, os.O_WRONLY | os.O_CREAT) as file:
                os.pwrite(file, b"%0*d\n" % (_LENGTH - 1, count), 0)
        except OSError as error:
            if not self._failed:
                log.warning(
                    "the journal's commits cannot be counted",
                    file=self.path,
                    error=error.strerror,
                    hint="a lost write-ahead log would not be noticed: see why the file cannot be"
                    " written",
                )
            self._failed = True
        else:
            self._failed = False


@contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, _MODE)
    try:
        yield file
    finally:
        os.close(file)


def _parsed(raw: bytes) -> int | None:
    if len(raw) != _LENGTH or not raw.endswith(b"\n") or not raw[:-1].isdigit():
        return None
    return int(raw)
