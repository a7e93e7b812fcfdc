"""Requests that PF0 drops without an answer: PF1 waits for it, up to almost a minute.

All wait at the same time, on a card each.
"""

import errno
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import alveo
import alveo_mailbox
import pytest
from alveo import ALL, TENANT_LOADS, A, Alveo, B, fails, until

pytestmark = pytest.mark.skipif(not alveo.MODULES, reason="the guest's: make test-alveo")

LONG = 20.0
"""Seconds; on a machine that is not emulated it is 52."""


@dataclass(frozen=True)
class Waiting:
    """A load that was begun.

    Attributes:
        took: its seconds.
    """

    card: Alveo
    took: "Future[float]"


def load(card: Alveo) -> float:
    begin = time.monotonic()
    with fails(errno.ETIMEDOUT):
        card.load(B)
    return time.monotonic() - begin


@pytest.fixture(scope="module")
def cards() -> Iterator[list[Alveo]]:
    yield alveo.install(cards=3)
    alveo.remove()


@pytest.fixture(scope="module", autouse=True)
def shut(cards: list[Alveo]) -> Alveo:
    """One whose mask has the bit of USER_PROBE, too, once PF1 has heard of the others."""
    card = cards[2]
    card.fresh()
    card.set_mask(ALL)
    (card.pf0 / alveo.DISABLE).write_text(hex(ALL | 1 << alveo_mailbox.USER_PROBE))
    return card


@pytest.fixture(scope="module")
def waiting(cards: list[Alveo]) -> Iterator[tuple[Waiting, Waiting]]:
    unheard, fooled, _ = cards
    unheard.fresh()
    unheard.set("mute", 1)
    (unheard.pf0 / alveo.DISABLE).write_text(hex(ALL))
    fooled.fresh()
    fooled.set_mask(TENANT_LOADS)
    alveo_mailbox.probe(fooled)
    time.sleep(1)
    unheard.set("mute", 0)
    with ThreadPoolExecutor() as pool:
        yield (
            Waiting(unheard, pool.submit(load, unheard)),
            Waiting(fooled, pool.submit(load, fooled)),
        )


def test_until_pf1_has_heard_of_the_mask_its_loads_are_dropped(waiting: tuple[Waiting, Waiting]):
    """PF1 looks at its own copy, which a lost message leaves as it was."""
    card = waiting[0].card
    assert card.of_pf1(alveo.DISABLE) == "0x0"
    assert waiting[0].took.result() > LONG
    assert card.image == A


def test_a_tenants_probe_is_in_no_mask_and_makes_pf0_drop_loads_until_the_mask_is_written(
    waiting: tuple[Waiting, Waiting],
):
    """PF0 takes PF1 for a driver on another machine, whose addresses are not its own."""
    card = waiting[1].card
    assert waiting[1].took.result() > LONG
    assert card.image == A
    card.set_mask(0)  # PF1 introduces itself again
    card.load(B)
    assert (card.uuid, card.image) == (B, B)


def test_a_mask_with_the_probe_too_stops_it_and_pf1_gives_its_peer_up(shut: Alveo):
    """So nobody can have that bit set: programs find no device that is ready."""
    until(lambda: shut.tells("ready", "0x0"), "PF1 gives PF0 up")
    assert shut.of_pf1(alveo.DISABLE) == "0x0"
    assert (shut.uuid, shut.image) == (A, A)
    shut.set_mask(0)
    shut.load(B)
    assert (shut.uuid, shut.image) == (B, B)
