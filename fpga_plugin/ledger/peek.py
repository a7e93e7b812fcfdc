"""What the journal says to whoever only looks, beside a running plugin or without one.

Opened read-only: nothing is made, moved aside or waited for. Who has what is what the plugin wrote
last.
"""

import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field

from fpga_plugin.ledger.journal import JOURNAL_FILE, JournalError
from fpga_plugin.ledger.records import Ownership


@dataclass(frozen=True, slots=True)
class Peek:
    """Ids are as they are written there, unchecked.

    Attributes:
        owners: CLAIMED or STARTED, by the device that is claimed.
        conditions: condition and reason, by region.
    """

    owners: Mapping[str, str] = field(default_factory=dict)
    conditions: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def peek(state_dir: str) -> Peek:
    """Look into the journal of a state directory; empty where there is none yet.

    Raises:
        JournalError: it cannot be read.
    """
    path = os.path.join(state_dir, JOURNAL_FILE)
    if not os.path.exists(path):
        return Peek()
    # What was not folded in yet is read with the log, by its rules. Without a log SQLite would make
    # one to share with others, and cannot on a read-only mount: hence immutable.
    how = "mode=ro" if os.path.exists(f"{path}-wal") else "mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(f"file:{path}?{how}", uri=True, timeout=1.0)) as db:
            claims = db.execute("SELECT device, started FROM claims").fetchall()
            regions = db.execute("SELECT region, condition, reason FROM regions").fetchall()
    except sqlite3.Error as error:
        raise JournalError(
            f"journal {path} cannot be read: {error}",
            hint="run this as the plugin's user; a damaged journal is set aside at the next start",
        ) from error
    return Peek(
        {device: Ownership.STARTED if started else Ownership.CLAIMED for device, started in claims},
        {region: (condition, reason) for region, condition, reason in regions},
    )
