"""Lives of many pods by the device plugin API.

Kubelet is the double of `fpga-plugin demo`, of either kind: extended (environment in PreStart,
PostStop, Deallocate) or stock. Pods are admitted, start and end, containers crash, pods are deleted
by force while their processes go on, static pods come again with their uid. After its restart
kubelet starts what crashed without PreStart, until the plugin has registered. While DRA serves,
pods go on, and end.
"""

import asyncio
import contextlib
import json
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from checker import Violation, devices_of
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
    request,
)
from doubles.xclbins import ALVEO, VADD
from grpclib.exceptions import GRPCError, StreamTerminatedError
from node import BLANKS, LIMIT, Node, Side, regions_of
from pods_support import FakePod, PodsServer, as_kubelet_has_it, serving

from fpga_plugin.demo.double import EXTENDED, STOCK, AdmissionError, KubeletDouble
from fpga_plugin.demo.plugins import DeviceList, NoEndpointError, PluginConnection
from fpga_plugin.demo.pod import DemoContainer, DemoPod
from fpga_plugin.kubernetes.kubelet.podsapi import SOURCE_ANNOTATION
from fpga_plugin.kubernetes.names import ResourceName

XRT_PREFIX = "fpga.amd.com"
ALVEO_REGIONS, ALVEO_CARDS = f"{XRT_PREFIX}/region-{ALVEO}", f"{XRT_PREFIX}/fpga-{ALVEO}"
KINDS = {"regions": REGIONS, "cards": CARDS, "others": OTHER_REGIONS, "alveos": ALVEO_REGIONS}
LISTED = {
    REGIONS: 4,
    CARDS: 2,
    OTHER_REGIONS: 2,
    OTHER_CARDS: 1,
    ALVEO_REGIONS: 1,
    ALVEO_CARDS: 1,
}
PAUSE = 0.15
"""Seconds that a kubelet is away when it restarts: a PR that has begun ends in less."""

GONE = (NoEndpointError, StreamTerminatedError, OSError, TimeoutError)
"""What a call ends with when the plugin is not there, or dies."""


@dataclass(eq=False)
class Tenant:
    """A pod that was admitted.

    Attributes:
        todo: containers that have to start, the next one first.
        runs: those that run, each with its regions.
        busy: something happens to it.
        started: a container of it did.
    """

    pod: DemoPod
    known: FakePod
    todo: list[str]
    runs: dict[str, list[str]] = field(default_factory=dict)
    busy: bool = False
    started: bool = False


def under(resource: str, prefix: str) -> ResourceName:
    """A resource's name where this prefix is set; that of Alveo cards' does not change."""
    if resource.startswith(f"{XRT_PREFIX}/"):
        return ResourceName(resource)
    return ResourceName(f"{prefix}/{resource.partition('/')[2]}")


