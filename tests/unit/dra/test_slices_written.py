"""A node's ResourceSlices, written to an API server that fails, refuses and takes fields away.

The scheduler goes by what stands there, so what is not written is given out or hidden wrongly
(invariants 3 and 4): it is tried again for ever, at a pace that no server minds. The watch is late
on purpose here: it says nothing after the first list, so whatever the reconciler knows it learned
from answers. With a real connection: tests/integration/test_slices.py.
"""

import asyncio
import contextlib
import copy
import itertools
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import doubles.slices
import msgspec
import pytest
from doubles.slices import Device, Taint
from ledger_world import StillLoop
from structlog.testing import capture_logs

from fpga_plugin.dra import slices
from fpga_plugin.dra.desired import Form, Spec
from fpga_plugin.dra.lifecycle import ANSWER_SECONDS
from fpga_plugin.dra.pool import COLLECTION, Pool, ResourceSlice
from fpga_plugin.dra.slices import SliceReconciler
from fpga_plugin.host.backoff import Backoff
from fpga_plugin.kubernetes.apiserver.mirror import Mirror
from fpga_plugin.kubernetes.apiserver.rest import ApiServerError

NODE = "/api/v1/nodes/node-a"
COUNTERS, FIRST, SECOND = (f"{each}-fpga.intel.com-node-a" for each in ("c0000", "d0000", "d0001"))
DIRTY = Taint("dirty", "scrub")
SETTLE, DELAY, LONGEST = 1.0, 4.0, 1000.0
MOST = 300
"""Requests, and looks at what is wanted, of any test here: more is a loop without a pause."""

Json = dict[str, Any]


def refusal(code: int, reason: str = "", said: str = "", retry_after: float = 0) -> ApiServerError:
    message = f"it says {code} {reason}"
    return ApiServerError(message, code=code, reason=reason, said=said, retry_after=retry_after)


class Server:
    """The API server: as strict about versions as the real one.

    Attributes:
        objects: slices by name.
        uid: of the node; None: there is no such node.
        log: method and name of each request, with the time.
        failing: what the next requests like this end with.
        made: what it makes of what it is sent.
        sessions: how many connections there were.
    """

    def __init__(self, loop: StillLoop) -> None:
        self._loop = loop
        self.objects: dict[str, Json] = {}
        self.uid: str | None = "uid-1"
        self.log: list[tuple[float, str]] = []
        self.failing: list[tuple[str, ApiServerError]] = []
        self.made: Callable[[Json], None] = lambda _: None
        self.sessions = 0
        self.version = 100

    @contextlib.asynccontextmanager
    async def session(self, kubeconfig: str | None) -> AsyncIterator["Server"]:
        assert kubeconfig == "credentials"
        self.sessions += 1
        yield self

    def count(self, pattern: str) -> int:
        return sum(re.search(pattern, line) is not None for _, line in self.log)

    def store(self, item: Json) -> None:
        self.version += 1
        item = copy.deepcopy(item)
        item["metadata"] |= {"resourceVersion": str(self.version), "uid": "u"}
        self.objects[item["metadata"]["name"]] = item

    async def call(self, method: str, path: str, *, body: Any = None) -> bytes:
        await asyncio.sleep(0)
        name = path.removeprefix(COLLECTION).removeprefix("/")
        self.log.append((self._loop.time(), f"{method} {name or body['metadata']['name']}"))
        assert len(self.log) < MOST, self.log[:20]
        for number, (pattern, error) in enumerate(self.failing):
            if re.search(pattern, self.log[-1][1]):
                del self.failing[number]
                raise error
        if path == f"{NODE}":
            if self.uid is None:
                raise refusal(404, "NotFound")
            return msgspec.json.encode({"metadata": {"name": "node-a", "uid": self.uid}})
        assert path.startswith(COLLECTION)
        return msgspec.json.encode(self._slice(method, name, body) or {})

    def _slice(self, method: str, name: str, body: Any) -> Json | None:
        if method == "POST":
            assert not name
            name = body["metadata"]["name"]
            if name in self.objects:
                raise refusal(409, "AlreadyExists")
        elif name not in self.objects:
            raise refusal(404, "NotFound")
        if method == "DELETE":
            del self.objects[name]
            return None
        if method == "PUT":
            now = self.objects[name]["metadata"]["resourceVersion"]
            if body["metadata"]["resourceVersion"] != now:
                raise refusal(409, "Conflict")
        if method != "GET":
            sent = copy.deepcopy(body)
            self.made(sent)
            self.store(sent)
        return copy.deepcopy(self.objects[name])


