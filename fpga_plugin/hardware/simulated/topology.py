"""The part of sysfs that spans cards: classes, buses and the numbers of device nodes.

Each of these directories is computed from the plugged cards when it is next looked at after a
change. Listing one looks at the files of all cards first; finding one entry does so only where the
entry is unknown, because the card that it leads to is looked at on the way anyway.
"""

import errno
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from fpga_plugin.hardware.simulated import functions, layout
from fpga_plugin.hardware.simulated.board import Binding, Board
from fpga_plugin.hardware.simulated.functions import VfioDriver
from fpga_plugin.hardware.simulated.tree import (
    Attribute,
    Directory,
    Fixed,
    Lazy,
    Node,
    Symlink,
    failure,
)
from fpga_plugin.ids import CardId


class _Index:
    """A directory over all cards."""

    def __init__(
        self, build: Callable[[], Mapping[str, Node]], look_at_all: Callable[[], None]
    ) -> None:
        self._build = build
        self._look_at_all = look_at_all
        self._entries: Mapping[str, Node] | None = None

    def forget(self) -> None:
        """Compute it again when it is next looked at."""
        self._entries = None

    def names(self) -> list[str]:
        """What is in it."""
        self._look_at_all()
        return list(self._now())

    def child(self, name: str) -> Node | None:
        """One entry of it."""
        if name not in self._now():
            self._look_at_all()
        return self._now().get(name)

    def _now(self) -> Mapping[str, Node]:
        if self._entries is None:
            self._entries = self._build()
        return self._entries


