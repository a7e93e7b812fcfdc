"""What kubelet's and the runtime's versions say of claims: a warning, and never more than that.

The versions are read from the API server: again when kubelet registers, and never in the way.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles import LIMIT
from doubles.apiserver import ApiServerDouble, Reply
from doubles.loops import beside, until
from ledger_world import StillLoop
from structlog.testing import capture_logs

from fpga_plugin.errors import NoSourceError
from fpga_plugin.host.backoff import Backoff
from fpga_plugin.kubernetes.apiserver import nodecheck
from fpga_plugin.kubernetes.apiserver.nodecheck import (
    CDI_NOT_KNOWN,
    NodeCheck,
    for_cdi_devices,
    for_claims,
)

GOOD = "v1.36.3"
NODES, NODE = "/api/v1/nodes", "node-a"


@pytest.mark.parametrize(
    "runtime",
    [
        "containerd://2.0.0",
        "containerd://2.1.4-k3s2",
        "containerd://v2.3.0-rc.1",
        "containerd://10.0.1",
        "cri-o://1.36.1",
        "containerd://Unknown",
        "containerd://",
        "somebody-else://0.1",
        "containerd 1.6",
        "",
        "://1.6",
        "x" * 1000,
    ],
)
def test_nothing_is_said_against_what_has_cdi_or_is_not_known(runtime: str) -> None:
    assert for_claims(GOOD, runtime) == ()


@pytest.mark.parametrize(
    ("runtime", "said", "remedy"),
    [
        ("containerd://1.6.20~ds1", "knows no CDI", "update to containerd 2"),
        ("containerd://1.7.1", "knows no CDI", "update to containerd 2"),
        ("containerd://1.7.2", "CDI is off unless", "enable_cdi = true"),
        ("containerd://1.7.28-k3s1", "CDI is off unless", "enable_cdi = true"),
        ("docker://27.3.1", "cri-dockerd passes no CDI", "containerd 2 or CRI-O"),
    ],
)
def test_a_runtime_without_cdi_is_named_with_the_remedy(
    runtime: str, said: str, remedy: str
) -> None:
    (told,) = for_claims(GOOD, runtime)
    assert runtime in told
    assert said in told
    assert remedy in told


@pytest.mark.parametrize(
    "kubelet",
    [
        "v1.34",
        "v1.34.0",
        "v1.36.3+k3s1",
        "v1.34.2-gke.10",
        "v2.0",
        "",
        "?",
    ],
)
def test_a_kubelet_that_serves_claims_or_is_not_known_is_no_concern(kubelet: str) -> None:
    assert for_claims(kubelet, "containerd://2.0.0") == ()


@pytest.mark.parametrize("kubelet", ["v1.33.9", "v1.9.0", "1.26.1"])
def test_a_kubelet_that_is_too_old_is_named_with_the_remedy(kubelet: str) -> None:
    (told,) = for_claims(kubelet, "containerd://2.0.0")
    assert kubelet in told
    assert "1.34" in told
    assert "FPGA_PLUGIN_MODE=device-plugin" in told


def test_a_foreign_version_neither_floods_nor_forges_a_line() -> None:
    told = for_claims("v1.2\n" + "x" * 900, "containerd://1.6\n{" + "x" * 100)
    assert len(told) == 2
    assert all("\n" not in one and len(one.encode()) <= 400 for one in told)


@pytest.mark.parametrize(
    ("runtime", "kubelet", "said"),
    [
        ("containerd://2.0.0", "v1.29.0", ()),
        ("cri-o://1.31.1", "v1.31.0", ()),
        ("containerd://2.0.0", "v1.28.9", ("from 1.29 on",)),
        ("containerd://1.6.20", "v1.32.0", ("update to containerd 2",)),
        ("containerd://1.7.20", "v1.32.0", ("enable_cdi = true",)),
        ("docker://27.3.1", "v1.28.0", ("from 1.29 on", "cri-dockerd")),
        ("containerd://Unknown", "v1.32.0", ("not known",)),
        ("somebody-else://0.1", "v1.32.0", ("not known",)),
        ("", "", ("not known",)),
    ],
)
def test_what_keeps_a_device_plugins_cdi_devices_from_containers(
    runtime: str, kubelet: str, said: tuple[str, ...]
) -> None:
    told = for_cdi_devices(kubelet, runtime)
    assert len(told) == len(said)
    assert all(part in one for part, one in zip(said, told, strict=True))
    assert all("FPGA_PLUGIN_CDI_DEVICES" in one or "enable_cdi" in one for one in told)


# ---------------------------------------------------------------- when it is asked


def node(runtime: str, kubelet: str = GOOD) -> dict[str, Any]:
    info = {"kubeletVersion": kubelet, "containerRuntimeVersion": runtime}
    return {"metadata": {"name": NODE}, "status": {"nodeInfo": info}}


Story = Callable[[ApiServerDouble, NodeCheck, list[str]], Awaitable[None]]


def checked(folder: Path, story: Story) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT), ApiServerDouble() as server:
            server.objects = {NODES: {}}
            warned: list[str] = []
            check = NodeCheck(
                server.kubeconfig(folder),
                NODE,
                judge=for_claims,
                warn=warned.append,
                backoff=lambda: Backoff(0.01, 0.05),
            )
            async with beside(check.run()):
                await story(server, check, warned)

    asyncio.run(main())


def test_it_asks_once_a_registration_and_not_again_while_all_is_well(tmp_path: Path) -> None:
    async def story(server: ApiServerDouble, check: NodeCheck, warned: list[str]) -> None:
        await server.put(NODES, node("containerd://2.1.4"))
        await asyncio.sleep(0.05)
        assert server.requests == []
        for number in (1, 2):
            check.wake()
            await until(lambda n=number: server.count("GET") == n)
        await asyncio.sleep(0.1)
        assert server.count("GET") == 2
        assert (check.concerns, warned) == ((), [])

    checked(tmp_path, story)


@pytest.mark.parametrize(
    ("declared", "concerned"),
    [(None, True), ([], True), (["RestartAllContainersOnContainerExits"], False)],
)
def test_a_kubelet_that_declares_features_is_not_judged_by_its_version(
    tmp_path: Path, declared: list[str] | None, *, concerned: bool
) -> None:
    async def story(server: ApiServerDouble, check: NodeCheck, warned: list[str]) -> None:
        told = node("containerd://2.1.4", "v1.29.9-vendor")
        if declared is not None:
            told["status"]["declaredFeatures"] = declared
        await server.put(NODES, told)
        check.wake()
        await until(lambda: server.count("GET") == 1 and (not concerned or warned))
        await asyncio.sleep(0.02)
        assert bool(check.concerns) is concerned

    checked(tmp_path, story)


def test_a_concern_is_told_once_and_goes_when_the_node_was_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodecheck, "AGAIN_SECONDS", 0.02)

    async def story(server: ApiServerDouble, check: NodeCheck, warned: list[str]) -> None:
        await server.put(NODES, node("containerd://1.6.20"))
        check.wake()
        await until(lambda: server.count("GET") >= 3)
        assert len(warned) == 1
        assert check.concerns == tuple(warned)
        await server.put(NODES, node("containerd://2.1.4"))
        await until(lambda: check.concerns == ())
        asked = server.count("GET")
        await asyncio.sleep(0.1)
        assert server.count("GET") == asked

    with capture_logs() as logged:
        checked(tmp_path, story)
    events = [line["event"] for line in logged if line["log_level"] != "debug"]
    assert events == ["kubelet or the container runtime may be too old", "versions of the node"]


def test_a_server_that_is_away_or_talks_nonsense_is_asked_again(tmp_path: Path) -> None:
    async def story(server: ApiServerDouble, check: NodeCheck, warned: list[str]) -> None:
        server.replies.extend(
            [
                Reply(503),
                Reply(0),
                Reply(404, b"<html>"),
                Reply(200, b"[]"),
                Reply(200, {"status": {"nodeInfo": {"kubeletVersion": 5}}}),
                Reply(200, {"status": {"nodeInfo": {"kubeletVersion": "x" * 2000}}}),
            ]
        )
        await server.put(NODES, node("containerd://1.6.20"))
        check.wake()
        await until(lambda: warned)
        assert not server.replies

    checked(tmp_path, story)


def test_what_nobody_can_tell_is_a_concern_where_nobody_else_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        told: list[str] = []
        async with asyncio.timeout(LIMIT), ApiServerDouble() as server:
            server.objects = {NODES: {}}
            check = NodeCheck(
                server.kubeconfig(tmp_path),
                NODE,
                judge=for_cdi_devices,
                warn=told.append,
                not_known=CDI_NOT_KNOWN,
                backoff=lambda: Backoff(0.01, 0.05),
            )
            async with beside(check.run()):
                check.wake()
                await until(lambda: server.count("GET") >= 3)
                (said,) = check.concerns
                assert said.startswith(CDI_NOT_KNOWN)
                assert told == [said], "once"
                await server.put(NODES, node("containerd://2.1.4"))
                await until(lambda: check.concerns == ())

    asyncio.run(main())


class Paces:
    """Pauses of 1 s, 2 s, 3 s and so on."""

    def __init__(self) -> None:
        self.failures = 0

    def delay(self, _: NoSourceError) -> float:
        self.failures += 1
        return float(self.failures)

    def reset(self) -> None:
        self.failures = 0


class Clock:
    """A check whose looks end as a test says, and when it looked.

    Attributes:
        ends: what the next looks find, or end with; then there is no concern.
        looked: seconds after the last `registered`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(NodeCheck, "_look", lambda _: self._look())
        self.ends: list[tuple[str, ...] | NoSourceError] = []
        self.looked: list[float] = []
        self.loop = StillLoop()
        self.check = NodeCheck(None, NODE, judge=for_claims, warn=lambda _: None, backoff=Paces)  # type: ignore[arg-type]
        self.task = self.loop.create_task(self.check.run())
        self._begin = 0.0
        self.loop.settle()

    async def _look(self) -> None:
        self.looked.append(self.loop.time() - self._begin)
        end = self.ends.pop(0) if self.ends else ()
        if isinstance(end, NoSourceError):
            raise end
        self.check.concerns = end

    def registered(self, *ends: tuple[str, ...] | NoSourceError) -> list[float]:
        """When it looks, until it has no reason to."""
        self.ends, self._begin = [*ends], self.loop.time()
        self.looked.clear()
        self.check.wake()
        self.loop.settle()
        while self.loop.pass_time():
            assert len(self.looked) < 20
            self.loop.settle()
        return self.looked

    def end(self) -> None:
        self.task.cancel()
        self.loop.settle()
        self.loop.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock(monkeypatch)
    yield clock
    clock.end()


def test_nothing_is_asked_before_kubelet_has_registered_the_driver(clock: Clock) -> None:
    """A kubelet that is being updated writes its version before it registers drivers."""
    assert clock.looked == []
    assert not clock.loop.pass_time()
    assert clock.registered() == [0.0]


def test_it_is_asked_again_only_while_there_is_something_to_warn_of(clock: Clock) -> None:
    again = nodecheck.AGAIN_SECONDS
    assert clock.registered(("old",), ("old",), ()) == [0.0, again, 2 * again]
    assert clock.registered(()) == [0.0], "a plugin with nothing to do wakes nobody"


def test_after_an_answer_a_server_that_is_away_is_asked_as_soon_as_the_first_time(
    clock: Clock,
) -> None:
    away = NoSourceError("it is away")
    assert clock.registered(away, away, away) == [0.0, 1.0, 3.0, 6.0]
    assert clock.registered(away) == [0.0, 1.0]
