"""A copy of a collection of the API server's, kept by list and watch; the server is scripted."""

import asyncio
import json
import traceback

import msgspec
import pytest
from daemon_support import LIMIT
from doubles.apiserver import ApiServerDouble, Reply, status
from doubles.loops import beside, until

from fpga_plugin.host.backoff import Backoff
from fpga_plugin.kubernetes.apiserver import mirror as mirror_module
from fpga_plugin.kubernetes.apiserver.mirror import Metadata, Mirror
from fpga_plugin.kubernetes.apiserver.rest import MAX_RETRY_AFTER, ApiServerError, session

PATH = "/apis/test/v1/things"


class Thing(msgspec.Struct):
    metadata: Metadata
    colour: str = ""


def thing(name: str, colour: str = "red", **spec: str):
    return {"metadata": {"name": name}, "colour": colour, "spec": spec}


class Scene:
    """A server, and a mirror of its things on node `a`."""

    def __init__(self, server: ApiServerDouble, kubeconfig: str) -> None:
        self.server = server
        self.changes = 0
        self._news = asyncio.Event()
        self.mirror = Mirror(
            kubeconfig,
            PATH,
            Thing,
            fields={"spec.node": "a"},
            changed=self._changed,
            backoff=Backoff(0.01, 0.05),
        )

    def _changed(self) -> None:
        self.changes += 1

    @property
    def colours(self):
        return {name: item.colour for name, item in self.mirror.items.items()}

    async def shows(self, **colours: str) -> None:
        await until(lambda: self.colours == colours)


def told(tmp_path, story, *things, accepted_token: str = "") -> ApiServerDouble:
    async def limited():
        async with asyncio.timeout(LIMIT), ApiServerDouble() as server:
            server.accepted_token = accepted_token
            server.objects[PATH] = {}
            for one in things:
                await server.put(PATH, one)
            scene = Scene(server, server.kubeconfig(tmp_path))
            async with beside(scene.mirror.run()):
                await story(scene)
            return server

    return asyncio.run(limited())


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(mirror_module, "FIRST_DELAY", 0.01)
    monkeypatch.setattr(mirror_module, "LASTING_SECONDS", 0.2)


A = thing("a", node="a")


def test_list_then_watch_keeps_the_copy_as_the_server_has_it(tmp_path) -> None:
    async def story(scene):
        await scene.shows(a="red")
        assert scene.mirror.synced
        await scene.server.put(PATH, thing("b", "blue", node="a"))
        await scene.shows(a="red", b="blue")
        await scene.server.put(PATH, thing("a", "green", node="a"))
        await scene.shows(a="green", b="blue")
        await scene.server.put(PATH, thing("elsewhere", node="b"))
        await scene.server.remove(PATH, "b")
        await scene.shows(a="green")

    server = told(tmp_path, story, A)
    assert server.count("GET") == 2, server.requests  # one list, one watch


def test_a_long_list_comes_in_pages(tmp_path) -> None:
    async def story(scene):
        await until(lambda: len(scene.colours) == 5)

    async def paged(scene):
        scene.server.page = 2
        await story(scene)

    told(tmp_path, paged, *(thing(f"n{number}", node="a") for number in range(5)))


def test_a_watch_goes_on_where_it_was_cut_without_a_list(tmp_path) -> None:
    async def story(scene):
        await scene.shows(a="red")
        for colour in ("blue", "green"):
            await until(lambda: scene.server.requests[-1].find("watch") > 0)
            scene.server.cut()
            await scene.server.put(PATH, thing("a", colour, node="a"))
            await scene.shows(a=colour)

    server = told(tmp_path, story, A)
    assert server.count("limit=") == 1, server.requests


@pytest.mark.parametrize("how", ["in the watch", "as an answer"])
def test_a_version_that_is_no_longer_kept_makes_a_new_list(tmp_path, how: str) -> None:
    async def story(scene):
        await scene.shows(a="red")
        await until(lambda: scene.server.count("watch") == 1)
        if how == "as an answer":
            scene.server.replies.append(Reply(410, status(410, "Expired"), when="watch"))
        # What was deleted meanwhile is told by no watch: only a list shows it.
        del scene.server.objects[PATH]["a"]
        await scene.server.put(PATH, thing("b", node="c"))  # a later version, of another node
        scene.server.oldest = scene.server.version
        scene.server.cut()
        await scene.shows()

    server = told(tmp_path, story, A)
    assert server.count("limit=") == 2, server.requests


def test_a_token_that_was_replaced_is_read_anew(tmp_path) -> None:
    async def story(scene):
        await until(lambda: scene.mirror.problem != "")
        assert "401" in scene.mirror.problem
        scene.server.kubeconfig(tmp_path, "second")
        await scene.shows(a="red")
        assert scene.mirror.problem == ""

    server = told(tmp_path, story, A, accepted_token="second")
    assert set(server.tokens) == {"the-token", "second"}


