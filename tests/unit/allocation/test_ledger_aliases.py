"""What a resource with an alias means, as long as a pod has a device by it."""

from dataclasses import replace

import pytest
from doubles.cards import AFU, INTERFACE, OTHER_INTERFACE, PREFIX, device, make_card
from ledger_support import MemoryJournal, found, scrub

from fpga_plugin.allocation.journal.records import AliasBinding, Change
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.hardware.model import Card
from fpga_plugin.ids import Alias, InterfaceId, Resource
from fpga_plugin.kubernetes.names import ResourceName

CARD, OTHER = make_card(1), make_card(2, nodes=(2, 3), interface_id=OTHER_INTERFACE)
P0 = device(CARD, 0)
BOARD = Alias("board")
REGION, WHOLE = ResourceName(f"{PREFIX}/region-board"), ResourceName(f"{PREFIX}/fpga-board")


def life(
    journal: MemoryJournal,
    *cards: Card,
    functions: bool = False,
    aliases: bool = True,
    shells: bool = False,
) -> Ledger:
    ledger = Ledger(
        prefix=PREFIX,
        journal=journal,
        snapshot=journal.snapshot,
        boot_id="boot",
        functions=functions,
        aliases=aliases,
        shells=shells,
    )
    for card in cards or (CARD, OTHER):
        found(ledger, card)
        scrub(ledger, card)
    return ledger


@pytest.fixture
def journal() -> MemoryJournal:
    return MemoryJournal()


@pytest.fixture
def ledger(journal: MemoryJournal) -> Ledger:
    return life(journal)


def means(ledger: Ledger, name: ResourceName) -> InterfaceId | None:
    return None if (known := ledger.naming.resource(name)) is None else known.interface_id


def test_free_devices_are_listed_by_the_alias_from_then_on(ledger: Ledger) -> None:
    assert ledger.naming.call_interfaces({INTERFACE: BOARD}) == {}
    assert ledger.aliases == {INTERFACE: BOARD}
    assert ledger.naming.present_resource(P0) == REGION
    assert {REGION, WHOLE} <= ledger.resources, "kubelet hears of both"


def test_an_alias_that_a_pod_has_goes_to_another_interface_id_only_after_it(ledger: Ledger) -> None:
    """Kubelet admits the pod again by this name: it must not be given another kind of card."""
    ledger.naming.call_interfaces({INTERFACE: BOARD})
    ledger.device_plugin.allocate(REGION, [P0])
    for _ in range(2):
        assert ledger.naming.call_interfaces({OTHER_INTERFACE: BOARD}) == {
            OTHER_INTERFACE: (BOARD, REGION)
        }
        assert ledger.aliases == {}
        assert means(ledger, REGION) == INTERFACE
    ledger.device_plugin.release([P0])
    assert ledger.naming.call_interfaces({OTHER_INTERFACE: BOARD}) == {}
    assert means(ledger, REGION) == OTHER_INTERFACE
    assert ledger.naming.present_resource(device(OTHER, 0)) == REGION


def test_an_alias_that_says_the_same_as_before_is_given_though_a_pod_has_it(
    ledger: Ledger, journal: MemoryJournal
) -> None:
    """The manifest is read again and again."""
    ledger.naming.call_interfaces({INTERFACE: BOARD})
    ledger.device_plugin.allocate(REGION, [P0])
    writes = journal.writes
    assert ledger.naming.call_interfaces({INTERFACE: BOARD}) == {}
    assert ledger.aliases == {INTERFACE: BOARD}
    assert journal.writes == writes, "nothing is new"


def test_an_alias_that_is_withdrawn_is_left_to_the_pods_that_have_it(
    ledger: Ledger, journal: MemoryJournal
) -> None:
    ledger.naming.call_interfaces({INTERFACE: BOARD})
    ledger.device_plugin.allocate(REGION, [P0])
    ledger.naming.call_interfaces({})
    assert ledger.alias_bindings == {REGION: AliasBinding(INTERFACE, current=False)}
    assert ledger.allocations[P0].resource == REGION
    assert ledger.naming.present_resource(device(CARD, 1)) != REGION
    writes = journal.writes
    ledger.naming.call_interfaces({})
    assert journal.writes == writes
    again = life(journal)
    assert means(again, REGION) == INTERFACE, "after a restart, too"
    again.device_plugin.release([P0])
    again.naming.call_interfaces({})
    assert again.alias_bindings == {}


