"""What a hostile client can do to the sockets for kubelet, in frames of its own making."""

import asyncio
import contextlib
import gc
import os
import socket
import struct
from contextlib import asynccontextmanager

import grpc
import grpclib.protocol
import pytest
from grpclib.client import Channel
from grpclib.const import Status
from grpclib.encoding.proto import ProtoCodec
from grpclib.exceptions import GRPCError
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, StreamEnded, TrailersReceived
from hpack import Encoder
from hyperframe.frame import (
    DataFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from kubelet_support import LIMIT, REGION, REGIONS, Calls, Changes, eventually, plugin
from structlog.testing import capture_logs

from fpga_plugin.api.messages import v1beta1 as api
from fpga_plugin.demo.plugins import PluginManager
from fpga_plugin.deviceplugin.servicer import OPTIONS
from fpga_plugin.serving import http2, messages
from fpga_plugin.serving.http2 import Allowance, CalmProtocol

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SettingsFrame(0).serialize()
EMPTY = bytes(5)
"""An empty gRPC message."""


def headers(method: str = "GetDevicePluginOptions", **more: str) -> bytes:
    """Without a dynamic table, so that the same bytes serve any number of streams."""
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", f"/v1beta1.DevicePlugin/{method}"),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *more.items(),
    ]
    encoder = Encoder()
    encoder.header_table_size = 0
    return encoder.encode(fields)


HEADERS = headers()
UNKNOWN = struct.pack(">HBBBLB", 0, 1, 0xFA, 0, 0, 0)


def begin(stream: int, block: bytes = HEADERS) -> bytes:
    return HeadersFrame(stream, block, flags=("END_HEADERS",)).serialize()


def data(stream: int, content: bytes = EMPTY, *, end: bool = True) -> bytes:
    return DataFrame(stream, content, flags=("END_STREAM",) if end else ()).serialize()


def reset(stream: int) -> bytes:
    frame = RstStreamFrame(stream)
    frame.error_code = ErrorCodes.CANCEL
    return frame.serialize()


def call(stream: int) -> bytes:
    return begin(stream) + data(stream)


class Raw:
    """A client that sends what it likes, and understands what it is answered.

    Not asyncio's streams: these lose what was answered once a write fails.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._sending: list[asyncio.Task[None]] = []
        self._h2 = H2Connection(
            H2Configuration(
                client_side=True, header_encoding="utf-8", validate_outbound_headers=False
            )
        )
        self._h2.initiate_connection()
        self.events: list[object] = []
        self.send(PREFACE)

    def send(self, *frames: bytes) -> None:
        before = self._sending[-1:]

        async def send() -> None:
            await asyncio.gather(*before)
            with contextlib.suppress(OSError):
                await self._loop.sock_sendall(self._socket, b"".join(frames))

        self._sending.append(asyncio.create_task(send()))

    def knows(self, *streams: int) -> None:
        """Streams that answers may be about."""
        for stream in streams:
            self._h2.send_headers(stream, [(":method", "POST")])
            self._h2.end_stream(stream)

    async def read(self) -> bool:
        """Take what there is; whether more may come."""
        async with asyncio.timeout(LIMIT):
            try:
                received = await self._loop.sock_recv(self._socket, 65536)
            except ConnectionResetError:  # it did not read all that we sent
                return False
        if received:
            self.events += self._h2.receive_data(received)
        return bool(received)

    async def close(self) -> None:
        for task in self._sending:
            task.cancel()
        await asyncio.wait(self._sending)
        self._socket.close()

    async def goaway(self) -> int:
        """The reason for which the connection is closed."""
        while await self.read():
            pass
        (event,) = (each for each in self.events if isinstance(each, ConnectionTerminated))
        return event.error_code

    async def ended(self, stream: int) -> dict[str, str]:
        """The trailers of an answer."""
        while not any(isinstance(e, StreamEnded) and e.stream_id == stream for e in self.events):
            assert await self.read(), "the connection was closed"
        (event,) = (
            each
            for each in self.events
            if isinstance(each, TrailersReceived) and each.stream_id == stream
        )
        return dict(event.headers)


@asynccontextmanager
async def raw(path: str):
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, path)
    client = Raw(connection)
    try:
        yield client
    finally:
        await client.close()


def protocols() -> list[CalmProtocol]:
    """The server's side of the connections that there are."""
    return [
        each
        for each in gc.get_objects()
        if isinstance(each, CalmProtocol) and not each.connection.is_closing()
    ]


