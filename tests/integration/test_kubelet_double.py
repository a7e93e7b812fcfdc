"""The kubelet double does what kubelet does, seen from the plugin, and tells all that it hears."""

import asyncio
import os
import socket
import time
from contextlib import asynccontextmanager, closing, suppress

import pytest
from doubles import LIMIT
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from kubelet_support import CARDS, INTERFACE, REGIONS, Calls, Changes, device, plugin

from fpga_plugin.daemon.process import Daemon
from fpga_plugin.demo.double import (
    EXTENDED,
    FORK,
    SERVICE_ENV,
    STOCK,
    AdmissionError,
    KubeletDouble,
    rpc_error,
)
from fpga_plugin.demo.plugins import NoEndpointError
from fpga_plugin.demo.pod import DemoContainer, DemoPod
from fpga_plugin.errors import NotFinishedError, RefusedError
from fpga_plugin.ids import ours
from fpga_plugin.kubernetes.kubelet.checkpoint import read_checkpoint, read_stamp
from fpga_plugin.kubernetes.kubelet.grants import cached_grant
from fpga_plugin.kubernetes.kubelet.podresources import PodResourcesClient
from fpga_plugin.kubernetes.kubelet.podsapi import PodsApi
from fpga_plugin.kubernetes.pod import NoSuchPodError, Phase
from fpga_plugin.settings.settings import load_settings

PREFIX = "fpga.intel.com"
ENV = {"FPGA_REGION_1": INTERFACE, "FPGA_AFU_1": "18b79ffa2ee54aa096ef4230dafacb5f"}
STORE = os.path.join(os.path.dirname(__file__), "..", "..", "bitstreams")


def pod(*containers, init=(), **how) -> DemoPod:
    return DemoPod(name="a", containers=containers, init_containers=init, **how)


def container(name="app", count=1, resource=REGIONS, **how) -> DemoContainer:
    return DemoContainer(name=name, devices={resource: count}, env=ENV, **how)


APP = container()


@asynccontextmanager
async def stage(tmp_path, *regions, profile=EXTENDED, **how):
    """A double, and the kubelet layer over a fake life of allocations."""
    changes = Changes()
    calls = Calls(changes)
    calls.listed = {REGIONS: regions or tuple(device(f"0000-10-00.0-p{n}") for n in range(4))}
    double = KubeletDouble(str(tmp_path), profile=profile, **how)
    await double.start()
    try:
        async with plugin(tmp_path, calls):
            await double.wait_for(REGIONS)
            yield double, calls
    finally:
        await double.stop()


def called(calls, method):
    return [call[1:] for call in calls.called if call[0] == method]


def test_admission_asks_grants_and_records_before_any_start(tmp_path):
    async def run():
        listed = (device("0000-10-00.0-p0", numa=1), device("0000-10-00.0-p1", healthy=False))
        async with stage(tmp_path, *listed) as (double, calls):
            one = pod(APP)
            await double.admit(one)
            assert called(calls, "preferred") == [(REGIONS, ["0000-10-00.0-p0"], [], 1)]
            assert called(calls, "allocate") == [(REGIONS, ["0000-10-00.0-p0"])]
            checkpoint = read_checkpoint(
                str(tmp_path / "kubelet_internal_checkpoint"), ours(PREFIX)
            )
            (entry,) = checkpoint.entries
            assert entry.pod_uid == one.uid
            assert entry.container == "app"
            assert entry.devices == {"0000-10-00.0-p0"}
            grant = cached_grant(entry)
            assert grant is not None
            assert grant.nodes == {"/dev/0000-10-00.0-p0"}
            assert checkpoint.registered == {REGIONS: {"0000-10-00.0-p0"}}
            assert (
                '"1": ["0000-10-00.0-p0"]' in (tmp_path / "kubelet_internal_checkpoint").read_text()
            )
            await double.admit(one)  # its devices are there already
            assert len(called(calls, "allocate")) == 1

    asyncio.run(run())


def test_every_list_rewrites_the_checkpoint(tmp_path):
    async def run():
        path = str(tmp_path / "kubelet_internal_checkpoint")
        async with stage(tmp_path) as (double, calls):
            before = read_stamp(path)
            calls.set(REGIONS, device("0000-10-00.0-p3"))
            await double.wait_for(REGIONS, lambda listed: listed.ids == ("0000-10-00.0-p3",))
            assert read_stamp(path) != before

    asyncio.run(run())


