"""The second api: claims that kubelet prepares and unprepares, in every order that it knows."""

import contextlib
import json
import shutil
import sqlite3
import uuid
from pathlib import Path

import grpc
import pytest
from daemon_support import (
    AFU,
    AFU_2,
    BLANK,
    CARD,
    ID,
    LIMIT,
    P0,
    P1,
    Node,
    Refused,
    eventually,
    message,
    sign_manifest,
)
from dra_support import (
    DRIVER,
    NAMESPACE,
    NODE,
    OWN_POD,
    Claim,
    DraNode,
    Json,
    config,
    container,
    dra_name,
)
from nursery import constants


def test_a_claims_life_from_registration_to_a_clean_region():
    with DraNode().up() as node:
        (info,) = node.dra.registered
        assert list(info.supported_versions) == [
            "v1.DRAPlugin",
            "v1.DRAResourceHealth",
            "v1alpha1.DRAResourceHealth",
        ]
        claim = node.claim("c", P0, bitstream=AFU, driverParams={"clock": 250})
        (device,) = node.dra.prepare(claim)
        assert (device.pool_name, device.device_name) == (NODE, dra_name(P0))
        assert list(device.request_names) == ["fpga"]
        assert list(device.cdi_device_ids) == [f"k8s.{DRIVER}/claim={claim.uid}-{dra_name(P0)}"]
        assert not device.HasField("share_id")
        assert node.afu(P0) == AFU
        assert node.state()[P0]["clock"] == 250
        file = node.file(claim)
        assert (file["cdiVersion"], file["kind"]) == ("0.5.0", f"k8s.{DRIVER}/claim")
        (of_device,) = file["devices"]
        assert of_device["name"] == f"{claim.uid}-{dra_name(P0)}"
        (path,) = [one["path"] for one in of_device["containerEdits"]["deviceNodes"]]
        assert node.env(claim)["FPGA_DEVICE_0000_10_00_0_P0"] == path
        assert node.env(claim)["FPGA_REQUEST_FPGA"] == path
        assert node.dra.unprepare(claim) == ""
        assert (node.afu(P0), node.afu(P1)) == (BLANK, BLANK)
        assert node.state()[P0]["clock"] != 250
        assert node.file(claim) is None


def metadata(node: DraNode, claim: Claim) -> tuple[str, list[Json]]:
    """Where a claim's containers read of their devices, and what."""
    (of_device,) = node.file(claim)["devices"]
    (mount,) = of_device["containerEdits"]["mounts"]
    lines = Path(mount["hostPath"]).read_text().splitlines()
    return mount["containerPath"], [json.loads(line) for line in lines]


def test_a_claims_containers_read_of_their_devices():
    with DraNode().up() as node:
        claim = node.claim("c", P0, bitstream=AFU)
        claim.metadata["annotations"] = {"resource.kubernetes.io/pod-claim-name": "mine"}
        node.put(claim)
        node.dra.prepare(claim)
        path, told = metadata(node, claim)
        assert path.endswith(f"/resourceclaimtemplates/mine/fpga/{DRIVER}-metadata.json")
        assert [one["requests"][0]["devices"][0]["name"] for one in told] == [dra_name(P0)] * 2
        directory = node.folder / "plugins" / DRIVER / "metadata"
        for left in (*directory.iterdir(), *node.cdi.iterdir()):
            left.unlink()
        (directory / f"{uuid.uuid4()}_fpga.json").touch()
        node.again()
        eventually(lambda: metadata(node, claim) == (path, told), "written again at the start")
        eventually(lambda: len([*directory.iterdir()]) == 1, "what nobody knows has gone")
        assert node.dra.unprepare(claim) == ""
        assert list(directory.iterdir()) == []


def test_the_reader_of_an_ofs_slots_claim_finds_the_function_for_its_virtual_machine():
    function = "0000:10:00.1"
    with DraNode("1x1+ofs", slot_functions=f"{CARD}={function}").up() as node:
        claim = node.claim("c", P0, bitstream=AFU)
        node.dra.prepare(claim)
        _, (told, _) = metadata(node, claim)
        ((device,),) = [one["devices"] for one in told["requests"]]
        assert device["attributes"]["resource.kubernetes.io/pciBusID"] == {"string": function}
        assert node.env(claim)["FPGA_FUNCTIONS_0000_10_00_0_P0"] == function


def test_a_claim_without_config_gets_a_blank_region():
    with DraNode().up() as node:
        node.dra.prepare(node.claim("c", P0))
        assert node.afu(P0) == BLANK