@asynccontextmanager
async def served(directory):
    """A plugin that is registered with a kubelet: yields kubelet, calls and the service."""
    calls, one = Calls(Changes()), PluginManager(str(directory))
    await one.start()
    try:
        async with plugin(directory, calls) as service:
            await one.wait_for(REGIONS)
            yield one, calls, service
    finally:
        await one.stop()


def endpoint(one: PluginManager) -> str:
    return os.path.join(one.directory, one.requests[-1].endpoint)


async def still_served(one: PluginManager, calls: Calls) -> None:
    """Kubelet's connection and its list stream are what they were."""
    assert await one.connection(REGIONS).stub.get_device_plugin_options(api.Empty()) == OPTIONS
    calls.tell()
    assert one.lists[REGIONS].healthy == {REGION.id}


def test_streams_that_are_reset_at_once_end_the_connection_before_anything_is_made_of_them(
    tmp_path,
):
    async def story():
        async with served(tmp_path) as (one, calls, service):
            gc.collect()
            before = sum(isinstance(e, grpclib.protocol.Stream) for e in gc.get_objects())
            async with raw(endpoint(one)) as client:
                with capture_logs() as lines:
                    client.send(*(begin(n) + reset(n) for n in range(1, 2_000, 2)))
                    assert await client.goaway() == ErrorCodes.ENHANCE_YOUR_CALM
            await still_served(one, calls)
            assert dict(service.dropped.items()) == {("flood",): 1}
            (line,) = (each for each in lines if each["log_level"] == "warning")
            assert line["event"] == "a connection to a socket for kubelet is closed"
            gc.collect()
            after = sum(isinstance(e, grpclib.protocol.Stream) for e in gc.get_objects())
            assert after < before + 10, "nothing is kept of 1000 streams"

    asyncio.run(story())


def test_a_stream_that_was_reset_before_its_call_began_is_let_go(tmp_path):
    async def story():
        async with served(tmp_path) as (one, calls, service):
            async with raw(endpoint(one)) as client:
                client.knows(101)
                client.send(*(begin(n) + reset(n) for n in range(1, 100, 2)), call(101))
                assert (await client.ended(101))["grpc-status"] == "0"
                await eventually(lambda: any(each.idle for each in protocols()))
            await still_served(one, calls)
            assert not dict(service.dropped.items())

    asyncio.run(story())


def update(stream: int) -> bytes:
    frame = WindowUpdateFrame(stream)
    frame.window_increment = 1
    return frame.serialize()


def again(stream: int) -> bytes:
    """Headers for a stream that was reset: h2 answers each with a reset of its own."""
    return begin(stream)


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(PingFrame(0, opaque_data=b"12345678").serialize(), id="ping"),
        pytest.param(
            SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 9}).serialize(), id="settings"
        ),
        pytest.param(update(0), id="window"),
        pytest.param(PriorityFrame(9).serialize(), id="priority"),
        pytest.param(UNKNOWN, id="unknown"),
        pytest.param(data(3, b"x", end=False), id="data of a byte"),
        pytest.param(data(3, b"", end=False), id="no data"),
        pytest.param(DataFrame(3, b"", pad_length=10, flags=("PADDED",)).serialize(), id="padding"),
        pytest.param(again(1), id="headers of a stream that was reset"),
    ],
)
def test_frames_that_bring_no_call_further_end_the_connection(tmp_path, frame, monkeypatch):
    monkeypatch.setattr(http2, "FRAMES_A_SECOND", 0.0)  # this client may be that slow

    async def story():
        async with served(tmp_path) as (one, calls, service):
            async with raw(endpoint(one)) as client:
                client.knows(1, 3)
                client.send(begin(1), reset(1), begin(3), frame * 5_000)
                assert await client.goaway() == ErrorCodes.ENHANCE_YOUR_CALM
            await still_served(one, calls)
            assert dict(service.dropped.items()) == {("flood",): 1}

    asyncio.run(story())


