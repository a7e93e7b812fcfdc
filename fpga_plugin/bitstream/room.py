"""Memory for bitstreams where the disk takes no copy of them: a share of the pod's, and no more.

Each is an anonymous mapping, so that its memory goes back to the system when nobody uses it.
"""

import mmap
import threading
import weakref

from fpga_plugin.errors import StoreUnavailableError
from fpga_plugin.process.memory import memory_limit

SHARE = 2
"""All bitstreams that are held in memory may have this part of the limit: a half."""


class Room:
    """Gives out memory up to a limit. Thread-safe."""

    def __init__(self, limit: int | None = None) -> None:
        """Take nothing yet.

        Args:
            limit: bytes, of all together; None: by the memory limit of this process.
        """
        self._memory = memory_limit() if limit is None else limit * SHARE
        self.limit = self._memory // SHARE
        self._lock = threading.RLock()  # a garbage collection may give back while one takes
        self._held = 0

    def take(self, size: int, where: str, why: str) -> memoryview:
        """Memory of so many bytes, which is given back when the last view of it goes.

        Args:
            size: in bytes.
            where: the file that it is for, for the message.
            why: it has to be in memory, for the message.

        Raises:
            StoreUnavailableError: it would be too much.
        """
        with self._lock:
            if self._held + size > self.limit:
                held = f", and {self._held} are taken" if self._held else ""
                raise StoreUnavailableError(
                    f"{where}: its {size} bytes cannot be copied to the disk ({why}), and at most"
                    f" {self.limit} bytes are held in memory{held}: 1/{SHARE} of the limit"
                    f" of {self._memory}",
                    hint="make room in FPGA_PLUGIN_STATE_DIR, or raise the pod's memory limit",
                )
            self._held += size
        try:
            mapping = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except BaseException:
            self._give_back(size)
            raise
        weakref.finalize(mapping, self._give_back, size)
        return memoryview(mapping)[:size]

    def _give_back(self, size: int) -> None:
        with self._lock:
            self._held -= size
