"""SIGKILL between any two steps of an allocation's life, then a restart on what is left behind.

Whatever was going on: the neighbour's region is not touched, an owned region stays with its owner
and on the list, a region that may hold somebody's image is not Healthy before it was scrubbed, and
one that is clean is not programmed again.
"""

import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from daemon_support import (
    AFU,
    AFU_2,
    AFU_3,
    BLANK,
    CARD,
    CARD_2,
    CARDS,
    FACTORY,
    HEALTHY,
    NO_REQUEST,
    P0,
    P1,
    P2,
    REGIONS,
    UNHEALTHY,
    Node,
    Refused,
    request,
)

SCHEMA_1 = Path(__file__).with_name("journal-schema-1.sql")


@dataclass(frozen=True)
class Point:
    """Where in the life of an allocation on P0 the plugin is killed.

    Attributes:
        reach: brings a node to this point.
        owned: kubelet has given P0 to a pod.
        afu: what P0 holds.
        clean: P0 is blank and known to be: nothing is to be done.
        own: what is on P0 is its owner's, verified: the next container of it needs no scrub.
    """

    reach: Callable[[Node], object]
    owned: bool
    afu: str
    clean: bool = False
    own: bool = False


def idle(_: Node) -> None:
    pass


def allocated(node: Node) -> None:
    node.kubelet.allocate(P0)


def started(node: Node) -> None:
    allocated(node)
    node.kubelet.prestart(P0, env=request())


def handed_over_blank(node: Node) -> None:
    allocated(node)
    node.kubelet.prestart(P0, env=NO_REQUEST)


def refused(node: Node) -> None:
    allocated(node)
    with pytest.raises(Refused, match="NOT_FOUND"):
        node.kubelet.prestart(P0, env=request("0" * 32))


def stopped(node: Node) -> None:
    started(node)
    mark = node.plugin.mark
    node.kubelet.poststop(P0)
    node.plugin.until_logged("region scrubbed", mark, region=P0)


def ended(node: Node) -> None:
    stopped(node)
    node.kubelet.deallocate(P0)


def ended_without_poststop(node: Node) -> None:
    started(node)
    mark = node.plugin.mark
    node.kubelet.deallocate(P0)
    node.plugin.until_logged("region scrubbed", mark, region=P0)


def given_to_another(node: Node) -> None:
    started(node)
    node.kubelet.allocate(P0)


def begin_programming(node: Node) -> None:
    """After `allocated`, with PRs that do not end."""
    call = node.kubelet.begin_prestart(P0, env=request())
    node.until_programming(P0, AFU)
    call.cancel()


def begin_programming_again(node: Node) -> None:
    call = node.kubelet.begin_prestart(P0, env=request(AFU_2))
    node.until_programming(P0, AFU_2)
    call.cancel()


def begin_scrub_by_poststop(node: Node) -> None:
    node.kubelet.poststop(P0)
    node.until_programming(P0, BLANK)


def begin_scrub_by_deallocate(node: Node) -> None:
    node.kubelet.deallocate(P0)
    node.until_programming(P0, BLANK)


def begin_next_owner(node: Node) -> None:
    """The scrub of what the earlier tenant left, inside the next one's PreStart."""
    call = node.kubelet.begin_prestart(P0, env=request(AFU_2))
    node.until_programming(P0, BLANK)
    call.cancel()


POINTS = {
    "idle": Point(idle, owned=False, afu=BLANK, clean=True),
    "after Allocate": Point(allocated, owned=True, afu=BLANK, clean=True),
    "after a PreStart that was refused": Point(refused, owned=True, afu=BLANK, clean=True),
    "after PreStart": Point(started, owned=True, afu=AFU, own=True),
    "after PreStart without a request": Point(handed_over_blank, owned=True, afu=BLANK, own=True),
    "after PostStop's scrub": Point(stopped, owned=True, afu=BLANK, clean=True),
    "after Deallocate": Point(ended, owned=False, afu=BLANK, clean=True),
    "after Deallocate's scrub": Point(ended_without_poststop, owned=False, afu=BLANK, clean=True),
    "after the next Allocate": Point(given_to_another, owned=True, afu=AFU),
}

INSIDE = {
    "programming": (allocated, Point(begin_programming, owned=True, afu=AFU)),
    "programming again": (started, Point(begin_programming_again, owned=True, afu=AFU_2)),
    "PostStop's scrub": (started, Point(begin_scrub_by_poststop, owned=True, afu=BLANK)),
    "Deallocate's scrub": (started, Point(begin_scrub_by_deallocate, owned=False, afu=BLANK)),
    "the scrub for the next owner": (
        given_to_another,
        Point(begin_next_owner, owned=True, afu=BLANK),
    ),
}


