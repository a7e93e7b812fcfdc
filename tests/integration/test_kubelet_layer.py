"""The kubelet layer over real sockets, against kubelets of every generation and their accidents."""

import asyncio
import gc
import os
import socket
import tempfile
import threading
import time
from pathlib import Path

import grpc
import grpclib.server
import pytest
from grpclib.client import Channel
from grpclib.const import Status
from grpclib.encoding.proto import ProtoCodec
from grpclib.exceptions import GRPCError, StreamTerminatedError
from h2.exceptions import StreamClosedError
from kubelet_support import (
    CARDS,
    EVENTS_ONLY,
    LIMIT,
    QUICK,
    REGION,
    REGIONS,
    Calls,
    Changes,
    Kubelet,
    connected,
    device,
    eventually,
    kubelet,
    own_sockets,
    plugin,
)
from structlog.testing import capture_logs

from fpga_plugin.deviceplugin.device_stream import DeviceStreams
from fpga_plugin.deviceplugin.encoding import ListCodec, encode_list
from fpga_plugin.deviceplugin.errors import KubeletDirectoryError, NotRegisteredError
from fpga_plugin.deviceplugin.link import KubeletLink
from fpga_plugin.deviceplugin.register import register
from fpga_plugin.deviceplugin.registration import Timing
from fpga_plugin.deviceplugin.servicer import OPTIONS, Servicer
from fpga_plugin.deviceplugin.sockets import OWN_SOCKET, check_directory
from fpga_plugin.errors import RefusedError, UnknownDeviceError
from fpga_plugin.kubernetes.grpc.unix_socket import socket_identity
from fpga_plugin.kubernetes.messages import v1beta1 as api

REGION_2 = device("0000-10-00.0-p1", healthy=False)


@pytest.fixture
def directory():
    """Kubelet's device plugin directory."""
    with tempfile.TemporaryDirectory() as root:  # short: kubelet dials by path
        (Path(root) / "device-plugins").mkdir()
        yield Path(root) / "device-plugins"


def test_it_registers_with_all_options_and_sends_the_list_at_once(tmp_path):
    async def story():
        async with connected(tmp_path) as (one, calls, changes, service):
            (request,) = one.requests
            assert request.version == "v1beta1"
            assert request.resource_name == REGIONS
            assert OWN_SOCKET.fullmatch(request.endpoint)
            assert request.options == one.options[0] == OPTIONS
            assert bytes(OPTIONS).hex() == "0801100118012001"  # 1 to 4, all true
            await changes.until(lambda: calls.opened == [REGIONS])
            assert service.status[REGIONS].registered
            assert service.status[REGIONS].streaming
            assert service.status[REGIONS].problem == ""
            assert calls.facts == [socket_identity(str(tmp_path), "kubelet.sock")]

    asyncio.run(story())


def test_every_resource_is_registered_on_a_socket_of_its_own_later_ones_too(directory):
    async def story():
        async with connected(directory) as (one, calls, changes, service):
            calls.set(CARDS)
            await changes.until(lambda: one.streams(CARDS, ids=[]))
            assert len({request.endpoint for request in one.requests}) == 2
            assert set(service.status) == {REGIONS, CARDS}
            assert len(calls.facts) == 1

    asyncio.run(story())


def test_a_burst_of_changes_is_one_message_and_no_change_is_none(tmp_path):
    async def story():
        async with connected(tmp_path) as (one, calls, changes, _service):
            calls.tell()
            await one.client().stub.get_device_plugin_options(api.Empty())  # a turn for the stream
            for _ in range(50):
                calls.set(REGIONS, REGION, REGION_2)
                calls.set(REGIONS, REGION_2)
            await changes.until(lambda: one.streams(ids=[REGION_2.id]))
            calls.set(REGIONS)
            await changes.until(lambda: one.streams(ids=[]))
            assert [[each.id for each in sent.devices] for sent in one.client().lists] == [
                [REGION.id],
                [REGION_2.id],
                [],
            ]
            assert one.client().lists[1].devices[0].health == "Unhealthy"

    asyncio.run(story())


