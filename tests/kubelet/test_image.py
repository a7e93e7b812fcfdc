"""The image as the chart's pod: what it may, what it has given up, and that it serves the others.

`make test-image` runs these, and the life of pods (test_life.py) with the plugin as such a pod.
"""

import copy
import functools
import json
import socket
import stat
import subprocess
import tarfile
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pod_plugin
import pytest
import yaml
from control_plane import ControlPlane
from daemon_support import AFU, BLANK, CARD, CARDS, P0, P1, REGIONS, request
from machine import PLUGIN_IN_A_POD, until
from namespace import PORT_DEVICE, ROOT
from node import Node, Pod, container
from pod_plugin import ARCHIVE, plugin_of

pytestmark = pytest.mark.skipif(
    not PLUGIN_IN_A_POD, reason="needs the image and the chart's pod: make test-image"
)

api_server = pytest.mark.parametrize("make_node", ["api-server"], indirect=True)
pods_api = pytest.mark.parametrize("make_node", ["pods-api"], indirect=True)

NO_CAPABILITIES = "0" * 16


def status(node: Node) -> dict[str, str]:
    """/proc/<pid>/status of the plugin's process."""
    text = Path("/proc", str(plugin_of(node).pid()), "status").read_text()
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


# ---------------------------------------------------------------- the image


def image_files() -> dict[str, tarfile.TarInfo]:
    """What is in the image's layers."""
    found = {}
    with tarfile.open(ARCHIVE) as image:
        member = image.extractfile("manifest.json")
        assert member is not None
        (manifest,) = json.load(member)
        for layer in manifest["Layers"]:
            with tarfile.open(fileobj=image.extractfile(layer)) as files:
                found |= {entry.name.removeprefix("./"): entry for entry in files}
    return found


def test_the_image_has_one_program_and_nothing_to_make_more_of() -> None:
    files = image_files()
    programs = {
        name
        for name, entry in files.items()
        if entry.isfile() and entry.mode & stat.S_IXUSR and ".so" not in name
    }
    assert {name for name in programs if not name.startswith("usr/lib/python")} <= {
        "usr/bin/python3.11",
        "usr/local/bin/fpga-plugin",
        "usr/sbin/ldconfig",
    }
    names = {Path(name).name for name in files}
    assert not {"sh", "bash", "dash", "busybox", "apt", "dpkg", "pip", "gcc", "cc"} & names
    assert not [name for name, entry in files.items() if entry.mode & (stat.S_ISUID | stat.S_ISGID)
                and entry.isfile()]  # fmt: skip


def test_the_image_says_what_debian_packages_it_has_and_their_licences() -> None:
    files = image_files()
    packages = {
        Path(name).name for name in files if "dpkg/status.d/" in name and files[name].isfile()
    }
    assert {"libc6", "libudev1", "libssl3", "python3.11-minimal"} <= packages
    for package in packages:
        assert f"usr/share/doc/{package}/copyright" in files


# ---------------------------------------------------------------- what it may


PROBE = """
import json, os, socket
said = {}
def attempt(name, what):
    try:
        what()
        said[name] = "ok"
    except OSError as error:
        said[name] = os.strerror(error.errno)
attempt("device", lambda: os.open("/host/dev/dfl-port.0", os.O_RDWR | os.O_EXCL))
attempt("sysfs", lambda: os.open("/host/sys/kernel/mm/ksm/run", os.O_WRONLY))
attempt("root", lambda: os.open("/file", os.O_WRONLY | os.O_CREAT))
attempt("dev", lambda: os.open("/host/dev/file", os.O_WRONLY | os.O_CREAT))
attempt("store", lambda: os.open("/srv/intel.com/fpga/file", os.O_WRONLY | os.O_CREAT))
attempt("cgroup", lambda: os.mkdir("/host/cgroup/mine"))
attempt("state", lambda: os.close(os.open("/var/lib/fpga-plugin/probe", os.O_WRONLY | os.O_CREAT)))
attempt("kubelet", lambda: os.close(os.open("/var/lib/kubelet/device-plugins/probe", os.O_WRONLY | os.O_CREAT)))
said["shell"] = os.path.exists("/bin/sh")
print(json.dumps(said), flush=True)
import signal
signal.sigwait([signal.SIGTERM])
"""  # noqa: E501  # a program in a line each


