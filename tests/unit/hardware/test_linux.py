import errno
import os
import re
import struct
import termios
from pathlib import Path

import pytest

from fpga_plugin.hardware.kernel import Handle, Kernel
from fpga_plugin.hardware.linux import LinuxKernel


@pytest.fixture
def trees(tmp_path: Path) -> tuple[LinuxKernel, Path]:
    """A kernel whose trees are mounted somewhere else, and the folder that holds them."""
    (tmp_path / "sys/devices/pci0000:00/0000:3b:00.0").mkdir(parents=True)
    (tmp_path / "sys/devices/pci0000:00/0000:3b:00.0/numa_node").write_text("1\n")
    (tmp_path / "sys/class").mkdir()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dfl-port.0").touch()
    return LinuxKernel(str(tmp_path / "sys"), str(tmp_path / "dev") + "/"), tmp_path


CARD = "/sys/devices/pci0000:00/0000:3b:00.0"


@pytest.mark.parametrize(
    "target",
    [
        "../devices/pci0000:00/0000:3b:00.0",
        "../../sys/devices/pci0000:00/./0000:3b:00.0/",
        "{root}/sys/devices/pci0000:00/0000:3b:00.0",
    ],
)
def test_links_lead_to_paths_of_the_node(trees: tuple[LinuxKernel, Path], target: str):
    kernel, root = trees
    (root / "sys/class/card").symlink_to(target.format(root=root))
    assert kernel.realpath("/sys/class/card") == CARD
    assert kernel.realpath("/sys/class/card/numa_node") == f"{CARD}/numa_node"
    assert kernel.exists("/sys/class/card/numa_node")
    assert not kernel.exists("/sys/class/card/vendor")
    assert not kernel.exists("/sys/class/card/numa_node/x")


@pytest.mark.parametrize(
    "target",
    ["/etc/passwd", "../../../../../../etc/passwd", "nowhere", "/sys", "../../sysx", "../../dev"],
)
def test_a_link_out_of_the_trees_leads_nowhere(trees: tuple[LinuxKernel, Path], target: str):
    kernel, root = trees
    (root / "sysx").mkdir()
    (root / "sys/class/card").symlink_to(target)
    with pytest.raises(FileNotFoundError):
        kernel.realpath("/sys/class/card")
    assert not kernel.exists("/sys/class/card")


def test_links_in_a_circle_are_an_error(trees: tuple[LinuxKernel, Path]):
    kernel, root = trees
    (root / "sys/class/a").symlink_to("b")
    (root / "sys/class/b").symlink_to("a")
    with pytest.raises(OSError, match=re.escape(os.strerror(errno.ELOOP))):
        kernel.realpath("/sys/class/a")


def test_a_root_may_itself_be_a_link(trees: tuple[LinuxKernel, Path]):
    _, root = trees
    (root / "host").symlink_to(root)
    kernel = LinuxKernel(f"{root}/host/sys", f"{root}/host/dev")
    assert kernel.realpath(CARD) == CARD
    assert kernel.listdir("/sys/devices/pci0000:00") == ["0000:3b:00.0"]


def test_attributes_are_read_without_the_newline_and_written_as_they_are(
    trees: tuple[LinuxKernel, Path],
):
    kernel, root = trees
    kernel.write(f"{CARD}/numa_node", "0")
    assert (root / CARD[1:] / "numa_node").read_text().startswith("0")
    (root / CARD[1:] / "numa_node").write_text("two\nlines\n")
    assert kernel.read(f"{CARD}/numa_node") == "two\nlines"
    (root / CARD[1:] / "numa_node").write_bytes(b"\xff")
    assert kernel.read(f"{CARD}/numa_node") == "\ufffd"


def test_an_attribute_is_never_created(trees: tuple[LinuxKernel, Path]):
    kernel, _ = trees
    with pytest.raises(FileNotFoundError):
        kernel.write(f"{CARD}/sriov_numvfs", "0")


@pytest.mark.parametrize("path", ["/etc/passwd", "/sysx/a", "", "/"])
def test_only_the_two_trees_are_reached(trees: tuple[LinuxKernel, Path], path: str):
    kernel, _ = trees
    with pytest.raises(FileNotFoundError):
        kernel.read(path)


def test_nodes_are_opened_below_the_root_of_the_device_tree(trees: tuple[LinuxKernel, Path]):
    kernel, root = trees
    handle = kernel.open("/dev/dfl-port.0", os.O_RDWR)
    assert os.readlink(f"/proc/self/fd/{handle}") == str(root / "dev/dfl-port.0")
    assert not os.get_inheritable(handle)
    kernel.close(handle)
    with pytest.raises(OSError, match="Bad file descriptor"):
        kernel.close(handle)


def test_an_ioctl_gives_its_result_and_takes_a_struct_or_an_integer():
    kernel: Kernel = LinuxKernel()
    readable, writable = os.pipe()
    try:
        os.write(writable, b"abc")
        assert kernel.ioctl(Handle(readable), termios.FIONREAD, bytes(4)) == 0
        assert kernel.ioctl(Handle(readable), termios.FIONBIO, struct.pack("i", 1)) == 0
        assert not os.get_blocking(readable)
        with pytest.raises(OSError, match="Inappropriate") as caught:
            kernel.ioctl(Handle(readable), 0xB640, 0)
        assert caught.value.errno == errno.ENOTTY
    finally:
        os.close(readable)
        os.close(writable)


def test_the_boot_id_is_the_kernels():
    expected = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert LinuxKernel("/nowhere", "/nowhere").boot_id() == expected


def test_more_than_a_file_has_cannot_be_mapped(trees: tuple[LinuxKernel, Path]):
    kernel, root = trees
    (root / "sys/class/resource0").write_bytes(bytes(256))
    handle = kernel.open("/sys/class/resource0", os.O_RDWR)
    with pytest.raises(OSError, match=re.escape(os.strerror(errno.ENXIO))):
        kernel.map(handle, 4096)
    kernel.close(handle)
