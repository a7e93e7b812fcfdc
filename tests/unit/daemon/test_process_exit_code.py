"""How the daemon ends: 0 when it was told to, 1 when a task of its own failed."""

import asyncio
import os
import signal

import pytest

from fpga_plugin.commands import main as cli
from fpga_plugin.daemon import process as daemon_module
from fpga_plugin.daemon.process import Daemon
from fpga_plugin.settings.settings import load_settings


async def _fails() -> None:
    raise RuntimeError


async def _told_to_end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("work", "code"), [(_fails, 1), (_told_to_end, 0)])
def test_a_background_task_that_fails_is_no_success(monkeypatch, capsys, work, code):
    tasks = []

    async def serve(_settings) -> Daemon:
        made = Daemon(load_settings({}))
        tasks.append(asyncio.create_task(made._supervised(work())))
        return made

    def run(settings) -> int:
        # Not cli._run, which tunes the process that it has to itself: garbage, log.
        asyncio.run(daemon_module.run(settings))
        return 0

    monkeypatch.setattr(daemon_module, "_serve", serve)
    monkeypatch.setattr(cli, "_run", run)
    assert cli.main(["run"]) == code
    assert ("background task" in capsys.readouterr().err) == (code == 1)
