"""`fpga-plugin card program`: by hand, on a drained card, and never left for a pod to find."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import nursery
import pytest
from daemon_support import (
    AFU,
    AFU_2,
    BLANK,
    CARD,
    HEALTHY,
    ID,
    LIMIT,
    P0,
    P1,
    REGIONS,
    ROOT,
    Node,
    eventually,
    request,
)
from test_clocks_life import AFU as CLOCKED
from test_clocks_life import with_image
from test_draining import card
from test_exposure_policy import status

from fpga_plugin.observability.client import ask


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as node:
        yield node.up()


def program(node: Node, *words: str, ok: bool = True) -> str:
    """What the command prints; of a refusal, what it complains of."""
    node.told()
    others = {k: v for k, v in os.environ.items() if not k.startswith("FPGA_PLUGIN_")}
    env = others | dict(node.settings)
    done = nursery.run(["card", "program", *words], env, str(ROOT), timeout=2 * LIMIT)
    assert done.returncode == (0 if ok else 1), done.stderr
    return done.stdout if ok else done.stderr


def region(node: Node, number: int = 0):
    return status(node)["regions"][number]


def slow(seconds: str) -> Node:
    """One region whose PRs take so long, up and blank."""
    node = Node("1x1", simulated_pr_seconds=seconds)
    node.kubelet.start()
    node.start()
    node.kubelet.until(REGIONS, {P0: HEALTHY})
    return node


def test_a_region_of_a_drained_card_is_programmed_and_scrubbed_when_the_card_comes_back(node: Node):
    card(node, "drain")
    text = program(node, CARD, P0, AFU)
    assert f"region {P0} is programmed, and reads AFU {AFU}" in text
    assert "clock not stated" in text
    assert (node.afu(P0), node.afu(P1)) == (AFU, BLANK)
    assert region(node)["condition"] == "PROGRAMMED"
    assert region(node)["ownership"] == "FREE"
    assert "an operator programmed it" in region(node)["reason"]
    assert node.kubelet.listed(REGIONS) == {}
    found = json.loads(program(node, CARD, "0", AFU_2, "--json"))  # the port's number will do
    assert (found["region"], found["afu_id"]) == (P0, AFU_2)
    assert "program blank" in found["steps"]
    assert node.afu(P0) == AFU_2
    card(node, "undrain")
    node.kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
    assert node.afu(P0) == BLANK


def test_a_bitstream_may_be_named_and_is_shown_by_its_name():
    with Node("1x1") as node:
        node.own_store()
        sign = ["bitstream", "sign", "--manifest", "--dir", str(node.store)]
        done = nursery.run(
            [*sign, f"--alias={ID}/{AFU}.gbs=gzip"], dict(os.environ), str(ROOT), timeout=LIMIT
        )
        assert done.returncode == 0, done.stderr
        node.up()
        card(node, "drain")
        assert f"region {P0} is programmed, and reads AFU gzip ({AFU})\n" in program(
            node, CARD, P0, "gzip"
        )
        assert node.afu(P0) == AFU
        found = json.loads(program(node, CARD, P0, AFU, "--json"))
        assert (found["afu_id"], found["name"]) == (AFU, "gzip")
        assert json.loads(program(node, CARD, P0, AFU_2, "--json"))["name"] == ""
        assert "no name of one" in program(node, CARD, P0, "gzpi", ok=False)
        (node.store / "manifest.json").write_text("{")
        text = program(node, CARD, P0, "gzip", ok=False)
        assert "manifest.json" in text
        assert "no name of one" not in text


def test_a_card_in_service_is_refused_and_not_touched(node: Node):
    text = program(node, CARD, P0, AFU, ok=False)
    assert "in service" in text
    assert "card drain" in text
    assert node.afu(P0) == BLANK


def test_a_card_of_which_somebody_has_a_region_is_refused_for_its_other_regions_too(node: Node):
    node.kubelet.allocate(P1)
    node.kubelet.prestart(P1, env=request())
    card(node, "drain")
    assert "has an owner" in program(node, CARD, P0, AFU, ok=False)
    assert (node.afu(P0), node.afu(P1)) == (BLANK, AFU)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((CARD, P0, "0" * 32), "0" * 32),
        ((CARD, P0, "../../etc/passwd"), "no bitstream id"),
        ((CARD, "7", AFU), "has no region"),
        (("0000-99-00.0", P0, AFU), "no card"),
        (("x\x1b[2J", P0, AFU), "no card"),
    ],
)
def test_what_does_not_exist_is_named(node: Node, words: tuple[str, ...], says: str):
    card(node, "drain")
    text = program(node, *words, ok=False)
    assert says in text
    assert "\x1b" not in text
    assert node.afu(P0) == BLANK


def test_a_bitstream_that_is_not_trusted_is_refused():
    with Node("1x1", trust="digest") as node:
        store = node.own_store(manifest=True)
        node.up()
        card(node, "drain")
        program(node, CARD, P0, AFU)
        path = next(store.glob(f"*/{AFU_2}.gbs"))
        path.write_bytes(path.read_bytes() + b"x")
        assert "manifest" in program(node, CARD, P0, AFU_2, ok=False)
        assert node.afu(P0) == AFU


def test_a_port_that_somebody_has_open_is_refused(node: Node):
    card(node, "drain")
    node.arm(P0, "port-open")
    assert "in use" in program(node, CARD, P0, AFU, ok=False)
    assert node.afu(P0) == BLANK


def test_an_image_that_is_too_slow_for_the_clock_is_refused_and_the_region_blanked():
    with with_image("1x1+fixed-clock", high=150) as node:
        card(node, "drain")
        assert "user clock runs at 200 MHz" in program(node, CARD, P0, CLOCKED, ok=False)
        eventually(lambda: region(node)["condition"] == "BLANK")
        assert node.afu(P0) == BLANK


def test_a_pr_that_fails_is_told_and_the_region_is_not_given_out(node: Node):
    card(node, "drain")
    node.arm(P0, "pr-error")
    assert "reconfigured" in program(node, CARD, P0, AFU, ok=False)
    eventually(lambda: region(node)["condition"] == "FAULTED")


def test_a_programming_that_takes_longer_than_an_answer_is_waited_for():
    with slow("5") as node:
        card(node, "drain")
        found = json.loads(program(node, CARD, P0, AFU, "--json"))  # blank and image: 10 s
        assert found["finished"]
        assert node.afu(P0) == AFU


@pytest.mark.parametrize("kill", [False, True])
def test_a_restart_scrubs_what_was_programmed_by_hand(node: Node, *, kill: bool):
    card(node, "drain")
    program(node, CARD, P0, AFU)
    if kill:
        node.plugin.kill()
    node.again()
    eventually(lambda: region(node)["condition"] == "BLANK")
    assert node.afu(P0) == BLANK
    assert status(node)["drained"]


def test_killed_in_the_middle_it_is_scrubbed():
    with slow("3") as node:
        card(node, "drain")
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(program, node, CARD, P0, AFU, ok=False)
            eventually(lambda: region(node)["condition"] == "SCRUBBING")
            node.plugin.kill()
            assert asked.result()
        node.again()
        eventually(lambda: region(node)["condition"] == "BLANK")
        assert node.afu(P0) == BLANK


def test_undrained_in_the_middle_it_is_given_to_nobody_before_it_is_blank():
    with slow("3") as node:
        card(node, "drain")
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(program, node, CARD, P0, AFU, ok=False)
            eventually(lambda: region(node)["condition"] == "SCRUBBING")
            ask(str(node.state_dir), "POST", "/card", {"operation": "undrain", "card": CARD})
            assert asked.result()
        node.kubelet.until(REGIONS, {P0: HEALTHY})
        assert node.afu(P0) == BLANK


def test_where_functions_are_handed_out_as_they_are_nothing_is_programmed_by_hand():
    with Node("1x1", advertise="af") as node:
        node.kubelet.start()
        node.start()
        eventually(lambda: region(node)["condition"] == "UNBLANKED")
        card(node, "drain")
        before = node.afu(P0)
        assert "FPGA_PLUGIN_ADVERTISE=af" in program(node, CARD, P0, AFU, ok=False)
        assert node.afu(P0) == before


def test_a_slot_of_an_ofs_card_is_programmed_by_hand_too():
    with Node("1x1+ofs").up() as node:
        card(node, "drain")
        assert AFU in program(node, CARD, "0", AFU)
        assert (region(node)["condition"], region(node)["afu_id"]) == ("PROGRAMMED", AFU)
        card(node, "undrain")
        node.kubelet.until(REGIONS, {P0: HEALTHY})
        assert region(node)["afu_id"] == BLANK
