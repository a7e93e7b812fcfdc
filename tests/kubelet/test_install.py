"""The documents' installs, word by word: their own commands on a real cluster, by kubectl and helm.

What is in the documents' blocks is run as it stands there, but for three names (REGISTRY, NODE and
the release's version) and for what builds and pushes the image. What the node of this test lacks
is added behind the documents' back: it has simulated cards, and no network for pods (`RENDER`,
`APPLY`). There is one kubelet, so a second node (`OtherNode`) is one by its object alone.
`make test-image` runs these.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pod_plugin
import pytest
import yaml
from control_plane import ControlPlane
from daemon_support import CARDS, REGIONS, STORE
from images import write_image
from machine import CONTROL_PLANE, PLUGIN_IN_A_POD, SCRATCH, STAY, Process, Runtime, until
from namespace import BUSYBOX, ROOT
from node import Node

KUBECTL = ROOT / ".cache/deploy/kubectl"

pytestmark = pytest.mark.skipif(
    not PLUGIN_IN_A_POD or not KUBECTL.exists(),
    reason="needs the image, kubectl and controllers: make test-image",
)

NOT_RUN = ("git clone", "make image", "docker push")
"""Commands of the documents: the image is built by `make test-image`, and imported."""

CONTROLLERS = (
    "daemonset-controller",
    "namespace-controller",
    "node-lifecycle-controller",
    "root-ca-certificate-publisher-controller",
)

VALUES = {
    "image": {"pullPolicy": "Never", "tag": pod_plugin.TAG},
    "paths": {"bitstreams": str(STORE)},
    "settings": {
        "FPGA_PLUGIN_BACKEND": "simulated",
        "FPGA_PLUGIN_SIMULATED_CARDS": "1x2",
        "FPGA_PLUGIN_RECONCILE_INTERVAL": "0.5",
    },
}

RENDER = f"""\
#!{sys.executable}
import sys, yaml
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(ROOT)!r}]
import pod_plugin
objects = [one for one in yaml.safe_load_all(sys.stdin) if one]
for one in objects:
    if one["kind"] == "DaemonSet":
        spec = one["spec"]["template"]["spec"]
        spec["hostNetwork"] = True
        pod_plugin.add_credentials(spec)
yaml.safe_dump_all(objects, sys.stdout)
"""

APPLY = f"""\
#!{sys.executable}
import os, sys
arguments = sys.argv[1:]
if arguments[:2] == ["apply", "-k"]:
    sys.path[:0] = {sys.path!r}
    from test_install import overlay
    arguments[2] = overlay(arguments[2])
os.execv({str(KUBECTL)!r}, ["kubectl", *arguments])
"""
"""kubectl, but that a kustomization that is applied is one over the document's."""

TENANT = "example.com/compress:1"
"""The image that the samples of deploy/examples name: here it does nothing until it is ended."""

CNI = """\
#!/bin/sh
echo '{"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": "'"$CNI_NETNS"'"}],
 "ips": [{"address": "10.88.0.5/24", "interface": 0}]}'
"""
"""A network in which nobody reaches anybody: the pod of `helm test` needs none."""


def overlay(directory: str) -> str:
    """A kustomization over one, with what the node of this test lacks; its directory."""
    of = Path(tempfile.mkdtemp(dir=Path(directory).resolve().parent))
    path = "/spec/template/spec"
    spec: Any = {"volumes": [], "containers": [{"env": [], "volumeMounts": []}]}
    pod_plugin.add_credentials(spec)
    (container,) = spec["containers"]
    settings: Any = VALUES["settings"]
    added = {
        f"{path}/volumes/-": spec["volumes"],
        f"{path}/containers/0/volumeMounts/-": container["volumeMounts"],
        f"{path}/containers/0/env/-": [
            *container["env"],
            *({"name": name, "value": text} for name, text in settings.items()),
        ],
        f"{path}/hostNetwork": [True],
    }
    base = yaml.safe_load((ROOT / "deploy/kustomize/base/daemonset.yaml").read_text())
    volumes = [one["name"] for one in base["spec"]["template"]["spec"]["volumes"]]
    replaced = {
        f"{path}/volumes/{volumes.index('bitstreams')}/hostPath/path": str(STORE),
        f"{path}/containers/0/image": f"{pod_plugin.REPOSITORY}:{pod_plugin.TAG}",
    }
    patch = [
        *({"op": "add", "path": at, "value": one} for at, each in added.items() for one in each),
        *({"op": "replace", "path": at, "value": value} for at, value in replaced.items()),
    ]
    (of / "kustomization.yaml").write_text(yaml.safe_dump({
        "resources": [os.path.relpath(directory, of)],
        "patches": [{"target": {"kind": "DaemonSet"}, "patch": yaml.safe_dump(patch)}],
    }))  # fmt: skip
    return str(of)


