"""What stands in the way: what Allocate and a start are made of, beside what is inevitable."""

import re
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from heapq import nlargest
from operator import itemgetter
from pathlib import Path

from figures import Figure, Goal, median, percentile
from measure import BARE_STACK, BLOCK, RESOURCES, Effort
from node import PORTS, Node
from reference import Echo

PACKAGES = 10
"""Rows of the longest imports."""

_IMPORTED = re.compile(r"^import time: +([0-9]+) \| +[0-9]+ \| +(\S+)$", re.MULTILINE)
"""A line of `-X importtime`: microseconds of the module itself, with all below it, its name."""


def allocate(python: Path, folder: Path, effort: Effort) -> list[Figure]:
    """The bare stack with what the plugin cannot do without, one thing after the other.

    In turn with each other. What the plugin's own Allocate takes beyond the last of them is what
    could still be gained.
    """
    folder.mkdir()
    kinds: Mapping[str, tuple[str | Path, ...]] = {
        "bare": (),
        "with one SQLite transaction": (folder / "one",),
        "and with the plugin's server": (folder / "both", "limits"),
    }
    took: dict[str, list[float]] = {kind: [] for kind in kinds}
    with ExitStack() as stack:
        echoes = {
            kind: stack.enter_context(Echo(python, folder / f"{number}.sock", *arguments))
            for number, (kind, arguments) in enumerate(kinds.items())
        }
        for round_ in range(effort.calls // BLOCK + 1):
            for kind, echo in echoes.items():
                block = [echo.allocate() for _ in range(BLOCK)]
                if round_:  # the first one finds nothing warm
                    took[kind] += block
    p50 = {kind: percentile(seconds, 50) * 1000 for kind, seconds in took.items()}
    bare = p50.pop("bare")
    count = len(took["bare"])
    return [
        Figure(
            f"1x{PORTS}",
            f"the bare stack {kind}, p50",
            value,
            "ms",
            Goal(),
            bare,
            count,
            f"{BARE_STACK}; no feature",
        )
        for kind, value in p50.items()
    ]


def start(node: Node, effort: Effort) -> list[Figure]:
    """The interpreter by itself, and which packages' imports take longest.

    The interpreter's own measuring is in the imports: what says something is which they are.
    """
    cards = f"{len(node.cards)}x{PORTS}"
    alone: list[float] = []
    for _ in range(effort.rounds):
        began = time.monotonic()
        subprocess.run([node.python, "-I", "-c", "pass"], check=True)
        alone.append(time.monotonic() - began)
    log = node.folder / "plugin.log"
    before = log.stat().st_size
    node.extra["PYTHONPROFILEIMPORTTIME"] = "1"
    try:
        with node.start():
            node.kubelet.wait_registered(RESOURCES)
            node.wait_clean()
    finally:
        del node.extra["PYTHONPROFILEIMPORTTIME"]
    packages, modules = imports(log.read_bytes()[before:].decode())
    note = "of the imports alone, by `-X importtime`"
    return [
        Figure(cards, "the interpreter alone", median(alone) * 1000, "ms", samples=effort.rounds),
        Figure(
            cards, "all imports", sum(packages.values()), "ms", note=f"{modules.total()} modules"
        ),
        *(
            Figure(cards, f"  {name}", took, "ms", note=f"{modules[name]} modules, {note}")
            for name, took in nlargest(PACKAGES, packages.items(), key=itemgetter(1))
        ),
    ]


def imports(text: str) -> tuple[dict[str, float], Counter[str]]:
    """Milliseconds of each package's modules, and how many those are.

    Of the plugin's own code each package below the first is one.
    """
    took: defaultdict[str, float] = defaultdict(float)
    modules: Counter[str] = Counter()
    for micros, module in _IMPORTED.findall(text):
        parts = module.split(".")
        name = ".".join(parts[:2] if parts[0] == "fpga_plugin" else parts[:1])
        took[name] += int(micros) / 1000
        modules[name] += 1
    return took, modules
