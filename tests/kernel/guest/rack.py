"""The guest's cards: what a test may do to them, through debugfs and dfl-pci.

A test that any cards can play arms a fault by its word (`node.arm`). One that only these can play
writes the card's own files with `knob` (fakedfl.c has the list), or registers: `poke` those of a
port, `poke_card` those of the FME. The registers are memory: what was written is read until it is
written back. Whoever arms something need not disarm it: `lay_out` gives the next test fresh cards.

`RealNode` takes the place of `daemon_support.Node`: the same tests then run the daemon on the real
drivers. Faults have the words of simulated cards (fpga_plugin/hardware/simulated/faults.py).
"""

import ctypes
import errno
import fcntl
import mmap
import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import daemon_support

PlainNode = daemon_support.Node
"""What `RealNode` takes the place of (`on_real_cards`)."""

DEBUGFS = Path("/sys/kernel/debug/fakedfl")
DRIVER = Path("/sys/bus/pci/drivers/dfl-pci")
PCI = Path("/sys/bus/pci/devices")

PORT_SPAN = 0x100000
PORT_ERRORS = 0x1010
PORT_STATUS = 0x40
AFU = 0x40000
CATFATAL, NONFATAL, PCIE0_ERRORS = 0x4060, 0x4050, 0x4020
NONFATAL_PCIE, NONFATAL_PORT = 1 << 2, 1 << 3
THERMAL_THRESHOLDS, THERMAL_WELL = 0x1008, 90 | 95 << 8 | 100 << 24
BOARD = 0x10000
NO_ANSWER = 0xBAD
MEMORY_STATUS, MEMORY_WELL = 0x3008, 0b11
ALL_ONES = (1 << 64) - 1
AP6_EVENT = 1 << 50
POWER_AP6 = 6 << 8
MMIO_TIMEOUT = 1 << 32

SLOWER = 4.0
"""Whoever looks for a PR that is under way takes longer to look here."""

LONGEST_PR = 7.0
"""Seconds. The driver gives a PR up after 8; on a busy machine 4 pass before a test has looked."""

PORT_GET_REGION_INFO = 0xB642
REGION_INFO = struct.Struct("<IIIIQQ")
"""struct dfl_fpga_port_region_info: argsz, flags, index, padding, size, offset."""

CARD = re.compile(r"([0-9]+)x([0-9]+)(\+ofs)?(?:@([0-9a-f]{32}))?")

FUNCTIONS = ("0000:13:00.0", "0000:14:00.0")
"""They play the virtual functions of the first card, where that is an OFS card."""

SHARED, STRANGER = "0000:15:00.0", "0000:15:00.1"
"""One more, and what is in its IOMMU group besides: a device of virtio's, with a driver."""

OPEN = "0000:20:00.0"
"""One more, behind no IOMMU."""

ALL_FUNCTIONS = (*FUNCTIONS, SHARED, OPEN)
"""Those of which any may be made the card's (`have_functions`), in the order of the bits."""

VFIO = PCI.parent / "drivers/vfio-pci"


def address(card: str) -> str:
    """A card's PCI address, of its id or of one of its regions'."""
    domain, bus, rest = card.partition("-p")[0].split("-")
    return f"{domain}:{bus}:{rest}"


def cards() -> list[str]:
    """Ids of the cards that the machine has, whether or not they are plugged."""
    return sorted(name.replace(":", "-") for name in os.listdir(DEBUGFS))


def knob(card: str, name: str, value: object) -> None:
    """Write a file of the card's in debugfs."""
    (DEBUGFS / address(card) / name).write_text(f"{value}")


def count(card: str, name: str) -> int:
    """Read one."""
    return int((DEBUGFS / address(card) / name).read_text(), 0)


def poke(region: str, offset: int, value: int) -> None:
    """Write a register of a region's port."""
    port = int(region.partition("-p")[2])
    knob(region, "poke", f"{PORT_SPAN * (port + 1) + offset:x} {value:x}")


def poke_card(card: str, offset: int, value: int) -> None:
    """Write a register of a card's FME."""
    knob(card, "poke", f"{offset:x} {value:x}")


