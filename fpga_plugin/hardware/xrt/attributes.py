"""Reading the two functions' attributes, each by its name.

PF1's directory is never walked, and `ulp_uuids` never read: with nothing loaded, reading it is a
NULL dereference in the driver (userpf/xocl_sysfs.c, ulp_uuids_show), after which the functions can
no longer be removed. Its subdevices' directories may be listed by name.
"""

from fpga_plugin.errors import AcceleratorSilentError, HardwareError, quote
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.sysfs import children, number, optional
from fpga_plugin.hardware.xrt import defs
from fpga_plugin.ids import AfuId, RegionId, parse_afu_id

_ALL_ONES = AfuId("f" * 32)


def value(kernel: Kernel, path: str) -> int | None:
    """An attribute that is a number; None where it is not there, as while a card is reset.

    Raises:
        HardwareError: it is none.
        OSError: it cannot be read.
    """
    text = optional(kernel, path)
    return None if text is None else number(path, text)


def is_offline(kernel: Kernel, function: str) -> bool:
    """Whether a function's driver says that its card is being reset.

    `dev_offline` is 1 then. While PF1 takes its parts down and makes them again it is -19 (ENODEV):
    its driver has no device for a moment (userpf/xocl_sysfs.c, dev_offline_show). Or it is not
    there.

    Raises:
        OSError: it cannot be read.
    """
    return (optional(kernel, f"{function}/dev_offline") or "").strip() != "0"


def loaded(kernel: Kernel, user: str, region: RegionId) -> AfuId:
    """The uuid of the xclbin that PF1's driver believes is loaded; `NO_IMAGE`: none.

    It is the driver's record, which it makes once ICAP and memory calibration have succeeded and
    drops at every failure (subdev/icap.c): weaker than an id that the logic itself shows.

    Raises:
        HardwareError: it cannot be read, as while the card is reset, or is no uuid.
    """
    path = f"{user}/xclbinuuid"
    try:
        lines = {line.strip() for line in kernel.read(path).splitlines() if line.strip()}
    except OSError as error:
        raise HardwareError(
            f"what is loaded into region {region} cannot be read: {path} ({error.strerror})",
            hint="is the card being reset? Else see the kernel's log",
        ) from error
    try:
        found = {parse_afu_id(line) for line in lines} - {defs.NO_IMAGE}
    except ValueError as error:
        raise HardwareError(f"{path} says {quote(' '.join(sorted(lines)))}: {error}") from error
    if len(found) > 1:
        raise HardwareError(
            f"region {region} has {len(found)} xclbins loaded: {path}",
            hint="a card whose driver has several slots is not served (docs/compatibility.md)",
        )
    if _ALL_ONES in found:
        raise AcceleratorSilentError(f"{path} reads all ones", hint="see the kernel's log")
    return next(iter(found), defs.NO_IMAGE)


def firewall(kernel: Kernel, management: str) -> int:
    """The highest level of the AXI firewalls that have tripped; 0: none, or the card has none.

    PF0's `error` is not read: reading it clears it (mgmtpf/mgmt-sysfs.c, error_show).

    Raises:
        HardwareError: nonsense.
        OSError: it cannot be read.
    """
    levels = (
        value(kernel, f"{subdevice}/level") or 0
        for subdevice in children(kernel, management, r"firewall\.m\.[0-9]{1,9}")
    )
    return max(levels, default=0)
