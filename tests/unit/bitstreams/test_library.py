"""What reaches the driver: verified, and from a copy that nobody else can write."""

import contextlib
import errno
import gzip
import hashlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from doubles import bitstreams
from doubles.bitstreams import HASH, aocx

from fpga_plugin.bitstreams import aocx as aocx_module
from fpga_plugin.bitstreams import cache as cache_module
from fpga_plugin.bitstreams import library as library_module
from fpga_plugin.bitstreams.cache import Cache
from fpga_plugin.bitstreams.library import Library
from fpga_plugin.bitstreams.manifest import ManifestFile, write_manifest
from fpga_plugin.bitstreams.places import Place, place_for
from fpga_plugin.bitstreams.trust import Trust
from fpga_plugin.errors import (
    BitstreamError,
    BitstreamNotFoundError,
    NotFinishedError,
    NotPermittedError,
    StoreUnavailableError,
)
from fpga_plugin.hardware.image import RawImage
from fpga_plugin.ids import BitstreamId, parse_afu_id, parse_bitstream_id, parse_interface_id
from fpga_plugin.settings.settings import TrustMode

INTERFACE = parse_interface_id("ce48969398f05f33946d560708be108a")
AFU = parse_afu_id("18b79ffa2ee54aa096ef4230dafacb5f")
OTHER_AFU = parse_afu_id("850adcc26ceb4b229722d43375b61c66")
BITSTREAM = parse_bitstream_id(AFU)
RELATIVE = f"{INTERFACE}/{AFU}.gbs"
MIB = 1 << 20


def gbs(tail: bytes = b"logic", afu=AFU, interface=INTERFACE) -> bytes:
    return bitstreams.gbs(bytes.fromhex(afu) + tail, afu, interface=interface)


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "store"
    (path / INTERFACE).mkdir(parents=True)
    os.chmod(path, 0o755)
    os.chmod(path / INTERFACE, 0o755)
    return path


@pytest.fixture
def place(root):
    return root / RELATIVE


@pytest.fixture
def copies(tmp_path):
    return tmp_path / "verified"


@pytest.fixture
def make(root, copies):
    def make(*, limit=1 << 30, mode=TrustMode.ANY, guarded=True, keys=None):
        trust = Trust(str(root), mode, keys and str(keys), guarded=guarded)
        return Library(
            str(root),
            directory=str(copies),
            limit=limit,
            trust=trust,
            guarded=guarded,
        )

    return make


def put(place, content: bytes) -> None:
    temporary = place.with_name(".new")
    temporary.write_bytes(content)
    os.chmod(temporary, 0o644)
    temporary.rename(place)


def name(root, content: bytes) -> None:
    """Write a manifest that says what the file should be."""
    line = ManifestFile(RELATIVE, hashlib.sha256(content).hexdigest(), len(content))
    put(root / "manifest.json", write_manifest([line]))


def image(library) -> bytes:
    return library.load(INTERFACE, BITSTREAM).image.data[16:]


def kept(copies) -> set[str]:
    return {path.name for path in copies.iterdir() if len(path.name) == 64}


@pytest.fixture
def hashed(monkeypatch):
    """Counts the files of the store that were read and hashed."""
    calls = []
    pieces_of = library_module.pieces_of

    def counted(opened):
        calls.append(opened.path)
        return pieces_of(opened)

    monkeypatch.setattr(library_module, "pieces_of", counted)
    return calls


@pytest.fixture
def checked(monkeypatch):
    """Counts the copies that were hashed again."""
    calls = []
    has = cache_module._has

    def counted(file, sha256):
        calls.append(sha256)
        return has(file, sha256)

    monkeypatch.setattr(cache_module, "_has", counted)
    return calls


def test_a_copy_is_named_by_its_digest_and_read_only(make, place, copies):
    put(place, gbs())
    assert image(make()) == b"logic"
    (copy,) = kept(copies)
    assert copy == hashlib.sha256(place.read_bytes()).hexdigest()
    assert (copies / copy).stat().st_mode & 0o7777 == 0o400
    assert copies.stat().st_mode & 0o7777 == 0o700


