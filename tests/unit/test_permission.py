"""Whose namespace a policy is asked about, when the devices change hands meanwhile."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from doubles.cards import REGIONS, device, make_card
from doubles.kubelet import Kubelet

from fpga_plugin.claims.permission import Permission
from fpga_plugin.errors import NotPermittedError, RefusedError
from fpga_plugin.ids import PodUid
from fpga_plugin.pods.directory import PodDirectory
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


def changed_hands() -> None:
    raise RefusedError("the claim ended before its container started")


def same() -> None:
    """The claim is still the caller's."""


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
        return await permission.check(CALLER, REGIONS, [P0], [], lease)

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
