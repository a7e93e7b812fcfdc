"""`fpga-plugin devices` beside a plugin, after one, and where there is little to read."""

import json
import subprocess
from typing import Any

from daemon_support import P0, Node, command


def devices(node: Node, *options: str) -> "subprocess.CompletedProcess[str]":
    done = command("devices", *options, settings=node.settings)
    assert done.returncode == 0, done.stderr
    return done


def listed(node: Node) -> tuple[str, list[tuple[str, str]]]:
    """The card's note, and owner and condition of each region."""
    found: dict[str, Any] = json.loads(devices(node, "--json").stdout)
    (card,) = found["cards"]
    return card["note"], [(row["ownership"], row["condition"]) for row in card["regions"]]


def memory(node: Node) -> str:
    (card,) = json.loads(devices(node, "--json").stdout)["cards"]
    return str(card["memory"])


def test_the_devices_command_tells_who_has_what_while_the_plugin_runs_and_after_it():
    with Node("1x2").up() as node:
        node.kubelet.allocate(P0)
        told = ("", [("CLAIMED", "BLANK"), ("FREE", "BLANK")])
        assert memory(node) == "cleared"
        assert listed(node) == told
        node.plugin.stop()
        assert listed(node) == told


def test_no_device_is_said_to_be_free_where_the_journal_cannot_be_read():
    with Node("1x2").up() as node:
        node.kubelet.allocate(P0)
        node.plugin.stop()
        journal = node.state_dir / "journal.sqlite3"
        journal.write_bytes(b"x" * 4096)
        note, regions = listed(node)
        assert regions == [("", ""), ("", "")]
        assert f"journal {journal} cannot be read: file is not a database" in note
        text = devices(node).stdout
        assert "FREE" not in text
        assert "cannot be read" in text
        assert journal.read_bytes() == b"x" * 4096
        assert memory(node) == "not known"
        journal.unlink()
        assert memory(node) == "not known", "no plugin has noted anything of the card"
        assert [owner for owner, _ in listed(node)[1]] == ["FREE", "FREE"]
