"""Kubelet's directory reports its listeners when to look, wherever it comes from and goes to."""

import asyncio
import errno
import os
import shutil
import socket
import threading
from pathlib import Path

import pytest

from fpga_plugin.deviceplugin.watch import KubeletDirectory
from fpga_plugin.host import watcher


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def watching(path: Path, *steps, recheck: float = 1000.0) -> None:
    """The listener is called after each step, and what it does not concern is not told."""

    async def run() -> None:
        directory = KubeletDirectory(str(path), recheck=recheck)
        told = asyncio.Event()
        with directory.listening(told.set):
            await directory.start()
            for step in steps:
                step()
                await asyncio.wait_for(told.wait(), 10)
                await asyncio.sleep(0.02)
                told.clear()
            if recheck > 1:
                os.makedirs(path, exist_ok=True)
                await asyncio.sleep(0.05)
                told.clear()
                (path / "kubelet_internal_checkpoint").write_text("{}")
                await asyncio.sleep(0.05)
                assert not told.is_set()
            directory.stop()

    asyncio.run(run())


def test_sockets_that_come_and_go_are_told_and_other_files_are_not(tmp_path):
    kubelet, own = tmp_path / "kubelet.sock", tmp_path / "fpga-plugin-1-2.sock"

    def restart() -> None:
        kubelet.unlink()
        bind(kubelet)

    watching(tmp_path, lambda: bind(kubelet), lambda: bind(own), restart, own.unlink)


def test_a_directory_may_come_later_and_with_the_directories_above_it(tmp_path):
    path = tmp_path / "lib" / "kubelet" / "plugins"
    watching(
        path,
        lambda: path.mkdir(parents=True),
        lambda: bind(path / "kubelet.sock"),
        lambda: (tmp_path / "lib").rename(tmp_path / "old"),
        lambda: (tmp_path / "old").rename(tmp_path / "lib"),
        lambda: shutil.rmtree(path),
    )


def test_what_inotify_does_not_see_is_told_at_the_next_look(tmp_path, monkeypatch):
    monkeypatch.setattr(watcher.Watcher, "_matters", lambda *_: False)
    kubelet = tmp_path / "kubelet.sock"
    watching(tmp_path, lambda: bind(kubelet), kubelet.unlink, recheck=0.05)


def test_a_node_without_threads_left_still_finds_kubelet(tmp_path, monkeypatch):
    def no_thread(*_args) -> None:
        raise RuntimeError("can't start new thread")

    kubelet = tmp_path / "kubelet.sock"
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    watching(tmp_path, lambda: bind(kubelet), kubelet.unlink)


@pytest.mark.parametrize("what", ["add_watch", "__init__"])
def test_without_inotify_it_is_looked_at_all_the_time(tmp_path, monkeypatch, what):
    def none_left(*_args, **_kwargs):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(watcher.Inotify, what, none_left)
    monkeypatch.setattr("fpga_plugin.deviceplugin.watch._WITHOUT_INOTIFY", 0.05)
    kubelet = tmp_path / "kubelet.sock"
    watching(tmp_path, lambda: bind(kubelet), kubelet.unlink, lambda: bind(kubelet))


def test_a_listing_that_fails_once_does_not_end_the_watching(tmp_path, monkeypatch):
    kubelet = tmp_path / "kubelet.sock"
    monkeypatch.setattr("fpga_plugin.deviceplugin.watch._WITHOUT_INOTIFY", 0.05)
    refused = []

    def once(path, listdir=os.listdir):
        if not refused and str(path) == str(tmp_path):
            refused.append(path)
            raise OSError(errno.EMFILE, "Too many open files")
        return listdir(path)

    def restart() -> None:
        assert refused
        kubelet.unlink()
        bind(kubelet)

    def begin() -> None:
        monkeypatch.setattr(os, "listdir", once)
        bind(kubelet)

    watching(tmp_path, begin, restart, restart)
