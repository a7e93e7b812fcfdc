"""What the end of a rebind leaves when it cannot be written down."""

from ledger_support import MemoryJournal
from ledger_world import Images, Plugin, Rack, make_boards

from fpga_plugin.config.settings import RecoveryPolicy, ScrubPolicy
from fpga_plugin.ids import CardId
from fpga_plugin.ledger.records import Condition


def test_a_card_that_is_back_is_in_service_once_the_journal_takes_it(monkeypatch):
    async def at_once(function, *args):
        return function(*args)

    monkeypatch.setattr("asyncio.to_thread", at_once)
    rack = Rack(make_boards([(2, True)]), lambda _: None)
    (card,) = map(CardId, rack.boards)
    journal = MemoryJournal()
    plugin = Plugin(
        rack, [], Images(), journal, scrub=ScrubPolicy.REQUIRED, recovery=RecoveryPolicy.REBIND
    )
    try:
        plugin.begin(plugin.hardware.scan())
        plugin.work()
        plugin.kubelet_answers()
        plugin.work()
        assert all(r.condition is Condition.BLANK for r in plugin.ledger.regions.values())
        ledger = plugin.ledger

        def as_a_rebind_leaves_it() -> None:
            ledger.set_rebinding(card, rebinding=True)
            journal.failing = 1

        plugin.call(as_a_rebind_leaves_it)
        assert ledger.rebinding, "what is not written down is not so"
        plugin.loop.pass_time()
        plugin.work()
        assert not ledger.rebinding
        assert all(r.condition is Condition.BLANK for r in ledger.regions.values())
    finally:
        plugin.end()
