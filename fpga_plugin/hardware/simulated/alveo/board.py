"""A simulated Alveo card: its FPGA, and the drivers of its two functions.

Time passes by the clock, not by threads: what is due is done when somebody looks.
"""

import errno
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from fpga_plugin.hardware.simulated.board import Machine, unsigned
from fpga_plugin.hardware.simulated.faults import SimulatedFault
from fpga_plugin.hardware.simulated.numbers import Numbers
from fpga_plugin.hardware.simulated.slots import CardFile, Shape
from fpga_plugin.hardware.simulated.state import NO_IMAGE, AlveoState
from fpga_plugin.hardware.simulated.tree import failure
from fpga_plugin.ids import AfuId, CardId, PciAddress, region_id

HOT_RESET_BIT: Final = 1 << 5
LOAD_BIT: Final = 1 << 17
"""LOAD_XCLBIN_SLOT_KADDR, which PF1 sends to a PF0 of the same domain."""

COPY_SECONDS: Final = 0.15
"""Until PF1 has a new mask; seen: 0.1 to 0.2 s."""

RESET_SECONDS: Final = 0.3
"""Of a hot reset. Seen: 1.2 s; a tenth of a second passes before `shutdown` reads 1."""

DOWN_SECONDS: Final = 0.05
UP_SECONDS: Final = 0.1
LOST_SECONDS: Final = 0.6
"""Until PF1 gives an answer up that was lost, and comes online by itself; seen: 20 s."""

REFRESH_SECONDS: Final = 0.1
"""After which a late refresh empties PF1's record."""

FIRST_MINOR: Final = 128

_LOOK: Final = 1 << 16
"""Bytes looked at together of what is written to memory: the whole is not copied."""


