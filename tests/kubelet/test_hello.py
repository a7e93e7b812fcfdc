"""The example program of docs/devices.md as a pod, in an image of its own.

The cards are simulated, and so a port's node is a stand-in that is no port: that the container may
open it is the kernel's own word, and what the drivers answer there comes from a library that the
image preloads (`tests/doubles/fake_nodes.c`). Against Linux' real drivers the same program runs in
the virtual machine (`tests/kernel/guest/test_examples.py`).
"""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_support import AFU, P0, request
from images import write_image
from machine import BUSYBOX, SCRATCH, STAY, Runtime, until
from namespace import ROOT
from node import Node, container

pytestmark = pytest.mark.needs("gcc")

IMAGE = "localhost/hello-fpga:1"
SHOWN = "d8424dc4a4a3c413f89e433683f9040b"
"""The accelerator behind the preloaded library's port, whatever the simulated one holds."""


def compiled(source: str, to: Path, *flags: str) -> Path:
    command = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", *flags, "-o", to, ROOT / source]
    subprocess.run(command, check=True)
    return to


def libraries(*programs: Path) -> dict[str, Path]:
    """What the programs load, by its path in an image."""
    told = subprocess.run(["ldd", *programs], check=True, capture_output=True, text=True).stdout
    found = re.findall(r"(/\S+) \(0x", told)
    return {path.lstrip("/"): Path(path) for path in found}


@pytest.fixture(scope="module")
def image(runtime: Runtime) -> str:
    program = compiled("deploy/examples/hello-fpga/hello_fpga.c", SCRATCH / "hello_fpga")
    nodes = compiled(
        "tests/doubles/fake_nodes.c", SCRATCH / "fake_nodes.so", "-shared", "-fPIC", "-ldl"
    )
    files = {"bin/busybox": BUSYBOX, "bin/hello_fpga": program, "lib/fake_nodes.so": nodes}
    archive = SCRATCH / "hello.tar"
    links = {f"bin/{tool}": "busybox" for tool in ("sh", "sleep")}
    files |= libraries(program, nodes)
    write_image(archive, IMAGE, files, links=links, command=["/bin/hello_fpga"])
    runtime.ctr("images", "import", str(archive))
    return IMAGE


def test_the_example_finds_the_region_that_its_pod_was_given(
    make_node: Callable[..., Node], image: str
) -> None:
    node = make_node("1x1")
    hello = 'exec 3<>"$FPGA_DEVICE_1" && LD_PRELOAD=/lib/fake_nodes.so hello_fpga;'
    pod = node.pod("hello", container(env=request(), command=hello + STAY, image=image))
    pod.until_running()
    assert node.afu(P0) == AFU
    said = f"/dev/dfl-port.0: accelerator {SHOWN}"
    until(lambda: pod.output() == said, "the program says which accelerator it found")


def test_without_a_region_the_example_says_what_to_ask_for(
    make_node: Callable[..., Node], image: str
) -> None:
    node = make_node("1x1")
    alone = container(command=f"hello_fpga 2>&1; {STAY}", resources={}, image=image)
    pod = node.pod("alone", alone)
    pod.until_running()
    until(lambda: "does the container ask for an FPGA" in pod.output(), "what is missing")