def blocks(document: str, heading: str) -> list[str]:
    """What a part of a document reports to type, each block of it."""
    text = (ROOT / "docs" / document).read_text()
    part = re.split(rf"^## {re.escape(heading)}\n", text, flags=re.MULTILINE)[1]
    part = re.split(r"^## ", part, flags=re.MULTILINE)[0]
    found = re.findall(r"^ *```sh\n(.*?)^ *```$", part, re.MULTILINE | re.DOTALL)
    return [
        "\n".join(line for line in one.splitlines() if not line.strip().startswith(NOT_RUN))
        for one in found
    ]


def inline(document: str, heading: str, beginning: str) -> list[str]:
    """The commands between backquotes in a part's text that begin so."""
    text = (ROOT / "docs" / document).read_text()
    part = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(rf"`({re.escape(beginning)}[^`]*)`", part)


class Cluster:
    """API server, controllers, scheduler and one node, and a person's shell on it."""

    def __init__(self, runtime: Runtime, control_plane: ControlPlane) -> None:
        self.control_plane = control_plane
        self._folder = SCRATCH / "install"
        self._folder.mkdir()
        network = SCRATCH / "cni"
        network.mkdir(exist_ok=True)
        for name in ("none", "loopback"):
            self._program(network / name, CNI)
        plugins = {"cniVersion": "1.0.0", "name": "none", "plugins": [{"type": "none"}]}
        (network / "10-none.conflist").write_text(json.dumps(plugins))
        self.node = Node(runtime, "1x2", {"PodsAPI": False}, control_plane)
        self.node.kubelet.start()
        until(control_plane.has_node, "kubelet registers its node")
        admin = control_plane.kubeconfig("admin")
        common = ("--kubeconfig", admin, "--leader-elect=false")
        self._processes = [
            Process(
                "kube-controller-manager",
                CONTROL_PLANE / "kube-controller-manager",
                *common,
                f"--controllers={','.join(CONTROLLERS)}",
                f"--root-ca-file={control_plane.certificate}",
            ),
            Process("kube-scheduler", CONTROL_PLANE / "kube-scheduler", *common),
        ]
        programs = self._folder / "bin"
        programs.mkdir()
        render, values = self._folder / "render", self._folder / "values.yaml"
        self._program(render, RENDER)
        values.write_text(yaml.safe_dump(VALUES))
        more = f"--values {values} --post-renderer {render}"
        self._program(
            programs / "helm",
            f'#!/bin/sh\ncase $1 in install|upgrade) exec {pod_plugin.HELM} "$@" {more} ;; esac\n'
            f'exec {pod_plugin.HELM} "$@"\n',
        )
        self._program(programs / "kubectl", APPLY)
        # Where a person has cloned the project: what is made there stays in the test.
        self._clone = self._folder / "clone"
        self._clone.mkdir()
        (self._clone / "deploy").symlink_to(ROOT / "deploy")
        tenant = self._folder / "tenant.tar"
        write_image(
            tenant,
            TENANT,
            {"bin/busybox": BUSYBOX},
            links={"bin/sh": "busybox", "bin/sleep": "busybox"},
            command=["/bin/sh", "-c", STAY],
        )
        runtime.ctr("images", "import", str(tenant))
        self._environment = os.environ | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "KUBECONFIG": str(admin),
            "HOME": str(self._folder),
            "PYTHONPATH": str(ROOT),
        }
        if not gone(self):  # what other tests of the session installed
            self.types("helm uninstall --ignore-not-found -n fpga-plugin fpga-plugin")
            self.types("kubectl delete namespace fpga-plugin")
            until(lambda: gone(self), "the namespace is gone")
        label = "feature.node.kubernetes.io/fpga-dfl.present-"
        self.types(f"kubectl label node node {label}")

    @staticmethod
    def _program(path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def types(self, commands: str, *, limit: float = 240.0) -> str:
        """What a shell says to these commands of a document."""
        text = commands.replace("REGISTRY/", "localhost/").replace("NODE", "node")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self._clone,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}\n{self._tails()}"
        return done.stdout

    def _tails(self) -> str:
        pods = self.control_plane.call("GET", "/api/v1/pods")["items"]
        seen = [f"{one['metadata']['name']}: {json.dumps(one.get('status'))}" for one in pods]
        return "\n".join([*seen, *(process.tail() for process in self._processes)])

    def allocatable(self) -> dict[str, str]:
        told = self.control_plane.call("GET", "/api/v1/nodes/node")["status"]["allocatable"]
        return {name: count for name, count in told.items() if name.startswith("fpga.intel.com/")}

    def close(self) -> None:
        for process in self._processes:
            process.end(signal.SIGKILL)
        self.node.close()
        self.control_plane.clear()
        shutil.rmtree(self._folder)
        for path in (SCRATCH / "cni").iterdir():  # not the directory: containerd watches it
            path.unlink()


