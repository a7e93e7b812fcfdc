"""Lives of many pods on a node whose plugin is killed again and again.

Kubelet is the double of `fpga-plugin demo`, of either kind: extended (environment in PreStart,
PostStop, Deallocate) or stock. Several things happen at once, on pods of their own: admissions,
starts, ends, crashes of containers, pods deleted by force whose processes go on, restarts of
kubelet. What holds is judged by `checker`; what else goes wrong on the node is `weather`.
"""

import asyncio
import contextlib
import json
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import points
import spawn  # noqa: F401  # first: it says where the integration tests' modules are
from checker import Checker, Snapshot, Violation, card_of, read_journal
from daemon_support import (
    AFU,
    AFU_2,
    AFU_3,
    BLANK,
    CARDS,
    ID,
    OTHER_BLANK,
    OTHER_CARDS,
    OTHER_ID,
    OTHER_REGIONS,
    REGIONS,
    STORE,
    Plugin,
    request,
)
from grpclib.exceptions import GRPCError, StreamTerminatedError
from pods_support import FakePod, PodsServer, serving
from weather import FAIR, Weather, wind

from fpga_plugin.demo.double import EXTENDED, STOCK, AdmissionError, KubeletDouble
from fpga_plugin.demo.plugins import Connection, DeviceList, NoEndpointError
from fpga_plugin.demo.pod import Container, DemoPod
from fpga_plugin.ids import ResourceName

REGION, CARD, OTHER, OTHER_CARD = map(ResourceName, (REGIONS, CARDS, OTHER_REGIONS, OTHER_CARDS))
KINDS = {"regions": REGION, "cards": CARD, "others": OTHER}
HARDWARE = f"2x2,1x2@{OTHER_ID}"
BLANKS = {
    f"0000-{card}-00.0-p{port}": OTHER_BLANK if card == 12 else BLANK
    for card in (10, 11, 12)
    for port in (0, 1)
}
LISTED = {REGION: 4, CARD: 2, OTHER: 2, OTHER_CARD: 1}
AT_ONCE = 8
"""Pods."""

HANDS = 5
"""Things that happen at once."""

LIMIT = 60.0
"""Seconds for what has to come about by itself; it takes a hundredth of that."""

GONE = (NoEndpointError, StreamTerminatedError, OSError, TimeoutError)
"""What a call ends with when the plugin is not there, or dies."""


@dataclass(eq=False)
class Tenant:
    """A pod that was admitted.

    Attributes:
        todo: containers that have to start, the next one first.
        runs: those that run, each with its regions.
        busy: something happens to it.
    """

    pod: DemoPod
    known: FakePod
    todo: list[str]
    runs: dict[str, list[str]] = field(default_factory=dict)
    busy: bool = False


