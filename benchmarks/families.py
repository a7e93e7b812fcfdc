"""What a second family costs a node: four Alveo cards beside four DFL ones, and the same without.

The two nodes are measured in turn, and watched side by side. Alveo cards' first start, with their
resets and the clearing of their memory, comes before: what is measured are starts on clean cards.
"""

import shutil
import time
from contextlib import ExitStack
from pathlib import Path

from figures import Figure, median
from kubelet import healthy
from measure import RESOURCES, Effort
from node import PORTS, Node
from plugin import switches_of
from runtime import ROOT

ALVEO = "5b1a0d1e0c2f4a6e9d3b7c8f2e4a6b10"
COUNT = 4
"""Cards of each family."""

_ROWS = "two families"
_OURS = tuple(f"fpga.amd.com/{kind}-{ALVEO}" for kind in ("region", "fpga"))


class Mixed(Node):
    """A node with as many Alveo cards as it has others."""

    def __init__(self, folder: Path, store: Path, python: Path) -> None:
        super().__init__(folder, store, python, count=COUNT, pr_seconds=0.01)
        (store / ALVEO).mkdir()
        name = f"{ALVEO}/blank.xclbin"
        shutil.copy(ROOT / "bitstreams" / name, store / name)
        cards = f"{COUNT}x{PORTS},{COUNT}x1+alveo@{ALVEO}"
        self.extra = {"FPGA_PLUGIN_SIMULATED_CARDS": cards}

    def wait_clean(self) -> float:
        """When every region and card of both families was Healthy in kubelet's lists."""
        last = super().wait_clean()
        lists = (self.kubelet.wait_list(one, lambda data: healthy(data) == COUNT) for one in _OURS)
        return max(last, *lists)


def families(python: Path, folder: Path, store: Path, effort: Effort) -> list[Figure]:
    """Start, memory and wake-ups of a node of two families; the reference is one of DFL alone."""
    for name in ("dfl", "both"):
        (folder / f"families-{name}").mkdir()
    places = {
        name: (folder / f"families-{name}", store / f"families-{name}") for name in ("dfl", "both")
    }
    with ExitStack() as stack:
        alone = Node(*places["dfl"], python, count=COUNT, pr_seconds=0.01)
        both = Mixed(*places["both"], python)
        nodes = ((alone, RESOURCES), (both, 2 * RESOURCES))
        first: list[float] = []
        started: tuple[list[float], list[float]] = [], []
        cpu: tuple[list[float], list[float]] = [], []
        for node, _ in nodes:
            stack.callback(node.kubelet.close)
            with node.start() as plugin:
                first.append(node.wait_clean() - plugin.began)
        for _ in range(effort.starts):
            for number, (node, resources) in enumerate(nodes):
                with node.start() as plugin:
                    registered = node.kubelet.wait_registered(resources)[-1]
                    started[number].append((registered - plugin.began) * 1000)
                    cpu[number].append(plugin.cpu() * 1000)
                    node.wait_clean()
        plugins = [stack.enter_context(node.start()) for node, _ in nodes]
        for node, _ in nodes:
            node.wait_clean()
        time.sleep(1)
        begun = [plugin.memory()[0] for plugin in plugins]
        past = [switches_of(plugin.pid) for plugin in plugins]
        time.sleep(effort.idle)
        wakes = [
            (switches_of(plugin.pid) - before) * 60 / effort.idle
            for plugin, before in zip(plugins, past, strict=True)
        ]
        later = [plugin.memory()[0] for plugin in plugins]
    beside = f"{COUNT} Alveo cards beside {COUNT} of {PORTS} regions"
    note = f"{beside}; reference: these alone"
    rows = (
        ("first start ever until all is scrubbed", "ms", [one * 1000 for one in first]),
        ("start to registered, all resources", "ms", [median(one) for one in started]),
        ("CPU of the plugin until then", "ms", [median(one) for one in cpu]),
        ("RSS at once", "MiB", begun),
        (f"RSS after {effort.idle:g} s", "MiB", later),
        ("idle wake-ups", "/min", wakes),
    )
    return [
        Figure(_ROWS, name, value, unit, reference=reference, samples=effort.starts, note=note)
        for name, unit, (reference, value) in rows
    ]
