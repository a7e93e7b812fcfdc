"""What is known of the store's blank bitstreams, without a look at the store each time.

The same with files is in test_blanks.py.
"""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from doubles.cards import BLANK, INTERFACE, OTHER_INTERFACE, make_card
from grpclib.const import Status
from structlog.testing import capture_logs

from fpga_plugin.cards.blanks import Blanks
from fpga_plugin.errors import (
    FpgaPluginError,
    NotFinishedError,
    NotPermittedError,
    RefusedError,
    StoreUnavailableError,
)
from fpga_plugin.hardware.image import Image, RawImage
from fpga_plugin.ids import InterfaceId
from fpga_plugin.settings.settings import ScrubPolicy

IMAGE = SimpleNamespace(image=None, afu_id=BLANK)
SIGNER = NotPermittedError("nobody signed it")


class Store:
    """What the store says next of each interface id, and how often it was asked."""

    def __init__(self, says: Any) -> None:
        self.says, self.asked = says, 0

    async def blank(self, _interface_id: InterfaceId, takes: type[Image]) -> Any:
        self.asked += 1
        if isinstance(self.says, Exception):
            raise self.says
        return self.says

    def blank_path(self, interface_id: InterfaceId, takes: type[Image]) -> str:
        return f"/store/{interface_id}/blank.{'gbs' if takes is RawImage else 'xclbin'}"


def made(says: Any, policy: ScrubPolicy = ScrubPolicy.REQUIRED) -> tuple[Blanks, Store]:
    store = Store(says)
    return Blanks(store, policy), store


def load(blanks: Blanks) -> object:
    return asyncio.run(blanks.load(make_card()))


def afu_id(blanks: Blanks, of: InterfaceId = INTERFACE) -> object:
    return asyncio.run(blanks.afu_id(replace(make_card(), interface_id=of)))


@pytest.mark.parametrize("policy", list(ScrubPolicy))
def test_a_region_is_compared_with_the_blank_that_is_there(policy: ScrubPolicy) -> None:
    """Without its id a clean idle card would be programmed again (invariant 9)."""
    blanks, store = made(IMAGE, policy)
    assert afu_id(blanks) == BLANK
    assert afu_id(blanks) == BLANK
    assert store.asked == 1
    assert blanks.problem(INTERFACE) == ""
    assert load(blanks) is IMAGE, "what is programmed is read again"
    assert store.asked == 2


@pytest.mark.parametrize(
    ("says", "words"),
    [(None, f"no blank bitstream at /store/{INTERFACE}/blank.gbs"), (SIGNER, str(SIGNER))],
)
def test_what_cannot_be_used_is_no_blank_and_says_why(says: object, words: str) -> None:
    """Invariant 4. Best effort does without, whatever is wrong with it."""
    blanks, _ = made(says)
    with pytest.raises(RefusedError, match=words):
        load(blanks)
    assert blanks.problem(INTERFACE) == words
    assert afu_id(blanks) is None
    blanks, _ = made(says, ScrubPolicy.BEST_EFFORT)
    assert load(blanks) is None
    assert blanks.problem(INTERFACE) == words
    assert afu_id(blanks) is None


@pytest.mark.parametrize("kind", [StoreUnavailableError, NotFinishedError])
def test_a_blank_that_cannot_be_had_now_is_worth_another_try(kind: type[FpgaPluginError]) -> None:
    """To scrubs it is missing until the store changes; a call is answered UNAVAILABLE."""
    late = kind("not read within 8 s", hint="it goes on")
    blanks, _ = made(late)
    with pytest.raises(kind) as caught:
        load(blanks)
    assert caught.value.status is Status.UNAVAILABLE
    assert str(caught.value) == "no-blank-image: not read within 8 s: it goes on"
    assert blanks.problem(INTERFACE) == str(late)
    blanks.forget(INTERFACE)
    assert afu_id(blanks) is None
    assert blanks.missing(make_card())
    assert load(made(late, ScrubPolicy.BEST_EFFORT)[0]) is None


def test_a_blank_that_comes_and_goes_is_told_once_each_time() -> None:
    blanks, store = made(None)
    told = []
    for says in (None, None, SIGNER, SIGNER, IMAGE, IMAGE, None):
        store.says = says
        blanks.forget(INTERFACE)
        with capture_logs() as logs:
            found = afu_id(blanks)
        assert found == (BLANK if says is IMAGE else None)
        assert bool(blanks.problem(INTERFACE)) is (says is not IMAGE)
        told.append([each["log_level"] for each in logs])
    assert told == [["warning"], [], ["warning"], [], ["info"], [], ["warning"]]


def test_a_blank_that_was_always_there_is_nothing_to_tell() -> None:
    with capture_logs() as logs:
        load(made(IMAGE)[0])
    assert not logs


@pytest.mark.parametrize(("which", "again"), [(INTERFACE, 1), (OTHER_INTERFACE, 0), (None, 1)])
def test_the_store_is_looked_at_again_where_it_changed(
    which: InterfaceId | None, again: int
) -> None:
    blanks, store = made(IMAGE)
    afu_id(blanks)
    afu_id(blanks, OTHER_INTERFACE)
    assert store.asked == 2
    blanks.forget(which)
    afu_id(blanks)
    assert store.asked == 2 + again
    afu_id(blanks, OTHER_INTERFACE)
    assert store.asked == 3 + (which is None)


@pytest.mark.parametrize(
    ("says", "policy", "missing"),
    [
        (None, ScrubPolicy.REQUIRED, True),
        (SIGNER, ScrubPolicy.REQUIRED, True),
        (None, ScrubPolicy.BEST_EFFORT, False),
        (IMAGE, ScrubPolicy.REQUIRED, False),
    ],
)
def test_a_blank_is_missing_if_scrubs_wait_for_it_by_the_last_look(
    says: object, policy: ScrubPolicy, *, missing: bool
) -> None:
    blanks, _ = made(says, policy)
    card = make_card()
    assert not blanks.missing(card), "nobody looked"
    afu_id(blanks)
    assert blanks.missing(card) is missing
    assert not blanks.missing(replace(card, interface_id=OTHER_INTERFACE))
    blanks.forget(INTERFACE)
    assert not blanks.missing(card), "the store changed"
