"""What is done to a region, against a port that fails at a chosen step."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from unittest import mock

import pytest
from doubles.cards import AFU, BLANK, INTERFACE, make_card

from fpga_plugin.bitstreams.store import Bitstream
from fpga_plugin.cards import steps
from fpga_plugin.cards.reports import Report
from fpga_plugin.errors import HardwareError, RefusedError, WrongImageError
from fpga_plugin.hardware.image import Image, RawImage
from fpga_plugin.ids import AfuId, BitstreamId

CARD = make_card()
REGION = CARD.regions[0]


@dataclass
class FakePort:
    """A port that takes every image; what `clear_errors` finds is given, call by call."""

    errors: list[Mapping[str, int]] = field(default_factory=list)
    shows: AfuId | None = None
    programmed: list[bytes] = field(default_factory=list)

    def reset(self) -> None:
        pass

    def clear_errors(self) -> Mapping[str, int]:
        return self.errors.pop(0) if self.errors else {}

    def program(self, image: Image) -> None:
        self.programmed.append(bytes(image.data))

    def afu_id(self, expected: AfuId | None = None) -> AfuId:
        return self.shows or AfuId(self.programmed[-1].decode())


def image(afu: AfuId) -> Bitstream:
    return Bitstream("/srv/x.gbs", INTERFACE, BitstreamId(afu), afu, RawImage(afu.encode()))


def backend() -> mock.Mock:
    found = mock.Mock()
    found.clear_errors.return_value = {"pcie0_errors": 0x1}
    return found


def scrub(port: FakePort, report: Report | None = None) -> Report:
    report = report or Report(REGION.id)
    steps.scrub(backend(), CARD, REGION, port, image(BLANK), report)
    return report


def test_errors_of_the_last_image_are_cleared_and_told():
    report = scrub(FakePort([{"errors": 0x2, "errors_left": 0x2}, {"errors": 0x2}]))
    assert report.afu_id == BLANK
    assert report.steps[1].note == "errors was 0x2, errors_left was 0x2, pcie0_errors was 0x1"


def test_what_the_last_image_noted_in_the_card_after_its_reset_is_cleared_too():
    card, port = backend(), FakePort()
    seen: list[int] = []

    def clear(_: object) -> dict[str, int]:
        seen.append(len(port.programmed))
        return {}

    card.clear_errors.side_effect = clear
    steps.scrub(card, CARD, REGION, port, image(BLANK), Report(REGION.id))
    assert seen == [0, 1]


def test_errors_that_stay_after_blanking_fail_the_scrub():
    """Under the last image they may be its doing; under the blank one the hardware is at fault."""
    report = Report(REGION.id)
    with pytest.raises(HardwareError, match="keeps port errors 0x2 after it was blanked"):
        scrub(FakePort([{}, {"errors": 0x3, "errors_left": 0x2}]), report)
    assert "0x2" in report.steps[-1].note


def test_a_function_stays_is_read_and_has_no_errors_after_its_reset():
    report = Report(REGION.id)
    port = FakePort([{"errors": 0x2, "errors_left": 0x2}], shows=AFU)
    steps.scrub(backend(), CARD, REGION, port, None, report, keep=True)
    assert not port.programmed
    assert report.afu_id == AFU
    assert "its own memory is not cleared" in report.steps[-1].note
    port = FakePort([{}, {"errors": 0x3, "errors_left": 0x2}], shows=AFU)
    with pytest.raises(HardwareError, match="keeps port errors 0x2 after it was reset"):
        steps.scrub(backend(), CARD, REGION, port, None, report, keep=True)


def test_a_function_that_is_not_the_promised_one_is_refused():
    report = Report(REGION.id)
    steps.verify(FakePort(shows=AFU), AFU, report, function=True)
    with pytest.raises(RefusedError, match=f"holds the function {BLANK} by now"):
        steps.verify(FakePort(shows=BLANK), AFU, report, function=True)


@pytest.mark.parametrize("shows", [BLANK, AfuId("0" * 32)])
def test_an_image_counts_as_programmed_only_when_its_afu_id_reads_back(shows: AfuId):
    report = Report(REGION.id)
    with pytest.raises(WrongImageError, match=f"shows AFU {shows} where {AFU} was programmed"):
        steps.program(FakePort(shows=shows), image(AFU), report, name="program")
    steps.program(FakePort(), image(AFU), report, name="program")
    assert report.afu_id == AFU


def test_a_blank_whose_afu_id_does_not_read_back_is_no_scrub():
    with pytest.raises(WrongImageError):
        scrub(replace(FakePort(), shows=AFU))
