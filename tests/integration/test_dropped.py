"""The daemon as root's process: what it kept of root's privileges, and that it works without."""

import os
from pathlib import Path

import pytest
from daemon_support import AFU, P0, Node, request

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root has capabilities to lose")


def capabilities(node: Node) -> set[str]:
    """All sets of all threads."""
    tasks = Path("/proc", str(node.plugin.process.pid), "task")
    return {
        line.split()[1]
        for task in tasks.iterdir()
        for line in (task / "status").read_text().splitlines()
        if line.startswith("Cap")
    }


def test_a_plugin_at_work_has_no_capability_in_any_thread():
    with Node("1x2") as node:
        node.up()
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request())
        assert node.afu(P0) == AFU
        assert capabilities(node) == {"0" * 16}


def test_it_keeps_one_where_its_store_is_another_users():
    with Node("1x2") as node:
        store = node.own_store()
        os.chown(store, 12345, 12345)
        store.chmod(0o700)
        node.up()
        (line,) = node.plugin.logged("CAP_DAC_OVERRIDE is kept: not everything is root's")
        assert line["directories"] == [str(store)]
        assert capabilities(node) == {"0" * 16, "0" * 15 + "2"}
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request())
        assert node.afu(P0) == AFU
