"""A stock kubelet's random life: pods by the hundred, and everything around them failing at times.

Kubelet, its checkpoint, PodResources and the Pods API are the double's; the plugin is a process of
its own. What has to hold is known from kubelet's side alone: which container holds which device,
what it asked for, which processes still run. Three things are watched: a started container's
regions hold exactly what it asked for, and nothing else changes them while it runs; no region goes
from one pod to the next without having been blank; at the end nothing is lost.
"""

import asyncio
import contextlib
import os
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from daemon_support import (
    AFU,
    AFU_2,
    AFU_3,
    BLANK,
    CARDS,
    ID,
    LIMIT,
    OTHER_BLANK,
    OTHER_ID,
    OTHER_REGIONS,
    REGIONS,
    Node,
    request,
)
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError
from pods_support import FakePod, PodsServer, as_kubelet_has_it, serving

from fpga_plugin.demo.double import STOCK, AdmissionError, KubeletDouble
from fpga_plugin.demo.plugins import NoEndpointError
from fpga_plugin.demo.pod import DemoContainer, DemoPod
from fpga_plugin.kubernetes.names import ResourceName

SOAK = os.environ.get("HYPOTHESIS_PROFILE") == "soak"
PODS = 500 if SOAK else 60
"""In each walk."""

BEGIN = int(os.environ.get("SEED", "20261121"))
SEEDS = range(BEGIN, BEGIN + (10 if SOAK else 1))

AT_ONCE = 9
INTERVAL = 0.02
TRIES = 40
"""Of a container's start in peace: kubelet's tries, which come ten seconds apart."""

REGION, CARD, OTHER = map(ResourceName, (REGIONS, CARDS, OTHER_REGIONS))
RESOURCES = {REGION: 4, CARD: 2, OTHER: 2}
BLANKS = {ID: BLANK, OTHER_ID: OTHER_BLANK}
CHECKPOINT = "kubelet_internal_checkpoint"


@dataclass(eq=False)
class Tenant:
    """A pod that was admitted.

    Attributes:
        todo: containers that have to start, the next one first.
        runs: containers that run.
        doomed: its containers may never start again, and are refused with a reason.
    """

    pod: DemoPod
    known: FakePod
    todo: list[str]
    runs: set[str] = field(default_factory=set)
    doomed: str = ""


def fpga(
    name: str, env: Mapping[str, str], *, restartable: bool = False, **counts: int
) -> DemoContainer:
    named = {"regions": REGION, "cards": CARD, "others": OTHER}
    devices = {named[kind]: count for kind, count in (counts or {"regions": 1}).items()}
    return DemoContainer(name=name, devices=devices, env=env, restartable=restartable)


def make_pod(rng: random.Random, number: int) -> DemoPod:
    """A pod of one of the kinds that there are; its requests are by chance."""

    def asks(n: str = "1") -> dict[str, str]:
        afu = rng.choice([AFU, AFU_2, AFU_3, ""])
        return request(afu, n=n) if afu else {"PATH": "/bin"}

    def init(name: str) -> DemoContainer:
        return fpga(name, asks())

    kinds: list[Callable[[], tuple[tuple[DemoContainer, ...], tuple[DemoContainer, ...]]]] = [
        lambda: ((), (fpga("app", asks()),)),
        lambda: ((), (fpga("one", asks()), fpga("two", asks()))),
        lambda: ((init("first"),), (fpga("app", asks()),)),
        lambda: ((init("first"), init("second")), (fpga("app", asks()),)),
        lambda: ((init("first"), fpga("side", asks(), restartable=True)), (fpga("app", asks()),)),
        lambda: ((), (fpga("app", asks("1") | asks("2"), regions=2),)),
        lambda: ((), (fpga("app", asks(), cards=1),)),
        lambda: ((init_card("first"),), (fpga("app", asks(), cards=1),)),
        lambda: (
            (),
            (
                fpga(
                    "app",
                    request(rng.choice([AFU, AFU_2])) | request(AFU_3, interface=OTHER_ID, n="9"),
                    regions=1,
                    others=1,
                ),
            ),
        ),
    ]

    def init_card(name: str) -> DemoContainer:
        return fpga(name, asks(), cards=1)

    before, apps = rng.choice(kinds)()
    return DemoPod(name=f"pod-{number}", init_containers=before, containers=apps)


