"""CDI files: what the container runtime puts into the containers of a claim.

One file a claim (cncf-tags/container-device-interface, spec 0.5.0, in which names may begin with a
digit), one device in it for each device of the claim. The directory is empty after a reboot, so the
files are written again at each Prepare and at each start of the plugin. A runtime drops a file that
it does not understand, and a container whose device is in none does not start.
"""

import os
import re
import threading
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import msgspec

from fpga_plugin.allocation.calls import AllocateAnswer
from fpga_plugin.allocation.journal.records import Allocation, ClaimOwner
from fpga_plugin.dra.metadata import MetadataFiles, by_request, remove_files
from fpga_plugin.dra.names import device_name
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.hardware.grant import Grant, Mount
from fpga_plugin.hardware.model import Card
from fpga_plugin.host.atomic_file import replace_file
from fpga_plugin.ids import DeviceId, RegionId, Resource, device_order, numbered_variable
from fpga_plugin.kubernetes.names import ClaimUid, ResourceName, parse_claim_uid

VERSION: Final = "0.5.0"

_ENCODER: Final = msgspec.json.Encoder(order="deterministic")


class CdiError(FpgaPluginError):
    """A file for the container runtime cannot be written."""


class CdiFiles:
    """Writes and removes CDI files. Blocks: use it in a thread. Overlapping calls run in turn.

    Args:
        directory: where the runtime looks for generated files.
        driver: our name, which is in the names of files and devices.
        metadata: files that describe the devices to their containers; None: none.
    """

    def __init__(self, directory: str, driver: str, metadata: MetadataFiles | None = None) -> None:
        self._directory = directory
        self._metadata = metadata
        self.driver = driver
        self._one = threading.Lock()
        self._name = re.compile(
            rf"\.?k8s\.{re.escape(driver)}-claim_(?P<uid>[A-Za-z0-9-]+)\.json(?P<half>\.tmp|\.new)?"
        )

    def path(self, uid: ClaimUid, driver: str = "") -> str:
        """Where the file of a claim is that is allocated now, under our name or a former one."""
        parse_claim_uid(uid)  # it came by a message: never a path of its own
        return os.path.join(self._directory, f"k8s.{driver or self.driver}-claim_{uid}.json")

    def of(self, owner: ClaimOwner) -> str:
        """Where a claim's file is, or would be."""
        return owner.file or self.path(owner.uid)

    def write(
        self,
        owner: ClaimOwner,
        allocations: Collection[Allocation],
        cards: Mapping[DeviceId, Card],
    ) -> None:
        """Make or replace a claim's file, and before it what its containers read.

        `cards`: of the claim's devices.

        Raises:
            FpgaPluginError: one cannot be written.
        """
        path = self.of(owner)
        try:
            with self._one:
                mounts = {}
                if self._metadata is not None:
                    mounts = self._metadata.write(owner, allocations, cards)
                content = _ENCODER.encode(self._content(owner, allocations, mounts))
                self._check_reached(path)
                os.makedirs(self._directory, exist_ok=True)
                # The runtime reads *.json and *.yaml only, and no temporary file.
                replace_file(path, [content], mode=0o644)
        except OSError as error:
            raise CdiError(
                f"{path} cannot be written: {error.strerror}",
                hint="mount the node's directory for CDI files there, and see FPGA_PLUGIN_CDI_DIR",
            ) from error

    def remove(self, path: str, uid: ClaimUid) -> None:
        """No container starts with the devices of a claim; its file is at this path.

        Raises:
            CdiError: the file may still be there.
        """
        with self._one:
            self._check_reached(path)
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                raise CdiError(f"{path} cannot be removed: {error.strerror}") from error
            if self._metadata is not None:
                self._metadata.remove(lambda of: of == uid)

    def _check_reached(self, path: str) -> None:
        """Whether the directory is seen in which a claim's file is, or may be."""
        directory = os.path.dirname(path)
        if directory != self._directory and not os.path.isdir(directory):
            raise CdiError(
                f"{path} cannot be reached: {directory} is not there",
                hint="FPGA_PLUGIN_CDI_DIR was another directory when the claim was prepared: mount"
                " that one, too, until the claim has ended",
            )

    def keep(self, uids: Collection[ClaimUid]) -> None:
        """Remove the files of all other claims, and what was left half written."""
        with self._one:
            if self._metadata is not None:
                self._metadata.remove(lambda of: of not in uids)
            remove_files(
                self._directory,
                self._name,
                lambda match: bool(match["half"]) or match["uid"] not in uids,
            )

    def _content(
        self, owner: ClaimOwner, allocations: Iterable[Allocation], mounts: Mapping[str, Mount]
    ) -> Mapping[str, Any]:
        granted = {allocation.device: allocation for allocation in allocations}
        variables = {
            request: _variables(request, [granted[device] for device in devices])
            for request, devices in by_request(owner).items()
        }
        return {
            "cdiVersion": VERSION,
            "kind": _kind(owner.driver),
            "devices": [
                {
                    "name": f"{owner.uid}-{device_name(device)}",
                    "containerEdits": _edits(
                        AllocateAnswer.of(
                            Resource.parse(granted[device].resource), granted[device].grants
                        ),
                        [variables[request] for request in owner.requests.get(device, ())],
                        [mounts[name] for name in owner.requests.get(device, ()) if name in mounts],
                    ),
                }
                for device in owner.devices
            ],
        }


