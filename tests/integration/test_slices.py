"""This node's ResourceSlices, kept as the ledger wants them: against a scripted API server."""

import asyncio
import copy
import time

import pytest
from daemon_support import LIMIT
from doubles import slices
from doubles.apiserver import ApiServerDouble, Reply, status
from doubles.loops import beside, until
from doubles.slices import Device, Effect, Taint

from fpga_plugin.dra.desired import Form, Spec
from fpga_plugin.dra.pool import COLLECTION, Pool
from fpga_plugin.dra.slices import SliceReconciler
from fpga_plugin.host.backoff import Backoff
from fpga_plugin.kubernetes.apiserver import mirror as mirror_module

NODES = "/api/v1/nodes"
DRIVER, NODE = "fpga.intel.com", "node-a"


def region(number: int, *taints: Taint, counters: bool = True) -> Device:
    consumes = {"card": (f"region-{number}",)} if counters else {}
    return Device(f"r{number}", {"type": "region", "port": number}, consumes, taints)


class Scene:
    """A server with a node, and the reconciler of its slices.

    Attributes:
        devices: what the one slice of devices ought to say, with counters where they are known.
        forms: in which the reconciler asked for the slices.
    """

    def __init__(self, server: ApiServerDouble, kubeconfig: str) -> None:
        self.server = server
        self.devices: list[list[Device]] = [[region(0), region(1)]]
        self.forms: list[Form] = []
        self.registered = asyncio.Event()
        self.registered.set()
        self.kubeconfig = kubeconfig
        self.reconciler = self.made()

    def made(self) -> SliceReconciler:
        return SliceReconciler(
            self.kubeconfig,
            Pool(DRIVER, NODE),
            self.wanted,
            registered=self.registered,
            settle=0.01,
            backoff=lambda: Backoff(0.01, 0.05),
        )

    def wanted(self, form: Form) -> tuple[Spec, ...]:
        self.forms.append(form)
        return slices.wanted(self.devices, form)

    @property
    def slices(self):
        return self.server.objects[COLLECTION]

    @property
    def writes(self) -> int:
        return self.server.count("^(POST|PUT|DELETE)")

    def generations(self) -> set[int]:
        return {one["spec"]["pool"]["generation"] for one in self.slices.values()}

    def devices_told(self) -> list[str]:
        return [
            device["name"]
            for name in sorted(self.slices)
            for device in self.slices[name]["spec"].get("devices", ())
        ]

    def whole(self) -> bool:
        """Whether the server has exactly what is wanted, of one generation."""
        wanted = self.wanted(self.reconciler.form)
        counts = {one["spec"]["pool"]["resourceSliceCount"] for one in self.slices.values()}
        return (
            len(self.slices) == len(wanted)
            and counts == {len(wanted)}
            and len(self.generations()) == 1
            and self.devices_told() == [d["name"] for one in wanted for d in one.get("devices", ())]
        )

    async def settled(self) -> None:
        """All is as wanted, and the reconciler knows it."""
        await until(self.whole)
        await until(lambda: self.reconciler.published and not self.reconciler.problem)

    async def change(self, *devices: list[Device]) -> None:
        self.devices = list(devices)
        self.reconciler.wake()
        await self.settled()

    async def quiet(self) -> None:
        """Whatever it is told, nothing is written."""
        before = self.writes
        for _ in range(5):
            self.reconciler.wake()
            await asyncio.sleep(0.03)
        assert self.writes == before, self.server.requests[before:]


def told(tmp_path, story, *, before=lambda _: None) -> ApiServerDouble:
    async def limited():
        async with asyncio.timeout(LIMIT), ApiServerDouble() as server:
            server.objects = {COLLECTION: {}, NODES: {}}
            await server.put(NODES, {"metadata": {"name": NODE}})
            scene = Scene(server, server.kubeconfig(tmp_path))
            before(scene)
            async with beside(scene.reconciler.run()):
                await story(scene)
            return server

    return asyncio.run(limited())


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(mirror_module, "FIRST_DELAY", 0.01)


