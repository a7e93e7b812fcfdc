"""What a container may ask for, rule by rule (docs/requests.md)."""

import pytest
from grpclib.const import Status
from hypothesis import given
from hypothesis import strategies as st

from fpga_plugin.allocation.requests.parse import (
    FpgaRequest,
    NamedBitstream,
    assign,
    check_limits,
    parse_requests,
)
from fpga_plugin.cards.targets import resolved
from fpga_plugin.errors import FpgaPluginError, InvalidRequestError, RefusedError
from fpga_plugin.hardware.backend import ClockLimits, DriverSettings
from fpga_plugin.ids import Alias, DeviceId, InterfaceId, RegionId

IFACE = "ce48969398f05f33946d560708be108a"
OTHER = "69528db6eb31577a8c3668f9faa081f6"
AFU = "d8424dc4a4a3c413f89e433683f9040b"
AFU2 = "f7df405cbd7acf7222f144b0b93acd18"
HASH = "0123456789abcdef0123456789abcdef01234567"
CARD = DeviceId("0000-3b-00.0")


def dashed(text):
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def env(n="1", iface=IFACE, bitstream=AFU, **more):
    return {f"FPGA_REGION_{n}": iface, f"FPGA_BITSTREAM_ID_{n}": bitstream} | more


def one(variables):
    (request,) = parse_requests(variables)
    return request


def refused(variables):
    with pytest.raises(InvalidRequestError) as caught:
        parse_requests(variables)
    message = str(caught.value)
    assert caught.value.status is Status.INVALID_ARGUMENT
    assert len(message.encode()) < 1024
    assert message.isascii()
    assert message.isprintable()
    return message


def test_the_kep_names_make_a_request():
    assert one(env()) == FpgaRequest(
        suffix="1", interface_id=IFACE, bitstream_id=AFU, settings=DriverSettings()
    )


def test_the_intel_names_make_the_same_request():
    assert one({"FPGA_REGION_1": IFACE, "FPGA_AFU_1": AFU}) == one(env())


@pytest.mark.parametrize("form", [str, str.upper, dashed, lambda t: dashed(t).upper()])
def test_ids_are_taken_in_any_case_and_with_dashes(form):
    request = one({"FPGA_REGION_1": form(IFACE), "FPGA_AFU_1": form(AFU)})
    assert (request.interface_id, request.bitstream_id) == (IFACE, AFU)


@pytest.mark.parametrize("name", ["FPGA_BITSTREAM_ID_1", "FPGA_AFU_1"])
def test_a_bitstream_id_may_be_a_40_digit_hash(name):
    assert one({"FPGA_REGION_1": IFACE, name: HASH.upper()}).bitstream_id == HASH


def test_an_interface_id_may_not_be_a_40_digit_hash():
    assert "FPGA_REGION_1" in refused(env(iface=HASH))


def test_both_names_are_fine_when_they_mean_the_same():
    assert one(env(FPGA_AFU_1=dashed(AFU).upper())).bitstream_id == AFU


def test_both_names_with_different_ids_are_refused():
    message = refused(env(FPGA_AFU_1=AFU2))
    assert "FPGA_AFU_1" in message
    assert "FPGA_BITSTREAM_ID_1" in message


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"FPGA_REGION_1": IFACE}, "FPGA_REGION_1"),
        ({"FPGA_AFU_x": AFU}, "FPGA_AFU_x"),
        ({"FPGA_BITSTREAM_ID_1": AFU}, "FPGA_BITSTREAM_ID_1"),
        ({"FPGA_REGION_1": IFACE, "FPGA_AFU_2": AFU}, "FPGA_REGION_1"),
        ({"FPGA_REGION_1": IFACE, "FPGA_AFU_01": AFU}, "FPGA_AFU_01"),
        ({"FPGA_DRIVER_PARAMS_1": "clock=100"}, "FPGA_DRIVER_PARAMS_1"),
        ({"FPGA_BITSTREAM_ID_1": AFU, "FPGA_DRIVER_PARAMS_1": "debug=1"}, "FPGA_BITSTREAM_ID_1"),
        ({"FPGA_REGION_1": IFACE, "FPGA_DRIVER_PARAMS_1": "debug=1"}, "FPGA_REGION_1"),
        (env() | {"FPGA_AFU_2": AFU}, "FPGA_AFU_2"),
    ],
)
def test_a_variable_without_its_counterpart_is_refused(variables, named):
    assert named in refused(variables)


