"""Whose a device is in mode `dra`: claim, request and pods, in status, history, card and log."""

from daemon_support import AFU, CARD, P0, P1, eventually
from dra_support import NAMESPACE, Claim, DraNode
from test_status import command, region, told


def events(node, *arguments):
    return told(node, "status", "--history", *arguments)["events"]


def test_status_names_claim_request_and_pod():
    with DraNode().up() as node:
        claim = node.claim("nlb0", P0, bitstream=AFU, request="accelerator")
        node.dra.prepare(claim)
        (pod,) = claim.pods
        shown = region(node, P0)
        owner = shown["owner"]
        assert (owner["namespace"], owner["claim"], owner["claim_uid"]) == (
            NAMESPACE,
            "nlb0",
            claim.uid,
        )
        assert owner["requests"] == ["accelerator"]
        assert owner["pods"] == [f"{NAMESPACE}/pod-{pod}"]
        assert (owner["pod"], owner["pod_uid"]) == (f"pod-{pod}", pod)
        assert shown["healthy"]
        assert region(node, P1)["healthy"], "free and clean, though no resource is registered"
        text = command(node.state_dir, "status").stdout
        assert f"claim {NAMESPACE}/nlb0 (request accelerator), pod {NAMESPACE}/pod-{pod}" in text
        for words in ("nlb0", claim.uid, f"pod-{pod}"):
            (card,) = told(node, "status", "--find", words)["cards"]
            assert [one["region"] for one in card["regions"]] == [P0]
        text = command(node.state_dir, "card", "drain", CARD).stdout
        assert f"in use by claim {NAMESPACE}/nlb0" in text


def test_several_pods_of_a_claim_are_counted_and_named():
    with DraNode().up() as node:
        claim = node.claim("shared", P0, bitstream=AFU)
        claim.pods.append("22222222-2222-4222-8222-222222222222")
        node.put(claim)
        node.dra.prepare(claim)
        owner = region(node, P0)["owner"]
        assert owner["pods"] == [f"{NAMESPACE}/pod-{uid}" for uid in sorted(claim.pods)]
        assert (owner["pod"], owner["pod_uid"]) == ("", "")
        assert "(request fpga), 2 pods" in command(node.state_dir, "status").stdout


def test_after_a_restart_the_claim_is_still_named():
    with DraNode().up() as node:
        claim = node.claim("nlb0", P0, bitstream=AFU)
        node.dra.prepare(claim)
        node.again()
        owner = region(node, P0)["owner"]
        assert (owner["claim"], owner["pods"]) == ("nlb0", claim.pods)


def test_the_history_names_the_claim_from_its_beginning_to_its_scrub():
    with DraNode().up() as node:
        claim = node.claim("nlb0", P0, bitstream=AFU)
        node.dra.prepare(claim)
        assert node.dra.unprepare(claim) == ""

        def whole():
            found = {one["event"]: one for one in events(node, "--find", "default/nlb0")}
            return (
                found if {"claimed", "programmed", "released", "scrubbed"} <= set(found) else None
            )

        found = eventually(whole)
        (pod,) = claim.pods
        for one in found.values():
            assert one["claim"] == f"{NAMESPACE}/nlb0", one
            assert (one["pod"], one["pod_uid"]) == (f"{NAMESPACE}/pod-{pod}", pod), one
        text = command(node.state_dir, "status", "--history").stdout
        assert f"claim {NAMESPACE}/nlb0, pod {NAMESPACE}/pod-{pod}" in text


def test_a_refused_claim_is_in_the_status_until_it_is_served_or_ends():
    with DraNode().up() as node:
        good = node.claim("good", P0, bitstream=AFU)
        node.dra.prepare(good)
        bad = node.claim("bad", P1, bitstream="0" * 32)
        node.dra.refused(bad)
        node.dra.refused(bad)
        shown = told(node, "status")
        (one,) = shown["refusals"]
        assert (one["claim"], one["times"], one["open"]) == (f"{NAMESPACE}/bad", 2, True)
        assert (one["method"], one["devices"]) == ("NodePrepareResources", [P1])
        assert one["pod"] == f"pod-{bad.pods[0]}"
        assert shown["trouble"]["refused"] == 1
        assert region(node, P0)["refused"] == "", "it is another claim's refusal"
        assert f"claim {NAMESPACE}/bad" in command(node.state_dir, "status").stdout
        (line, *_) = node.plugin.logged("claim refused")
        assert (line["claim"], line["namespace"], line["name"]) == (bad.uid, NAMESPACE, "bad")
        assert node.dra.unprepare(bad) == ""
        assert told(node, "status")["trouble"]["refused"] == 0
        again = node.claim("again", P1, bitstream="0" * 32)
        node.dra.refused(again)
        node.dra.prepare(node.claim("other", P1, bitstream=AFU))
        assert told(node, "status")["trouble"]["refused"] == 0


def test_a_claim_that_was_never_read_is_named_in_its_refusal():
    with DraNode().up() as node:
        node.dra.refused(claim := Claim("never"))
        (one,) = told(node, "status")["refusals"]
        assert (one["claim"], one["devices"], one["pod"]) == (f"{NAMESPACE}/never", [], "")
        (line,) = node.plugin.logged("claim not prepared")
        assert (line["claim"], line["name"]) == (claim.uid, "never")


def test_every_line_about_a_claim_names_it():
    with DraNode().up() as node:
        claim = node.claim("nlb0", P0, bitstream=AFU)
        node.dra.prepare(claim)
        node.dra.wipe()
        node.plugin.until_logged("kubelet's record lacks a claim")
        node.dra.keep(claim)
        assert node.dra.unprepare(claim) == ""
        lines = [one for one in node.plugin.lines if one.get("claim") == claim.uid]
        assert {one["event"] for one in lines} >= {"claim prepared", "claim served", "claim ended"}
        assert {(one["namespace"], one["name"]) for one in lines} == {(NAMESPACE, "nlb0")}


def test_odd_names_of_pods_are_left_out_and_stop_nothing():
    with DraNode().up() as node:
        claim = node.claim("c", P0, bitstream=AFU)
        told_object = claim.object()
        told_object["status"]["reservedFor"][0]["name"] = "\x1b[2J/../x"
        node.api.objects[claim.path] = told_object
        node.dra.prepare(claim)
        assert region(node, P0)["owner"]["pods"] == claim.pods