def test_the_same_list_is_sent_again_on_demand(tmp_path):
    async def story():
        async with connected(tmp_path) as (one, _calls, changes, service):
            service.resend()
            await changes.until(lambda: len(one.client().lists) == 2)
            assert one.client().lists[0] == one.client().lists[1]

    asyncio.run(story())


def test_streams_of_one_endpoint_are_independent(tmp_path):
    async def story():
        async with connected(tmp_path) as (one, calls, changes, service):
            async with Channel(path=one.client().path, codec=ProtoCodec()) as channel:
                other = api.DevicePluginStub(channel).list_and_watch(api.Empty())
                assert [each.id for each in (await anext(other)).devices] == [REGION.id]
                calls.set(REGIONS, REGION_2)
                assert [each.id for each in (await anext(other)).devices] == [REGION_2.id]
                await other.aclose()
            await changes.until(lambda: one.streams(ids=[REGION_2.id]))
            assert service.status[REGIONS].streaming
            assert len(one.requests) == 1

    asyncio.run(story())


def test_node_zero_is_sent_and_an_unknown_node_is_not():
    sent = api.ListAndWatchResponse.parse(encode_list([device("a", numa=0), device("b")]))
    assert [each.topology for each in sent.devices] == [
        api.TopologyInfo(nodes=[api.NumaNode(id=0)]),
        None,
    ]


@pytest.mark.parametrize("count", [0, 1, 1024])
def test_the_quick_encoding_is_the_ordinary_one(count):
    states = [
        ("Unhealthy", None, None),
        ("Healthy", 0, api.TopologyInfo(nodes=[api.NumaNode(id=0)])),
        ("Healthy", 1, api.TopologyInfo(nodes=[api.NumaNode(id=1)])),
    ]
    devices, messages = [], []
    for n in range(count):
        name, (health, numa, topology) = f"0000-10-00.0-p{n}", states[n % 3]
        devices.append(device(name, healthy=health == "Healthy", numa=numa))
        messages.append(api.Device(id=name, health=health, topology=topology))
    quick = ListCodec().encode(encode_list(devices), api.ListAndWatchResponse)
    assert quick == bytes(api.ListAndWatchResponse(devices=messages))


def test_every_method_of_the_service_is_served_with_its_types():
    async def mappings():
        calls = Calls(Changes())
        served = Servicer(REGIONS, calls, DeviceStreams(REGIONS, calls, calls)).__mapping__()
        return served, api.DevicePluginBase().__mapping__()

    served, generated = asyncio.run(mappings())
    assert {path: handler[1:] for path, handler in served.items()} == {
        path: handler[1:] for path, handler in generated.items()
    }


def allocate_request(*ids: str) -> api.AllocateRequest:
    return api.AllocateRequest(
        container_requests=[api.ContainerAllocateRequest(devices_ids=list(ids))]
    )


def test_allocate_answers_each_container(tmp_path):
    async def story():
        async with connected(tmp_path) as (one, calls, _changes, _service):
            request = api.AllocateRequest(
                container_requests=[
                    api.ContainerAllocateRequest(devices_ids=["a", "b"]),
                    api.ContainerAllocateRequest(devices_ids=["c"]),
                ]
            )
            answer = await one.client().stub.allocate(request)
            first, second = answer.container_responses
            assert first.envs == {"FPGA_DEVICE_a": "/dev/a", "FPGA_DEVICE_b": "/dev/b"}
            assert first.mounts == [
                api.Mount(container_path="/usr/share/fpga", host_path="/opt/fpga", read_only=True)
            ]
            assert first.devices == [
                api.DeviceSpec(container_path=node, host_path=node, permissions="rw")
                for node in ("/dev/a", "/dev/b")
            ]
            assert (first.annotations, first.cdi_devices) == ({}, [])
            assert [spec.host_path for spec in second.devices] == ["/dev/c"]
            assert [call[2] for call in calls.called] == [["a", "b"], ["c"]]

    asyncio.run(story())