@pytest.mark.parametrize(
    "name", ["FPGA_REGION_1", "FPGA_BITSTREAM_ID_1", "FPGA_AFU_1", "FPGA_DRIVER_PARAMS_1"]
)
def test_an_empty_value_is_refused(name):
    assert name in refused(env() | {name: ""})


@pytest.mark.parametrize("kind", ["REGION", "BITSTREAM_ID", "AFU", "DRIVER_PARAMS"])
@pytest.mark.parametrize("suffix", ["", "a-b", "1.2", " 1", "1 ", "é", "\u0661", "1\n", "\0", "/"])
def test_a_bad_suffix_is_refused(kind, suffix):
    assert f"FPGA_{kind}_" in refused(env() | {f"FPGA_{kind}_{suffix}": AFU})


def test_a_bad_suffix_is_named():
    assert "'FPGA_REGION_a-b'" in refused({"FPGA_REGION_a-b": IFACE})


@pytest.mark.parametrize(
    "name",
    [
        "FPGA_REGIONAL",
        "FPGA_REGION",
        "FPGA_REGION1",
        "FPGA_BITSTREAM_1",
        "FPGA_BITSTREAM_ID",
        "FPGA_AFUS_1",
        "FPGA_DRIVER_PARAM_1",
        "FPGA_DEVICE_0000_3B_00_0_P0",
        "FPGA_PLUGIN_SCRUB",
        "fpga_region_1",
        "MY_FPGA_REGION_1",
        "FPGA_",
        "",
    ],
)
def test_other_variables_are_ignored(name):
    assert parse_requests({name: "whatever"}) == ()
    assert parse_requests(env() | {name: ""}) == parse_requests(env())


def test_without_variables_there_are_no_requests():
    assert parse_requests({}) == ()


@pytest.mark.parametrize(
    "value",
    [
        "ce48",
        IFACE + "0",
        IFACE[:-1] + "g",
        f" {IFACE}",
        f"{IFACE}\n",
        f"{{{dashed(IFACE)}}}",
        IFACE.replace("-", "")[:8] + "-" + IFACE[8:],
        "../../../etc/passwd",
        "\uff21" * 32,
        "\u0661" * 32,
        "a" * 1_000_000,
        "\ud800",
        "0x" + IFACE[:30],
    ],
)
@pytest.mark.parametrize("name", ["FPGA_REGION_1", "FPGA_BITSTREAM_ID_1", "FPGA_AFU_1"])
def test_a_value_that_is_no_id_is_refused(name, value):
    message = refused(env() | {name: value})
    assert name in message
    assert "a" * 65 not in message


@pytest.mark.parametrize("name", ["compress", "g", "a2-z", "0" * 30 + "g"])
def test_a_bitstream_may_be_asked_for_by_what_people_call_it(name):
    for variable in ("FPGA_BITSTREAM_ID_1", "FPGA_AFU_1"):
        request = one({"FPGA_REGION_1": IFACE, variable: name})
        assert request.bitstream_id == NamedBitstream(Alias(name), "")
        with pytest.raises(InvalidRequestError, match=f"{variable}='{name}': neither"):
            _ = request.file_id
    both = env(bitstream=name, FPGA_AFU_1=name)
    assert one(both) == one(env(bitstream=name))
    assert "differ" in refused(env(FPGA_AFU_1=name))


@pytest.mark.parametrize(
    "value", ["blank", "Compress", "-g", "g-", "g_g", "g.g", "0" * 31 + "g", "face", "", "g\n"]
)
def test_what_nobody_can_be_called_is_refused_where_it_is_read(value):
    assert "FPGA_BITSTREAM_ID_1" in refused(env(bitstream=value))


def test_only_the_stores_manifest_says_which_bitstream_a_name_means():
    requests = parse_requests(env(1, bitstream="gzip") | env(2) | env(3, OTHER, "gzip"))
    aliases = {(IFACE, Alias("gzip")): AFU2, (OTHER, Alias("gzip")): AFU}
    found = [request.file_id for request in resolved(requests, aliases)]
    assert found == [AFU2, AFU, AFU]
    with pytest.raises(InvalidRequestError, match=f"FPGA_BITSTREAM_ID_3='gzip'.*{OTHER}"):
        resolved(requests, {(IFACE, Alias("gzip")): AFU2})


def test_the_syntax_of_all_variables_is_checked_before_they_are_paired():
    assert "FPGA_AFU_z" in refused({"FPGA_REGION_1": IFACE, "FPGA_AFU_z": "Nonsense"})


