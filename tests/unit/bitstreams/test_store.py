"""The store."""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from doubles import bitstreams
from doubles.bitstreams import HASH, aocx
from doubles.samples import SAMPLES, copy_samples
from doubles.xclbins import ALVEO, VADD

from fpga_plugin.bitstreams import files
from fpga_plugin.bitstreams.library import Library
from fpga_plugin.bitstreams.places import place_for
from fpga_plugin.bitstreams.reader import StoreReader
from fpga_plugin.bitstreams.store import Store
from fpga_plugin.bitstreams.trust import Trust
from fpga_plugin.errors import BitstreamError, BitstreamNotFoundError
from fpga_plugin.hardware.image import RawImage, Xclbin
from fpga_plugin.ids import parse_afu_id, parse_bitstream_id, parse_interface_id
from fpga_plugin.settings.settings import TrustMode

REPOSITORY = Path(__file__).parents[3]

INTERFACE = parse_interface_id("ce48969398f05f33946d560708be108a")
OTHER_INTERFACE = parse_interface_id("38d782e3b6125343b9342433e348ac4c")
AFU = parse_afu_id("18b79ffa2ee54aa096ef4230dafacb5f")
OTHER_AFU = parse_afu_id("850adcc26ceb4b229722d43375b61c66")
BITSTREAM = parse_bitstream_id(AFU)


def gbs(afu=AFU, interface=INTERFACE, tail: bytes = b"") -> bytes:
    return bitstreams.gbs(bytes.fromhex(afu) + tail, afu, interface=interface)


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "store"
    (path / INTERFACE).mkdir(parents=True)
    return path


@pytest.fixture
def place(root):
    return root / INTERFACE / f"{AFU}.gbs"


def library_of(root: Path, directory: Path) -> Library:
    return Library(
        str(root),
        directory=str(directory),
        limit=1 << 30,
        trust=Trust(str(root), TrustMode.ANY, None),
        guarded=False,
    )


@pytest.fixture
def library(root, tmp_path):
    return library_of(root, tmp_path / "verified")


@pytest.fixture
def store(library):
    return library.store


def refusal(library, bitstream_id=BITSTREAM) -> str:
    """Why the daemon does not take a file; whoever only looks is notified the same."""
    with pytest.raises(BitstreamError) as caught:
        library.load(INTERFACE, bitstream_id)
    with pytest.raises(BitstreamError) as looked:
        library.store.check(place_for(INTERFACE, bitstream_id, RawImage))
    assert str(caught.value) == str(looked.value)
    return str(caught.value)


def test_a_bitstream_is_loaded_with_its_ids_and_raw_image(library, place):
    place.write_bytes(gbs(tail=b"logic"))

    loaded = library.load(INTERFACE, BITSTREAM)

    assert (loaded.path, loaded.interface_id) == (str(place), INTERFACE)
    assert (loaded.bitstream_id, loaded.afu_id) == (AFU, AFU)
    assert loaded.image.data == bytes.fromhex(AFU) + b"logic"
    assert "logic" not in repr(loaded)


def test_a_loaded_image_does_not_change_with_the_file(library, place):
    place.write_bytes(gbs(tail=b"logic"))
    loaded = library.load(INTERFACE, BITSTREAM)
    place.write_bytes(b"")
    assert bytes(loaded.image.data).endswith(b"logic")


@pytest.mark.parametrize(
    "file",
    sorted(SAMPLES.glob("*/*.[gax]*")),
    ids=lambda path: f"{path.parent.name[:4]}-{path.stem}",
)
def test_every_sample_can_be_loaded_and_shows_its_afu_id_on_a_simulated_card(file, tmp_path):
    copy_samples(tmp_path / "samples")
    library = library_of(tmp_path / "samples", tmp_path)
    interface_id = parse_interface_id(file.parent.name)
    takes = Xclbin if file.suffix == ".xclbin" else RawImage
    named = None if file.stem == "blank" else parse_bitstream_id(file.stem)
    loaded = library.load(interface_id, named, takes)
    at = 0 if takes is RawImage else 416
    assert loaded.image.data[at : at + 16].hex() == loaded.afu_id
    assert loaded.afu_id != "d8424dc4a4a3c413f89e433683f9040b"  # what simulated cards power up with


def test_the_sample_store_has_what_is_documented():
    entries = Store(str(SAMPLES)).list()
    assert [entry.problem for entry in entries if entry.problem] == []
    assert {(e.interface_id, e.bitstream_id) for e in entries} == {
        (INTERFACE, AFU),
        (INTERFACE, OTHER_AFU),
        (INTERFACE, "583046af95883bdc653bc8fcede570d756ac30d9"),
        (INTERFACE, "f7df405cbd7acf7222f144b0b93acd18"),
        (INTERFACE, VADD),
        (INTERFACE, None),
        (OTHER_INTERFACE, "f7df405cbd7acf7222f144b0b93acd18"),
        (OTHER_INTERFACE, None),
        (ALVEO, VADD),
        (ALVEO, "c3d4e5f60718493a8b5c6d7e8f901a2b"),
        (ALVEO, None),
    }