def test_prestart_passes_the_environment_and_the_time_that_is_left(tmp_path):
    async def story():
        async with connected(tmp_path) as (one, calls, _changes, _service):
            request = api.PreStartContainerRequest(devices_ids=["a"], env={"FPGA_AFU_1": "x"})
            await one.client().stub.pre_start_container(request, timeout=30)
            await one.client().stub.pre_start_container(
                api.PreStartContainerRequest(devices_ids=["a"])
            )
            with_deadline, without = calls.called
            assert with_deadline[:4] == ("prestart", REGIONS, ["a"], {"FPGA_AFU_1": "x"})
            assert 25 < with_deadline[4] <= 30
            assert without[3:] == ({}, None)

    asyncio.run(story())


def test_a_prestart_that_kubelet_gives_up_is_cancelled_and_told(tmp_path):
    async def story():
        seen = []
        async with connected(tmp_path, on_call=lambda *call: seen.append(call)) as (one, calls, *_):
            calls.prestart_waits = asyncio.Event()
            with pytest.raises((GRPCError, TimeoutError)):
                await one.client().stub.pre_start_container(
                    api.PreStartContainerRequest(devices_ids=[REGION.id]), timeout=0.05
                )
            await eventually(lambda: len(seen) == 2)
            assert seen[1][0] == "PreStartContainer"
            assert seen[1][3] in {Status.DEADLINE_EXCEEDED, Status.CANCELLED}
            # and the connection serves on
            await one.client().stub.allocate(allocate_request("a"))

    asyncio.run(story())


def test_preferred_allocation_and_the_extensions_reach_the_calls(tmp_path):
    async def story():
        async with connected(tmp_path) as (one, calls, _changes, _service):
            stub = one.client().stub
            answer = await stub.get_preferred_allocation(
                api.PreferredAllocationRequest(
                    container_requests=[
                        api.ContainerPreferredAllocationRequest(["a", "b", "c"], ["b"], 2)
                    ]
                )
            )
            assert [each.device_i_ds for each in answer.container_responses] == [["a", "b"]]
            assert (
                await stub.post_stop_container(api.PostStopContainerRequest(["a"])) == api.Empty()
            )
            assert (
                await stub.deallocate(
                    api.DeallocateRequest([api.ContainerDeallocateRequest(["a", "b"])])
                )
                == api.Empty()
            )
            assert calls.called == [
                ("preferred", REGIONS, ["a", "b", "c"], ["b"], 2),
                ("poststop", REGIONS, ["a"]),
                ("deallocate", REGIONS, ["a", "b"]),
            ]

    asyncio.run(story())


def test_malformed_requests_are_refused_or_ignored_as_kubelet_can_bear(tmp_path):
    async def story():
        async with connected(tmp_path) as (one, calls, _changes, _service):
            stub = one.client().stub
            for refused in (
                stub.allocate(api.AllocateRequest()),
                stub.allocate(allocate_request()),
                stub.allocate(allocate_request("a", "")),
                stub.allocate(allocate_request("a", "a")),
                stub.pre_start_container(api.PreStartContainerRequest()),
                stub.pre_start_container(api.PreStartContainerRequest([""])),
            ):
                with pytest.raises(GRPCError) as caught:
                    await refused
                assert caught.value.status is Status.INVALID_ARGUMENT
                assert caught.value.message
            await stub.deallocate(api.DeallocateRequest())
            await stub.deallocate(api.DeallocateRequest([api.ContainerDeallocateRequest([""])]))
            await stub.post_stop_container(api.PostStopContainerRequest())
            assert calls.called == []

    asyncio.run(story())