def test_a_warm_start_hashes_nothing(make, place, hashed, checked):
    put(place, gbs())
    library = make()
    library.examine(RELATIVE)  # as the index does when the file arrives
    assert len(hashed) == 1
    assert image(library) == b"logic"
    assert image(library) == b"logic"
    assert (len(hashed), checked) == (1, [])


def test_the_image_is_the_copy_itself_and_outlives_its_removal(make, place, copies):
    put(place, gbs(b"l" * 100_000))
    library = make()
    library.examine(RELATIVE)
    bitstream = library.load(INTERFACE, BITSTREAM)
    (copy,) = kept(copies)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    (mapped,) = [fields for fields in maps if fields[-1] == str(copies / copy)]
    assert mapped[1] == "rw-p"  # private: not even a defect of ours reaches the copy
    place.unlink()
    library.tidy([])
    assert not kept(copies)
    assert bytes(bitstream.image.data) == bytes.fromhex(AFU) + b"l" * 100_000


def test_a_copy_that_cannot_be_mapped_is_refused(make, place, monkeypatch):
    def unable(*_args, **_more):
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    monkeypatch.setattr(cache_module.mmap, "mmap", unable)
    put(place, gbs())
    with pytest.raises(StoreUnavailableError, match="cannot be copied to the disk: No such device"):
        image(make())


def test_after_a_restart_the_file_is_not_read_and_the_copy_is_hashed_once(
    make, place, hashed, checked
):
    """Also after a boot: a power cut may have left of the copy what it wants."""
    put(place, gbs())
    image(make())
    later = make()
    assert [image(later), image(later)] == [b"logic", b"logic"]
    assert (len(hashed), len(checked)) == (1, 1)


