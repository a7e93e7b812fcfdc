"""Every reason that stands against a device, and what it stops (`allocation/obstacles.py`)."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
from doubles.cards import REGIONS, WHOLE
from ledger_support import make_ledger, start, tenancy
from obstacle_reasons import BOARD, CARD, D0, OTHER, R0, R1, REASONS

from fpga_plugin.allocation.exposure import ExposurePolicy
from fpga_plugin.allocation.journal.records import Change, Condition, Fact
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.names import LEAVE_DRA
from fpga_plugin.allocation.obstacles import ObstacleKind, Stops
from fpga_plugin.errors import RefusedError, UnknownDeviceError
from fpga_plugin.hardware.faults import Fault, FaultKind
from fpga_plugin.hardware.grant import Grant
from fpga_plugin.hardware.model import CardProblem, Iommu
from fpga_plugin.ids import DeviceId, PciAddress
from fpga_plugin.settings.settings import Exposure

ROOT = Path(__file__).parents[3]


@pytest.fixture
def ledger() -> Ledger:
    return make_ledger(CARD)[0]


def kinds(ledger: Ledger, device: DeviceId = D0) -> set[ObstacleKind]:
    return {one.kind for one in ledger.obstacles.of(device)}


def make_dra() -> Ledger:
    ledger, _ = make_ledger(CARD)
    ledger.obstacles._dra = True
    return ledger


@pytest.mark.parametrize("kind", REASONS)
def test_each_reason_is_found_and_says_what_is_so_and_what_to_do(
    ledger: Ledger, kind: ObstacleKind
) -> None:
    assert kind not in kinds(ledger)
    REASONS[kind](ledger)
    assert kind in kinds(ledger)
    for one in ledger.obstacles.of(D0):
        assert CARD.id in one.message.rpartition(" ")[0]
        assert one.refusal(operator=True).hint


@pytest.mark.parametrize("kind", REASONS)
def test_a_pods_owner_reads_no_command_and_the_operator_does(
    ledger: Ledger, kind: ObstacleKind
) -> None:
    """What `fpga-plugin`, the plugin's log and the kernel's say is not a tenant's to see."""
    REASONS[kind](ledger)
    for one in ledger.obstacles.of(D0):
        told = str(one.refusal().for_tenant())
        assert "fpga-plugin " not in told
        assert " log" not in told
        if one.operator:
            assert str(one.refusal()) == f"{one.message}: {one.operator}", "for status and log"


def test_what_helps_beside_the_runbook_is_the_operators(ledger: Ledger) -> None:
    fault = Fault(FaultKind.TRANSIENT, "fatal: 2 errors", "`fpga-plugin card retry`")
    ledger.hardware.set_failing(CARD.id, {R0: fault})
    (one,) = ledger.obstacles.of(D0)
    assert one.told == "fatal: 2 errors; `fpga-plugin card retry`"
    assert str(one.refusal()).endswith(": `fpga-plugin card retry`")
    assert "retry" not in str(one.refusal().for_tenant())


def test_of_what_is_no_failure_the_cause_alone_is_told(ledger: Ledger) -> None:
    """The operator's command is in the refusal, and in status."""
    REASONS[ObstacleKind.KEPT](ledger)
    (one,) = ledger.obstacles.of(D0)
    assert one.operator
    assert one.told == one.cause != ""


@pytest.mark.parametrize("kind", [kind for kind in REASONS if kind.stops & Stops.ALLOCATE])
def test_what_stops_allocate_does_stop_it(ledger: Ledger, kind: ObstacleKind) -> None:
    REASONS[kind](ledger)
    owned = D0 in ledger.allocations
    with pytest.raises((RefusedError, UnknownDeviceError)):
        ledger.device_plugin.allocate(REGIONS, [D0])
    assert (D0 in ledger.allocations) == owned


@pytest.mark.parametrize("kind", [kind for kind in REASONS if not kind.stops & Stops.ALLOCATE])
def test_what_does_not_stop_allocate_does_not(ledger: Ledger, kind: ObstacleKind) -> None:
    REASONS[kind](ledger)
    assert ledger.device_plugin.allocate(REGIONS, [D0])


def test_of_a_whole_card_ports_without_a_driver_and_memory_count(ledger: Ledger) -> None:
    ledger.hardware.card_found(replace(CARD, regions=CARD.regions[:1]), {R0: None}, None)
    ledger.work.set_memory_clear_pending(CARD.id, open_=True)
    assert {ObstacleKind.INCOMPLETE, ObstacleKind.MEMORY} <= kinds(ledger, BOARD)
    assert not {ObstacleKind.INCOMPLETE, ObstacleKind.MEMORY} & kinds(ledger)


def test_the_operator_refuses_cards_that_expose_memory(ledger: Ledger) -> None:
    ledger.obstacles.exposure = ExposurePolicy(untranslated_dma=Exposure.REFUSE)
    untranslated = replace(CARD, iommu=Iommu.NONE)
    ledger.show(untranslated)
    assert ObstacleKind.EXPOSED in kinds(ledger)


def test_modes_restarts_and_releases_of_others_never_take_a_device_from_its_owner() -> None:
    """Invariant 3: only hardware, or the other API, makes an owned device Unhealthy."""
    stopping = {kind for kind in ObstacleKind if Stops.OWNER in kind.stops}
    hardware = {
        ObstacleKind.GONE,
        ObstacleKind.INCOMPLETE,
        ObstacleKind.FAULTED,
        ObstacleKind.FAILING,
        ObstacleKind.HUNG,
    } | {ObstacleKind.REBINDING}
    assert stopping == hardware | {ObstacleKind.RESOURCE_CLAIM}


