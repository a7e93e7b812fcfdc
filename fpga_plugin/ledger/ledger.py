"""The ledger: who has what, and what is on it. Pure state, no I/O but the journal's.

Every method is one step: it checks, and makes one change. What of it takes trust away holds at
once, what gives trust once it is written (`trust`): memory is never less strict than what a restart
would read. All methods belong to the event loop and take microseconds. What is advertised is
derived from the ledger by `lists`.

A claim is kept per device id. Ownership of a region follows from the claims on it and on its card;
condition is a fact of its own (docs/architecture.md, "Two facts for each region").

The steps come from three sides, each with modules of its own: kubelet (`claims`, `holders`),
hardware (`presence`), and the work on regions (`conditions`). What resources are called comes from
the store (`aliases`). `state` holds what they change.
"""

from fpga_plugin.ledger.aliases import InterfaceAliases
from fpga_plugin.ledger.conditions import Conditions
from fpga_plugin.ledger.holders import Holders
from fpga_plugin.ledger.names import (
    DELETE_THE_POD,
    MAY_COME_BACK,
    card_of,
    is_card,
    resource_names,
)
from fpga_plugin.ledger.presence import Presence

__all__ = ["DELETE_THE_POD", "MAY_COME_BACK", "Ledger", "card_of", "is_card", "resource_names"]


class Ledger(Holders, Presence, Conditions, InterfaceAliases):
    """See the module."""
