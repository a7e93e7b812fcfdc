"""What is believed of a damaged journal, row by row: `salvaged` and `untold`.

The same with files, in test_journal.py. Each line of the module that may be wrong alone has a test
here (`make mutants`).
"""

from dataclasses import replace

from doubles.cards import AFU, BLANK, REGIONS, WHOLE, device, make_card
from ledger_support import tenancy

from fpga_plugin.ids import DeviceId, RegionId, ResourceName
from fpga_plugin.ledger.records import (
    Change,
    Claim,
    Condition,
    Epoch,
    RegionRecord,
    TenantImage,
)
from fpga_plugin.ledger.rows import Loaded
from fpga_plugin.ledger.salvage import salvaged, untold

CARD = make_card(1)
OTHER = make_card(2, nodes=(2, 3))
R0, R1, R2, R3 = (region.id for card in (CARD, OTHER) for region in card.regions)


def claim(device: DeviceId, resource: ResourceName = REGIONS) -> Claim:
    return Claim(device, resource, {})


def record(region: RegionId, condition: Condition = Condition.BLANK) -> RegionRecord:
    return RegionRecord(region, condition, "so", BLANK)


def damaged(told: Change) -> Change:
    return salvaged(Loaded(told, left_out=("a row",), commits=7)).snapshot


def test_a_journal_that_makes_sense_is_believed_as_it_is() -> None:
    """A clean idle card is not programmed again (invariant 9)."""
    told = Change(
        claims={device(CARD, 0): claim(device(CARD, 0)), device(OTHER): claim(device(OTHER), WHOLE)}
    )
    loaded = Loaded(told, commits=7)
    assert salvaged(loaded) is loaded


def test_a_card_that_is_claimed_in_both_ways_loses_these_claims_alone() -> None:
    """Invariant 1. Claims of other cards take something from nobody: they stay (invariant 3)."""
    third = make_card(3, nodes=(4, 5))
    both = {each: claim(each) for each in (device(CARD), device(CARD, 0))}
    good = {each: claim(each) for each in (device(OTHER), device(third, 0), device(third, 1))}
    loaded = Loaded(Change(claims={**both, **good, device(CARD, 1): None}), commits=7)
    found = salvaged(loaded)
    (left_out,) = found.left_out
    assert left_out.startswith(f"claims on card {CARD.id}:")
    assert found.commits == 7
    assert found.snapshot.claims == {each: replace(good[each], exposed=True) for each in good}
    again = salvaged(replace(loaded, left_out=("a row",)))
    assert again.left_out == ("a row", left_out)


def test_nothing_that_would_give_a_region_out_is_believed_and_nothing_else_is_lost() -> None:
    """Invariant 4."""
    told = Change(
        epochs={Epoch.BOOT: "boot"},
        regions={R0: record(R0), R1: record(R1, Condition.FAULTED)},
        images={TenantImage(R0, AFU): True},
        drained={CARD.id: True},
        debts={CARD.id: True},
    )
    found = damaged(told)
    assert found.epochs == {Epoch.BOOT: "boot", Epoch.LOST: "rows of the journal"}
    assert found.regions == {
        R0: RegionRecord(R0, Condition.DIRTY, "the journal was damaged"),
        R1: record(R1, Condition.FAULTED),
    }
    expected = (TenantImage(R0, AFU), TenantImage(R0, None), TenantImage(R1, None))
    assert found.images == dict.fromkeys(expected, True)
    assert (found.drained, found.debts) == (told.drained, told.debts)


def test_whose_processes_may_be_there_is_believed_whatever_else_was_lost() -> None:
    """Invariant 7. A row of it only ever keeps a region back."""
    told = tenancy(R0, "pod-0").tenancies | tenancy(R2, "pod-2", left=False).tenancies
    assert damaged(Change(tenancies=told)).tenancies == told


def test_what_a_whole_journal_could_not_note_is_added_once() -> None:
    """An image of an owner's that is not noted would be given out with the memory it left."""
    regions = {R0: record(R0), R1: record(R1, Condition.DIRTY)}
    old = Loaded(Change(regions=regions))
    assert untold(old, lost="") == Change(images={TenantImage(R1, None): True})
    assert untold(replace(old, commits=1), lost="") == Change()
    lost = Change(epochs={Epoch.LOST: "the journal"})
    assert untold(old, lost="the journal") == lost
    assert untold(replace(old, commits=1), lost="the journal") == lost
