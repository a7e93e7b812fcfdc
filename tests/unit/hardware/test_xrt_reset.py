"""The reset of an Alveo card, with each trap that AMD's drivers were seen to set."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from doubles.alveo import CARD, CARD_2, Rig
from doubles.xclbins import ALVEO

from fpga_plugin.errors import CardGoneError, FpgaPluginError, HardwareError, PortInUseError
from fpga_plugin.hardware.faults import FaultKind
from fpga_plugin.hardware.model import Card, CardProblem
from fpga_plugin.hardware.xrt import backend, defs, reset

MASK = "config_mailbox_channel_disable"


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(reset, "DOWN_SECONDS", 6.0)  # of which nobody has to look at each moment
    monkeypatch.setattr(reset, "UP_SECONDS", 5.0)
    return Rig.with_a_clock(tmp_path, monkeypatch)


def at(rig: Rig, what: str, act: Callable[[], object]) -> None:
    """Do something the moment before `<attribute>=<text>` is written."""
    rig.kernel.before = lambda request: act() if request.endswith(what) else None


def test_a_reset_takes_the_image_off_the_record_and_leaves_the_card_masked(rig: Rig):
    rig.program()
    rig.backend.reset(rig.card())
    state = rig.board().state
    assert (state.shutdown, state.mask, state.minor) == (False, defs.MASK, 128)
    assert rig.board().copy == defs.MASK
    assert rig.backend.afu_id(rig.region()) == defs.NO_IMAGE


def test_only_the_bit_of_the_reset_is_let_through_for_it(rig: Rig):
    rig.program()
    rig.kernel.written.clear()
    rig.backend.reset(rig.card())
    name = "config_mailbox_channel_disable"
    assert rig.kernel.written == [
        (name, hex(defs.MASK & ~(1 << 5))),
        ("shutdown", "1"),
        ("shutdown", "0"),
        (name, hex(defs.MASK)),
    ]


def test_it_goes_online_only_when_the_management_function_is_back(rig: Rig):
    offline: list[bool] = []

    def note(what: str) -> None:
        if what.endswith("shutdown=0"):
            offline.append(rig.board().is_offline)

    rig.kernel.before = note
    rig.backend.reset(rig.card())
    assert offline == [False]


def test_a_reset_waits_for_nothing_but_the_card(rig: Rig):
    rig.backend.reset(rig.card())
    assert rig.clock.now < 2


def test_a_management_function_that_goes_offline_late_is_waited_for(rig: Rig):
    """`shutdown` reads 1 before: a card put online then is one in reset."""
    written: dict[str, float] = {}

    def note(what: str) -> None:
        if "/shutdown=" in what:
            written[what[-1]] = rig.clock.now

    def pass_time() -> None:
        if "1" in written:
            offline = 1 < rig.clock.now - written["1"] < 2
            rig.kernel.instead["0.0/dev_offline"] = str(int(offline))

    rig.kernel.before = note
    rig.clock.passing = pass_time
    rig.backend.reset(rig.card())
    assert written["0"] - written["1"] >= 2


def test_a_card_that_came_online_by_itself_is_not_waited_for(rig: Rig):
    """Its management function has no reset to begin."""
    rig.board().put(shutdown=True)
    rig.backend.bind(CARD)
    rig.card()
    assert rig.clock.now < 1


def test_where_an_answer_was_lost_before_the_reset_is_asked_for_once_the_card_is_up(rig: Rig):
    """While `shutdown` reads 1 another 1 is ignored."""
    rig.program()
    card = rig.card()
    rig.board().put(shutdown=True)
    rig.kernel.written.clear()
    rig.backend.reset(card)
    assert rig.kernel.written == [
        (MASK, hex(defs.MASK_WHILE_RESETTING)),
        ("shutdown", "0"),
        ("shutdown", "1"),
        ("shutdown", "0"),
        (MASK, hex(defs.MASK)),
    ]
    assert rig.backend.afu_id(rig.region()) == defs.NO_IMAGE


def test_where_an_answer_was_lost_the_card_is_up_before_the_reset_is_asked_for(rig: Rig):
    card = rig.card()
    rig.board().put(shutdown=True)
    at(rig, "shutdown=0", lambda: rig.kernel.instead.update({"0.1/ready": "0x0"}))
    with pytest.raises(HardwareError, match="its user function is not ready"):
        rig.backend.reset(card)
    assert ("shutdown", "1") not in rig.kernel.written


def test_a_reset_that_a_dead_plugin_began_is_finished_and_no_other_asked_for(rig: Rig):
    card = rig.card()
    rig.board().set_shutdown("1")
    rig.clock.sleep(5)
    rig.backend.reset(card)
    assert rig.kernel.written == [("shutdown", "0"), (MASK, hex(defs.MASK))]


def test_a_card_whose_node_is_missing_is_reset_all_the_same(rig: Rig):
    card = rig.card()
    rig.kernel.listed["0000:10:00.1/drm"] = []
    with pytest.raises(HardwareError, match="its user function is not ready"):
        rig.backend.reset(card)
    assert ("shutdown", "1") in rig.kernel.written


@pytest.mark.parametrize(
    "lacks",
    [
        lambda rig: rig.kernel.instead.update({"0.1/shutdown": "1"}),
        lambda rig: rig.kernel.instead.update({"0.1/ready": "0x0"}),
        lambda rig: rig.kernel.instead.update({"0.1/dev_offline": OSError(errno.EIO, "error")}),
        lambda rig: rig.kernel.listed.update({"0000:10:00.1/drm": ["card0"]}),
        lambda rig: rig.kernel.gone.add("0.1/xclbinuuid"),
    ],
)
def test_a_card_that_lacks_something_after_its_reset_did_not_come_back(
    rig: Rig, lacks: Callable[[Rig], object]
):
    card = rig.card()
    at(rig, "shutdown=0", lambda: lacks(rig))
    with pytest.raises(HardwareError, match="its user function is not ready"):
        rig.backend.reset(card)
    assert rig.clock.now >= reset.UP_SECONDS
    assert rig.kernel.written[-1] == ("shutdown", "0"), "a card that is not up was masked"


@pytest.mark.parametrize("answer", ["1", OSError(errno.EIO, "Input/output error")])
def test_a_management_function_that_stays_offline_fails_the_reset(rig: Rig, answer: str | OSError):
    card = rig.card()
    at(rig, "shutdown=1", lambda: rig.kernel.instead.update({"0.0/dev_offline": answer}))
    with pytest.raises(HardwareError, match="its management function is offline"):
        rig.backend.reset(card)
    assert rig.clock.now >= reset.DOWN_SECONDS
    assert rig.kernel.written[-1] == ("shutdown", "1"), "it was put online in its reset"


@pytest.mark.parametrize(("user", "function"), [(False, "0000:10:00.0"), (True, "0000:10:00.1")])
@pytest.mark.parametrize("unreadable", [False, True])
def test_a_function_that_loses_its_driver_meanwhile_ends_the_reset_at_once(
    rig: Rig, *, user: bool, function: str, unreadable: bool
):
    card = rig.card()
    rig.arm("holder")

    def lose() -> None:
        if rig.clock.now < 1:
            return
        if unreadable:
            rig.kernel.fails["exists", f"{function}/driver"] = OSError(errno.EIO, "error")
        else:
            rig.kernel.gone.add(f"{function}/driver")

    rig.clock.passing = lose
    with pytest.raises(CardGoneError, match=f"went while it was reset: .*{function}"):
        rig.backend.reset(card)
    assert rig.clock.now < 2


@pytest.mark.parametrize(
    ("code", "kind", "told"),
    [
        (errno.ENOENT, CardGoneError, "shutdown is not there"),
        (errno.ENOTDIR, CardGoneError, "shutdown is not there"),
        (errno.EIO, HardwareError, r"writing 1 to .*/shutdown failed \(because\)"),
    ],
)
def test_why_a_card_cannot_be_reset_is_told(
    rig: Rig, code: int, kind: type[FpgaPluginError], told: str
):
    rig.kernel.fails["write", "/shutdown"] = OSError(code, "because")
    with pytest.raises(kind, match=f"card {CARD} cannot be reset: .*{told}"):
        rig.backend.reset(rig.card())
    assert rig.card(), "it counts as being reset no longer"


def test_a_card_of_before_is_not_reset(rig: Rig):
    card = rig.card()
    rig.board().unbind(user=True)
    rig.board().bind(user=True)
    for ask in (rig.backend.reset, rig.backend.rebind):
        with pytest.raises(CardGoneError, match="is no longer the user function"):
            ask(card)
    assert not rig.kernel.written


def test_what_mends_a_card_is_a_reset(rig: Rig):
    rig.program()
    rig.board().put(bad="firewall")
    rig.backend.rebind(rig.card())
    assert rig.backend.port_errors(rig.region()) == {}
    assert ("shutdown", "1") in rig.kernel.written


def test_an_answer_that_is_lost_costs_a_moment(rig: Rig):
    fault = rig.arm("lost-answer")
    rig.backend.reset(rig.card())
    assert not fault.exists()
    assert not rig.board().state.shutdown
    rig.backend.reset(rig.card())  # the one after it, where `shutdown` read 1 and 1 is ignored


def test_a_bad_state_is_cured(rig: Rig):
    rig.board().put(bad="bad-state")
    fault = rig.backend.health(rig.card()).failed[rig.region().id]
    assert fault.kind is FaultKind.CURABLE
    rig.backend.reset(rig.card())
    assert not rig.backend.health(rig.card()).failed


def test_a_holder_that_ignores_the_signal_keeps_the_card_until_it_ends(rig: Rig):
    holder = rig.arm("holder")
    card = rig.card()
    with pytest.raises(PortInUseError, match="does not end"):
        rig.backend.reset(card)
    assert isinstance(rig.backend.scan_card(CARD), CardProblem)  # nobody is given it
    holder.unlink()
    rig.backend.reset(card)
    assert rig.card() == card


def test_a_card_that_a_dead_plugin_left_shut_down_is_put_online(rig: Rig):
    rig.board().set_shutdown("1")
    rig.clock.sleep(1)
    assert "is shut down" in rig.problem().message
    rig.backend.bind(CARD)
    rig.card()
    assert rig.board().state.mask == defs.MASK
    rig.backend.bind(CARD)  # as it is left
    with pytest.raises(CardGoneError):
        rig.backend.bind("0000-77-00.0")


def test_a_reset_that_a_process_kept_from_ending_is_finished_by_bind(rig: Rig):
    """The process ended, and nobody waited for the reset: PF1 stays down."""
    holder = rig.arm("holder")
    card = rig.card()
    with pytest.raises(PortInUseError):
        rig.backend.reset(card)
    written = list(rig.kernel.written)
    with pytest.raises(HardwareError, match="not back from its reset") as error:
        rig.backend.bind(CARD)
    assert "ignores SIGBUS" in error.value.hint
    assert rig.kernel.written == written, "it begins no reset"
    holder.unlink()
    rig.clock.sleep(60)
    rig.backend.bind(CARD)
    assert rig.card() == card
    assert rig.board().state.mask == defs.MASK


def test_a_management_function_that_is_back_late_is_waited_for_by_the_next_try(rig: Rig):
    card = rig.card()
    at(rig, "shutdown=1", lambda: rig.kernel.instead.update({"0.0/dev_offline": "1"}))
    for attempt in (rig.backend.reset, rig.backend.bind):
        with pytest.raises(HardwareError, match="its management function is offline"):
            attempt(card if attempt == rig.backend.reset else CARD)
    rig.kernel.instead.clear()
    rig.backend.bind(CARD)
    assert rig.card() == card


def test_a_look_at_a_card_that_is_being_reset_shows_it_as_it_was(rig: Rig):
    card = rig.card()
    seen: list[object] = []
    rig.kernel.before = lambda what: seen.append(rig.backend.scan_card(CARD))
    rig.backend.reset(card)
    assert seen == [card] * len(seen)
    assert len(seen) == 4


def test_a_node_that_moved_is_the_same_region_with_another_node(rig: Rig):
    before = rig.region()
    rig.arm("minor-moves")
    rig.backend.reset(rig.card())
    after = rig.region()
    assert after.handle == before.handle
    assert (before.grant.nodes, after.grant.nodes) == (
        ("/dev/dri/renderD128",),
        ("/dev/dri/renderD130",),
    )
    rig.program()  # by the node that it has now
    assert rig.backend.numbers(before) == {"/dev/dri/renderD130": "226:130"}


def test_cards_are_reset_one_at_a_time_so_that_each_gets_its_node_back(tmp_path: Path):
    rig = Rig(tmp_path)  # by the clock of the machine: threads have no other
    cards = [rig.card(), rig.card(CARD_2)]
    down: list[int] = []

    def note(what: str) -> None:
        boards = (rig.board(), rig.board(CARD_2))
        down.append(sum(board.state.minor is None for board in boards))

    rig.kernel.before = note
    threads = [threading.Thread(target=rig.backend.reset, args=(card,)) for card in cards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert max(down) == 1
    assert [rig.board(c).state.minor for c in (CARD, CARD_2)] == [128, 129]


def test_a_card_that_hangs_in_its_reset_keeps_no_other_from_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Those that wait for it go on together; one after them waits for it no more."""
    monkeypatch.setattr(backend, "TURN_SECONDS", 0.2)
    rig = Rig(tmp_path, f"4x1+alveo@{ALVEO}")
    first, *others = [rig.card(card) for card in sorted(rig.backend.card_ids())]
    begun, over = threading.Event(), threading.Event()

    def hang(what: str) -> None:
        if f"{str(first.address)[:-1]}1/shutdown=1" in what:
            begun.set()
            over.wait(60)

    rig.kernel.before = hang
    hung = threading.Thread(target=rig.backend.reset, args=(first,))
    hung.start()
    try:
        assert begun.wait(30)
        last = others.pop()
        waiting = [threading.Thread(target=rig.backend.reset, args=(card,)) for card in others]
        for thread in waiting:
            thread.start()
        for thread in waiting:
            thread.join(30)
            assert not thread.is_alive()
        monkeypatch.setattr(backend, "TURN_SECONDS", 60.0)
        rig.backend.reset(last)
        assert hung.is_alive()
    finally:
        over.set()
        hung.join(30)
    assert {rig.board(card).state.shutdown for card in rig.backend.card_ids()} == {False}


