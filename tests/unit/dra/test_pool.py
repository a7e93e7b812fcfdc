"""What is written of a node's ResourceSlices: only what differs, and never half a pool.

The scheduler allocates by them. A slice that is not put right gives out what must not be (invariant
4) or hides what an owner has (invariant 3); a pool of two generations is not used at all. How they
are written is in tests/integration/test_slices.py.
"""

import copy
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from doubles.slices import CounterSet, Device, Effect, Slice, Taint

from fpga_plugin.dra.desired import Form
from fpga_plugin.dra.pool import (
    MAX_NAME,
    Pool,
    PoolOf,
    ResourceSlice,
    SlicePlan,
    lost,
)

POOL = Pool("fpga.intel.com", "node-a")
OWNER = {"kind": "Node", "name": "node-a", "uid": "1"}
COUNTERS, FIRST, SECOND = (f"{each}-fpga.intel.com-node-a" for each in ("c0000", "d0000", "d0001"))
NAMES = (COUNTERS, FIRST, SECOND)
DIRTY = Taint("dirty", "scrub", Effect.NO_EXECUTE)

Spec = dict[str, Any]


def device(number: int, *taints: Taint) -> Device:
    return Device(f"r{number}", {"port": number}, {"card": (f"region-{number}",)}, taints)


def wanted(*first: Device, more: Iterable[Device] = (device(1),)) -> dict[str, Spec]:
    """Counters, and two slices of devices."""
    counters = Slice(counter_sets=(CounterSet("card", ("region-0", "region-1")),))
    devices = (Slice(devices=first or (device(0),)), Slice(devices=tuple(more)))
    return POOL.named([one.spec() for one in (counters, *devices)])


def read(manifest: Spec) -> ResourceSlice:
    """As the API server reports it."""
    return msgspec.json.decode(msgspec.json.encode(manifest), type=ResourceSlice)


def sent(
    name: str,
    one: Spec | Slice,
    *,
    generation: int = 1,
    count: int = 3,
    before: ResourceSlice | None = None,
) -> Spec:
    spec = one.spec() if isinstance(one, Slice) else one
    return POOL.manifest(name, spec, generation=generation, count=count, before=before, owner=OWNER)


def there(slices: dict[str, Spec], generation: int = 1) -> dict[str, ResourceSlice]:
    """The API server has them."""
    return {
        name: read(sent(name, one, generation=generation, count=len(slices)))
        for name, one in slices.items()
    }


def plan(want: dict[str, Spec], have: dict[str, ResourceSlice], **accepted: Any) -> SlicePlan:
    return POOL.plan(want, have, accepted=accepted)


def stray(name: str, *, generation: int, **spec: str) -> dict[str, ResourceSlice]:
    """A slice that nobody wants."""
    one = read(sent(name, Slice(), generation=generation))
    for key, value in spec.items():
        setattr(one.spec, key, value)
    return {name: one}


# ------------------------------------------------------------------ one slice


def test_a_slice_says_all_that_is_wanted_and_nothing_else() -> None:
    attributes = {"type": "region", "port": 1, "whole": False}
    full = Device("r1", attributes, {"card": ("region-1",)}, (DIRTY, Taint("held")))
    manifest = sent(FIRST, Slice(devices=(full, Device("bare", {}))), generation=7, count=2)
    assert manifest == {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": FIRST, "ownerReferences": [OWNER]},
        "spec": {
            "driver": "fpga.intel.com",
            "nodeName": "node-a",
            "pool": {"name": "node-a", "generation": 7, "resourceSliceCount": 2},
            "devices": [
                {
                    "name": "r1",
                    "attributes": {
                        "type": {"string": "region"},
                        "port": {"int": 1},
                        "whole": {"bool": False},
                    },
                    "consumesCounters": [
                        {"counterSet": "card", "counters": {"region-1": {"value": "1"}}}
                    ],
                    "taints": [
                        {"key": "fpga.intel.com/dirty", "value": "scrub", "effect": "NoExecute"},
                        {"key": "fpga.intel.com/held", "effect": "NoSchedule"},
                    ],
                },
                {"name": "bare", "attributes": {}},
            ],
        },
    }
    counters = sent(COUNTERS, wanted()[COUNTERS])["spec"]
    assert counters["sharedCounters"] == [
        {"name": "card", "counters": {"region-0": {"value": "1"}, "region-1": {"value": "1"}}}
    ]
    assert "devices" not in counters


def test_names_tell_what_a_slice_is_so_that_a_lost_answer_is_found_again() -> None:
    assert tuple(wanted()) == NAMES
    sets = [Slice(counter_sets=(CounterSet(str(n), ()),)).spec() for n in range(2)]
    assert [name[:5] for name in POOL.named([*sets, {}])] == ["c0000", "c0001", "d0000"]


