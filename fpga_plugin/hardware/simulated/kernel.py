"""The kernel that simulated cards run under: sysfs, device nodes and ioctls, without any of them.

It stands below the very DFL code that drives real cards. Reality is the directory: every path and
every open looks whether the card's file is still there, so that a card is gone the moment its file
is, whether or not anybody heard an event.

What a card's unplugging does to those who had it open is that their calls fail with the errno of a
device that is gone; the real kernel may crash instead. The FPGA manager's state and status are not
in the file: after a restart of the daemon they read as after a load of the driver.
"""

import errno
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from fpga_plugin.hardware.kernel import Handle, Registers
from fpga_plugin.hardware.simulated.board import Board, OpenFile
from fpga_plugin.hardware.simulated.driver import PciDriver
from fpga_plugin.hardware.simulated.faults import SimulatedFault
from fpga_plugin.hardware.simulated.pr import STUCK_SECONDS, Reconfiguration
from fpga_plugin.hardware.simulated.rack import Rack
from fpga_plugin.hardware.simulated.tree import Attribute, Lazy, Node, Symlink, failure, resolve
from fpga_plugin.hardware.simulated.vfio import VfioFiles
from fpga_plugin.ids import CardId
from fpga_plugin.settings.settings import SimulatedGroup

# Numbers of include/uapi/linux/fpga-dfl.h, once more and not from the code above this seam: a
# slip there must not meet the same slip here.
_GET_API_VERSION, _CHECK_EXTENSION = 0xB600, 0xB601
_PORT_RESET, _FME_PORT_PR = 0xB640, 0xB680
_SET_IRQ = frozenset({0x4008B646, 0x4008B648, 0x4008B684})

_NODE = re.compile(r"/dev/dfl-(fme|port)\.([0-9]{1,9})", re.ASCII)


