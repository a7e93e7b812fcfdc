"""One copy of a blank bitstream for all cards that are scrubbed at the same time."""

import asyncio
import os

import pytest

from fpga_plugin.bitstream.pack import complete_document, pack_gbs
from fpga_plugin.bitstream.store import Store
from fpga_plugin.config import ScrubPolicy
from fpga_plugin.ids import AfuId, InterfaceId
from fpga_plugin.lifecycle.blanks import Blanks

INTERFACE = InterfaceId("ce48969398f05f33946d560708be108a")


@pytest.fixture
def store(tmp_path):
    (tmp_path / INTERFACE).mkdir()
    return Store(str(tmp_path))


def install(store, afu_id):
    """A blank bitstream of the same size as any other, put there by renaming."""
    document = complete_document(
        {}, where="test", interface_id=INTERFACE, afu_id=AfuId(f"{afu_id:032x}")
    )
    path = store.blank_path(INTERFACE)
    with open(f"{path}.new", "wb") as file:
        file.write(pack_gbs(document, bytes.fromhex(f"{afu_id:032x}"), where="test"))
    os.rename(f"{path}.new", path)


def load(blanks):
    return asyncio.run(blanks.load(INTERFACE))


def test_those_who_need_it_at_the_same_time_share_one_copy(store):
    install(store, 1)
    blanks = Blanks(store, ScrubPolicy.REQUIRED)

    async def many():
        return await asyncio.gather(*(blanks.load(INTERFACE) for _ in range(50)))

    first, *others = asyncio.run(many())
    assert all(other is first for other in others)


def test_another_file_is_read_whether_or_not_the_watch_saw_it(store):
    install(store, 1)
    blanks = Blanks(store, ScrubPolicy.REQUIRED)
    before = load(blanks)
    install(store, 2)
    after = load(blanks)
    assert (before.afu_id, after.afu_id) == (f"{1:032x}", f"{2:032x}")


def test_what_the_watch_saw_is_read_again_even_where_the_file_looks_the_same(store):
    install(store, 1)
    blanks = Blanks(store, ScrubPolicy.REQUIRED)
    before = load(blanks)
    assert load(blanks) is before
    blanks.forget(INTERFACE)
    assert load(blanks) is not before


def test_a_file_that_went_is_not_taken_from_memory(store):
    install(store, 1)
    blanks = Blanks(store, ScrubPolicy.BEST_EFFORT)
    before = load(blanks)
    os.unlink(store.blank_path(INTERFACE))
    assert load(blanks) is None
    assert before is not None
