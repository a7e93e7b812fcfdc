"""A node whose plugin is killed again and again, by whichever API it serves.

The node has one kubelet, which is asked through two APIs: pods have devices by the one (`pods`),
ResourceClaims by the other (`claims`). One of the two serves in a run of the plugin, and what the
other gave out stays. Several things happen at once. What holds is judged by `checker`; how a life
is started is `setup`; what else goes wrong on the node is `weather`.
"""

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import points
import spawn  # noqa: F401  # first: it says where the integration tests' modules are
from checker import Checker, Snapshot, Violation, card_of, read_journal
from daemon_support import AFU_2, BLANK, OTHER_BLANK, OTHER_ID, STORE, Plugin
from doubles.xclbins import ALVEO
from setup import Setup, changed
from weather import FAIR, Weather, Wind, wind

HARDWARE = f"2x2,1x2@{OTHER_ID},1x1+alveo@{ALVEO}"
ALVEO_REGION, ALVEO_BLANK = "0000-13-00.0-p0", "b1a2c3d4e5f60718293a4b5c6d7e8f90"
BLANKS = {
    f"0000-{card}-00.0-p{port}": OTHER_BLANK if card == 12 else BLANK
    for card in (10, 11, 12)
    for port in (0, 1)
} | {ALVEO_REGION: ALVEO_BLANK}
AT_ONCE = 8
"""Pods, or claims."""

HANDS = 5
"""Things that happen at once."""

LIMIT = 60.0
"""Idle seconds (`Node.idled`) for what has to come about by itself: a hundred times as many."""

KEPT_LIVES = 6
"""Of which there is the log when something is found."""

IDLE, IDLE_WHERE_ALL_STAYS = 0.7, 0.2
"""Seconds in which kubelet gets no answer and nobody has anything to do: then a life ends."""

LONGEST_WHERE_ALL_STAYS = 4.0
"""Seconds from the plugin's registration: what lasts stops to have anything to do soon."""

Step = tuple[Callable[[Any], Awaitable[None]], float]
"""What happens, and how often."""


def regions_of(devices: Iterable[str]) -> list[str]:
    """The regions of devices, cards among them, in their order."""
    return sorted(r for r in BLANKS for device in devices if device in {r, card_of(r)})