class Kubelet(KubeletDouble):
    """The double, which notes the devices that it asks something for.

    As the real one it admits one pod after the other, and lets go of devices under the same lock.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._lock = asyncio.Lock()
        self._holder: asyncio.Task[Any] | None = None
        self.touched: set[str] = set()
        self.calls = 0

    @contextlib.asynccontextmanager
    async def _alone(self) -> Any:
        task = asyncio.current_task()
        if self._holder is task:
            yield
            return
        async with self._lock:
            self._holder = task
            try:
                yield
            finally:
                self._holder = None

    async def admit(self, pod: DemoPod) -> None:
        async with self._alone():
            await super().admit(pod)

    async def free_inactive(self) -> None:
        async with self._alone():
            await super().free_inactive()

    def connection(self, resource: ResourceName) -> Connection:
        found = super().connection(resource)
        protocol = found.channel._protocol
        if protocol is not None and not hasattr(protocol.connection, "_transport"):
            # grpclib (0.4) fails with an AttributeError on a connection that was just lost.
            raise NoEndpointError(f"the plugin that registered {resource} is gone")
        return found

    def asks(self, ids: Any) -> None:
        self.touched.update(ids)
        self.calls += 1

    async def allocate(self, resource: ResourceName, ids: Any) -> Any:
        self.asks(ids)
        return await super().allocate(resource, ids)

    async def prestart(self, resource: ResourceName, ids: Any, *args: Any, **more: Any) -> None:
        self.asks(ids)
        await super().prestart(resource, ids, *args, **more)

    async def deallocate(self, resource: ResourceName, ids: Any) -> None:
        self.asks(ids)
        await super().deallocate(resource, ids)


def make_pod(rng: random.Random, number: int) -> DemoPod:
    """A pod of one of the kinds that there are."""

    def asks(n: str = "1") -> Mapping[str, str]:
        afu = rng.choice([AFU, AFU_2, AFU_3, ""])
        return request(afu, n=n) if afu else {"PATH": "/bin"}

    def fpga(
        name: str, env: Mapping[str, str], *, restartable: bool = False, **counts: int
    ) -> Container:
        devices = {KINDS[kind]: count for kind, count in (counts or {"regions": 1}).items()}
        return Container(name=name, devices=devices, env=env, restartable=restartable)

    both = dict(request(AFU)) | dict(request(AFU_3, interface=OTHER_ID, n="9"))
    other = dict(request(AFU_3, interface=OTHER_ID))
    init = fpga("first", asks())
    before, apps = rng.choice(
        [
            ((), (fpga("app", asks()),)),
            ((), (fpga("app", asks()),)),
            ((), (fpga("app", rng.choice([other, {}]), others=1),)),
            ((), (fpga("one", asks()), fpga("two", asks()))),
            ((init,), (fpga("app", asks()),)),
            ((init, fpga("side", asks(), restartable=True)), (fpga("app", asks()),)),
            ((), (fpga("app", {**asks("1"), **asks("2")}, regions=2),)),
            ((), (fpga("app", asks(), cards=1),)),
            ((fpga("first", asks(), cards=1),), (fpga("app", asks(), cards=1),)),
            ((), (fpga("app", both, regions=1, others=1),)),
        ]
    )
    return DemoPod(name=f"pod-{number}", init_containers=before, containers=apps)


class Node:
    """The node, and what kubelet knows.

    Args:
        rng: whatever is by chance.
        stock: kubelet is as shipped, else as extended by both KEPs.
        storms: the weather changes.
        only: the one weather that there is besides fair.
    """

    def __init__(self, rng: random.Random, *, stock: bool, storms: bool, only: str = "") -> None:
        self.rng = rng
        self.said: Counter[str] = Counter()
        self.only = only
        self.folder = Path(tempfile.mkdtemp(prefix="fpga-campaign-"))
        self.weather = Weather(self.folder, STORE) if storms else None
        self.state_dir = self.folder / "state"
        self.cgroups = self.folder / "cgroup" / "kubepods"
        self.cgroups.mkdir(parents=True)
        (self.cgroups.parent / "cgroup.controllers").write_text("cpu pids\n")
        self.server = PodsServer()
        self.kubelet = Kubelet(
            str(self.folder / "kubelet"),
            profile=STOCK if stock else EXTENDED,
            podresources_path=str(self.folder / "list.sock"),
            on_list=self.listed,
        )
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
                "PODRESOURCES_SOCKET": self.folder / "list.sock",
                "PODS_SOCKET": self.folder / "pods.sock",
                "CGROUP_ROOT": self.cgroups.parent,
                "HTTP_ADDRESS": "",
                "RECONCILE_INTERVAL": "0.02",
                "HEALTH_INTERVAL": "0.2",
            }.items()
        }
        self.tenants: list[Tenant] = []
        self.zombies: list[Tenant] = []
        self.admitted = 0
        self.plugin: Plugin | None = None
        self.wind = FAIR
        self.known = True
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

    # ---------------------------------------------------------------- what kubelet knows

    def owned(self) -> dict[str, str]:
        """Devices of pods that are there, the plugin's answer to Allocate in hand."""
        return {
            device: held.pod
            for held in self.kubelet.held.values()
            if held.pod in self.kubelet.pods
            for device in held.ids
        }

    def listed(self, new: DeviceList) -> None:
        """Judge a list as it comes; what is found ends the portion."""
        connection = self.kubelet.connections.get(new.resource)
        if connection is None or connection.stopped or self.found is not None:
            return  # kubelet's own doing, when the plugin is gone
        held = self.kubelet.held.values()
        mine = {
            device
            for one in held
            if one.resource == new.resource and one.pod in self.kubelet.pods
            for device in one.ids
        }
        # What was nobody's at the plugin's start, and what nobody has asked for since: between
        # the end of a pod and its release the plugin has to take its devices for owned.
        busy = {device for one in held for device in one.ids} | self.kubelet.touched | self.claimed
        if self.wind.forgets or not self.known:
            busy |= BLANKS.keys()  # a spoiled journal may show claims of any time
        try:
            self.checker.listed(new.ids, new.healthy, mine, busy, known=self.known)
        except Violation as error:
            self.found = error

    def all_known(self) -> bool:
        """Whether each owner's device is on its list and Healthy."""
        healthy = {device for each in self.kubelet.lists.values() for device in each.healthy}
        return set(self.owned()) <= healthy and all(map(self.serves, LISTED))

    def serves(self, resource: ResourceName) -> bool:
        connection = self.kubelet.connections.get(resource)
        return connection is not None and not connection.stopped and resource in self.kubelet.lists

    def regions(self, tenant: Tenant, container: str) -> list[str]:
        """In the order of docs/requests.md."""
        devices = self.kubelet.devices(tenant.pod, container).values()
        return sorted(
            region for region in BLANKS for ids in devices if {region, card_of(region)} & set(ids)
        )

    def wanted(self, tenant: Tenant, container: str) -> dict[str, str]:
        """What each region has to hold, by the rules of docs/requests.md."""
        env = tenant.pod.container(container).env
        wanted: dict[str, str] = {}
        for interface, blank in ((ID, BLANK), (OTHER_ID, OTHER_BLANK)):
            afus = [
                env[name.replace("_REGION_", "_BITSTREAM_ID_")]
                for name, value in sorted(env.items())
                if name.startswith("FPGA_REGION_") and value == interface
            ]
            regions = [r for r in self.regions(tenant, container) if BLANKS[r] == blank]
            padded = [*afus, *[blank] * len(regions)]
            wanted |= dict(zip(regions, padded, strict=False))
        return wanted

    # ---------------------------------------------------------------- pods

    def cgroup(self, tenant: Tenant) -> None:
        """Write the pod's cgroup as the kernel would have it."""
        path = self.cgroups / f"pod{tenant.pod.uid}"
        path.mkdir(exist_ok=True)
        (path / "new").write_text(f"populated {int(bool(tenant.runs))}\n")
        (path / "new").replace(path / "cgroup.events")

    def remove_cgroup(self, tenant: Tenant) -> None:
        """In one step as far as the plugin can see, as rmdir of a cgroup is."""
        path = self.cgroups / f"pod{tenant.pod.uid}"
        if path.exists():
            shutil.rmtree(path.rename(self.folder / f"gone-{tenant.pod.uid}"))

    async def admit(self) -> None:
        if len(self.tenants) >= AT_ONCE:
            return
        pod = make_pod(self.rng, self.admitted)
        known = FakePod(
            uid=pod.uid,
            name=pod.name,
            init={one.name: one.env for one in pod.init_containers},
            app={one.name: one.env for one in pod.containers},
        )
        known.sidecars = frozenset(one.name for one in pod.init_containers if one.restartable)
        tenant = Tenant(pod, known, [one.name for one in pod.all_containers], busy=True)
        self.cgroup(tenant)
        try:
            await self.kubelet.admit(pod)
        except (AdmissionError, GRPCError, *GONE):
            self.kubelet.pods.pop(pod.uid, None)  # kubelet rejects the pod
            self.remove_cgroup(tenant)
            return
        self.admitted += 1
        self.said["pods"] += 1
        self.server.pods[pod.uid] = known
        tenant.busy = False
        self.tenants.append(tenant)

    def pick(self, holds: Any = lambda _: True) -> Tenant | None:
        found = [tenant for tenant in self.tenants if not tenant.busy and holds(tenant)]
        return self.rng.choice(found) if found else None

    @contextlib.contextmanager
    def busy(self, tenant: Tenant) -> Any:
        tenant.busy = True
        try:
            yield
        finally:
            tenant.busy = False

    async def start(self) -> None:
        if (tenant := self.pick(lambda each: each.todo)) is not None:
            with self.busy(tenant):
                await self.start_next(tenant)

    async def start_next(self, tenant: Tenant) -> None:
        """PreStart for the pod's next container; OK and it runs, or ran."""
        name = tenant.todo[0]
        container = tenant.pod.container(name)
        if not all(map(self.serves, container.devices)):
            return
        wanted, begun = self.wanted(tenant, name), time.time()
        try:
            async with asyncio.timeout(0.03 if self.rng.random() < 0.1 else LIMIT):
                called = await self.kubelet.start_container(tenant.pod, name)
        except GRPCError as error:
            self.said[f"PreStart {error.status.name}"] += 1
            tenant.known.refused(name, error.message or "?")
            if "delete the pod" in (error.message or ""):
                await self.end_one(tenant)
            return
        except GONE:
            return
        if set(called) != set(container.devices):
            return
        self.said["containers"] += 1
        self.checker.began(tenant.pod.uid, wanted, whole=CARD in container.devices)
        tenant.todo.remove(name)
        tenant.runs[name] = list(wanted)
        self.cgroup(tenant)
        if name in tenant.known.init and name not in tenant.known.sidecars:
            await asyncio.sleep(self.rng.random() * 0.01)
            await self.container_ends(tenant, name)
            tenant.known.ended(name, started=begun + 1)
        else:
            tenant.known.runs(name, started=begun + 1)

    async def container_ends(self, tenant: Tenant, name: str) -> None:
        self.checker.ended(tenant.pod.uid, tenant.runs.pop(name))
        self.cgroup(tenant)
        with contextlib.suppress(GRPCError, *GONE):
            await self.kubelet.remove_container(tenant.pod, name)

    async def crash(self) -> None:
        """A container ends, and kubelet starts it again."""
        if (tenant := self.pick(lambda each: each.runs)) is not None:
            with self.busy(tenant):
                name = self.rng.choice(sorted(tenant.runs))
                await self.container_ends(tenant, name)
                tenant.known.ended(name, 1, started=time.time())
                tenant.todo.insert(0, name)

    async def end(self) -> None:
        if (tenant := self.pick()) is not None:
            with self.busy(tenant):
                await self.end_one(tenant)

    async def end_one(self, tenant: Tenant) -> None:
        """Its containers stop, then kubelet lets it go."""
        for name in list(tenant.runs):
            await self.container_ends(tenant, name)
        self.tenants.remove(tenant)
        self.server.pods.pop(tenant.pod.uid, None)
        self.remove_cgroup(tenant)
        with contextlib.suppress(GRPCError, *GONE):
            await self.kubelet.end_pod(tenant.pod)

    async def end_by_force(self) -> None:
        """Kubelet forgets the pod, and gives on its devices, while its processes run."""
        if (tenant := self.pick(lambda each: each.runs)) is not None:
            tenant.busy = True
            self.tenants.remove(tenant)
            self.zombies.append(tenant)
            self.server.pods.pop(tenant.pod.uid, None)
            with contextlib.suppress(GRPCError, *GONE):
                await self.kubelet.end_pod(tenant.pod)

    async def reap(self) -> None:
        if self.zombies:
            zombie = self.zombies.pop(self.rng.randrange(len(self.zombies)))
            for regions in zombie.runs.values():
                self.checker.ended(zombie.pod.uid, regions)
            zombie.runs.clear()
            self.remove_cgroup(zombie)

    async def pause(self) -> None:
        await asyncio.sleep(self.rng.random() * 0.03)

    async def restart_kubelet(self) -> None:
        await self.kubelet.restart()

    WHAT = (
        (admit, 20),
        (start, 40),
        (crash, 5),
        (end, 6),
        (end_by_force, 1.5),
        (reap, 5),
        (pause, 8),
        (restart_kubelet, 0.15),
    )

    async def hand(self) -> None:
        """One thing after another, until the plugin is dead."""
        steps, weights = zip(*self.WHAT, strict=True)
        while self.alive():
            (step,) = self.rng.choices(steps, weights)
            if all(map(self.serves, LISTED)):
                await step(self)
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
        self.kubelet.touched = set()
        self.claimed = self.recorded()
        self.plugin = Plugin(self.settings | env | self.wind.env)

    def recorded(self) -> set[str]:
        """Devices that journal or checkpoint show as somebody's, whoever is still there."""
        devices = {device for one in self.kubelet.held.values() for device in one.ids}
        path = self.folder / "kubelet" / "kubelet_internal_checkpoint"
        if path.exists():
            for entry in json.loads(path.read_text())["Data"]["PodDeviceEntries"] or ():
                devices.update(*entry["DeviceIDs"].values())
        return devices | set(self.snapshot.claims)

    async def life(self) -> None:
        """One life: pods meanwhile, SIGKILL, and what the dead plugin leaves is judged."""
        self.wind = wind(self.rng, self.only) if self.weather and not self.zombies else FAIR
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
        calls = self.kubelet.calls + self.rng.randint(2, self.rng.choice([8, 24, 60]))
        hands = [asyncio.create_task(self.hand()) for _ in range(HANDS)]
        try:
            while (
                self.alive() and self.kubelet.calls < calls and time.monotonic() < self.born + limit
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
        while not all(one.stopped for one in self.kubelet.connections.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)  # what kubelet has is of the life that has ended
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
        if not self.wind.forgets and self.known:
            touched = self.kubelet.touched | self.claimed
            self.checker.left_alone(self.idle, self.since, touched)
        if (self.state_dir / "journal.sqlite3").exists():
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
                raise Violation(f"{what}, which did not come about")
            await asyncio.sleep(0.01)

    async def peace(self) -> None:
        """Everything ends, and then nothing is lost: all is Healthy and blank, nobody's."""
        self.wind = FAIR
        self.launch()
        await self.until(self.all_known, "3: every owner's device Healthy after a restart")
        self.known = True
        while self.zombies:
            await self.reap()
        for tenant in list(self.tenants):
            await self.end_one(tenant)

        def healthy() -> bool:
            lists = self.kubelet.lists
            return all(
                self.serves(r) and len(lists[r].healthy) == count for r, count in LISTED.items()
            )

        await self.until(healthy, "4: all devices Healthy when nobody has any")
        self.checker.all_clean()
        await self.killed()
        self.judge()
        if self.snapshot.claims or self.idle != set(BLANKS):
            raise Violation(f"9: something is lost: {self.snapshot}")
        self.said["times that everything came back"] += 1


async def portion(
    seed: str, *, stock: bool, storms: bool, kills: int, until: float, only: str = ""
) -> tuple[Node, Violation | None]:
    """Lives until the number of kills or the time is reached; returns what was found."""
    node = Node(random.Random(seed), stock=stock, storms=storms, only=only)
    found: Violation | None = None
    this = asyncio.current_task()
    assert this is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, this.cancel)  # nothing may stay mounted
    try:
        await node.kubelet.start()
        async with serving(node.server, node.folder / "pods.sock"):
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
        try:
            await node.kubelet.stop()
        finally:
            node.close()
    return node, found
