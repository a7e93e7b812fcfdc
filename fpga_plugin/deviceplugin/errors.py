"""What can stand between the plugin and kubelet; each says what the operator can do."""

from grpclib.const import Status

from fpga_plugin.errors import FpgaPluginError


class KubeletDirectoryError(FpgaPluginError):
    """Kubelet's device plugin directory is missing, or sockets cannot be made in it."""

    status = Status.FAILED_PRECONDITION


class NotRegisteredError(FpgaPluginError):
    """Kubelet is not there, refused the registration, or did not ask for the device list."""

    status = Status.UNAVAILABLE
