"""A node whose plugin is killed again and again, by whichever door it serves.

Several things happen at once, on pods of their own; which, a door's subclass says (`life` for the
device plugin API, `claims` for DRA). What holds is judged by `checker`; what else goes wrong on the
node is `weather`.
"""

import asyncio
import json
import random
import shutil
import signal
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, ClassVar

import points
import spawn  # noqa: F401  # first: it says where the integration tests' modules are
from checker import Checker, Snapshot, Violation, card_of, read_journal
from daemon_support import BLANK, OTHER_BLANK, OTHER_ID, STORE, Plugin
from weather import FAIR, Weather, wind

HARDWARE = f"2x2,1x2@{OTHER_ID}"
BLANKS = {
    f"0000-{card}-00.0-p{port}": OTHER_BLANK if card == 12 else BLANK
    for card in (10, 11, 12)
    for port in (0, 1)
}
AT_ONCE = 8
"""Pods, or claims."""

HANDS = 5
"""Things that happen at once."""

LIMIT = 60.0
"""Seconds for what has to come about by itself; it takes a hundredth of that."""


def regions_of(devices: Iterable[str]) -> list[str]:
    """The regions of devices, cards among them, in their order."""
    return sorted(r for r in BLANKS for device in devices if device in {r, card_of(r)})