def test_what_is_prepared_is_answered_from_the_journal_and_the_hardware_is_not_touched():
    with DraNode().up() as node:
        claim = node.claim("c", P0, bitstream=AFU)
        first = node.dra.prepare(claim)
        steps = node.programmed()
        assert node.dra.prepare(claim) == first
        node.dra.restart()  # and it has forgotten what was prepared
        for path in node.cdi.iterdir():
            path.unlink()
        assert node.dra.prepare(claim) == first
        assert node.programmed() == steps
        assert node.file(claim) is not None
        node.again()
        assert node.dra.prepare(claim) == first
        assert node.programmed() == 0
        assert node.afu(P0) == AFU


def allocate(node: DraNode, claim: Claim, *devices: str) -> None:
    """The scheduler gives a claim other devices, under the same uid."""
    claim.results = Claim(claim.name, *devices).results
    another_pod(node, claim)


def another_pod(node: DraNode, claim: Claim) -> None:
    """A claim is never allocated again while it is reserved for a pod."""
    claim.pods = [str(uuid.uuid4())]
    node.put(claim)


def prepare_anew(node: DraNode, *claims: Claim) -> None:
    """Kubelet asks for other pods of claims, and its record names the earlier ones no more."""
    call = node.dra.begin("Prepare", *claims)
    for claim in claims:
        node.plugin.until_logged("claim withdrawn", claim=claim.uid)
        node.dra.keep(claim)
    for claim, answer in zip(claims, call.result(LIMIT).values(), strict=True):
        assert not answer.error, answer.error
        node.dra.keep(claim, answer.devices)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_claim_that_was_allocated_anew_gets_its_new_devices_and_leaves_the_old(restarted):
    """Kubelet ought to have unprepared it; one that forgot, or was away, has not."""
    with DraNode("2x1").up() as node:
        claim = node.claim("c", P0, bitstream=AFU)
        node.dra.prepare(claim)
        if restarted:
            node.again()
        allocate(node, claim, Q0)
        prepare_anew(node, claim)
        assert node.afu(Q0) == AFU
        eventually(lambda: node.afu(P0) == BLANK)
        file = node.file(claim)
        assert [one["name"] for one in file["devices"]] == [f"{claim.uid}-{dra_name(Q0)}"]
        node.dra.prepare(node.claim("d", P0, bitstream=AFU_2))
        assert node.dra.unprepare(claim) == ""
        assert (node.afu(P0), node.afu(Q0)) == (AFU_2, BLANK)


def test_a_claim_that_was_allocated_anew_waits_for_its_old_pods():
    with DraNode().up() as node:
        claim = node.claim("c", P0, bitstream=AFU)
        node.dra.prepare(claim)
        (pod,) = claim.pods
        node.cgroups.set(pod, "main")
        allocate(node, claim, P1)
        call = node.dra.begin("Prepare", claim)
        node.plugin.until_logged("claim withdrawn", claim=claim.uid)
        assert node.file(claim) is None, "no container starts on what it had"
        node.dra.keep(claim)
        node.plugin.kill()  # nor after a restart
        node.restarted()
        with contextlib.suppress(grpc.RpcError):
            call.result(LIMIT)
        assert node.file(claim) is None
        asked = node.api.gets()
        call = node.dra.begin("Prepare", claim)
        eventually(lambda: node.api.gets() > asked)
        assert (node.afu(P0), node.afu(P1)) == (AFU, BLANK)
        assert not call.done()
        node.cgroups.remove(pod)
        (device,) = call.result(LIMIT)["c"].devices
        assert device.device_name == dra_name(P1)
        assert node.afu(P1) == AFU
        eventually(lambda: node.afu(P0) == BLANK)


def test_a_claim_that_was_allocated_anew_on_the_same_device_is_programmed_anew():
    with DraNode().up() as node:
        claim = node.claim("c", P0, bitstream=AFU)
        node.dra.prepare(claim)
        claim.config = [config(bitstream=AFU_2)]
        another_pod(node, claim)
        prepare_anew(node, claim)
        assert node.afu(P0) == AFU_2


MISSING = "0000000000004000800000000000beef"


