"""A copy of a collection of the API server's objects, kept up to date: list, then watch.

The list reports at which version it was made, the watch what came after it. The watch is ended by
both sides now and then, and goes on at the version that it has come to. Where the server no longer
keeps that version (410), the collection is listed again. A failure is retried for ever, less
and less often; the last copy is kept meanwhile.

Nothing is polled: between two changes the process sleeps until the watch is renewed.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec
import structlog

from fpga_plugin.errors import NoSourceError, quote
from fpga_plugin.host.backoff import Backoff
from fpga_plugin.kubernetes.apiserver.rest import ApiServerError, Session, decoded, session

log = structlog.get_logger()

WATCH_SECONDS: Final = 570
"""How long a watch is asked for; client-go asks for 5 to 10 minutes."""

SILENCE_SECONDS: Final = 660.0
"""The server ends a watch in time, so that one which is silent for longer is dead."""

PAGE: Final = 500
MOST_PAGES: Final = 1000
"""Of a list; a server that always reports another page is given up."""

FIRST_DELAY: Final = 0.5
"""Seconds from a watch that ended at once to the next."""

LASTING_SECONDS: Final = 5.0
"""A watch that lasted so long was one: that a proxy cuts it off is no failure."""


class Metadata(msgspec.Struct, omit_defaults=True):
    """What is read of an object's metadata."""

    name: str = ""
    uid: str = ""
    resourceVersion: str = ""  # noqa: N815  # the API's own name


class Object(Protocol):
    """What is mirrored: msgspec makes it of JSON."""

    @property
    def metadata(self) -> Metadata:
        """Of the object."""


T = TypeVar("T", bound=Object)


class _ListMetadata(msgspec.Struct):
    resourceVersion: str = ""  # noqa: N815  # the API's own name
    continue_: str = msgspec.field(name="continue", default="")


class _List(msgspec.Struct, Generic[T]):
    metadata: _ListMetadata
    items: list[T] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Refusal(msgspec.Struct):
    code: int = 0
    reason: str = ""
    message: str = ""


class Marked(msgspec.Struct):
    """An object of any kind, by its metadata alone."""

    metadata: Metadata


_event = msgspec.json.Decoder(_Event)
_refusal = msgspec.json.Decoder(_Refusal)
_marked = msgspec.json.Decoder(Marked)


