"""The backend in docs/backends.md is complete: the life of an allocation runs on it."""

import asyncio
import functools
import inspect
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
from doubles.cards import AFU, BLANK, PREFIX
from ledger_support import MemoryJournal
from ledger_world import Images, Plugin, Pod, start_job
from repository import ROOT

from fpga_plugin.allocation.journal.records import Condition
from fpga_plugin.allocation.names import resource_names
from fpga_plugin.bitstreams.store import Bitstream
from fpga_plugin.errors import CardGoneError, PortInUseError, UnknownDeviceError
from fpga_plugin.hardware import backend as interface
from fpga_plugin.hardware.faults import FaultKind
from fpga_plugin.hardware.image import RawImage
from fpga_plugin.hardware.model import CardProblem
from fpga_plugin.ids import AfuId, CardId, DeviceId, RegionId, device_variable
from fpga_plugin.kubernetes.names import PodUid
from fpga_plugin.settings.settings import RecoveryPolicy, ScrubPolicy

DOCUMENT = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")
(CODE,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
CARD = CardId("0000-3b-00.0")
R0, R1 = RegionId(f"{CARD}-p0"), RegionId(f"{CARD}-p1")
TORN = AfuId("bad" + "0" * 29)


class Files(Images):
    """`StoreReader` whose images begin with their AFU id; one is torn."""

    async def load(self, interface_id, bitstream_id, takes):
        return self._of(interface_id, AfuId(bitstream_id))

    async def blank(self, interface_id, takes):
        return self._of(interface_id, BLANK)

    @staticmethod
    def _of(interface_id, afu):
        image = b"torn" if afu == TORN else bytes.fromhex(afu) + b"and more"
        return Bitstream("/srv/x.gbs", interface_id, f"{afu}", afu, RawImage(image))


class Node:
    """A card of two regions in a folder, and the plugin on the example."""

    def __init__(self, root, recovery=RecoveryPolicy.NONE):
        self.folder = root / CARD
        self.folder.mkdir()
        for port in range(2):
            (self.folder / str(port)).write_bytes(b"somebody's logic")
        example = {}
        exec(compile(CODE, "docs/backends.md", "exec"), example)
        self.backend = example["FolderBackend"](str(root))
        self.backend.boards = {}  # what `Plugin.end` looks through
        self.events = example["FolderEvents"]()
        self.pods = []
        self.plugin = Plugin(
            self.backend,
            self.pods,
            Files(),
            MemoryJournal(),
            scrub=ScrubPolicy.REQUIRED,
            recovery=recovery,
        )
        self.ledger = self.plugin.ledger

    def power_on(self):
        self.events.start(self.plugin.hardware.changed)
        self.plugin.begin(self.plugin.hardware.scan())
        self.plugin.work()
        self.plugin.call(lambda: self.ledger.device_plugin.kubelet_found("life 1"))
        self.plugin.kubelet_answers()
        self.plugin.work()
        (self.resource, _) = resource_names(PREFIX, self.ledger.cards[CARD])

    def admit(self, region):
        device = DeviceId(region)
        allocate = self.plugin.calls.allocate
        answer = self.plugin.call(lambda: allocate(self.resource, [device]))
        pod = Pod(PodUid(f"pod-{len(self.pods)}"), self.resource, (device,), {})
        self.pods.append(pod)
        return pod, answer

    def start(self, pod, afu):
        card = self.ledger.cards[CARD]
        env = {"FPGA_REGION_0": card.interface_id, "FPGA_BITSTREAM_ID_0": afu}
        start = self.plugin.prestarts.serve(pod.resource, pod.devices, env, 30.0)
        task = self.plugin.begin(start)
        self.plugin.work()
        return task

    def end(self, pod):
        pod.active = False
        self.plugin.call(lambda: self.plugin.calls.deallocate(pod.resource, pod.devices))
        self.plugin.work()

    def look(self):
        self.plugin.call(lambda: self.events.changed(CARD))
        self.plugin.work()

    def logic(self, region):
        return self.backend.afu_id(self.ledger.region(region))

    def conditions(self):
        return {self.ledger.record(region).condition for region in (R0, R1)}


@pytest.fixture
def make(tmp_path):
    made = []

    async def to_thread(function, *args, **kwargs):
        return await start_job(made[-1].plugin, functools.partial(function, *args, **kwargs))

    def node(**options):
        made.append(Node(tmp_path, **options))
        made[-1].power_on()
        return made[-1]

    with mock.patch.object(asyncio, "to_thread", to_thread):
        yield node
        for one in made:
            one.events.close()
            one.plugin.end()


def test_the_document_names_every_method_and_the_example_has_them():
    protocols = {
        "FolderPort": interface.Port,
        "FolderBackend": interface.Backend,
        "FolderEvents": interface.EventSource,
    }
    for name, protocol in protocols.items():
        methods = [m for m, _ in inspect.getmembers(protocol, inspect.isfunction) if m[0] != "_"]
        assert len(methods) > 1
        section = CODE.partition(f"class {name}:")[2].partition("\nclass ")[0]
        assert [m for m in methods if f"def {m}(" not in section] == []
        assert [m for m in methods if f"`{m}`" not in DOCUMENT.replace(CODE, "")] == []


def test_the_example_is_short():
    assert sum(bool(line.strip()) for line in CODE.splitlines()) <= 93


def test_the_examples_types_are_right(tmp_path):
    (tmp_path / "folders.py").write_text(CODE, encoding="utf-8")
    (tmp_path / "use.py").write_text(
        "from fpga_plugin.hardware.backend import Backend, EventSource\n"
        "from folders import FolderBackend, FolderEvents\n"
        "backend: Backend = FolderBackend('/')\n"
        "events: EventSource = FolderEvents()\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file="]
    command += ["--cache-dir", str(tmp_path / "cache"), str(tmp_path / "use.py")]
    env = {**os.environ, "MYPYPATH": str(tmp_path)}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_an_allocation_lives_on_the_example(make):
    node = make()
    assert node.conditions() == {Condition.BLANK}
    pod, answer = node.admit(R0)
    assert answer.nodes == (str(node.folder / "0"),)
    assert answer.envs[device_variable(R0)] == answer.envs["FPGA_DEVICE_1"] == answer.nodes[0]
    node.start(pod, AFU).result()
    assert (node.logic(R0), node.logic(R1)) == (AFU, BLANK)
    assert node.ledger.record(R0).condition is Condition.PROGRAMMED
    node.end(pod)
    assert node.logic(R0) == BLANK
    assert node.conditions() == {Condition.BLANK}


def test_a_failed_pr_on_the_example_is_told_and_mended_by_a_rebind(make):
    node = make(recovery=RecoveryPolicy.REBIND)
    pod, _ = node.admit(R0)
    with mock.patch.object(node.plugin.recovery, "may", return_value=False):
        task = node.start(pod, TORN)
    assert "write 16 bytes into each empty file" in str(task.exception())
    assert node.ledger.record(R0).condition is Condition.FAULTED
    assert node.ledger.failing[R0].kind is FaultKind.POISONED
    assert R1 not in node.ledger.failing
    node.end(pod)
    node.look()
    assert node.plugin.recovery.done == 1
    assert node.conditions() == {Condition.BLANK}


def test_a_region_of_the_example_that_was_replaced_is_another_one(make):
    node = make()
    pod, _ = node.admit(R0)
    node.start(pod, AFU).result()
    before = node.ledger.region(R0)
    (node.folder / "new").write_bytes(bytes.fromhex(AFU))
    (node.folder / "new").rename(node.folder / "0")
    with pytest.raises(CardGoneError, match="another one"):
        node.backend.afu_id(before)
    node.look()
    assert node.ledger.record(R0).condition is Condition.DIRTY
    assert node.ledger.region(R0) != before


def test_a_region_of_the_example_opens_for_one_only(make):
    node = make()
    card = node.ledger.cards[CARD]
    with (
        node.backend.open_port(card, card.regions[0]),
        pytest.raises(PortInUseError),
        node.backend.open_port(card, card.regions[0]),
    ):
        pass


def test_the_example_tells_what_is_wrong_with_a_card(make):
    node = make()
    (node.folder / "README").touch()
    assert isinstance(node.backend.scan().problems[CARD], CardProblem)
    (node.folder / "README").unlink()
    assert node.backend.scan().cards == node.ledger.cards
    gone = SimpleNamespace(regions=node.ledger.cards[CARD].regions)
    (node.folder / "1").unlink()
    assert node.backend.health(gone).failed[R1].kind is FaultKind.TRANSIENT
    node.look()
    pod, _ = node.admit(R0)
    with pytest.raises(UnknownDeviceError):
        node.admit(R1)
    node.start(pod, AFU).result()
