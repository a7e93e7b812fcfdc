"""The ends of pods, as kubelet streams them; and that nothing is polled meanwhile."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from daemon_support import LIMIT
from doubles.loops import beside, until
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from pods_support import PodsServer, serving

from fpga_plugin.kubernetes.kubelet import podwatch
from fpga_plugin.kubernetes.kubelet.podwatch import PodWatch
from fpga_plugin.kubernetes.messages import core_v1, v1alpha1
from fpga_plugin.kubernetes.messages.v1alpha1 import EventType
from fpga_plugin.kubernetes.names import PodUid

ONE, TWO = (PodUid(f"0f1c2d3e-0000-4000-8000-00000000000{number}") for number in (1, 2))


def pod(uid: str, phase: str = "Running") -> bytes:
    return bytes(
        core_v1.Pod(
            metadata=core_v1.ObjectMeta(name="a", namespace="tenant", uid=uid),
            status=core_v1.PodStatus(phase=phase),
        )
    )


class Streaming(PodsServer):
    """A Pods API with the stream.

    Attributes:
        initial: what each new stream reports at first.
        streams: how many there were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.initial: list[bytes] = []
        self.streams = 0
        self.refused: Exception | None = None
        self.silent = False
        self._open: list[asyncio.Queue] = []

    def tell(self, kind: EventType, raw: bytes) -> None:
        for queue in self._open:
            queue.put_nowait(v1alpha1.WatchPodsEvent(type=kind, pod=raw))

    def end(self) -> None:
        for queue in self._open:
            queue.put_nowait(None)

    async def watch_pods(self, message):
        self.streams += 1
        if self.refused is not None:
            raise self.refused
        queue: asyncio.Queue = asyncio.Queue()
        self._open.append(queue)
        try:
            for raw in self.initial:
                yield v1alpha1.WatchPodsEvent(type=EventType.ADDED, pod=raw)
            if not self.silent:
                yield v1alpha1.WatchPodsEvent(type=EventType.INITIAL_SYNC_COMPLETE)
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._open.remove(queue)


def watched(tmp_path, story) -> None:
    """`story(watch, server, changes)` beside a watch that is wanted; the first stream has ONE."""

    async def limited():
        async with asyncio.timeout(LIMIT):
            server = Streaming()
            server.initial = [pod(ONE)]
            changes: list[None] = []
            watch = PodWatch(str(tmp_path / "pods.sock"), lambda: changes.append(None))
            watch.want()
            async with serving(server, tmp_path / "pods.sock"), beside(watch.run()):
                await story(watch, server, changes)

    asyncio.run(limited())


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(podwatch, "FIRST_DELAY", 0.02)


def test_a_pod_lives_from_the_event_that_tells_it_to_the_one_that_tells_its_end(tmp_path) -> None:
    async def story(watch, server, changes):
        await until(lambda: watch.open)
        assert watch.lives(ONE)
        assert not watch.lives(TWO)
        server.tell(EventType.ADDED, pod(TWO, "Pending"))
        await until(lambda: watch.lives(TWO))
        server.tell(EventType.MODIFIED, pod(TWO))
        before = len(changes)
        server.tell(EventType.MODIFIED, pod(TWO, "Succeeded"))
        await until(lambda: len(changes) > before)
        assert not watch.lives(TWO)
        server.tell(EventType.DELETED, pod(ONE, ""))
        await until(lambda: not watch.lives(ONE))
        server.tell(EventType.DELETED, pod(ONE, ""))
        server.tell(EventType.MODIFIED, pod(TWO, "Failed"))
        server.tell(EventType.ADDED, pod(ONE))
        await until(lambda: watch.lives(ONE))
        assert len(changes) == before + 2

    watched(tmp_path, story)


def test_nobody_lives_while_there_is_no_stream(tmp_path) -> None:
    async def story(watch, server, changes):
        await until(lambda: watch.lives(ONE))
        before = len(changes)
        server.refused = GRPCError(Status.UNAVAILABLE, "later")
        server.end()
        await until(lambda: not watch.lives(ONE))
        assert len(changes) == before + 1
        server.refused = None
        await until(lambda: watch.lives(ONE))

    watched(tmp_path, story)


def test_an_end_that_was_dropped_keeps_an_allocation_for_a_minute_at_most() -> None:
    assert podwatch.RENEW_SECONDS + podwatch.OPEN_SECONDS <= 70.0


def test_a_renewed_stream_finds_what_the_last_one_lost(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(podwatch, "RENEW_SECONDS", 0.5)

    async def story(watch, server, changes):
        await until(lambda: watch.lives(ONE))
        told_at = watch.told_at
        server.initial = [pod(TWO)]  # the end of ONE was dropped
        await until(lambda: watch.lives(TWO))
        assert not watch.lives(ONE)
        assert watch.told_at > told_at
        seen = server.streams
        await until(lambda: watch.open and server.streams > seen + 1)

    watched(tmp_path, story)


BROKEN = [
    lambda server: setattr(server, "refused", GRPCError(Status.UNIMPLEMENTED)),
    lambda server: setattr(server, "refused", ValueError("x")),
    lambda server: server.initial.append(b"\xff\xff"),
    lambda server: server.initial.append(b""),
    lambda server: server.initial.extend(pod(str(number)) for number in range(6)),
    lambda server: setattr(server, "silent", True),
]


@pytest.mark.parametrize("break_it", BROKEN)
def test_a_stream_that_is_none_is_tried_again_and_tells_nothing(
    tmp_path, monkeypatch, break_it
) -> None:
    monkeypatch.setattr(podwatch, "MAX_PODS", 5)
    monkeypatch.setattr(podwatch, "OPEN_SECONDS", 1.0)

    async def story(watch, server, changes):
        await until(lambda: watch.open)
        break_it(server)
        server.end()
        await until(lambda: not watch.open)
        seen = server.streams
        await until(lambda: server.streams > seen)
        assert not watch.lives(ONE)
        server.refused, server.silent, server.initial = None, False, [pod(TWO)]
        await until(lambda: watch.lives(TWO))

    watched(tmp_path, story)


def test_without_a_socket_and_without_an_allocation_nothing_is_asked(tmp_path) -> None:
    async def story():
        async with asyncio.timeout(LIMIT):
            server = Streaming()
            watch = PodWatch(str(tmp_path / "pods.sock"), lambda: None)
            async with AsyncExitStack() as servers, beside(watch.run()):
                async with serving(server, tmp_path / "pods.sock"):
                    await asyncio.sleep(0.1)
                    assert server.streams == 0
                watch.want()
                await asyncio.sleep(0.1)  # the socket is gone
                assert not watch.open
                # Until the watch has ended: a server waits for its streams.
                await servers.enter_async_context(serving(server, tmp_path / "pods.sock"))
                await until(lambda: watch.open)

    asyncio.run(story())
