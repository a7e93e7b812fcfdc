"""What a tenant's image may have caused stops nobody who would mend it, and only him.

An accelerator that hangs reads all ones, as a card that is off the bus does; its port reports them
apart. PCI Express errors stay noted in the card's FME until somebody clears them.
"""

from collections.abc import Callable

import pytest
from doubles.cards import POISONED, TOO_HOT
from ledger_scene import Scene
from ledger_support import trouble
from ledger_world import AFUS, Pod

from fpga_plugin.allocation.journal.records import Condition
from fpga_plugin.allocation.names import card_of
from fpga_plugin.cards.actions import CardActions
from fpga_plugin.cards.recovery import Recovery
from fpga_plugin.errors import AcceleratorSilentError, RefusedError
from fpga_plugin.hardware.faults import Fault, FaultKind
from fpga_plugin.ids import CardId, RegionId

AFU, OTHER_AFU = AFUS
CURABLE = Fault(FaultKind.CURABLE, "hung: it does not answer")


@pytest.fixture
def scene(make: Callable[..., Scene]) -> Scene:
    return make(cards=[2])


def card(scene: Scene) -> CardId:
    return card_of(scene.regions[0])


def hang(scene: Scene, region: RegionId, how: str = "hung") -> None:
    """And the plugin has looked."""
    scene.rack.slot(region).silent = how
    look(scene)


def look(scene: Scene) -> None:
    scene.plugin.begin(scene.plugin.hardware.check(card(scene)))
    scene.plugin.work()


def tenant(scene: Scene, region: RegionId) -> Pod:
    pod = scene.admit(region)
    scene.start(pod, AFU)
    return pod


def leave(scene: Scene, pod: Pod) -> None:
    pod.active = False
    scene.plugin.call(lambda: scene.plugin.calls.deallocate(pod.resource, pod.devices))
    scene.plugin.work()


def retry(scene: Scene) -> None:
    plugin = scene.plugin
    actions = CardActions(plugin.operations, plugin.recovery, plugin.hardware)
    task = plugin.begin(actions.retry(card(scene)))
    plugin.work()
    task.result()


def test_a_hung_accelerator_is_scrubbed_when_its_owner_is_gone_and_given_out_again(
    scene: Scene,
) -> None:
    region, other = scene.regions
    pod = tenant(scene, region)
    hang(scene, region)
    assert scene.ledger.failing == {region: CURABLE}
    assert trouble(scene.ledger, region)
    with pytest.raises(RefusedError, match="faulted: hung"):
        scene.admit(region)
    leave(scene, pod)
    assert scene.condition(region) is Condition.BLANK
    programs = scene.rack.programs
    look(scene)
    assert not trouble(scene.ledger, region), "at the first look"
    scene.plugin.work()
    assert scene.rack.programs == programs, "it was scrubbed once"
    tenant(scene, region)
    assert not trouble(scene.ledger, other)


def test_a_free_region_whose_accelerator_hangs_is_scrubbed(scene: Scene) -> None:
    region = scene.regions[0]
    hang(scene, region)
    assert scene.condition(region) is Condition.BLANK
    assert not scene.rack.slot(region).silent


def test_the_owners_next_container_has_a_hung_accelerator_programmed_again(scene: Scene) -> None:
    region = scene.regions[0]
    pod = tenant(scene, region)
    hang(scene, region)
    scene.start(pod, AFU)
    assert not scene.rack.slot(region).silent
    assert scene.condition(region) is Condition.PROGRAMMED


def test_an_image_that_hangs_at_once_costs_its_pod_the_start_and_nobody_the_region(
    scene: Scene,
) -> None:
    region = scene.regions[0]
    scene.rack.slot(region).hanging = AFU
    pod = scene.admit(region)
    for _ in range(3):
        task = scene.prestart(pod, AFU)
        scene.plugin.work()
        assert isinstance(task.exception(), AcceleratorSilentError)
        assert scene.condition(region) is Condition.BLANK, "it was scrubbed"
    scene.start(pod, OTHER_AFU)
    leave(scene, pod)
    assert scene.condition(region) is Condition.BLANK


