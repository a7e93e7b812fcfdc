"""Puts the simulated hardware together: the DFL code over the simulated kernel, and its events."""

from collections.abc import Sequence
from dataclasses import dataclass

from fpga_plugin.errors import SettingsError, quote
from fpga_plugin.hardware.dfl.backend import DflBackend
from fpga_plugin.hardware.dfl.slot_functions import SlotRule
from fpga_plugin.hardware.simulated.kernel import SimulatedKernel
from fpga_plugin.hardware.simulated.uevents import SimulatedEvents
from fpga_plugin.settings.settings import SimulatedGroup


@dataclass(frozen=True, slots=True)
class SimulatedHardware:
    """The hardware of a daemon with simulated cards."""

    kernel: SimulatedKernel
    backend: DflBackend
    events: SimulatedEvents


def simulated_backend(
    directory: str,
    groups: Sequence[SimulatedGroup],
    *,
    pr_seconds: float,
    owner: bool,
    slots: str | None = None,
    rule: SlotRule | None = None,
) -> SimulatedHardware:
    """Simulated cards whose state is in `directory`.

    Args:
        directory: FPGA_PLUGIN_SIMULATED_DIR; made if it is missing.
        groups: FPGA_PLUGIN_SIMULATED_CARDS.
        pr_seconds: FPGA_PLUGIN_SIMULATED_PR_SECONDS.
        owner: this process holds the plugin's lock. False (`fpga-plugin card list`): only look,
            write nothing, and do not start the events.
        slots: the directory of the slots' notes; None: in memory.
        rule: which functions are behind the slots of OFS cards.

    Raises:
        SettingsError: the directory cannot be made or written.
    """
    try:
        kernel = SimulatedKernel(directory, groups, pr_seconds=pr_seconds, owner=owner)
    except OSError as error:
        raise SettingsError(
            f"the simulated cards' directory {quote(directory)} cannot be used ({error.strerror})",
            hint="set FPGA_PLUGIN_SIMULATED_DIR to a directory that the plugin may write",
        ) from error
    backend = DflBackend(kernel, rule=rule, slots=slots, owner=owner)
    return SimulatedHardware(kernel, backend, SimulatedEvents(kernel))
