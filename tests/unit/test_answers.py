"""Answers of calls: in one piece where nothing is waited for, whole and in order where it is."""

import asyncio
from asyncio.selector_events import _SelectorSocketTransport

import pytest
from grpclib.client import Channel
from grpclib.config import Configuration
from grpclib.encoding.proto import ProtoCodec

from fpga_plugin.api.messages.v1beta1 import (
    AllocateRequest,
    AllocateResponse,
    ContainerAllocateRequest,
    ContainerAllocateResponse,
    DevicePluginStub,
)
from fpga_plugin.errors import RefusedError
from fpga_plugin.serving.server import ClosingServer
from fpga_plugin.serving.unary import unary


async def allocate(request):
    """So many bytes as the device's id says."""
    (container,) = request.container_requests
    (size,) = container.devices_ids
    if size == "refused":
        raise RefusedError("no such size")
    value = "v" * int(size)
    return AllocateResponse(
        container_responses=[ContainerAllocateResponse(envs={"VALUE": value})] if value else []
    )


class Service:
    def __mapping__(self):
        return {
            "/v1beta1.DevicePlugin/Allocate": unary(
                "Allocate", AllocateRequest, AllocateResponse, allocate
            )
        }


def served(tmp_path, talk, **config):
    """Run `talk` with a client of a server; what it returned."""

    async def main():
        path = str(tmp_path / "s.sock")
        configuration = Configuration(**config)
        server = ClosingServer([Service()])
        await server.start(path=path)
        try:
            async with Channel(path=path, codec=ProtoCodec(), config=configuration) as channel:
                return await asyncio.wait_for(talk(DevicePluginStub(channel)), 60)
        finally:
            await server.close_all()

    return asyncio.run(main())


async def ask(stub, size):
    answer = await stub.allocate(
        AllocateRequest(container_requests=[ContainerAllocateRequest(devices_ids=[str(size)])])
    )
    return sum(len(each.envs["VALUE"]) for each in answer.container_responses)


@pytest.fixture(autouse=True)
def any_window(monkeypatch):
    """grpclib's own clients have none of less than 64 KiB."""
    monkeypatch.setattr("grpclib.config._validate", lambda _: None)


SIZES = (0, 1, 8000, 8100, 8150, 8180, 8192, 8200, 9000, 16384, 70_000, 300_000)


@pytest.mark.parametrize("window", [1, 100, 8191, 8192, 8193, 8200, 65_535, 1 << 22])
def test_answers_of_any_size_arrive_whole_through_windows_of_any_size(tmp_path, window):
    sizes = [size for size in SIZES if size <= 400 * window]

    async def talk(stub):
        alone = [await ask(stub, size) for size in sizes]
        return alone, await asyncio.gather(*(ask(stub, size) for size in 2 * sizes))

    alone, together = served(
        tmp_path, talk, http2_connection_window_size=1 << 22, http2_stream_window_size=window
    )
    assert alone == sizes
    assert together == 2 * sizes


@pytest.mark.parametrize("window", [100, 1 << 22])
def test_a_refusal_arrives_and_the_connection_goes_on(tmp_path, window):
    async def talk(stub):
        with pytest.raises(Exception, match="no such size"):
            await ask(stub, "refused")
        return await ask(stub, 17)

    assert served(tmp_path, talk, http2_stream_window_size=window) == 17


def test_a_short_answer_is_one_write(tmp_path, monkeypatch):
    written = []
    write = _SelectorSocketTransport.write

    def counted(self, data):
        if self.get_extra_info("sockname"):  # the server's end of a unix socket has a name
            written.append(bytes(data))
        write(self, data)

    async def talk(stub):
        await ask(stub, 1)
        monkeypatch.setattr(_SelectorSocketTransport, "write", counted)
        for _ in range(3):
            await ask(stub, 40)

    served(tmp_path, talk)
    with_message = [data for data in written if b"v" * 40 in data]
    assert len(with_message) == 3
    # HEADERS, DATA, HEADERS: frame types 1, 0, 1 (RFC 9113 section 6).
    for data in with_message:
        types = []
        while data:
            types.append(data[3])
            data = data[9 + int.from_bytes(data[:3], "big") :]  # noqa: PLW2901
        assert types == [1, 0, 1]
