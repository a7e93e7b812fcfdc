"""FPGA_* variables that mean nothing: which they are, and what was meant."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpga_plugin.allocation.requests.environment import container_requests
from fpga_plugin.allocation.requests.parse import REQUEST_PREFIXES
from fpga_plugin.allocation.requests.unknown_variables import (
    UnknownVariable,
    requests_in,
    unknown_variables,
)
from fpga_plugin.errors import InvalidRequestError
from fpga_plugin.kubernetes.pod import Container, Pod, Variable


def meant(name: str) -> str:
    (found,), count = unknown_variables({name: "x"})
    assert count == 1
    assert found.name == f"'{name}'"
    return found.meant


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("FPGA_REGON_1", "FPGA_REGION_1"),
        ("FPGA_REGION1", "FPGA_REGION_1"),
        ("FPGA_REGION", "FPGA_REGION_1"),
        ("FPGA_DRIVER_PARAM_1", "FPGA_DRIVER_PARAMS_1"),
        ("FPGA_BITSTREAM_2", "FPGA_BITSTREAM_ID_2"),
        ("FPGA_BITSTREAM_ID", "FPGA_BITSTREAM_ID_1"),
        ("FPGA_BITSTREAMID_left", "FPGA_BITSTREAM_ID_left"),
        ("FPGA_AFU", "FPGA_AFU_1"),
        ("FPGA_AFU_ID", "FPGA_AFU_ID_1"),
        ("FPGA_AFUS_3", "FPGA_AFU_3"),
        ("FPGA_region_1", "FPGA_REGION_1"),
        ("FPGA_TUNING", ""),
        ("FPGA_", ""),
    ],
)
def test_the_nearest_right_name_is_told(name: str, right: str):
    if name == "FPGA_AFU_ID":  # it is a request variable: of the suffix ID
        assert unknown_variables({name: "x"}) == ((), 0)
    else:
        assert meant(name) == right


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FPGA_REGION_1", "x"),
        ("FPGA_REGION_", "x"),  # a wrong request is an error of its own
        ("FPGA_DEVICE_0000_3B_00_0_P0", "/dev/dfl-port.0"),
        ("FPGA_DEVICE_1", "/dev/dfl-port.0"),
        ("FPGA_DEVICES_REGION_CE489693", "/dev/dfl-port.0"),
        ("FPGA_FUNCTIONS_0000_3B_00_0_P0", "0000:3b:00.1"),
        ("FPGA_REQUEST_ONE", "x"),
        ("FPGA_PLUGIN_SCRUB", "required"),
        ("FPGA_SERVICE_HOST", "10.0.0.1"),  # of Services called `fpga` and `fpga-app`
        ("FPGA_APP_SERVICE_PORT_HTTP", "80"),
        ("FPGA_APP_PORT_80_TCP_ADDR", "10.0.0.1"),
        ("FPGA_APP_PORT", "tcp://10.0.0.1:80"),
        ("FPGAS", "2"),
        ("MY_FPGA_REGION_1", "x"),
    ],
)
def test_names_with_a_meaning_are_not_told(name: str, value: str):
    assert unknown_variables({name: value}) == ((), 0)


def test_a_port_that_is_no_services_is_told():
    assert meant("FPGA_APP_PORT") == ""


def test_few_are_named_and_all_are_counted():
    found, count = unknown_variables({f"FPGA_X{i:03}": "" for i in range(100)})
    assert [one.name for one in found] == [f"'FPGA_X{i:03}'" for i in range(8)]
    assert count == 100


@given(st.dictionaries(st.text().map(lambda text: f"FPGA_{text}"), st.text()))
def test_a_tenants_name_is_shown_printable_and_cut(env: dict[str, str]):
    found, count = unknown_variables(env)
    assert len(found) == min(count, 8)
    for one in found:
        assert len(str(one)) < 200
        assert one.name.isascii()
        assert one.name.isprintable()
        assert not one.meant or one.meant.startswith(REQUEST_PREFIXES)


def test_it_reads_as_a_question():
    assert str(UnknownVariable("'FPGA_AFUS_1'", "FPGA_AFU_1")) == (
        "'FPGA_AFUS_1' (did you mean FPGA_AFU_1?)"
    )
    assert str(UnknownVariable("'FPGA_TUNING'", "")) == "'FPGA_TUNING'"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("FPGA_REGON_1", "FPGA_BITSTREAM_ID_1"), ("FPGA_BITSTREM_ID_1", "FPGA_REGION_1")],
)
def test_a_missing_variable_is_refused_with_the_one_that_was_meant_to_be_it(wrong, right):
    env = {wrong: "c" * 32, right: "a" * 32, "FPGA_TUNING": "x"}
    with pytest.raises(InvalidRequestError) as caught:
        requests_in(env)
    assert f"{right} is set, but" in caught.value.message
    assert caught.value.hint.startswith(f"'{wrong}' (did you mean {meant(wrong)}?) has no effect; ")
    container = Container("app", tuple(Variable(*one) for one in env.items()), ())
    pod = Pod(
        namespace="n", name="p", uid="u", node="", service_account="", containers=(container,)
    )
    ((asks,), _) = container_requests(pod)
    assert asks.wrong == (caught.value.message, caught.value.hint, caught.value.asked)


def test_what_is_misspelt_elsewhere_is_not_named_for_a_missing_variable():
    with pytest.raises(InvalidRequestError) as caught:
        requests_in({"FPGA_AFU_1": "a" * 32, "FPGA_REGON_2": "c" * 32})
    assert caught.value.hint == "set FPGA_REGION_1 to the interface id of the device"


def test_those_of_a_pods_spec_are_known_and_change_nothing_else():
    def asks(*names: str):
        container = Container("app", tuple(Variable(name, "x") for name in names), ())
        pod = Pod(
            namespace="n", name="p", uid="u", node="", service_account="", containers=(container,)
        )
        ((found,), _) = container_requests(pod)
        return found

    misspelt = asks("FPGA_REGON_1", "PATH")
    assert dict(misspelt.env) == {"FPGA_REGON_1": "x"}
    assert misspelt.same(asks("PATH")), "which of them starts makes no difference"
