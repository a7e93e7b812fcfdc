"""CDI files: what the container runtime puts into the containers of a claim.

One file a claim (cncf-tags/container-device-interface, spec 0.5.0, in which names may begin with a
digit), one device in it for each device of the claim. The directory is empty after a reboot, so the
files are written anew at each Prepare and at each start of the plugin. A runtime drops a file that
it does not understand, and a container whose device is in none does not start. What the operator
adds to containers (`workloads`) is in it too, as it was when the file was written. While that
cannot be read, a file that has the claim's devices already is not written anew: it would lose what
the operator adds, and so would each container that starts again.
"""

import contextlib
import os
import re
import threading
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog

from fpga_plugin.claims.calls import Allocation
from fpga_plugin.dra.names import device_name
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.hardware.grant import Grant
from fpga_plugin.ids import (
    ClaimUid,
    DeviceId,
    RegionId,
    Resource,
    ResourceName,
    device_order,
    numbered_variable,
    parse_claim_uid,
)
from fpga_plugin.ledger.records import Claim, Holder

if TYPE_CHECKING:
    from fpga_plugin.workloads.file import WorkloadsFile  # imports YAML: only where there is one

VERSION: Final = "0.5.0"

_ENCODER: Final = msgspec.json.Encoder(order="deterministic")


MAX_BYTES: Final = 1 << 20
"""Of a file that is looked at; ours have some KiB."""

log = structlog.get_logger()


class _Edits(msgspec.Struct):
    env: list[str] = []


class _Device(msgspec.Struct):
    name: str
    containerEdits: _Edits  # noqa: N815  # the specification's own name

    def core(self) -> tuple[str, list[str]]:
        """Which device it is, and its nodes as its variables tell them: workloads set none."""
        return self.name, [line for line in self.containerEdits.env if _TELLING.match(line)]


class _File(msgspec.Struct):
    """Of a file as it was written what tells the devices."""

    devices: list[_Device]


# Made at import: see pods/checkpoint.py.
_FILE: Final = msgspec.json.Decoder(_File)


class CdiError(FpgaPluginError):
    """A file for the container runtime cannot be written."""


