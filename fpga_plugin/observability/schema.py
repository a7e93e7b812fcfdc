"""The shape of what `fpga-plugin status` and `card` answer in JSON, and of what the page draws.

No more than types: the commands that print the answers import nothing of the daemon.
"""

from typing import NotRequired, TypedDict


class WhoView(TypedDict):
    """The owner of a device.

    The pod's fields are empty while kubelet's records do not show it. In mode `dra` the owner is a
    ResourceClaim: `claim` is its name, in `namespace`; `requests` are those of its requests for
    which it has the device; `pods` are all that use it, by namespace and name, or by uid where no
    name is known. `pod` and `pod_uid` are then empty unless there is exactly one.
    """

    pod_uid: str
    namespace: str
    pod: str
    claim: str
    claim_uid: str
    requests: list[str]
    pods: list[str]


class OwnerView(WhoView):
    """Who has a device; `since` is Unix time, null where it is not known."""

    device: str
    resource: str
    ownership: str
    since: float | None


class ClockView(TypedDict):
    """An image's user clock: `set`, `checked`, `not checked` or `not stated`, and the details."""

    state: str
    detail: str


class KeptView(TypedDict):
    """Whose container failed, how, and for how long more the region is kept as it left it."""

    pod_uid: str
    namespace: str
    pod: str
    failure: str
    seconds_left: float


class RegionView(TypedDict):
    """One region.

    `clock` is null where no image of a container's is on it, or the plugin was restarted since.
    `afu_id` is what is on it, and for GBS files the bitstream's id; `bitstream` is what people call
    that, empty where the store does not say; `failed`: its hardware is not well, or FAULTED, and
    `reason` says why; `unusable` is why nobody can be given it although it is free and did not
    fail, empty where somebody can; `refused` is why its owner's container was not started, empty
    where it was not refused since; `kept` is null unless it is kept for debugging.
    """

    region: str
    node: str
    ownership: str
    condition: str
    reason: str
    failed: bool
    unusable: str
    afu_id: str
    bitstream: str
    clock: ClockView | None
    healthy: bool
    refused: str
    kept: KeptView | None
    owner: OwnerView | None


class CardView(TypedDict):
    """One card; `note` says why it, or its regions, are not given out.

    `passing` is what passes by itself. `memory` is `cleared`, `not cleared yet` or `never cleared`,
    `iommu` is `translate`, `shared`, `identity`, `none` or `unknown`; both are empty where the card
    is gone. `untested` is what the plugin does with such a card that nobody has seen on hardware,
    `interface_alias` what the store's manifest calls the interface id; both are empty for nothing.
    """

    card: str
    interface_id: str
    interface_alias: NotRequired[str]
    description: str
    numa_node: int | None
    present: bool
    mode: str
    drained: bool
    memory: str
    untested: NotRequired[str]
    iommu: str
    note: str
    passing: NotRequired[str]
    temperatures: dict[str, float]
    power: dict[str, float]
    regions: list[RegionView]


class RefusalView(TypedDict):
    """The last refusal of a pod, or the last warning about one; times are Unix time.

    `open`: the pod still waits, or its admission failed within the last hour. `claim` is the
    ResourceClaim by which it asked, as namespace and name; empty with the device plugin API.
    """

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
    claim: str
    open: bool


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


class BitstreamView(TypedDict):
    """A bitstream of the store.

    `last_used` is when it was last programmed here, as far back as the history goes.
    `bitstream_id` is empty for a blank bitstream; `trust` is FPGA_PLUGIN_TRUST's word where the
    plugin verified the file, `not verified yet`, or `refused`, and then `problem` says why.
    """

    interface_id: str
    interface_alias: NotRequired[str]
    bitstream_id: str
    afu_id: str
    name: str
    size: int | None
    last_used: float | None
    trust: str
    problem: str


class EventView(TypedDict):
    """Something that happened to a region.

    `event` is `claimed`, `released`, `programmed`, `scrubbed` or `refused`; `at` is Unix time;
    `seconds` is how long it took or, of a release, how long the device was owned, null where it
    says nothing; `pod`, and in mode `dra` the ResourceClaim `claim`, are namespace and name, empty
    where not known; `message` says what went wrong.
    """

    at: float
    region: str
    event: str
    seconds: float | None
    pod_uid: str
    pod: str
    claim: str
    afu_id: str
    bitstream: str
    message: str


class HistoryView(TypedDict):
    """What happened, the newest first; `time` is Unix time."""

    time: float
    events: list[EventView]


class TroubleView(TypedDict):
    """How much of the node needs somebody.

    Pods that were refused and wait, cards that are drained, regions and cards that failed, free
    regions that nobody can be given until somebody acts, by reason, cards whose memory is cleared
    by no scrub, and regions that are kept for debugging.
    """

    refused: int
    drained: int
    failed: int
    unusable: dict[str, int]
    never_cleared: int
    kept: int


class MeasureView(TypedDict):
    """A measure of the sandbox; `detail` says how far it goes, or why it does not hold."""

    name: str
    holds: bool
    detail: str


class StatusView(TypedDict):
    """Everything; `time` and `started` are Unix time.

    `notes` say what may keep pods from their devices although the plugin is ready.
    """

    version: str
    node: str
    time: float
    started: float
    ready: bool
    not_ready: list[str]
    notes: list[str]
    trouble: TroubleView
    scrub: str
    sandbox: list[MeasureView]
    resources: list[ResourceView]
    cards: list[CardView]
    problems: list[ProblemView]
    refusals: list[RefusalView]
    bitstreams: list[BitstreamView]
    warnings: list[RefusalView]


class HolderView(WhoView):
    """Who still has something of the card.

    `since` is null where it is not known.
    """

    device: str
    resource: str
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


class FunctionView(TypedDict):
    """A PCI function of a card.

    `role` is `card` (by it the card is programmed), `physical` or `virtual`; `driver` is empty for
    none; `group` is its IOMMU group, null without an IOMMU, and `translation` that group's type.
    """

    address: str
    role: str
    driver: str
    group: int | None
    translation: str


class ReadingView(TypedDict):
    """What a region's AFU id reads now, or why it cannot be read."""

    region: str
    afu_id: str
    bitstream: str
    error: str


class InspectionView(TypedDict):
    """A card as its hardware shows it now.

    `errors` are its error registers, 0 where all is well.
    """

    card: CardView
    errors: dict[str, int]
    regions: list[ReadingView]
    events: list[EventView]


class ProgrammedView(TypedDict):
    """A programming by hand; not `finished`: ask again. `steps` has the seconds of each.

    `name` is what the store's manifest calls the bitstream, and may be empty.
    """

    finished: bool
    region: str
    afu_id: str
    name: NotRequired[str]
    clock: ClockView | None
    steps: dict[str, float]