def test_a_name_is_never_longer_than_the_api_server_takes() -> None:
    driver = "d" * 63
    longest = MAX_NAME - len("d0000-") - len(driver) - 1
    (name,) = Pool(driver, "n" * longest).named([{}])
    assert name == f"d0000-{driver}-{'n' * longest}"
    assert len(name) == MAX_NAME
    names = [name for end in ("a", "b") for name in Pool(driver, "n" * longest + end).named([{}])]
    assert [len(name) for name in names] == [MAX_NAME, MAX_NAME]
    assert len(set(names)) == 2, "two nodes have the same slice"


def test_what_is_replaced_is_what_was_seen_and_a_taint_keeps_its_time() -> None:
    """The time is since when: tolerations for some seconds count from it."""
    one = Slice(devices=(device(0, DIRTY, Taint("held")), device(1, DIRTY)))
    assert "resourceVersion" not in sent(FIRST, one)["metadata"]
    told = sent(FIRST, one)
    told["metadata"]["resourceVersion"] = "41"
    told["spec"]["devices"][0]["taints"][0]["timeAdded"] = "2026-01-01T00:00:00Z"
    other = Taint("dirty", "failing", Effect.NO_EXECUTE)
    now = Slice(devices=(device(0, DIRTY, other, Taint("held")), device(1, DIRTY)))
    again = sent(FIRST, now, before=read(told))
    assert again["metadata"]["resourceVersion"] == "41"
    first, second = again["spec"]["devices"]
    assert [one.get("timeAdded", "") for one in first["taints"]] == ["2026-01-01T00:00:00Z", "", ""]
    assert all("timeAdded" not in one for one in (*first["taints"][1:], *second["taints"]))


# ------------------------------------------------------------------ the pool


def test_a_pool_is_made_whole_and_then_left_alone() -> None:
    assert plan(wanted(), {}) == SlicePlan(1, (), NAMES)
    nothing = plan(wanted(), there(wanted()))
    assert nothing == SlicePlan(1)
    assert not nothing


@pytest.mark.parametrize(
    "what", [SlicePlan(1, ("a",)), SlicePlan(1, (), ("a",)), SlicePlan(1, ("a",), ("b",))]
)
def test_whatever_is_to_be_done_is_a_reason_to_do_it(what: SlicePlan) -> None:
    assert what


@pytest.mark.parametrize("generation", [1, 5])
def test_one_slice_that_differs_is_replaced_in_its_place(generation: int) -> None:
    """The pool is used all the time: a taint must not wait for it."""
    have = there(wanted(), generation)
    assert plan(wanted(device(0, DIRTY)), have) == SlicePlan(generation, (), (FIRST,))


def test_several_that_differ_make_a_new_generation_of_all() -> None:
    want = wanted(device(0, DIRTY), more=[device(1, DIRTY)])
    assert plan(want, there(wanted())) == SlicePlan(2, (), NAMES)


@pytest.mark.parametrize("missing", NAMES)
def test_a_missing_slice_makes_a_new_generation_that_ends_with_it(missing: str) -> None:
    """Until it is there the pool is not used, so no half of it is."""
    have = there(wanted())
    del have[missing]
    rest = tuple(name for name in NAMES if name != missing)
    assert plan(wanted(), have) == SlicePlan(2, (), (*rest, missing))


@pytest.mark.parametrize(
    "pool",
    [
        PoolOf("node-a", 1, 3),
        PoolOf("node-a", 3, 3),
        PoolOf("node-a", 2, 2),
        PoolOf("node-a", 2, 4),
        PoolOf("node-b", 2, 3),
    ],
)
@pytest.mark.parametrize("name", [COUNTERS, SECOND])
def test_slices_that_do_not_count_together_are_all_written_anew(name: str, pool: PoolOf) -> None:
    """As a death in the middle of a generation leaves them, or somebody else."""
    have = there(wanted(), 2)
    have[name].spec.pool = pool
    assert plan(wanted(), have) == SlicePlan(max(2, pool.generation) + 1, (), NAMES)


def test_a_pool_without_a_generation_gets_one() -> None:
    assert plan(wanted(), there(wanted(), 0)) == SlicePlan(1, (), NAMES)


@pytest.mark.parametrize(
    ("told", "counts"),
    [(-1, 0), (0, 0), (1, 1), ((1 << 62) - 1, (1 << 62) - 1), (1 << 62, 0), ((1 << 63) - 1, 0)],
)
def test_a_generation_that_nothing_can_follow_counts_as_none(told: int, counts: int) -> None:
    (one,) = stray("stray", generation=told).values()
    assert one.generation == counts


