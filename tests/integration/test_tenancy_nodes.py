"""Pods that kubelet has forgotten and that still run: what they can still reach serves nobody."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_support import (
    AFU,
    AFU_2,
    BLANK,
    CARD,
    CARD_2,
    CARDS,
    HEALTHY,
    MAIN,
    P0,
    P1,
    REGIONS,
    UNHEALTHY,
    Cgroups,
    Node,
    Refused,
    eventually,
    request,
)

A, B, C = (f"{digit * 8}-{digit * 4}-4{digit * 3}-8{digit * 3}-{digit * 12}" for digit in "abc")
A0, B0 = f"{CARD}-p0", f"{CARD_2}-p0"


@pytest.fixture
def cgroups(tmp_path: Path) -> Cgroups:
    return Cgroups(tmp_path / "cgroup")


def owned(node: Node, pod: str, device: str, resource: str = REGIONS):
    """Allocate to a pod, and its entry in kubelet's checkpoint."""
    answer = node.kubelet.allocate(device, resource=resource)
    return (pod, "main", resource, [device], answer)


def run(node: Node, cgroups: Cgroups, device: str) -> None:
    """Pod A alone, on one region."""
    cgroups.set(A, MAIN)
    node.kubelet.checkpoint(owned(node, A, device))
    node.kubelet.prestart(device, env=request())


def memory_clear_pending(node: Node) -> list[str]:
    with sqlite3.connect(node.state_dir / "journal.sqlite3") as db:
        return [
            card
            for (card,) in db.execute("SELECT key FROM journal WHERE kind = 'memory_clear_pending'")
        ]


def lose_journal(node: Node) -> None:
    node.plugin.kill()
    for suffix in ("", "-wal", "-shm"):
        (node.state_dir / f"journal.sqlite3{suffix}").unlink(missing_ok=True)


# ------------------------------------------------------------------ nodes


@pytest.fixture
def lent(cgroups: Cgroups) -> Iterator[Node]:
    """A's card is pulled, another card gets its node's number, and A is deleted by force."""
    with Node("2x1", cgroup_root=str(cgroups.root)).up() as node:
        run(node, cgroups, A0)
        for card in (CARD_2, CARD):
            node.unplug(card)
            node.plugin.until_logged("card gone", card=card)
        mark = node.plugin.mark
        node.plug(CARD_2)
        node.plugin.until_logged("card found", since=mark, card=CARD_2)
        assert node.state()[B0]["node"] == 0
        node.kubelet.checkpoint()
        node.kubelet.deallocate(A0)
        yield node


def refused(node: Node) -> str:
    with pytest.raises(Refused) as refusal:
        node.kubelet.allocate(B0)
    assert refusal.value.code == "FAILED_PRECONDITION"
    return refusal.value.message


def test_a_node_that_a_living_pod_was_given_is_nobody_elses(lent: Node) -> None:
    warning = lent.plugin.until_logged(
        "a card is held back: a pod that still runs may open its regions"
    )
    assert warning["pods"] == [A]
    lent.kubelet.until(REGIONS, {B0: UNHEALTHY})
    lent.kubelet.until(CARDS, {CARD_2: UNHEALTHY})
    assert f"open to pod {A}" in refused(lent)


def test_a_restarted_plugin_still_knows_which_node_is_in_whose_hands(lent: Node) -> None:
    lent.again()
    lent.kubelet.until(REGIONS, {B0: UNHEALTHY})
    assert f"open to pod {A}" in refused(lent)


def test_the_node_comes_back_scrubbed_when_the_pods_processes_are_gone(
    lent: Node, cgroups: Cgroups
) -> None:
    mark = lent.plugin.mark
    cgroups.set(A)
    lent.kubelet.until_health(B0, HEALTHY)
    lent.plugin.until_logged("region scrubbed", since=mark, region=B0)
    lent.kubelet.checkpoint(owned(lent, B, B0))
    cgroups.set(B, MAIN)
    lent.kubelet.prestart(B0, env=request(AFU_2))
    assert lent.afu(B0) == AFU_2


# ------------------------------------------------------------------ a lost journal


def test_the_owner_of_a_card_that_comes_after_the_start_is_found(cgroups: Cgroups) -> None:
    with Node("2x2", cgroup_root=str(cgroups.root)).up() as node:
        run(node, cgroups, B0)
        lose_journal(node)
        node.unplug(CARD_2)
        node.start()
        node.plugin.until_logged("kubelet's records read")
        node.plug(CARD_2)
        node.kubelet.until_health(f"{CARD_2}-p1", HEALTHY)
        assert node.kubelet.listed()[B0] == HEALTHY
        assert CARD_2 not in node.kubelet.listed(CARDS)
        with pytest.raises(Refused, match="its regions"):
            node.kubelet.allocate(CARD_2, resource=CARDS)