@dataclass(frozen=True)
class Hardware:
    """What P0 is a region of, and the region that a pod has through all of it."""

    cards: str
    neighbour: str
    clock: bool

    @property
    def beside(self) -> bool:
        """Whether the neighbour's region is one of the same card."""
        return self.neighbour.startswith(CARD)


HARDWARE = [
    pytest.param(Hardware("1x2", P1, clock=True), id="PAC A10"),
    pytest.param(Hardware("2x1+ofs", f"{CARD_2}-p0", clock=False), id="OFS"),
]


def with_neighbour(hardware: Hardware) -> Node:
    """The neighbour is in use, by a pod that lives through all of it."""
    node = Node(hardware.cards).up()
    node.kubelet.allocate(hardware.neighbour)
    params = "clock=77" if hardware.clock and node.has_clocks else ""
    node.kubelet.prestart(hardware.neighbour, env=request(AFU_3, params=params))
    return node


def check_after(node: Node, point: Point, hardware: Hardware) -> None:
    """The plugin was killed at the point: start it again, and let the allocation's life go on."""
    other = hardware.neighbour
    kubelet = node.kubelet
    before = node.state()
    assert before[P0]["afu_id"] == point.afu
    node.set(simulated_pr_seconds="0.01")
    node.restarted()

    listed = kubelet.endpoints[REGIONS].lists[0]
    assert listed == {P0: HEALTHY if point.owned or point.clean else UNHEALTHY, other: HEALTHY}
    offered = {} if hardware.beside or point.owned else {CARD: listed[P0]}
    assert kubelet.endpoints[CARDS].lists[0] == offered
    kubelet.until(REGIONS, {P0: HEALTHY, other: HEALTHY})
    if point.clean or point.own:
        assert node.steps(P0) == []
        assert node.afu(P0) == point.afu
    if not point.owned:
        assert node.afu(P0) == BLANK
        kubelet.allocate(P0)

    kubelet.prestart(P0, env=request(AFU_2))
    assert node.afu(P0) == AFU_2
    programmed = [step for step in node.steps(P0) if step.startswith("program")]
    assert programmed == (["program"] if point.clean or point.own else ["program blank", "program"])

    assert node.steps(other) == []
    assert node.state()[other] == before[other]
    kubelet.deallocate(P0, other)
    kubelet.until(CARDS, dict.fromkeys({CARD, other.partition("-p")[0]}, HEALTHY))
    assert {node.afu(region) for region in (P0, other)} == {BLANK}


@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("name", POINTS)
def test_killed_between_two_steps(name: str, hardware: Hardware):
    point = POINTS[name]
    with with_neighbour(hardware) as node:
        point.reach(node)
        node.plugin.kill()
        check_after(node, point, hardware)


@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("name", INSIDE)
def test_killed_inside(name: str, hardware: Hardware):
    before, point = INSIDE[name]
    with with_neighbour(hardware) as node:
        before(node)
        node.set(simulated_pr_seconds="600")
        node.again()
        point.reach(node)
        node.plugin.kill()
        check_after(node, point, hardware)


@pytest.mark.parametrize(
    "event",
    [
        "directory made",
        "card found",
        "serving",
        "a new kubelet process was found",
        "registered with kubelet",
        "kubelet's records read",
        "region scrubbed",
    ],
)
def test_killed_while_it_starts(event: str):
    with Node() as node:
        node.kubelet.start()
        plugin = node.start(kill_at=event)
        assert plugin.exit_code() == -signal.SIGKILL
        node.start()
        node.settled()
        assert {node.afu(region) for region in (P0, P1)} == {BLANK}


def test_killed_inside_the_first_scrub():
    with Node("1x3", simulated_pr_seconds="600") as node:
        node.kubelet.start()
        node.start().until_logged("kubelet's records read")
        node.until_programming(P0, BLANK)
        node.plugin.kill()
        assert [node.afu(region) for region in (P0, P1, P2)] == [BLANK, FACTORY, FACTORY]
        node.set(simulated_pr_seconds="0.01")
        node.restarted()
        # It reads as blank, but nobody saw how that PR ended.
        assert node.kubelet.endpoints[REGIONS].lists[0][P0] == UNHEALTHY
        node.settled()
        assert [node.scrubs(region) for region in (P0, P1, P2)] == [1, 1, 1]


