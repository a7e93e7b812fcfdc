"""`fpga-plugin-probe healthz` and `readyz`: asks the running plugin over its status socket.

For kubelet's exec probes. The plugin's TCP address would do as well, but its clients may hold up
the probes, and kubelet then restarts a plugin that is well. The socket is root's alone.

Kubelet starts this every few seconds on every node, so it imports nothing but `os`, `sys` and the C
module of sockets: 15 ms of processor time and 8 MiB, where `fpga-plugin status` takes 330 ms. The
image has it as a file of its own, which runs without `site` (`python3 -IS`).
"""
# ruff: noqa: T201  # a command prints

import _socket
import os
import sys
from collections.abc import Sequence

STATE_DIR = "/var/lib/fpga-plugin"
"""Where FPGA_PLUGIN_STATE_DIR is not set."""

SOCKET = "status.sock"

SECONDS = {"healthz": 8.0, "readyz": 4.0}
"""What may be asked, and how long the answer may take: less than kubelet gives the probe, so that
its event reports what went wrong."""

_MAX_ANSWER = 65536
_USAGE = 2
_READ = 4096


def main(arguments: Sequence[str]) -> int:
    """Ask; the exit code is 0 where the answer is yes."""
    if len(arguments) != 1 or arguments[0] not in SECONDS:
        print(f"usage: fpga-plugin-probe {'|'.join(SECONDS)}", file=sys.stderr)
        return _USAGE
    state_dir = os.environ.get("FPGA_PLUGIN_STATE_DIR") or STATE_DIR
    try:
        status, words = _ask(state_dir, arguments[0])
    except OSError as error:
        print(f"{state_dir}/{SOCKET} does not answer: {error.strerror or error}")
        return 1
    print(words)
    return int(status != "200")


def _ask(state_dir: str, word: str) -> tuple[str, str]:
    os.chdir(state_dir)  # a socket's path has at most 107 bytes
    client = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    client.settimeout(SECONDS[word])
    client.connect(SOCKET)
    client.sendall(f"GET /{word} HTTP/1.0\r\n\r\n".encode())
    answer = b""
    while len(answer) < _MAX_ANSWER and (data := client.recv(_READ)):
        answer += data
    head, _, body = answer.decode(errors="replace").partition("\r\n\r\n")
    status = [*head.split(" ", 2), ""][1]
    return status, body.strip() or "no answer"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
