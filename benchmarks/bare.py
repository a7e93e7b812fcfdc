"""The bare hardware: a simulated region that is opened, programmed, read and closed.

Run by the same Python as the plugin, with a folder and a PR's seconds as its arguments. For each
line on its standard input, a size in MiB, it prints how many seconds that took.
"""

import os
import sys
import time

from fpga_plugin.hardware.simulated.factory import simulated_backend
from fpga_plugin.settings.values import parse_simulated_cards


def main(folder: str, pr_seconds: float) -> None:
    """Until the end of standard input."""
    groups = parse_simulated_cards("1x4")
    backend = simulated_backend(folder, groups, pr_seconds=pr_seconds, owner=True).backend
    (card,) = backend.scan().cards.values()
    images = {size: os.urandom(size * 2**20) for size in (1, 8, 32)}
    for line in sys.stdin:
        image = images[int(line)]
        began = time.perf_counter()
        with backend.open_port(card, card.regions[0]) as port:
            port.program(image)
            port.afu_id()
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
