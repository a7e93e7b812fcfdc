"""The plugin as the pod that the chart makes, from the image of the Dockerfile: `make test-image`.

What a DaemonSet's controller, the service account's admission and a registry would do is done here,
and nothing else is changed: the pod is the DaemonSet's template with its mounts, privileges and
probes. With an API server helm itself installs the chart there, and the template is what the API
server made of it; without one the pod is a file of kubelet's, rendered by helm.
"""

import copy
import json
import subprocess
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import yaml
from control_plane import URL, ControlPlane
from machine import Runtime, until
from namespace import ROOT

if TYPE_CHECKING:
    from node import Node

HELM = ROOT / ".cache/deploy/helm"
CHART = ROOT / "deploy/helm/fpga-plugin"
ARCHIVE = ROOT / ".cache/image/fpga-plugin.tar"
REPOSITORY, TAG = "localhost/fpga-plugin", "test"
IMAGE = f"{REPOSITORY}:{TAG}"
NAMESPACE = "fpga-plugin"

OWN = {
    "FPGA_PLUGIN_STATE_DIR": "paths.state",
    "FPGA_PLUGIN_BITSTREAM_DIR": "paths.bitstreams",
    "FPGA_PLUGIN_PODS_SOCKET": "",
    "FPGA_PLUGIN_KUBECONFIG": "",
    "FPGA_PLUGIN_HTTP_ADDRESS": "",
    "FPGA_PLUGIN_EVENTS": "events",
    "FPGA_PLUGIN_OBSERVE": "observe",
    "FPGA_PLUGIN_MODE": "mode",
    "NODE_NAME": "",
}
"""Settings of a test that the chart has another value for, or sets itself."""

_CREDENTIALS = "/var/run/secrets/kubernetes.io/serviceaccount"


def missing() -> str:
    """What is not built; empty if all is there."""
    absent = [str(path.relative_to(ROOT)) for path in (HELM, ARCHIVE) if not path.exists()]
    return f"not built: {', '.join(absent)} (make test-image)" if absent else ""


def load_image(runtime: Runtime) -> None:
    """Put the image where kubelet finds it."""
    runtime.ctr("images", "import", str(ARCHIVE))


def helm(*arguments: str, kubeconfig: str | None = None) -> str:
    """Run helm; what it says.

    Raises:
        AssertionError: it fails.
    """
    command = [HELM, *arguments, "--namespace", NAMESPACE]
    if kubeconfig is not None:
        command += ["--kubeconfig", kubeconfig]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def values(settings: Mapping[str, str], more: Mapping[str, str] | None = None) -> list[str]:
    """Arguments of helm for a test's settings, and for values that are no settings."""
    given = {"image.repository": REPOSITORY, "image.tag": TAG, "image.pullPolicy": "Never"}
    given |= more or {}
    for name, text in settings.items():
        key = OWN.get(name, f"settings.{name}")
        if key:
            given[key] = text
    return [
        word
        for name, text in given.items()
        # Braces and commas are helm's own in a value.
        for word in ("--set", f"{name}={text}".replace(",", "\\,"))
    ]


def install(
    control_plane: ControlPlane,
    settings: Mapping[str, str],
    more: Mapping[str, str] | None = None,
) -> str:
    """`helm upgrade --install` into the API server; its notes."""
    make_namespace(control_plane)
    return helm("upgrade", "--install", "fpga-plugin", str(CHART), *values(settings, more),
                kubeconfig=control_plane.kubeconfig("admin"))  # fmt: skip


def make_namespace(control_plane: ControlPlane) -> None:
    """The plugin's, if there is none."""
    path = "/api/v1/namespaces"
    known = [each["metadata"]["name"] for each in control_plane.call("GET", path)["items"]]
    if NAMESPACE not in known:
        control_plane.call("POST", path, {"metadata": {"name": NAMESPACE}})
        # What the controller manager puts into each namespace.
        control_plane.call("POST", f"{path}/{NAMESPACE}/configmaps", {
            "metadata": {"name": "kube-root-ca.crt"},
            "data": {"ca.crt": control_plane.certificate.read_text()},
        })  # fmt: skip