class SimulatedKernel:
    """Implements `fpga_plugin.hardware.kernel.Kernel`. Thread safe.

    Args:
        directory: FPGA_PLUGIN_SIMULATED_DIR.
        groups: FPGA_PLUGIN_SIMULATED_CARDS.
        pr_seconds: how long a PR takes.
        stuck_seconds: how long one takes that `pr-stuck` is armed for.
        owner: this process holds the plugin's lock, so that no other has ports open. A reader
            (`owner=False`) writes nothing and cannot open nodes.
        sleep: waits for a PR; cannot be interrupted.

    Attributes:
        owner: as given.
        rack: the cards.
        note_removal: called for cards whose files were removed; other drivers' cards share the
            directory.

    Raises:
        OSError: the directory cannot be made or written.
    """

    def __init__(
        self,
        directory: str,
        groups: Sequence[SimulatedGroup],
        *,
        pr_seconds: float = 0.05,
        stuck_seconds: float = STUCK_SECONDS,
        owner: bool = True,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.directory = directory
        self.owner = owner
        self._listeners: list[Callable[[CardId], None]] = []
        self._open: dict[Handle, OpenFile] = {}
        self._next_handle = 3
        self.rack = Rack(
            directory,
            groups,
            owner=owner,
            bind=lambda text: self._driver.bind(text),  # noqa: PLW0108 - it comes after the rack
            unbind=lambda text: self._driver.unbind(text),  # noqa: PLW0108 - the same
            stop=lambda what: self._driver.oops(what),  # noqa: PLW0108 - the same
        )
        self.note_removal = [self.rack.note_removal]
        self._lock = self.rack.lock
        self._driver = PciDriver(directory, self.rack, self.tell)
        self._vfio = VfioFiles(self.rack, self.rack.vfio, self._next)
        self._pr = Reconfiguration(
            self.rack, pr_seconds=pr_seconds, stuck_seconds=stuck_seconds, sleep=sleep
        )

    @property
    def cards_directory(self) -> str:
        """One file a plugged card."""
        return self.rack.slots.cards_directory

    @property
    def faults_directory(self) -> str:
        """One file an armed fault."""
        return self.rack.machine.faults.directory

    # The Kernel protocol.

    def boot_id(self) -> str:
        """The machine's boot id; the first line of `boot_id` in the directory plays another."""
        for path in (os.path.join(self.directory, "boot_id"), "/proc/sys/kernel/random/boot_id"):
            try:
                with open(path, encoding="ascii", errors="replace") as file:
                    return file.readline().strip()
            except FileNotFoundError:
                continue
        raise failure(errno.ENOENT, "/proc/sys/kernel/random/boot_id")

    def listdir(self, path: str) -> list[str]:
        """Names in a sysfs directory."""
        with self._lock:
            _, node = self._resolve(path)
            if isinstance(node, (str, Attribute, Symlink)):
                raise failure(errno.ENOTDIR, path)
            return node.names()

    def realpath(self, path: str) -> str:
        """Where a sysfs path leads."""
        with self._lock:
            return self._resolve(path)[0]

    def exists(self, path: str) -> bool:
        """Whether a sysfs path leads anywhere."""
        try:
            self.realpath(path)
        except OSError:
            return False
        return True

    def instance(self, path: str) -> int:
        """Which life of the drivers a port's directory is of; 0 for directories without one."""
        node = self._node(path)
        return node.instance if isinstance(node, Lazy) else 0

    def read(self, path: str) -> str:
        """A sysfs attribute."""
        match self._node(path):
            case str() as text:
                return text
            case Attribute(show=show) if show is not None:
                with _at(path):
                    return show()
            case Attribute():
                raise failure(errno.EACCES, path)
            case _:
                raise failure(errno.EISDIR, path)

    def write(self, path: str, text: str) -> None:
        """Write a sysfs attribute."""
        match self._node(path):
            case Attribute(store=store) if store is not None and self.owner:
                with _at(path):
                    store(text)
            case str() | Attribute():
                raise failure(errno.EACCES, path)
            case _:
                raise failure(errno.EISDIR, path)

    def open(self, node: str, flags: int) -> Handle:
        """Open a device node; O_EXCL means that nobody else has it open, nor can open it."""
        vfio = VfioFiles.is_node(node)
        if not vfio and _NODE.fullmatch(node) is None:
            raise failure(errno.ENOENT, node)
        if not self.owner:
            raise failure(errno.EACCES, node)
        if vfio:
            with self._lock:
                return self._vfio.open(node)
        match = _NODE.fullmatch(node)
        assert match is not None, "just asked"
        board, port = self._device(node, match[1], int(match[2]))
        exclusive = bool(flags & os.O_EXCL)
        if port is None:
            return self._open_fme(board, node, exclusive=exclusive)
        return self._open_port(board, port, node, exclusive=exclusive)

    def ioctl(self, handle: Handle, request: int, argument: bytes | int) -> int:
        """The ioctls of include/uapi/linux/fpga-dfl.h that a plugin needs; EINVAL for the rest."""
        with self._lock:
            if handle in self._vfio:
                return self._vfio.ioctl(handle, request, argument)
        file = self._file(handle)
        with self._lock:
            self.rack.look(file.board.card)
        if not file.alive:
            # afu_ioctl and fme_ioctl take ENODEV for "not mine" and end up with EINVAL.
            raise failure(errno.EINVAL, file.board.card)
        if request in {_GET_API_VERSION, _CHECK_EXTENSION}:
            return 0
        if request in _SET_IRQ:
            raise failure(errno.ENOENT, file.board.card)  # a card without interrupts
        if request == _PORT_RESET and file.port is not None and argument == 0:
            file.board.reset(file.port)
            return 0  # on a poisoned port too
        if request == _FME_PORT_PR and file.port is None:
            return self._pr.run(file, argument)
        raise failure(errno.EINVAL, file.board.card)

    def map(self, handle: Handle, length: int) -> Registers:  # noqa: ARG002 - of the interface
        """Registers of a PCI function; nothing else of a simulated card has any (ENODEV)."""
        with self._lock:
            if handle not in self._vfio:
                raise failure(errno.ENODEV)
            return self._vfio.map(handle)

    def query(self, handle: Handle, request: int, argument: bytes) -> bytes:
        """An ioctl that fills a struct: VFIO's only."""
        with self._lock:
            if handle not in self._vfio:
                raise failure(errno.EINVAL)
            return self._vfio.query(handle, request, argument)

    def close(self, handle: Handle) -> None:
        """Close a device node. The FME's waits for a PR that runs."""
        with self._lock:
            if handle in self._vfio:
                self._vfio.close(handle)
                return
            if (file := self._open.pop(handle, None)) is None:
                raise failure(errno.EBADF)
        binding = file.binding
        if file.port is None:
            with file.board.fme_lock:
                binding.fme_open -= 1
                binding.fme_exclusive &= binding.fme_open > 0
            return
        with self._lock:
            binding.exclusive -= {file.port}
            if file.alive:
                state = file.board.state(file.port)
                self.rack.put(file.board.region(file.port), replace(state, open=state.open - 1))
                if state.open == 1:
                    with suppress(OSError):  # afu_release does not look at what came of it
                        file.board.reset(file.port)
            self.rack.settle()

    # What the event source needs.

    def removed(self, name: str) -> CardId | None:
        """Told that a file of `cards/` was removed; returns the card. Does no I/O.

        A card that was taken out and put back at once is seen as that, not as never moved, even
        if its new file got the inode of the old one.
        """
        if (card := self.rack.slots.parse(name)) is not None:
            for note in self.note_removal:
                note(card)
        return card

    def card(self, name: str) -> CardId | None:
        """The card that a file of `cards/` stands for; None for other names."""
        return self.rack.slots.parse(name)

    def subscribe(self, listener: Callable[[CardId], None]) -> Callable[[], None]:
        """Call `listener`, from any thread, when drivers are bound or unbound; returns its end."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    # Device nodes.

    def _device(self, node: str, kind: str, number: int) -> tuple[Board, int | None]:
        with self._lock:
            topology = self.rack.topology
            if (found := topology.device(kind, number)) is None:
                self.rack.look_at_all()
            else:
                self.rack.look(found[0].card)
            found = topology.device(kind, number)
        if found is None:
            raise failure(errno.ENXIO, node)
        return found

    def _open_fme(self, board: Board, node: str, *, exclusive: bool) -> Handle:
        with board.fme_lock, self._lock:
            binding = board.binding
            if board.gone or binding is None:
                raise failure(errno.ENXIO, node)
            if binding.fme_exclusive or (exclusive and (binding.fme_open or board.fme_held())):
                raise failure(errno.EBUSY, node)
            binding.fme_open += 1
            binding.fme_exclusive = exclusive
            return self._handle(OpenFile(board, binding, None))

    def _open_port(self, board: Board, port: int, node: str, *, exclusive: bool) -> Handle:
        with self._lock:
            binding = board.binding
            if board.gone or binding is None:
                raise failure(errno.ENXIO, node)
            state = board.state(port)
            tenant = self.rack.machine.faults.armed(board.region(port)) is SimulatedFault.PORT_OPEN
            if port in binding.exclusive or (exclusive and (state.open or tenant)):
                raise failure(errno.EBUSY, node)
            self.rack.machine.state.commit(board.region(port), replace(state, open=state.open + 1))
            if exclusive:
                binding.exclusive |= {port}
            return self._handle(OpenFile(board, binding, port))

    def _next(self) -> Handle:
        handle = Handle(self._next_handle)
        self._next_handle += 1
        return handle

    def _handle(self, file: OpenFile) -> Handle:
        handle = self._next()
        self._open[handle] = file
        return handle

    def _file(self, handle: Handle) -> OpenFile:
        file = self._open.get(handle)
        if file is None:
            raise failure(errno.EBADF)
        return file

    def tell(self, card: CardId) -> None:
        """Drivers or nodes of a card came or went: the uevents of it."""
        for listener in tuple(self._listeners):
            listener(card)

    def _node(self, path: str) -> Node:
        with self._lock:
            return self._resolve(path)[1]

    def _resolve(self, path: str) -> tuple[str, Node]:
        return resolve(self.rack.topology.root, path)


@contextmanager
def _at(path: str) -> Iterator[None]:
    """An attribute's OSError names its file, as that of the real one does."""
    try:
        yield
    except OSError as error:
        raise failure(error.errno or errno.EIO, path) from error