@pytest.mark.parametrize("end", ["killed", "terminated"])
def test_a_restart_with_idle_clean_cards_programs_nothing(end: str):
    with Node("2x2").up() as node:
        before = (node.simulated / "state.json").read_text()
        if end == "killed":
            node.plugin.kill()
        else:
            assert node.plugin.stop() == 0
        # A PR would use these up.
        faults = [node.arm(region, "pr-error") for region in node.state()]
        node.restarted()
        assert set(node.kubelet.endpoints[REGIONS].lists[0].values()) == {HEALTHY}
        assert set(node.kubelet.endpoints[CARDS].lists[0].values()) == {HEALTHY}
        assert [node.steps(region) for region in node.state()] == [[]] * 4
        assert all(fault.exists() for fault in faults)
        assert (node.simulated / "state.json").read_text() == before


def test_a_whole_card_stays_with_its_owner_over_a_kill():
    with Node().up() as node:
        node.kubelet.allocate(CARD, resource=CARDS)
        node.kubelet.prestart(CARD, env=request(), resource=CARDS)
        before = node.state()
        node.again()
        assert node.kubelet.endpoints[CARDS].lists[0] == {CARD: HEALTHY}
        assert node.kubelet.endpoints[REGIONS].lists[0] == {}
        with pytest.raises(Refused, match="FAILED_PRECONDITION"):
            node.kubelet.allocate(P0)
        node.caught_up()
        assert node.state() == before
        node.kubelet.deallocate(CARD, resource=CARDS)
        node.settled()
        assert {node.afu(region) for region in (P0, P1)} == {BLANK}


def lose_journal(node: Node) -> None:
    """While no plugin runs."""
    for file in node.state_dir.glob("journal.sqlite3*"):
        file.unlink()


def lose_journal_under_a_tenant(node: Node) -> None:
    """The plugin dies while a pod runs, and kubelet's records of the pod are all that is left."""
    answer = node.kubelet.allocate(P0)
    node.kubelet.prestart(P0, env=request())
    node.kubelet.checkpoint(("uid-1", "app", REGIONS, [P0], answer))
    node.plugin.kill()
    lose_journal(node)


def test_an_allocation_of_a_lost_journal_is_found_in_kubelets_checkpoint():
    with Node().up() as node:
        lose_journal_under_a_tenant(node)
        node.restarted()
        # The card's other region is nobody's, and not known to be clean.
        node.kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
        assert node.afu(P0) == AFU
        assert node.kubelet.listed(CARDS) == {}
        assert (node.scrubs(P0), node.scrubs(P1)) == (0, 1)
        # It may not be its own image: nothing reports it.
        node.kubelet.prestart(P0, env=request(AFU_2))
        assert (node.scrubs(P0), node.afu(P0)) == (1, AFU_2)
        node.kubelet.checkpoint()
        node.kubelet.deallocate(P0)
        node.kubelet.until(CARDS, {CARD: HEALTHY})


def test_without_journal_and_checkpoint_everything_is_scrubbed():
    with Node().up() as node:
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request())
        node.plugin.kill()
        lose_journal(node)
        node.restarted()
        assert node.kubelet.endpoints[REGIONS].lists[0] == {P0: UNHEALTHY, P1: UNHEALTHY}
        node.settled()
        assert {node.afu(region) for region in (P0, P1)} == {BLANK}
        with pytest.raises(Refused, match="delete the pod") as refused:
            node.kubelet.prestart(P0, env=request())
        assert refused.value.code == "FAILED_PRECONDITION"


def test_a_journal_of_another_version_is_set_aside_and_a_running_tenant_is_adopted():
    with Node().up() as node:
        lose_journal_under_a_tenant(node)
        with closing(sqlite3.connect(node.state_dir / "journal.sqlite3")) as db:
            db.executescript(SCHEMA_1.read_text())
        plugin = node.restarted()
        said = plugin.until_logged("the journal is in doubt")
        with closing(sqlite3.connect(said["copy"])) as db:
            assert db.execute("SELECT device FROM claims").fetchall() == [(P0,)]
        adopted = plugin.until_logged("allocation adopted")
        assert (adopted["device"], adopted["pod"]) == (P0, "uid-1")
        # The tenant keeps its image; the other region is nobody's, and not known to be clean.
        node.kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
        assert (node.scrubs(P0), node.scrubs(P1)) == (0, 1)
        assert node.afu(P0) == AFU
        node.kubelet.deallocate(P0)
        plugin.until_logged("region scrubbed", region=P0)
        node.kubelet.until(CARDS, {CARD: HEALTHY})


def test_an_unreadable_journal_is_set_aside_and_everything_scrubbed():
    with Node().up() as node:
        node.plugin.kill()
        for file in node.state_dir.glob("journal.sqlite3-*"):
            file.unlink()
        (node.state_dir / "journal.sqlite3").write_bytes(b"no database" * 500)
        plugin = node.restarted()
        said = plugin.until_logged("the journal is in doubt")
        assert said["copy"].endswith(".unreadable")
        node.settled()
        assert [node.scrubs(region) for region in (P0, P1)] == [1, 1]
