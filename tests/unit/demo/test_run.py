"""What the demo says in the end of a pod that was not served."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from fpga_plugin.cards.reports import Report
from fpga_plugin.demo.events import Failure
from fpga_plugin.demo.pod import DemoPod
from fpga_plugin.demo.recorder import Recorder
from fpga_plugin.demo.run import _showed_another, _verdict
from fpga_plugin.errors import FpgaPluginError, ProgrammingError, WrongImageError
from fpga_plugin.ids import RegionId

ADVICE = "simulated cards cannot run an image for real cards"
POD = cast("DemoPod", SimpleNamespace(namespace="ns", name="pod"))


def recorder(*errors: FpgaPluginError) -> Recorder:
    reports = []
    for error in errors:
        reports.append(Report(RegionId("0000-10-00.0-p0")))
        reports[-1].failed(error)
    made: Any = SimpleNamespace(work=[SimpleNamespace(report=one) for one in reports])
    return cast("Recorder", made)


@pytest.mark.parametrize(
    ("error", "real"),
    [
        (WrongImageError("in whatever words"), True),
        (ProgrammingError("region p0 shows AFU a where b was programmed"), False),
    ],
)
def test_the_kind_of_error_says_that_an_image_is_for_real_cards_and_not_its_words(
    error: FpgaPluginError, *, real: bool
) -> None:
    found = recorder(ProgrammingError("once"), error)
    assert _showed_another(found) is real
    verdict = _verdict(POD, Failure(str(error)), [], real=_showed_another(found))
    assert verdict.startswith(f"Failed: {error}")
    assert verdict.endswith(ADVICE) is real
