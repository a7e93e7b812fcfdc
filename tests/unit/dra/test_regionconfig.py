"""RegionConfig: strict, and bounded by the class whoever asks."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpga_plugin.dra.regionconfig import (
    MAX_BYTES,
    MAX_CHOICES,
    DeviceTarget,
    RegionConfig,
    merged,
    parse_config,
    within,
)
from fpga_plugin.errors import FpgaPluginError, InvalidRequestError, NotPermittedError
from fpga_plugin.hardware.backend import DriverSettings
from fpga_plugin.ids import BitstreamId

A, B = BitstreamId("a" * 32), BitstreamId("b" * 32)
HEAD = {"apiVersion": "fpga.intel.com/v1alpha1", "kind": "RegionConfig"}


def parse(*, from_class: bool = False, **fields: object) -> RegionConfig:
    return parse_config(json.dumps(HEAD | fields).encode(), from_class=from_class)


def test_every_field_is_read():
    params = {"clock": 250, "debug": 1}
    assert parse(bitstream=A.upper(), driverParams=params) == RegionConfig(A, None, 250, True)
    assert parse(from_class=True, bitstreams=[A, B]).choices == {A, B}
    assert parse() == RegionConfig()


@pytest.mark.parametrize(
    "fields",
    [
        {"bitstreem": A},
        {"bitstream": "nlb0"},
        {"bitstream": 1},
        {"bitstreams": [A]},  # a claim names one
        {"driverParams": {"clok": 1}},
        {"driverParams": {"clock": 0}},
        {"driverParams": {"clock": True}},
        {"driverParams": {"debug": 2}},
        {"kind": "GpuConfig"},
        {"apiVersion": "fpga.intel.com/v2"},
    ],
)
def test_what_is_not_understood_is_refused(fields):
    with pytest.raises(InvalidRequestError, match="config of the claim"):
        parse(**fields)


@pytest.mark.parametrize(
    "fields", [{"bitstreams": []}, {"bitstreams": [A], "bitstream": A}, {"bitstreams": [A] * 257}]
)
def test_a_class_that_makes_no_sense_is_refused(fields):
    with pytest.raises(InvalidRequestError, match="config of the DeviceClass"):
        parse(from_class=True, **fields)


def test_an_entry_that_the_api_server_would_not_take_is_not_decoded():
    with pytest.raises(InvalidRequestError, match="more than"):
        parse_config(b" " * (MAX_BYTES + 1), from_class=False)


def test_what_is_just_within_the_limits_is_taken():
    """A pod would be refused for a config that the documents allow."""
    whole = json.dumps(HEAD).encode()
    assert parse_config(whole.ljust(MAX_BYTES), from_class=False) == RegionConfig()
    many = [f"{number:032x}" for number in range(MAX_CHOICES)]
    assert parse(from_class=True, bitstreams=many).choices == set(many)
    for clock in (1, 1_000_000_000):
        assert parse(driverParams={"clock": clock}).clock == clock
    with pytest.raises(InvalidRequestError, match=r"<= 1000000000 - at `\$.driverParams.clock`"):
        parse(driverParams={"clock": 1_000_000_001})


@given(st.binary(max_size=200) | st.recursive(st.none() | st.text(), st.lists).map(repr))
def test_any_bytes_are_an_error_of_ours_or_a_config(raw):
    with contextlib.suppress(FpgaPluginError):
        parse_config(raw if isinstance(raw, bytes) else raw.encode(), from_class=True)


def test_of_a_claims_entries_the_last_that_says_something_holds():
    entries = [RegionConfig(A, clock=100), RegionConfig(B), RegionConfig(debug=True)]
    assert merged(entries) == DeviceTarget(B, DriverSettings(clock=100, debug=True))
    assert merged([RegionConfig(debug=True), RegionConfig(B)]).settings.debug is True
    assert merged([]) == DeviceTarget()


def test_a_class_pins_what_is_not_asked_and_refuses_what_is_asked_otherwise():
    pins = [RegionConfig(A, clock=100, debug=False)]
    assert within(pins, DeviceTarget(), "d") == DeviceTarget(A, DriverSettings(clock=100))
    assert within(pins, DeviceTarget(A, DriverSettings(clock=100)), "d").bitstream == A
    for wish in (
        DeviceTarget(B),
        DeviceTarget(A, DriverSettings(clock=200)),
        DeviceTarget(A, DriverSettings(debug=True)),
    ):
        with pytest.raises(NotPermittedError, match="the DeviceClass pins"):
            within(pins, wish, "d")


def test_what_a_class_does_not_pin_or_pins_alike_stays_as_it_is_asked():
    """An entry that says one thing takes nothing else away from the container."""
    wish = DeviceTarget(A, DriverSettings(clock=200, debug=True))
    for entry in (
        RegionConfig(),
        RegionConfig(A),
        RegionConfig(clock=200),
        RegionConfig(debug=True),
    ):
        assert within([entry], wish, "d") == wish


def test_a_refusal_says_what_was_asked_for():
    lists = [RegionConfig(choices=frozenset({A}))]
    for wish, said in ((DeviceTarget(), "no bitstream"), (DeviceTarget(B), B)):
        with pytest.raises(NotPermittedError, match=f"^d: {said} is asked for"):
            within(lists, wish, "d")


def test_a_list_bounds_every_wish_and_no_bitstream_is_none_of_it():
    lists = [RegionConfig(choices=frozenset({A}))]
    assert within(lists, DeviceTarget(A), "d") == DeviceTarget(A)
    for wish in (DeviceTarget(B), DeviceTarget()):
        with pytest.raises(NotPermittedError, match="the DeviceClass lists"):
            within(lists, wish, "d")
    # whatever order the entries are in
    pinned = [*lists, RegionConfig(B)]
    with pytest.raises(NotPermittedError):
        within(pinned, DeviceTarget(), "d")
    assert within([*lists, RegionConfig(A)], DeviceTarget(), "d") == DeviceTarget(A)
