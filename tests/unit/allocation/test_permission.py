"""Whose namespace a policy is asked about, when the devices change hands meanwhile."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from doubles.cards import AFU, OTHER_INTERFACE, REGIONS, device, make_card
from doubles.kubelet import Kubelet
from ledger_support import make_ledger, reopened
from test_dra_steps import A, owner, prepare

from fpga_plugin.allocation.permission import Permission
from fpga_plugin.allocation.requests.directory import PodDirectory
from fpga_plugin.allocation.requests.identity import Identity
from fpga_plugin.allocation.requests.parse import FpgaRequest
from fpga_plugin.dra.claim import ResourceClaim
from fpga_plugin.dra.lifecycle import ClaimLifecycle
from fpga_plugin.errors import (
    NoSourceError,
    NotFinishedError,
    NotPermittedError,
    RefusedError,
    UnknownDeviceError,
)
from fpga_plugin.ids import BitstreamId, RegionId, Resource
from fpga_plugin.kubernetes.names import PodUid
from fpga_plugin.policy.file import PolicyFile

P0 = device(make_card(), 0)
CALLER = Identity(PodUid("caller"))
ONLY_A = """\
version: 1
default: deny
rules:
- name: a
  action: allow
  namespaces: [team-a]
"""


def changed_hands() -> None:
    raise RefusedError("the allocation ended before its container started")


def same() -> None:
    """The allocation is still the caller's."""


@pytest.fixture
def policy(tmp_path: Path) -> PolicyFile:
    path = tmp_path / "policy.yaml"
    path.write_text(ONLY_A)
    return PolicyFile(str(path), guarded=False)


def test_the_successors_namespace_permits_the_caller_nothing(policy: PolicyFile):
    kubelet = Kubelet("/nowhere", ("successor", P0))
    kubelet.namespace = "team-a"
    pods = PodDirectory(kubelet_dir="/nowhere", prefix="x", podresources=kubelet)  # type: ignore[arg-type]
    permission = Permission(policy, pods)

    async def ask(check: Callable[[], None] = same) -> Identity:
        lease = SimpleNamespace(check=check)
        return await permission.check(CALLER, Resource.parse(REGIONS), [P0], [], lease)

    with pytest.raises(RefusedError, match="ended before"):
        asyncio.run(ask(changed_hands))
    # Nor is it remembered as the caller's.
    kubelet.namespace, kubelet.held = "team-b", {("caller", P0)}
    with pytest.raises(NotPermittedError, match="team-b"):
        asyncio.run(ask())
    kubelet.namespace = "team-a"
    with pytest.raises(NotPermittedError, match="team-b"):
        asyncio.run(ask())  # a pod keeps its namespace, so it was asked for once
    assert kubelet.calls == 2


def test_what_depends_on_a_namespace_that_nobody_tells_is_not_permitted(policy: PolicyFile):
    """Invariant 4: kubelet asks again, and the message says what is missing."""

    class Nobody:
        async def name(self, *_: object) -> None:
            raise NoSourceError("kubelet's socket is not mounted")

    permission = Permission(policy, Nobody())  # type: ignore[arg-type]
    lease = SimpleNamespace(check=same)
    with pytest.raises(
        NoSourceError, match="depends on the pod's namespace, and nothing reports it"
    ):
        asyncio.run(permission.check(CALLER, Resource.parse(REGIONS), [P0], [], lease))  # type: ignore[arg-type]


def test_a_resource_claim_is_judged_by_the_interface_id_that_its_card_has_now(policy: PolicyFile):
    before, now = make_card(), make_card(interface_id=OTHER_INTERFACE)
    ledger, journal = make_ledger(before)
    prepare(ledger, before, 0)
    ledger = reopened(journal, now, boot_id="the card was flashed, and the node booted")
    assert ledger.naming.device_resource(P0) == REGIONS
    life = SimpleNamespace(_ledger=ledger, _permission=Permission(policy, None))  # type: ignore[arg-type]
    allocation = ResourceClaim(replace(owner(A, P0), namespace="team-b"))

    def check(interface_id) -> None:
        wish = FpgaRequest(suffix="", interface_id=interface_id, bitstream_id=BitstreamId(AFU))
        asyncio.run(ClaimLifecycle._check_policy(life, allocation, {RegionId(P0): wish}))

    with pytest.raises(NotPermittedError, match="namespace team-b may not have"):
        check(OTHER_INTERFACE)
    with pytest.raises(NotFinishedError, match=f"interface id {OTHER_INTERFACE} now"):
        check(before.interface_id)  # read before the card changed: no question would fit
    ledger.hardware.card_gone(now.id)
    with pytest.raises(UnknownDeviceError):
        check(OTHER_INTERFACE)
