"""A claim as the API server has it: our devices in it, its pods and its config.

NodePrepareResources only names a claim. This module reads it, and accepts it only with the uid that
kubelet named. A claim that the scheduler made for a pod's extended resources has no config but the
class's: what its containers ask for stands in their environment, as with the device plugin API.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote as url

import msgspec

from fpga_plugin.allocation.journal.records import ClaimOwner
from fpga_plugin.dra.names import parse_device_name
from fpga_plugin.dra.regionconfig import RegionConfig, parse_config
from fpga_plugin.errors import NoSourceError, RefusedError, UnknownDeviceError, quote
from fpga_plugin.ids import DeviceId
from fpga_plugin.kubernetes.apiserver.rest import ApiServerError, session
from fpga_plugin.kubernetes.kubelet.dra_record import RecordedClaim
from fpga_plugin.kubernetes.names import ClaimUid, PodName, PodUid, parse_name, parse_pod_uid

CALL_SECONDS: Final = 5.0
"""For one question; Prepare has 40 s for everything."""

POD_CLAIM: Final = "resource.kubernetes.io/pod-claim-name"
"""Annotation of a claim that was made by a template: what its pod calls it (resource/v1)."""

EXTENDED: Final = "resource.kubernetes.io/extended-resource-claim"
"""Annotation of a claim that the scheduler made for a pod's extended resources (KEP-5004)."""

MAX_RESULTS: Final = 32
"""Devices of a claim (resource/v1, AllocationResultsMaxSize)."""


class NoSuchClaimError(RefusedError):
    """The API server itself says that there is no such claim any more, or none of this node's."""


@dataclass(frozen=True, slots=True)
class ClaimRef:
    """A claim as kubelet names it.

    Attributes:
        uid: of the claim.
        namespace: of the claim and its pods.
        name: of the claim.
    """

    uid: ClaimUid
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"claim {self.full_name}"

    @classmethod
    def of(cls, claim: ClaimOwner | RecordedClaim) -> "ClaimRef":
        """A claim that the ledger, or kubelet's record, has."""
        return cls(claim.uid, claim.namespace, claim.name)

    @property
    def full_name(self) -> str:
        """Namespace and name."""
        return f"{self.namespace}/{self.name}"

    @property
    def logged(self) -> dict[str, str]:
        """Values of a log line."""
        return {"claim": self.uid, "namespace": self.namespace, "name": self.name}


@dataclass(frozen=True, slots=True)
class Config:
    """An entry of the allocation's config, for us.

    Attributes:
        from_class: of a DeviceClass; else of the claim.
        requests: to which it applies; empty: to all.
        config: what it says.
    """

    from_class: bool
    requests: frozenset[str]
    config: RegionConfig


@dataclass(frozen=True, slots=True)
class ResourceClaim:
    """A claim with devices of ours.

    Attributes:
        owner: which claim, and its devices as they are allocated now.
        configs: in order; those of classes come first.
        pods: for which it is reserved, those known now.
        pod: the pod whose extended resources it stands for; None: it is no such claim.
        names: the pods' valid names.
        others: whether it is reserved for a consumer that is no pod, such as a group of pods: it
            counts as one that lives.
    """

    owner: ClaimOwner
    configs: tuple[Config, ...] = ()
    pods: frozenset[PodUid] = frozenset()
    pod: tuple[PodName, PodUid] | None = None
    names: Mapping[PodUid, PodName] = field(default_factory=dict, hash=False)
    others: bool = False

    @property
    def users(self) -> frozenset[PodUid]:
        """All pods known now that may use it."""
        return self.pods if self.pod is None else self.pods | {self.pod[1]}

    def of(self, device: DeviceId, *, from_class: bool) -> list[RegionConfig]:
        """The entries that apply to a device: they name its request, with a subrequest or not."""
        requests = self.owner.requests[device]
        names = {*requests, *(self.owner.subrequests.get(one, one) for one in requests)}
        return [
            entry.config
            for entry in self.configs
            if entry.from_class is from_class and (not entry.requests or entry.requests & names)
        ]


class _Opaque(msgspec.Struct):
    driver: str = ""
    parameters: msgspec.Raw = msgspec.Raw(b"null")


class _Config(msgspec.Struct):
    source: str = ""
    requests: list[str] | None = None
    opaque: _Opaque | None = None


class _Result(msgspec.Struct):
    request: str
    driver: str
    pool: str
    device: str
    adminAccess: bool | None = None  # noqa: N815  # the API's own name


class _Devices(msgspec.Struct):
    results: list[_Result] | None = None
    config: list[_Config] | None = None


class _Allocation(msgspec.Struct):
    devices: _Devices = msgspec.field(default_factory=_Devices)


class _Reference(msgspec.Struct):
    """An owner by its kind, a consumer by its resource."""

    name: str = ""
    uid: str = ""
    kind: str = ""
    apiVersion: str = ""  # noqa: N815  # the API's own name
    resource: str = ""
    apiGroup: str = ""  # noqa: N815  # the API's own name


class _Status(msgspec.Struct):
    allocation: _Allocation | None = None
    reservedFor: list[_Reference] | None = None  # noqa: N815  # the API's own name


class _Metadata(msgspec.Struct):
    uid: str
    annotations: dict[str, str] | None = None
    ownerReferences: list[_Reference] | None = None  # noqa: N815  # the API's own name


class _Claim(msgspec.Struct):
    metadata: _Metadata
    status: _Status = msgspec.field(default_factory=_Status)


