"""The demo's default output: what of the events it shows, and how."""

import io

import pytest
from repository import ROOT

from fpga_plugin.allocation.journal.records import Condition, Ownership
from fpga_plugin.cards.reports import Report, ReportStep
from fpga_plugin.demo.brief import BriefOutput
from fpga_plugin.demo.events import (
    Advertised,
    Failure,
    KubeletCall,
    RegionShown,
    RegionWork,
    Warned,
)
from fpga_plugin.demo.plugins import DeviceList
from fpga_plugin.demo.pod_manifest import read_manifest
from fpga_plugin.ids import AfuId, DeviceId, RegionId
from fpga_plugin.kubernetes.names import ResourceName

IF = "ce48969398f05f33946d560708be108a"
REGIONS = ResourceName(f"fpga.intel.com/region-{IF}")
CARDS = ResourceName(f"fpga.intel.com/fpga-{IF}")
P0, P1 = RegionId("0000-10-00.0-p0"), RegionId("0000-10-00.0-p1")
AFU = AfuId("18b79ffa2ee54aa096ef4230dafacb5f")
KEP = ROOT / "fpga_plugin" / "demo" / "kep-pod.yaml"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(*events, detail=True, names=None, stream=None) -> list[str]:
    stream = stream or io.StringIO()
    output = BriefOutput(stream)
    output.detail = detail
    output.names = names or {}
    for event in events:
        output.event(1.234, event)
    return stream.getvalue().splitlines()


def listed(resource, *devices, healthy=None):
    return DeviceList(
        resource, dict.fromkeys(devices, 0), frozenset(devices if healthy is None else healthy)
    )


def call(method, *devices, status="OK"):
    return KubeletCall(method, REGIONS, tuple(map(DeviceId, devices)), status, "", 0.0123)


def work(condition, *, scrubbed=False, error="", afu=AFU):
    steps = [ReportStep("program", 0.25), ReportStep("verify", 0.001)]
    report = Report(P0, scrubbed=scrubbed, steps=steps, afu_id=afu, error=error)
    return RegionWork(report, condition)


@pytest.mark.parametrize(
    "event",
    [
        call("GetDevicePluginOptions"),
        call("GetPreferredAllocation", P0),
        Advertised(listed(REGIONS, P0, P1, healthy={P0}), listed(REGIONS, P0, P1)),
        Advertised(listed(REGIONS, P0, P1), listed(REGIONS, P0)),
        RegionShown(P0, Ownership.FREE, Condition.SCRUBBING, None),
        Failure("the verdict has it"),
    ],
)
def test_what_the_verdict_or_the_timeline_has_is_not_shown(event):
    assert shown(event) == []


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (call("Allocate", P0), f"kubelet  Allocate {P0}: OK in 12 ms"),
        (
            call("PostStopContainer", P0, P1, status="INTERNAL"),
            f"kubelet  PostStopContainer {P0} and 1 more: INTERNAL in 12 ms",
        ),
        (call("Deallocate"), "kubelet  Deallocate: OK in 12 ms"),
        (
            Advertised(listed(CARDS), listed(CARDS, "0000-10-00.0")),
            "plugin   hides card 0000-10-00.0: a region is taken",
        ),
        (
            Advertised(listed(REGIONS), listed(REGIONS, P0, P1, healthy=())),
            f"plugin   hides region {P0} and 1 more: the card is taken",
        ),
        (work(Condition.BLANK, scrubbed=True), f"plugin   scrubs {P0} in 251 ms; it is blank"),
        (
            work(Condition.UNBLANKED, scrubbed=True),
            f"plugin   scrubs {P0} in 251 ms; it is unblanked",
        ),
        (work(Condition.BLANK), f"plugin   hands {P0} over blank"),
    ],
)
def test_an_event_is_a_line(event, line):
    assert shown(event) == [f"  1.23 s  {line}"]


@pytest.mark.parametrize("scrubbed", [True, False])
def test_a_programmed_region_shows_the_id_or_the_name_that_was_read_back(scrubbed):
    event = work(Condition.PROGRAMMED, scrubbed=scrubbed)
    first = f"  1.23 s  plugin   programs {P0} in 251 ms, and reads back"
    assert shown(event) == [first, " " * 21 + AFU]
    assert shown(event, names={AFU: "compress"}) == [first, " " * 21 + "compress"]


def test_work_that_failed_shows_why():
    assert shown(
        work(Condition.DIRTY, scrubbed=True, error="port busy"),
        work(Condition.FAULTED, error="no answer"),
    ) == [
        f"  1.23 s  plugin   cannot scrub {P0}: DIRTY",
        " " * 21 + "port busy",
        f"  1.23 s  plugin   cannot program {P0}: FAULTED",
        " " * 21 + "no answer",
    ]


def test_a_region_that_its_owner_left_is_shown_once():
    def state(ownership, condition):
        return RegionShown(P0, ownership, condition, None)

    lines = shown(
        state(Ownership.CLAIMED, Condition.BLANK),
        state(Ownership.STARTED, Condition.PROGRAMMED),
        state(Ownership.FREE, Condition.DIRTY),
        state(Ownership.FREE, Condition.BLANK),
    )
    assert lines == [f"  1.23 s  plugin   takes {P0} back: no pod has it any more"]


def test_before_the_pod_only_what_is_wrong_with_it_is_shown():
    assert shown(
        call("Allocate", P0),
        work(Condition.BLANK, scrubbed=True),
        Warned("misspelt", ()),
        Failure("not yet", final=False),
        detail=False,
    ) == [
        "  1.23 s  plugin   warns",
        " " * 21 + "misspelt",
        "  1.23 s  kubelet  reports",
        " " * 21 + "not yet",
    ]


def test_long_messages_fit_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    lines = shown(Warned("a " * 300, ()), stream=Terminal())
    assert len(lines) > 4
    assert max(map(len, lines)) <= 80


def test_containers_are_named_where_there_are_several(tmp_path):
    def introduced(path):
        stream = io.StringIO()
        BriefOutput(stream).introduce(
            read_manifest(str(path), "fpga.intel.com"), "", "", "a stock kubelet"
        )
        return stream.getvalue()

    assert "in container" not in introduced(KEP)
    two = f"""\
apiVersion: v1
kind: Pod
metadata: {{name: two}}
spec:
  containers:
  - {{name: one, resources: {{limits: {{{REGIONS}: 1}}}}}}
  - {{name: other, env: [{{name: FPGA_REGION_1, value: {IF}}}]}}
  - {{name: third}}
"""
    (tmp_path / "two.yaml").write_text(two)
    assert introduced(tmp_path / "two.yaml").endswith(
        "Pod default/two asks for\n"
        f"  in container one\n    1 x {REGIONS}\n"
        f"  in container other\n    FPGA_REGION_1={IF}\n\n"
    )
