"""What kubelet does by the device plugin API: its lives, and the claims that it makes and ends."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from msgspec import UNSET

from fpga_plugin.allocation.journal.records import Change, Claim, Debug, Epoch, Tenancy
from fpga_plugin.allocation.names import (
    DELETE_THE_POD,
    grants_among,
    is_function,
    names_kind_of,
)
from fpga_plugin.allocation.naming import Naming
from fpga_plugin.allocation.obstacles import ANOTHER_POD, Kind, Obstacles, Stops
from fpga_plugin.allocation.state import State
from fpga_plugin.allocation.step import WORKED_ON, Step
from fpga_plugin.errors import RefusedError
from fpga_plugin.ids import CardId, DeviceId, PodUid, ResourceName
from fpga_plugin.kubernetes.cgroup import Cgroup


class Allocations:
    """The ledger's steps on the side of kubelet."""

    def __init__(self, state: State, obstacles: Obstacles, naming: Naming) -> None:
        self._state = state
        self._obstacles = obstacles
        self._naming = naming

    def kubelet_epoch(self, epoch: str) -> None:
        """A life of kubelet, which may be another than before.

        Between its start and our registration kubelet starts containers without PreStart, so every
        claim may have been used, and PostStops of before cannot be counted any more. Holds even if
        it cannot be written.
        """
        state = self._state
        if epoch == state.epoch:
            return
        step = Step(
            state, Change(epochs={Epoch.KUBELET: epoch}, strays=dict.fromkeys(state.strays, 0))
        )
        for device, claim in state.claims.items():
            if not claim.exposed:
                step.change.claims[device] = replace(claim, exposed=True)
            step.use(state.tenancies.users(claim))
        step.commit()

    @property
    def sends_env(self) -> bool:
        """Whether this kubelet is known to send the environment in PreStart."""
        return bool(self._state.env_epoch) and self._state.env_epoch == self._state.epoch

    def env_seen(self) -> None:
        """This kubelet sent a non-empty environment."""
        if not self.sends_env:
            self._state.commit(Change(epochs={Epoch.ENVIRONMENT: self._state.epoch}))

    def allocate(self, resource: ResourceName, ids: Sequence[str]) -> tuple[Claim, ...]:
        """Grant devices: all of them, or none.

        Of a device that is owned under the same resource: without a PreStart since the last
        Allocate this is the same pod's next container, or the pod never started; with one it is an
        implied release of exactly this device, and PreStart sorts out the rest.

        Raises:
            UnknownDeviceError: no such device.
            RefusedError: an obstacle stands against one of them.
            JournalError: nothing was granted.
        """
        devices = self._naming.check_devices(resource, ids)
        self._state.activity.update(devices)
        step = Step(self._state)
        implied = 0
        granted: list[Claim] = []
        for device in devices:
            held = self._state.claims.get(device)
            self._obstacles.check(device, Stops.ALLOCATE if held is None else Stops.REPEAT)
            if held is not None and not held.touched and not held.exposed:
                granted.append(self._grant_again(step, held))
                continue
            if held is not None:
                self._check_name(device, resource)
                step.release(held)
                implied += 1
            regions = self._obstacles.regions_of(device)
            grants = {region.id: region.grant for region in regions}
            strays = step.strays(device)
            granted.append(step.grant(device, resource, grants, [None], prestarts=strays))
        nodes = [node for claim in granted for _, node in claim.nodes]
        if len(set(nodes)) < len(nodes):
            raise RefusedError(
                f"{', '.join(devices)} show the same device node: device numbers are changing",
                hint=ANOTHER_POD,
            )
        step.commit()
        self._state.ends["implied"] += implied
        return tuple(granted)

    def _grant_again(self, step: Step, held: Claim) -> Claim:
        """A claim of which nothing began: to the same pod, or to another after one that failed.

        Raises:
            RefusedError: its nodes are other devices' by now; the claim is ended.
        """
        try:
            self._obstacles.check_grants(held)
        except RefusedError:
            # Whoever was given the old nodes could never start, nor can whoever shares them;
            # kept, the claim would refuse every later pod too.
            self.release([held.device])
            raise
        if held.pod is not None:  # whose it is now has to be learnt again
            users = self._state.tenancies.users(held)
            step.change.tenancies |= dict.fromkeys((one.key for one in users), None)
            held = step.change.claims[held.device] = replace(held, pod=None)
            step.begin(held, [None], used=False)
        return held

    def _check_name(self, device: DeviceId, resource: ResourceName) -> None:
        """Whether another pod may have a device under the name by which its owner has it.

        Kubelet gave it from the list of before. Given again under it, claim after claim would keep
        the former name, or a meaning that an alias has no more, for as long as pods ask for it.

        Raises:
            RefusedError: regions keep their functions since, or it is given out under another name.
        """
        if self._naming.serves_functions and not is_function(resource):
            raise RefusedError(
                f"{resource} is left to the pods that have it: regions are handed over with the"
                " functions that are on them (FPGA_PLUGIN_ADVERTISE=af)",
                hint="ask for the function's resource, which begins with af-",
            )
        present = self._naming.present_resource(device)
        if present not in {None, resource}:
            raise RefusedError(
                f"{resource} is left to the pods that have it: {device} is given out as {present}",
                hint=f"ask for {present}",
            )

    def adopt(
        self,
        resource: ResourceName,
        device: DeviceId,
        pod: PodUid | None,
        env: Mapping[str, str],
    ) -> Claim:
        """Make the claim that kubelet's records show and the ledger lacks (a lost journal).

        Args:
            resource: under which kubelet has it.
            device: which; its card need not be there.
            pod: whose.
            env: the variables that the pod was given, `FPGA_DEVICE_<REGION ID>` among them; where
                kubelet kept none, its regions' present grants are taken for it.

        Raises:
            RefusedError: it conflicts with what the ledger knows, or nothing tells its nodes.
        """
        if device in self._state.claims:
            raise RefusedError(f"{device} has an owner already", hint=DELETE_THE_POD)
        if not names_kind_of(resource, device):
            raise RefusedError(f"{device} is no device of {resource}")
        for obstacle in self._obstacles.of(device):
            if obstacle.kind is Kind.MODE:
                raise obstacle.refusal()
        grants = grants_among(device, env)
        grants = grants or {r.id: r.grant for r in self._obstacles.regions_of(device)}
        step = Step(self._state)
        claim = step.grant(
            device,
            resource,
            grants,
            [pod],
            used=True,
            pod=pod,
            prestarts=1 + step.strays(device),  # one was not seen: never balanced
        )
        if resource not in self._state.resources:
            step.change.resources[resource] = True  # kubelet re-admits its pods by this name
        for region in grants:
            # PROGRAMMED without an owner: an operator did that, for himself.
            step.spoil(region, "a pod may have used it")
        step.commit()
        return claim

    def reconciled(self, cards: Iterable[CardId]) -> None:
        """What kubelet's records show of these cards was adopted: all their owners are known."""
        known = self._state.unreconciled.intersection(cards)
        self._state.unreconciled -= known
        for card in known:
            self._state.notify(card)

    def keep_back(self, cards: Iterable[CardId]) -> None:
        """Who has these cards is not known: kubelet's records name somebody who is no owner."""
        new = set(cards) - self._state.unreconciled
        self._state.unreconciled |= new
        for card in new:
            self._state.notify(card)

    def bind_pod(
        self,
        devices: Iterable[DeviceId],
        pod: PodUid,
        env: Mapping[str, str] = MappingProxyType({}),
        cgroups: Collection[Cgroup] = (),
    ) -> None:
        """Kubelet's records name the pod that owns these devices.

        A claim that is known to be another pod's is released and made again: kubelet gave the
        device to somebody else without our hearing of it.

        Args:
            devices: whose pod it is.
            pod: which.
            env: as of `adopt`, where the pod is another one; empty: it has the nodes of before.
            cgroups: those of the pod, while a container of it is about to start.
        """
        step = Step(self._state)
        implied = 0
        for device in devices:
            claim = self._state.claims.get(device)
            if claim is None:
                continue
            if claim.pod in {None, pod}:
                self._bind(step.change, claim, pod, cgroups)
                continue
            step.release(claim)
            implied += 1
            step.grant(
                device,
                claim.resource,
                grants_among(device, env) or claim.grants,
                [pod],
                used=True,
                pod=pod,
                prestarts=1 + step.strays(device),  # as in adopt
            )
        step.commit()
        self._state.ends["implied"] += implied

    def _bind(self, change: Change, claim: Claim, pod: PodUid, cgroups: Collection[Cgroup]) -> None:
        """The pod of an allocation is this one, and runs in these cgroups."""
        tenancies = self._state.tenancies
        if claim.pod is None:
            change.claims[claim.device] = replace(claim, pod=pod)
        for one in tenancies.users(claim):
            key = replace(one.key, pod=pod)
            # Beside the pod's there is one without a name where its end could not be written.
            same = [each for each in (tenancies.get(key), one) if each is not None]
            cgroups = tuple(dict.fromkeys([*(c for each in same for c in each.cgroups), *cgroups]))
            used = any(each.used for each in same)
            numbers = tuple(sorted({n for each in same for n in each.numbers or ()})) or UNSET
            now = replace(one, key=key, used=used, cgroups=cgroups, numbers=numbers)
            if now != one:
                change.tenancies |= {one.key: None, key: now}

    def prestart_seen(self, devices: Iterable[DeviceId]) -> None:
        """Count a PreStart, before anything is known of its outcome.

        Raises:
            JournalError: it cannot be written, and counts all the same: its PostStop will come.
        """
        change = Change()
        for device in devices:
            self._state.activity[device] += 1
            claim = self._state.claims.get(device)
            if claim is None:
                continue
            # Of starts that failed while the plugin was away the PostStops may still come. Before
            # this one nothing ran but what ran then, so the counts held.
            epoch = "" if device in self._state.inherited else claim.epoch
            change.claims[device] = replace(
                claim, touched=True, prestarts=claim.prestarts + 1, epoch=epoch
            )
        self._state.commit(change)

    def poststop_seen(self, devices: Iterable[DeviceId]) -> tuple[DeviceId, ...]:
        """Count a PostStop; returns the devices for which they balance the PreStarts.

        Where one was started, their regions are DIRTY then, whatever it was given. A
        PostStop may come long after its claim ended, and carries nothing but device ids: those
        that are still to come of earlier claims are counted first.
        """
        step = Step(self._state)
        balanced = []
        for device in devices:
            claim = self._state.claims.get(device)
            if claim is None:
                if strays := self._state.strays.get(device, 0):
                    step.change.strays[device] = strays - 1
                continue
            if claim.poststops >= claim.prestarts:
                continue
            claim = replace(claim, poststops=claim.poststops + 1)
            step.change.claims[device] = claim
            if self._stopped(claim):
                balanced.append(device)
                for region in claim.grants if claim.started else ():
                    step.spoil(
                        region,
                        "as many containers of its owner ended as began",
                        but=WORKED_ON,
                    )
        step.commit()
        return tuple(balanced)

    def balanced(self, device: DeviceId) -> bool:
        """Whether every container that was started under the claim is known to have stopped."""
        claim = self._state.claims.get(device)
        return claim is not None and self._stopped(claim)

    def _stopped(self, claim: Claim) -> bool:
        balanced = claim.prestarts == claim.poststops
        return claim.touched and self._state.countable(claim) and balanced

    def started(self, claims: Iterable[Claim], debug: Debug | None = None) -> None:
        """A PreStart succeeded and is about to be answered.

        `debug`: what its pod asks for should the container fail; of any region.
        """
        step = Step(self._state)
        for claim in claims:
            current = self._state.claims[claim.device]
            step.end_debug(current.grants)
            step.use(self._state.tenancies.users(current))
            for region in current.grants:
                if debug is not None:
                    step.change.debugs[region] = replace(debug, region=region)
            if not current.started:
                step.change.claims[claim.device] = replace(current, started=True)
        step.commit()

    def release(self, devices: Iterable[str]) -> tuple[DeviceId, ...]:
        """End the claims on these devices; unknown and unowned ones are passed over.

        Returns those that were owned.
        """
        step = Step(self._state)
        released = []
        for text in devices:
            claim = self._state.claims.get(DeviceId(text))
            if claim is not None and self._state.holder_of(claim.device) is not None:
                continue  # no call of the device plugin API is about it
            if claim is not None and claim.device not in step.change.claims:
                step.release(claim)
                released.append(claim.device)
        step.commit()
        self._state.activity.update(released)
        self._state.ends["released"] += len(released)
        return tuple(released)

    def end_tenancies(self, tenancies: Iterable[Tenancy]) -> None:
        """The processes of these are gone: nobody opens a region by their nodes."""
        step = Step(self._state)
        present = (self._state.tenancies.get(one.key) for one in tenancies)
        step.end([one for one in present if one is not None and one.left])
        step.commit()
