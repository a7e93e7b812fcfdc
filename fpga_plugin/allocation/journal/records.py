"""What the ledger remembers: allocations and the condition of regions, as values.

These are also the rows of the journal: everything in them outlives the process. What the types say
of sizes and forms holds for what is read from there (`rows`); between fields, `rows` looks itself.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, TypeAlias

from msgspec import UNSET, Meta, UnsetType

from fpga_plugin.hardware.grant import DeviceNumber, Grant, Path
from fpga_plugin.ids import AfuId, CardId, DeviceId, InterfaceId, RegionId
from fpga_plugin.kubernetes.cgroup import Cgroup
from fpga_plugin.kubernetes.names import ClaimUid, PodUid, ResourceName

Text: TypeAlias = Annotated[str, Meta(max_length=1 << 16)]
"""Far more than the longest reason."""

Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 32)]
"""PreStarts or PostStops of one allocation."""

Number: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]
"""Of an allocation, counted up in one journal."""

Time: TypeAlias = Annotated[float, Meta(ge=0, lt=1e11)]
"""Seconds since 1970, up to the year 5138; Python's dates end later."""

Uid: TypeAlias = Annotated[PodUid, Meta(min_length=1, max_length=1 << 16)]
"""A pod's uid; what may be in it was looked at where kubelet told it."""

Name: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?\Z")]
"""Of a namespace, pod or container (`kubernetes.names`)."""

