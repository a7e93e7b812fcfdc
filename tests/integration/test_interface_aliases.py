"""Resources by what the store's manifest calls their interface ids, by the daemon as a process."""

import json
import sqlite3
import subprocess
from pathlib import Path

import pytest
from daemon_support import (
    AFU,
    CARD,
    CARD_2,
    CARDS,
    HEALTHY,
    ID,
    OTHER_ID,
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

BOARD, BOARDS = "fpga.intel.com/region-board", "fpga.intel.com/fpga-board"
OLD = "fpga.intel.com/region-old"
FREE = {P0: HEALTHY, P1: HEALTHY}


@pytest.fixture
def node():
    with Node("1x2") as made:
        made.own_store()
        made.set(interface_aliases="true")
        yield made


def call(store: Path, **names: str) -> None:
    """Call interface ids so, as an operator does: alias by alias; `none` for no alias."""
    options = [
        f"--interface-alias={interface}={alias if alias != 'none' else ''}"
        for alias, interface in names.items()
    ]
    sign_manifest(store, *options).check_returncode()


def shown(node: Node, *words: str) -> str:
    return command(*words, settings=node.settings).stdout


def test_devices_are_listed_by_the_alias_in_place_of_the_id(node):
    call(node.store, board=ID)
    node.up()
    assert sorted(node.kubelet.endpoints) == [BOARDS, BOARD], "never both"
    assert node.kubelet.listed(BOARD) == FREE
    answer = node.kubelet.allocate(P0, resource=BOARD)
    assert answer.envs["FPGA_DEVICES_REGION_CE489693"] == answer.envs["FPGA_DEVICE_1"]
    node.kubelet.prestart(P0, env=request(), resource=BOARD)
    assert node.afu(P0) == AFU
    with pytest.raises(Refused, match="INVALID_ARGUMENT"):
        node.kubelet.prestart(P0, env=request(interface=OTHER_ID), resource=BOARD)
    node.again()
    assert sorted(node.kubelet.endpoints) == [BOARDS, BOARD]
    assert node.kubelet.listed(BOARD)[P0] == HEALTHY
    node.kubelet.deallocate(P0, resource=BOARD)
    node.kubelet.until(BOARDS, {CARD: HEALTHY})
    node.kubelet.allocate(CARD, resource=BOARDS)
    node.kubelet.prestart(CARD, env=request(), resource=BOARDS)


def test_an_owner_keeps_the_list_by_which_it_was_admitted(node):
    node.up()  # no manifest yet
    node.kubelet.allocate(P0)
    node.kubelet.prestart(P0, env=request())
    call(node.store, old=ID)
    node.kubelet.signal.until(lambda: node.kubelet.listed(OLD) == {P1: HEALTHY}, "the alias")
    node.kubelet.until(REGIONS, {P0: HEALTHY})
    node.kubelet.until(CARDS, {})
    node.kubelet.allocate(P1, resource=OLD)
    node.kubelet.prestart(P1, env=request(), resource=OLD)
    call(node.store, board=ID)
    node.kubelet.signal.until(lambda: node.kubelet.has_list(BOARD), "the next alias")
    node.kubelet.until(OLD, {P1: HEALTHY})
    node.again()  # each of the three means the same as before
    for resource, devices in ((REGIONS, [P0]), (OLD, [P1]), (BOARD, [])):
        node.kubelet.until(resource, dict.fromkeys(devices, HEALTHY))
    node.kubelet.prestart(P0, env=request())  # its container restarts
    node.kubelet.prestart(P1, env=request(), resource=OLD)
    node.kubelet.deallocate(P0)
    node.kubelet.deallocate(P1, resource=OLD)
    node.kubelet.until(BOARD, FREE)
    node.kubelet.until(REGIONS, {})
    node.kubelet.until(OLD, {})
    node.again()
    assert set(node.plugin.logged("serving")[0]["resources"]) == {BOARD, BOARDS}


def test_an_alias_goes_only_when_a_manifest_says_so(node):
    call(node.store, board=ID)
    node.up()
    manifest = node.store / "manifest.json"
    content = manifest.read_bytes()
    manifest.write_text("{")
    node.plugin.until_logged("aliases of interface ids are not known: resources keep their names")
    manifest.unlink()
    node.again()
    assert set(node.plugin.logged("serving")[0]["resources"]) == {BOARD, BOARDS}
    node.kubelet.until(BOARD, FREE)
    manifest.write_bytes(content)
    call(node.store, none=ID)
    node.kubelet.signal.until(lambda: node.kubelet.listed(REGIONS) == FREE, "the id")
    node.kubelet.until(BOARD, {})


def test_an_alias_means_one_interface_id_as_long_as_a_pod_has_a_device_by_it():
    with Node(f"1x1,1x1@{OTHER_ID}") as node:
        node.own_store()
        node.set(interface_aliases="true")
        call(node.store, board=ID)
        node.up()
        other = f"{CARD_2}-p0"
        others = f"fpga.intel.com/region-{OTHER_ID}"
        node.kubelet.allocate(P0, resource=BOARD)
        node.kubelet.prestart(P0, env=request(), resource=BOARD)
        call(node.store, none=ID)
        call(node.store, board=OTHER_ID)
        waits = "an alias waits: a pod has a device by it for another interface id"
        assert node.plugin.until_logged(waits)["interface_id"] == OTHER_ID
        node.kubelet.until(others, {other: HEALTHY})
        node.kubelet.until(BOARD, {P0: HEALTHY})
        node.kubelet.deallocate(P0, resource=BOARD)
        node.kubelet.until(BOARD, {other: HEALTHY})
        node.kubelet.until(REGIONS, {P0: HEALTHY})


def test_without_the_setting_only_people_see_the_alias(node):
    node.set(interface_aliases="false")
    call(node.store, board=ID)
    node.up()
    assert sorted(node.kubelet.endpoints) == sorted([REGIONS, CARDS])
    eventually(lambda: "interface board" in shown(node, "status"))
    (card,) = json.loads(shown(node, "status", "--json"))["cards"]
    assert (card["interface_id"], card["interface_alias"]) == (ID, "board")
    assert "interface board" in shown(node, "devices")
    (card,) = json.loads(shown(node, "devices", "--json"))["cards"]
    assert (card["interface_id"], card["interface_alias"]) == (ID, "board")
    assert ID not in shown(node, "status")
    assert ID not in shown(node, "devices")


def test_the_setting_switched_off_leaves_owners_their_lists(node):
    call(node.store, board=ID)
    node.up()
    node.kubelet.allocate(P0, resource=BOARD)
    node.kubelet.prestart(P0, env=request(), resource=BOARD)
    node.set(interface_aliases="false")
    node.again()
    node.kubelet.until(BOARD, {P0: HEALTHY})
    node.kubelet.signal.until(lambda: node.kubelet.listed(REGIONS) == {P1: HEALTHY}, "the id")
    node.kubelet.prestart(P0, env=request(), resource=BOARD)
    node.kubelet.deallocate(P0, resource=BOARD)
    node.kubelet.until(REGIONS, FREE)


def test_a_journal_that_lost_what_an_alias_stands_for_still_knows_its_owner(node):
    call(node.store, board=ID)
    node.up()
    node.kubelet.allocate(P0, resource=BOARD)
    node.kubelet.prestart(P0, env=request(), resource=BOARD)
    node.plugin.kill()
    with sqlite3.connect(node.state_dir / "journal.sqlite3") as journal:
        journal.execute("DELETE FROM journal WHERE kind = 'alias_bindings'")
    journal.close()
    (node.store / "manifest.json").unlink()
    node.restarted()
    node.kubelet.until(BOARD, {P0: HEALTHY})
    node.kubelet.prestart(P0, env=request(), resource=BOARD)
    assert node.afu(P0) == AFU


def test_no_alias_is_remembered_where_functions_are_served(node):
    node.set(advertise="af")
    call(node.store, board=ID)
    node.up()
    eventually(lambda: "interface board" in shown(node, "status"))
    assert not {BOARD, BOARDS} & set(node.plugin.logged("serving")[0]["resources"])
    assert node.plugin.stop() == 0
    with sqlite3.connect(node.state_dir / "journal.sqlite3") as journal:
        rows = journal.execute("SELECT key FROM journal WHERE kind = 'alias_bindings'").fetchall()
    journal.close()
    assert rows == []


def test_the_policy_is_asked_about_the_interface_id(node):
    policy = node.folder / "policy.yaml"
    rule = f"{{name: not-these, action: deny, interfaces: [{ID}]}}"
    policy.write_text(f"version: 1\ndefault: allow\nrules: [{rule}]\n")
    node.set(policy_file=str(policy))
    call(node.store, board=ID)
    node.up()
    node.kubelet.allocate(P0, resource=BOARD)
    with pytest.raises(Refused, match="rule not-these"):
        node.kubelet.prestart(P0, env=request(), resource=BOARD)


@pytest.mark.parametrize(
    "alias", [ID, "deadbeef", "blank", "Board", "a" * 32, "-g"], ids=lambda alias: alias[:8]
)
def test_what_could_be_taken_for_an_id_is_no_alias(node, alias):
    done = sign_manifest(node.store, f"--interface-alias={ID}={alias}")
    assert done.returncode == 2
    assert "no name" in done.stderr


def test_two_interface_ids_with_one_alias_are_refused(node):
    call(node.store, board=ID)
    with pytest.raises(subprocess.CalledProcessError) as refused:
        call(node.store, board=OTHER_ID)
    assert "two interface ids have the alias board" in refused.value.stderr
