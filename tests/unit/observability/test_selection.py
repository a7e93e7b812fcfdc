"""What is looked for in a status is found by pod, card and region, and by nothing else."""

import pytest
from test_page import card, owner, refusal, region, status

from fpga_plugin.observability.selection import selected

OTHER = "0000-11-00.0"


def shown(words):
    whole = status(
        card(region(owner=owner()), region(1)),
        card(region(0, region=f"{OTHER}-p0"), card=OTHER),
        refusals=[refusal(), refusal(pod="other", pod_uid="99", devices=[f"{OTHER}-p0"])],
        problems=[{"card": "0000-12-00.0", "error": "e", "hint": ""}],
    )
    found = selected(whole, words)
    return (
        [one["region"] for each in found["cards"] for one in each["regions"]],
        [one["pod"] for one in found["refusals"]],
        [one["card"] for one in found["problems"]],
    )


P0, P1, Q0 = "0000-10-00.0-p0", "0000-10-00.0-p1", f"{OTHER}-p0"


@pytest.mark.parametrize(
    ("words", "regions", "refused", "skipped"),
    [
        ("", [P0, P1, Q0], ["compress", "other"], ["0000-12-00.0"]),
        ("  ", [P0, P1, Q0], ["compress", "other"], ["0000-12-00.0"]),
        ("TEAM/Compress", [P0], ["compress"], []),
        ("3f0c6e5e", [P0], ["compress"], []),
        (OTHER, [Q0], ["other"], []),
        ("0000:11:00.0", [Q0], ["other"], []),
        (P1, [P1], [], []),
        ("0000-12", [], [], ["0000-12-00.0"]),
        ("nobody", [], [], []),
        ("<script>", [], [], []),
    ],
)
def test_what_is_looked_for_is_shown(words, regions, refused, skipped):
    assert shown(words) == (regions, refused, skipped)


def test_the_nodes_own_facts_stay():
    whole = status(card(region()))
    assert {k: v for k, v in selected(whole, "x").items() if k != "cards"} == {
        k: v for k, v in whole.items() if k != "cards"
    }
