"""One look at a node, by those who serve nothing: `fpga-plugin devices` and FPGA_PLUGIN_OBSERVE."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fpga_plugin.commands.card_list import list_devices
from fpga_plugin.observability.node_facts import look
from fpga_plugin.settings.settings import load_settings

UID = "0" * 8 + "-1"
FIRST, SECOND = "0000-10-00.0", "0000-11-00.0"


@pytest.fixture
def settings(tmp_path: Path):
    (tmp_path / "kubelet").mkdir()
    return load_settings(
        {
            "FPGA_PLUGIN_BACKEND": "simulated",
            "FPGA_PLUGIN_SIMULATED_CARDS": "2x2",
            "FPGA_PLUGIN_SIMULATED_DIR": str(tmp_path / "cards"),
            "FPGA_PLUGIN_STATE_DIR": str(tmp_path / "state"),
            "FPGA_PLUGIN_KUBELET_DIR": str(tmp_path / "kubelet"),
            "FPGA_PLUGIN_BITSTREAM_DIR": str(Path(__file__).parents[3] / "bitstreams"),
        }
    )


def give(settings, resource: str, *devices: str) -> None:
    """Write kubelet's checkpoint: a pod has these devices."""
    entry = {
        "PodUID": UID,
        "ContainerName": "main",
        "ResourceName": resource,
        "DeviceIDs": {"-1": list(devices)},
        "AllocResp": "",
    }
    data = {"PodDeviceEntries": [entry], "RegisteredDevices": {}}
    path = Path(settings.kubelet_dir, "kubelet_internal_checkpoint")
    path.write_text(json.dumps({"Data": data, "Checksum": 1}))


def names(settings) -> tuple[str, str]:
    interface = look(settings).cards[0].card.interface_id
    return f"other.example.com/region-{interface}", f"other.example.com/fpga-{interface}"


def test_a_region_is_in_use_by_its_own_allocation_or_its_cards_whatever_the_resource_was_called(
    settings,
):
    regions, cards = names(settings)
    give(settings, regions, f"{FIRST}-p1")
    assert [[each.in_use for each in card.regions] for card in look(settings).cards] == [
        [False, True],
        [False, False],
    ]
    give(settings, cards, SECOND)
    assert [[each.in_use for each in card.regions] for card in look(settings).cards] == [
        [False, False],
        [True, True],
    ]


def test_devices_of_another_plugin_keep_all_cards_of_their_kind_back_and_are_told(settings):
    regions, _ = names(settings)
    give(settings, regions, "dfl-fme.0")
    node = look(settings)
    assert [[entry.pod_uid for entry in card.foreign] for card in node.cards] == [[UID], [UID]]
    assert list_devices(settings)["cards"][0]["note"].endswith(f"(docs/migration.md): pod {UID}")
    give(settings, f"other.example.com/region-{'0' * 32}", "dfl-fme.0")
    assert [card.foreign for card in look(settings).cards] == [(), ()]
    assert list_devices(settings)["cards"][0]["note"] == ""


def test_a_blank_bitstream_is_missed_only_where_the_plugin_may_serve_the_card(settings, tmp_path):
    only = load_settings({"FPGA_PLUGIN_CARDS": SECOND}).cards
    bare = replace(settings, bitstream_dir=str(tmp_path / "nothing"), cards=only)
    first, second = look(bare).cards
    assert (first.left_alone, first.no_blank) == ("FPGA_PLUGIN_CARDS leaves it out", "")
    assert second.no_blank.startswith(f"no blank bitstream at {tmp_path}/nothing/")
    notes = [card["note"] for card in list_devices(bare)["cards"]]
    assert notes[0] == "left alone: FPGA_PLUGIN_CARDS leaves it out"
    assert notes[1].startswith("no-blank-image: ")


def test_what_cannot_be_read_is_told_and_makes_nobody_an_owner(settings, tmp_path):
    Path(settings.kubelet_dir, "kubelet_internal_checkpoint").write_text("{")
    Path(settings.state_dir).mkdir()
    Path(settings.state_dir, "journal.sqlite3").write_bytes(b"x" * 4096)
    node = look(settings)
    assert "checkpoint" in node.checkpoint_error
    assert "file is not a database" in node.journal_error
    region = node.cards[0].regions[0]
    assert (region.ownership, region.condition, region.in_use) == ("", "", False)
    assert list_devices(settings)["cards"][0]["note"] == node.journal_error
