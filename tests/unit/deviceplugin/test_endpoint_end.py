"""The end of what serves kubelet, at whatever instant it comes: nothing stays open."""

import asyncio
import gc
import socket
import warnings
from pathlib import Path

import pytest
from doubles import LIMIT

from fpga_plugin.deviceplugin.endpoint import Endpoint
from fpga_plugin.kubernetes.grpc.unix_socket import socket_path
from fpga_plugin.kubernetes.kubelet.registry import Info, RegistrySocket
from fpga_plugin.kubernetes.names import ResourceName

STEPS = 10
"""Turns of the loop, more than a start or a stop takes."""

TURNS = 5
"""Of the loop, in which asyncio makes a connection of a client that dialled."""


class Api:
    """As much of `DevicePlugin` as an endpoint asks for before kubelet calls it."""

    def __init__(self):
        self.lists = self.prestarts = self.reconciler = self

    def subscribe(self, _changed):
        return lambda: None


def endpoint(directory: Path) -> Endpoint:
    resource = ResourceName("fpga.intel.com/region-ce48969398f05f33946d560708be108a")
    return Endpoint(resource, Api(), str(directory))


def registry(directory: Path) -> RegistrySocket:
    return RegistrySocket(
        str(directory / "fpga.sock"), Info("DRAPlugin", "fpga", "", ()), lambda _: None
    )


def dial(directory: Path) -> socket.socket | None:
    """A client that connects and waits; None where nobody listens."""
    for file in directory.iterdir():
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.settimeout(LIMIT / 2)
        with socket_path(str(directory), file.name) as path:
            try:
                client.connect(path)
            except OSError:
                client.close()
            else:
                return client
    return None


@pytest.mark.parametrize("serves", [endpoint, registry])
@pytest.mark.parametrize("what", ["start", "stop"])
def test_who_is_cancelled_at_any_instant_of_it_leaves_no_socket_open(tmp_path, serves, what):
    async def cancelled_after(steps: int, *, dialled_before: int) -> bool:
        server = serves(tmp_path)
        client = None
        if what == "stop":
            await server.start()
            client = dial(tmp_path)
            for _ in range(dialled_before):
                await asyncio.sleep(0)
        task = asyncio.create_task(getattr(server, what)())
        for _ in range(steps):
            await asyncio.sleep(0)
        finished = task.done()
        task.cancel()
        await asyncio.wait({task})
        if what == "start" and finished:
            await server.stop()
        assert not list(tmp_path.iterdir())
        if client is not None:  # it is notified of the end, while the loop still runs
            with client:
                await asyncio.to_thread(read_to_the_end, client)
        following = serves(tmp_path)  # which gets a descriptor of the same number
        await following.start()
        client = dial(tmp_path)
        assert client is not None
        with client:
            assert await asyncio.to_thread(client.recv, 1), "it accepts"
            await following.stop()
        return finished

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        seen = {
            asyncio.run(cancelled_after(steps, dialled_before=turns))
            for steps in range(1, STEPS)  # a task that never began has nothing to end
            for turns in range(TURNS)
        }
        gc.collect()
    assert [str(each.message) for each in told] == []
    assert seen == {False, True}, "it was cancelled before its end, and came after it"


def read_to_the_end(client: socket.socket) -> None:
    try:
        while client.recv(1024):
            pass
    except ConnectionResetError:
        pass