def test_bytes_that_are_no_message_are_an_invalid_argument(tmp_path):
    path = "/v1beta1.DevicePlugin/PreStartContainer"

    def send(socket_path: str, data: bytes) -> grpc.StatusCode:
        with grpc.insecure_channel(f"unix:{socket_path}") as channel:
            method = channel.unary_unary(path, lambda raw: raw, lambda raw: raw)
            with pytest.raises(grpc.RpcError) as caught:
                method(data, timeout=LIMIT)
            return caught.value.code()

    async def story():
        async with connected(tmp_path) as (one, calls, _changes, _service):
            for data in (b"\x0a\x02\xff\xfe", b"\x07", b"\x0a", b"\x12\x03\x0a\x05a", b""):
                code = await asyncio.to_thread(send, one.client().path, data)
                assert code is grpc.StatusCode.INVALID_ARGUMENT, data
            assert calls.called == []

    asyncio.run(story())


def test_refusals_carry_their_status_and_defects_say_nothing_of_themselves(tmp_path):
    async def story():
        seen = []
        async with connected(tmp_path, on_call=lambda *call: seen.append(call)) as (one, calls, *_):
            stub = one.client().stub
            for error, status, message in (
                (
                    UnknownDeviceError("no device x", hint="look"),
                    Status.NOT_FOUND,
                    "no device x: look",
                ),
                (
                    RefusedError("whole card, ümläut"),
                    Status.FAILED_PRECONDITION,
                    "whole card, ümläut",
                ),
                (
                    RuntimeError("secret"),
                    Status.INTERNAL,
                    "Allocate failed: see the log of fpga-plugin",
                ),
            ):
                calls.fails = error
                with pytest.raises(GRPCError) as caught:
                    await stub.allocate(allocate_request(REGION.id, "../../etc"))
                assert (caught.value.status, caught.value.message) == (status, message)
                method, resource, devices, seen_status, seen_message, seconds = seen[-1]
                assert (method, resource, devices) == ("Allocate", REGIONS, (REGION.id,))
                assert (seen_status, seen_message) == (status, message)
                assert 0 <= seconds < LIMIT

    asyncio.run(story())


def test_an_observer_that_fails_costs_nobody_an_answer(tmp_path):
    def fail(*_call):
        raise RuntimeError

    async def story():
        async with connected(tmp_path, on_call=fail) as (one, *_):
            await one.client().stub.allocate(allocate_request("a"))

    asyncio.run(story())


def test_kubelet_has_its_answer_before_the_call_is_told(tmp_path):
    answered, before = threading.Event(), []

    def observe(method, *_rest):
        if method in {"Allocate", "Deallocate"}:
            before.append(answered.wait(LIMIT))
            answered.clear()

    def call(path: str, method: str, message: object) -> None:
        with grpc.insecure_channel(f"unix:{path}") as channel:
            ask = channel.unary_unary(f"/v1beta1.DevicePlugin/{method}", bytes, lambda raw: raw)
            try:
                ask(message, timeout=LIMIT)
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT  # noqa: PT017  # or none
            answered.set()

    async def story():
        async with connected(tmp_path, on_call=observe) as (one, *_):
            path = one.client().path
            for method, message in (
                ("Allocate", allocate_request("a")),
                ("Allocate", allocate_request("")),
                ("Deallocate", api.DeallocateRequest([api.ContainerDeallocateRequest(["a"])])),
            ):
                await asyncio.to_thread(call, path, method, message)
            assert before == [True, True, True]

    asyncio.run(story())


