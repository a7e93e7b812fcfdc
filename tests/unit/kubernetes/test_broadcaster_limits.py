"""Kubernetes Events: few, counted, and never in anybody's way."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import datetime

from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.kubernetes.events import broadcaster as events
from fpga_plugin.kubernetes.events.broadcaster import Event, EventBroadcaster, Subject

NODE = Subject("Node", "node-1", "", "node-1")


def pod(name: str = "compress") -> Subject:
    return Subject("Pod", name, "tenant", f"uid-{name}")


def news(subject: Subject | None = None, note: str = "no bitstream") -> Event:
    return Event(subject or pod(), "FpgaProgrammingRefused", "Programming", note, warning=True)


@dataclass
class Cluster:
    """Takes Events, or refuses them."""

    created: list[Event] = field(default_factory=list)
    counted: list[tuple[str, int]] = field(default_factory=list)
    connected: int = 0
    refuses: str = ""
    breaks: bool = False

    def connect(self) -> "Cluster":
        self.connected += 1
        return self

    async def create(self, event: Event, when: datetime) -> str:
        assert when.tzinfo is not None
        self._refuse()
        self.created.append(event)
        return f"event-{len(self.created)}"

    async def again(self, event: Event, name: str, *, count: int, when: datetime) -> None:
        self._refuse()
        self.counted.append((name, count))

    def _refuse(self) -> None:
        if self.breaks:
            raise RuntimeError("a bug")
        if self.refuses:
            raise FpgaPluginError(self.refuses)


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


async def settled(recorder: EventBroadcaster) -> None:
    while recorder._task is not None:
        await asyncio.wait({recorder._task})


def play(
    story: Callable[[EventBroadcaster, Clock], Coroutine[object, object, None]], cluster: Cluster
) -> EventBroadcaster:
    async def main() -> EventBroadcaster:
        clock = Clock()
        recorder = EventBroadcaster(cluster.connect, clock=clock)
        await story(recorder, clock)
        await settled(recorder)
        await recorder.close()
        return recorder

    return asyncio.run(main())


def test_news_is_posted_and_nothing_is_connected_before_there_is_any() -> None:
    cluster = Cluster()

    async def story(recorder: EventBroadcaster, _: Clock) -> None:
        assert cluster.connected == 0
        recorder.record(news())
        recorder.record(news(NODE, "card gone"))

    assert play(story, cluster).posted == 2
    assert cluster.created == [news(), news(NODE, "card gone")]
    assert cluster.connected == 1


def test_the_same_news_is_counted_once_a_minute_in_the_event_that_is_there() -> None:
    cluster = Cluster()

    async def story(recorder: EventBroadcaster, clock: Clock) -> None:
        for _ in range(10):
            recorder.record(news())
            await settled(recorder)
        assert cluster.counted == []
        clock.now += events.SERIES_SECONDS
        recorder.record(news())
        await settled(recorder)

    play(story, cluster)
    assert cluster.created == [news()]
    assert cluster.counted == [("event-1", 11)]


def test_old_news_that_comes_again_is_a_new_event() -> None:
    cluster = Cluster()

    async def story(recorder: EventBroadcaster, clock: Clock) -> None:
        recorder.record(news())
        await settled(recorder)
        clock.now += events.REPEAT_SECONDS
        recorder.record(news())

    play(story, cluster)
    assert cluster.created == [news(), news()]
    assert cluster.counted == []


def test_a_pod_that_fails_in_ever_new_words_gets_few_events_and_takes_none_from_others() -> None:
    cluster = Cluster()

    async def story(recorder: EventBroadcaster, clock: Clock) -> None:
        for number in range(100):
            recorder.record(news(note=f"words {number}"))
            await settled(recorder)
        recorder.record(news(pod("other")))
        clock.now += events.SUBJECT_REFILL_SECONDS
        recorder.record(news(note="a minute later"))

    recorder = play(story, cluster)
    assert len(cluster.created) == events.SUBJECT_BURST + 2
    assert recorder.dropped == 100 - events.SUBJECT_BURST


def test_all_pods_together_are_limited_too() -> None:
    cluster = Cluster()

    async def story(recorder: EventBroadcaster, _: Clock) -> None:
        for number in range(100):
            recorder.record(news(pod(f"pod-{number}")))

    play(story, cluster)
    assert len(cluster.created) == events.TOTAL_BURST


def test_the_events_that_are_remembered_are_bounded() -> None:
    cluster = Cluster()

    async def story(recorder: EventBroadcaster, clock: Clock) -> None:
        for number in range(3 * events.MAX_KNOWN):
            clock.now += events.TOTAL_REFILL_SECONDS
            recorder.record(news(pod(f"pod-{number}")))
            await settled(recorder)
        assert len(recorder._known) <= events.MAX_KNOWN
        assert len(recorder._subjects) <= events.MAX_KNOWN

    play(story, cluster)
    assert len(cluster.created) == 3 * events.MAX_KNOWN


def test_an_api_server_that_refuses_is_reported_once_and_asked_again_with_the_next_news(
    capsys,
) -> None:
    cluster = Cluster(refuses="the API server answered 403")

    async def story(recorder: EventBroadcaster, _: Clock) -> None:
        recorder.record(news())
        recorder.record(news(pod("other")))
        await settled(recorder)
        cluster.refuses = ""
        recorder.record(news(pod("third")))

    recorder = play(story, cluster)
    out = capsys.readouterr().out
    assert out.count("events cannot be posted") == 1
    assert out.count("events are posted again") == 1
    assert (recorder.posted, recorder.dropped) == (1, 2)


def test_an_event_that_could_not_be_posted_is_posted_when_it_comes_again() -> None:
    cluster = Cluster(refuses="down")

    async def story(recorder: EventBroadcaster, clock: Clock) -> None:
        recorder.record(news())
        await settled(recorder)
        cluster.refuses = ""
        clock.now += events.SERIES_SECONDS
        recorder.record(news())

    play(story, cluster)
    assert cluster.created == [news()]


def test_a_bug_in_posting_stops_nothing(capsys) -> None:
    cluster = Cluster(breaks=True)

    async def story(recorder: EventBroadcaster, _: Clock) -> None:
        recorder.record(news())
        await settled(recorder)
        cluster.breaks = False
        recorder.record(news(pod("other")))

    assert play(story, cluster).posted == 1
    assert "an event could not be posted" in capsys.readouterr().out


def test_closing_gives_up_what_is_on_its_way_and_takes_no_more() -> None:
    cluster = Cluster()

    async def main() -> EventBroadcaster:
        recorder = EventBroadcaster(cluster.connect)
        asked = asyncio.Event()

        async def create(_event: Event, _when: datetime) -> str:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

        cluster.create = create  # type: ignore[method-assign]
        recorder.record(news())
        await asked.wait()
        await recorder.close()
        recorder.record(news(pod("late")))
        assert recorder._task is None
        return recorder

    assert asyncio.run(main()).posted == 0
