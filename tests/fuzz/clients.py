"""Who asks the plugin for its state: clients of HTTP, and what pods' texts become on its pages."""

import asyncio
import json
from collections import Counter
from contextlib import suppress
from html.parser import HTMLParser
from types import SimpleNamespace

import h11
from doubles.journal import NoJournal
from structlog.testing import capture_logs
from target import Target

from fpga_plugin.allocation.journal.records import Change
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.cards.actions import CardActions
from fpga_plugin.ids import CardId, DeviceId
from fpga_plugin.kubernetes.names import PodName, PodUid
from fpga_plugin.observability.http import Listener, Request, Response
from fpga_plugin.observability.page import page
from fpga_plugin.observability.routes import Routes
from fpga_plugin.observability.status_context import StatusContext
from fpga_plugin.observability.table import table
from fpga_plugin.observability.view import StatusView, view
from fpga_plugin.settings.settings import Settings

_CARD = CardId("0000-10-00.0")


class _Idle:
    """Takes every call and does nothing."""

    def __getattr__(self, _name: str) -> object:
        return lambda *_: None


class _Inventory(_Idle):
    """Nothing is there."""

    async def rescan(self, _card: CardId) -> None:
        """Look in vain."""


def _routes(*, started: bool = False) -> Routes:
    """Of a plugin whose journal remembers one card that is gone."""
    ledger = Ledger(
        prefix="fpga.intel.com",
        journal=NoJournal(),
        snapshot=Change(drained={_CARD: True}),
        boot_id="boot",
    )
    actions = CardActions(SimpleNamespace(ledger=ledger), _Idle(), _Inventory())
    context = StatusContext(Settings(status_page=True))
    if started:
        context.plugin = SimpleNamespace(actions=actions, ledger=ledger)
    return Routes(context)


class _Writer:
    """What a connection is answered with."""

    def __init__(self) -> None:
        self.sent = b""

    def write(self, data: bytes) -> None:
        self.sent += data

    async def drain(self) -> None:
        """It is all there."""


_STATUSES = frozenset({200, 400, 404, 405, 409, 413, 414, 421, 431, 501, 503})


def _http(data: bytes) -> None:
    """A whole connection; the first byte says whether to the local socket or over TCP."""
    routes = _routes()
    writer = _Writer()

    async def serve() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data[1:])
        reader.feed_eof()
        await Listener(routes.local if data[:1] == b"\1" else routes.public)._serve(
            reader, writer, lambda *_: None
        )

    with capture_logs():
        asyncio.run(serve())
    if not writer.sent:
        return
    client = h11.Connection(h11.CLIENT)
    head = b"HEAD" if data[1:6].startswith(b"HEAD ") else b"GET"
    client.send(h11.Request(method=head, target="/", headers=[("Host", "a")]))
    client.send(h11.EndOfMessage())
    client.receive_data(writer.sent)
    answer = client.next_event()
    assert isinstance(answer, h11.Response)
    assert answer.status_code in _STATUSES, writer.sent


def _card_operation(data: bytes) -> None:
    """What is asked for a card, by whoever may open the local socket."""

    if b"inspect" in data:
        return  # wants a whole plugin, and reads no more of the request

    async def answer() -> Response:
        return await _routes(started=True).local(Request("POST", "/card", body=data))

    with capture_logs():
        response = asyncio.run(answer())
    told = json.loads(response.body)
    if response.status == 200:  # OK
        assert told["card"] == _CARD
    else:
        assert response.status == 409  # Conflict
        assert told["error"].isprintable()
        assert len(told["error"]) < 1024  # as all messages


class _Tags(HTMLParser):
    """Counts elements and their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found[tag] += 1
        self.found.update(f"{tag} {name}" for name, _ in attrs)


def _status_of(texts: list[str]) -> StatusView:
    context = StatusContext(Settings())
    message, namespace, name, method = (texts + [""] * 4)[:4]
    uid = PodUid("u")
    context.refusals.refused(
        method,
        uid,
        (DeviceId(_CARD),),
        status="INVALID_ARGUMENT",
        message=message,
        name=PodName(namespace, name),
    )
    return asyncio.run(view(context))


_PLAIN = _Tags(page(_status_of(["x", "x", "x", "x"]))).found
del _PLAIN["code"]


def _page(data: bytes) -> None:
    """Texts that a pod may have put into its refusal, separated by NUL, on the page as text."""
    texts = [f"x{text}" for text in data.decode(errors="surrogateescape").split("\0")]
    status = _status_of([*texts, "x", "x", "x", "x"])
    document = page(status)
    with suppress(UnicodeEncodeError):  # surrogates: an error encodes its message before
        document.encode()
    found = _Tags(document).found
    del found["code"]  # what stands between backquotes is drawn so, and is nothing but text
    assert found == _PLAIN
    assert all(line.isprintable() for line in table(status).split("\n"))
    json.loads(json.dumps(status))


_DRAIN = json.dumps({"operation": "drain", "card": _CARD}).encode()

TARGETS = {
    "http": Target(
        _http,
        (
            b"\0GET /metrics?a=%41&b=1 HTTP/1.1\r\nHost: a\r\nAccept: */*\r\n\r\n",
            b"\0GET / HTTP/1.1\r\nHost: [::1]:9102\r\n\r\n",
            b"\0HEAD / HTTP/1.0\r\n\r\n",
            b"\0GET /readyz HTTP/1.0\r\n\r\n",
            b"\1GET /status HTTP/1.0\r\n\r\n",
            b"\1POST /card HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s"
            % (len(_DRAIN), _DRAIN),
        ),
        (b"Content-Length: ", b"Transfer-Encoding: chunked", b"HTTP/1.0", b"%00", b"\r\n\r\n"),
    ),
    "card-operation": Target(
        _card_operation,
        tuple(
            json.dumps({"operation": word, "card": _CARD}).encode()
            for word in ("drain", "undrain", "retry", "x")
        ),
        (b'"operation"', b'"card"', _CARD.encode(), b"[" * 99),
    ),
    "page": Target(
        _page,
        (
            b"no allocation is known\0team-a\0pod",
            b"<script>alert(1)</script>\0\"'>\0&lt;\0\x1b[31m",
        ),
        (
            b"<b>",
            b"</td>",
            b'" onload="',
            b"<!--",
            b"&#60;",
            b"\xe2\x80\xae",
            b"]]>",
            b"javascript:",
        ),
    ),
}
