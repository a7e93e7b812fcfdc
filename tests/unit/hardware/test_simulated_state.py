"""The simulated cards' state lies outside the daemon: it survives it, and follows the files."""

import ctypes
import errno
import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from fpga_plugin.hardware.simulated.kernel import SimulatedKernel
from fpga_plugin.hardware.simulated.slots import Slots, card_at
from fpga_plugin.ids import InterfaceId
from fpga_plugin.settings.settings import SimulatedGroup

INTERFACE = InterfaceId("ce48969398f05f33946d560708be108a")
OTHER_INTERFACE = InterfaceId("38d782e3b6125343b9342433e348ac4c")
FACTORY = "d8424dc4a4a3c413f89e433683f9040b"
REGION = "0000-10-00.0-p0"


def start(directory: Path, *groups, **options) -> SimulatedKernel:
    groups = groups or ((2, 2, INTERFACE),)
    options = {"sleep": lambda _: None} | options
    return SimulatedKernel(
        str(directory), tuple(SimulatedGroup(*group) for group in groups), **options
    )


def program(kernel, fme, port, image):
    buffer = ctypes.create_string_buffer(image, len(image))
    handle = kernel.open(f"/dev/dfl-fme.{fme}", os.O_RDWR)
    try:
        packed = struct.pack("<IIIIQ", 24, 0, port, len(image), ctypes.addressof(buffer))
        return kernel.ioctl(handle, 0xB680, packed)
    finally:
        kernel.close(handle)


def regions(directory):
    return json.loads((directory / "state.json").read_text())["regions"]


def addresses(kernel):
    return sorted(kernel.listdir("/sys/bus/pci/devices"))


def everything(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
    }


@pytest.mark.parametrize(
    ("index", "card"),
    [
        (0, "0000-10-00.0"),
        (1, "0000-11-00.0"),
        (239, "0000-ff-00.0"),
        (240, "0001-10-00.0"),
        (480, "0002-10-00.0"),
    ],
)
def test_card_ids_count_buses_10_to_ff_domain_after_domain(index, card):
    assert card_at(index) == card


def test_the_first_start_creates_all_cards(tmp_path):
    start(tmp_path / "deep" / "simulated")
    directory = tmp_path / "deep" / "simulated"
    assert sorted(os.listdir(directory / "cards")) == ["0000-10-00.0", "0000-11-00.0"]
    assert list(regions(directory)) == [
        "0000-10-00.0-p0",
        "0000-10-00.0-p1",
        "0000-11-00.0-p0",
        "0000-11-00.0-p1",
    ]
    assert (directory / "faults").is_dir()


def test_state_is_what_the_contract_says_and_nothing_that_moves(tmp_path):
    start(tmp_path)
    document = json.loads((tmp_path / "state.json").read_text())
    assert set(document) == {"regions"}
    assert document["regions"][REGION] == {
        "afu_id": FACTORY,
        "bound": True,
        "clock": 200,
        "fme": 0,
        "node": 0,
        "open": 0,
        "poisoned": False,
    }


def test_equal_states_are_equal_files(tmp_path):
    kernel = start(tmp_path)
    before = (tmp_path / "state.json").read_bytes()
    program(kernel, 1, 1, b"\x11" * 16)
    assert (tmp_path / "state.json").read_bytes() != before
    program(kernel, 1, 1, bytes.fromhex(FACTORY))
    kernel.close(kernel.open("/dev/dfl-port.0", os.O_RDWR))
    assert (tmp_path / "state.json").read_bytes() == before


def test_state_is_replaced_not_written_over(tmp_path):
    kernel = start(tmp_path)
    with open(tmp_path / "state.json", "rb") as old:
        text = old.read()
        program(kernel, 0, 0, b"\x11" * 16)
        old.seek(0)
        assert old.read() == text


def test_state_outlives_the_daemon_but_open_descriptors_do_not(tmp_path):
    kernel = start(tmp_path)
    program(kernel, 0, 0, b"\x11" * 16)
    kernel.write("/sys/class/fpga_region/region0/dfl-port.0/userclk/frequency", "50000")
    (tmp_path / "faults" / "0000-11-00.0-p1").write_text("pr-error")
    with pytest.raises(OSError, match="Input/output"):
        program(kernel, 1, 1, b"\x22" * 16)
    kernel.open("/dev/dfl-port.0", os.O_RDWR | os.O_EXCL)
    before = regions(tmp_path)
    assert before[REGION]["open"] == 1

    after_kernel = start(tmp_path)
    after = regions(tmp_path)
    assert after.pop(REGION) == before.pop(REGION) | {"open": 0}
    assert after == before
    assert after["0000-11-00.0-p1"]["poisoned"] is True
    after_kernel.close(after_kernel.open("/dev/dfl-port.0", os.O_RDWR | os.O_EXCL))


