"""The floor: a bare grpclib server that answers Allocate from memory.

What the plugin takes beyond this is its own doing; what this takes is grpclib, asyncio, the kernel
and the client. Run by the same Python as the plugin, with the socket's path as its argument.
"""

import asyncio
import sys

from grpclib.encoding.proto import ProtoCodec
from grpclib.server import Server

from fpga_plugin.api.messages.v1beta1 import (
    AllocateRequest,
    AllocateResponse,
    ContainerAllocateResponse,
    DevicePluginBase,
    DeviceSpec,
)


class Echo(DevicePluginBase):
    """Answers every Allocate with one device."""

    async def allocate(self, message: AllocateRequest) -> AllocateResponse:  # noqa: ARG002
        """Like the plugin's answer for one region."""
        node = "/dev/dfl-port.0"
        return AllocateResponse(
            container_responses=[
                ContainerAllocateResponse(
                    envs={"FPGA_DEVICE_0000_10_00_0_P0": node},
                    devices=[DeviceSpec(container_path=node, host_path=node, permissions="rw")],
                )
            ]
        )


async def _main(path: str) -> None:
    server = Server([Echo()], codec=ProtoCodec())
    await server.start(path=path)
    print("serving", flush=True)
    await server.wait_closed()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
