"""Kubelet's calls of the second api over a socket: what each claim is answered, and who hears it.

What a claim goes through is in test_lifecycle.py, the driver with a daemon behind in
tests/integration/test_dra.py.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from doubles import LIMIT
from doubles.cards import BLANK, TOO_HOT, device, make_card
from doubles.loops import beside, until
from grpclib.client import Channel
from grpclib.const import Cardinality, Status
from grpclib.encoding.proto import ProtoCodec
from grpclib.exceptions import GRPCError
from ledger_support import found, make_ledger
from structlog.testing import capture_logs
from test_dra_steps import owner

from fpga_plugin.allocation.journal.records import ClaimOwner
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.recorder import EventRecorder
from fpga_plugin.allocation.requests.identity import Identity
from fpga_plugin.dra import servicer
from fpga_plugin.dra.claim import ClaimRef, ResourceClaim
from fpga_plugin.dra.evictions import Evictions
from fpga_plugin.dra.lifecycle import PreparedDevice
from fpga_plugin.dra.servicer import MAX_CLAIMS, DraServicer
from fpga_plugin.errors import FpgaPluginError, RefusedError
from fpga_plugin.hardware.faults import Fault, FaultKind
from fpga_plugin.ids import CardId, DeviceId, RegionId
from fpga_plugin.kubernetes.events.broadcaster import Event
from fpga_plugin.kubernetes.grpc.server import ClosingServer
from fpga_plugin.kubernetes.messages import v1, v1alpha1
from fpga_plugin.kubernetes.messages.k8s.io.kubelet.pkg.apis.dra import v1 as dra
from fpga_plugin.kubernetes.names import ClaimUid, PodName, PodUid

CARD = make_card()
P0, P1 = device(CARD, 0), device(CARD, 1)
POOL = "node-a"
POD = PodUid("00000000-0000-4000-8000-0000000000f0")
OTHER_POD = PodUid("00000000-0000-4000-8000-0000000000f1")
POD_NAME = PodName("space", "pod-1")


def uid(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012d}"


def named(number: int, name: str = "") -> dra.Claim:
    """A claim, as kubelet names it."""
    return dra.Claim(namespace="space", uid=uid(number), name=name or f"claim-{number}")


@dataclass
class Life:
    """What becomes of claims, as the test says.

    Attributes:
        answers: devices, or an error, by the claim's number.
        claims: as they were read last.
        asked: which calls came, in order.
        waits: of a claim, until its call goes on.
    """

    answers: dict[int, tuple[PreparedDevice, ...] | Exception] = field(default_factory=dict)
    claims: dict[int, ResourceClaim] = field(default_factory=dict)
    asked: list[tuple[str, ClaimRef]] = field(default_factory=list)
    waits: dict[int, asyncio.Event] = field(default_factory=dict)

    async def prepare(self, ref: ClaimRef) -> tuple[PreparedDevice, ...]:
        return await self._answer("prepare", ref)

    async def unprepare(self, ref: ClaimRef) -> None:
        await self._answer("unprepare", ref)

    async def _answer(self, call: str, ref: ClaimRef) -> tuple[PreparedDevice, ...]:
        self.asked.append((call, ref))
        number = int(ref.uid[-12:])
        if number in self.waits:
            await self.waits[number].wait()
        answer = self.answers.get(number, ())
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def read(self) -> dict[str, ResourceClaim]:
        return {uid(number): claim for number, claim in self.claims.items()}


class Heard:
    """What those hear who tell pods."""

    def __init__(self) -> None:
        self.refusals: list[tuple[Identity, list[DeviceId], str]] = []
        self.served_: list[tuple[list[DeviceId], str]] = []
        self.events: list[Event] = []
        self.now = 0.0

    def record(self, event: Event) -> None:
        self.events.append(event)

    def refused(
        self, identity: Identity, devices: Sequence[DeviceId], error: FpgaPluginError
    ) -> None:
        self.refusals.append((identity, list(devices), str(error)))

    def served(self, devices: Sequence[DeviceId], claim: str) -> None:
        self.served_.append((list(devices), claim))


class Api:
    """The servicer behind a socket, and kubelet's end of it."""

    def __init__(self, ledger: Ledger, channel: Channel, life: Life, heard: Heard) -> None:
        self.ledger, self.channel, self.lifecycle, self.heard = ledger, channel, life, heard
        self._calls = dra.DraPluginStub(channel)

    async def prepare(self, *claims: dra.Claim) -> dict[str, dra.NodePrepareResourceResponse]:
        asked = dra.NodePrepareResourcesRequest(claims=list(claims))
        return (await self._calls.node_prepare_resources(asked)).claims

    async def unprepare(self, *claims: dra.Claim) -> dict[str, dra.NodeUnprepareResourceResponse]:
        asked = dra.NodeUnprepareResourcesRequest(claims=list(claims))
        return (await self._calls.node_unprepare_resources(asked)).claims

    @asynccontextmanager
    async def health(self, package: ModuleType = v1) -> AsyncIterator["Words"]:
        """Kubelet listens to what is said of devices' health."""
        words = Words(package.DraResourceHealthStub(self.channel), package)
        listening = asyncio.create_task(words.listen())
        try:
            yield words
        finally:
            listening.cancel()
            with suppress(asyncio.CancelledError):
                await listening