@pytest.mark.parametrize("aliases", [True, False])
def test_what_an_alias_meant_holds_after_a_restart_where_aliases_are_wanted(
    ledger: Ledger, journal: MemoryJournal, *, aliases: bool
) -> None:
    """The store may not answer for a while; where nobody wants aliases, free devices have none."""
    ledger.naming.call_interfaces({INTERFACE: BOARD, OTHER_INTERFACE: Alias("box")})
    ledger.device_plugin.allocate(REGION, [P0])
    again = life(journal, aliases=aliases)
    assert again.aliases == ({INTERFACE: BOARD, OTHER_INTERFACE: Alias("box")} if aliases else {})
    assert means(again, REGION) == INTERFACE, "a pod has it"
    if not aliases:
        assert again.alias_bindings == {REGION: AliasBinding(INTERFACE, current=False)}


@pytest.mark.parametrize("what", ["a whole image", "functions"])
def test_what_is_served_otherwise_gets_no_resource_by_an_alias(
    journal: MemoryJournal, what: str
) -> None:
    """A resource, once registered, stays registered: a list that is empty for ever is noise."""
    ledger = life(journal, functions=what == "functions")
    if what == "a whole image":
        ledger.hardware.card_gone(CARD.id)
        found(ledger, replace(CARD, reprogrammable=False))
    ledger.naming.call_interfaces({INTERFACE: BOARD})
    assert not {REGION, WHOLE} & ledger.resources


SHELL = ResourceName("amd.com/xilinx_u55c_gen3x16_xdma_base_3-0")
ALVEO = replace(make_card(3, nodes=(4,)), vendor_resource=SHELL)
AGAIN = replace(make_card(4, nodes=(5,)), vendor_resource=SHELL)
RENAMED = replace(make_card(4, nodes=(5,), interface_id=OTHER_INTERFACE), vendor_resource=SHELL)
P3, P4 = device(ALVEO, 0), device(AGAIN, 0)


def test_cards_are_given_out_by_their_vendors_name_alone_where_that_is_wanted(
    journal: MemoryJournal,
) -> None:
    ledger = life(journal, ALVEO, AGAIN, CARD, shells=True)
    assert ledger.naming.resources_of(ALVEO) == (SHELL, None)
    assert ledger.naming.present_resource(P4) == SHELL
    assert ledger.naming.present_resource(device(ALVEO)) is None, "no whole cards"
    assert ledger.naming.resources_of(CARD) != (SHELL, None), "it has no such name"
    assert means(ledger, SHELL) == INTERFACE
    assert ledger.aliases == {}, "it is no alias of the interface id"
    plain = life(MemoryJournal(), ALVEO)
    assert SHELL not in plain.naming.resources_of(ALVEO)
    assert plain.alias_bindings == {}


def test_aliases_leave_the_vendors_names_as_they_are(journal: MemoryJournal) -> None:
    ledger = life(journal, ALVEO, shells=True)
    ledger.naming.call_interfaces({INTERFACE: BOARD})
    assert ledger.naming.present_resource(P3) == SHELL
    assert not {REGION, WHOLE} & ledger.resources
    ledger.naming.call_interfaces({})
    assert means(ledger, SHELL) == INTERFACE


def test_a_vendors_name_means_one_interface_id_while_a_card_or_a_pod_has_it(
    journal: MemoryJournal,
) -> None:
    """Another card of that name is given out by its interface id meanwhile."""
    ledger = life(journal, ALVEO, RENAMED, shells=True)
    assert means(ledger, SHELL) == INTERFACE
    assert SHELL not in ledger.naming.resources_of(RENAMED)
    ledger.device_plugin.allocate(SHELL, [P3])
    ledger.hardware.card_gone(ALVEO.id)
    found(ledger, replace(RENAMED, numa_node=1))
    assert means(ledger, SHELL) == INTERFACE, "a pod has it"
    again = life(journal, RENAMED, shells=True)
    assert means(again, SHELL) == INTERFACE, "after a restart, too"
    again.device_plugin.release([P3])
    found(again, RENAMED)
    assert means(again, SHELL) == OTHER_INTERFACE
    assert again.naming.resources_of(RENAMED) == (SHELL, None)