class CdiFiles:
    """Blocks: use it in a thread. Calls may overlap, and follow one another then.

    Args:
        directory: where the runtime looks for generated files.
        driver: our name, which is in the names of files and devices.
        workloads: what containers get beside their devices; None: nothing.
    """

    def __init__(
        self, directory: str, driver: str, workloads: "WorkloadsFile | None" = None
    ) -> None:
        self._directory = directory
        self._workloads = workloads
        self.driver = driver
        self._one = threading.Lock()
        self._name = re.compile(rf"k8s\.{re.escape(driver)}-claim_([A-Za-z0-9-]+)\.json")

    def path(self, uid: ClaimUid, driver: str = "") -> str:
        """Where the file of a claim is that is allocated now, under our name or a former one."""
        parse_claim_uid(uid)  # it came by a message: never a path of its own
        return os.path.join(self._directory, f"k8s.{driver or self.driver}-claim_{uid}.json")

    def of(self, holder: Holder) -> str:
        """Where a claim's file is, or would be."""
        return holder.file or self.path(holder.uid)

    def write(self, holder: Holder, claims: Iterable[Claim]) -> None:
        """Make or replace a claim's file.

        Raises:
            CdiError: it cannot be written.
        """
        path = self.of(holder)
        # The runtime reads *.json and *.yaml only.
        new = f"{path}.new"
        planned = self._content(holder, claims)
        content = _ENCODER.encode(planned)
        try:
            with self._one:
                if (problem := self._problem) and _has(path, planned):
                    return
                self._check_reached(path)
                os.makedirs(self._directory, exist_ok=True)
                with open(new, "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(new, path)
        except OSError as error:
            raise CdiError(
                f"{path} cannot be written: {error.strerror}",
                hint="mount the node's directory for CDI files there, and see FPGA_PLUGIN_CDI_DIR",
            ) from error
        if problem:
            log.warning(
                "claim's file has not what the workloads file may add",
                claim=holder.uid,
                error=problem,
                hint="mend the workloads file; containers of new claims get it then",
            )

    @property
    def _problem(self) -> str:
        """Why it is not known what the operator adds to containers; empty: it is."""
        if self._workloads is None or self._workloads.content.entries:
            return ""  # by the last good version
        return self._workloads.problem

    def remove(self, path: str) -> None:
        """No container starts with the devices of the claim whose file it is.

        Raises:
            CdiError: the file may still be there.
        """
        with self._one:
            self._check_reached(path)
            try:
                os.unlink(path)
            except FileNotFoundError:
                return
            except OSError as error:
                raise CdiError(f"{path} cannot be removed: {error.strerror}") from error

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
            try:
                names = os.listdir(self._directory)
            except OSError:
                return
            for name in names:
                match = self._name.fullmatch(name.removesuffix(".new"))
                if match and (name.endswith(".new") or match[1] not in uids):
                    with contextlib.suppress(OSError):
                        os.unlink(os.path.join(self._directory, name))

    def _content(self, holder: Holder, claims: Iterable[Claim]) -> Mapping[str, Any]:
        granted = {claim.device: claim for claim in claims}
        of_requests: dict[str, list[Claim]] = {}
        for device in holder.devices:
            for request in holder.requests.get(device, ()):
                of_requests.setdefault(request, []).append(granted[device])
        variables = {request: _variables(request, mine) for request, mine in of_requests.items()}
        return {
            "cdiVersion": VERSION,
            "kind": _kind(holder.driver),
            "devices": [
                {
                    "name": f"{holder.uid}-{device_name(device)}",
                    "containerEdits": _edits(
                        self._allocation(granted[device]),
                        [variables[request] for request in holder.requests.get(device, ())],
                    ),
                }
                for device in holder.devices
            ],
        }

    def _allocation(self, claim: Claim) -> Allocation:
        resource = Resource.parse(claim.resource)
        given = Allocation.of(resource, claim.grants)
        if self._workloads is None:
            return given
        return given.plus(self._workloads.content.extras(resource))


def device_id(holder: Holder, device: DeviceId) -> str:
    """What kubelet tells the runtime to inject for a device of a claim."""
    return f"{_kind(holder.driver)}={holder.uid}-{device_name(device)}"


def _kind(driver: str) -> str:
    return f"k8s.{driver}/claim"


def request_variable(request: str) -> str:
    """`FPGA_REQUEST_<REQUEST NAME>`: the variable in which a container finds a request's nodes."""
    return "FPGA_REQUEST_" + "".join(
        c if c.isascii() and c.isalnum() else "_" for c in request.upper()
    )


def _has(path: str, planned: Mapping[str, Any]) -> bool:
    """Whether a file has the devices that are planned, whatever else it adds to containers."""
    try:
        with open(path, "rb") as file:
            there = _FILE.decode(file.read(MAX_BYTES))
    except (OSError, msgspec.DecodeError):
        return False
    return [one.core() for one in there.devices] == [
        one.core() for one in msgspec.convert(planned, _File).devices
    ]


def _variables(request: str, claims: Iterable[Claim]) -> Mapping[str, str]:
    """What a container finds all devices of a request by, as in one answer of the first door.

    Each of these devices sets them to the same, so it does not matter which is injected last.
    """
    grants: dict[RegionId, Grant] = {}
    of_resources: dict[ResourceName, dict[RegionId, Grant]] = {}
    for claim in claims:
        grants |= claim.grants
        of_resources.setdefault(claim.resource, {}).update(claim.grants)
    envs: dict[str, str] = {}
    for name, mine in of_resources.items():
        resource = Resource.parse(name)
        envs[resource.variable] = Allocation.of(resource, mine).envs[resource.variable]
    regions = sorted(grants, key=device_order)
    envs |= {numbered_variable(n): str(grants[region]) for n, region in enumerate(regions, 1)}
    envs[request_variable(request)] = ",".join(str(grants[region]) for region in regions)
    return envs


def _edits(given: Allocation, of_requests: Iterable[Mapping[str, str]]) -> Mapping[str, Any]:
    # What tells a device by number or kind is the requests': by itself it knows no other device.
    env = {k: v for k, v in given.envs.items() if not _OF_REQUEST.fullmatch(k)}
    for variables in of_requests:
        env |= variables
    edits: dict[str, Any] = {
        "env": [f"{key}={value}" for key, value in sorted(env.items())],
        "deviceNodes": [
            {"path": node, "hostPath": node, "permissions": "rw"} for node in given.nodes
        ],
    }
    if given.mounts:
        edits["mounts"] = [
            {
                "hostPath": mount.host_path,
                "containerPath": mount.container_path,
                # As kubelet asks for by the first door.
                "options": ["rbind", "rprivate", "ro" if mount.read_only else "rw"],
            }
            for mount in given.mounts
        ]
    return edits


_OF_REQUEST: Final = re.compile(r"FPGA_DEVICE_[0-9]+|FPGA_DEVICES_.*", re.ASCII)

_TELLING: Final = re.compile(r"FPGA_(?!DEVICE_[0-9]+=|DEVICES_)", re.ASCII)
"""Lines of a device's variables that tell its nodes; the others repeat them in another order."""
