"""What the end of a rebind leaves when it cannot be written down."""

from ledger_scene import scenes

from fpga_plugin.allocation.journal.records import Condition
from fpga_plugin.settings.settings import RecoveryPolicy


def test_a_card_that_is_back_is_in_service_once_the_journal_takes_it():
    with scenes() as make:
        scene = make(cards=[2], memory=True, recovery=RecoveryPolicy.REBIND)
        ledger = scene.ledger
        (card,) = ledger.cards

        def as_a_rebind_leaves_it() -> None:
            ledger.hardware.set_rebinding(card, rebinding=True)
            scene.journal.failing = 1

        scene.plugin.call(as_a_rebind_leaves_it)
        assert ledger.rebinding, "what is not written down is not so"
        scene.plugin.loop.pass_time()
        scene.plugin.work()
        assert not ledger.rebinding
        assert all(r.condition is Condition.BLANK for r in ledger.regions.values())