def test_slices_are_published_once_kubelet_has_the_driver(tmp_path) -> None:
    async def story(scene):
        await asyncio.sleep(0.1)
        assert not scene.server.requests
        scene.registered.set()
        await scene.settled()
        (node,) = scene.server.objects[NODES].values()
        for one in scene.slices.values():
            assert one["spec"]["driver"] == DRIVER
            assert one["spec"]["nodeName"] == one["spec"]["pool"]["name"] == NODE
            assert one["metadata"]["ownerReferences"] == [
                {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": node["metadata"]["uid"]}
            ]
        await scene.quiet()

    told(tmp_path, story, before=lambda scene: scene.registered.clear())


def test_an_empty_pool_is_told_too(tmp_path) -> None:
    async def story(scene):
        await until(lambda: len(scene.slices) == 1)
        await until(lambda: scene.reconciler.published)
        await scene.quiet()

    def before(scene):
        scene.reconciler._wanted = lambda _: ({},)

    told(tmp_path, story, before=before)


def test_one_changed_slice_is_replaced_in_its_place(tmp_path) -> None:
    async def story(scene):
        await scene.settled()
        assert scene.generations() == {1}
        writes = scene.writes
        await scene.change([region(0), region(1), region(2)])
        assert scene.generations() == {1}
        assert scene.writes == writes + 1

    told(tmp_path, story)


def test_more_than_one_slice_makes_a_new_generation_and_obsolete_ones_go(tmp_path) -> None:
    async def story(scene):
        await scene.settled()
        await scene.change([region(0)], [region(1)])
        assert scene.generations() == {2}
        assert len(scene.slices) == 3
        await scene.change([region(3)], [region(4)])
        assert scene.generations() == {3}
        await scene.change([region(3)])
        assert scene.generations() == {4}
        assert len(scene.slices) == 2
        await scene.quiet()

    told(tmp_path, story)


def test_a_restart_finds_its_slices_and_writes_nothing(tmp_path) -> None:
    async def story(scene):
        await scene.settled()
        before = copy.deepcopy(scene.slices)
        again = scene.made()
        async with beside(again.run()):
            await until(lambda: again.published)
        assert scene.slices == before

    told(tmp_path, story)


@pytest.mark.parametrize("all_of_them", [True, False])
def test_what_kubelet_deletes_is_made_again(tmp_path, all_of_them) -> None:
    async def story(scene):
        await scene.settled()
        for _ in range(3):
            for name in sorted(scene.slices)[: None if all_of_them else 1]:
                await scene.server.remove(COLLECTION, name)
            await scene.settled()
        await scene.quiet()

    told(tmp_path, story)


def test_a_node_that_was_made_anew_owns_the_slices(tmp_path) -> None:
    async def story(scene):
        await scene.settled()
        await scene.server.remove(NODES, NODE)
        for name in list(scene.slices):
            await scene.server.remove(COLLECTION, name)
        await until(lambda: scene.reconciler.problem != "")  # without a node nobody owns them
        await scene.server.put(NODES, {"metadata": {"name": NODE}})
        await scene.settled()
        (node,) = scene.server.objects[NODES].values()
        owners = [one["metadata"]["ownerReferences"][0]["uid"] for one in scene.slices.values()]
        assert set(owners) == {node["metadata"]["uid"]}

    told(tmp_path, story)


def test_what_somebody_else_wrote_is_put_right(tmp_path) -> None:
    async def story(scene):
        await scene.settled()
        name = max(scene.slices)
        forged = copy.deepcopy(scene.slices[name])
        forged["spec"]["devices"][0]["attributes"] = {}
        await scene.server.put(COLLECTION, forged)
        await until(lambda: scene.slices[name]["spec"]["devices"][0]["attributes"])
        stray = copy.deepcopy(scene.slices[name])
        stray["metadata"] = {"name": "stray"}
        stray["spec"]["pool"]["generation"] = 1 << 62
        await scene.server.put(COLLECTION, stray)
        await until(lambda: "stray" not in scene.slices)
        await scene.settled()

    told(tmp_path, story)


@pytest.mark.parametrize("other", [{"nodeName": "node-b"}, {"driver": "gpu.example.com"}])
def test_slices_of_others_stay_where_a_server_tells_them_too(tmp_path, monkeypatch, other) -> None:
    monkeypatch.setattr("doubles.apiserver._selected", lambda *_: True)

    async def story(scene):
        await until(lambda: scene.slices)
        await scene.settled()
        foreign = copy.deepcopy(scene.slices[max(scene.slices)])
        foreign["metadata"] = {"name": "foreign"}
        foreign["spec"] |= other | {"devices": []}
        await scene.server.put(COLLECTION, foreign)
        scene.devices = [[region(0, HOT), region(1)]]
        scene.reconciler.wake()
        await until(lambda: taints_of(scene, "r0"))
        await scene.quiet()
        assert "foreign" in scene.slices

    told(tmp_path, story)


def test_a_taint_that_makes_no_sense_is_put_right_too(tmp_path) -> None:
    async def story(scene):
        await scene.settled()
        name = max(scene.slices)
        forged = copy.deepcopy(scene.slices[name])
        forged["spec"]["devices"][0]["taints"] = [
            {"key": "k", "value": {}, "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z"}
        ]
        await scene.server.put(COLLECTION, forged)
        await until(lambda: "taints" not in scene.slices[name]["spec"]["devices"][0])
        await scene.settled()

    told(tmp_path, story)


@pytest.mark.parametrize("code", [0, 409, 429, 500, 503, 403, 404])
@pytest.mark.parametrize("when", ["^GET /api/v1/nodes", "^POST", "^PUT", "^DELETE"])
def test_a_write_that_fails_is_tried_again(tmp_path, code: int, when: str) -> None:
    async def story(scene):
        await scene.settled()
        body = b"<html>" if code == 404 else status(code, "Whatever")
        scene.server.replies.extend([Reply(code, body, when=when)] * 2)
        await scene.change([region(5)], [region(6)], [region(7)])
        await scene.change([region(5)])
        assert not scene.server.replies
        await scene.quiet()

    told(tmp_path, story)


@pytest.mark.parametrize("when", ["^POST", "^PUT", "^DELETE"])
def test_a_write_whose_answer_is_lost_is_found_to_be_done(tmp_path, when: str) -> None:
    async def story(scene):
        await scene.settled()
        lost = [2]
        usual = scene.server._send

        async def send(writer, reply):
            if lost[0] and scene.server.count(when) > begun and reply.body:
                lost[0] -= 1
                return False
            return await usual(writer, reply)

        begun = scene.server.count(when)
        scene.server._send = send
        await scene.change([region(5)], [region(6)], [region(7)])
        await scene.change([region(5)])
        assert lost == [0]
        await scene.quiet()

    told(tmp_path, story)


def test_a_conflict_is_settled_by_looking(tmp_path) -> None:
    async def story(scene):
        await scene.settled()
        scene.server.replies.append(Reply(409, status(409, "Conflict"), when="^PUT"))
        await scene.change([region(5), region(6)])
        assert scene.server.count("^GET .*resourceslices/") == 1

    told(tmp_path, story)


def test_a_name_that_another_driver_took_is_named_and_taken_once_it_is_free(tmp_path) -> None:
    async def story(scene):
        await until(lambda: "delete it" in scene.reconciler.problem)
        assert "other" in scene.reconciler.problem
        await scene.server.remove(COLLECTION, name)
        await scene.settled()

    name = next(iter(Pool(DRIVER, NODE).named([{}])))

    def before(scene):
        scene.server.objects[COLLECTION][name] = {
            "metadata": {"name": name, "resourceVersion": "5", "uid": "u"},
            "spec": {"driver": "other", "nodeName": NODE, "pool": {"name": "x"}},
        }

    told(tmp_path, story, before=before)


# -------------------------------------------------------------------- taints


HOT = Taint("faulted", "thermal")


def stamping(item) -> None:
    """What the API server does: a taint without a time gets the present one."""
    for device in item["spec"].get("devices", ()) if "spec" in item else ():
        for taint in device.get("taints", ()):
            taint.setdefault("timeAdded", str(time.monotonic_ns()))


def taints_of(scene, name: str):
    (found,) = [
        device.get("taints")
        for one in scene.slices.values()
        for device in one["spec"].get("devices", ())
        if device["name"] == name
    ]
    return found


def test_a_taint_is_told_without_a_new_generation_and_keeps_its_time(tmp_path) -> None:
    async def story(scene):
        await scene.settled()
        scene.devices = [[region(0, HOT), region(1)]]
        scene.reconciler.wake()
        await until(lambda: taints_of(scene, "r0"))
        (taint,) = first = taints_of(scene, "r0")
        assert (taint["key"], taint["value"]) == (f"{DRIVER}/faulted", "thermal")
        assert taint["effect"] == "NoSchedule"
        await scene.quiet()
        evict = Taint("faulted", "", Effect.NO_EXECUTE)
        scene.devices = [[region(0, HOT), region(1, evict)]]
        scene.reconciler.wake()
        await until(lambda: taints_of(scene, "r1"))
        assert taints_of(scene, "r1")[0]["effect"] == "NoExecute"
        assert taints_of(scene, "r0") == first
        assert scene.generations() == {1}
        scene.devices = [[region(0), region(1)]]
        scene.reconciler.wake()
        await until(lambda: not taints_of(scene, "r0"))
        await scene.quiet()

    def before(scene):
        scene.server.made = stamping

    told(tmp_path, story, before=before)


# -------------------------------------------------------------------- older servers


def without_counters(item) -> None:
    item.get("spec", {}).pop("sharedCounters", None)
    for device in item.get("spec", {}).get("devices", ()):
        device.pop("consumesCounters", None)


def without_taints(item) -> None:
    for device in item.get("spec", {}).get("devices", ()):
        device.pop("taints", None)


def test_a_server_that_drops_counters_never_sees_devices_that_need_them(tmp_path) -> None:
    async def story(scene):
        await scene.settled()
        assert scene.reconciler.form == Form(counters=False)
        await scene.quiet()

    posted = []

    def before(scene):
        def made(item):
            posted.append(copy.deepcopy(item.get("spec", {})))
            without_counters(item)

        scene.server.made = made

    told(tmp_path, story, before=before)
    assert not any(
        "consumesCounters" in device for spec in posted for device in spec.get("devices", ())
    )


def test_a_server_that_refuses_counters_gets_slices_without_them(tmp_path) -> None:
    async def story(scene):
        await scene.settled()
        assert scene.reconciler.form == Form(counters=False)
        await scene.quiet()
        # An upgraded server no longer has the version that the watch would go on at.
        await scene.server.put(NODES, {"metadata": {"name": "another"}})
        scene.server.oldest = scene.server.version
        scene.server.cut()
        await until(lambda: scene.reconciler.form == Form())
        await scene.settled()

    def before(scene):
        message = f"ResourceSlice {'x' * 100} is invalid: spec.devices[0].consumesCounters[0]: no"
        scene.server.replies.append(Reply(422, status(422, "Invalid", message), when="^POST"))

    told(tmp_path, story, before=before)


def test_a_policy_that_refuses_a_slice_for_another_reason_takes_no_counters_away(tmp_path) -> None:
    async def story(scene):
        await scene.settled()
        assert set(scene.forms) == {Form()}

    def before(scene):
        denied = "ValidatingAdmissionPolicy 'x' denied request: only between two and three o'clock"
        scene.server.replies.append(Reply(422, status(422, "Invalid", denied), when="^POST"))

    told(tmp_path, story, before=before)


def test_a_server_that_drops_taints_is_asked_for_no_others(tmp_path) -> None:
    async def story(scene):
        await scene.settled()
        assert scene.reconciler.form == Form(taints=False)
        await scene.quiet()

    def before(scene):
        scene.devices = [[region(0, HOT), region(1)]]
        scene.server.made = without_taints

    told(tmp_path, story, before=before)


def test_a_server_that_changes_something_else_is_not_fought(tmp_path) -> None:
    async def story(scene):
        await scene.settled()
        await scene.quiet()
        await scene.change([region(0)])
        await scene.quiet()

    def before(scene):
        def made(item):
            for device in item.get("spec", {}).get("devices", ()):
                device["bindsToNode"] = False

        scene.server.made = made

    told(tmp_path, story, before=before)


ODD = [
    {"metadata": []},
    {"metadata": {"name": "x"}, "spec": {"devices": [1]}},
    {"metadata": {"name": "x"}, "spec": {"pool": {"generation": "1"}}},
    {"kind": "Status"},
    b"<html>",
    b'{"metadata": {"name": "\xff", "uid": "u"}}',
    b'{"metadata": {"name": "x", "uid": "u"}, "deep": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
]


@pytest.mark.parametrize("answer", ODD, ids=lambda answer: str(answer)[:60])
def test_answers_that_are_not_understood_end_nothing(tmp_path, answer) -> None:
    async def story(scene):
        scene.server.replies.append(Reply(200, answer, when="^POST"))
        scene.server.replies.append(Reply(200, answer, when="^GET .*nodes"))
        await scene.settled()
        await scene.quiet()

    told(tmp_path, story, before=lambda scene: scene.registered.set())
