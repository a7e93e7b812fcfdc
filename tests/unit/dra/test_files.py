"""Invariant 10 by the second api: a claim's file is there while its nodes lead where they did."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from doubles.cards import AFU, device, make_card
from ledger_support import MemoryJournal, found, make_ledger, reopened, scrub
from test_dra_steps import POD, A, B, owner, prepare

from fpga_plugin.allocation.journal.records import Allocation, ClaimOwner
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.dra.cdi import CdiError, CdiFiles
from fpga_plugin.dra.files import ClaimFiles
from fpga_plugin.dra.names import device_name
from fpga_plugin.hardware.model import Card
from fpga_plugin.ids import DeviceId
from fpga_plugin.kubernetes.names import ClaimUid

ONE, TWO = make_card(1, nodes=(0,)), make_card(2, nodes=(1,))
SWAPPED = make_card(1, nodes=(1,)), make_card(2, nodes=(0,))


class Directory:
    """The runtime's directory, and what the plugin keeps in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = CdiFiles(str(path), "fpga.intel.com")

    def shown(self) -> set[ClaimUid]:
        return {uid for uid in (A, B) if any(self.path.glob(f"*{uid}.json"))}

    def write(self, ledger: Ledger, *uids: ClaimUid) -> None:
        for uid in uids:
            known = ledger.claim_owners[uid]
            self.files.write(known, [ledger.allocations[one] for one in known.devices], {})

    def begin(self, ledger: Ledger, then: Callable[[], None] | None = None) -> None:
        """A start of the plugin, and what comes `then`, until nothing is left to do."""

        async def run() -> None:
            kept = ClaimFiles(ledger, self.files)
            await kept.begin()
            if then is not None:
                then()
                await asyncio.wait({task := asyncio.create_task(kept.run())}, timeout=0.2)
                task.cancel()

        asyncio.run(run())


@pytest.fixture
def cdi(tmp_path: Path) -> Directory:
    return Directory(tmp_path)


def prepared() -> MemoryJournal:
    """Two claims, each with the region of a card."""
    ledger, journal = make_ledger(ONE, TWO)
    prepare(ledger, ONE, 0, A)
    prepare(ledger, TWO, 0, B)
    return journal


def again(journal: MemoryJournal, *cards: Card) -> Ledger:
    ledger = reopened(journal)
    for card in cards:
        found(ledger, card, AFU)
    return ledger


def test_a_start_writes_the_files_of_what_is_as_it_was(cdi: Directory):
    ledger = again(prepared(), ONE, TWO)
    assert not ledger.dra.preparation_error(ledger.claim_owners[A])
    cdi.begin(ledger)
    assert cdi.shown() == {A, B}


def test_cards_that_swapped_their_numbers_while_the_plugin_was_away_start_no_container(
    cdi: Directory,
):
    journal = prepared()
    cdi.write(reopened(journal), A, B)
    ledger = again(journal, *SWAPPED)
    assert "device numbering changed" in ledger.dra.preparation_error(ledger.claim_owners[A])
    cdi.begin(ledger)
    assert cdi.shown() == set()
    assert not ledger.dra.is_prepared(ledger.claim_owners[A])


def test_the_file_of_a_claim_that_ended_goes_though_another_claim_has_the_device_by_now(
    cdi: Directory,
):
    """Its removal failed, and the plugin ended before kubelet asked again."""
    ledger, journal = make_ledger(ONE)
    prepare(ledger, ONE, 0, A)
    cdi.write(ledger, A)
    ledger.dra.end_claim(A)
    ledger.work.end_tenancies(ledger.tenancies.left(ONE.regions[0].id))
    scrub(ledger, ONE)
    prepare(ledger, ONE, 0, B)
    cdi.begin(again(journal, ONE))
    assert cdi.shown() == {B}


@pytest.mark.parametrize("cards", [(ONE, TWO), SWAPPED])
def test_cards_that_went_and_came_back_start_no_container(cdi: Directory, cards):
    ledger = again(prepared(), ONE, TWO)

    def replug() -> None:
        assert cdi.shown() == {A, B}
        for card in (ONE, TWO):
            ledger.hardware.card_gone(card.id)
        for card in cards:
            found(ledger, card, AFU)

    cdi.begin(ledger, replug)
    assert cdi.shown() == set()
    assert not any(map(ledger.dra.is_prepared, ledger.claim_owners.values()))
    found_again = again(ledger._journal, *cards)  # type: ignore[arg-type]
    cdi.begin(found_again)
    assert cdi.shown() == set()


