"""A journal for tests of the ledger alone."""

from fpga_plugin.allocation.journal.records import Change


class NoJournal:
    """`JournalWriter` that writes nothing."""

    def write(self, change: Change) -> None:
        """Forget the change."""
