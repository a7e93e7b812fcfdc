"""HTTP/2 connections that cannot cost more than a client's honest calls do.

h2 bounds the streams that are open at a time (100, advertised and enforced) and a request's headers
(64 KiB, at most 64 continuations). It bounds a frame's size only once all of it is there, and not
what a client may send for ever: streams that it resets at once (CVE-2023-44487), pings, settings
and window updates that each want an answer, data in pieces of a byte. grpclib makes a task of each
request, also of those that were reset with the same packet, and forgets to let go of the stream of
a task that was cancelled before it began.

So frames are counted while they are parsed, before anything is made of them. A connection that
sends more than its allowance, or does not read what it is answered, is closed: with
ENHANCE_YOUR_CALM where it can still be told. Uses what grpclib (0.4) keeps to itself:
`H2Protocol.connection._connection` and `._transport`, `Handler._tasks`; and of h2 (4.4)
`FrameBuffer._data`.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import structlog
from grpclib.config import Configuration
from grpclib.protocol import H2Protocol
from grpclib.protocol import Stream as ProtocolStream
from grpclib.server import Handler
from h2.errors import ErrorCodes
from h2.events import UnknownFrameReceived
from h2.exceptions import DenialOfServiceError, ProtocolError
from h2.frame_buffer import FrameBuffer
from hyperframe.frame import DataFrame, Frame, HeadersFrame, RstStreamFrame

from fpga_plugin.telemetry.instruments import Counter
from fpga_plugin.telemetry.rate_limit import RateLimit

RESETS: Final = 200
RESETS_A_SECOND: Final = 20.0
"""Streams that a client may reset: at once, and from then on. Kubelet resets a call whose time is
up, which is once in half a minute for a container."""

FRAMES: Final = 4000
FRAMES_A_SECOND: Final = 400.0
FRAMES_A_CALL: Final = 4
"""Frames that bring no call further. Google's clients send two or three with a call: their window,
and now and then a ping that measures the connection."""

SMALL: Final = 1024
"""Bytes of data below which a frame counts as one that brings nothing further, unless it is the
last of its request. Each takes some 250 bytes until it is read."""

MAX_UNREAD: Final = 1 << 20
"""Bytes of answers to control frames that a client may leave unread. Lists and calls' answers wait
until the client reads, and are at most a few hundred KiB."""

MAX_CONNECTIONS: Final = 16
"""At a time and socket. Kubelet has one, and for a moment another when it registers."""

CONFIGURATION: Final = Configuration(
    http2_connection_window_size=1 << 20,
    http2_stream_window_size=1 << 18,
)
"""Bytes that a client may send before they are read; grpclib's own 4 MiB are for long distances."""

_FRAME_HEAD, _LENGTH = 9, 3
"""Bytes of a frame's header, and of the length with which it begins (RFC 9113 section 4.1)."""

_log = structlog.get_logger()


class Allowance:
    """So many at once, and so many a second from then on.

    Args:
        burst: at once.
        per_second: later.
        clock: seconds that only grow.
    """

    __slots__ = ("_burst", "_clock", "_left", "_per_second", "_since")

    def __init__(
        self, burst: int, per_second: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst = self._left = float(burst)
        self._per_second = per_second
        self._clock = clock
        self._since = clock()

    def give(self, number: int) -> None:
        """So many more were earned."""
        self._left = min(self._burst, self._left + number)

    def take(self) -> bool:
        """One more; False when that is too many."""
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._since) * self._per_second)
        self._since = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class CountedFrames(FrameBuffer):
    """Parses frames, and refuses to go on with a client that sends too many of them."""

    def __init__(self) -> None:
        super().__init__(server=True)
        self._newest = 0
        self._resets = Allowance(RESETS, RESETS_A_SECOND)
        self._frames = Allowance(FRAMES, FRAMES_A_SECOND)

    def __next__(self) -> Frame:
        """The next whole frame.

        A header block in several frames passes here once for each of them, as h2 has it.

        Raises:
            StopIteration: there is none yet.
            DenialOfServiceError: there were too many.
            ProtocolError: it is none.
        """
        if len(self._data) >= _FRAME_HEAD:
            # h2 looks at the length once all of the frame is there, which may be 16 MiB.
            self._validate_frame_length(int.from_bytes(self._data[:_LENGTH], "big"))
        frame = super().__next__()
        self._count(frame)
        return frame

    def _count(self, frame: Frame) -> None:
        match frame:
            case HeadersFrame() if frame.stream_id > self._newest:
                self._newest = frame.stream_id
                self._frames.give(FRAMES_A_CALL)
                return
            case DataFrame() if len(frame.data) >= SMALL or "END_STREAM" in frame.flags:
                return
            case RstStreamFrame():
                if not self._resets.take():
                    raise DenialOfServiceError("too many streams were reset")
            case _:
                pass
        if not self._frames.take():
            raise DenialOfServiceError("too many frames that belong to no call")


