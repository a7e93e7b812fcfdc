"""DRA from outside: a kubelet that prepares claims, and the API server that has them.

Plain grpcio and http.server, threads, no code of ours, as `daemon_support`.
"""

import contextlib
import json
import threading
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
from daemon_support import (
    ID,
    LIMIT,
    Cgroups,
    Node,
    NotRegistered,
    Registry,
    Signal,
    call_unary,
    message,
)

DRIVER = "fpga.intel.com"
NODE = "node-a"
DRA = "k8s.io.kubelet.pkg.apis.dra.v1"
NAMESPACE = "default"

Json = dict[str, Any]


def dra_name(device: str) -> str:
    return device.replace(".", "-")


def config(*, from_class: bool = False, requests: Sequence[str] = (), **parameters: Any) -> Json:
    """One entry of an allocation's config."""
    return {
        "source": "FromClass" if from_class else "FromClaim",
        "requests": list(requests),
        "opaque": {
            "driver": DRIVER,
            "parameters": {
                "apiVersion": "fpga.intel.com/v1alpha1",
                "kind": "RegionConfig",
                **parameters,
            },
        },
    }


class ApiServer:
    """Claims and pods over HTTP; counts what it is asked.

    Attributes:
        objects: by path.
        asked: paths of GET, in order.
        posted: objects that it was asked to make, and refused.
        away: it answers 503.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Json] = {}
        self.asked: list[str] = []
        self.posted: list[Json] = []
        self.away = False
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.asked.append(self.path)
                found = owner.objects.get(self.path)
                if owner.away:
                    self._answer(
                        503, {"kind": "Status", "code": 503, "reason": "ServiceUnavailable"}
                    )
                elif found is None:
                    self._answer(404, {"kind": "Status", "code": 404, "reason": "NotFound"})
                else:
                    self._answer(200, found)

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                owner.posted.append(json.loads(self.rfile.read(length)))
                self._answer(403, {"kind": "Status", "code": 403, "reason": "Forbidden"})

            def _answer(self, code: int, body: Json) -> None:
                raw = json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(LIMIT)

    def gets(self, kind: str = "resourceclaims") -> int:
        return sum(f"/{kind}/" in path for path in self.asked)


class Claim:
    """A ResourceClaim, as the scheduler allocated it."""

    def __init__(self, name: str, *devices: str, request: str = "fpga") -> None:
        self.uid = str(uuid.uuid4())
        self.name = name
        self.results = [
            {"request": request, "driver": DRIVER, "pool": NODE, "device": dra_name(device)}
            for device in devices
        ]
        self.config: list[Json] = []
        self.pods: list[str] = []
        self.metadata: Json = {}

    @property
    def path(self) -> str:
        return f"/apis/resource.k8s.io/v1/namespaces/{NAMESPACE}/resourceclaims/{self.name}"

    def object(self) -> Json:
        allocation = {"devices": {"results": self.results, "config": self.config}}
        consumers = [{"resource": "pods", "name": f"pod-{uid}", "uid": uid} for uid in self.pods]
        return {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {
                "name": self.name,
                "namespace": NAMESPACE,
                "uid": self.uid,
                **self.metadata,
            },
            "spec": {},
            "status": {"allocation": allocation, "reservedFor": consumers},
        }

    def message(self) -> Any:
        return message("Claim", DRA)(namespace=NAMESPACE, uid=self.uid, name=self.name)


class DraKubelet:
    """Finds the driver, calls it, and keeps a record as kubelet does.

    Attributes:
        registered: what the driver said of itself at each registration.
        refusals: how many registrations fail first.
        old: a kubelet before 1.36, which asks nobody again whom it refused.
    """

    def __init__(self, root) -> None:
        self.root = root
        self.refusals = 0
        self.old = False
        self.signal = Signal()
        self.registered: list[Any] = []
        self.record: dict[str, Json] = {}
        self._channel: grpc.Channel | None = None
        self._registry: Registry | None = None
        self._calls = ThreadPoolExecutor(max_workers=8)

    def start(self) -> None:
        (self.root / "plugins_registry").mkdir(exist_ok=True)
        self._registry = Registry(
            self.root / "plugins_registry", self._found, self._gone, old=self.old
        )
        self._registry.start()

    def stop(self) -> None:
        if self._registry is not None:
            self._registry.stop()
            self._registry = None
        self._gone("")

    def close(self) -> None:
        self.stop()
        self._calls.shutdown()

    def restart(self) -> None:
        self.stop()
        self.registered.clear()
        self.start()
        self.until_registered()

    def _found(self, _path: str, info: Any) -> None:
        assert (info.type, info.name) == ("DRAPlugin", DRIVER)
        assert info.endpoint == str(self.root / "plugins" / DRIVER / "dra.sock")
        if self.refusals:
            self.refusals -= 1
            raise NotRegistered(
                "RegisterPlugin error -- plugin registration failed with err: endpoint"
                f" {info.endpoint} already registered for DRA driver plugin {DRIVER}"
            )
        self._channel = grpc.insecure_channel(f"unix:{info.endpoint}")
        with self.signal.changed:
            self.registered.append(info)
            self.signal.changed.notify_all()

    def _gone(self, _path: str) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def until_registered(self, number: int = 1) -> None:
        self.signal.until(lambda: len(self.registered) >= number, "a registration")

    # ---------------------------------------------------------------- calls

    def call(self, method: str, *claims: Claim, timeout: float = LIMIT) -> dict[str, Any]:
        """What the driver answers for each claim, by name."""
        self.signal.until(lambda: self._channel is not None, "a driver")
        assert self._channel is not None
        sent = message(f"Node{method}ResourcesRequest", DRA)(
            claims=[claim.message() for claim in claims]
        )
        answer = call_unary(
            self._channel,
            f"/{DRA}.DRAPlugin/Node{method}Resources",
            sent,
            message(f"Node{method}ResourcesResponse", DRA),
            timeout,
        )
        assert set(answer.claims) == {claim.uid for claim in claims}
        return {claim.name: answer.claims[claim.uid] for claim in claims}

    def begin(self, method: str, *claims: Claim) -> "Future[dict[str, Any]]":
        return self._calls.submit(self.call, method, *claims)

    def prepare(self, claim: Claim) -> list[Any]:
        """Prepare, and keep the record of it."""
        self.keep(claim)
        answer = self.call("Prepare", claim)[claim.name]
        assert not answer.error, answer.error
        self.keep(claim, answer.devices)
        return list(answer.devices)

    def refused(self, claim: Claim) -> str:
        self.keep(claim)
        answer = self.call("Prepare", claim)[claim.name]
        assert answer.error
        assert not answer.devices
        return str(answer.error)

    def unprepare(self, claim: Claim) -> str:
        answer = self.call("Unprepare", claim)[claim.name]
        if not answer.error:
            self.record.pop(claim.uid, None)
            self._write()
        return str(answer.error)

    # ---------------------------------------------------------------- record

    def keep(self, claim: Claim, devices: Sequence[Any] = ()) -> None:
        self.record[claim.uid] = {
            "ClaimUID": claim.uid,
            "ClaimName": claim.name,
            "Namespace": NAMESPACE,
            "PodUIDs": {uid: {} for uid in claim.pods},
            "DriverState": {
                DRIVER: {
                    "Devices": [
                        {
                            "PoolName": one.pool_name,
                            "DeviceName": one.device_name,
                            "RequestNames": list(one.request_names),
                            "CDIDeviceIDs": list(one.cdi_device_ids),
                        }
                        for one in devices
                    ]
                }
            },
        }
        self._write()

    def wipe(self) -> None:
        self.record.clear()
        self._write()

    def _write(self) -> None:
        data = json.dumps({"kind": "DRACheckpoint", "ClaimInfoStateList": [*self.record.values()]})
        path = self.root / "dra_manager_state"
        path.with_suffix(".new").write_text(json.dumps({"Data": data, "Checksum": 1}))
        path.with_suffix(".new").replace(path)


OWN_POD = "00000000-0000-4000-8000-000000000000"
"""A pod that is seen: so kubelet's tree of cgroups is known."""


