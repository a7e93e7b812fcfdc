"""The uevent watch on the kernel's own netlink socket, which umockdev replaces: when it runs over.

The events are harmless ones of /dev/null, made by writing to its `uevent` attribute.
"""

import asyncio
import os
import socket

import pytest

from fpga_plugin.hardware.udev import UdevEvents
from fpga_plugin.ids import CardId

TRIGGER = "/sys/devices/virtual/mem/null/uevent"


@pytest.mark.skipif(not os.access(TRIGGER, os.W_OK), reason="uevents can be made by root only")
def test_lost_events_ask_for_one_scan_of_all_and_leave_the_watch_working():
    def overflow(descriptor: int) -> None:
        with socket.socket(fileno=os.dup(descriptor)) as duplicate:
            duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        with open(TRIGGER, "w", encoding="ascii") as file:
            for _ in range(100):
                file.write("change")
                file.flush()

    async def run() -> None:
        told: asyncio.Queue[CardId | None] = asyncio.Queue()
        source = UdevEvents()
        source.start(told.put_nowait)
        descriptor = source._monitor.fileno()
        for _ in range(2):  # the watch goes on after a loss
            overflow(descriptor)
            assert await asyncio.wait_for(told.get(), 10) is None
            assert told.empty()
        # A pending error that nobody took would wake the loop for ever.
        with socket.socket(fileno=os.dup(descriptor)) as duplicate:
            assert duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        source.close()

    asyncio.run(run())
