"""What a process holds of the machine, minute by minute, and whether that grows."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SETTLED = 0.35
"""The part of a run after which nothing may grow: by then each list, cache and history is full that
has a bound which so many pods can reach."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One look.

    Attributes:
        minute: since the start.
        rss, anonymous: MiB resident, and those of them that no file backs: what a leak is made of.
        descriptors, threads: how many.
        journal: KiB of the journal and of its write-ahead log.
        cpu: seconds so far.
        pods: that ended so far.
        attacks: of hostile clients so far.
    """

    minute: float
    rss: float
    anonymous: float
    descriptors: int
    threads: int
    journal: float
    cpu: float
    pods: int
    attacks: int


def look(pid: int, state_dir: Path, *, minute: float, pods: int, attacks: int) -> Sample:
    """Read them."""
    process = Path(f"/proc/{pid}")
    sizes = dict(
        re.findall(
            r"^(VmRSS|RssAnon):\s+([0-9]+) kB$", (process / "status").read_text(), re.MULTILINE
        )
    )
    ticks = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
    return Sample(
        minute=round(minute, 1),
        rss=int(sizes["VmRSS"]) / 1024,
        anonymous=int(sizes["RssAnon"]) / 1024,
        descriptors=len(list((process / "fd").iterdir())),
        threads=len(list((process / "task").iterdir())),
        journal=sum(file.stat().st_size for file in state_dir.glob("journal.sqlite3*")) / 1024,
        cpu=sum(map(int, ticks)) / 100,
        pods=pods,
        attacks=attacks,
    )


LIMITS = {
    # What the name of a gauge may end above what it had reached when the run had settled.
    "anonymous": lambda reached: 1.0 + 0.01 * reached,
    "descriptors": lambda _: 12,  # connections that come and go
    "threads": lambda _: 2,
    "journal": lambda _: 16 * 1024,  # FOLD_BYTES of the daemon: the log's length is a saw
}


def growth(samples: Sequence[Sample]) -> list[str]:
    """What grew, in words; empty where nothing did.

    The highest of the last third is compared with the highest between the settling and that third.
    """
    begin, last = int(len(samples) * SETTLED), len(samples) - len(samples) // 3
    early, late = samples[begin:last], samples[last:]
    if not early or not late:
        return ["the run was too short to tell: it takes a sample before its last third"]
    found = []
    for name, limit in LIMITS.items():
        reached = max(getattr(each, name) for each in early)
        ended = max(getattr(each, name) for each in late)
        if ended > reached + limit(reached):
            found.append(f"{name} grew from {reached:.1f} to {ended:.1f}")
    return found


def table(samples: Sequence[Sample]) -> str:
    """For docs/load.md."""
    gauges = ["RSS, MiB", "anonymous", "descriptors", "threads", "journal, KiB", "CPU, s"]
    names = ["minute", "pods", "attacks", *gauges]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    lines += [
        f"| {one.minute:g} | {one.pods:,} | {one.attacks:,} | {one.rss:.1f} | {one.anonymous:.1f} "
        f"| {one.descriptors} | {one.threads} | {one.journal:.0f} | {one.cpu:.0f} |"
        for one in samples
    ]
    return "\n".join(lines)
