"""What may be done to a card while the plugin starts."""

import asyncio
import json
from types import SimpleNamespace
from typing import cast

import pytest
from ledger_support import make_ledger

from fpga_plugin.cards.actions import CardState
from fpga_plugin.ids import CardId
from fpga_plugin.observability.http import Request
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
