"""A cluster of one node on which a person types what the documents say, by kubectl and helm.

API server, controllers, scheduler, kubelet and containerd are real. What the node of a test lacks
is added behind the documents' back: it has simulated cards, and no network for pods (`RENDER`,
`APPLY`).
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
from pathlib import Path
from typing import Any

import pod_plugin
import yaml
from control_plane import ControlPlane
from daemon_support import STORE
from images import write_image
from machine import CONTROL_PLANE, SCRATCH, STAY, Process, Runtime, until
from namespace import BUSYBOX, ROOT
from node import Node

KUBECTL = ROOT / ".cache/deploy/kubectl"

NOT_RUN = ("git clone", "make image", "docker push")
"""Commands of the documents: the image is built by `make test-image`, and imported."""

CONTROLLERS = (
    "daemonset-controller",
    "namespace-controller",
    "node-lifecycle-controller",
    "resourcequota-controller",
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
    from typed_cluster import overlay
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
        f"{path}/containers/0/image": pod_plugin.IMAGE,
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


def blocks(document: str, heading: str = "") -> list[str]:
    """What a document, or the part below a heading, tells to type, each block of it."""
    part = (ROOT / "docs" / document).read_text()
    if heading:
        part = re.split(rf"^## {re.escape(heading)}\n", part, flags=re.MULTILINE)[1]
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
        self._programs = programs = self._folder / "bin"
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

    def has_program(self, name: str, text: str) -> None:
        """Put a script in the person's path."""
        self._program(self._programs / name, text)

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


def gone(cluster: Cluster) -> bool:
    try:
        cluster.control_plane.call("GET", "/api/v1/namespaces/fpga-plugin")
    except urllib.error.HTTPError as error:
        return error.code == 404
    return False


def uninstalled(cluster: Cluster) -> None:
    using, _, remove = blocks("install.md", "Uninstall")
    assert cluster.types(using) == ""
    cluster.types(remove)
    until(lambda: gone(cluster), "the namespace is gone")


def offers_nothing(cluster: Cluster) -> bool:
    """What a plugin before offered goes when kubelet next tells of its devices."""
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
