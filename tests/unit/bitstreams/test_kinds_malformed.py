"""Every way in which a bitstream's file can be wrong has a message that says which one it is."""

import gzip
import hashlib
import os
import stat
from pathlib import Path

import pytest
from doubles.bitstreams import AFU, GBS, HASH, INTERFACE, aocx
from doubles.bitstreams import gbs as whole_gbs
from malformed import FILES, gbs

from fpga_plugin.bitstreams.aocx import AOCX
from fpga_plugin.bitstreams.files import MAX_FILE_BYTES
from fpga_plugin.bitstreams.gbs import GBS as GBS_KIND
from fpga_plugin.bitstreams.kinds import KINDS, read_data
from fpga_plugin.bitstreams.library import Library
from fpga_plugin.bitstreams.manifest import ManifestFile, write_manifest
from fpga_plugin.bitstreams.trust import Trust
from fpga_plugin.errors import BitstreamError, FpgaPluginError
from fpga_plugin.ids import parse_afu_id, parse_interface_id
from fpga_plugin.settings.settings import TrustMode

# One a line. `...` at the end: how Python, msgspec or zlib says the rest differs by their versions.
MESSAGES = dict(
    line.split("|", 1)
    for line in Path(__file__).with_name("malformed.txt").read_text(encoding="utf-8").splitlines()
)
MESSAGES = {name.strip(): message.removeprefix(" ") for name, message in MESSAGES.items()}

HINTS = {
    "legacy": "pack its image again with OPAE's packager",
    "pacsign": "take the GBS file from before the signing",
    "pacsign in an aocx": "take the GBS file from before the signing",
    "xclbin": "take the file from before `xclbinutil --private-key`",
    "gzipped gbs": "unpack it with `gunzip`",
    "gbs zipped twice": "unpack it with `gunzip`",
    "raw image": "pack it with OPAE's packager",
    "web page": "an error page of a server",
    "pointer of git lfs": "the pointer of a file in Git LFS",
    "image is pacsign": "pack the raw image (RBF) again",
    "emulator build": "emulator and library builds have no image",
    "interface all ones": "no card has it",
    "accelerator id all ones": "give the accelerator an id of its own",
    "gbs cut in the middle": "the file is cut off or damaged",
}


def test_there_are_more_than_a_hundred_and_each_has_its_message():
    assert FILES.keys() == MESSAGES.keys()
    assert len(FILES) > 100
    assert len(set(FILES.values())) == len(FILES)


def check(message: str, expected: str) -> None:
    if expected.endswith("..."):
        assert message.startswith(expected.removesuffix("..."))
    else:
        assert message == expected


def clean(error: FpgaPluginError) -> None:
    """Short, one line, and for any terminal."""
    assert len(str(error).encode()) < 1024
    assert str(error).isprintable()


@pytest.mark.parametrize("name", FILES)
def test_a_malformed_file_is_refused_with_what_is_wrong(name):
    with pytest.raises(BitstreamError) as caught:
        read_data(FILES[name], "f")
    clean(caught.value)
    check(caught.value.message, f"f: {MESSAGES[name]}")
    assert HINTS.get(name, "") in caught.value.hint


@pytest.fixture
def make(tmp_path):
    """A store with one directory, and the library of it."""

    def make(mode: TrustMode = TrustMode.ANY, keys: str | None = None) -> Library:
        root = str(tmp_path / "store")
        os.makedirs(os.path.join(root, INTERFACE), mode=0o755, exist_ok=True)
        return Library(
            root,
            directory=str(tmp_path / "verified"),
            limit=1 << 30,
            trust=Trust(root, mode, keys),
            guarded=True,
        )

    return make


def put(library: Library, name: str | bytes, content: bytes) -> str:
    path = os.path.join(library.store.root.encode(), INTERFACE.encode(), os.fsencode(name))
    with open(path, "wb") as file:
        file.write(content)
        os.fchmod(file.fileno(), 0o644)
    return os.fsdecode(path)


def refusal(library: Library, file: str) -> FpgaPluginError:
    """What is wrong with a file of the directory."""
    verdict = library.examine(f"{INTERFACE}/{file}")
    assert verdict is not None
    assert verdict.problem is not None
    return verdict.problem