def test_building_the_samples_gives_what_is_checked_in(tmp_path):
    subprocess.run(
        [sys.executable, SAMPLES / "sources" / "build.py", tmp_path],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    built = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.glob("*/*")}
    kept = {path.relative_to(SAMPLES): path.read_bytes() for path in SAMPLES.glob("*/*.[gax]*")}
    assert built == kept
    assert {path.suffix for path in kept} == {".gbs", ".aocx", ".xclbin"}
    assert (tmp_path / "manifest.json").read_bytes() == (SAMPLES / "manifest.json").read_bytes()


def test_a_missing_bitstream_is_not_found_and_the_message_names_its_path(library, place):
    with pytest.raises(BitstreamNotFoundError, match=str(place)) as caught:
        library.load(INTERFACE, BITSTREAM)
    # Nodes have no such program, and the plugin's pod reads the store only.
    assert caught.value.hint == (
        "check the bitstream id, or add the file to the store: `fpga-plugin bitstream install --dir"
        " STORE FILE`, then copy STORE to the node (docs/bitstreams.md)"
    )


def test_a_missing_interface_directory_is_said(library):
    with pytest.raises(BitstreamNotFoundError, match=f"interface id {OTHER_INTERFACE}"):
        library.load(OTHER_INTERFACE, BITSTREAM)


def test_a_missing_store_is_said(tmp_path):
    library = library_of(tmp_path / "nowhere", tmp_path / "verified")
    for call in (lambda: library.load(INTERFACE, BITSTREAM), library.store.list):
        with pytest.raises(BitstreamNotFoundError, match="no bitstream store") as caught:
            call()
        assert "FPGA_PLUGIN_BITSTREAM_DIR" in caught.value.hint


def test_a_file_for_another_interface_is_refused(library, place):
    place.write_bytes(gbs(interface=OTHER_INTERFACE))
    message = refusal(library)
    assert INTERFACE in message
    assert OTHER_INTERFACE in message


def test_a_file_with_another_afu_id_than_its_name_is_refused(library, place):
    place.write_bytes(gbs(afu=OTHER_AFU))
    assert f"has the AFU id {OTHER_AFU}" in refusal(library)


def test_an_aocx_file_is_named_by_its_hash_and_gives_the_image_inside(library, store, place):
    name = parse_bitstream_id(HASH)
    path = place.with_name(f"{HASH}.aocx")
    with pytest.raises(BitstreamNotFoundError, match=str(path)):
        library.load(INTERFACE, name)
    path.write_bytes(aocx())
    loaded = library.load(INTERFACE, name)
    assert (loaded.bitstream_id, loaded.afu_id) == (HASH, AFU)
    assert loaded.image.data[:16] == bytes.fromhex(AFU)
    (entry,) = store.list()
    assert (entry.problem, entry.bitstream_id) == (None, HASH)
    path.write_bytes(aocx(name=b"f" * 40))
    assert f"has the hash {'f' * 40}, not the one of its name" in refusal(library, name)
    assert "has the hash" in str(store.list()[0].problem)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (AFU, "aocx", "holds AOCX, and its name is that of GBS"),
        (HASH, "gbs", "holds GBS, and its name is that of AOCX"),
    ],
)
def test_a_file_of_another_format_than_its_name_is_refused(library, place, name, content, words):
    path = place.with_name(f"{name}.{'aocx' if name == HASH else 'gbs'}")
    path.write_bytes(aocx() if content == "aocx" else gbs())
    assert words in refusal(library, parse_bitstream_id(name))
    assert words in str(library.store.list()[0].problem)


@pytest.mark.parametrize("kind", ["fifo", "socket", "directory", "null"])
def test_what_is_no_regular_file_is_refused_without_waiting(
    library, store, place, kind, monkeypatch
):
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "socket":
        monkeypatch.chdir(place.parent)  # socket paths are short
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(place.name)
    elif kind == "directory":
        place.mkdir()
    else:
        place.symlink_to("/dev/null")
    assert "not a regular file" in refusal(library)
    assert "not a regular file" in str(store.list()[0].problem)


def test_links_within_the_store_are_followed_as_a_configmap_makes_them(library, root, store, place):
    (root / "..2024" / INTERFACE).mkdir(parents=True)
    (root / "..2024" / INTERFACE / place.name).write_bytes(gbs())
    (root / "..data").symlink_to("..2024")
    place.parent.rmdir()
    place.parent.symlink_to(f"..data/{INTERFACE}")

    assert library.load(INTERFACE, BITSTREAM).afu_id == AFU
    assert [entry.problem for entry in store.list()] == [None]


