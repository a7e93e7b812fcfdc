"""Sets the user clock of simulated cards, which is the one thing of theirs that no real card has.

Linux has no documented way to set a real port's clock (`userclk_freqcmd` takes raw commands for a
PLL: dfl-afu-main.c). For people who try `clock=` a simulated port has the file `userclk/frequency`,
in kHz; what it is set to is measured as on real cards.
"""

from fpga_plugin.errors import HardwareError
from fpga_plugin.hardware.backend import ClockLimits, DriverSettings
from fpga_plugin.hardware.dfl.backend import DflBackend
from fpga_plugin.hardware.dfl.handles import port_of
from fpga_plugin.hardware.model import Card, Region
from fpga_plugin.hardware.simulated.state import CLOCK_DEFAULT, CLOCK_HIGH, CLOCK_LOW

_KHZ_PER_MHZ = 1000


class ClockedDflBackend(DflBackend):
    """The DFL code, with a clock that can be set where a card has the file for it."""

    def clock_limits(self, card: Card, region: Region) -> ClockLimits | None:
        """In MHz; None for a card whose clock is fixed."""
        if not self._kernel.exists(_file(region)):
            return super().clock_limits(card, region)
        return ClockLimits(CLOCK_LOW, CLOCK_HIGH)

    def apply_settings(self, card: Card, region: Region, settings: DriverSettings) -> None:
        """Set the clock, or its default again."""
        if not self._kernel.exists(_file(region)):
            super().apply_settings(card, region, settings)
            return
        wanted = str((settings.clock or CLOCK_DEFAULT) * _KHZ_PER_MHZ)
        try:
            if self._kernel.read(_file(region)) != wanted:
                self._kernel.write(_file(region), wanted)
        except OSError as error:
            raise HardwareError(
                f"the clock of region {region.id} cannot be set to {wanted} kHz ({error.strerror})",
                hint="is the card still plugged, and FPGA_PLUGIN_SIMULATED_DIR writable?",
            ) from error


def _file(region: Region) -> str:
    return f"{port_of(region).sysfs}/userclk/frequency"