@pytest.mark.parametrize("shells", [True, False])
def test_a_vendors_name_is_kept_over_a_restart_where_it_is_wanted(
    journal: MemoryJournal, *, shells: bool
) -> None:
    life(journal, ALVEO, shells=True).device_plugin.allocate(SHELL, [P3])
    again = life(journal, CARD, shells=shells)  # the card is not there yet
    assert again.alias_bindings == {SHELL: AliasBinding(INTERFACE, current=shells)}
    assert again.naming.named_resource(SHELL).interface_id == INTERFACE
    if not shells:  # and when it is wanted again while the pod runs
        again = life(journal, AGAIN, shells=True)
        assert again.naming.present_resource(P4) == SHELL
        again = life(journal, CARD)
    again.device_plugin.release([P3])
    assert (SHELL in life(journal, CARD, shells=shells).alias_bindings) is shells


def test_while_no_card_is_there_the_names_of_the_last_ones_are_registered(
    journal: MemoryJournal,
) -> None:
    """A card may be in its reset when the plugin starts: kubelet hears of no other resource."""
    by_id = Resource.parse(f"{PREFIX}/region-{INTERFACE}")
    assert life(journal, ALVEO, CARD, shells=True).naming.lists(by_id), "CARD has no other name"
    assert not life(journal, ALVEO, shells=True).naming.lists(by_id)
    assert not life(journal, OTHER, shells=True).naming.lists(by_id)
    assert life(journal, OTHER).naming.lists(by_id), "where nobody wants it"
    assert life(MemoryJournal(), OTHER, shells=True).naming.lists(by_id)


THIRD_INTERFACE = InterfaceId("89abcdef0123456789abcdef01234567")
THIRD = make_card(5, nodes=(6,), interface_id=THIRD_INTERFACE)


def test_a_vendors_name_that_one_of_several_cards_has_is_not_taken_by_another(
    journal: MemoryJournal,
) -> None:
    ledger = life(journal, ALVEO, THIRD, RENAMED, shells=True)
    assert means(ledger, SHELL) == INTERFACE
    assert SHELL not in ledger.naming.resources_of(RENAMED)


BY_ID = ResourceName(f"{PREFIX}/region-{INTERFACE}")


@pytest.mark.parametrize(
    ("name", "meaning", "asked", "listed"),
    [
        (SHELL, AliasBinding(INTERFACE, current=True), BY_ID, False),
        (SHELL, AliasBinding(INTERFACE, current=False), BY_ID, True),
        (SHELL, AliasBinding(OTHER_INTERFACE, current=True), BY_ID, True),
        (REGION, AliasBinding(INTERFACE, current=True), REGION, True),
        (SHELL, AliasBinding(INTERFACE, current=True), SHELL, True),
        (SHELL, AliasBinding(INTERFACE, current=False), SHELL, False),
    ],
)
def test_while_no_card_is_there_a_vendors_name_of_its_interface_id_alone_replaces_others(
    journal: MemoryJournal,
    name: ResourceName,
    meaning: AliasBinding,
    asked: ResourceName,
    *,
    listed: bool,
) -> None:
    ledger = life(journal, THIRD, shells=True)
    ledger.commit(Change(alias_bindings={name: meaning}))
    resource = ledger.naming.resource(asked)
    assert resource is not None
    assert ledger.naming.lists(resource) is listed


def test_what_has_its_name_is_not_named_again(journal: MemoryJournal) -> None:
    """Else each look at a card would write, and list every card again."""
    ledger = life(journal, ALVEO, CARD, shells=True)
    change = Change()
    for card in (ALVEO, CARD):
        ledger.naming.name_card(change, card)
    assert change == Change()
    functions = life(MemoryJournal(), functions=True)
    functions.naming.name_function(change, CARD.regions[0].id, AFU)
    assert len(change.resources) == 1
    functions.commit(change)
    again = Change()
    functions.naming.name_function(again, CARD.regions[0].id, AFU)
    assert again == Change()