class OtherNode:
    """A second node, without a kubelet: of its pods a thread says that they run, and have ended."""

    NAME = "other"

    def __init__(self, control_plane: ControlPlane) -> None:
        self._call, self._ended = control_plane.call, threading.Event()
        label = "feature.node.kubernetes.io/fpga-dfl.present"
        labels = {"kubernetes.io/os": "linux", "kubernetes.io/hostname": self.NAME, label: "true"}
        self._call("POST", "/api/v1/nodes", {"metadata": {"name": self.NAME, "labels": labels}})
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def pods(self) -> list[dict[str, Any]]:
        listed = self._call("GET", f"/api/v1/pods?fieldSelector=spec.nodeName={self.NAME}")
        return list(listed["items"])

    def _run(self) -> None:
        while not self._ended.wait(0.3):
            # Somebody else may have changed or removed it meanwhile; there is a next time.
            with suppress(OSError):
                self._says_that_it_is_well()
                for pod in self.pods():
                    with suppress(urllib.error.HTTPError):
                        self._plays(pod)

    def _says_that_it_is_well(self) -> None:
        path = f"/api/v1/nodes/{self.NAME}"
        node = self._call("GET", path)
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        ready = {"type": "Ready", "status": "True", "reason": "Test", "lastHeartbeatTime": now}
        room = {"cpu": "8", "memory": "8Gi", "pods": "16"}
        node["status"] |= {"conditions": [ready], "capacity": room, "allocatable": room}
        self._call("PUT", f"{path}/status", node)

    def _plays(self, pod: dict[str, Any]) -> None:
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        if "deletionTimestamp" in metadata:
            self._call("DELETE", path, {"gracePeriodSeconds": 0})
        elif pod["status"].get("phase") != "Running":
            ready = [{"type": name, "status": "True"} for name in ("Ready", "ContainersReady")]
            pod["status"] |= {"phase": "Running", "conditions": ready}
            self._call("PUT", f"{path}/status", pod)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._call("DELETE", f"/api/v1/nodes/{self.NAME}")


def observes(pod: dict[str, Any]) -> bool:
    (container,) = pod["spec"]["containers"]
    return {"name": "FPGA_PLUGIN_OBSERVE", "value": "true"} in container["env"]


@pytest.fixture
def other(cluster: Cluster) -> Iterator[OtherNode]:
    made = OtherNode(cluster.control_plane)
    yield made
    made.close()


@pytest.fixture(scope="module", params=["api-server"])
def cluster(runtime: Runtime, control_plane: ControlPlane) -> Iterator[Cluster]:
    made = Cluster(runtime, control_plane)
    yield made
    made.close()


def gone(cluster: Cluster) -> bool:
    try:
        cluster.control_plane.call("GET", "/api/v1/namespaces/fpga-plugin")
    except urllib.error.HTTPError as error:
        return error.code == 404
    return False


def uninstalled(cluster: Cluster) -> None:
    using, remove = blocks("install.md", "Uninstall")
    assert cluster.types(using) == ""
    cluster.types(remove)
    until(lambda: gone(cluster), "the namespace is gone")


def offers_nothing(cluster: Cluster) -> bool:
    """What a plugin before offered goes when kubelet next reports its devices."""
    return not any(int(count) for count in cluster.allocatable().values())


def looked(cluster: Cluster, look: str) -> str:
    """What the plugin saw; it takes a second from its start, which a person does not notice."""
    logs = look[look.index("POD=") if "POD=" in look else look.rindex("kubectl") :]
    told = ""

    def says() -> bool:
        nonlocal told
        told = cluster.types(logs)
        return "would serve card" in told

    until(says, "it says what it would serve")
    return told