class CallHandler(Handler):
    """grpclib's tasks of one connection; lets go of the stream of each, however it ended."""

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
        # A task that is cancelled before its first step runs no line of the function in it.
        self._tasks[stream].add_done_callback(release)


class Connections:
    """The connections of one server, oldest first; belongs to the event loop.

    Args:
        dropped: counts those that were closed for what they sent, by reason.
    """

    def __init__(self, dropped: Counter | None = None) -> None:
        self._dropped = Counter() if dropped is None else dropped
        self._open: dict[CalmProtocol, None] = {}
        self._rate_limit = RateLimit()

    def enter(self, protocol: "CalmProtocol") -> None:
        """One came: where there are too many, the oldest on which nothing is asked has to go.

        Kubelet's has a ListAndWatch at all times. Where something is asked on all, the new one
        goes.
        """
        self._open[protocol] = None
        if len(self._open) > MAX_CONNECTIONS:
            idle = next((each for each in self._open if each.idle), protocol)
            self.drop(idle, "limit")

    def leave(self, protocol: "CalmProtocol") -> None:
        """One ended."""
        self._open.pop(protocol, None)

    def drop(self, protocol: "CalmProtocol", reason: str) -> None:
        """Close one for what it does."""
        self.leave(protocol)
        self._dropped.add(reason)
        if closed := self._rate_limit.happened():
            _log.warning(
                "a connection to a socket for kubelet is closed", reason=reason, closed=closed
            )
        protocol.end(reason)

    def close(self) -> None:
        """End all."""
        for protocol in tuple(self._open):
            self.leave(protocol)
            protocol.end("the endpoint ends")


class CalmProtocol(H2Protocol):
    """One connection of a client.

    Args:
        handler: its calls.
        config: grpclib's.
        h2_config: h2's.
        connections: all of the server.
    """

    def __init__(
        self, handler: CallHandler, config: Configuration, h2_config: Any, connections: Connections
    ) -> None:
        super().__init__(handler, config, h2_config)
        self._connections = connections

    @property
    def idle(self) -> bool:
        """Whether nothing is asked on it."""
        return not self.processor.streams

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        super().connection_made(transport)
        h2 = self.connection._connection  # noqa: SLF001  # see the module
        h2.incoming_buffer = CountedFrames()
        self._connections.enter(self)

    def data_received(self, data: bytes) -> None:
        """Bytes came. As grpclib has it, but for what is wrong with them."""
        if self.connection.is_closing():
            return
        try:
            events = self.connection.feed(data)
        except DenialOfServiceError:
            self._connections.drop(self, "flood")
            return
        except ProtocolError:
            self._connections.drop(self, "protocol_error")
            return
        except ValueError:  # a header that is no ASCII: h2 leaves that to str.decode
            self.connection._connection.close_connection(ErrorCodes.PROTOCOL_ERROR)  # noqa: SLF001  # see the module
            self._connections.drop(self, "protocol_error")
            return
        self.connection.flush()
        for event in events:
            if isinstance(event, UnknownFrameReceived):
                continue  # RFC 9113 section 5.5; grpclib would end the connection
            self.processor.process(event)
            if self.connection.is_closing():
                return
        self.connection.flush()
        transport = self.connection._transport  # noqa: SLF001  # see the module
        if transport.get_write_buffer_size() > MAX_UNREAD:
            self._connections.drop(self, "unread_answers")

    def connection_lost(self, exc: BaseException | None) -> None:
        """It ended."""
        self._connections.leave(self)
        super().connection_lost(exc)

    def end(self, reason: str) -> None:
        """Close it, and cancel its calls."""
        if self.connection.is_closing():
            return
        transport = self.connection._transport  # noqa: SLF001  # see the module
        self.connection.flush()  # the GOAWAY that h2 made of an error
        self.processor.close(reason)
        if transport.get_write_buffer_size():
            transport.abort()  # the client does not read; nothing more would come of waiting
