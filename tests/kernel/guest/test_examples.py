"""The programs of docs/devices.md, on the real driver's port: they read what the card has there."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import rack

from fpga_plugin.allocation.calls import AllocateAnswer
from fpga_plugin.hardware.dfl.backend import DflBackend
from fpga_plugin.hardware.image import RawImage
from fpga_plugin.hardware.linux import LinuxKernel
from fpga_plugin.hardware.model import Card
from fpga_plugin.ids import CardId, Resource

pytestmark = pytest.mark.skipif(not rack.DEBUGFS.exists(), reason="the guest's: make test-kernel")

EXAMPLES = Path(__file__).parents[3] / "deploy/examples/hello-fpga"
CARD = CardId(rack.daemon_support.CARD)
RESOURCE = Resource.parse(f"fpga.intel.com/region-{rack.daemon_support.ID}")
AFU = "00112233445566778899aabbccddeeff"


@pytest.fixture
def backend() -> Iterator[DflBackend]:
    rack.lay_out("1x3")
    yield DflBackend(LinuxKernel("/sys", "/dev"))
    for card in rack.cards():
        rack.unplug(card)


def compiled(tmp_path: Path) -> list[str]:
    program = tmp_path / "hello_fpga"
    subprocess.run(["gcc", "-o", str(program), str(EXAMPLES / "hello_fpga.c")], check=True)
    return [str(program)]


@pytest.mark.parametrize("language", [pytest.param("c", marks=pytest.mark.needs("gcc")), "python"])
def test_a_program_finds_its_region_and_reads_the_accelerators_id(backend, tmp_path, language):
    card = backend.scan_card(CARD)
    assert isinstance(card, Card)
    region = card.regions[1]
    with backend.open_port(card, region) as port:
        port.program(RawImage(bytes.fromhex(AFU) + bytes(1000)))
    command = [sys.executable, str(EXAMPLES / "hello_fpga.py")]
    if language == "c":
        command = compiled(tmp_path)
    env = AllocateAnswer.of(RESOURCE, {region.id: region.grant}).envs
    done = subprocess.run(
        command,
        env={"PATH": os.environ["PATH"], **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"{region.grant}: accelerator {AFU}\n"), (
        done.stderr
    )
