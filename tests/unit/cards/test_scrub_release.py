"""What the release may scrub, with everything that can come between two of its steps.

The real plugin on the doubles of `ledger_scene`: the test lets each thread of the
plugin finish when it wants.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
from doubles.cards import BLANK, POISONED, REGIONS, TOO_HOT, WHOLE
from ledger_scene import Scene, scenes
from ledger_support import former
from ledger_world import AFUS, Pod

from fpga_plugin.allocation.journal.records import Condition
from fpga_plugin.allocation.release import release
from fpga_plugin.ids import CardId, RegionId
from fpga_plugin.kubernetes.names import PodUid, ResourceName

AFU = AFUS[0]


class World(Scene):
    """A node with one card, and what kubelet does there."""

    def __init__(self, **more: bool) -> None:
        super().__init__(cards=[2], **more)
        (self.board,) = self.rack.boards.values()
        self.r0, self.r1 = self.regions

    def restart_kubelet(self, instance: str) -> None:
        self.plugin.call(lambda: self.plugin.reconciler.kubelet_found(instance))

    def answer(self) -> None:
        self.plugin.call(self.plugin.queue.sync)

    def settle(self) -> None:
        """Let threads finish and waits end, some seconds of them."""
        for _ in range(50):
            self.plugin.work()
            if not self.plugin.loop.pass_time():
                break

    def until_the_cgroup_is_read(self) -> None:
        """Let threads finish until one is about to look for the last owner."""
        for _ in range(10):
            names = [
                getattr(job.function, "func", job.function).__name__ for job in self.plugin.jobs
            ]
            if names == ["_may_live"]:
                return
            self.plugin.job(0)
        raise AssertionError("nobody looks for the last owner")

    def run(self, *ids: RegionId | CardId) -> Pod:
        """A pod that runs."""
        pod = self.admit(*ids)
        self.start(pod, *[AFU] * len(pod.nodes))
        pod.running = True
        self.touched.clear()
        return pod

    def end(self, pod: Pod) -> None:
        pod.running = False

    def forget(self, pod: Pod) -> None:
        """Kubelet gave its devices on."""
        pod.active = False

    def deallocate(self, pod: Pod) -> None:
        self.forget(pod)
        self.plugin.call(lambda: self.plugin.calls.deallocate(pod.resource, pod.devices))

    def poststop(self, pod: Pod) -> None:
        self.plugin.call(lambda: self.plugin.calls.poststop(pod.resource, pod.devices))


@pytest.fixture
def make() -> Iterator[Callable[..., World]]:
    with scenes(World) as make:
        yield make


@pytest.fixture
def world(make) -> World:
    return make()


# ------------------------------------------------------------------ an implied release


def test_what_an_implied_release_left_is_scrubbed_once_its_pod_is_gone(world: World) -> None:
    a = world.run(world.r0)
    world.forget(a)
    world.admit(world.r0)
    world.settle()
    assert world.condition(world.r0) is Condition.DIRTY
    assert not world.touched, "a still runs"
    world.end(a)
    world.settle()
    assert world.condition(world.r0) is Condition.BLANK
    assert world.rack.slot(world.r0).afu == BLANK
    assert world.ledger.allocations[world.r0].ownership == "CLAIMED"


def test_what_an_implied_release_of_a_card_left_is_scrubbed_once_its_pod_is_gone(
    world: World,
) -> None:
    card = world.board.card.id
    a = world.run(card)
    world.forget(a)
    world.end(a)
    world.admit(card)
    world.settle()
    assert {world.condition(world.r0), world.condition(world.r1)} == {Condition.BLANK}


def test_a_start_that_was_refused_while_the_last_owner_ran_changes_nothing_about_that(
    world: World,
) -> None:
    a = world.run(world.r0)
    world.forget(a)
    b = world.admit(world.r0)
    refused = world.prestart(b, AFU)
    world.plugin.work()
    assert "still runs" in str(refused.exception())
    world.end(a)
    world.settle()
    assert world.condition(world.r0) is Condition.BLANK


def test_a_region_whose_owner_may_have_started_without_prestart_is_not_scrubbed(
    world: World,
) -> None:
    a = world.run(world.r0)
    world.forget(a)
    world.admit(world.r0)
    world.restart_kubelet("life 2")
    world.answer()
    world.end(a)
    world.settle()
    assert not world.touched
    assert world.condition(world.r0) is Condition.DIRTY


def test_a_region_whose_owner_has_started_is_not_scrubbed(world: World) -> None:
    world.run(world.r0)
    world.plugin.call(lambda: world.ledger.work.dirty([world.r0], "its card came back"))
    world.settle()
    assert not world.touched


# ------------------------------------------------------------------ what comes between


def test_a_region_that_gets_an_owner_while_the_last_ones_cgroup_is_read_is_not_scrubbed(
    world: World,
) -> None:
    a = world.run(world.r0)
    world.end(a)
    world.deallocate(a)
    world.until_the_cgroup_is_read()
    # A container that kubelet started unasked: its allocation is taken from kubelet's records.
    world.plugin.call(lambda: world.ledger.device_plugin.adopt(REGIONS, world.r0, PodUid("b"), {}))
    world.settle()
    assert not world.touched


def test_a_kubelet_that_restarts_while_a_cgroup_is_read_unsyncs_the_queue(world: World) -> None:
    a = world.run(world.r0)
    world.end(a)
    world.deallocate(a)
    world.until_the_cgroup_is_read()
    world.restart_kubelet("life 2")
    opened = mock.Mock(wraps=world.rack.open_port)
    world.rack.open_port = opened
    world.settle()
    assert not opened.called, "the very look would disturb a container that began unasked"
    world.answer()
    world.settle()
    assert world.condition(world.r0) is Condition.BLANK


@pytest.mark.parametrize("told", [False, True], ids=["asked", "and reports what is in use"])
def test_a_kubelet_that_restarts_between_two_regions_stops_the_second(make, *, told: bool) -> None:
    world = make(memory=True)
    pods = [world.run(world.r0), world.run(world.r1)]
    for pod in pods:
        world.end(pod)
        world.forget(pod)
    world.board.memory.add("c")
    for region in (world.r0, world.r1):
        world.admit(region)

    def restart() -> None:
        world.on_touch = lambda: None
        world.plugin.loop.call_soon(world.plugin.reconciler.kubelet_found, "life 2")
        if told:  # of what it began without PreStart meanwhile, its records say nothing
            world.plugin.loop.call_soon(world.plugin.queue.sync)
            world.plugin.loop.call_soon(setattr, world.plugin.queue, "_closing", True)  # no more

    world.on_touch = restart
    world.settle()
    assert set(world.touched) == {world.r0}
    assert world.board.memory == {"c"}, "an owner may have begun to use it"
    assert world.condition(world.r0) is Condition.DIRTY
    assert world.condition(world.r1) is Condition.DIRTY


# ------------------------------------------------------------------ PostStops


def test_poststops_that_balance_scrub_where_the_pod_runs_no_container(world: World) -> None:
    a = world.run(world.r0)
    world.end(a)
    world.poststop(a)
    world.settle()
    assert world.condition(world.r0) is Condition.BLANK
    world.deallocate(a)
    assert former(world.ledger, world.r0) == set(), "nobody waits for it again"


def test_the_end_of_one_container_told_twice_does_not_blank_its_successors_region(
    world: World,
) -> None:
    a = world.run(world.r0)
    world.start(a, AFU)  # the first container died, this is the next
    world.touched.clear()
    world.poststop(a)
    world.poststop(a)
    world.settle()
    assert not world.touched
    assert world.rack.slot(world.r0).afu == AFU
    world.deallocate(a)  # by force: it still runs
    world.settle()
    assert not world.touched
    world.end(a)
    world.settle()
    assert world.condition(world.r0) is Condition.BLANK


def test_a_port_that_a_container_has_open_is_not_scrubbed_whatever_kubelet_says(
    world: World,
) -> None:
    a = world.run(world.r0)
    world.end(a)  # as far as its cgroup reports
    world.rack.slot(world.r0).opens.add("a")
    world.poststop(a)
    world.settle()
    assert not world.touched
    world.rack.slot(world.r0).opens.clear()
    world.settle()
    assert world.condition(world.r0) is Condition.BLANK


# ------------------------------------------------------------------ cards that are left alone


def test_a_card_that_another_plugins_pods_hold_is_not_scrubbed(make) -> None:
    world = make(memory=True)
    ledger, card = world.ledger, world.board.card.id
    world.plugin.call(lambda: ledger.hardware.set_foreign({card: "drain the node"}))
    world.plugin.call(lambda: ledger.work.dirty([world.r0], "a pod may have used it"))
    world.settle()
    assert not world.touched
    world.plugin.call(lambda: ledger.hardware.set_foreign({}))
    world.settle()
    assert world.condition(world.r0) is Condition.BLANK


def test_the_memory_of_a_card_that_another_plugins_pods_hold_is_not_cleared(make) -> None:
    world = make(memory=True)
    ledger, card = world.ledger, world.board.card.id
    world.board.memory.add("another plugin's pod")
    world.plugin.call(lambda: ledger.hardware.set_foreign({card: "drain the node"}))
    world.plugin.call(lambda: ledger.work.set_memory_clear_pending(card, open_=True))
    world.settle()
    assert world.board.memory
    world.plugin.call(lambda: ledger.hardware.set_foreign({}))
    world.settle()
    assert not world.board.memory


# ------------------------------------------------------------------ cards whose owners are unknown


def unreconcile(world: World) -> None:
    """Kubelet's records name somebody who cannot be an owner."""
    ledger, card = world.ledger, world.board.card
    world.plugin.call(lambda: ledger.keep_back([card.id]))
    assert ledger.unreconciled == {card.id}


