"""A dictionary that stays small."""

from fpga_plugin.host.bounded import BoundedDict


def test_what_was_set_the_longest_ago_is_forgotten():
    kept = BoundedDict[str, int](2)
    kept["a"] = kept["b"] = 1
    kept["a"] = 2
    kept["c"] = 3
    assert list(kept.items()) == [("a", 2), ("c", 3)]


def test_what_is_asked_for_may_be_made_the_latest():
    kept = BoundedDict[str, int](2)
    kept["a"], kept["b"] = 1, 2
    kept.move_to_end("a")
    kept["c"] = 3
    assert list(kept) == ["a", "c"]