class Mapping:
    """A port's AFU registers, mapped, with no descriptor left: as a container's library may do."""

    def __init__(self, region: str) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            *[ctypes.c_int] * 3,
            ctypes.c_long,
        ]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._unmap = libc.munmap
        descriptor = os.open(node(region), os.O_RDWR | os.O_CLOEXEC)
        try:
            info = bytearray(REGION_INFO.pack(REGION_INFO.size, 0, 0, 0, 0, 0))
            fcntl.ioctl(descriptor, PORT_GET_REGION_INFO, info, True)
            *_, self._size, offset = REGION_INFO.unpack(info)
            found = libc.mmap(
                None,
                self._size,
                mmap.PROT_READ | mmap.PROT_WRITE,
                mmap.MAP_SHARED,
                descriptor,
                offset,
            )
            assert found != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
        finally:
            os.close(descriptor)
        self._address: int = found

    def afu_id(self) -> str:
        """As the tenant reads it."""
        low, high = (ctypes.c_uint64.from_address(self._address + n).value for n in (8, 16))
        return f"{high:016x}{low:016x}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._unmap(self._address, self._size) == 0


def measure(card: str, register: int, value: int) -> None:
    """What a register of the board's management controller reads (intel-m10-bmc-hwmon.c)."""
    poke_card(card, BOARD + 2 * register, value)


def bound(card: str) -> bool:
    return (PCI / address(card) / "driver").exists()


def take_driver_off(card: str) -> None:
    """Once no port of it is open or mapped: Linux 6.1 would not survive that."""
    if bound(card):
        daemon_support.eventually(lambda: not any(map(openers, nodes(card))))
        daemon_support.eventually(lambda: not any(map(mapped, nodes(card))))
        (DRIVER / "unbind").write_text(address(card))


def unplug(card: str) -> None:
    """Take it off the bus, with the same care."""
    take_driver_off(card)
    knob(card, "absent", 1)
    if there(card):
        (PCI / address(card) / "remove").write_text("1")


def there(card: str) -> bool:
    """Whether the card is on its bus: what was taken off and is found there by chance is none."""
    try:
        return (PCI / address(card) / "vendor").read_text() == "0x8086\n"
    except FileNotFoundError:
        return False


def plug(card: str) -> None:
    if not there(card):
        if (PCI / address(card)).exists():
            (PCI / address(card) / "remove").write_text("1")
        knob(card, "absent", 0)
        (PCI.parent / "rescan").write_text("1")
    if not bound(card):
        (DRIVER / "bind").write_text(address(card))


def power_up(
    card: str,
    ports: int = 3,
    interface: str = daemon_support.ID,
    ofs: bool = False,  # noqa: FBT001, FBT002 - `described` reports it by position
    *,
    board: bool = False,
) -> None:
    """An unplugged card as it comes from the factory, all faults gone.

    `board`: on one that has a management controller; `ofs`: its AFU is in functions of their own.
    """
    if ofs:
        free_functions()
    for name in ("pr_err", "pr_stuck", "pr_deaf", "port_deaf", "stall_ms", "memory_busy"):
        knob(card, name, 0)
    knob(card, "pr_ports", 0xFF)
    knob(card, "functions", 0b11)
    knob(card, "layout", f"{ports} {interface[:16]} {interface[16:]} {2 if ofs else board:d}")


def free_functions() -> None:
    """No function has a driver."""
    for function in FUNCTIONS:
        if (VFIO / function).exists():
            daemon_support.eventually(lambda f=function: not openers(group(f)))
            (VFIO / "unbind").write_text(function)
        (PCI / function / "driver_override").write_text("\n")


def have_functions(card: str, *wanted: str) -> None:
    """Make these the virtual functions of an OFS card, in place of those that it has; or none."""
    number = PCI / address(card) / "sriov_numvfs"
    number.write_text("0")
    if wanted:
        knob(card, "functions", sum(1 << ALL_FUNCTIONS.index(one) for one in wanted))
        number.write_text(f"{len(wanted)}")
    tell(card)


def tell(card: str) -> None:
    """A uevent of the card's, as when functions of it come or go."""
    (PCI / address(card) / "uevent").write_text("add")


def group(function: str) -> str:
    """The node of a function's IOMMU group."""
    return f"/dev/vfio/{(PCI / function / 'iommu_group').resolve().name}"


