"""Whose namespace a policy is asked about, when the devices change hands meanwhile."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from doubles.cards import REGIONS, device, make_card

from fpga_plugin.claims.permission import Permission
from fpga_plugin.errors import NotPermittedError, RefusedError
from fpga_plugin.ids import PodUid
from fpga_plugin.pods.identity import Identity
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


@dataclass(frozen=True)
class Held:
    namespace: str
    pod: str
    devices: frozenset[str] = frozenset({P0})


@dataclass
class PodResources:
    """Kubelet's List, and what happens while it is on its way."""

    holder: Held
    changed_hands: bool = False
    lists: int = field(default=0)

    async def list_devices(self) -> list[Held]:
        self.lists += 1
        await asyncio.sleep(0)
        return [self.holder]

    def same(self) -> None:
        if self.changed_hands:
            raise RefusedError("the claim ended before its container started")


@pytest.fixture
def policy(tmp_path: Path) -> PolicyFile:
    path = tmp_path / "policy.yaml"
    path.write_text(ONLY_A)
    return PolicyFile(str(path), guarded=False)


def test_the_successors_namespace_permits_the_caller_nothing(policy: PolicyFile):
    kubelet = PodResources(Held("team-a", "successor"), changed_hands=True)
    permission = Permission(policy, podresources=kubelet)  # type: ignore[arg-type]

    async def ask() -> Identity:
        return await permission.check(CALLER, REGIONS, [P0], [], kubelet.same)

    with pytest.raises(RefusedError, match="ended before"):
        asyncio.run(ask())
    # Nor is it remembered as the caller's.
    kubelet.changed_hands = False
    kubelet.holder = Held("team-b", "caller")
    with pytest.raises(NotPermittedError, match="team-b"):
        asyncio.run(ask())
    kubelet.holder = Held("team-a", "caller")
    with pytest.raises(NotPermittedError, match="team-b"):
        asyncio.run(ask())  # a pod keeps its namespace, so it was asked for once
    assert kubelet.lists == 2
