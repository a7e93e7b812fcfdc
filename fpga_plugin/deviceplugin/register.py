"""Registers a resource's endpoint with kubelet: a Register call on kubelet.sock."""

import asyncio

from grpclib.client import Channel
from grpclib.encoding.proto import ProtoCodec
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from fpga_plugin.deviceplugin.errors import NotRegisteredError
from fpga_plugin.deviceplugin.servicer import OPTIONS
from fpga_plugin.deviceplugin.sockets import KUBELET_SOCKET
from fpga_plugin.errors import MAX_TOLD, quote
from fpga_plugin.kubernetes.grpc.unix_socket import socket_path
from fpga_plugin.kubernetes.messages.v1beta1 import RegisterRequest, RegistrationStub
from fpga_plugin.kubernetes.names import ResourceName

VERSION = "v1beta1"
"""The one version that kubelet accepts (k8s.io/kubelet deviceplugin/v1beta1/constants.go)."""


async def register(directory: str, resource: ResourceName, endpoint: str, seconds: float) -> None:
    """One Register call.

    Kubelet dials the endpoint and asks for its options before it answers (1.25 and later).

    Args:
        directory: where kubelet.sock is.
        resource: the name to register.
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
