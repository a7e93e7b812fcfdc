"""Files for the container runtime, by several threads at once."""

import threading
from concurrent.futures import ThreadPoolExecutor

from fpga_plugin.allocation.journal.records import ClaimOwner
from fpga_plugin.dra.cdi import CdiFiles
from fpga_plugin.dra.metadata import MetadataFiles
from fpga_plugin.ids import DeviceId
from fpga_plugin.kubernetes.names import ClaimUid

UID = ClaimUid("claim-a")


def test_one_claim_written_twice_at_once_while_others_are_removed(tmp_path):
    metadata = tmp_path / "metadata"
    files = CdiFiles(str(tmp_path), "fpga.intel.com", MetadataFiles(str(metadata), "node-a"))
    requests = {DeviceId("0000-10-00.0-p0"): ("fpga",)}
    owner = ClaimOwner(UID, "n", "c", (), requests, "fpga.intel.com")
    together = threading.Barrier(3, timeout=60)
    rounds = range(100)

    def write() -> None:
        for _ in rounds:
            together.wait()
            files.write(owner, [])

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
