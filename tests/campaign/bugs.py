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
        apis: by which it shows.
        machine: the test in tests/unit/allocation whose state machine finds it, in place of the
            campaign's checker.
        also: more replacements: file, what stands there, and what then does.
    """

    file: str
    old: str
    new: str
    breaks: str
    weather: str = ""
    apis: str = "device-plugin"
    kubelet: str = "extended"
    machine: str = ""
    also: tuple[tuple[str, str, str], ...] = ()


BUGS = {
    "no-scrub": Bug(
        "cards/steps.py",
        '        program(port, blank, report, name="program blank")\n',
        "        report.afu_id = blank.afu_id\n",
        "249",
    ),
    "no-reset": Bug(
        "cards/steps.py",
        "    report.scrubbed = True\n    quiesce(backend, card, region, port, report)\n",
        "    report.scrubbed = True\n",
        "24",
    ),
    "no-program": Bug(
        "cards/operations.py",
        '                steps.program(port, image, report, name="program")\n',
        "                report.afu_id = image.afu_id\n",
        "29",
    ),
    "journal-after-the-answer": Bug(
        "allocation/state.py",
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
        "allocation/work_steps.py",
        "        step.commit()\n        self._begun.update(begun)\n",
        "        self._state.apply(step.change)\n        self._begun.update(begun)\n",
        "249",
    ),
    "memory-cleared-under-a-neighbour": Bug(
        "cards/operations.py",
        "        if self.ledger.others_owned(card.id, reports):\n            return\n",
        "",
        "7",
    ),
    "memory-not-cleared": Bug(
        "cards/steps.py",
        "        backend.clear_memory(card)\n",
        "        pass\n",
        "2",
    ),
    "scrub-under-a-living-pod": Bug(
        "cards/scrub.py",
        "        if (one := await operations.living(left)) is not None:\n",
        "        if (one := None) is not None:\n",
        "17",
    ),
    "half-a-scrub-is-believed": Bug(
        "allocation/ledger.py",
        '        reason = "the plugin ended while it worked on the region"\n',
        "        return replace(record, condition=Condition.BLANK)\n",
        "2349",
    ),
    "restart-scrubs-everything": Bug(
        "allocation/ledger.py",
        '    if not same_boot:\n        reason = "the node booted"\n',
        '    if same_boot:\n        reason = "the node booted"\n',
        "9",
    ),
    "claims-forgotten-at-the-start": Bug(
        "allocation/ledger.py",
        "        self.apply(snapshot)\n",
        "        self.apply(replace(snapshot, allocations={}, tenancies={}))\n",
        "1379",
    ),
    "owners-leave-the-list": Bug(
        "allocation/lists.py",
        "(c.resource, c.device, Stops.OWNER)",
        "(c.resource, c.device, Stops.OFFER)",
        "3",
    ),
    "lost-log-believed": Bug(
        "allocation/journal/journal.py",
        "        if missing > 0:\n",
        "        if missing < -9:\n",
        "12349",
        weather="write-ahead log cut",
    ),
    "claims-end-while-kubelet-knows-them": Bug(
        "deviceplugin/reconcile.py",
        "        held = {device for pod in listed.devices for device in pod.devices}\n",
        "        held = set[DeviceId]()\n",
        "1379",
        kubelet="stock",
        also=(
            (
                "deviceplugin/reconcile.py",
                "[d for d in ended if not checkpoint.holders(d)]",
                "ended",
            ),
        ),
    ),
    "unprepare-answered-before-it-is-clean": Bug(
        "dra/lifecycle.py",
        "        regions = ends.regions(ref.uid)\n",
        "        regions = []\n",
        "4",
        apis="dra",
    ),
    "pods-of-a-claim-not-asked": Bug(
        "allocation/step.py",
        "        self.begin(allocation, pods, used=used)\n",
        "        self.begin(allocation, (), used=used)\n",
        "47",
        apis="dra",
        also=(("allocation/dra_steps.py", "[pod for pod in of_claim if pod not in there]", "()"),),
    ),
    "claim-prepared-before-it-is-done": Bug(
        "dra/lifecycle.py",
        "        ledger.dra.take(owner, claim.users)\n",
        "        ledger.dra.take(owner, claim.users)\n"
        "        ledger.dra.prepared(ref.uid, asked)\n",
        "29",
        apis="dra",
    ),
    "file-stays-after-unprepare": Bug(
        "dra/ends.py",
        "        await self._files.remove(uid, owner)\n",
        "",
        "10",
        apis="dra",
    ),
    "claims-not-adopted": Bug(
        "dra/reconcile.py",
        "        if not names:\n",
        "        if True:\n",
        "12349",
        apis="dra",
        weather="journal lost",
    ),
    # The rows of "One answer to each question" (docs/architecture.md), each brought back.
    "f1-no-record-is-an-empty-one": Bug(
        "dra/reconcile.py",
        '            raise RecordUnreadableError(f"kubelet\'s record {path} is not there")\n',
        "            return {}\n",
        "13479",
        apis="both",
    ),
    "f1-a-half-record-is-an-empty-one": Bug(
        "dra/reconcile.py",
        "        return await asyncio.to_thread(read_record, self._root, ours)\n",
        "        try:\n"
        "            return await asyncio.to_thread(read_record, self._root, ours)\n"
        "        except Exception:\n"
        "            return {}\n",
        "13479",
        apis="both",
    ),
    "f1-lost-claims-are-nobodys": Bug(
        "allocation/journal/doubt.py",
        "    if claims:\n",
        "    if claims and not why:\n",
        "12379",
        apis="both",
        weather="journal lost",
    ),
    "f2-only-the-present-name-is-asked-for": Bug(
        "dra/reconcile.py",
        "            return driver in drivers"
        " or any(card_of(one) in cards for one in devices_of(devices))\n",
        "            return driver == self._driver\n",
        "1379",
        apis="both",
    ),
    "f2-files-are-sought-where-they-are-written-now": Bug(
        "dra/cdi.py",
        "        return owner.file or self.path(owner.uid)\n",
        "        return self.path(owner.uid)\n",
        "310",
        apis="dra",
    ),
    "f3-what-takes-trust-away-waits-for-the-journal": Bug(
        "allocation/state.py",
        "        concerned = self.apply(taking)\n"
        "        self._unwritten |= taking\n"
        "        try:\n"
        "            if told := self._unwritten | giving:\n"
        "                self._journal.write(told)\n"
        "                self._unwritten = Change()\n",
        "        concerned: set[CardId | None] = set()\n"
        "        try:\n"
        "            if told := change:\n"
        "                self._journal.write(told)\n"
        "                concerned |= self.apply(taking)\n",
        "23479",
        machine="test_state_unwritten.py::TestUnwritten",
    ),
    "f4-prepared-for-whatever-it-was": Bug(
        "dra/lifecycle.py",
        "lambda had: had.prepared == asked",
        "lambda had: True",
        "2",
        apis="dra",
    ),
    "f5-the-scrub-of-a-region-ends-its-pods-elsewhere": Bug(
        "allocation/step.py",
        "        for one in tenancies:\n            self.change.tenancies[one.key] = None\n",
        "        for one in tenancies:\n"
        "            self.change.tenancies |= dict.fromkeys(\n"
        "                key for key in (each.key for each in self._state.tenancies.values())\n"
        "                if key.pod == one.pod\n"
        "            )\n",
        "179",
        machine="test_ledger_steps.py::TestSteps",
    ),
    "f6-a-static-pod-is-its-uid": Bug(
        "cards/operations.py",
        "        return not self.cgroups.instance_gone(cgroups) and self.cgroups.may_live(pod)\n",
        "        noted = self.clocks  # by a key that no region has\n"
        "        if cgroups:\n"
        "            noted.setdefault(pod, cgroups)\n"
        "        return not self.cgroups.instance_gone(noted.get(pod, ()))"
        " and self.cgroups.may_live(pod)\n",
        "179",
        machine="test_ledger_life.py::TestLife",
    ),
    "f7-what-is-put-back-is-believed": Bug(
        "allocation/journal/journal.py",
        "        if last.journal != loaded.identity:\n",
        '        if loaded.identity:\n            return ""\n'
        "        if last.journal != loaded.identity:\n",
        "123479",
        weather="state directory exchanged",
        also=(
            (
                "allocation/reconcile/owners.py",
                "            older = self._is_older(device, checkpoint.stamp)\n",
                (
                    "            if card_of(device) not in ledger.unreconciled:\n"
                    "                continue\n"
                    "            older = self._is_older(device, checkpoint.stamp)\n"
                ),
            ),
        ),
    ),
    "f7-the-same-with-claims": Bug(
        "allocation/journal/journal.py",
        "        if last.journal != loaded.identity:\n",
        '        if loaded.identity:\n            return ""\n'
        "        if last.journal != loaded.identity:\n",
        "123479",
        apis="dra",
        weather="state directory exchanged",
        also=(
            (
                "dra/reconcile.py",
                "        if not names:\n",
                (
                    "        new = ledger.unreconciled\n"
                    "        if not any(_of_card(each, card) for each in names"
                    " for card in new):\n"
                ),
            ),
        ),
    ),
    "f8-the-next-pod-is-not-judged": Bug(
        "dra/lifecycle.py",
        "        await self._check_policy(claim, requests)\n"
        "        targets = await self._targets.exactly(requests)\n",
        "        targets = await self._targets.exactly(requests)\n",
        "4",
        apis="dra",
    ),
    "f8-nobody-is-judged": Bug(
        "allocation/permission.py",
        "        if self._file is None:\n",
        "        if True:\n",
        "4",
    ),
    "f9-pods-of-a-claim-are-kept-for-ever": Bug(
        "dra/reconcile.py",
        "        self._ledger.work.end_tenancies(gone)\n",
        "",
        "9",
        apis="dra",
    ),
    "f10-prepared-again-under-its-users": Bug(
        "dra/lifecycle.py",
        "        if (one := await self._operations.living(users)) is not None:\n",
        "        if (one := next(iter(users[:0]), None)) is not None:\n",
        "17",
        apis="dra",
        weather="marker lost",
    ),
    "f11-a-silent-accelerator-bars-its-scrub": Bug(
        "hardware/dfl/health.py",
        "        return FaultKind.CURABLE if answers else FaultKind.TRANSIENT\n",
        "        return FaultKind.TRANSIENT\n",
        "4",
        weather="accelerators hang",
    ),
    "a-consumer-that-is-no-pod-is-nobody": Bug(
        "dra/claim.py",
        "        others=len(uids) < len(consumers),\n",
        "        others=False,\n",
        "1379",
        apis="dra",
    ),
    "an-older-schema-has-no-users": Bug(
        "allocation/journal/rows.py",
        "        snapshot = of_schema_3(snapshot, found)\n",
        "        snapshot = snapshot  # whoever uses regions is not looked for\n",
        "179",
        machine="test_ledger_steps.py::TestSteps",
    ),
    "a-boot-changes-nothing": Bug(
        "allocation/ledger.py",
        '        same_boot = snapshot.facts.get(Fact.BOOT, "") == self.boot_id\n',
        "        same_boot = True\n",
        "2347910",
        machine="test_ledger_steps.py::TestSteps",
    ),
}


def copy(name: str, folder: Path) -> Path:
    """Make a copy of the package with a bug in it; returns the directory that it is in.

    Raises:
        ValueError: the code is no longer what the bug replaces.
    """
    package = folder / "fpga_plugin"
    shutil.copytree(ROOT / "fpga_plugin", package, ignore=shutil.ignore_patterns("__pycache__"))
    for file, text in broken(BUGS[name]).items():
        (package / file).write_text(text)
    return folder


def broken(bug: Bug) -> dict[str, str]:
    """The texts of the files that have the bug in them.

    Raises:
        ValueError: as `copy`.
    """
    texts: dict[str, str] = {}
    for file, old, new in ((bug.file, bug.old, bug.new), *bug.also):
        text = texts.get(file) or (ROOT / "fpga_plugin" / file).read_text()
        if text.count(old) != 1:
            raise ValueError(f"{file} has not exactly once: {old}")
        texts[file] = text.replace(old, new)
    return texts
