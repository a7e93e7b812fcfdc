"""The work queue of cards: any part adds a card that may have work; one worker looks at it.

It works like a controller's queue (client-go's workqueue). A card that is added twice is looked at
once. One task at a time works on a card. The worker looks at the present state, not at what
changed. No work begins before kubelet's records were read (`sync`): until then it is unknown what
is in use. The queue is constructed first and depends on no other part; `start` gives it its worker.
"""

import asyncio
import contextlib
import enum
from typing import Protocol

import structlog

from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.host.backoff import Backoff
from fpga_plugin.ids import CardId

log = structlog.get_logger()

FIRST_RETRY = 0.1
"""Seconds until a card that has to wait is looked at again; doubles up to the interval."""


class Outcome(enum.Enum):
    """The outcome of one look at a card."""

    DONE = enum.auto()
    """Something was done; there may be more."""

    WAIT = enum.auto()
    """There is work, but not yet: the card is looked at again after a while."""

    NOTHING = enum.auto()
    """There is no work, or none that time alone makes possible."""


class CardWorker(Protocol):
    """Does the work on a card."""

    async def work(self, card: CardId) -> Outcome:
        """Look at the card, and do the work that is due.

        Raises:
            FpgaPluginError: the work cannot be done now; the queue tries again.
        """


class CardQueue:
    """The cards that may have work, and the tasks that look at them.

    Args:
        interval: the longest wait in seconds between two looks at a card that has to wait.

    Attributes:
        synced: kubelet's records show what is in use: work that had begun may go on.
        instance: a number that differs between any two kubelet instances, even if both are synced.
    """

    def __init__(self, *, interval: float) -> None:
        self.interval = interval
        self._worker: CardWorker | None = None
        self.synced = False
        self.instance = 0
        self._closing = False
        self._added: set[CardId] = set()  # ever: `sync` looks at all of them
        self._tasks: dict[CardId, asyncio.Task[None]] = {}
        self._again: dict[CardId, asyncio.Event] = {}

    def start(self, worker: CardWorker) -> None:
        """Let this worker look at the cards that are added from now on."""
        self._worker = worker

    @property
    def open(self) -> bool:
        """Whether work may begin."""
        return self.synced and not self._closing

    def sync(self) -> None:
        """Kubelet's records were read: look at every card."""
        self.synced = True
        for card in tuple(self._added):
            self.add(card)

    def unsync(self) -> None:
        """Another kubelet instance: what is in use is unknown."""
        self.synced = False
        self.instance += 1

    def busy(self, card: CardId) -> bool:
        """Whether a task looks at the card, or waits to look at it again."""
        return card in self._tasks

    def add(self, card: CardId) -> None:
        """Something changed about a card; there may be work."""
        self._added.add(card)
        if not self.open or self._worker is None:
            return
        if (again := self._again.get(card)) is not None:
            again.set()
        else:
            self._again[card] = asyncio.Event()
            work = self._run(self._worker, card)
            self._tasks[card] = asyncio.create_task(work, name=f"release {card}")

    def add_later(self, card: CardId, seconds: float) -> None:
        """Add a card after so many seconds; a queue that is closed by then does nothing."""
        asyncio.get_running_loop().call_later(seconds, self.add, card)

    async def _run(self, worker: CardWorker, card: CardId) -> None:
        backoff = Backoff(FIRST_RETRY, self.interval)
        again = self._again[card]
        try:
            while self.open:
                again.clear()
                try:
                    outcome = await worker.work(card)
                except FpgaPluginError as error:  # such as a journal that cannot be written
                    log.warning("release waits", card=card, error=str(error))
                    outcome = Outcome.WAIT
                if outcome is Outcome.DONE:
                    backoff.reset()
                elif outcome is Outcome.WAIT:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(backoff.delay()):
                            await again.wait()
                elif not again.is_set():
                    break
        except Exception:
            log.exception("release stopped", card=card)
        finally:
            del self._again[card], self._tasks[card]

    async def close(self) -> None:
        """Begin nothing new and wait for what cannot be interrupted."""
        self._closing = True
        for again in self._again.values():
            again.set()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks.values()))