def test_a_card_whose_owners_are_not_known_is_neither_scrubbed_nor_cleared(make) -> None:
    world = make(memory=True)
    ledger, card = world.ledger, world.board.card.id
    unreconcile(world)
    world.board.memory.add("a")
    opened = world.rack.open_port = mock.Mock(wraps=world.rack.open_port)
    world.plugin.call(lambda: ledger.work.dirty([world.r0], "a pod may have used it"))
    world.settle()
    assert not opened.called, "the very look would disturb an owner"
    assert world.board.memory
    world.plugin.call(lambda: ledger.reconciled([card]))
    world.settle()
    assert world.condition(world.r0) is world.condition(world.r1) is Condition.BLANK
    assert not world.board.memory


def test_the_ports_of_a_card_whose_owners_are_not_known_are_not_opened_at_a_drain(make) -> None:
    world = make()
    unreconcile(world)
    opened = world.rack.open_port = mock.Mock(wraps=world.rack.open_port)
    task = world.plugin.begin(world.plugin.actions.drain(world.board.card.id))
    world.settle()
    assert any("kubelet's records" in why for why in task.result().waits_for)
    assert not opened.called


# ------------------------------------------------------------------ memory


def test_a_neighbours_memory_is_not_cleared_by_a_release(make) -> None:
    world = make(memory=True)
    a, _ = world.run(world.r0), world.run(world.r1)
    world.board.memory |= {"a", "b"}
    world.end(a)
    world.deallocate(a)
    world.settle()
    assert world.condition(world.r0) is Condition.BLANK
    assert world.board.memory == {"a", "b"}
    assert world.ledger.memory_clear_pending == {world.board.card.id}