def test_dirty_stops_the_offer_and_not_allocate() -> None:
    assert ObstacleKind.NOT_CLEAN.stops == Stops.OFFER


def test_with_dra_a_pods_device_is_said_to_the_scheduler() -> None:
    ledger = make_dra()
    ledger.device_plugin.allocate(REGIONS, [D0])
    assert ObstacleKind.POD in kinds(ledger)
    assert ObstacleKind.RESOURCE_CLAIM not in kinds(ledger)


def test_a_tenancy_alone_decides_nothing_before_its_processes_were_looked_at(
    ledger: Ledger,
) -> None:
    REASONS[ObstacleKind.TENANCY](ledger)
    for what in Stops:
        assert ledger.obstacles.first(D0, what) is None


def test_the_most_telling_reason_comes_first(ledger: Ledger) -> None:
    ledger.work.dirty([R0], "so")
    ledger.hardware.set_drained(CARD.id, drained=True)
    ledger.hardware.set_failing(CARD.id, {R0: Fault(FaultKind.LASTING, "port: dead")})
    found = [one.kind for one in ledger.obstacles.of(D0)]
    assert found == [ObstacleKind.FAILING, ObstacleKind.DRAINED, ObstacleKind.NOT_CLEAN]
    with pytest.raises(RefusedError, match="is faulted: port: dead"):
        ledger.obstacles.check(D0, Stops.ALLOCATE)


def test_a_card_that_is_not_served_says_why_and_what_helps(ledger: Ledger) -> None:
    ledger.hardware.card_gone(CARD.id)
    ledger.problems[CARD.id] = CardProblem(
        PciAddress.parse(CARD.id), "no driver", hint="load dfl-pci"
    )
    (gone,) = (one for one in ledger.obstacles.of(D0) if one.kind is ObstacleKind.GONE)
    assert gone.message == f"card {CARD.id} is not served: no driver"
    assert gone.operator == "load dfl-pci"
    assert gone.tenant.endswith("or ask the node's operator")


def test_another_card_does_not_matter(ledger: Ledger) -> None:
    ledger.hardware.set_foreign({OTHER.id: "x"})
    assert kinds(ledger) == set()


def test_an_owner_that_started_has_its_region_programmed_and_no_obstacle_but_itself(
    ledger: Ledger,
) -> None:
    ledger.device_plugin.allocate(REGIONS, [D0])
    start(ledger, D0)
    assert ledger.record(R0).condition is Condition.PROGRAMMED
    assert kinds(ledger) == {ObstacleKind.OWNED}


def test_nodes_that_lead_elsewhere_refuse_the_container(ledger: Ledger) -> None:
    (claim,) = ledger.device_plugin.allocate(REGIONS, [D0])
    moved = replace(CARD.regions[0], grant=Grant(("/dev/moved",)))
    ledger.show(replace(CARD, regions=(moved, *CARD.regions[1:])))
    with pytest.raises(RefusedError, match="device numbering changed"):
        ledger.obstacles.check_grants(claim)


def test_the_table_of_the_documents_is_made_from_the_code() -> None:
    path = ROOT / "docs/architecture.md"
    tool = runpy.run_path(str(ROOT / "docs/obstacles.py"))
    text = path.read_text()
    assert tool["rewritten"](text) == text, "run `make docs`"


def test_of_two_pods_with_a_regions_node_the_one_that_can_be_deleted_is_named(
    ledger: Ledger,
) -> None:
    node = CARD.regions[0].grant.nodes[0]
    ledger.commit(tenancy(R1, "left", node))
    ledger.commit(tenancy(OTHER.regions[0].id, "runs", node, left=False))
    (one,) = (each for each in ledger.obstacles.of(D0) if each.kind is ObstacleKind.STRANGER)
    assert one.operator == f"delete the pod that holds {OTHER.regions[0].id}"


def test_a_card_of_which_a_claim_may_have_devices_says_why_and_what_ends_that(
    ledger: Ledger,
) -> None:
    ledger.keep_back([CARD.id])
    assert "rows were lost" not in ledger.obstacles.first(D0, Stops.ALLOCATE).message
    ledger.commit(Change(facts={Fact.RESOURCE_CLAIMS: "rows were lost"}))
    one = ledger.obstacles.first(D0, Stops.ALLOCATE)
    assert one.message == f"who has card {CARD.id} is not known: rows were lost"
    assert (one.tenant, one.operator) == (LEAVE_DRA, LEAVE_DRA)


@pytest.mark.parametrize("resets", [True, False])
def test_a_card_whose_reset_rebinds_its_driver_is_not_kept_back_by_it(
    ledger: Ledger, *, resets: bool
) -> None:
    """Such a reset is a part of each scrub: what was begun is ended by the next one."""
    ledger.show(replace(CARD, resets=resets))
    ledger.hardware.set_rebinding(CARD.id, rebinding=True)
    assert (ObstacleKind.REBINDING in kinds(ledger)) is not resets


@pytest.mark.parametrize("owned", [D0, BOARD, None])
def test_a_debug_hold_that_is_not_decided_names_the_owners_device(
    ledger: Ledger, owned: DeviceId | None
) -> None:
    if owned is not None:
        ledger.device_plugin.allocate(WHOLE if owned == BOARD else REGIONS, [owned])
    REASONS[ObstacleKind.UNDECIDED](ledger)
    (one,) = (each for each in ledger.obstacles.of(R0) if each.kind is ObstacleKind.UNDECIDED)
    assert one.device == owned
