"""What a look at the cards reads, whom it reports, and what becomes of a look that comes too late.

Each look reads in threads, and meanwhile cards come, go, are replaced, or are worked on. Nothing of
this may take a card that is another one by now for the one that was read (invariants 2 and 4), nor
a PR for a fault (invariant 3).
"""

from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import pytest
from doubles.cards import AFU, BLANK, PREFIX
from ledger_scene import Scene, scenes
from ledger_support import listed
from ledger_world import FACTORY, Plugin, Reads
from structlog.testing import capture_logs

from fpga_plugin.allocation.exposure import ExposurePolicy
from fpga_plugin.allocation.journal.records import Condition
from fpga_plugin.allocation.names import resource_names
from fpga_plugin.cards.inventory import Inventory
from fpga_plugin.cards.reads import SILENT, SilentCardError
from fpga_plugin.cards.workers import STUCK, STUCK_HINT, WORK_SECONDS
from fpga_plugin.errors import HardwareError, NotFinishedError, RefusedError
from fpga_plugin.hardware.faults import Fault, FaultKind
from fpga_plugin.hardware.model import Card, CardHealth, CardProblem, Iommu, Region
from fpga_plugin.ids import AfuId, CardId, DeviceId, PciAddress, RegionId
from fpga_plugin.settings.settings import Exposure, ScrubPolicy
from fpga_plugin.settings.values import CardSelection

T = TypeVar("T")

HOT = Fault(FaultKind.TRANSIENT, "thermal: AP6")


class SomeSilent(Reads):
    """Reads of which some cards' do not end.

    Attributes:
        silent: how many reads these cards still answer.
        singly: the cards that were read each by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.silent: dict[CardId, int] = {}
        self.singly: list[CardId] = []

    async def run(self, card: CardId, function: Callable[[], T]) -> T:
        self.singly.append(card)
        if self.silent.get(card) == 0:
            await super().run(card, lambda: None)  # so much time passes at least
            raise SilentCardError(f"card {card}: {SILENT}")
        if card in self.silent:
            self.silent[card] -= 1
        return await super().run(card, function)

    async def each(
        self, cards: Iterable[CardId], function: Callable[[CardId], T]
    ) -> tuple[dict[CardId, T], frozenset[CardId]]:
        wanted = tuple(cards)
        answers, _ = await super().each((c for c in wanted if c not in self.silent), function)
        return answers, frozenset(wanted) & self.silent.keys()


class Looks:
    """An inventory over the cards of a scene: one of two regions, and one of one.

    Attributes:
        read: each read of the hardware, and of which card.
        told: what the node heard of which card.
        queued: the cards of which the queue heard.
        logged: each line.
        problems: cards that are there and cannot be served.
        errors: port errors by region; None: they cannot be read.
        degraded: signals of all cards that take nothing away.
        unguarded: what of the guard of all cards is missing.
    """

    def __init__(
        self,
        scene: Scene,
        logged: list[Mapping[str, Any]],
        *,
        cards: CardSelection | None = None,
        interval: float = 0.0,
    ) -> None:
        self.scene, self.plugin, self.ledger = scene, scene.plugin, scene.ledger
        self.rack = scene.rack
        self.logged = logged
        self.read: list[tuple[str, CardId]] = []
        self.told: list[tuple[CardId, str]] = []
        self.queued: list[CardId] = []
        self.problems: dict[CardId, CardProblem] = {}
        self.errors: dict[RegionId, Mapping[str, int] | None] = {}
        self.degraded: tuple[str, ...] = ()
        self.unguarded = ""
        self.reads = SomeSilent()
        self._then: dict[tuple[str, CardId], Callable[[], None]] = {}
        for what in ("scan_card", "health", "afu_id", "port_errors"):
            setattr(scene.rack, what, self._noted(what))
        self.one, self.other = scene.rack.boards
        self.inventory = Inventory(
            scene.operations,
            self,  # type: ignore[arg-type]  # the queue
            recorder=self,  # type: ignore[arg-type]
            reads=self.reads,
            cards=cards or CardSelection(),
            interval=interval,
        )

    # the queue

    def add(self, card: CardId) -> None:
        self.queued.append(card)
        self.plugin.queue.add(card)

    # the recorder

    def card_failed(self, card: CardId, reason: str) -> None:
        self.told.append((card, reason))

    def card_recovered(self, card: CardId, what: str) -> None:
        self.told.append((card, what))

    # the hardware

    def _noted(self, what: str) -> Callable[[Any], object]:
        inner = getattr(self, f"_{what}", getattr(self.rack, what))

        def read(of: Any) -> object:
            card = CardId(getattr(of, "card", None) or getattr(of, "id", None) or of)
            self.read.append((what, card))
            try:
                return inner(of)
            finally:
                self._then.pop((what, card), lambda: None)()

        return read

    def _scan_card(self, card: CardId) -> Card | CardProblem | None:
        board = self.rack.boards[card]
        return self.problems.get(card) or (board.card if board.present else None)

    def _health(self, card: Card) -> CardHealth:
        found = type(self.rack).health(self.rack, card)
        return replace(found, degraded=self.degraded, unguarded=self.unguarded)

    def _port_errors(self, region: Region) -> Mapping[str, int]:
        if (errors := self.errors.get(region.id, {})) is None:
            raise HardwareError(f"errors of region {region.id} cannot be read")
        return errors

    def after(self, what: str, card: CardId, then: Callable[[], None]) -> None:
        """Do something once, in the moment in which a read of a card has ended."""
        self._then[what, card] = then

    def reads_of(self, card: CardId, *what: str) -> int:
        return sum(of == card and (not what or which in what) for which, of in self.read)

    # looks

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.plugin.begin(work)
        self.plugin.work()
        task.result()

    def changed(self, card: CardId | None) -> None:
        """An event, and what comes of it."""
        self.event(card)
        self.plugin.work()

    def new(self) -> None:
        """The first card is there again, and nobody knows it any more."""
        board = self.rack.boards[self.one]
        board.present = False
        self.changed(self.one)
        board.present = True

    def event(self, card: CardId | None) -> None:
        self.plugin.call(lambda: self.inventory.changed(card))

    def until(self, done: Callable[[], bool]) -> None:
        """Let the threads that began last end first."""
        while not done():
            assert self.plugin.jobs, "nothing goes on, and it has not happened"
            self.plugin.job(len(self.plugin.jobs) - 1)

    def at(self, instant: float) -> None:
        """Time passes, and whatever is due then is done."""
        self.plugin.loop.call_at(instant, lambda: None)
        while self.plugin.loop.time() < instant:
            assert self.plugin.loop.pass_time()
            self.plugin.work()

    @contextmanager
    def at_work(self, card: CardId) -> Iterator[None]:
        """Somebody holds the card's lock, as for a PR."""
        done = self.plugin.loop.create_future()

        async def work() -> None:
            async with self.scene.operations.workers.lock(card):
                await done

        self.plugin.begin(work())
        try:
            yield
        finally:
            self.plugin.call(lambda: done.set_result(None))
            self.plugin.work()

    @contextmanager
    def in_a_call(self, card: CardId) -> Iterator[None]:
        """A thread works on the card all the time, with the card's lock held."""

        async def work() -> None:
            workers = self.scene.operations.workers
            async with workers.lock(card):
                await workers.run(card, lambda: None)

        self.plugin.begin(work())
        thread = self.plugin.jobs.pop()
        try:
            yield
        finally:
            self.plugin.jobs.append(thread)
            self.plugin.work()

    def lines(self, event: str) -> list[Mapping[str, Any]]:
        return [line for line in self.logged if line["event"] == event]

    def count(self, event: str) -> int:
        return len(self.lines(event))

    def hot(self, region: RegionId, why: str = HOT.message) -> None:
        self.rack.slot(region).failing = why


