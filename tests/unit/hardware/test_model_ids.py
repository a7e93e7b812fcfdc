"""Ids of cards and regions, which are made with them (`hardware/model.py`)."""

from dataclasses import replace

from doubles.cards import make_card

from fpga_plugin.ids import PciAddress


def test_a_changed_copy_has_the_id_of_what_it_is_now():
    card = make_card(2)
    moved = replace(card, address=PciAddress.parse("0001:3b:00.0"))
    assert (card.id, moved.id) == (str(card.address).replace(":", "-"), "0001-3b-00.0")
    region = card.regions[1]
    assert region.id == f"{card.id}-p1"
    assert replace(region, port_id=7, card=moved.id).id == "0001-3b-00.0-p7"


def test_the_id_adds_nothing_to_what_makes_two_of_them_equal():
    card = make_card(2)
    assert replace(card) == card
    assert hash(replace(card.regions[0])) == hash(card.regions[0])
    assert replace(card, ports=3) != card
    assert f"{card.id}-p0" not in repr(card)
