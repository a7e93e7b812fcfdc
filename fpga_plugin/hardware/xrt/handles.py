"""How the XRT backend finds a card and a region again: what `Card.handle`, `Region.handle` are."""

from dataclasses import dataclass, replace

from fpga_plugin.errors import CardGoneError, HardwareError
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.model import Card, Region
from fpga_plugin.hardware.vfio.function import PCI
from fpga_plugin.ids import PciAddress


@dataclass(frozen=True, slots=True)
class Functions:
    """A card's two PCI functions.

    Attributes:
        management: the directory of PF0.
        user: the directory of PF1.
        instance: tells the life of PF1's driver from a later one: inode numbers of PF1's directory
            and of its file `shutdown`, which stays while the card is reset and goes with the driver
            (userpf/xocl_sysfs.c, xocl_persist_attrs).
    """

    management: str
    user: str
    instance: tuple[int, int]


def user_function(address: PciAddress) -> PciAddress:
    """PF1 of the card whose PF0 this is."""
    return replace(address, function=1)


def directories(address: PciAddress) -> tuple[str, str]:
    """The directories of PF0 and of PF1."""
    return f"{PCI}/{address}", f"{PCI}/{user_function(address)}"


def instance(kernel: Kernel, user: str) -> tuple[int, int]:
    """As of `Functions`.

    Raises:
        OSError: PF1 or its driver is not there.
    """
    return kernel.instance(user), kernel.instance(f"{user}/shutdown")


def functions_of(what: Card | Region) -> Functions:
    """The functions of a card or region that this backend found."""
    assert isinstance(what.handle, Functions), "of another backend"
    return what.handle


def check_instance(kernel: Kernel, region: Region) -> None:
    """Make sure that PF1 and its driver are those that were scanned.

    Raises:
        CardGoneError: they are not.
        HardwareError: that is unknown.
    """
    functions = functions_of(region)
    try:
        now = instance(kernel, functions.user)
    except (FileNotFoundError, NotADirectoryError):
        now = None
    except OSError as error:
        raise HardwareError(
            f"{functions.user} cannot be looked up ({error.strerror})", hint="see the kernel's log"
        ) from error
    if now != functions.instance:
        raise CardGoneError(
            f"{functions.user} is no longer the user function of region {region.id}",
            hint="the card was removed, or xocl was bound again; delete the pod",
        )