def test_an_extended_kubelet_sends_env_poststop_and_deallocate(tmp_path):
    async def run():
        async with stage(tmp_path) as (double, calls):
            one = pod(APP)
            await double.admit(one)
            assert await double.start_container(one, "app") == [REGIONS]
            await double.remove_container(one, "app")
            await double.end_pod(one)
            ids = ["0000-10-00.0-p0"]
            ((_, _, env, time_left),) = called(calls, "prestart")
            assert env == SERVICE_ENV | ENV
            assert 25 < time_left <= 30
            assert called(calls, "poststop") == [(REGIONS, ids)]
            assert called(calls, "deallocate") == [(REGIONS, ids)]
            assert double.held == {}

    asyncio.run(run())


def test_a_stock_kubelet_sends_none_of_it(tmp_path):
    async def run():
        async with stage(tmp_path, profile=STOCK) as (double, calls):
            one = pod(APP)
            await double.admit(one)
            await double.start_container(one, "app")
            await double.remove_container(one, "app")
            await double.end_pod(one)
            ((_, _, env, _),) = called(calls, "prestart")
            assert env == {}
            assert called(calls, "poststop") + called(calls, "deallocate") == []
            assert double.held  # freed when somebody asks
            await double.free_inactive()
            assert double.held == {}

    asyncio.run(run())


@pytest.mark.parametrize(("profile", "app"), [(EXTENDED, "p0"), (STOCK, "p0"), (FORK, "p1")])
def test_init_containers_leave_their_devices_to_the_app_but_in_the_fork(tmp_path, profile, app):
    async def run():
        async with stage(tmp_path, profile=profile) as (double, _):
            one = pod(APP, init=(container("init"),))
            await double.admit(one)
            assert double.devices(one, "init") == {REGIONS: ("0000-10-00.0-p0",)}
            assert double.devices(one, "app") == {REGIONS: (f"0000-10-00.0-{app}",)}

    asyncio.run(run())


def test_a_sidecar_keeps_what_it_took_over(tmp_path):
    async def run():
        async with stage(tmp_path) as (double, calls):
            init = (container("init"), container("beside", restartable=True))
            one = pod(container("app", 2), init=init)
            await double.admit(one)
            assert double.devices(one, "beside") == double.devices(one, "init")
            assert double.devices(one, "app") == {REGIONS: ("0000-10-00.0-p1", "0000-10-00.0-p2")}
            # Reused devices alone need no preference.
            assert len(called(calls, "preferred")) == 2

    asyncio.run(run())


def test_reused_devices_must_be_included_when_more_are_needed(tmp_path):
    async def run():
        async with stage(tmp_path) as (double, calls):
            await double.admit(pod(container("app", 2), init=(container("init"),)))
            all_ids = [f"0000-10-00.0-p{n}" for n in range(4)]
            assert called(calls, "preferred")[-1] == (REGIONS, all_ids, all_ids[:1], 2)

    asyncio.run(run())


def test_too_few_devices_reject_the_pod_without_a_call(tmp_path):
    async def run():
        async with stage(tmp_path) as (double, calls):
            one = pod(container(count=5))
            with pytest.raises(AdmissionError, match="Requested: 5, Available: 4") as caught:
                await double.admit(one)
            assert caught.value.call is None
            assert called(calls, "allocate") == []
            assert double.pods == {}

    asyncio.run(run())


def test_a_refused_allocate_rejects_the_pod_and_is_deallocated_all_the_same(tmp_path):
    async def run():
        async with stage(tmp_path) as (double, calls):
            calls.fails = RefusedError("card 0000-10-00.0 is elsewhere")

            def preferred(*_):
                return []

            calls.preferred = preferred
            calls.deallocate = lambda resource, ids: calls.called.append(
                ("deallocate", resource, list(ids))
            )
            with pytest.raises(AdmissionError) as caught:
                await double.admit(pod(APP))
            assert str(caught.value) == (
                "Pod was rejected: Allocate failed due to rpc error: code = FailedPrecondition"
                " desc = card 0000-10-00.0 is elsewhere, which is unexpected"
            )
            assert caught.value.call is not None
            assert called(calls, "deallocate") == [(REGIONS, ["0000-10-00.0-p0"])]

    asyncio.run(run())


def test_a_failed_pods_grants_are_deallocated_when_it_goes(tmp_path):
    async def run():
        async with stage(tmp_path) as (double, calls):
            one = pod(container("a", 3), container("b", 2))
            with pytest.raises(AdmissionError):
                await double.admit(one)
            assert called(calls, "deallocate") == []
            await double.end_pod(one)
            ids = ["0000-10-00.0-p0", "0000-10-00.0-p1", "0000-10-00.0-p2"]
            assert called(calls, "deallocate") == [(REGIONS, ids)]
            await double.admit(pod(container("a", 4)))

    asyncio.run(run())


