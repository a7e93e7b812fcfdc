"""A call's message, of which the client says how long it is and sends as much as it likes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from grpclib.const import Status
from grpclib.server import Stream

from fpga_plugin.errors import FpgaPluginError, InvalidRequestError

MAX_REQUEST_BYTES = 4 << 20
"""What a server in Go takes unless it says otherwise (grpc-go, defaultServerMaxReceiveMessageSize),
as all other device plugins are. A thousand devices have 64 KiB."""

_MAX_AT_ONCE = 64 << 10
"""So many bytes are decoded within some 10 ms."""

RECEIVE_SECONDS = 10.0
"""Until a call's message is there, of which kubelet sends all at once."""

SEND_SECONDS = 10.0
"""Until the client takes a call's answer: a window of no bytes would keep it for ever."""

_GATHERED = 8 << 10
"""Bytes of an answer that are written at once; less than a frame of HTTP/2 and a window have."""

_HEAD_BYTES = 5
"""Of a gRPC message: a flag for compression, four bytes of length."""


class RequestTooLargeError(InvalidRequestError):
    """A call of kubelet's has more bytes than are read, as a server in Go says it."""

    status = Status.RESOURCE_EXHAUSTED


class StalledCallError(FpgaPluginError):
    """A client began a call and did not go on with it."""

    status = Status.DEADLINE_EXCEEDED


@asynccontextmanager
async def in_time(seconds: float, what: str) -> AsyncIterator[None]:
    """Wait for the client, but not for ever.

    Raises:
        StalledCallError: the time is up.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise StalledCallError(f"{what} within {seconds:g} s") from error


async def receive(stream: Stream[Any, Any]) -> Any:
    """The call's message; a long one is decoded beside the event loop.

    grpclib's own `recv_message` takes up to 4 GiB and decodes on the loop. Kubelet sends the
    variables of the container as it expanded them, so a tenant whose variables are made of each
    other can make any number of bytes of a few lines. Uses what that method uses, `_stream`,
    `_codec` and `_recv_type`, which grpclib (0.4) keeps to itself.

    Raises:
        InvalidRequestError: the client sent none, too long a one, or none that can be read.
        StalledCallError: it began one and did not go on.
    """
    source, codec, kind = stream._stream, stream._codec, stream._recv_type  # noqa: SLF001  # see above
    try:
        async with in_time(RECEIVE_SECONDS, "the request did not arrive"):
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


async def send(stream: Stream[Any, Any], message: Any) -> None:
    """Answer a call that has one answer, and end it; nothing can be told of it after that.

    Raises:
        StalledCallError: the client does not take it.
    """
    source = stream._stream  # noqa: SLF001  # see `receive`
    number = source.id or 0  # of a call that came it is never None
    window = source._h2_connection.local_flow_control_window(number)  # noqa: SLF001  # the same
    if not source.connection.write_ready.is_set() or window <= _GATHERED:
        async with in_time(SEND_SECONDS, "the client did not take the answer"):
            await stream.send_message(message)
        return
    transport = source._transport  # noqa: SLF001  # the same
    gathered = _Gathered(transport)
    source._transport = gathered  # type: ignore[assignment]  # noqa: SLF001  # all that it asks for
    try:
        async with in_time(SEND_SECONDS, "the client did not take the answer"):
            await stream.send_message(message)
            await stream.send_trailing_metadata()
    finally:
        source._transport = transport  # noqa: SLF001  # the same
        gathered.flush()


class _Gathered:
    """What one answer writes, headers, message and trailers, in one piece.

    Written one by one, each wakes the client: a tenth of the time of an Allocate. Nothing is held
    back while anything is waited for, or frames of other calls would pass those in here, and HTTP/2
    needs headers in their order. So it begins only where the client takes that many bytes, and
    holds no more than that: what is longer, and may have to wait, goes out before it does.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._parts: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> None:
        """Hold it, or write all."""
        self._parts.append(data)
        self._size += len(data)
        if self._size > _GATHERED:
            self.flush()

    def flush(self) -> None:
        """Write what is held."""
        if self._parts:
            self._transport.write(b"".join(self._parts))
        self._parts.clear()

    def is_closing(self) -> bool:
        """Whether the connection ends."""
        return self._transport.is_closing()
