"""A node whose kubelet prepares claims: real kubelet, containerd 2, scheduler and controllers.

What `tests/kubelet` has for the device plugin API, with pods that the scheduler binds and claims
that it allocates. What a test waits for it sees where an operator would: in the API, in kubelet's
list of pods, in the plugin's log, in what a container writes.
"""

import contextlib
import json
import shutil
import signal
import sqlite3
import urllib.error
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import node as first_door
import yaml
from control_plane import ControlPlane
from daemon_support import AFU
from machine import CONTROL_PLANE, LIMIT, Process, Runtime, until
from node import Pod

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy/dra"
DRIVER = "fpga.intel.com"
API = "/apis/resource.k8s.io/v1"
NAMESPACED = f"{API}/namespaces/default"
RECORD = Path("/var/lib/kubelet/dra_manager_state")
CDI = Path("/var/run/cdi")

RETRY = 150.0
"""Seconds after which a test gives up on kubelet's second Prepare, which comes after 60 to 90."""

CONTROLLERS = (
    "resourceclaim-controller",
    "device-taint-eviction-controller",
    "garbage-collector-controller",
)
"""The ones that DRA takes; others would have the node ready, which without a network it is not."""

_PLACES = {
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "DeviceClass": f"{API}/deviceclasses",
}


OPENS = "exec 3<>/dev/dfl-port.0 && echo opened;"
"""The begin of a container's command: it has the first port open for as long as it runs."""


class Cluster(ControlPlane):
    """The API server with the scheduler and controllers of claims."""

    # A pod is not kept off a node that is not ready: the pods here need no network.
    disabled = "ServiceAccount,TaintNodesByCondition"

    def __init__(self) -> None:
        super().__init__()
        common = ("--kubeconfig", self.kubeconfig("admin"), "--leader-elect=false")
        self._programs = [
            Process("kube-scheduler", CONTROL_PLANE / "kube-scheduler", *common),
            Process(
                "kube-controller-manager",
                CONTROL_PLANE / "kube-controller-manager",
                *common,
                f"--controllers={','.join(CONTROLLERS)}",
            ),
        ]
        self.install()
        # Requests with admin access are for namespaces that an administrator has marked.
        path = "/api/v1/namespaces/default"
        default = self.call("GET", path)
        default["metadata"]["labels"]["resource.kubernetes.io/admin-access"] = "true"
        self.call("PUT", path, default)

    def install(self) -> None:
        """Classes and rights, as without helm."""
        self.apply(DEPLOY / "deviceclasses.yaml")
        user = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "fpga-plugin"}
        self.apply(DEPLOY / "rbac.yaml", subjects=[user])

    def end(self) -> None:
        for program in self._programs:
            program.end(signal.SIGKILL)
        super().end()

    def apply(self, path: Path, *, subjects: Sequence[Mapping[str, str]] = ()) -> None:
        """Make all objects of a file of YAML.

        Args:
            path: of the file.
            subjects: whose the role bindings are, in place of those in the file.
        """
        for one in yaml.safe_load_all(path.read_text()):
            changed = {"subjects": list(subjects)} if one["kind"] == "ClusterRoleBinding" else {}
            self.call("POST", _PLACES[one["kind"]], one | changed)

    def claims(self) -> dict[str, dict[str, Any]]:
        """All of them, by name."""
        found = self.call("GET", f"{API}/resourceclaims")["items"]
        return {claim["metadata"]["name"]: claim for claim in found}

    def release(self, name: str) -> None:
        """Let a claim's object go although it is in use, as an administrator might."""
        path = f"{NAMESPACED}/resourceclaims/{name}"
        self.call("DELETE", path)

        def gone() -> bool:
            # The controller writes it meanwhile.
            try:
                claim = self.call("GET", path)
                claim["metadata"]["finalizers"] = []
                self.call("PUT", path, claim)
            except urllib.error.HTTPError as error:
                if error.code not in {404, 409}:
                    raise
                return error.code == 404
            return False

        until(gone, f"claim {name} is deleted")

    def clear(self) -> None:
        """Forget all pods, claims, events and the node."""
        super().clear()
        for kind in ("resourceclaimtemplates", "resourceclaims"):
            self.call("DELETE", f"{NAMESPACED}/{kind}")
        self.call("DELETE", "/api/v1/namespaces/default/events")
        until(lambda: not self.claims(), "all claims are gone")
        self.call("DELETE", f"{API}/resourceslices")

    def events(self, reason: str) -> list[str]:
        """What the events of this reason say."""
        found = self.call("GET", "/api/v1/namespaces/default/events")["items"]
        return [event["message"] for event in found if event["reason"] == reason]


