"""A card, and how each kind of obstacle comes to stand against its first region."""

from collections.abc import Callable
from typing import Final

from doubles.cards import REGIONS, WHOLE, make_card

from fpga_plugin.allocation.journal.records import (
    Change,
    ClaimOwner,
    DebugHold,
    Tenancy,
    TenancyKey,
)
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.obstacles import ObstacleKind
from fpga_plugin.hardware.faults import Fault, FaultKind
from fpga_plugin.ids import DeviceId, RegionId
from fpga_plugin.kubernetes.names import ClaimUid

CARD, OTHER = make_card(1, nodes=(0, 1)), make_card(2, nodes=(2, 3))
R0, R1 = (region.id for region in CARD.regions[:2])
D0, D1, BOARD = DeviceId(R0), DeviceId(R1), DeviceId(CARD.id)


def fail(ledger: Ledger, kind: FaultKind) -> None:
    ledger.hardware.set_failing(CARD.id, {R0: Fault(kind, "thermal: hot")})


def tenancy(region: RegionId, *nodes: str, left: bool = True) -> Change:
    key = TenancyKey(region, 77, "somebody")
    return Change(tenancies={key: Tenancy(key, nodes, used=True, left=left)})


def debug(until: float) -> Change:
    return Change(debug_holds={R0: DebugHold(R0, "uid", "ns", "pod", (), 60.0, "exit 1", until)})


def resource_claim(ledger: Ledger) -> None:
    ledger.device_plugin.allocate(REGIONS, [D0])
    owner = ClaimOwner(ClaimUid("claim-a"), "ns", "claim", (D0,), {})
    ledger.commit(Change(claim_owners={owner.uid: owner}))


REASONS: Final[dict[ObstacleKind, Callable[[Ledger], object]]] = {
    ObstacleKind.GONE: lambda one: one.hardware.card_gone(CARD.id),
    ObstacleKind.KEPT: lambda one: one.commit(debug(9.0)),
    ObstacleKind.UNDECIDED: lambda one: one.commit(debug(0.0)),
    ObstacleKind.FAULTED: lambda one: one.work.faulted(R0, "a PR failed"),
    ObstacleKind.FAILING: lambda one: fail(one, FaultKind.TRANSIENT),
    ObstacleKind.HUNG: lambda one: fail(one, FaultKind.CURABLE),
    ObstacleKind.STRANGER: lambda one: one.commit(tenancy(R1, *CARD.regions[0].grant.nodes)),
    ObstacleKind.TENANCY: lambda one: one.commit(tenancy(R0, "/dev/another")),
    ObstacleKind.RESOURCE_CLAIM: resource_claim,
    ObstacleKind.FOREIGN: lambda one: one.hardware.set_foreign({CARD.id: "x"}),
    ObstacleKind.REBINDING: lambda one: one.hardware.set_rebinding(CARD.id, rebinding=True),
    ObstacleKind.UNRECONCILED: lambda one: one.keep_back([CARD.id]),
    ObstacleKind.DRAINED: lambda one: one.hardware.set_drained(CARD.id, drained=True),
    ObstacleKind.MODE: lambda one: one.device_plugin.allocate(WHOLE, [BOARD]),
    ObstacleKind.OWNED: lambda one: one.device_plugin.allocate(REGIONS, [D0]),
    ObstacleKind.NOT_CLEAN: lambda one: one.work.dirty([R0], "so"),
}
