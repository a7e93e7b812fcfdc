"""Kubelet's side, in the benchmark's own process: registration, lists, calls, PodResources.

It is made of grpcio, whose C core costs less time a call than a client in Python, and hands raw
bytes to and fro, so that the benchmark measures the plugin rather than its own encoding. It plays a
kubelet that knows all calls.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc  # type: ignore[import-untyped]  # ships no types

from fpga_plugin.kubernetes.messages import v1, v1beta1

LIMIT = 60.0
"""Seconds after which a benchmark gives up waiting: something is broken then, not slow."""


class Kubelet:
    """One kubelet instance.

    Attributes:
        registered: when each resource registered first, since `forget`.
        held: devices that PodResources shows as a pod's, by resource.
    """

    def __init__(self, folder: Path) -> None:
        self.directory = folder / "device-plugins"
        self.directory.mkdir()
        self.podresources = folder / "podresources.sock"
        self.registered: dict[str, float] = {}
        self.held: dict[str, set[str]] = {}
        self._changed = threading.Condition()
        self._lists: dict[str, list[tuple[float, bytes]]] = {}
        self._channels: dict[str, grpc.Channel] = {}
        self._servers = [
            _serve(
                self.directory / "kubelet.sock",
                "v1beta1.Registration",
                {"Register": self._register},
            ),
            _serve(self.podresources, "v1.PodResourcesLister", {"List": self._list}),
        ]

    def close(self) -> None:
        """End it."""
        self.forget()
        for server in self._servers:
            server.stop(None)

    def forget(self) -> None:
        """The plugin ended: forget its connections, lists and registrations."""
        with self._changed:
            channels = list(self._channels.values())
            self._channels.clear()
            self._lists.clear()
            self.registered.clear()
        for channel in channels:
            channel.close()

    def _register(self, data: bytes, _context: object) -> bytes:
        now = time.monotonic()
        request = v1beta1.RegisterRequest.parse(data)
        name = request.resource_name
        channel = grpc.insecure_channel(f"unix:{self.directory / request.endpoint}")
        channel.unary_unary("/v1beta1.DevicePlugin/GetDevicePluginOptions")(b"")
        with self._changed:
            self.registered.setdefault(name, now)
            self._lists[name] = []
            self._channels[name] = channel
            self._changed.notify_all()
        threading.Thread(target=self._watch, args=(name, channel), daemon=True).start()
        return b""

    def _watch(self, name: str, channel: grpc.Channel) -> None:
        try:
            for data in channel.unary_stream("/v1beta1.DevicePlugin/ListAndWatch")(b""):
                now = time.monotonic()
                with self._changed:
                    self._lists.setdefault(name, []).append((now, data))
                    self._changed.notify_all()
        except (grpc.RpcError, ValueError):
            pass  # the plugin, or this kubelet, ended

    def _list(self, _data: bytes, _context: object) -> bytes:
        devices = [
            v1.ContainerDevices(resource_name=name, device_ids=sorted(ids))
            for name, ids in self.held.items()
        ]
        container = v1.ContainerResources(name="main", devices=devices)
        pod = v1.PodResources(name="pod", namespace="default", containers=[container])
        return bytes(v1.ListPodResourcesResponse(pod_resources=[pod] if devices else []))

    def call(self, resource: str, method: str) -> Callable[[bytes], bytes]:
        """A method of a resource's endpoint, ready to be called with raw bytes."""
        with self._changed:
            channel = self._channels[resource]
        function: Callable[[bytes], bytes] = channel.unary_unary(f"/v1beta1.DevicePlugin/{method}")
        return function

    def wait_registered(self, count: int) -> Sequence[float]:
        """When each of `count` resources registered, in order."""
        self._wait(lambda: len(self.registered) >= count, f"{count} resources to be registered")
        return sorted(self.registered.values())

    def wait_list(
        self, resource: str, holds: Callable[[bytes], bool], *, since: float = 0.0
    ) -> float:
        """When a list for which `holds` came first, after `since`; waits until one comes."""
        at = 0.0
        seen = 0

        def found() -> bool:
            nonlocal at, seen
            lists = self._lists.get(resource, [])
            for at, data in lists[seen:]:
                seen += 1
                if at >= since and holds(data):
                    return True
            return False

        self._wait(found, f"a list of {resource}")
        return at

    def messages(self, since: float) -> Mapping[str, int]:
        """How many lists of each resource came after `since`."""
        with self._changed:
            return {
                name: sum(at >= since for at, _ in lists) for name, lists in self._lists.items()
            }

    def last(self, resource: str, holds: Callable[[bytes], bool]) -> bool:
        """Whether the resource's present list is one for which `holds`."""
        with self._changed:
            lists = self._lists.get(resource)
        return lists is not None and bool(lists) and holds(lists[-1][1])

    def trim(self) -> None:
        """Forget all lists but the last of each resource."""
        with self._changed:
            for lists in self._lists.values():
                del lists[:-1]

    def _wait(self, holds: Callable[[], bool], what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(holds, LIMIT):
                msg = f"waited {LIMIT:g} s for {what}"
                raise TimeoutError(msg)


def _serve(
    path: Path, service: str, methods: Mapping[str, Callable[[bytes, object], bytes]]
) -> grpc.Server:
    server = grpc.server(ThreadPoolExecutor(8))
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
    server.add_insecure_port(f"unix:{path}")
    server.start()
    return server


def listed(device: str, *, healthy: bool | None = None) -> Callable[[bytes], bool]:
    """Whether a list has a device, in a state of health; None: in any.

    Looks for the device's own bytes: field 1 the id, field 2 the health (deviceplugin.proto).
    """
    start = b"\n" + bytes([len(device)]) + device.encode() + b"\x12"
    if healthy is not None:
        health = b"Healthy" if healthy else b"Unhealthy"
        start += bytes([len(health)]) + health
    return lambda data: start in data


def healthy(data: bytes) -> int:
    """How many Healthy devices are in a list."""
    return data.count(b"\x12\x07Healthy")
