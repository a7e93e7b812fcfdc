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
        assert str(await targets.explained(error)) == str(error), "nothing was read yet"
        await store.names()
        manifest.answers.clear()
        before = threading.active_count()
        assert str(await targets.explained(error)) == f"no gzip ({'1' * 32})"
        assert threading.active_count() == before
        manifest.answers.set()
        manifest.broken = True
        await store.names()
        assert str(await targets.explained(error)) == str(error), (
            "nothing of such a manifest counts"
        )

    asyncio.run(steps())


def entry(interface: str, bitstream: str | None, title: str):
    contents = SimpleNamespace(name=title)
    return SimpleNamespace(interface_id=interface, bitstream_id=bitstream, contents=contents)


ENTRIES = (
    entry("0" * 32, "1" * 32, "hello_afu"),
    entry("2" * 32, "3" * 32, "hello_afu"),
    entry("2" * 32, None, "hello_afu"),
    entry("2" * 32, "4" * 32, "another"),
    SimpleNamespace(interface_id="2" * 32, bitstream_id="5" * 32, contents=None),
)


@pytest.mark.parametrize(
    ("title", "interface", "ids"),
    [
        ("hello_afu", "2" * 32, "3" * 32),
        ("'hello_afu'", "2" * 32, "3" * 32),
        ("hello_afu", None, f"{'1' * 32} or {'3' * 32}"),
        ("hello", None, ""),
    ],
)
def test_the_ids_of_a_title_are_found(title, interface, ids):
    store = SimpleNamespace(root="/store", list=lambda: ENTRIES)
    made = StoreReader(SimpleNamespace(trust=None, store=store))
    assert asyncio.run(made.titled(title, interface)) == ids


def test_no_refusal_waits_for_titles_of_a_store_that_hangs(monkeypatch):
    monkeypatch.setattr(reader, "LOOK_SECONDS", 0.05)
    answers = threading.Event()
    store = SimpleNamespace(root="/store", list=lambda: answers.wait(60) and ENTRIES)
    made = StoreReader(SimpleNamespace(trust=None, store=store))

    async def steps() -> None:
        assert await made.titled("hello_afu") == ""
        answers.set()

    asyncio.run(steps())
