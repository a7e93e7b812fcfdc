"""Simulated Alveo cards for unit tests: the XRT code over its simulated kernel, which notes."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from doubles.xclbins import ALVEO, VADD, xclbin
from fpga_plugin.hardware.image import ComputeKernel, KernelArgument, MemoryBank, Xclbin
from fpga_plugin.hardware.kernel import Handle
from fpga_plugin.hardware.model import Card, CardProblem, Region
from fpga_plugin.hardware.simulated.alveo.board import AlveoBoard
from fpga_plugin.hardware.simulated.alveo.kernel import SimulatedXrtKernel
from fpga_plugin.hardware.simulated.kernel import SimulatedKernel
from fpga_plugin.hardware.xrt import port, waiting
from fpga_plugin.hardware.xrt.backend import XrtBackend
from fpga_plugin.ids import AfuId, CardId
from fpga_plugin.settings.values import parse_simulated_cards

OTHER = AfuId("b7c1e2d34b5f46889a0b1c2d3e4f5061")
CARD, CARD_2 = CardId("0000-10-00.0"), CardId("0000-11-00.0")
BANK = MemoryBank("HBM[0]", "HBM", used=True, on_card=True, base=1 << 20, size=1 << 20)
KERNEL = ComputeKernel(
    "vadd", 0x1000, software_reset=True, arguments=(KernelArgument("in", 0x10, 8),)
)


def image(uuid: AfuId = VADD, *, banks: tuple[MemoryBank, ...] = (BANK,)) -> Xclbin:
    """An xclbin as the store gives it."""
    return Xclbin(
        data=xclbin(uuid),
        uuid=uuid,
        interface_id=ALVEO,
        kernels=(KERNEL,),
        dataflow=True,
        slot_size=4096,
        banks=banks,
    )


class NotingKernel:
    """The simulated kernel; what is asked of it is noted, and may be answered otherwise.

    Attributes:
        read_paths: attributes that were read, and directories that were listed.
        written: what was written, in order.
        requests: ioctls, with their arguments.
        instead: answers of attributes, by the end of their paths: a text, or an error.
        listed: what directories hold, by the end of their paths.
        fails: errors of other calls, by the call and the end of what it is asked of.
        gone: ends of paths that lead nowhere.
        ignored: ioctls that are answered, and do nothing.
        held: what is open.
        before: is called before each write, open or ioctl.
    """

    def __init__(self, inner: SimulatedXrtKernel) -> None:
        self.inner = inner
        self.read_paths: list[str] = []
        self.written: list[tuple[str, str]] = []
        self.requests: list[tuple[int, bytes]] = []
        self.instead: dict[str, str | OSError] = {}
        self.listed: dict[str, list[str]] = {}
        self.fails: dict[tuple[str, str], OSError] = {}
        self.gone: set[str] = set()
        self.ignored: set[int] = set()
        self.held: set[Handle] = set()
        self.before: Callable[[str], None] = lambda what: None

    def _asked(self, call: str, what: str) -> None:
        for (failing, end), error in self.fails.items():
            if failing == call and what.endswith(end):
                raise error

    def read(self, path: str) -> str:
        self.read_paths.append(path)
        for end, answer in self.instead.items():
            if path.endswith(end):
                if isinstance(answer, OSError):
                    raise answer
                return answer
        return self.inner.read(path)

    def listdir(self, path: str) -> list[str]:
        self.read_paths.append(path)
        self._asked("listdir", path)
        for end, names in self.listed.items():
            if path.endswith(end):
                return names
        return self.inner.listdir(path)

    def write(self, path: str, text: str) -> None:
        self.before(f"{path}={text}")
        self._asked("write", path)
        self.written.append((path.rpartition("/")[2], text))
        self.inner.write(path, text)

    def exists(self, path: str) -> bool:
        self._asked("exists", path)
        return not path.endswith(tuple(self.gone)) and self.inner.exists(path)

    def instance(self, path: str) -> int:
        self._asked("instance", path)
        return self.inner.instance(path)

    def realpath(self, path: str) -> str:
        self._asked("realpath", path)
        return self.inner.realpath(path)

    def open(self, node: str, flags: int) -> Handle:
        self.before(f"open {node}")
        self._asked("open", node)
        handle = self.inner.open(node, flags)
        self.held.add(handle)
        return handle

    def query(self, handle: Handle, request: int, argument: bytes) -> bytes:
        self._asked("query", hex(request))
        return self.inner.query(handle, request, argument)

    def close(self, handle: Handle) -> None:
        self.inner.close(handle)
        self.held.remove(handle)

    def ioctl(self, handle: Handle, request: int, argument: bytes | int) -> int:
        self.before(hex(request))
        assert isinstance(argument, bytes)
        self._asked("ioctl", hex(request))
        self.requests.append((request, argument))
        if request in self.ignored:
            return 0
        return self.inner.ioctl(handle, request, argument)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Clock:
    """A time that passes where somebody sleeps, and nowhere else; stands for the module `time`.

    Attributes:
        now: seconds since the beginning.
        passing: is called each time that somebody has slept.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.passing: Callable[[], None] = lambda: None
        self._looks = 0

    def monotonic(self) -> float:
        self._looks += 1
        assert self._looks < 10_000, "somebody looks again and again, and never sleeps"
        return self.now

    def sleep(self, seconds: float) -> None:
        self._looks = 0
        self.now += seconds
        assert self.now < 1_000, "somebody waits for ever"
        self.passing()


class Rig:
    """A machine with Alveo cards.

    Attributes:
        kernel: notes.
        backend: the code under test.
        clock: of the cards and of the code, where `with_a_clock` made it.
    """

    clock: Clock

    def __init__(
        self, directory: Path, cards: str = f"2x1+alveo@{ALVEO}", *, clock: Any = time
    ) -> None:
        self.directory = directory
        machine = SimulatedKernel(str(directory), parse_simulated_cards(cards))
        self.kernel = NotingKernel(
            SimulatedXrtKernel(
                machine,
                pr_seconds=0,
                stuck_seconds=0.2,
                sleep=clock.sleep,
                now=clock.monotonic,
            )
        )
        self.backend = XrtBackend(self.kernel)

    @classmethod
    def with_a_clock(cls, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Self:
        """One in which waiting takes no time."""
        clock = Clock()
        for module in (waiting, port):
            monkeypatch.setattr(module, "time", clock)
        rig = cls(directory, clock=clock)
        rig.clock = clock
        return rig

    def card(self, card: CardId = CARD) -> Card:
        found = self.backend.scan_card(card)
        assert isinstance(found, Card), found
        return found

    def problem(self, card: CardId = CARD) -> CardProblem:
        found = self.backend.scan_card(card)
        assert isinstance(found, CardProblem), found
        return found

    def region(self, card: CardId = CARD) -> Region:
        return self.card(card).regions[0]

    def board(self, card: CardId = CARD) -> AlveoBoard:
        return self.kernel.inner.rack.boards[card]

    def arm(self, word: str, card: CardId = CARD) -> Path:
        path = self.directory / "faults" / f"{card}-p0"
        path.write_text(word)
        return path

    def program(self, uuid: AfuId = VADD, **options: Any) -> None:
        with self.backend.open_port(self.card(), self.region()) as port:
            port.program(image(uuid, **options))
