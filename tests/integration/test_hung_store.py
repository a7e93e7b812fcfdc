"""The store's file system stops to answer: for a file, for all of it, before the plugin starts."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from daemon_support import (
    AFU,
    AFU_2,
    AFU_3,
    BLANK,
    HEALTHY,
    ID,
    LIMIT,
    NO_REQUEST,
    P0,
    P1,
    REGIONS,
    UNHEALTHY,
    Node,
    Refused,
    eventually,
    request,
)
from doubles.bitstreams import gbs
from fuse_store import CONTENTS, EVERYTHING, FuseStore, why_not

from fpga_plugin.bitstreams.reader import MOST_THREADS
from fpga_plugin.ids import parse_afu_id

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@contextmanager
def mounted() -> Iterator[tuple[Node, FuseStore]]:
    """A node with the samples' store on a file system that hangs on demand."""
    node = Node("1x2")
    source = node.own_store()
    mountpoint = node.folder / "mounted"
    node.set(bitstream_dir=str(mountpoint))
    with node, FuseStore(source, mountpoint) as store:
        try:
            yield node, store
        finally:
            for life in node.lives:
                if life.process.poll() is None:
                    life.kill()


def indexed(node: Node) -> None:
    """The plugin runs, and every file of the store has been verified."""
    node.up()
    eventually((node.state_dir / "verified.json").exists)


def refusal(node: Node, device: str, afu: str, *, timeout: float = LIMIT) -> Refused:
    with pytest.raises(Refused) as caught:
        node.kubelet.prestart(device, env=request(afu), timeout=timeout)
    return caught.value


def another(node: Node, number: int) -> str:
    """The id of one more good file, which nobody has verified."""
    afu = parse_afu_id(f"{number:032x}")
    path = node.folder / "store" / ID / f"{afu}.gbs"
    path.write_bytes(gbs(bytes.fromhex(afu) + b"logic", afu))
    path.chmod(0o644)
    return afu


def test_a_file_that_hangs_is_refused_by_name_and_costs_no_other_pod_anything():
    with mounted() as (node, store):
        store.hang(f"{AFU_2}.gbs")
        node.up()
        node.kubelet.allocate(P0)
        node.kubelet.allocate(P1)
        for _ in range(12):  # more than asyncio has threads for everybody
            refusal(node, P0, AFU_2, timeout=0.4)
        assert store.waiting() == 1
        refused = refusal(node, P0, AFU_2)
        assert refused.code == "UNAVAILABLE"
        assert f"{AFU_2}.gbs: not read within 8 s" in refused.message
        assert "check the file system that holds" in refused.message
        node.kubelet.prestart(P1, env=request(AFU))
        assert node.afu(P1) == AFU
        store.answer()
        node.kubelet.prestart(P0, env=request(AFU_2))
        assert node.afu(P0) == AFU_2


def test_what_was_verified_is_programmed_and_scrubbed_while_the_whole_store_hangs():
    with mounted() as (node, store):
        indexed(node)
        node.kubelet.allocate(P0)
        node.kubelet.allocate(P1)
        node.kubelet.prestart(P0, env=request(AFU))
        node.kubelet.prestart(P1, env=request(AFU_2))
        store.hang(EVERYTHING)
        for _ in range(3):
            node.kubelet.prestart(P0, env=request(AFU_2))
            assert node.afu(P0) == AFU_2
            node.kubelet.prestart(P0, env=request(AFU))
            assert node.afu(P0) == AFU
        node.kubelet.prestart(P1, env=NO_REQUEST)
        assert node.afu(P1) == BLANK
        node.kubelet.deallocate(P0)
        eventually(lambda: node.afu(P0) == BLANK)
        node.kubelet.until_health(P0, HEALTHY)
        assert store.waiting() <= MOST_THREADS + 1  # and the watcher's
        node.plugin.until_logged("the store does not answer: a verified copy is used")


def test_many_files_that_hang_take_few_threads_and_the_message_says_which_and_what_to_check():
    with mounted() as (node, store):
        indexed(node)
        node.kubelet.allocate(P0)
        node.kubelet.allocate(P1)
        node.kubelet.prestart(P1, env=request(AFU))
        hung = [another(node, number) for number in range(1, MOST_THREADS + 3)]
        for afu in hung:
            store.hang(f"{afu}.gbs")
        for afu in hung:
            refusal(node, P0, afu, timeout=0.4)
        assert store.waiting() <= MOST_THREADS + 1
        refused = refusal(node, P0, hung[-1])
        assert refused.code == "UNAVAILABLE"
        assert f"{MOST_THREADS} reads of the store do not end" in refused.message
        assert f"{hung[0]}.gbs" in refused.message
        node.kubelet.prestart(P1, env=request(AFU_2))  # verified when it was indexed
        assert node.afu(P1) == AFU_2
        store.answer()
        node.kubelet.prestart(P0, env=request(hung[-1]))
        assert node.afu(P0) == hung[-1]


def test_a_store_that_hangs_at_the_start_is_taken_up_when_it_answers():
    with mounted() as (node, store):
        store.hang(CONTENTS)
        node.kubelet.start()
        node.start()
        node.kubelet.until(REGIONS, {P0: UNHEALTHY, P1: UNHEALTHY})
        store.answer()
        node.kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request(AFU_3))
        assert node.afu(P0) == AFU_3


def test_a_file_that_changed_is_not_served_from_its_copy():
    """The store still says that the file is another one, and gives nothing of it."""
    with mounted() as (node, store):
        indexed(node)
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request(AFU))
        file = node.folder / "store" / ID / f"{AFU}.gbs"
        file.write_bytes(file.read_bytes() + b"more")
        store.hang(file.name)
        assert refusal(node, P0, AFU).code == "UNAVAILABLE"
        store.hang(EVERYTHING)
        assert refusal(node, P0, AFU).code == "UNAVAILABLE"


def test_the_end_of_the_plugin_waits_for_no_read_that_hangs():
    with mounted() as (node, store):
        node.up()
        store.hang(EVERYTHING)
        node.kubelet.allocate(P0)
        refusal(node, P0, f"{9:032x}", timeout=0.4)
        eventually(store.waiting)
        assert node.plugin.stop() == 0  # or else it does not end within the test's limit
