"""A small HTTP server on asyncio: one request a connection, a TCP address or a unix socket.

The standard library's server polls twice a second and takes a thread a connection; frameworks cost
more memory than the rest of the plugin. h11 parses, so that what a hostile client sends is judged
by code that was written for it. Request, time and number of connections are bounded: a client that
is slow, or many of them, can only harm each other.
"""

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qs, unquote

import h11
import structlog

from fpga_plugin.kubelet.sockets import socket_path

log = structlog.get_logger()

MAX_HEAD: Final = 16384
"""Bytes of a request's first line and headers."""

MAX_BODY: Final = 65536
"""Bytes of a request's body."""

MAX_CONNECTIONS: Final = 32
"""At a time and listener; further ones are closed unanswered."""

SECONDS: Final = 15.0
"""From a connection's first byte to the last of its answer."""

_REASONS: Final = {200: b"OK", 404: b"Not Found", 503: b"Service Unavailable"}

_READ = 4096
_BACKLOG = 16


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        method: `GET`, `POST`, …
        path: percent-decoded, without the query.
        query: the last value of each name.
        accept: the Accept header, in lower case.
        body: at most `MAX_BODY` bytes.
    """

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    accept: str = ""
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Response:
    """One answer."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()


def text(status: int, words: str) -> Response:
    """A plain answer."""
    return Response(status, f"{words}\n".encode())


Handler = Callable[[Request], Awaitable[Response]]


class Listener:
    """One listening socket and its connections; belongs to the event loop.

    Args:
        handler: answers; what it raises is logged and becomes a 500.
        seconds: how long a connection may take.
        connections: how many there may be at a time.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        seconds: float = SECONDS,
        connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._handler = handler
        self._seconds = seconds
        self._most = connections
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._unlink: tuple[str, str] | None = None
        self.addresses: list[str] = []

    async def open_tcp(self, host: str, port: int) -> None:
        """Listen on an address; an empty host means all, IPv4 and IPv6.

        Raises:
            OSError: it is in use, forbidden, or not this node's.
        """
        sockets = await _tcp_sockets(host, port)
        for one in sockets:
            self._servers.append(
                await asyncio.start_server(self._connected, sock=one, limit=MAX_HEAD)
            )
            shown = one.getsockname()
            shown_host = f"[{shown[0]}]" if ":" in shown[0] else shown[0]
            self.addresses.append(f"{shown_host}:{shown[1]}")

    async def open_unix(self, directory: str, name: str) -> None:
        """Listen on a unix socket that only its owner may connect to, in place of a left-over one.

        Raises:
            OSError: it cannot be made there.
        """
        with socket_path(directory, name) as path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                one.bind(path)
                os.chmod(path, 0o600)  # before it listens: nobody connects in between
                one.listen(_BACKLOG)
            except BaseException:
                one.close()
                raise
        self._unlink = directory, name
        self._servers.append(
            await asyncio.start_unix_server(self._connected, sock=one, limit=MAX_HEAD)
        )
        self.addresses.append(os.path.join(directory, name))

    @property
    def connections(self) -> int:
        """How many there are now."""
        return len(self._tasks)

    async def close(self) -> None:
        """Listen no more and end the connections."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        if self._unlink is not None:
            with contextlib.suppress(OSError), socket_path(*self._unlink) as path:
                os.unlink(path)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "asyncio makes one for each connection"
        if len(self._tasks) >= self._most:
            writer.transport.abort()
            return
        self._tasks.add(task)
        try:
            async with asyncio.timeout(self._seconds):
                await self._serve(reader, writer)
                # Waits for the client to take the answer, and for its end of the connection.
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass  # a client that went, was too slow, or is not waited for at the end
        except Exception:
            log.exception("unexpected error in an HTTP connection")
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        try:
            request = await _receive(connection, reader)
        except h11.RemoteProtocolError as error:
            request = None
            response = text(error.error_status_hint, "not an HTTP request that is understood here")
        else:
            if request is None:
                return
            response = await self._answer(request)
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
                reason=_REASONS.get(response.status, b""),
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


async def _receive(connection: h11.Connection, reader: asyncio.StreamReader) -> Request | None:
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
    return Request(
        method=head.method.decode("ascii", "replace"),
        path=unquote(path),
        query={name: values[-1] for name, values in parsed.items()},
        accept=accept.decode("ascii", "replace").lower(),
        body=body,
    )


async def _tcp_sockets(host: str, port: int) -> list[socket.socket]:
    if not host:
        return [_any_address(port)]
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
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
