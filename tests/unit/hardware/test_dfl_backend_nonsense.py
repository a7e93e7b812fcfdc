"""Whatever the kernel answers to whichever call, the DFL code says it in the plugin's own errors.

Each operation is repeated with its first, second, third, … call to the kernel failing, by each way
in which a dying card fails or with each kind of nonsense that an attribute may hold.
"""

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from doubles.dfl import CARD, FakeKernel, failure, served

from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.hardware.backend import Backend
from fpga_plugin.hardware.dfl.backend import DflBackend
from fpga_plugin.hardware.dfl.handles import port_of
from fpga_plugin.hardware.image import RawImage
from fpga_plugin.hardware.linux import LinuxKernel
from fpga_plugin.hardware.model import Card

CALLS = {"listdir", "realpath", "exists", "read", "write", "open", "ioctl"}
ERRORS = (errno.EIO, errno.ENODEV, errno.EBUSY, errno.EACCES, errno.EINTR, errno.ENOENT)
NONSENSE = (
    "",
    "x" * 65536,
    "\x00\ufffd",
    "-1",
    "0x",
    "9" * 5000,
    "\u0661",
    "f" * 16,
    "1_0",
    "a\nb",
)


class Moody(FakeKernel):
    """Its call number `turn` fails with `answer`, or reads as it."""

    turn = -1
    calls = 0
    answer: int | str = 0

    def __init__(self) -> None:
        super().__init__()
        for name in CALLS:  # so that calls of one method by another count too
            setattr(self, name, self._moody(name, getattr(self, name)))

    def _moody(self, name: str, method: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            self.calls += 1
            if self.calls - 1 != self.turn:
                return method(*arguments)
            if isinstance(self.answer, int):
                raise failure(self.answer, str(arguments[0]))
            return self.answer if name == "read" else method(*arguments)

        return call


def with_port(use: Callable[..., object]) -> Callable[[Backend, Card], object]:
    def operation(backend: Backend, card: Card) -> object:
        with backend.open_port(card, card.regions[0]) as port:
            return use(port)

    return operation


def errors_set(kernel: FakeKernel) -> None:
    """So that there is something to clear."""
    for path in list(kernel.files):
        if path.endswith("/errors/errors"):
            kernel.files[path] = "0x10"
        elif path.endswith("/ap1_event"):
            kernel.files[path] = "1"


OPERATIONS: dict[str, Callable[[Backend, Card], object]] = {
    "scan": lambda backend, _: backend.scan(),
    "scan one": lambda backend, card: backend.scan_card(card.id),
    "health": lambda backend, card: backend.health(card),
    "readings": lambda backend, card: backend.readings(card),
    "afu id": lambda backend, card: backend.afu_id(card.regions[0]),
    "port errors": lambda backend, card: backend.port_errors(card.regions[0]),
    "user clock": lambda backend, card: backend.user_clock(card.regions[0]),
    "clear memory": lambda backend, card: backend.clear_memory(card),
    "reset": with_port(lambda port: port.reset()),
    "clear errors": with_port(lambda port: port.clear_errors()),
    "program": with_port(lambda port: port.program(RawImage(b"image"))),
    "rebind": lambda backend, card: backend.rebind(card),
    "bind": lambda backend, card: backend.bind(card.id),
}


def card_of_moods() -> tuple[Moody, Backend, Card]:
    kernel = Moody()
    fme = kernel.add_card(ports=(0, 1))
    errors_set(kernel)
    board = f"{fme}/dfl_dev.8/spi_master/spi0/spi0.0/d5005bmc-hwmon.3.auto/hwmon/hwmon6"
    for name, value in {"input": "61000", "max": "95000", "crit": "100000", "label": "x"}.items():
        kernel.files[f"{board}/temp2_{name}"] = value
    backend, card = served(kernel)
    for name in ("userclk_freqcntrcmd", "userclk_freqcntrsts"):
        kernel.files[f"{port_of(card.regions[0]).sysfs}/{name}"] = "0x4e20"
    kernel.files[f"/sys/devices/pci0000:3a/{card.address}/sriov_numvfs"] = "0"
    for file in ("bind", "unbind"):
        kernel.files[f"/sys/bus/pci/drivers/dfl-pci/{file}"] = ""
    return kernel, backend, card


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize(
    "answer",
    [*ERRORS, *NONSENSE],
    ids=[*map(errno.errorcode.get, ERRORS), *map(str, range(len(NONSENSE)))],
)
def test_each_call_to_the_kernel_may_fail(operation, answer):
    for turn in itertools.count():
        kernel, backend, card = card_of_moods()
        kernel.calls, kernel.turn, kernel.answer = 0, turn, answer
        said = ""
        try:
            operation(backend, card)
        except FpgaPluginError as error:
            said = error.message
        assert len(said) < 1000
        assert not kernel.opened, f"left open: {kernel.opened}"
        if kernel.calls <= turn:
            break  # it has made no such call
    assert turn > 1


def test_a_thousand_ports_that_cannot_be_had_leave_nothing_open(tmp_path: Path):
    plan = FakeKernel()
    plan.add_card(ports=(0,))
    plan.on_disk(tmp_path / "sys")
    (tmp_path / "dev").mkdir()
    for node in ("dfl-port.0", "dfl-fme.0"):
        (tmp_path / "dev" / node).touch()
    backend = DflBackend(LinuxKernel(str(tmp_path / "sys"), str(tmp_path / "dev")))
    (card,) = backend.scan().cards.values()
    assert card.id == CARD
    (region,) = card.regions

    def fails() -> None:
        with pytest.raises(FpgaPluginError), backend.open_port(card, region) as port:
            port.program(RawImage(b"image"))  # a file has no such ioctl

    fails()
    before = os.listdir("/proc/self/fd")
    for turn in range(1000):
        if turn == 500:  # the node is another port's by now
            (tmp_path / port_of(region).sysfs.removeprefix("/") / "id").write_text("3")
        fails()
    assert len(os.listdir("/proc/self/fd")) == len(before)
