"""PreStart: what kubelet asks before each start of a container (invariant 2).

It finds out who asks and for what, has the regions prepared, and hands them over. It waits for the
preparation, but not longer than the call has time: the preparation goes on, and its result serves
exactly one later PreStart that asks for the same and comes before it expires. After each wait,
PreStart checks again what may have changed. At the end it reads the AFU ids once more; from then to
the hand-over it waits for nothing.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from fpga_plugin.allocation.calls import Caller
from fpga_plugin.allocation.journal.journal import JournalError
from fpga_plugin.allocation.journal.records import DebugHold, RegionRecord
from fpga_plugin.allocation.lease import Lease, allocation_ended
from fpga_plugin.allocation.names import DELETE_THE_POD, card_of
from fpga_plugin.allocation.permission import Permission
from fpga_plugin.allocation.recorder import EventRecorder
from fpga_plugin.allocation.requests.directory import PodDirectory
from fpga_plugin.allocation.requests.identity import Identity
from fpga_plugin.allocation.requests.parse import FpgaRequest
from fpga_plugin.cards.debugging import Debugging
from fpga_plugin.cards.handover import last_look
from fpga_plugin.cards.operations import CardOperations
from fpga_plugin.cards.prepare import Plan, Preparer
from fpga_plugin.cards.targets import Targets
from fpga_plugin.deviceplugin.environment import StockEnvironment
from fpga_plugin.errors import FpgaPluginError, NotFinishedError, RefusedError
from fpga_plugin.ids import AfuId, CardId, DeviceId, InterfaceId, RegionId, Resource, ResourceKind
from fpga_plugin.kubernetes.cgroup import Cgroup, known_gone
from fpga_plugin.kubernetes.names import PodUid, ResourceName

log = structlog.get_logger()

_PLURALS = {
    ResourceKind.REGION: "regions",
    ResourceKind.AF: "preprogrammed functions",
    ResourceKind.WHOLE: "whole cards",
}

LONGEST_ANSWER = 25.0
"""Seconds after which a PreStart is answered whatever its deadline; kubelet gives it 30 s."""

UNCLAIMED_FOR = 600.0
"""Seconds for which a result waits for the PreStart that it serves.