class Scene:
    """A reconciler, its server, and a clock that stands until `run`.

    Attributes:
        devices: what the slices of devices ought to say.
        forms: in which it was asked what they ought to say.
        list_after: seconds until the first list is there.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = StillLoop()
        self.server = server = Server(self.loop)
        self.devices: list[list[Device]] = [[device(0)], [device(1)]]
        self.forms: list[Form] = []
        self.list_after = 0.0
        self.registered = asyncio.Event()
        scene = self

        class LateMirror(Mirror[ResourceSlice]):
            async def run(self) -> None:
                assert self._path == COLLECTION
                assert self._selector == "spec.driver=fpga.intel.com,spec.nodeName=node-a"
                await asyncio.sleep(scene.list_after)
                self.list()
                await asyncio.Event().wait()

            def list(self) -> None:
                listed = msgspec.json.encode(list(server.objects.values()))
                items = msgspec.json.decode(listed, type=list[ResourceSlice])
                self.items = {one.metadata.name: one for one in items}
                self.lists += 1
                self._changed()

        monkeypatch.setattr(slices, "Mirror", LateMirror)
        monkeypatch.setattr(slices, "session", server.session)
        self.restart()

    def restart(self) -> None:
        """Another run of the plugin."""
        self.reconciler = SliceReconciler(
            "credentials",
            Pool("fpga.intel.com", "node-a"),
            self.wanted,
            registered=self.registered,
            settle=SETTLE,
            backoff=lambda: Backoff(DELAY, LONGEST),
        )
        self.mirror: Any = self.reconciler._mirror
        self.task: asyncio.Task[None] | None = None

    def wanted(self, form: Form) -> tuple[Spec, ...]:
        self.forms.append(form)
        assert len(self.forms) < MOST
        return doubles.slices.wanted(self.devices, form)

    def run(self, seconds: float) -> None:
        """So much time passes."""
        if self.task is None:
            self.task = self.loop.create_task(self.reconciler.run())
        self.loop.settle()
        reached: list[bool] = []
        self.loop.call_later(seconds, reached.append, True)  # of no name
        while not reached:
            assert self.loop.pass_time()
        if self.task.done():
            raise AssertionError("it has ended") from self.task.exception()

    def begin(self) -> None:
        """Kubelet has the driver, and the slices are there."""
        self.registered.set()
        self.run(SETTLE + 1)
        assert self.well()

    def change(self, *parts: list[Device]) -> None:
        self.devices = list(parts)
        self.reconciler.wake()

    def told(self) -> dict[str, list[str]]:
        """The devices of each slice."""
        return {
            name: [each["name"] for each in one["spec"].get("devices", ())]
            for name, one in sorted(self.server.objects.items())
        }

    def well(self) -> bool:
        """Whether the server has exactly what is wanted, and the reconciler knows it."""
        pool, form = Pool("fpga.intel.com", "node-a"), self.reconciler.form
        want = pool.named(self.wanted(form))
        have = {
            name: {
                key: one["spec"][key] for key in ("sharedCounters", "devices") if key in one["spec"]
            }
            for name, one in self.server.objects.items()
        }
        pools = {msgspec.json.encode(one["spec"]["pool"]) for one in self.server.objects.values()}
        known = self.reconciler.published and not self.reconciler.problem
        return have == want and len(pools) == 1 and known

    def generation(self) -> int:
        return self.server.objects[FIRST]["spec"]["pool"]["generation"]

    def quiet(self) -> None:
        """Whatever it is told, nothing is asked or written."""
        before = len(self.server.log), self.server.sessions
        for _ in range(3):
            self.reconciler.wake()
            self.run(SETTLE + 1)
        assert (len(self.server.log), self.server.sessions) == before, self.server.log[before[0] :]

    def end(self) -> None:
        if self.task is not None:
            self.task.cancel()
            while not self.task.done():
                self.loop.settle()
            if not self.task.cancelled():
                self.task.exception()
        self.loop.close()


def device(number: int, *taints: Taint) -> Device:
    return Device(f"r{number}", {"port": number}, {"card": (f"region-{number}",)}, taints)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene(monkeypatch)
    yield made
    made.end()


# ------------------------------------------------------------------ when


def test_nothing_is_told_before_kubelet_has_the_driver(scene: Scene) -> None:
    """A pod would be bound to a node that cannot serve it."""
    assert not scene.reconciler.published
    assert scene.reconciler.problem == ""
    assert scene.reconciler.form == Form(), "nothing is known against the server"
    scene.reconciler.wake()
    scene.run(60)
    assert (scene.server.sessions, scene.mirror.lists) == (0, 0)
    scene.begin()
    owners = [one["metadata"]["ownerReferences"] for one in scene.server.objects.values()]
    assert owners == 3 * [
        [{"apiVersion": "v1", "kind": "Node", "name": "node-a", "uid": "uid-1"}]
    ], "the node's end is theirs"


def test_what_was_there_before_the_first_list_is_not_written_again(scene: Scene) -> None:
    scene.begin()
    assert scene.task is not None
    scene.task.cancel()
    scene.loop.settle()
    written = len(scene.server.log)
    scene.list_after = 30.0
    scene.restart()
    scene.reconciler.wake()  # the ledger has news
    scene.run(29)
    assert not scene.reconciler.published
    scene.run(3)
    assert scene.reconciler.published
    assert len(scene.server.log) == written


def test_changes_within_a_moment_are_written_once_and_the_last_counts(scene: Scene) -> None:
    """A region between two owners changes twice; each write is heard by every scheduler."""
    scene.begin()
    scene.change([device(0, DIRTY)], [device(1)])
    scene.run(SETTLE / 2)
    scene.change([device(5)], [device(1)])
    scene.run(SETTLE / 4)
    assert scene.server.count("PUT") == 0
    scene.run(SETTLE / 4 + 0.1)
    assert scene.server.count("PUT") == 1
    assert scene.well()
    assert scene.generation() == 1


def test_what_changes_while_it_is_written_waits_for_its_moment(scene: Scene) -> None:
    """A region that flaps would be written as often as the server answers."""
    scene.begin()
    numbers = itertools.count(10)

    def changed(_: Json) -> None:
        scene.change([device(next(numbers))], [device(1)])

    scene.server.made = changed
    scene.change([device(5)], [device(1)])
    scene.run(8.5 * SETTLE)
    assert scene.server.count("PUT") == 8


def test_nothing_happens_between_two_changes(scene: Scene) -> None:
    scene.begin()
    asked = len(scene.forms)
    scene.run(10_000)
    assert len(scene.forms) == asked
    scene.quiet()


def test_what_was_written_is_known_before_the_watch_tells_it(scene: Scene) -> None:
    scene.begin()
    scene.change([device(0)])
    scene.run(SETTLE + 1)
    assert scene.told() == {COUNTERS: [], FIRST: ["r0"]}
    assert scene.generation() == 2
    assert scene.server.count(f"^DELETE {SECOND}") == 1
    scene.quiet()


# ------------------------------------------------------------------ who waits for it


def waits(scene: Scene) -> float:
    """Seconds until the scheduler has been notified, as far as is waited for it."""
    task = scene.loop.create_task(scene.reconciler.caught_up())
    began = scene.loop.time()
    ends: list[float] = []
    task.add_done_callback(lambda _: ends.append(scene.loop.time()))
    scene.run(2 * slices.TELL_SECONDS)
    task.result()  # a server that is away fails no claim's end
    return ends[0] - began


def test_what_is_waited_for_is_written(scene: Scene) -> None:
    scene.begin()
    scene.change([device(0, DIRTY)], [device(1)])
    assert waits(scene) == pytest.approx(SETTLE)
    assert scene.well()


def test_who_has_nothing_to_tell_does_not_wait(scene: Scene) -> None:
    assert waits(scene) == 0, "kubelet has not the driver yet"
    scene.begin()
    assert waits(scene) == 0


def test_what_changes_meanwhile_is_told_too(scene: Scene) -> None:
    scene.begin()
    scene.change([device(0, DIRTY)], [device(1)])

    def changed(_: Json) -> None:
        scene.server.made = lambda _: None
        scene.change([device(0, DIRTY)], [device(1, DIRTY)])

    scene.server.made = changed
    assert waits(scene) == pytest.approx(2 * SETTLE)
    assert scene.well()


def test_a_server_that_takes_nothing_keeps_nobody_waiting(scene: Scene) -> None:
    """Kubelet gives the call up after 45 s, of which a scrub may take 40."""
    scene.begin()
    scene.server.failing = [("PUT", refusal(500, "InternalError"))] * 20
    scene.change([device(0, DIRTY)], [device(1)])
    assert waits(scene) == pytest.approx(slices.TELL_SECONDS)
    assert slices.TELL_SECONDS + ANSWER_SECONDS < 45


# ------------------------------------------------------------------ what fails


@pytest.mark.parametrize("what", [f"^POST {SECOND}", "^GET api/v1/nodes/node-a"])
def test_a_write_that_fails_is_tried_again_less_and_less_often(scene: Scene, what: str) -> None:
    scene.server.failing = [(what, refusal(500))] * 5
    scene.registered.set()
    with capture_logs() as logged:
        scene.run(SETTLE + 1)
        assert not scene.reconciler.published
        assert scene.reconciler.problem == "it says 500 "
        scene.run(60 * DELAY)
        assert scene.well()
    times = [time for time, line in scene.server.log if re.search(what, line)]
    waits = [after - before for before, after in itertools.pairwise(times)]
    for number, wait in enumerate(waits):
        shortest = DELAY * 2**number * 0.75
        assert shortest <= wait <= 2 * shortest + SETTLE
    events = [line["event"] for line in logged if line["log_level"] == "warning"]
    assert events == ["ResourceSlices not published"], "once, and not at each try"
    # When it has gone well the next failure is met as the first one was.
    scene.server.failing = [("^PUT", refusal(503))]
    scene.change([device(7)], [device(1)])
    scene.run(SETTLE + 0.1)
    assert scene.reconciler.problem
    scene.run(1.25 * DELAY + SETTLE)
    assert scene.well()


def test_another_failure_is_told_and_the_servers_own_pace_kept(scene: Scene) -> None:
    scene.begin()
    scene.server.failing = [("^PUT", refusal(429, retry_after=90.0)), ("^PUT", refusal(403))]
    scene.change([device(7)], [device(1)])
    with capture_logs() as logged:
        scene.run(89)
        assert scene.server.count("^PUT") == 1
        scene.run(120)
    assert scene.well()
    told = [line["error"] for line in logged if line["log_level"] == "warning"]
    assert told == ["it says 429 ", "it says 403 "]


def test_without_a_node_nothing_is_made_that_nobody_owns_and_what_is_obsolete_goes(
    scene: Scene,
) -> None:
    scene.begin()
    stray = copy.deepcopy(scene.server.objects[FIRST])
    stray["metadata"]["name"] = "stray"
    scene.server.store(stray)
    scene.mirror.list()
    scene.run(SETTLE + 1)
    assert scene.generation() == 2, "one slice more of a generation that does not count it"
    stray["spec"]["pool"]["generation"] = 1
    scene.server.store(stray)
    scene.mirror.list()
    scene.server.uid = None
    scene.run(SETTLE + 1)
    assert "stray" not in scene.server.objects
    assert scene.well()
    scene.change([device(7)], [device(1)])
    scene.run(10 * DELAY)
    assert scene.reconciler.problem
    assert scene.server.count("PUT") == 3, "those of the new generation"
    scene.server.uid = "uid-2"
    scene.run(40 * DELAY)
    assert scene.well()
    assert scene.server.objects[FIRST]["metadata"]["ownerReferences"][0]["uid"] == "uid-2"


@pytest.mark.parametrize(
    ("error", "gone"),
    [
        (refusal(404, "NotFound"), True),
        (refusal(404), False),  # a proxy's
        (refusal(500, "NotFound"), False),
        (refusal(500), False),
    ],
)
def test_what_could_not_be_deleted_is_tried_again_unless_it_is_gone(
    scene: Scene, error: ApiServerError, *, gone: bool
) -> None:
    scene.begin()
    scene.server.failing = [("^DELETE", error)]
    if gone:
        del scene.server.objects[SECOND]
    scene.change([device(0)])
    scene.run(SETTLE + 0.5)
    assert (scene.reconciler.problem == "") is gone
    scene.run(2 * DELAY)
    assert scene.well()
    assert scene.server.count("^DELETE") == (1 if gone else 2)
    scene.quiet()


# ------------------------------------------------------------------ others write too


@pytest.mark.parametrize("deleted", [False, True])
def test_a_slice_that_somebody_changed_or_deleted_unheard_is_looked_at_and_put_right(
    scene: Scene, *, deleted: bool
) -> None:
    scene.begin()
    was = scene.server.objects.pop(FIRST)
    if not deleted:
        scene.server.store(was)
    scene.change([device(7)], [device(1)])
    scene.run(SETTLE + 0.5)
    assert scene.reconciler.problem
    assert scene.server.count("^GET d") == 1
    scene.run(2 * DELAY + SETTLE)
    assert scene.well()
    scene.quiet()


def test_a_slice_that_was_made_although_no_answer_came_is_found(scene: Scene) -> None:
    usual, lost = scene.server.store, [FIRST]

    def store(item: Json) -> None:
        usual(item)
        if item["metadata"]["name"] in lost:
            lost.clear()
            raise refusal(0)

    scene.server.store = store  # type: ignore[method-assign]
    scene.registered.set()
    scene.run(40 * DELAY)
    assert scene.well()
    assert scene.server.count(f"^POST {FIRST}") == 2


@pytest.mark.parametrize(
    ("error", "looks"),
    [
        (refusal(500), False),
        (refusal(404), False),
        (refusal(0), False),
        (refusal(404, "NotFound"), True),
        (refusal(409, "Conflict"), True),
    ],
)
def test_only_who_may_be_wrong_about_a_slice_looks_at_it(
    scene: Scene, error: ApiServerError, *, looks: bool
) -> None:
    scene.begin()
    scene.server.failing = [("^PUT", error)]
    scene.change([device(7)], [device(1)])
    scene.run(SETTLE + 2 * DELAY)
    assert scene.well()
    assert scene.server.count("^GET d") == int(looks)


def test_a_server_that_does_not_serve_slices_is_not_asked_for_one(scene: Scene) -> None:
    scene.server.failing = [("^POST", refusal(404, "NotFound"))]
    scene.registered.set()
    scene.run(SETTLE + 2 * DELAY)
    assert scene.well()
    assert scene.server.count("^GET [cd]") == 0


def test_a_slice_that_cannot_be_looked_at_is_not_taken_for_gone(scene: Scene) -> None:
    scene.begin()
    scene.server.failing = [("^PUT", refusal(409, "Conflict")), ("^GET d", refusal(500))]
    scene.change([device(7)], [device(1)])
    scene.run(SETTLE + 2 * DELAY)
    assert scene.well()
    assert scene.server.count("^POST") == 3, "those of the beginning"


def test_a_slice_of_another_driver_is_named_and_never_overwritten(scene: Scene) -> None:
    foreign = {
        "metadata": {"name": FIRST},
        "spec": {"driver": "gpu.example.com", "nodeName": "node-a"},
    }
    scene.server.store(foreign)
    scene.registered.set()
    scene.list_after = 1.0
    scene.run(0)
    scene.mirror.items = {}  # the server selects by driver
    scene.mirror.list = lambda: None
    scene.mirror.lists = 1
    scene.reconciler.wake()
    scene.run(20 * DELAY)
    assert "is of driver 'gpu.example.com' on node 'node-a': delete it" in scene.reconciler.problem
    assert scene.server.objects[FIRST]["spec"] == foreign["spec"]
    del scene.server.objects[FIRST]
    scene.run(80 * DELAY)
    assert scene.well()


def test_a_quarrel_with_another_writer_is_fought_at_a_pace(scene: Scene) -> None:
    """Both would have the server for themselves."""
    scene.begin()
    usual = scene.server.store

    def store(item: Json) -> None:
        usual(item)
        other = copy.deepcopy(scene.server.objects[FIRST])
        other["spec"]["devices"][0]["attributes"] = {}
        usual(other)
        scene.mirror.learn(msgspec.convert(scene.server.objects[FIRST], ResourceSlice))
        scene.reconciler.wake()

    scene.server.store = store  # type: ignore[method-assign]
    scene.change([device(7)], [device(1)])
    scene.run(20 * SETTLE)
    assert scene.server.count("^PUT") <= 20


# ------------------------------------------------------------------ what the server understands


def without(*fields: str) -> Callable[[Json], None]:
    def made(item: Json) -> None:
        for where in (item["spec"], *item["spec"].get("devices", ())):
            for field in fields:
                where.pop(field, None)

    return made


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        (("sharedCounters", "consumesCounters"), Form(counters=False)),
        (("taints",), Form(taints=False)),
        (("sharedCounters", "consumesCounters", "taints"), Form(counters=False, taints=False)),
    ],
)
def test_a_server_that_drops_fields_gets_what_is_true_without_them_until_it_is_another(
    scene: Scene, fields: tuple[str, ...], form: Form
) -> None:
    """Devices whose counters or taints it dropped would be given out twice, or dirty."""
    scene.server.made = without(*fields)
    scene.devices = [[device(0, DIRTY)], [device(1)]]
    scene.begin()
    assert scene.reconciler.form == form
    asked = len(scene.forms)
    scene.quiet()
    assert Form() not in scene.forms[asked:], "asked again only with a new list"
    scene.server.made = lambda _: None
    scene.mirror.list()
    scene.run(SETTLE + 1)
    assert scene.reconciler.form == Form()
    assert scene.well()


@pytest.mark.parametrize("field", ["sharedCounters", "devices[0].consumesCounters"])
def test_a_server_that_refuses_counters_gets_slices_without_them(scene: Scene, field: str) -> None:
    error = refusal(422, "Invalid", f"spec.{field}: Invalid value")
    scene.server.failing = [(f"^POST {COUNTERS}", error)]
    scene.begin()
    assert scene.reconciler.form == Form(counters=False)
    assert sorted(scene.server.objects) == [FIRST, SECOND]
    scene.quiet()


@pytest.mark.parametrize(
    ("code", "said"),
    [(422, "a policy denies it"), (422, ""), (403, "spec.sharedCounters"), (500, "sharedCounters")],
)
def test_who_refuses_a_slice_for_another_reason_is_asked_again_for_the_same(
    scene: Scene, code: int, said: str
) -> None:
    scene.server.failing = [(f"^POST {COUNTERS}", refusal(code, "Invalid", said))]
    scene.registered.set()
    scene.run(SETTLE + 0.5)
    assert str(code) in scene.reconciler.problem
    scene.run(2 * DELAY)
    assert scene.well()
    assert set(scene.forms) == {Form()}


def test_who_refuses_counters_where_there_are_none_is_not_asked_without_a_pause(
    scene: Scene,
) -> None:
    scene.server.failing = [("^POST", refusal(422, "Invalid", "sharedCounters"))] * 3
    scene.registered.set()
    scene.run(SETTLE + 0.5)
    assert scene.server.count("^POST") == 2, "with counters, without, and no more"
    assert scene.reconciler.problem
    scene.run(20 * DELAY)
    assert scene.well()


def test_what_the_server_makes_of_a_slice_is_let_stand_for_as_long_as_it_makes_it(
    scene: Scene,
) -> None:
    scene.server.made = without("attributes")
    scene.registered.set()
    scene.run(SETTLE + 1)
    assert scene.reconciler.published
    scene.quiet()
    less = copy.deepcopy(scene.server.objects[FIRST])
    # Another version of it takes all; what is less then is somebody else's doing.
    scene.server.made = lambda _: None
    for parts in ([[device(7)], [device(1)]], [[device(0)], [device(1)]]):
        scene.change(*parts)
        scene.run(SETTLE + 1)
    less["spec"]["pool"] = scene.server.objects[FIRST]["spec"]["pool"]
    scene.server.store(less)
    scene.mirror.list()
    scene.run(SETTLE + 1)
    assert scene.server.objects[FIRST]["spec"]["devices"][0]["attributes"]