@pytest.fixture
def looks() -> Iterator[Callable[..., Looks]]:
    """Makes one. No look may end in an error that only the log reports."""
    made: list[Looks] = []
    with scenes() as scene, capture_logs() as logged:

        def make(**options: Any) -> Looks:
            made.append(Looks(scene(), logged, **options))
            logged.clear()
            return made[-1]

        yield make
        assert not any(each.count("scan failed") for each in made)


async def scan(look: Looks) -> None:
    await look.inventory.scan()


async def every(look: Looks) -> None:
    await look.inventory.check_all()


async def one(look: Looks) -> None:
    await look.inventory.check(look.one)


async def event(look: Looks) -> None:
    look.inventory.changed(look.one)


async def lost_events(look: Looks) -> None:
    look.inventory.changed(None)


# ------------------------------------------------------------------ what went, and what came


def test_a_full_scan_notices_a_card_that_went(looks: Callable[..., Looks]) -> None:
    """No event told of it: else it would stay on the list for ever."""
    look = looks()
    look.rack.boards[look.one].present = False
    look.run(look.inventory.scan())
    assert set(look.ledger.cards) == {look.other}
    assert look.told == [(look.one, "gone")]
    look.run(look.inventory.scan())
    look.changed(look.one)
    assert look.count("card gone") == 1
    assert look.told == [(look.one, "gone")]


def test_a_card_that_comes_while_all_are_scanned_is_not_called_gone(
    looks: Callable[..., Looks],
) -> None:
    look = looks()
    board = look.rack.boards[look.one]
    board.present = False
    look.changed(look.one)
    scanning = look.plugin.begin(look.inventory.scan())
    look.plugin.job(0)  # which cards there are

    def comes() -> None:
        board.present = True
        look.event(look.one)
        look.until(lambda: look.one in look.ledger.cards)

    look.after("health", look.other, comes)
    look.plugin.work()
    scanning.result()
    assert look.one in look.ledger.cards
    assert look.count("card gone") == 1, "only when it went"


def test_a_full_scan_does_not_take_in_what_a_card_was_before_an_event(
    looks: Callable[..., Looks],
) -> None:
    """Invariant 2: the instance that the scan read is not there any more."""
    look = looks()

    def replaced() -> None:
        look.scene.swap(look.one, told=False)
        look.event(look.one)
        look.until(lambda: look.count("card went and came back") > 0)

    look.after("health", look.one, replaced)
    look.run(look.inventory.scan())
    assert look.ledger.cards[look.one] == look.rack.boards[look.one].card
    assert look.count("card went and came back") == 1


@pytest.mark.parametrize(
    ("scanned", "then"),
    [("served", "problem"), ("absent", "problem"), ("problem", "served"), ("problem", "absent")],
)
def test_a_full_scan_does_not_say_of_a_card_what_was_so_before_an_event(
    looks: Callable[..., Looks], scanned: str, then: str
) -> None:
    """The status, and whoever claims it, would be told for ever why it is skipped, or never."""
    look = looks()
    board = look.rack.boards[look.one]
    problem = CardProblem(board.card.address, "no FME")

    def become(state: str) -> None:
        board.present = state != "absent"
        look.problems = {look.one: problem} if state == "problem" else {}

    def turns() -> None:
        become(then)
        look.event(look.one)
        look.until(lambda: not look.plugin.jobs)

    become(scanned)
    look.changed(look.one)
    look.after("health", look.other, turns)
    look.run(look.inventory.scan())
    assert (look.one in look.ledger.cards) == (then == "served")
    assert look.inventory.problems == look.problems


@pytest.mark.parametrize("begin", [scan, event], ids=["scan", "event"])
def test_of_two_looks_the_later_one_is_believed(
    looks: Callable[..., Looks], begin: Callable[[Looks], Coroutine[Any, Any, None]]
) -> None:
    """The first one waits for the store, after it saw the card; the second one sees none."""
    look = looks()
    look.scene.operations.blanks.forget(None)
    look.plugin.begin(begin(look))
    while look.scene.operations.blanks._afus or look.reads_of(look.one, "afu_id") < 2:
        look.plugin.job(0)
    look.rack.boards[look.one].present = False
    look.plugin.begin(begin(look))
    for _ in range(3):  # all that the second one would do now
        if len(look.plugin.jobs) > 1:
            look.plugin.job(1)
    look.plugin.work()
    assert look.one not in look.ledger.cards


@pytest.mark.parametrize("begin", [scan, event], ids=["scan", "event"])
def test_a_card_that_goes_while_it_is_looked_at_is_looked_at_again_and_no_other(
    looks: Callable[..., Looks], begin: Callable[[Looks], Coroutine[Any, Any, None]]
) -> None:
    look = looks()
    look.new()
    look.after("scan_card", look.one, lambda: setattr(look.rack.boards[look.one], "present", False))
    look.run(begin(look))
    look.plugin.work()
    assert look.one not in look.ledger.cards
    look.rack.boards[look.one].present = True
    before = look.reads_of(look.other)
    look.at(1.0)
    assert look.one in look.ledger.cards
    assert look.reads_of(look.other) == before


