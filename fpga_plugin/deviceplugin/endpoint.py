"""One life of one resource's server: a socket of its own, from binding to the last byte.

It listens before it is registered. Its end closes kubelet's connections and awaits the handlers,
because kubelets mix up a new registration with an old stream that ends later (kubernetes/kubernetes
issues 121994 and 127803).
"""

import asyncio

import structlog

from fpga_plugin.deviceplugin.device_stream import DeviceStreams
from fpga_plugin.deviceplugin.encoding import ListCodec
from fpga_plugin.deviceplugin.service import DevicePlugin
from fpga_plugin.deviceplugin.servicer import Servicer
from fpga_plugin.deviceplugin.sockets import listen, remove_socket
from fpga_plugin.kubernetes.grpc.server import ClosingServer
from fpga_plugin.kubernetes.grpc.unix_socket import socket_identity
from fpga_plugin.kubernetes.names import ResourceName

_GRACE = 0.5
"""Seconds for handlers to end once they were cancelled; they only have clean-up left to do."""

_log = structlog.get_logger()


class Endpoint:
    """Serves a resource on a new socket in kubelet's directory.

    Attributes:
        name: the socket's base name, as RegisterRequest wants it; empty before `start`.
        streams: the ListAndWatch streams.
    """

    def __init__(self, resource: ResourceName, api: DevicePlugin, directory: str) -> None:
        self.name = ""
        self.streams = DeviceStreams(resource, api.lists, api.reconciler)
        self._resource = resource
        self._directory = directory
        self._servicer = Servicer(resource, api, self.streams)
        self._server: ClosingServer | None = None

    @property
    def in_place(self) -> bool:
        """Whether the socket file is still there, so that kubelet could connect."""
        return socket_identity(self._directory, self.name) is not None

    async def start(self) -> None:
        """Bind and serve.

        Raises:
            KubeletDirectoryError: no socket can be made.
        """
        listener, self.name = listen(self._directory)
        try:
            server = ClosingServer([self._servicer], codec=ListCodec())
            await server.serve(listener)
        except BaseException:
            listener.close()
            remove_socket(self._directory, self.name)
            raise
        self._server = server

    async def stop(self) -> None:
        """Close the socket and kubelet's connections, end the handlers; does nothing twice."""
        server, self._server = self._server, None
        if server is None:
            return
        remove_socket(self._directory, self.name)
        await server.close_all()
        if running := set(self._servicer.running):
            _, pending = await asyncio.wait(running, timeout=_GRACE)
            if pending:
                _log.warning(
                    "calls still run after their socket was closed",
                    resource=self._resource,
                    count=len(pending),
                    waited=_GRACE,
                )
