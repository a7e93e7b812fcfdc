"""The periodic look at all cards: cheap where nothing changed, and it misses nothing."""

import asyncio
import contextlib
import os
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from doubles import LIMIT
from doubles.journal import NoJournal

from fpga_plugin.allocation.journal.journal import JournalError
from fpga_plugin.allocation.journal.records import Change, Condition
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.queue import CardQueue
from fpga_plugin.allocation.recorder import EventRecorder
from fpga_plugin.allocation.requests.directory import PodDirectory
from fpga_plugin.cards import reads
from fpga_plugin.cards.blanks import Blanks
from fpga_plugin.cards.inventory import Inventory
from fpga_plugin.cards.operations import CardOperations
from fpga_plugin.cards.reads import CardReads
from fpga_plugin.cards.workers import CardWorkers
from fpga_plugin.hardware.faults import Fault, FaultKind
from fpga_plugin.hardware.simulated.factory import simulated_backend
from fpga_plugin.ids import AfuId, InterfaceId, RegionId
from fpga_plugin.observability import metrics
from fpga_plugin.settings.settings import ScrubPolicy, SimulatedGroup
from fpga_plugin.settings.values import CardSelection

INTERFACE = InterfaceId("ce48969398f05f33946d560708be108a")
REGION = RegionId("0000-10-00.0-p1")


class NoStore:
    async def blank(self, _interface_id, _takes):
        return None

    def blank_path(self, interface_id, _takes):
        return f"/srv/{interface_id}/blank.gbs"


class Node:
    def __init__(self, folder):
        self.folder = folder
        self.looked_closely = []
        groups = [SimulatedGroup(cards=3, regions=2, interface_id=INTERFACE)]
        hardware = simulated_backend(str(folder), groups, pr_seconds=0, owner=True)
        self.backend = hardware.backend
        self.ledger = Ledger(
            prefix="fpga.intel.com", journal=NoJournal(), snapshot=Change(), boot_id="boot"
        )
        self.workers = CardWorkers()
        operations = CardOperations(
            ledger=self.ledger,
            backend=hardware.backend,
            blanks=Blanks(NoStore(), ScrubPolicy.REQUIRED),
            workers=self.workers,
            cgroups=None,
            observer=None,
        )
        self.debugged = operations.port_errors_logged
        self.inventory = Inventory(
            operations,
            CardQueue(interval=2.0),
            cards=CardSelection(),
            interval=0.0,
            recorder=EventRecorder(
                None,
                node_name=None,
                pods=PodDirectory(kubelet_dir="/nowhere", prefix="x"),
                observer=None,
            ),
            reads=CardReads(),
        )
        check = self.inventory.check

        async def noted(card):
            self.looked_closely.append(card)
            await check(card)

        self.inventory.check = noted

    def fault(self, word):
        (self.folder / "faults" / REGION).write_text(word)


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def told(node, *steps):
    async def story():
        await node.inventory.scan()
        node.looked_closely.clear()
        for step in steps:
            step()
            await node.inventory.check_all()
            await asyncio.gather(*node.inventory._tasks)

    asyncio.run(story())


def test_cards_that_look_as_before_are_not_looked_at_closely(node):
    told(node, lambda: None, lambda: None)
    assert node.looked_closely == []


def test_a_card_that_fails_is_found_and_one_that_recovers_too(node):
    seen = []
    told(
        node,
        lambda: node.fault("thermal"),
        lambda: (
            seen.append(dict(node.ledger.failing)) or os.unlink(node.folder / "faults" / REGION)
        ),
    )
    assert list(seen[0]) == [REGION]
    assert node.ledger.failing == {}
    assert set(node.looked_closely) == {"0000-10-00.0"}


@pytest.mark.parametrize(
    ("kind", "recovered"), [(FaultKind.POISONED, True), (FaultKind.TRANSIENT, False)]
)
def test_only_a_region_that_was_poisoned_is_recovered_at_once(node, kind, recovered):
    """A rebind has an end; a card at the edge of its temperature limit comes and goes."""
    node.inventory._interval = 1000.0
    fault = Fault(kind, "what the hardware says")
    told(node, lambda: node.ledger.hardware.set_failing("0000-10-00.0", {REGION: fault}))
    assert (REGION not in node.ledger.failing) == recovered


def test_a_clean_region_that_somebody_else_programmed_is_dirty(node):
    def left_clean():
        node.ledger.work.working([REGION])
        node.ledger.work.clean(REGION, AfuId("0" * 32), blank=True)

    told(node, left_clean)
    assert node.ledger.record(REGION).condition is Condition.DIRTY