class Side(ABC):
    """What was given out through one API: kubelet's part of it, and who has it.

    Attributes:
        known: the plugin has had its journal, or kubelet's records, to know these owners by.
    """

    WHAT: ClassVar[tuple[Step, ...]]
    """While this API serves."""

    BESIDE: ClassVar[tuple[Step, ...]]
    """While the other one does: kubelet has nobody to ask."""

    def __init__(self, node: "Node") -> None:
        self.node = node
        self.rng, self.said, self.checker = node.rng, node.said, node.checker
        self.folder = node.folder
        self.known = True

    @property
    def serves(self) -> bool:
        """Whether this is the API of the present life."""
        return self.node.side is self

    @abstractmethod
    def serving(self) -> AbstractAsyncContextManager[None]:
        """Kubelet, and whoever else answers the plugin."""

    @abstractmethod
    def settings(self) -> Mapping[str, str]:
        """The plugin's, where this API serves."""

    @abstractmethod
    def records(self, how: str) -> None:
        """Kubelet's records of this API are so in the coming life (`Setup.records`)."""

    @abstractmethod
    def owned(self) -> dict[str, str]:
        """Devices that kubelet has for pods which are there, the plugin's word in hand; whose."""

    @abstractmethod
    def holding(self) -> set[str]:
        """Devices that kubelet has for anybody."""

    @abstractmethod
    def recorded(self) -> set[str]:
        """Devices that kubelet's records show as somebody's, whoever is still there."""

    @abstractmethod
    def all_known(self, *, contested: bool = False) -> bool:
        """Whether each owner's device is given as one that is well.

        `contested`: but for those that a claim has, too.
        """

    @abstractmethod
    def all_free(self) -> bool:
        """Whether everything is there to be given out."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether kubelet can ask the plugin something."""

    @abstractmethod
    async def gone(self) -> None:
        """The plugin is dead: wait until nothing that comes is of its last life any more."""

    @abstractmethod
    def prefixes(self) -> set[str]:
        """Under which names somebody has something."""

    @abstractmethod
    async def everything_ends(self) -> None:
        """All pods end that can be ended in this life, those too that were deleted by force."""

    @abstractmethod
    def exposed(self) -> bool:
        """Whether pods run of which only the journal knows."""

    def claims(self) -> Collection[str]:
        """Claims that kubelet's record of them names."""
        return ()

    def unrecorded(self) -> bool:
        """Whether kubelet's record lacks something that was prepared."""
        return False

    @abstractmethod
    async def boots(self) -> None:
        """The node has booted: nothing runs, and kubelet asks for all of it again."""

    @abstractmethod
    async def restarts(self) -> None:
        """Kubelet does."""

    async def hang(self) -> None:
        """An accelerator of a DFL card hangs, its owner's or the blank: it is silent until a PR."""
        if not self.node.wind.silent:
            return
        region = self.rng.choice(sorted(BLANKS.keys() - {ALVEO_REGION}))
        fault = self.folder / "cards" / "faults" / region
        if not fault.exists():
            self.checker.hung.add(region)
            fault.with_name("new").write_text("afu-hung\n")
            fault.with_name("new").replace(fault)
            self.said["accelerators that hung"] += 1

    async def restart_kubelet(self) -> None:
        """There is one, for both APIs."""
        for side in self.node.sides.values():
            await side.restarts()

    async def pause(self) -> None:
        """Nothing for a moment."""
        await asyncio.sleep(self.rng.random() * 0.03)

    @abstractmethod
    def launched(self) -> None:
        """A run of the plugin begins."""

    def standing(self) -> str:
        """What there is, for whoever asks why it is not otherwise."""
        return ""

    def journal(self) -> Snapshot:
        """What the journal of the running plugin says; nothing where it cannot be read now."""
        path, found = self.node.state_dir / "journal.sqlite3", Snapshot()
        try:
            with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
                found.take(db.execute("SELECT kind, key, value FROM journal"))
        except sqlite3.Error:
            return Snapshot()
        return found