def test_a_request_for_another_card_must_be_well_formed_too():
    assert "FPGA_AFU_2" in refused(env() | {"FPGA_REGION_2": OTHER, "FPGA_AFU_2": "X"})


@pytest.mark.parametrize(
    ("value", "settings"),
    [
        ("clock=400", DriverSettings(clock=400)),
        ("debug=1", DriverSettings(debug=True)),
        ("debug=0", DriverSettings()),
        ("clock=1000,debug=1", DriverSettings(clock=1000, debug=True)),
        ("debug=1,clock=10", DriverSettings(clock=10, debug=True)),
        ("clock=0", DriverSettings(clock=0)),
        (f"clock={'0' * 5000}400", DriverSettings(clock=400)),
        ("clock=999999999", DriverSettings(clock=999_999_999)),
    ],
)
def test_driver_parameters_are_read(value, settings):
    assert one(env(FPGA_DRIVER_PARAMS_1=value)).settings == settings


@pytest.mark.parametrize(
    "value",
    [
        ",",
        "clock=400,",
        ",clock=400",
        "clock=400,,debug=1",
        "clock",
        "clock=",
        "=400",
        "clock==400",
        "clock=400 ",
        " clock=400",
        "clock=400, debug=1",
        "clock =400",
        "clock=400\n",
        "clock=-1",
        "clock=+400",
        "clock=4_0",
        "clock=4e2",
        "clock=400.0",
        "clock=0x10",
        "clock=\u0664\u0660\u0660",
        "clock=" + "9" * 10_000,
        "clock=9999999999",
        "debug=2",
        "debug=01",
        "debug=true",
        "Clock=400",
        "clock=400,clock=400",
        "debug=1,clock=400,debug=1",
        "voltage=1",
        "clock=400;debug=1",
        "x" * 100_000 + "=1",
    ],
)
def test_bad_driver_parameters_are_refused(value):
    message = refused(env(FPGA_DRIVER_PARAMS_1=value))
    assert "FPGA_DRIVER_PARAMS_1" in message
    assert "x" * 65 not in message
    assert "9" * 65 not in message


def test_driver_parameters_may_not_be_only_a_blank():
    assert "FPGA_DRIVER_PARAMS_1" in refused(env(FPGA_DRIVER_PARAMS_1=" "))


def test_requests_come_in_order_of_suffix():
    in_order = ["0", "001", "01", "1", "2", "010", "10", "1_0", "A", "_", "_1", "a", "a1", "b"]
    variables = {}
    for n in reversed(in_order):
        variables |= env(n)
    assert [request.suffix for request in parse_requests(variables)] == in_order


def test_suffix_numbers_of_any_length_compare_by_value():
    huge = ["9" * 9_999, "1" + "0" * 10_000, "0" * 7_000 + "1" + "0" * 9_999 + "1"]
    variables = {}
    for n in ["a", *reversed(huge), "3"]:
        variables |= env(n)
    assert [request.suffix for request in parse_requests(variables)] == ["3", *huge, "a"]


@given(st.lists(st.integers(0, 10**30), unique=True), st.randoms(use_true_random=False))
def test_suffix_order_is_the_order_of_numbers(numbers, random):
    shuffled = list(numbers)
    random.shuffle(shuffled)
    variables = {}
    for n in shuffled:
        variables |= env(str(n))
    assert [int(r.suffix) for r in parse_requests(variables)] == sorted(numbers)


names = st.one_of(
    st.text(max_size=20),
    st.builds(
        "FPGA_{}{}".format,
        st.sampled_from(["REGION_", "AFU_", "BITSTREAM_ID_", "DRIVER_PARAMS_", "REGION"]),
        st.one_of(st.sampled_from(["1", "2", "01", "x"]), st.text(max_size=5)),
    ),
)
values = st.one_of(
    st.text(max_size=80),
    st.sampled_from([IFACE, AFU, dashed(AFU2), HASH, "clock=100", "debug=1,clock=5", ""]),
)


@given(st.dictionaries(names, values, max_size=8))
def test_any_environment_gives_requests_or_a_clean_error(variables):
    try:
        requests = parse_requests(variables)
    except InvalidRequestError as error:
        message = str(error)
    else:
        message = ""
        assert all(f"FPGA_REGION_{request.suffix}" in variables for request in requests)
    assert len(message.encode()) < 1024
    assert message.isascii()


