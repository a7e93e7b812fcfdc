"""`fpga-plugin card show`: what would be done, as text to send back; nothing is touched."""

import json

from daemon_support import AFU, CARD, ID, P0, REGIONS, Node, command, request, sign_manifest


def check(node: Node, *options: str) -> str:
    done = command("card", "show", "--assumptions", *options, settings=node.settings)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_works_without_a_plugin_and_leaves_no_trace():
    with Node("1x2+no-clear+no-iommu") as node:
        before = sorted(node.folder.rglob("*"))
        text = check(node)
        assert sorted(node.folder.rglob("*")) == before
        assert f"card {CARD}  Intel PAC A10 GX" in text
        assert REGIONS in text
        assert "clear its memory: no, it is never cleared" in text
        assert (
            "- an IOMMU keeps its DMA from the host's memory, and from other devices: IOMMU: none"
            in text
        )
        assert "? the port's AFU id follows the image" in text


def test_beside_a_plugin_it_says_what_is_in_use_and_changes_nothing():
    with Node("1x2", untranslated_dma="refuse").up() as node:
        node.kubelet.allocate(P0)
        before, calls = node.state(), node.plugin.mark
        found = json.loads(check(node, "--json"))
        (card,) = found["cards"]
        assert any("reset and blank what nobody has" in one for one in card["would"])
        assert not any(f"nobody has: {P0}" in one for one in card["would"])
        verdicts = {one["verdict"] for one in card["assumptions"]}
        assert verdicts <= {"holds", "does not hold", "cannot be told"}
        assert found["settings"]["FPGA_PLUGIN_UNTRANSLATED_DMA"] == "refuse"
        assert node.state() == before
        assert not node.plugin.logged("card found", calls)


def test_without_being_asked_it_lists_no_assumptions_and_names_no_plugin():
    with Node("2x1") as node:
        found = json.loads(command("card", "show", CARD, "--json", settings=node.settings).stdout)
        assert [card["card"] for card in found["cards"]] == [CARD]
        assert found["cards"][0]["assumptions"] == []
        assert found["cards"][0]["functions"][0]["role"] == "card"
        assert found["now"] is None


def test_a_card_that_the_settings_leave_out_would_be_left_alone():
    with Node("1x1", cards="!0000:10:00.0") as node:
        (card,) = json.loads(check(node, "--json"))["cards"]
        assert card["would"] == ["leave it alone"]
        assert "FPGA_PLUGIN_CARDS" in card["problem"]


def test_of_an_ofs_card_the_functions_of_its_slot_are_named():
    with Node("1x1+ofs") as node:
        (card,) = json.loads(check(node, "--json"))["cards"]
        assert "OFS" in card["description"]
        failed = [one for one in card["assumptions"] if one["verdict"] == "does not hold"]
        assert failed == []
        (slot,) = [one for one in card["assumptions"] if "OFS slot" in one["says"]]
        assert "0000:10:00.1 in group" in slot["seen"]
        assert (
            "bind to vfio-pci, and unbind when nobody has it: 0000:10:00.1, 0000:10:00.2"
            in (card["would"])
        )


def test_each_card_has_its_own_assumptions():
    with Node("1x1,1x1+ofs,1x2+no-pr") as node:
        ports, slot, fixed = [
            {one["says"]: one for one in card["assumptions"]}
            for card in json.loads(check(node, "--json"))["cards"]
        ]
        says = "it is of a kind that is known"
        assert "behind its ports, reconfigured" in ports[says]["seen"]
        assert "PCI functions of their own" in slot[says]["seen"]
        assert "in flash" in fixed[says]["seen"]
        image = "the blank image runs nothing"
        assert [image in each for each in (ports, slot, fixed)] == [True, True, False]


def test_the_settings_that_decide_are_in_the_report():
    functions = "0000:10:00.0=0000:10:00.2"
    given = {"cards": "0000:10:00.0", "slot_functions": functions, "slot_identity": "0000:10:00.0"}
    with Node("1x1+ofs", **given) as node:
        text = check(node)
        for name, value in given.items():
            assert f"  FPGA_PLUGIN_{name.upper()}={value}\n" in text
        assert "reset and blank what nobody has" in text


def test_what_people_call_the_ids_is_shown_with_them():
    with Node("1x1") as node:
        node.own_store()
        aliases = [f"--alias={ID}/{AFU}.gbs=gzip", f"--interface-alias={ID}=rack-cards"]
        sign_manifest(node.store, *aliases).check_returncode()
        node.up()
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request("gzip"))
        text = check(node)
        (card,) = json.loads(check(node, "--json"))["cards"]
        assert f"  interface rack-cards ({ID})\n" in text
        assert f"  {P0}: shows gzip ({AFU})\n" in text
        assert (card["interface_id"], card["interface_alias"]) == (ID, "rack-cards")
        assert [(one["afu_id"], one["name"]) for one in card["holds"]] == [(AFU, "gzip")]