def test_unbound_cards_stay_so_over_a_restart(tmp_path):
    start(tmp_path).write("/sys/bus/pci/drivers/dfl-pci/unbind", "0000:10:00.0")
    kernel = start(tmp_path)
    assert not kernel.exists("/sys/bus/pci/devices/0000:10:00.0/driver")
    kernel.write("/sys/bus/pci/drivers/dfl-pci/bind", "0000:10:00.0")
    assert regions(tmp_path)[REGION]["node"] == 0


def test_a_deleted_state_is_a_power_cycle(tmp_path):
    kernel = start(tmp_path)
    before = regions(tmp_path)
    program(kernel, 0, 0, b"\x11" * 16)
    (tmp_path / "state.json").unlink()
    start(tmp_path)
    assert regions(tmp_path) == before


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"regions": []}', '{"regions": {"0000-10-00.0-p0": 3}}', "\xff"]
)
def test_a_broken_state_is_a_power_cycle_too(tmp_path, text):
    start(tmp_path)
    before = regions(tmp_path)
    (tmp_path / "state.json").write_text(text, encoding="latin-1")
    start(tmp_path)
    assert regions(tmp_path) == before


def test_a_state_with_only_an_afu_id_is_enough(tmp_path):
    start(tmp_path)
    (tmp_path / "state.json").write_text(
        json.dumps({"regions": {REGION: {"afu_id": "11" * 16, "clock": "x", "node": -3}}})
    )
    start(tmp_path)
    assert regions(tmp_path)[REGION]["afu_id"] == "11" * 16
    assert regions(tmp_path)[REGION]["clock"] == 200
    assert sorted(state["node"] for state in regions(tmp_path).values()) == [0, 1, 2, 3]


def test_unplugging_loses_the_configuration(tmp_path):
    kernel = start(tmp_path)
    program(kernel, 0, 0, b"\x11" * 16)
    (tmp_path / "faults" / REGION).write_text("pr-error")
    with pytest.raises(OSError, match="Input/output"):
        program(kernel, 0, 0, b"\x22" * 16)
    card = tmp_path / "cards" / "0000-10-00.0"
    card.unlink()
    assert addresses(kernel) == ["0000:11:00.0"]
    assert REGION not in regions(tmp_path)
    card.touch()
    assert addresses(kernel) == ["0000:10:00.0", "0000:11:00.0"]
    assert regions(tmp_path)[REGION]["afu_id"] == FACTORY
    assert regions(tmp_path)[REGION]["poisoned"] is False


def test_every_way_into_an_unplugged_card_fails_without_an_event(tmp_path):
    kernel = start(tmp_path)
    port = kernel.realpath("/sys/class/fpga_region/region0/dfl-port.0")
    held = kernel.open("/dev/dfl-port.1", os.O_RDWR)
    fme = kernel.open("/dev/dfl-fme.0", os.O_RDWR)
    (tmp_path / "cards" / "0000-10-00.0").unlink()
    with pytest.raises(FileNotFoundError):
        kernel.read(f"{port}/afu_id")
    assert not kernel.exists(port)
    assert not kernel.exists("/sys/bus/pci/devices/0000:10:00.0")
    with pytest.raises(OSError, match=f"Errno {errno.ENXIO}]"):
        kernel.open("/dev/dfl-port.0", os.O_RDWR)
    for handle in (held, fme):
        with pytest.raises(OSError, match=f"Errno {errno.EINVAL}]"):
            kernel.ioctl(handle, 0xB640, 0)
        kernel.close(handle)


def test_a_pr_whose_card_is_unplugged_fails_and_leaves_nothing(tmp_path):
    kernel = start(tmp_path, sleep=lambda _: (tmp_path / "cards" / "0000-10-00.0").unlink())
    with pytest.raises(OSError, match=f"Errno {errno.EINVAL}]"):
        program(kernel, 0, 0, b"\x11" * 16)
    assert REGION not in regions(tmp_path)


def test_a_card_put_back_during_its_pr_does_not_get_that_image(tmp_path):
    card = tmp_path / "cards" / "0000-10-00.0"

    def replug(_):
        card.unlink()
        kernel.listdir("/sys/class/fpga_region")
        card.touch()

    kernel = start(tmp_path, sleep=replug)
    with pytest.raises(OSError, match=f"Errno {errno.EINVAL}]"):
        program(kernel, 0, 0, b"\x11" * 16)
    kernel.listdir("/sys/class/fpga_region")
    assert regions(tmp_path)[REGION]["afu_id"] == FACTORY