class DraNode(Node):
    """A node whose plugin serves the second api."""

    def __init__(self, hardware: str = "1x2", **settings: str) -> None:
        super().__init__(hardware, **settings)
        self.api = ApiServer()
        self.dra = DraKubelet(self.folder)
        self.cdi = self.folder / "cdi"
        self.cgroups = Cgroups(self.folder / "cgroup")
        self.cgroups.set(OWN_POD, "main")
        (self.folder / "pods" / OWN_POD).mkdir(parents=True)
        credentials = self.folder / "kubeconfig"
        credentials.write_text(
            json.dumps(
                {
                    "current-context": "c",
                    "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
                    "clusters": [
                        {
                            "name": "k",
                            "cluster": {"server": f"http://127.0.0.1:{self.api.port}"},
                        }
                    ],
                    "users": [{"name": "u", "user": {"token": "t"}}],
                }
            )
        )
        self.set(
            mode="dra",
            cdi_dir=str(self.cdi),
            kubeconfig=str(credentials),
            cgroup_root=str(self.folder / "cgroup"),
        )
        self.settings["NODE_NAME"] = NODE

    def __exit__(self, *error: object) -> None:
        self.dra.close()
        super().__exit__(*error)
        self.api.close()

    def up(self) -> "DraNode":
        self.dra.start()
        self.start()
        self.ready()
        return self

    def ready(self) -> None:
        self.plugin.until_logged("driver registered with kubelet")
        self.plugin.until_logged("kubelet's record of claims read")

    def again(self):
        """Kill and start again."""
        self.plugin.kill()
        return self.restarted()

    def restarted(self):
        self.dra.registered.clear()
        self.start()
        self.ready()
        self.dra.until_registered()
        return self.plugin

    def claim(self, name: str, *devices: str, request: str = "fpga", **parameters: Any) -> Claim:
        """A claim that is allocated, for a pod."""
        claim = Claim(name, *devices, request=request)
        if parameters:
            claim.config = [config(**parameters)]
        claim.pods = [str(uuid.uuid4())]
        self.put(claim)
        return claim

    def put(self, claim: Claim) -> None:
        self.api.objects[claim.path] = claim.object()

    def file_path(self, claim: Claim) -> Path:
        return self.cdi / f"k8s.{DRIVER}-claim_{claim.uid}.json"

    def file(self, claim: Claim) -> Json | None:
        with contextlib.suppress(FileNotFoundError):
            return json.loads(self.file_path(claim).read_text())
        return None

    def env(self, claim: Claim, device: int = 0) -> Mapping[str, str]:
        """What the runtime gives a container with a device of the claim."""
        found = self.file(claim)
        assert found is not None
        lines = found["devices"][device]["containerEdits"]["env"]
        return dict(line.split("=", 1) for line in lines)

    def pod(self, name: str, uid: str, *containers: Json, **status: Any) -> None:
        self.api.objects[f"/api/v1/namespaces/{NAMESPACE}/pods/{name}"] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": NAMESPACE, "uid": uid},
            "spec": {"containers": list(containers)},
            "status": status,
        }

    def programmed(self, since: int = 0) -> int:
        """How often this run of the plugin has done anything to a region."""
        return sum("steps" in line for line in self.plugin.lines[since:])


def container(name: str, afu: str | None) -> Json:
    env = (
        []
        if afu is None
        else [
            {"name": "FPGA_REGION_1", "value": ID},
            {"name": "FPGA_AFU_1", "value": afu},
        ]
    )
    return {"name": name, "image": "i", "env": env}