Afu: TypeAlias = Annotated[AfuId, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Interface: TypeAlias = Annotated[InterfaceId, Meta(pattern=r"^[0-9a-f]{32}\Z")]


class Ownership(enum.StrEnum):
    """Who has a region: nobody, an owner, or an owner of whom a PreStart succeeded."""

    FREE = "FREE"
    CLAIMED = "CLAIMED"
    STARTED = "STARTED"


class Condition(enum.StrEnum):
    """What is on a region (docs/architecture.md, "Two facts for each region")."""

    BLANK = "BLANK"
    PROGRAMMED = "PROGRAMMED"
    DIRTY = "DIRTY"
    SCRUBBING = "SCRUBBING"
    FAULTED = "FAULTED"
    UNBLANKED = "UNBLANKED"


CLEAN = frozenset({Condition.BLANK, Condition.UNBLANKED})
"""Scrubbed since the last owner; UNBLANKED only ever arises under best-effort scrubbing."""


class CardMode(enum.StrEnum):
    """How a card is used; derived from its allocations, never stored."""

    FREE = "free"
    PARTITIONED = "partitioned"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class RegionRecord:
    """One region's condition.

    Attributes:
        region: which region.
        condition: what is on it.
        reason: why it is FAULTED, or what made it DIRTY; for people.
        afu_id: what its AFU id read as when the condition was set; None if not known.
    """

    region: RegionId
    condition: Condition
    reason: Text = ""
    afu_id: Afu | None = None


@dataclass(frozen=True, slots=True)
class Allocation:
    """A device and its owner: what Allocate or Prepare granted.

    Attributes:
        device: the card or region.
        resource: the resource under which it was granted.
        grants: what Allocate answered for each region (invariant 10).
        started: a PreStart succeeded.
        prestart_seen: a PreStart was seen since the last Allocate, successful or not.
        missed_prestart: a container may have run without a PreStart that the plugin saw. Kubelet
            sends none after its restart until the plugin registers again; the node may have
            rebooted; a damaged journal may have lost it.
        pod: the owner, once kubelet's records name it.
        instance: the kubelet instance in which the allocation was made; empty where PreStarts and
            PostStops cannot be compared any more, since some may not have been seen.
        prestarts: PreStarts seen, failed ones included: a forked kubelet has created the container
            by then and will report its removal. Begins with the PostStops of earlier allocations
            that are still pending.
        poststops: PostStops seen.
        number: no other allocation in the journal has it, nor ever will.
        since: Unix time of the grant, for people; 0 where it is not known.
    """

    device: DeviceId
    resource: ResourceName
    grants: Mapping[RegionId, Grant] = field(hash=False)
    started: bool = False
    prestart_seen: bool = False
    missed_prestart: bool = False
    pod: Uid | None = None
    instance: Text = ""
    prestarts: Count = 0
    poststops: Count = 0
    number: Number = field(default=0, compare=False)
    since: Time = field(default=0.0, compare=False)

    @property
    def ownership(self) -> Ownership:
        """CLAIMED or STARTED."""
        return Ownership.STARTED if self.started else Ownership.CLAIMED

    @property
    def used(self) -> bool:
        """Whether a container of the owner may have had the device.

        Else none can have it before its PreStart is answered with OK: kubelet asks for one.
        """
        return self.started or self.missed_prestart


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a ResourceClaim asked for a region, and what came of it: compared, never hashed.

    Attributes:
        interface_id: for which the bitstream is built; None: blank.
        bitstream: which file of the store; None: blank.
        afu_id: what the region read as; None: blank.
        clock: user clock in MHz; None: the default.
        debug: whether port errors are logged.
    """

    interface_id: Interface | None = None
    bitstream: Text | None = None
    afu_id: Afu | None = None
    clock: Count | None = None
    debug: bool = False


@dataclass(frozen=True, slots=True)
class ClaimOwner:
    """A ResourceClaim that owns devices (DRA); each of them has an `Allocation` besides.

    Attributes:
        uid: of the claim.
        namespace: of the claim and its pods.
        name: of the claim.
        devices: that were allocated to it.
        requests: for which of the claim's requests each of them is.
        subrequests: the name with its subrequest of each request that has any (`main/sub`).
        pod_claim: what the pod calls the claim for which it was made by a template;
            empty: none.
        driver: under whose name it was allocated, which is that of kubelet's record of it, too.
        file: path of its CDI file.
        boot: of the node, in which it was prepared; empty: it is not.
        prepared: what its regions were prepared for; empty: not known.
        ended: kubelet ended it, and what it had may not be clean yet.
    """

    uid: ClaimUid
    namespace: Text
    name: Text
    devices: tuple[DeviceId, ...]
    requests: Mapping[DeviceId, tuple[Text, ...]] = field(hash=False)
    driver: Text = ""
    file: Text = ""
    boot: Text = ""
    prepared: Mapping[RegionId, Prepared] = field(default_factory=dict, hash=False)
    ended: bool = False
    subrequests: Mapping[Text, Text] = field(default_factory=dict, hash=False)
    pod_claim: Text = ""

    @property
    def full_name(self) -> str:
        """Namespace and name."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class TenancyKey:
    """Which tenancy.

    Attributes:
        region: that was granted.
        allocation: by which allocation (`Allocation.number`): each Allocate begins another tenancy,
            also for a pod of the same uid, as a static pod that comes again.
        pod: whose processes; None: kubelet's records have not named the pod.
    """

    region: RegionId
    allocation: Number
    pod: Uid | None


@dataclass(frozen=True, slots=True)
class Tenancy:
    """A pod's processes may have a region's device nodes open.

    It begins at Allocate, or for each pod of a ResourceClaim, and outlives the allocation: the
    pod's device cgroup allows the nodes' numbers for as long as the pod has processes, whatever
    kubelet says of it, and whichever region has these numbers by then. It alone answers who may be
    using a region, and whose hands a node is in.

    Attributes:
        key: which.
        nodes: that were granted for the region.
        used: a container may have had the nodes since the region was last scrubbed.
        left: kubelet's word that the pod is done with them: the allocation ended, or kubelet's
            record of it no longer names the pod. It says nothing of the pod's processes.
        cgroups: of this instance of the pod, noted while a container of it was about to start.
            Empty: not known, and the pod's uid has to tell.
        numbers: device numbers that the nodes have had since, while a container could start with
            them: its processes open whatever has them now. Unset, and in no row: not known.
    """

    key: TenancyKey
    nodes: tuple[Path, ...]
    used: bool = False
    left: bool = False
    cgroups: tuple[Cgroup, ...] = ()
    numbers: tuple[DeviceNumber, ...] | UnsetType = UNSET

    @property
    def region(self) -> RegionId:
        """Which region was granted."""
        return self.key.region

    @property
    def ways(self) -> tuple[str, ...]:
        """By which its processes may open a device: paths of nodes, and device numbers."""
        return (*self.nodes, *(self.numbers or ()))

    @property
    def pod(self) -> PodUid | None:
        """Whose processes."""
        return self.key.pod


@dataclass(frozen=True, slots=True)
class TenantImage:
    """An image that a region was programmed with for an owner, and that no blank replaced since.

    Attributes:
        region: which region.
        afu_id: as which it reads; None: it may be any, since the journal does not say.
    """

    region: RegionId
    afu_id: Afu | None


@dataclass(frozen=True, slots=True)
class DebugHold:
    """A region that is kept as its container left it, should the container fail.

    Written with the start of the container. A scrub, another owner or another boot of the node ends
    it.

    Attributes:
        region: which region.
        pod: whose container it is.
        namespace: of the pod.
        name: of the pod.
        containers: those that have the region, where kubelet's records told; empty: any of the pod.
        seconds: for how long the region is to be kept.
        failure: what the pod's status said last of a container that failed; empty: nothing.
        until: seconds of the node's boot clock (CLOCK_BOOTTIME) until which the region is kept; 0:
            it is not, or not yet. No step of the wall clock makes it longer.
    """

    region: RegionId
    pod: Uid
    namespace: Name
    name: Name
    containers: tuple[Name, ...]
    seconds: Time
    failure: Text = ""
    until: Time = 0.0


@dataclass(frozen=True, slots=True)
class AliasBinding:
    """The interface id that an alias in a resource's name stands for.

    Attributes:
        interface_id: which.
        current: whether free devices are listed under it; else it is left to pods that have some.
    """

    interface_id: Interface
    current: bool


class Fact(enum.StrEnum):
    """What a value of `Change.facts` says: of node, kubelet or journal."""

    BOOT = "boot"
    """The boot id of the node in which the conditions held."""
    KUBELET = "kubelet"
    """The last kubelet instance that the plugin found."""
    ENVIRONMENT = "environment"
    """The kubelet instance that last sent an environment in PreStart."""
    RESOURCE_CLAIMS = "resource_claims"
    """Why ResourceClaims may have devices that the journal lost. Ends once the plugin has read
    kubelet's record of claims."""
    LOST = "lost"
    """What an earlier journal lost. What is on regions that this journal lacks is unknown, however
    much later they are found."""


@dataclass(slots=True)
class Change:
    """What one transaction writes; None, False, 0 and "" delete.

    All that the journal holds is one, too: the change that makes an empty journal say so. Each
    field is a kind of row (`rows`).

    Attributes:
        facts: of node, kubelet and journal.
        allocations: in force.
        regions: conditions.
        memory_clear_pending: cards whose on-card memory is to be cleared.
        drained: cards that the operator takes out of service.
        rebinding: cards whose driver was being taken off and put on again.
        unreconciled: cards of which kubelet's records may name owners that the journal lacks.
        tenancies: pods whose processes may have a region's nodes open.
        resources: every resource ever registered.
        pending_poststops: PostStops of ended allocations that may still come.
        claim_owners: ResourceClaims that own devices.
        images: of owners, that may still be on their regions.
        debug_holds: regions that are to be kept as they are, should their container fail.
        alias_bindings: of resources with an alias in their names.
    """

    facts: dict[Fact, str] = field(default_factory=dict)
    allocations: dict[DeviceId, Allocation | None] = field(default_factory=dict)
    regions: dict[RegionId, RegionRecord] = field(default_factory=dict)
    memory_clear_pending: dict[CardId, bool] = field(default_factory=dict)
    drained: dict[CardId, bool] = field(default_factory=dict)
    rebinding: dict[CardId, bool] = field(default_factory=dict)
    unreconciled: dict[CardId, bool] = field(default_factory=dict)
    tenancies: dict[TenancyKey, Tenancy | None] = field(default_factory=dict)
    resources: dict[ResourceName, bool] = field(default_factory=dict)
    pending_poststops: dict[DeviceId, int] = field(default_factory=dict)
    claim_owners: dict[ClaimUid, ClaimOwner | None] = field(default_factory=dict)
    images: dict[TenantImage, bool] = field(default_factory=dict)
    debug_holds: dict[RegionId, DebugHold | None] = field(default_factory=dict)
    alias_bindings: dict[ResourceName, AliasBinding | None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(getattr(self, each.name) for each in fields(self))

    def __or__(self, later: "Change") -> "Change":
        """Both in one, where `later` has the last word."""
        return Change(*(getattr(self, f.name) | getattr(later, f.name) for f in fields(self)))
