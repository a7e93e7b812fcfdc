"""The API server and its etcd, as processes; pods are bound to the node by name.

There is no scheduler and no controller: a pod names its node, and what only a controller would do
(service accounts, taints) is switched off. Rights are checked as in a cluster: kubelet is a node,
the plugin may do what its role says.
"""

import shutil
import signal
import subprocess
import urllib.error
from collections.abc import Mapping
from typing import Any

from api_calls import ApiCalls
from machine import CONTROL_PLANE, SCRATCH, Process, until
from namespace import ADDRESS

URL = "https://127.0.0.1:6443"
ETCD = "http://127.0.0.1:2379"

TOKENS = {
    "admin": ("admin", "system:masters"),
    "kubelet": ("system:node:node", "system:nodes"),
    "plugin": ("fpga-plugin", ""),
    "stranger": ("stranger", ""),
}
"""Users and groups by token; the token is the key."""


class ControlPlane(ApiCalls):
    """One API server; ends with `end`.

    Attributes:
        disabled: plugins of its admission that are switched off.
    """

    disabled = "ServiceAccount"

    def __init__(self) -> None:
        super().__init__(URL, SCRATCH / "control-plane")
        self._folder.mkdir()
        self._key = self._folder / "service-accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", self._key, "2048"], check=True,
                       capture_output=True)  # fmt: skip
        (self._folder / "tokens.csv").write_text(
            "".join(f'{token},{user},{user},"{group}"\n' for token, (user, group) in TOKENS.items())
        )
        # Its data are lost with the test, so nothing waits for a disk.
        self._etcd = Process(
            "etcd",
            CONTROL_PLANE / "etcd",
            *("--data-dir", self._folder / "etcd", "--unsafe-no-fsync", "--log-level", "error"),
            *("--listen-client-urls", ETCD, "--advertise-client-urls", ETCD),
        )
        self.start()
        self._allow_plugin()

    def start(self) -> None:
        """The API server, until it is ready."""
        keys = ("service-account-key-file", "service-account-signing-key-file")
        self._server = Process(
            "kube-apiserver",
            CONTROL_PLANE / "kube-apiserver",
            *(f"--{name}={self._key}" for name in keys),
            f"--token-auth-file={self._folder}/tokens.csv",
            f"--cert-dir={self._folder}",
            f"--etcd-servers={ETCD}",
            "--bind-address=127.0.0.1",
            f"--advertise-address={ADDRESS}",
            "--secure-port=6443",
            "--kubelet-preferred-address-types=InternalIP",  # the node's name is in no DNS
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.98.0.0/24",
            "--authorization-mode=Node,RBAC",
            "--allow-privileged=true",  # the plugin's own pod is
            f"--disable-admission-plugins={self.disabled}",
        )
        until(self._ready, "the API server is ready")

    def _ready(self) -> bool:
        for process in (self._etcd, self._server):
            assert process.runs, process.tail()
        return self.answers()

    def stop(self) -> None:
        """The API server only; at once, for its own way to end waits for its clients."""
        self._server.end(signal.SIGKILL)

    def end(self) -> None:
        self.stop()
        self._etcd.end(signal.SIGKILL)
        shutil.rmtree(self._folder)

    def _allow_plugin(self) -> None:
        """The one right that the plugin needs."""
        rbac = "/apis/rbac.authorization.k8s.io/v1"
        name = {"name": "plugin-as-user"}  # the chart's own is called fpga-plugin
        self.call("POST", f"{rbac}/clusterroles", {
            "metadata": name,
            "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}],
        })  # fmt: skip
        self.call("POST", f"{rbac}/clusterrolebindings", {
            "metadata": name,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole"} | name,
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User"}
                         | {"name": "fpga-plugin"}],
        })  # fmt: skip

    def clear(self) -> None:
        """Forget all pods and the node."""
        for pod in self.call("GET", "/api/v1/pods")["items"]:
            metadata = pod["metadata"]
            self.delete_pod(metadata["name"], grace=0, namespace=metadata["namespace"])
        try:
            self.call("DELETE", "/api/v1/nodes/node")
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise

    def has_node(self) -> bool:
        """Whether kubelet has made its node."""
        return bool(self.call("GET", "/api/v1/nodes")["items"])

    def create_pod(self, manifest: Mapping[str, Any]) -> str:
        """Make a pod; its uid."""
        namespace = manifest["metadata"].get("namespace", "default")
        made = self.call("POST", f"/api/v1/namespaces/{namespace}/pods", manifest)
        return str(made["metadata"]["uid"])

    def delete_pod(
        self, name: str, grace: int | None = None, *, namespace: str = "default"
    ) -> None:
        """As kubectl does; with a grace of 0 it is a forced one."""
        options = {} if grace is None else {"gracePeriodSeconds": grace}
        self.call("DELETE", f"/api/v1/namespaces/{namespace}/pods/{name}", options)