def test_a_claim_that_cannot_have_its_new_device_leaves_the_old_to_others():
    with DraNode().up() as node:
        claim = node.claim("c", P0, bitstream=AFU)
        node.dra.prepare(claim)
        claim.config = [config(bitstream=MISSING)]
        allocate(node, claim, P1)
        call = node.dra.begin("Prepare", claim)
        node.plugin.until_logged("claim withdrawn", claim=claim.uid)
        node.dra.keep(claim)
        assert MISSING in call.result(LIMIT)["c"].error
        assert node.plugin.logged("claim left devices", claim=claim.uid, devices=[P0])
        eventually(lambda: node.afu(P0) == BLANK)
        node.dra.prepare(node.claim("d", P0, bitstream=AFU_2))
        node.again()
        assert node.afu(P0) == AFU_2
        claim.config = []
        node.put(claim)
        node.dra.prepare(claim)
        assert node.dra.unprepare(claim) == ""
        eventually(lambda: journal(node, claim) == "")


def test_two_claims_swap_their_devices():
    with DraNode().up() as node:
        one, other = node.claim("c", P0, bitstream=AFU), node.claim("d", P1, bitstream=AFU_2)
        node.dra.prepare(one)
        node.dra.prepare(other)
        allocate(node, one, P1)
        allocate(node, other, P0)
        prepare_anew(node, one, other)
        assert (node.afu(P0), node.afu(P1)) == (AFU_2, AFU)


def test_what_is_prepared_is_not_answered_while_nobody_says_what_it_has():
    with DraNode().up() as node:
        claim = node.claim("c", P0, bitstream=AFU)
        first = node.dra.prepare(claim)
        node.api.away = True
        asked = node.api.gets()
        call = node.dra.begin("Prepare", claim)
        eventually(lambda: node.api.gets() > asked)
        assert not call.done()
        assert node.file(claim) is not None, "its containers start again all the same"
        node.api.away = False
        assert list(call.result(LIMIT)["c"].devices) == first
        claim.results = []
        node.put(claim)
        assert "0 devices" in node.dra.refused(claim)
        assert node.afu(P0) == AFU


def test_files_for_the_runtime_are_written_anew_at_the_start():
    with DraNode().up() as node:
        claim = node.claim("c", P0, bitstream=AFU)
        node.dra.prepare(claim)
        before = node.file(claim)
        node.plugin.kill()
        shutil.rmtree(node.cdi)
        stale = node.cdi / f"k8s.{DRIVER}-claim_{'0' * 8}.json"
        stale.parent.mkdir()
        stale.write_text("{}")
        others = node.cdi / "others.json"
        others.write_text("{}")
        node.restarted()
        assert node.file(claim) == before
        eventually(lambda: not stale.exists())
        assert others.exists()


def test_after_a_reboot_a_claim_is_prepared_anew():
    with DraNode().up() as node:
        claim = node.claim("c", P0, bitstream=AFU)
        node.dra.prepare(claim)
        node.plugin.kill()
        (node.simulated / "boot_id").write_text("another\n")
        shutil.rmtree(node.cdi)
        state = json.loads((node.simulated / "state.json").read_text())
        state["regions"][P0]["afu_id"] = "0" * 32
        (node.simulated / "state.json").write_text(json.dumps(state))
        node.restarted()
        assert node.file(claim) is None  # nothing starts with what is not prepared
        node.dra.prepare(claim)
        assert node.afu(P0) == AFU
        assert node.file(claim) is not None
        assert node.dra.unprepare(claim) == ""
        assert node.afu(P0) == BLANK


Q0 = "0000-11-00.0-p0"


def swap_numbers(node: DraNode, *regions: str) -> None:
    """Two regions get each other's device node, as after a rebind of their cards."""
    path = node.simulated / "state.json"
    state = json.loads(path.read_text())
    one, other = (state["regions"][region] for region in regions)
    one["node"], other["node"] = other["node"], one["node"]
    path.write_text(json.dumps(state))


def test_no_container_starts_with_a_node_that_became_anothers_while_the_plugin_was_away():
    with DraNode("2x1").up() as node:
        mine, theirs = (
            node.claim(name, one, bitstream=AFU) for name, one in (("a", P0), ("b", Q0))
        )
        for claim in (mine, theirs):
            node.dra.prepare(claim)
        before = node.file(mine)
        node.plugin.kill()
        swap_numbers(node, P0, Q0)
        assert node.file(mine) == before
        node.restarted()
        assert node.plugin.logged("claim withdrawn", claim=mine.uid)
        assert node.file(mine) is None
        assert node.file(theirs) is None
        another_pod(node, mine)
        assert "also open to the pod" in node.dra.refused(mine)
        # Whoever has a node of its region by another name does not hold up a claim's end.
        (pod,) = theirs.pods
        node.cgroups.set(pod, "main")
        assert node.dra.unprepare(mine) == ""
        assert node.afu(P0) == AFU, "kept back until then"
        node.cgroups.remove(pod)
        assert node.dra.unprepare(theirs) == ""
        eventually(lambda: node.afu(P0) == node.afu(Q0) == BLANK)