@pytest.mark.parametrize("busy", [False, True])
def test_a_full_scan_looks_once_at_what_is_well(looks: Callable[..., Looks], *, busy: bool) -> None:
    look = looks()
    if busy:
        with look.at_work(look.one):
            look.run(look.inventory.scan())
    else:
        look.run(look.inventory.scan())
    before = len(look.read)
    look.at(5.0)
    assert len(look.read) == before
    assert not look.told


@pytest.mark.parametrize("begin", [scan, event], ids=["scan", "event"])
def test_a_card_that_comes_hot_is_out_of_service_when_the_look_is_over(
    looks: Callable[..., Looks], begin: Callable[[Looks], Coroutine[Any, Any, None]]
) -> None:
    """Invariant 4: a card that is not known yet is not offered first and judged later."""
    look = looks()
    look.new()
    look.hot(look.scene.regions[0])
    look.run(begin(look))
    assert look.ledger.failing == {look.scene.regions[0]: HOT}
    if begin is scan:
        assert look.reads_of(look.one, "health") == 1, "the scan's own"


def test_a_card_that_was_added_is_scrubbed_though_only_recovery_looked(
    looks: Callable[..., Looks],
) -> None:
    look = looks()
    look.scene.swap(look.one, told=False)
    look.run(look.inventory.look(look.one))
    look.plugin.work()
    assert look.one in look.queued
    assert all(look.scene.condition(r) is Condition.BLANK for r in look.scene.regions)
    assert look.told == [(look.one, "it went and came back")]


def test_a_card_is_told_of_once(looks: Callable[..., Looks]) -> None:
    look = looks()
    look.new()
    for _ in range(2):
        look.changed(look.one)
        look.run(look.inventory.scan())
    assert [line["card"] for line in look.lines("card found")] == [look.one]
    assert look.count("card gone") == 1


def test_a_card_that_cannot_be_reprogrammed_is_told_of(looks: Callable[..., Looks]) -> None:
    look = looks()
    board = look.rack.boards[look.one]
    board.card = replace(board.card, reprogrammable=False)
    look.changed(look.one)
    look.changed(look.one)
    assert look.count("card cannot be reprogrammed") == 1


@pytest.mark.parametrize("begin", [scan, event], ids=["scan", "event"])
def test_what_the_journal_has_as_clean_is_not_scrubbed_because_the_plugin_is_new(
    looks: Callable[..., Looks], begin: Callable[[Looks], Coroutine[Any, Any, None]]
) -> None:
    """Invariant 9: the first look at a card asks what its blank reads as."""
    look = looks()
    scene = look.scene
    scene.plugin.end()
    scene.plugin = Plugin(scene.rack, [], scene.images, scene.journal, scrub=ScrubPolicy.REQUIRED)
    scene.ledger, scene.operations = scene.plugin.ledger, scene.plugin.operations
    again = Looks(scene, look.logged)
    again.run(begin(again))
    again.plugin.work()
    assert again.reads_of(again.one, "afu_id")
    for region in again.ledger.cards[again.one].regions:
        assert scene.condition(region.id) is Condition.BLANK


@pytest.mark.parametrize(
    ("functions", "reprogrammable", "wanted"),
    [(False, True, True), (True, True, False), (False, False, False), (True, False, False)],
)
def test_a_blank_is_looked_for_only_where_a_region_can_be_blanked(
    looks: Callable[..., Looks], *, functions: bool, reprogrammable: bool, wanted: bool
) -> None:
    """Else every N3000, and every node that serves functions, would be told to install one."""
    look = looks()
    look.scene.hold_releases()
    look.scene.images.has_blank = False
    look.scene.operations.blanks.forget(None)
    look.ledger.naming.serves_functions = functions
    board = look.rack.boards[look.one]
    board.card = replace(board.card, reprogrammable=reprogrammable)
    look.changed(look.one)
    assert bool(look.count("blank bitstream missing")) == wanted


# ------------------------------------------------------------------ a card at work


@pytest.mark.parametrize("begin", [scan, every, one, event, lost_events])
def test_no_look_judges_the_health_of_a_card_that_is_worked_on(
    looks: Callable[..., Looks], begin: Callable[[Looks], Coroutine[Any, Any, None]]
) -> None:
    """A PR looks like a poisoned port, for which an owner's device is Unhealthy (invariant 3)."""
    look = looks()
    with look.at_work(look.one):
        look.hot(look.scene.regions[0], "poisoned: a PR runs")
        looking = look.plugin.begin(begin(look))
        look.plugin.work()
        assert look.reads_of(look.one, "health") == 0
        assert not look.ledger.failing
        if begin in {scan, every, lost_events}:
            assert look.reads_of(look.other, "health"), "the others are not held up"
        look.hot(look.scene.regions[0], "")
    looking.result()
    assert not look.ledger.failing
    assert not look.told


def test_work_that_does_not_end_keeps_no_other_card_from_the_regular_look(
    looks: Callable[..., Looks],
) -> None:
    """Invariant 8. The card itself is looked at once the work has ended."""
    look = looks(interval=10.0)
    look.plugin.begin(look.inventory.run())
    mine, other = look.scene.regions[0], look.scene.regions[2]
    look.hot(mine)
    with look.at_work(look.one):
        look.at(10.0)
        look.hot(other)
        look.at(20.0)
        assert look.ledger.failing == {other: HOT}
        assert not look.inventory._tasks, "no look waits for the work"
        look.problems[look.one] = CardProblem(PciAddress.parse(look.one), "no answer", passing=True)
        look.changed(look.one)
        look.at(30.0)
        assert not look.inventory._tasks, "nor one at a card that cannot be served meanwhile"
        look.problems.clear()
    look.at(40.0)
    look.at(50.0)
    assert look.ledger.failing == {mine: HOT, other: HOT}


def test_a_card_on_which_a_call_does_not_end_is_out_of_service_until_it_does(
    looks: Callable[..., Looks],
) -> None:
    """Invariant 4. Its owners lose nothing before it is certain that this is no slow work."""
    look = looks(interval=60.0)
    look.plugin.begin(look.inventory.run())
    regions = look.scene.regions[:2]
    with look.in_a_call(look.one):
        look.at(WORK_SECONDS)
        assert not look.ledger.failing
        look.at(WORK_SECONDS + 180.0)
        stuck = Fault(FaultKind.TRANSIENT, STUCK, STUCK_HINT)
        assert look.ledger.failing == dict.fromkeys(regions, stuck)
        assert look.told == [(look.one, f"region {r}: {stuck.told}") for r in regions], "once"
    look.at(WORK_SECONDS + 240.0)
    assert set(look.ledger.failing) == set(regions), "it is well, but not for long enough"
    look.at(WORK_SECONDS + 360.0)
    assert not look.ledger.failing
    assert look.told[2:] == [(look.one, f"region {r} is well again") for r in regions]


