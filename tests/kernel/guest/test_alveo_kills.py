"""SIGKILL at each step that the plugin takes on AMD's drivers, then a restart."""

import signal
from collections.abc import Iterator
from pathlib import Path

import alveo
import mortal
import pytest
from alveo import ALL, A, Alveo, B
from alveo_node import BLANK, CARDS, REGIONS, AlveoNode, dirt, dirty, request
from daemon_support import HEALTHY

pytestmark = pytest.mark.skipif(not alveo.MODULES, reason="the guest's: make test-alveo")

IN_PRESTART = ("before mask", "after mask", "before load", "after load")
IN_RELEASE = (
    "before shutdown",
    "after shutdown",
    "before online",
    "after online",
    "before load",
    "after load",
    "before zero",
    "after zero",
)
"""Of the first call of that kind."""


@pytest.fixture(scope="module")
def plugged() -> Iterator[Alveo]:
    (card,) = alveo.install()
    yield card
    alveo.remove()


@pytest.fixture
def card(plugged: Alveo) -> Alveo:
    plugged.fresh()
    return plugged


@pytest.fixture
def node(card: Alveo) -> Iterator[AlveoNode]:
    with AlveoNode(card) as it:
        it.settings |= {mortal.DEATH: str(death(it)), mortal.LOG: str(it.folder / "log")}
        yield it.up()


def death(node: AlveoNode) -> Path:
    """Where the plugin may read it: it is confined."""
    return node.state_dir / "die"


def die(node: AlveoNode, where: str) -> None:
    death(node).with_suffix(".new").write_text(where)
    death(node).with_suffix(".new").replace(death(node))


def dead(node: AlveoNode, where: str) -> None:
    """It died there and nowhere else."""
    assert node.plugin.exit_code() == -signal.SIGKILL
    death(node).unlink()
    last = (node.folder / "log").read_text().splitlines()[-1]
    assert last.endswith(f"KILL hardware {where.replace(' ', '-')}")


def ends_well(node: AlveoNode, card: Alveo) -> None:
    """Nobody has the card any more: it becomes clean."""
    node.kubelet.until_health(card.id, HEALTHY, CARDS)
    node.kubelet.until_health(f"{card.id}-p0", HEALTHY, REGIONS)
    assert (card.uuid, card.image, card.mask) == (BLANK, BLANK, ALL)
    assert dirt(card) == 0


def test_killed_at_each_step_of_a_prestart_the_card_stays_its_owners(node: AlveoNode, card: Alveo):
    kubelet, region = node.kubelet, f"{card.id}-p0"
    for where in IN_PRESTART:
        print(f"--- {where} ---")  # noqa: T201  # pytest shows it with a failure
        kubelet.allocate(region, resource=REGIONS)
        die(node, where)
        call = kubelet.begin_prestart(region, env=request(A), resource=REGIONS)
        dead(node, where)
        call.cancel()
        node.restarted()
        assert kubelet.listed(REGIONS) == {region: HEALTHY}
        node.prestart(region, request(B))
        assert (card.uuid, card.image, card.mask) == (B, B, ALL)
        dirty(card)
        kubelet.deallocate(region, resource=REGIONS)
        ends_well(node, card)


def test_killed_at_each_step_of_a_release_the_card_is_clean_before_it_is_offered(
    node: AlveoNode, card: Alveo
):
    kubelet, region = node.kubelet, f"{card.id}-p0"
    for where in IN_RELEASE:
        print(f"--- {where} ---")  # noqa: T201  # the same
        kubelet.allocate(region, resource=REGIONS)
        node.prestart(region, request(A))
        dirty(card)
        die(node, where)
        kubelet.deallocate(region, resource=REGIONS)
        dead(node, where)
        node.restarted()
        ends_well(node, card)
