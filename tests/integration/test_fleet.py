"""`fpga-plugin fleet` as a command: real plugins behind an API server that lists and proxies."""

import contextlib
import http.client
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
from daemon_support import P0, REGIONS, Node, command, request
from test_http import address

POD = "3f0c6e5e-7a54-4d0a-9f66-9d1f2b9be111"
EVIL = "\x1b[2J<script>"


class Cluster(ThreadingHTTPServer):
    """Lists pods, a few an answer, and hands requests on to them, Host and all, as Kubernetes does.

    Attributes:
        pods: by name, what to answer: the address of a plugin, or a code and a body.
        asked: paths, and the Host that came with each.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pods = {}
        self.phases = {}
        self.namespaces = {}
        self.nodes = {}
        self.selectors = []
        self.listing = None
        self.hangs = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def kubeconfig(self, folder):
        path = folder / "kubeconfig"
        path.write_text(
            json.dumps(
                {
                    "current-context": "c",
                    "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
                    "clusters": [
                        {
                            "name": "k",
                            "cluster": {"server": f"http://127.0.0.1:{self.server_address[1]}"},
                        }
                    ],
                    "users": [{"name": "u", "user": {"token": "t"}}],
                }
            )
        )
        return str(path)


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):  # as http.server has it
        url = urlsplit(self.path)
        parts = url.path.split("/")
        if parts[-1] == "pods":
            self._list(parse_qs(url.query))
            return
        name, _, port = parts[parts.index("pods") + 1].partition(":")
        assert port == "9102", "the pod's spec says so"
        assert url.path.endswith("/proxy/status.json")
        answer = self.server.pods[name]
        if isinstance(answer, str):
            self._proxied(answer)
        else:
            self._send(*answer)

    def _proxied(self, plugin):
        there = http.client.HTTPConnection(plugin, timeout=30)
        # A client that has the cluster's address from a kubeconfig would send its public name.
        host = self.headers["Host"].replace("127.0.0.1", "api.cluster.example.com")
        there.request("GET", "/status.json", headers={"Host": host})
        answer = there.getresponse()
        self._send(answer.status, answer.read())
        there.close()

    def _list(self, params):
        self.server.selectors.append((self.path.split("?")[0], params["labelSelector"][0]))
        if self.server.listing is not None:
            self._send(*self.server.listing)
            return
        names = sorted(self.server.pods)
        begin = int(params.get("continue", ["0"])[0])
        more = {"continue": str(begin + 2)} if begin + 2 < len(names) else {}
        items = [
            {
                "metadata": {"name": name, "namespace": self.server.namespaces.get(name, "fpga")},
                "spec": {
                    "nodeName": self.server.nodes.get(name, f"node-{name}"),
                    "containers": [
                        {"name": "x", "ports": [{"name": "http", "containerPort": 9102}]}
                    ],
                },
                "status": {"phase": self.server.phases.get(name, "Running")},
            }
            for name in names[begin : begin + 2]
        ]
        self._send(200, json.dumps({"metadata": more, "items": items}).encode())

    def _send(self, code, body):
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def cluster():
    with contextlib.closing(Cluster()) as cluster:
        cluster.close = cluster.server_close
        yield cluster
        cluster.shutdown()


def fleet(cluster, tmp_path, *arguments):
    where = {"KUBECONFIG": cluster.kubeconfig(tmp_path), "HOME": str(tmp_path)}
    return command("fleet", *arguments, settings=where)


@contextlib.contextmanager
def plugin(hardware):
    with Node(hardware, http_address="127.0.0.1:0", status_page="true") as node:
        node.up()
        yield node, address(node.plugin)


def test_every_node_is_a_line_and_their_sum_is_one(cluster, tmp_path):
    with plugin("2x3") as (node, one), plugin("1x2+no-clear") as (_, two):
        answer = node.kubelet.allocate(P0)
        node.kubelet.checkpoint((POD, "main", REGIONS, [P0], answer))
        node.kubelet.prestart(P0, env=request())
        cluster.pods = {"a": one, "b": two}
        done = fleet(cluster, tmp_path)
        assert done.returncode == 0, done.stderr
        head, a, b, total = (line.split() for line in done.stdout.splitlines())
        assert head[:7] == ["NODE", "NAMESPACE", "STATE", "CARDS", "REGIONS", "USED", "FREE"]
        assert a[:12] == ["node-a", "fpga", "ready", "2", "6", "1", "5", *["0"] * 5]
        assert b[:12] == ["node-b", "fpga", "ready", "1", "2", "0", "2", *["0"] * 4, "1"]
        assert total == ["2", "of", "2", "nodes", "3", "8", "1", "7", *["0"] * 4, "1", "0"]
        assert cluster.selectors == [("/api/v1/pods", "app.kubernetes.io/part-of=fpga-plugin")]
        assert done.stderr == "", "no terminal, no progress"


def test_the_whole_status_of_each_node_is_in_json(cluster, tmp_path):
    with plugin("1x2") as (_, one):
        cluster.pods = {"a": one, "gone": (503, b"{}")}
        done = fleet(cluster, tmp_path, "--json")
        assert done.returncode == 1
        a, gone = json.loads(done.stdout)["nodes"]
        assert (a["node"], a["namespace"], a["pod"], a["error"]) == ("node-a", "fpga", "a", "")
        assert [card["card"] for card in a["status"]["cards"]] == ["0000-10-00.0"]
        assert gone["status"] is None
        assert "NetworkPolicy" in gone["error"]


def test_nodes_that_do_not_answer_are_told_and_the_others_are_shown(cluster, tmp_path):
    with plugin("1x2") as (_, one):
        cluster.pods = {
            "a": one,
            "b": (503, b"{}"),
            "c": (404, b"{}"),
            "d": (403, b"{}"),
            "e": (200, b"[1]"),
            "f": (200, b"{" * 100_000),
            "g": (200, json.dumps({"version": EVIL, "ready": True, "cards": []}).encode()),
            "h": one,
        }
        cluster.phases = {"h": "Pending"}
        done = fleet(cluster, tmp_path)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[9].split()[:4] == ["1", "of", "8", "nodes"]
    assert sum("NO ANSWER" in line for line in lines) == 7
    for name, words in (
        ("b", "NetworkPolicy"),
        ("c", "FPGA_PLUGIN_STATUS_PAGE"),
        ("d", "pods/proxy"),
        ("e", "not understood"),
        ("f", "not understood"),
        ("g", "not understood"),
        ("h", "'Pending'"),
    ):
        (line,) = [line for line in lines if line.startswith(f"  ! node-{name}:")]
        assert words in line
    assert "\x1b" not in done.stdout
    assert "Traceback" not in done.stderr


HEALTHY = json.dumps(
    {
        "version": "1",
        "ready": True,
        "cards": [],
        "trouble": {"refused": 0, "drained": 0, "failed": 0, "never_cleared": 0},
    }
).encode()

EMPTY_STORE = json.dumps(
    json.loads(HEALTHY)
    | {
        "trouble": {"refused": 0, "drained": 0, "failed": 0, "never_cleared": 0}
        | {"unusable": {"no blank bitstream": 6}}
    }
).encode()


def test_a_node_with_an_empty_store_is_noted(cluster, tmp_path):
    cluster.pods = {"a": (200, HEALTHY), "b": (200, EMPTY_STORE)}
    done = fleet(cluster, tmp_path)
    assert done.returncode == 0, "it answers"
    assert done.stdout.count("unusable") == 1
    assert "  ! node-b: 6 unusable: no blank bitstream\n" in done.stdout


def test_pods_of_another_namespace_and_a_node_that_is_there_twice_are_noted(cluster, tmp_path):
    cluster.pods = {"a": (200, HEALTHY), "b": (200, HEALTHY)}
    cluster.nodes = {"a": "one", "b": "one"}
    cluster.namespaces = {"b": "tenant"}
    done = fleet(cluster, tmp_path)
    assert done.returncode == 0
    _, a, b, _, spaces, twice = done.stdout.splitlines()
    assert (a.split()[:2], b.split()[:2]) == (["one", "fpga"], ["one", "tenant"])
    assert "2 namespaces say that they are the plugin: fpga, tenant" in spaces
    assert "-n NAMESPACE" in spaces
    assert "more than one pod says that it is the plugin of one:" in twice


def test_nodes_of_one_namespace_are_noted_for_nothing(cluster, tmp_path):
    cluster.pods = {"a": (200, HEALTHY), "b": (200, HEALTHY)}
    assert "!" not in fleet(cluster, tmp_path).stdout


def test_a_status_that_is_larger_than_any_is_not_read(cluster, tmp_path):
    padding = b" " * (9 << 20)
    cluster.pods = {"a": (200, HEALTHY + padding)}
    done = fleet(cluster, tmp_path)
    assert done.returncode == 1
    assert "an answer of more than 8388608 bytes" in done.stdout


def test_what_a_node_says_moves_no_cursor(cluster, tmp_path):
    told = {
        "version": EVIL,
        "ready": False,
        "not_ready": [EVIL],
        "cards": [],
        "trouble": {"refused": 0, "drained": 0, "failed": 0, "never_cleared": 0},
    }
    cluster.pods = {"a": (200, json.dumps(told).encode())}
    done = fleet(cluster, tmp_path)
    assert done.returncode == 0
    assert "NOT READY" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("listing", "words"),
    [
        ((403, b"{}"), "rights to list pods"),
        ((200, b"[]"), "not understood"),
        ((200, b'{"items": [{"metadata": {"name": 7}}]}'), "not understood"),
        ((200, b'{"items": [], "metadata": {"continue": "on"}}'), "does not end"),
    ],
)
def test_a_list_that_is_none_is_told(cluster, tmp_path, listing, words):
    cluster.listing = listing
    done = fleet(cluster, tmp_path)
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_no_plugin_at_all_is_no_success(cluster, tmp_path):
    done = fleet(cluster, tmp_path, "-n", "some where", "-l", "a=b")
    assert done.returncode == 1
    assert "no plugin's pod was found" in done.stderr
    assert cluster.selectors == [("/api/v1/namespaces/some%20where/pods", "a=b")]


def test_without_credentials_it_says_so(cluster, tmp_path):
    done = fleet(cluster, tmp_path, "--kubeconfig", str(tmp_path / "none"))
    assert done.returncode == 1
    assert "credentials" in done.stderr
    assert "Traceback" not in done.stderr
