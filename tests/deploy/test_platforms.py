"""What docs/platforms.md says to set is what the chart takes, and does: `make test-deploy`.

Where the page's facts were read, in copies of August 2026, Bottlerocket's of October 2024:

- k3s: pkg/agent/config/config.go, pkg/daemons/agent/agent_linux.go
- RKE2: its documentation, Default Pod Security Standards
- k0s: docs/configuration.md (Kubelet root directory), pkg/component/worker/kubelet.go
- MicroK8s: microk8s-resources/default-args/kubelet, snap/hooks/install
- Talos: Sidero Labs' pkgs, kernel/build/config-amd64 (CONFIG_FPGA is not set); its documentation,
  Pod Security and Architecture
- Flatcar: scripts, coreos-modules/files/commonconfig-6.18, amd64_defconfig-6.18 (no CONFIG_FPGA)
- Bottlerocket: core-kit (packages/filesystem, packages/release/*.mount), Restricted Filesystem; the
  SELinux type: awslabs/mountpoint-s3-csi-driver#155
- quota of the plugin's priority: NVIDIA/aicr#921, which does it for the GPU operator on GKE
- Kueue: its documentation, Dynamic Resource Allocation
- Argo CD: its documentation, Helm and Resource Tracking
- cluster autoscaler: its documentation for AWS, and its FAQ, startup taints
"""

import re

import pytest
import yaml
from test_charts import CHART, ROOT, TOOLS, mounts, pod_spec, rendered

pytestmark = pytest.mark.skipif(
    not (TOOLS / "helm").exists(), reason="helm is not built: make test-deploy"
)

PAGE = (ROOT / "docs/platforms.md").read_text()
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


def named() -> list[str]:
    """Each `value=text` of the page, as `helm --set` takes it."""
    found = re.findall(r"`([a-zA-Z]+(?:\.[a-zA-Z]+)*=[^`\s]*)`", PAGE)
    return sorted({one for one in found if one.partition("=")[0].split(".")[0] in VALUES})


def test_every_value_of_the_page_is_one_of_the_charts() -> None:
    assert len(named()) >= 6
    for value in named():
        if value != "openshift.create=true":
            rendered(value)
        rendered(value, "mode=dra")


@pytest.mark.parametrize("root", re.findall(r"`paths\.kubelet=([^`]*)`", PAGE))
def test_kubelets_root_may_be_anywhere_and_device_plugins_is_where_it_always_is(root: str) -> None:
    paths = {
        host["hostPath"]["path"] for host, _ in mounts(rendered(f"paths.kubelet={root}")).values()
    }
    assert {f"{root}/pod-resources", f"{root}/pods-api"} <= paths
    assert "/var/lib/kubelet/device-plugins" in paths
    hidden = rendered(f"paths.kubelet={root}", "paths.hidden={pods}", "mode=dra")
    inside = [path for path in mounts(hidden) if path.startswith(root)]
    assert f"{root}/pods" in inside
    assert f"{root}/pki" not in inside


def test_a_store_elsewhere_is_the_same_in_the_pod() -> None:
    (path,) = set(re.findall(r"`paths\.bitstreams=([^`]*)`", PAGE))
    host, writable = mounts(rendered(f"paths.bitstreams={path}"))["/srv/intel.com/fpga"]
    assert host["hostPath"]["path"] == path
    assert not writable


def test_the_plugin_tolerates_the_autoscalers_taint_and_has_the_priority_of_the_quota() -> None:
    spec = pod_spec(rendered())
    assert {"operator": "Exists"} in spec["tolerations"]
    assert f"values: [{spec['priorityClassName']}]" in PAGE
