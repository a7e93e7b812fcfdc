"""The DFL backend and the uevent watch, driven by a test: a JSON object a line, in and out.

Commands carry an `id`, which their answer repeats; an error is answered by its class and text. Each
call of `changed` is a line of its own. The event loop goes on serving while a command blocks a
thread.
"""

import asyncio
import json
import sys
from typing import Any

from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.hardware.dfl.backend import DflBackend
from fpga_plugin.hardware.dfl.handles import fme_of
from fpga_plugin.hardware.linux import LinuxKernel
from fpga_plugin.hardware.model import Card
from fpga_plugin.hardware.udev import UdevEvents
from fpga_plugin.ids import CardId, RegionId

backend = DflBackend(LinuxKernel())
events = UdevEvents()


def say(**names: Any) -> None:
    sys.stdout.write(json.dumps(names) + "\n")
    sys.stdout.flush()


def scan() -> dict[str, Any]:
    inventory = backend.scan()
    return {
        "cards": {
            card.id: {
                "interface_id": card.interface_id,
                "numa_node": card.numa_node,
                "fme_node": fme_of(card).node,
                "complete": card.complete,
                "regions": {region.id: str(region.grant) for region in card.regions},
                "afu_ids": {region.id: backend.afu_id(region) for region in card.regions},
                "failed": {r: fault.message for r, fault in backend.health(card).failed.items()},
            }
            for card in inventory.cards.values()
        },
        "problems": {card: problem.message for card, problem in inventory.problems.items()},
    }


def use(region: str, image: str | None = None) -> None:
    """Open the port, reset it, and program `image` (hex) where there is one."""
    wanted = RegionId(region)
    card = backend.scan_card(CardId(wanted.rpartition("-p")[0]))
    assert isinstance(card, Card)
    (found,) = (each for each in card.regions if each.id == wanted)
    with backend.open_port(card, found) as port:
        port.reset()
        if image is not None:
            port.program(bytes.fromhex(image))


async def answer(line: str) -> None:
    command = json.loads(line)
    number, do = command.pop("id"), command.pop("do")
    try:
        match do:
            case "watch":
                reply = events.start(lambda card: say(changed=card))
            case "ping":
                reply = None
            case "scan":
                reply = await asyncio.to_thread(scan)
            case "use":
                reply = await asyncio.to_thread(use, **command)
            case _:
                raise ValueError(do)
    except FpgaPluginError as error:
        say(id=number, error=type(error).__name__, message=str(error))
    else:
        say(id=number, reply=reply)


async def main() -> None:
    reader = asyncio.StreamReader(limit=64 * 1024 * 1024)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    async with asyncio.TaskGroup() as tasks:
        while line := await reader.readline():
            tasks.create_task(answer(line.decode()))
    events.close()
    transport.close()


asyncio.run(main())