def drivers() -> list[str]:
    """The driver of each function, empty for none."""
    links = [PCI / function / "driver" for function in FUNCTIONS]
    return [_target(link) for link in links]


def _target(link: Path) -> str:
    """The name of what it leads to; empty where it is not, or has just gone."""
    try:
        return link.readlink().name
    except FileNotFoundError:
        return ""


def described(spec: str) -> list[tuple[int, str, bool]]:
    """Ports, interface id and whether it is OFS, of each card of FPGA_PLUGIN_SIMULATED_CARDS."""
    found: list[tuple[int, str, bool]] = []
    for group in spec.split(","):
        parts = CARD.fullmatch(group)
        assert parts, f"no cards: {spec}"
        one = (int(parts[2]), parts[4] or daemon_support.ID, bool(parts[3]))
        found += [one] * int(parts[1])
    return found


def lay_out(spec: str) -> None:
    """These cards, all fresh; the machine's other cards are unplugged."""
    wanted = described(spec)
    assert len(wanted) <= len(cards()), f"the machine has {len(cards())} cards: {spec}"
    for card in cards():
        take_driver_off(card)
    for card, what in zip(cards(), wanted, strict=False):
        power_up(card, *what)
        plug(card)


COUNTED = {"pr-error": "pr_err", "pr-stuck": "pr_stuck", "port-deaf": "port_deaf"}
"""Faults that are files of the card's."""

LATCHED: dict[str, tuple[tuple[Callable[[str, int, int], None], int, int], ...]] = {
    "afu-hung": (
        (poke, AFU + 8, ALL_ONES),
        (poke, AFU + 16, ALL_ONES),
        (poke, PORT_ERRORS, MMIO_TIMEOUT),
    ),
    "port-fatal": ((poke, PORT_ERRORS, 1), (poke_card, NONFATAL, NONFATAL_PORT)),
    "pcie-error": ((poke_card, PCIE0_ERRORS, 1), (poke_card, NONFATAL, NONFATAL_PCIE)),
}
"""Faults that are registers of a region or its card; a PR or who clears them ends them."""


@dataclass
class Fault:
    """Trouble that was armed; like the file that arms it on simulated cards."""

    region: str
    word: str
    descriptor: int = -1
    image: tuple[int, int] = (0, 0)

    def arm(self) -> None:
        region = self.region
        port = int(region.partition("-p")[2])
        match self.word:
            case "pr-error" | "pr-stuck":
                knob(region, "pr_ports", 1 << port)
                knob(region, "pr_err" if self.word == "pr-error" else "pr_stuck", 1)
            case "port-deaf":
                knob(region, "port_deaf", 1 << port)
            case "port-open":
                slot = (PCI / address(region) / "virtfn0").exists()
                path = group(FUNCTIONS[0]) if slot else node(region)
                self.descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            case word if word in LATCHED:
                for write, offset, value in LATCHED[word]:
                    write(region, offset, value)
            case "thermal":
                poke(region, PORT_ERRORS, AP6_EVENT)
                poke(region, PORT_STATUS, POWER_AP6)
            case "fatal":
                afu = attributes()[region]["afu_id"]
                self.image = int(afu[16:], 16), int(afu[:16], 16)
                for offset in (PORT_ERRORS, AFU + 8, AFU + 16):
                    poke(region, offset, ALL_ONES)
            case word:
                raise AssertionError(f"no fault: {word}")

    def unlink(self) -> None:
        match self.word:
            case "port-deaf":
                knob(self.region, "port_deaf", 0)
            case "port-open":
                os.close(self.descriptor)
                self.descriptor = -1
            case "thermal":
                poke(self.region, PORT_ERRORS, 0)
                poke(self.region, PORT_STATUS, 0)
            case "fatal":
                poke(self.region, PORT_ERRORS, 0)
                for offset, half in zip((AFU + 8, AFU + 16), self.image, strict=True):
                    poke(self.region, offset, half)
            case _:
                knob(self.region, "pr_err", 0)
                knob(self.region, "pr_stuck", 0)

    def exists(self) -> bool:
        if self.word in COUNTED:
            return bool(count(self.region, COUNTED[self.word]))
        if self.word in LATCHED:
            one = attributes()[self.region]
            regions = PCI / address(self.region) / "fpga_region"
            (port,) = regions.glob(f"region*/dfl-port.{one['node']}/errors/errors")
            (fme,) = regions.glob("region*/dfl-fme.*/errors/pcie0_errors")
            return one["afu_id"] == "f" * 32 or any(int(r.read_text(), 0) for r in (port, fme))
        return True


