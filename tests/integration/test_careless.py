"""What an operator may do to the plugin's own files, and what it says and loses then."""

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_support import AFU, BLANK, CARD, HEALTHY, P0, P1, REGIONS, Node, request


def node() -> Node:
    """A node whose cards do not go with the state directory."""
    made = Node()
    made.simulated = made.folder / "cards"
    made.set(simulated_dir=str(made.simulated))
    return made


def remove_all(directory: Path):
    """The directory itself too, where the plugin may make it again."""
    shutil.rmtree(directory)


def empty(directory: Path):
    """All that lies in it; of a mounted one nobody can remove more."""
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize(("remove", "sandbox"), [(empty, "auto"), (remove_all, "off")])
def test_a_state_directory_that_is_removed_while_the_plugin_runs_loses_no_allocation(
    remove: Callable[[Path], None], sandbox: str
):
    made = node()
    made.set(sandbox=sandbox)
    with made.up() as n:
        n.kubelet.allocate(P0)
        n.kubelet.prestart(P0, env=request(AFU))
        remove(n.state_dir)
        since = n.plugin.mark
        n.kubelet.allocate(P1)
        n.plugin.until_logged("the journal was removed while it was in use, and is put back", since)
        n.again()
        # Both are known, though kubelet has no records; the one that was started is untouched.
        n.kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
        assert n.afu(P0) == AFU
        assert n.scrubs(P0) == 0
        n.kubelet.prestart(P0, env=request(AFU))
        n.kubelet.prestart(P1, env=request(AFU))
        assert "Traceback" not in n.plugin.text


def test_rows_that_make_no_sense_cost_a_scrub_and_no_pod_its_region():
    with node().up() as n:
        n.kubelet.allocate(P0)
        n.kubelet.prestart(P0, env=request(AFU))
        n.plugin.kill()
        with sqlite3.connect(n.state_dir / "journal.sqlite3") as db:
            db.execute(
                "INSERT INTO journal VALUES ('memory_clear_pending', '\x1b[31m nonsense', 'true')"
            )
            db.execute(f"INSERT INTO journal VALUES ('drained', '{CARD}', 'true')")
        db.close()
        plugin = n.restarted()
        said = plugin.until_logged("the journal is in doubt")
        assert said["rows"] == [
            "memory_clear_pending '?[31m nonsense': not a PCI address (such as 0000:3b:00.0)"
        ]
        assert said["copy"].endswith("journal.sqlite3.unreadable")
        plugin.until_logged("region scrubbed", region=P1)
        # Drained: what is free is not offered; the tenant keeps what it has.
        n.kubelet.until(REGIONS, {P0: HEALTHY})
        assert (n.afu(P0), n.afu(P1)) == (AFU, BLANK)
        assert n.scrubs(P0) == 0
        n.kubelet.prestart(P0, env=request(AFU))


def test_a_card_that_is_named_and_not_there_is_told_and_the_others_are_served():
    with Node("2x1", cards="0000:11:00.0,0000:77:00.0") as n:
        n.up()
        said = n.plugin.logged("a card that FPGA_PLUGIN_CARDS names is not there")
        assert [line["card"] for line in said] == ["0000-77-00.0"]
        assert not n.plugin.logged("no FPGA cards on this node")


def test_a_sysfs_that_is_somewhere_else_is_told():
    with Node(backend="dfl", sysfs_root="/nonexistent/sys") as n:
        said = n.start().until_logged("no FPGA cards on this node")
        assert "/nonexistent/sys (FPGA_PLUGIN_SYSFS_ROOT)" in said["hint"]
        assert n.plugin.stop() == 0
