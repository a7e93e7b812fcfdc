"""Calls in odd orders, repeated, cut off, or never (invariants 5, 6 and 7)."""

import grpc
import pytest
from daemon_support import (
    AFU,
    AFU_2,
    AFU_3,
    BLANK,
    CARD,
    CARDS,
    HEALTHY,
    NO_REQUEST,
    P0,
    P1,
    REGIONS,
    Node,
    Refused,
    request,
)

from fpga_plugin.deviceplugin.prestart import answer_within


def refusal(call: object, *arguments: str, **named: object) -> str:
    """Status and message of a call that is refused."""
    with pytest.raises(Refused) as refused:
        call(*arguments, **named)  # type: ignore[operator]
    return str(refused.value)


def test_allocate_again_before_a_prestart_answers_the_same_and_changes_nothing():
    with Node().up() as node:
        first = node.kubelet.allocate(P0)
        assert node.kubelet.allocate(P0) == first
        node.kubelet.prestart(P0, env=request())
        assert node.afu(P0) == AFU
        assert node.scrubs(P0) == 1  # the one at start


def test_an_implied_release_is_scrubbed_before_the_next_owner_is_programmed():
    with Node().up() as node:
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request())
        mark = node.plugin.mark
        # Nothing ever told that the first pod ended.
        answer = node.kubelet.allocate(P0)
        assert answer.envs["FPGA_DEVICE_0000_10_00_0_P0"] == "/dev/dfl-port.0"
        assert node.kubelet.listed(REGIONS) == {P0: HEALTHY, P1: HEALTHY}
        node.kubelet.prestart(P0, env=request())
        assert node.afu(P0) == AFU
        steps = node.steps(P0, mark)
        assert steps.index("program blank") < steps.index("program")
        assert node.scrubs(P1, mark) == 0


def test_an_implied_release_without_a_request_hands_over_blank():
    with Node().up() as node:
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request(params="clock=33" if node.has_clocks else ""))
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=NO_REQUEST)
        assert node.afu(P0) == BLANK
        assert node.state()[P0].get("clock") == node.state()[P1].get("clock")


def test_an_implied_release_ends_only_the_allocations_that_it_names():
    with Node("1x3").up() as node:
        node.kubelet.allocate(P0, P1)
        node.kubelet.prestart(P0, P1, env=request(AFU, n="0") | request(AFU_2, n="1"))
        mark = node.plugin.mark
        node.kubelet.allocate(P1)
        node.kubelet.prestart(P1, env=request(AFU_3))
        assert (node.afu(P0), node.afu(P1)) == (AFU, AFU_3)
        assert (node.scrubs(P0, mark), node.scrubs(P1, mark)) == (0, 1)


def test_deallocate_may_be_repeated_and_name_what_nobody_has():
    with Node().up() as node:
        kubelet = node.kubelet
        kubelet.allocate(P0)
        kubelet.prestart(P0, env=request())
        node.give_back(P0)
        mark = node.plugin.mark
        kubelet.deallocate(P0)
        kubelet.deallocate(P0, P1)
        kubelet.deallocate()
        kubelet.deallocate(
            "", "no-such-device", "../../etc", "é" * 300, "\0", f"{CARD}-p9", "x" * 9
        )
        kubelet.deallocate(CARD)  # a card is no device of this resource
        kubelet.poststop(P0)
        kubelet.poststop("no-such-device", "é" * 300, "\n")
        kubelet.poststop()
        assert (node.steps(P0, mark), node.steps(P1, mark)) == ([], [])
        kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})  # it may come after the card's list
        assert kubelet.listed(CARDS) == {CARD: HEALTHY}


def test_deallocate_for_another_resource_does_not_end_an_allocation():
    with Node().up() as node:
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request())
        node.kubelet.deallocate(P0, resource=CARDS)
        node.kubelet.poststop(P0, resource=CARDS)
        node.caught_up()
        assert node.afu(P0) == AFU
        assert "FAILED_PRECONDITION" in refusal(node.kubelet.allocate, CARD, resource=CARDS)


def test_deallocate_comes_before_poststop():
    with Node().up() as node:
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request())
        mark = node.plugin.mark
        node.give_back(P0)
        node.kubelet.poststop(P0)
        assert node.scrubs(P0, mark) == 1
        assert node.afu(P0) == BLANK


def test_a_late_poststop_of_the_last_owner_does_not_touch_the_next():
    with Node().up() as node:
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request())
        node.give_back(P0)
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request(AFU_2))
        mark = node.plugin.mark
        node.kubelet.poststop(P0)
        assert node.steps(P0, mark) == []
        assert node.afu(P0) == AFU_2
        node.kubelet.poststop(P0)
        node.plugin.until_logged("region scrubbed", mark, region=P0)


