"""Threads for calls that may never return, so that a call that hangs holds up no other.

A read of a file system whose server is gone does not end, nor does one of a card that does not
answer, and no thread can be ended from outside. asyncio's own threads are few, everything shares
them, and the end of the process waits for them. So reads of anything foreign, a store or a card,
run here:

- each thread is used for one call, and the end of the process does not wait for it;
- calls of one key (a file, a card) come one after the other, so a key that hangs takes one thread;
- there is a limit on the threads of one `KeyedThreads`, and no caller waits longer than its limit.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from fpga_plugin.errors import NotFinishedError

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def no_thread(what: str, error: RuntimeError) -> NotFinishedError:
    """The error for work for which the node gives no thread."""
    return NotFinishedError(
        f"no thread can be started for {what} ({error})",
        hint="it is tried again; the node or the plugin's pod is out of processes (pids)",
    )


class LateError(Exception):
    """A call did not end in time. The caller reports it in its own words.

    Attributes:
        seconds: since the oldest of those calls began that this one waits for.
        others: keys whose calls take all threads; empty where the call's own key is late.
        ended: each is done when one of the calls that this one waited for ends.
    """

    def __init__(
        self,
        seconds: float,
        others: tuple[Hashable, ...],
        ended: "frozenset[asyncio.Future[None]]",
    ) -> None:
        super().__init__(f"no answer for {seconds:.1f} s")
        self.seconds = seconds
        self.others = others
        self.ended = ended


@dataclass(eq=False, slots=True)
class _Call:
    """A thread at work.

    Attributes:
        began: by the loop's clock.
        ended: is done when the thread is.
    """

    began: float
    ended: "asyncio.Future[None]"


class KeyedThreads(Generic[K]):
    """Belongs to one event loop at a time."""

    def __init__(self, name: str, *, most: int | None = None) -> None:
        """Start none yet.

        Args:
            name: of the threads.
            most: threads at a time; None: as many as there are keys.
        """
        self._name = name
        self._most = most
        self._calls: dict[K, _Call] = {}

    async def run(
        self,
        key: K,
        function: Callable[[], T],
        *,
        seconds: float,
        least: float = 0.0,
        spare: int = 0,
    ) -> T:
        """Call a blocking function in a thread of its own; it goes on if its caller leaves.

        Args:
            key: what it reads. A call waits for the end of the one before it.
            function: called without arguments.
            seconds: after which to give up. A call that waits for another one gives up when that
                one has taken so long.
            least: seconds that it waits even then.
            spare: threads that are to be left to others.

        Raises:
            LateError: it did not end in time; or it did not begin, since the call before it did
                not end, or no thread is free.
            NotFinishedError: no thread can be started; nothing was called.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        deadline = began + seconds
        while (before := self._in_the_way(key, spare)) is not None:
            calls, others = before
            since = max(call.began for call in calls)
            await self._wait(calls, min(deadline, max(since + seconds, began + least)), others)
        return await self._begin(key, function, deadline)

    async def each(
        self, keys: Iterable[K], function: Callable[[K], T], *, seconds: float
    ) -> tuple[dict[K, T], frozenset[K]]:
        """Call a blocking function for each key, all in one thread as long as none of them is late.

        Args:
            keys: what to read. Those that are being read already are left out.
            function: called with each.
            seconds: that one key may take. The others then go on in another thread.

        Returns:
            What was answered; and which keys are late, in this call or an earlier one.

        Raises:
            NotFinishedError: no thread can be started.
        """
        loop = asyncio.get_running_loop()
        keys = tuple(keys)
        todo = deque(key for key in keys if key not in self._calls)
        found: dict[K, T] = {}
        while todo:
            turn = _Turn(todo, function)
            call, result = self._start(turn.run)
            late = False
            while not call.ended.done() and not late:
                wait = max(turn.began + seconds - time.monotonic(), 0.001)
                await asyncio.wait({call.ended}, timeout=wait)
                late = time.monotonic() >= turn.began + seconds
            if call.ended.done():
                result.result()  # raises what the function raised
            else:
                todo = turn.abandon()
                call.began = loop.time() - seconds
                if turn.key is not None:
                    self._busy(turn.key, call)
            found |= dict(turn.found)
            if call.ended.done():
                break
        past = loop.time() - seconds
        late_keys = (k for k, call in self._calls.items() if call.began <= past)
        return found, frozenset(late_keys).intersection(keys) - found.keys()

    def _in_the_way(self, key: K, spare: int) -> tuple[tuple[_Call, ...], tuple[K, ...]] | None:
        """What has to end before a call may begin; whose it is, unless it is the same key's."""
        # A call that has just ended is taken out by a callback that may still be to come.
        at_work = {k: call for k, call in self._calls.items() if not call.ended.done()}
        if key in at_work:
            return (at_work[key],), ()
        if self._most is None or len(at_work) < max(self._most - spare, 1):
            return None
        return tuple(at_work.values()), tuple(at_work)

    async def _begin(self, key: K, function: Callable[[], T], deadline: float) -> T:
        call, result = self._start(function)
        self._busy(key, call)
        await self._wait((call,), deadline, ())
        return result.result()

    async def _wait(self, calls: tuple[_Call, ...], deadline: float, others: tuple[K, ...]) -> None:
        """Until one of these calls has ended.

        Raises:
            LateError: none has.
        """
        loop = asyncio.get_running_loop()
        ended = frozenset(call.ended for call in calls)
        if (left := deadline - loop.time()) > 0:
            await asyncio.wait(ended, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if any(future.done() for future in ended):
            return
        raise LateError(loop.time() - min(call.began for call in calls), others, ended)

    def _busy(self, key: K, call: _Call) -> None:
        """The key's next call waits for this one."""
        self._calls[key] = call

        def ended(_: object) -> None:
            if self._calls.get(key) is call:
                del self._calls[key]

        if call.ended.done():
            ended(None)
        else:
            call.ended.add_done_callback(ended)

    def _start(self, function: Callable[[], T]) -> tuple[_Call, "asyncio.Future[T]"]:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        result: asyncio.Future[T] = loop.create_future()
        # A call that no task waits for any more may fail silently.
        result.add_done_callback(lambda done: done.cancelled() or done.exception())

        def tell(value: T | None, error: BaseException | None) -> None:
            if error is None:
                result.set_result(value)  # type: ignore[arg-type]
            else:
                result.set_exception(error)
            ended.set_result(None)

        def work() -> None:
            value: T | None = None
            failed: BaseException | None = None
            try:
                value = function()
            except BaseException as error:  # noqa: BLE001  # the waiting task gets it
                failed = error
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(tell, value, failed)

        try:
            threading.Thread(target=work, name=self._name, daemon=True).start()
        except RuntimeError as error:
            raise no_thread(f"a read of {self._name}", error) from error
        return _Call(loop.time(), ended), result


@dataclass(eq=False)
class _Turn(Generic[K, T]):
    """One thread's way through many keys.

    Attributes:
        todo: keys that are still to come.
        function: called with each.
        found: what was answered.
        key: the one that is read now.
        began: when its reading began, by the monotonic clock.
    """

    todo: deque[K]
    function: Callable[[K], T]
    found: dict[K, T] = field(default_factory=dict)
    key: K | None = None
    began: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _abandoned: bool = False

    def run(self) -> None:
        """In the thread."""
        while True:
            with self._lock:
                if self._abandoned or not self.todo:
                    return
                self.key = self.todo.popleft()
                self.began = time.monotonic()
            value = self.function(self.key)
            if not self._answer(self.key, value):
                return

    def _answer(self, key: K, value: T) -> bool:
        with self._lock:
            if not self._abandoned:
                self.found[key] = value
            return not self._abandoned

    def abandon(self) -> deque[K]:
        """The thread ends after the key that it reads now; returns the keys that it leaves."""
        with self._lock:
            self._abandoned = True
            return self.todo
