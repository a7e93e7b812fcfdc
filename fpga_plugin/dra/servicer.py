"""Kubelet's DRA calls: messages in, `ClaimLifecycle` behind, messages out.

All claims of a call are served at the same time, so that one that waits for an earlier tenant does
not hold up another. Each claim has its own answer: an error of one does not fail the call. A claim
that kubelet names twice is served once.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import structlog
from grpclib.const import Cardinality, Handler
from grpclib.server import Stream

from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.names import card_of
from fpga_plugin.allocation.obstacles import Stops
from fpga_plugin.allocation.recorder import EventRecorder
from fpga_plugin.allocation.requests.identity import Identity
from fpga_plugin.dra.claim import ClaimRef
from fpga_plugin.dra.evictions import Evictions
from fpga_plugin.dra.lifecycle import ClaimLifecycle
from fpga_plugin.dra.names import device_name
from fpga_plugin.errors import FpgaPluginError, InvalidRequestError
from fpga_plugin.ids import CardId, DeviceId
from fpga_plugin.kubernetes.grpc.server import receive
from fpga_plugin.kubernetes.grpc.unary import statuses, unary
from fpga_plugin.kubernetes.messages import v1, v1alpha1
from fpga_plugin.kubernetes.messages.k8s.io.kubelet.pkg.apis.dra import v1 as dra
from fpga_plugin.kubernetes.names import parse_claim_uid, parse_name

VERSIONS: Final = ("v1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
"""What kubelet is sent that is served; of each service it takes the first that it knows."""

MAX_CLAIMS: Final = 256
"""Of one call; a pod has at most a few dozen."""

HEALTH_TIMEOUT: Final = 300
"""Seconds after its last report for which kubelet believes it; then the health is Unknown."""

HEALTH_AGAIN: Final = 120.0
"""Seconds after which a report is sent again, although nothing changed. A plugin that hangs sends
none, and kubelet must see that; one report may come late."""

_log = structlog.get_logger()


class DraServicer:
    """Serves kubelet's DRA calls; grpclib reads `__mapping__`.

    Args:
        life: what the calls do.
        ledger: has the devices' health.
        pool: our node's.
        recorder: makes Events of refusals.
        evictions: knows which pods should not be there any more.
    """

    def __init__(
        self,
        lifecycle: ClaimLifecycle,
        ledger: Ledger,
        pool: str,
        recorder: EventRecorder,
        evictions: Evictions,
    ) -> None:
        self._recorder = recorder
        self._evictions = evictions
        self._lifecycle = lifecycle
        self._ledger = ledger
        self._pool = pool
        self._since: dict[tuple[DeviceId, bool], int] = {}

    def __mapping__(self) -> dict[str, Handler]:
        """Every method by its path."""
        calls = {"NodePrepareResource": self._prepare, "NodeUnprepareResource": self._unprepare}
        mapping = {
            f"/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/{name}s": _for_claims(name, serve)
            for name, serve in calls.items()
        }
        for name, package in (("v1", v1), ("v1alpha1", v1alpha1)):
            mapping[f"/{name}.DRAResourceHealth/NodeWatchResources"] = Handler(
                partial(self._health, package),
                Cardinality.UNARY_STREAM,
                package.NodeWatchResourcesRequest,
                package.NodeWatchResourcesResponse,
            )
        return mapping

    async def _prepare(self, ref: ClaimRef) -> dra.NodePrepareResourceResponse:
        try:
            devices = await self._lifecycle.prepare(ref)
        except FpgaPluginError as error:
            self._refused(ref, error)
            raise
        self._recorder.served([each.device for each in devices], ref.full_name)
        return dra.NodePrepareResourceResponse(
            devices=[
                dra.Device(
                    request_names=list(each.requests),
                    pool_name=self._pool,
                    device_name=device_name(each.device),
                    cdi_device_ids=list(each.cdi_ids),
                )
                for each in devices
            ]
        )

    async def _unprepare(self, ref: ClaimRef) -> dra.NodeUnprepareResourceResponse:
        self._recorder.served([], ref.full_name)
        await self._lifecycle.unprepare(ref)
        return dra.NodeUnprepareResourceResponse()

    def _refused(self, ref: ClaimRef, error: FpgaPluginError) -> None:
        """Make an Event for the waiting pod, with the reason."""
        claim = self._lifecycle.read.get(ref.uid)
        if claim is None:
            self._recorder.refused(Identity(claim=ref.full_name), [], error)
            return
        pod, name = next(iter(claim.names.items())) if len(claim.names) == 1 else (None, None)
        identity = Identity(pod, name=name, claim=ref.full_name)
        self._recorder.refused(identity, claim.owner.devices, error)
        if overdue := self._evictions.overdue(claim):
            _log.warning("pod not evicted", **ref.logged, reason=overdue)
            self._recorder.not_evicted(identity, claim.owner.devices, overdue)

    # ---------------------------------------------------------------- health

    async def _health(self, package: Any, stream: Stream[Any, Any]) -> None:
        """One stream: all devices at once, then again with each change and each HEALTH_AGAIN.

        `package`: of the messages, which are the same in both.
        """
        wake, due, clock = asyncio.Event(), 0.0, asyncio.get_running_loop().time
        changed = {card_of(device) for device in self._ledger.allocations}
        known: dict[CardId, dict[DeviceId, str]] = {}

        def note(card: CardId | None) -> None:
            if card is not None:
                changed.add(card)
                wake.set()

        stop = self._ledger.subscribe(note)
        try:
            with statuses("NodeWatchResources"):
                await receive(stream)
                while True:
                    wake.clear()
                    now = {card: self._conditions(card) for card in changed}
                    differs = any(now[card] != known.get(card, {}) for card in now)
                    known |= now
                    changed.clear()
                    if differs or clock() >= due:
                        due = clock() + HEALTH_AGAIN
                        every = {d: why for of in known.values() for d, why in of.items()}
                        await stream.send_message(self._message(package, every))
                    with suppress(TimeoutError):
                        async with asyncio.timeout_at(due):
                            await wake.wait()
        finally:
            stop()

    def _conditions(self, card: CardId) -> dict[DeviceId, str]:
        """Why each owned device of a card is not well; empty if it is."""
        ledger = self._ledger
        found = {}
        for allocation in ledger.allocations_on(card):
            why = ledger.obstacles.first(allocation.device, Stops.OWNER)
            found[allocation.device] = "" if why is None else why.cause or why.message
        return found

    def _message(self, package: Any, conditions: dict[DeviceId, str]) -> Any:
        keys = {(device, not problem) for device, problem in conditions.items()}
        self._since = {key: self._since.get(key, int(time.time())) for key in keys}
        status = package.HealthStatus
        return package.NodeWatchResourcesResponse(
            devices=[
                package.DeviceHealth(
                    device=package.DeviceIdentifier(
                        pool_name=self._pool, device_name=device_name(device)
                    ),
                    health=status.UNHEALTHY if problem else status.HEALTHY,
                    last_updated_time=self._since[device, not problem],
                    health_check_timeout_seconds=HEALTH_TIMEOUT,
                    message=problem[:1024],
                )
                for device, problem in sorted(conditions.items())
            ]
        )


def _for_claims(name: str, serve: Callable[[ClaimRef], Awaitable[object]]) -> Handler:
    """A method that serves each claim of a call.

    `name`: of the message with one claim's answer. The method and its messages are named after it.

    Raises:
        InvalidRequestError: by the method, of a call with more claims than any pod has.
    """
    method, answer_of = f"{name}s", getattr(dra, f"{name}Response")
    request, reply = getattr(dra, f"{method}Request"), getattr(dra, f"{method}Response")

    async def one(claim: dra.Claim) -> Any:
        started = time.monotonic()
        problem, logged, answer, named = "", "", None, {}
        try:
            ref = _parsed(claim)
            named = ref.logged
            answer = await serve(ref)
        except FpgaPluginError as error:
            problem, logged = str(error.for_tenant()), str(error)
        except Exception:  # noqa: BLE001  # of one claim: the others are answered
            _log.exception("unexpected error in a call", method=method)
            problem = logged = f"{method} failed: see the log of fpga-plugin"
        seconds = round(time.monotonic() - started, 6)
        if problem:
            _log.warning("claim refused", method=method, **named, message=logged, seconds=seconds)
            return answer_of(error=problem)
        _log.info("claim served", method=method, **named, seconds=seconds)
        return answer

    async def every(call: Any) -> Any:
        by_uid = {claim.uid: claim for claim in call.claims}
        if len(by_uid) > MAX_CLAIMS:
            raise InvalidRequestError(f"the call names {len(by_uid)} claims; at most {MAX_CLAIMS}")
        answers = await asyncio.gather(*map(one, by_uid.values()))
        return reply(claims=dict(zip(by_uid, answers, strict=True)))

    return unary(method, request, reply, every)


def _parsed(claim: dra.Claim) -> ClaimRef:
    """The claim that kubelet names.

    Raises:
        InvalidRequestError: it is no claim's uid or name.
    """
    try:
        return ClaimRef(
            parse_claim_uid(claim.uid), parse_name(claim.namespace), parse_name(claim.name)
        )
    except ValueError as error:
        raise InvalidRequestError(f"the call names no claim: {error}") from error