def test_poststop_after_the_successors_prestart_scrubs_nothing_until_both_ended():
    with Node().up() as node:
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request())
        node.kubelet.prestart(P0, env=request(AFU_2))
        mark = node.plugin.mark
        node.kubelet.poststop(P0)  # of the first incarnation
        assert node.steps(P0, mark) == []
        assert node.afu(P0) == AFU_2
        node.kubelet.poststop(P0)
        node.plugin.until_logged("region scrubbed", mark, region=P0)
        assert node.afu(P0) == BLANK
        # More of them than there were containers: nobody's business.
        mark = node.plugin.mark
        node.kubelet.poststop(P0)
        assert node.steps(P0, mark) == []


def test_a_container_may_start_after_its_poststop_was_scrubbed():
    with Node().up() as node:
        node.kubelet.allocate(P0)
        for afu in (AFU, AFU_2, AFU):
            mark = node.plugin.mark
            node.kubelet.prestart(P0, env=request(afu))
            assert node.afu(P0) == afu
            node.kubelet.poststop(P0)
            node.plugin.until_logged("region scrubbed", mark, region=P0)
            assert node.afu(P0) == BLANK
            assert node.kubelet.listed(REGIONS)[P0] == HEALTHY


def test_deallocate_after_a_refused_allocate_ends_nobodys_allocation():
    with Node().up() as node:
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request())
        assert "in use" in refusal(node.kubelet.allocate, CARD, resource=CARDS)
        node.kubelet.deallocate(CARD, resource=CARDS)
        node.caught_up()
        assert node.afu(P0) == AFU
        node.kubelet.until(CARDS, {})
        assert "in use" in refusal(node.kubelet.allocate, CARD, resource=CARDS)


def test_allocate_grants_all_or_nothing():
    with Node("2x2").up() as node:
        node.kubelet.allocate(P0)
        assert "FAILED_PRECONDITION" in refusal(
            node.kubelet.allocate, "0000-11-00.0", CARD, resource=CARDS
        )
        node.caught_up()
        node.kubelet.allocate("0000-11-00.0-p0")
        assert "NOT_FOUND" in refusal(node.kubelet.allocate, P1, f"{CARD}-p7")


@pytest.mark.parametrize(
    ("ids", "code"),
    [
        ([], "INVALID_ARGUMENT"),
        ([""], "INVALID_ARGUMENT"),
        (["no-such-device"], "NOT_FOUND"),
        ([CARD], "NOT_FOUND"),
        ([f"{CARD}-p00"], "NOT_FOUND"),
        (["0000-FF-00.0-p0"], "NOT_FOUND"),
        (["0000:10:00.0-p0"], "NOT_FOUND"),
        (["é" * 500], "NOT_FOUND"),
        (["0000-10-00.0-p0\n"], "NOT_FOUND"),
    ],
)
def test_ids_that_are_no_devices_are_refused_in_a_short_message(ids, code, idle_node):
    kubelet = idle_node.kubelet
    for call in (kubelet.allocate, lambda *names: kubelet.prestart(*names, env=request())):
        with pytest.raises(Refused) as refused:
            call(*ids)
        assert refused.value.code == code
        assert len(refused.value.message.encode()) < 1024
        assert refused.value.message.isascii()


@pytest.fixture(scope="module")
def idle_node():
    with Node().up() as node:
        yield node


def test_prestart_without_an_allocation_is_refused_or_taken_from_kubelets_records():
    with Node().up() as node:
        words = refusal(node.kubelet.prestart, P0, env=request())
        assert words.startswith("FAILED_PRECONDITION")
        assert "delete the pod" in words
        assert node.afu(P0) == BLANK
        answer = node.kubelet.allocate(P0)
        node.kubelet.deallocate(P0)
        node.kubelet.checkpoint(("uid-1", "app", REGIONS, [P0], answer))
        node.kubelet.prestart(P0, env=request())
        assert node.afu(P0) == AFU
        node.kubelet.until(CARDS, {})
        assert node.plugin.until_logged("allocation adopted", device=P0)["pod"] == "uid-1"


def test_prestart_of_a_region_whose_card_is_taken_is_not_made_an_allocation():
    with Node().up() as node:
        answer = node.kubelet.allocate(P0)
        node.kubelet.deallocate(P0)
        node.kubelet.allocate(CARD, resource=CARDS)
        node.kubelet.checkpoint(("uid-1", "app", REGIONS, [P0], answer))
        assert "FAILED_PRECONDITION" in refusal(node.kubelet.prestart, P0, env=request())
        assert node.afu(P0) == BLANK


def test_the_checkpoint_tells_that_another_pod_has_the_region_now():
    with Node().up() as node:
        answer = node.kubelet.allocate(P0)
        node.kubelet.checkpoint(("uid-1", "app", REGIONS, [P0], answer))
        node.kubelet.prestart(P0, env=request())
        mark = node.plugin.mark
        # The next pod's Allocate never reached us.
        node.kubelet.checkpoint(("uid-2", "app", REGIONS, [P0], answer))
        node.kubelet.prestart(P0, env=request())
        assert node.steps(P0, mark).count("program blank") == 1


# -------------------------------------------------------------------- deadlines


