"""The API is changed while pods have devices by the other one: they keep them."""

import uuid
from pathlib import Path

import pytest
from daemon_support import AFU, AFU_2, P0, P1, Node, Refused, request
from dra_support import DraNode

pytestmark = pytest.mark.filterwarnings("ignore")


def without_kubelets_root(node: DraNode) -> None:
    """As the chart mounts it for the device plugin API: kubelet's record of claims is not seen."""
    bare = node.folder / "container-root"
    (bare / "device-plugins").mkdir(parents=True, exist_ok=True)
    # It stands for the plugin's own pod: kubelet's tree of cgroups is known.
    (bare / "pods" / "00000000-0000-4000-8000-000000000000").mkdir(parents=True, exist_ok=True)
    node.set(mode="device-plugin", kubelet_root=str(bare))
    node.kubelet.start()


def held_back(node: DraNode) -> None:
    """A claim's region is given to nobody and as its pods left it; the other one is served."""
    node.kubelet.until_health(P1, "Healthy")
    assert node.kubelet.listed()[P0] == "Unhealthy"
    with pytest.raises(Refused, match="FPGA_PLUGIN_MODE=dra"):
        node.kubelet.allocate(P0)
    assert node.afu(P0) == AFU
    node.kubelet.allocate(P1)
    node.kubelet.deallocate(P1)


@pytest.mark.parametrize("between", ["runs", "is between two containers"])
def test_what_a_claim_has_stays_its_own_where_its_record_is_not_seen(between: str):
    with DraNode("1x2") as node:
        node.up()
        claim = node.claim("c", P0, bitstream=AFU)
        one = claim.pods[0]
        node.cgroups.set(one, "main")
        node.dra.prepare(claim)
        node.plugin.stop()
        if between != "runs":
            node.cgroups.set(one)  # its cgroup is there and empty
        without_kubelets_root(node)
        node.start().until_logged("serving")
        held_back(node)
        # A further pod joins, of which nobody reports; the first one ends.
        two = str(uuid.uuid4())
        node.cgroups.set(two, "main")
        node.cgroups.remove(one)
        node.plugin.stop()
        node.start().until_logged("serving")
        held_back(node)


def test_a_journal_that_was_lost_where_dra_served_last_gives_nothing_out():
    with DraNode("1x2") as node:
        node.up()
        claim = node.claim("c", P0, bitstream=AFU)
        node.cgroups.set(claim.pods[0], "main")
        node.dra.prepare(claim)
        node.plugin.stop()
        lost = node.folder / "another-state"
        simulated = node.simulated
        node.set(state_dir=str(lost), simulated_dir=str(simulated))
        node.state_dir = Path(lost)
        without_kubelets_root(node)
        for _ in range(2):  # the second life's journal is whole, and knows no more
            life = Node.restarted(node)
            assert set(node.kubelet.listed().values()) <= {"Unhealthy"}
            with pytest.raises(Refused, match="DRA served this node"):
                node.kubelet.allocate(P0)
            assert node.afu(P0) == AFU
            life.stop()
        # Kubelet's record is seen again: the claim is adopted, and the rest is served.
        node.set(kubelet_root=str(node.folder))
        node.start().until_logged("claim adopted")
        held_back(node)


def test_a_life_of_dra_that_lost_its_journal_and_read_no_record_leaves_claims_unknown():
    with DraNode("1x2") as node:
        node.up()
        claim = node.claim("c", P0, bitstream=AFU)
        node.cgroups.set(claim.pods[0], "main")
        node.dra.prepare(claim)
        node.plugin.stop()
        node.set(state_dir=str(node.folder / "another-state"), simulated_dir=str(node.simulated))
        node.state_dir = node.folder / "another-state"
        (node.folder / "dra_manager_state").write_text("half")
        node.start().until_logged("kubelet's record of claims cannot be read")
        node.plugin.stop()
        without_kubelets_root(node)
        Node.restarted(node)
        assert set(node.kubelet.listed().values()) <= {"Unhealthy"}
        with pytest.raises(Refused, match="DRA served this node"):
            node.kubelet.allocate(P0)
        assert node.afu(P0) == AFU


def test_a_claim_ends_where_its_record_lacks_it_and_its_pods_are_gone():
    with DraNode("1x2") as node:
        node.up()
        claim = node.claim("c", P0, bitstream=AFU)
        one = claim.pods[0]
        node.cgroups.set(one, "main")
        node.dra.prepare(claim)
        node.plugin.stop()
        node.set(mode="device-plugin")
        node.kubelet.start()
        node.dra.record.pop(claim.uid)
        node.dra._write()
        life = node.start()
        life.until_logged("serving")
        held_back(node)  # its pod runs on
        node.plugin.stop()
        node.cgroups.remove(one)
        node.start().until_logged("claim ended without a call")
        node.kubelet.until_health(P0, "Healthy")
        assert not node.file_path(claim).exists()
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request(AFU_2))
        assert node.afu(P0) == AFU_2


def test_a_journal_that_was_lost_after_a_life_with_leftovers_of_dra_gives_nothing_out():
    """The marker remembers them until kubelet's record of claims was read, whichever API served."""
    with DraNode("1x2") as node:
        node.up()
        claim = node.claim("c", P0, bitstream=AFU)
        node.cgroups.set(claim.pods[0], "main")
        node.dra.prepare(claim)
        node.plugin.stop()
        node.set(simulated_dir=str(node.simulated))
        without_kubelets_root(node)
        node.start().until_logged("serving")
        held_back(node)
        node.plugin.stop()
        lost = node.folder / "another-state"
        node.set(state_dir=str(lost))
        node.state_dir = Path(lost)
        Node.restarted(node)
        assert set(node.kubelet.listed().values()) <= {"Unhealthy"}
        with pytest.raises(Refused, match="DRA served this node"):
            node.kubelet.allocate(P0)
        assert node.afu(P0) == AFU
