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

Tell = Callable[[str], None]
"""Writes a line for people."""


async def trouble(node: DemoNode, tell: Tell) -> None:
    """One fault at a time, then a card is pulled; until cancelled.

    Args:
        node: of simulated cards.
        tell: what fails, and what is well again.
    """
    await asyncio.sleep(FIRST)
    for what, path, begin, end in _plays(node):
        _put(path, begin)
        tell(f"trouble: {what} ({path})")
        try:
            await asyncio.sleep(LASTS)
        finally:
            _put(path, end)
        tell(f"over: {what}")
        await asyncio.sleep(BETWEEN)


def _plays(node: DemoNode) -> Iterator[tuple[str, str, str | None, str | None]]:
    """What happens, the file that makes it happen, and what is in that during and afterwards."""
    folder = node.settings.simulated_dir
    regions = sorted(r.id for card in node.plugin.ledger.cards.values() for r in card.regions)
    cards = sorted(node.plugin.ledger.cards)
    for turn in itertools.count():
        for number, word in enumerate(FAULTS, turn):
            region = regions[number % len(regions)]
            yield f"region {region}: {word}", os.path.join(folder, "faults", region), word, None
        card = cards[turn % len(cards)]
        yield f"card {card} is pulled", os.path.join(folder, "cards", card), None, ""


def _put(path: str, text: str | None) -> None:
    """Write a file; None: take it away, if it did not have its effect and is gone."""
    if text is None:
        with suppress(FileNotFoundError):
            os.unlink(path)
    else:
        replace_file(path, [text.encode()], mode=0o644)