def test_credentials_that_come_late_are_found(tmp_path) -> None:
    path = tmp_path / "kubeconfig"

    async def story(scene):
        kept = path.read_bytes()
        path.unlink()
        await until(lambda: "kubeconfig" in scene.mirror.problem)
        path.write_bytes(kept)
        await scene.shows(a="red")

    async def without(scene):
        await story(scene)

    told(tmp_path, without, A)


def test_the_server_is_left_alone_as_long_as_it_asks(tmp_path) -> None:
    async def story(scene):
        begun = asyncio.get_running_loop().time()
        await scene.shows(a="red")
        assert asyncio.get_running_loop().time() - begun >= 1.0

    async def scripted(scene):
        scene.server.replies.append(
            Reply(429, status(429, "TooManyRequests"), headers={"Retry-After": "1"})
        )
        await story(scene)

    told(tmp_path, scripted, A)


def test_no_server_may_ask_for_an_hour() -> None:
    error = ApiServerError("x", code=429, retry_after=MAX_RETRY_AFTER)
    assert Backoff().delay(error) == MAX_RETRY_AFTER


def test_delays_grow_up_to_a_limit_and_begin_anew_after_a_success() -> None:
    backoff = Backoff(1.0, 4.0)
    delays = [backoff.delay(Exception()) for _ in range(6)]
    assert all(0.75 <= delay <= 5.0 for delay in delays)
    assert delays[-1] >= 3.0
    backoff.reset()
    assert backoff.delay(Exception()) <= 1.25


UNUSUAL = [
    b'{"kind": "\xff", "metadata": {"name": "\xff", "resourceVersion": "\xff"}}',
    b'{"deep": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
]
"""What is no UTF-8, and what is nested too deep: msgspec has other errors for these."""

REFUSALS = [
    Reply(0),
    Reply(500, status(500, "InternalError")),
    Reply(503, b"<html>bad gateway</html>"),
    Reply(404, b"<html>no such page</html>"),
    Reply(200, b"<html>welcome to this hotel</html>"),
    Reply(200, {"metadata": {"resourceVersion": 7}, "items": []}),
    Reply(200, {"metadata": {"resourceVersion": "1"}, "items": [{"metadata": []}]}),
    Reply(302, b"", headers={"Location": "http://127.0.0.1:1/"}),
    *(Reply(code, body) for code in (200, 500) for body in UNUSUAL),
]


@pytest.mark.parametrize("reply", REFUSALS, ids=lambda one: str(one.code))
@pytest.mark.parametrize("when", ["limit=", "watch="])
def test_whatever_goes_wrong_it_is_tried_again_and_what_was_known_is_kept(
    tmp_path, reply: Reply, when: str
) -> None:
    async def story(scene):
        scene.server.replies.extend([Reply(**{**reply.__dict__, "when": when})] * 3)
        await until(lambda: not scene.server.replies)
        await until(lambda: scene.server.count("watch=") >= 1)
        await scene.server.put(PATH, thing("b", "blue", node="a"))
        await scene.shows(a="red", b="blue")
        await until(lambda: scene.mirror.problem == "")

    told(tmp_path, story, A)


ODD_LINES = [
    b"{",
    b"[]",
    b'{"type": "ADDED"}',
    b'{"type": "ADDED", "object": {"metadata": {"name": 5}}}',
    b'{"type": "ERROR", "object": {"code": "x"}}',
    *(b'{"type": "ADDED", "object": %s}' % body for body in UNUSUAL),
    *(b'{"type": "ERROR", "object": %s}' % body for body in UNUSUAL),
    b'{"type": "ERROR", "object": {"code": 500, "message": "etcd is gone"}}',
]


@pytest.mark.parametrize("line", ODD_LINES, ids=lambda line: str(line[:60]))
def test_an_event_that_is_not_understood_ends_the_watch_and_loses_nothing(tmp_path, line) -> None:
    async def story(scene):
        scene.server.replies.append(Reply(200, line + b"\n", when="watch="))
        await until(lambda: not scene.server.replies)
        await scene.server.put(PATH, thing("b", "blue", node="a"))
        await scene.shows(a="red", b="blue")

    told(tmp_path, story, A)