Twice the longest time that kubelet lets pass between two tries to start a container
(MaxContainerBackOff, pkg/kubelet/kubelet.go)."""

ANSWER_MARGIN = 3.0
"""Seconds before its deadline at which a PreStart is answered."""


def answer_within(time_left: float | None) -> float:
    """Seconds that a PreStart may take, given its deadline in seconds from now."""
    if time_left is None:
        return LONGEST_ANSWER
    return min(max(time_left - ANSWER_MARGIN, time_left / 2, 0.0), LONGEST_ANSWER)


_Asked = tuple[Lease, str, Identity, tuple[FpgaRequest, ...]]
_Outcome = dict[RegionId, RegionRecord] | FpgaPluginError


@dataclass(frozen=True, slots=True)
class _Preparation:
    """Work for one PreStart; outlives the call.

    Attributes:
        asked: what makes a later PreStart the same: the lease, the kubelet instance, who asks, and
            what for.
        work: what the regions are then, or why they are not.
    """

    plan: Plan
    asked: _Asked
    work: asyncio.Task[_Outcome]


class PreStarts:
    """Serves PreStartContainer.

    Args:
        operations: has the ledger, and pods' cgroups.
        preparer: does the work on the regions.
        targets: turns a container's requests into targets of regions.
        pods: finds the pod.
        envs: finds what the container asks for, if kubelet does not send it.
        permission: the operator's policy.
        recorder: makes Events of refusals.
        debugging: reports what a pod asks for should its container fail.
    """

    def __init__(
        self,
        operations: CardOperations,
        preparer: Preparer,
        targets: Targets,
        *,
        pods: PodDirectory,
        envs: StockEnvironment,
        permission: Permission,
        recorder: EventRecorder,
        debugging: Debugging,
    ) -> None:
        self._ledger = operations.ledger
        self._cgroups = operations.cgroups
        self._preparer = preparer
        self._targets = targets
        self._pods = pods
        self._envs = envs
        self._permission = permission
        self._recorder = recorder
        self._debugging = debugging
        self._preparations: dict[frozenset[DeviceId], _Preparation] = {}
        self._tasks: set[asyncio.Task[_Outcome]] = set()
        self._ledger.subscribe(self._changed)

    async def serve(
        self,
        resource: ResourceName,
        ids: Sequence[str],
        env: Mapping[str, str],
        time_left: float | None,
        caller: Caller | None = None,
    ) -> None:
        """Bring the devices into the state that the container asks for.

        `caller` is filled in, even if the call fails.

        Raises:
            FpgaPluginError: the container must not start; the message says why.
        """
        budget = answer_within(time_left)
        devices = self._ledger.naming.check_devices(resource, ids)
        self._ledger.device_plugin.prestart_seen(devices)
        begun = self._ledger.lease(devices)
        identity = Identity()
        late = "preparation is not finished"
        try:
            try:
                async with asyncio.timeout(budget):
                    identity = await self._identify(resource, devices, begun)
                    lease = self._lease(devices)
                    identity, env = await self._ask(identity, lease, env)
                    requests = await self._targets.requests(identity, devices, env)
                    of = self._ledger.naming.named_resource(resource)

                    async def permitted() -> Identity:
                        self._check_interface(of, devices)
                        return await self._permission.check(identity, of, devices, requests, lease)

                    identity = await permitted()
                    preparation = await self._find_or_begin(identity, lease, requests)
                    debug = await self._debugging.requested(identity, devices)
                    await asyncio.wait({preparation.work})
                    late = "all is prepared, but its last checks are not done"
                    # If the policy forbids it by now, the finished work does not count.
                    observed: Mapping[RegionId, AfuId | None] = {}
                    if not isinstance(preparation.work.result(), FpgaPluginError):
                        observed = await last_look(
                            self._permission, self._preparer, preparation.plan, permitted
                        )
                    else:
                        await permitted()
            except TimeoutError:
                raise NotFinishedError(
                    f"{', '.join(devices)}: {late} after {budget:.1f} s",
                    hint="it goes on; kubelet's next attempt uses the result",
                ) from None
            self._hand_over(frozenset(devices), preparation, observed, debug)
        except FpgaPluginError as error:
            named = await self._targets.explained(error)
            self._envs.refused(identity, devices, str(named.for_tenant()))
            self._recorder.refused(identity, devices, named)
            raise named from error.__cause__
        finally:
            if caller is not None:
                caller.identity = identity
        self._envs.started(identity, devices)

    def _hand_over(
        self,
        devices: frozenset[DeviceId],
        preparation: _Preparation,
        observed: Mapping[RegionId, AfuId | None],
        debug: DebugHold | None,
    ) -> None:
        """Give a finished preparation to the one call that waits for it.

        `observed`: the AFU ids that its regions show just now. `debug`: the debug hold that its
        pod asks for, should the container fail.

        Raises:
            FpgaPluginError: it failed, or something came between.
        """
        plan = preparation.plan
        plan.lease.check()
        if self._preparations.get(devices) is not preparation:
            raise NotFinishedError(
                f"{', '.join(sorted(devices))}: another call used the preparation, or it was"
                " replaced by a later one",
                hint="kubelet's next try begins again",
            )
        del self._preparations[devices]
        outcome = preparation.work.result()
        if isinstance(outcome, FpgaPluginError):
            raise outcome
        self._preparer.check_result(plan, outcome, observed)
        self._ledger.device_plugin.started(plan.lease.allocations, debug)

    def _expire(self, asked: _Asked) -> None:
        """Drop a result that no call fetched in time: it may be outdated."""
        devices = frozenset(asked[0].devices)
        preparation = self._preparations.get(devices)
        if preparation is None or preparation.asked is not asked:
            return
        del self._preparations[devices]
        log.info("a preparation expired unused", devices=sorted(devices))
        outcome = preparation.work.result()
        records = {} if isinstance(outcome, FpgaPluginError) else outcome
        unchanged = [r for r, record in records.items() if self._ledger.record(r) is record]
        try:
            self._ledger.work.dirty(unchanged, "a preparation expired unused")
        except JournalError as error:
            log.warning(
                "an expired preparation cannot be journalled", regions=unchanged, error=str(error)
            )

    async def _find_or_begin(
        self,
        identity: Identity,
        lease: Lease,
        requests: tuple[FpgaRequest, ...],
    ) -> _Preparation:
        devices, instance = lease.devices, self._ledger.kubelet_instance
        key, asked = frozenset(devices), (lease, instance, identity, requests)
        if (begun := self._preparations.get(key)) is not None and begun.asked == asked:
            return begun
        targets = await self._targets.of(devices, requests, resources=identity.resources)
        plan = Plan(lease, identity.pod, targets, instance)
        self._preparer.check(plan, mending=True)
        # Another PreStart of the same may have come this far while the files were read.
        if (begun := self._preparations.get(key)) is not None and begun.asked == asked:
            return begun
        work = asyncio.create_task(
            self._carry_out(plan, asked), name=f"prepare {', '.join(devices)}"
        )
        preparation = self._preparations[key] = _Preparation(plan, asked, work)
        self._tasks.add(work)
        work.add_done_callback(self._tasks.discard)
        return preparation

    def _lease(self, devices: tuple[DeviceId, ...]) -> Lease:
        lease = self._ledger.lease(devices)
        if len(lease.allocations) != len(devices):
            raise allocation_ended(*devices)
        return lease

    async def _identify(
        self,
        resource: ResourceName,
        devices: tuple[DeviceId, ...],
        begun: Lease,
    ) -> Identity:
        """Find the pod; make the allocations that kubelet's records show and the ledger lacks.

        `begun`: the allocations when the call came.
        """
        gone = partial(known_gone, self._cgroups)
        identity = await self._pods.identify(resource, devices, gone)
        # Once there are other allocations, the records name their owner, not the caller.
        begun.check()
        missing = [device for device in devices if device not in self._ledger.allocations]
        if missing:
            if identity.pod is None:
                raise RefusedError(
                    f"{', '.join(missing)}: no allocation is known, and kubelet's records show"
                    " none",
                    hint=DELETE_THE_POD,
                )
            for device in missing:
                self._ledger.device_plugin.adopt(
                    resource, device, identity.pod, identity.granted_nodes()
                )
                log.warning("allocation adopted", device=device, pod=identity.pod)
            self._ledger.device_plugin.prestart_seen(missing)
        if identity.pod is not None:
            cgroups = await asyncio.to_thread(self._look_at_cgroup, identity.pod)
            begun.check()
            self._ledger.device_plugin.bind_pod(
                devices, identity.pod, identity.granted_nodes(), cgroups
            )
        self._refuse_mixture(identity)
        return identity

    def _look_at_cgroup(self, pod: PodUid) -> tuple[Cgroup, ...]:
        # Kubelet has made the cgroup by now: its absence would mean that we look elsewhere.
        self._cgroups.expect(pod)
        return self._cgroups.instance(pod)

    def _check_interface(self, of: Resource, devices: tuple[DeviceId, ...]) -> None:
        """Check that the policy is asked about the interface id that the cards have.

        A card was reflashed since its pod was admitted, or the journal lost what an alias stood
        for, and the alias stands for something else by now.

        Raises:
            RefusedError: it would be asked about another id.
        """
        for device in devices:
            card = self._ledger.cards.get(card_of(device))
            if card is not None and card.interface_id != of.interface_id:
                raise RefusedError(
                    f"{of.name} stands for interface id {of.interface_id}, and {device} has"
                    f" interface id {card.interface_id}",
                    hint=DELETE_THE_POD,
                )

    def _refuse_mixture(self, identity: Identity) -> None:
        """Devices of two kinds of one interface id in one container: not supported."""
        kinds = defaultdict[InterfaceId, set[ResourceKind]](set)
        for resource in filter(None, map(self._ledger.naming.resource, identity.resources)):
            kinds[resource.interface_id].add(resource.kind)
        for interface_id, both in kinds.items():
            if len(both) > 1:
                of = " and ".join(name for kind, name in _PLURALS.items() if kind in both)
                raise RefusedError(
                    f"the container asks for {of} of interface {interface_id}:"
                    " which bitstream belongs to which cannot be told",
                    hint="use one of the two kinds in a container",
                )

    async def _ask(
        self, identity: Identity, lease: Lease, env: Mapping[str, str]
    ) -> tuple[Identity, Mapping[str, str]]:
        """The container's environment: from the call, else from the pod's spec.

        An empty map equals an absent one on the wire. Once this kubelet sent a non-empty one, an
        empty one means that the container has no environment; before that it means a stock kubelet.

        Raises:
            NotFinishedError: the devices changed hands during the questions about the pod.
        """
        if env:
            self._ledger.device_plugin.env_seen()
            return identity, env
        if self._ledger.device_plugin.sends_env:
            return identity, {}
        fresh = not any(allocation.used for allocation in lease.allocations)
        asked = await self._envs.ask(identity, lease.devices, fresh=fresh)
        if self._lease(lease.devices) != lease:
            raise NotFinishedError(
                f"{', '.join(lease.devices)} got another owner while the pod's spec was read",
                hint="kubelet's next try begins again, if the pod is still there",
            )
        return asked

    async def _carry_out(self, plan: Plan, asked: _Asked) -> _Outcome:
        outcome: _Outcome
        try:
            outcome = await self._preparer.prepare(plan)
        except FpgaPluginError as error:
            outcome = error
        except Exception:
            log.exception("preparation failed", devices=plan.lease.devices)
            outcome = FpgaPluginError(
                "preparation failed for an unexpected reason",
                hint="the plugin's log has the details; please report this",
            )
        failed = isinstance(outcome, FpgaPluginError)
        log.info(
            "preparation failed" if failed else "prepared",
            devices=plan.lease.devices,
            pod=plan.pod,
            bitstreams={
                region: target.bitstream.bitstream_id if target and target.bitstream else None
                for region, target in plan.targets.items()
            },
            error=str(outcome) if failed else None,
        )
        # Without the preparation, which has whole images in memory.
        asyncio.get_running_loop().call_later(UNCLAIMED_FOR, self._expire, asked)
        return outcome

    def _changed(self, _card: CardId | None) -> None:
        """Drop preparations for allocations that ended."""
        for devices in [d for d, one in self._preparations.items() if not one.plan.lease.holds]:
            del self._preparations[devices]

    async def close(self) -> None:
        """Wait for the preparations that run; begin none."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._preparations.clear()
