"""Device metadata: what a container reads about the devices of its claim (KEP-5304).

One file for each request of a claim, mounted where
k8s.io/dynamic-resource-allocation/api/metadata says. It is a stream of JSON objects, the same in
each version of the API, the newest first. Whoever passes a device on needs it: KubeVirt takes from
it the PCI address of the function that a virtual machine gets. So `pciBusID` is here the one
function by which a container reaches its region (a slot with one function), and missing where there
is none or several; in the ResourceSlice it is the card's.

The files lie below the driver's directory in kubelet's root, which has the same path on the node
and in the plugin's pod: the container runtime mounts them from there.
"""

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

import msgspec

from fpga_plugin.allocation.journal.records import Allocation, ClaimOwner
from fpga_plugin.dra.attributes import PCI_BUS_ID, as_json, attributes
from fpga_plugin.dra.names import device_name
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.hardware.grant import Mount
from fpga_plugin.hardware.model import Card
from fpga_plugin.host.atomic_file import replace_file
from fpga_plugin.ids import DeviceId, functions_variable
from fpga_plugin.kubernetes.names import parse_claim_uid

VERSIONS: Final = ("v1beta1", "v1alpha1")
"""Kubernetes 1.37 reads both, 1.36 and KubeVirt 1.8 the latter."""

_GROUP: Final = "metadata.resource.k8s.io"
_CONTAINER_DIRECTORY: Final = "/var/run/kubernetes.io/dra-device-attributes"

_PART: Final = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)
"""A name that may be a part of a path: a DNS subdomain, which is never `..`."""

_FILE: Final = re.compile(r"\.?(?P<uid>[A-Za-z0-9-]+)_[a-z0-9.-]+\.json(?P<half>\.tmp)?", re.ASCII)

_ENCODER: Final = msgspec.json.Encoder(order="deterministic")


class MetadataError(FpgaPluginError):
    """A file about a claim's devices cannot be written."""


class MetadataFiles:
    """Writes and removes metadata files. Blocks: use it in a thread, one call at a time.

    Args:
        directory: of the files, the same path on the node.
        node: ours, which is the name of the pool, too.
    """

    def __init__(self, directory: str, node: str) -> None:
        self._directory = directory
        self._node = node

    def write(
        self, owner: ClaimOwner, claims: Collection[Allocation], cards: Mapping[DeviceId, Card]
    ) -> dict[str, Mount]:
        """Make or replace a claim's files; where each request's containers find theirs.

        Args:
            owner: the claim.
            claims: what it has.
            cards: of its devices.

        Raises:
            MetadataError: one cannot be written.
        """
        mounts = {}
        try:
            for request, devices in by_request(owner).items():
                if (seen := _container_path(owner, request)) is None:
                    continue
                path = os.path.join(self._directory, f"{owner.uid}_{request}.json")
                told = [self._device(owner, one, cards[one.device]) for one in claims
                        if one.device in devices]  # fmt: skip
                os.makedirs(self._directory, 0o755, exist_ok=True)
                replace_file(path, _stream(owner, request, told), mode=0o644)
                mounts[request] = Mount(path, seen)
        except OSError as error:
            raise MetadataError(
                f"metadata of claim {owner.full_name} cannot be written to {self._directory}:"
                f" {error.strerror}",
                hint="mount the driver's directory of kubelet's root there, and look at its disk",
            ) from error
        return mounts

    def remove(self, unwanted: Callable[[str], bool]) -> None:
        """Remove the files of claims by uid; a file that stays names devices, and gives none."""
        remove_files(self._directory, _FILE, lambda match: unwanted(match["uid"]))

    def _device(self, owner: ClaimOwner, claim: Allocation, card: Card) -> dict[str, Any]:
        told = attributes(claim.device, card.interface_id, card)
        del told[PCI_BUS_ID]
        functions = [
            function
            for region, grant in claim.grants.items()
            for function in grant.env.get(functions_variable(region), "").split(",")
            if function
        ]
        if len(functions) == 1:
            told[PCI_BUS_ID] = functions[0]
        return {
            "driver": owner.driver,
            "pool": self._node,
            "name": device_name(claim.device),
            "attributes": {name: as_json(value) for name, value in told.items()},
        }


def remove_files(
    directory: str, names: re.Pattern[str], unwanted: Callable[[re.Match[str]], bool]
) -> None:
    """Remove what has such a name and is unwanted, as far as that is possible."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            if (match := names.fullmatch(name)) and unwanted(match):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(directory, name))


def by_request(owner: ClaimOwner) -> dict[str, list[DeviceId]]:
    """The devices of each request of a claim, in the claim's order."""
    found: dict[str, list[DeviceId]] = {}
    for device in owner.devices:
        for request in owner.requests.get(device, ()):
            found.setdefault(request, []).append(device)
    return found


def _container_path(owner: ClaimOwner, request: str) -> str | None:
    """The path in a container; None: one of the names cannot be part of a path.

    If a template made the claim, the container knows only its pod's name for the claim, not the
    claim's own.
    """
    parse_claim_uid(owner.uid)
    claim = owner.pod_claim or owner.name
    if not all(map(_PART.fullmatch, (claim, request, owner.driver))):
        return None
    directory = "resourceclaimtemplates" if owner.pod_claim else "resourceclaims"
    return f"{_CONTAINER_DIRECTORY}/{directory}/{claim}/{request}/{owner.driver}-metadata.json"


def _stream(owner: ClaimOwner, request: str, devices: list[dict[str, Any]]) -> Iterator[bytes]:
    content: dict[str, Any] = {
        "kind": "DeviceMetadata",
        "metadata": {
            "name": owner.name,
            "namespace": owner.namespace,
            "uid": owner.uid,
            "generation": 1,
        },
        "requests": [{"name": owner.subrequests.get(request, request), "devices": devices}],
    }
    if owner.pod_claim:
        content["podClaimName"] = owner.pod_claim
    for version in VERSIONS:
        yield _ENCODER.encode({"apiVersion": f"{_GROUP}/{version}", **content}) + b"\n"
