"""Tells the event loop when simulated cards come, go, or report trouble: inotify in udev's place.

No polling and no thread: inotify's descriptor is one more that the loop waits for. An event is only
a hint, as it is with real cards: its receiver looks at the card, and looking is what plugs it
in. So nothing here reads a file or waits for a lock.
"""

import asyncio
import errno
from collections.abc import Callable
from typing import TYPE_CHECKING

from fpga_plugin.errors import HardwareError
from fpga_plugin.hardware.simulated.kernel import SimulatedKernel
from fpga_plugin.ids import CardId, device_order, parse_device_id

if TYPE_CHECKING:
    from asyncinotify import Event, Inotify

_INSTANCES_HINT = "raise fs.inotify.max_user_instances or max_user_watches on the node"


class SimulatedEvents:
    """Implements `fpga_plugin.hardware.backend.EventSource` over a kernel that owns its directory.

    A change in `faults/` is what the error interrupt of a real card would be. Bursts are not
    merged: `changed` is called for every event.
    """

    def __init__(self, kernel: SimulatedKernel) -> None:
        self._kernel = kernel
        self._changed: Callable[[CardId | None], None] | None = None
        self._inotify: Inotify | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unsubscribe: Callable[[], None] = lambda: None

    def start(self, changed: Callable[[CardId | None], None]) -> None:
        """Begin to call `changed` on the running loop.

        Raises:
            HardwareError: the directory is gone, or the node has no inotify left.
        """
        # Imported here: a process that only lists the cards need not load it.
        from asyncinotify import Inotify, Mask

        created = Mask.CREATE | Mask.MOVED_TO | Mask.CLOSE_WRITE
        mask = created | Mask.DELETE | Mask.MOVED_FROM | Mask.ONLYDIR
        inotify: Inotify | None = None
        try:
            inotify = Inotify(cache_size=64, sync_timeout=0)
            inotify.add_watch(self._kernel.cards_directory, mask)
            inotify.add_watch(self._kernel.faults_directory, mask)
        except OSError as error:
            if inotify is not None:
                inotify.close()
            enough = error.errno in {errno.ENOENT, errno.ENOTDIR}
            raise HardwareError(
                f"the simulated cards' directory {self._kernel.directory} cannot be watched "
                f"({error.strerror})",
                hint="do not remove it under the daemon" if enough else _INSTANCES_HINT,
            ) from error
        self._changed = changed
        self._inotify = inotify
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(inotify.fd, self._drain)
        self._unsubscribe = self._kernel.subscribe(self._rebound)

    def close(self) -> None:
        """Stop; no call of `changed` comes after this. May be repeated."""
        self._changed = None
        self._unsubscribe()
        self._unsubscribe = lambda: None
        if self._inotify is not None:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._inotify.fd)
            self._inotify.close()
        self._inotify = None

    def _drain(self) -> None:
        """Take what inotify has; stop if `changed` closes this source."""
        while self._inotify is not None and (event := self._inotify.sync_get()) is not None:
            self._hear(event)

    def _hear(self, event: "Event") -> None:
        from asyncinotify import Mask

        lost = Mask.Q_OVERFLOW | Mask.IGNORED | Mask.UNMOUNT
        if event.mask & lost or event.name is None or event.watch is None:
            self._tell(None)
            return
        name = str(event.name)
        if str(event.watch.path) == self._kernel.faults_directory:
            card = _card_of_region(name)
        elif event.mask & (Mask.DELETE | Mask.MOVED_FROM):
            card = self._kernel.removed(name)
        else:
            card = self._kernel.card(name)
        if card is not None:
            self._tell(card)

    def _rebound(self, card: CardId) -> None:
        """Called from any thread when drivers were bound or unbound: the uevents of a rebind."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        loop.call_soon_threadsafe(self._tell, card)

    def _tell(self, card: CardId | None) -> None:
        if self._changed is not None:
            self._changed(card)


def _card_of_region(name: str) -> CardId | None:
    """The card of a region's fault file; None for other names, such as those of editors."""
    try:
        address, port = device_order(parse_device_id(name))
    except ValueError:
        return None
    return address.card_id if port >= 0 else None
