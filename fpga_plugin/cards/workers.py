"""A thread for each call, and one call at a time on each card.

The kernel serialises all PRs of a card and a PR cannot be interrupted, so a card's work queues
behind a lock of its own. Each call runs in a thread of its own, which ends with it: one stuck card
never holds up another, and 256 idle cards cost nothing. Mere reads of a card do not wait for this
(`cards.reads`).

A thread cannot be interrupted. A task that is cancelled while a thread works for it waits for the
thread's end first. Else the card's lock would be free during the work, and no task would close what
the thread opened.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from typing import ParamSpec, TypeVar

from fpga_plugin.errors import NotFinishedError
from fpga_plugin.host.keyed_threads import no_thread
from fpga_plugin.ids import CardId, RegionId

P = ParamSpec("P")
T = TypeVar("T")


class CardWorkers:
    """Locks and threads of the cards.

    Args:
        programming: called with the regions whose work in flight would outlast the process's
            death, before the first and after the last of it.
    """

    def __init__(self, programming: Callable[[frozenset[RegionId]], None] | None = None) -> None:
        self._locks = defaultdict[CardId, asyncio.Lock](asyncio.Lock)
        self._in_flight: set[RegionId] = set()
        self._tell = programming or (lambda _: None)
        self._closing = False

    def lock(self, card: CardId) -> AbstractAsyncContextManager[None]:
        """Held through everything that changes what is on a card."""
        return self._locks[card]

    def locked(self, card: CardId) -> bool:
        """Whether a task holds the card's lock."""
        return self._locks[card].locked()

    async def run(
        self, card: CardId, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a blocking function in a thread; cancelled, it waits for its end.

        Raises:
            NotFinishedError: the plugin is ending, or no thread can be started; nothing was called.
        """
        if self._closing:
            raise NotFinishedError("the plugin is ending", hint="it goes on after its restart")
        return await self.finish(card, function, *args, **kwargs)

    async def finish(
        self, card: CardId, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Like `run`, but also while the plugin ends: for work that gives things back.

        Raises:
            NotFinishedError: no thread can be started; nothing was called.
        """
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"card-{card}")
        call = partial(function, *args, **kwargs)
        try:
            work = asyncio.get_running_loop().run_in_executor(thread, call)
        except RuntimeError as error:
            raise no_thread(f"card {card}", error) from error
        thread.shutdown(wait=False)  # it ends with this call
        cancelled: asyncio.CancelledError | None = None
        while not work.done():
            try:
                await asyncio.wait([work])  # which, cancelled, leaves it alone
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            work.exception()  # the caller was cancelled: keep asyncio from complaining
            raise cancelled
        return work.result()

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
        """Begin nothing new; each caller still awaits its own work."""
        self._closing = True