def test_a_server_that_ends_each_watch_at_once_is_not_asked_without_a_pause(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(mirror_module, "FIRST_DELAY", 0.2)

    async def story(scene):
        scene.server.replies.extend([Reply(200, b"", when="watch=")] * 1000)
        await until(lambda: scene.server.count("watch=") >= 1)
        await asyncio.sleep(0.5)

    server = told(tmp_path, story, A)
    assert server.count("watch=") <= 5, server.requests


def test_a_dead_server_is_given_up_by_the_clock(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(mirror_module, "SILENCE_SECONDS", 0.1)

    async def story(scene):
        scene.server.replies.append(Reply(hangs=True, when="watch="))
        await until(lambda: scene.server.count("watch=") >= 2)
        await scene.server.put(PATH, thing("b", "blue", node="a"))
        await scene.shows(a="red", b="blue")

    told(tmp_path, story, A)


def test_a_call_has_an_end(tmp_path) -> None:
    async def story():
        async with asyncio.timeout(LIMIT), ApiServerDouble() as server:
            server.replies.append(Reply(hangs=True))
            async with session(server.kubeconfig(tmp_path), seconds=0.1) as calls:
                with pytest.raises(ApiServerError, match="said nothing for"):
                    await calls.call("GET", PATH)

    asyncio.run(story())


def test_a_list_without_an_end_is_given_up(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(mirror_module, "MOST_PAGES", 3)
    endless = {"metadata": {"resourceVersion": "1", "continue": "again"}, "items": []}

    async def story(scene):
        scene.server.replies.extend([Reply(200, endless, when="limit=")] * 5)
        await until(lambda: "more than 3 pages" in scene.mirror.problem)
        await scene.shows(a="red")

    told(tmp_path, story, A)


def test_a_token_that_cannot_be_sent_is_in_no_message(tmp_path) -> None:
    async def story():
        async with ApiServerDouble() as server:
            async with session(server.kubeconfig(tmp_path, "0123-secret\n")) as calls:
                with pytest.raises(ApiServerError, match=r"cannot be asked.*token") as refused:
                    await calls.call("GET", PATH)
            assert "0123" not in "".join(traceback.format_exception(refused.value))

    asyncio.run(story())


UNREADABLE = {
    "a token file that is no text": lambda folder: {"tokenFile": str(folder / "odd")},
    "a login that reports no token": lambda _: {
        "exec": {"apiVersion": "client.authentication.k8s.io/v1beta1", "command": "true"}
    },
    "a login that reports something else": lambda _: {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1beta1",
            "command": "echo",
            "args": ['{"status": {}}'],
        }
    },
}


@pytest.mark.parametrize("user", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_credentials_that_are_not_understood_end_nothing(tmp_path, user) -> None:
    path = tmp_path / "kubeconfig"
    (tmp_path / "odd").write_bytes(b"\xff\xfe")

    async def story(scene):
        good = path.read_text()
        config = json.loads(good) | {"users": [{"name": "u", "user": user(tmp_path)}]}
        path.write_text(json.dumps(config))
        await until(lambda: "credentials may" in scene.mirror.problem)
        path.write_text(good)
        await scene.shows(a="red")

    told(tmp_path, story, A)


def test_an_answer_without_an_end_is_given_up(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("fpga_plugin.kubernetes.apiserver.rest.MAX_BODY", 1000)
    monkeypatch.setattr("fpga_plugin.kubernetes.apiserver.rest.MAX_LINE", 1000)

    async def story():
        async with asyncio.timeout(LIMIT), ApiServerDouble() as server:
            server.replies.extend([Reply(200, b" " * 1001), Reply(200, b"x" * 1001)])
            async with session(server.kubeconfig(tmp_path)) as calls:
                with pytest.raises(ApiServerError, match="more than 1000 bytes"):
                    await calls.call("GET", PATH)
                with pytest.raises(ApiServerError, match="more than 1000 bytes"):
                    async for _ in calls.lines(PATH, params={}, silence=LIMIT):
                        pass

    asyncio.run(story())


def test_a_refusal_says_whether_the_api_server_itself_refused(tmp_path) -> None:
    async def story():
        async with asyncio.timeout(LIMIT), ApiServerDouble() as server:
            server.replies.extend(
                [
                    Reply(404, status(404, "NotFound")),
                    Reply(404, json.dumps({"reason": "NotFound"}).encode()),
                    Reply(404, b"<html>"),
                ]
            )
            reasons = []
            async with session(server.kubeconfig(tmp_path)) as calls:
                for _ in range(3):
                    with pytest.raises(ApiServerError) as caught:
                        await calls.call("GET", PATH)
                    reasons.append(caught.value.reason)
            return reasons

    assert asyncio.run(story()) == ["NotFound", "", ""]


def test_what_a_write_was_answered_is_not_undone_by_an_event_from_before(tmp_path) -> None:
    async def story(scene):
        await scene.shows(a="red")
        later = Thing(Metadata("a", "u", str(scene.server.version + 10)), "written")
        scene.mirror.learn(later)
        await scene.server.put(PATH, thing("a", "old", node="a"))
        await scene.server.put(PATH, thing("b", "blue", node="a"))
        await scene.shows(a="written", b="blue")
        scene.mirror.learn(Thing(Metadata("a", "u", "1"), "ancient"))
        assert scene.colours["a"] == "written"

    told(tmp_path, story, A)