def test_a_card_is_not_stuck_whose_work_is_long_but_none_of_its_calls(
    looks: Callable[..., Looks],
) -> None:
    """Whoever holds the lock may wait for the store, or make many calls."""
    look = looks(interval=60.0)
    look.plugin.begin(look.inventory.run())
    with look.at_work(look.one):
        for end in (600.0, 1200.0):
            look.plugin.begin(look.scene.operations.workers.run(look.one, lambda: None))
            thread = look.plugin.jobs.pop()
            look.at(end)
            look.plugin.jobs.append(thread)
            look.plugin.work()
        look.at(3000.0)
    assert not look.told


def test_nobody_is_offered_a_card_on_which_a_pr_does_not_end_and_who_gets_it_hears_why(
    looks: Callable[..., Looks],
) -> None:
    look = looks(interval=60.0)
    scene, (one, two, other) = look.scene, look.scene.regions
    programmed, waiting = scene.admit(one), scene.admit(two)
    scene.prestart(programmed, AFU)
    scene.until(lambda: bool(scene.operations.workers._in_flight))
    pr = scene.plugin.jobs.pop()
    scene.prestart(waiting, AFU)
    look.plugin.begin(look.inventory.run())
    look.at(WORK_SECONDS + 60.0)
    offered = listed(scene.ledger, scene.plugin.lists)
    assert {d for devices in offered.values() for d in devices if devices[d]} == {
        other,
        look.other,
    }
    words = f"{STUCK}.*power-cycle the node"
    with pytest.raises(RefusedError, match=words):
        scene.admit(two)
    scene.plugin.jobs.append(pr)
    look.at(WORK_SECONDS + 240.0)
    assert not look.ledger.failing
    scene.start(waiting, AFU)


def test_a_guard_whose_setting_does_not_end_keeps_no_other_card_from_the_regular_look(
    looks: Callable[..., Looks],
) -> None:
    """Invariant 8: that of another card is set meanwhile, and its health is known."""
    look = looks(interval=10.0)
    guarded: list[CardId] = []
    stuck = look.plugin.loop.create_future()

    async def run(card: CardId, *_: object, **__: object) -> str:
        guarded.append(card)
        if card == look.one:
            await stuck
        return ""

    look.plugin.begin(look.inventory.run())
    look.rack.guard = lambda card, *, left: ""  # type: ignore[method-assign]
    look.unguarded = "mask"
    with mock.patch.object(look.scene.operations.workers, "run", run):
        look.at(10.0)
        look.hot(look.scene.regions[2])
        look.at(20.0)
        assert look.ledger.failing == {look.scene.regions[2]: HOT}
        assert guarded == [look.one, look.other, look.other]
        look.plugin.call(lambda: stuck.set_result(None))
        look.plugin.work()


# ------------------------------------------------------------------ cards that are left alone


@pytest.mark.parametrize("begin", [scan, every, lost_events])
def test_a_card_that_is_not_selected_is_not_touched(
    looks: Callable[..., Looks], begin: Callable[[Looks], Coroutine[Any, Any, None]]
) -> None:
    """Somebody else's: not even its AFU id is read, and no event makes the plugin look."""
    look = looks()
    out = look.other
    look.run(look.inventory.scan())
    look.plugin.call(lambda: look.ledger.hardware.card_gone(out))
    look.read.clear()
    look.logged.clear()
    look.inventory._cards = CardSelection(excluded=frozenset({out}))
    look.run(begin(look))
    assert look.reads_of(out, "afu_id", "health") == 0
    look.read.clear()
    look.changed(out)
    assert not look.read
    look.problems[out] = CardProblem(look.rack.boards[out].card.address, "no FME")
    look.run(begin(look))
    assert out not in look.ledger.cards
    assert out not in look.inventory.problems
    assert not look.count("card skipped")


@pytest.mark.parametrize("first", [scan, event], ids=["scan", "event"])
def test_a_card_that_cannot_be_served_holds_up_no_other_and_is_told_of_once(
    looks: Callable[..., Looks], first: Callable[[Looks], Coroutine[Any, Any, None]]
) -> None:
    look = looks()
    address = look.rack.boards[look.one].card.address
    for told, words in enumerate(("no FME", "no interface id"), 1):
        look.problems[look.one] = CardProblem(address, words)
        for begin in (first, scan, event, every):
            look.run(begin(look))
            look.plugin.work()
            assert set(look.ledger.cards) == {look.other}
            assert look.inventory.problems == look.problems
            assert look.count("card skipped") == told
    before = look.reads_of(look.one)
    look.run(look.inventory.check_all())
    look.plugin.work()
    assert look.reads_of(look.one) == before, "an event reports when it changes"
    look.problems.clear()
    look.changed(look.one)
    assert look.one in look.ledger.cards
    assert not look.inventory.problems


@pytest.mark.parametrize("begin", [scan, event], ids=["scan", "event"])
def test_a_card_that_could_not_be_served_and_went_is_no_problem_any_more(
    looks: Callable[..., Looks], begin: Callable[[Looks], Coroutine[Any, Any, None]]
) -> None:
    look = looks()
    look.problems[look.one] = CardProblem(look.rack.boards[look.one].card.address, "no FME")
    look.changed(look.one)
    assert look.inventory.problems
    look.problems.clear()
    look.rack.boards[look.one].present = False
    look.run(begin(look))
    look.plugin.work()
    assert not look.inventory.problems


# ------------------------------------------------------------------ cards that do not answer


@pytest.mark.parametrize("answers", [0, 1])
def test_a_card_that_stops_answering_in_the_middle_of_a_look_is_out_of_service(
    looks: Callable[..., Looks], answers: int
) -> None:
    """Invariant 4, whichever of the reads does not end."""
    look = looks()
    look.reads.silent[look.one] = answers
    look.changed(look.one)
    assert look.one in look.ledger.cards
    assert not look.inventory.problems
    assert {fault.message for fault in look.ledger.failing.values()} == {SILENT}
    assert len(look.ledger.failing) == 2
    assert not look.count("card found")


