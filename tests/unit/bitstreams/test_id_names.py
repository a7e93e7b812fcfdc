"""What the store's manifest calls ids is put beside them where people read, and nowhere else."""

import pytest

from fpga_plugin.allocation.dra_steps import DeviceOwnedError
from fpga_plugin.bitstreams.id_names import Names
from fpga_plugin.errors import BitstreamNotFoundError, NotFinishedError
from fpga_plugin.ids import Alias, BitstreamId, InterfaceId

CARDS, OTHER = InterfaceId("ce" * 16), InterfaceId("69" * 16)
AFU, AOCX = BitstreamId("d8" * 16), BitstreamId("f7" * 20)
NAMES = Names(
    {
        (CARDS, Alias("gzip")): AFU,
        (OTHER, Alias("zip")): AFU,
        (CARDS, Alias("kernel")): AOCX,
    },
    {CARDS: Alias("rack-cards")},
)


def test_an_id_with_a_name_has_it_beside_it():
    said = f"asks for {AOCX}, but the region of {CARDS} holds {OTHER}"
    now = f"asks for kernel ({AOCX}), but the region of rack-cards ({CARDS}) holds {OTHER}"
    assert NAMES.put(said) == now


def test_a_bitstream_that_two_interfaces_call_otherwise_has_both_names():
    assert NAMES.put(f"bitstream {AFU}: no") == f"bitstream gzip / zip ({AFU}): no"


def test_an_id_at_the_end_of_a_sentence_has_its_name():
    assert NAMES.put(f"it holds {AOCX}.") == f"it holds kernel ({AOCX})."


@pytest.mark.parametrize(
    "text",
    [
        f"/srv/intel.com/fpga/{CARDS}/{AFU}.gbs: not there",
        f"{AFU}.gbs",
        f"fpga.intel.com/region-{CARDS} has no device",
        f"FPGA_AFU_1='{AFU}': no",
        f"FPGA_AFU_1={AFU}",
        f"FPGA_AFU_1='a {AFU} b': no",
        f"FPGA_AFU_1='{AFU} is what a tenant wrote",
        f"x{AFU}",
        f"{AFU}0",
        AFU.upper(),
        "",
    ],
)
def test_what_is_part_of_something_else_or_quoted_stays(text: str):
    assert NAMES.put(text) == text


def test_what_stands_between_two_quotations_is_none():
    said = f"the pod's 'a {AFU} b' is not {AOCX}, the card's, nor 'x {AFU}'"
    assert NAMES.put(said) == said.replace(AOCX, f"kernel ({AOCX})")


def test_names_are_not_put_twice():
    once = NAMES.put(f"holds {AFU}")
    assert NAMES.put(once) == once


def test_the_error_stays_what_it_was():
    error = BitstreamNotFoundError(f"no {AFU}", hint=f"put {AOCX} there")
    told = NAMES.error(error)
    assert type(told) is BitstreamNotFoundError
    assert str(told) == f"no gzip / zip ({AFU}): put kernel ({AOCX}) there"
    assert str(error) == f"no {AFU}: put {AOCX} there", "others have it, too"
    goes_on = NotFinishedError(f"{AFU} goes on")
    assert NAMES.error(goes_on) is goes_on
    assert DeviceOwnedError("x", hint="y").reworded(str.upper).hint == "Y"


def test_one_bitstream_has_one_name_for_each_interface():
    assert NAMES.bitstream(OTHER, AFU) == "zip"
    assert not NAMES.bitstream(OTHER, AOCX)