def test_an_allocate_without_a_plugin_rejects_the_pod(tmp_path):
    async def run():
        double = KubeletDouble(str(tmp_path))
        await double.start()
        changes = Changes()
        async with plugin(tmp_path, Calls(changes)):
            await double.wait_for(REGIONS)
            listed = double.lists[REGIONS]
        await double.wait_for(REGIONS, lambda listed: not listed.healthy)
        double.lists[REGIONS] = listed  # as if kubelet had not noticed yet
        with pytest.raises(AdmissionError, match="has been stopped"):
            await double.admit(pod(APP))
        await double.stop()

    asyncio.run(run())


def test_a_call_raises_what_the_plugin_answered(tmp_path):
    async def run():
        async with stage(tmp_path) as (double, calls):
            calls.fails = RefusedError("no")
            with pytest.raises(GRPCError) as caught:
                await double.prestart(REGIONS, ["0000-10-00.0-p0"])
            assert caught.value.status is Status.FAILED_PRECONDITION

    asyncio.run(run())


def test_no_list_is_passed_over_while_somebody_waits(tmp_path):
    async def run():
        async with stage(tmp_path) as (double, _):
            waiting = asyncio.create_task(double.wait_for(REGIONS, lambda listed: listed.ids == ()))
            await asyncio.sleep(0)
            listed = double.lists[REGIONS]
            # Two lists in one go of the event loop: the waiter cannot run in between.
            double._received(type(listed)(REGIONS))
            double._received(listed)
            assert (await waiting).ids == ()
            assert double.lists[REGIONS] is listed

    asyncio.run(run())


def test_waiting_in_vain_tells_the_last_list(tmp_path):
    async def run():
        async with stage(tmp_path) as (double, _):
            with pytest.raises(TimeoutError, match=r"0000-10-00\.0-p3"):
                await double.wait_for(REGIONS, lambda _: False, timeout=0.01)

    asyncio.run(run())


def test_a_plugin_that_goes_leaves_its_devices_unhealthy_and_its_calls_fail(tmp_path):
    async def run():
        changes = Changes()
        calls = Calls(changes)
        double = KubeletDouble(str(tmp_path))
        await double.start()
        async with plugin(tmp_path, calls):
            await double.wait_for(REGIONS, lambda listed: listed.healthy)
        listed = await double.wait_for(REGIONS, lambda listed: not listed.healthy)
        assert listed.ids == ("0000-10-00.0-p0",)
        with pytest.raises(NoEndpointError, match="has been stopped"):
            await double.allocate(REGIONS, ["0000-10-00.0-p0"])
        await double.stop()

    asyncio.run(run())


def test_a_restart_makes_another_socket_and_remembers_who_has_what(tmp_path):
    async def run():
        async with stage(tmp_path) as (double, calls):
            one = pod(APP)
            await double.admit(one)
            before = (tmp_path / "kubelet.sock").stat()
            await double.stop()
            assert not [path for path in tmp_path.iterdir() if path.is_socket()]
            await double.start()
            after = (tmp_path / "kubelet.sock").stat()
            assert (before.st_ino, before.st_ctime_ns) != (after.st_ino, after.st_ctime_ns)
            # Until the plugin is back, containers start without PreStart.
            assert await double.start_container(one, "app") == []
            await double.wait_for(REGIONS)
            assert await double.start_container(one, "app") == [REGIONS]
            assert len(called(calls, "prestart")) == 1

    asyncio.run(run())


@pytest.mark.parametrize("turns", range(5))
def test_a_kubelet_that_stops_takes_the_connections_to_it_along(tmp_path, turns):
    """Those that came some turns of the event loop ago, too."""

    async def run():
        path = str(tmp_path / "list.sock")
        double = KubeletDouble(str(tmp_path), podresources_path=path)
        await double.start()
        served, writer = await asyncio.open_unix_connection(path)
        await served.read(1)
        with closing(socket.socket(socket.AF_UNIX)) as late:
            late.connect(path)
            for _ in range(turns):
                await asyncio.sleep(0)
            await double.stop()
            late.settimeout(LIMIT)
            with suppress(ConnectionResetError):
                while late.recv(4096):
                    pass
        async with asyncio.timeout(LIMIT):
            await served.read()  # to its end
        writer.close()
        await writer.wait_closed()

    asyncio.run(run())


