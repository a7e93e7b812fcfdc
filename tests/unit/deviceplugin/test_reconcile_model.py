"""Traces of the checked model with a stock kubelet, replayed on the real reconciler too.

Kubelet's List and checkpoint are doubles, which say what the trace says: a List that lacks a
device, a checkpoint that still has a dead pod's entry. What is asked when, what is counted and
which claims end is the plugin's own doing (`deviceplugin/reconcile.py`,
`allocation/reconcile/owners.py`, `deviceplugin/environment.py`).
How cards and calls are stepped is `test_ledger_model`'s.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import ledger_world
import pytest
from doubles.cards import REGIONS
from ledger_world import Checkpoint, Job, NoLink, Pod, env_for
from repository import ROOT
from test_ledger_model import ASIDE, RECORDS, Replay, asks, play, replays, start_job

from fpga_plugin.allocation.requests.directory import KnownPod
from fpga_plugin.allocation.requests.environment import ContainerRequests
from fpga_plugin.allocation.requests.parse import parse_requests
from fpga_plugin.deviceplugin import reconcile
from fpga_plugin.ids import DeviceId
from fpga_plugin.kubernetes.kubelet import checkpoint
from fpga_plugin.kubernetes.kubelet.checkpoint import CheckpointEntry, Stamp
from fpga_plugin.kubernetes.kubelet.podresources import (
    NoListReason,
    PodDevices,
    PodList,
    PodResourcesClient,
    PodResourcesError,
)
from fpga_plugin.kubernetes.names import PodName, PodUid, ResourceName

TRACES = sorted((ROOT / "tests/traces/stock").glob("*.txt"))


@dataclass(eq=False)
class Records:
    """Kubelet's records, of which the plugin reads two: the link to it, and `PodResourcesClient`.

    Attributes:
        pods: all that were admitted.
        lacks: devices that the next List does not show, though the plugin has claims on them.
        stays: devices whose entries the checkpoint keeps though their pod has ended.
        written: how often the checkpoint was.
        lists: how many Lists there were.
        life: of kubelet.
    """

    pods: list[Pod]
    lacks: frozenset[DeviceId] = frozenset()
    stays: frozenset[DeviceId] = frozenset()
    written: int = 1
    lists: int = 0
    life: int = 1

    async def snapshot(self) -> PodList:
        self.lists += 1
        devices = {d: pod.resource for pod in self.pods for d in pod.devices}
        return PodList(
            tuple(
                PodDevices("tenant", "pod", "main", resource, frozenset({device}))
                for device, resource in devices.items()
                if device not in self.lacks
            ),
            f"life {self.life}",
        )

    async def allocatable(self) -> dict[ResourceName, frozenset[str]]:
        raise PodResourcesError("not served", reason=NoListReason.NOT_SERVED)

    def stamp(self) -> Stamp:
        return (self.life, self.written, 0)

    def checkpoint(self) -> checkpoint.Checkpoint:
        held = {d: pod for pod in self.pods for d in pod.devices if pod.active or d in self.stays}
        # Never of a device that has been allocated again.
        held |= {d: pod for pod in self.pods for d in pod.devices if pod.active}
        entries = tuple(
            CheckpointEntry(pod.uid, "main", pod.resource, frozenset({device}))
            for device, pod in held.items()
        )
        return checkpoint.Checkpoint(entries, stamp=self.stamp())


class StockPods(Checkpoint):
    """`PodDirectory` over those records; its pods' specs are known."""

    def __init__(self, records: Records) -> None:
        super().__init__(records.pods)
        self.records = records
        self.podresources = records  # type: ignore[assignment]

    async def checkpoint(self) -> checkpoint.Checkpoint:
        return await asyncio.to_thread(self.records.checkpoint)

    def stamp(self) -> Stamp:
        return self.records.stamp()

    async def requests(self, pod: PodUid, _held: frozenset[str]) -> tuple[KnownPod, None]:
        number = int(pod.removeprefix("pod-"))
        of = next(one for one in self.records.pods if one.uid == pod)
        env = {k: v for k, v in env_for(asks(number, of)).items() if k.startswith("FPGA_")}
        main = ContainerRequests("main", env=env, requests=parse_requests(env))
        return KnownPod(PodName("tenant", pod), (main,)), None


class StockLink(NoLink):
    """Kubelet writes its checkpoint for each list that it gets."""

    def __init__(self, records: Records) -> None:
        self.records = records

    def resend(self) -> None:
        self.records.written += 1


def wake_up() -> None:
    """The trace says when."""


