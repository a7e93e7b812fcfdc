"""The two ways in which kubelet hears of a resource's endpoint.

Either the plugin calls Register on kubelet.sock, as every device plugin does. Or kubelet finds the
plugin by its socket in `plugins_registry` (kubernetes/kubernetes pull request 58282 and later), as
it finds DRA drivers. Whichever it is, a life of an endpoint and its end are the same
(`registration`): kubelet.sock is served either way, and tells kubelet's lives apart.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import structlog
from grpclib.client import Channel
from grpclib.encoding.proto import ProtoCodec
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from fpga_plugin.api.messages.v1beta1 import RegisterRequest, RegistrationStub
from fpga_plugin.deviceplugin.errors import NotRegisteredError
from fpga_plugin.deviceplugin.servicer import OPTIONS
from fpga_plugin.deviceplugin.sockets import KUBELET_SOCKET
from fpga_plugin.errors import MAX_TOLD, quote
from fpga_plugin.ids import ResourceName
from fpga_plugin.serving.fixed_socket import registry_path
from fpga_plugin.serving.unix_socket import socket_path

VERSION = "v1beta1"
"""The one version that kubelet accepts (k8s.io/kubelet deviceplugin/v1beta1/constants.go)."""

_log = structlog.get_logger()


class Way(Protocol):
    """How an endpoint is made known to kubelet."""

    def announced(self, resource: ResourceName, endpoint: str) -> AbstractAsyncContextManager[None]:
        """Kubelet has accepted the endpoint when this is entered, and may until it is left.

        Raises:
            FpgaPluginError: kubelet cannot be reached, refuses, or takes too long.
        """


class KubeletSocket:
    """Register on kubelet.sock.

    Args:
        directory: where it is.
        seconds: how long the call may take; kubelet dials us within it (its own limit is 10 s).
    """

    def __init__(self, directory: str, seconds: float) -> None:
        self._directory = directory
        self._seconds = seconds

    @asynccontextmanager
    async def announced(self, resource: ResourceName, endpoint: str) -> AsyncIterator[None]:
        """See `Way`."""
        await register(self._directory, resource, endpoint, self._seconds)
        yield


class PluginWatcher:
    """A socket in `plugins_registry` for each resource.

    Args:
        directory: where the endpoints' sockets are.
        root: kubelet's root directory.
        seconds: how long kubelet may take to find it, with its delays after failures.
    """

    def __init__(self, directory: str, root: str, seconds: float) -> None:
        self._directory = directory
        self._root = root
        self._seconds = seconds

    @asynccontextmanager
    async def announced(self, resource: ResourceName, endpoint: str) -> AsyncIterator[None]:
        """See `Way`."""
        from fpga_plugin.serving.registry import (  # messages that the other way does not need
            Info,
            RegistrySocket,
        )

        first: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def told(problem: str) -> None:
            if not first.done():
                first.set_result(problem)
            elif problem:  # the stream's end tells what it means for us
                _log.warning(
                    "kubelet does not register a plugin", resource=resource, reason=problem
                )

        path = os.path.join(self._directory, endpoint)
        socket = RegistrySocket(
            registry_path(self._root, resource),
            Info("DevicePlugin", resource, path, (VERSION,)),
            told,
        )
        await socket.start()
        try:
            try:
                async with asyncio.timeout(self._seconds):
                    problem = await first
            except TimeoutError:
                raise NotRegisteredError(
                    f"kubelet did not register {socket.path} within {self._seconds:g} s",
                    hint="kubelet is not running, or FPGA_PLUGIN_KUBELET_ROOT is not its directory",
                ) from None
            if problem:
                raise NotRegisteredError(f"kubelet refused to register {resource}: {problem}")
            yield
        finally:
            await socket.stop()


async def register(directory: str, resource: ResourceName, endpoint: str, seconds: float) -> None:
    """One Register call.

    Kubelet dials the endpoint and asks for its options before it answers (1.25 and later).

    Args:
        directory: where kubelet.sock is.
        resource: what is registered.
        endpoint: base name of the endpoint's socket.
        seconds: the call's limit.

    Raises:
        NotRegisteredError: kubelet cannot be reached, refuses, or takes too long.
    """
    request = RegisterRequest(
        version=VERSION, endpoint=endpoint, resource_name=resource, options=OPTIONS
    )
    try:
        with socket_path(directory, KUBELET_SOCKET) as path:
            # The codec is named because grpclib would look for google's packages to find one.
            async with asyncio.timeout(seconds), Channel(path=path, codec=ProtoCodec()) as channel:
                await RegistrationStub(channel).register(request)
    except TimeoutError:
        raise NotRegisteredError(f"kubelet did not answer Register within {seconds:g} s") from None
    except OSError as error:
        raise NotRegisteredError(
            f"kubelet does not serve {KUBELET_SOCKET}: {error.strerror}"
        ) from error
    except GRPCError as error:
        raise NotRegisteredError(
            f"kubelet refused to register {resource}:"
            f" {quote(error.message or error.status.name, MAX_TOLD)}"
        ) from error
    except (StreamTerminatedError, ProtocolError, AttributeError) as error:
        # AttributeError: grpclib 0.4, where the connection ended before the call began.
        raise NotRegisteredError("kubelet broke off the Register call") from error
