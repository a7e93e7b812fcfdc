"""Where a stock kubelet's pods are read: kubelet's Pods API and the API server, both as servers."""

import asyncio
import contextlib
import http.server
import json
import os
import re
import ssl
import subprocess
import sys
import threading
import time
import traceback
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest
from daemon_support import AFU, AFU_2, BLANK, LIMIT, P0, Node
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from pods_support import (
    APP_ENV,
    OF_NODE,
    REGION,
    UID,
    FakePod,
    PodResources,
    PodsServer,
    as_kubelet_has_it,
    fpga,
    logged,
    on_stock_kubelet,
    request,
    serving,
)

from fpga_plugin.allocation.requests import directory as pod_directory
from fpga_plugin.allocation.requests.directory import PodDirectory
from fpga_plugin.allocation.requests.identity import Identity
from fpga_plugin.demo.pod import DemoPod
from fpga_plugin.deviceplugin import environment
from fpga_plugin.deviceplugin.environment import StockEnvironment
from fpga_plugin.errors import InvalidRequestError, NoSourceError
from fpga_plugin.ids import DeviceId, ours
from fpga_plugin.kubernetes.apiserver.pods import ApiServer
from fpga_plugin.kubernetes.cgroup import PodCgroups
from fpga_plugin.kubernetes.kubelet.podresources import PodResourcesClient
from fpga_plugin.kubernetes.kubelet.podsapi import PodsApi
from fpga_plugin.kubernetes.names import PodUid
from fpga_plugin.kubernetes.pod import PodSourceError

OTHER_UID = PodUid("0f1c2d3e-0000-4000-8000-000000000002")
MIRROR = {"kubernetes.io/config.mirror": UID}
PREFIX = "fpga.intel.com"
DEVICES = (DeviceId(P0),)


INIT_ENV = request(AFU)


# -------------------------------------------------------------------- the servers