def test_googles_grpc_client_is_served(tmp_path):
    def talk(path: str) -> None:
        with grpc.insecure_channel(f"unix:{path}") as channel:

            def unary(method, message, reply):
                call = channel.unary_unary(f"/v1beta1.DevicePlugin/{method}", bytes, reply.parse)
                return call(message, timeout=LIMIT)

            assert unary("GetDevicePluginOptions", api.Empty(), api.DevicePluginOptions) == OPTIONS
            watch = channel.unary_stream(
                "/v1beta1.DevicePlugin/ListAndWatch", bytes, api.ListAndWatchResponse.parse
            )(api.Empty())
            assert next(watch).devices[0].id == REGION.id
            answer = unary("Allocate", allocate_request("a"), api.AllocateResponse)
            assert answer.container_responses[0].envs == {"FPGA_DEVICE_a": "/dev/a"}
            request = api.PreStartContainerRequest(["a"], env={"A": "1", "B": ""})
            unary("PreStartContainer", request, api.PreStartContainerResponse)
            unary("PostStopContainer", api.PostStopContainerRequest(["a"]), api.Empty)
            request = api.DeallocateRequest([api.ContainerDeallocateRequest(["a"])])
            assert unary("Deallocate", request, api.Empty) == api.Empty()
            watch.cancel()

    async def story():
        async with connected(tmp_path) as (one, calls, _changes, _service):
            await asyncio.to_thread(talk, one.client().path)
            assert [call[0] for call in calls.called] == [
                "allocate",
                "prestart",
                "poststop",
                "deallocate",
            ]
            assert calls.called[1][3] == {"A": "1", "B": ""}

    asyncio.run(story())


@pytest.mark.parametrize("generation", [1, 2, 3])
@pytest.mark.parametrize("accident", ["stream lost", "socket deleted", "lost by kubelet"])
def test_a_registration_is_renewed_with_every_generation(directory, generation, accident):
    async def story():
        changes = Changes()
        calls = Calls(changes)
        async with (
            kubelet(directory, changes, generation=generation) as one,
            plugin(directory, calls) as service,
        ):
            await changes.until(one.streams)
            first = one.client()
            if accident == "stream lost":
                first.close()
            elif accident == "socket deleted":
                os.unlink(first.path)
            else:
                assert service.sent() == {REGIONS: {REGION.id}}
                service.reregister(REGIONS)
                service.reregister(REGIONS)  # twice is once
            await changes.until(lambda: one.client() is not first and one.streams())
            assert one.client().path != first.path
            assert first.ended
            await changes.until(lambda: len(calls.opened) >= 2)
            # whatever the old stream's end does, the new one outlives it
            calls.set(REGIONS, REGION, REGION_2)
            await changes.until(lambda: one.streams(ids=[REGION.id, REGION_2.id]))
            assert service.status[REGIONS].streaming
            assert own_sockets(directory) == [Path(one.client().path).name]
            assert len(calls.facts) == 1

    asyncio.run(story())


@pytest.mark.parametrize("leave_socket", [False, True])
def test_it_registers_again_when_kubelet_restarts(directory, leave_socket):
    async def story():
        changes = Changes()
        calls = Calls(changes)
        calls.listed[CARDS] = ()
        # Only inotify can be quick here: the delays are a minute.
        async with plugin(directory, calls, timing=EVENTS_ONLY) as service:
            for life in range(1, 4):
                one = Kubelet(directory, changes)
                await one.start()
                await changes.until(lambda: one.streams() and one.streams(CARDS, ids=[]))  # noqa: B023
                assert len(calls.facts) == len(set(calls.facts)) == life
                await one.stop(leave_socket=leave_socket)
                await eventually(lambda: not service.status[REGIONS].streaming)
            await eventually(lambda: service.status[REGIONS].problem)

    asyncio.run(story())


@pytest.mark.parametrize("wipes", [True, False])
def test_a_restart_that_leaves_the_old_connection_open_is_noticed(directory, wipes):
    async def story():
        changes = Changes()
        calls = Calls(changes)
        async with (
            kubelet(directory, changes) as old,
            plugin(directory, calls, timing=EVENTS_ONLY),
        ):
            await changes.until(old.streams)
            async with kubelet(directory, changes, wipes=wipes) as new:
                await changes.until(lambda: new.streams() and old.client().ended)
                assert len(calls.facts) == 2

    asyncio.run(story())


