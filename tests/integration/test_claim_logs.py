"""The log of a claim's life: every line of it is found by the pod's uid and by the card's id."""

import json
from typing import Any

import pytest
from daemon_support import (
    AFU,
    CARD,
    CARDS,
    HEALTHY,
    NO_REQUEST,
    P0,
    P1,
    REGIONS,
    Node,
    Refused,
    eventually,
    request,
)

POD, NEXT = "0b0e7c1e-6a2c-4c61-9f3e-000000000001", "0b0e7c1e-6a2c-4c61-9f3e-000000000002"


def story(node: Node, word: str, since: int) -> list[str]:
    """What `grep WORD` shows of the log at its usual level, as the events of the lines."""
    node.caught_up()
    lines = zip(node.plugin.raw[since:], node.plugin.lines[since:], strict=True)
    return [line["event"] for text, line in lines if word in text and line["level"] != "debug"]


def owned(node: Node, pod: str, *devices: str, resource: str = REGIONS) -> None:
    """Allocate devices to a pod, as kubelet's records show it afterwards."""
    answer = node.kubelet.allocate(*devices, resource=resource)
    node.kubelet.checkpoint((pod, "app", resource, devices, answer))


def refusals(node: Node, since: int) -> list[dict[str, Any]]:
    return node.plugin.logged("call refused", since, method="PreStartContainer")


def test_each_line_of_a_claims_life_is_found_by_its_device_and_by_its_pod():
    with Node().up() as node:
        mark = node.plugin.mark
        owned(node, POD, P0)
        node.kubelet.prestart(P0, env=request())
        node.kubelet.poststop(P0)
        node.plugin.until_logged("region scrubbed", mark, region=P0)
        node.kubelet.deallocate(P0)
        node.plugin.until_logged("released", mark)
        life = [
            "call",  # Allocate
            "region prepared",
            "prepared",
            "call",  # PreStartContainer
            "all containers of an allocation stopped",
            "call",  # PostStopContainer
            "region scrubbed",
            "released",
        ]
        told = [e for e in story(node, P0, mark) if e in life]
        assert sorted(told) == sorted(life)
        # Kubelet says in neither of these two calls whose container it is.
        nameless = ["Allocate", "PostStopContainer"]
        calls = [line for line in node.plugin.logged("call", mark) if line["level"] == "info"]
        assert [line["method"] for line in calls if POD not in json.dumps(line)] == nameless
        assert sorted(story(node, POD, mark)) == sorted([*life[1:5], *life[6:]])


def test_the_scrub_after_a_pod_that_was_killed_is_found_by_its_uid():
    with Node().up() as node:
        mark = node.plugin.mark
        owned(node, POD, P0)
        node.kubelet.prestart(P0, env=request())
        node.kubelet.deallocate(P0)
        line = node.plugin.until_logged("region scrubbed", mark, region=P0)
        assert line["former"] == [POD]


def test_after_an_implied_release_the_scrub_names_whose_state_it_cleans_away():
    with Node().up() as node:
        owned(node, POD, P0)
        node.kubelet.prestart(P0, env=request())
        mark = node.plugin.mark
        owned(node, NEXT, P0)  # kubelet gave it on without our hearing of the end
        node.kubelet.prestart(P0, env=request())
        done = [
            line
            for line in node.plugin.lines[mark:]
            if line.get("region") == P0 and "steps" in line
        ]
        # The release scrubs, or PreStart if it comes sooner.
        (scrub,) = [line for line in done if "program blank" in line["steps"]]
        (start,) = [line for line in done if "program" in line["steps"]]
        assert scrub["former"] == [POD]
        assert start["pod"] == NEXT


def test_a_refused_start_names_the_pod():
    with Node().up() as node:
        mark = node.plugin.mark
        owned(node, POD, P0)
        with pytest.raises(Refused, match="NOT_FOUND"):
            node.kubelet.prestart(P0, env=request("0" * 31 + "1"))
        node.caught_up()
        (line,) = refusals(node, mark)
        assert (line["pod"], line["devices"], line["status"]) == (POD, [P0], "NOT_FOUND")


def test_a_start_that_failed_in_the_hardware_names_the_pod_in_each_of_its_lines():
    with Node().up() as node:
        mark = node.plugin.mark
        owned(node, POD, P0)
        node.arm(P0, "pr-stuck")
        with pytest.raises(Refused, match="INTERNAL"):
            node.kubelet.prestart(P0, env=request())
        told = story(node, POD, mark)
        assert {
            "region failed",
            "region not prepared",
            "preparation failed",
            "call refused",
        } <= set(told)


def test_a_refused_start_names_no_pod_where_kubelets_records_tell_none():
    with Node().up() as node:
        mark = node.plugin.mark
        node.kubelet.allocate(P0)
        with pytest.raises(Refused, match="NOT_FOUND"):
            node.kubelet.prestart(P0, env=request("0" * 31 + "1"))
        node.caught_up()
        (line,) = refusals(node, mark)
        assert "pod" not in line


def test_a_start_refused_to_one_pod_is_not_logged_as_the_next_pods():
    """When it is answered, the claim and kubelet's records are the successor's."""
    with Node().up() as node:
        node.set(simulated_pr_seconds="1")  # until the devices are the next pod's
        node.again()
        mark = node.plugin.mark
        owned(node, POD, P0)
        call = node.kubelet.begin_prestart(P0, env=request())
        eventually(lambda: node.afu(P0) == AFU)
        node.kubelet.deallocate(P0)
        owned(node, NEXT, P0)
        node.kubelet.prestart(P0, env=request())
        assert call.code().name in {"FAILED_PRECONDITION", "UNAVAILABLE"}
        node.caught_up()
        ends = [
            *node.plugin.logged("call refused", mark),
            *node.plugin.logged("call not finished", mark),
        ]
        assert [line["pod"] for line in ends] == [POD]


def test_the_life_of_a_whole_card_is_found_by_the_cards_id():
    with Node().up() as node:
        mark = node.plugin.mark
        owned(node, POD, CARD, resource=CARDS)
        node.kubelet.prestart(CARD, env=request(AFU), resource=CARDS)
        node.kubelet.deallocate(CARD, resource=CARDS)
        node.kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
        told = story(node, CARD, mark)
        assert told.count("region prepared") == 2
        assert told.count("region scrubbed") == 2
        assert {"call", "prepared", "released"} <= set(told)


def test_calls_that_change_nothing_are_not_logged_at_the_usual_level():
    with Node().up() as node:
        node.set(log_level="info")
        node.again()
        mark = node.plugin.mark
        node.kubelet.preferred([P0], 1)
        node.kubelet.deallocate(P1)
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=NO_REQUEST)
        node.plugin.until_logged("call", mark, method="PreStartContainer")
        methods = [line["method"] for line in node.plugin.logged("call", mark)]
        assert methods == ["Allocate", "PreStartContainer"]


def test_trouble_of_the_hardware_names_the_pod_that_has_it():
    with Node().up() as node:
        owned(node, POD, P0)
        node.kubelet.prestart(P0, env=request())
        mark = node.plugin.mark
        fault = node.arm(P0, "thermal")
        assert node.plugin.until_logged("region unhealthy", mark, region=P0)["pod"] == POD
        fault.unlink()
        assert node.plugin.until_logged("region recovered", mark, region=P0)["pod"] == POD
        node.unplug(CARD)
        assert node.plugin.until_logged("card gone", mark)["pods"] == [POD]