class ApiServerDouble:
    """`GET /api/v1/namespaces/<namespace>/pods/<name>`, and nothing else."""

    def __init__(self, *pods: FakePod) -> None:
        self.pods = {f"/api/v1/namespaces/tenant/pods/{pod.name}": pod for pod in pods}
        self.asked: list[tuple[str, str]] = []
        self.code = 200
        self.body: bytes | None = None
        self.halves = False
        self.before = lambda: None
        self.go_on = threading.Event()
        self.go_on.set()
        double = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                double.asked.append((self.path, self.headers.get("Authorization", "")))
                double.go_on.wait(LIMIT)
                double.before()
                pod = double.pods.get(self.path)
                code = 404 if pod is None else double.code
                told = {"kind": "Status", "code": code, "message": "because"}
                if pod is None:
                    told["reason"] = "NotFound"
                if code == 200:
                    told = pod.json()
                body = json.dumps(told).encode() if double.body is None else double.body
                with contextlib.suppress(OSError):
                    self.send_response(code)
                    kind = "text/html" if body.startswith(b"<") else "application/json"
                    self.send_header("Content-Type", kind)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body[: len(body) // 2] if double.halves else body)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))

    def kubeconfig(self, folder, *, scheme="http", authority=""):
        path = folder / "kubeconfig"
        cluster = {"server": f"{scheme}://127.0.0.1:{self.server.server_port}"}
        if authority:
            cluster["certificate-authority"] = authority
        config = {
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [{"name": "k", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": "the-token"}}],
        }
        path.write_text(json.dumps(config))  # JSON is YAML
        return str(path)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.go_on.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def identity(*containers: str, uid: PodUid | None = UID, container: str = "") -> Identity:
    return Identity(
        uid,
        frozenset(containers or ("app",)),
        frozenset({REGION}),
        held=frozenset(DEVICES),
        container=container,
    )


def run(story):
    async def limited():
        async with asyncio.timeout(LIMIT):
            return await story

    return asyncio.run(limited())


@pytest.fixture
def socket(tmp_path):
    return tmp_path / "pods.sock"


@pytest.fixture
def list_socket(tmp_path):
    return tmp_path / "list.sock"


def directory(**sources) -> PodDirectory:
    return PodDirectory(kubelet_dir="/nowhere", prefix=PREFIX, **sources)


def from_kubelet(socket) -> StockEnvironment:
    return StockEnvironment(directory(pods_socket=str(socket), kubeconfig="/nowhere"))


def from_api_server(kubeconfig, list_socket, *, settle=0.01, cgroups=None) -> StockEnvironment:
    listed = PodResourcesClient(str(list_socket), ours(PREFIX))
    pods = directory(kubeconfig=kubeconfig, podresources=listed)
    return StockEnvironment(pods, cgroups=cgroups, settle=settle)


async def env_of(source, who, *, fresh) -> Mapping[str, str]:
    return (await source.ask(who, DEVICES, fresh=fresh))[1]


async def unanswered(source, who, *, fresh=False) -> str:
    with pytest.raises(NoSourceError) as caught:
        await source.ask(who, DEVICES, fresh=fresh)
    assert caught.value.status is Status.UNAVAILABLE
    assert len(str(caught.value)) < 1024
    return str(caught.value)


# -------------------------------------------------------------------- kubelet's Pods API


def test_kubelet_tells_what_a_container_asks_for(socket):
    async def story():
        server = PodsServer(FakePod(app={"app": {"SECRET": "s"} | APP_ENV, "other": INIT_ENV}))
        async with serving(server, socket):
            source = from_kubelet(socket)
            who, env = await source.ask(identity(), DEVICES, fresh=True)
            assert (env, who.container) == (APP_ENV, "")
            assert who.name == ("tenant", "compress")
            assert server.calls == [UID]
            # A restart asks nobody: the environment of a pod never changes.
            assert await env_of(source, identity(), fresh=False) == APP_ENV
            assert await env_of(source, identity("other"), fresh=False) == INIT_ENV
            assert server.calls == [UID]
            assert source._pods.answers == {"pods-api": 1, "kept": 2}
            assert "SECRET" not in repr(source._pods._known)

    run(story())


def test_a_container_without_requests_asks_for_nothing(socket):
    async def story():
        async with serving(PodsServer(FakePod(app={"app": {"A": "b"}})), socket):
            assert await env_of(from_kubelet(socket), identity(), fresh=True) == {}

    run(story())


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        ({"error": GRPCError(Status.FAILED_PRECONDITION, "Kubelet is initializing")}, "starting"),
        ({"error": GRPCError(Status.UNIMPLEMENTED)}, "does not have this call"),
        ({"error": GRPCError(Status.RESOURCE_EXHAUSTED, "slow\n")}, "RESOURCE_EXHAUSTED 'slow?'"),
        ({"pods": {}}, f"knows no pod {UID}"),
        ({"raw": b""}, "not understood"),
        ({"raw": b"\xff\xff\xff"}, "not understood"),
        ({"raw": bytes(FakePod(uid=OTHER_UID).message())}, f"another pod: {OTHER_UID}"),
        ({"hangs": True}, "did not answer"),
    ],
)
def test_a_kubelet_that_fails_to_answer_gives_a_reason_and_no_pod(socket, fails, words):
    async def story():
        server = PodsServer(FakePod())
        for name, value in fails.items():
            setattr(server, name, value)
        async with serving(server, socket):
            with pytest.raises(PodSourceError, match=str(socket)) as caught:
                await PodsApi(str(socket), call_seconds=0.2).get(UID)
            assert words in str(caught.value)

    run(story())


def test_without_any_source_the_message_says_what_to_configure(socket):
    async def story():
        said = await unanswered(from_kubelet(socket), identity())
        for words in (
            UID,
            "No such file",
            str(socket),
            "PodResources API is switched off",
            "FPGA_PLUGIN_PODS_SOCKET",
            "get pods",
            "FPGA_PLUGIN_KUBECONFIG",
        ):
            assert words in said, said
        socket.write_text("")  # nobody listens
        assert "Connection refused" in await unanswered(from_kubelet(socket), identity())

    run(story())


def test_a_pod_that_kubelets_records_do_not_tell_has_no_source(socket):
    async def story():
        said = await unanswered(from_kubelet(socket), Identity())
        for words in ("checkpoint", P0, "FPGA_PLUGIN_KUBELET_DIR"):
            assert words in said

    run(story())


def test_a_container_that_the_spec_lacks_has_no_source(socket):
    async def story():
        async with serving(PodsServer(FakePod()), socket):
            said = await unanswered(from_kubelet(socket), identity("app", "gone"))
            assert "tenant/compress lacks containers" in said

    run(story())


def test_a_request_out_of_a_field_that_may_change_is_read_anew(socket):
    async def story():
        env = APP_ENV | {
            "FPGA_AFU_1": {"valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['afu']"}}}
        }
        pod = FakePod(app={"app": env})
        server = PodsServer(pod)
        async with serving(server, socket):
            source = from_kubelet(socket)
            for afu in (AFU, AFU_2):
                pod.labels["afu"] = afu
                env = await env_of(source, identity(), fresh=True)
                assert env["FPGA_AFU_1"] == afu
            pod.labels["afu"] = "no_name"
            with pytest.raises(InvalidRequestError, match="FPGA_AFU_1='no_name'"):
                await source.ask(identity(), DEVICES, fresh=True)
            assert len(server.calls) == 3

    run(story())


def test_a_static_pod_is_read_anew(socket):
    async def story():
        pod = FakePod(annotations={"kubernetes.io/config.source": "file"})
        async with serving(PodsServer(pod), socket):
            source = from_kubelet(socket)
            assert await env_of(source, identity(), fresh=True) == APP_ENV
            pod.app = {"app": INIT_ENV}
            assert await env_of(source, identity(), fresh=True) == INIT_ENV

    run(story())


def test_a_malformed_request_is_the_containers_own_matter(socket):
    async def story():
        app = {"app": {"FPGA_REGION_1": "x"}, "fine": APP_ENV}
        server = PodsServer(FakePod(app=app))
        async with serving(server, socket):
            source = from_kubelet(socket)
            for _ in range(2):
                with pytest.raises(InvalidRequestError, match="FPGA_REGION_1='x'"):
                    await source.ask(identity(), DEVICES, fresh=True)
            assert await env_of(source, identity("fine"), fresh=True) == APP_ENV
            assert len(server.calls) == 1

    run(story())


def test_what_is_remembered_of_pods_is_bounded(socket, monkeypatch):
    monkeypatch.setattr(pod_directory, "KEPT_PODS", 2)
    monkeypatch.setattr(environment, "KEPT_PODS", 2)

    async def story():
        uids = [PodUid(f"uid-{n}") for n in range(4)]
        async with serving(PodsServer(*(FakePod(uid=uid) for uid in uids)), socket):
            source = from_kubelet(socket)
            for uid in uids:
                await source.ask(identity(uid=uid), DEVICES, fresh=True)
                source.refused(identity("app", "init", uid=uid), DEVICES, "words")
            assert list(source._pods._known) == list(source._trails) == uids[2:]

    run(story())


# -------------------------------------------------------------------- the API server


