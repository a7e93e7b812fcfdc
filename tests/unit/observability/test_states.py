"""The states' words lead to a part of the runbook that is there, and says the same."""

import pytest
from repository import ROOT

from fpga_plugin.allocation.journal.records import Condition
from fpga_plugin.observability.states import STATES

RUNBOOK = (ROOT / "docs/runbook.md").read_text()
HEADINGS = {
    line.lstrip("#").strip().lower().replace(" ", "-")
    for line in RUNBOOK.splitlines()
    if line.startswith("##")
}
TABLE = RUNBOOK.partition("\n## The states\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.word)
def test_a_states_part_of_the_runbook_is_there(state):
    assert state.part in HEADINGS
    assert f"`{state.word}`" in TABLE


def test_every_condition_is_explained():
    assert {condition.value.lower() for condition in Condition} <= {s.word for s in STATES}
