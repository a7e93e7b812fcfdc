"""`demo --serve --trouble`: cards fail and recover, so that people can rehearse it.

One fault after the other is armed in the simulated cards' own directory, as any user may arm one
there (docs/runbook.md, "Rehearse trouble"), and taken away again.
"""

import asyncio
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

from fpga_plugin.demo.node import DemoNode
from fpga_plugin.host.atomic_file import replace_file

FIRST: Final = 3.0
"""Seconds until the first trouble: the page is to be seen without any before."""

LASTS: Final = 20.0
"""Seconds of each: several looks of the plugin, and time to read what the page says."""

BETWEEN: Final = 8.0

FAULTS: Final = ("thermal", "afu-hung", "port-open", "fatal", "pr-error")
"""Words of simulated cards' faults. What the last one breaks stays until its card is pulled."""

Tell = Callable[[str], bool]
"""Writes a line for people; returns whether the output still has a reader."""


async def trouble(node: DemoNode, tell: Tell) -> None:
    """One fault at a time, then a card is pulled; until cancelled, or the output has no reader.

    Args:
        node: of simulated cards.
        tell: what fails, and what is well again.
    """
    await asyncio.sleep(FIRST)
    for what, path, begin, end in _plays(node):
        begin()
        if not tell(f"trouble: {what} ({path})"):
            return
        try:
            await asyncio.sleep(LASTS)
        finally:
            end()
        if not tell(f"over: {what}"):
            return
        await asyncio.sleep(BETWEEN)


Play = tuple[str, str, Callable[[], None], Callable[[], None]]


def _plays(node: DemoNode) -> Iterator[Play]:
    """What happens, the file that makes it happen, and how it begins and ends."""
    regions = sorted(r.id for card in node.plugin.ledger.cards.values() for r in card.regions)
    cards = sorted(node.plugin.ledger.cards)
    for turn in itertools.count():
        for number, word in enumerate(FAULTS, turn):
            region = regions[number % len(regions)]
            path = os.path.join(node.simulated, "faults", region)

            def arm(path: str = path, word: str = word) -> None:
                replace_file(path, [word.encode()], mode=0o644)

            yield f"region {region}: {word}", path, arm, _Removed(path)
        card = cards[turn % len(cards)]
        path = os.path.join(node.simulated, "cards", card)

        def plug(path: str = path) -> None:
            replace_file(path, [], mode=0o644)

        yield f"card {card} is pulled", path, _Removed(path), plug


class _Removed:
    """Takes a file away; it may have had its effect, and be gone."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path)