def test_the_api_server_tells_where_kubelet_does_not(tmp_path, list_socket, socket):
    async def story(api):
        async with serving(PodResources(compress=P0, other="0000-10-00.0-p1"), list_socket):
            source = StockEnvironment(
                directory(
                    pods_socket=str(socket),
                    kubeconfig=api.kubeconfig(tmp_path),
                    podresources=PodResourcesClient(str(list_socket), ours(PREFIX)),
                )
            )
            who, env = await source.ask(identity(), DEVICES, fresh=True)
            assert (env, who.name) == (APP_ENV, ("tenant", "compress"))
            # With the control plane away the pod's containers still restart.
            api.code = 500
            assert await env_of(source, identity(), fresh=False) == APP_ENV
            assert source._pods.answers == {"api-server": 1, "kept": 1}

    with ApiServerDouble(FakePod()) as api:
        run(story(api))
        # `get pods` is the only right that is used.
        assert api.asked == [("/api/v1/namespaces/tenant/pods/compress", "Bearer the-token")]


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        ({"code": 401}, "does not accept the plugin's credentials"),
        ({"code": 403}, "does not allow the plugin to get pods"),
        ({"code": 404}, "answered 404"),
        ({"code": 404, "body": b"<html>"}, "answered 404"),
        ({"code": 429}, "answered 429"),
        ({"halves": True}, "cannot be asked"),
        ({"code": 500}, "answered 500"),
        ({"code": 503, "body": b"<html>"}, "answered 503"),
        ({"code": 503, "body": b"broken"}, "answered 503"),
        ({"pods": {}}, "knows no pod tenant/compress"),
        ({"body": b"<html>"}, "not understood"),
        ({"body": b"{}"}, "not understood"),
        ({"body": b'{"metadata": 7}'}, "not understood"),
    ],
)
def test_an_api_server_that_fails_to_answer_gives_a_reason_and_no_pod(tmp_path, fails, words):
    with ApiServerDouble(FakePod()) as api:
        for name, value in fails.items():
            setattr(api, name, value)
        with pytest.raises(PodSourceError) as caught:
            run(ApiServer(api.kubeconfig(tmp_path)).get("tenant", "compress"))
        assert words in str(caught.value)


@pytest.mark.parametrize("spoilt", ["file", "directory"])
def test_credentials_that_others_may_write_are_not_used(tmp_path, spoilt):
    """They would say whom to ask what a pod is, and which program logs in."""
    (tmp_path / "etc").mkdir(mode=0o755)
    with ApiServerDouble(FakePod()) as api:
        path = api.kubeconfig(tmp_path / "etc")
        os.chmod(path if spoilt == "file" else tmp_path / "etc", 0o777)
        with pytest.raises(PodSourceError, match="may be written by anybody") as caught:
            run(ApiServer(path).get("tenant", "compress"))
        assert "chmod go-w" in str(caught.value)
        assert api.asked == []


# -------------------------------------------------------------------- is it gone?


@pytest.mark.parametrize(
    ("told", "ended"),
    [
        ({}, False),
        ({"pods": {}}, True),
        ({"phase": "Running"}, False),
        ({"phase": "Succeeded"}, True),
        ({"phase": "Failed"}, True),
        ({"error": GRPCError(Status.FAILED_PRECONDITION, "Kubelet is initializing")}, None),
        ({"error": GRPCError(Status.UNIMPLEMENTED)}, None),
        ({"raw": b"\xff\xff\xff"}, None),
        ({"raw": bytes(FakePod(uid=OTHER_UID).message())}, None),
    ],
)
def test_kubelet_tells_whether_a_pod_is_gone_or_has_ended(socket, told, ended):
    async def story():
        pod = FakePod()
        server = PodsServer(pod)
        async with serving(server, socket):
            source = from_kubelet(socket)
            await source.ask(identity(), DEVICES, fresh=True)
            for name, value in told.items():
                setattr(pod if name == "phase" else server, name, value)
            if ended is None:
                with pytest.raises(NoSourceError, match=f"whether pod {UID} is still there"):
                    await source._pods.ended(UID)
            else:
                assert await source._pods.ended(UID) is ended

    run(story())


@pytest.mark.parametrize("after", ["the plugin's start", "kubelet's start"])
def test_a_kubelet_that_does_not_have_its_pods_yet_ends_none(socket, after):
    """1.36 says NOT_FOUND of each pod until it has heard from the API server."""

    async def story():
        server = PodsServer(FakePod())
        async with serving(server, socket):
            source = from_kubelet(socket)
            if after == "kubelet's start":
                await source.ask(identity(), DEVICES, fresh=True)
                source.new_kubelet()
            pods, server.pods = server.pods, {}
            with pytest.raises(NoSourceError, match="and has not since it started"):
                await source._pods.ended(UID)
            server.pods = pods
            assert not await source._pods.ended(UID)
            server.pods = {}
            assert await source._pods.ended(UID)

    run(story())


@pytest.mark.parametrize(
    ("told", "ended"),
    [
        ({}, False),
        ({"pods": {}}, True),
        ({"uid": OTHER_UID}, True),
        ({"phase": "Failed"}, True),
        ({"code": 404, "body": b"<html>"}, None),
        ({"code": 404}, None),
        ({"code": 403}, None),
        ({"code": 429}, None),
        ({"code": 500}, None),
        ({"halves": True}, None),
        ({"body": b"{}"}, None),
    ],
)
def test_the_api_server_tells_whether_a_pod_that_was_read_is_gone(
    tmp_path, list_socket, told, ended
):
    async def story(api, pod):
        async with serving(PodResources(compress=P0), list_socket):
            source = from_api_server(api.kubeconfig(tmp_path), list_socket)
            with pytest.raises(NoSourceError, match="its name is not known"):
                await source._pods.ended(UID)  # who has the devices now may be another pod
            await source.ask(identity(), DEVICES, fresh=True)
        for name, value in told.items():
            setattr(pod if name in {"uid", "phase"} else api, name, value)
        if ended is None:
            with pytest.raises(NoSourceError, match=f"whether pod {UID} is still there"):
                await source._pods.ended(UID)
        else:
            assert await source._pods.ended(UID) is ended

    pod = FakePod()
    with ApiServerDouble(pod) as api:
        run(story(api, pod))


