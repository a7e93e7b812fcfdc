"""What a ResourceClaim was made with and prepared for is kept with it, whatever is set later."""

import time
import uuid
from typing import Any

import grpc
import pytest
from daemon_support import AFU, AFU_2, BLANK, P0, eventually
from dra_support import DraKubelet, DraNode, config
from nursery import constants
from test_policy_life import ALLOW_ALL, DENY_ALL, ConfigMap

NEW = "fpga.example.com"


@pytest.fixture
def any_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kubelet that takes the driver under any name."""

    def found(self: DraKubelet, _path: str, info: Any) -> None:
        self._channel = grpc.insecure_channel(f"unix:{info.endpoint}")
        with self.signal.changed:
            self.registered.append(info)
            self.signal.changed.notify_all()

    monkeypatch.setattr(DraKubelet, "_found", found)


@pytest.mark.usefixtures("any_driver")
@pytest.mark.parametrize("changed", ["resource_prefix", "cdi_dir"])
def test_a_claim_of_other_settings_is_kept_while_its_pods_run_and_its_file_ends_with_it(
    changed: str,
) -> None:
    with DraNode("1x2", reconcile_interval="1") as node:
        node.up()
        claim = node.claim("c", P0, bitstream=AFU)
        one, two = claim.pods[0], str(uuid.uuid4())
        node.cgroups.set(one, "main")
        node.dra.prepare(claim)
        file = node.file_path(claim)
        assert file.exists()
        node.plugin.stop()
        node.dra.registered.clear()
        node.set(**{changed: NEW if changed == "resource_prefix" else str(node.folder / "cdi-2")})
        node.start()
        node.ready()
        # A second pod joins without a call; the first one ends.
        claim.pods.append(two)
        node.put(claim)
        node.cgroups.set(two, "main")
        node.dra.record[claim.uid]["PodUIDs"] = {one: {}, two: {}}
        node.dra._write()
        mark = node.plugin.mark
        node.dra.record[claim.uid]["PodUIDs"] = {two: {}}
        node.dra._write()
        claim.pods.remove(one)
        node.put(claim)
        node.cgroups.remove(one)
        time.sleep(2)  # what would be wrong would be done by now
        assert not node.plugin.logged("claim ended without a call", since=mark)
        assert node.afu(P0) == AFU
        # Its end: kubelet's record lacks it, the API server too, and its last pod is gone.
        node.dra.record.pop(claim.uid)
        claim.pods.clear()
        node.put(claim)
        node.cgroups.remove(two)
        node.dra._write()
        node.plugin.until_logged("claim ended without a call", since=mark)
        eventually(lambda: node.afu(P0) == BLANK)
        assert not file.exists()
        # A former driver's directory is not this one's: what names the claim's devices stays.
        left = {one.parent.name for one in node.folder.rglob(f"*{claim.uid}*")}
        assert left == ({"metadata"} if changed == "resource_prefix" else set())


def test_kubelet_ends_a_claim_whose_file_is_where_another_setting_had_it() -> None:
    with DraNode("1x2") as node:
        node.up()
        claim = node.claim("c", P0, bitstream=AFU)
        node.dra.prepare(claim)
        file = node.file_path(claim)
        node.plugin.stop()
        node.dra.registered.clear()
        node.set(cdi_dir=str(node.folder / "cdi-2"))
        node.start()
        node.ready()
        assert file.exists(), "its containers may start again"
        assert node.dra.unprepare(claim) == ""
        assert node.afu(P0) == BLANK
        assert not file.exists(), "else a container would start with what is another's by then"
        # The next claim has its file where the setting says.
        other = node.claim("d", P0, bitstream=AFU_2)
        node.dra.prepare(other)
        assert [one.parent.name for one in node.folder.rglob("*-claim_*.json")] == ["cdi-2"]


@pytest.mark.usefixtures("any_driver")
def test_a_claim_of_another_name_that_kubelet_lost_is_asked_about_under_its_own() -> None:
    """Between two containers of a pod its cgroup is empty: alone, that is not gone."""
    with DraNode("1x2", reconcile_interval="1") as node:
        node.up()
        claim = node.claim("c", P0, bitstream=AFU)
        node.cgroups.set(claim.pods[0])
        node.dra.prepare(claim)
        node.plugin.stop()
        node.dra.registered.clear()
        node.set(resource_prefix=NEW)
        node.dra.wipe()
        node.start()
        node.ready()
        asked = node.api.gets()
        node.plugin.until_logged("kubelet's record lacks a claim")
        eventually(lambda: node.api.gets() > asked)
        time.sleep(1)  # what would be wrong would be done by now
        assert not node.plugin.logged("claim ended without a call")
        assert node.afu(P0) == AFU
        assert node.file_path(claim).exists()


@pytest.mark.parametrize("restarted", [False, True])
def test_what_a_claim_asks_for_by_now_is_compared_with_what_was_prepared(
    restarted: bool,  # noqa: FBT001  # a parameter of the test
) -> None:
    with DraNode("1x2") as node:
        node.settings |= constants({"dra.lifecycle.ANSWER_SECONDS": 6})
        node.up()
        claim = node.claim("c", P0, bitstream=AFU)
        node.dra.prepare(claim)
        if restarted:
            node.again()
        # Kubelet lost its record, the pod is gone, and the claim was allocated for something else.
        node.dra.wipe()
        claim.config = [config(bitstream=AFU_2)]
        claim.pods = [str(uuid.uuid4())]
        node.put(claim)
        node.dra.keep(claim)
        answer = node.dra.call("Prepare", claim)["c"]
        assert answer.error or node.afu(P0) == AFU_2, "OK means: as it asks"
        # The next pod gets what the claim asks for, once nobody else has it.
        claim.pods = [str(uuid.uuid4())]
        node.put(claim)
        node.dra.keep(claim)
        eventually(lambda: not node.dra.call("Prepare", claim)["c"].error)
        assert node.afu(P0) == AFU_2


def test_the_policy_is_asked_for_the_next_pod_of_a_prepared_claim() -> None:
    with DraNode("1x2") as node:
        policy = ConfigMap(node.folder / "policy", ALLOW_ALL)
        node.set(policy_file=str(policy.path))
        node.up()
        claim = node.claim("c", P0, bitstream=AFU)
        node.dra.prepare(claim)
        mark = node.plugin.mark
        policy.set(DENY_ALL)
        node.plugin.until_logged("policy in force", since=mark)
        assert "may not have" in node.dra.call("Prepare", claim)["c"].error
        assert node.afu(P0) == AFU, "who runs with it keeps it"