def test_who_has_the_node_is_ended(rig: Rig):
    handle = rig.kernel.open("/dev/dri/renderD128", 2)
    rig.backend.reset(rig.card())
    with pytest.raises(OSError, match="No such device"):
        rig.kernel.inner.query(handle, defs.DRM_VERSION, bytes(64))


def test_a_card_that_goes_meanwhile_ends_the_reset(rig: Rig):
    rig.kernel.before = lambda what: (
        (rig.directory / "cards" / CARD).unlink() if what.endswith("shutdown=1") else None
    )
    with pytest.raises((CardGoneError, HardwareError)):
        rig.backend.reset(rig.card())
    assert rig.backend.scan_card(CARD) is None


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("bad-state", FaultKind.CURABLE),
        ("firewall", FaultKind.CURABLE),
        ("fatal", FaultKind.TRANSIENT),
        ("thermal", FaultKind.TRANSIENT),
        ("recovery", FaultKind.LASTING),
    ],
)
def test_each_signal_is_of_its_kind(rig: Rig, word: str, kind: FaultKind):
    card = rig.card()
    assert not rig.backend.health(card).failed
    rig.arm(word)
    assert rig.backend.health(card).failed[card.regions[0].id].kind is kind


@pytest.mark.parametrize(
    ("attribute", "answer"),
    [
        ("0.0/dev_offline", "1"),
        ("0.1/dev_offline", "1"),
        ("0.0/ready", "0"),
        ("0.1/ready", "0x0"),
        ("0.1/device_bad_state", "nonsense"),
        ("0.1/ready", OSError(5, "Input/output error")),
        ("0.0/aer_dev_fatal", "TOTAL_ERR_FATAL 2"),
    ],
)
def test_a_card_that_does_not_answer_is_out_of_service_until_it_does(
    rig: Rig, attribute: str, answer: str | OSError
):
    card = rig.card()
    assert not rig.backend.health(card).failed
    rig.kernel.instead[f"0000:10:0{attribute}"] = answer
    fault = rig.backend.health(card).failed[card.regions[0].id]
    assert fault.kind is FaultKind.TRANSIENT
    rig.kernel.instead.clear()
    assert not rig.backend.health(card).failed