def test_a_copy_of_a_static_pod_that_somebody_deleted_ends_nothing(tmp_path, list_socket):
    async def story(api):
        async with serving(PodResources(compress=P0), list_socket):
            source = from_api_server(api.kubeconfig(tmp_path), list_socket)
            await source.ask(identity(), DEVICES, fresh=True)
        api.pods.clear()
        with pytest.raises(NoSourceError, match="its name is not known"):
            await source._pods.ended(UID)

    copy = FakePod(uid=OTHER_UID, annotations=MIRROR, owners=[OF_NODE])
    with ApiServerDouble(copy) as api:
        run(story(api))


def test_an_api_server_that_does_not_answer_is_waited_for_no_longer_than_that(tmp_path):
    with ApiServerDouble(FakePod()) as api:
        api.go_on.clear()
        with pytest.raises(PodSourceError, match=r"did not answer|cannot be asked"):
            run(ApiServer(api.kubeconfig(tmp_path), call_seconds=0.2).get("tenant", "compress"))


def test_an_api_server_that_is_away_is_a_reason(tmp_path):
    with ApiServerDouble() as api:
        kubeconfig = api.kubeconfig(tmp_path)
    with pytest.raises(PodSourceError, match="cannot be asked"):
        run(ApiServer(kubeconfig).get("tenant", "compress"))


def test_a_token_that_cannot_be_sent_is_in_no_message(tmp_path):
    with ApiServerDouble() as api:
        path = api.kubeconfig(tmp_path)
        config = json.loads(Path(path).read_text())
        config["users"] = [{"name": "u", "user": {"token": "0123-secret\n"}}]
        config["contexts"][0]["context"]["user"] = "u"
        Path(path).write_text(json.dumps(config))
        with pytest.raises(PodSourceError, match=r"cannot be asked.*token") as refused:
            run(ApiServer(path).get("tenant", "compress"))
    assert "0123" not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize("text", [None, "", "[]", "{", "a: [", '{"clusters": []}', "\0"])
def test_credentials_that_cannot_be_used_are_named(tmp_path, text):
    path = tmp_path / "kubeconfig"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PodSourceError, match=str(path)):
        run(ApiServer(str(path)).get("tenant", "compress"))


def test_without_a_service_account_that_is_what_is_said(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(PodSourceError, match="no service account is mounted"):
        run(ApiServer(None).get("tenant", "compress"))


def test_a_pod_of_the_same_name_is_not_the_same_pod(tmp_path, list_socket):
    async def story(api):
        async with serving(PodResources(compress=P0), list_socket):
            said = await unanswered(
                from_api_server(api.kubeconfig(tmp_path), list_socket), identity()
            )
            assert f"is another one ({OTHER_UID})" in said

    with ApiServerDouble(FakePod(uid=OTHER_UID)) as api:
        run(story(api))


def test_the_copy_of_a_static_pod_has_kubelets_uid_in_an_annotation(tmp_path, list_socket):
    async def story(api):
        async with serving(PodResources(compress=P0), list_socket):
            source = from_api_server(api.kubeconfig(tmp_path), list_socket)
            for _ in range(2):
                assert await env_of(source, identity(), fresh=True) == APP_ENV

    copy = FakePod(uid=OTHER_UID, annotations=MIRROR, owners=[OF_NODE])
    with ApiServerDouble(copy) as api:
        run(story(api))
        assert len(api.asked) == 2


def test_a_pod_that_says_it_is_a_mirror_takes_nobodys_place(tmp_path, list_socket):
    """Its tenant deleted the pod that still runs, and made another one of the same name."""

    async def story(api):
        async with serving(PodResources(compress=P0), list_socket):
            said = await unanswered(
                from_api_server(api.kubeconfig(tmp_path), list_socket), identity()
            )
            assert f"is another one ({OTHER_UID})" in said

    with ApiServerDouble(FakePod(uid=OTHER_UID, annotations=MIRROR)) as api:
        run(story(api))


def test_a_pod_that_says_it_is_a_mirror_keeps_no_other_pods_device(tmp_path, list_socket):
    async def story(api):
        async with serving(PodResources(compress=P0), list_socket):
            source = from_api_server(api.kubeconfig(tmp_path), list_socket)
            await source.ask(identity(), DEVICES, fresh=True)
        assert not await source._pods.ended(UID)
        (path,) = api.pods
        api.pods[path] = FakePod(uid=OTHER_UID, annotations=MIRROR)
        assert await source._pods.ended(UID)

    with ApiServerDouble(FakePod()) as api:
        run(story(api))


def test_a_pod_that_says_it_is_static_is_asked_for_once(tmp_path, list_socket):
    async def story(api):
        async with serving(PodResources(compress=P0), list_socket):
            source = from_api_server(api.kubeconfig(tmp_path), list_socket)
            for _ in range(2):
                assert await env_of(source, identity(), fresh=True) == APP_ENV

    with ApiServerDouble(FakePod(annotations={"kubernetes.io/config.source": "file"})) as api:
        run(story(api))
        assert len(api.asked) == 1


@pytest.mark.parametrize(
    ("listed", "words"),
    [({"other": "0000-10-00.0-p1"}, "no pod"), ({"a": P0, "b": P0}, "several pods")],
)
def test_a_pod_whose_name_is_not_told_is_not_asked_for(tmp_path, list_socket, listed, words):
    async def story(api):
        async with serving(PodResources(**listed), list_socket):
            said = await unanswered(
                from_api_server(api.kubeconfig(tmp_path), list_socket), identity()
            )
            assert f"shows {words} with the devices" in said

    with ApiServerDouble(FakePod()) as api:
        run(story(api))
        assert api.asked == []


# -------------------------------------------------------------------- whose turn it is


BOTH = ("init", "app")


def two() -> FakePod:
    return FakePod(init={"init": INIT_ENV}, app={"app": APP_ENV})


class Life:
    """PreStarts of one pod, as kubelet and the service make them."""

    def __init__(self, source, pod: FakePod) -> None:
        self.source = source
        self.pod = pod

    async def start(self, expected: Mapping[str, str], container: str, *, fresh=False) -> None:
        who = identity(*BOTH)
        who, env = await self.source.ask(who, DEVICES, fresh=fresh)
        assert (env, who.container) == (expected, container)
        self.source.started(who, DEVICES)

    async def refuse(self, starting: str) -> None:
        words = await unanswered(self.source, identity(*BOTH))
        assert "init, app of pod tenant/compress ask for different bitstreams" in words
        self.source.refused(identity(*BOTH), DEVICES, words)
        self.pod.refused(starting, words)


def on_the_pods_api(story, socket) -> None:
    """`story(life, pod)` of a pod of two containers, of which kubelet reports."""

    async def told():
        pod = two()
        async with serving(PodsServer(pod), socket):
            await story(Life(from_kubelet(socket), pod), pod)

    run(told())


def on_the_api_server(
    story, tmp_path, list_socket, *, patience: float = environment.PATIENCE
) -> None:
    """The same, where the API server reports the pod: `story(life, pod, api)`."""

    async def told(api, pod):
        async with serving(PodResources(compress=P0), list_socket):
            await story(Life(from_api_server(api.kubeconfig(tmp_path), list_socket), pod), pod, api)

    pod = two()
    with ApiServerDouble(pod) as api, pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "PATIENCE", patience)
        run(told(api, pod))