class StockReplay(Replay):
    """Kubelet calls Allocate and PreStart, and is asked for the rest.

    Attributes:
        may_end: devices whose claims end if the checkpoint lacks them too: of these the checkpoint
            keeps dead pods' entries until the trace says that it was settled.
    """

    extended = False

    def begin(self) -> None:
        if not hasattr(self, "records"):
            self.records = Records(self.known)
        self.may_end: frozenset[DeviceId] = frozenset()
        with (
            mock.patch.object(ledger_world, "Checkpoint", return_value=StockPods(self.records)),
            mock.patch.object(ledger_world, "NoLink", return_value=StockLink(self.records)),
        ):
            super().begin()
        for name, work in (("reconcile", self.plugin.reconciler), ("owners", self.plugin.owners)):
            self.plugin.loop.create_task(work.run(), name=f"kubelet {name}")
        self.plugin.loop.settle()

    # ------------------------------------------------------------ kubelet's records

    def asked(self, *, asleep: bool = False) -> list[Job]:
        """What the records are asked now; or whether they are asked again later."""
        jobs = [job for job in self.plugin.jobs if job.pod == RECORDS]  # type: ignore[attr-defined]
        return [job for job in jobs if (job.kind == "sleep") == asleep]  # type: ignore[attr-defined]

    def answer(self, *, stays: frozenset[DeviceId] = frozenset()) -> None:
        """Let what is asked come to its end; `stays`: what the checkpoint keeps of the dead."""
        self.records.stays = stays
        while jobs := self.asked():
            self.end_of(jobs[0])
        self.records.stays = frozenset()

    def some(self, mask: int) -> frozenset[DeviceId]:
        return frozenset(d for n, d in enumerate(self.devices) if mask >> n & 1)

    # ------------------------------------------------------------ steps

    def step_power_on(self, x: int, y: int) -> None:
        super().step_power_on(x, y)
        self.step_kubelet_answers(x, y)

    def step_list(self, lacks: int, may_end: int) -> None:
        self.answer(stays=self.may_end)
        self.records.lacks = self.some(lacks)
        lists = self.records.lists
        (sleep,) = self.asked(asleep=True)
        self.end_of(sleep)
        assert self.records.lists == lists + 1, "one List is asked for"
        self.records.lacks = frozenset()
        self.may_end = self.some(may_end)
        if not may_end:
            self.answer()  # what has nothing more to ask asks nothing

    def step_settle(self, _x: int, _y: int) -> None:
        self.answer()
        self.may_end = frozenset()

    def step_admit(self, number: int, index: int) -> None:
        self.may_end -= {self.devices[index]}
        super().step_admit(number, index)
        self.records.written += 1

    def step_admit_again(self, number: int, index: int) -> None:
        self.may_end -= {*self.pods[number].devices}
        super().step_admit_again(number, index)
        self.records.written += 1

    def step_prestart(self, number: int, index: int) -> None:
        self.may_end -= {*self.pods[number].devices}
        super().step_prestart(number, index)

    def step_kubelet_restarts(self, _x: int, _y: int) -> None:
        for number in tuple(self.calls):
            self.cancel(number)
        self.instance += 1
        self.records.life += 1
        self.may_end = frozenset()
        self.report_instance()
        self.answer()  # whose claims these are, and what was asked of the former kubelet

    def step_readmitted(self, _x: int, _y: int) -> None:
        """From now on its Lists have what its pods have."""

    def step_kubelet_answers(self, _x: int, _y: int) -> None:
        self.plugin.call(lambda: self.plugin.reconciler.stream_opened(REGIONS))
        for _ in range(20):
            if self.plugin.reconciler.answered:
                break
            self.end_of([*self.asked(), *self.asked(asleep=True)][0])
        self.answer()


@contextmanager
def stock_replays() -> Iterator[StockReplay]:
    sleep = asyncio.sleep

    async def gated(seconds: float) -> None:
        task = asyncio.current_task()
        if task is None or not task.get_name().startswith(ASIDE):
            await sleep(seconds)
        else:
            await start_job(replay.plugin, wake_up)

    with replays(StockReplay) as replay, mock.patch("asyncio.sleep", gated):
        yield replay


@pytest.mark.parametrize("trace", TRACES, ids=lambda path: path.stem)
def test_after_each_step_of_a_stock_trace_the_plugin_is_as_the_model_says(trace: Path):
    with stock_replays() as replay:
        play(replay, trace)


def test_the_traces_have_every_kind_of_step_of_a_stock_kubelet():
    lines = [line for trace in TRACES for line in trace.read_text().splitlines()]
    names = {line.split()[0] for line in lines}
    steps = {n.removeprefix("step_") for n in dir(StockReplay) if n.startswith("step_")}
    assert names == steps - {"deallocate", "poststop", "crash_away"}  # an extended kubelet's


def test_a_claim_that_ends_after_one_list_is_not_what_the_model_says(
    monkeypatch: pytest.MonkeyPatch,
):
    counted = reconcile.Reconciler._list

    async def each(reconciler: reconcile.Reconciler, podresources: PodResourcesClient) -> None:
        await counted(reconciler, podresources)
        await counted(reconciler, podresources)

    monkeypatch.setattr(reconcile.Reconciler, "_list", each)
    with stock_replays() as replay, pytest.raises(AssertionError, match=r"\d+: list "):
        play(replay, TRACES[0])
