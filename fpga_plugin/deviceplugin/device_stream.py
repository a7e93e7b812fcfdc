"""The ListAndWatch streams of one endpoint: what each was sent, and whether kubelet holds one.

A message replaces the whole list, so the latest list alone brings a stream up to date: a burst of
changes, or changes while kubelet does not read, cost one message. Kubelet writes a checkpoint for
each message, and scrubbing a thousand regions at the start makes a thousand changes. So after a
number of messages without a delay, each further one waits. The stream also shows kubelet's
interest: kubelet never opens it again by itself, so its end means that the resource has to be
registered again.
"""

import asyncio
from typing import Any

import structlog
from grpclib.server import Stream

from fpga_plugin.allocation.lists import AdvertisedDevice, DeviceLists
from fpga_plugin.deviceplugin.encoding import encode_list
from fpga_plugin.deviceplugin.reconcile import Reconciler
from fpga_plugin.kubernetes.names import ResourceName

PAUSE = 0.02
"""Seconds between two lists on a stream, on average over a long row of changes."""

AT_ONCE = 16
"""Lists that may go out without a delay; each `PAUSE` without one allows another."""

_log = structlog.get_logger()


class _Cursor:
    """Where one stream is."""

    __slots__ = ("changed", "not_before", "sent")

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.sent: tuple[AdvertisedDevice, ...] | None = None
        self.not_before = 0.0  # on the loop's clock


class DeviceStreams:
    """Sends a resource's list on any number of streams, each at its own pace.

    Attributes:
        opened: set once a stream was sent its first list.
        lost: set when, after that, the last stream ended.
    """

    def __init__(self, resource: ResourceName, lists: DeviceLists, reconciler: Reconciler) -> None:
        self._resource = resource
        self._lists = lists
        self._reconciler = reconciler
        self._cursors: set[_Cursor] = set()
        self._log = _log.bind(resource=resource)
        self.opened = asyncio.Event()
        self.lost = asyncio.Event()

    @property
    def streaming(self) -> bool:
        """Whether kubelet holds a stream that was sent the list."""
        return self.opened.is_set() and not self.lost.is_set()

    @property
    def behind(self) -> bool:
        """Whether the present list has not been sent on some stream yet."""
        return any(cursor.changed.is_set() for cursor in self._cursors)

    def resend(self) -> None:
        """Send the list again even if it is the same: kubelet then rewrites its checkpoint."""
        for cursor in self._cursors:
            cursor.sent = None
            cursor.changed.set()

    async def feed(self, stream: Stream[Any, Any]) -> None:
        """Send the list, and each later one, until cancelled."""
        cursor = _Cursor()
        self._cursors.add(cursor)
        # The list may be the same after a change: then nothing is sent.
        unsubscribe = self._lists.subscribe(cursor.changed.set)
        try:
            await self._send(cursor, stream)
            self._open()
            while True:
                await cursor.changed.wait()
                await asyncio.sleep(cursor.not_before - asyncio.get_running_loop().time())
                cursor.changed.clear()
                await self._send(cursor, stream)
        finally:
            unsubscribe()
            self._cursors.discard(cursor)
            if self.opened.is_set() and not self._cursors:
                self.lost.set()
            self._log.debug("device list stream ended")

    async def _send(self, cursor: _Cursor, stream: Stream[Any, Any]) -> None:
        devices = self._lists.devices(self._resource)
        if devices is cursor.sent or devices == cursor.sent:
            return
        cursor.sent = devices  # before the wait: `resend` may come meanwhile
        await stream.send_message(encode_list(devices))
        now = asyncio.get_running_loop().time()
        cursor.not_before = max(cursor.not_before, now - AT_ONCE * PAUSE) + PAUSE
        self._log.debug(
            "device list sent",
            device_count=len(devices),
            healthy=sum(device.healthy for device in devices),
        )

    def _open(self) -> None:
        self.opened.set()
        try:
            self._reconciler.stream_opened(self._resource)
        except Exception:  # noqa: BLE001  # a defect behind must not cost kubelet its list
            self._log.exception("unexpected error when a stream opened")
