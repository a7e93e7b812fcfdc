"""What a node lacks shows in the status, and stops nothing; how it is asked: test_nodecheck.py."""

from daemon_support import AFU, P0, eventually
from dra_support import NODE, DraNode
from test_http import metrics
from test_status import told

NODES = "/api/v1/nodes"


def node(runtime: str, kubelet: str = "v1.36.3"):
    info = {"kubeletVersion": kubelet, "containerRuntimeVersion": runtime}
    return {"metadata": {"name": NODE}, "status": {"nodeInfo": info}}


def test_a_runtime_without_cdi_shows_in_status_and_stops_nothing() -> None:
    with DraNode() as here:
        here.api.objects[f"{NODES}/{NODE}"] = node("containerd://1.7.20")
        here.up()
        here.plugin.until_logged("kubelet or the container runtime may be too old")
        (note,) = told(here, "status")["notes"]
        assert "enable_cdi = true" in note
        here.dra.prepare(here.claim("c", P0, bitstream=AFU))
        assert here.afu(P0) == AFU
        # A runtime that was updated takes kubelet's next registration.
        here.api.objects[f"{NODES}/{NODE}"] = node("containerd://2.1.4")
        here.dra.restart()
        here.plugin.until_logged("versions of the node")
        eventually(lambda: told(here, "status")["notes"] == [])


def test_a_kubelet_that_looks_elsewhere_is_what_not_ready_says() -> None:
    with DraNode() as here:
        (here.folder / "plugins_registry").mkdir()
        here.start()  # and no kubelet
        (reason, *_) = eventually(lambda: told(here, "status")["not_ready"])
        assert "not registered with kubelet yet" in reason
        assert f"FPGA_PLUGIN_KUBELET_ROOT is {here.folder}" in reason


def test_a_directory_that_is_not_kubelets_root_is_refused_and_left_as_it_is() -> None:
    with DraNode() as here:
        assert here.start().exit_code() == 1
        assert f"'{here.folder}' is not kubelet's root directory" in here.plugin.text
        assert "FPGA_PLUGIN_KUBELET_ROOT" in here.plugin.text
        assert not (here.folder / "plugins").exists()


def test_foreign_slices_in_the_nodes_pool_show_in_status_metrics_and_an_event() -> None:
    with DraNode(http_address="127.0.0.1:0", events="true") as here:
        table = {
            "columnDefinitions": [{"name": name} for name in ("Name", "Node", "Driver", "Pool")],
            "rows": [{"cells": ["evil", "node-z", "fpga.intel.com", NODE]}],
        }
        question = "fieldSelector=spec.driver%3Dfpga.intel.com&includeObject=None&resourceVersion=0"
        here.api.objects[f"/apis/resource.k8s.io/v1/resourceslices?{question}"] = table
        plugin = here.up().plugin
        plugin.until_logged("foreign ResourceSlices in the node's pool")
        (note,) = told(here, "status")["notes"]
        assert "'evil' of node 'node-z'" in note
        assert metrics(plugin)["fpga_plugin_foreign_resource_slices"] == 1
        event = eventually(
            lambda: next((e for e in here.api.posted if e.get("reason") == "FpgaForeignSlices"), {})
        )
        assert "'evil' of node 'node-z'" in event["note"]