class Node(ABC):
    """The node, and what kubelet knows.

    Args:
        rng: whatever is by chance.
        storms: the weather changes.
        only: the one weather that there is besides fair.

    Attributes:
        touched: devices that kubelet has asked the plugin something for in its present life.
        calls: how often kubelet has asked.
        known: the plugin has had its journal, or kubelet's records, to know owners by.
        spoilt: the weather had the journal, and the plugin has not mended it yet.
        unread: nor has it read it.
    """

    WHAT: ClassVar[tuple[tuple[Callable[[Any], Awaitable[None]], float], ...]]
    """What happens, and how often."""

    def __init__(self, rng: random.Random, *, storms: bool, only: str = "") -> None:
        self.rng = rng
        self.said: Counter[str] = Counter()
        self.only = only
        self.folder = Path(tempfile.mkdtemp(prefix="fpga-campaign-"))
        self.weather = Weather(self.folder, STORE) if storms else None
        self.state_dir = self.folder / "state"
        self.cgroups = self.folder / "cgroup" / "kubepods"
        self.cgroups.mkdir(parents=True)
        (self.cgroups.parent / "cgroup.controllers").write_text("cpu pids\n")
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
                "CGROUP_ROOT": self.cgroups.parent,
                "HTTP_ADDRESS": "",
                "RECONCILE_INTERVAL": "0.02",
                "HEALTH_INTERVAL": "0.2",
            }.items()
        }
        self.touched: set[str] = set()
        self.calls = 0
        self.plugin: Plugin | None = None
        self.wind = FAIR
        self.known = True
        self.spoilt = self.unread = False
        self.born = 0.0
        self.since = 0
        self.idle: set[str] = set()
        self.claimed: set[str] = set()
        self.snapshot = Snapshot()
        self.found: BaseException | None = None

    def close(self) -> None:
        """Nothing of it stays, the plugin included."""
        if self.plugin is not None:
            self.plugin.kill()
        if self.weather is not None:
            self.weather.close()
        shutil.rmtree(self.folder)

    def asks(self, devices: Iterable[str]) -> None:
        """Kubelet asks the plugin something for devices."""
        self.touched.update(devices)
        self.calls += 1

    # ---------------------------------------------------------------- what a door says

    @abstractmethod
    def serving(self) -> AbstractAsyncContextManager[None]:
        """Kubelet, and whoever else answers the plugin."""

    @abstractmethod
    def owned(self) -> Mapping[str, str]:
        """Devices that kubelet has for pods which are there, the plugin's word in hand; whose."""

    @abstractmethod
    def recorded(self) -> set[str]:
        """Devices that journal or kubelet's records show as somebody's, whoever is still there."""

    @abstractmethod
    def all_known(self) -> bool:
        """Whether each owner's device is given as one that is well."""

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
    async def everything_ends(self) -> None:
        """All pods end, those too that were deleted by force."""

    @abstractmethod
    def exposed(self) -> bool:
        """Whether pods run of which only the journal knows."""

    def standing(self) -> str:
        """What there is, for whoever asks why it is not otherwise."""
        return ""

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
            shutil.rmtree(path.rename(self.folder / f"gone-{uid}"))

    async def pause(self) -> None:
        """Nothing for a moment."""
        await asyncio.sleep(self.rng.random() * 0.03)

    async def hand(self) -> None:
        """One thing after another, until the plugin is dead."""
        steps, weights = zip(*self.WHAT, strict=True)
        while self.alive():
            (step,) = self.rng.choices(steps, weights)
            if self.ready():
                try:
                    await step(self)
                except Violation as error:
                    self.found = self.found or error
            if self.found is not None:
                raise self.found
            await asyncio.sleep(self.rng.random() * 0.004)

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
        self.claimed = self.recorded()
        self.plugin = Plugin(self.settings | env | self.wind.env)

    async def life(self) -> None:
        """One life: pods meanwhile, SIGKILL, and what the dead plugin leaves is judged."""
        self.wind = wind(self.rng, self.only) if self.weather and not self.exposed() else FAIR
        if self.weather is not None:
            self.weather.begin(self.wind, self.rng)
        # Owners are known to the journal; else to kubelet's records, once they were read: it may
        # take several lives to come to that.
        self.known = self.known and not self.wind.forgets
        family = self.rng.choice(["", *points.FAMILIES, *points.FAMILIES, "any"])
        number = self.rng.randint(1, self.rng.choice([6, 30, 120]))
        late = ":late" if self.rng.random() < 0.75 else ""
        self.launch(f"{family}:{number}{late}" if family else "")
        # By kubelet's calls, not by a clock: a busy machine gets as much into a life.
        early = not family and self.rng.random() < 0.3
        limit = self.rng.random() * 0.4 if early else 20
        calls = self.calls + self.rng.randint(2, self.rng.choice([8, 24, 60]))
        hands = [asyncio.create_task(self.hand()) for _ in range(HANDS)]
        try:
            while (
                self.alive()
                and self.found is None
                and self.calls < calls
                and time.monotonic() < self.born + limit
            ):
                await asyncio.sleep(0.004)
                self.known = self.known or self.all_known()
        finally:
            await self.killed()
            done = await asyncio.gather(*hands, return_exceptions=True)
        for error in [self.found, *done]:
            if isinstance(error, BaseException):
                raise error
        self.judge()

    async def killed(self) -> None:
        assert self.plugin is not None
        code = self.plugin.process.poll()
        await asyncio.to_thread(self.plugin.kill)
        await self.gone()
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
            touched = self.touched | self.claimed
            self.checker.left_alone(self.idle, self.since, touched)
        if self.unread:
            self.idle = set()
        elif (self.state_dir / "journal.sqlite3").exists():
            self.snapshot = read_journal(self.state_dir, self.folder / "read")
            self.idle = self.checker.journal(self.snapshot, known=self.known)
        self.said[f"weather: {self.wind.name}"] += 1

    # ---------------------------------------------------------------- peace

    async def until(self, holds: Any, what: str) -> None:
        deadline = time.monotonic() + LIMIT
        while not holds():
            if self.found is not None:
                raise self.found
            if not self.alive() or time.monotonic() > deadline:
                assert self.plugin is not None
                raise Violation(f"{what}, which did not come about: {self.standing()}")
            await asyncio.sleep(0.01)

    async def peace(self) -> None:
        """Everything ends, and then nothing is lost: all is Healthy and blank, nobody's."""
        self.wind = FAIR
        self.launch()
        await self.until(self.all_known, "3: every owner's device Healthy after a restart")
        self.known = True
        await self.everything_ends()
        await self.until(self.all_free, "4: all devices Healthy when nobody has any")
        self.checker.all_clean()
        await self.killed()
        self.judge()
        if self.snapshot.claims or self.snapshot.holders or self.idle != set(BLANKS):
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
