"""Plugins and commands are forked from a process that has imported them.

To import the plugin is most of what a start of it costs: half a second of a processor, and five
seconds where that is emulated. What is forked is a process of its own as any other, with arguments,
environment, standard streams and signals as a new program has them.

`python nursery.py SOCKET` (a descriptor) is the process that is forked from: it has no threads and
opens nothing. It forks twice, so that the plugin becomes a child of the tests' process (which is a
subreaper, prctl(2)) and its end is seen there, with its exit code.
"""

import ctypes
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import IO

import fpga_plugin

PR_SET_CHILD_SUBREAPER = 36
"""linux/prctl.h"""

MAX_REQUEST = 1 << 20

program = __file__
"""What they are forked from: the virtual machine has its own (`tests/kernel/guest/mortal.py`)."""

CONSTANTS = "TEST_CONSTANTS"
"""What `constants` puts into a process' environment."""


def constants(values: Mapping[str, float]) -> dict[str, str]:
    """Settings of a process whose modules have other constants, such as how long something waits.

    Each name is that of a module in `fpga_plugin` and of its constant. A program that is not
    forked keeps its own.
    """
    return {CONSTANTS: json.dumps(dict(values))}


class Forked:
    """As much of `subprocess.Popen` as `daemon_support.Plugin` uses."""

    def __init__(self, pid: int, stderr: IO[bytes]) -> None:
        self.pid = pid
        self.stderr = stderr
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)
        self._lock = threading.Lock()  # a test waits for its end while a reader of its log kills it

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    os.close(self._pidfd)
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the end; raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            select.select([self._pidfd], [], [], timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("plugin", timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Unless its end was seen already. It is seen nowhere but in `poll` and `wait`."""
        with self._lock:
            if self.returncode is None:
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _nursery() -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
    """The line to it, and the process, which ends with the line."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_REQUEST)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, program, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    return ours, process


_ASKING = threading.Lock()
"""Its answers come in the order of the requests."""


def launch(
    arguments: Sequence[str], env: Mapping[str, str], folder: str, *, stdout: int | None = None
) -> Forked:
    """Start `python -m fpga_plugin ARGUMENTS`; its standard error is a pipe.

    Standard output is the descriptor, which stays the caller's; the rest is /dev/null.
    """
    reading, writing = os.pipe()
    try:
        request = json.dumps([list(arguments), dict(env), folder]).encode()
        with _ASKING:
            line, _ = _nursery()
            socket.send_fds(line, [request], [writing] if stdout is None else [writing, stdout])
            pid = int(line.recv(32) or b"0")
    finally:
        os.close(writing)
    assert pid, "the nursery has ended: see above"
    return Forked(pid, os.fdopen(reading, "rb", buffering=0))


def run(
    arguments: Sequence[str], env: Mapping[str, str], folder: str, *, timeout: float
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end, as `subprocess.run` does with captured text.

    Raises:
        subprocess.TimeoutExpired: it did not end; it was killed.
    """
    reading, writing = os.pipe()
    try:
        process = launch(arguments, env, folder, stdout=writing)
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    said: dict[str, bytes] = {}

    def read(name: str, stream: IO[bytes]) -> None:
        with stream:
            said[name] = stream.read()

    readers = [
        threading.Thread(target=read, args=("out", os.fdopen(reading, "rb"))),
        threading.Thread(
            target=read, args=("err", os.fdopen(os.dup(process.stderr.fileno()), "rb"))
        ),
    ]
    process.stderr.close()
    for reader in readers:
        reader.start()
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout)
        raise
    finally:
        for reader in readers:
            reader.join(timeout)
    out, err = (said[name].decode() for name in ("out", "err"))
    return subprocess.CompletedProcess([*arguments], code, out, err)


def import_all() -> None:
    """Import the whole package, and what each module brings; none begins a thread.

    Else each process imports again what the plugin imports when it needs it.
    """
    for module in pkgutil.walk_packages(fpga_plugin.__path__, "fpga_plugin."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def _serve(descriptor: int) -> None:
    import_all()
    from fpga_plugin.commands.main import main

    gc.freeze()  # a command's last collection would look at, and so copy, all that was imported

    with socket.socket(fileno=descriptor) as connection:
        while True:
            request, streams, _, _ = socket.recv_fds(connection, MAX_REQUEST, 2)
            if not request:
                return  # the tests have ended
            reading, writing = os.pipe()
            if (middle := os.fork()) == 0:
                if (child := os.fork()) == 0:
                    for ours in (connection.detach(), reading, writing):
                        os.close(ours)
                    arguments, env, folder = json.loads(request)
                    _become(streams[0], env, folder)
                    for stdout in streams[1:]:
                        os.dup2(stdout, 1)
                        os.close(stdout)
                        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # for all its life
                    sys.exit(main(arguments))
                os.write(writing, str(child).encode())
                os._exit(0)
            os.waitpid(middle, 0)  # from here on the child is the tests' own
            connection.send(os.read(reading, 32))
            for done in (*streams, reading, writing):
                os.close(done)


def _become(stderr: int, env: Mapping[str, str], folder: str) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream, replaced in ((nothing, 0), (nothing, 1), (stderr, 2)):
        os.dup2(stream, replaced)
    os.close(nothing)
    os.close(stderr)
    sys.argv[:] = ["fpga_plugin"]
    os.environ.clear()
    os.environ.update(env)
    if env.get("PYTHONWARNINGS") == "error":  # a program reads it before its first line
        warnings.simplefilter("error")
    for name, value in json.loads(env.get(CONSTANTS, "{}")).items():
        module, _, constant = name.rpartition(".")
        assert hasattr(sys.modules[f"fpga_plugin.{module}"], constant), name
        setattr(sys.modules[f"fpga_plugin.{module}"], constant, value)
    os.chdir(folder)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