_CLAIM: Final = msgspec.json.Decoder(_Claim)


class ClaimReader:
    """Reads claims at the API server.

    Args:
        kubeconfig: path of a file with credentials; None: the pod's service account.
        driver: our name.
        node: ours; the name of its pool, too.
        named: called with the names of a claim's pods.
    """

    def __init__(
        self,
        kubeconfig: str | None,
        *,
        driver: str,
        node: str,
        named: Callable[[Mapping[PodUid, PodName]], None] = lambda _: None,
    ) -> None:
        self._kubeconfig = kubeconfig
        self._driver = driver
        self._node = node
        self._named = named

    async def get(self, ref: ClaimRef, driver: str = "") -> ResourceClaim:
        """The claim, as it is now; `driver`: under whose name it was allocated, if not ours.

        Raises:
            NoSuchClaimError: there is none of this uid.
            NoSourceError: the API server does not say.
            FpgaPluginError: it cannot be served.
        """
        path = (
            f"/apis/resource.k8s.io/v1/namespaces/{url(ref.namespace, safe='')}"
            f"/resourceclaims/{url(ref.name, safe='')}"
        )
        try:
            async with session(self._kubeconfig, seconds=CALL_SECONDS) as server:
                body = await server.call("GET", path)
        except ApiServerError as error:
            if error.not_found:
                raise NoSuchClaimError(f"{ref} is not there any more") from error
            raise
        claim = read_claim(body, ref, driver=driver or self._driver, node=self._node)
        self._named(claim.names)
        return claim


def read_claim(body: bytes, ref: ClaimRef, *, driver: str, node: str) -> ResourceClaim:
    """The API server's answer.

    Raises:
        NoSuchClaimError: it is another claim of this name, not allocated, or elsewhere.
        RefusedError: it has one with access that nobody gets.
        FpgaPluginError: it is not understood.
    """
    try:
        claim = _CLAIM.decode(body)
        consumers = claim.status.reservedFor or ()
        pods = [one for one in consumers if (one.apiGroup, one.resource) == ("", "pods")]
        uids = frozenset(parse_pod_uid(one.uid) for one in pods)
        pod = _pod(claim, ref)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise NoSourceError(f"{ref} is not understood: {quote(error)}") from error
    if claim.metadata.uid != ref.uid:
        raise NoSuchClaimError(f"{ref} is another one by now: its uid is not {ref.uid}")
    allocation = claim.status.allocation
    if allocation is None:
        raise NoSuchClaimError(f"{ref} is not allocated")
    results = [one for one in allocation.devices.results or () if one.driver == driver]
    if not results:
        raise NoSuchClaimError(f"{ref} has 0 devices of {driver}")
    if all(one.pool != node for one in results):
        raise NoSuchClaimError(
            f"{ref} is allocated in pool {quote(results[0].pool)}, and this is node {node}"
        )
    if len(results) > MAX_RESULTS:
        raise RefusedError(f"{ref} has {len(results)} devices of {driver}")
    names = {}
    for one in pods:
        with suppress(ValueError):  # a name is only shown
            names[parse_pod_uid(one.uid)] = PodName(ref.namespace, parse_name(one.name))
    # A device of several requests is listed for each.
    requests: dict[DeviceId, dict[str, None]] = {}
    subrequests: dict[str, str] = {}
    for result in results:
        request, slash, _ = result.request.partition("/")
        requests.setdefault(_device(result, ref, node), {})[request] = None
        if slash:
            subrequests[request] = result.request
    return ResourceClaim(
        ClaimOwner(
            uid=ref.uid,
            namespace=ref.namespace,
            name=ref.name,
            devices=tuple(requests),
            requests={device: tuple(of) for device, of in requests.items()},
            driver=driver,
            subrequests=subrequests,
            pod_claim=(claim.metadata.annotations or {}).get(POD_CLAIM, ""),
        ),
        tuple(
            Config(
                one.source == "FromClass",
                frozenset(one.requests or ()),
                parse_config(bytes(one.opaque.parameters), from_class=one.source == "FromClass"),
            )
            for one in allocation.devices.config or ()
            if one.opaque is not None and one.opaque.driver == driver
        ),
        uids,
        pod,
        names,
        others=len(uids) < len(consumers),
    )


def _device(result: _Result, ref: ClaimRef, node: str) -> DeviceId:
    if result.adminAccess:
        raise RefusedError(
            f"{ref}: request {quote(result.request)} has adminAccess, and the scheduler does not"
            " count it: its device may be somebody's",
            hint="ask without adminAccess",
        )
    if result.pool != node:
        raise RefusedError(f"{ref} has devices of pool {quote(result.pool)} and of node {node}")
    try:
        return parse_device_name(result.device)
    except ValueError as error:
        raise UnknownDeviceError(f"{ref}: {quote(result.device)} is {error}") from error


def _pod(claim: _Claim, ref: ClaimRef) -> tuple[PodName, PodUid] | None:
    """The pod whose extended resources a claim stands for.

    Raises:
        ValueError: its owner has no proper name.
    """
    if (claim.metadata.annotations or {}).get(EXTENDED) != "true":
        return None
    for owner in claim.metadata.ownerReferences or ():
        if (owner.apiVersion, owner.kind) == ("v1", "Pod"):
            return PodName(ref.namespace, parse_name(owner.name)), parse_pod_uid(owner.uid)
    return None
