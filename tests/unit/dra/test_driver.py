"""DRA as kubelet finds it: what it takes, its two sockets, and what it says of itself.

The calls are in test_servicer.py, the driver with a daemon behind in tests/integration/test_dra.py.
"""

import asyncio
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from doubles import LIMIT
from doubles.cards import PREFIX, device, make_card
from doubles.loops import until
from doubles.plugin_manager import PluginManager
from grpclib.client import Channel
from grpclib.encoding.proto import ProtoCodec
from ledger_support import make_ledger
from test_dra_steps import A, prepare

from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.queue import CardQueue
from fpga_plugin.allocation.recorder import EventRecorder
from fpga_plugin.dra import driver as module
from fpga_plugin.dra.driver import (
    DraDriver,
    check,
    make_directories,
    open_leftovers,
    socket_path,
)
from fpga_plugin.errors import FpgaPluginError, SettingsError
from fpga_plugin.host.backoff import Backoff
from fpga_plugin.kubernetes.grpc import fixed_socket
from fpga_plugin.kubernetes.grpc.fixed_socket import SUN_PATH, SocketError, registry_path
from fpga_plugin.kubernetes.messages.k8s.io.kubelet.pkg.apis.dra import v1 as dra
from fpga_plugin.kubernetes.messages.pluginregistration import PluginInfo
from fpga_plugin.settings.settings import Advertise, ServedApi, Settings

SETTINGS = Settings(mode=ServedApi.DRA, node_name="node-a", kubelet_root=".", cdi_dir="cdi")
SOCKET = Path(socket_path(SETTINGS))
REGISTRY = Path(registry_path(".", PREFIX))
REFUSED = "endpoint already registered"
BOTH = [str(SOCKET), str(REGISTRY)]
UID = "00000000-0000-4000-8000-000000000001"

# ---------------------------------------------------------------- what it takes