class Topology:
    """What all cards show together. Not thread safe: the kernel's lock covers it.

    Args:
        boards: the plugged cards, kept up to date by the caller.
        look_at_all: makes `boards` what the files say.
        look_at: raises OSError if a card has gone.
        bind: takes what is written to dfl-pci's `bind`.
        unbind: the same for `unbind`.
        vfio: the driver of virtual functions.

    Attributes:
        root: the directory `/`.
    """

    def __init__(
        self,
        boards: Mapping[CardId, Board],
        *,
        look_at_all: Callable[[], None],
        look_at: Callable[[Board], None],
        bind: Callable[[str], None],
        unbind: Callable[[str], None],
        vfio: VfioDriver,
    ) -> None:
        self._boards = boards
        self._vfio = vfio
        self._look_at_all = look_at_all
        self._look_at = look_at
        self._unbind = unbind
        self._driver_files = {
            "bind": Attribute(store=bind),
            "unbind": Attribute(store=self._unbind_dfl),
        }
        self._indexes: list[_Index] = []
        self._devices: dict[tuple[str, int], tuple[Board, int | None]] | None = None
        self.root: Directory = Fixed({"sys": self._sys()})

    def changed(self) -> None:
        """Cards came, went, or were bound again."""
        self._devices = None
        for index in self._indexes:
            index.forget()

    def device(self, kind: str, number: int) -> tuple[Board, int | None] | None:
        """What a device node stands for: a card and a port id, or None for its FME."""
        if self._devices is None:
            self._devices = {}
            for board, binding in self._bound():
                self._devices["fme", binding.fme] = board, None
                for port in board.ports:
                    self._devices["port", binding.nodes[port]] = board, port
        return self._devices.get((kind, number))

    def _sys(self) -> Directory:
        fpga_drivers = Fixed(
            {"dfl-fme": self._index(self._fmes), "dfl-port": self._index(self._ports)}
        )
        buses: dict[str, Node] = {
            "pci": Fixed(
                {
                    "devices": self._index(self._functions),
                    "drivers": Fixed(
                        {
                            "dfl-pci": self._index(self._pci_driver),
                            "vfio-pci": self._index(self._vfio_driver),
                        }
                    ),
                }
            ),
            "platform": Fixed({"devices": self._index(self._platform), "drivers": fpga_drivers}),
            "dfl": Fixed(
                {
                    "devices": self._index(self._memories),
                    "drivers": Fixed({"dfl-emif": self._index(self._memories)}),
                }
            ),
        }
        classes: dict[str, Node] = {
            "fpga_region": self._index(self._regions),
            "fpga_manager": self._index(self._managers),
            "hwmon": self._index(self._sensors),
            "vfio": self._index(self._vfio_groups),
        }
        devices = self._index(self._roots)
        groups = Fixed({"iommu_groups": self._index(self._groups)})
        return Fixed(
            {"bus": Fixed(buses), "class": Fixed(classes), "devices": devices, "kernel": groups}
        )

    def _index(self, build: Callable[[], Mapping[str, Node]]) -> _Index:
        index = _Index(build, self._look_at_all)
        self._indexes.append(index)
        return index

    def _bound(self) -> Iterator[tuple[Board, Binding]]:
        for _, board in sorted(self._boards.items()):
            if board.binding is not None:
                yield board, board.binding

    def _roots(self) -> Mapping[str, Node]:
        roots: defaultdict[str, dict[str, Node]] = defaultdict(dict)
        for _, board in sorted(self._boards.items()):
            functions_of_root = roots[layout.root_name(board)]
            functions_of_root[str(board.address)] = self._function(board)
            for index in self._virtual(board):
                name = str(functions.address(board, index))
                functions_of_root[name] = self._virtual_function(board, index)
        return {name: Fixed(functions) for name, functions in roots.items()}

    def _function(self, board: Board) -> Directory:
        return Lazy(
            lambda: layout.pci_entries(board, self._vfio), guard=lambda: self._look_at(board)
        )

    def _virtual_function(self, board: Board, index: int) -> Directory:
        return Lazy(
            lambda: self._vfio.entries(board, index, layout.pci_path(board)),
            guard=lambda: self._look_at(board),
            instance=functions.instance(board, board.generation),
        )

    @staticmethod
    def _virtual(board: Board) -> range:
        return range(len(functions.drivers(board)))

    def _each_virtual(self) -> Iterator[tuple[Board, int]]:
        for _, board in sorted(self._boards.items()):
            for index in self._virtual(board):
                yield board, index

    def _functions(self) -> Mapping[str, Node]:
        physical = {
            str(board.address): Symlink(layout.pci_path(board))
            for _, board in sorted(self._boards.items())
        }
        virtual = {
            str(functions.address(board, index)): Symlink(functions.path(board, index))
            for board, index in self._each_virtual()
        }
        return {**physical, **virtual}

    def _groups(self) -> Mapping[str, Node]:
        return {
            str(functions.group(board, index)): Fixed(
                {
                    "type": "DMA",
                    "devices": Fixed(
                        {
                            str(functions.address(board, index)): Symlink(
                                functions.path(board, index)
                            )
                        }
                    ),
                }
            )
            for board, index in self._each_virtual()
        }

    def _vfio_groups(self) -> Mapping[str, Node]:
        return {
            str(number): Fixed({"dev": f"{layout.VFIO_MAJOR}:{number}"})
            for board, index in self._each_virtual()
            if functions.drivers(board)[index] == functions.VFIO
            for number in [functions.group(board, index)]
        }

    def _vfio_driver(self) -> Mapping[str, Node]:
        files = {
            "bind": Attribute(store=lambda text: self._vfio.bind(*self._addressed(text))),
            "unbind": Attribute(
                store=lambda text: self._vfio.unbind(*self._addressed(text), functions.VFIO)
            ),
        }
        return {**files, **self._with_driver(functions.VFIO)}

    def _with_driver(self, driver: str) -> Mapping[str, Node]:
        return {
            str(functions.address(board, index)): Symlink(functions.path(board, index))
            for board, index in self._each_virtual()
            if functions.drivers(board)[index] == driver
        }

    def _unbind_dfl(self, text: str) -> None:
        try:
            board, index = self._addressed(text)
        except OSError:
            self._unbind(text)
        else:
            self._vfio.unbind(board, index, functions.DFL)

    def _addressed(self, text: str) -> tuple[Board, int]:
        for board, index in self._each_virtual():
            if text.removesuffix("\n") == str(functions.address(board, index)):
                return board, index
        raise failure(errno.ENODEV)

    def _pci_driver(self) -> Mapping[str, Node]:
        bound = {str(board.address): Symlink(layout.pci_path(board)) for board, _ in self._bound()}
        return {**self._driver_files, **bound, **self._with_driver(functions.DFL)}

    def _regions(self) -> Mapping[str, Node]:
        paths = []
        for board, binding in self._bound():
            paths.append(layout.base_path(board, binding))
            paths += [layout.region_path(board, binding, port) for port in board.ports]
        return _links(paths)

    def _managers(self) -> Mapping[str, Node]:
        return _links([layout.manager_path(*bound) for bound in self._bound()])

    def _sensors(self) -> Mapping[str, Node]:
        return _links([path for bound in self._bound() for path in layout.sensor_paths(*bound)])

    def _memories(self) -> Mapping[str, Node]:
        return _links([layout.memory_path(*bound) for bound in self._bound()])

    def _fmes(self) -> Mapping[str, Node]:
        return _links([layout.fme_path(*bound) for bound in self._bound()])

    def _ports(self) -> Mapping[str, Node]:
        return _links(
            [
                layout.port_path(board, binding, port)
                for board, binding in self._bound()
                for port in board.ports
            ]
        )

    def _platform(self) -> Mapping[str, Node]:
        return {**self._fmes(), **self._ports()}


def _links(paths: list[str]) -> dict[str, Node]:
    return {path.rpartition("/")[2]: Symlink(path) for path in paths}
