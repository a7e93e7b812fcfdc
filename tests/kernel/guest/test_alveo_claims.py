"""A ResourceClaim's life on AMD's own drivers, on a node that has a card of each family."""

from collections.abc import Iterator

import alveo
import pytest
from alveo import ALL, A, Alveo, until
from alveo_node import BLANK, dirt, dirty, equip
from daemon_support import BLANK as DFL_BLANK
from daemon_support import P0
from dra_support import DraNode, dra_name

pytestmark = pytest.mark.skipif(not alveo.MODULES, reason="the guest's: make test-kernel")


@pytest.fixture(scope="module")
def card() -> Iterator[Alveo]:
    (found,) = alveo.install()
    found.fresh()
    yield found
    alveo.remove()


def test_a_claim_from_prepare_to_unprepare_beside_a_dfl_card(card: Alveo):
    region = f"{card.id}-p0"
    with DraNode("1x1") as node:
        equip(node)
        node.set(backend="auto")
        node.up()
        until(lambda: card.image == BLANK, "the free card is blank")
        until(lambda: node.afu(P0) == DFL_BLANK, "and so is that of the other family")
        claim = node.claim("c", region, bitstream=A.hex)
        (device,) = node.dra.prepare(claim)
        assert device.device_name == dra_name(region)
        assert (card.uuid, card.image, card.mask) == (A, A, ALL)
        file = node.file(claim)
        assert file is not None
        edits = file["devices"][0]["containerEdits"]
        assert [one["path"] for one in edits["deviceNodes"]] == [card.node]
        dirty(card)
        assert node.dra.unprepare(claim) == ""
        assert (card.uuid, card.image, card.mask, dirt(card)) == (BLANK, BLANK, ALL, 0)
        assert node.afu(P0) == DFL_BLANK
