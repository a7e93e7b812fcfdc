"""What must hold, as docs/architecture.md numbers it, judged without a line of the plugin.

The checker sees four things: what the cards wrote down (`points`) and hold (`state.json`), the
journal, which it reads itself, the lists that kubelet was sent, and kubelet's own state, which the
campaign reports it: who was given what, which container runs since when. All of it is put on one
time line, that of the cards' log.
"""

import json
import re
import shutil
import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

JOURNAL = "journal.sqlite3"

NO_BLANK = "no-blank-image"

MAX_ROW = 16 << 10
"""Characters: far more than any row needs, and a small part of what can be read again."""


class Violation(AssertionError):  # noqa: N818  # the field's word for it
    """Something that must hold does not."""


@dataclass(frozen=True)
class Event:
    """A line of the cards' log: what happened to a region or card, at which second of the day."""

    at: str
    kind: str
    target: str
    value: str = ""


@dataclass(eq=False)
class Use:
    """A container that has a region, from its start (PreStart's OK) to its end.

    Attributes:
        pod: its uid.
        afu: what it asked for.
        begin, end: positions on the time line.
    """

    pod: str
    afu: str
    begin: int
    end: int | None = None


@dataclass
class Snapshot:
    """What a journal says, as the checker reads it.

    Attributes:
        allocations: each device's row.
        regions: the same.
        claim_owners: of each ResourceClaim.
        tenancies: of each pod that may be using a region.
        boot: of the node, in which it was written.
    """

    allocations: dict[str, dict[str, Any]] = field(default_factory=dict)
    regions: dict[str, dict[str, Any]] = field(default_factory=dict)
    claim_owners: dict[str, dict[str, Any]] = field(default_factory=dict)
    tenancies: dict[str, dict[str, Any]] = field(default_factory=dict)
    boot: str = ""

    def take(self, rows: Iterable[tuple[str, str, str]]) -> None:
        """These are rows of it."""
        for kind, key, value in rows:
            if kind in {"allocations", "regions", "claim_owners", "tenancies"}:
                getattr(self, kind)[key] = json.loads(value)
            elif (kind, key) == ("facts", "boot"):
                self.boot = json.loads(value)

    def devices(self) -> set[str]:
        """What somebody has, by it."""
        return {
            *self.allocations,
            *devices_of(self.claim_owners.values()),
        }

    def left(self) -> bool:
        """Whether anything is left of anybody."""
        return bool(self.allocations or self.claim_owners or self.tenancies)

    def users(self, *, but: Collection[str] = ()) -> set[str]:
        """Pods that may be using what claims of DRA have, `but` these claims.

        Not an earlier owner's, whose region was adopted before it was scrubbed: the scrub ends it.
        """
        rows = (row for uid, row in self.claim_owners.items() if uid not in but)
        held = devices_of(rows)
        numbers = {row["number"] for device, row in self.allocations.items() if device in held}
        keys = map(json.loads, self.tenancies)
        return {key["pod"] for key in keys if key["allocation"] in numbers}

    def allocation_on(self, region: str) -> dict[str, Any] | None:
        """Of the region or of its card."""
        return self.allocations.get(region) or self.allocations.get(card_of(region))

    def unblanked(self) -> set[str]:
        """Regions that could not be scrubbed, because there was no blank image."""
        return {each for each, row in self.regions.items() if NO_BLANK in row["reason"]}

    def of_others(self, claim: str) -> set[str]:
        """Devices of all claims of DRA but one, and of those that ended and are not clean yet.

        Also those of pods by the other API, of whose end the plugin may not have heard.
        """
        others = {uid: row for uid, row in self.claim_owners.items() if uid != claim}
        in_force = [row for row in self.claim_owners.values() if not row.get("ended")]
        return devices_of(others.values()) | (self.allocations.keys() - devices_of(in_force))


def devices_of(claims: Iterable[Mapping[str, Any]]) -> set[str]:
    """The devices of ResourceClaims, by their rows."""
    return {device for row in claims for device in row["devices"]}


def node_of(state: Mapping[str, Any]) -> str:
    """A region's node, by what the cards wrote down."""
    if "minor" in state:
        return f"/dev/dri/renderD{state['minor']}"
    return f"/dev/dfl-port.{state['node']}"


def card_of(device: str) -> str:
    """A region's card; a card itself."""
    return device.partition("-p")[0]