def test_the_store_says_the_same_of_a_file_as_the_reader(make):
    library = make()
    for name, content in FILES.items():
        kind = next((kind for kind in KINDS if content.startswith(kind.magic)), GBS_KIND)
        file = f"{HASH if kind is AOCX else AFU}.{kind.ending}"
        path = put(library, file, content)
        check(refusal(library, file).message, f"{path}: {MESSAGES[name]}")
        os.unlink(path)
    assert [
        entry for entry in os.listdir(library.store.root + "/../verified") if len(entry) == 64
    ] == []


OTHER = parse_afu_id("b" * 32)
OTHER_INTERFACE = parse_interface_id("c" * 32)


def other_gbs(interface=INTERFACE, afu=AFU) -> bytes:
    return whole_gbs(b"logic", afu, interface=interface)


NAMES = {
    "x.gbs": "the name 'x' is not 32 hex digits, nor the 8-4-4-4-12 form, nor 40 hex digits",
    f"{AFU[:-1]}.gbs": f"the name '{AFU[:-1]}' is not 32 hex digits",
    f"{AFU}0.gbs": f"the name '{AFU}0' is not 32 hex digits",
    f"{AFU.upper()}.gbs": "bitstream ids are written as lower-case hex digits without dashes",
    "18b79ffa-2ee5-4aa0-96ef-4230dafacb5f.gbs": "bitstream ids are written as lower-case hex",
    f"{AFU} .gbs": f"the name '{AFU} ' is not 32 hex digits",
    f"{AFU}\n.gbs": f"the name '{AFU}?' is not 32 hex digits",
    "\x1b[31m.gbs": "the name '?[31m' is not 32 hex digits",
    "\u0661" * 32 + ".gbs": f"the name '{'?' * 32}' is not 32 hex digits",
    b"\xff\xfe.gbs": "the name '??' is not 32 hex digits",
    "a" * 250 + ".gbs": f"the name '{'a' * 64}'... is not 32 hex digits",
    f"{HASH}.gbs": "40 hex digits do not name a file that ends in .gbs",
    f"{AFU}.aocx": "32 hex digits do not name a file that ends in .aocx",
    "blank.aocx": "`blank` does not name a file that ends in .aocx",
    f"{AFU}.gbs.gbs": f"the name '{AFU}.gbs' is not 32 hex digits",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_file_name_that_no_store_has_is_refused_with_what_is_wrong(make, name):
    library = make()
    path = put(library, name, GBS)
    (entry,) = library.store.list(read=False)
    assert entry.path == path
    assert entry.problem is not None
    told = refusal(library, os.path.basename(path))
    assert NAMES[name] in told.message
    assert len(str(told).encode()) < 1024


CONTENTS = {
    "another accelerator's": (f"{AFU}.gbs", other_gbs(afu=OTHER), f"has the AFU id {OTHER}"),
    "another card's": (
        f"{AFU}.gbs",
        other_gbs(interface=OTHER_INTERFACE),
        f"was built for interface id {OTHER_INTERFACE}, not {INTERFACE}",
    ),
    "another card's blank": (
        "blank.gbs",
        other_gbs(interface=OTHER_INTERFACE),
        f"was built for interface id {OTHER_INTERFACE}, not {INTERFACE}",
    ),
    "another hash's": (f"{'a' * 40}.aocx", aocx(), f"has the hash {HASH}, not the one of its name"),
    "another card's in an aocx": (
        f"{HASH}.aocx",
        aocx(gzip.compress(other_gbs(interface=OTHER_INTERFACE), mtime=0)),
        f"was built for interface id {OTHER_INTERFACE}, not {INTERFACE}",
    ),
    "gbs in an aocx's place": (f"{HASH}.aocx", GBS, "holds GBS, and its name is that of AOCX"),
    "aocx in a gbs's place": (f"{AFU}.gbs", aocx(), "holds AOCX, and its name is that of GBS"),
    "aocx as blank": ("blank.gbs", aocx(), "holds AOCX, and its name is that of GBS"),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_a_file_in_anothers_place_is_refused_with_what_it_is(make, name):
    file, content, expected = CONTENTS[name]
    library = make()
    path = put(library, file, content)
    assert refusal(library, file).message.startswith(f"{path}: {expected}")


def _link(target: str):
    return lambda path: os.symlink(target, path)


def _mode(mode: int):
    def make(path: str) -> None:
        with open(path, "wb") as file:
            file.write(GBS)
            os.fchmod(file.fileno(), mode)

    return make


def _sparse(path: str) -> None:
    with open(path, "wb") as file:
        os.fchmod(file.fileno(), 0o644)
        file.truncate(MAX_FILE_BYTES + 1)


INODES = {
    "a directory": (os.mkdir, "a directory, not a regular file"),
    "a fifo": (os.mkfifo, "a fifo, not a regular file"),
    "a socket": (lambda path: os.mknod(path, stat.S_IFSOCK | 0o644), "a socket, not a regular"),
    "a device": (_link("/dev/zero"), "a character device, not a regular file"),
    "a link out of the store": (_link("/etc/passwd"), "a symbolic link leads out of the store"),
    "a link far up": (_link("../" * 40 + "etc/passwd"), "a symbolic link leads out of the store"),
    "a link by way of /proc": (_link("/proc/self/exe"), "a symbolic link leads out of the store"),
    "a link to nowhere": (_link("nowhere"), "a symbolic link that leads nowhere"),
    "a link to itself": (_link(f"{AFU}.gbs"), "cannot be read: Too many levels of symbolic links"),
    "more bytes than are read": (_sparse, f"{MAX_FILE_BYTES + 1} bytes; at most {MAX_FILE_BYTES}"),
    "anybody's to write": (_mode(0o646), "may be written by anybody"),
    "a group's to write": (_mode(0o664), "may be written by group"),
}


@pytest.mark.parametrize("name", INODES)
def test_what_is_no_file_of_the_operators_is_refused_with_what_it_is(make, name):
    create, expected = INODES[name]
    library = make()
    path = os.path.join(library.store.root, INTERFACE, f"{AFU}.gbs")
    create(path)
    told = refusal(library, f"{AFU}.gbs")
    assert expected in told.message
    clean(told)


def _line(**values: object) -> bytes:
    good = {
        "path": f"{INTERFACE}/{AFU}.gbs",
        "sha256": hashlib.sha256(GBS).hexdigest(),
        "size": len(GBS),
    }
    return write_manifest([ManifestFile(**{**good, **values})])


MANIFESTS = {
    "another digest": (TrustMode.ANY, _line(sha256="0" * 64), "where manifest.json says 00000000"),
    "another size": (TrustMode.ANY, _line(size=1), "bytes where manifest.json says 1"),
    "cut": (TrustMode.ANY, _line()[:-3], "nothing of the store is trusted"),
    "a path out of the store": (
        TrustMode.ANY,
        _line(path="../../etc/passwd"),
        "'../../etc/passwd' is no bitstream's path in a store",
    ),
    "a digest of 63 digits": (TrustMode.ANY, _line(sha256="0" * 63), "not a manifest"),
    "a size below nothing": (TrustMode.ANY, _line(size=-1), "not a manifest"),
    "another file only": (
        TrustMode.DIGEST,
        _line(path=f"{INTERFACE}/blank.gbs"),
        "manifest.json does not name it, and FPGA_PLUGIN_TRUST is digest",
    ),
    "none": (TrustMode.DIGEST, None, "the store has no manifest.json, and FPGA_PLUGIN_TRUST is"),
    "no key": (TrustMode.SIGNED, _line(), "not signed, and FPGA_PLUGIN_TRUST is signed"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_file_that_the_manifest_does_not_vouch_for_is_refused_with_the_reason(make, name):
    mode, manifest, expected = MANIFESTS[name]
    library = make(mode)
    put(library, f"{AFU}.gbs", GBS)
    if manifest is not None:
        path = os.path.join(library.store.root, "manifest.json")
        with open(path, "wb") as file:
            file.write(manifest)
            os.fchmod(file.fileno(), 0o644)
    assert expected in refusal(library, f"{AFU}.gbs").message


def test_a_good_file_is_good(make):
    """Else all that is above could be refused for another reason."""
    library = make()
    for file, content in ((f"{AFU}.gbs", GBS), (f"{HASH}.aocx", aocx()), ("blank.gbs", GBS)):
        put(library, file, content)
        verdict = library.examine(f"{INTERFACE}/{file}")
        assert verdict is not None
        assert verdict.problem is None
    with pytest.raises(BitstreamError):
        read_data(gbs("{}"), "f")
