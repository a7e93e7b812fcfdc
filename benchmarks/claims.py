"""What one claim costs while many others are prepared (DRA): the work should follow what changed.

Kubelet and the API server are the doubles of the integration tests.
"""

import contextlib
import io
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from figures import Figure
from measure import Effort
from plugin import cpu_of, switches_of
from runtime import ROOT

from fpga_plugin.hardware.simulated.slots import card_at

if TYPE_CHECKING:
    from dra_support import DraNode

REGIONS = 8
"""Of a card."""

_SETTLED = 1.0
"""Seconds until what follows a claim's end, its scrub above all, is over."""


def claims(effort: Effort) -> list[Figure]:
    """CPU of the plugin for one claim beside few and beside many, and what many keep awake."""
    beside, wakes = {}, {}
    for count in (REGIONS, effort.claims):
        with _node(count) as node:
            beside[count] = _cost(node, count, effort.rounds)
            pid = node.plugin.process.pid
            before = switches_of(pid)
            time.sleep(effort.idle)
            wakes[count] = (switches_of(pid) - before) * 60 / effort.idle
    where = f"{effort.claims // REGIONS}x{REGIONS}"
    name = f"of {effort.claims}"
    reference = f"reference: the same beside {REGIONS - 1} claims"
    return [
        Figure(
            where,
            f"CPU of a claim's life, the last {name}",
            beside[effort.claims] * 1000,
            "ms",
            reference=beside[REGIONS] * 1000,
            samples=effort.rounds,
            note=f"Prepare, Unprepare, scrub; {reference}",
        ),
        Figure(
            where,
            f"wake-ups with {effort.claims - 1} prepared claims",
            wakes[effort.claims],
            "/min",
            reference=wakes[REGIONS],
            note=reference,
        ),
    ]


@contextmanager
def _node(count: int) -> "Iterator[DraNode]":
    """A plugin with so many regions, all of them but the last prepared for a claim."""
    sys.path[:0] = [str(ROOT / "tests" / "integration"), str(ROOT / "tests")]
    from dra_support import DraNode

    with (
        contextlib.redirect_stdout(io.StringIO()),  # the harness shows the log at the end
        DraNode(
            f"{count // REGIONS}x{REGIONS}",
            log_level="info",
            simulated_pr_seconds="0",
            health_interval="30",
            reconcile_interval="2",
        ) as node,
    ):
        node.up()
        for number in range(count - 1):
            node.dra.prepare(node.claim(f"claim-{number}", _region(number)))
        yield node


def _region(number: int) -> str:
    return f"{card_at(number // REGIONS)}-p{number % REGIONS}"


def _cost(node: "DraNode", count: int, rounds: int) -> float:
    """Seconds of CPU of a claim's life, less what the plugin takes in as much time without one."""
    pid = node.plugin.process.pid
    time.sleep(_SETTLED)
    began, before = time.monotonic(), cpu_of(pid)
    for number in range(rounds):
        claim = node.claim(f"again-{number}", _region(count - 1))
        node.dra.prepare(claim)
        assert not node.dra.unprepare(claim)
    time.sleep(_SETTLED)
    took, busy = time.monotonic() - began, cpu_of(pid) - before
    before = cpu_of(pid)
    time.sleep(took)
    return max(busy - (cpu_of(pid) - before), 0.0) / rounds