class Words:
    """What a health stream has said."""

    def __init__(self, stub: Any, package: ModuleType) -> None:
        self._stub, self._package = stub, package
        self.said: list[dict[str, Any]] = []
        self._more = asyncio.Event()
        self._ended = False

    async def listen(self) -> None:
        request = self._package.NodeWatchResourcesRequest()
        try:
            async for answer in self._stub.node_watch_resources(request, timeout=LIMIT):
                self.said.append({one.device.device_name: one for one in answer.devices})
                self._more.set()
        finally:
            self._ended = True
            self._more.set()

    async def next(self) -> dict[str, Any]:
        """The next message; each is taken once."""
        while not self.said:
            assert not self._ended, "the stream ends with kubelet's interest, not before"
            self._more.clear()
            await self._more.wait()
        return self.said.pop(0)


Play = Callable[[Api], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a story with the api."""
    monkeypatch.chdir(tmp_path)  # a path of any length

    def run(story: Play, life: Life | None = None) -> None:
        async def main() -> None:
            ledger, _ = make_ledger(CARD)
            ledger.obstacles._dra = True
            lives, heard = life or Life(), Heard()
            recorder = EventRecorder(
                heard,  # type: ignore[arg-type]
                node_name=POOL,
                pods=SimpleNamespace(),  # type: ignore[arg-type]
                observer=heard,  # type: ignore[arg-type]
            )
            served = DraServicer(
                lives,  # type: ignore[arg-type]
                ledger,
                POOL,
                recorder,
                Evictions(ledger, lambda: heard.now),
            )
            server = ClosingServer([served])
            await server.start(path="dra.sock")
            try:
                async with (
                    asyncio.timeout(LIMIT),
                    Channel(path="dra.sock", codec=ProtoCodec()) as channel,
                ):
                    await story(Api(ledger, channel, lives, heard))
            finally:
                await server.close_all()

        asyncio.run(main())

    return run


# ---------------------------------------------------------------- claims


def test_each_claim_is_answered_with_its_own_devices(play: Callable[..., None]) -> None:
    """Kubelet hands the CDI ids of an answer to the runtime: another claim's would be another
    tenant's region (invariant 1)."""
    life = Life(
        answers={
            1: (PreparedDevice(("one", "two"), P0, ("cdi-0", "vendor.com/x=y")),),
            2: (PreparedDevice(("one",), P1, ("cdi-1",)),),
        }
    )

    async def story(api: Api) -> None:
        answers = await api.prepare(named(1), named(2))
        assert answers == {
            uid(number): dra.NodePrepareResourceResponse(
                devices=[
                    dra.Device(
                        request_names=requests,
                        pool_name=POOL,
                        device_name=region.replace(".", "-"),
                        cdi_device_ids=list(cdi),
                    )
                ]
            )
            for number, requests, region, cdi in (
                (1, ["one", "two"], P0, ("cdi-0", "vendor.com/x=y")),
                (2, ["one"], P1, ("cdi-1",)),
            )
        }
        assert sorted(api.heard.served_) == [([P0], "space/claim-1"), ([P1], "space/claim-2")]
        assert api.heard.refusals == []

    play(story, life)


def test_a_claims_end_is_answered_when_it_has_ended(play: Callable[..., None]) -> None:
    """An answer before that would let kubelet forget a claim whose region is not clean."""

    async def story(api: Api) -> None:
        api.lifecycle.waits[1] = asyncio.Event()
        call = asyncio.create_task(api.unprepare(named(1)))
        await until(lambda: api.lifecycle.asked)
        assert not call.done()
        assert api.lifecycle.asked == [
            ("unprepare", ClaimRef(ClaimUid(uid(1)), "space", "claim-1")),
        ]
        assert api.heard.served_ == [([], "space/claim-1")], "what was refused of it is over"
        api.lifecycle.waits[1].set()
        assert await call == {uid(1): dra.NodeUnprepareResourceResponse()}

    play(story)


def test_an_error_of_one_claim_is_its_own_answer(play: Callable[..., None]) -> None:
    """Kubelet unprepares and starts pods by these: the claim that is refused has no device, and
    that of another pod in the same call is served all the same."""
    life = Life(
        answers={
            1: RefusedError("not now", hint="echo 1 > reset", tenant="ask the node's operator"),
            2: (PreparedDevice(("one",), P1, ("cdi-1",)),),
            3: ZeroDivisionError("a bug"),
        }
    )

    async def story(api: Api) -> None:
        answers = await api.prepare(named(1), named(2), named(3))
        refused, served, failed = (answers[uid(number)] for number in (1, 2, 3))
        assert (refused.error, refused.devices) == ("not now: ask the node's operator", [])
        assert (served.error, [one.cdi_device_ids for one in served.devices]) == ("", [["cdi-1"]])
        assert (failed.error, failed.devices) == (
            "NodePrepareResources failed: see the log of fpga-plugin",
            [],
        )
        ends = await api.unprepare(named(1), named(2), named(3))
        assert [ends[uid(number)].error for number in (1, 2, 3)] == [
            "not now: ask the node's operator",
            "",
            "NodeUnprepareResources failed: see the log of fpga-plugin",
        ]

    play(story, life)


def test_a_claim_that_waits_does_not_hold_up_another(play: Callable[..., None]) -> None:
    async def story(api: Api) -> None:
        api.lifecycle.waits[1] = asyncio.Event()
        call = asyncio.create_task(api.prepare(named(1), named(2)))
        await until(lambda: len(api.heard.served_) == 1)
        assert api.heard.served_ == [([], "space/claim-2")]
        api.lifecycle.waits[1].set()
        assert (await call).keys() == {uid(1), uid(2)}

    play(story)


@pytest.mark.parametrize(
    "claim",
    [
        dra.Claim(namespace="space", uid="../../etc/cdi", name="c"),
        dra.Claim(namespace="../space", uid=uid(1), name="c"),
        dra.Claim(namespace="space", uid=uid(1), name="c/d"),
        dra.Claim(),
    ],
    ids=["uid", "namespace", "name", "nothing"],
)
def test_what_names_no_claim_reaches_nothing(play: Callable[..., None], claim: dra.Claim) -> None:
    """Invariant 11: of the uid a file's name is made, of the others a path of the API server."""

    async def story(api: Api) -> None:
        with capture_logs() as logged:
            (answer,) = (await api.prepare(claim)).values()
            (end,) = (await api.unprepare(claim)).values()
        assert answer.error.startswith("the call names no claim: ")
        assert end.error.startswith("the call names no claim: ")
        assert api.lifecycle.asked == []
        assert api.heard.refusals == api.heard.served_ == []
        assert [line.keys() & {"claim", "namespace", "name"} for line in logged] == [set(), set()]

    play(story)


def test_a_claim_that_is_named_twice_is_served_once(play: Callable[..., None]) -> None:
    """Two Prepares of one claim side by side would each program its region."""

    async def story(api: Api) -> None:
        answers = await api.prepare(*[named(1)] * (MAX_CLAIMS + 2), named(2))
        assert answers.keys() == {uid(1), uid(2)}
        assert [ref.uid for _, ref in api.lifecycle.asked] == [uid(1), uid(2)]

    play(story)


@pytest.mark.parametrize("number", [MAX_CLAIMS, MAX_CLAIMS + 1])
@pytest.mark.parametrize("call", ["prepare", "unprepare"])
def test_a_call_names_as_many_claims_as_are_taken_and_no_more(
    play: Callable[..., None], call: str, number: int
) -> None:
    """Each is a task: a caller would have as many as it likes."""

    async def story(api: Api) -> None:
        claims = [named(each) for each in range(number)]
        if number <= 256:
            assert len(await getattr(api, call)(*claims)) == number
            return
        with pytest.raises(GRPCError, match=f"{number} claims; at most {MAX_CLAIMS}") as refused:
            await getattr(api, call)(*claims)
        assert refused.value.status is Status.INVALID_ARGUMENT
        assert api.lifecycle.asked == []

    play(story)


CLAIM = ResourceClaim(owner(ClaimUid(uid(1)), P0, P1), names={POD: POD_NAME})


@pytest.mark.parametrize(
    ("claim", "pod", "devices"),
    [
        (CLAIM, (POD, POD_NAME), [P0, P1]),
        (replace(CLAIM, names={}), (None, None), [P0, P1]),
        (
            replace(CLAIM, names={POD: POD_NAME, OTHER_POD: PodName("space", "pod-2")}),
            (None, None),
            [P0, P1],
        ),
        (None, (None, None), []),
    ],
    ids=["one pod", "pods without names", "two pods", "never read"],
)
def test_whose_pod_waits_is_told_where_it_is_one(
    play: Callable[..., None],
    claim: ResourceClaim | None,
    pod: tuple[PodUid | None, PodName | None],
    devices: list[DeviceId],
) -> None:
    """The Event goes to that pod: one of several would be told what may be none of its business."""
    life = Life(answers={1: RefusedError("not now")}, claims={1: claim} if claim else {})

    async def story(api: Api) -> None:
        await api.prepare(named(1))
        ((identity, about, message),) = api.heard.refusals
        assert (identity.pod, identity.name) == pod
        assert (identity.claim, about, message) == ("space/claim-1", devices, "not now")
        api.heard.refusals.clear()
        await api.unprepare(named(1))
        assert api.heard.refusals == [], "its pod has ended: nobody waits"

    play(story, life)


def test_a_pod_that_should_have_been_evicted_hears_that_nobody_does(
    play: Callable[..., None],
) -> None:
    """Its device failed before it started, and kubelet asks for it a minute later."""
    life = Life(answers={1: RefusedError("PR failed")}, claims={1: CLAIM})

    async def story(api: Api) -> None:
        api.ledger.dra.take(owner(ClaimUid(uid(1)), P0), [POD])
        api.ledger.work.working([RegionId(P0)])
        api.ledger.work.faulted(RegionId(P0), "PR failed")
        await api.prepare(named(1))
        assert [one.reason for one in api.heard.events] == ["FpgaProgrammingRefused"]
        api.heard.now = 60.0
        await api.prepare(named(1))
        event = api.heard.events[-1]
        assert (event.reason, event.subject.name) == ("FpgaPodNotEvicted", POD_NAME.name)
        assert f"{P0} failed before the pod started" in event.note

    play(story, life)


def test_each_claim_is_logged_with_its_name_and_how_long_it_took(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(answers={2: RefusedError("not now")})
    now = iter([10.0, 10.1234567, 20.0, 20.25])
    clock = SimpleNamespace(monotonic=lambda: next(now), time=lambda: 0.0)
    monkeypatch.setattr(servicer, "time", clock)

    async def story(api: Api) -> None:
        with capture_logs() as logged:
            await api.prepare(named(1))
            await api.unprepare(named(2))
        assert logged == [
            {
                "event": "claim served",
                "log_level": "info",
                "method": "NodePrepareResources",
                "claim": uid(1),
                "namespace": "space",
                "name": "claim-1",
                "seconds": 0.123457,
            },
            {
                "event": "claim refused",
                "log_level": "warning",
                "method": "NodeUnprepareResources",
                "claim": uid(2),
                "namespace": "space",
                "name": "claim-2",
                "seconds": 0.25,
                "message": "not now",
            },
        ]

    play(story, life)


# ---------------------------------------------------------------- health


def take(ledger: Ledger, number: int, *devices: DeviceId) -> None:
    ledger.dra.take(
        ClaimOwner(
            uid=ClaimUid(uid(number)),
            namespace="space",
            name=f"claim-{number}",
            devices=devices,
            requests=dict.fromkeys(devices, ("one",)),
        ),
        [POD],
    )


def words(said: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {name: (one.health.name, one.message) for name, one in said.items()}


def dra_name(one: DeviceId) -> str:
    return one.replace(".", "-")


WELL = ("HEALTHY", "")


@pytest.mark.parametrize("package", [v1, v1alpha1])
def test_health_is_told_of_owned_devices_at_once_and_with_each_change(
    play: Callable[..., None], package: ModuleType
) -> None:
    """Pods' status shows it. What changes nothing of it is not sent at once."""

    async def story(api: Api) -> None:
        ledger = api.ledger
        take(ledger, 1, P0)
        async with api.health(package) as health:
            (first,) = (said := await health.next()).values()
            assert words(said) == {dra_name(P0): WELL}
            assert (first.device.pool_name, first.device.device_name) == (POOL, dra_name(P0))
            assert first.health_check_timeout_seconds == servicer.HEALTH_TIMEOUT
            ledger.dra.join({ClaimUid(uid(1)): [OTHER_POD]})  # a change of another kind
            for _ in range(20):
                await asyncio.sleep(0)  # it would be sent by now
            take(ledger, 2, P1)
            assert words(await health.next()) == {dra_name(P0): WELL, dra_name(P1): WELL}
            ledger.hardware.set_failing(CARD.id, {CARD.regions[1].id: TOO_HOT})
            assert words(await health.next()) == {
                dra_name(P0): WELL,
                dra_name(P1): ("UNHEALTHY", TOO_HOT.message),
            }
            ledger.dra.end_claim(ClaimUid(uid(2)))
            assert words(await health.next()) == {dra_name(P0): WELL}
            assert await api.prepare(named(3)), "the loop is free"
            assert health.said == []

    play(story)


def test_after_a_change_the_health_of_the_changed_card_alone_is_looked_at(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node may have a thousand claims, and each change of the ledger is told."""
    looked: list[CardId] = []
    conditions = DraServicer._conditions

    def counted(self: DraServicer, card: CardId) -> dict[DeviceId, str]:
        looked.append(card)
        return conditions(self, card)

    monkeypatch.setattr(DraServicer, "_conditions", counted)
    other = make_card(7, nodes=(90, 91))

    async def story(api: Api) -> None:
        ledger = api.ledger
        found(ledger, other, BLANK)
        ledger.reconciled([other.id])
        take(ledger, 1, P0)
        take(ledger, 2, DeviceId(other.regions[0].id))
        async with api.health() as health:
            said = await health.next()
            assert len(said) == 2
            looked.clear()
            ledger.hardware.set_failing(CARD.id, {CARD.regions[0].id: TOO_HOT})
            said = await health.next()
            assert words(said)[dra_name(P0)] == ("UNHEALTHY", TOO_HOT.message)
            assert words(said)[dra_name(DeviceId(other.regions[0].id))] == WELL
            assert set(looked) == {CARD.id}

    play(story)


def test_a_change_of_one_card_is_told_though_another_is_noted_with_it(
    play: Callable[..., None],
) -> None:
    other = make_card(7, nodes=(90, 91))

    async def story(api: Api) -> None:
        ledger = api.ledger
        found(ledger, other, BLANK)
        ledger.reconciled([other.id])
        take(ledger, 1, P0)
        take(ledger, 2, DeviceId(other.regions[0].id))
        async with api.health() as health:
            await health.next()
            ledger.notify([other.id])
            ledger.hardware.set_failing(CARD.id, {CARD.regions[0].id: TOO_HOT})
            said = await health.next()
            assert words(said)[dra_name(P0)] == ("UNHEALTHY", TOO_HOT.message)

    play(story)


def test_health_is_sent_again_before_kubelet_forgets_it_whatever_else_changes(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert servicer.HEALTH_AGAIN * 2 < servicer.HEALTH_TIMEOUT, "one report may be lost"
    assert servicer.HEALTH_TIMEOUT <= 300, "for so long a plugin that hangs reads as Healthy"
    monkeypatch.setattr(servicer, "HEALTH_AGAIN", 0.05)

    async def story(api: Api) -> None:
        take(api.ledger, 1, P0)

        async def other_changes() -> None:
            while True:
                for pod in (OTHER_POD, POD):
                    api.ledger.dra.join({ClaimUid(uid(1)): [pod]})
                    api.ledger.dra.part(ClaimUid(uid(1)), [])
                    await asyncio.sleep(0.01)

        async with api.health() as health:
            for _ in range(3):
                assert words(await health.next()) == {dra_name(P0): WELL}
            async with beside(other_changes()):
                for _ in range(3):
                    assert words(await health.next()) == {dra_name(P0): WELL}

    play(story)


def test_a_stream_that_nobody_reads_any_more_costs_nothing(play: Callable[..., None]) -> None:
    """Kubelet opens one again at each of its starts."""

    async def story(api: Api) -> None:
        listeners = len(api.ledger._listeners)
        for _ in range(3):
            async with api.health() as health:
                await health.next()
                assert len(api.ledger._listeners) == listeners + 1
            await until(lambda: len(api.ledger._listeners) == listeners)

    play(story)


def test_a_call_without_a_message_is_told_what_it_lacks(play: Callable[..., None]) -> None:
    async def story(api: Api) -> None:
        async with api.channel.request(
            "/v1.DRAResourceHealth/NodeWatchResources",
            Cardinality.STREAM_STREAM,
            v1.NodeWatchResourcesRequest,
            v1.NodeWatchResourcesResponse,
            timeout=LIMIT,
        ) as stream:
            await stream.send_request()
            await stream.end()
            with pytest.raises(GRPCError) as refused:
                await stream.recv_message()
        assert refused.value.status is Status.INVALID_ARGUMENT
        assert refused.value.message == "the request has no message"

    play(story)


def gone(ledger: Ledger) -> None:
    ledger.hardware.card_gone(CARD.id)


def gone_and_faulted(ledger: Ledger) -> None:
    ledger.hardware.card_gone(CARD.id)
    ledger.work.faulted(CARD.regions[0].id, "it does not answer")


def a_region_less(ledger: Ledger) -> None:
    found(ledger, replace(CARD, regions=CARD.regions[:1]))


def second_fails(ledger: Ledger) -> None:
    ledger.hardware.set_failing(CARD.id, {CARD.regions[1].id: TOO_HOT})


LONG = Fault(FaultKind.TRANSIENT, "x" * 2000)


def long_words(ledger: Ledger) -> None:
    ledger.hardware.set_failing(CARD.id, {CARD.regions[0].id: LONG})


@pytest.mark.parametrize(
    ("happens", "message"),
    [
        (gone, f"card {CARD.id} is gone"),
        (gone_and_faulted, f"card {CARD.id} is gone"),
        (a_region_less, f"card {CARD.id} shows 1 of its 2 regions"),
        (second_fails, TOO_HOT.message),
        (long_words, "x" * 1024),  # what the API takes of a device's health
    ],
)
def test_a_card_is_as_well_as_its_worst_region(
    play: Callable[..., None], happens: Callable[[Ledger], None], message: str
) -> None:
    """What is not there is told first: nobody can mend it from here."""

    async def story(api: Api) -> None:
        take(api.ledger, 1, DeviceId(CARD.id))
        async with api.health() as health:
            assert words(await health.next()) == {dra_name(DeviceId(CARD.id)): WELL}
            happens(api.ledger)
            said = await health.next()
            assert words(said) == {dra_name(DeviceId(CARD.id)): ("UNHEALTHY", message)}

    play(story)


def test_since_when_it_is_so_is_told(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubelet takes the later of two words: a time that moves with each would be none."""
    clock = SimpleNamespace(time=lambda: clock.now, now=1000.5)
    monkeypatch.setattr(servicer, "time", clock)

    async def story(api: Api) -> None:
        region = CARD.regions[0].id
        take(api.ledger, 1, P0)
        async with api.health() as health:

            async def since() -> dict[str, int]:
                return {name: one.last_updated_time for name, one in (await health.next()).items()}

            assert await since() == {dra_name(P0): 1000}
            clock.now = 2000.0
            take(api.ledger, 2, P1)
            assert await since() == {dra_name(P0): 1000, dra_name(P1): 2000}
            clock.now = 3000.0
            api.ledger.hardware.set_failing(CARD.id, {region: TOO_HOT})
            assert await since() == {dra_name(P0): 3000, dra_name(P1): 2000}
            clock.now = 4000.0
            api.ledger.hardware.set_failing(CARD.id, {})
            assert await since() == {dra_name(P0): 4000, dra_name(P1): 2000}

    play(story)
