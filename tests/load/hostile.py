"""Clients that mean ill, on every socket of the plugin, for as long as the run goes.

Each picks a socket and does one thing that tests/unit/kubernetes/test_server_grpclib.py,
tests/integration/test_hostile_life.py and tests/integration/test_http.py look at once; here it is
done thousands of times beside honest clients. Only root may connect to the gRPC sockets: there they
do what a broken client does.
"""

import asyncio
import contextlib
import os
import random
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack(">HBBBL", 0, 0, 4, 0, 0)
PATIENCE = 3.0
"""Seconds that a client stays which waits, or reads slowly."""

Connect = Callable[[], Awaitable[socket.socket]]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One HTTP/2 frame (RFC 9113 section 4.1)."""
    return len(payload).to_bytes(3, "big") + struct.pack(">BBL", kind, flags, stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header that enters no table (RFC 7541 section 6.2.2), with lengths below 127."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def call(stream: int, path: bytes, message: bytes | None) -> bytes:
    """The frames of a gRPC call; without a message it never ends."""
    block = b"".join(
        literal(name, value)
        for name, value in (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path),
            (b":authority", b"localhost"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
        )
    )
    frames = frame(1, 4, stream, block)
    return frames if message is None else frames + frame(0, 1, stream, message)


WATCH = b"/v1beta1.DevicePlugin/ListAndWatch"
PRESTART = b"/v1beta1.DevicePlugin/PreStartContainer"
PREPARE = b"/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources"
EMPTY = bytes(5)


class Hostile:
    """All of them.

    Args:
        sockets: finds the plugin's gRPC sockets, which are others after each registration.
        https: finds where it serves HTTP: paths, or (host, port).
        rng: what they choose by.

    Attributes:
        done: how often each thing was done.
    """

    def __init__(
        self,
        sockets: Callable[[], list[Path]],
        https: Callable[[], list[Path | tuple[str, int]]],
        rng: random.Random,
    ) -> None:
        self._sockets = sockets
        self._https = https
        self._rng = rng
        self.done: Counter[str] = Counter()

    async def run(self, clients: int, pause: float) -> None:
        """So many at a time, each with a pause after what it did, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self._client(pause))

    async def _client(self, pause: float) -> None:
        attacks = [
            *[(self._sockets, each) for each in (self.half, self.calls)],
            *[(self._sockets, each) for each in (self.oversize, self.aborts)],
            *[(self._https, each) for each in (self.half, self.garbage, self.headers, self.slow)],
        ]
        while True:
            where, attack = self._rng.choice(attacks)
            if places := where():
                place = self._rng.choice(places)
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(2 * PATIENCE):
                        with await self._dial(place) as connection:
                            await attack(connection)
                self.done[f"{attack.__name__} on {'HTTP' if where == self._https else 'gRPC'}"] += 1
            await asyncio.sleep(pause * self._rng.uniform(0.5, 1.5))

    async def _dial(self, place: Path | tuple[str, int]) -> socket.socket:
        family = socket.AF_UNIX if isinstance(place, Path) else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            address = str(place) if isinstance(place, Path) else place
            await asyncio.get_running_loop().sock_connect(connection, address)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _send(self, connection: socket.socket, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(connection, data)

    async def _drain(self, connection: socket.socket) -> None:
        """Read until the plugin ends it, or patience does."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                while await loop.sock_recv(connection, 65536):
                    pass

    # ---------------------------------------------------------------- what they do

    async def half(self, connection: socket.socket) -> None:
        """Half of what opens a connection, and silence."""
        await self._send(connection, self._rng.choice([b"", PREFACE[:10], b"GET /metrics HT"]))
        await asyncio.sleep(PATIENCE * self._rng.random())

    async def garbage(self, connection: socket.socket) -> None:
        """Random bytes, now and then behind a good beginning."""
        good = self._rng.choice([b"", PREFACE, b"GET / HTTP/1.1\r\n"])
        await self._send(connection, good + os.urandom(self._rng.randrange(1, 9000)))
        await self._drain(connection)

    async def calls(self, connection: socket.socket) -> None:
        """Calls of methods that there are and are not, with messages that are none."""
        await self._send(connection, PREFACE)
        for stream in range(1, 41, 2):
            path = self._rng.choice([WATCH, PRESTART, PREPARE, b"/a.B/C", b"/" + b"x" * 100])
            junk = os.urandom(self._rng.randrange(200))
            await self._send(connection, call(stream, path, b"\0" + struct.pack(">L", 200) + junk))
        await self._drain(connection)

    async def oversize(self, connection: socket.socket) -> None:
        """A message that says it has a gigabyte, and a frame that says it has 16 MiB."""
        huge = b"\0" + struct.pack(">L", 1 << 30)
        await self._send(connection, PREFACE + call(1, PRESTART, None) + frame(0, 0, 1, huge))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                for _ in range(100):  # more than the window of a stream
                    await self._send(connection, frame(0, 0, 1, bytes(16000)))
        await self._send(connection, b"\xff\xff\xff" + bytes(6) + bytes(1000))
        await self._drain(connection)

    async def aborts(self, connection: socket.socket) -> None:
        """A call, and gone with a reset before it is answered."""
        await self._send(connection, PREFACE + call(1, PRESTART, EMPTY) + call(3, WATCH, EMPTY))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def headers(self, connection: socket.socket) -> None:
        """Headers without an end."""
        await self._send(connection, b"GET /metrics HTTP/1.1\r\n")
        for _ in range(1000):
            await self._send(connection, b"X-A: " + b"a" * 1000 + b"\r\n")

    async def slow(self, connection: socket.socket) -> None:
        """Asks again and again, and reads a byte now and then."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        for path in (b"/metrics", b"/", b"/status", b"/history", b"/readyz", b"/" + b"x" * 5000):
            request = b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
            await self._send(connection, request)
        for _ in range(5):
            await asyncio.get_running_loop().sock_recv(connection, 1)
            await asyncio.sleep(PATIENCE / 10)
