"""Files for the container runtime: where they lie, and by several threads at once."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from doubles.cards import device, make_card
from test_metadata import taken

from fpga_plugin.allocation.journal.records import ClaimOwner
from fpga_plugin.dra.cdi import CdiError, CdiFiles
from fpga_plugin.dra.metadata import MetadataFiles
from fpga_plugin.kubernetes.names import ClaimUid

UID = ClaimUid("claim-a")


def test_one_claim_written_twice_at_once_while_others_are_removed(tmp_path):
    metadata = tmp_path / "metadata"
    files = CdiFiles(str(tmp_path), "fpga.intel.com", MetadataFiles(str(metadata), "node-a"))
    card = make_card()
    owner, allocations, cards = taken(card, device(card, 0), uid=UID)
    together = threading.Barrier(3, timeout=60)
    rounds = range(100)

    def write() -> None:
        for _ in rounds:
            together.wait()
            files.write(owner, allocations, cards)

    def keep() -> None:
        for _ in rounds:
            together.wait()
            files.keep({UID})

    def in_all(task) -> None:
        try:
            task()
        except BaseException:
            together.abort()
            raise

    with ThreadPoolExecutor(3) as threads:
        for one in [threads.submit(in_all, task) for task in (write, write, keep)]:
            one.result()
    assert [path.suffix for path in tmp_path.iterdir() if path.is_file()] == [".json"]
    assert [path.name for path in metadata.iterdir()] == [f"{UID}_fpga.json"]


def claim(file: str = "") -> ClaimOwner:
    return ClaimOwner(UID, "n", "c", (), {}, "fpga.intel.com", file)


def test_a_claims_file_stays_where_it_was_written_first(tmp_path):
    """FPGA_PLUGIN_CDI_DIR may have changed since (docs/architecture.md, f2)."""
    (former := tmp_path / "former").mkdir()
    files = CdiFiles(str(tmp_path / "now"), "fpga.intel.com")
    owner = claim(str(former / "claim.json"))
    files.write(owner, [], {})
    assert [path.name for path in former.iterdir()] == ["claim.json"]
    assert not [*(tmp_path / "now").glob("*.json")]
    files.remove(files.of(owner), UID)
    assert not [*former.iterdir()]
    files.write(claim(), [], {})
    (written,) = (tmp_path / "now").iterdir()
    assert str(written) == files.path(UID) == files.of(claim())
    assert written.stat().st_mode & 0o777 == 0o644, "the runtime may run as another user"


def test_a_former_directory_that_is_not_seen_may_hold_the_file(tmp_path):
    """Neither is the file taken for removed, nor the directory made where nobody reads it."""
    files = CdiFiles(str(tmp_path / "now"), "fpga.intel.com")
    owner = claim(str(tmp_path / "former" / "claim.json"))
    with pytest.raises(CdiError, match=r"cannot be reached: .*former is not there"):
        files.write(owner, [], {})
    with pytest.raises(CdiError, match=r"cannot be reached: .*former is not there"):
        files.remove(files.of(owner), UID)
    files.remove(files.path(UID), UID)  # its own is made at the first file


def test_what_containers_read_of_a_claim_goes_with_its_file(tmp_path):
    class Metadata(MetadataFiles):
        """Notes what is removed, and whether a file may be written meanwhile."""

        def __init__(self) -> None:
            super().__init__(str(tmp_path / "metadata"), "node-a")
            self.noted: list[object] = []

        def remove(self, unwanted: Callable[[str], bool]) -> None:
            gone = [uid for uid in (UID, "another") if unwanted(uid)]
            self.noted.append((gone, files._one.locked()))

    files = CdiFiles(str(tmp_path / "cdi"), "fpga.intel.com", metadata := Metadata())
    files.remove(files.path(UID), UID)
    files.keep({UID})
    assert metadata.noted == [([UID], True), (["another"], True)]
