"""The end of a claim: what it removes, whom it tells, and what it waits for."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from doubles.cards import BLANK
from ledger_scene import scenes
from structlog.testing import capture_logs
from test_lifecycle import A, B, ClaimScene, ref

from fpga_plugin.allocation.journal.records import Condition
from fpga_plugin.dra.names import device_name
from fpga_plugin.ids import DeviceId
from fpga_plugin.kubernetes.kubelet.dra_record import RecordedClaim
from fpga_plugin.kubernetes.names import ClaimUid


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., ClaimScene]]:
    with scenes(functools.partial(ClaimScene, tmp_path)) as make:  # type: ignore[arg-type]
        yield make  # type: ignore[misc]


@pytest.fixture
def scene(make: Callable[..., ClaimScene]) -> ClaimScene:
    return make()


def end(scene: ClaimScene, uid: ClaimUid) -> None:
    scene.plugin.begin(scene.ends.end(uid)).add_done_callback(lambda task: task.result())
    scene.plugin.work()


def test_a_claim_that_only_kubelets_record_has_is_over_and_the_record_read_again(
    scene: ClaimScene,
) -> None:
    doubted: list[ClaimUid] = []
    scene.ends.doubted = doubted.append
    region = scene.regions[0]
    device = device_name(DeviceId(region))
    scene.allocated(A, region)
    scene.prepared()
    record = {
        uid: RecordedClaim(
            uid,
            ref(uid).namespace,
            ref(uid).name,
            frozenset(),
            "fpga.intel.com",
            {device: ("fpga",)},
        )
        for uid in (A, B)
    }
    scene.ends.recorded = record
    for _ in range(2):
        end(scene, A)
        assert (scene.ends.over, doubted) == ({A}, []), "the journal has it"
    end(scene, B)
    assert (scene.ends.over, doubted) == ({A, B}, [B])
    another = ClaimUid("00000000-0000-4000-8000-00000000000c")
    end(scene, another)
    assert (scene.ends.over, doubted) == ({A, B, another}, [B]), "the record may not be read yet"
    assert scene.ends.regions(B) == [region]


def test_the_end_of_a_claim_is_logged_once_with_its_pods(scene: ClaimScene) -> None:
    scene.allocated(A, scene.regions[0], pods=("pod-1", "pod-2"))
    scene.prepared()
    with capture_logs() as logged:
        end(scene, A)
        end(scene, A)
    (told,) = [line for line in logged if line["event"] == "claim ended"]
    assert told["pods"] == ["pod-1", "pod-2"]


def test_a_claim_that_goes_on_has_no_region_that_its_end_waits_for(scene: ClaimScene) -> None:
    region = scene.regions[0]
    scene.allocated(A, region)
    scene.prepared()
    assert scene.ends.regions(A) == []
    end(scene, A)
    assert scene.ends.regions(A) == [region]


def test_a_claim_is_remembered_until_all_of_its_regions_are_clean(scene: ClaimScene) -> None:
    one, two = scene.regions[:2]
    scene.allocated(A, one, two)
    scene.prepared()
    assert scene.ends.calls[A] == 1
    scene.plugin.queue.unsync()  # nothing is scrubbed
    end(scene, A)
    scene.plugin.call(lambda: scene.ledger.work.working([one]))
    scene.plugin.call(lambda: scene.ledger.work.clean(one, BLANK, blank=True))
    assert scene.ledger.record(one).condition is Condition.BLANK
    forgotten = scene.plugin.begin(scene.ends.forget(A))
    scene.plugin.work()
    assert not forgotten.result()
    assert A in scene.ledger.claim_owners
    scene.plugin.call(scene.plugin.queue.sync)
    scene.plugin.work()
    forgotten = scene.plugin.begin(scene.ends.forget(A))
    scene.plugin.work()
    assert forgotten.result()
    assert A not in scene.ledger.claim_owners
    assert A not in scene.ends.calls