def test_no_container_starts_on_a_card_that_went_and_came_back():
    with DraNode("2x1").up() as node:
        claim, other = (
            node.claim(name, one, bitstream=AFU) for name, one in (("a", P0), ("b", Q0))
        )
        for one in (claim, other):
            node.dra.prepare(one)
        node.unplug(CARD)
        eventually(lambda: node.file(claim) is None)
        node.plug(CARD)
        node.plugin.until_logged("claim withdrawn", claim=claim.uid)
        assert node.file(claim) is None
        assert node.file(other) is not None
        another_pod(node, claim)
        node.dra.prepare(claim)
        assert node.afu(P0) == AFU
        assert node.file(claim) is not None


def test_a_claim_whose_card_is_away_for_a_moment_is_told_so_and_served_when_it_is_back():
    """As while the driver of a free card is bound again: kubelet asks again by itself."""
    with DraNode().up() as node:
        claim = node.claim("c", P0, bitstream=AFU)
        node.unplug(CARD)
        node.plugin.until_logged("card gone")
        told = node.dra.refused(claim)
        assert "may come back by itself" in told
        assert "kubelet tries a start again" in told
        node.plug(CARD)
        eventually(lambda: not node.dra.call("Prepare", claim)["c"].error, "it is prepared")
        assert node.afu(P0) == AFU


@pytest.mark.parametrize("old", [False, True])
def test_a_driver_that_kubelet_refused_says_so_and_is_registered_later(*, old: bool):
    """A kubelet before 1.36 looks at a refused plugin's socket never again, but at a new one."""
    with DraNode() as node:
        node.dra.refusals, node.dra.old = 1, old
        node.up()
        (line,) = node.plugin.logged("kubelet does not register the driver")
        assert "already registered" in line["reason"]
        assert line["retry_in"] > 0
        assert "kubelet's own log" in line["hint"]
        claim = node.claim("c", P0, bitstream=AFU)
        node.dra.prepare(claim)
        assert node.afu(P0) == AFU


def test_unknown_and_deleted_claims_are_unprepared_without_a_word():
    with DraNode().up() as node:
        assert node.dra.unprepare(Claim("never")) == ""
        claim = node.claim("c", P0, bitstream=AFU)
        node.dra.prepare(claim)
        del node.api.objects[claim.path]
        assert node.dra.unprepare(claim) == ""
        assert node.dra.unprepare(claim) == ""
        assert node.afu(P0) == BLANK


def test_claims_that_cannot_be_served_are_refused_with_the_reason():
    with DraNode().up() as node:
        admin = node.claim("admin", P0)
        admin.results[0]["adminAccess"] = True
        node.put(admin)
        assert "adminAccess" in node.dra.refused(admin)
        elsewhere = node.claim("elsewhere", P0)
        elsewhere.results[0]["pool"] = "node-b"
        node.put(elsewhere)
        assert "pool 'node-b'" in node.dra.refused(elsewhere)
        renamed = node.claim("renamed", P0)
        known, renamed.uid = renamed.uid, "another"
        assert "its uid is not another" in node.dra.refused(renamed)
        renamed.uid = known
        gone = node.claim("gone", "0000-ff-00.0-p0")
        assert "is gone: it may come back by itself" in node.dra.refused(gone)
        misspelt = node.claim("misspelt", P0, bitstreem=AFU)
        assert "bitstreem" in node.dra.refused(misspelt)
        unknown = node.claim("unknown", P0, bitstream="0" * 32)
        assert "0" * 32 in node.dra.refused(unknown)
        deleted = node.claim("deleted", P0)
        del node.api.objects[deleted.path]
        assert "not there any more" in node.dra.refused(deleted)
        assert node.afu(P0) == BLANK
        # and none of them stands in the way
        node.dra.prepare(node.claim("c", P0, bitstream=AFU))


def test_a_class_bounds_what_a_claim_asks_for():
    with DraNode().up() as node:
        pinned = node.claim("pinned", P0)
        pinned.config = [config(from_class=True, bitstream=AFU)]
        node.put(pinned)
        node.dra.prepare(pinned)
        assert node.afu(P0) == AFU
        other = node.claim("other", P1)
        other.config = [config(from_class=True, bitstream=AFU), config(bitstream=AFU_2)]
        node.put(other)
        assert "the DeviceClass pins" in node.dra.refused(other)
        other.config = [config(from_class=True, bitstreams=[AFU]), config(bitstream=AFU_2)]
        node.put(other)
        assert "the DeviceClass lists" in node.dra.refused(other)
        other.config = [config(from_class=True, bitstreams=[AFU, AFU_2]), config(bitstream=AFU_2)]
        node.put(other)
        node.dra.prepare(other)
        assert node.afu(P1) == AFU_2


