"""CDI devices that the operator adds to containers, by the daemon as a process."""

from daemon_support import CARD, CARDS, P0, P1, REGIONS, Node, eventually
from dra_support import NODE, DraNode
from test_status import told

OPENCL, LICENCE, OF_CARD = "vendor.com/opencl=board", "vendor.com/licence=one", "vendor.com/x=card"
ADDED = ",".join(
    (
        f"{REGIONS.partition('/')[2]}={OPENCL}",
        f"{REGIONS}={LICENCE}",
        f"{CARDS}={OF_CARD}",
    )
)


def test_allocate_names_the_devices_of_its_resource_and_no_others():
    with Node("2x2", cdi_devices=ADDED).up() as node:
        answer = node.kubelet.allocate(P0)
        assert [one.name for one in answer.cdi_devices] == [OPENCL, LICENCE]
        assert [one.host_path for one in answer.devices] == ["/dev/dfl-port.0"]
        of_card = node.kubelet.allocate("0000-11-00.0", resource=CARDS)
        assert [one.name for one in of_card.cdi_devices] == [OF_CARD]


def test_prepare_names_them_beside_each_device_of_a_claim():
    with DraNode("2x2", cdi_devices=ADDED).up() as node:
        claim, card = node.claim("c", P0, P1), node.claim("card", "0000-11-00.0")
        for one, added in ((claim, [OPENCL, LICENCE]), (card, [OF_CARD])):
            for device in node.dra.prepare(one):
                own, *others = device.cdi_device_ids
                assert one.uid in own
                assert others == added
        edits = node.file(claim)["devices"][0]["containerEdits"]
        assert "vendor.com" not in str(edits)


def test_a_runtime_that_ignores_them_shows_in_log_status_and_stops_nothing():
    with DraNode("1x2") as node:
        info = {"kubeletVersion": "v1.32.0", "containerRuntimeVersion": "containerd://1.6.20"}
        node.api.objects[f"/api/v1/nodes/{NODE}"] = {
            "metadata": {"name": NODE},
            "status": {"nodeInfo": info},
        }
        node.set(mode="device-plugin", cdi_devices=ADDED)
        Node.up(node)
        said = node.plugin.until_logged("kubelet or the container runtime may be too old")
        assert "containerd://1.6.20" in said["reason"]
        assert "what FPGA_PLUGIN_CDI_DEVICES adds" in said["reason"]
        assert eventually(lambda: told(node, "status")["notes"]) == [said["reason"]]
        assert node.kubelet.allocate(CARD, resource=CARDS).cdi_devices


def test_a_runtime_that_nobody_can_ask_about_is_said_to_be_unknown():
    with Node("1x2", cdi_devices=ADDED).up() as node:
        (note,) = eventually(lambda: told(node, "status")["notes"])
        assert "it is not known whether the container runtime adds" in note
        assert "NODE_NAME is not set" in note


def test_what_belongs_to_a_claim_is_given_to_nobody_else():
    with Node("1x2", cdi_devices="*=k8s.fpga.intel.com/claim=x") as node:
        assert node.start().exit_code() == 2
        assert "k8s.<driver>/claim belong to one ResourceClaim" in node.plugin.text
