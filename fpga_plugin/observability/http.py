"""A small HTTP server on asyncio: one request a connection, a TCP address or a unix socket.

The standard library's server polls twice a second and needs a thread a connection; frameworks cost
more memory than the rest of the plugin. h11 parses, so that what a hostile client sends is judged
by code that was written for it. Request, time and number of connections are bounded: a client that
is slow, or many of them, can only harm each other (`connections` reports who goes).
"""

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final
from urllib.parse import parse_qs, unquote

import h11
import structlog

from fpga_plugin.kubernetes.grpc.unix_socket import listen_on, socket_identity, socket_path
from fpga_plugin.observability.connections import Connection, Connections, Stage

log = structlog.get_logger()

MAX_HEAD: Final = 16384
"""Bytes of a request's first line and headers."""

MAX_BODY: Final = 65536
"""Bytes of a request's body."""

HEAD_SECONDS: Final = 2.0
"""From a connection to the end of its request's headers."""

SECONDS: Final = 15.0
"""From a connection to the last byte of its answer."""

_READ = 4096

_BACKLOG = 16
"""Connections that asyncio accepts in one turn of its loop."""

_QUEUE = 128
"""Connections that the kernel keeps until then. It drops what comes to a full queue, and an honest
client tries again after a second."""


Headers = tuple[tuple[str, str], ...]
"""Names and values."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        method: `GET`, `POST`, …
        path: percent-decoded, without the query.
        query: the last value of each name.
        accept: the Accept header, in lower case.
        body: at most `MAX_BODY` bytes.
        host: the Host header; None where there is none.
    """

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    accept: str = ""
    body: bytes = b""
    host: str | None = None


@dataclass(frozen=True, slots=True)
class Response:
    """One answer."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: Headers = ()


def text(status: int, words: str, *, headers: Headers = ()) -> Response:
    """A plain answer."""
    return Response(status, f"{words}\n".encode(), headers=headers)


Handler = Callable[[Request], Awaitable[Response]]

_Reached = Callable[..., None]
"""Called with a connection's stage, and the number of bytes that it has to take."""


class Listener:
    """One listening socket and its connections.

    Args:
        handler: answers; what it raises is logged and becomes a 500.
        connections: who is connected, and how many may be.
        head_seconds: how long a connection may take until its request's headers are there.
        seconds: how long it may take as a whole.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        connections: Connections | None = None,
        head_seconds: float = HEAD_SECONDS,
        seconds: float = SECONDS,
    ) -> None:
        self._handler = handler
        self._connections = Connections() if connections is None else connections
        self._head_seconds = head_seconds
        self._seconds = seconds
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket: tuple[str, str] | None = None
        self._identity: str | None = None
        self.addresses: list[str] = []

    async def open_tcp(self, host: str, port: int) -> None:
        """Listen on an address; an empty host means all, IPv4 and IPv6.

        Raises:
            OSError: it is in use, forbidden, or not this node's.
        """
        sockets = await _tcp_sockets(host, port)
        # Not yet serving, asyncio suspends nowhere: who is cancelled here closes all of them.
        servers = [
            await asyncio.start_server(
                self._connected, sock=one, limit=MAX_HEAD, backlog=_BACKLOG, start_serving=False
            )
            for one in sockets
        ]
        self._servers += servers
        for server, one in zip(servers, sockets, strict=True):
            await server.start_serving()
            one.listen(_QUEUE)
            shown = one.getsockname()
            shown_host = f"[{shown[0]}]" if ":" in shown[0] else shown[0]
            self.addresses.append(f"{shown_host}:{shown[1]}")

    async def open_unix(self, directory: str, name: str) -> None:
        """Listen on a unix socket that only its owner may connect to, in place of a left-over one.

        A directory in its place is moved aside: a bind mount of a socket that was not there yet
        makes one (Docker's `-v`, a hostPath).

        Raises:
            OSError: it cannot be made there.
        """
        with socket_path(directory, name) as path:
            _clear(path)
            one = listen_on(path)
        self._socket, self._identity = (directory, name), socket_identity(directory, name)
        server = await asyncio.start_unix_server(
            self._connected, sock=one, limit=MAX_HEAD, backlog=_BACKLOG, start_serving=False
        )
        self._servers.append(server)  # before asyncio suspends: who is cancelled then closes it
        await server.start_serving()
        self.addresses.append(os.path.join(directory, name))

    @property
    def in_place(self) -> bool:
        """Whether clients can find the unix socket: nobody removed or replaced it."""
        return (
            self._socket is not None
            and self._identity is not None
            and socket_identity(*self._socket) == self._identity
        )

    @property
    def connections(self) -> int:
        """How many there are now."""
        return len(self._connections)

    async def close(self) -> None:
        """Listen no more and end the connections."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        if self._socket is not None and self.in_place:
            with contextlib.suppress(OSError), socket_path(*self._socket) as path:
                os.unlink(path)
        self._socket = None
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "asyncio makes one for each connection"
        self._tasks.add(task)
        connection = Connection(task, writer.transport, _source(writer.transport))
        self._connections.enter(connection)
        began = asyncio.get_running_loop().time()
        limit = asyncio.timeout_at(began + self._head_seconds)

        def reached(stage: Stage, unread: int = 0) -> None:
            if connection.stage is Stage.HEAD:
                limit.reschedule(began + self._seconds)
            self._connections.reached(connection, stage, unread)

        try:
            async with limit:
                await self._serve(reader, writer, reached)
                # Waits for the client to take the answer, and for its end of the connection.
                writer.close()
                await writer.wait_closed()
        except (OSError, asyncio.CancelledError):  # a TimeoutError is an OSError
            # A client that went, was too slow, had to make room, or is not waited for at the end.
            if limit.expired():
                self._connections.too_slow(connection)
        except Exception:
            log.exception("unexpected error in an HTTP connection")
        finally:
            self._tasks.discard(task)
            self._connections.leave(connection)
            writer.transport.abort()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reached: _Reached
    ) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        try:
            request = await _receive(connection, reader, reached)
        except h11.RemoteProtocolError as error:
            request = None
            response = text(error.error_status_hint, "not an HTTP request that is understood here")
        else:
            if request is None:
                return
            reached(Stage.ANSWERING)
            response = await self._answer(request)
        reached(Stage.READING, len(response.body))
        headers = [
            ("Content-Type", response.content_type),
            ("Content-Length", str(len(response.body))),
            ("Connection", "close"),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            *response.headers,
        ]
        with contextlib.suppress(h11.LocalProtocolError):  # the client broke off in between
            start = h11.Response(
                status_code=response.status,
                headers=headers,
                reason=HTTPStatus(response.status).phrase.encode(),
            )
            writer.write(connection.send(start) or b"")
            if request is None or request.method != "HEAD":
                writer.write(connection.send(h11.Data(data=response.body)) or b"")
            await writer.drain()

    async def _answer(self, request: Request) -> Response:
        try:
            return await self._handler(request)
        except Exception:
            log.exception("unexpected error in an HTTP request", path=request.path[:64])
            return text(500, "an error in fpga-plugin: see its log")