def slow(node: Node) -> None:
    """From here on a PR takes longer than `hasty` waits: by as much as a busy machine may need."""
    node.set(simulated_pr_seconds="4")
    node.again()
    node.kubelet.allocate(P0)


def hasty(node: Node) -> None:
    """A PreStart that is answered before its preparation is done: at half of its time."""
    words = refusal(node.kubelet.prestart, P0, env=request(), timeout=4)
    assert words.startswith("UNAVAILABLE")
    assert P0 in words


def test_a_preparation_that_takes_too_long_goes_on_and_serves_exactly_one_later_call():
    with Node().up() as node:
        slow(node)
        mark = node.plugin.mark
        hasty(node)
        node.plugin.until_logged("prepared", mark)
        node.kubelet.prestart(P0, env=request())  # finds it done
        assert node.afu(P0) == AFU
        assert node.steps(P0, mark).count("program") == 1
        # That was its one call: the next is a restart of the container, and programs again.
        node.kubelet.prestart(P0, env=request())
        assert node.steps(P0, mark).count("program") == 2


def test_a_later_call_waits_for_the_preparation_that_runs():
    with Node().up() as node:
        slow(node)
        mark = node.plugin.mark
        hasty(node)
        node.kubelet.prestart(P0, env=request())
        assert node.afu(P0) == AFU
        assert node.steps(P0, mark).count("program") == 1


def test_another_request_in_between_is_what_counts():
    with Node().up() as node:
        slow(node)
        hasty(node)
        node.kubelet.prestart(P0, env=request(AFU_2))
        assert node.afu(P0) == AFU_2
        node.kubelet.prestart(P0, env=request())
        assert node.afu(P0) == AFU


def test_a_call_that_is_cut_off_does_not_stop_its_preparation():
    with Node().up() as node:
        slow(node)
        mark = node.plugin.mark
        call = node.kubelet.begin_prestart(P0, env=request())
        node.until_programming(P0, AFU)
        call.cancel()
        with pytest.raises(grpc.FutureCancelledError):
            call.result()
        node.plugin.until_logged("prepared", mark)
        node.kubelet.prestart(P0, env=request())
        assert node.steps(P0, mark).count("program") == 1


def test_allocate_and_deallocate_are_answered_while_the_card_is_programmed():
    with Node().up() as node:
        node.set(simulated_pr_seconds="600")  # longer than any call here has time
        node.again()
        node.kubelet.allocate(P0)
        call = node.kubelet.begin_prestart(P0, env=request())
        node.until_programming(P0, AFU)
        node.kubelet.allocate(P1)
        node.kubelet.deallocate(P0, P1)
        assert not call.done()
        node.plugin.kill()


def test_an_allocation_that_ends_while_it_is_prepared_is_scrubbed_and_its_prestart_refused():
    with Node().up() as node:
        slow(node)
        call = node.kubelet.begin_prestart(P0, env=request())
        node.until_programming(P0, AFU)
        node.kubelet.deallocate(P0)
        with pytest.raises(grpc.RpcError) as failed:
            call.result()
        assert failed.value.code().name in {"FAILED_PRECONDITION", "UNAVAILABLE"}
        node.settled()
        assert node.afu(P0) == BLANK


def test_a_result_that_nobody_fetched_does_not_serve_the_next_owner():
    with Node().up() as node:
        slow(node)
        hasty(node)
        node.plugin.until_logged("prepared")
        mark = node.plugin.mark
        node.kubelet.allocate(P0)  # the pod went; another one has it now
        node.kubelet.prestart(P0, env=request())
        steps = node.steps(P0, mark)
        assert steps.index("program blank") < steps.index("program")


def test_two_equal_prestarts_at_once_program_once_and_one_of_them_is_told_to_retry():
    with Node().up() as node:
        slow(node)
        mark = node.plugin.mark
        calls = [node.kubelet.begin_prestart(P0, env=request()) for _ in range(2)]
        codes = sorted(call.code().name for call in calls)
        assert codes == ["OK", "UNAVAILABLE"]
        assert node.steps(P0, mark).count("program") == 1


def test_a_poststop_between_two_allocations_is_settled_and_the_next_owner_balances():
    with Node().up() as node:
        kubelet = node.kubelet
        kubelet.allocate(P0)
        kubelet.prestart(P0, env=request(AFU))
        node.give_back(P0)
        kubelet.poststop(P0)
        kubelet.allocate(P0)
        kubelet.prestart(P0, env=request(AFU_2))
        kubelet.poststop(P0)
        node.plugin.until_logged("all containers of an allocation stopped", device=P0)


@pytest.mark.parametrize(
    ("has", "answers"),
    [(30, 25), (28, 25), (27, 24), (10, 7), (6, 3), (5.9, 2.95), (0.4, 0.2), (0, 0), (None, 25)],
)
def test_a_prestart_is_answered_in_time_for_kubelet_to_hear_it(has, answers):
    assert answer_within(has) == pytest.approx(answers)
