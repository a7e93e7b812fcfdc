"""The hwmon devices of a board's management controller (BMC), below the FME.

The FME's own have alarms and no labels (drivers/fpga/dfl-fme-main.c). The BMC's, where a board has
one, have labels, mostly limits, and no alarms (drivers/hwmon/intel-m10-bmc-hwmon.c); what is
pluggable and not there reads ENODATA.
"""

from collections.abc import Iterator

from fpga_plugin.hardware import hwmon

_BMC = r"[a-z0-9]{1,16}bmc-hwmon\.[0-9]{1,9}\.auto"
_SPI = ("spi_master", r"spi[0-9]{1,9}", r"spi[0-9]{1,9}\.[0-9]{1,3}")
_WAYS = (
    (),  # N6000 (intel-m10-bmc-pmci, Linux 6.2)
    _SPI,  # D5005, N501x (spi-altera-dfl)
    (r"subdev_spi_altera\.[0-9]{1,9}\.auto", *_SPI),  # N3000 (dfl-n3000-nios)
)
"""What lies between one of the FME's devices and the controller."""


def board(listed: hwmon.Listed, fme_sysfs: str) -> Iterator[str]:
    """The directories of the management controller's."""
    for device in listed(fme_sysfs, r"dfl_dev\.[0-9]{1,9}"):
        for way in _WAYS:
            yield from hwmon.found(listed, device, (*way, _BMC, *hwmon.HWMON))