def test_whoever_looks_at_a_silent_card_takes_it_out_of_service(
    looks: Callable[..., Looks],
) -> None:
    """Recovery's look does; it does not read the health."""
    look = looks()
    look.reads.silent[look.one] = 0
    look.run(look.inventory.look(look.one))
    assert {fault.message for fault in look.ledger.failing.values()} == {SILENT}


def test_a_new_card_that_does_not_answer_is_a_problem_until_it_does(
    looks: Callable[..., Looks],
) -> None:
    look = looks()
    look.new()
    look.reads.silent[look.one] = 0
    look.changed(look.one)
    assert look.one not in look.ledger.cards
    assert look.inventory.problems[look.one].message == SILENT
    look.reads.silent.clear()
    look.run(look.inventory.check_all())
    look.plugin.work()
    assert look.one in look.ledger.cards
    assert not look.inventory.problems


@pytest.mark.parametrize("begin", [scan, every])
def test_a_known_card_that_does_not_answer_with_the_others_is_not_asked_again_by_itself(
    looks: Callable[..., Looks], begin: Callable[[Looks], Coroutine[Any, Any, None]]
) -> None:
    """Each of these would take ten seconds more, one card after the other; a scan has all wait."""
    look = looks()
    look.reads.silent[look.one] = 0
    look.run(begin(look))
    assert {fault.message for fault in look.ledger.failing.values()} == {SILENT}
    assert set(look.ledger.failing) == {r.id for r in look.ledger.cards[look.one].regions}
    assert look.one not in look.inventory.problems
    assert begin is scan or not look.reads.singly


def test_a_silence_is_not_that_of_the_card_that_came_instead(looks: Callable[..., Looks]) -> None:
    look = looks()
    look.reads.silent[look.one] = 0
    checking = look.plugin.begin(look.inventory.check(look.one))
    look.reads.silent.clear()
    look.scene.swap(look.one, told=False)
    look.plugin.begin(look.inventory.look(look.one))
    look.until(lambda: look.count("card went and came back") > 0)
    look.plugin.work()
    checking.result()
    assert not look.ledger.failing


def test_a_card_that_went_while_its_health_was_read_is_looked_at_again(
    looks: Callable[..., Looks],
) -> None:
    look = looks()
    look.after("health", look.one, lambda: setattr(look.rack.boards[look.one], "present", False))
    look.run(look.inventory.check(look.one))
    assert look.one in look.ledger.cards
    assert not look.ledger.failing
    look.at(1.0)
    assert look.one not in look.ledger.cards


def test_a_region_that_cannot_be_read_is_no_obstacle_to_later_looks(
    looks: Callable[..., Looks],
) -> None:
    look = looks()
    look.scene.hold_releases()
    look.rack.slot(look.scene.regions[0]).afu = None
    for begin in (every, every, scan, one, event):
        look.run(begin(look))
        look.plugin.work()
        assert set(look.ledger.failing) == {look.scene.regions[0]}


# ------------------------------------------------------------------ how often


@pytest.mark.parametrize("known", [True, False], ids=["of a card", "of any"])
def test_many_events_make_one_look_and_one_more_for_those_that_came_meanwhile(
    looks: Callable[..., Looks], *, known: bool
) -> None:
    """A card that is pulled leaves events of which nobody can tell any more whose they were."""
    look = looks()
    card = look.one if known else None

    def storm() -> None:
        for _ in range(5):
            look.inventory.changed(card)

    look.plugin.call(storm)
    look.after("scan_card", look.one, lambda: look.plugin.call(storm))
    look.plugin.work()
    assert look.reads_of(look.one, "scan_card") == 2
    look.changed(card)
    assert look.reads_of(look.one, "scan_card") == 3
    look.run(look.inventory.scan())
    assert look.reads_of(look.one, "scan_card") == 4
    assert not look.inventory._tasks, "what ended is not kept"


def test_each_periodic_look_gives_cards_that_are_well_to_the_queue(
    looks: Callable[..., Looks],
) -> None:
    """What had to be left undone, and no event reports, is tried again."""
    look = looks()
    look.run(look.inventory.check_all())
    assert look.queued == [look.one, look.other]
    assert look.reads.singly == []


def test_the_signals_of_a_card_that_was_replaced_say_nothing_of_the_next(
    looks: Callable[..., Looks],
) -> None:
    """Invariant 4. They look as before, and so does what is known of the next one."""
    look = looks()
    look.scene.hold_releases()
    region = look.scene.regions[2]

    def replaced() -> None:
        look.scene.swap(look.other, told=False)
        look.plugin.begin(look.inventory.look(look.other))
        look.until(lambda: look.count("card went and came back") > 0)
        look.hot(region)

    look.after("afu_id", look.other, replaced)
    look.run(look.inventory.check_all())
    assert look.ledger.failing == {region: HOT}


def test_all_cards_are_looked_at_once_an_interval(looks: Callable[..., Looks]) -> None:
    look = looks(interval=10.0)
    look.plugin.begin(look.inventory.run())
    for instant, read in [(0.0, 0), (9.0, 0), (10.0, 1), (19.0, 1), (20.0, 2), (30.0, 3)]:
        assert not look.plugin.jobs
        look.at(instant)
        assert look.reads_of(look.other, "health") == read
        assert look.reads_of(look.one, "health") == read


@pytest.mark.parametrize(
    ("only", "there", "problem", "named"),
    [
        (None, True, False, []),
        (None, False, True, []),
        (None, False, False, [None]),
        (["0000-10-00.0"], True, False, []),
        (["0000-10-00.0"], False, True, []),
        (["0000-10-00.0"], False, False, ["0000-10-00.0"]),
        (["0000-77-00.0", "0000-10-00.0", "0000-66-00.0"], True, False, ["0000-66", "0000-77"]),
    ],
)
def test_what_is_missing_at_the_start_is_said(
    looks: Callable[..., Looks],
    only: list[str] | None,
    *,
    there: bool,
    problem: bool,
    named: list[str | None],
) -> None:
    """A slip in a setting looks like a node without cards; None: that it is one is said."""
    wanted = None if only is None else frozenset(map(CardId, only))
    look = looks(cards=CardSelection(only=wanted))
    look.rack.boards[look.other].present = False
    look.rack.boards[look.one].present = there
    if problem:
        look.problems[look.one] = CardProblem(look.rack.boards[look.one].card.address, "no FME")
        look.rack.boards[look.one].present = True
    look.run(look.inventory.scan())
    look.inventory.say_what_is_missing("/sys")
    said = look.lines("a card that FPGA_PLUGIN_CARDS names is not there")
    said += look.lines("no FPGA cards on this node")
    assert [line.get("card") for line in said] == [
        name and next(card for card in only or () if card.startswith(name)) for name in named
    ]