def extended(node: DraNode, *, classes=(), containers=(("main", AFU),), devices=(P0,)) -> Claim:
    """A claim that the scheduler made for a pod's extended resources."""
    uid = "11111111-1111-4111-8111-111111111111"
    claim = Claim("pod-extended-resources-x", *devices, request="container-0-request-0")
    claim.pods = [uid]
    claim.config = list(classes)
    claim.metadata = {
        "annotations": {"resource.kubernetes.io/extended-resource-claim": "true"},
        "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "pod", "uid": uid}],
    }
    node.put(claim)
    mappings = [
        {
            "containerName": name,
            "resourceName": "fpga.intel.com/region",
            "requestName": "container-0-request-0",
        }
        for name, _ in containers
    ]
    node.pod(
        "pod",
        uid,
        *(container(name, afu) for name, afu in containers),
        extendedResourceClaimStatus={
            "resourceClaimName": claim.name,
            "requestMappings": mappings,
        },
    )
    return claim


def test_a_pod_that_asks_by_limits_and_variables_runs_unchanged():
    with DraNode().up() as node:
        claim = extended(node)
        node.dra.prepare(claim)
        assert node.afu(P0) == AFU
        assert node.dra.unprepare(claim) == ""


def test_a_class_bounds_what_variables_ask_for_too():
    with DraNode().up() as node:
        claim = extended(node, classes=[config(from_class=True, bitstream=AFU_2)])
        assert "the DeviceClass pins" in node.dra.refused(claim)
        assert node.afu(P0) == BLANK


def test_containers_that_share_a_device_and_want_different_bitstreams_are_refused():
    with DraNode().up() as node:
        claim = extended(node, containers=(("a", AFU), ("b", AFU_2)))
        assert "containers a and b share a device" in node.dra.refused(claim)
        same = extended(node, containers=(("a", AFU), ("b", AFU)))
        node.dra.prepare(same)
        assert node.afu(P0) == AFU


def test_a_policy_counts_for_the_claims_namespace():
    with DraNode() as node:
        policy = node.folder / "policy.yaml"
        allow = "{name: r, action: allow, namespaces: [%s]}"
        policy.write_text(f"version: 1\ndefault: deny\nrules:\n- {allow % 'elsewhere'}\n")
        node.set(policy_file=str(policy))
        node.up()
        claim = node.claim("c", P0, bitstream=AFU)
        assert f"namespace {NAMESPACE} may not have" in node.dra.refused(claim)
        policy.write_text(f"version: 1\ndefault: deny\nrules:\n- {allow % NAMESPACE}\n")
        node.dra.prepare(claim)
        assert node.afu(P0) == AFU


def test_a_refused_claim_hears_what_people_call_the_bitstream():
    with DraNode() as node:
        node.own_store()
        sign_manifest(node.store, f"--alias={ID}/{AFU}.gbs=gzip").check_returncode()
        policy = node.folder / "policy.yaml"
        policy.write_text("version: 1\ndefault: deny\n")
        node.set(policy_file=str(policy))
        node.up()
        claim = node.claim("c", P0, bitstream=AFU)
        # Until the index has read the manifest, the id has to do.
        eventually(lambda: f"with bitstream gzip ({AFU})" in node.dra.refused(claim))


def test_a_forced_deletion_does_not_give_the_device_to_two():
    with DraNode().up() as node:
        old = node.claim("old", P0, bitstream=AFU)
        node.dra.prepare(old)
        (pod,) = old.pods
        node.cgroups.set(pod, "main")
        del node.api.objects[old.path]  # the scheduler gives its device away
        new = node.claim("new", P0, bitstream=AFU_2)
        call = node.dra.begin("Prepare", new)
        # the old claim's end is not held up by the new one, nor does it wipe what still runs
        ending = node.dra.begin("Unprepare", old)
        node.plugin.until_logged("scrub waits", region=P0)
        assert node.afu(P0) == AFU
        assert not call.done()
        node.cgroups.remove(pod)
        assert ending.result(LIMIT)["old"].error == ""
        assert call.result(LIMIT)["new"].error == ""
        assert node.afu(P0) == AFU_2


