"""A node with several families: one backend, and each card its own family's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doubles.xclbins import ALVEO

from fpga_plugin.errors import CardGoneError, RefusedError
from fpga_plugin.hardware.backend import DriverSettings
from fpga_plugin.hardware.dfl.backend import DflBackend
from fpga_plugin.hardware.families import Families
from fpga_plugin.hardware.image import RawImage, Xclbin
from fpga_plugin.hardware.model import AssumptionVerdict
from fpga_plugin.hardware.simulated.factory import simulated_backend
from fpga_plugin.hardware.xrt.backend import XrtBackend
from fpga_plugin.ids import CardId
from fpga_plugin.settings.values import parse_simulated_cards

PAC, U55C = CardId("0000-10-00.0"), CardId("0000-11-00.0")


def made(path: Path, cards: str = f"1x2,1x1+alveo@{ALVEO}"):
    return simulated_backend(str(path), parse_simulated_cards(cards), pr_seconds=0, owner=True)


@pytest.fixture
def both(tmp_path: Path) -> Families:
    backend = made(tmp_path).backend
    assert isinstance(backend, Families)
    return backend


def test_each_card_is_found_by_its_family(both: Families):
    assert sorted(both.card_ids()) == [PAC, U55C]
    found = both.scan()
    assert not found.problems
    assert {c.id: c.family for c in found.cards.values()} == {PAC: "dfl", U55C: "xrt"}
    assert {c.id: c.takes for c in found.cards.values()} == {PAC: RawImage, U55C: Xclbin}
    assert both.scan_card(PAC) == found.cards[PAC]
    assert both.scan_card(U55C) == found.cards[U55C]
    assert both.scan_card(CardId("0000-77-00.0")) is None


def test_what_is_asked_of_a_card_its_family_answers(both: Families):
    cards = both.scan().cards
    pac, u55c = cards[PAC], cards[U55C]
    assert both.clock_limits(pac, pac.regions[0]) is not None
    assert both.clock_limits(u55c, u55c.regions[0]) is None
    assert both.user_clock(u55c.regions[0]).high is None
    assert {f.driver for f in both.functions(U55C)} == {"xclmgmt", "xocl"}
    assert {f.driver for f in both.functions(PAC)} == {"dfl-pci"}
    assert "xrt-smi" in both.rebind_advice(u55c)
    assert "dfl-pci" in both.rebind_advice(pac)
    assert both.readings(u55c).errors.keys() == {"device_bad_state", "firewall_level"}
    assert "catfatal_errors" in both.readings(pac).errors
    assert not both.health(pac).failed
    assert both.health(u55c).unguarded
    assert both.guard(pac, left=False) == ""
    assert both.guard(u55c, left=False)
    assert both.numbers(u55c.regions[0]) == {"/dev/dri/renderD128": "226:128"}
    assert not both.bound_by_plugin(u55c.regions[0])
    both.give_back(u55c, u55c.regions[0])
    assert both.port_errors(pac.regions[0]) == {}
    assert both.clear_errors(u55c) == {}
    both.apply_settings(pac, pac.regions[0], DriverSettings(clock=300))
    with pytest.raises(RefusedError):
        both.apply_settings(u55c, u55c.regions[0], DriverSettings(clock=300))
    with pytest.raises(RefusedError):
        both.make_functions(U55C, make=True)
    assert any("xclmgmt" in one.says for one in both.assumptions(U55C))
    assert any("dfl-pci" in one.says for one in both.assumptions(PAC))
    assert both.boot_id()
    both.accept_errors(PAC)
    both.bind(PAC)
    both.bind(U55C)
    both.clear_memory(pac)
    both.reset(u55c)
    both.rebind(pac)
    for card in (pac, u55c):
        with both.open_port(both.scan().cards[card.id], both.scan().cards[card.id].regions[0]) as p:
            p.reset()
            assert p.afu_id() == both.afu_id(both.scan().cards[card.id].regions[0])


def test_a_card_that_no_family_has_is_gone(both: Families, tmp_path: Path):
    nobody = CardId("0000-77-00.0")
    for ask in (both.functions, both.bind):
        with pytest.raises(CardGoneError):
            ask(nobody)
    told = {one.says: one.verdict for one in both.assumptions(nobody)}
    assert told["it is a PCI function that the kernel knows"] is AssumptionVerdict.FAILS
    both.accept_errors(nobody)
    fresh = made(tmp_path / "other").backend  # asked of a card before anybody listed them
    assert {f.driver for f in fresh.functions(U55C)} == {"xclmgmt", "xocl"}


class Noting:
    """A family that notes what is asked of it, beyond finding cards, and answers as it would."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.asked: list[str] = []
        self.answers: dict[str, object] = {}

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._backend, name)

        def call(*args: Any) -> Any:
            self.asked.append(name)
            return self.answers[name] if name in self.answers else real(*args)

        return call


@pytest.fixture
def noting(both: Families) -> tuple[Families, dict[CardId, Noting]]:
    families = [Noting(each) for each in both._backends]
    of = {card: each for each in families for card in each.card_ids()}
    assert set(of) == {PAC, U55C}
    return Families(families), of


ASKED: dict[str, Callable[[Families, Any], object]] = {
    "give_back": lambda both, card: both.give_back(card, card.regions[0]),
    "clear_memory": lambda both, card: both.clear_memory(card),
    "reset": lambda both, card: both.reset(card),
    "rebind": lambda both, card: both.rebind(card),
    "accept_errors": lambda both, card: both.accept_errors(card.id),
    "bound_by_plugin": lambda both, card: both.bound_by_plugin(card.regions[0]),
}


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("card_id", [PAC, U55C])
def test_a_call_reaches_the_cards_own_family_and_no_other(noting, name: str, card_id: CardId):
    both, of = noting
    card = both.scan().cards[card_id]
    for family in of.values():
        family.asked.clear()
        family.answers[name] = None  # what it does is the family's own tests' matter
    ASKED[name](both, card)
    assert {each: family.asked for each, family in of.items()} == {
        PAC: [name] if card_id == PAC else [],
        U55C: [name] if card_id == U55C else [],
    }, "a card that is known is not looked for again either"


def test_a_card_that_was_looked_at_alone_is_known(noting):
    both, of = noting
    card = both.scan_card(U55C)
    of[U55C].answers["bound_by_plugin"] = True
    assert both.bound_by_plugin(card.regions[0])


def test_of_a_region_that_nobody_scanned_nothing_is_bound(noting):
    both, of = noting
    region = both.scan().cards[U55C].regions[0]
    assert not Families(tuple(of.values())).bound_by_plugin(region)


def test_a_card_in_trouble_is_its_own_familys_problem(tmp_path: Path):
    hardware = made(tmp_path)
    (tmp_path / "faults" / f"{U55C}-p0").write_text("recovery")
    found = hardware.backend.scan()
    assert set(found.cards) == {PAC}
    assert "golden image" in found.problems[U55C].message


def test_with_one_family_there_is_no_other():
    from fpga_plugin.build import open_hardware
    from fpga_plugin.settings.settings import load_settings

    def kind(word: str):
        settings = load_settings({"FPGA_PLUGIN_BACKEND": word})
        return type(open_hardware(settings, owner=False).backend)

    assert kind("dfl") is DflBackend
    assert kind("xrt") is XrtBackend
    assert kind("auto") is Families
