"""Puts the simulated hardware together: the families' code over simulated kernels, and events."""

from collections.abc import Sequence
from dataclasses import dataclass

from fpga_plugin.errors import SettingsError, quote
from fpga_plugin.hardware.backend import Backend
from fpga_plugin.hardware.dfl.slot_functions import SlotRule
from fpga_plugin.hardware.simulated.clock import ClockedDflBackend
from fpga_plugin.hardware.simulated.kernel import SimulatedKernel
from fpga_plugin.hardware.simulated.uevents import SimulatedEvents
from fpga_plugin.settings.settings import SimulatedGroup, SimulatedKind


@dataclass(frozen=True, slots=True)
class SimulatedHardware:
    """The hardware of a daemon with simulated cards."""

    kernel: SimulatedKernel
    backend: Backend
    events: SimulatedEvents


def simulated_backend(
    directory: str,
    groups: Sequence[SimulatedGroup],
    *,
    pr_seconds: float,
    owner: bool,
    slots: str | None = None,
    rule: SlotRule | None = None,
    tenant_loads: bool = False,
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
        tenant_loads: owners of Alveo cards may load what they bring.

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
    backend: Backend = ClockedDflBackend(kernel, rule=rule, slots=slots, owner=owner)
    if any(SimulatedKind.ALVEO in group.kinds for group in groups):
        from fpga_plugin.hardware.families import Families  # only where there are such cards
        from fpga_plugin.hardware.simulated.alveo.kernel import SimulatedXrtKernel
        from fpga_plugin.hardware.xrt.backend import XrtBackend

        alveo = SimulatedXrtKernel(kernel, pr_seconds=pr_seconds)
        backend = Families([backend, XrtBackend(alveo, tenant_loads=tenant_loads)])
    return SimulatedHardware(kernel, backend, SimulatedEvents(kernel))
