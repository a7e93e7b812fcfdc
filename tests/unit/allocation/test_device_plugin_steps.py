"""The ledger's steps for the device plugin API, where the order of calls is not kubelet's usual."""

from dataclasses import replace

import pytest
from doubles.cards import REGIONS, device, make_card
from ledger_support import found, make_ledger, make_lists, reopened, shown, start
from test_dra_steps import POD, A, owner, prepare

from fpga_plugin.allocation.journal.records import TenancyKey
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.obstacles import Stops
from fpga_plugin.errors import RefusedError
from fpga_plugin.ids import DeviceId, device_variable
from fpga_plugin.kubernetes.names import PodUid

CARD, OTHER = make_card(1, nodes=(0, 1)), make_card(2, nodes=(2, 3))
P0, P1, P2 = device(CARD, 0), device(CARD, 1), device(OTHER, 0)
R0 = CARD.regions[0].id
NEXT = PodUid("pod-next")


def test_a_device_that_is_allocated_again_is_no_longer_the_former_pods() -> None:
    ledger, _ = make_ledger(CARD)
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.bind_pod([P0], POD)
    ledger.device_plugin.allocate(REGIONS, [P0])
    (one,) = ledger.tenancies.values()
    assert one.pod is None


def test_a_device_that_went_to_another_pod_has_the_nodes_of_kubelets_record() -> None:
    """The former allocation's nodes may be others by now."""
    ledger, _ = make_ledger(CARD)
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.bind_pod([P0], POD)
    ledger.device_plugin.bind_pod([P0], NEXT, {device_variable(R0): "/dev/dfl-port.7"})
    (one,) = ledger.tenancies.values()
    assert (one.pod, one.nodes) == (NEXT, ("/dev/dfl-port.7",))


def test_a_device_that_went_to_another_pod_without_a_record_keeps_its_nodes() -> None:
    ledger, _ = make_ledger(CARD)
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.bind_pod([P0], POD)
    ledger.device_plugin.bind_pod([P0], NEXT)
    assert ledger.allocations[P0].grants[R0].nodes == ("/dev/dfl-port.0",)


def test_a_pod_that_is_bound_already_is_not_written_again() -> None:
    ledger, journal = make_ledger(CARD)
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.bind_pod([P0], POD)
    writes = journal.writes
    ledger.device_plugin.bind_pod([P0], POD)
    assert journal.writes == writes


@pytest.mark.parametrize("named_is_used", [False, True])
def test_of_a_pods_two_tenancies_the_used_one_counts(*, named_is_used: bool) -> None:
    """The nameless one stays where its end could not be written."""
    ledger, journal = make_ledger(CARD)
    ledger.device_plugin.allocate(REGIONS, [P0])
    (nameless,) = journal.snapshot.tenancies.values()
    assert nameless is not None
    named = replace(nameless, key=replace(nameless.key, pod=POD), used=named_is_used)
    nameless = replace(nameless, used=not named_is_used)
    journal.snapshot.tenancies = {nameless.key: nameless, named.key: named}
    again = reopened(journal, CARD)
    again.device_plugin.bind_pod([P0], POD)
    (one,) = again.tenancies.values()
    assert (one.key, one.used) == (TenancyKey(R0, nameless.key.allocation, POD), True)


def test_devices_with_one_node_are_not_given_out_together() -> None:
    """While device numbers change, two regions may show the same node."""
    ledger, journal = make_ledger(make_card(1, nodes=(0, 0)))
    with pytest.raises(RefusedError, match="show the same device node"):
        ledger.device_plugin.allocate(REGIONS, [P0, P1])
    assert (ledger.allocations, journal.snapshot.allocations) == ({}, {})


def test_the_device_plugins_calls_end_no_resourceclaim() -> None:
    ledger, _ = make_ledger(CARD)
    prepare(ledger, CARD, 0)
    assert ledger.device_plugin.release([P0]) == ()
    assert P0 in ledger.allocations
    assert not ledger.claim_owners[A].ended


