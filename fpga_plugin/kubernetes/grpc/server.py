"""grpclib's server with limits, and with an end: the only module that reaches into grpclib.

grpclib has no public way to the four things that a server for kubelet needs:

- to close connections: `close` leaves them open, and on Python 3.12 and later `wait_closed` waits
  until the client closes them, which kubelet does not (grpclib's issues 107 and 148);
- to limit their number;
- to limit the size of a message: `recv_message` takes up to 4 GiB and decodes them on the loop;
- to release the stream of a call that the client resets in the packet that begins it: grpclib
  cancels the task before its first step, so that the task's own release never runs.

The sockets are 0600 root, so every client is kubelet: frames are not counted, and grpclib and
h2 judge what they make of them. pyproject.toml pins the version of grpclib, and
tests/unit/kubernetes/test_server_grpclib.py fails where a name of its that is used here is another.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import structlog
from grpclib.config import Configuration
from grpclib.const import Status
from grpclib.protocol import H2Protocol
from grpclib.protocol import Stream as ProtocolStream
from grpclib.server import Handler, Server, Stream

from fpga_plugin.errors import InvalidRequestError
from fpga_plugin.host.rate_limit import RateLimit
from fpga_plugin.kubernetes.grpc.codec import Codec

if TYPE_CHECKING:
    from grpclib._typing import IServable

MAX_CONNECTIONS: Final = 16
"""At a time and socket. Kubelet has one, and for a moment another when it registers."""

MAX_REQUEST_BYTES: Final = 4 << 20
"""What a server in Go takes unless it says otherwise (grpc-go, defaultServerMaxReceiveMessageSize),
as all other device plugins are. A thousand devices have 64 KiB."""

_MAX_AT_ONCE: Final = 64 << 10
"""So many bytes are decoded within some 10 ms."""

_HEAD_BYTES: Final = 5
"""Of a gRPC message: a flag for compression, four bytes of length."""

_CONFIGURATION: Final = Configuration(
    http2_connection_window_size=1 << 20,
    http2_stream_window_size=1 << 18,
)
"""Bytes that a client may send before they are read; grpclib's own 4 MiB are for long distances."""

_log = structlog.get_logger()


class RequestTooLargeError(InvalidRequestError):
    """A call of kubelet's has more bytes than are read, as a server in Go says it."""

    status = Status.RESOURCE_EXHAUSTED


async def receive(stream: Stream[Any, Any]) -> Any:
    """The call's message; a long one is decoded beside the event loop.

    Kubelet sends the variables of the container as it expanded them, so a tenant whose variables
    are made of each other can make any number of bytes of a few lines.

    Raises:
        InvalidRequestError: the client sent none, too long a one, or none that can be read.
    """
    source, codec, kind = stream._stream, stream._codec, stream._recv_type  # noqa: SLF001  # see the module
    try:
        head = await source.recv_data(_HEAD_BYTES)
        if not head:
            raise InvalidRequestError("the request has no message")
        size = int.from_bytes(head[1:], "big")
        if size > MAX_REQUEST_BYTES:
            raise RequestTooLargeError(
                f"the request has {size} bytes; at most {MAX_REQUEST_BYTES} are read",
                hint="the container's environment is too large: leave something out of it",
            )
        data = await source.recv_data(size)
    except AssertionError as error:  # grpclib's word for a message that ends early
        raise InvalidRequestError("the request is cut off") from error
    if head[0]:
        raise InvalidRequestError("the request is compressed")
    if size > _MAX_AT_ONCE:
        return await asyncio.to_thread(codec.decode, data, kind)
    return codec.decode(data, kind)


class ClosingServer(Server):
    """Serves on one socket.

    Args:
        handlers: the services.
        codec: of the messages.
    """

    def __init__(self, handlers: "Sequence[IServable]", *, codec: Codec | None = None) -> None:
        super().__init__(handlers, codec=codec or Codec(), config=_CONFIGURATION)
        self._connections: dict[_Connection, None] = {}  # oldest first
        self._rate_limit = RateLimit()

    def _protocol_factory(self) -> "_Connection":
        handler = _CallHandler(
            self._mapping, self._codec, self._status_details_codec, self.__dispatch__
        )
        return _Connection(
            handler, self._config, self._h2_config, entered=self._entered, left=self._left
        )

    def _entered(self, connection: "_Connection") -> None:
        """Where there are too many, the oldest on which nothing is asked has to go.

        Kubelet's has a ListAndWatch at all times. Where something is asked on all, the new one
        goes.
        """
        self._connections[connection] = None
        if len(self._connections) > MAX_CONNECTIONS:
            idle = next((each for each in self._connections if each.idle), connection)
            self._left(idle)
            if closed := self._rate_limit.happened():
                _log.warning("too many connections to a socket for kubelet", closed=closed)
            idle.end("too many connections")

    def _left(self, connection: "_Connection") -> None:
        self._connections.pop(connection, None)

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections on a listening socket, which the caller closes if that fails."""
        try:
            await self.start(sock=listener)
        except BaseException:
            # asyncio may have begun to watch it, and would confuse the next socket of this number.
            asyncio.get_running_loop().remove_reader(listener.fileno())
            raise

    async def close_all(self) -> None:
        """Stop listening, cancel the handlers, close every connection.

        A task that is cancelled while it waits here ends after the close: a registration that
        failed closes its server, and the plugin may stop at the same moment.
        """
        # asyncio loses a connection that it accepts in the turn of the loop in which its server is
        # closed: the client would wait for ever. So none is accepted first, and those that
        # were get their transports, within two turns.
        loop = asyncio.get_running_loop()
        if isinstance(self._server, asyncio.Server):
            for listening in self._server.sockets:
                loop.remove_reader(listening.fileno())
        ends = [await _turn(), await _turn()]
        self.close()
        for connection in tuple(self._connections):
            connection.end("the endpoint ends")
        ends.append(await _turn())  # transports close their sockets on the loop's next turn
        for cancelled in ends:
            if cancelled is not None:
                raise cancelled


class _CallHandler(Handler):
    """grpclib's tasks of one connection; releases the stream of each, however it ended."""

    def accept(
        self, stream: ProtocolStream, headers: Any, release_stream: Callable[[], Any]
    ) -> None:
        """A request came."""
        released = False

        def release(*_: object) -> None:
            nonlocal released
            if not released:
                released = True
                release_stream()

        super().accept(stream, headers, release)
        self._tasks[stream].add_done_callback(release)


class _Connection(H2Protocol):
    """One connection of a client; tells its server when it comes and goes."""

    def __init__(
        self,
        *arguments: Any,
        entered: "Callable[[_Connection], None]",
        left: "Callable[[_Connection], None]",
    ) -> None:
        super().__init__(*arguments)
        self._entered, self._left = entered, left

    @property
    def idle(self) -> bool:
        """Whether nothing is asked on it."""
        return not self.processor.streams

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        super().connection_made(transport)
        self._entered(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """It ended."""
        self._left(self)
        super().connection_lost(exc)

    def end(self, reason: str) -> None:
        """Close it, and cancel its calls."""
        if self.connection.is_closing():
            return
        transport = self.connection._transport  # noqa: SLF001  # see the module
        self.processor.close(reason)
        if transport.get_write_buffer_size():
            transport.abort()  # a kubelet that does not read: nothing more would come of waiting


async def _turn() -> asyncio.CancelledError | None:
    """One turn of the loop; returns what cancelled it."""
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError as cancelled:
        return cancelled
    return None