def test_a_neighbours_memory_is_not_cleared_by_a_start(make) -> None:
    world = make(memory=True)
    world.run(world.r1)
    world.board.memory.add("b")
    world.plugin.call(lambda: world.ledger.work.dirty([world.r0], "a pod may have used it"))
    world.run(world.r0)
    assert world.board.memory == {"b"}
    assert world.ledger.memory_clear_pending == {world.board.card.id}


def test_the_memory_of_a_running_pod_that_kubelet_has_forgotten_is_not_cleared(make) -> None:
    world = make(memory=True)
    a, b = world.run(world.r0), world.run(world.r1)
    world.deallocate(b)  # by force: it still runs
    world.board.memory |= {"a", "b"}
    world.end(a)
    world.deallocate(a)
    world.settle()
    assert world.condition(world.r0) is Condition.BLANK
    assert world.board.memory
    assert world.ledger.memory_clear_pending == {world.board.card.id}
    world.end(b)
    world.settle()
    assert not world.board.memory
    assert not world.ledger.memory_clear_pending


def test_the_debt_stays_while_a_region_that_nobody_has_may_still_write(make) -> None:
    """It is DIRTY and cannot be scrubbed: somebody has its port open."""
    world = make(memory=True)
    world.rack.slot(world.r1).opens.add("somebody")
    world.plugin.call(
        lambda: world.ledger.work.dirty([world.r0, world.r1], "a pod may have used it")
    )
    world.settle()
    assert world.condition(world.r0) is Condition.BLANK
    assert world.ledger.memory_clear_pending == {world.board.card.id}
    world.rack.slot(world.r1).opens.clear()
    world.settle()
    assert not world.ledger.memory_clear_pending


def test_the_debt_of_a_card_that_lacks_a_region_waits_for_it(make) -> None:
    world = make(memory=True)
    card = world.board.card
    half = replace(card, regions=card.regions[:1])
    world.board.card = half
    world.plugin.begin(world.plugin.hardware.rescan(card.id))
    world.plugin.work()
    world.plugin.call(lambda: world.ledger.work.set_memory_clear_pending(card.id, open_=True))
    world.board.memory.add("a")
    world.settle()
    assert world.board.memory, "the region that is away may write it"


