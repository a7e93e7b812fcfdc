"""Bitstreams by what the store's manifest calls them, by the daemon as a process."""

import json
from pathlib import Path

import pytest
from daemon_support import (
    AFU,
    AFU_2,
    BLANK,
    P0,
    P1,
    REGIONS,
    Node,
    Refused,
    command,
    eventually,
    request,
    sign_manifest,
)

INTERFACE = REGIONS.rpartition("-")[2]

HELLO_AFU = "850adcc26ceb4b229722d43375b61c66"


@pytest.fixture
def node():
    with Node("1x2") as made:
        made.own_store()
        name(made.store, gzip=AFU)
        yield made


def name(store: Path, **names: str) -> None:
    """Call bitstreams so, as an operator does."""
    options = [f"--alias={INTERFACE}/{afu}.gbs={alias}" for alias, afu in names.items()]
    sign_manifest(store, *options).check_returncode()


def shown(node: Node, name: str) -> dict:
    return json.loads(command(name, "--json", settings=node.settings).stdout or "{}")


def on_p0(node: Node) -> tuple[str, str] | None:
    """The id of what status says of the region, and what it calls that."""
    regions = [one for card in shown(node, "status").get("cards", []) for one in card["regions"]]
    return (regions[0]["afu_id"], regions[0]["bitstream"]) if regions else None


def test_a_pod_may_ask_for_a_bitstream_by_its_name(node):
    node.up()
    node.kubelet.allocate(P0)
    node.kubelet.prestart(P0, env=request("gzip"))
    assert node.afu(P0) == AFU
    node.kubelet.allocate(P1)
    eventually(lambda: on_p0(node) == (AFU, "gzip / 'vector_add'"))  # a port shows no more
    (card,) = shown(node, "devices")["cards"]
    assert (card["regions"][0]["afu_id"], card["regions"][0]["name"]) == (AFU, "gzip")
    node.kubelet.prestart(P1, env={"FPGA_REGION_x": INTERFACE, "FPGA_AFU_x": "gzip"})
    assert node.afu(P1) == AFU


def test_a_name_that_nobody_has_is_told_and_nothing_is_programmed(node):
    node.up()
    node.kubelet.allocate(P0)
    with pytest.raises(Refused) as refused:
        node.kubelet.prestart(P0, env=request("gzpi"))
    assert refused.value.code == "INVALID_ARGUMENT"
    assert "FPGA_BITSTREAM_ID_1='gzpi': neither a bitstream's id nor a name" in str(refused.value)
    assert node.afu(P0) == BLANK


def test_a_title_is_refused_with_the_id_that_has_it():
    """`bitstream list` and status show it, in quotes."""
    with Node("1x1").up() as node:
        node.kubelet.allocate(P0)
        with pytest.raises(Refused) as refused:
            node.kubelet.prestart(P0, env=request("hello_afu"))
        assert refused.value.code == "INVALID_ARGUMENT"
        assert refused.value.message.endswith(
            f"it is the title of bitstream {HELLO_AFU}: ask for that"
        )


def test_a_name_means_what_the_manifest_says_at_the_start(node):
    node.up()
    node.kubelet.allocate(P0)
    node.kubelet.prestart(P0, env=request("gzip"))
    name(node.store, zip=AFU, gzip=AFU_2)
    node.kubelet.prestart(P0, env=request("gzip"))
    assert node.afu(P0) == AFU_2
    node.kubelet.prestart(P0, env=request("zip"))
    assert node.afu(P0) == AFU


def test_the_policy_is_asked_about_the_bitstream_that_a_name_means(node):
    policy = node.folder / "policy.yaml"
    rule = f"{{name: no-gzip, action: deny, bitstreams: [{AFU}]}}"
    policy.write_text(f"version: 1\ndefault: allow\nrules: [{rule}]\n")
    node.set(policy_file=str(policy))
    node.up()
    node.kubelet.allocate(P0)
    with pytest.raises(Refused, match="rule no-gzip"):
        node.kubelet.prestart(P0, env=request("gzip"))
    assert node.afu(P0) == BLANK
    name(node.store, zip=AFU_2)
    node.kubelet.prestart(P0, env=request("zip"))
    assert node.afu(P0) == AFU_2


def test_a_refusal_has_the_names_of_what_it_is_about(node):
    policy = node.folder / "policy.yaml"
    rule = f"{{name: no-gzip, action: deny, bitstreams: [{AFU}]}}"
    policy.write_text(f"version: 1\ndefault: allow\nrules: [{rule}]\n")
    node.set(policy_file=str(policy))
    name(node.store, gzip=AFU)
    sign_manifest(node.store, f"--interface-alias={INTERFACE}=rack-cards").check_returncode()
    node.up()
    node.kubelet.allocate(P0)

    def refused() -> str:
        with pytest.raises(Refused) as error:
            node.kubelet.prestart(P0, env=request(AFU))
        assert "rule no-gzip" in str(error.value)
        return str(error.value)

    # Until the index has read the manifest, the ids have to do.
    eventually(lambda: f"gzip ({AFU})" in refused())
    assert f"rack-cards ({INTERFACE})" in refused()
    (*_, line) = node.plugin.logged("call refused", method="PreStartContainer")
    assert f"gzip ({AFU})" in line["message"]
