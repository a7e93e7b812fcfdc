"""What a read of a card that does not answer becomes."""

import asyncio
import threading

import pytest

from fpga_plugin.cards import reads
from fpga_plugin.cards.reads import CardReads, SilentCardError
from fpga_plugin.ids import CardId


def test_a_read_that_takes_too_long_is_an_error_and_never_an_answer(monkeypatch):
    monkeypatch.setattr(reads, "CARD_SECONDS", 0.05)
    answers = threading.Event()
    try:
        with pytest.raises(SilentCardError):
            asyncio.run(CardReads().run(CardId("0000-3b-00.0"), answers.wait))
    finally:
        answers.set()