class Mirror(Generic[T]):
    """One collection.

    Args:
        kubeconfig: path of a file with credentials; None: the pod's service account.
        path: of the collection (`/apis/resource.k8s.io/v1/resourceslices`).
        kind: the type of its objects.
        fields: field selectors, by field.
        changed: is called after each change, and after each list.
        backoff: how long to wait after failures.

    Attributes:
        items: the objects by name, as last heard of.
        lists: how many lists have succeeded since the start.
        problem: why the copy may be old; empty if it is not.
    """

    def __init__(
        self,
        kubeconfig: str | None,
        path: str,
        kind: type[T],
        *,
        fields: Mapping[str, str],
        changed: Callable[[], None],
        backoff: Backoff | None = None,
    ) -> None:
        self._kubeconfig = kubeconfig
        self._path = path
        self._selector = ",".join(f"{field}={value}" for field, value in fields.items())
        self._changed = changed
        self._backoff = backoff or Backoff()
        self._one = msgspec.json.Decoder(kind)
        self._many: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_List[kind])  # type: ignore[valid-type]  # made of a value
        self._version = ""
        self.items: dict[str, T] = {}
        self.lists = 0
        self.problem = ""

    async def run(self) -> None:
        """Keep the copy up to date; ends only when cancelled."""
        while True:
            try:
                async with session(self._kubeconfig) as server:
                    await self._follow(server)
                continue
            except NoSourceError as error:
                if isinstance(error, ApiServerError) and error.gone:
                    self._version = ""
                await self._failed(error)

    async def _failed(self, error: NoSourceError) -> None:
        delay = self._backoff.delay(error)
        if not (isinstance(error, ApiServerError) and error.gone) and not self.problem:
            log.warning(
                "API server does not say what it has",
                path=self._path,
                error=error.message,
                hint="it is asked again, less and less often",
            )
        self.problem = error.message
        await asyncio.sleep(delay)

    @property
    def synced(self) -> bool:
        """Whether a list has succeeded since the start."""
        return self.lists > 0

    def learn(self, item: T) -> None:
        """The server answered with this object: do not wait for the watch to report it too."""
        have = self.items.get(item.metadata.name)
        if have is None or _later(item.metadata, have.metadata):
            self.items[item.metadata.name] = item

    def forget(self, name: str) -> None:
        """The server said that there is no such object any more."""
        self.items.pop(name, None)

    async def _follow(self, server: Session) -> None:
        """List if need be, then watch once.

        Raises:
            NoSourceError: it did not go on to the end of the watch.
        """
        if not self._version:
            self.items, self._version = await self._list(server)
            self.lists += 1
            self._well()
            self._changed()
        began = asyncio.get_running_loop().time()
        try:
            await self._watch(server)
        except ApiServerError as error:
            if error.code or error.reason or _seconds_since(began) < LASTING_SECONDS:
                raise
        self._backoff.reset()
        # A server that ends each watch at once is not asked as fast as it answers.
        if _seconds_since(began) < FIRST_DELAY:
            await asyncio.sleep(FIRST_DELAY)

    async def _watch(self, server: Session) -> None:
        """Until the server ends it.

        Raises:
            ApiServerError: it was refused, or broke.
        """
        params = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(WATCH_SECONDS),
            "fieldSelector": self._selector,
        }
        lines = server.lines(self._path, params=params, silence=SILENCE_SECONDS)
        async with contextlib.aclosing(lines):
            async for line in lines:
                self._take(line)
                self._backoff.reset()
                self._well()

    def _well(self) -> None:
        if self.problem:
            log.info("API server reports what it has again", path=self._path)
        self.problem = ""

    async def _list(self, server: Session) -> tuple[dict[str, T], str]:
        params = {"fieldSelector": self._selector, "limit": str(PAGE)}
        items: dict[str, T] = {}
        for _ in range(MOST_PAGES):
            body = await server.call("GET", self._path, params=params)
            page = decoded(self._many, body, self._path)
            items.update({item.metadata.name: item for item in page.items or ()})
            if not page.metadata.continue_:
                return items, page.metadata.resourceVersion
            params["continue"] = page.metadata.continue_
        raise ApiServerError(f"{self._path}: a list of more than {MOST_PAGES} pages")

    def _take(self, line: bytes) -> None:
        """One event of the watch.

        Raises:
            ApiServerError: it is the end of the watch, or not understood.
        """
        before, self._version = self._version, ""  # what is not understood is in the next list
        event = decoded(_event, line, self._path)
        if event.type == "ERROR":
            told = decoded(_refusal, event.object, self._path)
            self._version = before
            raise ApiServerError(
                f"watch {self._path}: {quote(told.message)}",
                code=told.code,
                reason=told.reason,
            )
        version = decoded(_marked, event.object, self._path).metadata.resourceVersion
        kept = event.type != "BOOKMARK"
        item = decoded(self._one, event.object, self._path) if kept else None
        self._version = version
        if item is not None and self._apply(event.type, item):
            self._changed()

    def _apply(self, kind: str, item: T) -> bool:
        """Whether an event changed anything; what `learn` already got does not."""
        name = item.metadata.name
        have = self.items.get(name)
        if have is not None and not _later(item.metadata, have.metadata):
            return False
        if kind == "DELETED":
            return self.items.pop(name, None) is not None
        self.items[name] = item
        return True


def _seconds_since(began: float) -> float:
    return asyncio.get_running_loop().time() - began


def _later(told: Metadata, have: Metadata) -> bool:
    """Whether an event is later than what is known of the object.

    Versions are compared as numbers, which the API allows since 1.35 and every server has always
    counted; others are taken as they come.
    """
    if not (told.resourceVersion.isdecimal() and have.resourceVersion.isdecimal()):
        return True
    return int(told.resourceVersion[:40]) > int(have.resourceVersion[:40])