def read_journal(state_dir: Path, scratch: Path) -> Snapshot:
    """Read a copy, while no plugin runs: opening the journal itself would change its log.

    Raises:
        Violation: it cannot be opened, or is damaged.
    """
    scratch.mkdir(exist_ok=True)
    for suffix in ("", "-wal"):
        (scratch / f"{JOURNAL}{suffix}").unlink(missing_ok=True)
        if (source := state_dir / f"{JOURNAL}{suffix}").exists():
            shutil.copyfile(source, scratch / source.name)
    found = Snapshot()
    try:
        with closing(sqlite3.connect(scratch / JOURNAL)) as db:
            (verdict,) = db.execute("PRAGMA integrity_check").fetchone()
            if verdict != "ok":
                raise Violation(f"the journal is damaged: {verdict}")
            if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'journal'").fetchone():
                return found  # killed before it had made its table
            rows = db.execute("SELECT kind, key, value FROM journal").fetchall()
            found.take(rows)
            if (longest := max((len(value) for _, _, value in rows), default=0)) > MAX_ROW:
                raise Violation(f"9: a row of the journal has grown to {longest} characters")
    except sqlite3.Error as error:
        raise Violation(f"the journal cannot be opened: {error}") from error
    return found


class Checker:
    """The time line, and the judgement.

    Args:
        log: the cards' log.
        state: `state.json`.
        blanks: the blank image's AFU id of each region.
        owned: devices that kubelet has given to pods which are there, by device: the pod's uid.

    Attributes:
        hung: regions whose accelerator hung in this life: whoever has one may see it fail.
    """

    def __init__(
        self,
        log: Path,
        state: Path,
        blanks: Mapping[str, str],
        owned: Callable[[], Mapping[str, str]],
    ) -> None:
        self.blanks = blanks
        self.events: list[Event] = []
        self.uses: dict[str, list[Use]] = {region: [] for region in blanks}
        self.hung: set[str] = set()
        self.deaths: list[str] = []
        self.checked = 0
        self._log, self._state = log, state
        self._owned = owned
        self._offset = 0
        self._afu: dict[str, str] = {}
        self._blanked: dict[str, int] = {}
        self._reset: dict[str, int] = {}
        self._scrubbed: dict[str, int] = {}
        self._cleared: dict[str, int] = {}

    # ---------------------------------------------------------------- the time line

    def state(self) -> dict[str, dict[str, Any]]:
        """What the cards hold."""
        if not self._state.exists():  # killed before it had made its cards
            return {}
        regions: dict[str, dict[str, Any]] = json.loads(self._state.read_text())["regions"]
        return regions

    def now(self) -> int:
        """The position on the time line; everything before it has been looked at."""
        if self._log.exists():
            with self._log.open("rb") as file:
                file.seek(self._offset)
                *lines, _ = file.read().split(b"\n")
            self._offset += sum(len(line) + 1 for line in lines)
            for line in lines:
                self._happened(Event(*(line.decode().split(" ", 3))))
        return len(self.events)

    def _happened(self, event: Event) -> None:
        self.events.append(event)
        at, target = len(self.events), event.target
        match event.kind:
            case "KILL":
                self.deaths.append(f"{target}/{event.value}")
            case "CLEAR":
                for region in self.blanks:
                    if card_of(region) == target and (use := self.running(region)) is not None:
                        raise Violation(f"7: memory of {target} cleared under pod {use.pod}")
                self._cleared[target] = at
            case "PR" | "RESET" | "OPEN":
                if (use := self.running(target)) is not None:
                    raise Violation(f"7: {event.kind} of {target} while pod {use.pod} runs on it")
                if event.kind == "RESET":
                    self._reset[target] = at
                elif event.kind == "PR":
                    self._afu[target] = event.value
                    if event.value == self.blanks[target]:
                        self._blanked[target] = at
                        self._scrubbed[target] = self._reset.get(target, 0)

    def running(self, region: str) -> Use | None:
        """Who runs on a region."""
        return next((use for use in self.uses[region][-2:] if use.end is None), None)

    def last_end(self, region: str, *, but: str = "") -> int:
        """When the last container of another pod ended there; 0: never one ran.

        Raises:
            Violation: it runs.
        """
        for use in reversed(self.uses[region]):
            if use.pod != but:
                if use.end is None:
                    raise Violation(f"1: {region} is given out while pod {use.pod} runs on it")
                return use.end
        return 0

    # ---------------------------------------------------------------- kubelet's side

    def began(self, pod: str, wanted: Mapping[str, str], *, whole: bool) -> None:
        """PreStart answered OK for a container: it starts on these regions, asking for that.

        Raises:
            Violation: it must not.
        """
        at, state = self.now(), self.state()
        for region, afu in wanted.items():
            holds = state[region]["afu_id"]
            if holds != afu:
                raise Violation(f"2: {region} holds {holds} where pod {pod} asked for {afu}")
            ended = self.last_end(region, but=pod)
            if self._blanked.get(region, 0) <= ended:
                raise Violation(f"2: {region} was not blanked between its last pod and {pod}")
            if self._scrubbed.get(region, 0) <= ended:
                raise Violation(f"2: {region} was not reset between its last pod and {pod}")
        if whole:
            self._memory({card_of(region) for region in wanted}, but=pod)
        for region, afu in wanted.items():
            self.uses[region].append(Use(pod, afu, at))
        self.checked += 1

    def resumed(self, pod: str, regions: Iterable[str]) -> None:
        """A container starts without PreStart, on whatever its regions hold."""
        at, state = self.now(), self.state()
        for region in regions:
            self.last_end(region, but=pod)
            self.uses[region].append(Use(pod, state[region]["afu_id"], at))

    def _memory(self, cards: Iterable[str], *, but: str = "") -> None:
        for card in cards:
            ends = [self.last_end(r, but=but) for r in self.blanks if card_of(r) == card]
            if self._cleared.get(card, 0) <= max(ends) > 0:
                raise Violation(f"2: memory of {card} was not cleared since its last pod")

    def ended(self, pod: str, regions: Iterable[str]) -> None:
        """A container has ended; to be told before the plugin can know."""
        at = self.now()
        for region in regions:
            use = self.running(region)
            assert use is not None, f"the campaign lost count of {region}"
            assert use.pod == pod, f"the campaign lost count of {region}"
            use.end = at

    def unharmed(self) -> None:
        """Who runs has what it asked for, and has it alone."""
        self.now()
        state = self.state()
        for region in self.blanks:
            use = self.running(region)
            if use is not None and state[region]["afu_id"] != use.afu:
                raise Violation(f"9: {region} changed under pod {use.pod}")
        holders: dict[str, str] = {}
        for device, pod in self._owned().items():
            for region in self.regions_of(device):
                if holders.setdefault(region, pod) != pod:
                    raise Violation(f"1: {region} has two owners: {holders[region]} and {pod}")
        self.checked += 1

    # ---------------------------------------------------------------- claims of DRA

    def prepared(
        self, claim: str, wanted: Mapping[str, str], nodes: Mapping[str, str] | None
    ) -> None:
        """A claim counts as prepared: its containers may start, by nobody's leave.

        `nodes`: what its file for the container runtime says; None: there is none.

        Raises:
            Violation: they must not, or cannot.
        """
        self.now()
        if nodes is None:
            raise Violation(f"3: claim {claim} is prepared and has no file")
        state = self.state()
        for region, afu in wanted.items():
            holds = state[region]["afu_id"]
            if holds != afu:
                raise Violation(f"2: {region} holds {holds} where claim {claim} asked for {afu}")
            name = f"FPGA_DEVICE_{re.sub('[^A-Z0-9]', '_', region.upper())}"
            if nodes.get(name) != node_of(state[region]):
                raise Violation(f"10: claim {claim} has another node than {region}'s: {nodes}")
        self.checked += 1

    def released(self, claim: str, regions: Iterable[str], nodes: Mapping[str, str] | None) -> None:
        """Unprepare was answered; `regions`: those that no other claim has or waits for.

        Raises:
            Violation: something is left of the claim.
        """
        self.now()
        if nodes is not None:
            raise Violation(f"10: claim {claim} is unprepared and has a file")
        state = self.state()
        for region in regions:
            self._clean(region, state, f"claim {claim} is unprepared")
        self.checked += 1

    def regions_of(self, device: str) -> list[str]:
        """A card's regions; a region itself."""
        return [r for r in self.blanks if device in {r, card_of(r)}]

    def hangs(self, device: str) -> bool:
        """Whether a region of it may be silent."""
        return not self.hung.isdisjoint(self.regions_of(device))

    # ---------------------------------------------------------------- lists

    def listed(
        self,
        devices: Iterable[str],
        healthy: Iterable[str],
        mine: Iterable[str],
        busy: Iterable[str],
        *,
        known: bool,
    ) -> None:
        """A list came.

        Args:
            devices: on it.
            healthy: those of them that are.
            mine: devices of this resource that pods have.
            busy: devices that the plugin may take for owned.
            known: the plugin has had its journal, or kubelet's records, to know owners by.

        Raises:
            Violation: it must not be so.
        """
        self.now()
        devices, healthy, state = set(devices), set(healthy), self.state()
        for device in mine:
            if known and device not in devices:
                raise Violation(f"3: {device} has an owner and is not on the list")
            if known and device not in healthy and not self.hangs(device):
                raise Violation(f"3: {device} has an owner and is Unhealthy")
        taken = {region for device in busy for region in self.regions_of(device)}
        for device in healthy:
            regions = self.regions_of(device)
            if taken.isdisjoint(regions):
                for region in regions:
                    self._clean(region, state, f"{device} is Healthy")
                if device == card_of(device):
                    self._memory([device])
        self.checked += 1

    def all_clean(self) -> None:
        """Nobody has anything, and everything is Healthy."""
        self.now()
        state = self.state()
        for region in self.blanks:
            self._clean(region, state, "everything is Healthy")
        self._memory({card_of(region) for region in self.blanks})
        self.checked += 1

    def _clean(self, region: str, state: Mapping[str, dict[str, Any]], where: str) -> None:
        holds = state[region]["afu_id"]
        if holds != self.blanks[region]:
            raise Violation(f"4: {where} and {region} holds {holds}")
        if (use := self.running(region)) is not None:
            raise Violation(f"4: {where} while pod {use.pod} runs on {region}")
        ended = self.last_end(region)
        if self._blanked.get(region, 0) <= ended or self._scrubbed.get(region, 0) <= ended:
            raise Violation(f"4: {where} and {region} was not scrubbed since its last pod")

    # ---------------------------------------------------------------- deaths

    def died(self) -> None:
        """The plugin is dead: what the cards did not come to write down is in their state."""
        self.now()
        for region, holds in self.state().items():
            if self._afu.get(region, holds["afu_id"]) != holds["afu_id"]:
                self._happened(Event("", "PR", region, holds["afu_id"]))

    def journal(self, found: Snapshot, owned: Mapping[str, str] | None = None) -> set[str]:
        """Judge what the journal says at a death; returns the regions that are idle and clean.

        `owned`: devices that it must have as somebody's; None: all that kubelet has given.
        """
        self.now()
        state = self.state()
        held: dict[str, str] = {}
        for device in found.allocations:
            for region in self.regions_of(device):
                if held.setdefault(region, device) != device:
                    raise Violation(f"1: {region} is allocated as {held[region]} and as {device}")
        for device, pod in (self._owned() if owned is None else owned).items():
            if device not in found.allocations:
                raise Violation(
                    f"9: the journal has no allocation of {device}, which pod {pod} has"
                )
        idle = set()
        for region, record in found.regions.items():
            if record["condition"] == "BLANK" and found.allocation_on(region) is None:
                idle.add(region)
            self._record(region, record, found.allocation_on(region), state)
        self.checked += 1
        return idle

    def _record(
        self,
        region: str,
        record: Mapping[str, Any],
        allocation: Mapping[str, Any] | None,
        state: Mapping[str, dict[str, Any]],
    ) -> None:
        holds = state[region]["afu_id"]
        match record["condition"]:
            case "BLANK" if allocation is None:
                self._clean(region, state, "the journal has it as free and BLANK")
            case "BLANK" if holds != self.blanks[region]:
                raise Violation(f"9: the journal has {region} as BLANK, it holds {holds}")
            case "BLANK" if not (allocation.get("started") or allocation.get("missed_prestart")):
                self._clean(region, state, "the journal has it as allocated and BLANK")
            case "PROGRAMMED" if holds != record["afu_id"]:
                raise Violation(f"9: {region} holds {holds}, the journal says {record}")
            case "PROGRAMMED" if allocation is None:
                raise Violation(f"9: {region} is PROGRAMMED in the journal, and nobody's")

    def left_alone(self, idle: Iterable[str], since: int, touched: Iterable[str]) -> None:
        """Regions that were idle and clean at a restart were programmed for somebody, or not."""
        asked = {region for device in touched for region in self.regions_of(device)}
        alone = set(idle) - asked
        for event in self.events[since:]:
            if event.kind == "PR" and event.target in alone:
                raise Violation(
                    f"9: {event.target} was clean and idle, and a restart programmed it"
                )
        self.checked += 1