def test_containers_that_ask_for_the_same_need_no_status(socket):
    async def story():
        server = PodsServer(FakePod(init={"init": APP_ENV}, app={"app": {"A": "b"} | APP_ENV}))
        async with serving(server, socket):
            source = from_kubelet(socket)
            for fresh in (True, False, False):
                who, env = await source.ask(identity(*BOTH), DEVICES, fresh=fresh)
                assert (env, who.container) == (APP_ENV, "")
            assert len(server.calls) == 1

    run(story())


def test_a_pods_life_with_an_init_container_that_asks_for_something_else(socket):
    async def story(life, pod):
        await life.start(INIT_ENV, "init", fresh=True)
        pod.ended("init", 1, started=time.time())
        await life.start(INIT_ENV, "init")
        pod.ended("init", started=time.time())
        await life.start(APP_ENV, "app")
        pod.ended("app", 1, started=time.time())
        await life.start(APP_ENV, "app")

    on_the_pods_api(story, socket)


@pytest.mark.parametrize("seconds", [0.0, -3600.0])
def test_a_run_that_was_seen_before_the_last_prestart_proves_nothing(
    tmp_path, list_socket, monkeypatch, seconds
):
    """It is of the same second, or the clock was set back: its time does not say."""

    async def story(life, pod, api):
        await life.start(INIT_ENV, "init", fresh=True)
        pod.ended("init", 1, started=time.time())
        now = time.time() + seconds
        monkeypatch.setattr("fpga_plugin.deviceplugin.environment.time.time", lambda: now)
        await life.start(INIT_ENV, "init")
        # It began again and succeeded, which the status does not show yet: it is the app's turn.
        await life.refuse("app")
        pod.ended("init", started=now)
        await life.start(APP_ENV, "app")

    on_the_api_server(story, tmp_path, list_socket, patience=0.1)


def test_an_unproved_start_is_refused_and_kubelets_quote_of_the_refusal_proves_it(socket):
    async def story(life, pod):
        pod.ended("init", started=5)
        # As after a restart of the plugin: nothing is remembered.
        await life.refuse("app")
        await life.start(APP_ENV, "app")
        # It runs, and its liveness probe fails: kubelet kills and starts it in one go.
        pod.runs("app")
        await life.refuse("app")
        await life.start(APP_ENV, "app")

    on_the_pods_api(story, socket)


def test_each_refusal_has_words_that_no_other_has(socket):
    async def story(life, pod):
        await life.refuse("init")
        pod.ended("init", started=5)
        old = dict(pod.states)
        await life.refuse("app")
        # Kubelet quotes an older question only: no answer to this one.
        pod.states = old | {"init": {"state": {"waiting": {"message": "(question 0000)"}}}}
        await life.refuse("app")
        await life.start(APP_ENV, "app")

    on_the_pods_api(story, socket)


def test_a_new_sandbox_begins_with_the_init_container(socket):
    async def story(life, pod):
        await life.start(INIT_ENV, "init", fresh=True)
        pod.ended("init", started=time.time())
        await life.start(APP_ENV, "app")
        # The sandbox dies; the init container's old run is all that its status has.
        pod.ended("app", 137, started=time.time())
        pod.sandbox = False
        await life.refuse("init")
        pod.sandbox = True
        await life.start(INIT_ENV, "init")

    on_the_pods_api(story, socket)