def test_obsolete_slices_go_without_a_new_generation_only_if_they_are_of_an_older_one() -> None:
    """One of this generation was counted in: the others' counts are of a pool with it."""
    have = there(wanted(), 2)
    old, same, newer = (stray(name, generation=n) for name, n in (("x", 1), ("y", 2), ("z", 3)))
    assert plan(wanted(), have | old) == SlicePlan(2, ("x",))
    assert plan(wanted(device(7)), have | old) == SlicePlan(2, ("x",), (FIRST,))
    assert plan(wanted(), have | same) == SlicePlan(3, ("y",), NAMES)
    assert plan(wanted(), have | old | same) == SlicePlan(3, ("x", "y"), NAMES)
    assert plan(wanted(), have | newer) == SlicePlan(4, ("z",), NAMES)


@pytest.mark.parametrize("other", [{"driver": "gpu.example.com"}, {"nodeName": "node-b"}])
def test_what_others_have_is_not_deleted_and_does_not_count(other: dict[str, str]) -> None:
    foreign = stray("foreign", generation=9, **other)
    assert plan(wanted(), there(wanted()) | foreign) == SlicePlan(1)
    assert plan(wanted(), foreign) == SlicePlan(1, (), NAMES)


def test_what_the_server_made_of_a_slice_is_no_difference_as_long_as_both_stay_so() -> None:
    have = there(wanted())
    have[FIRST].spec.devices = [{"name": "r0", "attributes": {}}]
    before = wanted()[FIRST], have[FIRST].spec.content
    assert plan(wanted(), have) == SlicePlan(1, (), (FIRST,))
    assert plan(wanted(), have, **{FIRST: before}) == SlicePlan(1)
    assert plan(wanted(device(5)), have, **{FIRST: before}) == SlicePlan(1, (), (FIRST,))
    have[FIRST].spec.devices = []
    assert plan(wanted(), have, **{FIRST: before}) == SlicePlan(1, (), (FIRST,))


def tainted(taints: Any) -> dict[str, ResourceSlice]:
    have = there(wanted(device(0, DIRTY)))
    assert have[FIRST].spec.devices is not None
    have[FIRST].spec.devices[0]["taints"] = taints
    return have


def test_the_time_that_the_server_adds_to_a_taint_is_no_difference() -> None:
    (taint,) = sent(FIRST, wanted(device(0, DIRTY))[FIRST])["spec"]["devices"][0]["taints"]
    timed = taint | {"timeAdded": "2026-01-01T00:00:00Z"}
    assert plan(wanted(device(0, DIRTY)), tainted([timed])) == SlicePlan(1)
    for other in ({"effect": "NoSchedule"}, {"value": "x"}, {"key": "x"}):
        assert plan(wanted(device(0, DIRTY)), tainted([timed | other])), other


@pytest.mark.parametrize("taints", [None, 5, "text", {}, [], [5], ["text", None], [{}]])
def test_a_taint_that_is_gone_or_makes_no_sense_is_put_right(taints: Any) -> None:
    have = tainted(taints)
    want = wanted(device(0, DIRTY))
    assert plan(want, copy.deepcopy(have)) == SlicePlan(1, (), (FIRST,))
    again = sent(FIRST, want[FIRST], before=have[FIRST])
    assert again["spec"] == sent(FIRST, want[FIRST])["spec"]


# ------------------------------------------------------------------ what the server understands


@pytest.mark.parametrize(
    ("gone", "counters", "taints"),
    [
        ((), True, True),
        (("sharedCounters",), False, True),
        (("consumesCounters",), False, True),
        (("taints",), True, False),
        (("consumesCounters", "taints"), False, False),
        (("attributes",), True, True),
    ],
)
def test_a_field_that_the_server_took_away_is_one_that_it_does_not_know(
    gone: tuple[str, ...], *, counters: bool, taints: bool
) -> None:
    """Regions that nobody keeps apart from their card would be given out twice (invariant 1), and
    what is dirty would be given out (invariant 4)."""
    forms = []
    for content in wanted(device(0, DIRTY)).values():
        told = {key: value for key, value in content.items() if key not in gone}
        if "devices" in told:
            told["devices"] = [
                {key: value for key, value in each.items() if key not in gone}
                for each in told["devices"]
            ]
        forms.append(lost(Form(), content, told))
    assert all(form.counters for form in forms) is counters
    assert all(form.taints for form in forms) is taints


def test_what_the_server_does_not_know_is_not_believed_for_being_left_out() -> None:
    content = Slice(devices=(Device("r0", {}),)).spec()
    for form in (Form(counters=False), Form(taints=False), Form(counters=False, taints=False)):
        assert lost(form, content, content) == form


def test_a_set_or_a_device_that_lost_its_counters_is_noticed_in_whatever_shape() -> None:
    sets = wanted()[COUNTERS]
    devices = wanted()[FIRST]
    for content, told in ((sets, {"sharedCounters": None}), (sets, {}), (devices, {})):
        assert not lost(Form(), content, told).counters
