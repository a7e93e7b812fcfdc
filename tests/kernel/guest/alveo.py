"""The guest's Alveo cards: what a test may ask of AMD's drivers, and do to the fake cards below.

Each card is two functions, as on a real one: PF0, which xclmgmt drives, and PF1, which xocl drives.
Numbers, structures and names of files are those of XRT 2.25: `xocl_ioctl.h`, `mgmt-ioctl.h`,
`mailbox_proto.h`. Nothing here is the plugin's: what it does is compared with this.

The modules are loaded by `install` and taken away by `remove`, so that each file of tests begins
with cards that were never programmed, and the tests of DFL cards have none of them beside them.
The fake cards' own files, in debugfs: `fakealveo.c` has the list.
"""

import ctypes
import errno
import fcntl
import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import pytest
from doubles import alveo_files

MODULES = os.environ.get("GUEST_ALVEO_MODULES", "").split()
"""Paths, in the order in which they are loaded (tests/kernel/xrt.py); none on the host."""

PCI = Path("/sys/bus/pci/devices")
DRIVERS = PCI.parent / "drivers"
DEBUGFS = Path("/sys/kernel/debug/fakealveo")
BUSYBOX = "/proc/1/root/bin/busybox"
FIRMWARE = Path("/proc/1/root/lib/firmware/xilinx", alveo_files.LOGIC)
"""The kernel looks for firmware in the root of the first process, which is the initramfs."""

BUS = 0x80
"""The fake cards' host bridge, which no IOMMU is for; each card has a bus behind it."""

PATIENCE = 180.0
"""Seconds until a test gives up. The guest has no KVM."""

READ_AXLF = 0xC0286454
AXLF = struct.Struct("<Qi4xQIII4x")
"""struct drm_xocl_axlf: image, kernels (number and table), slot, settings, flags."""

FORCE = 1
CONTEXT = 0xC0206448
CONTEXT_ARGUMENT = struct.Struct("<I16sIII")
OPEN, CLOSE = 0, 1
ANY_UNIT = 0xFFFFFFFF
HOT_RESET = 0x6455
READ_MEMORY, WRITE_MEMORY = 0xC020644E, 0xC020644F
"""DRM_IOCTL_XOCL_PREAD_UNMGD and PWRITE_UNMGD."""

TRANSFER = struct.Struct("<I4xQQQ")
"""struct drm_xocl_pwrite_unmgd: address space, address on the card, size, address of the data."""

MGMT_LOAD = 0x40085806
"""xclmgmt's own, on /dev/xclmgmt<N>."""

TEST_READY = 1 << 1
LOADS = 1 << 7 | 1 << 8 | 1 << 17 | 1 << 18
RESET, RECLOCK, PROGRAM_SHELL = 1 << 5, 1 << 9, 1 << 14
ALL = LOADS | RESET | RECLOCK | PROGRAM_SHELL
"""The mask of an allocation that has a named bitstream."""

TENANT_LOADS = RESET | RECLOCK | PROGRAM_SHELL
"""The mask of one whose tenant may load what it likes."""

DISABLE = "config_mailbox_channel_disable"
HOLD = (
    "import os, signal, sys\n"
    "if sys.argv[2:]: signal.signal(signal.SIGBUS, signal.SIG_IGN)\n"
    "os.open(sys.argv[1], os.O_RDWR)\n"
    "print('held', flush=True)\n"
    "while True: signal.pause()\n"
)

A, B, ALIEN = (UUID(f"{letter * 8}-1111-4222-8333-444455556666") for letter in "abc")
NO_UUID = UUID(int=0)


def image(uuid: UUID) -> bytes:
    """An image that fits the cards, or, for ALIEN, one of another shell."""
    if uuid == ALIEN:
        return alveo_files.xclbin(uuid, alveo_files.OTHER_INTERFACE)
    return alveo_files.xclbin(uuid)


def until(holds: Callable[[], object], what: str, *, limit: float = PATIENCE) -> None:
    """Wait for what no event announces."""
    deadline = time.monotonic() + limit
    while not holds():
        assert time.monotonic() < deadline, f"not within {limit:g} s: {what}"
        time.sleep(0.02)


@contextmanager
def fails(*numbers: int) -> Iterator[None]:
    """What is done here is refused with one of these errors."""
    with pytest.raises(OSError) as raised:  # noqa: PT011  # its number is looked at
        yield
    names = [errno.errorcode[number] for number in numbers]
    assert errno.errorcode[raised.value.errno or 0] in names