class OldKubelet(Life):
    """A pod of a kubelet before 1.29, whose status does not say of the sandbox."""

    def __init__(self, api, pod, tmp_path, list_socket) -> None:
        self.pod_cgroup = tmp_path / f"cgroup/kubepods/burstable/pod{UID}"
        self.pod_cgroup.mkdir(parents=True)
        (tmp_path / "cgroup/cgroup.controllers").write_text("cpu\n")
        self.populate(self.pod_cgroup)
        cgroups = PodCgroups(str(tmp_path / "cgroup"))
        source = from_api_server(api.kubeconfig(tmp_path), list_socket, cgroups=cgroups)
        super().__init__(source, pod)
        pod.sandbox = None

    @staticmethod
    def populate(cgroup) -> None:
        cgroup.mkdir(exist_ok=True)
        (cgroup / "cgroup.events").write_text("populated 1\n")

    def runs(self, *containers: str) -> None:
        """Which of the pod's containers have processes, its sandbox's among them."""
        for cgroup in self.pod_cgroup.iterdir():
            if cgroup.is_dir():
                (cgroup / "cgroup.events").unlink()
                cgroup.rmdir()
        for name in containers:
            self.populate(self.pod_cgroup / name)


def on_an_old_kubelet(story, tmp_path, list_socket, monkeypatch) -> None:
    async def told(api, pod):
        async with serving(PodResources(compress=P0), list_socket):
            await story(OldKubelet(api, pod, tmp_path, list_socket), pod)

    monkeypatch.setattr("fpga_plugin.deviceplugin.environment.PATIENCE", 0.05)
    pod = two()
    with ApiServerDouble(pod) as api:
        run(told(api, pod))


def test_where_kubelet_does_not_tell_the_pods_cgroup_shows_that_it_keeps_its_sandbox(
    tmp_path, list_socket, monkeypatch
):
    async def story(life, pod):
        life.runs("pause-1")
        await life.start(INIT_ENV, "init", fresh=True)
        pod.ended("init", started=time.time())
        await life.refuse("app")
        await life.start(APP_ENV, "app")
        pod.ended("app", 1, started=time.time())
        life.runs("pause-1", "side")
        await life.start(APP_ENV, "app")

    on_an_old_kubelet(story, tmp_path, list_socket, monkeypatch)


def test_a_refusal_in_an_older_sandbox_proves_nothing_where_kubelet_does_not_tell(
    tmp_path, list_socket, monkeypatch
):
    """The status still quotes it at the app, while the init container starts again."""

    async def story(life, pod):
        life.runs("pause-1")
        await life.start(INIT_ENV, "init", fresh=True)
        pod.ended("init", started=time.time())
        await life.refuse("app")
        life.runs("pause-2")
        await life.refuse("init")
        await life.start(INIT_ENV, "init")
        life.runs("pause-2", "init")

    on_an_old_kubelet(story, tmp_path, list_socket, monkeypatch)


def test_a_start_in_an_older_sandbox_proves_nothing_where_kubelet_does_not_tell(
    tmp_path, list_socket, monkeypatch
):
    async def story(life, pod):
        life.runs("pause-1")
        await life.refuse("init")
        await life.start(INIT_ENV, "init")
        pod.ended("init", started=time.time())
        states = dict(pod.states)
        life.runs("pause-2")
        words = await unanswered(life.source, identity(*BOTH))
        assert "ask for different bitstreams" in words
        pod.states = states  # it lags: the status quotes nothing yet
        words = await unanswered(life.source, identity(*BOTH))
        assert "the pod's status names the container then" in words

    on_an_old_kubelet(story, tmp_path, list_socket, monkeypatch)


def test_a_sandbox_that_was_not_proved_at_one_refusal_is_not_proved_at_the_next(
    tmp_path, list_socket, monkeypatch
):
    """The question in between was about other devices, of which nothing was known."""
    other = (DeviceId("0000-10-00.0-p1"),)

    async def story(life, pod):
        life.runs("pause-1")
        await life.refuse("init")
        await life.start(INIT_ENV, "init")
        pod.ended("init", started=time.time())
        states = dict(pod.states)
        life.runs("pause-2")
        with pytest.raises(NoSourceError):
            await life.source.ask(identity(*BOTH), other, fresh=False)
        pod.states = states
        words = await unanswered(life.source, identity(*BOTH))
        assert "ask for different bitstreams" in words

    on_an_old_kubelet(story, tmp_path, list_socket, monkeypatch)


def test_where_nothing_tells_of_the_sandbox_the_refusal_says_what_helps(
    tmp_path, list_socket, monkeypatch
):
    async def story(life, pod):
        await life.start(INIT_ENV, "init", fresh=True)
        pod.ended("init", started=time.time())
        for _ in range(3):
            await life.refuse("app")
            words = await unanswered(life.source, identity(*BOTH))
            assert "its cgroups are not seen (FPGA_PLUGIN_CGROUP_ROOT)" in words

    on_an_old_kubelet(story, tmp_path, list_socket, monkeypatch)


def test_another_refusal_in_between_still_tells_who_starts(socket):
    async def story(life, pod):
        await life.refuse("app")
        who, _ = await life.source.ask(identity(*BOTH), DEVICES, fresh=False)
        assert who.container == "app"
        # The preparation then fails for a reason of its own.
        words = "region 0000-10-00.0-p0: somebody has it open"
        life.source.refused(identity(*BOTH, container="app"), DEVICES, words)
        pod.refused("app", words)
        await life.start(APP_ENV, "app")

    on_the_pods_api(story, socket)


