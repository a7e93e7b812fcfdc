"""What the ledger remembers: claims and the condition of regions, as values.

These are also the rows of the journal: everything in them outlives the process.
"""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fpga_plugin.ids import AfuId, CardId, DeviceId, PodUid, RegionId, ResourceName


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


class Mode(enum.StrEnum):
    """How a card is used; derived from its claims, never stored."""

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
        former: pods that owned it since it was last scrubbed; no scrub while one of them lives.
    """

    region: RegionId
    condition: Condition
    reason: str = ""
    afu_id: AfuId | None = None
    former: frozenset[PodUid] = frozenset()


@dataclass(frozen=True, slots=True)
class Claim:
    """A device that Allocate granted.

    Attributes:
        device: the card or region.
        resource: the resource under which it was granted.
        nodes: device node of each region at the time of the grant: kubelet hands these out for as
            long as the pod lives, while the kernel's numbers move (invariant 10).
        started: a PreStart succeeded.
        touched: a PreStart was seen since the last Allocate, successful or not.
        exposed: a container may have run without PreStart (kubelet skips it after its restart
            until the plugin registers again, and the node may have rebooted).
        pod: the owner, once kubelet's records told.
        epoch: kubelet's life in which the claim was made; empty where PreStarts and PostStops
            cannot be compared any more, since some may not have been seen.
        prestarts: PreStarts seen, failed ones included: a forked kubelet has created the container
            by then and will report its removal. Begins with the strays of earlier claims.
        poststops: PostStops seen.
        generation: differs between any two claims of one life of the plugin; not journalled.
        since: Unix time of the grant, for people; 0 where it is not known.
    """

    device: DeviceId
    resource: ResourceName
    nodes: tuple[tuple[RegionId, str], ...]
    started: bool = False
    touched: bool = False
    exposed: bool = False
    pod: PodUid | None = None
    epoch: str = ""
    prestarts: int = 0
    poststops: int = 0
    generation: int = field(default=0, compare=False)
    since: float = field(default=0.0, compare=False)

    @property
    def ownership(self) -> Ownership:
        """CLAIMED or STARTED."""
        return Ownership.STARTED if self.started else Ownership.CLAIMED

    @property
    def used(self) -> bool:
        """Whether a container of the owner may have had the device.

        Else none can have it before its PreStart is answered with OK: kubelet asks for one.
        """
        return self.started or self.exposed


@dataclass(frozen=True, order=True, slots=True)
class Loan:
    """A device node that is still in the hands of a pod whose claim ended.

    The pod's device cgroup allows the node's number for as long as the pod has processes, whatever
    kubelet says of it, and whichever region has that number by then.

    Attributes:
        pod: who has it.
        region: for which region it was granted.
        node: the device node.
    """

    pod: PodUid
    region: RegionId
    node: str


@dataclass(slots=True)
class Change:
    """What one transaction writes; None and False delete."""

    claims: dict[DeviceId, Claim | None] = field(default_factory=dict)
    regions: dict[RegionId, RegionRecord] = field(default_factory=dict)
    debts: dict[CardId, bool] = field(default_factory=dict)
    resources: set[ResourceName] = field(default_factory=set)
    strays: dict[DeviceId, int] = field(default_factory=dict)
    drained: dict[CardId, bool] = field(default_factory=dict)
    rebinding: dict[CardId, bool] = field(default_factory=dict)
    unreconciled: dict[CardId, bool] = field(default_factory=dict)
    loans: dict[Loan, bool] = field(default_factory=dict)
    epoch: str | None = None
    env_epoch: str | None = None

    def __bool__(self) -> bool:
        return bool(
            self.claims
            or self.regions
            or self.debts
            or self.resources
            or self.strays
            or self.drained
            or self.rebinding
            or self.unreconciled
            or self.loans
            or self.epoch is not None
            or self.env_epoch is not None
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The journal's content at start.

    Attributes:
        boot_id: in which the conditions held; empty where there is no journal yet.
        epoch: kubelet's last known life.
        env_epoch: the life in which kubelet last sent an environment in PreStart.
        claims: in force.
        regions: conditions.
        debts: cards with an open memory debt.
        resources: every resource ever registered.
        strays: PostStops of ended claims that may still come, by device.
        drained: cards that the operator takes out of service.
        rebinding: cards whose driver was being taken off and put on again.
        unreconciled: cards of which kubelet's records may show owners that the journal lacks.
        loans: nodes in the hands of pods whose claims ended.
    """

    boot_id: str = ""
    epoch: str = ""
    env_epoch: str = ""
    claims: tuple[Claim, ...] = ()
    regions: tuple[RegionRecord, ...] = ()
    debts: frozenset[CardId] = frozenset()
    resources: frozenset[ResourceName] = frozenset()
    strays: Mapping[DeviceId, int] = field(default_factory=dict)
    drained: frozenset[CardId] = frozenset()
    rebinding: frozenset[CardId] = frozenset()
    unreconciled: frozenset[CardId] = frozenset()
    loans: frozenset[Loan] = frozenset()


def pods(uids: Iterable[PodUid | None]) -> frozenset[PodUid]:
    """The known ones among `uids`."""
    return frozenset(uid for uid in uids if uid is not None)
