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

WORK_SECONDS = 900.0
"""How long a call that works on a card may take, before the card counts as stuck.

A PR takes seconds, and a load of an Alveo card about a minute until its mailbox gives up. The
longest call that still ends well is a reset of such a card of which each step takes all of its time
(`hardware.xrt.reset`): six minutes, and one more for its turn. In 15 minutes 64 GiB of memory are
cleared even at 75 MB/s.
"""

STUCK = f"work on the card has not ended within {WORK_SECONDS / 60:.0f} min"
"""Why the regions of a card whose work hangs are out of service."""

STUCK_HINT = "see the kernel's log; if the work does not end, power-cycle the node"


class CardWorkers:
    """Locks and threads of the cards.

    Args:
        programming: called with the regions whose work in flight would outlast the process's
            death, before the first and after the last of it.
    """

    def __init__(self, programming: Callable[[frozenset[RegionId]], None] | None = None) -> None:
        self._locks = defaultdict[CardId, asyncio.Lock](asyncio.Lock)
        self._calls: list[tuple[CardId, float]] = []  # that run, and since when
        self._in_flight: set[RegionId] = set()
        self._tell = programming or (lambda _: None)
        self._closing = False

    def lock(self, card: CardId) -> AbstractAsyncContextManager[None]:
        """Held through everything that changes what is on a card."""
        return self._locks[card]

    def locked(self, card: CardId) -> bool:
        """Whether a task holds the card's lock."""
        return self._locks[card].locked()

    def stuck(self, card: CardId) -> bool:
        """Whether a call on a card runs that has taken longer than any that ends well."""
        latest = asyncio.get_running_loop().time() - WORK_SECONDS
        return any(of == card and began < latest for of, began in self._calls)

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
        call = (card, asyncio.get_running_loop().time())
        self._calls.append(call)
        try:
            return await self._in_thread(card, partial(function, *args, **kwargs))
        finally:
            self._calls.remove(call)

    async def _in_thread(self, card: CardId, call: Callable[[], T]) -> T:
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"card-{card}")
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