def test_a_container_of_two_resources_is_told_by_the_refusal_of_either(socket):
    async def story(life, pod):
        others = (DeviceId("0000-11-00.0-p0"),)
        await life.refuse("app")
        await life.start(APP_ENV, "app")
        with pytest.raises(NoSourceError) as caught:
            await life.source.ask(identity(*BOTH), others, fresh=False)
        life.source.refused(identity(*BOTH), others, str(caught.value))
        pod.refused("app", str(caught.value))
        # Kubelet begins with the first resource again.
        await life.start(APP_ENV, "app")
        who, _ = await life.source.ask(identity(*BOTH), others, fresh=False)
        assert who.container == "app"

    on_the_pods_api(story, socket)


def test_another_kubelet_forgets_what_was_proved(socket):
    async def story(life, pod):
        await life.start(INIT_ENV, "init", fresh=True)
        pod.ended("init", started=time.time())
        life.source.new_kubelet()
        await life.refuse("app")
        life.source.new_kubelet()
        await life.refuse("app")
        await life.start(APP_ENV, "app")

    on_the_pods_api(story, socket)


def test_a_wrong_request_of_one_container_is_that_containers_own(socket):
    async def story():
        pod = FakePod(init={"init": {"FPGA_REGION_1": "x"}}, app={"app": APP_ENV})
        async with serving(PodsServer(pod), socket):
            source = from_kubelet(socket)
            with pytest.raises(InvalidRequestError, match="FPGA_REGION_1='x'"):
                await source.ask(identity(*BOTH), DEVICES, fresh=True)
            words = await unanswered(source, identity(*BOTH))
            source.refused(identity(*BOTH), DEVICES, words)
            pod.refused("app", words)
            assert await env_of(source, identity(*BOTH), fresh=False) == APP_ENV

    run(story())


def test_a_status_that_lags_is_waited_for(tmp_path, list_socket):
    """The first reads show the status of before; what proves something has to stay."""

    async def story(life, pod, api):
        await life.start(INIT_ENV, "init", fresh=True)
        assert len(api.asked) == 1
        pod.runs("init")
        began = time.time()

        def catch_up():
            if len(api.asked) == 4:
                pod.ended("init", started=began)

        api.before = catch_up
        await life.start(APP_ENV, "app")
        assert len(api.asked) == 5

    on_the_api_server(story, tmp_path, list_socket)


def test_a_lagging_status_that_changes_its_mind_proves_nothing_yet(tmp_path, list_socket):
    async def story(life, pod, api):
        await life.start(INIT_ENV, "init", fresh=True)
        pod.ended("init", started=time.time())

        def sandbox_dies():
            pod.sandbox = len(api.asked) < 3

        api.before = sandbox_dies
        await life.refuse("init")
        api.before = lambda: setattr(pod, "sandbox", True)
        await life.start(INIT_ENV, "init")

    on_the_api_server(story, tmp_path, list_socket, patience=0.5)


# -------------------------------------------------------------------- what is imported when


def fresh_python(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


STARTED = "import sys, fpga_plugin.commands.main, fpga_plugin.daemon.process; "


def test_a_plugin_that_needs_no_source_has_imported_none():
    modules = (
        "lightkube",
        "httpx2",
        "anyio",
        "fpga_plugin.kubernetes.kubelet.podsapi",
        "fpga_plugin.kubernetes.messages.core_v1",
    )
    fresh_python(f"{STARTED} assert not {set(modules)!r} & set(sys.modules)")


def test_the_pods_api_takes_no_http_client():
    fresh_python(
        f"{STARTED} import fpga_plugin.kubernetes.kubelet.podsapi;"
        " assert not {'lightkube', 'httpx2'} & set(sys.modules)"
    )


def test_what_stock_kubelets_need_is_imported_at_the_first_question_in_a_thread(socket):
    fresh_python(
        f"""{STARTED}
import asyncio, threading
from fpga_plugin.errors import NoSourceError
from fpga_plugin.kubernetes.names import PodUid
from fpga_plugin.allocation.requests.directory import PodDirectory
from fpga_plugin.allocation.requests.identity import Identity
from fpga_plugin.deviceplugin.environment import StockEnvironment

who = Identity(PodUid("a"), frozenset("b"))
source = StockEnvironment(PodDirectory(kubelet_dir="/nowhere", prefix="x", pods_socket="/nowhere"))
source.started(who, ())
source.refused(who, (), "words")
source.new_kubelet()
late = "fpga_plugin.kubernetes.kubelet.podsapi"
assert late not in sys.modules
threads = {{}}

class Watch:
    def find_spec(self, name, *_):
        threads[name] = threading.current_thread()

sys.meta_path.insert(0, Watch())
try:
    asyncio.run(source.ask(who, (), fresh=True))
except NoSourceError:
    pass
assert threads[late] is not threading.main_thread()
"""
    )


@pytest.mark.needs("openssl")
def test_the_api_server_is_asked_over_tls_in_a_plugin_that_started_without_it(tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
            ),
            *("-nodes", "-keyout", key, "-out", certificate, "-subj", "/CN=test"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    ask = (
        f"{STARTED} import asyncio; from fpga_plugin.kubernetes.apiserver.pods import ApiServer;"
        " pod = asyncio.run(ApiServer({!r}).get('tenant', 'compress')); assert pod.uid == {!r}"
    )
    with ApiServerDouble(FakePod()) as api:
        api.server.socket = context.wrap_socket(api.server.socket, server_side=True)
        trusted = api.kubeconfig(tmp_path, scheme="https", authority=str(certificate))
        fresh_python(ask.format(trusted, UID))
        untrusted = api.kubeconfig(tmp_path, scheme="https")
        with pytest.raises(PodSourceError, match="CERTIFICATE_VERIFY_FAILED"):
            run(ApiServer(untrusted).get("tenant", "compress"))


# -------------------------------------------------------------------- the daemon


def test_a_stock_kubelets_pod_is_programmed_with_the_bitstream_of_its_env():
    async def story(node, double, server):
        pod = DemoPod(name="compress", containers=(fpga("app", {"A": "b"} | APP_ENV),))
        server.pods[pod.uid] = as_kubelet_has_it(pod)
        await double.admit(pod)
        assert await double.start_container(pod, "app") == [REGION]
        (region,) = double.devices(pod, "app")[REGION]
        assert node.afu(region) == AFU_2
        await logged(node, "pod read", source="pods-api", name="compress")
        # The environment is known: a restart needs nobody.
        del server.pods[pod.uid]
        await double.start_container(pod, "app")
        assert node.afu(region) == AFU_2
        (address,) = node.plugin.until_logged("serving metrics")["addresses"]
        url = f"http://{address}/metrics"
        told = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=LIMIT).read())
        counted = re.findall(rb'fpga_plugin_pod_source_answers_total{source="(.*)"} (.*)', told)
        assert {name: float(number) for name, number in counted} == {b"kept": 1, b"pods-api": 1}
        mark = node.plugin.mark
        await double.end_pod(pod)
        await logged(node, "region scrubbed", mark, region=region)
        assert node.afu(region) == BLANK

    on_stock_kubelet(story, http_address="127.0.0.1:0")