@pytest.mark.parametrize(
    ("readings", "failed", "degraded"),
    [
        ({"temp1_input": "96999"}, False, False),
        ({"temp1_input": "97000"}, True, False),
        ({"temp1_input": "97000", "temp1_label": "Cage0"}, False, True),
        ({"temp1_input": "nonsense"}, False, True),
        ({"temp1_input": "97000", "temp1_crit": "0"}, False, False),
    ],
)
def test_heat_of_the_fpga_takes_it_out_of_service_and_of_an_optical_module_does_not(
    rig: Rig, readings: dict[str, str], *, failed: bool, degraded: bool
):
    rig.kernel.instead |= {f"/{name}": text for name, text in readings.items()}
    health = rig.backend.health(rig.card())
    assert (bool(health.failed), bool(health.degraded)) == (failed, degraded)


def test_a_reset_of_the_link_is_no_trouble_of_it(rig: Rig):
    card = rig.card()
    rig.backend.health(card)
    rig.kernel.instead["aer_dev_fatal"] = "TOTAL_ERR_FATAL 1"
    assert rig.backend.health(card).failed
    rig.backend.reset(card)
    assert not rig.backend.health(card).failed


def test_a_driver_that_is_bound_anew_is_told_by_health(rig: Rig):
    card = rig.card()
    rig.board().unbind(user=True)
    rig.board().bind(user=True)
    fault = rig.backend.health(card).failed[card.regions[0].id]
    assert fault.kind is FaultKind.TRANSIENT


