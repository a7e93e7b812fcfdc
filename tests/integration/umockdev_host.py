"""Holds a umockdev testbed for a test: a /sys, a /dev, uevents, and ioctls that are answered here.

Runs under Debian's own Python with gi (`umockdev-wrapper /usr/bin/python3 umockdev_host.py`); what
is tested runs in another process, under any Python, that finds the testbed by UMOCKDEV_DIR. Takes
one command a line on stdin and gives one answer a line on stdout, both JSON:

    {"do": "root"}                                    the folder for UMOCKDEV_DIR
    {"do": "add", "devices": TEXT}                    in umockdev's own form; an event for each
    {"do": "remove", "path": PATH}                    a device and what is below it; no event
    {"do": "uevent", "path": PATH, "action": ACTION}  of a device that is there
    {"do": "set", "path": PATH, "name": N, "value": TEXT}  an attribute
    {"do": "serve", "node": NODE}                     record and answer the node's ioctls
    {"do": "answer", "node": NODE, "errno": NUMBER}   how from now on; 0: success
    {"do": "follow", "ports": [PATH, ...]}            by port id: afu_id becomes what a PR brings
    {"do": "hold", "node": NODE}                      leave the node's ioctls unanswered
    {"do": "release"}                                 answer all again
    {"do": "ioctls", "count": N}                      all so far, once there are N

More than ten uevents that a watcher has not read abort this process (net.unix.max_dgram_qlen).
"""

import json
import struct
import sys
import threading

import gi

gi.require_version("UMockdev", "1.0")
from gi.repository import UMockdev  # noqa: E402 - the version is chosen first

FME_PORT_PR = 0xB680
TIMEOUT = 30.0


class Host:
    def __init__(self) -> None:
        self.testbed = UMockdev.Testbed.new()
        self.handlers = {}
        self.errnos = {}
        self.seen = []
        self.changed = threading.Condition()
        self.held = set()
        self.ports = []

    def root(self) -> str:
        return self.testbed.get_root_dir()

    def add(self, devices: str) -> None:
        self.testbed.add_from_string(devices)

    def remove(self, path: str) -> None:
        self.testbed.remove_device(path)

    def uevent(self, path: str, action: str) -> None:
        self.testbed.uevent(path, action)

    def set(self, path: str, name: str, value: str) -> None:
        self.testbed.set_attribute(path, name, value)

    def serve(self, node: str) -> None:
        handler = UMockdev.IoctlBase()
        handler.connect("handle-ioctl", self._ioctl, node)
        self.testbed.attach_ioctl(node, handler)
        self.handlers[node] = handler  # gi forgets it otherwise

    def answer(self, node: str, errno: int) -> None:
        self.errnos[node] = errno

    def follow(self, ports: list) -> None:
        self.ports = ports

    def hold(self, node: str) -> None:
        with self.changed:
            self.held.add(node)

    def release(self) -> None:
        with self.changed:
            self.held.clear()
            self.changed.notify_all()

    def ioctls(self, count: int) -> list:
        with self.changed:
            self.changed.wait_for(lambda: len(self.seen) >= count, TIMEOUT)
            return self.seen

    def _ioctl(self, _handler, client, node) -> bool:
        """Runs in umockdev's own thread, one ioctl at a time."""
        request = client.get_request()
        seen = {"node": node, "request": request}
        if request == FME_PORT_PR:
            argument = client.get_arg().resolve(0, 24)
            raw = argument.retrieve()
            seen["argument"] = raw.hex()
            # The buffer's address is the struct's last member; the size is in the one before it.
            port_id, size = struct.unpack_from("<II", raw, 8)
            seen["image"] = argument.resolve(16, size).retrieve().hex()
        with self.changed:
            self.seen.append(seen)
            self.changed.notify_all()
            self.changed.wait_for(lambda: node not in self.held, TIMEOUT)
        errno = self.errnos.get(node, 0)
        if request == FME_PORT_PR and self.ports and not errno:
            self.set(self.ports[port_id], "afu_id", seen["image"][:32] + "\n")
        client.complete(-1 if errno else 0, errno)
        return True


def main() -> None:
    host = Host()
    for line in sys.stdin:
        command = json.loads(line)
        number, do = command.pop("id"), command.pop("do")
        answer = {"id": number, "reply": getattr(host, do)(**command)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


main()
