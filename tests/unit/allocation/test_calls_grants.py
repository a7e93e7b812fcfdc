"""What a container gets of a region is the backend's to say; the ledger keeps and compares it."""

from dataclasses import replace

import pytest
from doubles.cards import REGIONS, device, make_card
from ledger_support import found, gone, make_ledger, reopened, scrub, start

from fpga_plugin.allocation.calls import AllocateAnswer
from fpga_plugin.allocation.names import resource_names
from fpga_plugin.errors import RefusedError
from fpga_plugin.hardware.grant import Grant, Mount
from fpga_plugin.ids import RegionId, Resource, device_variable
from fpga_plugin.kubernetes.names import PodUid

CARD = make_card(1, nodes=((0, 1), (2, 3)), shared=("/dev/shared",))
OTHER = make_card(2, nodes=((4, 5), (6, 7)), shared=("/dev/shared",))
P0, P1 = device(CARD, 0), device(CARD, 1)
R0, R1 = RegionId(P0), RegionId(P1)
Q0 = device(OTHER, 0)
POD = PodUid("pod-a")
CARDS = resource_names("fpga.intel.com", CARD.interface_id)[1]


@pytest.fixture
def ledger():
    return make_ledger(CARD, OTHER)[0]


def test_a_container_gets_all_that_the_grants_of_its_regions_say():
    library, plugins = Mount("/opt/lib", "/usr/lib/x"), Mount("/opt/plugins", "/p", read_only=False)
    one = Grant(("/dev/a", "/dev/b"), ("/dev/s",), (library,), {"FUNCTIONS": "1"})
    other = Grant(("/dev/c",), ("/dev/s",), (library, plugins), {device_variable(R1): "nonsense"})
    allocation = AllocateAnswer.of(
        Resource.parse(REGIONS), {R1: other, R0: one}
    )  # as kubelet named them
    assert allocation.nodes == ("/dev/s", "/dev/a", "/dev/b", "/dev/c")
    assert allocation.mounts == (library, plugins)
    assert allocation.envs == {
        "FUNCTIONS": "1",
        device_variable(R0): "/dev/a,/dev/b",
        device_variable(R1): "/dev/c",
        "FPGA_DEVICE_1": "/dev/a,/dev/b",
        "FPGA_DEVICE_2": "/dev/c",
        "FPGA_DEVICES_REGION_CE489693": "/dev/a,/dev/b,/dev/c",
    }


def test_devices_are_numbered_by_address_and_port_not_by_their_text():
    ids = ["0000-3b-00.0-p10", "0000-3b-00.0-p9", "0000-0a-00.0-p3", "0000-3b-00.0-p1"]
    grants = {RegionId(id_): Grant((f"/dev/{id_}",)) for id_ in ids}
    envs = AllocateAnswer.of(Resource.parse(CARDS), grants).envs
    numbered = [envs[f"FPGA_DEVICE_{number}"] for number in range(1, 5)]
    assert numbered == [
        "/dev/0000-0a-00.0-p3",
        "/dev/0000-3b-00.0-p1",
        "/dev/0000-3b-00.0-p9",
        "/dev/0000-3b-00.0-p10",
    ]
    assert envs["FPGA_DEVICES_FPGA_CE489693"] == ",".join(numbered)
    assert "FPGA_DEVICE_0" not in envs
    assert "FPGA_DEVICE_5" not in envs


def test_what_a_container_gets_of_another_card_has_another_name():
    one, other = (
        AllocateAnswer.of(
            Resource.parse(f"fpga.example.com/region-{id_}"), {R0: Grant(("/dev/a",))}
        )
        for id_ in ("0123456789abcdef" * 2, "fedcba9876543210" * 2)
    )
    assert one.envs.keys() ^ other.envs.keys() == {
        "FPGA_DEVICES_REGION_01234567",
        "FPGA_DEVICES_REGION_FEDCBA98",
    }


