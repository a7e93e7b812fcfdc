"""What the daemon tells of itself: metrics, health, and who has what."""

from typing import Final

SOCKET: Final = "status.sock"
"""Name of the socket in the state directory."""