def test_a_header_block_in_many_pieces_counts_each_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(http2, "FRAMES", 100)

    def pieces(stream: int, count: int) -> bytes:
        block = bytearray()
        block += HeadersFrame(stream, HEADERS).serialize()
        for number in range(count):
            last = number == count - 1
            block += struct.pack(">HBBBL", 0, 0, 9, 4 if last else 0, stream)  # CONTINUATION
        return bytes(block)

    async def story():
        async with served(tmp_path) as (one, calls, _service):
            async with raw(endpoint(one)) as client:
                client.knows(1)
                client.send(pieces(1, 10), data(1))
                assert (await client.ended(1))["grpc-status"] == "0"
                client.send(*(pieces(n, 50) for n in (3, 5, 7)))
                assert await client.goaway() == ErrorCodes.ENHANCE_YOUR_CALM
            await still_served(one, calls)

    asyncio.run(story())


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"".join(begin(n) for n in range(1, 205, 2)), id="more streams than allowed"),
        pytest.param(begin(1, headers(x="a" * 26_000)[:16000]) * 2, id="headers that are cut off"),
        pytest.param(begin(1, b"\x40\x01x\x02\xff\xfe"), id="a header that is no text"),
        pytest.param(
            struct.pack(">HBBBL", 0x40, 1, 0, 0, 1), id="the beginning of a frame that is too large"
        ),
        pytest.param(begin(2), id="a stream of the server's"),
        pytest.param(b"\xff" * 100, id="no frame"),
    ],
)
def test_bytes_that_are_not_http2_end_the_connection_alone_and_without_a_traceback(
    tmp_path, sent, caplog
):
    async def story():
        async with served(tmp_path) as (one, calls, service):
            async with raw(endpoint(one)) as client:
                client.send(sent)
                assert await client.goaway() != ErrorCodes.ENHANCE_YOUR_CALM
            await still_served(one, calls)
            assert dict(service.dropped.items()) == {("protocol_error",): 1}

    asyncio.run(story())
    assert not caplog.records


def test_unknown_frames_are_ignored(tmp_path):
    async def story():
        async with (
            served(tmp_path) as (one, _calls, service),
            raw(endpoint(one)) as client,
        ):
            client.knows(1)
            client.send(UNKNOWN, call(1))
            assert (await client.ended(1))["grpc-status"] == "0"
            assert not dict(service.dropped.items())

    asyncio.run(story())


def test_a_client_that_reads_no_answers_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(http2, "MAX_UNREAD", 1000)

    async def story():
        async with served(tmp_path) as (one, calls, service):
            reader, writer = await asyncio.open_unix_connection(endpoint(one), limit=1)
            writer.transport.pause_reading()
            writer.write(PREFACE)
            await eventually(lambda: any(each.idle for each in protocols()))
            (server,) = (each for each in protocols() if each.idle)
            # The kernel's buffer takes some hundred KiB before ours grows.
            transport = server.connection._transport
            await eventually(lambda: transport.get_write_buffer_size() == 0)
            while not transport.get_write_buffer_size():
                transport.write(bytes(65536))
            writer.write(PingFrame(0, opaque_data=b"12345678").serialize())
            await eventually(lambda: dict(service.dropped.items()) == {("unread_answers",): 1})
            writer.transport.abort()
            await still_served(one, calls)
            del reader

    asyncio.run(story())


