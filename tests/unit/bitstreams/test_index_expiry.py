"""The index notices that the manifest expires, though nothing in the store changes."""

import asyncio
import hashlib
from datetime import timedelta

import pytest
from doubles import LIMIT
from test_library import BITSTREAM, INTERFACE, gbs, put
from test_seen_manifests import NOW, Node, clock  # noqa: F401  # a fixture
from test_signatures import FILE

from fpga_plugin.bitstreams import index as index_module
from fpga_plugin.bitstreams.index import StoreIndex
from fpga_plugin.bitstreams.library import Library
from fpga_plugin.bitstreams.manifest import ManifestFile, write_manifest
from fpga_plugin.bitstreams.reader import StoreReader
from fpga_plugin.errors import NotPermittedError


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


@pytest.fixture
def make(tmp_path, node):
    """The library of another life."""

    def make() -> Library:
        return Library(
            str(node.root),
            directory=str(tmp_path / "verified"),
            limit=1 << 20,
            trust=node.life(),
            guarded=False,
        )

    return make


@pytest.fixture
def library(make, node):
    node.manifest(5, expires=NOW + timedelta(days=1))
    return make()


def test_a_verdict_of_an_earlier_life_does_not_outlive_the_manifest(make, node, clock):  # noqa: F811  # a fixture
    content = gbs()
    put(node.root / FILE, content)
    line = ManifestFile(FILE, hashlib.sha256(content).hexdigest(), len(content))
    node.put(write_manifest([line], version=5, expires=NOW + timedelta(days=1)))
    first = make()
    for _ in range(2):  # the second time, the record of manifests is what it was
        assert first.load(INTERFACE, BITSTREAM)
    # The next life reads neither file nor manifest, as long as both stay the same.
    first.verdicts.save()
    clock.time = NOW + timedelta(days=2)
    for library in (make(), first):
        with pytest.raises(NotPermittedError, match="expired"):
            library.load(INTERFACE, BITSTREAM)


def test_everything_is_judged_anew_when_the_manifest_expires(library, clock, monkeypatch):  # noqa: F811  # a fixture
    monkeypatch.setattr(index_module, "_CLOCK_SECONDS", 0.01)
    seconds_left = library.trust.seconds_left
    library.trust.named()  # as the first file that is judged has it read

    async def story() -> None:
        changed, looks = asyncio.Queue(), asyncio.Queue()

        def look() -> float | None:
            looks.put_nowait(left := seconds_left())
            return left

        monkeypatch.setattr(library.trust, "seconds_left", look)
        index = StoreIndex(StoreReader(library), changed.put_nowait)
        async with asyncio.timeout(LIMIT), asyncio.TaskGroup() as group:
            task = group.create_task(index.run())
            for _ in range(4):  # two times that it waited, and what it had to wait for after them
                assert await looks.get()
            assert changed.empty()
            clock.time = NOW + timedelta(days=2)
            assert await changed.get() is None  # any blank bitstream may have changed
            while await looks.get() is not None:
                pass
            await asyncio.sleep(0.05)  # some times of `_CLOCK_SECONDS`
            assert changed.empty(), "once"
            task.cancel()

    asyncio.run(story())
