"""Cards of other kinds meet the same faults as a PAC A10: an OFS slot, and a card without PR.

Their regions are reset through other files, and one of them is never programmed; what is promised
of a region in trouble, and of its owner, is the same.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import pytest
from daemon_support import (
    AFU,
    BLANK,
    CARD,
    FACTORY,
    HEALTHY,
    ID,
    NO_REQUEST,
    P0,
    REGIONS,
    UNHEALTHY,
    Node,
    Refused,
    request,
)
from test_draining import card

from fpga_plugin.ids import AfuId, InterfaceId, Resource, ResourceKind

GONE = ""

FUNCTION = Resource("fpga.intel.com", ResourceKind.AF, InterfaceId(ID), AfuId(FACTORY)).name


@dataclass(frozen=True)
class Kind:
    """How a kind of card is served.

    Attributes:
        cards: of the simulation.
        resource: that its region is.
        env: what a container asks for.
        holds: what the region then holds.
        clean: what it holds when nobody has it.
        settings: of the plugin.
    """

    cards: str
    resource: str
    env: Mapping[str, str]
    holds: str
    clean: str
    settings: Mapping[str, str] = field(default_factory=dict)


SLOT = Kind("1x1+ofs", REGIONS, request(AFU), AFU, BLANK)
FIXED = Kind("1x1+no-pr", FUNCTION, NO_REQUEST, FACTORY, FACTORY, {"advertise": "af"})


class Served:
    """A node with one such card, and what is done to its region."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.node = Node(kind.cards, **kind.settings)

    def up(self) -> None:
        self.node.kubelet.start()
        self.node.start()
        self.until(HEALTHY)

    def until(self, health: str) -> None:
        """Wait until the region is listed so; empty: not at all."""
        self.node.kubelet.until(self.kind.resource, {P0: health} if health else {})

    def allocate(self) -> None:
        self.node.kubelet.allocate(P0, resource=self.kind.resource)

    def prestart(self) -> None:
        self.node.kubelet.prestart(P0, env=self.kind.env, resource=self.kind.resource)

    def start(self) -> None:
        self.allocate()
        self.prestart()
        assert self.node.afu(P0) == self.kind.holds

    def release(self) -> None:
        self.node.kubelet.deallocate(P0, resource=self.kind.resource)

    def refused(self, call: Callable[[], None]) -> Refused:
        with pytest.raises(Refused) as caught:
            call()
        return caught.value

    def replace_card(self) -> None:
        """Another card comes in the place of this one, which has not failed."""
        self.node.unplug(CARD)
        self.node.plugin.until_logged("card gone", card=CARD)
        self.node.plug(CARD)