def test_a_card_that_is_seen_late_takes_nothing_from_its_claim(cdi: Directory):
    ledger = again(prepared(), ONE)

    def late() -> None:
        assert cdi.shown() == {A}
        assert ledger.dra.is_prepared(ledger.claim_owners[B])
        found(ledger, TWO, AFU)

    cdi.begin(ledger, late)
    assert cdi.shown() == {A, B}


def test_what_was_adopted_keeps_its_file_until_its_nodes_lead_elsewhere(cdi: Directory):
    ledger, _ = make_ledger(ONE, TWO)
    ledger.dra.adopt_claim(owner(A, device(ONE, 0)), [POD])
    cdi.write(ledger, A)
    cdi.begin(ledger)
    assert cdi.shown() == {A}
    cdi.begin(ledger, lambda: ledger.hardware.card_gone(ONE.id))
    assert cdi.shown() == set()


def test_what_was_adopted_and_has_no_file_gets_none(cdi: Directory):
    """Nobody knows what its region holds: no container starts on it before it is prepared again."""
    ledger, _ = make_ledger(ONE, TWO)
    ledger.dra.adopt_claim(owner(A, device(ONE, 0)), [POD])
    cdi.begin(ledger, lambda: ledger.dra.join({A: ()}))
    assert cdi.shown() == set()


def test_a_directory_that_is_not_writable_for_a_while_ends_nothing(
    cdi: Directory, monkeypatch: pytest.MonkeyPatch
):
    ledger = again(prepared(), ONE, TWO)
    cdi.begin(ledger)
    monkeypatch.setattr("fpga_plugin.dra.files.RETRY_SECONDS", 0.01)
    remove, failures = cdi.files.remove, [OSError(28, "no space"), OSError(30, "read-only")]

    def failing(path: str, uid: ClaimUid) -> None:
        if failures:
            raise CdiError(str(failures.pop()))
        remove(path, uid)

    monkeypatch.setattr(cdi.files, "remove", failing)
    cdi.begin(ledger, lambda: ledger.hardware.card_gone(ONE.id))
    assert cdi.shown() == {B}


def meanwhile(
    cdi: Directory, monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], object]
) -> None:
    """What happens while the next files are written, each time before the thread is done."""
    write, left = cdi.files.write, [*steps]

    def slow(
        known: ClaimOwner, claims: Iterable[Allocation], cards: Mapping[DeviceId, Card]
    ) -> None:
        if left:
            left.pop(0)()
        write(known, claims, cards)

    monkeypatch.setattr(cdi.files, "write", slow)


def test_the_file_of_a_claim_that_is_withdrawn_while_it_is_written_does_not_stay(
    cdi: Directory, monkeypatch: pytest.MonkeyPatch
):
    ledger = again(prepared(), ONE, TWO)
    meanwhile(
        cdi,
        monkeypatch,
        lambda: ledger.dra.unprepared(A),
        lambda: ledger.dra.end_claim(B),
    )
    cdi.begin(ledger)
    assert cdi.shown() == set()


def test_a_claim_that_is_prepared_anew_while_its_file_is_written_has_that_of_its_new_device(
    cdi: Directory, monkeypatch: pytest.MonkeyPatch
):
    ledger = again(prepared(), ONE, TWO)
    ledger.dra.end_claim(B)
    meanwhile(cdi, monkeypatch, lambda: prepare(ledger, TWO, 0, A))
    answered = asyncio.run(ClaimFiles(ledger, cdi.files).settle(A, again=True))
    assert answered == ledger.claim_owners[A]
    (path,) = cdi.path.glob(f"*{A}.json")
    assert device_name(device(TWO, 0)) in path.read_text()
    assert device_name(device(ONE, 0)) not in path.read_text()


def test_the_file_of_a_claim_that_ended_goes_whatever_was_written_of_it(cdi: Directory):
    """Its removal may have failed when the claim ended."""
    ledger = again(prepared(), ONE, TWO)
    cdi.begin(ledger)
    ledger.dra.end_claim(A)
    assert asyncio.run(ClaimFiles(ledger, cdi.files).settle(A)) is None
    assert cdi.shown() == {B}


def test_the_file_goes_from_the_directory_in_which_it_was_written(cdi: Directory, tmp_path: Path):
    ledger, _ = make_ledger(ONE)
    (former := tmp_path / "former").mkdir()
    place = former / "claim.json"
    ledger.dra.adopt_claim(replace(owner(A, device(ONE, 0)), file=str(place)), [POD])
    cdi.write(ledger, A)
    assert place.exists()
    asyncio.run(ClaimFiles(ledger, cdi.files).remove(A, ledger.claim_owners[A]))
    assert not place.exists()