def test_podresources_shows_active_pods_and_no_init_containers(tmp_path):
    async def run():
        socket = str(tmp_path / "podresources")
        os.mkdir(tmp_path / "kubelet")
        listed = tuple(device(f"0000-10-00.0-p{n}", numa=n % 2) for n in range(3))
        async with stage(
            tmp_path / "kubelet", *listed, profile=STOCK, podresources_path=socket
        ) as (double, _):
            one = pod(container("app", 2), init=(container("init"),))
            client = PodResourcesClient(socket, ours(PREFIX))
            assert (await client.snapshot()).devices == ()
            await double.admit(one)
            held = (await client.snapshot()).devices
            assert {(each.pod, each.container) for each in held} == {("a", "app")}
            assert {device for each in held for device in each.devices} == {
                "0000-10-00.0-p0",
                "0000-10-00.0-p1",
            }
            await double.end_pod(one)
            assert (await client.snapshot()).devices == ()
            assert double.held == {}  # List made kubelet free them

    asyncio.run(run())


def test_the_pods_api_shows_pods_as_the_plugins_own_client_reads_them(tmp_path):
    async def run():
        socket = str(tmp_path / "pods")
        os.mkdir(tmp_path / "kubelet")
        async with stage(tmp_path / "kubelet", profile=STOCK, pods_path=socket) as (double, calls):
            one = pod(
                APP, init=(container("init"), container("side", restartable=True)), namespace="n"
            )
            client = PodsApi(socket)
            with pytest.raises(NoSuchPodError):
                await client.get(one.uid)
            await double.admit(one)
            known = await client.get(one.uid)
            assert (known.full_name, known.ended) == (("n", "a"), False)
            assert known.sandbox is True
            assert [c.name for c in known.containers] == ["app"]
            assert [(c.name, c.restartable) for c in known.init] == [
                ("init", False),
                ("side", True),
            ]
            assert {v.name: v.value for v in known.containers[0].env} == ENV
            assert known.state("init").phase is Phase.WAITING

            began = int(time.time())
            await double.start_container(one, "init")
            assert (await client.get(one.uid)).state("init").started >= began
            double.end_container(one, "init", 3)
            state = (await client.get(one.uid)).state("init")
            assert state.phase is Phase.TERMINATED
            assert state.ended.exit_code == 3
            assert state.ended.started >= began

            calls.fails = NotFinishedError("not yet")
            with pytest.raises(GRPCError):
                await double.start_container(one, "app")
            state = (await client.get(one.uid)).state("app")
            assert state.phase is Phase.WAITING
            assert "desc = not yet" in state.message

            await double.end_pod(one)
            with pytest.raises(NoSuchPodError):
                await client.get(one.uid)

    asyncio.run(run())


def test_errors_are_spelled_as_go_spells_them():
    assert rpc_error(GRPCError(Status.INVALID_ARGUMENT, "x")) == (
        "rpc error: code = InvalidArgument desc = x"
    )
    assert "code = Canceled desc = " in rpc_error(GRPCError(Status.CANCELLED))


def settings(tmp_path):
    return load_settings(
        {
            "FPGA_PLUGIN_BACKEND": "simulated",
            "FPGA_PLUGIN_KUBELET_DIR": str(tmp_path / "kubelet"),
            "FPGA_PLUGIN_STATE_DIR": str(tmp_path / "state"),
            "FPGA_PLUGIN_BITSTREAM_DIR": os.path.abspath(STORE),
            "FPGA_PLUGIN_SIMULATED_PR_SECONDS": "0",
            "FPGA_PLUGIN_RECONCILE_INTERVAL": "0.02",
            "FPGA_PLUGIN_PODRESOURCES_SOCKET": str(tmp_path / "podresources"),
            "FPGA_PLUGIN_PODS_SOCKET": "",
            "FPGA_PLUGIN_CGROUP_ROOT": "",
            "FPGA_PLUGIN_HTTP_ADDRESS": "",
        }
    )


def test_a_stock_kubelets_silence_is_enough_for_the_real_daemon_to_release(tmp_path):
    async def run():
        double = KubeletDouble(
            str(tmp_path / "kubelet"),
            profile=STOCK,
            podresources_path=str(tmp_path / "podresources"),
        )
        await double.start()
        daemon = Daemon(settings(tmp_path))
        await daemon.start()
        try:
            await double.wait_for(CARDS, lambda listed: len(listed.healthy) == 2)
            one = pod(APP)
            await double.admit(one)
            await double.wait_for(CARDS, lambda listed: len(listed.ids) == 1)
            await double.end_pod(one)
            await double.wait_for(CARDS, lambda listed: len(listed.healthy) == 2)
        finally:
            await daemon.stop()
            await double.stop()

    asyncio.run(run())
