"""A plugin that kubelet finds by itself: its socket in `<kubelet root>/plugins_registry`.

Kubelet watches that directory and looks each second (pkg/kubelet/pluginmanager): it asks a new
socket what it serves (GetInfo, 1 s), dials the endpoint, and says what came of it
(NotifyRegistrationStatus). What fails it tries again after 0.5 to 122 s; before Kubernetes 1.36
not all of it (`Reoffer`). A socket that goes is deregistered; one that is made again under the same
name is registered again. A kubelet that starts finds what is there.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from grpclib.const import Handler

from fpga_plugin.errors import MAX_TOLD, quote
from fpga_plugin.host.backoff import Backoff
from fpga_plugin.kubernetes.grpc.fixed_socket import FixedSocket, SocketError
from fpga_plugin.kubernetes.grpc.unary import unary
from fpga_plugin.kubernetes.messages.pluginregistration import (
    InfoRequest,
    PluginInfo,
    RegistrationStatus,
    RegistrationStatusResponse,
)

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Info:
    """What a plugin says of itself.

    Attributes:
        kind: `DevicePlugin` or `DRAPlugin`.
        name: a resource or a driver.
        endpoint: path of the socket that serves it.
        versions: of the services there, the preferred one first.
    """

    kind: str
    name: str
    endpoint: str
    versions: tuple[str, ...]


class RegistrySocket(FixedSocket):
    """One socket in the directory; where it goes, kubelet deregisters the plugin.

    Args:
        path: of the socket; kubelet passes over names that begin with a dot.
        info: the answer to kubelet's GetInfo.
        told: is called with each word of kubelet's: empty, or why it did not register the plugin.
    """

    def __init__(self, path: str, info: Info, told: Callable[[str], None]) -> None:
        super().__init__(path, _Registration(info, told))


class Reoffer:
    """Makes the socket again that kubelet refused, so that kubelet looks at it once more.

    Kubelet before 1.36 counts a socket as done although its own part of the registration failed,
    and tries again with a new socket only (kubernetes/kubernetes pull request 133335). A later one
    tries again by itself, and is asked no oftener than that.

    Args:
        socket: what is made again.
        first: seconds after the first refusal.
        last: seconds after many.
    """

    def __init__(self, socket: RegistrySocket, *, first: float = 5.0, last: float = 160.0) -> None:
        self._socket = socket
        self._backoff = Backoff(first, last)
        self._wait = 0.0
        self._refused = asyncio.Event()

    def told(self, problem: str) -> float:
        """Take kubelet's word; the seconds after which the socket is made again, 0: never."""
        if not problem:
            self._backoff.reset()
            self._refused.clear()
            return 0.0
        self._wait = self._backoff.delay()
        self._refused.set()
        return self._wait

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            await self._refused.wait()
            await asyncio.sleep(self._wait)
            if not self._refused.is_set():
                continue  # kubelet has tried again by itself, and registered it
            self._refused.clear()
            await self._socket.stop()
            try:
                await self._socket.start()
            except SocketError as error:
                _log.warning(
                    "the registration's socket cannot be made",
                    message=error.message,
                    hint=error.hint,
                    retry_in=self.told(error.message),
                )


class _Registration:
    """Both calls; neither waits."""

    def __init__(self, info: Info, told: Callable[[str], None]) -> None:
        self._info = info
        self._told = told

    def __mapping__(self) -> dict[str, Handler]:
        """The service's methods by their paths."""
        return {
            "/pluginregistration.Registration/GetInfo": unary(
                "GetInfo", InfoRequest, PluginInfo, self._get_info
            ),
            "/pluginregistration.Registration/NotifyRegistrationStatus": unary(
                "NotifyRegistrationStatus",
                RegistrationStatus,
                RegistrationStatusResponse,
                self._notified,
            ),
        }

    async def _get_info(self, _request: InfoRequest) -> PluginInfo:
        return PluginInfo(
            type=self._info.kind,
            name=self._info.name,
            endpoint=self._info.endpoint,
            supported_versions=list(self._info.versions),
        )

    async def _notified(self, status: RegistrationStatus) -> RegistrationStatusResponse:
        told = status.error or "no reason is given"
        problem = "" if status.plugin_registered else quote(told, MAX_TOLD)
        asyncio.get_running_loop().call_soon(self._told, problem)
        return RegistrationStatusResponse()
