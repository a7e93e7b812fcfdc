"""Lives of many claims by DRA: prepared, used by one and many pods, unprepared, forgotten.

A claim is what owns a device, so the checker hears of claims where it hears of pods at the other
API. Its containers start without a call, by the claim's file for the container runtime. Kubelet
prepares each claim again in each of its lives, asks again for what was not answered, and loses its
record. Claims are deleted while their pods run, and the scheduler gives their devices away; they
are allocated again under the same uid for another image; crowds of pods come and go. While the
device plugin API serves, or the driver has another name, no call is made: pods come, go and run.
"""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checker import Violation
from claim_kubelet import ClaimKubelet
from daemon_support import AFU, AFU_2, AFU_3, BLANK, OTHER_BLANK
from doubles.apiserver import ApiServerDouble, Reply, status
from doubles.xclbins import VADD
from dra_support import NAMESPACE, NODE, Claim, config, dra_name
from node import ALVEO_BLANK, BLANKS, LIMIT, Node, Side, regions_of

CARDS = ("0000-10-00.0", "0000-11-00.0", "0000-12-00.0", "0000-13-00.0")
IMAGES = {BLANK: (AFU, AFU_2, AFU_3), OTHER_BLANK: (AFU_3,), ALVEO_BLANK: (VADD,)}
DEVICES = {dra_name(device): device for device in (*BLANKS, *CARDS)}
CLAIMS = f"/apis/resource.k8s.io/v1/namespaces/{NAMESPACE}/resourceclaims"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
CROWD = 100
"""Pods that use one claim at once."""

ALWAYS = "00000000-0000-4000-8000-000000000000"
"""A pod that kubelet always runs: the plugin knows kubelet's cgroups by it."""


class GroupClaim(Claim):
    """Reserved for a group: the API server names none of its pods, only kubelet's record does."""

    def object(self) -> Any:
        made = super().object()
        group = {"apiGroup": "scheduling.k8s.io", "resource": "podgroups"}
        made["status"]["reservedFor"] = [{**group, "name": self.name, "uid": self.uid}]
        return made


@dataclass(eq=False)
class Tenant:
    """A claim that is allocated to this node, and its pods.

    Attributes:
        driver: under whose name.
        wanted: what its regions have to hold.
        whole: it has a card.
        pods: uids, each with one container.
        runs: those whose container runs.
        ready: kubelet has the driver's answer in its present life.
        prepared: it had one once.
        joined: a pod came that no call told of.
        ending: Unprepare was called.
        busy: something happens to it.
    """

    claim: Claim
    driver: str
    devices: list[str]
    wanted: Mapping[str, str]
    pods: list[str]
    runs: set[str] = field(default_factory=set)
    ready: bool = False
    prepared: bool = False
    joined: bool = False
    ending: bool = False
    busy: bool = False

    @property
    def whole(self) -> bool:
        return not BLANKS.keys() >= set(self.devices)


