"""What figures are held against, measured beside them in the same run.

Other work on the machine slows both, so that their ratio says more than either. The bare stack is a
grpclib server with the same messages and no feature (`echo.py`); the bare hardware is a region that
is opened, programmed and closed with nobody around it (`bare.py`).
"""

import json
import subprocess
import time
from pathlib import Path
from typing import Self

import grpc  # type: ignore[import-untyped]  # ships no types
from plugin import cpu_of, memory_of

from fpga_plugin.kubernetes.messages import v1beta1

REQUEST = bytes(
    v1beta1.AllocateRequest(
        container_requests=[v1beta1.ContainerAllocateRequest(devices_ids=["0000-10-00.0-p0"])]
    )
)


class Echo:
    """The bare stack, as a process; more `arguments` of `echo.py` make it less bare.

    Attributes:
        ready: seconds from its start until it serves.
    """

    def __init__(self, python: Path, socket: Path, *arguments: str | Path) -> None:
        self._socket = socket
        began = time.monotonic()
        script = Path(__file__).with_name("echo.py")
        self._process = subprocess.Popen(
            [python, script, socket, *arguments], stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()
        self.ready = time.monotonic() - began
        self._channel = grpc.insecure_channel(f"unix:{socket}")
        self._call = self._channel.unary_unary("/v1beta1.DevicePlugin/Allocate")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self._process.kill()
        self._process.communicate()

    def allocate(self) -> float:
        """Seconds of one Allocate."""
        began = time.perf_counter()
        self._call(REQUEST)
        return time.perf_counter() - began

    def cpu(self) -> float:
        """Seconds of CPU so far."""
        return cpu_of(self._process.pid)

    def memory(self) -> tuple[float, float]:
        """RSS and PSS in MiB."""
        return memory_of(self._process.pid)


class Bare:
    """The bare hardware, as a process: programs a region whenever it is asked to."""

    def __init__(self, python: Path, folder: Path, pr_seconds: float) -> None:
        script = Path(__file__).with_name("bare.py")
        self._process = subprocess.Popen(
            [python, script, folder, str(pr_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def program(self, mebibytes: int) -> float:
        """Seconds from before the port is opened until it is closed, with a PR between."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(mebibytes, file=self._process.stdin, flush=True)
        return float(json.loads(self._process.stdout.readline()))
