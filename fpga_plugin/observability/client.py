"""The command line's side of the local socket."""

import json
import os
import socket
from typing import Any, Final

from fpga_plugin.errors import FpgaPluginError, RefusedError
from fpga_plugin.kubernetes.grpc.unix_socket import socket_path
from fpga_plugin.observability import SOCKET

SECONDS: Final = 20.0
"""How long the daemon may take; `card retry` waits for work on the card that is under way."""


class NoDaemonError(FpgaPluginError):
    """No running plugin answers on its socket."""


def _connected(directory: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(SECONDS)
        with socket_path(directory, SOCKET) as path:
            connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


def ask(state_dir: str, method: str, path: str, body: object = None) -> Any:
    """Ask the daemon of this state directory; returns its answer.

    Raises:
        NoDaemonError: none runs, or this user may not ask it.
        RefusedError: it refused; the message is its own.
    """
    import http.client  # with email: nothing that the daemon needs

    where = os.path.join(state_dir, SOCKET)
    connection = http.client.HTTPConnection("localhost")
    try:
        connection.sock = _connected(state_dir)
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        answer = json.loads(response.read())
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
        raise NoDaemonError(
            f"no fpga-plugin runs here: nothing listens on {where}",
            hint="start it with `fpga-plugin run`, or name its state directory in"
            " FPGA_PLUGIN_STATE_DIR; in a cluster: kubectl exec into the plugin's pod of the node",
        ) from None
    except PermissionError:
        raise NoDaemonError(f"only root may use {where}", hint="try again with sudo -E") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NoDaemonError(
            f"the fpga-plugin behind {where} did not answer: {error or type(error).__name__}",
            hint="see its log; it may be starting or ending",
        ) from error
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise RefusedError(str(answer.get("error", "refused")), hint=str(answer.get("hint", "")))
    return answer
