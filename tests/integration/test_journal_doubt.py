"""A journal that is not the last life's, or not of this version, under pods that run.

What gives trust is dropped, what takes it stays; kubelet's checkpoint names the owners.
"""

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from daemon_support import (
    AFU,
    BLANK,
    CARD,
    HEALTHY,
    P0,
    P1,
    REGIONS,
    UNHEALTHY,
    Cgroups,
    Node,
    run,
)

A, B = (f"{digit * 8}-{digit * 4}-4{digit * 3}-8{digit * 3}-{digit * 12}" for digit in "ab")
P2 = f"{CARD}-p2"
SCHEMA_3 = Path(__file__).with_name("journal-schema-3.sql")
DOUBT = "the journal is in doubt"


@pytest.fixture
def cgroups(tmp_path: Path) -> Cgroups:
    return Cgroups(tmp_path / "cgroup")


@pytest.fixture
def node(cgroups: Cgroups) -> Iterator[Node]:
    """A node whose cards do not go with its state directory."""
    with Node("1x3", cgroup_root=str(cgroups.root)) as made:
        made.simulated = made.folder / "cards"
        made.set(simulated_dir=str(made.simulated))
        yield made.up()


def move(node: Node, name: str) -> None:
    """Another FPGA_PLUGIN_STATE_DIR from the next start on."""
    node.state_dir = node.folder / name
    node.set(state_dir=str(node.state_dir))


def believed(node: Node) -> None:
    """A further start finds nothing wrong, and scrubs nothing."""
    node.plugin.stop()
    plugin = node.restarted()
    assert plugin.logged(DOUBT) == []
    assert [node.scrubs(region) for region in (P0, P1, P2)] == [0, 0, 0]


# ------------------------------------------------------------------ another version's


def schema_3(node: Node) -> None:
    """While no plugin runs: the journal as eea44c1 would have left it."""
    journal = node.state_dir / "journal.sqlite3"
    with closing(sqlite3.connect(journal)) as db:
        lives = dict(db.execute("SELECT key, value FROM journal WHERE kind = 'facts'"))
    for file in node.state_dir.glob("journal.sqlite3*"):
        file.unlink()
    (node.kubelet_dir / "fpga-plugin" / "marker").unlink()
    sql = SCHEMA_3.read_text()
    for name, life in {"BOOT": lives["boot"], "KUBELET": lives["kubelet"]}.items():
        sql = sql.replace(name, life.strip('"'))
    with closing(sqlite3.connect(journal)) as db:
        db.executescript(sql)


def test_an_upgrade_under_running_pods_touches_none_of_them(node: Node, cgroups: Cgroups) -> None:
    """Also the one that kubelet has forgotten: only the journal knows of it."""
    run(node, cgroups, B, P1)
    of_a = run(node, cgroups, A, P0)
    node.kubelet.checkpoint(of_a)
    node.kubelet.deallocate(P1)
    node.kubelet.until(REGIONS, {P0: HEALTHY, P1: UNHEALTHY, P2: HEALTHY})
    node.plugin.kill()
    schema_3(node)
    plugin = node.restarted()
    said = plugin.until_logged(DOUBT)
    assert said["reason"] == "another version of the plugin wrote it (schema 3, not 4)"
    with closing(sqlite3.connect(said["copy"])) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (3,)
    # What it calls clean is scrubbed, as nothing of it gives trust; the pods' regions are not.
    node.kubelet.until(REGIONS, {P0: HEALTHY, P1: UNHEALTHY, P2: HEALTHY})
    assert [node.scrubs(region) for region in (P0, P1, P2)] == [0, 0, 1]
    assert (node.afu(P0), node.afu(P1)) == (AFU, AFU)
    believed(node)
    # The pods end as any others do.
    cgroups.set(B)
    node.plugin.until_logged("region scrubbed", region=P1)
    node.kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY, P2: HEALTHY})
    cgroups.set(A)
    node.kubelet.checkpoint()
    node.kubelet.deallocate(P0)
    node.plugin.until_logged("region scrubbed", region=P0)
    assert node.afu(P0) == BLANK


def test_of_a_newer_version_what_can_be_read_is_kept(node: Node, cgroups: Cgroups) -> None:
    run(node, cgroups, A, P0)
    node.plugin.kill()
    with closing(sqlite3.connect(node.state_dir / "journal.sqlite3")) as db, db:
        db.execute("PRAGMA user_version = 99")
        db.execute("INSERT INTO journal VALUES ('news', 'x', 'y')")
        db.execute("INSERT INTO journal VALUES ('drained', ?, 'true')", (CARD,))
    plugin = node.restarted()
    assert "(schema 99, not 4)" in plugin.until_logged(DOUBT)["reason"]
    plugin.until_logged("region scrubbed", region=P1)
    assert (node.scrubs(P0), node.afu(P0)) == (0, AFU)
    node.kubelet.until(REGIONS, {P0: HEALTHY})  # the card is still drained


# ------------------------------------------------------------------ not the last life's


def swapped(node: Node, cgroups: Cgroups) -> None:
    """The state directory is changed, a pod starts, and it is changed back (f7)."""
    node.plugin.stop()
    first = node.state_dir.name
    move(node, "other")
    plugin = node.restarted()
    assert "the plugin last ran with another one" in plugin.until_logged(DOUBT)["reason"]
    node.settled()
    run(node, cgroups, A, P0)
    node.plugin.stop()
    move(node, first)


def restored(node: Node, cgroups: Cgroups) -> None:
    """A copy of before is put in its place."""
    node.plugin.stop()
    copy = node.folder / "copy"
    shutil.copytree(node.state_dir, copy, ignore=shutil.ignore_patterns("*.sock"))
    node.restarted()
    run(node, cgroups, A, P0)
    node.plugin.stop()
    shutil.rmtree(node.state_dir)
    copy.rename(node.state_dir)


def marker_lost(node: Node, cgroups: Cgroups) -> None:
    run(node, cgroups, A, P0)
    node.plugin.stop()
    (node.kubelet_dir / "fpga-plugin" / "marker").unlink()


@pytest.mark.parametrize(
    ("happens", "why"),
    [
        (swapped, "the plugin last ran with another one, in "),
        (restored, "an older copy put in its place"),
        (marker_lost, "does not say whether it is the last life's"),
    ],
)
def test_a_pod_that_started_since_keeps_its_region(
    node: Node, cgroups: Cgroups, happens: Callable[[Node, Cgroups], None], why: str
) -> None:
    happens(node, cgroups)
    plugin = node.restarted()
    assert why in plugin.until_logged(DOUBT)["reason"]
    for region in (P1, P2):  # nobody's, and not known to be clean
        plugin.until_logged("region scrubbed", region=region)
    assert [node.scrubs(region) for region in (P0, P1, P2)] == [0, 1, 1]
    assert node.afu(P0) == AFU
    node.kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY, P2: HEALTHY})
    believed(node)
    assert node.afu(P0) == AFU
    cgroups.set(A)
    node.kubelet.checkpoint()
    node.kubelet.deallocate(P0)
    node.plugin.until_logged("region scrubbed", region=P0)