def template(node: "Node") -> dict[str, Any]:
    """The pod that the DaemonSet's controller would make for this node."""
    control_plane = node.kubelet.control_plane
    if control_plane is None:
        text = helm("template", "fpga-plugin", str(CHART), *values(node.settings))
        made = next(o for o in yaml.safe_load_all(text) if o and o["kind"] == "DaemonSet")
    else:
        install(control_plane, node.settings, node.chart)
        path = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/fpga-plugin"
        made = control_plane.call("GET", path)
    pod = copy.deepcopy(made["spec"]["template"])
    pod["metadata"] = {"name": "fpga-plugin", "namespace": NAMESPACE} | pod["metadata"]
    # No CNI here: the network is the node's. No scheduler: the node is named.
    pod["spec"] |= {"nodeName": "node", "hostNetwork": True}
    if control_plane is None:
        # A file's pod may not refer to objects of an API server that there is none of.
        for name in ("serviceAccountName", "automountServiceAccountToken", "priorityClassName"):
            pod["spec"].pop(name, None)
    else:
        add_credentials(pod["spec"])
    return {"apiVersion": "v1", "kind": "Pod"} | pod


def add_credentials(spec: dict[str, Any]) -> None:
    """As the ServiceAccount admission does, which is off for want of its controller."""
    token = {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}}
    authority = {"configMap": {"name": "kube-root-ca.crt"}}
    namespace = {"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}
    sources = [token, authority, {"downwardAPI": {"items": [namespace]}}]
    spec["volumes"].append({"name": "kube-api-access", "projected": {"sources": sources}})
    (container,) = spec["containers"]
    container["volumeMounts"].append(
        {"name": "kube-api-access", "mountPath": _CREDENTIALS, "readOnly": True}
    )
    # There is no proxy that would lead the Service's address to the server.
    host, port = URL.removeprefix("https://").split(":")
    container["env"] += [
        {"name": "KUBERNETES_SERVICE_HOST", "value": host},
        {"name": "KUBERNETES_SERVICE_PORT", "value": port},
    ]


class PodPlugin:
    """One run of the plugin's pod; looks like `daemon_support.Plugin`.

    Its lines are those that the container runtime wrote to the pod's log.
    """

    def __init__(self, node: "Node") -> None:
        from node import Pod  # node imports this module

        self._node = node
        self.pod: Pod = Pod(node, template(node))
        self.process = self  # for `poll`

    def poll(self) -> int | None:
        """Its end is the node's business: no process of ours."""
        return 0

    @property
    def text(self) -> str:
        return self.pod.output("fpga-plugin") + "\n"

    @property
    def lines(self) -> list[dict[str, Any]]:
        parsed = []
        for line in self.pod.output("fpga-plugin").splitlines():
            try:
                parsed.append(json.loads(line))
            except ValueError:
                parsed.append({"event": "", "text": line})
        return parsed

    @property
    def mark(self) -> int:
        return len(self.lines)

    def logged(self, event: str, since: int = 0, **values: Any) -> list[dict[str, Any]]:
        return [
            line
            for line in self.lines[since:]
            if line["event"] == event and all(line.get(k) == v for k, v in values.items())
        ]

    def until_logged(self, event: str, since: int = 0, **values: Any) -> dict[str, Any]:
        try:
            return until(lambda: self.logged(event, since, **values), f"log {event} {values}")[0]
        except AssertionError as error:
            raise AssertionError(f"{error}: {json.dumps(self.pod.seen().get('status'))}") from None

    def pid(self) -> int:
        """Of its process, as this test sees it."""
        wanted = self.pod.container("fpga-plugin")["containerID"].removeprefix("containerd://")
        for line in self._node.runtime.ctr("tasks", "list").splitlines()[1:]:
            container_id, pid, _ = line.split()
            if container_id == wanted:
                return int(pid)
        raise AssertionError(f"no task of {wanted}")

    def delete(self) -> None:
        """As an upgrade begins: the pod is deleted with its own grace period."""
        self.pod.delete()
        self.pod.until_gone()


def plugin_of(node: "Node") -> PodPlugin:
    """The one that runs there."""
    plugin = node.plugin
    assert isinstance(plugin, PodPlugin)
    return plugin