def test_a_caller_that_went_before_it_was_answered_is_no_defect_of_ours(tmp_path, monkeypatch):
    async def ended(_stream, _message):
        raise StreamClosedError(3)

    async def story():
        async with connected(tmp_path) as (one, calls, changes, _service):
            with capture_logs() as logs:
                monkeypatch.setattr(grpclib.server.Stream, "send_message", ended)
                calls.set(REGIONS, REGION, REGION_2)
                await changes.until(lambda: one.client().ended)
                # The next registration begins with a call.
                await eventually(lambda: "call not finished" in [line["event"] for line in logs])
                monkeypatch.undo()
            assert [line for line in logs if line["log_level"] == "error"] == []

    asyncio.run(story())


def test_it_waits_for_kubelets_socket(directory):
    async def story():
        changes = Changes()
        calls = Calls(changes)
        async with plugin(directory, calls, timing=EVENTS_ONLY) as service:
            await asyncio.sleep(0)
            assert "kubelet.sock is not in" in service.status[REGIONS].problem
            assert own_sockets(directory) == []
            async with kubelet(directory, changes) as one:
                await changes.until(one.streams)

    asyncio.run(story())


def test_it_waits_for_kubelets_directory_and_for_one_that_is_made_again(tmp_path):
    directory = tmp_path / "a" / ("deep" * 20)  # no socket's path may be that long

    async def story():
        changes = Changes()
        calls = Calls(changes)
        async with plugin(directory, calls, timing=EVENTS_ONLY) as service:
            await asyncio.sleep(0)
            assert "is not there" in service.status[REGIONS].problem
            assert "FPGA_PLUGIN_KUBELET_DIR" in service.status[REGIONS].problem
            directory.mkdir(parents=True)
            async with kubelet(directory, changes) as one:
                await changes.until(one.streams)
                old = directory.rename(directory.with_name("old"))
                directory.mkdir()
                async with kubelet(directory, changes) as two:
                    await changes.until(two.streams)
                    one.directory = old

    asyncio.run(story())


def test_a_directory_that_is_made_again_at_once_is_watched_again(tmp_path):
    directory = tmp_path / "d"
    directory.mkdir()

    async def story():
        changes = Changes()
        async with plugin(directory, Calls(changes), timing=EVENTS_ONLY):
            for _ in range(5):
                await asyncio.sleep(0)
            directory.rmdir()
            directory.mkdir()  # many file systems give it the inode of the old one
            for _ in range(5):
                await asyncio.sleep(0.001)
            async with kubelet(directory, changes) as one:
                await changes.until(one.streams)

    asyncio.run(story())


def test_a_kubelet_that_refuses_is_asked_again(directory):
    async def story():
        changes = Changes()
        calls = Calls(changes)
        async with (
            kubelet(directory, changes, refusals=5) as one,
            plugin(directory, calls) as service,
        ):
            await changes.until(lambda: one.refusals < 5)
            await changes.until(one.streams)
            assert len(one.requests) == 6
            assert len({request.endpoint for request in one.requests}) == 6
            assert service.status[REGIONS].problem == ""
            assert own_sockets(directory) == [one.requests[-1].endpoint]

    asyncio.run(story())


def test_a_kubelet_that_dies_between_connection_and_call_is_one_that_broke_off(tmp_path):
    async def story():
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(tmp_path / "kubelet.sock"))
            server.listen()
            call = asyncio.create_task(register(str(tmp_path), REGIONS, "x.sock", seconds=LIMIT))
            # After the task's first step, which connects, and before the connection's first write.
            asyncio.get_running_loop().call_soon(server.close)
            with pytest.raises(NotRegisteredError, match="broke off"):
                await call

    asyncio.run(story())


