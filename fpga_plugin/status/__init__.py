"""What the daemon tells of itself: metrics, health, and who has what."""

from typing import Final

SOCKET: Final = "status.sock"
"""In the state directory (DESIGN.md section 11)."""