class ClaimSide(Side):
    """What claims have.

    Args:
        node: of which it is a side.

    Attributes:
        again_in: seconds from the driver's registration after which a kubelet that has restarted
            comes to the claims that it had prepared.
        again_from: when that is.
    """

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.kubelet = ClaimKubelet(self.folder)
        self.api = ApiServerDouble()
        self.api.objects = {
            CLAIMS: {},
            SLICES: {},
            "/api/v1/nodes": {NODE: {"metadata": {"name": NODE, "uid": "a-node"}}},
        }
        self.api.made = self.published
        node.cgroup(ALWAYS, runs=True)
        (self.folder / "pods" / ALWAYS).mkdir(parents=True)
        self.tenants: list[Tenant] = []
        self.zombies: list[Tenant] = []
        self.number = 0
        self.judging = False
        self.before: set[str] = set()
        self.again_in, self.again_from = 0.0, 0.0

    def settings(self) -> Mapping[str, str]:
        return {
            "FPGA_PLUGIN_KUBECONFIG": str(self.folder / "kubeconfig"),
            "NODE_NAME": NODE,
        }

    def records(self, how: str) -> None:
        self.kubelet.is_written(how)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with self.api:
            self.api.kubeconfig(self.folder)
            self.kubelet.start()
            try:
                yield
            finally:
                await self.kubelet.stop()

    # ---------------------------------------------------------------- what is known

    def everybody(self) -> list[Tenant]:
        return [*self.tenants, *self.zombies]

    def owned(self) -> dict[str, str]:
        return {
            device: tenant.claim.uid
            for tenant in self.tenants
            if tenant.prepared and not tenant.ending
            for device in tenant.devices
        }

    def holding(self) -> set[str]:
        return {device for tenant in self.everybody() for device in tenant.devices}

    def recorded(self) -> set[str]:
        return self.holding().union(*(one.devices for one in self.kubelet.record.values()))

    def claims(self) -> Collection[str]:
        return self.kubelet.record.keys()

    def exposed(self) -> bool:
        """Not even kubelet's record knows what they have."""
        return bool(self.zombies) or self.unrecorded()

    def unrecorded(self) -> bool:
        return any(
            tenant.prepared and not self.kubelet.names_devices_of(tenant.claim)
            for tenant in self.tenants
        )

    def mine(self) -> set[str]:
        """Devices that claims have under the driver's present name."""
        now = self.node.setup.prefix
        return {
            device
            for one in self.tenants
            if one.driver == now and one.prepared and not one.ending
            for device in one.devices
        }

    def all_known(self, *, contested: bool = False) -> bool:
        del contested
        assert self.node.plugin is not None
        # One that is ending may have ended, and nobody heard of it.
        there = {one.claim.uid for one in self.tenants if one.prepared and not one.ending}
        return (
            self.ready()
            and bool(self.node.plugin.logged("kubelet's record of claims read"))
            and {one for one in self.mine() if not self.checker.hangs(one)} <= self.offered()
            and there <= self.journal().claim_owners.keys()
        )

    def all_free(self) -> bool:
        if not self.ready() or self.offered() != {*BLANKS, *CARDS}:
            return False
        found = self.journal()  # slices come later than what they tell of
        clean = [one for one in found.regions.values() if one["condition"] == "BLANK"]
        return len(clean) == len(BLANKS) and not found.left()

    def standing(self) -> str:
        found = self.journal()
        return f"offered {sorted(self.offered())}, in the journal {found}"

    def ready(self) -> bool:
        driver = self.node.setup.prefix
        return self.kubelet.channel is not None and self.kubelet.driver == driver

    def asked(self, tenant: Tenant) -> bool:
        """Whether kubelet can ask the driver for its claim."""
        return self.serves and self.ready() and tenant.driver == self.node.setup.prefix

    def prefixes(self) -> set[str]:
        return {tenant.driver for tenant in self.everybody()}

    async def boots(self) -> None:
        for zombie in self.zombies:
            self.pods_end(zombie)
        for tenant in self.tenants:
            for pod in tuple(tenant.runs):
                self.stops(tenant, pod)
            for pod in tenant.pods:
                self.node.remove_cgroup(pod)
                self.node.cgroup(pod, runs=False)
        for file in self.folder.glob("cdi*/*"):  # they lie in memory
            file.unlink()
        await self.restarts()

    async def gone(self) -> None:
        """What the dead plugin still had on its way to the API server is not judged."""
        self.judging = False
        for _ in range(20):
            await asyncio.sleep(0)
            self.api.cut()

    def launched(self) -> None:
        for tenant in self.everybody():  # while no plugin runs
            if self.rng.random() < 0.1:
                self.run_or_stop(tenant)
            if tenant in self.tenants and tenant.ready and self.rng.random() < 0.05:
                self.comes(tenant, 1)
        self.before = self.mine()
        self.judging = self.serves

    # ---------------------------------------------------------------- ResourceSlices

    def offered(self) -> set[str]:
        """Devices that the scheduler may give out, by the slices that there are."""
        slices = self.api.objects[SLICES].values()
        return {
            DEVICES[one["name"]]
            for each in slices
            if each["spec"]["driver"] == self.node.setup.prefix
            for one in each["spec"].get("devices") or ()
            if not one.get("taints")
        }

    def published(self, item: Any) -> None:
        """Judge a slice as it comes; what is found ends the portion."""
        listed = item.get("spec", {}).get("devices")
        if item.get("kind") != "ResourceSlice" or not listed:
            return
        if not self.judging or self.node.found is not None:
            return
        devices = {DEVICES[one["name"]] for one in listed}
        well = {DEVICES[one["name"]] for one in listed if not one.get("taints")}
        # It was made up at any time since the last one.
        now = self.mine()
        mine, self.before = self.before & now, now
        try:
            self.checker.listed(devices, well, mine, self.node.busy, known=self.known)
        except Violation as error:
            self.node.found = error

    # ---------------------------------------------------------------- claims

    def free(self) -> list[str]:
        """What the scheduler has to give: it does not know of pods whose claims were deleted."""
        taken = {r for tenant in self.tenants for r in regions_of(tenant.devices)}
        if self.rng.random() < 0.9:
            taken |= self.node.beside()
        return [device for device in DEVICES.values() if taken.isdisjoint(regions_of([device]))]

    def make(self) -> Tenant | None:
        """A claim of one of the kinds that there are, as the scheduler allocates it."""
        rng, free = self.rng, self.free()
        regions = [device for device in free if device in BLANKS]
        cards = [device for device in free if device in CARDS]
        kind = rng.choice(["region", "region", "region", "two", "card"])
        if kind == "card" and cards:
            devices = [rng.choice(cards)]
        elif kind == "two" and len(regions) > 1:
            devices = rng.sample(regions, 2)
        elif regions:
            devices = [rng.choice(regions)]
        else:
            return None
        self.number += 1
        group = rng.random() < 0.4
        claim = (GroupClaim if group else Claim)(f"claim-{self.number}")
        driver = self.node.setup.prefix
        for number, device in enumerate(devices):
            claim.results += Claim("", device, request=f"r{number}").results
        claim.results = [one | {"driver": driver} for one in claim.results]
        tenant = Tenant(claim, driver, devices, {}, [], joined=group)
        self.asks_for(tenant)
        return tenant

    def asks_for(self, tenant: Tenant) -> None:
        """The scheduler allocates the claim, for images by chance and one pod."""
        wanted: dict[str, str] = {}
        tenant.claim.config = []
        for number, device in enumerate(tenant.devices):
            images = IMAGES[BLANKS[regions_of([device])[0]]]
            afu = self.rng.choice([*images, ""])
            if afu:
                one = config(requests=[f"r{number}"], bitstream=afu)
                one["opaque"]["driver"] = tenant.driver
                tenant.claim.config.append(one)
            wanted |= {region: afu or BLANKS[region] for region in regions_of([device])}
        tenant.wanted = wanted
        tenant.pods = [self.uid()]
        tenant.claim.pods = list(tenant.pods)
        self.put(tenant.claim)
        self.node.cgroup(tenant.pods[0], runs=False)

    def uid(self) -> str:
        return str(uuid.UUID(int=self.rng.getrandbits(128), version=4))

    def put(self, claim: Claim) -> None:
        """At the API server."""
        self.api.objects[CLAIMS][claim.name] = claim.object()

    def delete(self, claim: Claim) -> None:
        self.api.objects[CLAIMS].pop(claim.name, None)

    def pick(self, holds: Any = lambda _: True) -> Tenant | None:
        found = [tenant for tenant in self.tenants if not tenant.busy and holds(tenant)]
        return self.rng.choice(found) if found else None

    @contextlib.contextmanager
    def busy(self, *tenants: Tenant) -> Any:
        for tenant in tenants:
            tenant.busy = True
        try:
            yield
        finally:
            for tenant in tenants:
                tenant.busy = False

    async def admit(self) -> None:
        if len(self.tenants) < self.node.at_once and (tenant := self.make()) is not None:
            self.said["claims"] += 1
            self.said["pods"] += 1
            self.tenants.append(tenant)

    async def prepare(self) -> None:
        """Kubelet asks for what it has no answer for in this life; of one pod's claims at once."""

        if self.again_in and self.ready():
            self.again_in, self.again_from = 0.0, time.monotonic() + self.again_in

        def lacks(tenant: Tenant) -> bool:
            waits = tenant.prepared and time.monotonic() < self.again_from
            return self.asked(tenant) and not (tenant.ready or tenant.ending or waits)

        if (first := self.pick(lacks)) is None:
            return
        other = self.pick(lambda each: each is not first and lacks(each))
        together = [first, other] if other is not None and self.rng.random() < 0.3 else [first]
        with self.busy(*together):
            await self.prepare_these(together)

    async def prepare_these(self, tenants: list[Tenant]) -> None:
        for tenant in tenants:
            self.kubelet.keep(tenant.claim, tenant.driver, tenant.devices, tenant.pods)
            self.node.touched.update(tenant.devices)
        answers = await self.kubelet.prepare([tenant.claim for tenant in tenants], self.patience())
        for tenant, answer in zip(tenants, answers, strict=True):
            if answer is None:
                continue  # nobody hears of it
            self.node.calls += 1
            if answer.error:
                self.said["Prepare refused"] += 1
                continue
            names = sorted(DEVICES[one.device_name] for one in answer.devices)
            if names != sorted(tenant.devices):
                raise Violation(f"2: the answer for claim {tenant.claim.uid} names {names}")
            self.said["Prepare again" if tenant.prepared else "Prepare"] += 1
            self.node.allowed(f"claim {tenant.claim.uid}", tenant.wanted)
            tenant.ready = tenant.prepared = True
            self.checker.prepared(tenant.claim.uid, tenant.wanted, self.nodes(tenant))
            self.kubelet.keep(
                tenant.claim, tenant.driver, tenant.devices, tenant.pods, answer.devices
            )

    def patience(self) -> float:
        """Seconds that kubelet waits for an answer; its own are 45."""
        return self.rng.choice([0.03, 1, 5, 10])

    def nodes(self, tenant: Tenant, where: str = "cdi*") -> dict[str, str] | None:
        """Where the variables of the claim's file lead; None: there is none, and nothing starts."""
        name = f"k8s.{tenant.driver}-claim_{tenant.claim.uid}.json"
        files = [*self.folder.glob(f"{where}/{name}")]
        if not files:
            return None
        found = json.loads(files[0].read_text())
        lines = [line for one in found["devices"] for line in one["containerEdits"]["env"]]
        return dict(line.split("=", 1) for line in lines)

    def run_or_stop(self, tenant: Tenant, *, stops: bool = True) -> None:
        """A container of the claim starts, or ends where one `stops`: no call reports it."""
        pod = self.rng.choice(tenant.pods)
        if pod in tenant.runs:
            if stops:
                self.stops(tenant, pod)
            return
        if tenant.busy or tenant not in self.tenants or not tenant.ready:
            return
        nodes = self.nodes(tenant)
        if nodes is None and (not self.known or any(map(self.checker.hangs, tenant.devices))):
            return  # it was not adopted, or what does not answer was not as it was prepared
        self.checker.prepared(tenant.claim.uid, tenant.wanted, nodes)
        if not tenant.runs:
            self.checker.began(tenant.claim.uid, tenant.wanted, whole=tenant.whole)
        tenant.runs.add(pod)
        self.said["containers"] += 1
        self.node.cgroup(pod, runs=True)

    def stops(self, tenant: Tenant, pod: str) -> None:
        tenant.runs.remove(pod)
        if not tenant.runs:
            self.checker.ended(tenant.claim.uid, tenant.wanted)
        self.node.cgroup(pod, runs=False)

    async def container(self) -> None:
        stops = self.node.ends()
        if (tenant := self.pick(lambda each: each.ready or (stops and each.runs))) is not None:
            self.run_or_stop(tenant, stops=stops)

    async def join(self) -> None:
        """More pods of a claim: kubelet writes them down, and asks nothing."""
        most = self.rng.choice([3, 3, 3, CROWD])
        if (tenant := self.pick(lambda each: each.ready and len(each.pods) < most)) is not None:
            self.comes(tenant, self.rng.randint(1, most - len(tenant.pods)))

    def comes(self, tenant: Tenant, pods: int) -> None:
        uids = [self.uid() for _ in range(pods)]
        for uid in uids:
            self.node.cgroup(uid, runs=False)
        self.said["pods"] += pods
        tenant.joined = True
        self.used_by(tenant, [*tenant.pods, *uids])

    async def leave(self) -> None:
        """All pods of a claim end that run nothing, but one."""
        if (tenant := self.pick(lambda each: each.ready and len(each.pods) > 1)) is not None:
            ended = [uid for uid in tenant.pods if uid not in tenant.runs][1:]
            for uid in ended:
                self.node.remove_cgroup(uid)
            self.used_by(tenant, [uid for uid in tenant.pods if uid not in ended])

    def used_by(self, tenant: Tenant, pods: list[str]) -> None:
        tenant.pods, tenant.claim.pods = pods, list(pods)
        self.put(tenant.claim)
        self.kubelet.used(tenant.claim, pods)

    async def allocated_anew(self) -> None:
        """Kubelet loses sight of a claim whose pods have ended; it comes again, for other images.

        Its uid and devices are the same.
        """
        tenant = self.pick(lambda each: each.prepared and not each.runs and not each.ending)
        if tenant is not None and self.known and self.node.ends():
            self.said["allocated again"] += 1
            self.pods_end(tenant)
            self.kubelet.forget(tenant.claim)
            tenant.ready = tenant.prepared = False
            self.asks_for(tenant)

    async def end(self) -> None:
        early = self.rng.random() < 0.1
        if not self.node.ends():
            return
        if (tenant := self.pick(lambda each: each.prepared or early)) is not None:
            await self.end_one(tenant)

    async def end_one(self, tenant: Tenant) -> None:
        """Its containers stop, then kubelet asks for its end until it is answered."""
        with self.busy(tenant):
            self.pods_end(tenant)
            if self.rng.random() < 0.3:
                self.delete(tenant.claim)
            if await self.unprepare(tenant):
                self.tenants.remove(tenant)
                self.delete(tenant.claim)

    def pods_end(self, tenant: Tenant) -> None:
        for pod in tuple(tenant.runs):
            self.stops(tenant, pod)
        for pod in tenant.pods:
            self.node.remove_cgroup(pod)

    async def unprepare(self, tenant: Tenant) -> bool:
        """Whether kubelet is done with it; of what its record lacks it asks nothing."""
        # Before owners are known the answer says nothing: the claim's card is held back.
        known, uid = self.known, tenant.claim.uid
        tenant.ending, tenant.ready = True, False
        if uid not in self.kubelet.record:
            return True
        if not self.asked(tenant):
            return False
        before = self.journal()
        row = before.claim_owners.get(uid)
        # A journal that was lost was the only one to know another directory (docs/dra.md).
        file = "" if row is None else row.get("file", "")
        where = Path(file).parent.name or self.node.setup.cdi
        stood = f"{uid} (journal: {row}, {[before.regions.get(one) for one in tenant.wanted]})"
        self.node.touched.update(tenant.devices)
        answer = await self.kubelet.unprepare(tenant.claim, self.patience())
        if answer is None or answer.error:
            self.said["Unprepare to be repeated"] += 1
            return False
        self.said["Unprepare"] += 1
        self.node.calls += 1
        mine = set(tenant.wanted)
        for other in self.everybody():
            if other is not tenant:
                mine -= set(other.wanted)
        mine -= self.node.beside()
        # A journal that was set back may have another claim there, which is over. Until that has
        # ended nobody gets the region, and this one could not be adopted beside it.
        after = self.journal()
        mine -= set(regions_of(after.of_others(uid)))
        # A store that hung had no blank: such a region stays as it is, kept back by a taint. Its
        # scrub may have begun since the answer.
        mine -= (before.unblanked() | after.unblanked()) - self.offered()
        if known and tenant.prepared:
            self.checker.released(stood, mine, self.nodes(tenant, where))
        self.kubelet.forget(tenant.claim)
        return True

    async def end_by_force(self) -> None:
        """The claim is deleted, and its devices are given on, while its containers run."""
        if not self.node.setup.cgroups or not self.node.ends(0.2):
            return  # without cgroups kubelet's word alone would count
        if (tenant := self.pick(lambda each: each.runs and self.seen(each))) is None:
            return
        self.said["deleted by force"] += 1
        tenant.ready = False
        self.tenants.remove(tenant)
        self.zombies.append(tenant)
        self.delete(tenant.claim)
        if self.known and self.rng.random() < 0.5:
            with self.busy(tenant):
                await self.unprepare(tenant)  # to no end, unless another claim has its regions

    def seen(self, tenant: Tenant) -> bool:
        """Whether somebody still names its pods: kubelet's record, or the journal by their uids.

        Of a pod that came without a call the journal may not have been told.
        """
        return not tenant.joined or self.kubelet.names_devices_of(tenant.claim)

    async def reap(self) -> None:
        if self.zombies and self.node.ends():
            await self.reaps(self.rng.choice(self.zombies))

    async def reaps(self, zombie: Tenant) -> None:
        self.pods_end(zombie)
        if not zombie.busy:
            with self.busy(zombie):
                if await self.unprepare(zombie):
                    self.zombies.remove(zombie)

    async def restarts(self) -> None:
        """It asks for all claims again, sooner or later; it may have lost its record."""
        await self.kubelet.stop()
        self.again_in = self.rng.choice([0, 0, 0.3, 1])
        for tenant in self.everybody():
            tenant.ready = False
        # While pods are served by the device plugin API the API server is not asked: what kubelet's
        # record lacks is over once none of its processes runs.
        if self.serves and self.known and not self.zombies and self.rng.random() < 0.5:
            self.said["record of claims lost"] += 1
            self.kubelet.wipe()
        self.kubelet.start()

    async def api_stumbles(self) -> None:
        if not self.api.replies:
            refusal = Reply(503, status(503, "ServiceUnavailable"))
            self.api.replies.append(self.rng.choice([refusal, Reply(0)]))

    WHAT = (
        (admit, 20),
        (prepare, 40),
        (container, 25),
        (join, 4),
        (leave, 4),
        (end, 8),
        (end_by_force, 1.5),
        (reap, 6),
        (allocated_anew, 3),
        (Side.pause, 8),
        (Side.restart_kubelet, 0.3),
        (Side.hang, 5),
        (api_stumbles, 1),
    )
    BESIDE = ((container, 4), (join, 1), (leave, 1), (end, 0.1), (end_by_force, 0.2), (reap, 1))

    async def everything_ends(self) -> None:
        self.api.replies.clear()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LIMIT
        for zombie in self.zombies:
            if zombie.ending and zombie.driver != self.node.setup.prefix:
                # It has ended by the journal. If that is in doubt, kubelet's record keeps its card
                # back for as long as it runs, and the end of its neighbours with it.
                self.pods_end(zombie)
        await self.node.until(self.nobody_is_kept, "9: nothing is kept of pods that are gone")
        while mine := [one for one in self.everybody() if one.driver == self.node.setup.prefix]:
            for tenant in mine:
                if tenant in self.tenants:
                    await self.end_one(tenant)
                else:
                    await self.reaps(tenant)
            if self.node.found is not None:
                raise self.node.found
            if not self.node.alive() or loop.time() > deadline:
                raise Violation("9: all claims unprepared, which did not come about")
            await asyncio.sleep(0.01)

    def nobody_is_kept(self) -> bool:
        """Whether the journal has, of what claims have, no pod that parted and is gone.

        Who has left a group nobody says while kubelet's record lacks its claim.
        """
        mine = {uid for tenant in self.everybody() for uid in tenant.pods}
        unsaid = {one.claim.uid for one in self.tenants if not self.seen(one)}
        users = self.journal().users(but=unsaid) - mine
        return all((self.node.cgroups / f"pod{uid}").exists() for uid in users)