class Walk:
    """The walk, and what is known.

    Attributes:
        tenants: pods that kubelet knows.
        zombies: pods that were deleted by force while their containers ran.
        expected: what a region has to hold, and for whom; for as long as a container runs on it.
    """

    def __init__(self, node: Node, seed: int) -> None:
        self.rng = random.Random(seed)
        self.node = node
        self.server = PodsServer()
        self.double = KubeletDouble(
            str(node.kubelet_dir),
            profile=STOCK,
            podresources_path=str(node.folder / "list.sock"),
        )
        self.cgroups = node.folder / "cgroup"
        (self.cgroups / "kubepods").mkdir(parents=True)
        (self.cgroups / "cgroup.controllers").write_text("cpu pids\n")
        self.tenants: list[Tenant] = []
        self.zombies: list[Tenant] = []
        self.expected: dict[str, tuple[str, str]] = {}
        self.admitted = 0
        self.said: Counter[str] = Counter()
        self.blank_at_death: list[set[str]] = []
        self.away = False
        self.steps: dict[Callable[[], Awaitable[None]], float] = {
            self.admit: 14,
            self.start: 26,
            self.start_several: 4,
            self.crash: 3,
            self.end: 8,
            self.end_by_force: 1,
            self.reap: 2,
            self.pause: 4,
            self.settle: 0.3,
            self.kill: 0.2,
            self.kill_while_one_starts: 0.3,
            self.come_back: 3,
            self.restart_kubelet: 0.4,
            self.restart_both: 0.1,
            self.restart_kubelet_while_one_starts: 0.2,
            self.lose_the_plugin: 0.3,
            self.spoil_checkpoint: 0.4,
            self.mend_checkpoint: 2,
            self.silence_pods_api: 0.5,
            self.silence_podresources: 0.5,
            self.hear_again: 3,
        }

    async def run(self) -> None:
        self.node.start()
        await self.double.start()
        try:
            async with serving(self.server, self.node.folder / "pods.sock"):
                await self.all_healthy()
                while self.admitted < PODS:
                    (step,) = self.rng.choices(list(self.steps), list(self.steps.values()))
                    self.said[step.__name__] += 1
                    await step()
                    self.check()
                await self.finish()
        finally:
            # The plugin first: connections that it makes meanwhile would outlive the loop.
            if self.node.plugin.process.poll() is None:
                await asyncio.to_thread(self.node.plugin.kill)
            for _ in range(50):
                await asyncio.sleep(0)  # what it had begun to send is accepted, and its end read
            await self.double.stop()

    # ---------------------------------------------------------------- what holds

    def check(self) -> None:
        """Nobody but its own PreStarts changes what a running container's region holds."""
        state = self.node.state()
        for region, (afu, who) in self.expected.items():
            assert state[region]["afu_id"] == afu, f"{region} of {who}"
        holders: dict[str, Tenant] = {}
        for tenant in self.tenants:
            for region in self.regions(tenant):
                assert holders.setdefault(region, tenant) is tenant, f"{region} has two owners"

    def regions(self, tenant: Tenant, container: str = "") -> list[str]:
        """Regions that a pod, or one of its containers, holds, whole cards resolved."""
        ids = {
            device
            for (uid, name, _), held in self.double.held.items()
            if uid == tenant.pod.uid and container in {"", name}
            for device in held.ids
        }
        return sorted(r for r in self.node.state() if r in ids or r.rpartition("-p")[0] in ids)

    def wanted(self, tenant: Tenant, container: str) -> dict[str, str]:
        """What each region of a container has to hold, by the rules of the requests."""
        env = tenant.pod.container(container).env
        wanted: dict[str, str] = {}
        for interface, blank in BLANKS.items():
            afus = [
                env[f"FPGA_BITSTREAM_ID_{name.removeprefix('FPGA_REGION_')}"]
                for name, value in sorted(env.items())
                if name.startswith("FPGA_REGION_") and value == interface
            ]
            regions = [
                r
                for r in self.regions(tenant, container)
                if (r[:10] == "0000-12-00") == (interface == OTHER_ID)
            ]
            wanted |= dict(zip(regions, [*afus, *[blank] * len(regions)], strict=False))
        return wanted

    # ---------------------------------------------------------------- pods

    def cgroup(self, tenant: Tenant) -> Path:
        return self.cgroups / "kubepods" / f"pod{tenant.pod.uid}"

    def populate(self, tenant: Tenant) -> None:
        """Write the pod's cgroup as the kernel would have it."""
        path = self.cgroup(tenant)
        path.mkdir(exist_ok=True)
        (path / "new").write_text(f"populated {int(bool(tenant.runs))}\n")
        (path / "new").replace(path / "cgroup.events")

    def remove_cgroup(self, tenant: Tenant) -> None:
        path = self.cgroup(tenant)
        if path.exists():
            # In one step as far as the plugin can see, as rmdir of a cgroup is.
            gone = path.rename(self.cgroups.parent / f"gone-{tenant.pod.uid}")
            (gone / "cgroup.events").unlink()
            gone.rmdir()

    async def admit(self) -> None:
        if len(self.tenants) >= AT_ONCE:
            return
        pod = make_pod(self.rng, self.admitted)
        known = as_kubelet_has_it(pod)
        tenant = Tenant(pod, known, [one.name for one in pod.all_containers])
        try:
            await self.double.admit(pod)
        except AdmissionError as error:
            self.note(error)
            if error.call is not None:
                self.check_refusal(error.call)
            return
        except (StreamTerminatedError, OSError):
            self.double.pods.pop(pod.uid)  # the plugin died: kubelet rejects the pod
            return
        self.admitted += 1
        self.server.pods[pod.uid] = known
        self.tenants.append(tenant)
        self.populate(tenant)

    def note(self, error: Exception) -> None:
        message = error.message if isinstance(error, GRPCError) else str(error)
        self.said[re.sub(r"[0-9a-f-]{36}", "...", message or "?")[:72]] += 1

    def pick(self, holds: Callable[[Tenant], object] = lambda _: True) -> Tenant | None:
        found = [tenant for tenant in self.tenants if holds(tenant)]
        return self.rng.choice(found) if found else None

    async def start(self) -> None:
        if (tenant := self.pick(lambda each: each.todo)) is not None:
            await self.start_next(tenant)

    async def start_several(self) -> None:
        """As kubelet does: each pod has a worker of its own."""
        waiting = [tenant for tenant in self.tenants if tenant.todo]
        await asyncio.gather(*map(self.start_next, waiting[:4]))

    async def start_next(self, tenant: Tenant) -> bool:
        """Start a pod's next container; returns whether it runs, or ran."""
        name = tenant.todo[0]
        wanted = self.wanted(tenant, name)
        for region in wanted:
            if self.expected.get(region, ("", tenant.pod.name))[1] == tenant.pod.name:
                self.expected.pop(region, None)
        begun = time.time()
        try:
            called = await self.double.start_container(tenant.pod, name)
        except NoEndpointError:
            return False
        except (StreamTerminatedError, OSError):
            return False  # the plugin died, or kubelet did
        except GRPCError as error:
            self.refused(tenant, name, error)
            return False
        if set(called) == set(tenant.pod.container(name).devices):
            state = self.node.state()
            for region, afu in wanted.items():
                assert state[region]["afu_id"] == afu, f"{region} of {tenant.pod.name}/{name}"
                self.expected[region] = (afu, tenant.pod.name)
        tenant.doomed = ""
        tenant.todo.remove(name)
        plain = name in tenant.known.init and name not in tenant.known.sidecars
        if plain:
            tenant.known.ended(name, started=begun + 1)
            for region in wanted:
                self.expected.pop(region, None)
        else:
            tenant.known.runs(name, started=begun + 1)
            tenant.runs.add(name)
            self.populate(tenant)
        return True

    def refused(self, tenant: Tenant, name: str, error: GRPCError) -> None:
        self.note(error)
        message = error.message or ""
        if message:
            tenant.known.refused(name, message)
        self.check_refusal(error)
        if "delete the pod" in message:
            tenant.doomed = message

    def check_refusal(self, error: GRPCError) -> None:
        """Not now, or not any more: all requests are right, and no hardware fails."""
        assert error.status in {Status.UNAVAILABLE, Status.FAILED_PRECONDITION}, error.message

    async def crash(self) -> None:
        """A container ends, and kubelet starts it again."""
        tenant = self.pick(lambda each: each.runs)
        if tenant is None:
            return
        name = self.rng.choice(sorted(tenant.runs))
        tenant.runs.discard(name)
        tenant.known.ended(name, 1, started=time.time())
        tenant.todo.insert(0, name)
        self.populate(tenant)

    async def end(self) -> None:
        if (tenant := self.pick()) is not None:
            self.end_one(tenant)
            await self.double.end_pod(tenant.pod)

    def end_one(self, tenant: Tenant) -> None:
        """Its containers stop, then kubelet lets it go."""
        self.forget(tenant)
        tenant.runs.clear()
        self.remove_cgroup(tenant)

    def forget(self, tenant: Tenant) -> None:
        self.tenants.remove(tenant)
        self.server.pods.pop(tenant.pod.uid, None)
        if tenant not in self.zombies:
            self.let_go(tenant)

    def let_go(self, tenant: Tenant) -> None:
        for region in [r for r, (_, who) in self.expected.items() if who == tenant.pod.name]:
            del self.expected[region]

    async def end_by_force(self) -> None:
        """Kubelet forgets the pod at once, and gives on its devices, while its processes run."""
        tenant = self.pick(lambda each: each.runs)
        if tenant is not None:
            self.zombies.append(tenant)
            self.forget(tenant)
            await self.double.end_pod(tenant.pod)

    async def reap(self) -> None:
        if self.zombies:
            zombie = self.zombies.pop(self.rng.randrange(len(self.zombies)))
            self.let_go(zombie)
            zombie.runs.clear()
            self.remove_cgroup(zombie)

    # ---------------------------------------------------------------- accidents

    async def died(self) -> None:
        """The plugin is killed; the partial reconfiguration that it began completes."""
        await asyncio.to_thread(self.node.plugin.kill)
        self.away = True
        blank = {r for r, is_ in self.node.state().items() if is_["afu_id"] in BLANKS.values()}
        self.blank_at_death.append(blank)

    async def kill(self) -> None:
        if not self.away:
            await self.died()

    async def come_back(self) -> None:
        if self.away:
            self.node.start()
            self.away = False

    @contextlib.asynccontextmanager
    async def one_starts(self):
        """Something happens at a random moment of a container's start."""
        tenant = self.pick(lambda each: each.todo)
        if tenant is None:
            yield
            return
        starting = asyncio.create_task(self.start_next(tenant))
        await asyncio.sleep(self.rng.random() * 0.02)
        yield
        await starting

    async def kill_while_one_starts(self) -> None:
        if not self.away:
            async with self.one_starts():
                await self.died()
            await self.come_back()

    async def restart_kubelet(self) -> None:
        await self.double.restart()

    async def restart_kubelet_while_one_starts(self) -> None:
        async with self.one_starts():
            await self.double.stop()
        await self.double.start()

    async def restart_both(self) -> None:
        await self.double.stop()
        await self.kill()
        if self.rng.random() < 0.5:
            await self.come_back()
        await self.double.start()

    async def lose_the_plugin(self) -> None:
        """Kubelet forgets a resource's devices, and the stream stays open."""
        for resource, listed in self.double.lists.items():
            self.double.lists[resource] = replace(listed, healthy=frozenset())

    async def spoil_checkpoint(self) -> None:
        (self.node.kubelet_dir / CHECKPOINT).write_text('{"Data": {"PodDevice')

    async def mend_checkpoint(self) -> None:
        self.double.write_checkpoint()

    async def silence_pods_api(self) -> None:
        self.server.error = GRPCError(Status.FAILED_PRECONDITION, "kubelet is starting")

    async def silence_podresources(self) -> None:
        error = GRPCError(Status.RESOURCE_EXHAUSTED, "rejected by rate limit")
        self.double.podresources_error = error

    async def hear_again(self) -> None:
        self.server.error = self.double.podresources_error = None

    async def pause(self) -> None:
        """Let the plugin do what it does by itself."""
        await asyncio.sleep(self.rng.random() * 3 * INTERVAL)

    # ---------------------------------------------------------------- peace

    async def peace(self) -> None:
        await self.come_back()
        await self.hear_again()
        await self.mend_checkpoint()
        while self.zombies:
            await self.reap()
        async with asyncio.timeout(LIMIT):
            while not all(map(self.serves, RESOURCES)):  # noqa: ASYNC110  # has no event
                await asyncio.sleep(INTERVAL)

    def serves(self, resource: ResourceName) -> bool:
        connection = self.double.connections.get(resource)
        return connection is not None and not connection.stopped

    async def settle(self) -> None:
        """With nothing wrong every container starts, unless its pod has to be deleted."""
        await self.peace()
        for tenant in tuple(self.tenants):
            tries = 0
            while tenant.todo and not (tenant.doomed and tries > 2):
                if not await self.start_next(tenant):
                    tries += 1
                    await asyncio.sleep(INTERVAL)
                assert tries < TRIES, (tenant.pod.name, tenant.known.states)
            if tenant.todo:
                self.said["pods that have to be deleted"] += 1

    async def finish(self) -> None:
        """Everything is mended and given back: then nothing is lost."""
        await self.settle()
        while self.tenants:
            await self.end()
        await self.all_healthy()
        state = self.node.state()
        assert {is_["afu_id"] for is_ in state.values()} == set(BLANKS.values())
        await asyncio.to_thread(self.node.plugin.stop)
        for life in self.node.lives:
            assert [line for line in life.lines if "exception" in line or "text" in line] == []
        self.check_handovers()

    async def all_healthy(self) -> None:
        for resource, count in RESOURCES.items():
            await self.double.wait_for(
                resource, lambda listed, n=count: len(listed.healthy) == n, timeout=LIMIT
            )

    def check_handovers(self) -> None:
        """Between two pods a region was blank: by what the plugin did, or as it was seen."""
        owner: dict[str, str] = {}
        blank: set[str] = set()
        handovers = 0
        for number, life in enumerate(self.node.lives):
            if number:
                blank = set(self.blank_at_death[number - 1])
            for line in life.lines:
                if line["event"] in {"region scrubbed", "region prepared"}:
                    if "program blank" in line["steps"] and line["error"] is None:
                        blank.add(line["region"])
                elif line["event"] == "prepared":
                    for region in line["bitstreams"]:
                        if owner.get(region, line["pod"]) != line["pod"]:
                            assert region in blank, (region, owner[region], line)
                            handovers += 1
                        owner[region] = line["pod"]
                        blank.discard(region)
        self.said["handovers"] = handovers


# Python 3.11 drops a connection that it accepted while its server closes (Server._attach asserts).
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_no_region_is_given_out_dirty_lost_or_programmed_with_anothers_request(seed: int) -> None:
    with Node(f"2x2,1x2@{OTHER_ID}") as node:
        node.set(
            pods_socket=str(node.folder / "pods.sock"),
            podresources_socket=str(node.folder / "list.sock"),
            cgroup_root=str(node.folder / "cgroup"),
            reconcile_interval=str(INTERVAL),
            simulated_pr_seconds="0.002",
        )
        walk = Walk(node, seed)
        try:
            asyncio.run(walk.run())
        finally:
            print(f"seed {seed}, {walk.admitted} pods")  # noqa: T201  # pytest shows it
            for what, times in sorted(walk.said.items()):
                print(f"{times:6d} {what}")  # noqa: T201  # the same
