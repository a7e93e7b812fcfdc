"""Which refusals and failures become Events, and about whom."""

import asyncio
from collections.abc import Awaitable, Callable
from unittest.mock import Mock

from doubles.kubelet import Kubelet

from fpga_plugin.allocation.recorder import MAX_LOOKUPS, EventRecorder
from fpga_plugin.allocation.requests.directory import PodDirectory
from fpga_plugin.allocation.requests.identity import Identity
from fpga_plugin.errors import (
    FpgaPluginError,
    HardwareError,
    InvalidRequestError,
    NoSourceError,
    NotFinishedError,
    ProgrammingError,
)
from fpga_plugin.ids import CardId, DeviceId
from fpga_plugin.kubernetes.events.broadcaster import Event, Subject
from fpga_plugin.kubernetes.names import PodName, PodUid

CARD = CardId("0000-3b-00.0")
DEVICES = (DeviceId(f"{CARD}-p0"),)
POD = PodUid("0f1c2d3e-0000-4000-8000-000000000001")
NAME = PodName("tenant", "compress")
NAMED = Identity(pod=POD, name=NAME)
UNNAMED = Identity(pod=POD)
REFUSAL = InvalidRequestError("FPGA_REGION_1: not an interface id")


class Sink(list[Event]):
    """Keeps Events instead of posting them."""

    closed = False

    def record(self, event: Event) -> None:
        self.append(event)

    async def close(self) -> None:
        self.closed = True


def directory(kubelet: Kubelet | None) -> PodDirectory:
    return PodDirectory(kubelet_dir="/nowhere", prefix="x", podresources=kubelet)  # type: ignore[arg-type]


def told(
    story: Callable[[EventRecorder], Awaitable[None]],
    kubelet: Kubelet | None = None,
    *,
    node: str | None = "node-1",
) -> list[Event]:
    async def main() -> list[Event]:
        sink = Sink()
        recorder = EventRecorder(
            sink,  # type: ignore[arg-type]
            node_name=node,
            pods=directory(kubelet),
            observer=Mock(),
        )
        await story(recorder)
        while recorder._lookups:
            await asyncio.gather(*recorder._lookups)
        await recorder.close()
        assert sink.closed
        return list(sink)

    return asyncio.run(main())


def refuse(identity: Identity, error: FpgaPluginError, times: int = 1):
    async def story(recorder: EventRecorder) -> None:
        for _ in range(times):
            recorder.refused(identity, DEVICES, error)

    return story


def test_a_refused_pod_hears_why_by_the_name_that_was_asked_for_on_the_way() -> None:
    kubelet = Kubelet()
    (event,) = told(refuse(NAMED, REFUSAL), kubelet)
    assert event.subject == Subject("Pod", "compress", "tenant", POD)
    assert event.reason == "FpgaProgrammingRefused"
    assert event.note == str(REFUSAL)
    assert event.warning
    assert kubelet.calls == 0


def test_hardware_that_failed_is_told_apart_from_a_refusal() -> None:
    (event,) = told(refuse(NAMED, ProgrammingError("fifo overflow")))
    assert event.reason == "FpgaProgrammingFailed"


def test_the_pod_reads_whom_to_ask_in_place_of_commands_for_root() -> None:
    error = HardwareError("it hangs", hint="as root: echo 1 > reset")
    (event,) = told(refuse(NAMED, error))
    assert event.note == "it hangs: ask the node's operator"


def test_what_becomes_of_a_debugged_pods_region_is_told_to_it() -> None:
    async def story(recorder: EventRecorder) -> None:
        recorder.warned(NAMED, DEVICES, "it has no effect", reason="FpgaDebugIgnored")
        recorder.about_pod(POD, NAME, "FpgaRegionKept", "it is kept")

    ignored, kept = told(story)
    assert (ignored.reason, ignored.note) == ("FpgaDebugIgnored", "it has no effect")
    assert (kept.reason, kept.note) == ("FpgaRegionKept", "it is kept")
    assert kept.subject == ignored.subject == Subject("Pod", "compress", "tenant", POD)


def test_a_warning_is_told_to_the_pod_that_is_served_all_the_same() -> None:
    async def story(recorder: EventRecorder) -> None:
        recorder.warned(NAMED, DEVICES, "FPGA_* variables mean nothing: 'FPGA_REGON_1'")

    (event,) = told(story)
    assert event.subject == Subject("Pod", "compress", "tenant", POD)
    assert event.reason == "FpgaVariableUnknown"
    assert "FPGA_REGON_1" in event.note
    assert event.warning


