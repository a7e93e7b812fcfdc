"""Daemons of the campaign, forked from a process that has imported the package: this tree's, or a
copy with a deliberate bug in it.

It is tests/integration/nursery.py with one step more: what was forked gets its failure points
(`points`) before it becomes the daemon. As a program this file is that process.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
INTEGRATION = HERE.parent / "integration"

for place in (HERE.parent, INTEGRATION):
    if str(place) not in sys.path:
        sys.path.append(str(place))

import nursery  # noqa: E402  # found by the lines above


def serve_daemons(package: Path) -> "subprocess.Popen[bytes]":
    """From now on this process' daemons are of the package in this directory.

    The end of this process is the end of the one that is returned.
    """
    import ctypes

    ctypes.CDLL(None).prctl(nursery.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nursery.MAX_REQUEST)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), str(package)],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": str(package)},
        )
    nursery._nursery = lambda: (ours, process)
    return process


def main(descriptor: int, package: str) -> None:
    """Fork daemons until the line ends."""
    import points

    import fpga_plugin

    nursery.import_all()  # before the points are made
    assert str(Path(fpga_plugin.__file__).parents[1]) == package, fpga_plugin.__file__
    become = nursery._become

    def become_one(stderr: int, env: Mapping[str, str], folder: str) -> None:
        become(stderr, env, folder)
        points.install(env)

    nursery._become = become_one
    nursery._serve(descriptor)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
