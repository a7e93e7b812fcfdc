"""The PodResources client against a real gRPC server on a unix socket, as kubelet is one."""

import asyncio
import contextlib
import gc
import os
import socket

import pytest
from doubles import LIMIT
from grpclib.client import Channel
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from pods_support import serving

from fpga_plugin.ids import ours
from fpga_plugin.kubernetes.kubelet import podresources
from fpga_plugin.kubernetes.kubelet.podresources import (
    NoListReason,
    PodDevices,
    PodResourcesClient,
    PodResourcesError,
)
from fpga_plugin.kubernetes.messages import v1

PREFIX = "fpga.intel.com"
REGION = f"{PREFIX}/region-ce48969398f05f33946d560708be108a"
WHOLE = f"{PREFIX}/fpga-ce48969398f05f33946d560708be108a"


class Kubelet(v1.PodResourcesListerBase):
    """Answers what it is told to, or fails as told."""

    def __init__(self):
        self.pods = []
        self.devices = []
        self.error = None
        self.on_call = None
        self.calls = 0

    async def list(self, message):
        await self._act()
        return v1.ListPodResourcesResponse(pod_resources=self.pods)

    async def get_allocatable_resources(self, message):
        await self._act()
        return v1.AllocatableResourcesResponse(devices=self.devices)

    async def _act(self):
        self.calls += 1
        if self.on_call is not None:
            await self.on_call()
        if self.error is not None:
            raise self.error


def devices(resource, *ids):
    return v1.ContainerDevices(resource_name=resource, device_ids=list(ids))


def pod(name="p", namespace="ns", **containers):
    return v1.PodResources(
        name=name,
        namespace=namespace,
        containers=[v1.ContainerResources(name=n, devices=d) for n, d in containers.items()],
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kubelet.sock"


def ask(path, kubelet, method="snapshot", **options):
    async def scenario():
        async with serving(kubelet, path):
            return await getattr(PodResourcesClient(str(path), ours(PREFIX), **options), method)()

    return asyncio.run(scenario())


def failure(path, kubelet, method="snapshot", **options):
    with pytest.raises(PodResourcesError) as caught:
        ask(path, kubelet, method, **options)
    assert caught.value.status is Status.UNAVAILABLE
    assert str(path) in str(caught.value)
    return caught.value


def test_devices_of_our_resources_are_listed_by_container(path):
    kubelet = Kubelet()
    kubelet.pods = [
        pod("a", "one", app=[devices(REGION, "r0"), devices("nvidia.com/gpu", "g")], side=[]),
        pod("b", "two", app=[devices(WHOLE, "c0")], other=[devices(REGION, "r1", "r2")]),
        pod("c", "two", app=[devices("x" + PREFIX + "/region-Odd", "r3")]),
        pod("d", "two", app=[devices("example.com/gpu-" + "0" * 32, "g")]),
    ]
    assert ask(path, kubelet).devices == (
        PodDevices("one", "a", "app", REGION, frozenset({"r0"})),
        PodDevices("two", "b", "app", WHOLE, frozenset({"c0"})),
        PodDevices("two", "b", "other", REGION, frozenset({"r1", "r2"})),
    )


def test_devices_that_were_given_under_another_prefix_are_listed_too(path):
    old = REGION.replace(PREFIX, "fpga.example.com")
    kubelet = Kubelet()
    kubelet.pods = [pod("a", "one", app=[devices(old, "r0"), devices(REGION, "r1")])]
    assert ask(path, kubelet).devices == (
        PodDevices("one", "a", "app", old, frozenset({"r0"})),
        PodDevices("one", "a", "app", REGION, frozenset({"r1"})),
    )


def test_a_name_of_another_prefix_that_may_be_an_alias_is_listed_too(path):
    """What it stands for the ledger knows; devices that are none of its own it passes over."""
    named = "fpga.example.com/region-odd"
    kubelet = Kubelet()
    kubelet.pods = [pod("a", "one", app=[devices(named, "r0")])]
    assert ask(path, kubelet).devices == (PodDevices("one", "a", "app", named, frozenset({"r0"})),)


def test_groups_of_one_resource_are_one(path):
    kubelet = Kubelet()
    kubelet.pods = [pod(app=[devices(REGION, "r0"), devices(WHOLE, "c"), devices(REGION, "r1")])]
    first, second = ask(path, kubelet).devices
    assert first.devices == {"r0", "r1"}
    assert second.devices == {"c"}


def test_a_dead_pod_that_old_kubelets_list_without_ids_holds_nothing(path):
    kubelet = Kubelet()
    kubelet.pods = [pod(app=[devices(REGION)])]
    assert ask(path, kubelet).devices == ()


@pytest.mark.parametrize(
    "odd",
    [
        b"\x10\x01",  # a number as a device's id
        b"\x13\x14",  # a group as one
        b"\x08\x01",  # a number as the resource's name
    ],
)
@pytest.mark.parametrize("method", ["snapshot", "allocatable"])
def test_an_answer_whose_fields_are_of_other_types_is_an_error(path, method, odd):
    group = devices(REGION, "r0")
    group._unknown_fields = odd
    kubelet = Kubelet()
    kubelet.pods, kubelet.devices = [pod(app=[group])], [group]
    assert "not understood (a field is of another type)" in str(failure(path, kubelet, method))


def test_no_pods_is_an_answer(path):
    assert ask(path, Kubelet()).devices == ()


def test_allocatable_devices_come_by_resource(path):
    kubelet = Kubelet()
    kubelet.devices = [devices(REGION, "r0"), devices("x/y", "z"), devices(REGION, "r1")]
    kubelet.devices += [devices(WHOLE)]
    assert ask(path, kubelet, "allocatable") == {REGION: {"r0", "r1"}, WHOLE: frozenset()}


@pytest.mark.parametrize("method", ["snapshot", "allocatable"])
@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (Status.RESOURCE_EXHAUSTED, NoListReason.RATE_LIMITED),
        (Status.UNIMPLEMENTED, NoListReason.NOT_SERVED),
        (Status.DEADLINE_EXCEEDED, NoListReason.TIMEOUT),
        (Status.UNKNOWN, NoListReason.FAILED),
        (Status.UNAVAILABLE, NoListReason.FAILED),
    ],
)
def test_kubelets_errors_are_told_apart(path, method, status, reason):
    kubelet = Kubelet()
    kubelet.error = GRPCError(status, "rejected\x1b[31m " + "x" * 5000)
    error = failure(path, kubelet, method)
    assert error.reason is reason
    assert status.name in str(error)
    assert "rejected" in str(error)
    assert "\x1b" not in str(error)
    assert len(str(error)) < 1024


