"""What may be done to a card while the plugin starts."""

import asyncio
import json
from types import SimpleNamespace
from typing import cast

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
