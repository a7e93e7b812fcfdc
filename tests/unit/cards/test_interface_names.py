"""Resources are called as the store's manifest says, and as before while nothing says otherwise."""

import asyncio
import itertools

import pytest
import structlog
from doubles import LIMIT
from doubles.cards import INTERFACE, OTHER_INTERFACE, PREFIX, REGIONS, device, make_card
from ledger_support import make_ledger

from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.cards import interface_names
from fpga_plugin.cards.interface_names import InterfaceNames
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.ids import Alias, InterfaceId
from fpga_plugin.kubernetes.names import ResourceName

CARD = make_card(1)
OTHER = make_card(2, nodes=(2, 3), interface_id=OTHER_INTERFACE)
P0 = device(CARD, 0)
BOARD, BOX = Alias("board"), Alias("box")
NAMED = ResourceName(f"{PREFIX}/region-board")

Manifest = dict[InterfaceId, Alias] | None | FpgaPluginError


class Store:
    """Its manifest is read again and again; the last one stays."""

    def __init__(self, *manifests: Manifest) -> None:
        self.manifests = list(manifests)
        self.asked = 0

    async def interface_aliases(self) -> dict[InterfaceId, Alias] | None:
        self.asked += 1
        told = self.manifests.pop(0) if len(self.manifests) > 1 else self.manifests[0]
        if isinstance(told, FpgaPluginError):
            raise told
        return told


def looked(ledger: Ledger, *manifests: Manifest) -> list[str]:
    """What the log says when each of these is looked at in turn."""
    names = InterfaceNames(ledger, Store(*manifests))

    async def look() -> None:
        for _ in manifests:
            await names.look()

    with structlog.testing.capture_logs() as lines:
        asyncio.run(look())
    return [str(line["event"]) for line in lines]


def make() -> Ledger:
    return make_ledger(CARD, OTHER)[0]


NEW = "aliases of interface ids"
UNKNOWN = "aliases of interface ids are not known: resources keep their names"
WAITS = "an alias waits: a pod has a device by it for another interface id"


@pytest.mark.parametrize(
    ("then", "named"),
    [
        ([], NAMED),
        ([None], NAMED),
        ([FpgaPluginError("the store does not answer")], NAMED),
        ([None, FpgaPluginError("the store does not answer"), None], NAMED),
        ([{}], REGIONS),
        ([{OTHER_INTERFACE: BOARD}], REGIONS),
    ],
    ids=["once", "no manifest", "no answer", "neither for long", "an empty one", "another id's"],
)
def test_only_a_manifest_that_says_otherwise_takes_a_name_away(
    then: list[Manifest], named: ResourceName
) -> None:
    """A name that comes and goes with a network file system takes its pods' place with it."""
    ledger = make()
    looked(ledger, {INTERFACE: BOARD}, *then)
    assert ledger.naming.present_resource(P0) == named


@pytest.mark.parametrize(
    ("manifests", "told"),
    [
        ([{}], []),
        ([{INTERFACE: BOARD}] * 2, [NEW]),
        ([{INTERFACE: BOARD}, {INTERFACE: BOX}], [NEW, NEW]),
        ([FpgaPluginError("one")] * 2, [UNKNOWN]),
        ([FpgaPluginError("one"), FpgaPluginError("two")], [UNKNOWN, UNKNOWN]),
        ([FpgaPluginError("one"), None, FpgaPluginError("one")], [UNKNOWN, UNKNOWN]),
        ([FpgaPluginError("")], []),
    ],
    ids=["none", "same", "changed", "same problem", "another problem", "it is back", "no words"],
)
def test_what_is_new_is_said_once(manifests: list[Manifest], told: list[str]) -> None:
    assert looked(make(), *manifests) == told


def test_an_alias_that_a_pod_has_is_said_to_wait_once_and_again_when_it_waits_again() -> None:
    ledger = make()
    looked(ledger, {INTERFACE: BOARD})
    ledger.device_plugin.allocate(NAMED, [P0])
    swapped: Manifest = {OTHER_INTERFACE: BOARD}
    told = looked(ledger, swapped, swapped, {}, swapped)
    assert told.count(WAITS) == 2
    assert ledger.naming.present_resource(device(OTHER, 0)) == f"{PREFIX}/region-{OTHER_INTERFACE}"


def test_a_journal_that_cannot_be_written_leaves_the_names_and_the_next_look_gives_them() -> None:
    ledger, journal = make_ledger(CARD)
    journal.failing = 1
    told = looked(ledger, {INTERFACE: BOARD}, {INTERFACE: BOARD})
    assert told == ["resources keep their names", NEW]
    assert ledger.naming.present_resource(P0) == NAMED


def test_the_manifest_is_looked_at_for_as_long_as_the_plugin_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One look a tick, the first after one: `plugin` looked before."""
    waited: list[float] = []
    asked: list[int] = []
    store, ledger = Store(None, {INTERFACE: BOARD}), make()

    async def tick(seconds: float) -> None:
        waited.append(seconds)
        asked.append(store.asked)
        assert len(waited) < 50
        if ledger.naming.present_resource(P0) == NAMED:
            raise asyncio.CancelledError
        await asyncio.sleep(0)

    monkeypatch.setattr(interface_names, "tick", tick)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(asyncio.wait_for(InterfaceNames(ledger, store).run(), LIMIT))
    assert set(waited) == {interface_names.LOOK_SECONDS}
    assert asked == list(itertools.islice(itertools.count(), len(waited)))
