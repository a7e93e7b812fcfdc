"""xclbin files in a store and on the command line: as the other kinds, by cards that take them."""

import argparse
import asyncio
import ctypes
import hashlib
import json
import os
import tracemalloc
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from doubles.bitstreams import gbs
from doubles.xclbins import ALVEO, VADD, axlf, kernel, metadata, partition, parts, xclbin

from fpga_plugin.bitstreams.library import Library
from fpga_plugin.bitstreams.places import place_for
from fpga_plugin.bitstreams.reader import StoreReader
from fpga_plugin.bitstreams.trust import Trust
from fpga_plugin.commands.bitstream import add_bitstream_parser, run_bitstream
from fpga_plugin.errors import BitstreamNotFoundError, NotPermittedError
from fpga_plugin.hardware.image import RawImage, Xclbin
from fpga_plugin.ids import AfuId, BitstreamId
from fpga_plugin.settings.settings import Settings, TrustMode

BLANK = AfuId("b1a2c3d4e5f60718293a4b5c6d7e8f90")
NAME = BitstreamId(VADD)
RELATIVE = f"{ALVEO}/{VADD}.xclbin"


@pytest.fixture
def root(tmp_path):
    (tmp_path / "store" / ALVEO).mkdir(parents=True, mode=0o755)
    return tmp_path / "store"


@pytest.fixture
def make(tmp_path, root):
    def make(mode: TrustMode = TrustMode.ANY, keys: str | None = None) -> Library:
        return Library(
            str(root),
            directory=str(tmp_path / "verified"),
            limit=1 << 30,
            trust=Trust(str(root), mode, keys, guarded=False),
            guarded=False,
        )

    return make


@pytest.fixture
def run(root, capsys):
    """Run the command; returns its exit code, output and error lines."""

    def run(*words: object) -> tuple[int, str, str]:
        parser = argparse.ArgumentParser(prog="fpga-plugin")
        add_bitstream_parser(
            parser.add_subparsers(required=True), Settings(bitstream_dir=str(root))
        )
        code = run_bitstream(parser.parse_args(["bitstream", *map(str, words)]))
        return (code, *capsys.readouterr())

    return run


def put(root: Path, relative: str, data: bytes) -> Path:
    path = root / relative
    path.write_bytes(data)
    path.chmod(0o644)
    return path


# ------------------------------------------------------------------ the daemon's side


def test_a_card_that_takes_xclbin_gets_the_whole_file_and_what_its_driver_is_told(make, root):
    data = xclbin()
    put(root, RELATIVE, data)
    loaded = make().load(ALVEO, NAME, Xclbin)
    assert (loaded.bitstream_id, loaded.afu_id, loaded.interface_id) == (VADD, VADD, ALVEO)
    assert loaded.image.data == data
    assert loaded.image.uuid == VADD
    assert [one.name for one in loaded.image.kernels] == ["vadd"]
    assert [bank.tag for bank in loaded.image.banks if bank.clearable] == ["HBM[0]", "PLRAM[0]"]
    assert (loaded.image.slot_size, loaded.image.dataflow) == (4096, False)
    assert (loaded.clock_frequency_high, loaded.clock_frequency_low) == (None, None)


def test_the_driver_reads_the_verified_copy_where_it_lies(make, root, tmp_path):
    put(root, RELATIVE, xclbin())
    data = make().load(ALVEO, NAME, Xclbin).image.data
    assert ctypes.string_at(ctypes.addressof(ctypes.c_char.from_buffer(data)), 7) == b"xclbin2"
    digest = hashlib.sha256(xclbin()).hexdigest()
    assert (tmp_path / "verified" / digest).read_bytes() == xclbin()


def test_a_file_of_hundreds_of_mebibytes_is_verified_in_little_memory(make, root):
    put(root, RELATIVE, xclbin(image=bytes(200 << 20)))
    library = make()
    tracemalloc.start()
    try:
        assert library.load(ALVEO, NAME, Xclbin).image.data.nbytes > 200 << 20
        assert library.load(ALVEO, NAME, Xclbin).image.uuid == VADD
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_the_blank_of_such_cards_is_an_xclbin(make, root):
    put(root, f"{ALVEO}/blank.xclbin", xclbin(BLANK))
    library = make()
    blank = library.load(ALVEO, None, Xclbin)
    assert (blank.afu_id, blank.bitstream_id) == (BLANK, BLANK)
    with pytest.raises(BitstreamNotFoundError, match=r"no bitstream .*blank\.gbs"):
        library.load(ALVEO, None)
    assert blank.path.endswith("/blank.xclbin")


