"""A thread a card, and one at a time on each card; reading has a second thread.

The kernel serialises all PRs of a card and a PR cannot be interrupted, so a card's work queues
behind a lock of its own and runs in a thread of its own: one stuck card never holds up another.
What only reads, and what no PR holds up, has another: it neither waits for a neighbour's PR nor,
where a read hangs, takes a thread from other cards. A thread ends when nobody wants it any more;
256 idle cards cost nothing.

A thread cannot be interrupted. Whoever is cancelled while one works for him waits for its end
first: else the card's lock would be free while it is worked on, and what the thread opened would be
nobody's to close.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import ParamSpec, TypeVar

from fpga_plugin.errors import NotFinishedError
from fpga_plugin.ids import CardId, RegionId

P = ParamSpec("P")
T = TypeVar("T")


class CardWorkers:
    """Locks and threads of the cards; belongs to the event loop.

    Args:
        programming: is told which regions have work in flight that the process's death would not
            stop; before the first and after the last of it.
    """

    def __init__(self, programming: Callable[[frozenset[RegionId]], None] | None = None) -> None:
        self._locks: dict[CardId, asyncio.Lock] = {}
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._users: dict[str, int] = {}
        self._in_flight: set[RegionId] = set()
        self._tell = programming or (lambda _: None)
        self._closing = False

    @asynccontextmanager
    async def lock(self, card: CardId) -> AsyncIterator[None]:
        """Held through everything that changes what is on a card; keeps its thread."""
        async with self._locks.setdefault(card, asyncio.Lock()):
            with self._thread(_working(card)):
                yield

    def locked(self, card: CardId) -> bool:
        """Whether somebody holds the card's lock."""
        return card in self._locks and self._locks[card].locked()

    async def run(
        self, card: CardId, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a blocking function in the card's thread; cancelled, it waits for its end.

        Raises:
            NotFinishedError: the plugin is ending; nothing was called.
        """
        self._check_open()
        return await self._run(_working(card), lambda: function(*args, **kwargs))

    async def read(
        self, card: CardId, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a function that only reads, and that no PR holds up; needs no lock.

        Raises:
            NotFinishedError: the plugin is ending; nothing was called.
        """
        self._check_open()
        return await self._run(f"read-{card}", lambda: function(*args, **kwargs))

    def _check_open(self) -> None:
        if self._closing:
            raise NotFinishedError("the plugin is ending", hint="it goes on after its restart")

    async def finish(
        self, card: CardId, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Like `run`, also while the plugin is ending: for what gives things back."""
        return await self._run(_working(card), lambda: function(*args, **kwargs))

    async def _run(self, name: str, function: Callable[[], T]) -> T:
        with self._thread(name) as thread:
            work = asyncio.get_running_loop().run_in_executor(thread, function)
            cancelled: asyncio.CancelledError | None = None
            while not work.done():
                try:
                    await asyncio.wait([work])  # which, cancelled, leaves it alone
                except asyncio.CancelledError as error:
                    cancelled = error
            if cancelled is not None:
                work.exception()  # nobody is told, and asyncio does not complain of that
                raise cancelled
            return work.result()

    @contextmanager
    def _thread(self, name: str) -> Iterator[ThreadPoolExecutor]:
        """The thread of this name; it ends with the last of those who want it."""
        thread = self._threads.get(name)
        if thread is None:
            thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
            self._threads[name] = thread
        self._users[name] = self._users.get(name, 0) + 1
        try:
            yield thread
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
                del self._threads[name]
                thread.shutdown(wait=False)

    @contextmanager
    def in_flight(self, region: RegionId) -> Iterator[None]:
        """Around a PR, for a successor that waits for this process's death."""
        self._in_flight.add(region)
        self._tell(frozenset(self._in_flight))
        try:
            yield
        finally:
            self._in_flight.discard(region)
            self._tell(frozenset(self._in_flight))

    def close(self) -> None:
        """Begin nothing new; what runs now is waited for by whoever awaits it."""
        self._closing = True


def _working(card: CardId) -> str:
    """The name of the thread that changes what is on a card."""
    return f"card-{card}"