def test_no_socket_is_an_error(path):
    client = PodResourcesClient(str(path), ours(PREFIX))
    with pytest.raises(PodResourcesError, match="FPGA_PLUGIN_PODRESOURCES_SOCKET") as caught:
        asyncio.run(client.snapshot())
    assert caught.value.reason is NoListReason.MISSING
    with pytest.raises(PodResourcesError):
        client.instance()


def test_a_socket_without_a_listener_is_an_error(path):
    async def scenario():
        async with serving(Kubelet(), path):
            os.link(path, path.with_name("left"))
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        return await PodResourcesClient(str(path.with_name("left")), PREFIX).snapshot()

    with pytest.raises(PodResourcesError) as caught:
        asyncio.run(scenario())
    assert caught.value.reason is NoListReason.REFUSED


def test_a_path_too_long_for_a_socket_is_an_error(tmp_path):
    path = tmp_path / ("x" * 120)
    path.touch()
    with pytest.raises(PodResourcesError) as caught:
        asyncio.run(PodResourcesClient(str(path), ours(PREFIX)).snapshot())
    assert caught.value.reason is NoListReason.FAILED


def test_a_kubelet_that_does_not_answer_is_given_up(path):
    kubelet = Kubelet()
    kubelet.on_call = asyncio.Event().wait
    assert failure(path, kubelet, call_seconds=0.05).reason is NoListReason.TIMEOUT


def test_a_server_that_never_says_a_word_is_given_up(path):
    async def scenario():
        done = asyncio.Event()

        async def mute(_, writer):
            await done.wait()
            writer.close()

        server = await asyncio.start_unix_server(mute, path)
        try:
            client = PodResourcesClient(str(path), ours(PREFIX), call_seconds=0.05)
            await client.snapshot()
        finally:
            done.set()
            server.close()

    with pytest.raises(PodResourcesError) as caught:
        asyncio.run(scenario())
    assert caught.value.reason is NoListReason.TIMEOUT


def test_a_server_of_another_protocol_is_an_error(path):
    async def scenario():
        async def http1(_, writer):
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        async with await asyncio.start_unix_server(http1, path):
            await PodResourcesClient(str(path), ours(PREFIX), call_seconds=2).snapshot()

    with pytest.raises(PodResourcesError) as caught:
        asyncio.run(scenario())
    assert caught.value.reason in {NoListReason.FAILED, NoListReason.TIMEOUT}


@pytest.mark.parametrize(
    "pods",
    [
        [pod("", app=[devices(REGION, "r")])],
        [pod("../a", app=[devices(REGION, "r")])],
        [pod("a", "", app=[devices(REGION, "r")])],
        [pod("a", "n\n", app=[devices(REGION, "r")])],
        [pod("a", **{"": [devices(REGION, "r")]})],
        [pod("a", app=[devices(REGION, "r", "")])],
        [pod("a", app=[devices(f"{PREFIX}/", "r")])],
        [pod("a", app=[devices(f"{PREFIX}/a b", "r")])],
    ],
)
def test_an_entry_that_is_not_understood_is_not_left_out(path, pods):
    kubelet = Kubelet()
    kubelet.pods = [*pods, pod("fine", app=[devices(REGION, "r2")])]
    assert failure(path, kubelet).reason is NoListReason.FAILED


