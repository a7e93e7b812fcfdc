"""The last refusal of each pod, in bounded memory."""

import itertools

from fpga_plugin.ids import DeviceId
from fpga_plugin.kubernetes.names import PodUid
from fpga_plugin.observability.refusals import MAX_REFUSALS, Refusals

P0 = DeviceId("0000-10-00.0-p0")


def refusals():
    ticks = itertools.count(1)
    return Refusals(clock=lambda: float(next(ticks)))


def refuse(into, pod, devices=(P0,), message="no"):
    into.refused("PreStartContainer", pod, devices, status="NOT_FOUND", message=message)


def test_a_pod_that_is_refused_again_is_one_entry_with_a_count():
    kept = refusals()
    refuse(kept, PodUid("a"), message="first")
    refuse(kept, PodUid("b"))
    refuse(kept, PodUid("a"), message="second")
    newest, other = kept.latest()
    assert (newest.pod, newest.times, newest.since, newest.at) == ("a", 2, 1.0, 3.0)
    assert newest.message == "second"
    assert (other.pod, other.times) == ("b", 1)


def test_pods_that_are_not_known_are_told_apart_by_their_devices():
    kept = refusals()
    refuse(kept, None)
    refuse(kept, None, devices=(DeviceId("0000-10-00.0-p1"),))
    assert len(kept.latest()) == 2


def test_the_oldest_is_forgotten_when_there_are_too_many():
    kept = refusals()
    for number in range(MAX_REFUSALS + 5):
        refuse(kept, PodUid(str(number)))
    pods = [one.pod for one in kept.latest()]
    assert len(pods) == MAX_REFUSALS
    assert pods[0] == str(MAX_REFUSALS + 4)
    assert "4" not in pods
