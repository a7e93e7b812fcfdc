import asyncio
import builtins
import socket
from dataclasses import dataclass
from pathlib import Path

import pytest

from fpga_plugin.errors import HardwareError
from fpga_plugin.hardware import udev
from fpga_plugin.hardware.backend import EventSource
from fpga_plugin.ids import CardId

PARENT = "/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0"
VIRTUAL = "/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.1"
CARD = CardId("0000-3b-00.0")


@dataclass
class Event:
    """A pyudev.Device, as far as it is looked at."""

    action: str
    subsystem: str
    device_path: str

    @property
    def sys_name(self) -> str:
        return self.device_path.rpartition("/")[2]


class Monitor:
    """A pyudev.Monitor: gives what it holds, and wakes the loop as a socket does."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.events: list[Event | OSError] = []
        self.drained = asyncio.Event()

    def fileno(self) -> int:
        return self.ours.fileno()

    def send(self, *events: Event | OSError) -> None:
        self.events += events
        self.theirs.send(b"!")

    def poll(self, timeout: float) -> Event | None:
        assert timeout == 0
        if not self.events:
            self.ours.recv(4096)
            self.drained.set()
            return None
        event = self.events.pop(0)
        if isinstance(event, OSError):
            raise event
        return event

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


@pytest.fixture
def monitor(monkeypatch: pytest.MonkeyPatch):
    made = Monitor()
    monkeypatch.setattr(udev, "_monitor", lambda: made)
    yield made
    made.close()


@pytest.fixture
def root(tmp_path: Path) -> str:
    for function in (PARENT, VIRTUAL):
        (tmp_path / function[1:]).mkdir(parents=True)
    (tmp_path / VIRTUAL[1:] / "physfn").symlink_to("../0000:3b:00.0")
    return str(tmp_path)


def told(monitor: Monitor, root: str, *events: Event | OSError) -> list[CardId | None]:
    """What `changed` was called with for these events, sent at once."""

    async def run() -> list[CardId | None]:
        calls: list[CardId | None] = []
        source: EventSource = udev.UdevEvents(root)
        source.start(calls.append)
        monitor.send(*events)
        await monitor.drained.wait()
        source.close()
        return calls

    return asyncio.run(run())


@pytest.mark.parametrize(
    "event",
    [
        Event("bind", "platform", f"{PARENT}/fpga_region/region0/dfl-port.3"),
        Event("add", "platform", f"{PARENT}/fpga_region/region0/dfl-fme.3"),
        Event("unbind", "platform", f"{PARENT}/fpga_region/region0/dfl-fme.3"),
        Event("remove", "platform", f"{PARENT}/fpga_region/region0/dfl-port.3"),
        Event("add", "fpga_region", f"{PARENT}/fpga_region/region0"),
        Event("remove", "fpga_region", f"{PARENT}/fpga_region/region0"),
        Event("bind", "dfl", f"{PARENT}/fpga_region/region0/dfl-fme.3/dfl_dev.7"),
        Event("bind", "pci", PARENT),
        Event("unbind", "pci", PARENT),
        Event("add", "pci", VIRTUAL),
        Event("bind", "pci", VIRTUAL),
        Event("bind", "platform", f"{VIRTUAL}/fpga_region/region1/dfl-port.4"),
    ],
)
def test_an_event_of_a_card_names_the_card(monitor: Monitor, root: str, event: Event):
    assert told(monitor, root, event) == [CARD]


@pytest.mark.parametrize(
    "event",
    [
        Event("change", "pci", PARENT),
        Event("change", "platform", f"{PARENT}/fpga_region/region0/dfl-port.3"),
        Event("add", "platform", f"{PARENT}/fpga_region/region0/dfl-fme.3/dfl-fme-mgr.3"),
        Event("bind", "platform", "/devices/platform/fake.0/fpga_region/region0/dfl-port.3"),
        Event("bind", "platform", "/devices/platform/serial8250"),
        Event("bind", "dfl", "/devices/platform/dfl_dev.7"),
        Event("add", "net", f"{PARENT}/net/eth0"),
        Event("bind", "usb", f"{PARENT}/usb1/1-1"),
    ],
)
def test_other_events_change_nothing(monitor: Monitor, root: str, event: Event):
    assert told(monitor, root, event) == []


@pytest.mark.parametrize(
    "event",
    [
        Event("remove", "pci", "/devices/pci0000:3a/0000:3a:00.0/0000:3c:00.0"),
        Event("remove", "platform", "/devices/pci0000:3a/0000:3c:00.1/fpga_region/r/dfl-port.0"),
        OSError("Error while polling fd"),
    ],
)
def test_what_cannot_be_told_apart_asks_for_a_scan_of_all(monitor: Monitor, root: str, event):
    known = Event("bind", "pci", PARENT)
    assert told(monitor, root, known, event, known) == [None]


def test_a_burst_names_each_card_once(monitor: Monitor, root: str):
    other = Event("bind", "pci", "/devices/pci0000:3a/0000:3a:00.0")
    burst = [Event("bind", "pci", PARENT), other] * 20
    assert told(monitor, root, *burst) == [CardId("0000-3a-00.0"), CARD]


def test_no_call_comes_after_the_end(monitor: Monitor, root: str):
    async def run() -> list[CardId | None]:
        calls: list[CardId | None] = []
        source = udev.UdevEvents(root)

        def changed(card: CardId | None) -> None:
            calls.append(card)
            source.close()

        source.start(changed)
        monitor.send(
            Event("bind", "pci", PARENT), Event("bind", "pci", "/devices/pci0000:3a/0000:3a:00.0")
        )
        await monitor.drained.wait()
        monitor.send(Event("bind", "pci", PARENT))
        for _ in range(3):
            await asyncio.sleep(0)
        source.close()
        return calls

    assert len(asyncio.run(run())) == 1


def test_without_libudev_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def fail(name: str, *rest, **names):
        if name == "pyudev":
            raise ImportError("No library named udev")
        return real(name, *rest, **names)

    monkeypatch.setattr(builtins, "__import__", fail)

    async def run() -> None:
        udev.UdevEvents().start(lambda card: None)

    with pytest.raises(HardwareError, match="libudev1"):
        asyncio.run(run())