def test_several_pods_share_a_claim_and_all_of_them_are_waited_for():
    with DraNode().up() as node:
        claim = node.claim("c", P0, bitstream=AFU)
        devices = node.dra.prepare(claim)
        later = "22222222-2222-4222-8222-222222222222"
        node.cgroups.set(later, "main")
        claim.pods.append(later)
        node.dra.keep(claim, devices)  # no call reports it
        eventually(lambda: later in users(node))
        ending = node.dra.begin("Unprepare", claim)
        assert later in node.plugin.until_logged("scrub waits", region=P0)["reason"]
        assert node.afu(P0) == AFU
        node.cgroups.remove(later)
        assert ending.result(LIMIT)["c"].error == ""
        assert node.afu(P0) == BLANK


def users(node: DraNode) -> str:
    """Of all regions."""
    with contextlib.closing(sqlite3.connect(node.state_dir / "journal.sqlite3")) as db:
        return str([*db.execute("SELECT key, value FROM journal WHERE kind = 'tenancies'")])


def journal(node: DraNode, claim: Claim) -> str:
    with contextlib.closing(sqlite3.connect(node.state_dir / "journal.sqlite3")) as db:
        rows = db.execute(
            "SELECT value FROM journal WHERE kind = 'claim_owners' AND key = ?", (claim.uid,)
        )
        return "".join(value for (value,) in rows)


def test_a_pod_has_several_claims_and_an_error_is_that_of_one():
    with DraNode().up() as node:
        good = node.claim("good", P0, bitstream=AFU)
        bad = node.claim("bad", P1, bitstream="0" * 32)
        answers = node.dra.call("Prepare", good, bad)
        assert answers["good"].error == ""
        assert "0" * 32 in answers["bad"].error
        mark = node.plugin.mark
        bad.config = [config(bitstream=AFU_2)]
        node.put(bad)
        answers = node.dra.call("Prepare", good, bad)
        assert {one.error for one in answers.values()} == {""}
        assert node.plugin.logged("region prepared", mark, region=P1)
        assert not node.plugin.logged("region prepared", mark, region=P0), "it was before"
        answers = node.dra.call("Unprepare", good, bad)
        assert {one.error for one in answers.values()} == {""}
        assert (node.afu(P0), node.afu(P1)) == (BLANK, BLANK)


def test_a_card_and_its_regions_are_never_given_out_together():
    with DraNode().up() as node:
        whole = node.claim("whole", CARD, bitstream=AFU)
        node.dra.prepare(whole)
        assert (node.afu(P0), node.afu(P1)) == (AFU, AFU)
        region = node.claim("region", P0, bitstream=AFU_2)
        call = node.dra.begin("Prepare", region)
        ended = node.dra.begin("Unprepare", whole)
        assert ended.result(LIMIT)["whole"].error == ""
        assert call.result(LIMIT)["region"].error == ""
        assert (node.afu(P0), node.afu(P1)) == (AFU_2, BLANK)


@pytest.mark.parametrize("event", ["region prepared", "claim prepared", "claim served"])
def test_it_may_be_killed_anywhere_around_prepare(event):
    with DraNode() as node:
        claim = node.claim("c", P0, bitstream=AFU)
        node.dra.start()
        node.start(kill_at=event)
        node.ready()
        with contextlib.suppress(grpc.RpcError):
            node.dra.prepare(claim)
        node.plugin.exit_code()
        node.restarted()
        node.dra.prepare(claim)
        assert node.afu(P0) == AFU
        assert node.dra.unprepare(claim) == ""
        assert node.afu(P0) == BLANK


def ended_without_an_answer(node: DraNode) -> Claim:
    """A claim that the journal has ended, when the plugin is killed; kubelet was not told."""
    node.settings |= constants({"dra.reconcile.LOOK_SECONDS": 0.5})
    claim = node.claim("c", P0, bitstream=AFU)
    node.up()
    node.dra.prepare(claim)
    (pod,) = claim.pods
    node.cgroups.set(pod, "main")  # so it is not clean before the plugin dies
    call = node.dra.begin("Unprepare", claim)
    node.plugin.until_logged("claim ended")
    node.plugin.kill()
    with pytest.raises(grpc.RpcError):
        call.result(LIMIT)
    node.cgroups.remove(pod)
    return claim


def test_it_may_be_killed_around_unprepare():
    with DraNode() as node:
        claim = node.claim("c", P0, bitstream=AFU)
        node.dra.start()
        node.start(kill_at="claim ended")
        node.ready()
        node.dra.prepare(claim)
        with contextlib.suppress(grpc.RpcError):
            node.dra.unprepare(claim)
        node.plugin.exit_code()
        node.restarted()
        assert node.dra.unprepare(claim) == ""
        assert node.afu(P0) == BLANK
        assert node.file(claim) is None
        eventually(lambda: journal(node, claim) == "")