def test_a_grant_is_told_by_its_own_nodes_alone():
    now = Grant(("/dev/a", "/dev/b"), ("/dev/s",))
    assert now.reaches(Grant(("/dev/b", "/dev/a"), (), (Mount("/x", "/x"),), {"NEW": "1"}))
    assert not now.reaches(Grant(("/dev/a",), ("/dev/s",)))
    assert not now.reaches(Grant(("/dev/a", "/dev/b", "/dev/c"), ("/dev/s",)))
    assert Grant.parse(str(now)).reaches(now)


def test_neighbours_share_the_node_that_is_shared(ledger):
    (one,) = ledger.device_plugin.allocate(REGIONS, [P0])
    (other,) = ledger.device_plugin.allocate(REGIONS, [P1])
    for allocation in (one, other):
        assert allocation.grants == {
            r.id: r.grant for r in ledger.obstacles.regions_of(allocation.device)
        }
        ledger.obstacles.check_grants(allocation)


def test_one_of_several_nodes_that_moved_fails_the_start(ledger):
    (allocation,) = ledger.device_plugin.allocate(REGIONS, [P0])
    found(ledger, make_card(1, nodes=((0, 8), (2, 3)), shared=("/dev/shared",)))
    with pytest.raises(RefusedError, match=r"was /dev/dfl-port.0,/dev/dfl-port.1 and is /dev/dfl"):
        ledger.obstacles.check_grants(allocation)


def test_a_node_that_kubelets_copy_names_twice_is_one_node(ledger):
    ledger.device_plugin.adopt(
        REGIONS, P0, POD, {device_variable(R0): "/dev/dfl-port.0,/dev/dfl-port.0"}
    )
    assert ledger.allocations[P0].grants[R0].nodes == ("/dev/dfl-port.0",)
    ledger.device_plugin.poststop_seen([P0])
    ledger.device_plugin.release([P0])


def test_one_node_in_other_hands_keeps_a_region_back(ledger):
    ledger.device_plugin.allocate(REGIONS, [P0])
    start(ledger, P0)
    ledger.device_plugin.bind_pod([P0], POD)
    ledger.hardware.card_gone(CARD.id)
    moved = make_card(2, nodes=((4, 1), (6, 7)), shared=("/dev/shared",))
    found(ledger, moved)
    scrub(ledger, moved)
    (region, neighbour) = moved.regions
    (one,) = ledger.strangers(region)
    assert (one.region, one.nodes, one.left) == (R0, ("/dev/dfl-port.0", "/dev/dfl-port.1"), False)
    assert not ledger.strangers(neighbour)
    with pytest.raises(RefusedError, match=r"^/dev/dfl-port.1 of region .* open to the pod"):
        ledger.device_plugin.allocate(REGIONS, [Q0])
    ledger.device_plugin.release([P0])
    assert ledger.strangers(region) == [replace(one, left=True)]
    assert one.pod == POD
    with pytest.raises(RefusedError, match=r"^/dev/dfl-port.1 of region .* open to pod"):
        ledger.device_plugin.allocate(REGIONS, [Q0])
    gone(ledger, POD)
    scrub(ledger, moved)
    ledger.device_plugin.allocate(REGIONS, [Q0])


def test_what_kubelet_kept_of_several_nodes_is_adopted_and_compared(ledger):
    kept = {device_variable(R0): "/dev/dfl-port.0,/dev/dfl-port.1"}
    allocation = ledger.device_plugin.adopt(REGIONS, P0, POD, kept)
    ledger.obstacles.check_grants(allocation)
    stale = ledger.device_plugin.adopt(REGIONS, P1, POD, {device_variable(R1): "/dev/dfl-port.2"})
    with pytest.raises(RefusedError, match="device numbering changed"):
        ledger.obstacles.check_grants(stale)


def test_a_grant_outlives_the_plugin():
    ledger, journal = make_ledger(CARD)
    ledger.device_plugin.allocate(REGIONS, [P0])
    again = reopened(journal, CARD)
    assert again.allocations[P0].grants == {R0: CARD.regions[0].grant}
    again.obstacles.check_grants(again.allocations[P0])