def test_no_call_of_this_api_counts_for_a_claims_device() -> None:
    """Else as many ends as beginnings would let its region be scrubbed under the claim's pods."""
    ledger, _ = make_ledger(CARD)
    prepare(ledger, CARD, 0)
    before, users = ledger.allocations[P0], dict(ledger.tenancies)
    ledger.device_plugin.bind_pod([P0], NEXT)
    assert ledger.tenancies == users, "its pods may still run"
    ledger.device_plugin.prestart_seen([P0])
    assert ledger.device_plugin.poststop_seen([P0]) == ()
    assert ledger.device_plugin.release([P0]) == ()
    assert ledger.allocations[P0] == before
    assert not ledger.device_plugin.balanced(P0)
    assert ledger.obstacles.first(P0, Stops.START), "nor is a container of another pod handed it"


def test_a_poststop_does_not_count_for_a_claim_that_was_adopted() -> None:
    """One PreStart was not seen; with DRA there was none."""
    ledger, _ = make_ledger(CARD)
    ledger.dra.adopt_claim(owner(A, P0), [POD])
    before = ledger.allocations[P0]
    assert before.prestarts > before.poststops
    ledger.device_plugin.poststop_seen([P0])
    assert ledger.allocations[P0] == before


# ------------------------------------------------------------------ a drained card


def drained(*, program: bool = True) -> Ledger:
    """Its owner's first container started, and then its card was drained."""
    ledger, _ = make_ledger(CARD)
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.bind_pod([P0], POD)
    if program:
        start(ledger, P0)
    else:
        ledger.device_plugin.prestart_seen([P0])
    ledger.hardware.set_drained(CARD.id, drained=True)
    return ledger


@pytest.mark.parametrize("program", [True, False])
@pytest.mark.parametrize("devices", [[P0], [P2, P0]])
def test_no_other_pod_is_given_a_drained_cards_device_after_its_owner(
    devices: list[DeviceId], *, program: bool
) -> None:
    """Else pods that wait would have it one after the other, and the card would never be free.

    Kubelet gives it out as it is still listed. What it says of the owner by that counts: where no
    PodResources are asked, it says nothing else.
    """
    ledger = drained(program=program)
    found(ledger, OTHER)
    with pytest.raises(RefusedError, match="is being taken out of service") as refused:
        ledger.device_plugin.allocate(REGIONS, devices)
    assert "a new pod, which is placed again" in str(refused.value.for_tenant())
    assert not ledger.allocations
    assert [one.left for one in ledger.tenancies.values()] == [True] * program
    assert P0 not in shown(make_lists(ledger), REGIONS)


def test_containers_of_a_pod_that_is_admitted_get_its_device_though_the_card_is_drained() -> None:
    """Kubelet makes all of their Allocates before the first one's PreStart."""
    ledger, _ = make_ledger(CARD)
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.hardware.set_drained(CARD.id, drained=True)
    ledger.device_plugin.allocate(REGIONS, [P0])
    start(ledger, P0)
    start(ledger, P0)
    assert P0 in ledger.allocations


@pytest.mark.parametrize("started_since", [True, False])
def test_after_a_restart_of_kubelet_an_allocate_may_be_the_owners_own(
    *, started_since: bool
) -> None:
    """Of a kubelet that lost its checkpoint. It would fail a pod that has the device."""
    ledger = drained()
    ledger.device_plugin.kubelet_found("life 2")
    if started_since:
        start(ledger, P0)
    ledger.device_plugin.allocate(REGIONS, [P0])
    start(ledger, P0)
    with pytest.raises(RefusedError, match="is being taken out of service"):
        ledger.device_plugin.allocate(REGIONS, [P0])


def test_a_device_of_a_card_in_service_goes_from_pod_to_pod() -> None:
    ledger = drained()
    ledger.hardware.set_drained(CARD.id, drained=False)
    ledger.device_plugin.allocate(REGIONS, [P0])
    assert ledger.ends == {"implied": 1}