class Node(first_door.Node):
    """A node with DRA; ends what it started.

    Args:
        runtime: with CDI.
        cards: simulated ones.
        cluster: which it is part of.
        gates: kubelet's feature gates.
        settings: of the plugin, without their prefix and in lower case.
    """

    def __init__(
        self,
        runtime: Runtime,
        cards: str,
        cluster: Cluster,
        *,
        gates: Mapping[str, bool] | None = None,
        **settings: str,
    ) -> None:
        super().__init__(runtime, cards, gates or {}, cluster, **{"mode": "dra"} | settings)
        self.cluster = cluster
        self.settings["NODE_NAME"] = "node"
        shutil.rmtree(CDI, ignore_errors=True)

    def until_allocatable(self) -> None:
        """Wait until kubelet has the driver and the scheduler its devices."""
        if self.settings["FPGA_PLUGIN_MODE"] == "device-plugin":
            super().until_allocatable()
            return
        self.plugin.until_logged("driver registered with kubelet")
        until(self.free, "the devices are in the slices, and one is free")

    def devices(self) -> dict[str, dict[str, Any]]:
        """What the slices say of each device."""
        slices = self.cluster.call("GET", f"{API}/resourceslices")["items"]
        return {
            device["name"]: device for one in slices for device in one["spec"].get("devices", ())
        }

    def free(self) -> set[str]:
        """Devices in the slices without a taint."""
        return {name for name, device in self.devices().items() if not device.get("taints")}

    def counted(self, what: str, resource: str) -> int:
        """How many devices of a device plugin's resource the Node object has.

        Args:
            what: `allocatable`, which the scheduler may give out, or `capacity`.
            resource: its name.
        """
        node = self.cluster.call("GET", "/api/v1/nodes/node")
        return int(node["status"][what].get(resource, "0"))

    def allocated(self) -> dict[str, list[str]]:
        """Devices of each claim that has any."""
        return {
            name: [one["device"] for one in claim["status"]["allocation"]["devices"]["results"]]
            for name, claim in self.cluster.claims().items()
            if claim.get("status", {}).get("allocation")
        }

    def until_free(self, *devices: str) -> None:
        """Wait until no claim has them, and no taint holds them back."""
        wanted = {dns(device) for device in devices}

        def free() -> bool:
            taken = {device for found in self.allocated().values() for device in found}
            return not wanted & taken and wanted <= self.free()

        until(free, f"{', '.join(devices)} free again")

    def pod(self, name: str, *containers: Mapping[str, Any], **spec: Any) -> Pod:  # type: ignore[override]
        """A pod that the scheduler binds."""
        whole = {
            "hostNetwork": True,
            "terminationGracePeriodSeconds": 1,
            "containers": list(containers),
        }
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "default"},
            "spec": whole | spec,
        }
        return Pod(self, manifest)

    def template(self, name: str, kind: str = "region", **parameters: Any) -> str:
        """A claim template by a class of deploy/dra; its name."""
        body = {"metadata": {"name": name}, "spec": {"spec": asking(kind, **parameters)}}
        self.cluster.call("POST", f"{NAMESPACED}/resourceclaimtemplates", body)
        return name

    def claim(self, name: str, kind: str = "region", **parameters: Any) -> str:
        """A claim by itself; its name."""
        body = {"metadata": {"name": name}, "spec": asking(kind, **parameters)}
        self.cluster.call("POST", f"{NAMESPACED}/resourceclaims", body)
        return name

    def asks(self, name: str, kind: str = "region", command: str = "", **parameters: Any) -> Pod:
        """A pod of one container with a claim of its own by a template of its own."""
        template = self.template(f"{name}-{uuid.uuid4().hex[:6]}", kind, **parameters)
        return self.pod(name, container(command), resourceClaims=[by_template(template)])

    def served(self, method: str, since: int = 0) -> list[str]:
        """Uids of the claims of kubelet's calls that were answered without an error, in order."""
        return [one["claim"] for one in self.plugin.logged("claim served", since, method=method)]

    def until_refused(self, *words: str) -> str:
        """Wait until kubelet reports a Prepare that failed with these words."""

        def refused() -> str:
            told = self.cluster.events("FailedPrepareDynamicResources")
            return next((text for text in told if all(word in text for word in words)), "")

        return str(waiting(refused, f"FailedPrepareDynamicResources with {words}"))

    def holders(self) -> list[str]:
        """Claims that the plugin has in its journal, from before it begins to program for them."""
        path = f"file:{self.settings['FPGA_PLUGIN_STATE_DIR']}/journal.sqlite3?mode=ro"
        with contextlib.closing(sqlite3.connect(path, uri=True)) as journal:
            rows = journal.execute("SELECT key FROM journal WHERE kind = 'claim_owners'")
            return [key for (key,) in rows]

    def phase(self, pod: Pod) -> str:
        """What the API says of a pod; kubelet's own list may not have it yet."""
        path = f"/api/v1/namespaces/default/pods/{pod.name}"
        return str(self.cluster.call("GET", path)["status"]["phase"])

    def sandboxes(self) -> list[str]:
        """Those that run."""
        kind = 'labels."io.cri-containerd.kind"==sandbox'
        found = self.runtime.ctr("containers", "list", "--quiet", kind).split()
        tasks = [line.split() for line in self.runtime.ctr("tasks", "list").splitlines()]
        return [task[0] for task in tasks if task[0] in found and task[-1] == "RUNNING"]