def test_names_of_variables_in_messages_are_cut():
    suffix = "a" * 100_000
    message = refused({f"FPGA_REGION_{suffix}": IFACE})
    assert "FPGA_REGION_aaa" in message
    assert "a" * 65 not in message
    assert len(one(env(suffix)).region_variable) < 70


def regions(*ifaces):
    return {RegionId(f"{CARD}-p{port}"): InterfaceId(iface) for port, iface in enumerate(ifaces)}


def requests_of(*ifaces):
    variables = {}
    for n, iface in enumerate(ifaces):
        variables |= env(str(n), iface, AFU)
    return parse_requests(variables)


def status_of(requests, given):
    with pytest.raises(FpgaPluginError) as caught:
        assign(requests, given)
    return caught.value.status, str(caught.value)


def test_no_request_leaves_every_region_blank():
    assert assign((), regions(IFACE, IFACE)) == {f"{CARD}-p0": None, f"{CARD}-p1": None}


def test_requests_in_order_go_to_regions_in_order():
    requests = requests_of(IFACE, IFACE)
    assert list(assign(requests, regions(IFACE, IFACE, IFACE)).items()) == [
        (f"{CARD}-p0", requests[0]),
        (f"{CARD}-p1", requests[1]),
        (f"{CARD}-p2", None),
    ]


def test_requests_for_another_card_belong_to_another_call():
    requests = requests_of(OTHER, IFACE, OTHER)
    assert assign(requests, regions(IFACE)) == {f"{CARD}-p0": requests[1]}


def test_requests_none_of_which_fits_are_refused_with_both_ids():
    status, message = status_of(requests_of(OTHER), regions(IFACE))
    assert status is Status.INVALID_ARGUMENT
    assert IFACE in message
    assert OTHER in message
    assert "FPGA_REGION_0" in message


def test_more_fitting_requests_than_regions_are_refused():
    status, message = status_of(requests_of(OTHER, IFACE, IFACE), regions(IFACE))
    assert status is Status.FAILED_PRECONDITION
    assert "FPGA_REGION_2" in message


def test_many_foreign_interface_ids_leave_room_for_the_devices_own():
    foreign = [f"{n:032x}" for n in range(60)]
    _, message = status_of(requests_of(*foreign), regions(IFACE))
    assert IFACE in message
    assert foreign[0] in message


@given(
    st.lists(st.sampled_from([IFACE, OTHER]), max_size=5),
    st.lists(st.sampled_from([IFACE, OTHER]), min_size=1, max_size=5),
)
def test_what_is_assigned_fits_and_nothing_is_lost(wanted, there):
    requests = requests_of(*wanted)
    given = regions(*there)
    try:
        result = assign(requests, given)
    except InvalidRequestError:
        assert wanted
        assert not set(wanted) & set(there)
        return
    except RefusedError:
        assert any(wanted.count(i) > there.count(i) > 0 for i in (IFACE, OTHER))
        return
    assert list(result) == list(given)
    for region, iface in given.items():
        given_to = result[region]
        assert given_to is None or given_to.interface_id == iface
    for iface in set(there):
        got = [result[region] for region, one in given.items() if one == iface]
        fitting = [r for r in requests if r.interface_id == iface]
        assert got == fitting + [None] * (len(got) - len(fitting))


def with_params(params):
    return one(env(FPGA_DRIVER_PARAMS_1=params))


@pytest.mark.parametrize("clock", [10, 11, 1000])
def test_a_clock_within_the_limits_is_fine(clock):
    check_limits(with_params(f"clock={clock}"), ClockLimits(10, 1000), CARD)


@pytest.mark.parametrize("clock", [0, 9, 1001])
def test_a_clock_outside_the_limits_is_refused(clock):
    with pytest.raises(InvalidRequestError, match=r"FPGA_DRIVER_PARAMS_1.*10 to 1000"):
        check_limits(with_params(f"clock={clock}"), ClockLimits(10, 1000), CARD)


def test_a_clock_on_a_card_that_cannot_set_it_is_refused():
    with pytest.raises(RefusedError, match=r"FPGA_DRIVER_PARAMS_1.*0000-3b-00\.0"):
        check_limits(with_params("clock=100"), None, CARD)


@pytest.mark.parametrize("params", ["debug=1", "debug=0"])
@pytest.mark.parametrize("limits", [None, ClockLimits(1, 2)])
def test_without_clock_there_is_nothing_to_limit(params, limits):
    check_limits(with_params(params), limits, CARD)
