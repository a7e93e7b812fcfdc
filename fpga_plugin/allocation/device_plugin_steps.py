"""The ledger's steps for the device plugin API: kubelet instances, allocations and their ends."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from msgspec import UNSET

from fpga_plugin.allocation import debug_holds
from fpga_plugin.allocation.journal.records import Allocation, Change, DebugHold, Fact
from fpga_plugin.allocation.names import (
    DELETE_THE_POD,
    grants_among,
    is_function,
    names_kind_of,
)
from fpga_plugin.allocation.naming import Naming
from fpga_plugin.allocation.obstacles import ANOTHER_POD, ObstacleKind, Obstacles, Stops
from fpga_plugin.allocation.state import State
from fpga_plugin.allocation.step import WORKED_ON, Step
from fpga_plugin.errors import RefusedError
from fpga_plugin.hardware.grant import Grant
from fpga_plugin.ids import DeviceId, RegionId
from fpga_plugin.kubernetes.cgroup import Cgroup
from fpga_plugin.kubernetes.names import PodUid, ResourceName


class DevicePluginSteps:
    """The ledger's steps for kubelet's calls of the device plugin API."""

    def __init__(self, state: State, obstacles: Obstacles, naming: Naming) -> None:
        self._state = state
        self._obstacles = obstacles
        self._naming = naming

    def kubelet_found(self, instance: str) -> None:
        """A kubelet instance was found; it may be a new one.

        Between its start and our registration kubelet starts containers without PreStart, so every
        allocation may have been used, and earlier PostStops cannot be counted any more. This holds
        even if it cannot be written.
        """
        state = self._state
        if instance == state.kubelet_instance:
            return
        step = Step(
            state,
            Change(
                facts={Fact.KUBELET: instance},
                pending_poststops=dict.fromkeys(state.pending_poststops, 0),
            ),
        )
        for device, allocation in state.allocations.items():
            if not allocation.missed_prestart:
                step.change.allocations[device] = replace(allocation, missed_prestart=True)
            step.use(state.tenancies.users(allocation))
        step.commit()

    @property
    def sends_env(self) -> bool:
        """Whether this kubelet is known to send the environment in PreStart."""
        instance = self._state.env_instance
        return bool(instance) and instance == self._state.kubelet_instance

    def env_seen(self) -> None:
        """This kubelet sent a non-empty environment."""
        if not self.sends_env:
            self._state.commit(Change(facts={Fact.ENVIRONMENT: self._state.kubelet_instance}))

    def allocate(self, resource: ResourceName, ids: Sequence[str]) -> tuple[Allocation, ...]:
        """Grant devices: all of them, or none.

        A device may be owned under the same resource already. Without a PreStart since the last
        Allocate, this is the same pod's next container, or the pod never started. With one, it
        implies the release of exactly this device, and PreStart sorts out the rest.

        Raises:
            UnknownDeviceError: no such device.
            RefusedError: an obstacle stands against one of them.
            JournalError: nothing was granted.
        """
        devices = self._naming.check_devices(resource, ids)
        step = Step(self._state)
        granted: list[Allocation] = []
        for device in devices:
            present = self._state.allocations.get(device)
            self._obstacles.check(device, Stops.ALLOCATE if present is None else Stops.REPEAT)
            if present is not None and not present.prestart_seen:
                # Also where a PreStart may have been missed: if none was, and this is the same
                # pod's next container, its first one has the nodes of before.
                self._check_nodes(present)
                if not present.missed_prestart:
                    granted.append(self._grant_again(step, present))
                    continue
            if present is not None:
                self._check_name(device, resource)
                self._check_successor(present)
                step.release(present, "implied")
            grants = self._obstacles.grants_of(device)
            granted.append(step.grant(device, resource, grants, [None]))
        nodes = [node for one in granted for grant in one.grants.values() for node in grant.nodes]
        if len(set(nodes)) < len(nodes):
            raise RefusedError(
                f"{', '.join(devices)} show the same device node: device numbers are changing",
                hint=ANOTHER_POD,
            )
        step.commit()
        # What is refused says nothing of the owner, whose end is still found out meanwhile.
        self._state.activity.update(devices)
        return tuple(granted)

    def _check_nodes(self, present: Allocation) -> None:
        """Whether an allocation's nodes are still those of its regions.

        Raises:
            RefusedError: they are other devices' by now; the allocation is ended.
        """
        try:
            self._obstacles.check_grants(present)
        except RefusedError:
            # A pod with the old nodes can never start, nor can one that shares them. If the
            # allocation stayed, it would refuse every later pod too.
            self.release([present.device])
            raise

    def _check_successor(self, present: Allocation) -> None:
        """Whether another pod may be given a device whose owner kubelet implies to be gone.

        After its restart, a kubelet that lost its checkpoint may ask for the owner itself again.
        So the question is only asked while no start was missed.

        Raises:
            RefusedError: somebody new may not have it; the allocation is ended.
        """
        if not present.prestart_seen or present.missed_prestart:
            return
        try:
            self._obstacles.check(present.device, Stops.ALLOCATE)
        except RefusedError:
            # Else the device would stay on its list, and every later pod would be refused too.
            self.release([present.device])
            raise

    def _grant_again(self, step: Step, present: Allocation) -> Allocation:
        """An unused allocation again: to the same pod, or to another after one that failed."""
        if present.pod is not None:  # whose it is now has to be learnt again
            users = self._state.tenancies.users(present)
            step.change.tenancies |= dict.fromkeys((one.key for one in users), None)
            present = step.change.allocations[present.device] = replace(present, pod=None)
            step.begin(present, [None], used=False)
        return present

    def _check_name(self, device: DeviceId, resource: ResourceName) -> None:
        """Whether another pod may have a device under the name by which its owner has it.

        Kubelet chose it from an outdated list. If it were granted under that name again, allocation
        after allocation would keep the former name, or an alias's former meaning, for as long as
        pods ask for it.

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
    ) -> Allocation:
        """Make the allocation that kubelet's records show and the ledger lacks (a lost journal).

        Args:
            resource: as kubelet's records name it.
            device: its card may be gone.
            pod: its owner.
            env: the variables that the pod was given, `FPGA_DEVICE_<REGION ID>` among them. If
                kubelet kept none, the regions' present grants stand in for them.

        Raises:
            RefusedError: it conflicts with what the ledger knows, or its nodes are unknown.
        """
        if device in self._state.allocations:
            raise RefusedError(f"{device} has an owner already", hint=DELETE_THE_POD)
        _check_kind(resource, device)
        for obstacle in self._obstacles.of(device):
            if obstacle.kind is ObstacleKind.MODE:
                raise obstacle.refusal()
        grants = grants_among(device, env) or self._obstacles.grants_of(device)
        step = Step(self._state)
        allocation = self._grant_recorded(step, device, resource, grants, pod)
        for region in grants:
            # PROGRAMMED without an owner: an operator programmed it by hand.
            step.spoil(region, "a pod may have used it")
        step.commit()
        return allocation

    def bind_pod(
        self,
        devices: Iterable[DeviceId],
        pod: PodUid,
        env: Mapping[str, str] = MappingProxyType({}),
        cgroups: Collection[Cgroup] = (),
        *,
        resource: ResourceName | None = None,
    ) -> None:
        """Kubelet's records name the pod that owns these devices.

        An allocation of another known pod is released and made again: kubelet gave the device to
        this pod without a call that the plugin saw.

        Args:
            devices: whose owner the pod is.
            pod: the owner.
            env: as for `adopt`, if the pod is another one; empty: the nodes stay the same.
            cgroups: the pod's, while one of its containers is about to start.
            resource: by which the pod has them, if it is another one; None: as the former.

        Raises:
            RefusedError: the resource has no such devices.
            JournalError: it cannot be written.
        """
        step = Step(self._state)
        for allocation in self._state.pod_allocations(devices):
            if allocation.pod in {None, pod}:
                self._bind(step.change, allocation, pod, cgroups)
                continue
            device = allocation.device
            step.release(allocation, "implied")
            grants = grants_among(device, env) or allocation.grants
            name = resource or allocation.resource
            _check_kind(name, device)
            self._grant_recorded(step, device, name, grants, pod)
        step.commit()

    def _grant_recorded(
        self,
        step: Step,
        device: DeviceId,
        resource: ResourceName,
        grants: Mapping[RegionId, Grant],
        pod: PodUid | None,
    ) -> Allocation:
        """Grant what a pod has by kubelet's records, which admit it again by the resource."""
        allocation = step.grant(device, resource, grants, [pod], used=True, pod=pod)
        if resource not in self._state.resources:
            step.change.resources[resource] = True
        return allocation

    def _bind(
        self, change: Change, allocation: Allocation, pod: PodUid, cgroups: Collection[Cgroup]
    ) -> None:
        """Record an allocation's pod and its cgroups."""
        tenancies = self._state.tenancies
        if allocation.pod is None:
            change.allocations[allocation.device] = replace(allocation, pod=pod)
        for one in tenancies.users(allocation):
            key = replace(one.key, pod=pod)
            # Beside the pod's there is one without a name where its end could not be written.
            same = [each for each in (tenancies.get(key), one) if each is not None]
            joined = tuple(dict.fromkeys([*(c for each in same for c in each.cgroups), *cgroups]))
            used = any(each.used for each in same)
            numbers = tuple(sorted({n for each in same for n in each.numbers or ()})) or UNSET
            now = replace(one, key=key, used=used, cgroups=joined, numbers=numbers)
            if now != one:
                change.tenancies |= {one.key: None, key: now}

    def prestart_seen(self, devices: Collection[DeviceId]) -> None:
        """Count a PreStart, before its outcome is known.

        Raises:
            JournalError: it cannot be written. It counts all the same: its PostStop will come.
        """
        change = Change()
        self._state.activity.update(devices)
        for allocation in self._state.pod_allocations(devices):
            # PostStops of starts that failed while the plugin was away may still come. Nothing
            # new ran before this PreStart, so the present counts hold.
            inherited = allocation.device in self._state.inherited
            change.allocations[allocation.device] = replace(
                allocation,
                prestart_seen=True,
                prestarts=allocation.prestarts + 1,
                instance="" if inherited else allocation.instance,
            )
        self._state.commit(change)

    def poststop_seen(self, devices: Iterable[DeviceId]) -> tuple[DeviceId, ...]:
        """Count a PostStop; returns the devices for which they balance the PreStarts.

        If a container had started, the devices' regions become DIRTY. A PostStop may come long
        after its allocation ended, and carries only device ids. So pending PostStops of earlier
        allocations are counted first.
        """
        step = Step(self._state)
        balanced = []
        for device in devices:
            allocation = self._state.allocations.get(device)
            if allocation is None:
                if pending_poststops := self._state.pending_poststops.get(device, 0):
                    step.change.pending_poststops[device] = pending_poststops - 1
                continue
            claimed = self._state.claim_owner_of(device) is not None
            if claimed or allocation.poststops >= allocation.prestarts:
                continue
            allocation = replace(allocation, poststops=allocation.poststops + 1)
            step.change.allocations[device] = allocation
            if self._stopped(allocation):
                balanced.append(device)
                for region in allocation.grants if allocation.started else ():
                    step.spoil(
                        region,
                        "as many containers of its owner ended as began",
                        but=WORKED_ON,
                    )
        step.commit()
        return tuple(balanced)

    def balanced(self, device: DeviceId) -> bool:
        """Whether all containers that started under the allocation are known to have stopped."""
        allocation = self._state.allocations.get(device)
        return allocation is not None and self._stopped(allocation)

    def _stopped(self, allocation: Allocation) -> bool:
        balanced = allocation.prestarts == allocation.poststops
        return allocation.prestart_seen and self._state.countable(allocation) and balanced

    def started(self, allocations: Iterable[Allocation], debug: DebugHold | None = None) -> None:
        """A PreStart succeeded and is about to be answered.

        `debug`: the debug hold that its pod asks for should the container fail; of any region.
        """
        step = Step(self._state)
        for allocation in allocations:
            current = self._state.allocations[allocation.device]
            step.change.debug_holds |= debug_holds.begun(self._state, current.grants, debug)
            step.start(current)
        step.commit()

    def release(self, devices: Iterable[str]) -> tuple[DeviceId, ...]:
        """End the allocations on these devices; unknown and unowned devices are skipped.

        Returns those that were owned.
        """
        step = Step(self._state)
        # No call of this API concerns what a ResourceClaim has.
        for allocation in self._state.pod_allocations(map(DeviceId, dict.fromkeys(devices))):
            step.release(allocation)
        released = tuple(step.change.allocations)
        step.commit()
        self._state.activity.update(released)
        return released


def _check_kind(resource: ResourceName, device: DeviceId) -> None:
    """Check that a resource, of whatever prefix, has such devices.

    Raises:
        RefusedError: it has not.
    """
    if not names_kind_of(resource, device):
        raise RefusedError(f"{device} is no device of {resource}")
