"""`make bench-kernel`: PreStart beside the bare ioctl, on the real DFL drivers.

Runs in the machine of the kernel tests (tests/kernel). The daemon serves one card; the bare ioctl
programs another of the same kind, in turn with the PreStarts, so that whatever slows the machine
down slows both. The machine has no KVM: its processor is emulated, and what Python does takes tens
of times as long in it. So a call that waits for nothing is measured, too: what PreStart adds is to
be held against that, and what grows with the image's size against the ioctl. All figures are the
fastest of their rounds, since other work on the host only ever adds, and to each its own.
"""

import argparse
import ctypes
import fcntl
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# The harness of the kernel tier; tests/kernel has it on the path in its machine.
import daemon_support
import on_real_cards  # noqa: F401  # makes the harness as patient as the machine is slow
import rack
from daemon_support import Node
from doubles.bitstreams import gbs
from figures import Figure, Goal, table
from machine import machine

from fpga_plugin.hardware.dfl import defs

SIZES = (1, 8, 32)
"""MiB; 32 is about the largest image of the cards that are supported."""

SERVED, BARE = daemon_support.CARD, daemon_support.CARD_2
REGION = f"{SERVED}-p0"

SHARE = 5.0
"""Per cent of the bare ioctl that may be added to it for the sake of a large image."""


@dataclass(frozen=True, slots=True)
class Round:
    """One PreStart and the ioctl beside it, in seconds.

    Attributes:
        bare: the ioctl alone.
        prestart: the call, as kubelet sees it.
        program: of that, the plugin's own PR, opening and closing the FME included.
    """

    bare: float
    prestart: float
    program: float


def main() -> int:
    """Run all, print, return the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks/kernel.py", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="of each size")
    arguments = parser.parse_args()
    if not rack.DEBUGFS.exists():
        sys.stderr.write("the cards of tests/kernel are not here: make bench-kernel\n")
        return 1
    with rack.RealNode("2x1") as node:
        # The card asks for no pause during a PR: it would only be the same for both.
        node.set(cards=rack.address(SERVED), simulated_pr_seconds="0", health_interval="30")
        store = node.own_store()
        images = [_add(store, number, size) for number, size in enumerate(SIZES, start=2)]
        here = machine(node.folder)
        node.up()
        for afu, _ in images:
            node.plugin.until_logged("bitstream verified", file=f"{daemon_support.ID}/{afu}.gbs")
        floor = _calls(node, 2 * arguments.rounds)
        rounds = [_prestarts(node, afu, image, arguments.rounds) for afu, image in images]
    figures = [
        Figure("any size", "a call that waits for nothing", floor, "ms", samples=arguments.rounds)
    ]
    least = _beyond(rounds[0])
    for size, each in zip(SIZES, rounds, strict=True):
        figures += _figures(size, each, floor, least)
    if arguments.json:
        rows = [figure.as_json() for figure in figures]
        print(json.dumps({"machine": here, "figures": rows}, indent=2))
    else:
        print("\n".join(f"{key:<11} {value}" for key, value in here.items()))
        print(table(figures))
    return 0


def _add(store: Path, number: int, mebibytes: int) -> tuple[str, bytes]:
    """Put a bitstream into the store; its AFU id and its raw image."""
    afu = f"{number:032x}"
    image = bytes.fromhex(afu) + os.urandom(mebibytes * 2**20 - 16)
    path = store / daemon_support.ID / f"{afu}.gbs"
    new = path.with_suffix(".new")
    new.write_bytes(gbs(image, afu, interface=daemon_support.ID))
    new.rename(path)
    return afu, image


def _bare(image: bytes) -> float:
    """Seconds of the ioctl alone, on the other card."""
    keep = ctypes.c_char_p(image)
    address = ctypes.cast(keep, ctypes.c_void_p).value
    assert address is not None, "c_char_p of bytes is never null"
    argument = defs.PORT_PR.pack(defs.PORT_PR.size, 0, 0, len(image), address)
    (fme,) = (rack.PCI / rack.address(BARE)).glob("fpga_region/region*/dfl-fme.*")
    descriptor = os.open(f"/dev/{fme.name}", os.O_RDWR | os.O_CLOEXEC)
    try:
        began = time.perf_counter()
        fcntl.ioctl(descriptor, defs.FME_PORT_PR, argument)
        return time.perf_counter() - began
    finally:
        os.close(descriptor)


def _calls(node: Node, rounds: int) -> float:
    """Milliseconds of GetPreferredAllocation, kubelet's side included; the first half warms up."""
    took: list[float] = []
    for _ in range(rounds):
        began = time.perf_counter()
        node.kubelet.preferred([REGION], 1)
        took.append(time.perf_counter() - began)
    return _ms(took[rounds // 2 :])


def _prestarts(node: Node, afu: str, image: bytes, rounds: int) -> list[Round]:
    """PreStarts of fresh claims on a clean region, each with the bare ioctl before it."""
    found: list[Round] = []
    for number in range(rounds + 1):
        node.kubelet.allocate(REGION)
        bare = _bare(image)
        mark = node.plugin.mark
        began = time.perf_counter()
        node.kubelet.prestart(REGION, env=daemon_support.request(afu), timeout=None)
        took = time.perf_counter() - began
        report = node.plugin.until_logged("region prepared", mark, region=REGION)
        if number:  # the first one finds nothing warm
            found.append(Round(bare, took, report["steps"]["program"]))
        node.give_back(REGION)
    return found


def _beyond(rounds: Sequence[Round]) -> float:
    """Milliseconds that PreStart takes longer than the bare ioctl."""
    return _ms([each.prestart for each in rounds]) - _ms([each.bare for each in rounds])


def _figures(size: int, rounds: Sequence[Round], floor: float, least: float) -> list[Figure]:
    bare = _ms([each.bare for each in rounds])
    beyond = _beyond(rounds)
    found = [
        Figure(f"{size} MiB", name, value, unit, samples=len(rounds), note=note)
        for name, value, unit, note in (
            ("bare ioctl", bare, "ms", ""),
            ("PreStart", _ms([each.prestart for each in rounds]), "ms", ""),
            ("of that its own PR", _ms([each.program for each in rounds]), "ms", "with the FME"),
            ("beyond the bare ioctl", beyond, "ms", ""),
            ("the same, in such calls", beyond / floor, "", "1 is what any answer costs here"),
        )
    ]
    if size != SIZES[0]:
        grown = 100 * (beyond - least) / bare
        goal = Goal(SHARE if size == SIZES[-1] else None)
        note = f"beyond what {SIZES[0]} MiB takes; of the bare ioctl"
        found.append(
            Figure(f"{size} MiB", "for its size", grown, "%", goal, None, len(rounds), note)
        )
    return found


def _ms(seconds: Sequence[float]) -> float:
    return min(seconds) * 1000


if __name__ == "__main__":
    sys.exit(main())