class Node:
    """The node, and what kubelet knows.

    Args:
        rng: whatever is by chance.
        sides: makes what was given out by each API.
        apis: which of them serve.
        storms: the weather changes.
        only: the one weather that there is besides fair.

    Attributes:
        touched: devices that kubelet has asked the plugin something for in its present life.
        calls: how often kubelet has asked.
        spoilt: the weather had the journal, and the plugin has not mended it yet.
        unread: nor has it read it.
        lasting: what was given out mostly stays with whom it has in this life, and runs: what comes
            next finds users of everything.
    """

    def __init__(
        self,
        rng: random.Random,
        sides: Mapping[str, Callable[["Node"], Side]],
        *,
        apis: tuple[str, ...],
        storms: bool,
        only: str = "",
    ) -> None:
        self.rng, self.apis, self.only = rng, apis, only
        self.said: Counter[str] = Counter()
        self.folder = Path(tempfile.mkdtemp(prefix="fpga-campaign-"))
        self.weather = Weather(self.folder, STORE) if storms else None
        self.state_dir = self.folder / "state"
        self.cgroups = self.folder / "cgroup" / "kubepods"
        self.cgroups.mkdir(parents=True)
        (self.cgroups.parent / "cgroup.controllers").write_text("cpu pids\n")
        for name in ("kubelet", "cards", "cards/faults", "cdi", "cdi-2"):  # mounted, so made
            (self.folder / name).mkdir()
        self.checker = Checker(
            self.folder / "cards.log", self.folder / "cards" / "state.json", BLANKS, self.owned
        )
        self.settings = {
            f"FPGA_PLUGIN_{name}": str(value)
            for name, value in {
                "BACKEND": "simulated",
                "SIMULATED_CARDS": HARDWARE,
                "SIMULATED_DIR": self.folder / "cards",
                "STATE_DIR": self.state_dir,
                "KUBELET_DIR": self.folder / "kubelet",
                "BITSTREAM_DIR": self.weather.store if self.weather else STORE,
                "HTTP_ADDRESS": "",
                "RECONCILE_INTERVAL": "0.02",
                "HEALTH_INTERVAL": "0.2",
            }.items()
        }
        self.touched: set[str] = set()
        self.calls = 0
        self.plugin: Plugin | None = None
        self.wind = FAIR
        self.setup = Setup(api=apis[0])
        self.spoilt = self.unread = self.lasting = False
        self.born = 0.0
        self.since = 0
        self.idle: set[str] = set()
        self.claimed: set[str] = set()
        self.snapshot = Snapshot()
        self.found: BaseException | None = None
        self.past = deque[tuple[Setup, Wind, Plugin]](maxlen=KEPT_LIVES)
        self.sides = {api: make(self) for api, make in sides.items()}

    def close(self) -> None:
        """Nothing of it stays, the plugin included."""
        if self.plugin is not None:
            self.plugin.kill()
        if self.weather is not None:
            self.weather.close()
        shutil.rmtree(self.folder)

    @property
    def boot(self) -> str:
        """The node's boot id."""
        return f"boot-{self.setup.boot}"

    @property
    def at_once(self) -> int:
        """Pods, or claims: of two APIs each leaves room for the other."""
        return AT_ONCE // len(self.apis)

    @property
    def side(self) -> Side:
        """Of the API that serves."""
        return self.sides[self.setup.api]

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Kubelet and the API server."""
        async with contextlib.AsyncExitStack() as stack:
            for side in self.sides.values():
                await stack.enter_async_context(side.serving())
            yield

    def asks(self, devices: Iterable[str]) -> None:
        """Kubelet asks the plugin something for devices."""
        self.touched.update(devices)
        self.calls += 1

    def owned(self) -> dict[str, str]:
        """Devices that kubelet has for pods which are there, by either API; whose."""
        return {device: who for side in self.sides.values() for device, who in side.owned().items()}

    def held(self) -> set[str]:
        """Devices that somebody may have, by either API."""
        return {device for side in self.sides.values() for device in side.recorded()}

    def beside(self) -> set[str]:
        """Regions that pods have by the API that does not serve."""
        others = (side for side in self.sides.values() if not side.serves)
        return {region for side in others for region in regions_of(side.recorded())}

    @property
    def known(self) -> bool:
        """Whether all owners are, by whichever API."""
        return all(side.known for side in self.sides.values())

    @property
    def busy(self) -> set[str]:
        """Devices that the plugin may take for owned: nothing is known of whether they are clean.

        What was nobody's at its start, and what nobody has asked for since, is not among them.
        """
        if self.wind.forgets or not self.known:
            return set(BLANKS)  # a spoiled journal may show claims of any time
        holding = {device for side in self.sides.values() for device in side.holding()}
        return self.touched | self.claimed | holding

    # ---------------------------------------------------------------- pods

    def cgroup(self, uid: str, *, runs: bool) -> None:
        """Write a pod's cgroup as the kernel would have it."""
        path = self.cgroups / f"pod{uid}"
        path.mkdir(exist_ok=True)
        (path / "new").write_text(f"populated {int(runs)}\n")
        (path / "new").replace(path / "cgroup.events")

    def remove_cgroup(self, uid: str) -> None:
        """In one step as far as the plugin can see, as rmdir of a cgroup is."""
        path = self.cgroups / f"pod{uid}"
        if path.exists():
            # Kept, so that its inode is not used again, as kernfs never does.
            path.rename(self.folder / f"gone-{uid}-{time.monotonic_ns()}")

    def ends(self, often: float = 0.05) -> bool:
        """Whether something ends whose turn it is; so `often` in a life in which all lasts."""
        return not self.lasting or self.rng.random() < often

    def allowed(self, owner: str, wanted: Mapping[str, str]) -> None:
        """The plugin lets an owner have these images.

        Raises:
            Violation: the operator's policy does not.
        """
        if self.setup.forbids and self.setup.forbids in wanted.values():
            raise Violation(f"4: {owner} gets what the policy denies: {wanted}")

    def steps(self) -> list[tuple[Side, Step]]:
        """What may happen in this life."""
        return [
            (side, step)
            for side in self.sides.values()
            for step in (side.WHAT if side.serves else side.BESIDE)
        ]

    async def hand(self) -> None:
        """One thing after another, until the plugin is dead."""
        steps = self.steps()
        while self.alive():
            ((side, (step, _)),) = self.rng.choices(steps, [weight for _, (_, weight) in steps])
            if self.side.ready():
                try:
                    await step(side)
                except Violation as error:
                    self.found = self.found or error
            if self.found is not None:
                raise self.found
            slow = self.lasting or not self.side.ready()
            await asyncio.sleep(self.rng.random() * (0.02 if slow else 0.004))

    # ---------------------------------------------------------------- lives of the plugin

    def alive(self) -> bool:
        assert self.plugin is not None
        return self.plugin.process.poll() is None

    def launch(self, kill: str = "") -> None:
        """Start the plugin, to die at this failure point."""
        env = {points.LOG: str(self.folder / "cards.log"), points.KILL: kill}
        env |= {"FPGA_PLUGIN_SIMULATED_PR_SECONDS": self.rng.choice(["0", "0.002", "0.02"])}
        self.born, self.since = time.monotonic(), self.checker.now()
        self.touched = set()
        faults = self.folder / "cards" / "faults"
        self.checker.hung = {region for region in BLANKS if (faults / region).exists()}
        self.claimed = self.held() | self.snapshot.devices()
        for side in self.sides.values():
            away = self.setup.records == "away" and side.serves
            side.records("there" if away else self.setup.records)
            side.launched()
        env |= self.setup.settings(self.folder)
        if self.wind.unwritten:
            first = self.rng.randrange(self.rng.choice([10, 60]))
            failing = range(first, first + self.rng.choice([1, 2, 10, 50]))
            env |= {points.UNWRITTEN: " ".join(map(str, failing))}
        (self.folder / "cards" / "boot_id").write_text(f"{self.boot}\n")
        self.plugin = Plugin(self.settings | env | self.side.settings() | self.wind.env)
        self.past.append((self.setup, self.wind, self.plugin))

    async def changes(self) -> None:
        """What is not as it was in the last life."""
        exposed = any(side.exposed() for side in self.sides.values())
        before = self.setup
        self.setup = changed(
            before, self.rng, self.apis, AFU_2, blind=not exposed, settled=self.lasting
        )
        if any(side.unrecorded() for side in self.sides.values()):
            self.setup = replace(self.setup, api=before.api)  # see ClaimSide.restarts
        await self.kubelet_changes(boots=before.boot != self.setup.boot)
        exposed = any(side.exposed() for side in self.sides.values())
        for name in ("api", "prefix", "cdi", "boot", "scrub"):
            if getattr(before, name) != getattr(self.setup, name):
                self.said[f"other {name}"] += 1
        if not self.setup.cgroups:
            self.said["no cgroups"] += 1
        if self.setup.records != "there":
            self.said[f"records {self.setup.records}"] += 1
        often = (0.7 if self.only else 0.4) if self.lasting else (0.3 if self.only else 0.15)
        self.wind = FAIR
        if self.weather is not None and self.rng.random() < often:
            self.wind = wind(self.rng, self.only, exposed=exposed)
            if self.wind.hangs:  # best-effort does without the blank then, as the operator wants
                self.setup = replace(self.setup, scrub="required")
        if self.weather is not None:
            self.weather.begin(self.wind, self.rng)
        # Owners are known to the journal; else to kubelet's records, once they were read: it may
        # take several lives to come to that.
        for side in self.sides.values():
            side.known = side.known and not self.wind.forgets

    async def kubelet_changes(self, *, boots: bool) -> None:
        """While no plugin runs the node boots, or kubelet restarts alone; mostly neither."""
        if boots:
            self.idle = set()  # after a boot nothing counts as clean
        elif self.rng.random() >= (0.35 if self.lasting else 0.1):
            return
        for side in self.sides.values():
            await (side.boots() if boots else side.restarts())

    async def life(self) -> None:
        """One life: pods meanwhile, SIGKILL, and what the dead plugin leaves is judged."""
        await self.changes()
        self.lasting = self.rng.random() < 0.4
        idle = IDLE_WHERE_ALL_STAYS if self.lasting else IDLE
        families = ["", *points.FAMILIES, *points.FAMILIES, "any"]
        family = self.rng.choice(families + [""] * 20 * self.lasting)
        number = self.rng.randint(1, self.rng.choice([6, 30, 120]))
        late = ":late" if self.rng.random() < 0.75 else ""
        self.launch(f"{family}:{number}{late}" if family else "")
        # By kubelet's calls, not by a clock: a busy machine gets as much into a life. One in which
        # nothing is answered ends, too: what it waits for may not come before the next one.
        early = not (family or self.lasting) and self.rng.random() < 0.3
        until = self.born + (self.rng.random() * 0.4 if early else 15)
        calls = self.calls + self.rng.randint(
            2, 60 if self.lasting else self.rng.choice([8, 24, 60])
        )
        hands = [asyncio.create_task(self.hand()) for _ in range(HANDS)]
        seen, begun, came = self.calls, self.idled(), time.monotonic()
        try:
            while self.alive() and self.found is None and self.calls < calls:
                if seen != self.calls or not self.side.ready():
                    seen, begun = self.calls, self.idled()
                if not self.side.ready():
                    came = time.monotonic()
                over = self.lasting and time.monotonic() > came + LONGEST_WHERE_ALL_STAYS
                if self.idled() > begun + idle or time.monotonic() > until or over:
                    break
                await asyncio.sleep(0.01)
                self.side.known = self.side.known or self.side.all_known()
        finally:
            await self.killed()
            done = await asyncio.gather(*hands, return_exceptions=True)
        for error in [self.found, *done]:
            if isinstance(error, BaseException):
                raise error
        self.judge()

    def idled(self) -> float:
        """Seconds by a clock that stands while the plugin or the campaign runs, or would."""
        assert self.plugin is not None
        now = time.monotonic()
        for process in ("self", self.plugin.process.pid):
            with contextlib.suppress(OSError):  # it has just died
                ran, waited, _ = Path(f"/proc/{process}/schedstat").read_text().split()
                now -= (int(ran) + int(waited)) / 1e9
        return now

    async def killed(self) -> None:
        assert self.plugin is not None
        code = self.plugin.process.poll()
        await asyncio.to_thread(self.plugin.kill)
        await self.side.gone()
        if code not in {None, -9} and not self.wind.refuses:
            raise Violation(f"the plugin ended by itself, with {code}: {self.plugin.text[-2000:]}")
        self.said["kills" if code in {None, -9} else "refused to start"] += 1
        if code is None:
            self.checker.deaths.append("any/instant")
        for line in self.plugin.lines:
            told = "\nfpga-plugin: " in f"\n{self.plugin.text}"
            if self.wind.refuses and told and "exception" not in line:
                continue  # why it does not start, for whoever runs it
            if "exception" in line or "text" in line:
                raise Violation(f"the plugin logged an error of its own: {json.dumps(line)}")

    def judge(self) -> None:
        """What the dead plugin leaves."""
        if self.weather is not None:
            self.weather.end(self.wind)
        self.checker.died()
        self.checker.unharmed()
        assert self.plugin is not None
        # Who dies before the journal is mended finds it damaged again; who died before it was read
        # leaves what the weather made of it.
        damaged = bool(self.plugin.logged("the journal is in doubt"))
        self.unread = (self.wind.forgets or self.unread) and not self.plugin.logged("serving")
        self.spoilt = self.wind.forgets or (self.spoilt and (damaged or self.unread))
        if not self.spoilt and self.known:
            asked = self.touched | self.claimed | self.checker.hung
            self.checker.left_alone(self.idle, self.since, asked)
        if self.unread:
            self.idle = set()
        elif (self.state_dir / "journal.sqlite3").exists():
            self.snapshot = read_journal(self.state_dir, self.folder / "read")
            owned = {d: who for s in self.sides.values() if s.known for d, who in s.owned().items()}
            self.idle = self.checker.journal(self.snapshot, owned)
            if self.snapshot.boot not in {"", self.boot}:
                self.idle = set()  # its conditions are of an earlier boot
        self.said[f"weather: {self.wind.name}"] += 1

    # ---------------------------------------------------------------- peace

    async def until(self, holds: Any, what: str) -> None:
        begun = self.idled()
        while not holds():
            if self.found is not None:
                raise self.found
            if not self.alive() or self.idled() > begun + LIMIT:
                assert self.plugin is not None
                standing = f"{self.side.standing()}\n{self.command('status')}"
                raise Violation(f"{what}, which did not come about: {standing}")
            await asyncio.sleep(0.01)

    def command(self, *words: str) -> str:
        """What the operator's command prints on this node."""
        command = [sys.executable, "-m", "fpga_plugin", *words]
        env = os.environ | {"FPGA_PLUGIN_STATE_DIR": str(self.state_dir)}
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout + done.stderr

    async def retry_the_silent(self) -> None:
        """The operator does: with the blank an accelerator hung twice, which makes it FAULTED."""
        await self.until(self.side.ready, "3: the plugin registers")
        journal = self.side.journal()
        for card in sorted(
            {card_of(region) for region, row in journal.regions.items() if _is_silent(row)}
        ):
            await asyncio.to_thread(self.command, "card", "retry", card)
            self.said["card retry"] += 1

    async def peace(self) -> None:
        """Everything ends, and then nothing is lost: all is Healthy and blank, nobody's.

        What was given out by an API, under a name, ends by it and under that.
        """
        self.wind = FAIR
        # What kubelet's record lacks first: see ClaimSide.restarts.
        sides = sorted(self.sides.items(), key=lambda one: not one[1].unrecorded())
        setups = [
            Setup(api, prefix, boot=self.setup.boot)
            for api, side in sides
            for prefix in sorted(side.prefixes())
        ]
        setups = setups or [Setup(self.setup.api, boot=self.setup.boot)]
        for setup in setups:
            self.setup = setup
            self.launch()
            await self.retry_the_silent()
            await self.until(
                partial(self.side.all_known, contested=True),
                "3: every owner's device Healthy after a restart",
            )
            self.side.known = True
            await self.side.everything_ends()
            await self.retry_the_silent()  # what still had an owner is tried again only now
            if setup is setups[-1]:
                await self.until(self.side.all_free, "4: all devices Healthy when nobody has any")
                self.checker.all_clean()
            await self.killed()
            self.judge()
        for side in self.sides.values():
            side.known = True
        if self.snapshot.left() or self.idle != set(BLANKS):
            raise Violation(f"9: something is lost: {self.snapshot}")
        self.said["times that everything came back"] += 1


async def portion(node: Node, *, kills: int, until: float) -> Violation | None:
    """Lives until the number of kills or the time is reached; returns what was found.

    The node is closed.
    """
    found: Violation | None = None
    this = asyncio.current_task()
    assert this is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, this.cancel)  # nothing may stay mounted
    try:
        async with node.serving():
            try:
                while node.said["kills"] < kills and time.monotonic() < until:
                    for _ in range(node.rng.randint(10, 30)):
                        if node.said["kills"] >= kills or time.monotonic() >= until:
                            break
                        await node.life()
                    await node.peace()
            except Violation as error:
                found = error
            if node.plugin is not None:
                await asyncio.to_thread(node.plugin.kill)
            for _ in range(50):
                await asyncio.sleep(0)
    finally:
        node.close()
    return found


def _is_silent(row: Mapping[str, Any]) -> bool:
    # As which it is found depends on when it fell silent: before its id was read, or after that.
    silent = "reads all ones", "keeps port errors 0x100000000"  # MMIOTimedOut
    return row["condition"] == "FAULTED" and any(one in row["reason"] for one in silent)