def test_a_mask_that_is_lost_is_told_and_restored(rig: Rig):
    rig.program()
    card = rig.card()
    assert rig.backend.health(card).unguarded == ""
    rig.board().unbind(user=False)
    rig.board().bind(user=False)
    assert "the mask of its mailbox is 0x0" in rig.backend.health(card).unguarded
    assert not rig.backend.health(card).failed
    assert "0x0" in rig.backend.guard(card, left=False)
    assert rig.backend.guard(card, left=False) == ""
    assert rig.backend.health(card).unguarded == ""
    assert rig.board().copy == defs.MASK


def test_an_operators_mask_is_not_believed(rig: Rig):
    rig.program()
    rig.board().set_mask("0x180")  # older texts name it; it stops no load
    assert rig.backend.guard(rig.card(), left=False)
    assert rig.board().state.mask == defs.MASK


def test_readings_and_functions_are_for_people(rig: Rig):
    card = rig.card()
    readings = rig.backend.readings(card)
    assert readings.temperatures == {"fpga_temperature": 41.0}
    assert readings.errors == {"device_bad_state": 0, "firewall_level": 0}
    found = [(str(f.address), f.role, f.driver) for f in rig.backend.functions(CARD)]
    assert found == [
        ("0000:10:00.0", "card", "xclmgmt"),
        ("0000:10:00.1", "physical", "xocl"),
    ]
    assert isinstance(card, Card)
