"""The floor: a bare grpclib server that answers Allocate from memory.

What the plugin takes beyond this is its own doing; what this takes is grpclib, asyncio, the kernel
and the client. Run by the same Python as the plugin, with the socket's path as its argument. Two
more arguments add what this plugin cannot do without: a file's path has it commit one row of SQLite
before each answer, and `limits` behind that has it serve with the plugin's own server, which limits
connections and messages. The floor imports nothing for either.
"""

import asyncio
import sys
from typing import TYPE_CHECKING

from grpclib.const import Handler
from grpclib.encoding.proto import ProtoCodec
from grpclib.server import Server

if TYPE_CHECKING:
    import sqlite3

from fpga_plugin.kubernetes.messages.v1beta1 import (
    AllocateRequest,
    AllocateResponse,
    ContainerAllocateResponse,
    DevicePluginBase,
    DeviceSpec,
)


class Echo(DevicePluginBase):
    """Answers every Allocate with one device."""

    def __init__(self, journal: str | None) -> None:
        self._calls = 0
        self._db: sqlite3.Connection | None = None
        if journal is not None:
            from sqlite3 import connect  # see the module

            # As the plugin's journal: what is committed survives the process, and no disk waits.
            self._db = connect(journal, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute("CREATE TABLE claims (device TEXT PRIMARY KEY, number INTEGER)")

    async def allocate(self, message: AllocateRequest) -> AllocateResponse:
        """Like the plugin's answer for one region."""
        if self._db is not None:
            self._calls += 1
            device = message.container_requests[0].devices_ids[0]
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("INSERT OR REPLACE INTO claims VALUES (?, ?)", (device, self._calls))
            self._db.execute("COMMIT")
        node = "/dev/dfl-port.0"
        return AllocateResponse(
            container_responses=[
                ContainerAllocateResponse(
                    envs={"FPGA_DEVICE_0000_10_00_0_P0": node},
                    devices=[DeviceSpec(container_path=node, host_path=node, permissions="rw")],
                )
            ]
        )


async def _main(path: str, journal: str | None = None, limits: str = "") -> None:
    echo = Echo(journal)
    server = _limited(echo) if limits else Server([echo], codec=ProtoCodec())
    await server.start(path=path)
    print("serving", flush=True)
    await server.wait_closed()


def _limited(echo: Echo) -> Server:
    from fpga_plugin.kubernetes.grpc.server import ClosingServer  # see the module
    from fpga_plugin.kubernetes.grpc.unary import unary  # see the module

    handler = unary("Allocate", AllocateRequest, AllocateResponse, echo.allocate)

    class Limited:
        def __mapping__(self) -> dict[str, Handler]:
            return {"/v1beta1.DevicePlugin/Allocate": handler}

    return ClosingServer([Limited()])


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