def test_work_that_goes_on_is_no_news() -> None:
    assert told(refuse(NAMED, NotFinishedError("not yet"))) == []


def test_a_pod_without_a_name_is_looked_up_by_its_devices() -> None:
    kubelet = Kubelet("/nowhere", ("other", "0000-3b-00.0-p1"), ("compress", DEVICES[0]))
    (event,) = told(refuse(UNNAMED, REFUSAL), kubelet)
    assert event.subject == Subject("Pod", "compress", "tenant", POD)


def test_a_pod_whose_name_is_known_is_not_looked_up() -> None:
    kubelet = Kubelet("/nowhere")

    async def story(recorder: EventRecorder) -> None:
        recorder._pods.learn(POD, NAME)
        recorder.refused(UNNAMED, DEVICES, REFUSAL)

    (event,) = told(story, kubelet)
    assert event.subject == Subject("Pod", "compress", "tenant", POD)
    assert kubelet.calls == 0


def test_a_pod_that_kubelet_does_not_tell_gets_no_event() -> None:
    silent = Kubelet("/nowhere", ("compress", DEVICES[0]))
    silent.error = NoSourceError("no socket")
    two = Kubelet("/nowhere", ("compress", DEVICES[0]), ("heir", DEVICES[0]))
    for kubelet in (Kubelet(), silent, two, None):
        assert told(refuse(UNNAMED, REFUSAL), kubelet) == []
    assert told(refuse(Identity(), REFUSAL), Kubelet("/nowhere", ("compress", DEVICES[0]))) == []


def test_look_ups_are_bounded_and_end_with_the_plugin() -> None:
    kubelet = Kubelet("/nowhere", ("compress", DEVICES[0]))

    async def story(recorder: EventRecorder) -> None:
        kubelet.answers.clear()
        await refuse(UNNAMED, REFUSAL, times=100)(recorder)
        await asyncio.sleep(0)
        assert kubelet.calls == MAX_LOOKUPS
        lookups = set(recorder._lookups)
        await recorder.close()
        assert all(task.cancelled() for task in lookups), "they have ended, too"

    assert told(story, kubelet) == []


def test_the_node_hears_of_its_cards() -> None:
    async def story(recorder: EventRecorder) -> None:
        recorder.card_failed(CARD, "gone")
        recorder.card_recovered(CARD, "found again")

    failed, recovered = told(story)
    assert failed.subject == Subject("Node", "node-1", "", "node-1")
    assert (failed.reason, failed.warning) == ("FpgaCardFailed", True)
    assert (recovered.reason, recovered.warning) == ("FpgaCardRecovered", False)
    assert told(story, node=None) == []


def test_where_events_are_off_nothing_is_asked() -> None:
    async def main() -> None:
        kubelet = Kubelet("/nowhere", ("compress", DEVICES[0]))
        recorder = EventRecorder(None, node_name="node-1", pods=directory(kubelet), observer=Mock())
        recorder.refused(UNNAMED, DEVICES, REFUSAL)
        recorder.card_failed(CARD, "gone")
        recorder.about_pod(POD, NAME, "FpgaRegionKept", "it is kept")
        assert not recorder._lookups
        await recorder.close()
        assert kubelet.calls == 0

    asyncio.run(main())


def test_the_node_hears_that_it_may_not_serve_claims() -> None:
    async def story(recorder: EventRecorder) -> None:
        recorder.node_unsuited("the container runtime is old")

    (event,) = told(story)
    assert event.subject == Subject("Node", "node-1", "", "node-1")
    assert (event.reason, event.warning) == ("FpgaNodeUnsuited", True)


def test_the_node_hears_of_foreign_slices() -> None:
    async def story(recorder: EventRecorder) -> None:
        recorder.foreign_slices("'evil' of node 'node-a'")

    (event,) = told(story)
    assert event.subject == Subject("Node", "node-1", "", "node-1")
    assert (event.reason, event.note) == ("FpgaForeignSlices", "'evil' of node 'node-a'")
    assert event.warning


def test_a_warning_is_seen_where_events_are_off() -> None:
    observer = Mock()
    recorder = EventRecorder(None, node_name=None, pods=directory(None), observer=observer)
    recorder.warned(UNNAMED, DEVICES, "it has no effect")
    observer.warned.assert_called_once_with(UNNAMED, DEVICES, "it has no effect")