def users(node: Node) -> set[str]:
    """Pods whose processes may have a region's nodes open, by the plugin's journal."""
    path = f"file:{node.settings['FPGA_PLUGIN_STATE_DIR']}/journal.sqlite3?mode=ro"
    with contextlib.closing(sqlite3.connect(path, uri=True)) as journal:
        rows = journal.execute("SELECT key FROM journal WHERE kind = 'tenancies'")
        return {json.loads(key)["pod"] for (key,) in rows}


def dns(device: str) -> str:
    """A device's name in a slice."""
    return device.replace(".", "-")


def asking(kind: str, **parameters: Any) -> dict[str, Any]:
    """The spec of a claim for one region or card, with a RegionConfig if it says anything.

    Args:
        kind: region, card, or the name of a class.
        parameters: of the config; `admin_access`: of the request.
    """
    name = f"fpga-{kind}-ce489693" if kind in {"region", "card"} else kind
    exactly = {"deviceClassName": name}
    if parameters.pop("admin_access", False):
        exactly |= {"adminAccess": True, "allocationMode": "ExactCount", "count": 1}
    devices: dict[str, Any] = {"requests": [{"name": "fpga", "exactly": exactly}]}
    if parameters:
        devices["config"] = [config(**parameters)]
    return {"devices": devices}


def config(**parameters: Any) -> dict[str, Any]:
    """A RegionConfig as classes and claims carry it."""
    kind = {"apiVersion": "fpga.intel.com/v1alpha1", "kind": "RegionConfig"}
    return {"opaque": {"driver": DRIVER, "parameters": kind | parameters}}


def by_template(template: str, name: str = "fpga") -> dict[str, str]:
    """An entry of a pod's claims."""
    return {"name": name, "resourceClaimTemplateName": template}


def by_claim(claim: str, name: str = "fpga") -> dict[str, str]:
    """An entry of a pod's claims."""
    return {"name": name, "resourceClaimName": claim}


def container(command: str = "", *claims: str, name: str = "main", **more: Any) -> dict[str, Any]:
    """A container of a pod with these of its claims; it stays after the command."""
    resources = {"claims": [{"name": claim} for claim in claims or ("fpga",)]}
    command += first_door.STAY
    return first_door.container(name, command=command, resources={}, **more) | {
        "resources": resources
    }


def running(node: Node, name: str = "asks", bitstream: str = AFU) -> tuple[Pod, str]:
    """A pod with a claim of its own, once it runs, and its container's id."""
    pod = node.asks(name, command=OPENS, bitstream=bitstream)
    return pod, pod.until_running()


def health(pod: Pod) -> list[str]:
    """Of its devices, as the pod's status reports it."""
    told = pod.container().get("allocatedResourcesStatus", [])
    return [one["health"] for each in told for one in each["resources"]]


def waiting(look: Callable[[], Any], what: str) -> Any:
    """As `until`, for what kubelet tries again after a minute and more."""
    return until(look, what, limit=LIMIT + RETRY)
