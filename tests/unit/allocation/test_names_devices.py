"""What names tell of devices, and how long a lease on allocations holds."""

import pytest
from doubles.cards import AFU, PREFIX, REGIONS, WHOLE, device, make_card
from ledger_support import make_ledger, start

from fpga_plugin.allocation.names import function_name, grants_among, names_kind_of
from fpga_plugin.errors import RefusedError
from fpga_plugin.ids import device_variable
from fpga_plugin.kubernetes.names import ResourceName

CARD = make_card(1, nodes=(0, 1))
P0, P1, BOARD = device(CARD, 0), device(CARD, 1), device(CARD)
R0, R1 = (region.id for region in CARD.regions)


def test_a_resource_names_cards_or_regions_and_what_is_no_resource_neither() -> None:
    """An allocation of the other kind in the journal, or in kubelet's records, is a damaged one."""
    assert names_kind_of(WHOLE, BOARD)
    assert names_kind_of(REGIONS, P0)
    assert names_kind_of(function_name(PREFIX, CARD.interface_id, AFU), P0)
    assert not names_kind_of(WHOLE, P0)
    assert not names_kind_of(REGIONS, BOARD)
    for one in (P0, BOARD):
        assert not names_kind_of(ResourceName("example.com/gpu"), one)


def test_an_environment_tells_every_region_of_a_card_and_of_a_region_its_own() -> None:
    env = {
        device_variable(R0): "/dev/dfl-port.0",
        device_variable(R1): "/dev/dfl-port.1",
        device_variable(R0).replace("0", "x") + "_OTHER": "/dev/mem",
        device_variable(R1) + "0x": "/dev/mem",
    }
    assert {region: grant.nodes for region, grant in grants_among(BOARD, env).items()} == {
        R0: ("/dev/dfl-port.0",),
        R1: ("/dev/dfl-port.1",),
    }
    assert list(grants_among(P0, env)) == [R0]
    assert grants_among(P0, {}) == {}


def test_a_lease_ends_with_any_of_its_allocations_whoever_has_the_device_then() -> None:
    """Work for one owner must not end up with the next one (invariants 1 and 4)."""
    ledger, _ = make_ledger(CARD)
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.allocate(REGIONS, [P1])
    lease = ledger.lease([P1, P0])
    assert lease.devices == (P1, P0)
    start(ledger, P0)
    assert lease.holds, "that it is used by now changes nothing"
    assert ledger.lease([P0, P1]) == lease
    lease.check()
    ledger.device_plugin.release([P0])
    assert not lease.holds
    with pytest.raises(RefusedError, match=f"allocation of {P0} ended before"):
        lease.check()
    ledger.device_plugin.allocate(REGIONS, [P0])
    assert not lease.holds
    assert ledger.lease([P0, P1]) != lease
    with pytest.raises(RefusedError, match=f"allocation of {P0} ended before"):
        lease.check()
