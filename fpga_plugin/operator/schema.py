"""The shape of what `fpga-plugin status` and `card` answer in JSON, and of what the page draws.

Types alone: the commands that print the answers import nothing of the daemon.
"""

from typing import TypedDict


class OwnerView(TypedDict):
    """Who has a device.

    `since` is Unix time, null where it is not known; the pod's fields are empty where kubelet's
    records have not told.
    """

    device: str
    resource: str
    ownership: str
    pod_uid: str
    namespace: str
    pod: str
    since: float | None


class RegionView(TypedDict):
    """One region; `afu_id` is what is on it, and for GBS files the bitstream's id."""

    region: str
    node: str
    ownership: str
    condition: str
    reason: str
    afu_id: str
    healthy: bool
    owner: OwnerView | None


class CardView(TypedDict):
    """One card; `note` says why it, or its regions, are not given out.

    `memory` is `cleared`, `not cleared yet` or `never cleared`, `iommu` is `translate`, `identity`,
    `none` or `unknown`; both are empty where the card is gone.
    """

    card: str
    interface_id: str
    description: str
    numa_node: int | None
    present: bool
    mode: str
    drained: bool
    memory: str
    iommu: str
    note: str
    temperatures: dict[str, float]
    power: dict[str, float]
    regions: list[RegionView]


class RefusalView(TypedDict):
    """The last refusal of a pod; times are Unix time."""

    at: float
    first: float
    times: int
    method: str
    devices: list[str]
    status: str
    message: str
    pod_uid: str
    namespace: str
    pod: str


class ResourceView(TypedDict):
    """How a resource stands with kubelet, and how many devices are on its list."""

    resource: str
    registered: bool
    streaming: bool
    problem: str
    devices: int
    healthy: int


class ProblemView(TypedDict):
    """A card that cannot be served."""

    card: str
    error: str
    hint: str


class MeasureView(TypedDict):
    """A measure of the sandbox; `detail` says how far it goes, or why it does not hold."""

    name: str
    holds: bool
    detail: str


class StatusView(TypedDict):
    """Everything; `time` and `started` are Unix time."""

    version: str
    node: str
    time: float
    started: float
    ready: bool
    not_ready: list[str]
    scrub: str
    sandbox: list[MeasureView]
    resources: list[ResourceView]
    cards: list[CardView]
    problems: list[ProblemView]
    refusals: list[RefusalView]


class HolderView(TypedDict):
    """Who still has something of the card; `pod_uid` is empty, `since` null, where not known."""

    device: str
    resource: str
    pod_uid: str
    started: bool
    since: float | None


class CardStateView(TypedDict):
    """How far a card is from being pulled; see `CardState`."""

    card: str
    present: bool
    drained: bool
    may_be_pulled: bool
    holders: list[HolderView]
    waits_for: list[str]
    not_clean: list[str]