def test_a_store_that_is_itself_reached_by_a_link_works(root, place, tmp_path):
    place.write_bytes(gbs())
    (tmp_path / "link").symlink_to(root)
    assert (
        library_of(tmp_path / "link", tmp_path / "verified").load(INTERFACE, BITSTREAM).afu_id
        == AFU
    )


@pytest.mark.parametrize("linked", ["file", "directory"])
def test_links_out_of_the_store_are_refused(library, root, place, tmp_path, linked):
    outside = tmp_path / "store-outside"  # shares the store's name as a prefix
    outside.mkdir()
    (outside / place.name).write_bytes(gbs())
    if linked == "file":
        place.symlink_to(outside / place.name)
    else:
        place.parent.rmdir()
        place.parent.symlink_to(outside)
    assert "leads out of the store" in refusal(library)
    assert "leads out of the store" in str(library.store.list()[0].problem)


def test_links_that_lead_nowhere_or_in_circles_are_told_from_missing_files(library, place):
    place.symlink_to("nowhere.gbs")
    assert "leads nowhere" in refusal(library)
    place.unlink()
    place.symlink_to(place.name)
    assert "cannot be read" in refusal(library)


def test_a_file_above_the_limit_is_refused_unread(library, place):
    place.write_bytes(gbs())
    os.truncate(place, files.MAX_FILE_BYTES + 1)  # sparse
    assert f"at most {files.MAX_FILE_BYTES}" in refusal(library)


def test_an_unreadable_file_is_refused_with_the_reason(library, place, monkeypatch):
    place.write_bytes(gbs())

    def refuse(*_args, **_kwargs):  # tests may run as root, who may read everything
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("fpga_plugin.host.trusted_files.io.FileIO", refuse)
    assert "Permission denied" in refusal(library)


def test_the_blank_bitstream_may_have_any_afu_id(library, store, root):
    (root / INTERFACE / "blank.gbs").write_bytes(gbs(afu=OTHER_AFU))
    blank = library.load(INTERFACE, None)
    assert blank.afu_id == OTHER_AFU
    assert (
        blank.path
        == store.at(place_for(INTERFACE, None, RawImage))
        == str(root / INTERFACE / "blank.gbs")
    )


def test_no_blank_bitstream_is_no_error(library, tmp_path):
    nowhere = library_of(tmp_path / "nowhere", tmp_path / "verified")
    for of, interface_id in (
        (library, INTERFACE),
        (library, OTHER_INTERFACE),
        (nowhere, INTERFACE),
    ):
        assert asyncio.run(StoreReader(of).blank(interface_id)) is None


@pytest.mark.parametrize("content", [b"", b"x" * 100, gbs(interface=OTHER_INTERFACE)])
def test_a_blank_bitstream_that_cannot_be_used_is_an_error(library, root, content):
    (root / INTERFACE / "blank.gbs").write_bytes(content)
    with pytest.raises(BitstreamError):
        library.load(INTERFACE, None)


def test_the_list_shows_problems_and_passes_over_what_is_not_its_business(root, store, place):
    place.write_bytes(gbs())
    (root / INTERFACE / f"{OTHER_AFU}.gbs").write_bytes(b"broken")
    (root / INTERFACE / "mine.gbs").write_bytes(gbs())
    (root / INTERFACE / f"{AFU.upper()}.gbs").write_bytes(gbs())
    (root / INTERFACE / f"{'b' * 40}.aocx").write_bytes(b"\x7fELF")
    (root / INTERFACE / ".x.gbs.1.tmp").write_bytes(b"")
    (root / INTERFACE / "notes.txt").write_text("")
    (root / "README.md").write_text("")
    (root / "sources").mkdir()
    (root / "sources" / "a.gbs").write_bytes(b"")
    (root / OTHER_INTERFACE.upper()).mkdir()

    found = {os.path.basename(entry.path): entry for entry in store.list()}

    assert found.pop(place.name).problem is None
    problems = {name: str(entry.problem) for name, entry in found.items()}
    assert problems.keys() == {
        f"{OTHER_AFU}.gbs",
        "mine.gbs",
        f"{AFU.upper()}.gbs",
        f"{'b' * 40}.aocx",
        OTHER_INTERFACE.upper(),
    }
    assert "too short" in problems[f"{OTHER_AFU}.gbs"]
    assert "'mine'" in problems["mine.gbs"]
    assert f"rename the file to {AFU}.gbs" in problems[f"{AFU.upper()}.gbs"]
    assert "ELF header" in problems[f"{'b' * 40}.aocx"]
    assert f"rename the directory to {OTHER_INTERFACE}" in problems[OTHER_INTERFACE.upper()]