# ------------------------------------------------------------------ health


@pytest.mark.parametrize("begin", [one, every])
def test_what_is_wrong_is_told_once_with_its_owner(
    looks: Callable[..., Looks], begin: Callable[[Looks], Coroutine[Any, Any, None]]
) -> None:
    look = looks()
    mine, free, _ = look.scene.regions
    look.scene.start(look.scene.admit(mine), AFU)
    pod = look.scene.pods[0].uid
    story: list[tuple[Mapping[RegionId, str], list[str]]] = [
        ({}, []),
        ({mine: "thermal: AP6"}, [f"region {mine}: thermal: AP6"]),
        ({mine: "thermal: AP6"}, []),
        ({mine: "thermal: AP1"}, [f"region {mine}: thermal: AP1"]),
        ({mine: "thermal: AP1", free: "fatal"}, [f"region {free}: fatal"]),
        ({mine: "thermal: AP1"}, [f"region {free} is well again"]),
        ({}, [f"region {mine} is well again"]),
        ({}, []),
    ]
    for signals, news in story:
        look.told.clear()
        look.logged.clear()
        look.queued.clear()
        for region in (mine, free):
            look.hot(region, signals.get(region, ""))
        look.run(begin(look))
        assert [what for _, what in look.told] == news
        assert {fault.message for fault in look.ledger.failing.values()} == set(signals.values())
        said = look.lines("region unhealthy") + look.lines("region recovered")
        assert len(said) == len(news)
        assert [line.get("pod") for line in said] == [pod if mine in n else None for n in news]
        assert look.one in look.queued
    assert look.scene.condition(free) is Condition.BLANK, "scrubbed since it failed"


def test_an_owner_who_is_not_known_yet_is_not_named(looks: Callable[..., Looks]) -> None:
    look = looks()
    look.scene.admit(look.scene.regions[0])
    look.hot(look.scene.regions[0])
    look.run(look.inventory.check(look.one))
    (line,) = look.lines("region unhealthy")
    assert "pod" not in line


def test_a_degraded_card_is_told_of_once_and_forgotten_when_it_goes(
    looks: Callable[..., Looks],
) -> None:
    look = looks()
    for signals, told in [(("power: AP1",), 1), (("power: AP1",), 0), ((), 0), (("pcie: x",), 1)]:
        look.degraded = signals
        look.logged.clear()
        look.run(look.inventory.check(look.one))
        assert look.inventory.degraded.get(look.one, ()) == signals
        assert [line["signals"] for line in look.lines("card degraded")] == [signals] * told
    look.rack.boards[look.one].present = False
    look.changed(look.one)
    assert look.inventory.degraded.get(look.one, ()) == ()


def test_what_another_process_did_to_a_region_is_told_of(looks: Callable[..., Looks]) -> None:
    look = looks()
    region = look.scene.regions[0]
    look.rack.slot(region).afu = FACTORY
    look.run(look.inventory.check(look.one))
    assert look.told == [(look.one, f"region {region} shows AFU {FACTORY} where {BLANK} was left")]


@pytest.mark.parametrize("owned", [True, False])
def test_a_guard_that_is_missing_is_restored_at_once_and_the_node_hears_of_it(
    looks: Callable[..., Looks], *, owned: bool
) -> None:
    look = looks()
    guarded: list[bool] = []

    def guard(card: Card, *, left: bool) -> str:
        guarded.append(left)
        return look.unguarded

    look.rack.guard = guard  # type: ignore[method-assign]
    region = look.scene.regions[0]
    if owned:
        resource, _ = resource_names(PREFIX, look.ledger.cards[look.one].interface_id)
        devices = [DeviceId(region)]
        look.plugin.call(lambda: look.ledger.device_plugin.allocate(resource, devices))
    look.run(look.inventory.check(look.one))
    assert (guarded, look.told) == ([], [])
    look.unguarded = "the mask of its mailbox is 0x0"
    look.run(look.inventory.check(look.one))
    assert guarded == [False]
    assert look.told == [(look.one, "the mask of its mailbox is 0x0; it is set again")]
    (line,) = look.lines("card was not guarded")
    assert (line["card"], line["missing"]) == (look.one, look.unguarded)
    assert serves(look, region)


def test_a_card_whose_guard_cannot_be_restored_gets_no_new_owner(
    looks: Callable[..., Looks],
) -> None:
    look = looks()

    def guard(card: Card, *, left: bool) -> str:
        raise HardwareError("the user function does not follow")

    look.rack.guard = guard  # type: ignore[method-assign]
    look.unguarded = "the mask of its mailbox is 0x0"
    look.run(look.inventory.check(look.one))
    region = look.scene.regions[0]
    assert look.ledger.failing[region].message == "unguarded: the user function does not follow"
    assert not look.count("card was not guarded")


def guards(look: Looks, missing: str) -> list[bool]:
    """Each time that a card's guard is restored: whether its owner may load what it brings."""
    restored: list[bool] = []

    def guard(card: Card, *, left: bool) -> str:
        restored.append(left)
        return missing

    look.rack.guard = guard  # type: ignore[method-assign]
    look.unguarded = "the mask of its mailbox is 0x0"
    return restored


@pytest.mark.parametrize("clean", [(), (0,), (1,), (0, 1)])
def test_a_card_is_guarded_if_any_of_its_regions_is_as_the_plugin_left_it(
    looks: Callable[..., Looks], clean: tuple[int, ...]
) -> None:
    """Of a card on which nothing is made the next scrub restores it anyway."""
    look = looks()
    look.scene.hold_releases()
    regions = [region.id for region in look.ledger.cards[look.one].regions]
    dirty = [region for number, region in enumerate(regions) if number not in clean]
    look.plugin.call(lambda: look.ledger.work.dirty(dirty, "a scrub failed"))
    restored = guards(look, "")
    look.run(look.inventory.check(look.one))
    assert len(restored) == bool(clean)


def test_a_card_with_an_owner_is_guarded_though_nothing_on_it_is_known(
    looks: Callable[..., Looks],
) -> None:
    """It went and came back: its owner runs on what it holds."""
    look = looks()
    look.scene.hold_releases()
    regions = [region.id for region in look.ledger.cards[look.one].regions]
    look.scene.admit(regions[0])
    look.plugin.call(lambda: look.ledger.work.dirty(regions, "it went and came back"))
    restored = guards(look, "")
    look.run(look.inventory.check(look.one))
    assert restored == [False]


