"""The files `bind` and `unbind` of the PCI driver dfl-pci.

A rebind is what repairs a poisoned port: the counter that a failed PR leaked dies with the drivers'
data, the FPGA keeps its image. With a port open the real kernel crashes in afu_release when that is
closed (Linux 6.1), and with the FME open its release uses freed memory: the simulated one says so
at once, loudly.
"""

import errno
import os
from collections.abc import Callable

from fpga_plugin.hardware.simulated import files
from fpga_plugin.hardware.simulated.board import Board
from fpga_plugin.hardware.simulated.faults import SimulatedFault
from fpga_plugin.hardware.simulated.rack import Rack
from fpga_plugin.hardware.simulated.tree import failure
from fpga_plugin.ids import CardId, PciAddress


class KernelOopsError(RuntimeError):
    """The real kernel would have crashed here; `oops` in the directory says the same.

    No OSError on purpose: nothing may take it for an answer of the hardware.
    """


class PciDriver:
    """Binds the drivers to cards and unbinds them.

    Args:
        directory: where `oops` is written.
        rack: the cards.
        tell: called with the card after each change: the uevents of it.
    """

    def __init__(self, directory: str, rack: Rack, tell: Callable[[CardId], None]) -> None:
        self._directory = directory
        self._rack = rack
        self._tell = tell

    def unbind(self, text: str) -> None:
        """Write a PCI address to `unbind`. Waits for a PR that runs.

        Raises:
            OSError: ENODEV, no such card or no driver bound to it.
            KernelOopsError: a port of the card was open.
        """
        board = self._addressed(text)
        with board.fme_lock, self._rack.lock:
            if board.gone or board.binding is None:
                raise failure(errno.ENODEV, str(board.address))
            for port in board.ports:
                region = board.region(port)
                tenant = self._rack.machine.faults.armed(region) is SimulatedFault.PORT_OPEN
                if tenant or board.state(port).open:
                    self.oops(
                        f"dfl-pci was unbound from {board.address} while {region} was open"
                        " (afu_release crashes when it is closed)"
                    )
            if board.binding.fme_open or board.fme_held():
                self.oops(
                    f"dfl-pci was unbound from {board.address} while its FME was open"
                    " (fme_release uses freed memory where the card has interrupts)"
                )
            board.unbind()
            self._rack.changed()
            self._rack.settle()
        self._tell(board.card)

    def bind(self, text: str) -> None:
        """Write a PCI address to `bind`.

        Raises:
            OSError: ENODEV, no such card; EBUSY, bound already.
        """
        board = self._addressed(text)
        with self._rack.lock:
            if board.gone:
                raise failure(errno.ENODEV, str(board.address))
            if board.binding is not None:
                raise failure(errno.EBUSY, str(board.address))
            board.bind()
            self._rack.changed()
            self._rack.settle()
        self._tell(board.card)

    def _addressed(self, text: str) -> Board:
        try:
            card = PciAddress.parse(text.removesuffix("\n")).card_id
        except ValueError:
            raise failure(errno.ENODEV) from None
        with self._rack.lock:
            if (board := self._rack.look(card)) is None:
                raise failure(errno.ENODEV, card)
            return board

    def oops(self, what: str) -> None:
        """The real kernel would crash or hang here: say so, loudly."""
        files.replace(os.path.join(self._directory, "oops"), f"{what}\n")
        raise KernelOopsError(f"kernel oops: {what}")