async def _receive(
    connection: h11.Connection, reader: asyncio.StreamReader, reached: _Reached
) -> Request | None:
    """The request; None where the client went before it sent one.

    Raises:
        h11.RemoteProtocolError: it is none, or too large.
    """
    head: h11.Request | None = None
    body = b""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(_READ))
        elif isinstance(event, h11.Request):
            head = event
            reached(Stage.BODY)
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > MAX_BODY:
                raise h11.RemoteProtocolError("the body is too large", error_status_hint=413)
        elif isinstance(event, h11.EndOfMessage):
            assert head is not None, "comes first"
            return _request(head, body)
        else:
            return None


def _request(head: h11.Request, body: bytes) -> Request:
    target = head.target.decode("ascii", "replace")
    path, _, query = target.partition("?")
    try:
        parsed = parse_qs(query, max_num_fields=16)
    except ValueError as error:
        raise h11.RemoteProtocolError("too many parameters") from error
    accept = b", ".join(value for name, value in head.headers if name == b"accept")
    host = next((value for name, value in head.headers if name == b"host"), None)
    return Request(
        method=head.method.decode("ascii", "replace"),
        path=unquote(path),
        query={name: values[-1] for name, values in parsed.items()},
        accept=accept.decode("ascii", "replace").lower(),
        host=None if host is None else host.decode("ascii", "replace"),
        body=body,
    )


def _source(transport: asyncio.WriteTransport) -> str:
    """The address of the peer; empty for a unix socket."""
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) else ""


def _clear(path: str) -> None:
    """Make room for a socket.

    Raises:
        OSError: what is there cannot be removed or moved.
    """
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        aside = f"{path}.aside-{time.time_ns()}"
        os.rename(path, aside)
        log.warning(
            "a directory in the place of the status socket is moved aside",
            moved_to=os.path.basename(aside),
        )


async def _tcp_sockets(host: str, port: int) -> list[socket.socket]:
    if not host:
        return [_any_address(port)]
    loop = asyncio.get_running_loop()
    # As bytes where it can be: for a text Python imports its codec for international names.
    name = host.encode() if host.isascii() else host
    found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    failed: OSError | None = None
    for family, _, _, _, address in dict.fromkeys(found):
        try:
            sockets.append(socket.create_server(address, family=family, backlog=_BACKLOG))
        except OSError as error:
            failed = error
        if sockets and not port:
            break  # one free port is enough
    if failed is not None and (not sockets or failed.errno == errno.EADDRINUSE):
        for one in sockets:
            one.close()
        raise failed
    return sockets


def _any_address(port: int) -> socket.socket:
    """Both kinds of addresses on one socket; IPv4 alone where the node has no IPv6."""
    try:
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
        )
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in {errno.EADDRINUSE, errno.EACCES}:
            raise
    return socket.create_server(("", port), backlog=_BACKLOG)
