"""Blank bitstreams as scrubs get them: one image for all cards, and never one of another file."""

import asyncio
import os

import pytest
from doubles.bitstreams import gbs
from doubles.cards import INTERFACE, make_card

from fpga_plugin.bitstreams.library import Library
from fpga_plugin.bitstreams.reader import StoreReader
from fpga_plugin.bitstreams.trust import Trust
from fpga_plugin.cards.blanks import Blanks
from fpga_plugin.settings.settings import ScrubPolicy, TrustMode

CARD = make_card()


@pytest.fixture
def store(tmp_path):
    root = tmp_path / "store"
    (root / INTERFACE).mkdir(parents=True)
    trust = Trust(str(root), TrustMode.ANY, None, guarded=False)
    library = Library(
        str(root),
        directory=str(tmp_path / "verified"),
        limit=1 << 20,
        trust=trust,
        guarded=False,
    )
    return StoreReader(library)


def install(store, afu_id):
    """A blank bitstream of the same size as any other, put there by renaming."""
    path = store.blank_path(INTERFACE)
    with open(f"{path}.new", "wb") as file:
        file.write(gbs(afu=f"{afu_id:032x}", interface=INTERFACE))
    os.rename(f"{path}.new", path)


def load(blanks):
    return asyncio.run(blanks.load(CARD))


def test_those_who_need_it_at_the_same_time_have_it_verified_once(store):
    install(store, 1)
    blanks = Blanks(store, ScrubPolicy.REQUIRED)

    async def many():
        return await asyncio.gather(*(blanks.load(CARD) for _ in range(50)))

    assert {blank.afu_id for blank in asyncio.run(many())} == {f"{1:032x}"}
    assert dict(store.library.verifications.items()) == {("good",): 1}


def test_another_file_is_read_whether_or_not_the_watch_saw_it(store):
    install(store, 1)
    blanks = Blanks(store, ScrubPolicy.REQUIRED)
    before = load(blanks)
    install(store, 2)
    after = load(blanks)
    assert (before.afu_id, after.afu_id) == (f"{1:032x}", f"{2:032x}")


def test_what_the_watch_saw_is_verified_again_even_where_the_file_looks_the_same(store):
    install(store, 1)
    blanks = Blanks(store, ScrubPolicy.REQUIRED)
    load(blanks)
    load(blanks)
    assert dict(store.library.verifications.items()) == {("good",): 1}
    store.library.verdicts.forget(f"{INTERFACE}/blank.gbs")  # as the index does
    blanks.forget(INTERFACE)
    load(blanks)
    assert dict(store.library.verifications.items()) == {("good",): 2}


def test_a_file_that_went_is_not_taken_from_memory(store):
    install(store, 1)
    blanks = Blanks(store, ScrubPolicy.BEST_EFFORT)
    before = load(blanks)
    os.unlink(store.blank_path(INTERFACE))
    assert load(blanks) is None
    assert before is not None