def root_of(length: int) -> str:
    """Kubelet's root, so that the longer of the two sockets has a path of so many bytes."""
    return "/" + "r" * (length - 1 - len(registry_path("", PREFIX)) - 1)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (SETTINGS, ""),
        (replace(SETTINGS, node_name=None), "NODE_NAME"),
        (replace(SETTINGS, resource_prefix="p" * 63, kubelet_root="/"), ""),
        (replace(SETTINGS, resource_prefix="p" * 64, kubelet_root="/"), "more than 63"),
        (replace(SETTINGS, advertise=Advertise.REGION), ""),
        (replace(SETTINGS, advertise=Advertise.AF), "FPGA_PLUGIN_ADVERTISE=af"),
        (replace(SETTINGS, kubelet_root=root_of(SUN_PATH)), ""),
        (replace(SETTINGS, kubelet_root=root_of(SUN_PATH + 1)), f"{SUN_PATH + 1} bytes"),
    ],
    ids=str,
)
def test_settings_that_are_not_enough_stop_the_start(settings: Settings, named: str) -> None:
    """Else the plugin runs, and no scheduler or kubelet ever finds it."""
    if not named:
        check(settings)
        return
    with pytest.raises(SettingsError, match=named):
        check(settings)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Kubelet's root directory, as kubelet left it; it is the working directory."""
    monkeypatch.chdir(tmp_path)  # a path of any length
    (tmp_path / "plugins_registry").mkdir()
    return tmp_path


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.usefixtures("root")
def test_directories_are_made_for_nobody_else_to_write_into() -> None:
    """Whoever may write there has its devices in any container, or kubelet's calls."""
    with umask(0):
        make_directories(SETTINGS)
        make_directories(SETTINGS)  # at the next start they are there
    for path in (SOCKET.parent, Path("cdi")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o755


def test_a_directory_that_is_not_kubelets_root_is_left_alone(root: Path) -> None:
    """A typo, or a hostPath that is missing: the driver would wait for kubelet for ever."""
    (root / "plugins_registry").rmdir()
    with pytest.raises(SocketError, match=r"'\.' is not kubelet's root directory") as refused:
        make_directories(SETTINGS)
    assert "FPGA_PLUGIN_KUBELET_ROOT" in refused.value.hint
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("at", ["plugins", "cdi"])
def test_a_directory_that_cannot_be_made_is_named(root: Path, at: str) -> None:
    (root / at).write_text("a file")
    with pytest.raises(SocketError, match=f"directory '.*{at}.*' cannot be made"):
        make_directories(SETTINGS)


# ---------------------------------------------------------------- its life


class Kubelet:
    """Kubelet's plugin manager, and what it says of the driver.

    Attributes:
        refuses: it knows the name by another socket.
        known: the driver, while it is registered.
    """

    def __init__(self) -> None:
        self.refuses = False
        self.known: PluginInfo | None = None
        self.manager = PluginManager(Path("plugins_registry"), self._register, self._deregister)

    async def _register(self, info: PluginInfo) -> None:
        if self.refuses:
            raise ValueError(REFUSED)
        self.known = info

    def _deregister(self, _info: PluginInfo) -> None:
        self.known = None


@pytest.fixture
def ledger() -> Ledger:
    return make_ledger(make_card())[0]


@pytest.fixture
def make(root: Path, ledger: Ledger) -> Callable[[], DraDriver]:
    """Must be called in the event loop."""
    del root
    make_directories(SETTINGS)

    def new() -> DraDriver:
        nothing = SimpleNamespace()
        operations = SimpleNamespace(ledger=ledger, blanks=nothing)
        queue = CardQueue(interval=LIMIT)
        queue.sync()
        recorder = EventRecorder(None, node_name="node-a", pods=nothing, observer=Mock())  # type: ignore[arg-type]
        rest: list[Any] = [operations, nothing, nothing, queue, nothing, recorder, nothing]
        return DraDriver(SETTINGS, *rest)

    return new


def sockets() -> list[str]:
    """Those of the driver's two sockets that are there."""
    return [path for path in BOTH if os.path.exists(path)]


def made() -> int:
    """When the socket that kubelet looks for was made; 0: it is not there."""
    return REGISTRY.stat().st_ctime_ns if REGISTRY.exists() else 0


def files() -> list[str]:
    """What the container runtime reads."""
    return [one.read_text() for one in Path("cdi").iterdir()]


def play(story: Callable[[], Any]) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT):
            await story()

    asyncio.run(main())


@asynccontextmanager
async def serving(api: DraDriver) -> AsyncIterator[Kubelet]:
    """The driver from its start to its end, and a kubelet that looks for it."""
    kubelet = Kubelet()
    await api.start()
    kubelet.manager.start()
    try:
        yield kubelet
    finally:
        await kubelet.manager.stop()
        await api.stop()


async def end(claim: str) -> dra.NodeUnprepareResourceResponse:
    """Kubelet's call for a claim, by the driver's socket."""
    async with Channel(path=str(SOCKET), codec=ProtoCodec()) as channel:
        asked = dra.NodeUnprepareResourcesRequest(
            claims=[dra.Claim(namespace="space", uid=claim, name="c")]
        )
        answer = await dra.DraPluginStub(channel).node_unprepare_resources(asked)
        return answer.claims[claim]


def test_kubelet_finds_the_driver_and_is_answered(make: Callable[[], DraDriver]) -> None:
    async def story() -> None:
        api = make()
        async with serving(api) as kubelet:
            await asyncio.wait_for(api.registered.wait(), LIMIT)
            info = kubelet.known
            assert info is not None
            assert (info.type, info.name) == ("DRAPlugin", PREFIX)
            assert info.endpoint == socket_path(SETTINGS)
            assert info.supported_versions == list(module.VERSIONS)
            assert await end(UID) == dra.NodeUnprepareResourceResponse()

    play(story)