def test_a_record_that_kubelet_lost_is_noticed_and_the_claim_ends_when_it_is_over():
    with DraNode().up() as node:
        claim = node.claim("c", P0, bitstream=AFU)
        node.dra.prepare(claim)
        (pod,) = claim.pods
        node.cgroups.set(pod, "main")
        node.dra.wipe()
        node.plugin.until_logged("kubelet's record lacks a claim", claim=claim.uid)
        assert node.afu(P0) == AFU
        del node.api.objects[claim.path]
        node.cgroups.remove(pod)
        # somebody else is given the device
        new = node.claim("new", P0, bitstream=AFU_2)
        node.dra.prepare(new)
        assert node.afu(P0) == AFU_2
        assert node.plugin.logged("claim ended without a call", claim=claim.uid)
        eventually(lambda: journal(node, claim) == "")


def test_of_a_claim_that_ended_and_that_kubelet_lost_nothing_stays_in_the_journal():
    with DraNode() as node:
        claim = ended_without_an_answer(node)
        assert journal(node, claim)
        node.dra.wipe()  # so it is not asked for again
        node.restarted()
        eventually(lambda: journal(node, claim) == "")
        assert node.afu(P0) == BLANK


def test_of_a_claim_that_ended_no_file_outlives_the_start_though_kubelet_may_still_ask_for_it():
    """Kubelet may lose its record later, and nothing would remove the file."""
    with DraNode() as node:
        claim = ended_without_an_answer(node)
        node.file_path(claim).write_text("{}")  # it died before it was removed
        node.restarted()
        assert node.file(claim) is None
        node.dra.wipe()
        eventually(lambda: journal(node, claim) == "")
        assert node.file(claim) is None


def test_a_claim_that_the_journal_lost_keeps_its_device():
    with DraNode().up() as node:
        claim = node.claim("c", P0, bitstream=AFU)
        node.dra.prepare(claim)
        (pod,) = claim.pods
        node.cgroups.set(pod, "main")
        node.plugin.kill()
        for path in node.state_dir.glob("journal*"):
            path.unlink()
        node.restarted()
        assert node.plugin.logged("claim adopted", claim=claim.uid)
        assert node.afu(P0) == AFU
        assert node.file(claim) is not None  # its containers may start again
        ending = node.dra.begin("Unprepare", claim)
        node.plugin.until_logged("scrub waits", region=P0)
        node.cgroups.remove(pod)
        assert ending.result(LIMIT)["c"].error == ""
        assert node.afu(P0) == BLANK


def test_no_container_of_an_adopted_claim_starts_on_what_the_claim_left():
    with DraNode().up() as node:
        claim = node.claim("c", P0, bitstream=AFU)
        node.dra.prepare(claim)
        (pod,) = claim.pods
        node.cgroups.set(pod, "main")
        node.plugin.kill()
        for path in node.state_dir.glob("journal*"):
            path.unlink()
        node.restarted()
        assert node.file(claim) is not None
        node.cgroups.remove(pod)
        claim.config = [config(bitstream=MISSING)]
        allocate(node, claim, P1)
        call = node.dra.begin("Prepare", claim)
        eventually(lambda: node.file(claim) is None)
        assert node.dra.unprepare(claim) == ""
        assert call.result(LIMIT)["c"].error
        node.dra.prepare(node.claim("d", P0, bitstream=AFU_2))


def test_a_slow_api_server_is_waited_for_inside_the_call():
    with DraNode().up() as node:
        claim = node.claim("c", P0, bitstream=AFU)
        node.api.away = True
        call = node.dra.begin("Prepare", claim)
        eventually(lambda: node.api.gets() > 1)
        node.api.away = False
        assert call.result(LIMIT)["c"].error == ""
        assert node.afu(P0) == AFU


def test_without_a_blank_bitstream_a_pod_does_not_hang_for_ever():
    with DraNode() as node:
        store = node.own_store()
        node.up()
        claim = node.claim("c", P0, bitstream=AFU)
        node.dra.prepare(claim)
        for blank in store.glob("*/blank.gbs"):
            blank.unlink()
        assert node.dra.unprepare(claim) == ""


