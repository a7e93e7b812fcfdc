"""Partial reconfiguration: what the ioctl DFL_FPGA_FME_PORT_PR does to a simulated card.

After fme_pr (dfl-fme-pr.c) and fpga_region_program_fpga (fpga-region.c): nothing is checked of the
image, not even whether the port is in use.

A PR that the death of the process interrupts completes, as in the kernel, where it cannot be
killed. The process takes the simulation with it, so the outcome of a PR is written to `state.json`
when the PR *begins*; until its time is over only this process's memory says that the port is busy.
The file is then right whenever the process dies. A fault is used up after that, so that none is
lost without its effect.
"""

import ctypes
import errno
import struct
from collections.abc import Callable
from dataclasses import replace

from fpga_plugin.hardware.simulated.board import AFU_BYTES, OpenFile, image_afu_id
from fpga_plugin.hardware.simulated.faults import SimulatedFault
from fpga_plugin.hardware.simulated.rack import Rack
from fpga_plugin.hardware.simulated.state import RegionState
from fpga_plugin.hardware.simulated.tree import failure
from fpga_plugin.settings.settings import SimulatedKind

STUCK_SECONDS = 8.0
"""How long the driver waits for a PR that never ends (PR_WAIT_TIMEOUT, dfl-fme-mgr.c)."""

_PORT_PR = struct.Struct("<IIIIQ")
"""struct dfl_fpga_fme_port_pr: argsz, flags, port_id, buffer_size, buffer_address (fpga-dfl.h)."""


class Reconfiguration:
    """Runs PRs, one at a time a card.

    Args:
        rack: the cards.
        pr_seconds: how long a PR takes.
        stuck_seconds: how long one takes that never ends.
        sleep: waits for that long.
    """

    def __init__(
        self,
        rack: Rack,
        *,
        pr_seconds: float,
        stuck_seconds: float,
        sleep: Callable[[float], None],
    ) -> None:
        self._rack = rack
        self._pr_seconds = pr_seconds
        self._stuck_seconds = stuck_seconds
        self._sleep = sleep

    def run(self, file: OpenFile, argument: bytes | int) -> int:
        """One ioctl on an open FME; `argument` is the struct, with an address of this process.

        Raises:
            OSError: as the drivers say it; EINVAL also when the card goes meanwhile (fme_ioctl
                takes its ENODEV for "not mine").
        """
        board = file.board
        if isinstance(argument, int) or len(argument) < _PORT_PR.size:
            raise failure(errno.EFAULT, board.card)
        argsz, flags, port, size, address = _PORT_PR.unpack_from(argument)
        if argsz < _PORT_PR.size or flags or port not in board.ports:
            raise failure(errno.EINVAL, board.card)
        if SimulatedKind.NO_PR in board.shape.kinds:
            raise failure(errno.EIO, board.card)  # a guess: nobody may find out
        if size == 0:
            raise failure(errno.ENOMEM, board.card)
        if address == 0:
            raise failure(errno.EFAULT, board.card)
        afu_id = image_afu_id(ctypes.string_at(address, min(size, AFU_BYTES)))
        with board.fme_lock:
            with self._rack.lock:
                if not file.alive:
                    raise failure(errno.EINVAL, board.card)
                board.reset(port)  # before a word is streamed, fpga_bridges_disable
                fault = self._begin(file, port, replace(board.state(port), afu_id=afu_id))
            try:
                self._sleep(
                    self._stuck_seconds if fault is SimulatedFault.PR_STUCK else self._pr_seconds
                )
            finally:
                with self._rack.lock:
                    self._rack.look(board.card)
                    file.binding.reconfiguring = None
            return self._end(file, fault)

    def _begin(self, file: OpenFile, port: int, programmed: RegionState) -> SimulatedFault | None:
        """Write down how the PR will end; returns the fault that it ends with, now used up."""
        board, binding = file.board, file.binding
        region = board.region(port)
        before = board.state(port)
        fault = self._rack.machine.faults.armed(region)
        hung = fault is SimulatedFault.AFU_HUNG and not before.poisoned
        if fault not in {SimulatedFault.PR_ERROR, SimulatedFault.PR_STUCK}:
            fault = None
        # A poisoned port swallows the PR, which then claims success; a failed one loads nothing.
        outcome = programmed if fault is None and not before.poisoned else before
        poisoned = before.poisoned or fault is not None
        self._rack.machine.state.commit(region, replace(outcome, poisoned=poisoned))
        if fault is not None or hung:
            self._rack.machine.faults.use_up(region)
        binding.reconfiguring = port
        binding.manager_state = "write"
        binding.manager_status = ""
        return fault

    def _end(self, file: OpenFile, fault: SimulatedFault | None) -> int:
        binding, card = file.binding, file.board.card
        if not file.alive:
            raise failure(errno.EINVAL, card)
        match fault:
            case SimulatedFault.PR_ERROR:
                binding.manager_state = "write complete error"
                binding.manager_status = "reconfig operation error"
                raise failure(errno.EIO, card)
            case SimulatedFault.PR_STUCK:
                binding.manager_state = "write complete error"
                raise failure(errno.ETIMEDOUT, card)
            case _:
                binding.manager_state = "operating"
                return 0
