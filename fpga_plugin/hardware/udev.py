"""Kernel uevents: reports to the event loop when cards, ports and their drivers come and go.

The events are the kernel's own, not udev's: they reach a pod without hostNetwork, and need no
udevd. They come through libudev on a netlink socket that the loop watches; there is no thread.
Reading sysfs here takes microseconds and touches no hardware, so it stays on the loop.
"""

import asyncio
import os
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import structlog

from fpga_plugin.errors import HardwareError
from fpga_plugin.ids import CardId, PciAddress

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

_RECEIVE_BUFFER = 4 * 1024 * 1024
"""Bytes of events that the kernel may hold for us: thousands, as when cards with many functions are
rebound. It is a limit, not an allocation."""

_RELEVANT: dict[str, tuple[re.Pattern[str], frozenset[str]]] = {
    # A port's and the FME's attributes come and go with their driver.
    "platform": (
        re.compile(r"dfl-(?:port|fme)\.[0-9]+"),
        frozenset({"add", "bind", "unbind", "remove"}),
    ),
    "fpga_region": (re.compile(r"region[0-9]+"), frozenset({"add", "remove"})),
    # dfl-emif may be bound long after the card: only then can its memory be cleared.
    "dfl": (re.compile(r"dfl_dev\.[0-9]+"), frozenset({"bind", "unbind"})),
    # PF1's node of an Alveo card: a reset takes it away and makes it again, perhaps another one.
    "drm": (re.compile(r"renderD[0-9]+"), frozenset({"add", "remove"})),
    # A function's driver: dfl-pci itself, and what another function of the card is used for. Some
    # of a slot's functions have none when they come.
    "pci": (re.compile(r".*"), frozenset({"add", "bind", "unbind", "remove"})),
}
"""By subsystem: names of devices, and actions, after which a card may look different."""

_PCI_FUNCTION = re.compile(r"/([0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7])(?=/|$)", re.ASCII)

_MAX_FAILURES = 8
"""Failed reads in one go after which the loop gets its turn; the socket wakes it again."""


class UdevEvents:
    """Implements `fpga_plugin.hardware.backend.EventSource`.

    Start it before the first scan: what changes in between is then seen twice, never missed.

    Args:
        sysfs_root: where the node's /sys is, which reports the card of a virtual function.
    """

    def __init__(self, sysfs_root: str = "/sys") -> None:
        self._sysfs_root = sysfs_root.rstrip("/")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._monitor: Any = None  # a pyudev.Monitor; pyudev has no types
        self._changed: Callable[[CardId | None], None] = _ignore

    def start(self, changed: Callable[[CardId | None], None]) -> None:
        """Begin to call `changed` on the running loop.

        Raises:
            HardwareError: libudev or the kernel's events are not available.
        """
        monitor = _monitor()
        self._changed = changed
        self._monitor = monitor
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(monitor.fileno(), self._drain)

    def close(self) -> None:
        """Stop; no call comes after this. May be repeated."""
        if self._loop is not None:
            self._loop.remove_reader(self._monitor.fileno())
        self._loop = None
        self._monitor = None  # libudev closes the socket with its last reference
        self._changed = _ignore

    def _drain(self) -> None:
        """Take all events that are there, and name each card once."""
        cards: set[CardId] = set()
        everything = False
        failures = 0
        while failures < _MAX_FAILURES:
            try:
                device = self._monitor.poll(timeout=0)
            except OSError as error:
                # ENOBUFS: events were lost. pyudev sees POLLERR and raises without an errno, and
                # without taking the error off the socket, which would then wake us for ever.
                failures += 1
                everything = True
                lost = _take_error(self._monitor.fileno())
                log.warning(
                    "kernel events were lost", error=os.strerror(lost) if lost else str(error)
                )
                continue
            if device is None:
                break
            match self._affected(device):
                case PciAddress() as address:
                    cards.add(address.card_id)
                    # A slot's second physical function is a matter of the first one's card.
                    cards.add(replace(address, function=0).card_id)
                case None:
                    everything = True
        for card in (None,) if everything else sorted(cards):
            self._changed(card)

    def _affected(self, device: Any) -> PciAddress | bool | None:
        """The card that an event is about; None: it may be any, False: none."""
        if (relevant := _RELEVANT.get(device.subsystem)) is None:
            return False
        names, actions = relevant
        if device.action not in actions or not names.fullmatch(device.sys_name):
            return False
        path: str = device.device_path
        functions = list(_PCI_FUNCTION.finditer(path))
        if not functions:
            return False  # below no PCI function: no card
        return self._card_of(functions[-1][1], path[: functions[-1].end()])

    def _card_of(self, function: str, path: str) -> PciAddress | None:
        """The physical function behind a function; None when that is no longer known."""
        directory = f"{self._sysfs_root}{path}"
        try:
            return PciAddress.parse(os.path.basename(os.readlink(f"{directory}/physfn")))
        except (OSError, ValueError):
            return PciAddress.parse(function) if os.path.isdir(directory) else None


def _ignore(card: CardId | None) -> None:
    """Stands in for `changed` before the start and after the end."""


def _monitor() -> Any:
    """A started monitor of the kernel's events."""
    try:
        # Here and not above: it loads libudev, which simulated cards can do without (18 ms).
        import pyudev
    except ImportError as error:
        raise HardwareError(
            f"libudev cannot be loaded ({error})",
            hint="install libudev1, and ldconfig (libc-bin), by which it is found",
        ) from error
    try:
        monitor = pyudev.Monitor.from_netlink(pyudev.Context(), source="kernel")
        for subsystem in _RELEVANT:
            monitor.filter_by(subsystem)
        try:
            monitor.set_receive_buffer_size(_RECEIVE_BUFFER)
        except OSError as error:  # beyond the default it takes CAP_NET_ADMIN
            log.debug("the buffer for kernel events keeps its default size", error=str(error))
        monitor.start()
    except OSError as error:
        raise HardwareError(
            f"the kernel's events cannot be received ({error})",
            hint="the container runtime must allow netlink sockets (NETLINK_KOBJECT_UEVENT)",
        ) from error
    return monitor


def _take_error(descriptor: int) -> int:
    """Take a pending error off a socket; its errno, or 0."""
    with socket.socket(fileno=os.dup(descriptor)) as duplicate:
        return duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
