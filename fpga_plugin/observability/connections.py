"""The connections of a listener, and which of them end when there are too many.

A prober of the plugin may share an address with a client that floods it, so a new connection is
never refused: room is made for it. The oldest connection whose request is not complete goes first:
an honest client sends its request at once. Next goes the oldest that does not take its answer, and
only then one that is being answered. One address may have half of the connections, so that a flood
from it does not end those of others.
"""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import structlog

from fpga_plugin.host.instruments import Counter
from fpga_plugin.host.rate_limit import RateLimit

MAX_CONNECTIONS: Final = 256
"""At a time and listener."""

MAX_FROM_ONE: Final = 128
"""At a time from one address. A request that comes with its connection is read within four turns of
asyncio's loop, and each turn accepts 16 more: an honest client is past its request before a flood
from its own address makes it the oldest."""

MAX_UNREAD: Final = 16 << 20
"""Bytes of answers that clients have not taken yet; a page of a thousand regions has 1 MiB."""

log = structlog.get_logger()


class Stage(IntEnum):
    """What a connection is at; the lower ones go first."""

    HEAD = 0
    """It sends the first line and the headers of its request."""
    BODY = 1
    """It sends the body."""
    READING = 2
    """It takes its answer."""
    ANSWERING = 3
    """It waits for us."""


@dataclass(eq=False, slots=True)
class Connection:
    """One connection.

    Attributes:
        task: serves it.
        transport: its socket.
        source: the address that it comes from; empty on a unix socket.
        stage: what it is at.
        unread: bytes of its answer, while it takes them.
    """

    task: asyncio.Task[None]
    transport: asyncio.WriteTransport
    source: str
    stage: Stage = Stage.HEAD
    unread: int = 0


_SLOW: Final = {
    Stage.HEAD: "slow_request",
    Stage.BODY: "slow_request",
    Stage.READING: "slow_reader",
    Stage.ANSWERING: "slow_answer",
}


class Connections:
    """All connections of a listener.

    Args:
        most: how many there may be at a time.
        most_from_one: how many of them from one address.
        most_unread: bytes of answers that they may leave unread.
        dropped: counts those that were closed before their end, by reason.
    """

    def __init__(
        self,
        *,
        most: int = MAX_CONNECTIONS,
        most_from_one: int = MAX_FROM_ONE,
        most_unread: int = MAX_UNREAD,
        dropped: Counter | None = None,
    ) -> None:
        self._most = most
        self._most_from_one = most_from_one
        self._most_unread = most_unread
        self._dropped = Counter() if dropped is None else dropped
        self._connections: dict[Connection, None] = {}  # in the order of their coming
        self._rate_limit = RateLimit()

    def __len__(self) -> int:
        return len(self._connections)

    def __iter__(self) -> Iterator[Connection]:
        return iter(tuple(self._connections))

    def enter(self, connection: Connection) -> None:
        """A connection came: make room for it."""
        if connection.source:
            same = [other for other in self._connections if other.source == connection.source]
            if len(same) >= self._most_from_one:
                self._make_room(same, "limit_of_address")
        if len(self._connections) >= self._most:
            self._make_room(self._connections, "limit")
        self._connections[connection] = None

    def reached(self, connection: Connection, stage: Stage, unread: int = 0) -> None:
        """A connection is at another stage; where it has an answer to take, make room for that."""
        connection.stage, connection.unread = stage, unread
        while sum(other.unread for other in self._connections) > self._most_unread:
            others = [c for c in self._connections if c.unread and c is not connection]
            if not others:
                return
            self._make_room(others, "unread_answers")

    def leave(self, connection: Connection) -> None:
        """A connection ended."""
        self._connections.pop(connection, None)

    def too_slow(self, connection: Connection) -> None:
        """A connection's time was up before it had its answer."""
        self._dropped.add(_SLOW[connection.stage])

    def _make_room(self, among: Iterable[Connection], reason: str) -> None:
        # Of equals the first, which is the oldest.
        oldest = min(among, key=lambda connection: connection.stage)
        del self._connections[oldest]
        oldest.transport.abort()
        oldest.task.cancel()
        self._dropped.add(reason)
        if closed := self._rate_limit.happened():
            log.warning(
                "too many HTTP connections: the oldest unfinished ones are closed",
                reason=reason,
                source=oldest.source or "the status socket",
                closed=closed,
                connections=len(self._connections) + 1,
            )