def probed(node: Node, name: str, security: dict[str, Any]) -> dict[str, Any]:
    """What the chart's own pod may do with another security context."""
    manifest = copy.deepcopy(pod_plugin.template(node))
    manifest["metadata"]["name"] = name
    (only,) = manifest["spec"]["containers"]
    only["command"] = ["/usr/bin/python3", "-I", "-c", PROBE]
    only["args"] = []
    only["securityContext"] = only["securityContext"] | security
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        only.pop(probe, None)
    only.pop("ports")
    pod = Pod(node, manifest)
    pod.until_running("fpga-plugin")
    until(lambda: pod.output("fpga-plugin"), "what it says")
    said: dict[str, Any] = json.loads(pod.output("fpga-plugin"))
    pod.delete()
    return said


@pods_api
def test_nothing_less_than_privileged_opens_a_device_node(make_node: Callable[..., Node]) -> None:
    node = make_node("1x1")
    assert PORT_DEVICE, "a device that no container may open unless it was given to it"
    without = {"privileged": False, "capabilities": {"add": ["ALL"]}}
    assert probed(node, "all-capabilities", without)["device"] == "Operation not permitted"
    said = probed(node, "as-deployed", {})
    assert said["device"] == "ok"
    assert said["sysfs"] == "ok"


@pods_api
def test_the_pod_writes_to_its_state_kubelets_directory_and_sysfs_only(
    make_node: Callable[..., Node],
) -> None:
    said = probed(make_node("1x1"), "as-deployed", {})
    assert said.pop("shell") is False
    written = {place for place in ("root", "dev", "store", "cgroup", "state", "kubelet", "sysfs")
               if said[place] == "ok"}  # fmt: skip
    assert written == {"state", "kubelet", "sysfs"}


