"""What a report reports a region: whose it is and was, and what went wrong, in one word too."""

import pytest
from doubles.cards import AFU, make_card

from fpga_plugin.cards.reports import Report
from fpga_plugin.errors import PortInUseError
from fpga_plugin.kubernetes.names import PodUid

REGION = make_card().regions[0].id
POD, FORMER = PodUid("pod-a"), frozenset({PodUid("pod-b")})


@pytest.mark.parametrize(
    ("pod", "former", "values"),
    [
        (None, frozenset(), {}),
        (POD, frozenset(), {"pod": POD}),
        (None, FORMER, {"former": FORMER}),
        (POD, FORMER, {"pod": POD, "former": FORMER}),
    ],
)
def test_a_log_line_has_the_pods_that_are_known_and_no_others(
    pod: PodUid | None, former: frozenset[PodUid], values: dict[str, object]
) -> None:
    """An operator looks for the tenant by it: whose data was it, and who waits."""
    assert Report(REGION, pod=pod, former=former).concerned() == values


@pytest.mark.parametrize(
    ("error", "words", "kind"),
    [
        (PortInUseError("it is open", hint="stop who has it"), "stop who has it", "port_in_use"),
        (RuntimeError("a defect"), "RuntimeError('a defect')", "unexpected"),
    ],
)
def test_a_failure_has_its_words_and_its_kind(error: Exception, words: str, kind: str) -> None:
    """The kind is a metric's label: alerts tell a defect from a port that somebody holds."""
    report = Report(REGION, scrubbed=True, afu_id=AFU)
    report.failed(error)
    assert words in report.error
    assert report.failure == kind
