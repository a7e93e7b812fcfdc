"""Files that come and go in the simulated cards' directory are heard of at once."""

import asyncio
import os

import pytest
from asyncinotify import Event, Mask

from fpga_plugin.errors import HardwareError
from fpga_plugin.hardware.backend import EventSource
from fpga_plugin.hardware.simulated.kernel import SimulatedKernel
from fpga_plugin.hardware.simulated.uevents import SimulatedEvents
from fpga_plugin.ids import InterfaceId
from fpga_plugin.settings.settings import SimulatedGroup

GROUP = SimulatedGroup(2, 2, InterfaceId("ce48969398f05f33946d560708be108a"))
CARD = "0000-10-00.0"


@pytest.fixture
def kernel(tmp_path):
    return SimulatedKernel(str(tmp_path), (GROUP,), sleep=lambda _: None)


def hear(kernel, *actions):
    """The cards that are heard of after each action."""

    async def listen():
        events: EventSource = SimulatedEvents(kernel)
        heard = asyncio.Queue()
        events.start(heard.put_nowait)
        told = []
        mark = os.path.join(kernel.faults_directory, "0000-fe-00.0-p0")
        try:
            for action in actions:
                await asyncio.to_thread(action)
                # A folder's coming and going are one event each, the last of this action's.
                await asyncio.to_thread(os.mkdir, mark)
                cards = set()
                while (card := await asyncio.wait_for(heard.get(), 10)) != "0000-fe-00.0":
                    cards.add(card)
                told.append(cards)
                await asyncio.to_thread(os.rmdir, mark)
                assert await asyncio.wait_for(heard.get(), 10) == "0000-fe-00.0"
        finally:
            events.close()
            events.close()
        return told

    return asyncio.run(listen())


def test_plugging_and_unplugging_are_heard(kernel, tmp_path):
    card = tmp_path / "cards" / CARD
    other = tmp_path / "cards" / "0000-3b-00.0"
    parked = tmp_path / "parked"
    assert hear(
        kernel,
        card.unlink,
        card.touch,
        other.touch,
        lambda: other.rename(parked),
        lambda: parked.rename(other),
        (tmp_path / "cards" / "README").touch,
    ) == [{CARD}, {CARD}, {"0000-3b-00.0"}, {"0000-3b-00.0"}, {"0000-3b-00.0"}, set()]


def test_faults_are_heard_as_their_card(kernel, tmp_path):
    fault = tmp_path / "faults" / f"{CARD}-p1"
    assert hear(
        kernel,
        lambda: fault.write_text("thermal"),
        fault.unlink,
        (tmp_path / "faults" / CARD).touch,
        (tmp_path / "faults" / ".swp").touch,
    ) == [{CARD}, {CARD}, set(), set()]


def test_a_rebind_is_heard_from_its_thread(kernel):
    driver = "/sys/bus/pci/drivers/dfl-pci"
    assert hear(
        kernel,
        lambda: kernel.write(f"{driver}/unbind", "0000:10:00.0"),
        lambda: kernel.write(f"{driver}/bind", "0000:10:00.0"),
    ) == [{CARD}, {CARD}]


def test_a_card_taken_out_and_put_back_at_once_has_lost_its_configuration(kernel, tmp_path):
    clock = "/sys/class/fpga_region/region0/dfl-port.0/userclk/frequency"
    kernel.write(clock, "100000")
    card = tmp_path / "cards" / CARD

    def replug():
        card.unlink()
        card.touch()

    assert hear(kernel, replug) == [{CARD}]
    kernel.listdir("/sys/class/fpga_region")
    assert kernel.read(clock) == "200000"


def test_lost_events_ask_for_a_scan_of_everything(kernel):
    events = SimulatedEvents(kernel)
    heard = []

    async def overflow():
        events.start(heard.append)
        events._hear(Event(watch=None, mask=Mask.Q_OVERFLOW, cookie=0, name=None))
        events.close()

    asyncio.run(overflow())
    assert heard == [None]


def test_nothing_is_told_after_close(kernel, tmp_path):
    heard = []

    async def listen():
        events = SimulatedEvents(kernel)
        events.start(heard.append)
        (tmp_path / "cards" / CARD).unlink()
        kernel.write("/sys/bus/pci/drivers/dfl-pci/unbind", "0000:11:00.0")
        events.close()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(listen())
    kernel.write("/sys/bus/pci/drivers/dfl-pci/bind", "0000:11:00.0")
    assert heard == []


def test_closing_from_within_is_safe(kernel, tmp_path):
    async def listen():
        events = SimulatedEvents(kernel)
        heard = asyncio.Queue()

        def once(card):
            heard.put_nowait(card)
            events.close()

        events.start(once)
        (tmp_path / "cards" / CARD).unlink()
        (tmp_path / "cards" / CARD).touch()
        first = await asyncio.wait_for(heard.get(), 10)
        await asyncio.sleep(0)
        return first, heard.qsize()

    assert asyncio.run(listen()) == (CARD, 0)


def test_a_directory_that_is_gone_is_an_error_that_says_so(kernel, tmp_path):
    for path in (tmp_path / "cards").iterdir():
        path.unlink()
    (tmp_path / "cards").rmdir()

    async def listen():
        SimulatedEvents(kernel).start(lambda _: None)

    with pytest.raises(HardwareError, match=str(tmp_path)):
        asyncio.run(listen())
