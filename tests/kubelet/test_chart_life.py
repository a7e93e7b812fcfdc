"""The chart with pods that run: an upgrade, a rollback, and docs/kind.md word by word.

`make test-image` runs these, with kubelet and containerd in place of kind.
"""

import json
import os
import stat
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pod_plugin
import pytest
from control_plane import ControlPlane
from daemon_support import CARDS, REGIONS
from machine import PLUGIN_IN_A_POD, Runtime, until
from namespace import PORT_DEVICE, PORTS, ROOT
from typed_cluster import KUBECTL, TENANT, Cluster, blocks, inline, offers_nothing, uninstalled

pytestmark = pytest.mark.skipif(
    not PLUGIN_IN_A_POD or not KUBECTL.exists(),
    reason="needs the image, kubectl and controllers: make test-image",
)

IN_THE_PLUGIN = "kubectl --namespace fpga-plugin exec daemonset/fpga-plugin -- "
PODS = "/api/v1/namespaces/{}/pods"

DOCKER = """\
#!/bin/sh
# docker exec NODE COMMAND: the node is here. The store is there, and nothing is written beside it.
[ "$1 $3" = "exec sh" ] || exit 0
shift 2
exec "$@"
"""


@pytest.fixture(scope="module", params=["api-server"])
def cluster(runtime: Runtime, control_plane: ControlPlane) -> Iterator[Cluster]:
    made = Cluster(runtime, control_plane)
    yield made
    made.close()


@pytest.fixture
def no_ports() -> Iterator[None]:
    """A node without device nodes of cards, as kind makes one."""
    ports = [Path(f"/dev/dfl-port.{port}") for port in range(PORTS)]
    for port in ports:
        port.unlink()
    yield
    for port in ports:
        port.unlink(missing_ok=True)
        os.mknod(port, stat.S_IFCHR | 0o600, PORT_DEVICE)


def pods(cluster: Cluster, namespace: str) -> dict[str, dict[str, Any]]:
    listed = cluster.control_plane.call("GET", PODS.format(namespace))["items"]
    return {pod["metadata"]["name"]: pod for pod in listed}


def life(pod: dict[str, Any]) -> tuple[str, str, int]:
    """What changes if a pod, or its container, is not the one that it was."""
    (container,) = pod["status"]["containerStatuses"]
    return pod["metadata"]["uid"], container["containerID"], container["restartCount"]


def image(cluster: Cluster) -> str:
    """Of the plugin that runs."""
    ((container,),) = (pod["spec"]["containers"] for pod in pods(cluster, "fpga-plugin").values())
    return str(container["image"])


def used(cluster: Cluster, namespace: str) -> dict[str, str]:
    """What the quotas of a namespace have counted."""
    path = f"/api/v1/namespaces/{namespace}/resourcequotas"
    quotas = cluster.control_plane.call("GET", path)["items"]
    return {
        name: count for quota in quotas for name, count in quota["status"].get("used", {}).items()
    }


def regions(cluster: Cluster) -> dict[str, tuple[str, str]]:
    """Ownership and condition of each region, as the plugin that runs says."""
    told = json.loads(cluster.types(f"{IN_THE_PLUGIN}fpga-plugin status --json"))
    return {
        region["region"]: (region["ownership"], region["condition"])
        for card in told["cards"]
        for region in card["regions"]
    }


def touched(cluster: Cluster) -> list[str]:
    """The regions that the plugin which runs has scrubbed or programmed since its start."""
    told = cluster.types("kubectl --namespace fpga-plugin logs daemonset/fpga-plugin")
    lines = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    assert lines
    return [
        line["region"] for line in lines if line["event"] in {"region scrubbed", "region prepared"}
    ]


