"""The steps of work on a region, with its port held exclusively.

All of it blocks and belongs into the card's thread. A scrub is: quiesce, clear port errors,
restore driver defaults, program the blank bitstream, verify. On-card memory belongs to the card,
not to a region: the scrub calls `clear_memory` once no neighbour uses it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from fpga_plugin.bitstreams.store import Bitstream
from fpga_plugin.cards.clocks import ClockPlan
from fpga_plugin.cards.reports import Report, ReportStep
from fpga_plugin.errors import HardwareError, RefusedError, WrongImageError
from fpga_plugin.hardware.backend import Backend, DriverSettings, Port
from fpga_plugin.hardware.model import Card, Region
from fpga_plugin.ids import AfuId


class Notes:
    """Collects the note of the step that is being timed."""

    def __init__(self) -> None:
        self.text = ""


@contextmanager
def timed(report: Report, name: str) -> Iterator[Notes]:
    """Add a step to the report, also when it fails."""
    notes = Notes()
    begin = time.perf_counter()
    try:
        yield notes
    except Exception as error:
        notes.text = str(error)
        raise
    finally:
        report.steps.append(ReportStep(name, time.perf_counter() - begin, notes.text))


def quiesce(backend: Backend, card: Card, region: Region, port: Port, report: Report) -> None:
    """Stop the accelerator, clear its errors, restore its driver parameters.

    Raises:
        HardwareError: a step failed.
    """
    with timed(report, "quiesce"):
        port.reset()
    with timed(report, "clear errors") as notes:
        errors = {**port.clear_errors(), **backend.clear_errors(card)}
        notes.text = ", ".join(f"{name} was {value:#x}" for name, value in errors.items())
    with timed(report, "restore defaults"):
        backend.apply_settings(card, region, DriverSettings())


def set_parameters(
    backend: Backend, card: Card, region: Region, clock: ClockPlan, report: Report
) -> None:
    """Set driver parameters, unless they are the defaults; notes the clock.

    Raises:
        FpgaPluginError: the driver refused.
    """
    with timed(report, "set parameters") as notes:
        notes.text = f"clock: {clock.detail}"
        if clock.settings != DriverSettings():
            backend.apply_settings(card, region, clock.settings)


def program(port: Port, bitstream: Bitstream, report: Report, *, name: str) -> None:
    """Program and verify: the ioctl's success alone proves nothing on a poisoned port.

    Raises:
        HardwareError: the PR failed, or something else answers than was programmed.
    """
    with timed(report, name) as notes:
        notes.text = f"AFU {bitstream.afu_id}"
        port.program(bitstream.image)
    verify(port, bitstream.afu_id, report)


def verify(port: Port, expected: AfuId, report: Report, *, function: bool = False) -> None:
    """Compare what is on the region with what was programmed, or the `function` that stays.

    Raises:
        RefusedError: it is not the function that the region's owner was promised.
        HardwareError: another AFU id than was programmed reads back, or none.
    """
    with timed(report, "verify") as notes:
        report.afu_id = port.afu_id(expected)
        if report.afu_id == expected:
            notes.text = f"AFU id reads {expected}"
        elif function:
            raise RefusedError(
                f"region {report.region} holds the function {report.afu_id} by now, and the pod was"
                f" given it for {expected}",
                hint="delete the pod: the region is advertised by the function that it holds",
            )
        else:
            raise WrongImageError(
                f"region {report.region} shows AFU {report.afu_id} where {expected} was programmed",
                hint="the bitstream's file is mislabelled, or was built for another card: install"
                " the right one",
            )


def scrub(  # noqa: PLR0917  # called in one place, in the order of the Backend's own methods
    backend: Backend,
    card: Card,
    region: Region,
    port: Port,
    blank: Bitstream | None,
    report: Report,
    *,
    keep: bool = False,
) -> None:
    """Scrub a region, all but the card's memory.

    Without a blank bitstream (best-effort) the last image stays, reset. `keep`: so does a function
    that came with the card, which has to be without errors then.

    Raises:
        HardwareError: a step failed; the region must not be given out.
    """
    report.scrubbed = True
    quiesce(backend, card, region, port, report)
    if keep:
        _no_errors_left(port, report, region, "reset")
        with timed(report, "verify") as notes:
            report.afu_id = port.afu_id()
            notes.text = f"function {report.afu_id} stays, reset; its own memory is not cleared"
    elif blank is not None:
        program(port, blank, report, name="program blank")
        # The source of errors that the last image kept raising is gone.
        backend.clear_errors(card)
        _no_errors_left(port, report, region, "blanked")
    else:
        with timed(report, "verify") as notes:
            report.afu_id = port.afu_id()
            notes.text = "no blank bitstream: the last image stays, reset"


def _no_errors_left(port: Port, report: Report, region: Region, what: str) -> None:
    with timed(report, "clear errors") as notes:
        if (left := port.clear_errors().get("errors_left")) is not None:
            notes.text = f"{left:#x} left"
            raise HardwareError(
                f"region {region.id} keeps port errors {left:#x} after it was {what}",
                hint="the operator finds what to do in docs/runbook.md",
            )


def clear_memory(backend: Backend, card: Card, report: Report) -> None:
    """Clear the card's memory, of all its regions at once.

    Raises:
        HardwareError: it failed or timed out.
    """
    with timed(report, "clear memory"):
        backend.clear_memory(card)
