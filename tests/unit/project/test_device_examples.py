"""The programs of docs/devices.md find their device, against nodes that a preloaded library has."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

from fpga_plugin.allocation.calls import AllocateAnswer
from fpga_plugin.hardware.grant import Grant
from fpga_plugin.ids import RegionId, Resource

EXAMPLES = ROOT / "deploy/examples/hello-fpga"
PAGE = (ROOT / "docs/devices.md").read_text(encoding="utf-8")
REGION = RegionId("0000-3b-00.0-p0")
RESOURCE = Resource.parse("fpga.intel.com/region-ce48969398f05f33946d560708be108a")
AFU = "d8424dc4a4a3c413f89e433683f9040b"

PORT = Grant(("/dev/dfl-port.0",))
GROUPS = Grant(
    ("/dev/vfio/7", "/dev/vfio/8"),
    ("/dev/vfio/vfio",),
    env={"FPGA_FUNCTIONS_0000_3B_00_0_P0": "0000:3b:00.5,0000:3b:00.6"},
)

pytestmark = pytest.mark.needs("gcc")


def compiled(source: Path, to: Path, *flags: str) -> Path:
    command = ["gcc", "-O1", "-Wall", "-Wextra", "-Werror", *flags, "-o", str(to), str(source)]
    subprocess.run(command, check=True)
    return to


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("nodes") / "fake_nodes.so"
    return compiled(ROOT / "tests/doubles/fake_nodes.c", to, "-shared", "-fPIC", "-ldl")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(EXAMPLES / "hello_fpga.c", tmp_path_factory.mktemp("hello") / "hello_fpga")


def run(nodes: Path, *command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], "LD_PRELOAD": str(nodes), **env}
    return subprocess.run(
        [str(word) for word in command], env=environ, capture_output=True, text=True, check=False
    )


def given(grant: Grant) -> dict[str, str]:
    return dict(AllocateAnswer.of(RESOURCE, {REGION: grant}).envs)


@pytest.mark.parametrize("grant", [PORT, GROUPS], ids=str)
def test_the_c_program_reads_its_accelerators_id(nodes, program, grant):
    done = run(nodes, program, **given(grant))
    assert (done.returncode, done.stdout) == (0, f"{grant}: accelerator {AFU}\n"), done.stderr


def test_the_python_program_reads_its_accelerators_id(nodes):
    done = run(nodes, sys.executable, EXAMPLES / "hello_fpga.py", **given(PORT))
    assert (done.returncode, done.stdout) == (0, f"{PORT}: accelerator {AFU}\n"), done.stderr


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({}, "FPGA_DEVICE_1 is not set"),
        (given(Grant(("/dev/dfl-port.1",))), "/dev/dfl-port.1: No such file"),
        (given(Grant(GROUPS.nodes)), "no FPGA_FUNCTIONS_<DEVICE ID> belongs to /dev/vfio/7"),
        (given(GROUPS) | {"FPGA_FUNCTIONS_0000_3B_00_0_P0": "0000:3b:00.6"}, "0000:3b:00.6: No"),
    ],
    ids=["nothing", "another port", "no functions", "another function"],
)
def test_the_c_program_says_what_is_missing(nodes, program, env, said):
    done = run(nodes, program, **env)
    assert done.returncode == 1
    assert said in done.stderr
    assert not done.stdout


def test_the_page_shows_what_the_programs_do():
    shown = dict(re.findall(r"(?s)```(\w+)\n(.*?)```", PAGE)[:2])
    assert shown["c"] in (EXAMPLES / "hello_fpga.c").read_text(encoding="utf-8")
    assert shown["python"] in (EXAMPLES / "hello_fpga.py").read_text(encoding="utf-8")
