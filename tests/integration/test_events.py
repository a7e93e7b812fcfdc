"""Events on their way to an API server."""

import asyncio
import http.server
import json
import threading
from datetime import datetime

import pytest
from daemon_support import CARD, Node, eventually

from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.kubernetes.events.broadcaster import Event, EventBroadcaster, Subject
from fpga_plugin.kubernetes.events.sink import ApiServerSink

POD = Subject("Pod", "compress", "tenant", "0f1c2d3e-0000-4000-8000-000000000001")
NODE = Subject("Node", "node-1", "", "node-1")
COLLECTION = "/apis/events.k8s.io/v1/namespaces/{}/events"


class ApiServer:
    """Takes Events as the real one does (validation: pkg/apis/core/validation/events.go)."""

    def __init__(self) -> None:
        self.code = 0
        self.made: list[dict] = []
        self.patched: list[tuple[str, dict]] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.body()
                where = body["metadata"]["namespace"]
                regarding = body["regarding"]
                assert self.path == COLLECTION.format(where)
                assert regarding.get("namespace", "default") == where
                assert body["reportingController"].count("/") == 1
                assert 0 < len(body["reportingInstance"]) <= 128
                assert 0 < len(body["action"]) <= 128
                assert 0 < len(body["reason"]) <= 128
                assert len(body["note"].encode()) <= 1024
                assert body["type"] in {"Normal", "Warning"}
                assert datetime.fromisoformat(body["eventTime"]).tzinfo is not None
                self.answer(body, outer.made.append)

            def do_PATCH(self):
                assert self.headers["Content-Type"] == "application/merge-patch+json"
                body = self.body()
                made = outer.made[-1] if outer.made else {}
                self.answer({**made, **body}, lambda _: outer.patched.append((self.path, body)))

            def body(self):
                assert self.headers["Authorization"] == "Bearer the-token"
                return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

            def answer(self, body, keep):
                code = outer.code or 201
                if code == 201:
                    keep(body)
                told = body if code == 201 else {"kind": "Status", "code": code, "message": "no"}
                data = json.dumps(told).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))

    def kubeconfig(self, folder) -> str:
        path = folder / "kubeconfig"
        server = f"http://127.0.0.1:{self.server.server_port}"
        path.write_text(
            json.dumps(
                {
                    "current-context": "c",
                    "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
                    "clusters": [{"name": "k", "cluster": {"server": server}}],
                    "users": [{"name": "u", "user": {"token": "the-token"}}],
                }
            )
        )
        return str(path)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.mark.parametrize("subject", [POD, NODE], ids=["pod", "node"])
def test_an_event_arrives_and_its_repetition_is_counted(tmp_path, subject) -> None:
    event = Event(subject, "FpgaProgrammingRefused", "Programming", "ö" * 2000, warning=True)
    clock = [0.0]

    async def main() -> None:
        sink = ApiServerSink(api.kubeconfig(tmp_path), instance="node-1")
        events = EventBroadcaster(lambda: sink, clock=lambda: clock[0])
        for _ in range(2):
            events.record(event)
            assert events._task is not None
            await events._task
            clock[0] += 60
        assert events.posted == 2

    with ApiServer() as api:
        asyncio.run(main())
    (made,) = api.made
    assert made["regarding"]["name"] == subject.name
    assert made["regarding"]["uid"] == subject.uid
    ((path, patch),) = api.patched
    assert path.endswith(f"/events/{made['metadata']['name']}")
    assert patch["series"]["count"] == 2
    assert set(patch) == {"series"}


def post(sink: ApiServerSink) -> str:
    event = Event(POD, "FpgaProgrammingRefused", "Programming", "because", warning=True)
    return asyncio.run(sink.create(event, datetime.now().astimezone()))


@pytest.mark.parametrize("code", [401, 403, 422, 500])
def test_a_refusal_says_what_the_api_server_said(tmp_path, code) -> None:
    with ApiServer() as api:
        api.code = code
        with pytest.raises(FpgaPluginError, match=f"answered {code}") as caught:
            post(ApiServerSink(api.kubeconfig(tmp_path), instance="node-1"))
    assert ("create and patch" in caught.value.hint) == (code in {401, 403})


def test_without_an_api_server_or_credentials_the_reason_is_told(tmp_path) -> None:
    with ApiServer() as api:
        gone = api.kubeconfig(tmp_path)
    with pytest.raises(FpgaPluginError, match="cannot be asked"):
        post(ApiServerSink(gone, instance="node-1"))
    with pytest.raises(FpgaPluginError, match="credentials"):
        post(ApiServerSink(str(tmp_path / "none"), instance="node-1"))
    with pytest.raises(FpgaPluginError, match="service account"):
        post(ApiServerSink(None, instance="node-1"))


def test_the_node_hears_that_a_card_went_from_the_daemon(tmp_path) -> None:
    with ApiServer() as api, Node(events="true", kubeconfig=api.kubeconfig(tmp_path)) as node:
        node.settings["NODE_NAME"] = "node-1"
        node.up().unplug(CARD)
        made = eventually(lambda: api.made)
    assert made[0]["regarding"] == {
        "apiVersion": "v1",
        "kind": "Node",
        "name": "node-1",
        "uid": "node-1",
    }
    assert made[0]["reason"] == "FpgaCardFailed"
    assert CARD in made[0]["note"]
    assert made[0]["reportingInstance"] == "node-1"