def test_both_sockets_go_at_the_end_and_whoever_is_connected_is_told(
    make: Callable[[], DraDriver],
) -> None:
    """Kubelet deregisters a driver by its socket's end; calls to one that stays would hang."""

    async def story() -> None:
        api = make()
        await api.stop()  # one that never started has nothing to end
        async with serving(api) as kubelet:
            await until(lambda: kubelet.known)
            reader, writer = await asyncio.open_unix_connection(str(SOCKET))
            await end(UID)  # the connection before it is accepted by then
            await api.stop()
            assert sockets() == []
            await reader.read()  # until the driver's end of it is closed
            writer.close()
            await api.stop()
            await until(lambda: kubelet.known is None)

    play(story)


def test_a_socket_that_another_process_made_stays_at_the_end(make: Callable[[], DraDriver]) -> None:
    """An upgrade: the successor serves by the time that this one ends."""

    async def story() -> None:
        api, successor = make(), make()
        await api.start()
        await successor.start()
        try:
            await api.stop()
            assert await end(UID) == dra.NodeUnprepareResourceResponse()
        finally:
            await successor.stop()

    play(story)


def test_files_of_prepared_claims_are_there_before_kubelet_can_call(
    make: Callable[[], DraDriver], ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that starts again after a reboot of the runtime's directory needs its file."""
    card = make_card()
    prepare(ledger, card, 0)
    there: list[bool] = []
    listen_at = fixed_socket.listen_at

    def listened(path: str) -> tuple[socket.socket, str]:
        there.append(any(A in one for one in files()))
        return listen_at(path)

    monkeypatch.setattr(fixed_socket, "listen_at", listened)

    async def story() -> None:
        async with serving(make()):
            assert there == [True, True]
            (file,) = files()
            assert device(card, 0).replace(".", "-") in file

    play(story)


def test_a_start_that_fails_leaves_no_socket_behind(
    make: Callable[[], DraDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubelet would register a driver that answers nothing."""
    listeners: list[socket.socket] = []
    listen_at = fixed_socket.listen_at

    def listened(path: str) -> tuple[socket.socket, str]:
        listener, identity = listen_at(path)
        listeners.append(listener)
        return listener, identity

    async def fails(*_: object) -> None:
        assert sockets() == [str(SOCKET)]
        raise asyncio.CancelledError

    monkeypatch.setattr(fixed_socket, "listen_at", listened)
    monkeypatch.setattr(fixed_socket.ClosingServer, "serve", fails)

    async def story() -> None:
        with pytest.raises(asyncio.CancelledError):
            await make().start()
        assert sockets() == []
        assert [one.fileno() for one in listeners] == [-1]

    play(story)


# ---------------------------------------------------------------- what it says of itself

NOT_YET = (
    "driver: not registered with kubelet yet (it looks into plugins_registry of its root directory"
    " each second; FPGA_PLUGIN_KUBELET_ROOT is .)"
)
NOT_PUBLISHED = "ResourceSlices: not published yet"


def test_what_keeps_it_from_serving_is_told_one_by_one(make: Callable[[], DraDriver]) -> None:
    """The readiness probe and `fpga-plugin status` say it; a node that is silent is ready."""

    async def story() -> None:
        api = make()
        assert api.not_ready() == [NOT_YET, NOT_PUBLISHED]
        api.registered.set()
        assert api.not_ready() == [NOT_PUBLISHED]
        api.slices.problem = "the API server is away"
        assert api.not_ready() == ["ResourceSlices: the API server is away"]
        api.slices.published = True
        assert api.not_ready() == [], "what was published is what the scheduler goes by"
        api.reconciler.problem = "the record is damaged"
        assert api.not_ready() == ["claims: the record is damaged"]
        api.registered.clear()
        assert api.not_ready() == [NOT_YET, "claims: the record is damaged"]
        assert list(api.node.concerns) == []
        api.node.concerns = ("kubelet is old",)
        assert list(api.node.concerns) == ["kubelet is old"]

    play(story)


def test_kubelets_refusal_is_told_until_it_registers_the_driver(
    make: Callable[[], DraDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        api = make()
        seen: list[str] = []
        monkeypatch.setattr(api.reconciler, "kubelet_seen", lambda: seen.append("record"))
        monkeypatch.setattr(api.node, "wake", lambda: seen.append("node"))
        refusal = f"kubelet refused the driver: '{REFUSED}'"
        async with serving(api) as kubelet:
            kubelet.refuses = True
            await until(lambda: api.problem)
            assert api.problem == refusal
            assert api.not_ready()[0] == f"driver: {refusal}"
            assert not api.registered.is_set()
            assert seen == []
            kubelet.refuses = False
            await until(api.registered.is_set)
            assert api.problem == ""
            # Kubelet's record and its version may be others in each of its lives.
            assert seen == ["record", "node"]
            await kubelet.manager.stop()
            following = Kubelet()
            following.refuses = True
            following.manager.start()
            try:
                await until(lambda: api.problem)
                assert not api.registered.is_set(), "no claim is prepared any more"
                assert api.not_ready()[0] == f"driver: {refusal}"
                assert seen == ["record", "node"]
            finally:
                await following.manager.stop()

    play(story)


def test_a_refused_socket_is_made_anew(
    make: Callable[[], DraDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubelet before 1.36 looks at a new one only."""

    async def story() -> None:
        api = make()
        offer = api.work()
        monkeypatch.setattr(api._reoffer, "_backoff", Backoff(0.0))
        work = asyncio.create_task(offer["registration"])
        for name, one in offer.items():
            if name != "registration":
                one.close()
        try:
            async with serving(api) as kubelet:
                kubelet.refuses = True
                await until(lambda: api.problem)
                before = made()
                await until(lambda: made() not in {0, before})
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work

    play(story)


def test_each_change_of_the_ledger_is_compared_with_what_is_published(
    make: Callable[[], DraDriver], ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 4: a region that failed would be on the scheduler's list."""

    async def story() -> None:
        api = make()
        woken: list[None] = []
        monkeypatch.setattr(api.slices, "wake", lambda: woken.append(None))
        ledger.work.faulted(make_card().regions[0].id, "it does not answer")
        assert woken

    play(story)


def test_the_end_of_a_claim_waits_until_the_scheduler_knows_what_it_leaves(
    make: Callable[[], DraDriver],
) -> None:
    async def story() -> None:
        api = make()
        assert api.lifecycle.tell_scheduler == api.slices.caught_up

    play(story)


def test_what_the_driver_does_while_it_serves(make: Callable[[], DraDriver]) -> None:
    """Of each there is one, and none is forgotten: who reads kubelet's record frees regions."""

    async def story() -> None:
        work = make().work()
        assert list(work) == ["registration", "claims", "files", "slices", "node"]
        for one in work.values():
            one.close()

    play(story)


@pytest.mark.usefixtures("root")
def test_what_dra_left_is_looked_up_in_kubelets_record(ledger: Ledger) -> None:
    """The device plugin API serves now, and a claim's devices are free once kubelet says so."""

    async def story() -> None:
        operations: Any = SimpleNamespace(ledger=ledger, blanks=SimpleNamespace())
        left = open_leftovers(SETTINGS, operations, CardQueue(interval=LIMIT))
        assert not await left.reconcile()
        assert left.problem.startswith("kubelet's record ./dra_manager_state is not there")

    play(story)


def test_what_cannot_be_bound_stops_the_start(make: Callable[[], DraDriver]) -> None:
    async def story() -> None:
        api = make()
        os.mkdir(SOCKET)
        with pytest.raises(FpgaPluginError, match="no socket can be made"):
            await api.start()
        assert sockets() == [str(SOCKET)]

    play(story)
