"""A claim's life on this node: prepared, used, ended (NodePrepareResources and …Unprepare…).

Prepare is idempotent by the claim's uid and allocation. For a claim that was prepared in this boot
the journal has the answer, and the hardware is not touched. The claim is read all the same: it may
have been deallocated, and allocated again with other devices under the same uid, while kubelet was
away or forgot it. Then its former devices are withdrawn, and released once they are unused.

Else the claim gets its devices in the ledger, and they are scrubbed, programmed and verified as
with the device plugin API. The work is a task of its own, which outlives the call: kubelet's next
call finds the result. The call waits for obstacles that pass by themselves (an earlier tenant that
still runs, a slow API server, a store that does not answer), since kubelet tries again only after
60 to 90 s. A result does not expire: kubelet ends each claim that it asked to prepare.

Unprepare ends the claim, and answers when its regions are clean, so that the scheduler allocates
only clean ones. A region that cannot be cleaned is kept back, and does not hold up the pod: the
answer comes once its taint is published, else the next claim would get the region.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Final, TypeVar

import structlog

from fpga_plugin.allocation.dra_steps import DeviceOwnedError, unknown_device
from fpga_plugin.allocation.journal.records import ClaimOwner, Prepared
from fpga_plugin.allocation.obstacles import RefusedForNowError, Stops
from fpga_plugin.allocation.permission import Permission
from fpga_plugin.allocation.queue import CardQueue
from fpga_plugin.allocation.requests.identity import Identity
from fpga_plugin.allocation.requests.parse import FpgaRequest
from fpga_plugin.cards.handover import last_look
from fpga_plugin.cards.operations import CardOperations, TenancyActiveError
from fpga_plugin.cards.prepare import Plan, Preparer, Target
from fpga_plugin.cards.targets import Targets
from fpga_plugin.dra.cdi import device_id
from fpga_plugin.dra.claim import ClaimReader, ClaimRef, NoSuchClaimError, ResourceClaim
from fpga_plugin.dra.claim_targets import ClaimTargets
from fpga_plugin.dra.ends import ClaimEnds
from fpga_plugin.dra.files import ClaimFiles
from fpga_plugin.errors import (
    FpgaPluginError,
    NoSourceError,
    NotFinishedError,
    PortInUseError,
    RefusedError,
    StoreUnavailableError,
)
from fpga_plugin.host.backoff import Backoff
from fpga_plugin.host.bounded import BoundedDict
from fpga_plugin.ids import CardId, DeviceId, RegionId, Resource
from fpga_plugin.kubernetes.names import ClaimUid, PodName
from fpga_plugin.settings.values import NO_CDI_DEVICES, CdiDevices

log = structlog.get_logger()

ANSWER_SECONDS: Final = 40.0
"""Until a call is answered; kubelet gives it 45 s (pkg/kubelet/cm/dra/plugin)."""

KEPT_CLAIMS: Final = 256
"""Claims whose last read is remembered, to name the pod of a refusal."""

FIRST_RETRY, LAST_RETRY = 0.1, 2.0
"""Seconds between two looks at what has to pass."""

_PASSING: Final = (
    NotFinishedError,
    NoSourceError,
    StoreUnavailableError,
    PortInUseError,
    TenancyActiveError,
    RefusedForNowError,
)
"""What may be over before the call has to be answered."""


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PreparedDevice:
    """A device of a claim as it is sent to kubelet."""

    requests: tuple[str, ...]
    device: DeviceId
    cdi_ids: tuple[str, ...]


class _Work:
    """The preparation of one claim; outlives the calls that wait for it.

    Attributes:
        task: does it.
        ended: the claim has ended meanwhile.
        claim: what it asks for, once read.
        waits: why the last try failed, if there was one.
    """

    task: "asyncio.Task[None]"

    def __init__(self, ref: ClaimRef) -> None:
        self._ref = ref
        self.ended = False
        self.claim: ResourceClaim | None = None
        self.waits = ""

    async def still(self, step: Awaitable[_T]) -> _T:
        """A step's result, if the claim has not ended meanwhile.

        Raises:
            NoSuchClaimError: it has.
        """
        result = await step
        if self.ended:
            raise _ended(self._ref)
        return result


class ClaimLifecycle:
    """Prepares and unprepares claims.

    Args:
        operations: has the ledger, and pods' cgroups.
        preparer: does the work on the regions.
        targets: loads bitstreams.
        queue: where cards that have to be scrubbed are added.
        claims: reads claims.
        claim_targets: decides what their regions become.
        permission: the operator's policy.
        files: for the container runtime.
        ends: ends claims.
        tell_scheduler: waits until the slices show which devices are not given out.
        cdi_devices: what the operator adds.

    Attributes:
        read: claims that have not ended, at their last read.
        seconds: until a call is answered.
    """

    def __init__(  # as PreStarts has them
        self,
        operations: CardOperations,
        preparer: Preparer,
        targets: Targets,
        queue: CardQueue,
        *,
        claims: ClaimReader,
        claim_targets: ClaimTargets,
        permission: Permission,
        files: ClaimFiles,
        ends: ClaimEnds,
        tell_scheduler: Callable[[], Awaitable[None]],
        cdi_devices: CdiDevices = NO_CDI_DEVICES,
    ) -> None:
        self._operations = operations
        self._ledger = operations.ledger
        self._preparer = preparer
        self._targets = targets
        self._queue = queue
        self._claims = claims
        self._claim_targets = claim_targets
        self._permission = permission
        self._files = files
        self._ends = ends
        self._cdi_devices = cdi_devices
        self._work: dict[ClaimUid, _Work] = {}
        self.read = BoundedDict[ClaimUid, ResourceClaim](KEPT_CLAIMS)
        self._changed = asyncio.Event()
        self._ledger.subscribe(self._tell)
        ends.ending = self._ending
        self.tell_scheduler = tell_scheduler
        self.seconds = ANSWER_SECONDS

    def _tell(self, _card: CardId | None) -> None:
        """Wake the calls that wait: they look again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _ending(self, uid: ClaimUid) -> None:
        if (work := self._work.get(uid)) is not None:
            work.ended = True
        self.read.pop(uid, None)

    # ---------------------------------------------------------------- prepare

    async def prepare(self, ref: ClaimRef) -> tuple[PreparedDevice, ...]:
        """Bring a claim's devices into the state that it asks for.

        Raises:
            FpgaPluginError: no container may start with them; the message says why.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.seconds
        self._ends.calls[ref.uid] += 1
        self._ends.over.discard(ref.uid)
        joined = True
        while joined:
            # An earlier call's work may have read the claim before it was allocated again.
            joined = ref.uid in self._work
            work = self._begin(ref, deadline)
            await asyncio.wait({work.task}, timeout=deadline - loop.time())
            if not work.task.done():
                why = f"; the last try: {work.waits}" if work.waits else ""
                raise NotFinishedError(
                    f"{ref}: preparation is not finished after {self.seconds:g} s{why}",
                    hint="it goes on; kubelet's next attempt uses the result",
                )
            work.task.result()
        # The caller may go away meanwhile: what is written is checked all the same.
        answer = asyncio.create_task(self._answer(ref), name=f"answer {ref.uid}")
        answer.add_done_callback(_heard)
        return await asyncio.shield(answer)

    def _begin(self, ref: ClaimRef, deadline: float) -> _Work:
        work = self._work.get(ref.uid)
        if work is None or work.ended:
            work = self._work[ref.uid] = _Work(ref)
            name = f"prepare {ref.uid}"
            work.task = asyncio.create_task(self._run(ref, work, deadline), name=name)
            work.task.add_done_callback(partial(self._done, ref.uid))
        return work

    def _done(self, uid: ClaimUid, task: "asyncio.Task[object]") -> None:
        _heard(task)
        if (work := self._work.get(uid)) is not None and work.task is task:
            del self._work[uid]

    async def _run(self, ref: ClaimRef, work: _Work, deadline: float) -> None:
        """Try until it is done, the call's time is up, or it cannot be done."""
        loop = asyncio.get_running_loop()
        backoff = Backoff(FIRST_RETRY, LAST_RETRY)
        while True:
            try:
                return await self._attempt(ref, work)
            except FpgaPluginError as error:
                wait = backoff.delay(error)
                late = loop.time() + FIRST_RETRY + wait >= deadline
                if late or work.ended or not isinstance(error, _PASSING):
                    log.warning("claim not prepared", **ref.logged, error=str(error))
                    raise await self._targets.explained(error) from error.__cause__
                work.waits = error.message
                if isinstance(error, DeviceOwnedError) and error.owner is not None:
                    self._ends.doubted(error.owner)
            except Exception as error:
                log.exception("preparation failed", **ref.logged)
                raise FpgaPluginError(
                    f"{ref}: preparation failed for an unexpected reason",
                    hint="the plugin's log has the details; please report this",
                ) from error
            await asyncio.sleep(FIRST_RETRY)  # changes come in bursts
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._changed.wait()

    async def _attempt(self, ref: ClaimRef, work: _Work) -> None:
        ledger = self._ledger
        if work.claim is None:
            work.claim = await work.still(self._claims.get(ref))
        claim = self.read[ref.uid] = work.claim
        owner = replace(claim.owner, file=self._files.cdi.path(ref.uid))
        await self._withdraw_unless(claim, lambda had: {**had.requests} == {**owner.requests})
        if not self._queue.synced and not self._stands(ref.uid):
            raise NotFinishedError(
                f"{ref}: kubelet's record of claims was not read yet",
                hint="the plugin's log says what keeps it from reading it",
            )
        await self._leave_former(ref, claim, work)
        requests = await self._claim_targets.of(claim)
        await self._check_policy(claim, requests)
        targets = await self._targets.exactly(requests)
        asked = {region: _prepared(requests[region], target) for region, target in targets.items()}
        # The same for the next pod of a prepared claim: it may not be what the first one got.
        await work.still(self._withdraw_unless(claim, lambda had: had.prepared == asked))
        # Of pods that came without a call kubelet's record may not have been read yet.
        ledger.dra.join({ref.uid: claim.users})
        if self._stands(ref.uid):
            return
        await work.still(self._check_users(ref))
        ledger.dra.take(owner, claim.users)
        plan = Plan(ledger.lease(owner.devices), None, targets, ledger.kubelet_instance)
        records = await self._preparer.prepare(plan)
        permitted = partial(self._check_policy, claim, requests)
        look = last_look(self._permission, self._preparer, plan, permitted)
        observed = await work.still(look)
        self._preparer.check_result(plan, records, observed)
        ledger.dra.prepared(ref.uid, asked)
        log.info(
            "claim prepared",
            **ref.logged,
            devices=owner.devices,
            requests=sorted({*chain(*owner.requests.values())}),
            pods=sorted(ledger.pods_of(owner.devices)),
            bitstreams={
                region: None if one is None else one.bitstream_id
                for region, one in requests.items()
            },
        )

    async def _answer(self, ref: ClaimRef) -> tuple[PreparedDevice, ...]:
        """Write the claim's file; returns the answer to kubelet."""
        owner = await self._files.settle(ref.uid, again=True)
        if owner is None:
            known = self._ledger.claim_owners.get(ref.uid)
            if known is None or known.ended:
                raise _ended(ref)
            raise NotFinishedError(
                f"{ref}: {self._ledger.dra.preparation_error(known) or 'it was allocated again'}",
                hint="it changed after it was prepared; kubelet asks again",
            )
        return tuple(
            PreparedDevice(
                owner.requests.get(device, ()),
                device,
                (
                    device_id(owner, device),
                    *self._cdi_devices.of(
                        Resource.parse(self._ledger.allocations[device].resource)
                    ),
                ),
            )
            for device in owner.devices
        )

    def _stands(self, uid: ClaimUid) -> bool:
        """Whether a claim's preparation in this boot still holds."""
        ledger = self._ledger
        owner = ledger.claim_owners.get(uid)
        return (
            owner is not None
            and not ledger.dra.preparation_error(owner)
            and not any(
                ledger.obstacles.first(region, Stops.START)
                for device in owner.devices
                for region in ledger.allocations[device].grants
            )
        )

    async def _withdraw_unless(
        self, claim: ResourceClaim, same: Callable[[ClaimOwner], bool]
    ) -> None:
        """Withdraw a claim's preparation unless it matches what the claim asks for now.

        An unknown preparation counts as different.

        Raises:
            FpgaPluginError: the file for the runtime cannot be removed, or the journal not be
                written.
        """
        owner = self._ledger.claim_owners.get(claim.owner.uid)
        if owner is not None and self._ledger.dra.is_prepared(owner) and not same(owner):
            why = f"it asks for something else now, on {', '.join(claim.owner.devices)}"
            await self._files.withdraw(owner, why)

    async def _leave_former(self, ref: ClaimRef, claim: ResourceClaim, work: _Work) -> None:
        """Release devices that the claim is no longer allocated, even if it gets no new ones yet.

        The scheduler allocates them to other claims, which would wait for as long as this claim
        cannot be prepared. Two claims that swap devices would wait for each other.

        Raises:
            TenancyActiveError: a pod of the claim runs.
            FpgaPluginError: the file for the runtime cannot be removed, or the journal not be
                written.
        """
        uid, now = ref.uid, claim.owner.devices
        if not self._ledger.dra.left_behind(uid, now):
            return
        # One that was adopted has its file still.
        await self._files.withhold(self._ledger.claim_owners[uid])
        await work.still(self._check_users(ref))
        left = self._ledger.dra.left_behind(uid, now)
        for card in self._ledger.dra.leave(uid, now):
            self._queue.add(card)
        log.info("claim left devices", **ref.logged, devices=list(left))

    async def _check_policy(
        self, claim: ResourceClaim, requests: Mapping[RegionId, FpgaRequest | None]
    ) -> None:
        """Ask the operator's policy, for the claim's namespace.

        Raises:
            NotPermittedError: the message names the rule.
            UnknownDeviceError: there is no such device by now.
            NotFinishedError: a card changed since the targets of its regions were decided.
        """
        nobody = self._ledger.lease(())  # the namespace is known: no claim has to tell it
        identity = Identity(name=PodName(claim.owner.namespace, claim.owner.name))
        for device in claim.owner.devices:
            if (name := self._ledger.naming.present_resource(device)) is None:
                raise unknown_device(device)
            resource = self._ledger.naming.named_resource(name)
            interface = resource.interface_id
            regions = self._ledger.obstacles.regions_of(device)
            asked = dict.fromkeys(target for one in regions if (target := requests[one.id]))
            # A request for another interface id would be none of the policy's questions.
            if any(target.interface_id != interface for target in asked):
                raise NotFinishedError(
                    f"claim {claim.owner.full_name}: the card of {device} has the interface id"
                    f" {interface} now",
                    hint="it is tried again with that",
                )
            await self._permission.check(identity, resource, [device], tuple(asked), nobody)

    async def _check_users(self, ref: ClaimRef) -> None:
        """Check that no pod uses a claim that has to be prepared again.

        Raises:
            TenancyActiveError: a pod of the claim runs.
        """
        users = self._ledger.dra.tenancies_of_claim(ref.uid)
        if (one := await self._operations.living(users)) is not None:
            raise TenancyActiveError(
                f"{ref}: pod {one.pod} runs with it, and its devices are not as they were prepared",
                hint="delete the pods that use the claim",
            )

    # ---------------------------------------------------------------- unprepare

    async def unprepare(self, ref: ClaimRef) -> None:
        """End a claim; returns when its regions are clean or kept back.

        Raises:
            FpgaPluginError: not yet.
        """
        ledger, ends = self._ledger, self._ends
        owner = ledger.claim_owners.get(ref.uid)
        unknown = owner is None or owner.ended  # which may be of an older journal
        if unknown and not self._queue.synced and ledger.unreconciled & ledger.cards.keys():
            raise NotFinishedError(
                f"{ref}: the journal lacks it, and kubelet's record of claims was not read yet",
                hint="kubelet asks again; the plugin's log says what keeps it from reading it",
            )
        await ends.end(ref.uid)
        regions = ends.regions(ref.uid)
        deadline = asyncio.get_running_loop().time() + self.seconds
        while left := [region for region in regions if ends.to_scrub(region)]:
            if (rest := deadline - asyncio.get_running_loop().time()) <= 0:
                raise NotFinishedError(
                    f"{ref}: {', '.join(sorted(left))} not scrubbed after {self.seconds:g} s",
                    hint="it goes on; kubelet asks again. `scrub waits` in the plugin's log says"
                    " for what: a pod's processes, or a tool that has the port open",
                )
            # What keeps a scrub waiting may pass without a change of the ledger.
            with suppress(TimeoutError):
                async with asyncio.timeout(min(LAST_RETRY, rest)):
                    await self._changed.wait()
        if any(ledger.obstacles.first(region, Stops.OFFER) for region in regions):
            await self.tell_scheduler()

    async def close(self) -> None:
        """Wait for what cannot be interrupted; begin nothing."""
        works = [*self._work.values()]
        for work in works:
            work.ended = True
        if works:
            await asyncio.wait([work.task for work in works])


def _prepared(request: FpgaRequest | None, target: Target | None) -> Prepared:
    """A region's preparation as the journal keeps it."""
    if request is None or target is None:
        return Prepared()
    return Prepared(
        request.interface_id,
        request.file_id,
        target.afu_id,
        request.settings.clock,
        request.settings.debug,
    )


def _heard(task: "asyncio.Task[object]") -> None:
    """Keep asyncio from complaining of an error: callers that wait raise it, if there are any."""
    if not task.cancelled():
        task.exception()


def _ended(ref: ClaimRef) -> RefusedError:
    return NoSuchClaimError(f"{ref} ended while it was prepared")