class Kubelet(KubeletDouble):
    """The double, which reports (`asks`) for which devices it asks something.

    As the real one it admits one pod after the other, and lets go of devices under the same lock.

    Attributes:
        half: its checkpoint is only half there.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._lock = asyncio.Lock()
        self._holder: asyncio.Task[Any] | None = None
        self.asks: Callable[[Iterable[str]], None] = lambda _: None
        self.half = False

    def write_checkpoint(self) -> None:
        super().write_checkpoint()
        if self.half:
            path = Path(self.directory) / "kubelet_internal_checkpoint"
            os.truncate(path, path.stat().st_size // 2)

    async def restart(self) -> None:
        await self.stop()
        await asyncio.sleep(PAUSE)
        await self.start()

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

    def connection(self, resource: ResourceName) -> PluginConnection:
        found = super().connection(resource)
        protocol = found.channel._protocol
        if protocol is not None and not hasattr(protocol.connection, "_transport"):
            # grpclib (0.4) fails with an AttributeError on a connection that was just lost.
            raise NoEndpointError(f"the plugin that registered {resource} is gone")
        return found

    async def allocate(self, resource: ResourceName, ids: Any) -> Any:
        self.asks(ids)
        return await super().allocate(resource, ids)

    async def prestart(self, resource: ResourceName, ids: Any, *args: Any, **more: Any) -> None:
        self.asks(ids)
        await super().prestart(resource, ids, *args, **more)

    async def deallocate(self, resource: ResourceName, ids: Any) -> None:
        self.asks(ids)
        await super().deallocate(resource, ids)


def make_pod(rng: random.Random, number: int, prefix: str) -> DemoPod:
    """A pod of one of the kinds that there are."""

    def asks(n: str = "1") -> Mapping[str, str]:
        afu = rng.choice([AFU, AFU_2, AFU_3, ""])
        return request(afu, n=n) if afu else {"PATH": "/bin"}

    def fpga(
        name: str, env: Mapping[str, str], *, restartable: bool = False, **counts: int
    ) -> DemoContainer:
        devices = {
            under(KINDS[kind], prefix): count for kind, count in (counts or {"regions": 1}).items()
        }
        return DemoContainer(name=name, devices=devices, env=env, restartable=restartable)

    both = dict(request(AFU)) | dict(request(AFU_3, interface=OTHER_ID, n="9"))
    other = dict(request(AFU_3, interface=OTHER_ID))
    alveo = dict(request(VADD, interface=ALVEO))
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
            ((), (fpga("app", rng.choice([alveo, {}]), alveos=1),)),
            ((), (fpga("one", alveo, alveos=1), fpga("two", alveo, alveos=1))),
        ]
    )
    return DemoPod(name=f"pod-{number}", init_containers=before, containers=apps)


class PodSide(Side):
    """What pods have by the device plugin API.

    Args:
        node: of which it is a side.
        stock: kubelet is as shipped, else as extended by both KEPs.
    """

    def __init__(self, node: Node, *, stock: bool) -> None:
        super().__init__(node)
        self.server = PodsServer()
        self.kubelet = Kubelet(
            str(self.folder / "kubelet"),
            profile=STOCK if stock else EXTENDED,
            podresources_path=str(self.folder / "list.sock"),
        )
        self.kubelet.listeners.append(self.listed)
        self.kubelet.asks = node.asks
        self.tenants: list[Tenant] = []
        self.zombies: list[Tenant] = []
        self.static: list[DemoPod] = []
        self.admitted = 0

    def settings(self) -> Mapping[str, str]:
        return {
            "FPGA_PLUGIN_PODRESOURCES_SOCKET": str(self.folder / "list.sock"),
            "FPGA_PLUGIN_PODS_SOCKET": str(self.folder / "pods.sock"),
        }

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        await self.kubelet.start()
        try:
            async with serving(self.server, self.folder / "pods.sock"):
                yield
        finally:
            await self.kubelet.stop()

    def records(self, how: str) -> None:
        # Kubelet's directory is mounted always: its checkpoint is never away.
        self.kubelet.half = how == "half"
        self.kubelet.write_checkpoint()

    def resource(self, name: str) -> ResourceName:
        return under(name, self.node.setup.prefix)

    # ---------------------------------------------------------------- what kubelet knows

    def owned(self) -> dict[str, str]:
        return {
            device: held.pod
            for held in self.kubelet.held.values()
            if held.pod in self.kubelet.pods
            for device in held.ids
        }

    def listed(self, new: DeviceList) -> None:
        """Judge a list as it comes; what is found ends the portion."""
        connection = self.kubelet.connections.get(new.resource)
        if connection is None or connection.stopped or self.node.found is not None:
            return  # kubelet's own doing, when the plugin is gone
        mine = {
            device
            for one in self.kubelet.held.values()
            if one.resource == new.resource and one.pod in self.kubelet.pods
            for device in one.ids
        }
        if not mine <= set(new.healthy):
            mine -= self.contested()
        try:
            self.checker.listed(new.ids, new.healthy, mine, self.node.busy, known=self.known)
        except Violation as error:
            self.node.found = error

    def all_known(self, *, contested: bool = False) -> bool:
        lists = self.kubelet.lists
        anywhere = {device for each in lists.values() for device in each.healthy}
        # A journal that was put back may have it as an earlier owner's, by another name.
        ill = {
            device
            for one in self.kubelet.held.values()
            if one.pod in self.kubelet.pods
            for device in one.ids
            if not self.checker.hangs(device)
            and device not in (lists[one.resource].healthy if one.resource in lists else anywhere)
        }
        return self.ready() and (not ill or (contested and ill <= self.contested()))

    def contested(self) -> set[str]:
        """Devices of claims that the journal has, and kubelet's record of claims names.

        State directories were exchanged: each gave out what the other does not know.
        """
        recorded = {uid for side in self.node.sides.values() for uid in side.claims()}
        owners = self.journal().claim_owners
        return devices_of(owners[uid] for uid in owners.keys() & recorded)

    def standing(self) -> str:
        held = {one.ids: one.pod for one in self.kubelet.held.values()}
        healthy = {name: sorted(each.healthy) for name, each in self.kubelet.lists.items()}
        hung, journal = sorted(self.checker.hung), self.journal()
        return f"held {held}, healthy {healthy}, hung {hung}, in the journal {journal}"

    def has(self, resource: ResourceName) -> bool:
        connection = self.kubelet.connections.get(resource)
        return connection is not None and not connection.stopped and resource in self.kubelet.lists

    def regions(self, tenant: Tenant, container: str) -> list[str]:
        """In the order of docs/requests.md."""
        return regions_of(
            one for ids in self.kubelet.devices(tenant.pod, container).values() for one in ids
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

    def holding(self) -> set[str]:
        return {device for one in self.kubelet.held.values() for device in one.ids}

    def recorded(self) -> set[str]:
        devices = self.holding()
        path = self.folder / "kubelet" / "kubelet_internal_checkpoint"
        if path.exists() and not self.kubelet.half:
            for entry in json.loads(path.read_text())["Data"]["PodDeviceEntries"] or ():
                devices.update(*entry["DeviceIDs"].values())
        return devices

    def ready(self) -> bool:
        return all(self.has(self.resource(name)) for name in LISTED)

    async def gone(self) -> None:
        while not all(one.stopped for one in self.kubelet.connections.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    def exposed(self) -> bool:
        return bool(self.zombies)

    def all_free(self) -> bool:
        lists = self.kubelet.lists
        return all(
            self.has(name) and len(lists[name].healthy) == count
            for name, count in ((self.resource(name), count) for name, count in LISTED.items())
        )

    def prefixes(self) -> set[str]:
        return {self.node.setup.prefix} if self.tenants or self.zombies else set()

    async def boots(self) -> None:
        while self.zombies:
            self.reaps()
        for tenant in self.tenants:
            for name in list(tenant.runs):
                self.checker.ended(tenant.pod.uid, tenant.runs.pop(name))
                tenant.todo.insert(0, name)
            self.node.remove_cgroup(tenant.pod.uid)
            self.node.cgroup(tenant.pod.uid, runs=False)
        await self.restarts()

    async def everything_ends(self) -> None:
        while self.zombies:
            self.reaps()
        for tenant in list(self.tenants):
            await self.end_one(tenant)

    # ---------------------------------------------------------------- pods

    async def admit(self) -> None:
        if len(self.tenants) >= self.node.at_once:
            return
        pod = make_pod(self.rng, self.admitted, self.node.setup.prefix)
        static = self.rng.random() < 0.3
        if static and self.static:
            pod = replace(pod, uid=self.static.pop().uid)
            self.said["static pods that came again"] += 1
        known = as_kubelet_has_it(pod)
        known.annotations[SOURCE_ANNOTATION] = "file" if static else "api"
        tenant = Tenant(pod, known, [one.name for one in pod.all_containers], busy=True)
        self.node.cgroup(tenant.pod.uid, runs=bool(tenant.runs))
        try:
            await self.kubelet.admit(pod)
        except (AdmissionError, GRPCError, *GONE):
            self.kubelet.pods.pop(pod.uid, None)  # kubelet rejects the pod
            self.node.remove_cgroup(tenant.pod.uid)
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
        connections = [self.kubelet.connections.get(name) for name in container.devices]
        if not any(connections) and tenant.started:
            self.starts_unasked(tenant, name)
            return
        if not all(map(self.has, container.devices)):
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
        self.node.allowed(tenant.pod.uid, wanted)
        whole = any(name.endswith(CARDS.partition("/")[2]) for name in container.devices)
        self.checker.began(tenant.pod.uid, wanted, whole=whole)
        tenant.started = True
        tenant.todo.remove(name)
        tenant.runs[name] = list(wanted)
        self.node.cgroup(tenant.pod.uid, runs=bool(tenant.runs))
        if name in tenant.known.init and name not in tenant.known.sidecars:
            await asyncio.sleep(self.rng.random() * 0.01)
            await self.container_ends(tenant, name)
            tenant.known.ended(name, started=begun + 1)
        else:
            tenant.known.runs(name, started=begun + 1)

    def starts_unasked(self, tenant: Tenant, name: str) -> None:
        """After its own restart kubelet asks nobody: what crashed runs on what there is."""
        tenant.todo.remove(name)
        tenant.runs[name] = self.regions(tenant, name)
        self.checker.resumed(tenant.pod.uid, tenant.runs[name])
        self.node.cgroup(tenant.pod.uid, runs=True)
        tenant.known.runs(name, started=time.time() + 1)
        self.said["containers without PreStart"] += 1

    async def container_ends(self, tenant: Tenant, name: str) -> None:
        self.checker.ended(tenant.pod.uid, tenant.runs.pop(name))
        self.node.cgroup(tenant.pod.uid, runs=bool(tenant.runs))
        with contextlib.suppress(GRPCError, *GONE):
            await self.kubelet.remove_container(tenant.pod, name)

    async def crash(self) -> None:
        """A container ends, and kubelet starts it again."""
        if (tenant := self.pick(lambda each: each.runs)) is not None:
            with self.busy(tenant):
                await self.crashes(tenant)

    async def crashes(self, tenant: Tenant) -> None:
        name = self.rng.choice(sorted(tenant.runs))
        await self.container_ends(tenant, name)
        tenant.known.ended(name, 1, started=time.time())
        tenant.todo.insert(0, name)

    async def end(self) -> None:
        if self.node.ends() and (tenant := self.pick()) is not None:
            with self.busy(tenant):
                await self.end_one(tenant)

    async def end_one(self, tenant: Tenant) -> None:
        """Its containers stop, then kubelet lets it go."""
        for name in list(tenant.runs):
            await self.container_ends(tenant, name)
        self.tenants.remove(tenant)
        self.server.pods.pop(tenant.pod.uid, None)
        self.node.remove_cgroup(tenant.pod.uid)
        if tenant.known.annotations[SOURCE_ANNOTATION] == "file":
            self.static.append(tenant.pod)
        with contextlib.suppress(GRPCError, *GONE):
            await self.kubelet.end_pod(tenant.pod)

    async def end_by_force(self) -> None:
        """Kubelet forgets the pod, and gives on its devices, while its processes run."""
        if not self.node.setup.cgroups or not self.node.ends(0.2):
            return  # without cgroups kubelet's word alone would count
        # Of a pod that was never known, as kubelet's records could not be read, its word counts.
        known = {json.loads(key)["pod"] for key in self.journal().tenancies}
        if (tenant := self.pick(lambda each: each.runs and each.pod.uid in known)) is not None:
            tenant.busy = True
            self.tenants.remove(tenant)
            self.zombies.append(tenant)
            self.server.pods.pop(tenant.pod.uid, None)
            with contextlib.suppress(GRPCError, *GONE):
                await self.kubelet.end_pod(tenant.pod)

    async def reap(self) -> None:
        if self.zombies and self.node.ends():
            self.reaps()

    def reaps(self) -> None:
        zombie = self.zombies.pop(self.rng.randrange(len(self.zombies)))
        for regions in zombie.runs.values():
            self.checker.ended(zombie.pod.uid, regions)
        zombie.runs.clear()
        self.node.remove_cgroup(zombie.pod.uid)

    def launched(self) -> None:
        pass

    async def restarts(self) -> None:
        crashed = [one for one in self.tenants if one.runs and not one.busy]
        await self.kubelet.restart()
        for tenant in crashed:
            if tenant in self.tenants and tenant.runs and not tenant.busy:
                with self.busy(tenant):
                    await self.crashes(tenant)
                    await self.start_next(tenant)

    WHAT = (
        (admit, 20),
        (start, 40),
        (crash, 5),
        (end, 6),
        (end_by_force, 1.5),
        (reap, 5),
        (Side.pause, 8),
        (Side.restart_kubelet, 0.3),
        (Side.hang, 5),
    )
    BESIDE = ((crash, 2), (end, 1), (end_by_force, 0.3), (reap, 3))