def nodes(card: str) -> list[str]:
    """Its ports' device nodes."""
    ports = (PCI / address(card) / "fpga_region").glob("region*/dfl-port.*")
    return [f"/dev/{port.name}" for port in ports]


def openers(path: str) -> int:
    """How many descriptors of a node there are."""
    found = 0
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            found += os.readlink(link) == path
        except OSError:
            continue  # closed by now
    return found


def mapped(path: str) -> bool:
    """Whether a process has memory of a node mapped."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if f" {path}\n" in maps.read_text():
                return True
        except OSError:
            continue  # the process has ended
    return False


def attributes() -> dict[str, dict[str, Any]]:
    """By region what `state.json` reports simulated ones, as far as the tests ask."""
    found: dict[str, dict[str, Any]] = {}
    for card in cards():
        for port in (PCI / address(card) / "fpga_region").glob("region*/dfl-port.*"):
            try:
                port_id = int((port / "id").read_text(), 0)
            except OSError:
                continue  # is going, or has no driver yet
            region = f"{card}-p{port_id}"
            number = int(port.name.partition(".")[2])
            try:
                afu, poisoned = (port / "afu_id").read_text().strip(), False
            except OSError as error:
                # The driver does not say: the card's own memory does.
                afu, poisoned = (
                    (DEBUGFS / address(card) / "images").read_text().split()[port_id],
                    error.errno != errno.ENOENT,  # a slot's port has no such attribute
                )
            found[region] = {
                "node": number,
                "afu_id": afu,
                "poisoned": poisoned,
                "open": openers(f"/dev/{port.name}"),
            }
    return dict(sorted(found.items()))  # directories have no order


def node(region: str) -> str:
    return f"/dev/dfl-port.{attributes()[region]['node']}"


class RealNode(daemon_support.Node):
    """A node whose cards are those of the machine; there is one at a time."""

    has_clocks = False  # Linux' own drivers document none

    _living: "RealNode | None" = None

    def __init__(self, cards: str = "1x2", **settings: str) -> None:
        assert RealNode._living is None, "another node has the machine's cards"
        lay_out(cards)
        RealNode._living = self
        self._faults: list[Fault] = []
        super().__init__(cards, **settings)
        self.own_store(manifest=True)  # real cards want to know who may write it
        self.set(backend="dfl", health_interval="0.5")

    def start(self, *, kill_at: str = "") -> daemon_support.Plugin:
        wanted = float(self.settings["FPGA_PLUGIN_SIMULATED_PR_SECONDS"])
        seconds = min(wanted * SLOWER, LONGEST_PR)
        milliseconds = int(seconds * 1000)
        for card in cards():
            knob(card, "stall_ms", milliseconds)
        return super().start(kill_at=kill_at)

    def state(self) -> dict[str, dict[str, Any]]:
        return attributes()

    def until_programming(self, region: str, afu: str) -> None:
        """While a PR runs the driver does not say the port's AFU id."""

        def begun() -> bool:
            now = attributes()[region]
            return bool(now["poisoned"]) or now["afu_id"] == afu

        daemon_support.eventually(begun)

    def arm(self, region: str, word: str) -> Fault:  # type: ignore[override]  # as much of a Path as is used
        self._faults.append(Fault(region, word))
        self._faults[-1].arm()
        return self._faults[-1]

    def unplug(self, card: str) -> None:
        unplug(card)

    def take_driver_off(self, card: str) -> None:
        take_driver_off(card)

    def plug(self, card: str) -> None:
        """A simulated card that was pulled comes back with the factory's image."""
        power_up(
            card, *described(self.settings["FPGA_PLUGIN_SIMULATED_CARDS"])[cards().index(card)]
        )
        plug(card)

    def __exit__(self, *more: object) -> None:
        super().__exit__(*more)
        RealNode._living = None
        for fault in self._faults:
            if fault.descriptor >= 0:
                os.close(fault.descriptor)
        for card in cards():
            take_driver_off(card)
