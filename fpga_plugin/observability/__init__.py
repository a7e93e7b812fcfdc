"""Status, metrics and health of the running daemon, and what is on a node."""

from typing import Final

SOCKET: Final = "status.sock"
"""Name of the socket in the state directory."""
