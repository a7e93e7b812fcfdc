"""Deliberate bugs, each in a copy of the package: what the checker must find.

A bug is a replacement of text, which has to be there exactly once, so that a bug that no longer
fits the code is noticed.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Bug:
    """One bug.

    Attributes:
        file: in the package.
        old, new: what stands there, and what then does.
        breaks: numbers of invariants, as the checker's words begin with them.
        weather: in which it shows; empty: in any.
        door: at which it shows.
        also: a second replacement in the file.
    """

    file: str
    old: str
    new: str
    breaks: str
    weather: str = ""
    door: str = "extended"
    also: tuple[str, str] = ("", "")


BUGS = {
    "no-scrub": Bug(
        "regions/steps.py",
        '        program(port, blank, report, name="program blank")\n',
        "        report.afu_id = blank.afu_id\n",
        "249",
    ),
    "no-reset": Bug(
        "regions/steps.py",
        "    report.scrubbed = True\n    quiesce(backend, card, region, port, report)\n",
        "    report.scrubbed = True\n",
        "24",
    ),
    "no-program": Bug(
        "regions/prepare.py",
        '                steps.program(port, want.bitstream, report, name="program")\n',
        "                report.afu_id = want.afu_id\n",
        "29",
    ),
    "journal-after-the-answer": Bug(
        "ledger/state.py",
        "                self._journal.write(told)\n",
        "                import asyncio\n"
        "                try:\n"
        "                    loop = asyncio.get_running_loop()\n"
        "                except RuntimeError:\n"
        "                    self._journal.write(told)\n"
        "                else:\n"
        "                    loop.call_later(0.05, self._journal.write, told)\n",
        "1349",
    ),
    "step-before-the-journal": Bug(
        "ledger/conditions.py",
        "        self._commit(change)\n        self._begun.update(begun)\n",
        "        self._apply(change)\n        self._begun.update(begun)\n",
        "249",
    ),
    "memory-cleared-under-a-neighbour": Bug(
        "regions/operations.py",
        "        if self.ledger.others_owned(card.id, reports):\n            return\n",
        "",
        "7",
    ),
    "memory-not-cleared": Bug(
        "regions/steps.py",
        "        backend.clear_memory(card)\n",
        "        pass\n",
        "2",
    ),
    "scrub-under-a-living-pod": Bug(
        "regions/scrub.py",
        "            if (one := await operations.living(operations.ledger.left(region.id)))"
        " is not None:\n",
        "            if (one := None) is not None:\n",
        "17",
    ),
    "half-a-scrub-is-believed": Bug(
        "ledger/state.py",
        '        reason = "the plugin ended while it worked on the region"\n',
        "        return replace(record, condition=Condition.BLANK)\n",
        "2349",
    ),
    "restart-scrubs-everything": Bug(
        "ledger/state.py",
        '    if not same_boot:\n        reason = "the node booted"\n',
        '    if same_boot:\n        reason = "the node booted"\n',
        "9",
    ),
    "claims-forgotten-at-the-start": Bug(
        "ledger/state.py",
        "        self._apply(snapshot)\n",
        "        self._apply(replace(snapshot, claims={}, tenancies={}))\n",
        "1379",
    ),
    "owners-leave-the-list": Bug(
        "ledger/lists.py",
        "                and not any(ledger.trouble(region) for region in claim.grants)\n",
        "                and all(\n"
        "                    ledger.record(region).condition in self._healthy_conditions\n"
        "                    for region in claim.grants\n"
        "                )\n",
        "3",
    ),
    "lost-log-believed": Bug(
        "ledger/journal.py",
        "        if missing > 0:\n",
        "        if missing < -9:\n",
        "12349",
        weather="write-ahead log cut",
    ),
    "claims-end-while-kubelet-knows-them": Bug(
        "stock/reconcile.py",
        "        held = {device for pod in listed.devices for device in pod.devices}\n",
        "        held = set[DeviceId]()\n",
        "1379",
        door="stock",
        also=("[d for d in ended if not checkpoint.holders(d)]", "ended"),
    ),
    "unprepare-answered-before-it-is-clean": Bug(
        "dra/life.py",
        "        regions = ends.regions(ref.uid)\n",
        "        regions = []\n",
        "4",
        door="dra",
    ),
    "pods-of-a-claim-not-asked": Bug(
        "ledger/holders.py",
        "        self._begin(change, claim, pods, used=exposed)\n",
        "        self._begin(change, claim, (), used=exposed)\n",
        "47",
        door="dra",
        also=("[pod for pod in pods if pod not in there]", "()"),
    ),
    "claim-prepared-before-it-is-done": Bug(
        "dra/life.py",
        "        ledger.take(holder, claim.users)\n",
        "        ledger.take(holder, claim.users)\n        ledger.prepared(ref.uid, asked)\n",
        "29",
        door="dra",
    ),
    "file-stays-after-unprepare": Bug(
        "dra/ends.py",
        "        await self._files.remove(uid, holder)\n",
        "",
        "10",
        door="dra",
    ),
    "claims-not-adopted": Bug(
        "dra/reconcile.py",
        "        if not names:\n",
        "        if True:\n",
        "12349",
        door="dra",
        weather="journal lost",
    ),
}


def copy(name: str, folder: Path) -> Path:
    """Make a copy of the package with a bug in it; returns the directory that it is in.

    Raises:
        ValueError: the code is no longer what the bug replaces.
    """
    bug = BUGS[name]
    package = folder / "fpga_plugin"
    shutil.copytree(ROOT / "fpga_plugin", package, ignore=shutil.ignore_patterns("__pycache__"))
    file = package / bug.file
    file.write_text(broken(bug, file.read_text()))
    return folder


def broken(bug: Bug, text: str) -> str:
    """The file's text with the bug.

    Raises:
        ValueError: as `copy`.
    """
    for old, new in ((bug.old, bug.new), bug.also):
        if old and text.count(old) != 1:
            raise ValueError(f"{bug.file} has not exactly once: {old}")
        text = text.replace(old, new) if old else text
    return text
