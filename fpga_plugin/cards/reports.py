"""Reports of the work on regions, for logs, the demo, metrics and Events."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.ids import AfuId, RegionId
from fpga_plugin.kubernetes.names import PodUid


@dataclass(frozen=True, slots=True)
class ReportStep:
    """One step of a scrub or a preparation.

    Attributes:
        name: `reset card`, `quiesce`, `clear errors`, `restore defaults`, `program blank`,
            `program`, `clear memory`, `set parameters`, `verify`.
        seconds: how long it took.
        note: what was found or done; may be empty.
    """

    name: str
    seconds: float
    note: str = ""


@dataclass(slots=True)
class Report:
    """The steps of one region's scrub or preparation, in order.

    Attributes:
        region: its id.
        scrubbed: whether a scrub was part of it.
        afu_id: what its AFU id reads afterwards; None if it was not read.
        error: what went wrong; empty if nothing did.
        failure: the kind of error in a word (`FpgaPluginError.kind`); empty if there was none.
        pod: the owner meanwhile; None: there is none, or it is unknown.
        former: pods that owned the region since it was last scrubbed.
    """

    region: RegionId
    scrubbed: bool = False
    steps: list[ReportStep] = field(default_factory=list)
    afu_id: AfuId | None = None
    error: str = ""
    failure: str = ""
    pod: PodUid | None = None
    former: frozenset[PodUid] = frozenset()

    def failed(self, error: Exception) -> None:
        """Note what went wrong."""
        if isinstance(error, FpgaPluginError):
            self.error, self.failure = str(error), error.kind
        else:
            self.error, self.failure = repr(error), "unexpected"

    def concerned(self) -> Mapping[str, object]:
        """The region's known present and former owners: values of a log line."""
        known: dict[str, object] = {} if self.pod is None else {"pod": self.pod}
        return known | ({"former": self.former} if self.former else {})


class ReportObserver(Protocol):
    """Gets reports of the work on regions. Must not raise."""

    def reported(self, report: Report) -> None:
        """A region was scrubbed or prepared, or that failed."""
