"""The virtual functions of a simulated OFS card: what sysfs shows, and vfio-pci's driver files.

The card has two. The first shows the slot's AFU, the second the placeholder that an image leaves in
a function which it does not use. As with the vendor's driver, and other than in mainline Linux,
they can be made while the port has its driver, and get dfl-pci unless the card is set not to probe
them; what that shows of them is left out. Which there are, and which driver each has, is part of
the card's state; overrides are not.
"""

import errno
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from fpga_plugin.hardware.simulated.board import ALL_ONES, Board, unsigned
from fpga_plugin.hardware.simulated.faults import SimulatedFault
from fpga_plugin.hardware.simulated.state import MOST_FUNCTIONS
from fpga_plugin.hardware.simulated.tree import Attribute, Node, Symlink, failure
from fpga_plugin.ids import PciAddress
from fpga_plugin.settings.settings import SimulatedKind

VFIO, DFL = "vfio-pci", "dfl-pci"
"""Drivers of a virtual function."""

PLACEHOLDER = (0x0110_0000_0000_0000, 0xD15A_B1ED_0000_0000)
"""Lower and upper half of d15ab1ed-0000-0000-0110-000000000000."""

_AFU_HEADER = 1 << 60 | 1 << 40
"""An AFU that ends the list (drivers/fpga/dfl.h)."""

Stop = Callable[[str], None]
"""Ends the process where the real kernel would hang or crash; says why."""


def is_ofs(board: Board) -> bool:
    """Whether the card's AFU is in functions of its own."""
    return SimulatedKind.OFS in board.shape.kinds


def drivers(board: Board) -> tuple[str, ...]:
    """The driver of each function that there is, empty for none."""
    return (board.state(0).functions or ()) if is_ofs(board) else ()


def address(board: Board, index: int) -> PciAddress:
    """A virtual function's address."""
    return replace(board.address, function=index + 1)


def path(board: Board, index: int) -> str:
    """Its directory."""
    root = f"pci{board.address.domain:04x}:{board.address.bus:02x}"
    return f"/sys/devices/{root}/{address(board, index)}"


def group(board: Board, index: int) -> int:
    """Its IOMMU group."""
    return (board.address.domain << 12) + (board.address.bus << 4) + index


def group_path(board: Board, index: int) -> str:
    """Its IOMMU group's directory."""
    return f"/sys/kernel/iommu_groups/{group(board, index)}"


def instance(board: Board, number: int) -> int:
    """A number that stays over restarts of the daemon, and that a card plugged later has not."""
    return (board.file.changed << 16) + number


def registers(board: Board, index: int) -> tuple[int, int, int]:
    """The first three registers of BAR 0: DFH, GUID_L and GUID_H."""
    busy = board.binding is not None and board.binding.reconfiguring is not None
    if busy or board.machine.faults.armed(board.region(0)) is SimulatedFault.FATAL:
        return ALL_ONES, ALL_ONES, ALL_ONES
    if index:
        return _AFU_HEADER, *PLACEHOLDER
    afu_id = board.state(0).afu_id
    return _AFU_HEADER, int(afu_id[16:], 16), int(afu_id[:16], 16)


class VfioDriver:
    """The files that make virtual functions and bind them.

    Args:
        changed: called with a card whose functions changed; the machine's lock is held.
        stop: for what the real kernel does not survive.
    """

    def __init__(self, changed: Callable[[Board], None], stop: Stop) -> None:
        self._changed = changed
        self._stop = stop
        self._overrides: dict[PciAddress, str] = {}
        self.open: set[int] = set()
        """Groups that are open."""

    def physical(self, board: Board) -> dict[str, Node]:
        """What the physical function's directory has of its virtual ones."""
        links: dict[str, Node] = {
            f"virtfn{index}": Symlink(path(board, index)) for index in range(len(drivers(board)))
        }
        return {
            "sriov_totalvfs": str(MOST_FUNCTIONS),
            "sriov_drivers_autoprobe": Attribute(
                lambda: str(int(board.autoprobe)), partial(self._set_autoprobe, board)
            ),
            "sriov_numvfs": Attribute(
                lambda: str(len(drivers(board))), partial(self._set_number, board)
            ),
            **links,
        }

    def entries(self, board: Board, index: int, parent: str) -> dict[str, Node]:
        """A virtual function's directory."""
        entries: dict[str, Node] = {
            "vendor": "0x8086",
            "device": "0xbccf",
            "subsystem_vendor": "0x8086",
            "subsystem_device": "0x1771",
            "class": "0x120000",
            "physfn": Symlink(parent),
            "iommu_group": Symlink(group_path(board, index)),
            "driver_override": Attribute(
                lambda: self._overrides.get(address(board, index), "(null)"),
                partial(self._override, address(board, index)),
            ),
            "subsystem": Symlink("/sys/bus/pci"),
        }
        if SimulatedKind.NO_IOMMU in board.shape.kinds:
            del entries["iommu_group"]
        if found := drivers(board)[index]:
            entries["driver"] = Symlink(f"/sys/bus/pci/drivers/{found}")
        return entries

    def bind(self, board: Board, index: int) -> None:
        """Write an address to vfio-pci's `bind`.

        Raises:
            OSError: ENODEV, the driver is not for it; EBUSY, it has one.
        """
        if drivers(board)[index]:
            raise failure(errno.EBUSY, str(address(board, index)))
        if self._overrides.get(address(board, index)) != VFIO:
            raise failure(errno.ENODEV, str(address(board, index)))
        self._put(board, index, VFIO)

    def unbind(self, board: Board, index: int, name: str) -> None:
        """Write an address to the `unbind` of the driver of that name.

        Raises:
            OSError: ENODEV, it does not have this driver.
        """
        if drivers(board)[index] != name:
            raise failure(errno.ENODEV, str(address(board, index)))
        if group(board, index) in self.open:
            self._stop(f"vfio-pci was unbound from {address(board, index)} while it was open")
        self._put(board, index, "")

    def _put(self, board: Board, index: int, driver: str) -> None:
        now = list(drivers(board))
        now[index] = driver
        board.change(0, lambda state: replace(state, functions=tuple(now)))
        self._changed(board)

    def _override(self, function: PciAddress, text: str) -> None:
        if word := text.strip():
            self._overrides[function] = word
        else:
            self._overrides.pop(function, None)

    def _set_autoprobe(self, board: Board, text: str) -> None:
        board.autoprobe = bool(unsigned(text))

    def _set_number(self, board: Board, text: str) -> None:
        number, now = unsigned(text), len(drivers(board))
        if number > MOST_FUNCTIONS:
            raise failure(errno.ERANGE, str(board.address))
        if number == now:
            return
        if number and now:
            raise failure(errno.EBUSY, str(board.address))
        tenant = board.machine.faults.armed(board.region(0)) is SimulatedFault.PORT_OPEN
        bound = [group(board, i) for i, driver in enumerate(drivers(board)) if driver == VFIO]
        if any(tenant or each in self.open for each in bound):
            self._stop(f"the virtual functions of {board.address} were removed while open")
        for index in range(MOST_FUNCTIONS):
            self._overrides.pop(address(board, index), None)
        board.generation += 1
        probed = DFL if board.autoprobe else ""
        board.change(0, lambda state: replace(state, functions=(probed,) * number))
        self._changed(board)
