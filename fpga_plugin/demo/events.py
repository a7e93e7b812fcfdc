"""What the demo shows: one value a step, and its form as a JSON object.

Programs that read `demo --json` rely on these keys: `t`, `event`, and where they apply `resource`,
`devices`, `method`, `status`, `message`, `seconds`, `region`, `ownership`, `condition`, `afu_id`.
`healthy`, `reason`, `steps`, `pod` and `container` come on top.
"""

from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from fpga_plugin.allocation.journal.records import Condition, Ownership
from fpga_plugin.cards.reports import Report
from fpga_plugin.demo.plugins import DeviceList
from fpga_plugin.ids import AfuId, DeviceId, RegionId
from fpga_plugin.kubernetes.names import ResourceName

JsonObject: TypeAlias = dict[str, Any]


def _fields(of: Any) -> JsonObject:
    """An object's fields: no empty text, and times in microseconds."""
    return {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in asdict(of).items()
        if value != ""
    }


@dataclass(frozen=True, slots=True)
class Advertised:
    """Kubelet got a resource's list.

    Attributes:
        listed: the list.
        before: the list that it replaces; None: it is the first one.
    """

    listed: DeviceList
    before: DeviceList | None = None

    def json(self) -> JsonObject:
        """Its fields."""
        return {
            "event": "advertised",
            "resource": self.listed.resource,
            "devices": self.listed.ids,
            "healthy": [device for device in self.listed.ids if device in self.listed.healthy],
        }


@dataclass(frozen=True, slots=True)
class KubeletCall:
    """Kubelet called, and the plugin answered.

    Attributes:
        method: of the device plugin API.
        resource: whose endpoint.
        devices: the ids that the call named, or that its answer chose.
        status: gRPC status by name (`INVALID_ARGUMENT`).
        message: what went wrong; empty if nothing did.
        seconds: from the call's arrival to its answer.
    """

    method: str
    resource: ResourceName
    devices: tuple[DeviceId, ...]
    status: str
    message: str
    seconds: float

    def json(self) -> JsonObject:
        """Its fields."""
        return {"event": "call", **_fields(self)}


@dataclass(frozen=True, slots=True)
class RegionShown:
    """Who has a region, and what is on it.

    Attributes:
        region: which region.
        ownership: who has it.
        condition: what is on it.
        afu_id: what its AFU id reads as; None while that is not known.
        reason: why it is FAULTED or DIRTY; may be empty.
    """

    region: RegionId
    ownership: Ownership
    condition: Condition
    afu_id: AfuId | None
    reason: str = ""

    def json(self) -> JsonObject:
        """Its fields."""
        return {"event": "region", **_fields(self)}


@dataclass(frozen=True, slots=True)
class RegionWork:
    """The plugin worked on a region: scrubbed it, programmed it, or both.

    Attributes:
        report: the steps, in order.
        condition: how the region is afterwards.
    """

    report: Report
    condition: Condition

    @property
    def seconds(self) -> float:
        """How long the steps took together."""
        return sum(step.seconds for step in self.report.steps)

    def json(self) -> JsonObject:
        """Its fields; `scrub` where it was scrubbed, whatever else was done, else `program`."""
        report = self.report
        return {
            "event": "scrub" if report.scrubbed else "program",
            "region": report.region,
            "condition": self.condition,
            "afu_id": report.afu_id,
            "seconds": round(self.seconds, 6),
            "steps": [_fields(step) for step in report.steps],
            **({"message": report.error} if report.error else {}),
        }


@dataclass(frozen=True, slots=True)
class Failure:
    """What a pod's event would say, or why there is no pod to begin with.

    Attributes:
        message: the event's text.
        status: gRPC status by name, where the plugin refused a call.
        method: which call.
        pod: the pod's name.
        container: the container that did not start.
        final: nothing is tried again.
    """

    message: str
    status: str = ""
    method: str = ""
    pod: str = ""
    container: str = ""
    final: bool = True

    def json(self) -> JsonObject:
        """Its fields but `final`: what follows shows it."""
        fields = _fields(self)
        del fields["final"]
        return {"event": "error", **fields}


@dataclass(frozen=True, slots=True)
class Warned:
    """A container is served, and may not be what its author means.

    Attributes:
        message: what the pod's event would say.
        devices: of the container.
    """

    message: str
    devices: tuple[DeviceId, ...]

    def json(self) -> JsonObject:
        """Its fields."""
        return {"event": "warning", **_fields(self)}


Event: TypeAlias = Advertised | KubeletCall | RegionShown | RegionWork | Warned | Failure