def test_a_journal_that_cannot_be_written_ends_no_look(node):
    """Found by the campaign: the plugin ended itself."""
    written: list[Change] = []

    def write(change):
        if len(written) == 2:
            written.append(change)
            raise JournalError("no space left")
        written.append(change)

    def left_clean():
        node.ledger.work.working([REGION])
        node.ledger._journal = SimpleNamespace(write=write)
        written[:] = [Change()]
        node.ledger.work.clean(REGION, AfuId("0" * 32), blank=True)

    told(node, left_clean, lambda: None)
    assert len(written) == 3, "the last one failed"
    assert node.ledger.record(REGION).condition is Condition.DIRTY


def test_a_card_at_work_is_looked_at_by_the_look_after_the_work(node):
    async def story():
        await node.inventory.scan()
        node.looked_closely.clear()
        node.fault("thermal")
        async with node.workers.lock("0000-10-00.0"):
            await node.inventory.check_all()
            assert not node.looked_closely
        await node.inventory.check_all()
        await asyncio.gather(*node.inventory._tasks)
        assert list(node.ledger.failing) == [REGION]

    asyncio.run(story())


def test_a_card_whose_port_errors_are_to_be_logged_is_looked_at_closely(node):
    told(node, lambda: node.debugged.add(REGION))
    assert node.looked_closely == ["0000-10-00.0"]


def test_a_degraded_card_is_counted_and_loses_nothing(node):
    def throttles():
        health = node.backend.health
        node.backend.health = lambda card: replace(health(card), degraded=("power: AP1", "pcie: x"))

    told(node, throttles)
    plugin = SimpleNamespace(inventory=node.inventory)
    (degraded,) = [value for name, _, value in metrics._OF_A_CARD if name == "card_degraded"]
    assert {degraded(plugin, {"card": card}) for card in node.ledger.cards} == {2}
    assert not node.ledger.failing


@contextlib.contextmanager
def silent(node, card, name):
    """One card's reads of a kind do not end."""
    read = getattr(node.backend, name)
    gate = threading.Event()

    def hung(found):
        if card in {found, getattr(found, "id", None)}:
            gate.wait(LIMIT)
        return read(found)

    setattr(node.backend, name, hung)
    try:
        yield gate
    finally:
        gate.set()


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(reads, "CARD_SECONDS", 0.5)


def test_a_card_that_does_not_answer_is_out_of_service_and_the_others_are_looked_at(node, soon):
    async def story():
        await node.inventory.scan()
        before = threading.active_count()
        with silent(node, "0000-11-00.0", "health") as gate:
            node.fault("thermal")
            for _ in range(4):
                await node.inventory.check_all()
            # One of asyncio's own, too; and those that have just ended are counted for a moment.
            async with asyncio.timeout(LIMIT):
                while threading.active_count() > before + 2:  # noqa: ASYNC110  # it has no event
                    await asyncio.sleep(0.01)
            failing = node.ledger.failing
            assert "thermal" in failing[REGION].message
            assert {r for r, fault in failing.items() if fault.message == reads.SILENT} == {
                "0000-11-00.0-p0",
                "0000-11-00.0-p1",
            }
            gate.set()
            async with asyncio.timeout(LIMIT):
                while set(failing) != {REGION}:
                    await node.inventory.check_all()
                    await asyncio.gather(*node.inventory._tasks)

    asyncio.run(story())


def test_a_card_that_does_not_answer_at_the_start_holds_up_no_other_and_is_found_later(node, soon):
    async def story():
        with silent(node, "0000-11-00.0", "scan_card") as gate:
            await node.inventory.scan()
            assert set(node.ledger.cards) == {"0000-10-00.0", "0000-12-00.0"}
            assert node.inventory.problems["0000-11-00.0"].message == reads.SILENT
            gate.set()
            async with asyncio.timeout(LIMIT):
                while len(node.ledger.cards) < 3:
                    await node.inventory.check_all()
                    await asyncio.sleep(0.01)
            assert not node.inventory.problems
        await node.inventory.close()

    asyncio.run(story())


def test_a_known_card_that_does_not_answer_a_scan_is_not_gone(node, soon):
    async def story():
        await node.inventory.scan()
        with silent(node, "0000-11-00.0", "scan_card"):
            await node.inventory.scan()
            await node.inventory.look("0000-11-00.0")
            assert len(node.ledger.cards) == 3
            assert {"0000-11-00.0-p0", "0000-11-00.0-p1"} == set(node.ledger.failing)
        await node.inventory.close()

    asyncio.run(story())