def test_a_file_that_the_cards_driver_does_not_read_is_none_of_their_bitstreams(make, root):
    put(root, f"{ALVEO}/{VADD}.gbs", gbs(afu=VADD, interface=ALVEO))
    put(root, f"{ALVEO}/blank.gbs", gbs(afu=BLANK, interface=ALVEO))
    library = make()
    assert isinstance(library.load(ALVEO, NAME).image, RawImage)
    with pytest.raises(BitstreamNotFoundError, match=rf"no bitstream .*{VADD}\.xclbin"):
        library.load(ALVEO, NAME, Xclbin)
    with pytest.raises(BitstreamNotFoundError, match=r"no bitstream .*blank\.xclbin"):
        library.load(ALVEO, None, Xclbin)
    put(root, RELATIVE, xclbin())
    assert isinstance(library.load(ALVEO, NAME, Xclbin).image, Xclbin)
    assert isinstance(library.load(ALVEO, NAME).image, RawImage)


def test_a_name_of_forty_digits_is_no_xclbin(make):
    with pytest.raises(BitstreamNotFoundError, match=r"no name of so many digits.*xclbin files"):
        make().load(ALVEO, BitstreamId("a" * 40), Xclbin)


def test_a_verified_xclbin_is_served_from_its_copy_while_the_store_is_away(make, root):
    put(root, RELATIVE, xclbin())
    library = make()
    library.load(ALVEO, NAME, Xclbin)
    root.rename(root.with_name("away"))
    kept = library.kept(place_for(ALVEO, NAME, Xclbin))
    assert kept is not None
    assert kept.image.uuid == VADD


def test_a_reader_asks_for_the_file_of_the_cards_kind(make, root):
    put(root, RELATIVE, xclbin())
    put(root, f"{ALVEO}/blank.xclbin", xclbin(BLANK))

    async def read():
        reader = StoreReader(make())
        loaded = await reader.load(ALVEO, NAME, Xclbin)
        blank = await reader.blank(ALVEO, Xclbin)
        return loaded.afu_id, blank.afu_id, await reader.blank(ALVEO), reader.blank_path(ALVEO)

    found = asyncio.run(read())
    assert found == (VADD, BLANK, None, str(root / ALVEO / "blank.gbs"))


@pytest.mark.parametrize(
    ("relative", "data", "words"),
    [
        (RELATIVE, xclbin(BLANK), f"has the uuid {BLANK}, not the one of its name"),
        (RELATIVE, xclbin(interface="1" * 31 + "2"), "was built for interface id 1111"),
        (RELATIVE, gbs(afu=VADD, interface=ALVEO), "holds GBS, and its name is that of xclbin"),
        (RELATIVE, b"text", "no xclbin: 4 bytes"),
        (f"{ALVEO}/{VADD}.gbs", xclbin(), "holds xclbin, and its name is that of GBS"),
        (f"{ALVEO}/{'a' * 40}.xclbin", xclbin(), "40 hex digits do not name a file that ends in"),
        (f"{ALVEO}/blank.aocx", xclbin(), "`blank` does not name a file"),
        (f"{ALVEO}/blank.xclbin", xclbin(interface="1" * 31 + "2"), "was built for interface id"),
    ],
)
def test_a_file_that_is_not_what_its_path_says_is_refused(make, root, relative, data, words):
    put(root, relative, data)
    verdict = make().examine(relative)
    assert verdict is not None
    assert words in str(verdict.problem)
    (entry,) = make().store.list()
    assert words in str(entry.problem)


def test_what_is_not_trusted_is_not_used(make, root):
    put(root, RELATIVE, xclbin())
    with pytest.raises(NotPermittedError):
        make(TrustMode.DIGEST).load(ALVEO, NAME, Xclbin)


# ------------------------------------------------------------------ the command line


def test_a_file_is_installed_where_the_plugin_finds_it(run, root, make, tmp_path):
    file, blank = put(tmp_path, "v.xclbin", xclbin()), put(tmp_path, "e.xclbin", xclbin(BLANK))
    assert run("install", file)[0] == 0
    assert run("install", "--blank", blank)[0] == 0
    assert (root / RELATIVE).read_bytes() == xclbin()
    assert make().load(ALVEO, None, Xclbin).afu_id == BLANK
    assert "was there already" in run("install", file)[1]


def test_inspect_shows_kernels_and_which_memory_a_blank_clears(run, tmp_path):
    xml = metadata(
        kernel("vadd", swReset="true"), kernel("many", [(f"a{n}", n, n * 8, 8) for n in range(9)])
    )
    file = put(tmp_path, "v.xclbin", axlf(parts(xml=xml).values()))
    code, out, _ = run("inspect", file)
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert f"afu id {VADD}" in lines
    assert f"interface id {ALVEO}" in lines
    assert "platform name 'xilinx_u55c_gen3x16_xdma_base_3'" in lines
    assert (
        "kernel 'vadd', 0x1000 bytes of registers, software reset; arguments: 'in' 8 at 0x10,"
        " 'out' 8 at 0x1c, 'size' 4 at 0x28" in lines
    )
    assert any(line.startswith("kernel 'many'") and line.endswith("and 1 more") for line in lines)
    clears = "a scrub with this file as the blank clears it"
    assert f"memory 'HBM[0]', HBM, 268435456 bytes at 0x0: {clears}" in lines
    assert f"memory 'PLRAM[0]', DRAM, 131072 bytes at 0x8000000000: {clears}" in lines
    assert [line.split(":")[0] for line in lines if "leaves it as it is" in line] == [
        "memory 'HBM[1]', HBM"
    ]
    assert "memory 'HOST[0]', DRAM: no memory of the card with addresses" in lines
    assert f"section PARTITION_METADATA, {len(partition(ALVEO))} bytes" in lines