@pytest.fixture(params=[SLOT, FIXED], ids=["OFS slot", "N3000"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    one = Served(request.param)
    with one.node:
        one.up()
        yield one
        if request.param is FIXED:
            lines = [line for life in one.node.lives for line in life.lines]
            steps = [step for line in lines for step in line.get("steps", ())]
            assert not [step for step in steps if step.startswith("program")]


def test_an_allocation_lives_and_the_next_one_finds_the_region_clean(served: Served) -> None:
    for _ in range(2):
        served.start()
        mark = served.node.plugin.mark
        served.release()
        served.node.plugin.until_logged("region scrubbed", mark, region=P0, error=None)
        served.until(HEALTHY)
        assert served.node.afu(P0) == served.kind.clean


@pytest.mark.parametrize("word", ["thermal", "fatal"])
def test_a_region_in_trouble_is_unhealthy_as_long_as_that_lasts(served: Served, word: str) -> None:
    mark = served.node.plugin.mark
    fault = served.node.arm(P0, word)
    served.until(UNHEALTHY)
    assert served.refused(served.allocate).code == "FAILED_PRECONDITION"
    fault.unlink()
    served.until(HEALTHY)
    served.node.plugin.until_logged("region scrubbed", mark, region=P0, error=None)
    assert served.node.afu(P0) == served.kind.clean


def test_an_owned_region_in_trouble_keeps_its_owner(served: Served) -> None:
    served.start()
    served.node.caught_up()
    mark = served.node.plugin.mark
    fault = served.node.arm(P0, "thermal")
    served.until(UNHEALTHY)
    assert served.refused(served.prestart).code == "FAILED_PRECONDITION"
    fault.unlink()
    served.until(HEALTHY)
    assert served.node.steps(P0, mark) == []
    served.prestart()
    assert served.node.afu(P0) == served.kind.holds


def test_a_region_that_somebody_has_open_is_not_worked_on(served: Served) -> None:
    served.allocate()
    fault = served.node.arm(P0, "port-open")
    mark = served.node.plugin.mark
    busy = served.refused(served.prestart)
    assert busy.code == "FAILED_PRECONDITION"
    assert P0 in busy.message or "/dev/vfio/" in busy.message
    assert served.node.steps(P0, mark) == []
    fault.unlink()
    served.prestart()
    fault = served.node.arm(P0, "port-open")
    mark = served.node.plugin.mark
    served.release()
    served.until(UNHEALTHY)
    assert served.node.afu(P0) == served.kind.holds
    fault.unlink()
    served.node.plugin.until_logged("region scrubbed", mark, region=P0, error=None)
    served.until(HEALTHY)


def test_a_port_that_does_not_acknowledge_its_reset_is_lost_until_its_card_is_replaced(
    served: Served,
) -> None:
    served.allocate()
    fault = served.node.arm(P0, "port-deaf")
    # The driver holds such a port in reset: a look at its AFU id may see that before the call, the
    # reset within it, or the last look before the region is handed over.
    refused = served.refused(served.prestart)
    assert refused.code in {"FAILED_PRECONDITION", "INTERNAL", "UNAVAILABLE"}
    fault.unlink()
    assert served.refused(served.prestart).code == "FAILED_PRECONDITION"
    served.release()
    served.until(UNHEALTHY)
    served.node.again()
    # A function whose id was not read since the last tenant is nobody's resource: not listed.
    assert served.refused(served.allocate).code in {"FAILED_PRECONDITION", "NOT_FOUND"}
    served.replace_card()
    served.until(HEALTHY)


def test_a_failed_scrub_keeps_the_last_tenants_region_back(served: Served) -> None:
    served.start()
    served.node.arm(P0, "port-deaf")
    mark = served.node.plugin.mark
    served.release()
    served.node.plugin.until_logged("region failed", mark, region=P0)
    served.until(UNHEALTHY)
    assert served.refused(served.allocate).code == "FAILED_PRECONDITION"


def test_an_allocation_outlives_its_card(served: Served) -> None:
    served.start()
    served.node.unplug(CARD)
    served.until(UNHEALTHY)
    gone = served.refused(served.prestart)
    assert gone.code == "FAILED_PRECONDITION"
    mark = served.node.plugin.mark
    served.node.plug(CARD)
    served.until(HEALTHY)
    served.prestart()
    assert "quiesce" in served.node.steps(P0, mark)
    assert served.node.afu(P0) == served.kind.holds


def test_a_drained_card_is_off_the_list_after_a_restart_too(served: Served) -> None:
    card(served.node, "drain")
    served.until(GONE)
    served.node.again()
    served.until(GONE)
    card(served.node, "undrain")
    served.until(HEALTHY)
    served.start()


def test_killed_with_an_owner_it_finds_the_region_as_it_was(served: Served) -> None:
    served.start()
    served.node.plugin.kill()
    served.node.restarted()
    served.until(HEALTHY)
    assert served.node.afu(P0) == served.kind.holds
    assert served.node.steps(P0) == []
    mark = served.node.plugin.mark
    served.release()
    served.node.plugin.until_logged("region scrubbed", mark, region=P0, error=None)
    served.until(HEALTHY)


@pytest.mark.parametrize("word", ["pr-error", "pr-stuck"])
def test_a_failed_pr_takes_a_slot_out_and_is_nothing_to_a_card_without_pr(
    served: Served, word: str
) -> None:
    served.allocate()
    fault = served.node.arm(P0, word)
    if served.kind is FIXED:
        served.prestart()
        assert fault.exists(), "nothing was programmed"
        return
    assert served.refused(served.prestart).code == "INTERNAL"
    assert served.refused(served.prestart).code == "FAILED_PRECONDITION"
    served.release()
    served.until(UNHEALTHY)
    served.node.again()
    served.until(UNHEALTHY)
    served.replace_card()
    served.until(HEALTHY)
    assert served.node.afu(P0) == BLANK


def test_a_slot_whose_functions_exist_is_not_rebound() -> None:
    """Rebinding would take them away under whoever uses one (dfl-pci removes them)."""
    one = Served(replace(SLOT, settings={"recovery": "rebind"}))
    with one.node:
        one.up()
        one.allocate()
        one.node.arm(P0, "pr-error")
        assert one.refused(one.prestart).code == "INTERNAL"
        one.release()
        one.until(UNHEALTHY)
        told = one.node.plugin.until_logged("card not rebound", card=CARD)
        assert "has 2 virtual functions" in told["reason"]
        assert not one.node.plugin.logged("card rebound")


def test_a_card_without_pr_is_rebound_where_that_is_allowed() -> None:
    one = Served(replace(FIXED, settings={**FIXED.settings, "recovery": "rebind"}))
    with one.node:
        one.up()
        one.start()
        fault = one.node.arm(P0, "port-deaf")
        mark = one.node.plugin.mark
        one.release()
        one.node.plugin.until_logged("region failed", mark, region=P0)
        fault.unlink()
        one.node.plugin.until_logged("card rebound", mark, card=CARD)
        one.until(HEALTHY)
        assert one.node.afu(P0) == FACTORY
        one.start()