def test_an_ok_to_register_without_a_stream_does_not_count(directory):
    async def story():
        changes = Changes()
        calls = Calls(changes)
        timing = Timing(first_delay=0.01, last_delay=0.02, stream=0.05)
        async with (
            kubelet(directory, changes, opens_stream=False) as one,
            plugin(directory, calls, timing=timing) as service,
        ):
            await changes.until(lambda: len(one.requests) >= 3)
            assert not service.status[REGIONS].streaming
            assert "did not ask for the device list" in service.status[REGIONS].problem
            one.opens_stream = True
            await changes.until(one.streams)

    asyncio.run(story())


def test_a_link_that_has_not_started_has_sent_nothing(tmp_path):
    async def story():
        link = KubeletLink(kubelet_dir=str(tmp_path))
        assert link.sent() == {}
        link.resend()
        link.reregister(REGIONS)
        await link.announced()
        assert not list(link.opened)
        await link.stop()

    asyncio.run(story())


def test_a_kubelet_that_does_not_answer_is_given_up_and_does_not_delay_the_end(tmp_path):
    async def story():
        changes = Changes()
        async with kubelet(tmp_path, changes, hangs=True) as one:
            timing = Timing(register=0.05, first_delay=0.01, last_delay=0.02)
            async with plugin(tmp_path, Calls(changes), timing=timing) as service:
                await changes.until(lambda: len(one.requests) == 3)
                assert "did not answer Register within 0.05 s" in service.status[REGIONS].problem
            calls = Calls(changes)
            service = KubeletLink(kubelet_dir=str(tmp_path))
            await service.start(calls)
            await changes.until(lambda: len(one.requests) > 3)
            began = time.monotonic()
            await service.stop()
            assert time.monotonic() - began < 0.4
            assert own_sockets(tmp_path) == []

    asyncio.run(story())


def test_a_kubelet_that_does_not_read_does_not_delay_the_end(tmp_path):
    many = [device(f"0000-10-00.0-p{n}") for n in range(2048)]

    async def story():
        async with connected(tmp_path) as (one, calls, changes, service):
            connection = one.client().channel._protocol.connection
            connection._transport.pause_reading()
            (cursor,) = service._registrations[REGIONS]._endpoint.streams._cursors
            # Until a change is not taken up any more: the stream waits for its reader.
            while not cursor.changed.is_set():
                many.reverse()
                calls.set(REGIONS, *many)
                for _ in range(5):
                    await asyncio.sleep(0)
            began = time.monotonic()
            await service.stop()
            assert time.monotonic() - began < 0.4
            with pytest.raises(BrokenPipeError):
                os.write(connection._transport.get_extra_info("socket").fileno(), b"anybody?")
            connection._transport.resume_reading()
            await changes.until(lambda: one.client().ended)

    asyncio.run(story())


def test_defects_behind_cost_neither_registration_nor_stream(directory):
    async def story():
        changes = Changes()
        calls = Calls(changes)
        calls.news_fails = 2  # the first kubelet_found, and the first stream_opened
        async with kubelet(directory, changes) as one, plugin(directory, calls):
            await changes.until(one.streams)
            await changes.until(lambda: calls.opened)
            calls.set(REGIONS)
            await changes.until(lambda: one.streams(ids=[]))
            assert len(one.requests) == 1
            assert calls.news_fails == 0

    asyncio.run(story())


def test_a_stream_is_kept_while_there_is_no_kubelet_to_register_with(directory):
    async def story():
        async with connected(directory, timing=EVENTS_ONLY) as (one, calls, changes, service):
            first = one.client()
            os.unlink(directory / "kubelet.sock")
            os.unlink(first.path)
            calls.set(REGIONS)
            await changes.until(lambda: one.streams(ids=[]))
            assert one.client() is first
            assert service.status[REGIONS].streaming
            async with kubelet(directory, changes) as new:
                await changes.until(lambda: new.streams(ids=[]) and first.ended)

    asyncio.run(story())