def test_inspect_for_scripts_has_the_same(run, tmp_path):
    file = put(tmp_path, "v.xclbin", xclbin())
    found = json.loads(run("inspect", "--json", file)[1])
    assert found["format"] == "xclbin"
    assert found["bitstream_id"] == found["afu_id"] == VADD
    assert (found["xrt_version"], found["slot_size"], found["dataflow"]) == ("2.19.0", 4096, False)
    assert found["kernels"][0]["arguments"][1] == {"name": "out", "offset": 28, "size": 8}
    bank = {"tag": "HBM[0]", "type": "HBM", "used": True, "on_card": True, "base": 0}
    assert found["memory_banks"][0] == {**bank, "size": 256 << 20, "clearable": True}
    assert found["sha256"] == hashlib.sha256(xclbin()).hexdigest()


def test_inspect_does_not_hold_the_file_in_memory(run, tmp_path):
    file = put(tmp_path, "v.xclbin", xclbin(image=bytes(100 << 20)))
    tracemalloc.start()
    try:
        assert run("inspect", file)[0] == 0
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_list_has_it_among_the_others(run, root):
    put(root, RELATIVE, xclbin())
    put(root, f"{ALVEO}/blank.xclbin", xclbin(BLANK))
    found = json.loads(run("list", "--json")[1])
    assert [(one["bitstream_id"], one["blank"]) for one in found] == [(VADD, False), (None, True)]
    assert found[0]["metadata"]["platform_name"] == "xilinx_u55c_gen3x16_xdma_base_3"
    assert f"{VADD}" in run("list")[1]


def test_it_is_signed_named_and_verified_as_the_others(run, root, make, tmp_path):
    put(root, RELATIVE, xclbin())
    put(root, f"{ALVEO}/blank.xclbin", xclbin(BLANK))
    key = Ed25519PrivateKey.generate()
    private = tmp_path / "private.pem"
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "ours.pem").write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    assert run("sign", "--key", private, root / RELATIVE)[0] == 0
    signed = make(TrustMode.SIGNED, str(keys))
    assert signed.load(ALVEO, NAME, Xclbin).image.uuid == VADD
    with pytest.raises(NotPermittedError, match="a blank bitstream's own signature"):
        signed.load(ALVEO, None, Xclbin)
    words = ("--alias", f"{RELATIVE}=vadd", "--interface-alias", f"{ALVEO}=u55c")
    assert run("sign", "--manifest", "--key", private, *words)[0] == 0
    library = make(TrustMode.SIGNED, str(keys))
    assert library.load(ALVEO, None, Xclbin).afu_id == BLANK
    assert library.trust.names().bitstreams == {(ALVEO, "vadd"): VADD}
    code, out, _ = run("verify", "--trust", "signed", "--keys", keys)
    assert code == 0
    assert out.count(": good (") == 2


def test_a_file_outside_a_store_is_signed_for_the_place_that_its_content_tells(run, tmp_path):
    file = put(tmp_path, "any name", xclbin())
    _, out, _ = run("sign", "--statement", file)
    assert f"path: {RELATIVE}\n" in out
    assert f"role: accelerator\ninterface id: {ALVEO}\n" in out


def test_it_is_removed_by_its_id(run, root):
    put(root, RELATIVE, xclbin())
    put(root, f"{ALVEO}/blank.xclbin", xclbin(BLANK))
    assert run("remove", ALVEO, VADD)[0] == 0
    assert run("remove", ALVEO, "blank")[0] == 0
    assert not (root / ALVEO).exists()


def test_of_two_files_of_one_id_none_is_removed(run, root):
    """Cards of one interface id take one kind; which of the two is wrong is the operator's word."""
    put(root, RELATIVE, xclbin())
    put(root, f"{ALVEO}/{VADD}.gbs", gbs(afu=VADD, interface=ALVEO))
    code, _, error = run("remove", ALVEO, VADD)
    assert (code, "are both there" in error) == (1, True)
    assert len(os.listdir(root / ALVEO)) == 2


def test_verify_says_what_is_wrong(run, root):
    path = put(root, RELATIVE, axlf(parts().values(), mode=0))
    code, _, error = run("verify", path)
    assert code == 1
    assert "its mode is 0, flat" in error