def test_connections_on_which_nothing_is_asked_make_room_and_kubelets_stays(tmp_path):
    async def story():
        async with served(tmp_path) as (one, calls, service):
            path = endpoint(one)
            idle = [await asyncio.open_unix_connection(path) for _ in range(40)]
            await eventually(lambda: sum(n for _, n in service.dropped.items()) == 25)
            async with Channel(path=path, codec=ProtoCodec()) as channel:
                stub = api.DevicePluginStub(channel)
                assert await stub.get_device_plugin_options(api.Empty()) == OPTIONS
            await still_served(one, calls)
            assert dict(service.dropped.items()) == {("limit",): 26}
            for _, writer in idle:
                writer.transport.abort()

    asyncio.run(story())


def test_a_call_whose_message_does_not_come_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(messages, "RECEIVE_SECONDS", 0.05)

    async def story():
        async with served(tmp_path) as (one, calls, _service):
            async with raw(endpoint(one)) as client:
                client.knows(1, 3)
                client.send(begin(1), begin(3), data(3, b"\0\0\0\0\7xx", end=False))
                for stream in (1, 3):
                    while not any(getattr(e, "stream_id", 0) == stream for e in client.events):
                        await client.read()
                await eventually(lambda: any(each.idle for each in protocols()))
            assert calls.called == []
            await still_served(one, calls)

    asyncio.run(story())


def test_a_client_without_a_window_for_its_answer_does_not_keep_the_call(tmp_path, monkeypatch):
    monkeypatch.setattr(messages, "SEND_SECONDS", 0.05)

    async def story():
        async with served(tmp_path) as (one, calls, _service):
            async with raw(endpoint(one)) as client:
                client.knows(1)
                none = SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 0}).serialize()
                client.send(none, call(1))
                trailers = await client.ended(1)
                assert trailers["grpc-status"] == str(Status.DEADLINE_EXCEEDED.value)
                await eventually(lambda: any(each.idle for each in protocols()))
            await still_served(one, calls)

    asyncio.run(story())


def test_an_honest_client_is_not_bounded_in_what_it_calls(tmp_path, monkeypatch):
    """Google's client sends windows and pings; ours gives up a call now and then."""
    monkeypatch.setattr(http2, "FRAMES", 100)
    monkeypatch.setattr(http2, "FRAMES_A_SECOND", 0.0)

    def talk(path: str) -> None:
        with grpc.insecure_channel(f"unix:{path}") as channel:
            options = channel.unary_unary(
                "/v1beta1.DevicePlugin/GetDevicePluginOptions", bytes, api.DevicePluginOptions.parse
            )
            for _ in range(500):
                assert options(api.Empty(), timeout=LIMIT) == OPTIONS

    async def story():
        async with served(tmp_path) as (one, calls, service):
            await asyncio.to_thread(talk, endpoint(one))
            stub = one.connection(REGIONS).stub
            for _ in range(50):
                async with asyncio.TaskGroup() as group:
                    for _ in range(20):
                        group.create_task(stub.get_device_plugin_options(api.Empty()))
            calls.prestart_waits = asyncio.Event()
            for _ in range(20):
                with pytest.raises((GRPCError, TimeoutError)):
                    await stub.pre_start_container(
                        api.PreStartContainerRequest(devices_ids=["a"]), timeout=0.01
                    )
            await still_served(one, calls)
            assert not dict(service.dropped.items())

    asyncio.run(story())


def test_an_allowance_is_so_many_at_once_and_so_many_a_second():
    now = 0.0
    allowance = Allowance(3, 2, clock=lambda: now)
    assert [allowance.take() for _ in range(4)] == [True, True, True, False]
    now = 0.5
    assert [allowance.take() for _ in range(2)] == [True, False]
    now = 100.0
    assert [allowance.take() for _ in range(4)] == [True, True, True, False]
    allowance.give(2)
    assert [allowance.take() for _ in range(3)] == [True, True, False]