def test_the_ten_minutes_of_the_install(cluster: Cluster) -> None:
    prepare, look, serve, attempt = blocks("install.md", "Install in ten minutes")
    (label,) = inline("install.md", "Install in ten minutes", "kubectl label node")
    cluster.types(prepare)
    cluster.types(label)
    cluster.types(look)
    told = looked(cluster, look)
    assert "would_wipe" in told
    until(lambda: offers_nothing(cluster), "nothing is offered")
    told = cluster.types(serve)
    assert "Phase:          Succeeded" in told
    # Kubelet reports the API server some seconds later, as the document says.
    nodes = next(line for line in serve.splitlines() if line.strip().startswith("kubectl get"))
    until(lambda: f"{REGIONS}:2" in cluster.types(nodes), "the node's regions are told")
    until(lambda: f"{CARDS}:1" in cluster.types(nodes), "the node's card is told")
    start, runs, end = attempt.splitlines()
    cluster.types(f"{start}\n{runs}")
    # Of the pods that use FPGAs, one does so only in an init container.
    init = {"name": "init", "image": TENANT, "resources": {"limits": {CARDS: "1"}}}
    cluster.control_plane.create_pod({
        "metadata": {"name": "waits"},
        "spec": {
            "initContainers": [init],
            "containers": [{"name": "app", "image": TENANT}],
            "schedulerName": "nobody",
        },
    })  # fmt: skip
    using, _ = blocks("install.md", "Uninstall")
    assert cluster.types(using).split() == ["default/region", "default/waits"]
    cluster.types(f"kubectl delete pod waits\n{end}")
    # The whole fleet at a glance, by the API server's own proxy.
    cluster.types(
        "helm upgrade fpga-plugin deploy/helm/fpga-plugin --namespace fpga-plugin"
        " --reset-then-reuse-values --set settings.FPGA_PLUGIN_STATUS_PAGE=true\n"
        "kubectl --namespace fpga-plugin rollout status daemonset"
        " --selector app.kubernetes.io/part-of=fpga-plugin"
    )

    def node_in_fleet() -> list[str]:
        told = cluster.types(f"{sys.executable} -m fpga_plugin fleet")
        head, line, total = told.splitlines()
        assert head.startswith("NODE")
        assert total.startswith("1 of 1 nodes")
        return line.split()

    # The region of the pod that ended is scrubbed, and nobody's.
    unused = ["node", "fpga-plugin", "ready", "1", "2", "0", "2"]
    until(lambda: node_in_fleet()[:7] == unused, "no region of the node is used")
    uninstalled(cluster)


def test_the_install_without_helm(cluster: Cluster) -> None:
    look, serve = blocks("install.md", "Install without helm")
    (label,) = inline("install.md", "Install in ten minutes", "kubectl label node")
    (remove,) = inline("install.md", "Install without helm", "kubectl delete")
    cluster.types(f"{label} --overwrite")
    cluster.types(look)
    assert "would_wipe" in looked(cluster, look)
    until(lambda: offers_nothing(cluster), "nothing is offered")
    cluster.types(serve)
    until(lambda: cluster.allocatable().get(REGIONS) == "2", "its regions are allocatable")
    cluster.types(remove)
    until(lambda: gone(cluster), "the namespace is gone")


def test_the_migration_of_a_node_leaves_another_that_serves_alone(
    cluster: Cluster, other: OtherNode
) -> None:
    install, look = blocks("migration.md", "Taking over a node")
    cluster.types("kubectl create namespace fpga-plugin")  # as install.md begins
    cluster.types("kubectl label node node feature.node.kubernetes.io/fpga-dfl.present-")
    cluster.types(install)
    (serving,) = until(other.pods, "the node that is done serves")
    assert not observes(serving)
    cordon, label, uncordon = (
        inline("migration.md", "Taking over a node", f"kubectl {word}")[0]
        for word in ("cordon", "label", "uncordon")
    )
    cluster.types(cordon)
    cluster.types(look)
    looked(cluster, look)
    here = "/api/v1/namespaces/fpga-plugin/pods?fieldSelector=spec.nodeName=node"
    assert [observes(one) for one in cluster.control_plane.call("GET", here)["items"]] == [True]
    cluster.types(f"{label}\n{uncordon}")
    rollout = next(line for line in look.splitlines() if " rollout status " in line)
    cluster.types(rollout)
    until(lambda: cluster.allocatable().get(REGIONS) == "2", "its regions are allocatable")
    (still,) = other.pods()
    assert still["metadata"]["uid"] == serving["metadata"]["uid"], "never out of service"
    uninstalled(cluster)