def test_a_guard_is_missed_by_the_periodic_look_too(looks: Callable[..., Looks]) -> None:
    look = looks()
    restored = guards(look, "")
    look.run(look.inventory.check_all())
    assert restored == [False] * len(look.ledger.cards)


def test_a_guard_that_was_there_after_all_is_no_news(looks: Callable[..., Looks]) -> None:
    look = looks()
    restored = guards(look, "")
    look.run(look.inventory.check(look.one))
    assert (restored, look.told, look.count("card was not guarded")) == ([False], [], 0)


def test_a_guard_lets_an_owner_load_that_has_one_of_the_cards_regions(
    looks: Callable[..., Looks],
) -> None:
    look = looks()
    owned = look.scene.regions[0]
    board = look.rack.boards[look.one]
    board.card = replace(board.card, owner_loads=True)
    look.changed(look.one)
    look.scene.admit(owned)
    assert look.ledger.left_to_owner(owned)
    restored = guards(look, "")
    look.run(look.inventory.check(look.one))
    assert restored == [True]


def test_the_log_names_the_owners_of_a_card_that_went(looks: Callable[..., Looks]) -> None:
    """Of the two devices with an owner, kubelet has named the pod of one."""
    look = looks()
    known, unknown, _ = look.scene.regions
    look.scene.start(look.scene.admit(known), AFU)
    look.scene.admit(unknown)
    look.rack.boards[look.one].present = False
    look.changed(look.one)
    (line,) = look.lines("card gone")
    assert line["pods"] == {look.scene.pods[0].uid}
    assert sorted(line["owned"]) == sorted([known, unknown])


def test_a_known_card_that_cannot_be_looked_at_says_why(looks: Callable[..., Looks]) -> None:
    look = looks()

    def fails(_: CardId) -> Card:
        raise HardwareError("its config space reads as ones")

    look.rack.scan_card = fails  # type: ignore[method-assign]
    look.run(look.inventory.look(look.one))
    assert {f.message for f in look.ledger.failing.values()} == {"its config space reads as ones"}


def test_a_card_that_is_not_there_is_looked_at_once(looks: Callable[..., Looks]) -> None:
    look = looks()
    look.rack.boards[look.one].present = False
    look.changed(look.one)
    look.read.clear()
    look.at(look.plugin.loop.time() + 10.0)
    assert look.reads_of(look.one) == 0


# ------------------------------------------------------------------ how long it has to be well


def serves(look: Looks, region: RegionId) -> bool:
    return region not in look.ledger.failing


@pytest.mark.parametrize("begin", [one, every])
@pytest.mark.parametrize(
    ("story", "recovers"),
    [
        pytest.param([(1, "well")], 11, id="nobody else has to look"),
        pytest.param(
            [(1, "well"), (6, "well"), (10, "well")], 11, id="looks do not begin it again"
        ),
        pytest.param([(1, "well"), (5, "hot"), (6, "well")], 16, id="it was hot in between"),
        pytest.param([(3, "hot"), (9, "well")], 19, id="the time in which it was hot is none"),
        pytest.param(
            [(1, "well"), (12, "hot"), (13, "well")], 23, id="what is over does not count again"
        ),
    ],
)
def test_a_card_at_the_edge_of_its_limit_does_not_come_and_go(
    looks: Callable[..., Looks],
    begin: Callable[[Looks], Coroutine[Any, Any, None]],
    story: list[tuple[float, str]],
    recovers: float,
) -> None:
    look = looks(interval=10.0)
    region = look.scene.regions[0]
    look.hot(region)
    look.run(look.inventory.check(look.one))
    for instant, state in story:
        look.at(instant)
        look.hot(region, HOT.message if state == "hot" else "")
        look.run(begin(look))
        assert not serves(look, region)
    look.at(recovers - 0.5)
    assert not serves(look, region)
    look.at(recovers)
    assert serves(look, region)


def test_what_a_scrub_has_ended_is_over_at_the_first_look(looks: Callable[..., Looks]) -> None:
    look = looks(interval=10.0)
    look.scene.hold_releases()
    region = look.scene.regions[0]
    look.rack.slot(region).silent = "hung"
    look.run(look.inventory.check(look.one))
    assert look.scene.ledger.failing
    look.rack.slot(region).silent = ""
    look.run(look.inventory.check(look.one))
    assert not look.scene.ledger.failing


def test_an_operators_retry_hastens_the_recovery_of_his_card_alone(
    looks: Callable[..., Looks],
) -> None:
    look = looks(interval=10.0)
    mine, _, others = look.scene.regions
    for region in (mine, others):
        look.hot(region)
    look.run(look.inventory.check_all())
    look.plugin.call(lambda: look.inventory.hasten(look.one))
    assert look.rack.accepted == [look.one]
    look.run(look.inventory.check_all())
    assert not serves(look, mine), "it is hot"
    for region in (mine, others):
        look.hot(region, "")
    look.run(look.inventory.check_all())
    assert not serves(look, mine), "it was hot at the next look"
    look.plugin.call(lambda: look.inventory.hasten(look.one))
    look.run(look.inventory.check_all())
    assert (serves(look, mine), serves(look, others)) == (True, False)


# ------------------------------------------------------------------ regions that are debugged


def test_port_errors_are_told_of_where_they_are_asked_for_and_when_they_change(
    looks: Callable[..., Looks],
) -> None:
    look = looks()
    mine, second, _ = look.scene.regions
    look.scene.start(look.scene.admit(mine), AFU)
    pod = look.scene.pods[0].uid
    debugged = look.scene.operations.port_errors_logged
    some, more = {"errors": 0x10}, {"errors": 0x30}
    shown = {"errors": "0x10"}, {"errors": "0x30"}
    story: list[tuple[bool, Mapping[str, int] | None, list[object]]] = [
        (False, some, []),
        (True, {}, []),
        (True, some, [shown[0]]),
        (True, some, []),
        (True, more, [shown[1]]),
        (True, None, ["unread"]),
        (True, more, []),
        (True, {}, [{}]),
        (True, some, [shown[0]]),
        (False, some, []),
        (True, some, [shown[0]]),  # asked for again, perhaps by another pod
    ]
    for number, (asked, errors, told) in enumerate(story):
        (debugged.add if asked else debugged.discard)(mine)
        look.errors[mine] = errors
        look.logged.clear()
        look.read.clear()
        look.run(look.inventory.check(look.one))
        said = look.lines("port errors") + look.lines("port errors cannot be read")
        assert [line.get("errors", "unread") for line in said] == told, number
        assert all((line["region"], line["pod"]) == (mine, pod) for line in said)
        assert look.reads_of(look.one, "port_errors") == int(asked)
        assert second not in debugged