def test_the_pod_at_work_has_no_capability_can_get_none_and_is_confined(
    make_node: Callable[..., Node],
) -> None:
    node = make_node("1x1")
    node.pod("asks", container(env=request())).until_running()
    assert node.afu(P0) == AFU
    found = status(node)
    assert {found[f"Cap{name}"] for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {
        NO_CAPABILITIES
    }
    assert found["NoNewPrivs"] == "1"
    assert found["Seccomp"] == "2"  # SECCOMP_MODE_FILTER; runtimes leave a privileged pod without
    measures = json.loads(run_in(node, "fpga-plugin", "status", "--json"))["sandbox"]
    assert {one["name"] for one in measures if one["holds"]} == {
        "capabilities",
        "landlock",
        "seccomp",
    }


# ---------------------------------------------------------------- at work


@pods_api
def test_the_pod_hears_uevents_without_the_nodes_network(make_node: Callable[..., Node]) -> None:
    # Real cards, of which there are none here: libudev, found by ldconfig, and a netlink socket.
    node = make_node("1x1")
    plugin_of(node).delete()
    manifest = pod_plugin.template(node)
    (only,) = manifest["spec"]["containers"]
    for entry in only["env"]:
        if entry["name"] == "FPGA_PLUGIN_BACKEND":
            entry["value"] = "dfl"
    pod = Pod(node, manifest)
    until(lambda: '"event":"serving"' in pod.output("fpga-plugin").replace(" ", ""), "it serves")


def run_in(node: Node, *command: str) -> str:
    """What `kubectl exec` of a command in the plugin's container says."""
    container_id = plugin_of(node).pod.container("fpga-plugin")["containerID"]
    plain = container_id.removeprefix("containerd://")
    return node.runtime.ctr("tasks", "exec", "--exec-id", uuid.uuid4().hex, plain, *command)


def ready(node: Node) -> bool:
    """Whether kubelet's probes find the plugin ready."""
    return bool(plugin_of(node).pod.container("fpga-plugin").get("ready"))


def scraped() -> str:
    with urllib.request.urlopen("http://127.0.0.1:9102/metrics", timeout=10) as answer:
        return answer.read().decode()


def test_the_pods_probes_find_it_ready_and_status_tells_who_has_what(
    make_node: Callable[..., Node],
) -> None:
    node = make_node("1x2")
    until(lambda: ready(node), "ready by the chart's probes")
    tenant = node.pod("asks", container(env=request()))
    tenant.until_running()
    told = json.loads(run_in(node, "fpga-plugin", "status", "--json"))
    (card,) = told["cards"]
    (region,) = [each for each in card["regions"] if each["owner"]]
    assert tenant.uid in json.dumps(region["owner"])
    assert AFU in json.dumps(region)
    assert "out of service" in run_in(node, "fpga-plugin", "card", "drain", CARD)
    node.until_offered(REGIONS, [P0])  # who has it keeps it
    run_in(node, "fpga-plugin", "card", "undrain", CARD)
    node.until_offered(REGIONS, [P0, P1])
    text = scraped()
    assert "fpga_plugin_ready 1.0" in text
    assert tenant.uid not in text
    assert tenant.name not in text
    assert plugin_of(node).pod.container("fpga-plugin")["restartCount"] == 0


def test_connections_that_fill_its_port_do_not_hold_up_the_pods_probes(
    make_node: Callable[..., Node],
) -> None:
    node = make_node("1x2")
    until(lambda: ready(node), "ready by the chart's probes")
    held = [socket.create_connection(("127.0.0.1", 9102), timeout=10) for _ in range(300)]
    try:
        for word in ("healthz", "readyz"):
            assert run_in(node, "/usr/local/bin/fpga-plugin-probe", word) == "ok\n"
        assert "fpga_plugin_ready 1.0" in scraped()
    finally:
        for one in held:
            one.close()


def test_an_upgrade_leaves_a_running_pod_alone(make_node: Callable[..., Node]) -> None:
    node = make_node("1x2")
    tenant = node.pod("asks", container(env=request()))
    first = tenant.until_running()
    plugin_of(node).delete()
    node.until_offered(REGIONS, [])
    assert node.afu(P0) == AFU
    node.start_plugin()
    node.until_offered(REGIONS, [P0, P1])
    assert tenant.until_running() == first
    assert tenant.container()["restartCount"] == 0
    assert node.afu(P0) == AFU
    node.pod("next", container(env=request())).until_running()
    tenant.delete()
    until(lambda: node.afu(P0) == BLANK, "scrubbed by the plugin that did not program it")


@api_server
def test_helm_says_what_to_do_next(make_node: Callable[..., Node]) -> None:
    node = make_node("1x1")
    control_plane = node.kubelet.control_plane
    assert control_plane is not None
    assert "fpga-plugin card list" in pod_plugin.install(control_plane, node.settings)
    looks = node.settings | {"FPGA_PLUGIN_OBSERVE": "true"}
    assert "--set observe=false" in pod_plugin.install(control_plane, looks)


PATHS = {
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "DaemonSet": "/apis/apps/v1/namespaces/default/daemonsets",
    "Deployment": "/apis/apps/v1/namespaces/default/deployments",
    "Namespace": "/api/v1/namespaces",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies",
    "NodeFeatureRule": "/apis/nfd.k8s-sigs.io/v1alpha1/nodefeaturerules",
    "Pod": "/api/v1/namespaces/default/pods",
    "PodMonitor": "/apis/monitoring.coreos.com/v1/namespaces/default/podmonitors",
    "ServiceAccount": "/api/v1/namespaces/default/serviceaccounts",
}
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


@pytest.fixture(scope="module")
def custom_kinds(control_plane: ControlPlane) -> None:
    """The API server knows PodMonitor and NodeFeatureRule, by their projects' own definitions."""
    for path in sorted((pod_plugin.HELM.parent / "crds").glob("*.yaml")):
        for definition in yaml.safe_load_all(path.read_text()):
            control_plane.call("POST", CRDS, definition)
    for kind in ("NodeFeatureRule", "PodMonitor"):
        until(functools.partial(is_served, control_plane, kind), f"{kind} is served")


def is_served(control_plane: ControlPlane, kind: str) -> bool:
    try:
        control_plane.call("GET", PATHS[kind])
    except urllib.error.HTTPError as error:
        if error.code not in {404, 429}:  # not known yet, its storage is being made
            raise
        return False
    return True


@api_server
@pytest.mark.usefixtures("make_node", "custom_kinds")
def test_the_api_server_takes_every_object_and_each_of_its_fields(
    control_plane: ControlPlane,
) -> None:
    manifests = [path.read_text() for path in (ROOT / "deploy/examples").glob("*.yaml")]
    manifests += [
        subprocess.run(
            [pod_plugin.HELM.parent / "kustomize", "build", ROOT / "deploy/kustomize" / overlay],
            check=True, capture_output=True, text=True,
        ).stdout
        for overlay in ("base", "overlays/all", "overlays/observe")
    ]  # fmt: skip
    taken = set()
    for each in (o for text in manifests for o in yaml.safe_load_all(text)):
        # Under another name and in a namespace that is there: nothing is kept of a dry run.
        each["metadata"]["name"] += "-checked"
        each["metadata"].pop("namespace", None)
        query = "?dryRun=All&fieldValidation=Strict"
        control_plane.call("POST", PATHS[each["kind"]] + query, each)
        taken.add(each["kind"])
    assert taken == PATHS.keys()


@api_server
@pytest.mark.usefixtures("make_node", "custom_kinds")
@pytest.mark.parametrize(
    ("version", "kind", "right", "wrong"),
    [
        ("v1", "ServiceAccount", {}, {"automountServiceAccountTokens": False}),
        (
            "monitoring.coreos.com/v1",
            "PodMonitor",
            {"spec": {"selector": {}, "podMetricsEndpoints": []}},
            {"spec": {"selector": {}, "podMetricsEndpoints": [{"path": "/", "ports": "x"}]}},
        ),
        (
            "nfd.k8s-sigs.io/v1alpha1",
            "NodeFeatureRule",
            {"spec": {"rules": [{"name": "x"}]}},
            {"spec": {"rules": [{"name": "x", "matchFeature": []}]}},
        ),
    ],
)
def test_the_api_server_refuses_an_unknown_field(
    control_plane: ControlPlane,
    version: str,
    kind: str,
    right: dict[str, Any],
    wrong: dict[str, Any],
) -> None:
    query = "?dryRun=All&fieldValidation=Strict"
    named = {"apiVersion": version, "kind": kind, "metadata": {"name": "x"}}
    control_plane.call("POST", PATHS[kind] + query, named | right)
    with pytest.raises(urllib.error.HTTPError, match="400"):
        control_plane.call("POST", PATHS[kind] + query, named | wrong)


def test_observing_takes_no_privileges_and_touches_nothing(make_node: Callable[..., Node]) -> None:
    node = make_node("1x2")
    before = node.regions()
    plugin_of(node).delete()
    node.until_offered(CARDS, [])
    node.settings["FPGA_PLUGIN_OBSERVE"] = "true"
    observer = node.start_plugin()
    line = observer.until_logged("would serve card", card=CARD)
    assert line["regions"] == [P0, P1]
    found = status(node)
    assert {found[f"Cap{name}"] for name in ("Prm", "Eff", "Bnd")} == {NO_CAPABILITIES}
    assert node.regions() == before
    assert not observer.logged("registered")
