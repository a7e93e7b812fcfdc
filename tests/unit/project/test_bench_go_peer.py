"""The Go peer of `make bench`: where it cannot be had, the table says why."""

import subprocess
import sys
from pathlib import Path

import pytest
from bench_support import bench_module


@pytest.fixture
def go_peer(monkeypatch, tmp_path):
    with bench_module("go_peer") as module:
        monkeypatch.setattr(module, "ROOT", tmp_path)
        yield module


def tool(tmp_path, monkeypatch, script):
    """A `go` that does what the script says, and nothing else on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    if script:
        (folder / "go").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "go").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("", "no `go` on the PATH"),
        ('echo \'{"Error": "reading it:\\\\n\\\\t403 Forbidden"}\'; exit 1', "403 Forbidden"),
        ("echo 'no network' >&2; exit 1", "no network"),
    ],
)
def test_a_peer_that_cannot_be_built_is_a_row_that_says_why(
    go_peer, tmp_path, monkeypatch, script, reason
):
    tool(tmp_path, monkeypatch, script)
    (row,) = go_peer.measure(Path(sys.executable), None)
    assert (row.cards, row.name) == ("Go peer", "not measured")
    assert reason in row.note
    assert "\n" not in row.note


def test_a_module_that_does_not_compile_is_one_too(go_peer, tmp_path, monkeypatch):
    (tmp_path / "module" / "cmd").mkdir(parents=True)
    tool(
        tmp_path,
        monkeypatch,
        f'case $1 in mod) echo \'{{"Dir": "{tmp_path}/module"}}\';;'
        " *) echo 'x.go:1: undefined: y' >&2; exit 1;; esac",
    )
    (row,) = go_peer.measure(Path(sys.executable), None)
    assert "does not compile: x.go:1: undefined: y" in row.note
    assert (tmp_path / ".cache" / "go-peer" / "source" / "cmd").is_dir()


def test_the_peer_is_watched_as_the_plugin_is(go_peer, tmp_path, monkeypatch):
    """It is started in its own way; any program does here."""
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: start(["sleep", "60"]))
    with go_peer.Peer(Path("sleep"), tmp_path, tmp_path, tmp_path / "log") as peer:
        monkeypatch.undo()
        assert peer.memory()[0] > 0
        assert peer.cpu() >= 0
        assert peer.threads() == 1
        assert peer.wakeups(0.01) >= 0
        assert peer.stop() >= 0
