"""Names of bitstreams from a store that does not answer: what it said last counts, nothing else."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from fpga_plugin.bitstreams import reader
from fpga_plugin.bitstreams.id_names import Names
from fpga_plugin.bitstreams.reader import StoreReader
from fpga_plugin.cards.targets import Targets
from fpga_plugin.errors import NotPermittedError, RefusedError, StoreUnavailableError

NAMES = {("0" * 32, "gzip"): "1" * 32}


class Manifest:
    """A store's, which hangs while `answers` is not set."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.broken = False

    def names(self):
        self.answers.wait(60)
        if self.broken:
            raise NotPermittedError("manifest.json is no manifest")
        return Names(NAMES, {"0" * 32: "board"}, counts=True)


@pytest.fixture
def manifest():
    made = Manifest()
    yield made
    made.answers.set()


def test_a_store_that_hangs_costs_no_name_that_was_read(manifest, monkeypatch):
    monkeypatch.setattr(reader, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(reader, "READ_SECONDS", 30.0)
    library = SimpleNamespace(trust=manifest, store=SimpleNamespace(root="/store"))

    async def steps() -> None:
        store = StoreReader(library)
        assert await store.aliases() == NAMES
        manifest.answers.clear()
        assert await store.aliases() == NAMES
        manifest.answers.set()

    asyncio.run(steps())


def test_a_store_that_never_answered_has_no_names_yet(manifest, monkeypatch):
    monkeypatch.setattr(reader, "READ_SECONDS", 0.05)
    library = SimpleNamespace(trust=manifest, store=SimpleNamespace(root="/store"))
    manifest.answers.clear()

    async def steps() -> None:
        with pytest.raises(StoreUnavailableError, match=r"/store/manifest\.json: not read within"):
            await StoreReader(library).aliases()
        manifest.answers.set()

    asyncio.run(steps())


def test_names_of_interface_ids_stay_while_the_store_hangs(manifest, monkeypatch):
    monkeypatch.setattr(reader, "LOOK_SECONDS", 0.05)
    library = SimpleNamespace(trust=manifest, store=SimpleNamespace(root="/store"))

    async def steps() -> None:
        store = StoreReader(library)
        assert await store.interface_aliases() == {"0" * 32: "board"}
        manifest.answers.clear()
        assert await store.interface_aliases() == {"0" * 32: "board"}
        manifest.answers.set()

    asyncio.run(steps())


def test_names_of_a_manifest_that_is_broken_by_now_do_not_serve_while_the_store_hangs(
    manifest, monkeypatch
):
    monkeypatch.setattr(reader, "READ_SECONDS", 0.05)
    library = SimpleNamespace(trust=manifest, store=SimpleNamespace(root="/store"))

    async def steps() -> None:
        store = StoreReader(library)
        assert await store.aliases() == NAMES
        manifest.broken = True
        with pytest.raises(NotPermittedError):
            await store.aliases()
        manifest.answers.clear()
        with pytest.raises(StoreUnavailableError):
            await store.aliases()
        manifest.answers.set()

    asyncio.run(steps())


def test_a_refusal_has_the_names_that_were_read_last_and_waits_for_no_store(manifest):
    library = SimpleNamespace(trust=manifest, store=SimpleNamespace(root="/store"))
    nothing = SimpleNamespace(ledger=None, backend=None)
    error = RefusedError(f"no {'1' * 32}")

    async def steps() -> None:
        store = StoreReader(library)
        targets = Targets(nothing, store, None, recorder=None)
        assert str(targets.named(error)) == str(error), "nothing was read yet"
        await store.names()
        manifest.answers.clear()
        before = threading.active_count()
        assert str(targets.named(error)) == f"no gzip ({'1' * 32})"
        assert threading.active_count() == before
        manifest.answers.set()
        manifest.broken = True
        await store.names()
        assert str(targets.named(error)) == str(error), "nothing of such a manifest counts"

    asyncio.run(steps())