def test_init_and_app_container_get_each_their_own_bitstream_on_one_region():
    async def story(node, double, server):
        pod = DemoPod(
            name="two",
            init_containers=(fpga("init", INIT_ENV),),
            containers=(fpga("app", APP_ENV),),
        )
        known = server.pods[pod.uid] = as_kubelet_has_it(pod)
        await double.admit(pod)
        (region,) = double.devices(pod, "app")[REGION]
        assert double.devices(pod, "init") == {REGION: (region,)}
        await double.start_container(pod, "init")
        assert node.afu(region) == AFU
        known.ended("init", started=time.time())
        await double.start_container(pod, "app")
        assert node.afu(region) == AFU_2
        # After a restart of the plugin kubelet's next try reports.
        await asyncio.to_thread(node.plugin.kill)
        node.start()
        await logged(node, "kubelet's records read")
        await double.wait_for(REGION, lambda known: region in known.ids)
        known.ended("app", 1, started=time.time())
        with pytest.raises(GRPCError, match="not known yet which of them") as caught:
            await double.start_container(pod, "app")
        assert caught.value.status is Status.UNAVAILABLE
        assert node.afu(region) == AFU_2
        known.refused("app", caught.value.message)
        await double.start_container(pod, "app")
        assert node.afu(region) == AFU_2

    on_stock_kubelet(story)


def test_a_stock_kubelets_pod_whose_spec_nobody_tells_waits():
    async def story(node, double, server):
        pod = DemoPod(name="compress", containers=(fpga("app", APP_ENV),))
        await double.admit(pod)
        (region,) = double.devices(pod, "app")[REGION]
        with pytest.raises(GRPCError, match="FPGA_PLUGIN_PODS_SOCKET") as caught:
            await double.start_container(pod, "app")
        assert caught.value.status is Status.UNAVAILABLE
        assert node.afu(region) == BLANK
        server.pods[pod.uid] = as_kubelet_has_it(pod)
        await double.start_container(pod, "app")
        assert node.afu(region) == AFU_2

    on_stock_kubelet(story, kubeconfig="/nowhere")


def test_the_api_server_and_podresources_do_where_there_is_no_pods_api(tmp_path):
    async def story(node, double, _):
        await double.admit(pod)
        await double.start_container(pod, "app")
        (region,) = double.devices(pod, "app")[REGION]
        assert node.afu(region) == AFU_2
        await logged(node, "pod read", source="api-server", namespace="tenant", name="compress")

    # The init container asks for the same, and PodResources does not show it.
    pod = DemoPod(
        name="compress",
        namespace="tenant",
        init_containers=(fpga("init", APP_ENV),),
        containers=(fpga("app", APP_ENV),),
    )
    with ApiServerDouble(as_kubelet_has_it(pod)) as api:
        on_stock_kubelet(story, pods_socket="", kubeconfig=api.kubeconfig(tmp_path))


def test_devices_that_change_hands_while_the_spec_is_read_are_not_programmed():
    async def story(node, double, server):
        pod = DemoPod(name="compress", containers=(fpga("app", APP_ENV),))
        server.pods[pod.uid] = as_kubelet_has_it(pod)
        await double.admit(pod)
        (region,) = double.devices(pod, "app")[REGION]
        server.hangs = True
        starting = asyncio.create_task(double.start_container(pod, "app"))
        await server.called.wait()
        await double.allocate(REGION, [region])  # another pod's, as far as the plugin can tell
        server.go_on.set()
        with pytest.raises(GRPCError, match="got another owner") as caught:
            await starting
        assert caught.value.status is Status.UNAVAILABLE
        assert node.afu(region) == BLANK

    on_stock_kubelet(story)


def test_an_extended_kubelet_asks_no_source():
    with Node().up() as node:
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=APP_ENV)
        assert node.afu(P0) == AFU_2
        assert not node.plugin.logged("pod read")
