"""Kubernetes Events: few lines that `kubectl describe` shows of a pod or a node.

An Event is news for people who do not read the plugin's log; the log has everything. So nothing
waits for one, none is tried twice, and both their number and what is kept of them are bounded. The
same news again is counted in the Event that is there (its `series`), at most once a minute. Without
news there is no timer and no task.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

import structlog

from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.host.bounded import BoundedDict
from fpga_plugin.host.rate_limit import TokenBucket

log = structlog.get_logger()

REPEAT_SECONDS = 600.0
"""The same news after so long is a new Event."""

SERIES_SECONDS = 60.0
"""How often a repeated Event's count is brought up to date at most."""

MAX_KNOWN = 256
"""Events that are remembered, to recognise their repetition."""

MAX_WAITING = 64
"""Events that wait for the API server; more are dropped."""

SUBJECT_BURST, SUBJECT_REFILL_SECONDS = 5, 60.0
"""Events about one pod or node: so many at once, then one in so many seconds."""

TOTAL_BURST, TOTAL_REFILL_SECONDS = 20, 6.0
"""The same for all of them."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What an Event is about.

    Attributes:
        kind: `Pod` or `Node`.
        name: of the object.
        namespace: of a pod; empty for a node.
        uid: of a pod; for a node its name, as kubelet's own Events have it.
    """

    kind: str
    name: str
    namespace: str
    uid: str


@dataclass(frozen=True, slots=True)
class Event:
    """One piece of news.

    Attributes:
        subject: what it is about.
        reason: one word in CamelCase, for machines.
        action: what the plugin did or tried, one word in CamelCase.
        note: for people; at most 1 KiB.
        warning: `Warning`, else `Normal`.
    """

    subject: Subject
    reason: str
    action: str
    note: str
    warning: bool


class EventSink(Protocol):
    """Puts Events into the cluster."""

    async def create(self, event: Event, when: datetime) -> str:
        """Make it; returns its name.

        Raises:
            FpgaPluginError: the API server does not accept it.
        """

    async def again(self, event: Event, name: str, *, count: int, when: datetime) -> None:
        """It happened `count` times by now, last at `when`.

        Raises:
            FpgaPluginError: the API server does not accept it.
        """


@dataclass(slots=True)
class _Known:
    """An Event that was recorded."""

    event: Event
    first: float
    sent: float = float("-inf")
    count: int = 1
    name: str = ""


class EventBroadcaster:
    """Sends Events to a sink, few of them.

    Args:
        connect: makes the sink; called in a thread at the first Event, since what it imports is
            large.
        clock: seconds, for tests.
    """

    def __init__(
        self, connect: Callable[[], EventSink], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._connect = connect
        self._clock = clock
        self._sink: EventSink | None = None
        self._known = BoundedDict[Event, _Known](MAX_KNOWN)
        self._subjects = BoundedDict[Subject, TokenBucket](MAX_KNOWN)
        self._total = TokenBucket(TOTAL_BURST, TOTAL_REFILL_SECONDS, clock=clock)
        self._waiting: deque[_Known] = deque()
        self._task: asyncio.Task[None] | None = None
        self._failing = ""
        self._closed = False
        self.posted = 0
        self.dropped = 0

    def record(self, event: Event) -> None:
        """Post it in the background, or count it, or drop it where there are too many."""
        if self._closed:
            return
        now = self._clock()
        known = self._known.get(event)
        if known is not None and now - known.first < REPEAT_SECONDS:
            known.count += 1
            if now - known.sent < SERIES_SECONDS or known in self._waiting:
                return
        elif self._may(event.subject):
            known = self._known[event] = _Known(event, now)
        else:
            self.dropped += 1
            return
        if len(self._waiting) >= MAX_WAITING:
            self.dropped += 1
            return
        known.sent = now
        self._waiting.append(known)
        if self._task is None:
            self._task = asyncio.create_task(self._post_all(), name="events")

    def _may(self, subject: Subject) -> bool:
        bucket = self._subjects.get(subject)
        if bucket is None:
            bucket = TokenBucket(SUBJECT_BURST, SUBJECT_REFILL_SECONDS, clock=self._clock)
        self._subjects[subject] = bucket
        if not (bucket.may() and self._total.may()):
            return False
        bucket.take()
        self._total.take()
        return True

    async def _post_all(self) -> None:
        try:
            while self._waiting:
                await self._post(self._waiting.popleft())
        finally:
            self._task = None

    async def _post(self, known: _Known) -> None:
        when = datetime.now(UTC)
        try:
            if self._sink is None:
                self._sink = await asyncio.to_thread(self._connect)
            if known.name:
                await self._sink.again(known.event, known.name, count=known.count, when=when)
            else:
                known.name = await self._sink.create(known.event, when)
        except FpgaPluginError as error:
            self.dropped += 1
            if str(error) != self._failing:
                self._failing = str(error)
                log.warning("events cannot be posted", error=error.message, hint=error.hint)
        except Exception:
            self.dropped += 1
            log.exception("an event could not be posted")
        else:
            self.posted += 1
            if self._failing:
                self._failing = ""
                log.info("events are posted again")

    async def close(self) -> None:
        """Post no more; an Event that is on its way is given up."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
