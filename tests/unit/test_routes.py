"""What may be done to a card while the plugin starts."""

import asyncio
import json
from types import SimpleNamespace
from typing import cast

import pytest

from fpga_plugin.config.settings import Settings
from fpga_plugin.operator.http import Request
from fpga_plugin.operator.routes import Routes
from fpga_plugin.operator.survey import Operation, Survey


def test_operations_that_come_after_the_socket_are_found():
    async def drain(card: str) -> dict[str, object]:
        return {"card": card}

    operations: dict[str, Operation] = {}
    survey = SimpleNamespace(settings=Settings())
    routes = Routes(cast("Survey", survey), operations)
    body = json.dumps({"operation": "drain", "card": "0000-10-00.0"}).encode()

    def ask():
        return asyncio.run(routes.local(Request("POST", "/card", {}, "", body)))

    early = ask()
    assert early.status == 409
    assert "the plugin is starting" in json.loads(early.body)["error"]
    operations["drain"] = drain
    assert json.loads(ask().body) == {"card": "0000-10-00.0"}


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
    survey = SimpleNamespace(settings=Settings(), plugin=None)
    routes = Routes(cast("Survey", survey), {})
    answer = asyncio.run(routes.local(Request("POST", "/program", {}, "", body)))
    assert answer.status == 409
    assert "does not name id, card, region, bitstream" in json.loads(answer.body)["error"]


def test_nothing_is_programmed_by_hand_while_the_plugin_starts_nor_over_tcp():
    survey = SimpleNamespace(settings=Settings(), plugin=None)
    routes = Routes(cast("Survey", survey), {})
    body = b'{"id": "1", "card": "c", "region": "r", "bitstream": "b"}'
    answer = asyncio.run(routes.local(Request("POST", "/program", {}, "", body)))
    assert "the plugin is starting" in json.loads(answer.body)["error"]
    public = Request("POST", "/program", {}, "", body, "127.0.0.1")
    assert asyncio.run(routes.public(public)).status == 405