def test_an_answer_during_which_kubelet_was_replaced_counts_for_nothing(path):
    kubelet = Kubelet()

    async def replace():
        os.rename(path, path.with_name("old"))
        path.touch()

    kubelet.on_call = replace
    assert failure(path, kubelet).reason is NoListReason.RESTARTED


def test_an_answer_during_which_kubelet_went_counts_for_nothing(path):
    kubelet = Kubelet()

    async def remove():
        path.unlink()

    kubelet.on_call = remove
    assert failure(path, kubelet).reason is NoListReason.MISSING


def test_each_kubelet_has_an_epoch_of_its_own(path):
    async def scenario():
        client = PodResourcesClient(str(path), ours(PREFIX))
        async with serving(Kubelet(), path):
            first = await client.snapshot()
            again = await client.snapshot()
        os.rename(path, path.with_name("kept")) if path.exists() else path.with_name("x").touch()
        async with serving(Kubelet(), path):
            second = await client.snapshot()
            assert client.instance() == second.instance
        return first.instance, again.instance, second.instance

    first, again, second = asyncio.run(scenario())
    assert first == again
    assert first != second
    assert len(first.split(":")) == 3


@pytest.mark.parametrize("another", [False, True])
def test_who_asks_again_soon_has_one_connection_to_each_kubelet(path, monkeypatch, another):
    made = []

    class Counted(Channel):
        def __init__(self, **options):
            made.append(self)
            super().__init__(**options)

    monkeypatch.setattr(podresources, "Channel", Counted)

    async def scenario():
        client = PodResourcesClient(str(path), ours(PREFIX), idle_seconds=0.2)
        before = len(os.listdir("/proc/self/fd"))
        async with serving(Kubelet(), path):
            for _ in range(3):
                await client.snapshot()
                await client.allocatable()
            if another:
                os.rename(path, path.with_name("kept"))
        if another:
            async with serving(Kubelet(), path):
                await client.snapshot()
                client.close()
        async with asyncio.timeout(LIMIT):
            while len(os.listdir("/proc/self/fd")) > before:  # noqa: ASYNC110  # no event reports
                await asyncio.sleep(0.01)
        client.close()  # where the server closed it first

    asyncio.run(scenario())
    assert len(made) == 1 + another


def test_after_a_failure_the_next_call_has_another_connection(path):
    async def scenario():
        kubelet = Kubelet()
        client = PodResourcesClient(str(path), ours(PREFIX), call_seconds=0.5, idle_seconds=60)
        async with serving(kubelet, path):
            await client.snapshot()
            kubelet.on_call = asyncio.Event().wait
            with pytest.raises(PodResourcesError):
                await client.snapshot()
            kubelet.on_call = None
            await client.snapshot()
            client.close()

    asyncio.run(scenario())


def test_calls_overlap_and_leave_no_connection(path):
    async def scenario():
        kubelet = Kubelet()
        all_there = asyncio.Event()

        async def gather():
            if kubelet.calls == 10:
                all_there.set()
            await all_there.wait()

        kubelet.on_call = gather
        async with serving(kubelet, path):
            client = PodResourcesClient(str(path), ours(PREFIX))
            before = len(os.listdir("/proc/self/fd"))
            await asyncio.gather(*(client.snapshot() for _ in range(10)))
            async with asyncio.timeout(LIMIT):
                # No event says that a socket was closed.
                while len(os.listdir("/proc/self/fd")) > before:  # noqa: ASYNC110 - see above
                    await asyncio.sleep(0)

    asyncio.run(scenario())


def test_a_cancelled_call_is_cancelled_not_failed(path):
    async def scenario():
        kubelet = Kubelet()
        called = asyncio.Event()

        async def hang():
            called.set()
            await asyncio.Event().wait()

        kubelet.on_call = hang
        async with serving(kubelet, path):
            task = asyncio.create_task(PodResourcesClient(str(path), ours(PREFIX)).snapshot())
            await called.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(scenario())


def test_a_connection_that_a_plugin_keeps_does_not_outlive_the_double(path):
    """Else a later test fails, whichever happens to run when it is collected."""

    async def scenario():
        with socket.socket(socket.AF_UNIX) as plugin:
            plugin.setblocking(False)
            loop = asyncio.get_running_loop()
            async with serving(Kubelet(), path):
                await loop.sock_connect(plugin, str(path))
                await loop.sock_recv(plugin, 1024)  # the server's first word: it has accepted
            async with asyncio.timeout(LIMIT):
                while await loop.sock_recv(plugin, 1024):
                    pass

    asyncio.run(scenario())
    gc.collect()  # warnings of unclosed transports are errors here