class AlveoBoard:
    """One plugged card. The caller holds the machine's lock.

    Args:
        machine: what all simulated cards share.
        minors: of render nodes.
        card: its id, the address of PF0.
        shape: its interface id.
        file: the identity of the file that plugs it.
        now: the clock.
        changed: called when drivers or nodes come and go.
        owner: may write.

    Attributes:
        gone: the card was unplugged.
        lives: how often xocl was bound.
        openings: tells descriptors of before a reset from those of after it.
    """

    def __init__(  # noqa: PLR0917  # made in one place
        self,
        machine: Machine,
        minors: Numbers,
        card: CardId,
        shape: Shape,
        file: CardFile,
        now: Callable[[], float],
        changed: Callable[["AlveoBoard"], None],
        *,
        owner: bool,
    ) -> None:
        self.machine = machine
        self.card = card
        self.region = region_id(card, 0)
        self.address = PciAddress.parse(card)
        self.user_address = replace(self.address, function=1)
        self.shape = shape
        self.file = file
        self.gone = False
        self.lives = 1
        self.openings = 0
        self._minors = minors
        self._now = now
        self._changed = changed
        self._owner = owner
        self._copy = 0
        self._due: dict[str, float] = {}  # by what becomes of it
        self._offline = False

    @property
    def state(self) -> AlveoState:
        """What the card and its drivers have now.

        Raises:
            OSError: ENODEV, the card is gone.
        """
        state = self.machine.state.regions.get(self.region)
        if not isinstance(state, AlveoState) or self.gone:
            raise failure(errno.ENODEV, self.card)
        return state

    def put(self, **changes: object) -> None:
        """Change it, on disk too."""
        state = replace(self.state, **changes)  # type: ignore[arg-type]  # the fields' own
        if self._owner:
            self.machine.state.commit(self.region, state)
        else:
            self.machine.state.put(self.region, state)

    def save(self) -> None:
        """Write down what was written to its memory since."""
        if self._owner:
            self.machine.state.save()

    def fault(self) -> SimulatedFault | None:
        """What is armed for the card."""
        return self.machine.faults.armed(self.region)

    def use_up(self) -> None:
        """What was armed has had its effect."""
        self.machine.faults.use_up(self.region)

    # ---------------------------------------------------------------- power and drivers

    def power_up(self, state: AlveoState) -> None:
        """Take the card into the machine: as it was left, or with its shell alone."""
        self.machine.state.put(self.region, replace(state, minor=None))
        self._copy = state.mask
        if state.user and not state.shutdown:
            self._make_node(state.minor)

    def _make_node(self, wanted: int | None = None) -> None:
        offset = None if wanted is None else wanted - FIRST_MINOR
        if offset is None or offset < 0 or not self._minors.take(offset):
            offset = self._minors.allocate()
        self.openings += 1
        self.put(minor=FIRST_MINOR + offset)
        self._changed(self)

    def remove_node(self) -> None:
        """Take the render node away; a process that has it open is ended."""
        self.openings += 1
        if (minor := self.state.minor) is not None:
            self._minors.free(minor - FIRST_MINOR)
            self.put(minor=None)
        self._changed(self)

    def unbind(self, *, user: bool) -> None:
        """Write an address to the `unbind` of a driver.

        Raises:
            OSError: ENODEV, it is not bound.
        """
        state = self.state
        if not (state.user if user else state.management):
            raise failure(errno.ENODEV, str(self.address))
        if user:
            self.remove_node()
            self.put(user=False, record=NO_IMAGE, shutdown=False)
        else:
            self.put(management=False, mask=0)
        self._changed(self)

    def bind(self, *, user: bool) -> None:
        """Write an address to the `bind` of a driver. PF0's comes without a mask.

        Raises:
            OSError: EBUSY, it is bound.
        """
        state = self.state
        if state.user if user else state.management:
            raise failure(errno.EBUSY, str(self.address))
        if user:
            self.lives += 1
            self.put(user=True)
            self._copy = self.state.mask
            self._make_node()
        else:
            self.put(management=True, mask=0)
            self._due["copy"] = self._now() + COPY_SECONDS
        self._changed(self)

    # ---------------------------------------------------------------- what passes with time

    def settle(self) -> None:
        """Do what is due by now, in its order."""
        if self.gone:
            return
        if (fault := self.fault()) in {
            SimulatedFault.BAD_STATE,
            SimulatedFault.FIREWALL,
        } and not self.state.bad:
            self.put(bad=str(fault))
        while due := [
            (at, what)
            for what, at in self._due.items()
            if at <= self._now() and not self._waits(what)
        ]:
            at, what = min(due)
            del self._due[what]
            self._happens(what, at)

    def _waits(self, what: str) -> bool:
        """Whether something that is due waits for what a fault plays."""
        armed = self.fault()
        return (what == "copy" and armed is SimulatedFault.MUTE) or (
            what == "down" and armed is SimulatedFault.HOLDER
        )

    def _happens(self, what: str, at: float) -> None:
        match what:
            case "copy":
                self._copy = self.state.mask
            case "refresh":
                self.put(record=NO_IMAGE)
            case "down":
                self._go_down(max(at, self._now()))
            case "reset":
                self.put(bad="")
                self._offline = False
            case "lost":
                self._come_up()
            case "up":
                self.put(shutdown=False)
                self._come_up()

    def _go_down(self, at: float) -> None:
        """PF1 asks PF0 for the reset, and waits for the answer."""
        if self._copy & HOT_RESET_BIT or not self.state.management:
            self.put(shutdown=True, record=NO_IMAGE)  # refused: it comes online by itself
            self._due["lost"] = at + UP_SECONDS
            return
        self._offline = True
        self._due["reset"] = at + RESET_SECONDS
        self.put(shutdown=True, record=NO_IMAGE)  # before the reset ends
        if self.fault() is SimulatedFault.LOST_ANSWER:
            self.use_up()
            self._due["lost"] = at + LOST_SECONDS

    def _come_up(self) -> None:
        if not self.state.user or self.state.minor is not None:
            return
        if self.fault() is SimulatedFault.MINOR_MOVES:
            self.use_up()
            first = self._minors.allocate()
            self._make_node()
            self._minors.free(first)
            return
        self._make_node()

    # ---------------------------------------------------------------- attributes

    @property
    def is_online(self) -> bool:
        """Whether PF1 has its attributes and its node."""
        return self.state.user and self.state.minor is not None

    @property
    def is_offline(self) -> bool:
        """Whether PF0 is in a reset, or does not answer."""
        return self._offline or self.fault() is SimulatedFault.FATAL

    @property
    def copy(self) -> int:
        """PF1's copy of the mask."""
        return self._copy

    def set_mask(self, text: str) -> None:
        """Write `config_mailbox_channel_disable` of PF0."""
        self.put(mask=unsigned(text))
        self._due["copy"] = self._now() + COPY_SECONDS

    def set_shutdown(self, text: str) -> None:
        """Write `shutdown` of PF1: 1 resets the card, 0 brings it online.

        While it reads 1, another 1 is ignored. A 0 while PF0 is in its reset finds a dead card.
        """
        match unsigned(text):
            case 1 if not self.state.shutdown and "down" not in self._due:
                self.remove_node()
                self._due["down"] = self._now() + DOWN_SECONDS
            case 0 if self.state.shutdown:
                if self._offline:
                    raise failure(errno.EIO, str(self.user_address))
                self._due["up"] = self._now() + UP_SECONDS
            case 0 | 1:
                pass
            case _:
                raise failure(errno.EINVAL, str(self.user_address))

    # ---------------------------------------------------------------- loads

    def loads(self, uuid: AfuId, *, flat: bool) -> None:
        """An image that streamed well: the card has it, and PF1's record says so.

        A flat one (mode 0) skips the ICAP in silence, and the record says so all the same.
        """
        self._due.pop("refresh", None)
        self.put(
            afu_id=self.state.afu_id if flat else uuid,
            record=uuid,
            zeroed=self.state.zeroed if flat else (),
        )
        if self.fault() is SimulatedFault.LATE_REFRESH:
            self.use_up()
            self._due["refresh"] = self._now() + REFRESH_SECONDS

    def fails(self, *, image_stays: bool) -> None:
        """A load that failed: PF1's record is empty, whatever the card holds."""
        self.put(record=NO_IMAGE, afu_id=self.state.afu_id if image_stays else NO_IMAGE)

    # ---------------------------------------------------------------- memory

    def write_memory(self, address: int, data: memoryview) -> None:
        """Write on-card memory; what is not zero is forgotten: it reads as something."""
        if self.fault() is SimulatedFault.MEMORY_STUCK:
            return
        end = address + len(data)
        kept = [
            part
            for low, high in self.state.zeroed
            for part in ((low, min(high, address)), (max(low, end), high))
            if part[0] < part[1]
        ]
        if not any(
            data[at : at + _LOOK].tobytes().strip(b"\0") for at in range(0, len(data), _LOOK)
        ):
            kept.append((address, end))
        merged: list[tuple[int, int]] = []
        for low, high in sorted(kept):
            if merged and merged[-1][1] >= low:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        self.machine.state.put(self.region, replace(self.state, zeroed=tuple(merged)))

    def read_memory(self, address: int, size: int) -> bytes:
        """Read on-card memory: zeros where they were written since the last load."""
        data = bytearray(b"\x5a" * size)
        for low, high in self.state.zeroed:
            begin, end = max(low, address), min(high, address + size)
            if begin < end:
                data[begin - address : end - address] = bytes(end - begin)
        return bytes(data)
