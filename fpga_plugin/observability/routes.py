"""The routes of the HTTP server, on the TCP address and on the local socket.

What TCP serves changes nothing. Any client that reaches the node's address may ask, by a name of
the node's (`hosts`), and gets what is rendered at most once a second (`rendered`). Requests that
change something are served on the local socket alone, which only its owner may open. So are
kubelet's probes, so that no flood of others can delay them.
"""

import asyncio
import json
import socket
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Final

from fpga_plugin.errors import FpgaPluginError, InvalidRequestError
from fpga_plugin.observability.health import not_live, not_ready
from fpga_plugin.observability.hosts import Hosts
from fpga_plugin.observability.http import Handler, Headers, Request, Response, text
from fpga_plugin.observability.rendered import Rendered
from fpga_plugin.observability.selection import MAX_WORDS, selected
from fpga_plugin.observability.status_context import StatusContext
from fpga_plugin.observability.view import past, view

JSON: Final = "application/json"

OPEN_METRICS: Final = "application/openmetrics-text"
"""In an Accept header: the newer of the two formats of metrics."""

FIND: Final = "find"
"""In a query: show only what has this in its name (`selection`)."""

PAGE_EVENTS: Final = 25
"""The newest, on the page; /history.json has more."""

_GET: Final = ("GET", "HEAD")
_POST: Final = ("POST",)


class Routes:
    """Answers requests.

    Args:
        context: what is shown.
    """

    def __init__(self, context: StatusContext) -> None:
        self._context = context
        settings = context.settings
        self._hosts = Hosts(
            (
                socket.gethostname(),
                settings.node_name or "",
                settings.http_address.host if settings.http_address else "",
                *(settings.http_hosts or ()),
            )
        )
        self._local: dict[str, tuple[tuple[str, ...], Handler]] = {
            "/status": (_GET, self._status),
            "/history": (_GET, self._history),
            "/metrics": (_GET, self._metrics),
            "/healthz": (_GET, self._healthz),
            "/readyz": (_GET, self._readyz),
            "/card": (_POST, self._card),
            "/program": (_POST, self._program),
        }
        self._public = {
            "/metrics": _shared(self._metrics),
            "/healthz": self._healthz,
            "/readyz": self._readyz,
        }
        if settings.status_page:
            self._public |= {
                "/": _shared(self._page),
                "/status.json": _shared(self._status),
                "/history.json": _shared(self._history),
            }

    async def public(self, request: Request) -> Response:
        """On the TCP address."""
        if not self._hosts.answers(request.host):
            return text(
                421,
                "this Host is none of the node's names: ask by its address, or list the name in"
                " FPGA_PLUGIN_HTTP_HOSTS",
            )
        if request.method not in _GET:
            return text(405, "only GET", headers=_allow(_GET))
        answer = self._public.get(request.path)
        if answer is None:
            return text(404, f"there is nothing here: {' '.join(self._public)}")
        return await answer(request)

    async def local(self, request: Request) -> Response:
        """On the unix socket, which the node's root alone can open."""
        methods, answer = self._local.get(request.path, ((), None))
        if answer is None:
            return _json(404, {"error": "this plugin does not know that request", "hint": ""})
        if request.method not in methods:
            error = {"error": f"{request.path} takes only {' and '.join(methods)}", "hint": ""}
            return _json(405, error, headers=_allow(methods))
        return await answer(request)

    async def _healthz(self, _request: Request) -> Response:
        reason = await not_live()
        return text(503, reason) if reason else text(200, "ok")

    async def _readyz(self, _request: Request) -> Response:
        reasons = not_ready(self._context)
        return text(503, "\n".join(reasons)) if reasons else text(200, "ok")

    async def _metrics(self, request: Request) -> Response:
        readings = await self._context.readings()
        # Imported by the first scrape: a start does not wait for it.
        from fpga_plugin.observability.metrics import exposition

        newer = OPEN_METRICS in request.accept
        body, content_type = exposition(self._context, readings, newer=newer)
        return Response(200, body, content_type)

    async def _status(self, request: Request) -> Response:
        return _json(200, selected(await view(self._context), request.query.get(FIND, "")))

    async def _history(self, request: Request) -> Response:
        return _json(200, await past(self._context, request.query.get(FIND, "")))

    async def _page(self, request: Request) -> Response:
        # Jinja2: only where a page is asked for, and nothing waits for its import.
        drawn = await asyncio.to_thread(import_module, "fpga_plugin.observability.page")
        words = request.query.get(FIND, "")
        events = await self._context.history.events(words, most=PAGE_EVENTS)
        html = drawn.page(await view(self._context), events, words=words)
        return Response(200, html.encode(), "text/html; charset=utf-8", drawn.HEADERS)

    async def _card(self, request: Request) -> Response:
        from fpga_plugin.observability.card_operations import operate  # seldom asked for

        try:
            asked = _strings(request.body, ("operation", "card"))
            return _json(200, await operate(self._context, asked["operation"], asked["card"]))
        except FpgaPluginError as error:
            return _json(409, {"error": error.message, "hint": error.hint})

    async def _program(self, request: Request) -> Response:
        from fpga_plugin.observability.card_operations import program  # seldom asked for

        try:
            asked = _strings(request.body, ("id", "card", "region", "bitstream"))
            return _json(200, await program(self._context, asked))
        except FpgaPluginError as error:
            return _json(409, {"error": error.message, "hint": error.hint})


def _shared(answer: Handler) -> Handler:
    """Each kind has its second for itself: a user who searches keeps no scraper waiting."""
    searched, newer_format, usual = Rendered(), Rendered(), Rendered()

    async def answered(request: Request) -> Response:
        words = request.query.get(FIND, "")[:MAX_WORDS]
        kind = searched if words else newer_format if OPEN_METRICS in request.accept else usual
        return await kind.get(words, lambda: answer(request))

    return answered


def _strings(body: bytes, names: Sequence[str]) -> Mapping[str, str]:
    """The texts of these names in an object.

    Raises:
        InvalidRequestError: it is no such request.
    """
    try:
        asked = json.loads(body)
        values = {name: asked[name] for name in names}
    except (ValueError, KeyError, TypeError, RecursionError):
        values = {}
    if not values or not all(isinstance(value, str) for value in values.values()):
        raise InvalidRequestError(f"the request does not name {', '.join(names)}")
    return values


def _allow(methods: tuple[str, ...]) -> Headers:
    return (("Allow", ", ".join(methods)),)


def _json(status: int, value: object, *, headers: Headers = ()) -> Response:
    return Response(status, json.dumps(value).encode(), JSON, headers)