def test_a_dead_kubelets_socket_is_not_dialled_in_a_loop(tmp_path):
    async def story():
        left = socket.socket(socket.AF_UNIX)
        left.bind(str(tmp_path / "kubelet.sock"))
        left.close()
        changes = Changes()
        calls = Calls(changes)
        async with plugin(tmp_path, calls, timing=EVENTS_ONLY) as service:
            await eventually(lambda: "does not serve" in service.status[REGIONS].problem)
            assert own_sockets(tmp_path) == []
            async with kubelet(tmp_path, changes) as one:
                await changes.until(one.streams)
                assert len(one.requests) == 1

    asyncio.run(story())


def test_stop_is_quick_and_leaves_nothing_while_kubelet_stays_connected(directory):
    async def story():
        changes = Changes()
        calls = Calls(changes)
        calls.listed[CARDS] = ()
        async with kubelet(directory, changes) as one:
            before = asyncio.all_tasks()
            service = KubeletLink(kubelet_dir=str(directory), timing=QUICK)
            await service.start(calls)
            await changes.until(lambda: one.streams() and one.streams(CARDS, ids=[]))
            calls.prestart_waits = asyncio.Event()
            prestart = asyncio.create_task(
                one.client().stub.pre_start_container(api.PreStartContainerRequest(["a"]))
            )
            await changes.until(lambda: calls.called)
            mine = asyncio.all_tasks() - before
            began = time.monotonic()
            await service.stop()
            assert time.monotonic() - began < 0.4
            assert own_sockets(directory) == []
            assert calls.subscribers == []
            assert service.status == {}
            await changes.until(lambda: one.client().ended)
            with pytest.raises(StreamTerminatedError):
                await prestart
            # what is not done belongs to the kubelet of the test
            names = [task.get_coro().__qualname__ for task in mine if not task.done()]
            assert all("Kubelet" in name or "request_handler" in name for name in names), names

    asyncio.run(story())
    gc.collect()  # warnings of unclosed sockets are errors here


def test_stop_works_before_kubelet_was_ever_there(directory):
    async def story():
        async with plugin(directory / "none", Calls(Changes()), timing=EVENTS_ONLY):
            pass
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(story())


def test_only_our_own_stale_sockets_are_removed_at_the_start(tmp_path):
    keep = ["other.sock", "fpga-plugin-x-1.sock", "fpga-plugin-1-1.sock.old"]
    for name in [*keep, "fpga-plugin-1-1.sock", "fpga-plugin-12-1700000000000.sock"]:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(tmp_path / name))
    (tmp_path / "fpga-plugin-2-2.sock").write_text("a file")

    async def story():
        async with plugin(tmp_path, Calls(Changes())):
            assert sorted(os.listdir(tmp_path)) == sorted([*keep, "fpga-plugin-2-2.sock"])

    asyncio.run(story())


def test_a_directory_too_deep_for_a_socket_path_is_served(tmp_path):
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    # The test's kubelet works through a link; kubelet itself could not serve there otherwise.
    link = tmp_path / "k"
    link.symlink_to(deep)

    async def story():
        changes = Changes()
        async with kubelet(link, changes) as one, plugin(deep, Calls(changes)):
            await changes.until(one.streams)

    asyncio.run(story())


def test_sockets_are_for_root_alone(directory):
    async def story():
        async with connected(directory) as (one, *_):
            assert os.stat(one.client().path).st_mode & 0o777 == 0o600

    asyncio.run(story())


def test_a_directory_that_cannot_be_used_says_what_to_do(tmp_path, monkeypatch):
    check_directory(str(tmp_path))
    with pytest.raises(KubeletDirectoryError, match="is not there: mount"):
        check_directory(str(tmp_path / "none"))
    (tmp_path / "file").write_text("")
    with pytest.raises(KubeletDirectoryError, match="is not a directory"):
        check_directory(str(tmp_path / "file"))
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(
        KubeletDirectoryError, match=r"cannot be written: mount .* without readOnly"
    ):
        check_directory(str(tmp_path))
