"""An upgrade from an earlier version of the plugin and a rollback to it, under pods that run.

The earlier version's own code runs, as git has it, on the libraries of this one. Where git does not
have it (a shallow clone), `test_journal_doubt` plays its journal.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_support import (
    AFU,
    BLANK,
    CARD,
    HEALTHY,
    MAIN,
    P0,
    P1,
    REGIONS,
    ROOT,
    UNHEALTHY,
    Cgroups,
    Node,
    run,
)
from dra_support import Claim, DraNode
from nursery import constants

EARLIER = "eea44c1cc21f40827e406b6496bc28736935a722"
"""The last version whose journal has schema 3."""

P2 = f"{CARD}-p2"
A, B = (f"{digit * 8}-{digit * 4}-4{digit * 3}-8{digit * 3}-{digit * 12}" for digit in "ab")
DOUBT = "the journal is in doubt"


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What starts the earlier version in place of the present one (`Node.wrapper`)."""
    folder = tmp_path_factory.mktemp("earlier")
    git = ["git", "-C", str(ROOT)]
    if subprocess.run(
        [*git, "cat-file", "-e", EARLIER], check=False, capture_output=True
    ).returncode:
        pytest.skip("the clone has no earlier versions (git fetch --unshallow)")
    files = subprocess.run(
        [*git, "archive", EARLIER, "fpga_plugin"], check=True, stdout=subprocess.PIPE
    ).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], check=True, input=files)
    return ["env", "-C", str(folder)]


@pytest.fixture
def cgroups(tmp_path: Path) -> Cgroups:
    return Cgroups(tmp_path / "cgroup")


@pytest.fixture
def node(cgroups: Cgroups) -> Iterator[Node]:
    with Node("1x3", cgroup_root=str(cgroups.root)) as made:
        made.own_store()  # the samples' manifest names xclbin files, which the earlier one refuses
        yield made


def two_pods(node: Node, cgroups: Cgroups) -> None:
    """A runs on the first region; B on the second, and was deleted by force."""
    run(node, cgroups, B, P1)
    of_a = run(node, cgroups, A, P0)
    node.kubelet.checkpoint(of_a)
    node.kubelet.deallocate(P1)
    node.kubelet.until(REGIONS, {P0: HEALTHY, P1: UNHEALTHY, P2: HEALTHY})


def a_ends(node: Node, cgroups: Cgroups) -> None:
    cgroups.set(A)
    node.kubelet.checkpoint()
    node.kubelet.deallocate(P0)
    node.plugin.until_logged("region scrubbed", region=P0)
    assert node.afu(P0) == BLANK


def test_an_upgrade_touches_no_pod(node: Node, cgroups: Cgroups, earlier: list[str]) -> None:
    """Nor the one that kubelet has forgotten: only the journal knows of it."""
    node.wrapper = earlier
    node.up()
    two_pods(node, cgroups)
    node.plugin.kill()
    node.wrapper = ()
    plugin = node.restarted()
    said = plugin.until_logged(DOUBT)
    assert said["reason"] == "another version of the plugin wrote it (schema 3, not 4)"
    # What it calls clean is scrubbed, as nothing of it gives trust.
    node.kubelet.until(REGIONS, {P0: HEALTHY, P1: UNHEALTHY, P2: HEALTHY})
    assert [node.scrubs(region) for region in (P0, P1, P2)] == [0, 0, 1]
    assert (node.afu(P0), node.afu(P1)) == (AFU, AFU)
    # A further start finds nothing wrong.
    plugin = node.again()
    assert plugin.logged(DOUBT) == []
    cgroups.set(B)
    plugin.until_logged("region scrubbed", region=P1)
    assert node.afu(P0) == AFU
    a_ends(node, cgroups)


def test_a_rollback_keeps_the_pods_that_kubelet_knows(
    node: Node, cgroups: Cgroups, earlier: list[str]
) -> None:
    """One that it has forgotten, too, as long as it has its device open; and back again."""
    node.up()
    two_pods(node, cgroups)
    opened = node.arm(P1, "port-open")
    node.plugin.stop()
    node.wrapper = earlier
    plugin = node.restarted()
    assert (
        "another version"
        in plugin.until_logged("journal unreadable: beginning a new one")["reason"]
    )
    node.kubelet.until(REGIONS, {P0: HEALTHY, P1: UNHEALTHY, P2: HEALTHY})
    assert [node.scrubs(region) for region in (P0, P1)] == [0, 0]
    assert (node.afu(P0), node.afu(P1)) == (AFU, AFU)
    node.plugin.kill()
    node.wrapper = ()
    node.restarted().until_logged(DOUBT)
    node.kubelet.until(REGIONS, {P0: HEALTHY, P1: UNHEALTHY, P2: HEALTHY})
    assert [node.scrubs(region) for region in (P0, P1)] == [0, 0]
    opened.unlink()
    node.plugin.until_logged("region scrubbed", region=P1)
    assert node.afu(P0) == AFU
    a_ends(node, cgroups)


def untouched(node: DraNode, claim: Claim, file: object) -> None:
    assert node.plugin.logged("region scrubbed", region=P0) == []
    assert (node.afu(P0), node.file(claim)) == (AFU, file)


@pytest.mark.parametrize("upgrade", [True, False], ids=["upgrade", "rollback and upgrade"])
def test_what_a_claim_has_stays_its_own(earlier: list[str], *, upgrade: bool) -> None:
    """With DRA: kubelet's record names it, whatever becomes of the journal."""
    with DraNode("1x2") as node:
        node.own_store()
        node.settings |= constants({"dra.lifecycle.ANSWER_SECONDS": 6})  # of the present version
        node.wrapper = earlier if upgrade else ()
        node.up()
        claim = node.claim("c", P0, bitstream=AFU)
        node.cgroups.set(claim.pods[0], MAIN)
        node.dra.prepare(claim)
        file = node.file(claim)
        if not upgrade:
            node.wrapper = earlier
            node.again()
            node.plugin.until_logged("region scrubbed", region=P1)
            untouched(node, claim, file)
        node.wrapper = ()
        node.again().until_logged("region scrubbed", region=P1)
        untouched(node, claim, file)
        other = node.claim("other", P0, bitstream=AFU)
        assert f"held by claim {claim.uid}" in node.dra.refused(other)
        node.cgroups.set(claim.pods[0])
        assert not node.dra.unprepare(claim)
        node.plugin.until_logged("region scrubbed", region=P0)
        assert (node.afu(P0), node.file(claim)) == (BLANK, None)
