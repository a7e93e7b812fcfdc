"""What can stand between the plugin and kubelet; each says what the operator can do."""

from grpclib.const import Status

from fpga_plugin.errors import FpgaPluginError, InvalidRequestError


class KubeletDirectoryError(FpgaPluginError):
    """Kubelet's device plugin directory is missing, or sockets cannot be made in it."""

    status = Status.FAILED_PRECONDITION


class NotRegisteredError(FpgaPluginError):
    """Kubelet is not there, refused the registration, or did not ask for the device list."""

    status = Status.UNAVAILABLE


class RequestTooLargeError(InvalidRequestError):
    """A call of kubelet's has more bytes than are read, as a server in Go says it."""

    status = Status.RESOURCE_EXHAUSTED


class StalledCallError(FpgaPluginError):
    """A client began a call and did not go on with it."""

    status = Status.DEADLINE_EXCEEDED