def test_a_start_that_scrubs_opens_the_debt_before_it_begins(make) -> None:
    world = make(memory=True)
    world.run(world.r1)
    world.plugin.call(
        lambda: world.ledger.work.set_memory_clear_pending(world.board.card.id, open_=False)
    )
    world.plugin.queue.unsync()
    world.plugin.call(lambda: world.ledger.work.dirty([world.r0], "a pod may have used it"))
    memory_clear_pending: list[bool] = []
    world.on_touch = lambda: memory_clear_pending.append(bool(world.ledger.memory_clear_pending))
    world.run(world.r0)
    assert memory_clear_pending
    assert all(memory_clear_pending)


# ------------------------------------------------------------------ rebinding the driver


@pytest.mark.parametrize("kept", ["by a tenancy", "by owners that are not known"])
def test_a_card_that_somebody_may_have_is_not_rebound(make, kept: str) -> None:
    world = make()
    ledger = world.ledger
    if kept == "by a tenancy":
        a = world.run(world.r0)
        world.deallocate(a)
        one, other = world.board.card.regions
        swapped = (replace(one, grant=other.grant), replace(other, grant=one.grant))
        world.board.card = replace(world.board.card, regions=swapped)
        world.plugin.call(lambda: ledger.hardware.card_found(world.board.card, {}, BLANK))
        assert ledger.strangers(world.board.card.regions[1])
    else:
        unreconcile(world)
    check = world.plugin.recovery.check_unused(world.board.card.id)
    hindrance = world.plugin.begin(check)
    world.plugin.work()
    expected = "open to pod pod-0" if kept == "by a tenancy" else "kubelet's records"
    assert expected in str(hindrance.exception())


def test_a_card_of_which_more_than_ports_is_wrong_does_not_pass_for_poisoned(make) -> None:
    world = make()
    card = world.board.card
    one, other = (region.id for region in card.regions)
    ledger, recovery = world.ledger, world.plugin.recovery
    for failing, poisoned in (
        ({}, False),
        ({one: POISONED}, True),
        ({one: POISONED, other: POISONED}, True),
        ({one: POISONED, other: TOO_HOT}, False),
        ({one: TOO_HOT}, False),
    ):
        world.plugin.call(partial(ledger.hardware.set_failing, card.id, failing))
        assert recovery.poisoned(card) == poisoned
        assert recovery.poisoned(card, [one]) == poisoned
    world.plugin.call(partial(ledger.hardware.set_failing, card.id, {one: POISONED}))
    assert not recovery.poisoned(card, [other])


# ------------------------------------------------------------------ the end of an allocation


def test_an_allocation_ends_under_its_own_resource_alone_and_its_card_is_looked_at(
    world: World,
) -> None:
    world.admit(world.r0)
    added: list[CardId] = []
    queue = SimpleNamespace(add=added.append)
    ledger = world.ledger
    release(ledger, queue, ResourceName(WHOLE), [world.r0, "unknown"])  # type: ignore[arg-type]
    assert world.r0 in ledger.allocations
    assert added == []
    world.plugin.call(
        lambda: release(ledger, queue, ResourceName(REGIONS), [world.r0, world.r0])  # type: ignore[arg-type]
    )
    assert world.r0 not in ledger.allocations
    assert added == [world.board.card.id]


# ------------------------------------------------------------------ device numbers


def number(world: World, region: RegionId, device: str) -> None:
    """What its node has once the region is held: VFIO numbers a group when a function is bound."""
    found = world.ledger.region(region)
    assert found is not None
    (node,) = found.grant.nodes
    world.rack.numbers_now[region] = {node: device}


def test_no_container_starts_on_a_region_whose_device_number_a_living_pod_has(
    world: World,
) -> None:
    """Invariant 10: its path is nobody else's, and the other pod opens it by the number."""
    number(world, world.r0, "243:0")
    world.run(world.r0)
    b = world.admit(world.r1)
    number(world, world.r1, "243:0")
    refused = world.prestart(b, AFU)
    world.plugin.work()
    assert "the device number of region" in str(refused.exception())
    assert not world.touched


def test_a_region_whose_device_number_a_living_pod_has_is_scrubbed_once_that_pod_is_gone(
    world: World,
) -> None:
    number(world, world.r0, "243:0")
    a, b = world.run(world.r0), world.run(world.r1)
    number(world, world.r1, "243:0")
    for pod in (b, a):
        world.end(b)
        world.deallocate(pod)
        world.settle()
        assert world.condition(world.r1) is Condition.DIRTY
    assert not world.touched
    world.end(a)
    world.settle()
    assert {world.condition(world.r0), world.condition(world.r1)} == {Condition.BLANK}
