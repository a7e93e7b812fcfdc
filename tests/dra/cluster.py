"""A cluster without kubelets: API server, etcd, scheduler and controllers, as processes.

Nodes are objects that the tests make. What kubelet does of a pod's end, the tests do by force.
Ports are free ones, so that nothing here takes root or namespaces.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

sys.path.append(str(Path(__file__).parents[1] / "kubelet"))

from api_calls import ApiCalls  # found by the line above

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / ".cache/kubelet" / os.environ.get("FPGA_DRA", "1.36")
"""Of the Kubernetes version that `make test-dra` was told."""

NAMES = ("etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager")

LIMIT = 120.0
"""Seconds after which a test gives up on what it waits for."""

CONTROLLERS = (
    "resourceclaim-controller",
    "device-taint-eviction-controller",
    "garbage-collector-controller",
)
"""The ones that DRA takes; others would take away nodes that no kubelet keeps alive."""

T = TypeVar("T")


def until(look: Callable[[], T], what: str, *, limit: float = LIMIT) -> T:
    """Wait for what nobody announces; returns what it came to."""
    deadline = time.monotonic() + limit
    while not (found := look()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {limit:g} s: {what}")
        time.sleep(0.05)
    return found


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Cluster(ApiCalls):
    """Runs until `end`.

    Args:
        folder: for its files and logs.
        gates: feature gates of all programs, besides what is on by default.
        api_arguments: of the API server, besides the usual ones.
    """

    def __init__(
        self,
        folder: Path,
        gates: Mapping[str, bool] | None = None,
        *,
        api_arguments: Sequence[str] = (),
    ) -> None:
        etcd, peers, api, scheduler, controllers = _free_ports(5)
        super().__init__(f"https://127.0.0.1:{api}", folder)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._arguments: dict[str, tuple[str | Path, ...]] = {}
        key = folder / "service-accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        (folder / "tokens.csv").write_text('admin,admin,admin,"system:masters"\n')
        features = [f"--feature-gates={name}={on}".lower().replace(name.lower(), name)
                    for name, on in (gates or {}).items()]  # fmt: skip
        store = self._store = f"http://127.0.0.1:{etcd}"
        self._run(
            "etcd",
            *("--data-dir", folder / "etcd", "--unsafe-no-fsync", "--log-level", "error"),
            *("--listen-client-urls", store, "--advertise-client-urls", store),
            *("--listen-peer-urls", f"http://127.0.0.1:{peers}"),
        )
        self._run(
            "kube-apiserver",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            f"--token-auth-file={folder}/tokens.csv",
            f"--cert-dir={folder}",
            f"--etcd-servers={store}",
            "--bind-address=127.0.0.1",
            "--advertise-address=10.99.0.1",  # a loopback address is refused; nobody comes by it
            "--endpoint-reconciler-type=none",
            f"--secure-port={api}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.98.0.0/24",
            "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
            *features,
            *api_arguments,
        )
        until(self._ready, "the API server is ready")
        admin = self.kubeconfig()
        common = ("--kubeconfig", admin, "--leader-elect=false", *features)
        self._run("kube-scheduler", *common, f"--secure-port={scheduler}")
        self._run(
            "kube-controller-manager",
            *common,
            f"--secure-port={controllers}",
            f"--controllers={','.join(CONTROLLERS)}",
        )

    def _run(self, name: str, *arguments: str | Path) -> None:
        self._arguments[name] = arguments
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [str(PROGRAMS / name), *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _ready(self) -> bool:
        for name, process in self._processes.items():
            assert process.poll() is None, self.tail(name)
        return self.answers()

    def tail(self, name: str, lines: int = 30) -> str:
        """The end of a program's log."""
        text = (self._folder / f"{name}.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def signal(self, name: str, number: signal.Signals) -> None:
        """Stop a program, or let it go on."""
        self._processes[name].send_signal(number)

    def restart(self, name: str) -> None:
        """Kill a program and start it again, until the API server answers."""
        self.signal(name, signal.SIGKILL)
        self._processes[name].wait(LIMIT)
        self._run(name, *self._arguments[name])
        until(self._ready, "the API server is ready again")

    def compact(self) -> None:
        """Let etcd forget all that is not of now (its JSON gateway, api/etcdserverpb/rpc.proto)."""
        found = self._etcd("/v3/kv/range", {"key": "AA=="})
        revision = found["header"]["revision"]
        self._etcd("/v3/kv/compaction", {"revision": revision, "physical": True})

    def _etcd(self, path: str, body: Mapping[str, Any]) -> Any:
        request = urllib.request.Request(self._store + path, data=json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=LIMIT) as answer:
            return json.loads(answer.read())

    def memory(self) -> dict[str, float]:
        """PSS of each program in MiB."""
        found = {}
        for name, process in self._processes.items():
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            (line,) = [one for one in text.splitlines() if one.startswith("Pss:")]
            found[name] = int(line.split()[1]) / 1024
        return found

    def end(self) -> None:
        """Its data are lost."""
        for process in reversed(self._processes.values()):
            process.send_signal(signal.SIGKILL)
            process.wait(LIMIT)

    def add_node(self, name: str, **labels: str) -> str:
        """A node that is ready and has room; its uid."""
        made = self.call("POST", "/api/v1/nodes", {
            "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}},
        })  # fmt: skip
        room = {"cpu": "1000", "memory": "1000Gi", "pods": "10000"}
        status = {"capacity": room, "allocatable": room,
                  "conditions": [{"type": "Ready", "status": "True"}]}  # fmt: skip
        self.call(
            "PATCH", f"/api/v1/nodes/{name}/status", {"status": status},
            kind="application/merge-patch+json",
        )  # fmt: skip
        return str(made["metadata"]["uid"])

    def apply(self, path: Path) -> list[dict[str, Any]]:
        """Make all objects of a file of YAML; those that are there already stay as they are."""
        objects = [one for one in yaml.safe_load_all(path.read_text()) if one is not None]
        for one in objects:
            group, plural = one["apiVersion"], f"{one['kind'].lower()}s".replace("ys", "ies")
            plural = plural.replace("classs", "classes")
            base = f"/apis/{group}" if "/" in group else f"/api/{group}"
            namespaced = one["kind"] in {"Pod", "ResourceClaim", "ResourceClaimTemplate"}
            scope = "/namespaces/default" if namespaced else ""
            try:
                self.call("POST", f"{base}{scope}/{plural}", one)
            except urllib.error.HTTPError as error:
                if error.code != 409:
                    raise AssertionError(error.read().decode()) from error
        return objects

    def plugin_token(self, node: str) -> str:
        """A token as the plugin's pod on a node gets it, of the service account of the base."""
        namespace = "/api/v1/namespaces/fpga-plugin"
        for path, body in (
            ("/api/v1/namespaces", {"metadata": {"name": "fpga-plugin"}}),
            (f"{namespace}/serviceaccounts", {"metadata": {"name": "fpga-plugin"}}),
        ):
            try:
                self.call("POST", path, body)
            except urllib.error.HTTPError as error:
                if error.code != 409:
                    raise
        pod = self.call("POST", f"{namespace}/pods", {
            "metadata": {"name": f"fpga-plugin-{node}"} if len(node) < 64
            else {"generateName": "fpga-plugin-"},
            "spec": {"serviceAccountName": "fpga-plugin", "nodeName": node,
                     "containers": [{"name": "main", "image": "none"}]},
        })  # fmt: skip
        metadata = pod["metadata"]
        bound = {"kind": "Pod", "apiVersion": "v1", "name": metadata["name"],
                 "uid": metadata["uid"]}  # fmt: skip
        told = self.call("POST", f"{namespace}/serviceaccounts/fpga-plugin/token",
                         {"spec": {"boundObjectRef": bound}})  # fmt: skip
        return str(told["status"]["token"])

    def slices(self) -> list[dict[str, Any]]:
        """All of them."""
        return list(self.call("GET", "/apis/resource.k8s.io/v1/resourceslices")["items"])

    def claims(self) -> list[dict[str, Any]]:
        """All of them."""
        return list(self.call("GET", "/apis/resource.k8s.io/v1/resourceclaims")["items"])

    def pod(self, name: str) -> dict[str, Any] | None:
        """A pod; None: there is none."""
        try:
            return dict(self.call("GET", f"/api/v1/namespaces/default/pods/{name}"))
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return None

    def add_pod(self, name: str, **spec: Any) -> None:
        """A pod; nobody runs it."""
        spec.setdefault("containers", [{"name": "main", "image": "none"}])
        pod = {"metadata": {"name": name}, "spec": spec}
        self.call("POST", "/api/v1/namespaces/default/pods", pod)

    def delete_pod(self, name: str) -> None:
        """By force, as no kubelet ends it."""
        path = f"/api/v1/namespaces/default/pods/{name}"
        self.call("DELETE", path, {"gracePeriodSeconds": 0})


def build(version: str = PROGRAMS.name) -> None:
    """Make the programs, or say why not."""
    script = ROOT / "tests/kubelet/build"
    if subprocess.run([script, version, *NAMES], check=False).returncode != 0:
        sys.exit(f"test-dra: {', '.join(NAMES)} cannot be built")


if __name__ == "__main__":
    build(sys.argv[1])
    os.environ["FPGA_DRA"] = sys.argv[1]
    os.execvp(sys.argv[2], sys.argv[2:])