def test_port_errors_that_cannot_be_read_hide_no_others(looks: Callable[..., Looks]) -> None:
    look = looks()
    first, second, _ = look.scene.regions
    look.scene.operations.port_errors_logged.update({first, second})
    look.errors = {first: None, second: {"errors": 1}}
    look.run(look.inventory.check(look.one))
    assert [line["region"] for line in look.lines("port errors")] == [second]


def test_of_a_card_that_went_while_its_port_errors_were_read_no_accelerator_is_told(
    looks: Callable[..., Looks],
) -> None:
    look = looks()
    look.scene.operations.port_errors_logged.add(look.scene.regions[0])
    gone = partial(look.ledger.hardware.card_gone, look.one)
    look.after("port_errors", look.one, lambda: look.plugin.loop.call_soon(gone))
    look.run(look.inventory.check(look.one))
    assert not look.count("accelerator of a debugged region")


def test_what_is_on_a_debugged_region_is_told_of_at_first_and_when_it_changes(
    looks: Callable[..., Looks],
) -> None:
    look = looks()
    mine = look.scene.regions[0]
    look.scene.start(look.scene.admit(mine), AFU)
    debugged = look.scene.operations.port_errors_logged
    story: list[tuple[bool, AfuId | None, list[AfuId | None]]] = [
        (False, AFU, []),
        (True, AFU, [AFU]),
        (True, AFU, []),
        (True, None, [None]),
        (True, None, []),
        (True, FACTORY, [FACTORY]),
        (False, FACTORY, []),
        (True, FACTORY, [FACTORY]),
    ]
    for number, (asked, afu, told) in enumerate(story):
        (debugged.add if asked else debugged.discard)(mine)
        look.rack.slot(mine).afu = afu
        look.logged.clear()
        look.run(look.inventory.check(look.one))
        said = look.lines("accelerator of a debugged region")
        assert [line["afu_id"] for line in said] == told, number
        assert all(line["region"] == mine for line in said)


# ------------------------------------------------------------------ what a card exposes


NEVER_CLEARED = "a card's memory is never cleared"
UNLIMITED = "a card's DMA is not limited by an IOMMU"


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (None, {}, []),
        (None, {"clears_memory": False}, [NEVER_CLEARED]),
        (None, {"iommu": Iommu.NONE}, [UNLIMITED]),
        (None, {"clears_memory": False, "iommu": Iommu.IDENTITY}, [NEVER_CLEARED, UNLIMITED]),
        ({}, {"numa_node": 1}, []),
        ({}, {"clears_memory": False}, [NEVER_CLEARED]),
        ({}, {"iommu": Iommu.NONE}, [UNLIMITED]),
        ({"clears_memory": False}, {"clears_memory": False, "numa_node": 1}, []),
        ({"clears_memory": False}, {}, []),
        ({"iommu": Iommu.NONE}, {"iommu": Iommu.NONE, "numa_node": 1}, []),
        ({"iommu": Iommu.NONE}, {"iommu": Iommu.IDENTITY}, [UNLIMITED]),
        ({"iommu": Iommu.NONE}, {}, []),
    ],
)
def test_what_a_card_exposes_is_said_when_it_begins(
    looks: Callable[..., Looks],
    before: Mapping[str, Any] | None,
    now: Mapping[str, Any],
    told: list[str],
) -> None:
    look = looks()
    board = look.rack.boards[look.one]
    safe = replace(board.card, clears_memory=True, iommu=Iommu.TRANSLATE)
    board.present = before is not None
    board.card = replace(safe, **(before or {}))
    look.changed(look.one)
    board.present, board.card = True, replace(safe, **now)
    look.logged.clear()
    look.changed(look.one)
    look.changed(look.one)
    said = [line for line in look.logged if line["event"] in {NEVER_CLEARED, UNLIMITED}]
    assert [line["event"] for line in said] == told
    assert all(line["given"] is None for line in said), "to everybody"


def test_who_is_refused_a_card_that_exposes_something_is_said(looks: Callable[..., Looks]) -> None:
    look = looks()
    look.ledger.obstacles.exposure = ExposurePolicy(untranslated_dma=Exposure.REFUSE)
    board = look.rack.boards[look.one]
    board.card = replace(board.card, iommu=Iommu.NONE)
    look.changed(look.one)
    (line,) = look.lines(UNLIMITED)
    assert line["given"].startswith("given to nobody: its IOMMU mode is none")


# ------------------------------------------------------------------ the end


def test_the_end_waits_for_the_looks_that_run_and_begins_no_other(
    looks: Callable[..., Looks],
) -> None:
    """What a thread reads must not meet a ledger whose journal is closed."""
    look = looks()
    look.event(look.one)
    closing = look.plugin.begin(look.inventory.close())
    assert not closing.done()
    look.changed(look.other)
    assert closing.done()
    closing.result()
    look.read.clear()
    look.changed(look.one)
    look.changed(None)
    look.run(look.inventory.check(look.other))
    assert not look.read


def test_a_card_that_nobody_knows_has_no_health(looks: Callable[..., Looks]) -> None:
    look = looks()
    look.rack.boards[look.one].present = False
    look.changed(look.one)
    look.read.clear()
    look.run(look.inventory.check(look.one))
    assert not look.read
    assert not look.logged[1:]


def test_work_that_begins_while_a_card_is_read_is_no_fault(looks: Callable[..., Looks]) -> None:
    """The read does not end before the work does."""
    look = looks()
    look.reads.silent = {look.one: 0}
    look.plugin.begin(look.inventory.check_all())
    with look.at_work(look.one):
        look.plugin.work()
        assert not look.ledger.failing


def test_a_node_without_threads_ends_no_looks(
    looks: Callable[..., Looks], monkeypatch: pytest.MonkeyPatch
) -> None:
    look = looks(interval=1)
    none = NotFinishedError("no thread can be started")
    monkeypatch.setattr(look.reads, "each", mock.AsyncMock(side_effect=none))
    task = look.plugin.begin(look.inventory.run())
    for _ in range(3):
        look.plugin.loop.pass_time()
        look.plugin.work()
    assert not task.done()
    assert look.count("cards not looked at") > 1
