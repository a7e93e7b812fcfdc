"""Reads the journal without writing to it, with or without a running plugin.

Opened read-only: nothing is made, moved aside or waited for. Who has what is what the plugin wrote
last.
"""

import os
import sqlite3
from contextlib import closing

from fpga_plugin.allocation.journal import rows
from fpga_plugin.allocation.journal.journal import JOURNAL_FILE, JournalError
from fpga_plugin.allocation.journal.records import Change


def peek(state_dir: str) -> Change:
    """What the journal of a state directory says; empty where there is none yet.

    Raises:
        JournalError: it cannot be read.
    """
    path = os.path.join(state_dir, JOURNAL_FILE)
    if not os.path.exists(path):
        return Change()
    # What was not folded in yet is read with the log, by its rules. Without a log SQLite would make
    # one to share with others, and cannot on a read-only mount: hence immutable.
    how = "mode=ro" if os.path.exists(f"{path}-wal") else "mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(f"file:{path}?{how}", uri=True, timeout=1.0)) as db:
            rows.check(db)
            loaded = rows.load(db)
        if loaded.wrong:
            raise ValueError(loaded.wrong)  # noqa: TRY301  # one error for all that keeps it from being read
    except (sqlite3.Error, ValueError) as error:
        raise JournalError(
            f"journal {path} cannot be read: {error}",
            hint="run this as the plugin's user; a damaged journal is set aside at the next start",
        ) from error
    return loaded.snapshot