def test_without_kubelets_copy_of_the_grant_the_owner_is_found_when_the_card_comes(
    cgroups: Cgroups,
) -> None:
    with Node("2x2", cgroup_root=str(cgroups.root)).up() as node:
        cgroups.set(A, MAIN)
        pod, container, resource, devices, answer = owned(node, A, B0)
        node.kubelet.checkpoint((pod, container, resource, devices, type(answer)()))
        node.kubelet.prestart(B0, env=request())
        lose_journal(node)
        node.unplug(CARD_2)
        node.start()
        node.plugin.until_logged("kubelet's records read")
        mark = node.plugin.mark
        node.plug(CARD_2)
        node.plugin.until_logged("allocation adopted", since=mark, device=B0, pod=A)
        node.kubelet.until_health(f"{CARD_2}-p1", HEALTHY)
        assert CARD_2 not in node.kubelet.listed(CARDS)


def test_the_node_of_an_owner_whose_card_is_away_is_not_given_out(cgroups: Cgroups) -> None:
    with Node("2x1", cgroup_root=str(cgroups.root)).up() as node:
        run(node, cgroups, A0)
        for card in (CARD_2, CARD):
            node.unplug(card)
            node.plugin.until_logged("card gone", card=card)
        lose_journal(node)
        node.plug(CARD_2)
        node.start()
        node.plugin.until_logged("allocation adopted", device=A0)
        assert node.state()[B0]["node"] == 0
        node.kubelet.until(REGIONS, {A0: UNHEALTHY, B0: UNHEALTHY})
        with pytest.raises(Refused, match="open to the pod"):
            node.kubelet.allocate(B0)


def test_a_new_card_waits_for_kubelets_records() -> None:
    with Node("2x1").up() as node:
        node.unplug(CARD_2)
        node.plugin.until_logged("card gone", card=CARD_2)
        lose_journal(node)
        node.start()
        node.kubelet.until_health(A0, HEALTHY)
        path = node.kubelet_dir / "kubelet_internal_checkpoint"
        path.write_text("{")
        node.plug(CARD_2)
        node.plugin.until_logged("kubelet's records cannot be read: nothing is released")
        node.kubelet.until(REGIONS, {A0: HEALTHY, B0: UNHEALTHY})
        with pytest.raises(Refused, match="kubelet's records were not read"):
            node.kubelet.allocate(B0)
        node.kubelet.checkpoint()
        node.kubelet.until_health(B0, HEALTHY)


# ------------------------------------------------------------------ memory


def test_memory_is_not_cleared_while_nobody_knows_the_neighbours() -> None:
    with Node("1x2").up() as node:
        entries = owned(node, A, P0), owned(node, B, P1)
        node.kubelet.checkpoint(*entries)
        node.kubelet.prestart(P0, env=request())
        node.kubelet.prestart(P1, env=request(AFU_2))
        lose_journal(node)
        node.set(podresources_socket=str(node.folder / "nobody.sock"))
        registered = len(node.kubelet.registrations)
        node.start()
        node.kubelet.signal.until(
            lambda: (
                len(node.kubelet.registrations) >= registered + 2
                and all(map(node.kubelet.has_list, (REGIONS, CARDS)))
            ),
            "lists",
        )
        node.kubelet.prestart(P1, env=request(AFU_2))
        assert "program" in node.steps(P1)
        assert "clear memory" not in node.steps(P1)
        assert node.afu(P0) == AFU


def test_the_memory_debt_stays_open_while_a_former_owner_runs(cgroups: Cgroups) -> None:
    with Node("1x2", cgroup_root=str(cgroups.root)).up() as node:
        for pod in (A, B):
            cgroups.set(pod, MAIN)
        first, second = owned(node, A, P0), owned(node, B, P1)
        node.kubelet.checkpoint(first, second)
        node.kubelet.prestart(P0, env=request())
        node.kubelet.prestart(P1, env=request(AFU_2))
        node.kubelet.checkpoint(second)
        node.kubelet.deallocate(P0)  # A is deleted by force and runs on
        node.plugin.until_logged("scrub waits", region=P0)
        mark = node.plugin.mark
        cgroups.set(B)
        node.kubelet.checkpoint()
        node.kubelet.deallocate(P1)
        node.plugin.until_logged("region scrubbed", since=mark, region=P1)
        told = node.plugin.until_logged("memory is not cleared while an earlier tenant runs", mark)
        assert (told["card"], told["pod"]) == (CARD, A)
        node.kubelet.until_health(P1, HEALTHY)
        assert "clear memory" not in node.steps(P1, mark)
        assert memory_clear_pending(node) == [CARD]
        assert node.afu(P0) == AFU
        cgroups.set(A)
        node.kubelet.until_health(CARD, HEALTHY, CARDS)
        assert "clear memory" in node.steps(P0, mark)
        assert eventually(lambda: not memory_clear_pending(node))
        assert node.afu(P0) == BLANK