def device_id(owner: ClaimOwner, device: DeviceId) -> str:
    """The CDI device that kubelet has the runtime inject for a device of a claim."""
    return f"{_kind(owner.driver)}={owner.uid}-{device_name(device)}"


def _kind(driver: str) -> str:
    return f"k8s.{driver}/claim"


def request_variable(request: str) -> str:
    """`FPGA_REQUEST_<REQUEST NAME>`: the variable in which a container finds a request's nodes."""
    return "FPGA_REQUEST_" + re.sub("[^A-Z0-9]", "_", request.upper())


def _variables(request: str, allocations: Iterable[Allocation]) -> Mapping[str, str]:
    """What a container finds all devices of a request by, as in one answer to Allocate.

    Each of these devices sets them to the same, so it does not matter which is injected last.
    """
    grants: dict[RegionId, Grant] = {}
    of_resources: dict[ResourceName, dict[RegionId, Grant]] = {}
    for allocation in allocations:
        grants |= allocation.grants
        of_resources.setdefault(allocation.resource, {}).update(allocation.grants)
    envs: dict[str, str] = {}
    for name, mine in of_resources.items():
        resource = Resource.parse(name)
        envs[resource.variable] = AllocateAnswer.of(resource, mine).envs[resource.variable]
    regions = sorted(grants, key=device_order)
    envs |= {numbered_variable(n): str(grants[region]) for n, region in enumerate(regions, 1)}
    envs[request_variable(request)] = ",".join(str(grants[region]) for region in regions)
    return envs


def _edits(
    given: AllocateAnswer, of_requests: Iterable[Mapping[str, str]], of_metadata: Iterable[Mount]
) -> Mapping[str, Any]:
    # What tells a device by number or kind is its requests': by itself it knows no other device.
    env = {**given.envs}
    for variables in of_requests:
        env |= variables
    edits: dict[str, Any] = {
        "env": [f"{key}={value}" for key, value in sorted(env.items())],
        "deviceNodes": [
            {"path": node, "hostPath": node, "permissions": "rw"} for node in given.nodes
        ],
    }
    # The runtime mounts a path once, although each device of a request names it.
    if mounts := [*given.mounts, *of_metadata]:
        edits["mounts"] = [
            {
                "hostPath": mount.host_path,
                "containerPath": mount.container_path,
                # As kubelet asks for with the device plugin API.
                "options": ["rbind", "rprivate", "ro" if mount.read_only else "rw"],
            }
            for mount in mounts
        ]
    return edits