def test_pods_keep_their_devices_while_the_chart_is_upgraded_and_rolled_back(
    cluster: Cluster, runtime: Runtime
) -> None:
    namespace, *_, attempt = blocks("install.md", "Install in ten minutes")
    (label,) = inline("install.md", "Install in ten minutes", "kubectl label node")
    (back,) = inline("upgrade.md", "Go back", "helm rollback")
    start, runs, _, end = attempt.splitlines()
    runs = runs.replace("Succeeded", "Running")  # the program of this pod goes on
    runtime.ctr("images", "tag", "--force", pod_plugin.IMAGE, f"{pod_plugin.REPOSITORY}:next")
    rollout = (
        "kubectl --namespace fpga-plugin rollout status daemonset"
        " --selector app.kubernetes.io/part-of=fpga-plugin"
    )
    chart = "fpga-plugin deploy/helm/fpga-plugin --namespace fpga-plugin"
    _, own = blocks("platforms.md", "Quotas")
    cluster.types(f"{namespace}\n{label} --overwrite\n{own}")
    cluster.types(f"helm install {chart} --set image.repository=REGISTRY/fpga-plugin\n{rollout}")
    until(lambda: cluster.allocatable().get(REGIONS) == "2", "its regions are allocatable")
    until(lambda: used(cluster, "fpga-plugin") == {"pods": "1"}, "the quota counts the plugin")
    cluster.types(f"{start}\n{runs}")
    tenant = life(pods(cluster, "default")["region"])
    before = regions(cluster)
    assert sorted(before.values()) == [("FREE", "BLANK"), ("STARTED", "PROGRAMMED")]

    cluster.types(f"helm upgrade {chart} --reset-then-reuse-values --set image.tag=next\n{rollout}")
    assert image(cluster).endswith(":next")
    assert life(pods(cluster, "default")["region"]) == tenant
    assert regions(cluster) == before
    assert touched(cluster) == []

    cluster.types(f"{back}\n{rollout}")
    assert image(cluster) == pod_plugin.IMAGE
    assert life(pods(cluster, "default")["region"]) == tenant
    assert regions(cluster) == before
    assert touched(cluster) == []

    # The plugin that went back still has the pod's region as the pod's, and scrubs it at its end.
    cluster.types(end)
    until(lambda: set(regions(cluster).values()) == {("FREE", "BLANK")}, "the region is scrubbed")
    uninstalled(cluster)


def test_a_namespace_gets_no_more_regions_than_its_quota(cluster: Cluster) -> None:
    tenants, _ = blocks("platforms.md", "Quotas")
    cluster.types(tenants)
    by_limits = f"requests.{REGIONS}"
    until(lambda: used(cluster, "default").get(by_limits) == "0", "the quota counts")
    pod = {
        "metadata": {"name": "greedy"},
        "spec": {
            "containers": [
                {"name": "app", "image": TENANT, "resources": {"limits": {REGIONS: "2"}}}
            ],
        },
    }
    with pytest.raises(urllib.error.HTTPError) as caught:
        cluster.control_plane.create_pod(pod)
    assert caught.value.code == 403
    caught.value.close()
    cluster.types("kubectl delete resourcequota fpga")


def test_the_recipe_for_kind(cluster: Cluster, runtime: Runtime, no_ports: None) -> None:
    until(lambda: offers_nothing(cluster), "nothing is offered")
    cluster.has_program("docker", DOCKER)
    cluster.has_program("kind", "#!/bin/sh\n")
    text = (ROOT / "deploy/examples/kind.yaml").read_text()
    named = next(line.split()[1] for line in text.splitlines() if "image: " in line)
    runtime.ctr("images", "tag", "--force", pod_plugin.IMAGE, named)
    build, node, install, run, end, remove = (
        block.replace("fpga-control-plane", "node") for block in blocks("kind.md")
    )
    cluster.types(build)
    cluster.types(node.replace("label node", "label --overwrite node"))
    told = cluster.types(install)
    assert "fpga-plugin" in told
    until(lambda: cluster.allocatable() == {REGIONS: "6", CARDS: "2"}, "as the page says")
    assert "default/kind" in cluster.types(run)
    says = "opened /dev/dfl-port.0 programmed with 18b79ffa2ee54aa096ef4230dafacb5f"
    until(lambda: says in cluster.types("kubectl logs kind"), "its program runs")
    told = cluster.types(end)
    assert "default/kind" in told
    until(lambda: set(regions(cluster).values()) == {("FREE", "BLANK")}, "the region is scrubbed")
    cluster.types(remove)
    uninstalled(cluster)