def test_health_is_told_at_once_and_with_each_change():
    with DraNode().up() as node:
        claim = node.claim("c", P0, bitstream=AFU)
        node.dra.prepare(claim)
        assert node.dra._channel is not None
        stream = node.dra._channel.unary_stream(
            "/v1.DRAResourceHealth/NodeWatchResources",
            request_serializer=lambda each: each.SerializeToString(),
            response_deserializer=message("NodeWatchResourcesResponse", "v1").FromString,
        )(message("NodeWatchResourcesRequest", "v1")(), timeout=LIMIT)
        (well,) = next(stream).devices
        assert (well.device.pool_name, well.device.device_name) == (NODE, dra_name(P0))
        assert (well.health, well.health_check_timeout_seconds) == (1, 300)
        node.arm(P0, "fatal")
        (sick,) = next(stream).devices
        assert sick.health == 2
        assert sick.message
        stream.cancel()


HELD = "ResourceClaims may still have devices, which are given to nobody"


def by_device_plugin(node: DraNode, root: Path) -> None:
    """Start the plugin again with the device plugin API; it sees kubelet's root directory."""
    (root / "device-plugins").mkdir(parents=True, exist_ok=True)
    (root / "pods" / OWN_POD).mkdir(parents=True, exist_ok=True)
    node.set(mode="device-plugin", kubelet_root=str(root))
    Node.restarted(node)


def test_what_claims_have_is_held_back_when_the_device_plugin_serves():
    """Without a record of kubelet's that can be read, nobody knows which pods came to a claim while
    no plugin ran, as it did to this one."""
    with DraNode().up() as node:
        claim = node.claim("c", P0, bitstream=AFU)
        devices = node.dra.prepare(claim)
        (first,), later = claim.pods, str(uuid.uuid4())
        node.cgroups.set(first, "main")
        assert node.plugin.stop() == 0
        node.kubelet.start()
        by_device_plugin(node, node.folder / "nothing-mounted")
        node.cgroups.set(later, "main")
        claim.pods.append(later)
        node.dra.keep(claim, devices)
        node.cgroups.remove(first)
        record = node.folder / "dra_manager_state"
        content = record.read_text()
        for root, text in (("nothing-mounted", content), ("", "{garbage"), ("", content)):
            assert node.plugin.stop() == 0
            record.write_text(text)
            by_device_plugin(node, node.folder / root)
            if root or text != content:
                line = node.plugin.until_logged(HELD)
                assert line["claims"] == [f"{NAMESPACE}/c"]
                assert "FPGA_PLUGIN_MODE=dra" in line["hint"]
            with pytest.raises(Refused, match=f"ResourceClaim {NAMESPACE}/c"):
                node.kubelet.allocate(P0)
            node.kubelet.allocate(P1)
            assert node.afu(P0) == AFU
            assert node.file(claim) is not None, "its containers may start again"
        node.dra.wipe()
        assert node.plugin.stop() == 0
        by_device_plugin(node, node.folder)
        assert node.afu(P0) == AFU, "the later pod runs"
        node.cgroups.remove(later)
        assert node.plugin.stop() == 0
        by_device_plugin(node, node.folder)
        node.plugin.until_logged("claim ended without a call", claim=claim.uid)
        eventually(lambda: node.afu(P0) == BLANK)
        assert node.file(claim) is None
        node.kubelet.allocate(P0)


def test_what_pods_of_the_device_plugin_have_is_held_back_when_dra_serves():
    with DraNode() as node:
        node.kubelet.start()
        by_device_plugin(node, node.folder)
        answer = node.kubelet.allocate(P0)
        pod = str(uuid.uuid4())
        node.cgroups.set(pod, "main")
        resource = f"fpga.intel.com/region-{ID}"
        node.kubelet.checkpoint((pod, "main", resource, [P0], answer))
        assert node.plugin.stop() == 0
        node.kubelet.stop()
        node.set(mode="dra")
        node.up()
        node.dra.prepare(node.claim("other", P1, bitstream=AFU))
        claim = node.claim("c", P0, bitstream=AFU)
        node.dra.keep(claim)
        call = node.dra.begin("Prepare", claim)
        asked = node.api.gets()
        eventually(lambda: node.api.gets() > asked or call.running())
        assert node.afu(P0) == BLANK
        node.plugin.kill()
        with contextlib.suppress(grpc.RpcError):
            call.result(LIMIT)
        node.cgroups.remove(pod)
        node.restarted()
        node.dra.prepare(claim)
        assert node.afu(P0) == AFU


def test_the_nodes_name_is_needed_and_said():
    with DraNode() as node:
        del node.settings["NODE_NAME"]
        assert node.start().exit_code() == 2
        assert "NODE_NAME" in node.plugin.text