@dataclass(frozen=True, slots=True)
class Alveo:
    """One card.

    Attributes:
        number: from 0 on.
    """

    number: int

    @property
    def address(self) -> str:
        """PF0's, which is the card's."""
        return f"0000:{BUS + 1 + self.number:02x}:00.0"

    @property
    def id(self) -> str:
        """As the plugin names the card."""
        return self.address.replace(":", "-")

    @property
    def pf0(self) -> Path:
        return PCI / self.address

    @property
    def pf1(self) -> Path:
        return PCI / f"{self.address[:-1]}1"

    # ------------------------------------------------------------- what the drivers say

    def nodes(self) -> list[str]:
        """Names of PF1's DRM nodes; none while it is shut down."""
        try:
            return sorted(os.listdir(self.pf1 / "drm"))
        except FileNotFoundError:
            return []

    @property
    def node(self) -> str:
        """The path of the render node."""
        (name,) = (name for name in self.nodes() if name.startswith("renderD"))
        return f"/dev/dri/{name}"

    @property
    def mgmt_node(self) -> str:
        return f"/dev/xclmgmt{self.of_pf0('instance')}"

    def of_pf0(self, name: str) -> str:
        return (self.pf0 / name).read_text().strip()

    def of_pf1(self, name: str) -> str:
        return (self.pf1 / name).read_text().strip()

    @property
    def uuid(self) -> UUID | None:
        """Of the image that PF1's driver believes to be loaded; None if it has never seen one."""
        text = self.of_pf1("xclbinuuid")
        return UUID(text) if text else None

    def tells(self, name: str, value: str, *, pf0: bool = False) -> bool:
        """Whether a file reads so; in the midst of a reset there are no files, or reads fail."""
        try:
            return (self.of_pf0(name) if pf0 else self.of_pf1(name)) == value
        except OSError:
            return False

    @property
    def up(self) -> bool:
        """PF1 is there and ready."""
        return (
            self.tells("ready", "0x1")
            and self.tells("dev_offline", "0")
            and self.tells("shutdown", "0")
            and len(self.nodes()) == 2
        )

    # ------------------------------------------------------------- what the fake card says

    def _state(self) -> dict[str, str]:
        line = (DEBUGFS / "state").read_text().splitlines()[self.number]
        return dict(re.findall(r"(\w+)=(\S+)", line))

    @property
    def image(self) -> UUID:
        """Of what was streamed to the card last, whoever did it and whatever the drivers say."""
        return UUID(self._state()["image"])

    @property
    def bursts(self) -> int:
        """How often the ICAP was told to go: grows with each image that is streamed."""
        return int(self._state()["bursts"])

    @property
    def resets(self) -> int:
        """Resets of the card's bus."""
        return int(self._state()["resets"])

    @property
    def memory(self) -> Path:
        """What the card's memory holds, whoever wrote it; a test may write it, too."""
        return DEBUGFS / f"memory{self.number}"

    def set(self, fault: str, value: int) -> None:
        """Arm a fault of the card's, or end it with 0."""
        (DEBUGFS / f"{fault}{self.number}").write_text(f"{value}")

    # ------------------------------------------------------------- what one may ask of PF1

    @contextmanager
    def opened(self, flags: int = os.O_RDWR) -> Iterator[int]:
        """The render node's descriptor."""
        descriptor = os.open(self.node, flags | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def load(self, content: bytes | UUID, *, force: bool = False, by: int | None = None) -> None:
        """Program by PF1, as XRT's library does; `by`: through this descriptor."""
        if isinstance(content, UUID):
            content = image(content)
        buffer = ctypes.create_string_buffer(content, len(content))
        flags = FORCE if force else 0
        argument = bytearray(AXLF.pack(ctypes.addressof(buffer), 0, 0, 0, 0, flags))
        if by is not None:
            fcntl.ioctl(by, READ_AXLF, argument)
            return
        with self.opened() as descriptor:
            fcntl.ioctl(descriptor, READ_AXLF, argument)

    def context(self, descriptor: int, operation: int, uuid: UUID) -> None:
        """Begin or end to use the image, as a program does."""
        argument = CONTEXT_ARGUMENT.pack(operation, uuid.bytes, ANY_UNIT, 0, 0)
        fcntl.ioctl(descriptor, CONTEXT, bytearray(argument))

    def write_memory(self, at: int, content: bytes) -> None:
        """The card's memory, as anyone may who has the render node."""
        buffer = ctypes.create_string_buffer(content, len(content))
        argument = TRANSFER.pack(0, at, len(content), ctypes.addressof(buffer))
        with self.opened() as descriptor:
            fcntl.ioctl(descriptor, WRITE_MEMORY, bytearray(argument))

    def read_memory(self, at: int, size: int) -> bytes:
        """The same."""
        buffer = ctypes.create_string_buffer(size)
        argument = TRANSFER.pack(0, at, size, ctypes.addressof(buffer))
        with self.opened() as descriptor:
            fcntl.ioctl(descriptor, READ_MEMORY, bytearray(argument))
        return buffer.raw

    def hot_reset(self) -> None:
        """As a tenant may ask for it."""
        with self.opened() as descriptor:
            fcntl.ioctl(descriptor, HOT_RESET)

    # ------------------------------------------------------------- what the host may do

    def mgmt_load(self, uuid: UUID) -> None:
        """Program by PF0, as xbmgmt does."""
        content = image(uuid)
        buffer = ctypes.create_string_buffer(content, len(content))
        descriptor = os.open(self.mgmt_node, os.O_RDWR | os.O_CLOEXEC)
        try:
            argument = bytearray(struct.pack("<Q", ctypes.addressof(buffer)))
            fcntl.ioctl(descriptor, MGMT_LOAD, argument)
        finally:
            os.close(descriptor)

    @property
    def mask(self) -> int:
        """Of requests that PF0 drops."""
        return int(self.of_pf0(DISABLE), 0)

    def set_mask(self, mask: int) -> None:
        """Set it, and wait until PF1 has heard of it."""
        (self.pf0 / DISABLE).write_text(hex(mask))
        until(lambda: self.tells(DISABLE, hex(mask)) and self.up, f"PF1 knows mask {mask:#x}")

    def shut_down(self) -> None:
        """PF1's `shutdown`, which resets the card; returns when the reset has ended.

        `shutdown` says 1 once PF0 has answered, which is offline by then and resets the card.
        """
        (self.pf1 / "shutdown").write_text("1")
        until(lambda: self.tells("shutdown", "1"), "PF0 has begun to reset")
        until(lambda: self.tells("dev_offline", "0", pf0=True), "PF0 is back from its reset")
        until(lambda: not self.nodes(), "PF1 is shut down")

    def come_back(self) -> None:
        """The end of a shutdown."""
        (self.pf1 / "shutdown").write_text("0")
        self.settle()

    def settle(self) -> None:
        """Wait until PF1 is up and stays so.

        Once it is up after a reset it takes all of itself down again, its node too, and makes that
        again from what PF0 tells of the card (xocl_refresh_subdevs). The mask is the last that it
        hears then. So a change of the mask, by a request that nobody sends, shows the end.
        """
        until(lambda: self.up, "PF1 is up")
        mask = self.mask
        self.set_mask(mask ^ TEST_READY)
        self.set_mask(mask)

    def bind(self, driver: str) -> None:
        address = self.pf0 if driver == "xclmgmt" else self.pf1
        (DRIVERS / driver / "bind").write_text(address.name)

    def unbind(self, driver: str) -> None:
        address = self.pf0 if driver == "xclmgmt" else self.pf1
        (DRIVERS / driver / "unbind").write_text(address.name)

    def bound(self, driver: str) -> bool:
        return (DRIVERS / driver / (self.pf0 if driver == "xclmgmt" else self.pf1).name).exists()

    def fresh(self, uuid: UUID | None = A) -> None:
        """No fault, no mask, both drivers, and this image on the card and in PF1's record."""
        for fault in ("stuck", "mute", "dma"):
            self.set(fault, 0)
        for driver in ("xclmgmt", "xocl"):
            if not self.bound(driver):
                self.bind(driver)
        if self.tells("shutdown", "1"):
            (self.pf1 / "shutdown").write_text("0")
        until(lambda: self.up, "PF1 is up")
        self.set_mask(TEST_READY)
        self.set_mask(0)
        if uuid is not None:
            self.load(uuid, force=True)
            assert self.uuid == uuid


@contextmanager
def holder(card: Alveo, *, stubborn: bool = False) -> Iterator["subprocess.Popen[str]"]:
    """A process that has the node open; a stubborn one ignores SIGBUS."""
    command = [sys.executable, "-S", "-c", HOLD, card.node, *(["stubborn"] if stubborn else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def _run(*command: str) -> None:
    done = subprocess.run([BUSYBOX, *command], check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"


def loaded() -> list[str]:
    """Names of the kernel's modules."""
    return [line.split()[0] for line in Path("/proc/modules").read_text().splitlines()]


QUIET, USUAL = 2, 4
"""Which of the kernel's messages the console shows; AMD's drivers complain of every image."""


def console(level: int) -> None:
    """What the kernel's console shows."""
    Path("/proc/sys/kernel/printk").write_text(f"{level}")


def install(cards: int = 1) -> list[Alveo]:
    """Load the drivers and plug so many cards in; returns when each is ready."""
    remove()  # what a test left that did not get to its end
    console(QUIET)
    FIRMWARE.mkdir(parents=True, exist_ok=True)
    (FIRMWARE / "partition.xsabin").write_bytes(alveo_files.partition())
    for module in MODULES:
        name = Path(module).stem.replace("-", "_")
        if name in loaded():
            continue
        parameters = ()
        if name == "fakealveo":
            parameters = (f"uuid={alveo_files.LOGIC}", f"cards={cards}", "domain=0", f"bus={BUS}")
        _run("insmod", module, *parameters)
    found = [Alveo(number) for number in range(cards)]
    for card in found:
        until(lambda c=card: c.up, f"{card.address} is ready")
    return found


def remove() -> None:
    """Take the drivers and the cards away."""
    for name in ("xocl", "xclmgmt", "fakealveo"):
        if name in loaded():
            _run("rmmod", name)
    console(USUAL)
    with suppress(FileNotFoundError):
        (FIRMWARE / "partition.xsabin").unlink()
