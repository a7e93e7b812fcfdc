"""Names of resources: what they say, and which of them are not this plugin's."""

import pytest

from fpga_plugin.ids import InterfaceId, Resource, ResourceKind, known_resource

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
        f"{DOMAIN}/af-695.d84.aVKNtusxV3qMNmj5-qCB9thCTcSko8QT-J5DNoP5BAs",  # its present form
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
    with pytest.raises(ValueError, match="neither region-<interface id> nor fpga-"):
        Resource.parse(name)


def test_kinds_are_called_as_policies_and_settings_call_them():
    assert [kind.value for kind in ResourceKind] == ["region", "whole"]