def test_what_is_silent_with_the_blank_too_is_given_up_until_the_operator_asks(
    scene: Scene,
) -> None:
    region = scene.regions[0]
    pod = tenant(scene, region)
    hang(scene, region, "dead")
    leave(scene, pod)
    while scene.condition(region) is Condition.DIRTY:
        assert scene.plugin.loop.pass_time()
        scene.plugin.work()
    assert scene.condition(region) is Condition.FAULTED
    programs = scene.rack.programs
    look(scene)
    scene.plugin.work()
    assert scene.rack.programs == programs, "it is not scrubbed for ever"
    scene.rack.slot(region).silent = "hung"
    retry(scene)
    assert scene.condition(region) is Condition.BLANK


def test_a_pcie_error_keeps_a_card_back_until_its_tenants_scrub_has_cleared_it(
    scene: Scene,
) -> None:
    region, other = scene.regions
    pod = tenant(scene, region)
    scene.rack.boards[card(scene)].pcie_errors = {"pcie0_errors": 1}
    look(scene)
    for device in (card(scene), other):
        with pytest.raises(RefusedError):
            scene.admit(device)
    scene.start(pod, AFU)
    scene.rack.boards[card(scene)].pcie_errors = {"pcie0_errors": 1}
    programs = scene.rack.programs
    leave(scene, pod)
    assert scene.condition(region) is Condition.BLANK
    look(scene)
    assert not scene.ledger.failing
    assert scene.rack.programs == programs + 1, "the neighbour was clean all the time"


def test_a_retry_clears_pcie_errors_and_touches_no_region(scene: Scene) -> None:
    region = scene.regions[0]
    tenant(scene, region)
    scene.rack.boards[card(scene)].pcie_errors = {"pcie0_errors": 1}
    look(scene)
    assert scene.ledger.failing.keys() == set(scene.regions)
    programs = scene.rack.programs
    retry(scene)
    assert not scene.ledger.failing
    assert scene.rack.programs == programs
    assert scene.logged.count("card errors cleared") == 1
    retry(scene)
    assert scene.logged.count("card errors cleared") == 1, "there was nothing to clear"


def test_a_hung_accelerator_does_not_keep_a_poisoned_neighbour_from_its_rebind(
    scene: Scene,
) -> None:
    recovery: Recovery = scene.plugin.recovery
    first, second = scene.regions
    (found,) = scene.ledger.cards.values()

    def poisoned(**faults: Fault) -> bool:
        failing = dict(zip((first, second), faults.values(), strict=True))
        scene.plugin.call(lambda: scene.ledger.hardware.set_failing(found.id, failing))
        return recovery.poisoned(found, [first])

    assert poisoned(first=POISONED, second=CURABLE)
    assert not poisoned(first=POISONED, second=TOO_HOT)
    assert not poisoned(first=CURABLE, second=POISONED), "this one needs no rebind"


def test_a_clean_region_is_scrubbed_after_a_fault_that_stopped_work_and_no_other(
    scene: Scene,
) -> None:
    region = scene.regions[0]
    scene.hold_releases()

    def shows(*faults: Fault | None) -> Condition:
        for fault in faults:
            failing = {} if fault is None else {region: fault}
            scene.plugin.call(
                lambda failing=failing: scene.ledger.hardware.set_failing(card(scene), failing)
            )
        return scene.condition(region)

    assert shows(CURABLE, None) is Condition.BLANK
    assert shows(TOO_HOT) is Condition.BLANK
    assert shows(CURABLE) is Condition.DIRTY
    scene.plugin.call(lambda: scene.ledger.work.faulted(region, "it failed with the blank too"))
    other = Fault(FaultKind.CURABLE, "something else")
    assert shows(other, CURABLE, TOO_HOT) is Condition.FAULTED
    assert shows(CURABLE) is Condition.DIRTY