def test_a_card_replaced_between_two_looks_is_another_card(tmp_path):
    kernel = start(tmp_path)
    program(kernel, 0, 0, b"\x11" * 16)
    card = tmp_path / "cards" / "0000-10-00.0"
    (tmp_path / "cards" / "new").touch()
    os.rename(tmp_path / "cards" / "new", card)
    assert len(addresses(kernel)) == 2
    assert regions(tmp_path)[REGION]["afu_id"] == FACTORY


def test_a_removal_that_was_seen_counts_even_if_the_new_file_has_the_old_inode(tmp_path):
    kernel = start(tmp_path)
    program(kernel, 0, 0, b"\x11" * 16)
    # What is left of a quick unlink and create on a file system that uses inodes again at once.
    (tmp_path / "cards" / "0000-10-00.0").chmod(0o600)
    assert kernel.removed("0000-10-00.0") == "0000-10-00.0"
    addresses(kernel)
    assert regions(tmp_path)[REGION]["afu_id"] == FACTORY


def test_a_removal_during_a_look_counts_at_the_next(tmp_path, monkeypatch):
    kernel = start(tmp_path)
    program(kernel, 0, 0, b"\x11" * 16)
    look = Slots.look

    def swapped_meanwhile(slots, card):
        found = look(slots, card)
        monkeypatch.undo()
        (tmp_path / "cards" / "0000-10-00.0").chmod(0o600)  # as above
        kernel.removed("0000-10-00.0")
        return found

    monkeypatch.setattr(Slots, "look", swapped_meanwhile)
    addresses(kernel)
    addresses(kernel)
    assert regions(tmp_path)[REGION]["afu_id"] == FACTORY


def test_touching_and_writing_a_cards_file_changes_nothing(tmp_path):
    kernel = start(tmp_path)
    program(kernel, 0, 0, b"\x11" * 16)
    before = (tmp_path / "state.json").read_bytes()
    (tmp_path / "cards" / "0000-10-00.0").write_text("whatever")
    (tmp_path / "cards" / "0000-10-00.0").touch()
    addresses(kernel)
    start(tmp_path)
    assert (tmp_path / "state.json").read_bytes() == before


def test_a_card_unplugged_while_no_daemon_runs_stays_so(tmp_path):
    start(tmp_path)
    (tmp_path / "cards" / "0000-10-00.0").unlink()
    assert addresses(start(tmp_path)) == ["0000:11:00.0"]
    assert addresses(start(tmp_path, (3, 2, INTERFACE))) == ["0000:11:00.0", "0000:12:00.0"]
    assert not (tmp_path / "cards" / "0000-10-00.0").exists()


def test_a_card_put_back_while_no_daemon_runs_is_fresh(tmp_path):
    program(start(tmp_path), 0, 0, b"\x11" * 16)
    (tmp_path / "cards" / "0000-10-00.0").unlink()
    start(tmp_path)
    (tmp_path / "cards" / "0000-10-00.0").touch()
    start(tmp_path)
    assert regions(tmp_path)[REGION]["afu_id"] == FACTORY


def test_numbers_outlive_the_daemon_and_go_to_the_next_card_that_comes(tmp_path):
    kernel = start(tmp_path)
    (tmp_path / "cards" / "0000-10-00.0").unlink()
    (tmp_path / "cards" / "0000-20-00.0").touch()
    addresses(kernel)
    (tmp_path / "cards" / "0000-10-00.0").touch()
    addresses(kernel)
    nodes = {region: state["node"] for region, state in regions(tmp_path).items()}
    assert nodes == {
        "0000-20-00.0-p0": 0,
        "0000-20-00.0-p1": 1,
        "0000-11-00.0-p0": 2,
        "0000-11-00.0-p1": 3,
        "0000-10-00.0-p0": 4,
        "0000-10-00.0-p1": 5,
    }
    kernel = start(tmp_path)
    assert {region: state["node"] for region, state in regions(tmp_path).items()} == nodes
    kernel.close(kernel.open("/dev/dfl-port.4", os.O_RDWR))


def test_a_card_outside_the_setting_has_the_last_groups_shape(tmp_path):
    kernel = start(tmp_path, (1, 1, INTERFACE), (1, 3, OTHER_INTERFACE))
    (tmp_path / "cards" / "0000-3b-00.1").touch()
    function = "/sys/bus/pci/devices/0000:3b:00.1"
    assert "0000:3b:00.1" in addresses(kernel)
    (base,) = kernel.listdir(f"{function}/fpga_region")
    assert kernel.read(f"{function}/fpga_region/{base}/dfl-fme.2/ports_num") == "3"
    compat = [
        kernel.read(f"/sys/class/fpga_region/{name}/compat_id")
        for name in kernel.listdir("/sys/class/fpga_region")
        if "0000:3b:00.1" in kernel.realpath(f"/sys/class/fpga_region/{name}") and name != base
    ]
    assert compat == [OTHER_INTERFACE] * 3