@pytest.mark.parametrize("warm", [False, True])
def test_a_copy_that_was_damaged_is_not_programmed(make, place, copies, hashed, warm):
    """With other bytes of the same number: a restart finds it, and so does a changed time."""
    put(place, gbs())
    library = make()
    image(library)
    (copy,) = kept(copies)
    os.chmod(copies / copy, 0o600)
    (copies / copy).write_bytes(gbs(b"LOGIC"))
    os.chmod(copies / copy, 0o400)
    assert image(library if warm else make()) == b"logic"
    assert len(hashed) == 2
    assert kept(copies) == {hashlib.sha256(gbs()).hexdigest()}


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": 1}', b"\xff", b"[" * 100_000])
def test_an_index_that_makes_no_sense_is_made_anew(make, place, copies, content):
    put(place, gbs())
    image(make())
    copies.with_name("verified.json").write_bytes(content)
    assert image(make()) == b"logic"


@pytest.mark.parametrize("how", ["renamed", "in place", "link"])
def test_a_file_swapped_after_it_was_indexed_is_verified_again(make, root, place, how):
    put(place, gbs())
    name(root, place.read_bytes())
    library = make()
    assert library.examine(RELATIVE).problem is None
    if how == "renamed":
        put(place, gbs(b"LOGIC"))
    elif how == "in place":
        with place.open("r+b") as file:
            file.seek(-5, os.SEEK_END)
            file.write(b"LOGIC")
        os.utime(place, ns=(1, 1))
    else:
        put(place.with_name("other"), gbs(b"LOGIC"))
        place.unlink()
        place.symlink_to("other")
    with pytest.raises(NotPermittedError, match=r"SHA-256 is [0-9a-f]{64} where manifest\.json"):
        image(library)


def test_a_file_that_is_swapped_while_it_is_verified_is_not_programmed(make, place, monkeypatch):
    put(place, gbs())
    library = make()
    read = Place.read

    def meanwhile(*args):
        put(place, gbs(b"LOGIC"))
        return read(*args)

    monkeypatch.setattr(Place, "read", meanwhile)
    assert image(library) == b"logic"  # what was hashed and judged, not what lies there now


@pytest.mark.parametrize("how", ["shorter", "same size"])
def test_a_file_that_is_rewritten_while_it_is_copied_is_refused(
    make, place, copies, monkeypatch, how
):
    put(place, gbs(b"x" * (3 << 20)))
    library = make()
    pieces_of = library_module.pieces_of

    def meanwhile(original):
        for piece in pieces_of(original):
            if how == "shorter":
                os.truncate(place, original.size - 1)
            else:
                with place.open("r+b") as file:
                    file.seek(-5, os.SEEK_END)
                    file.write(b"LOGIC")
                os.utime(place, ns=(1, 1))
            yield piece

    monkeypatch.setattr(library_module, "pieces_of", meanwhile)
    with pytest.raises(BitstreamError, match="changed while it was read"):
        image(library)
    assert kept(copies) == set()
    assert [path for path in copies.iterdir() if path.name.startswith(".")] == []


def test_a_hard_link_to_a_verified_file_lets_nobody_change_what_is_programmed(make, place, root):
    put(place, gbs())
    library = make()
    library.examine(RELATIVE)
    os.link(place, root / "link")
    assert image(library) == b"logic"
    with (root / "link").open("r+b") as file:
        file.truncate(30)
    with pytest.raises(BitstreamError):
        image(library)


def test_a_file_that_is_open_for_writing_waits_for_its_writer(make, place):
    put(place, gbs())
    library = make()
    with place.open("ab"):
        with pytest.raises(NotFinishedError, match="still being written"):
            image(library)
        with pytest.raises(NotFinishedError):
            library.examine(RELATIVE)
    assert image(library) == b"logic"


@pytest.mark.parametrize(
    ("mode", "owner", "words"),
    [(0o664, 0, "group"), (0o646, 0, "anybody"), (0o644, 12345, "belongs to user 12345")],
)
def test_a_file_that_others_may_write_is_refused(make, place, mode, owner, words):
    if owner and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    put(place, gbs())
    os.chmod(place, mode)
    if owner:
        os.chown(place, owner, -1)
    with pytest.raises(BitstreamError, match=words) as caught:
        image(make())
    assert place.name in caught.value.hint
    assert image(make(guarded=False)) == b"logic"


def test_a_file_that_others_may_rename_away_is_refused(make, place):
    put(place, gbs())
    os.chmod(place.parent, 0o777)
    with pytest.raises(BitstreamError, match=r"its directory .* may be written by anybody"):
        image(make())
    os.chmod(place.parent, 0o1777)
    assert image(make()) == b"logic"


@pytest.mark.parametrize("mode", TrustMode)
def test_a_store_whose_root_others_may_write_is_refused_in_every_mode(make, root, place, mode):
    """They could rename the manifest away, or the directory of an interface id."""
    put(place, gbs())
    os.chmod(root, 0o777)
    with pytest.raises(BitstreamError, match=f"its directory {root} may be written by anybody"):
        image(make(mode=mode))
    assert image(make(guarded=False)) == b"logic"


def test_a_store_whose_root_is_somebody_elses_is_refused(make, root, place):
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    put(place, gbs())
    os.chown(root, 12345, -1)
    with pytest.raises(BitstreamError, match=f"its directory {root} belongs to user 12345"):
        image(make())


def test_a_file_that_gets_writable_after_it_was_verified_is_refused(make, place):
    put(place, gbs())
    library = make()
    image(library)
    os.chmod(place, 0o666)
    with pytest.raises(BitstreamError, match="anybody"):
        image(library)


def test_what_was_refused_is_not_hashed_again(make, root, place, hashed):
    put(place, gbs())
    name(root, gbs(b"LOGIC"))
    hashed.clear()  # the manifest's own
    library = make()
    for _ in range(3):
        with pytest.raises(NotPermittedError):
            image(library)
    assert len(hashed) == 1


def test_what_was_not_used_for_longest_goes_first(make, root, place, copies):
    places = []
    for number in range(1, 4):
        afu = parse_afu_id(f"{number:032x}")
        put(root / INTERFACE / f"{afu}.gbs", gbs(b"x" * 1000, afu))
        places.append((root / INTERFACE / f"{afu}.gbs", parse_bitstream_id(afu)))
    size = places[0][0].stat().st_size
    library = make(limit=2 * size)

    def load(index):
        library.load(INTERFACE, places[index][1])
        copy = copies / hashlib.sha256(places[index][0].read_bytes()).hexdigest()
        load.clock += 1
        os.utime(copy, ns=(load.clock, load.clock))  # the clock of the file system is coarse

    load.clock = 0
    load(0)
    load(1)
    load(0)
    load(2)
    expected = {hashlib.sha256(places[i][0].read_bytes()).hexdigest() for i in (0, 2)}
    assert kept(copies) == expected


def test_arriving_files_push_nothing_out(make, root, place, copies):
    put(place, gbs())
    library = make(limit=place.stat().st_size)
    image(library)
    before = kept(copies)
    put(root / INTERFACE / f"{OTHER_AFU}.gbs", gbs(afu=OTHER_AFU))
    assert library.examine(f"{INTERFACE}/{OTHER_AFU}.gbs").problem is None
    assert kept(copies) == before


def test_no_room_at_all_still_serves(make, place, copies, hashed):
    put(place, gbs())
    library = make(limit=0)
    assert [image(library), image(library)] == [b"logic", b"logic"]
    assert len(hashed) == 2
    assert kept(copies) == set()


@pytest.mark.parametrize("failing", ["open", "write"])
def test_a_full_disk_refuses_and_leaves_nothing(make, place, copies, monkeypatch, failing):
    put(place, gbs())
    library = make()
    call = getattr(os, failing)

    def full(*args, **kwargs):
        if failing == "write" or str(args[0]).startswith(str(copies)):
            raise OSError(28, "No space left on device")
        return call(*args, **kwargs)

    monkeypatch.setattr(cache_module.os, failing, full)
    with pytest.raises(StoreUnavailableError, match="No space left on device") as caught:
        image(library)
    assert caught.value.message.startswith(f"{place}: its ")
    assert left_over(copies) == []
    monkeypatch.undo()
    assert image(library) == b"logic"  # it was no verdict on the file


def test_a_copy_that_was_cut_or_removed_is_made_anew(make, place, copies, hashed):
    put(place, gbs())
    library = make()
    image(library)
    (copy,) = kept(copies)
    os.chmod(copies / copy, 0o600)
    os.truncate(copies / copy, 10)
    os.chmod(copies / copy, 0o400)
    assert image(library) == b"logic"
    (copies / copy).unlink()
    assert image(library) == b"logic"
    assert len(hashed) == 3


def test_a_directory_of_copies_that_was_removed_is_made_anew(make, place, copies, hashed):
    put(place, gbs())
    library = make()
    image(library)
    shutil.rmtree(copies)
    image(library)
    hashed.clear()
    image(library)
    assert not hashed
    assert stat.S_IMODE(copies.stat().st_mode) == 0o700


def test_copies_of_files_that_went_are_removed(make, place, copies):
    put(place, gbs())
    library = make()
    image(library)
    place.unlink()
    assert library.examine(RELATIVE) is None
    assert library.verdicts.get(RELATIVE) is None
    library.tidy([])
    assert kept(copies) == set()
    with pytest.raises(BitstreamNotFoundError):
        image(library)


def test_copies_of_which_nothing_is_known_are_removed_at_the_start(make, place, copies):
    put(place, gbs())
    image(make())
    copies.with_name("verified.json").unlink()
    make()
    assert kept(copies) == set()


def test_ids_that_pods_make_up_leave_nothing_behind(make):
    library = make()
    for number in range(200):
        with pytest.raises(BitstreamNotFoundError):
            library.load(INTERFACE, parse_bitstream_id(f"{number:032x}"))
    assert library.verdicts._known == {}


def test_a_mislabelled_file_is_refused_with_its_own_path(make, place):
    put(place, gbs(afu=OTHER_AFU))
    with pytest.raises(BitstreamError, match=f"^{place}: has the AFU id {OTHER_AFU}"):
        image(make())
    put(place, b"XeonFPGA")
    with pytest.raises(BitstreamError, match=f"^{place}: too short"):
        image(make())


@pytest.mark.parametrize("limit", [1 << 30, 0])
def test_an_aocx_file_is_verified_and_programmed_from_its_copy(make, root, hashed, limit):
    file = root / INTERFACE / f"{HASH}.aocx"
    put(file, aocx())
    library = make(limit=limit)
    assert library.examine(f"{INTERFACE}/{HASH}.aocx").problem is None
    before = len(hashed)
    loaded = library.load(INTERFACE, parse_bitstream_id(HASH))
    assert (loaded.afu_id, loaded.image.data[:16].hex()) == (AFU, AFU)
    assert len(hashed) == before if limit else before + 1
    put(file, aocx(name=b"f" * 40))
    with pytest.raises(BitstreamError, match=f"^{file}: has the hash f"):
        library.load(INTERFACE, parse_bitstream_id(HASH))


# -- what trust refuses, what is large, what the disk does not take ------------------------------

AOCX = f"{INTERFACE}/{HASH}.aocx"


@pytest.fixture
def packed(root):
    """An AOCX file of several pieces."""
    file = root / AOCX
    put(file, aocx(gzip.compress(gbs(bytes(3 << 20)), 1, mtime=0)))
    return file


def unpacked_digest() -> str:
    return hashlib.sha256(gbs(bytes(3 << 20))).hexdigest()


def load_packed(library):
    return library.load(INTERFACE, parse_bitstream_id(HASH))


def left_over(copies) -> list[str]:
    return [path.name for path in copies.iterdir() if path.name.startswith(".")]


def test_nothing_of_a_file_that_is_not_trusted_is_parsed(make, packed, place, copies, monkeypatch):
    put(place, gbs())

    def never(*_args, **_more):
        raise AssertionError("parsed")

    library = make(mode=TrustMode.DIGEST)
    for where, name in ((Place, "read"), (library_module, "read_data"), (Cache, "map")):
        monkeypatch.setattr(where, name, never)
    for relative in (AOCX, RELATIVE):
        assert isinstance(library.examine(relative).problem, NotPermittedError)
    with pytest.raises(NotPermittedError):
        load_packed(library)
    assert kept(copies) == set()
    assert left_over(copies) == []


def test_a_file_that_comes_to_be_trusted_is_parsed_then(make, root, place):
    """Its copy may be there already: another name has the same content."""
    put(root / INTERFACE / f"{OTHER_AFU}.gbs", gbs(afu=OTHER_AFU))
    put(place, gbs(afu=OTHER_AFU))
    library = make()
    assert library.examine(f"{INTERFACE}/{OTHER_AFU}.gbs").problem is None
    name(root, b"x")
    assert isinstance(library.examine(RELATIVE).problem, NotPermittedError)
    name(root, place.read_bytes())
    assert "has the AFU id" in str(library.examine(RELATIVE).problem)


def test_an_aocx_file_is_unpacked_once_into_a_copy_that_is_mapped(
    make, packed, copies, monkeypatch
):
    library = make()
    assert library.examine(AOCX).problem is None
    assert kept(copies) == {path.name for path in copies.iterdir()} == {unpacked_digest()}
    library.verdicts.save()
    for later in (library, make()):  # a restart, too
        monkeypatch.setattr(aocx_module, "sections", None)
        loaded = load_packed(later)
        assert loaded.image.data[:16].hex() == AFU
        assert loaded.image.data.nbytes == 16 + (3 << 20)
    assert str(copies / unpacked_digest()) in Path("/proc/self/maps").read_text()


def test_an_unpacked_copy_that_was_cut_or_removed_is_made_anew(make, packed, copies, hashed):
    library = make()
    load_packed(library)
    unpacked = copies / unpacked_digest()
    for spoil in (lambda: os.truncate(unpacked, 100), unpacked.unlink):
        os.chmod(unpacked, 0o600)
        spoil()
        assert load_packed(library).image.data.nbytes == 16 + (3 << 20)
    assert len(hashed) == 3


def test_what_a_death_while_unpacking_left_is_removed_at_the_next_start(make, packed, copies):
    """In a process that is killed between two pieces."""
    library = make()

    def child() -> None:
        write = os.write

        def dying(descriptor, piece):
            if write(descriptor, piece) and left_over(copies)[1:]:  # the second is the unpacked one
                os.kill(os.getpid(), signal.SIGKILL)
            return len(piece)

        cache_module.os.write = dying
        load_packed(library)

    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            child()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert len(left_over(copies)) == 2
    assert load_packed(make()).image.data.nbytes == 16 + (3 << 20)
    assert left_over(copies) == []


def test_many_that_unpack_the_same_content_at_once_all_get_it(make, packed, copies):
    libraries = [make() for _ in range(6)]  # each stands for another file with the same content
    images = []

    def load(library) -> None:
        images.append(bytes(load_packed(library).image.data))

    threads = [threading.Thread(target=load, args=(library,)) for library in libraries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert images == [bytes.fromhex(AFU) + bytes(3 << 20)] * 6
    assert left_over(copies) == []


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_disk_that_gets_full_while_unpacking_refuses_and_leaves_nothing(
    make, packed, copies, monkeypatch, after
):
    library = make()
    write = os.write
    written = []

    def full(descriptor, piece):
        if len(left_over(copies)) < 2:
            return write(descriptor, piece)  # of the file itself
        written.append(piece)
        if len(written) > after:
            raise OSError(28, "No space left on device")
        return write(descriptor, piece)

    monkeypatch.setattr(cache_module.os, "write", full)
    with pytest.raises(StoreUnavailableError, match="No space left"):
        load_packed(library)
    assert list(copies.iterdir()) == []
    monkeypatch.undo()
    assert load_packed(library).image.data.nbytes == 16 + (3 << 20)


def test_a_file_that_the_disk_has_no_room_for_is_refused_and_taken_up_later(
    make, packed, copies, monkeypatch
):
    library = make()
    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "_free", lambda _: 1000)
        with pytest.raises(StoreUnavailableError, match="1000 bytes are free") as caught:
            load_packed(library)
    assert caught.value.message.startswith(f"{packed}: its ")
    assert "FPGA_PLUGIN_STATE_DIR" in caught.value.hint
    assert left_over(copies) == []
    assert load_packed(library).image.data.nbytes == 16 + (3 << 20)  # it was no verdict on the file


def test_a_full_disk_has_room_for_what_is_asked_for_where_older_copies_go(
    make, root, place, copies, monkeypatch
):
    put(root / INTERFACE / f"{OTHER_AFU}.gbs", gbs(afu=OTHER_AFU))
    put(place, gbs())
    library = make()
    library.examine(f"{INTERFACE}/{OTHER_AFU}.gbs")
    before = kept(copies)

    def free(directory):
        return 0 if kept(copies) & before else 1 << 30

    monkeypatch.setattr(cache_module, "_free", free)
    with pytest.raises(StoreUnavailableError):
        library.examine(RELATIVE)  # what only arrives pushes nothing out
    assert image(library) == b"logic"
    assert not kept(copies) & before


def test_copies_on_a_file_system_in_memory_are_limited_by_the_memory(make, packed, monkeypatch):
    monkeypatch.setattr(cache_module, "lies_in_memory", lambda _: True)
    monkeypatch.setattr(cache_module, "memory_limit", lambda: 4096)
    with pytest.raises(StoreUnavailableError, match="its file system is in memory, and takes 1024"):
        load_packed(make())
    monkeypatch.setattr(cache_module, "memory_limit", lambda: 20 << 20)
    assert load_packed(make()).image.data.nbytes == 16 + (3 << 20)


def test_large_files_take_little_memory_and_it_is_given_back(tmp_path):
    """In a process of its own, whose highest mark reports: both ways that once took all of it."""
    limit, large = 64, 256  # MiB
    program = f"""
import gzip, os, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from doubles.bitstreams import HASH, INTERFACE, elf, gbs
from fpga_plugin.bitstreams.library import Library
from fpga_plugin.bitstreams.trust import Trust
from fpga_plugin.settings.settings import TrustMode

root = {str(tmp_path / "store")!r}
os.makedirs(os.path.join(root, INTERFACE))
path = os.path.join(root, INTERFACE, HASH + ".aocx")

def marks():
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["VmHWM"].split()[0]) >> 10, int(lines["VmRSS"].split()[0]) >> 10

def library(mode):
    trust = Trust(root, mode, None, guarded=False)
    return Library(root, directory=root + ".copies", limit=1 << 40, trust=trust, guarded=False)

if sys.argv[1] == "untrusted":
    with open(path, "wb") as file:
        file.truncate({large} << 20)
    problem = library(TrustMode.DIGEST).examine(INTERFACE + "/" + HASH + ".aocx").problem
    assert "FPGA_PLUGIN_TRUST is digest" in problem.message
    mode = None
else:
    head = gbs(b"")
    import zlib
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    packed = packer.compress(head)
    for _ in range({large}):
        packed += packer.compress(bytes(1 << 20))
    packed += packer.flush()
    inner = elf((".acl.gbs.gz", packed))
    with open(path, "wb") as file:
        file.write(elf((".acl.rand_hash", HASH.encode()), (".acl.fpga.bin", inner)))
    loaded = library(TrustMode.ANY).load(INTERFACE, HASH)
    assert loaded.image.data.nbytes == {large} << 20
    high, _ = marks()
    assert high < {limit}, high
    assert loaded.image.data[-1] == 0 == sum(loaded.image.data[:: 4096])  # as the driver does
    del loaded
high, now = marks()
assert now < {limit}, now
assert high < {limit} or sys.argv[1] != "untrusted", high
"""
    for what in ("untrusted", "bomb"):
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        done = subprocess.run(
            [sys.executable, "-c", program, what], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


# -- a store that does not answer ----------------------------------------------------------------


def of(bitstream_id: BitstreamId | None) -> Place:
    return place_for(INTERFACE, bitstream_id, RawImage)


def test_a_verified_file_is_served_from_its_copy_while_the_store_is_away(make, root, place, packed):
    put(place, gbs())
    library = make()
    assert image(library) == b"logic"
    load_packed(library)
    root.rename(root.with_name("away"))
    assert library.kept(of(BITSTREAM)).image.data[16:] == b"logic"
    assert library.kept(of(parse_bitstream_id(HASH))).image.data.nbytes == 16 + (3 << 20)
    assert library.kept(of(parse_bitstream_id(OTHER_AFU))) is None
    assert library.kept(of(None)) is None


def _changed(library, root, place):
    put(place, gbs(b"LOGIC"))
    library._known(of(BITSTREAM))  # as far as a load comes that then hangs


def _removed(library, root, place):
    place.unlink()
    with pytest.raises(BitstreamNotFoundError):
        image(library)


def _writable(library, root, place):
    os.chmod(place, 0o666)
    with pytest.raises(BitstreamError):
        image(library)


def _directory_writable(library, root, place):
    os.chmod(place.parent, 0o777)  # the file itself is as it was
    with pytest.raises(BitstreamError):
        image(library)


def _not_trusted(library, root, place):
    name(root, b"x")
    with pytest.raises(NotPermittedError):
        image(library)


@pytest.mark.parametrize(
    "spoil",
    [
        _changed,
        _removed,
        _writable,
        _directory_writable,
        _not_trusted,
        lambda library, _root, _place: library.verdicts.forget(RELATIVE),  # the watcher's word
        lambda library, _root, _place: library.verdicts.doubt_all(),
        lambda library, _root, _place: library.tidy([]),
    ],
)
def test_a_copy_whose_original_may_have_changed_is_not_served_while_the_store_is_away(
    make, root, place, spoil
):
    put(place, gbs())
    library = make()
    image(library)
    assert library.kept(of(BITSTREAM)) is not None
    spoil(library, root, place)
    assert library.kept(of(BITSTREAM)) is None


def test_after_a_restart_the_store_is_asked_first(make, place):
    """Nobody watched it meanwhile, and the trust that is asked for may be another one."""
    put(place, gbs())
    image(make())
    library = make()
    assert library.kept(of(BITSTREAM)) is None
    image(library)
    assert library.kept(of(BITSTREAM)) is not None
