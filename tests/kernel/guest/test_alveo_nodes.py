"""Nodes with other settings on AMD's drivers: DRA, both families, tenants who load their own."""

import errno
from collections.abc import Iterator

import alveo
import pytest
from alveo import ALL, TENANT_LOADS, A, Alveo, B, fails, until
from alveo_node import BLANK, CARDS, REGIONS, AlveoNode, dirt, dirty, equip, request
from daemon_support import BLANK as DFL_BLANK
from daemon_support import HEALTHY, NO_REQUEST, P0
from dra_support import DraNode, dra_name

pytestmark = pytest.mark.skipif(not alveo.MODULES, reason="the guest's: make test-alveo")


@pytest.fixture(scope="module")
def plugged() -> Iterator[Alveo]:
    (found,) = alveo.install()
    yield found
    alveo.remove()


@pytest.fixture
def card(plugged: Alveo) -> Alveo:
    plugged.fresh()
    return plugged


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


def test_a_tenant_who_may_loads_his_own_and_is_cleaned_after(card: Alveo):
    region = f"{card.id}-p0"
    with AlveoNode(card, xrt_tenant_loads="true") as node:
        node.up()
        kubelet = node.kubelet
        assert card.mask == ALL  # nobody has it
        kubelet.allocate(region, resource=REGIONS)
        node.prestart(region, NO_REQUEST)
        assert (card.image, card.mask) == (BLANK, TENANT_LOADS)
        card.load(B)
        assert (card.uuid, card.image) == (B, B)
        with fails(errno.ENOTSUP):
            card.hot_reset()
        dirty(card)
        kubelet.deallocate(region, resource=REGIONS)
        kubelet.until_health(card.id, HEALTHY, CARDS)
        assert (card.uuid, card.image, card.mask, dirt(card)) == (BLANK, BLANK, ALL, 0)
        # Who names an image has the same promise as ever.
        kubelet.allocate(region, resource=REGIONS)
        node.prestart(region, request(A))
        assert (card.image, card.mask) == (A, ALL)
