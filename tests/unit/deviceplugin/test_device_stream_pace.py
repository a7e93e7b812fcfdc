"""Kubelet writes a checkpoint for each list: a thousand changes must not become as many lists."""

import asyncio

from doubles import LIMIT

from fpga_plugin.allocation.lists import AdvertisedDevice
from fpga_plugin.deviceplugin.device_stream import AT_ONCE, PAUSE, DeviceStreams
from fpga_plugin.deviceplugin.encoding import encode_list
from fpga_plugin.ids import DeviceId
from fpga_plugin.kubernetes.names import ResourceName

RESOURCE = ResourceName("fpga.intel.com/region-ce48969398f05f33946d560708be108a")


class Calls:
    """As much of `DeviceLists` and `Reconciler` as a stream needs."""

    def __init__(self):
        self.generation = 0

    def subscribe(self, changed):
        self.changed = changed
        return lambda: None

    def devices(self, _resource):
        return (AdvertisedDevice(DeviceId(f"0000-10-00.0-p{self.generation}"), True, None),)

    def stream_opened(self, _resource):
        pass


class Stream:
    def __init__(self):
        self.sent = []
        self.recorder = asyncio.Event()

    async def send_message(self, message):
        self.sent.append(message)
        self.recorder.set()

    async def until(self, message):
        async with asyncio.timeout(LIMIT):
            while message not in self.sent:
                self.recorder.clear()
                await self.recorder.wait()


async def fed(story):
    calls, stream = Calls(), Stream()
    streams = DeviceStreams(RESOURCE, calls, calls)
    feeding = asyncio.create_task(streams.feed(stream))

    def change():
        calls.generation += 1
        calls.changed()
        return encode_list(calls.devices(RESOURCE))

    try:
        await streams.opened.wait()
        await story(stream, change)
    finally:
        feeding.cancel()
        await asyncio.wait({feeding})


def test_a_few_changes_are_sent_at_once_each():
    async def story(stream, change):
        for _ in range(AT_ONCE - 1):
            expected = change()
            for _ in range(5):  # turns of the loop, and no time
                await asyncio.sleep(0)
            assert stream.sent[-1] == expected

    asyncio.run(fed(story))


def test_many_changes_are_few_lists_and_the_last_one_is_among_them():
    async def story(stream, change):
        began = asyncio.get_running_loop().time()
        for _ in range(2000):
            last = change()
            for _ in range(3):
                await asyncio.sleep(0)
        await stream.until(last)
        elapsed = asyncio.get_running_loop().time() - began
        assert len(stream.sent) <= AT_ONCE + 1 + elapsed / PAUSE

    asyncio.run(fed(story))
