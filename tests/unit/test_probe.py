"""The command of kubelet's exec probes, as the image runs it: without `site` and its packages."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fpga_plugin import observability, probe
from fpga_plugin.observability.http import Listener, text
from fpga_plugin.settings.settings import Settings

SCRIPT = Path(probe.__file__)


async def run(state_dir: Path, *arguments: str) -> tuple[int, str]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-IS", SCRIPT, *arguments,
        env=os.environ | {"FPGA_PLUGIN_STATE_DIR": str(state_dir)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await child.communicate()
    assert child.returncode is not None
    return child.returncode, said.decode()


def asked(directory: Path, response, word: str = "healthz") -> tuple[int, str]:
    async def answer(request):
        assert (request.method, request.path) == ("GET", f"/{word}")
        return response

    async def main():
        listener = Listener(answer)
        await listener.open_unix(str(directory), observability.SOCKET)
        try:
            return await run(directory, word)
        finally:
            await listener.close()

    return asyncio.run(main())


def test_the_probe_has_the_daemons_own_socket_path():
    assert Settings().state_dir == probe.STATE_DIR
    assert observability.SOCKET == probe.SOCKET


@pytest.mark.parametrize("word", ["healthz", "readyz"])
def test_a_good_answer_is_exit_code_0(tmp_path, word):
    assert asked(tmp_path, text(200, "ok"), word) == (0, "ok\n")


def test_a_bad_answer_is_exit_code_1_with_the_reason_for_kubelets_event(tmp_path):
    assert asked(tmp_path, text(503, "not registered\nnor that")) == (
        1,
        "not registered\nnor that\n",
    )


def test_a_state_directory_with_a_long_path_is_no_hindrance(tmp_path):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    assert asked(deep, text(200, "ok")) == (0, "ok\n")


def test_without_a_plugin_it_says_where_it_asked(tmp_path):
    code, said = asyncio.run(run(tmp_path, "healthz"))
    assert code == 1
    assert said == f"{tmp_path}/status.sock does not answer: No such file or directory\n"


@pytest.mark.parametrize("arguments", [(), ("status",), ("healthz", "x")])
def test_a_wrong_use_is_exit_code_2(tmp_path, arguments):
    code, said = asyncio.run(run(tmp_path, *arguments))
    assert code == 2
    assert said == "usage: fpga-plugin-probe healthz|readyz\n"
