"""Kubelet as the plugin reads it: PodResources' answers and the checkpoint, by script."""

import asyncio
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from doubles.cards import REGIONS
from fpga_plugin.kubernetes.kubelet.checkpoint import FILE_NAME
from fpga_plugin.kubernetes.kubelet.podresources import PodDevices, PodList
from fpga_plugin.kubernetes.names import PodUid, ResourceName

POD = PodUid("0a0a0a0a-0000-4000-8000-000000000001")


def entry(*devices: str, pod: str = POD, resource: str = REGIONS, **more: object) -> dict:
    """What one container holds of one resource, as the checkpoint has it."""
    return {
        "PodUID": pod,
        "ContainerName": "app",
        "ResourceName": resource,
        "DeviceIDs": {"-1": list(devices)},
        "AllocResp": "",
    } | more


def document(*entries: object, registered: Mapping[str, list[str]] | None = None) -> dict:
    """A checkpoint; nobody checks its checksum."""
    data = {"PodDeviceEntries": list(entries), "RegisteredDevices": dict(registered or {})}
    return {"Data": data, "Checksum": 3_000_000_000}


def write_checkpoint(directory: str | Path, *entries: object) -> None:
    """Replace the checkpoint, as kubelet does: by a rename."""
    write_text(directory, json.dumps(document(*entries)))


def write_text(directory: str | Path, text: str) -> None:
    """The same with anything in it."""
    path = os.path.join(directory, FILE_NAME)
    with open(path + ".new", "w") as file:
        file.write(text)
    os.replace(path + ".new", path)


class Kubelet:
    """Answers as `PodResourcesClient` hands them on, and a checkpoint.

    Attributes:
        held: what List shows: pods by name, each with a device of `resource`.
        namespace: of all of them.
        known: what it says is allocatable.
        error: raised by each answer, where set.
        instance: the kubelet instance that an answer is of.
        on_call: is notified of each question before it is answered.
        answers: cleared, questions wait.
        calls: how many there were.
        checkpoint: devices that it writes down when a list is sent again; none of them where
            `rewrites` is off.
        resends: how often one was.
    """

    def __init__(self, directory: str = "/nowhere", *held: tuple[str, str]) -> None:
        self.path = os.path.join(directory, FILE_NAME)
        self.resource = REGIONS
        self.held = set(held)
        self.namespace = "tenant"
        self.known: dict[ResourceName, frozenset[str]] = {}
        self.error: Exception | None = None
        self.instance = "1:1:1"
        self.on_call: Callable[[], None] = lambda: None
        self.answers = asyncio.Event()
        self.answers.set()
        self.calls = 0
        self.checkpoint: set[str] = set()
        self.rewrites = True
        self.resends = 0

    def show(self, *devices: str) -> None:
        """A pod has these, and nobody has any other."""
        self.held = {("pod", device) for device in devices}

    async def _called(self) -> None:
        self.calls += 1
        self.on_call()
        await self.answers.wait()
        if self.error is not None:
            raise self.error

    async def snapshot(self) -> PodList:
        await self._called()
        devices = tuple(
            PodDevices(self.namespace, pod, "app", self.resource, frozenset({device}))
            for pod, device in sorted(self.held)
        )
        return PodList(devices, self.instance)

    async def allocatable(self) -> Mapping[ResourceName, frozenset[str]]:
        await self._called()
        return self.known

    def write(self, devices: Iterable[str]) -> None:
        write_checkpoint(
            os.path.dirname(self.path), *(entry(each, resource=self.resource) for each in devices)
        )

    def resend(self) -> None:
        """A list is sent to it again."""
        self.resends += 1
        if self.rewrites:
            self.write(sorted(self.checkpoint))

    def spoil(self) -> None:
        """The same, and it writes what nobody can read."""
        self.resends += 1
        write_text(os.path.dirname(self.path), "{")
