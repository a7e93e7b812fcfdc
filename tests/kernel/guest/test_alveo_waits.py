"""Loads that PF0 drops without an answer: the caller waits almost a minute for it.

Both wait at the same time, on a card each.
"""

import errno
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import alveo
import alveo_mailbox
import pytest
from alveo import ALL, TENANT_LOADS, A, Alveo, B, fails

pytestmark = pytest.mark.skipif(not alveo.MODULES, reason="the guest's: make test-kernel")

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
def waiting() -> Iterator[tuple[Waiting, Waiting]]:
    unheard, fooled = alveo.install(cards=2)
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
    alveo.remove()


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