@pytest.mark.parametrize(
    "name", ["README", ".hidden", "0000:10:00.0", "0000-3B-00.0", "0000-10-00.0-p0", "00"]
)
def test_names_that_are_no_card_ids_are_ignored(tmp_path, name):
    kernel = start(tmp_path)
    (tmp_path / "cards" / name).touch()
    assert addresses(kernel) == ["0000:10:00.0", "0000:11:00.0"]
    assert kernel.card(name) is None


def test_a_reader_writes_nothing_and_needs_no_directory(tmp_path):
    directory = tmp_path / "none"
    kernel = start(directory, owner=False)
    assert addresses(kernel) == ["0000:10:00.0", "0000:11:00.0"]
    assert kernel.read("/sys/class/fpga_region/region0/dfl-port.0/afu_id") == FACTORY
    assert not directory.exists()


def test_a_reader_shows_what_is_there_and_changes_none_of_it(tmp_path):
    owner = start(tmp_path)
    program(owner, 0, 0, b"\x11" * 16)
    owner.open("/dev/dfl-port.0", os.O_RDWR)
    (tmp_path / "cards" / "0000-11-00.0").unlink()
    (tmp_path / "cards" / "0000-20-00.0").touch()
    before = everything(tmp_path)
    reader = start(tmp_path, (3, 2, INTERFACE), owner=False)
    assert addresses(reader) == ["0000:10:00.0", "0000:12:00.0", "0000:20:00.0"]
    port = "/sys/class/fpga_region/region0/dfl-port.0"
    assert reader.read(f"{port}/afu_id") == "11" * 16
    for node in ("/dev/dfl-port.0", "/dev/dfl-fme.0"):
        with pytest.raises(PermissionError):
            reader.open(node, os.O_RDWR)
    with pytest.raises(PermissionError):
        reader.write(f"{port}/userclk/frequency", "100000")
    assert everything(tmp_path) == before


KILLED_IN_PR = """
import ctypes, os, signal, struct, sys
from fpga_plugin.settings.settings import SimulatedGroup
from fpga_plugin.hardware.simulated.kernel import SimulatedKernel
from fpga_plugin.ids import InterfaceId

group = SimulatedGroup(1, 1, InterfaceId("ce48969398f05f33946d560708be108a"))
kernel = SimulatedKernel(
    sys.argv[1], (group,), sleep=lambda _: os.kill(os.getpid(), signal.SIGKILL)
)
kernel.open("/dev/dfl-port.0", os.O_RDWR | os.O_EXCL)
buffer = ctypes.create_string_buffer(b"\\x11" * 16, 16)
fme = kernel.open("/dev/dfl-fme.0", os.O_RDWR)
kernel.ioctl(fme, 0xB680, struct.pack("<IIIIQ", 24, 0, 0, 16, ctypes.addressof(buffer)))
"""


@pytest.mark.parametrize(
    ("word", "afu_id", "poisoned"), [("", "11" * 16, False), ("pr-error", FACTORY, True)]
)
def test_a_pr_that_the_daemons_death_interrupts_completes(tmp_path, word, afu_id, poisoned):
    (tmp_path / "faults").mkdir()
    if word:
        (tmp_path / "faults" / REGION).write_text(word)
    process = subprocess.run(
        [sys.executable, "-c", KILLED_IN_PR, str(tmp_path)], check=False, timeout=60
    )
    assert process.returncode == -signal.SIGKILL
    state = regions(tmp_path)[REGION]
    assert (state["afu_id"], state["poisoned"]) == (afu_id, poisoned)
    assert not (tmp_path / "faults" / REGION).exists()
    kernel = start(tmp_path, (1, 1, INTERFACE))
    kernel.close(kernel.open("/dev/dfl-port.0", os.O_RDWR | os.O_EXCL))


def test_a_state_that_cannot_be_written_fails_the_pr_before_it_begins(tmp_path):
    kernel = start(tmp_path)
    fme = kernel.open("/dev/dfl-fme.0", os.O_RDWR)
    (tmp_path / ".state.json.tmp").mkdir()
    buffer = ctypes.create_string_buffer(b"\x11" * 16, 16)
    packed = struct.pack("<IIIIQ", 24, 0, 0, 16, ctypes.addressof(buffer))
    with pytest.raises(IsADirectoryError):
        kernel.ioctl(fme, 0xB680, packed)
    (tmp_path / ".state.json.tmp").rmdir()
    assert kernel.read("/sys/class/fpga_region/region0/dfl-port.0/afu_id") == FACTORY
    assert kernel.ioctl(fme, 0xB680, packed) == 0
