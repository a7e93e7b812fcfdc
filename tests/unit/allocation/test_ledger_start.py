"""What a ledger takes up from its journal and its settings when the plugin starts."""

from typing import Any

import pytest
from doubles.cards import AFU, BLANK, PREFIX, REGIONS, device, make_card
from ledger_support import MemoryJournal, found, make_ledger, scrub

from fpga_plugin.allocation.journal.doubt import doubted
from fpga_plugin.allocation.journal.records import Change, Fact
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.obstacles import Stops
from fpga_plugin.settings.settings import ScrubPolicy

CARD = make_card(1, nodes=(0, 1))
P0 = device(CARD, 0)
R0 = CARD.regions[0].id


def begin(snapshot: Change, **settings: Any) -> tuple[Ledger, MemoryJournal]:
    journal = MemoryJournal(snapshot)
    return (
        Ledger(prefix=PREFIX, journal=journal, snapshot=snapshot, boot_id="boot", **settings),
        journal,
    )


@pytest.mark.parametrize("functions", [True, False])
@pytest.mark.parametrize("scrub_policy", ScrubPolicy)
def test_a_region_without_a_blank_is_offered_unless_a_blank_is_required(
    scrub_policy: ScrubPolicy, *, functions: bool
) -> None:
    """Where functions are served nothing is blanked, so nothing can be required."""
    ledger, _ = begin(Change(), scrub=scrub_policy, functions=functions)
    found(ledger, CARD)
    ledger.work.working([R0])
    ledger.work.clean(R0, AFU, blank=False)
    offered = functions or scrub_policy is ScrubPolicy.BEST_EFFORT
    assert (ledger.obstacles.first(R0, Stops.OFFER) is None) is offered
    ledger.work.working([R0])
    ledger.work.clean(R0, BLANK, blank=True)
    assert ledger.obstacles.first(R0, Stops.OFFER) is None


@pytest.mark.parametrize(
    ("journalled", "claims", "unknown"),
    [
        ("", False, ""),
        ("", True, "DRA served this node, and the journal is in doubt (so)"),
        ("rows were lost", False, "rows were lost"),
        ("rows were lost", True, "rows were lost"),
    ],
)
def test_that_claims_may_have_devices_is_taken_from_the_journal_before_the_start(
    journalled: str, unknown: str, *, claims: bool
) -> None:
    """It holds until kubelet's record of claims was read, however often the plugin starts."""
    facts = {Fact.BOOT: "boot"} | ({Fact.RESOURCE_CLAIMS: journalled} if journalled else {})
    ledger, journal = begin(doubted(Change(facts=facts), "so", claims=claims))
    assert ledger.resource_claims_unknown == unknown
    assert journal.snapshot.facts.get(Fact.RESOURCE_CLAIMS, "") == unknown
    assert journal.writes == 0, "what the journal says is not written again"


@pytest.mark.parametrize("unknown", ["", "rows were lost"])
def test_a_journal_that_has_every_owner_is_believed_unless_claims_may_have_devices(
    unknown: str,
) -> None:
    _, journal = make_ledger(CARD)
    journal.snapshot.facts[Fact.RESOURCE_CLAIMS] = unknown
    ledger, _ = begin(journal.snapshot)
    assert ledger.unreconciled == ({CARD.id} if unknown else set())


def test_a_restart_in_which_all_still_holds_writes_nothing() -> None:
    before, journal = make_ledger(CARD)
    scrub(before, CARD)
    before.device_plugin.allocate(REGIONS, [P0])
    _, again = begin(journal.snapshot)
    assert again.writes == 0
