"""Which requests a preprogrammed function satisfies, and what the policy is asked about it."""

import pytest

from fpga_plugin.allocation.permission import asks
from fpga_plugin.allocation.requests.functions import assign_functions
from fpga_plugin.allocation.requests.parse import FpgaRequest
from fpga_plugin.errors import InvalidRequestError, RefusedError
from fpga_plugin.ids import (
    AfuId,
    BitstreamId,
    InterfaceId,
    RegionId,
    Resource,
    ResourceKind,
)
from fpga_plugin.kubernetes.names import ResourceName
from fpga_plugin.policy.rules import Ask

IFACE, OTHER = InterfaceId("ce" * 16), InterfaceId("69" * 16)
AFU, AFU2 = AfuId("d8" * 16), AfuId("f7" * 16)
P0, P1 = RegionId("0000-3b-00.0-p0"), RegionId("0000-3b-00.0-p1")


def name(afu: AfuId, interface: InterfaceId = IFACE) -> ResourceName:
    return Resource("fpga.intel.com", ResourceKind.AF, interface, afu).name


def asked(afu: str, interface: InterfaceId = IFACE, n: str = "1") -> FpgaRequest:
    return FpgaRequest(suffix=n, interface_id=interface, bitstream_id=BitstreamId(afu))


def assign(*requests: FpgaRequest, also: tuple[ResourceName, ...] = ()):
    return assign_functions(requests, {P0: IFACE, P1: IFACE}, IFACE, AFU, (name(AFU), *also))


def test_without_requests_every_region_is_handed_over():
    assert assign() == {P0: None, P1: None}


def test_requests_for_the_function_go_to_regions_in_order():
    one, two = asked(AFU), asked(AFU, n="2")
    assert assign(one) == {P0: one, P1: None}
    assert assign(one, two) == {P0: one, P1: two}
    with pytest.raises(
        RefusedError, match=r"FPGA_REGION_3: the container asks for 3 .* was given 2"
    ):
        assign(one, two, asked(AFU, n="3"))


def test_a_function_satisfies_its_requests_though_no_record_names_the_containers_resources():
    one = asked(AFU)
    assert assign_functions((one,), {P0: IFACE, P1: IFACE}, IFACE, AFU, ()) == {P0: one, P1: None}


@pytest.mark.parametrize("wanted", [AFU2, "0" * 40])
def test_another_accelerator_is_refused(wanted: str):
    with pytest.raises(RefusedError, match=f"asks for {wanted}, but the region holds"):
        assign(asked(AFU), asked(wanted, n="2"))


def test_what_the_containers_other_functions_satisfy_is_none_of_this_calls_business():
    both = (asked(AFU), asked(AFU2, n="2"))
    assert assign(*both, also=(name(AFU2),)) == {P0: both[0], P1: None}
    elsewhere = asked(AFU2, OTHER)
    assert assign(elsewhere, also=(name(AFU2, OTHER),)) == {P0: None, P1: None}
    with pytest.raises(InvalidRequestError, match=f"interface id {OTHER}, but"):
        assign(elsewhere)


def test_the_policy_is_asked_about_the_function_whatever_is_requested():
    ask = Ask(kind=ResourceKind.AF, interface_id=IFACE, bitstream_id=BitstreamId(AFU))
    for requests in ((), (asked(AFU2),), (asked(AFU2, OTHER),)):
        assert asks(Resource.parse(name(AFU)), requests) == (ask,)
    assert str(ask).startswith("a preprogrammed region")
