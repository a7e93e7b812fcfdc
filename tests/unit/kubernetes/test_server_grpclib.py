"""What kubernetes/grpc/server.py does with grpclib's own names; fails where one of them is another.

A new version of grpclib: read what changed in its server.py, protocol.py and stream.py first.
"""

import asyncio
import re
from contextlib import asynccontextmanager
from importlib.metadata import version

import pytest
from grpclib.client import Channel
from grpclib.const import Status
from grpclib.encoding.proto import ProtoCodec
from grpclib.exceptions import GRPCError
from h2.errors import ErrorCodes
from hpack import Encoder
from hyperframe.frame import HeadersFrame, RstStreamFrame, SettingsFrame
from repository import ROOT
from structlog.testing import capture_logs

from fpga_plugin.kubernetes.grpc.server import MAX_CONNECTIONS, MAX_REQUEST_BYTES, ClosingServer
from fpga_plugin.kubernetes.grpc.unary import unary
from fpga_plugin.kubernetes.messages.v1beta1 import (
    AllocateRequest,
    AllocateResponse,
    ContainerAllocateRequest,
    DevicePluginStub,
)

ALLOCATE = "/v1beta1.DevicePlugin/Allocate"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SettingsFrame(0).serialize()
LIMIT = 30


class Service:
    """Answers; what is called `waits` waits."""

    def __init__(self):
        self.began = asyncio.Event()
        self.ended = asyncio.Event()

    async def allocate(self, request):
        if request.container_requests[0].devices_ids[0] == "waits":
            self.began.set()
            try:
                await asyncio.sleep(LIMIT)
            finally:
                self.ended.set()
        return AllocateResponse()

    def __mapping__(self):
        return {ALLOCATE: unary("Allocate", AllocateRequest, AllocateResponse, self.allocate)}


@asynccontextmanager
async def served(tmp_path):
    """A server: yields it, its service and its path."""
    path = str(tmp_path / "s.sock")
    service = Service()
    server = ClosingServer([service])
    await server.start(path=path)
    try:
        yield server, service, path
    finally:
        await server.close_all()


async def ask(path, device="any"):
    async with asyncio.timeout(LIMIT), Channel(path=path, codec=ProtoCodec()) as channel:
        request = AllocateRequest(
            container_requests=[ContainerAllocateRequest(devices_ids=[device])]
        )
        return await DevicePluginStub(channel).allocate(request)


async def until(condition):
    async with asyncio.timeout(LIMIT):
        while not condition():  # noqa: ASYNC110  # grpclib reports no change
            await asyncio.sleep(0.005)


def test_the_version_whose_own_names_are_used_is_the_only_one_that_is_installed():
    (pinned,) = re.findall(r'"grpclib==([0-9.]+)"', (ROOT / "pyproject.toml").read_text())
    assert version("grpclib") == pinned


def test_a_call_that_is_reset_in_the_packet_that_begins_it_leaves_nothing_behind(tmp_path):
    encoder = Encoder()
    encoder.header_table_size = 0
    block = encoder.encode([(":method", "POST"), (":scheme", "http"), (":path", ALLOCATE)])

    def begun_and_reset(stream):
        reset = RstStreamFrame(stream)
        reset.error_code = ErrorCodes.CANCEL
        return HeadersFrame(stream, block, flags=("END_HEADERS",)).serialize() + reset.serialize()

    async def story():
        async with served(tmp_path) as (server, _, path):
            _, writer = await asyncio.open_unix_connection(path)
            writer.write(PREFACE + b"".join(begun_and_reset(n) for n in range(1, 100, 2)))
            await until(lambda: [c for c in server._connections if c.connection.streams_started])
            (connection,) = server._connections
            assert connection.connection.streams_started == 50
            await until(lambda: connection.idle)
            writer.close()

    asyncio.run(story())


def test_connections_on_which_nothing_is_asked_make_room_and_a_call_goes_on(tmp_path):
    async def story():
        async with served(tmp_path) as (server, service, path):
            waiting = asyncio.create_task(ask(path, "waits"))
            await service.began.wait()
            with capture_logs() as lines:
                idle = [
                    await asyncio.open_unix_connection(path) for _ in range(2 * MAX_CONNECTIONS)
                ]
                await until(lambda: server._connections and len(lines) > 0)
                await ask(path)
            assert len(server._connections) <= MAX_CONNECTIONS
            assert [line["event"] for line in lines] == [
                "too many connections to a socket for kubelet"
            ]
            assert not waiting.done(), "the call goes on"
            assert not service.ended.is_set()
            waiting.cancel()
            await asyncio.wait({waiting})
            for _, writer in idle:
                writer.transport.abort()

    asyncio.run(story())


def test_the_end_closes_connections_and_cancels_their_calls(tmp_path):
    async def story():
        async with served(tmp_path) as (server, service, path):
            waiting = asyncio.create_task(ask(path, "waits"))
            reader, writer = await asyncio.open_unix_connection(path)
            await service.began.wait()
            await until(lambda: len(server._connections) == 2)
            await server.close_all()
            async with asyncio.timeout(LIMIT):
                await reader.read()  # to its end
                await service.ended.wait()
            with pytest.raises(Exception, match=r"lost|closed|terminated"):
                await waiting
            assert not server._connections
            writer.close()

    asyncio.run(story())


def test_a_message_that_is_too_large_is_refused_before_it_is_read(tmp_path):
    async def story():
        async with served(tmp_path) as (_, _, path):
            with pytest.raises(GRPCError) as refused:
                await ask(path, "d" * (MAX_REQUEST_BYTES + 1))
            assert refused.value.status is Status.RESOURCE_EXHAUSTED
            await ask(path, "d" * (MAX_REQUEST_BYTES // 2))

    asyncio.run(story())
