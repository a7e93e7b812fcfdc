"""Who has what: the ledger, its journal, and what is advertised from it."""
