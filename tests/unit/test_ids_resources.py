"""Names of resources: what they say, and which of them are not this plugin's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpga_plugin.ids import (
    AfuId,
    Alias,
    InterfaceId,
    Resource,
    ResourceKind,
    aliased_name,
    kind_of,
    known_resource,
    ours,
    shell_name,
)
from fpga_plugin.kubernetes.names import parse_resource

INTERFACE = InterfaceId("ce48969398f05f33946d560708be108a")
DOMAIN = "fpga.intel.com"


@pytest.mark.parametrize(
    ("stem", "kind"), [("region", ResourceKind.REGION), ("fpga", ResourceKind.WHOLE)]
)
@pytest.mark.parametrize("domain", [DOMAIN, "x", "a" * 253])
def test_a_name_says_what_it_is_a_resource_of_and_is_written_back(domain, stem, kind):
    name = f"{domain}/{stem}-{INTERFACE}"
    assert Resource.parse(name) == known_resource(name) == Resource(domain, kind, INTERFACE)
    assert Resource.parse(name).name == name


@pytest.mark.parametrize(
    "name",
    [
        f"{DOMAIN}/af-{INTERFACE}",  # the Intel plugin's, once
        f"{DOMAIN}/af-695.d85.aVKNtusxV3qMNmj5-qCB9thCTcSko8QT-J5DNoP5BAs",  # other digits
        f"{DOMAIN}/af-695.d84.aVKNtusxV3qMNmj5-qCB9thCTcSko8QT-J5DNoP5BAt",  # bits beyond the ids
        f"{DOMAIN}/af-695.d84.aVKNtusxV3qMNmj5+qCB9thCTcSko8QT+J5DNoP5BAs",  # another alphabet
        f"{DOMAIN}/af-695.d84.aVKNtusxV3qMNmj5-qCB9thCTcSko8QT-J5DNoP5BAs=",
        f"{DOMAIN}/af-695.d84.aVKNtusxV3qMNmj5-qCB9thCTcSko8QT-J5DNoP5BA",
        f"{DOMAIN}/region",
        f"{DOMAIN}/region-",
        f"{DOMAIN}/region-{INTERFACE.upper()}",
        f"{DOMAIN}/region-{INTERFACE}0",
        f"{DOMAIN}/region-{INTERFACE[1:]}",
        f"{DOMAIN}/region-{INTERFACE}\n",
        f"{DOMAIN}/x/region-{INTERFACE}",
        f"{DOMAIN}/xregion-{INTERFACE}",
        f"{DOMAIN.upper()}/region-{INTERFACE}",
        f"{'a' * 254}/region-{INTERFACE}",
        f"/region-{INTERFACE}",
        f"region-{INTERFACE}",
        "",
    ],
)
def test_another_name_is_not_this_plugins(name):
    assert known_resource(name) is None
    with pytest.raises(ValueError, match="none of region-<interface id>, fpga-"):
        Resource.parse(name)


@pytest.mark.parametrize(
    ("interface_id", "afu_id", "name"),
    [  # its own: arria10.dcp1.2-nlb0, arria10.dcp1.2-nlb3 and d5005-nlb3, each "-preprogrammed"
        (
            "69528db6eb31577a8c3668f9faa081f6",
            "f7df405cbd7acf7222f144b0b93acd18",
            "af-695.f7d.aVKNtusxV3qMNmj5-qCB9vffQFy9es9yIvFEsLk6zRg",
        ),
        (
            "69528db6eb31577a8c3668f9faa081f6",
            "d8424dc4a4a3c413f89e433683f9040b",
            "af-695.d84.aVKNtusxV3qMNmj5-qCB9thCTcSko8QT-J5DNoP5BAs",
        ),
        (
            "bfac4d851ee856fe8c95865ce1bbaa2d",
            "f7df405cbd7acf7222f144b0b93acd18",
            "af-bfa.f7d.v6xNhR7oVv6MlYZc4buqLfffQFy9es9yIvFEsLk6zRg",
        ),
    ],
)
def test_a_function_is_called_as_the_intel_plugin_calls_it(interface_id, afu_id, name):
    function = Resource(DOMAIN, ResourceKind.AF, InterfaceId(interface_id), AfuId(afu_id))
    assert function.name == f"{DOMAIN}/{name}"
    assert known_resource(f"{DOMAIN}/{name}") == function


@given(interface_id=st.binary(min_size=16, max_size=16), afu_id=st.binary(min_size=16, max_size=16))
def test_every_functions_name_is_read_back_and_has_room(interface_id, afu_id):
    function = Resource(
        DOMAIN, ResourceKind.AF, InterfaceId(interface_id.hex()), AfuId(afu_id.hex())
    )
    assert known_resource(function.name) == function
    assert len(function.name.removeprefix(f"{DOMAIN}/")) <= 63  # kubelet's limit


def test_kinds_are_called_as_policies_and_settings_call_them():
    assert [kind.value for kind in ResourceKind] == ["region", "whole", "af"]


@pytest.mark.parametrize(
    ("stem", "kind"), [("region", ResourceKind.REGION), ("fpga", ResourceKind.WHOLE)]
)
def test_an_alias_stands_in_place_of_the_id_and_says_nothing_of_it(stem, kind):
    resource = Resource(DOMAIN, kind, INTERFACE, alias=Alias("n6001-base"))
    assert resource.name == f"{DOMAIN}/{stem}-n6001-base"
    assert resource.variable == Resource(DOMAIN, kind, INTERFACE).variable
    assert known_resource(resource.name) is None
    found = aliased_name(resource.name)
    assert found is not None
    assert (found.domain, found.kind, found.alias) == (DOMAIN, kind, "n6001-base")
    assert kind_of(resource.name) is kind


@pytest.mark.parametrize(
    "name",
    [
        f"{DOMAIN}/region-{INTERFACE}",
        f"{DOMAIN}/region-{INTERFACE[1:]}",
        f"{DOMAIN}/region-deadbeef",  # no letter that no id has
        f"{DOMAIN}/region-blank",
        f"{DOMAIN}/region-{'x' * 32}",
        f"{DOMAIN}/region--x",
        f"{DOMAIN}/region-Board",
        f"{DOMAIN}/region-board\n",
        f"{DOMAIN}/af-board",
        f"{DOMAIN}/x/region-board",
        "region-board",
    ],
)
def test_another_name_has_no_alias(name):
    assert aliased_name(name) is None


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        (f"region-{INTERFACE}", "FPGA_DEVICES_REGION_CE489693"),
        (f"fpga-{INTERFACE}", "FPGA_DEVICES_FPGA_CE489693"),
        ("af-695.d84.aVKNtusxV3qMNmj5-qCB9thCTcSko8QT-J5DNoP5BAs", "FPGA_DEVICES_AF_69528DB6"),
    ],
)
def test_a_variable_names_all_that_a_container_has_of_a_resource(name, variable):
    assert Resource.parse(f"{DOMAIN}/{name}").variable == variable


@pytest.mark.parametrize(
    ("shell", "stamp", "name"),
    [
        ("xilinx_u55c_gen3x16_xdma_base_3", "0", "amd.com/xilinx_u55c_gen3x16_xdma_base_3-0"),
        ("xilinx_u200_qdma_201920_1", "1573695690", "amd.com/xilinx_u200_qdma_201920_1-1573695690"),
        ("xilinx_" + "x" * 54, "0", f"amd.com/xilinx_{'x' * 54}-0"),
        ("xilinx_" + "x" * 55, "0", ""),
        ("xilinx_u50", "", ""),
        ("", "0", ""),
        ("xilinx_../u50", "0", ""),
        ("evil_u50", "0", ""),
    ],
)
def test_a_shell_is_called_as_amds_plugin_calls_it_where_kubernetes_takes_that(shell, stamp, name):
    assert shell_name(shell, stamp) == name
    if not name:
        return
    assert len(name.removeprefix("amd.com/")) <= 63
    found = aliased_name(name)
    assert found is not None
    resource = found.of(INTERFACE)
    assert (resource.name, resource.kind, resource.alias) == (name, ResourceKind.REGION, None)
    assert resource.interface_id == INTERFACE
    assert resource.variable == "FPGA_DEVICES_REGION_CE489693"
    assert known_resource(name) is None, "the name does not say the interface id"
    assert ours(DOMAIN)(name)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("amd.com/xilinx_u55c_gen3x16_xdma_base_3-0", True),
        ("xilinx.com/fpga-xilinx_u200_xdma_201830_1-1542252769", True),
        ("amd.com/gpu", False),
        ("xilinx.com/gpu", False),
        ("evil.amd.com/xilinx_u55c_gen3x16_xdma_base_3-0", False),
    ],
)
def test_kubelets_records_are_read_of_what_amds_plugin_gives_out(name, read):
    assert ours(DOMAIN)(name) is read
    if read:
        assert parse_resource(name, ours(DOMAIN)) == name
    else:
        with pytest.raises(ValueError, match="is no resource of this plugin"):
            parse_resource(name, ours(DOMAIN))
