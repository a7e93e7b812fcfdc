"""What may be asked over TCP and how often it is answered, and what is refused at the start."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import cast

import pytest
from ledger_support import make_ledger

from fpga_plugin.cards.actions import CardState
from fpga_plugin.ids import CardId
from fpga_plugin.observability.http import Request, Response, text
from fpga_plugin.observability.routes import Routes
from fpga_plugin.observability.status_context import StatusContext
from fpga_plugin.plugin import Plugin
from fpga_plugin.settings.settings import Settings


def test_operations_are_refused_until_the_plugin_has_started():
    async def drain(card: str) -> CardState:
        return CardState(CardId(card), True, True, (), (), ())

    context = StatusContext(Settings())
    routes = Routes(context)

    def ask(operation: object):
        body = json.dumps({"operation": operation, "card": "0000-10-00.0"}).encode()
        return asyncio.run(routes.local(Request("POST", "/card", {}, "", body)))

    early = ask("drain")
    assert early.status == 409
    assert "the plugin is starting" in json.loads(early.body)["error"]
    actions = SimpleNamespace(drain=drain, undrain=None, retry=None, release=None)
    context.plugin = cast("Plugin", SimpleNamespace(actions=actions, ledger=make_ledger()[0]))
    assert json.loads(ask("drain").body)["drained"] is True
    assert "no operation 'pull'" in json.loads(ask("pull").body)["error"]
    assert "does not name operation, card" in json.loads(ask(1).body)["error"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b'"x"',
        b'{"id": 1, "card": "c", "region": "r", "bitstream": "b"}',
    ],
)
def test_a_request_to_program_that_names_nothing_is_refused(body: bytes):
    routes = Routes(StatusContext(Settings()))
    answer = asyncio.run(routes.local(Request("POST", "/program", {}, "", body)))
    assert answer.status == 409
    assert "does not name id, card, region, bitstream" in json.loads(answer.body)["error"]


def test_nothing_is_programmed_by_hand_while_the_plugin_starts_nor_over_tcp():
    routes = Routes(StatusContext(Settings()))
    body = b'{"id": "1", "card": "c", "region": "r", "bitstream": "b"}'
    answer = asyncio.run(routes.local(Request("POST", "/program", {}, "", body)))
    assert "the plugin is starting" in json.loads(answer.body)["error"]
    public = Request("POST", "/program", {}, "", body, "127.0.0.1")
    assert asyncio.run(routes.public(public)).status == 405


@pytest.mark.parametrize("path", ["/metrics", "/", "/status.json", "/history.json"])
def test_what_strangers_may_ask_for_is_rendered_once_a_second_whoever_asks(
    monkeypatch: pytest.MonkeyPatch, path: str
):
    """Else a hundred connections that ask again and again hold up kubelet's calls."""
    rendered = []

    def drawn(name: str) -> Callable[[Routes, Request], Awaitable[Response]]:
        async def draw(_routes: Routes, _request: Request) -> Response:
            rendered.append(name)
            return text(200, name)

        return draw

    for name in ("_metrics", "_page", "_status", "_history"):
        monkeypatch.setattr(Routes, name, drawn(name))

    async def many() -> set[int]:
        routes = Routes(StatusContext(Settings(status_page=True)))
        asked = [Request("GET", path, {}, "", b"", "127.0.0.1") for _ in range(120)]
        return {one.status for one in await asyncio.gather(*map(routes.public, asked))}

    assert asyncio.run(many()) == {200}
    assert len(rendered) == 1
