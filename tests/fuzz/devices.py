"""What a card and its driver may answer, and what simulated cards may find in their own files."""

import itertools
import os
import shutil
import tempfile
from contextlib import suppress

from doubles.cards import INTERFACE
from target import Target

from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.hardware.dfl.backend import DflBackend
from fpga_plugin.hardware.model import Card
from fpga_plugin.hardware.simulated.kernel import SimulatedKernel
from fpga_plugin.settings.settings import SimulatedGroup

_SCRATCH = tempfile.TemporaryDirectory(prefix="fuzz-")


class _Nonsense:
    """A kernel one of whose attributes, or several, read as somebody else says.

    The first byte of the input says which read is the first one that lies; the texts, separated
    by NUL, are what it and the following ones say.
    """

    def __init__(self, kernel: SimulatedKernel) -> None:
        self._kernel = kernel
        self._texts = itertools.repeat("")
        self._honest = 0

    def lie(self, data: bytes) -> None:
        self._honest = data[0] if data else 0
        self._texts = iter(data[1:].decode("latin-1").split("\0"))

    def read(self, path: str) -> str:
        text = self._kernel.read(path)
        if self._honest:
            self._honest -= 1
            return text
        return next(self._texts, text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._kernel, name)


_KERNEL = _Nonsense(
    SimulatedKernel(_SCRATCH.name, (SimulatedGroup(1, 2, INTERFACE),), sleep=lambda _: None)
)
_GOOD = DflBackend(_KERNEL._kernel).scan()


def _sysfs(data: bytes) -> None:
    backend = DflBackend(_KERNEL)
    (card,) = _GOOD.cards.values()
    _KERNEL.lie(data)
    for found in backend.scan().cards.values():
        assert isinstance(found, Card)
    _KERNEL.lie(data)
    backend.health(card)
    _KERNEL.lie(data)
    backend.readings(card)
    for region in card.regions:
        for look in (backend.afu_id, backend.port_errors):
            _KERNEL.lie(data)
            with suppress(FpgaPluginError):
                look(region)


def _state(data: bytes) -> None:
    directory = os.path.join(_SCRATCH.name, "again")
    shutil.rmtree(directory, ignore_errors=True)
    os.mkdir(directory)
    with open(os.path.join(directory, "state.json"), "wb") as file:
        file.write(data)
    kernel = SimulatedKernel(directory, (SimulatedGroup(1, 2, INTERFACE),))
    assert DflBackend(kernel).scan()


TARGETS = {
    "sysfs": Target(
        _sysfs,
        (b"\0x", b"\1" + INTERFACE.encode() + b"\0000", b"\x03-1\0000\0ffffffffffffffff"),
        (b"0x", b"ffffffffffffffff", b"0x1\n", INTERFACE.encode(), b"error", b"\xb2", b"_"),
    ),
    "state": Target(
        _state,
        (
            b'{"regions": {"0000-10-00.0-p0": {"afu_id": "' + INTERFACE.encode() + b'"}}}',
            b"[" * 5000,
        ),
        (b'"clock"', b'"poisoned"', b'"open"', b'"bound"', b'"node"', b'"fme"', b"1e999", b"NaN"),
    ),
}
