"""Finds Alveo cards in sysfs and turns each into a value, or into a problem of that card alone.

A card is two PCI functions of one device: PF0, which manages it, and PF1, which programs use. It
has one region. Its resources are named by the interface id that a fitting xclbin names. A shell of
two stages shows several: the driver takes the first of its own tree (mgmtpf/mgmt-utils.c,
xclmgmt_get_interface_uuid), which `interface_uuids` of PF0 has on its second line, behind that of
the base stage (mgmtpf/mgmt-sysfs.c). Not verified on a card whose shell has two.
"""

import math
import re
from collections.abc import Mapping

from fpga_plugin.errors import HardwareError, quote
from fpga_plugin.hardware import pci
from fpga_plugin.hardware.grant import DeviceNumber, Grant
from fpga_plugin.hardware.image import Xclbin
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.model import Card, CardProblem, Region
from fpga_plugin.hardware.sysfs import children, optional
from fpga_plugin.hardware.vfio.function import PCI, driver
from fpga_plugin.hardware.xrt import defs
from fpga_plugin.hardware.xrt.attributes import value
from fpga_plugin.hardware.xrt.handles import (
    Functions,
    directories,
    instance,
    user_function,
)
from fpga_plugin.ids import (
    CardId,
    InterfaceId,
    PciAddress,
    functions_variable,
    parse_interface_id,
    region_id,
    shell_name,
)

_VERSION = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})\.[0-9]{1,6}", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,8}:[0-9]{1,8}", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", re.ASCII)
_SERIAL = re.compile(r"[A-Za-z0-9]{1,32}", re.ASCII)


def card_ids(kernel: Kernel) -> tuple[CardId, ...]:
    """The cards that there are, with drivers or without; touches no hardware.

    Raises:
        HardwareError: PCI functions cannot be listed.
    """
    try:
        names = sorted(kernel.listdir(PCI))
    except FileNotFoundError:
        return ()  # a machine without PCI
    except OSError as error:
        raise HardwareError(
            f"{PCI} cannot be listed ({error.strerror})",
            hint="is the node's /sys mounted where FPGA_PLUGIN_SYSFS_ROOT says?",
        ) from error
    addresses = (PciAddress.parse(name) for name in names)
    return tuple(address.card_id for address in addresses if is_card(kernel, address))


class _ShutDownError(HardwareError):
    """PF1 is shut down."""


def is_card(kernel: Kernel, address: PciAddress) -> bool:
    """Whether a PCI function is the management function of a card of AMD's."""
    if address.function != 0:
        return False
    try:
        management, _ = directories(address)
        vendor, device, *_ = pci.ids(kernel, management)
        return vendor == defs.VENDOR and (
            device in defs.PRODUCTS or driver(kernel, address) == defs.MANAGEMENT_DRIVER
        )
    except OSError:
        return False


def scan_card(kernel: Kernel, card: CardId) -> Card | CardProblem | None:
    """One card; None when there is none of this id."""
    address = PciAddress.parse(card)
    if not is_card(kernel, address):
        return None
    try:
        return _card(kernel, address)
    except HardwareError as error:
        hint = error.hint or "the drivers say nonsense: see the kernel's log"
        interrupted = isinstance(error, _ShutDownError)
        return CardProblem(address, error.message, hint, passing=True, interrupted=interrupted)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return CardProblem(
            address,
            f"card {address} cannot be read: {error.strerror}{where}",
            "see the kernel's log; the card or its driver may be failing",
            passing=True,
        )


def _card(kernel: Kernel, address: PciAddress) -> Card:
    """Read a card.

    Raises:
        HardwareError: the card cannot be served; message and hint say why.
        OSError: an attribute cannot be read.
    """
    management, user = directories(address)
    functions = _functions(kernel, address, management, user)
    _refuse_old_drivers(kernel, address)
    _refuse_unfit(kernel, address, management)
    node, number = _render_node(kernel, address, user)
    region = region_id(address.card_id, 0)
    grant = Grant(
        nodes=(node,),
        shared=qdma_nodes(kernel, user),
        env={functions_variable(region): str(user_function(address))},
    )
    *_, device = pci.ids(kernel, management)[:2]
    product = defs.PRODUCTS.get(device, "AMD card")
    return Card(
        address=address,
        interface_id=interface_id(kernel, address, management),
        numa_node=pci.numa_node(kernel, management),
        regions=(Region(address.card_id, 0, grant, functions, numbers={node: number}),),
        ports=1,
        clears_memory=True,
        some_memory_stays=True,  # unless its blank bitstream is known to reach it
        memory=defs.ON_BOARD_MEMORY.get(device, math.inf),
        iommu=pci.iommu(kernel, (management, user)),
        description=f"{product} ({defs.VENDOR}:{device})",
        handle=functions,
        pcie_root=pci.root_complex(kernel.realpath(management)),
        firmware=_shell(kernel, management),
        untested=defs.UNTESTED,
        family="xrt",
        vendor="amd",
        model=product,
        serial=serial_number(kernel, management),
        guarded=_guarded(kernel, management),
        resets=True,
        vendor_resource=_amds_name(kernel, user),
        takes=Xclbin,
    )


def _functions(kernel: Kernel, address: PciAddress, management: str, user: str) -> Functions:
    """PF0 with xclmgmt and PF1 with xocl.

    Raises:
        HardwareError: one is missing, or has another driver or none.
    """
    has = driver(kernel, address)
    if has != defs.MANAGEMENT_DRIVER:
        raise _without_driver(address, "management", address, has, defs.MANAGEMENT_DRIVER)
    user_address = user_function(address)
    if not kernel.exists(user):
        raise HardwareError(
            f"card {address} has no user function {user_address}",
            hint="in a virtual machine that has one function alone the card cannot be served; on"
            f" the host, rescan its bus: echo 1 > {management}/dparent/rescan",
        )
    has = driver(kernel, user_address)
    if has != defs.USER_DRIVER:
        raise _without_driver(address, "user", user_address, has, defs.USER_DRIVER)
    if value(kernel, f"{user}/shutdown"):
        raise _ShutDownError(
            f"card {address} is shut down: a reset of it began and did not end, or somebody shut it"
            " down",
            hint=f"restart the plugin, which puts it online, or as root: echo 0 > {user}/shutdown",
        )
    return Functions(management, user, instance(kernel, user))


def _without_driver(
    card: PciAddress, role: str, address: PciAddress, has: str | None, wanted: str
) -> HardwareError:
    if has:
        return HardwareError(
            f"card {card} is left alone: its {role} function {address} has the driver {quote(has)}",
            hint=f"a virtual machine may be using it; to serve it here, bind it to {wanted}",
        )
    return HardwareError(
        f"the {role} function {address} of card {card} has no driver",
        hint=f"load the module {wanted} (of XRT's package for Alveo, xrt-xocl-dkms on Debian)",
    )


def _refuse_old_drivers(kernel: Kernel, address: PciAddress) -> None:
    for module in (defs.MANAGEMENT_DRIVER, defs.USER_DRIVER):
        path = f"/sys/module/{module}/version"
        text = optional(kernel, path) or ""
        match = _VERSION.match(text)
        if match is None:
            raise HardwareError(
                f"card {address} is left alone: nothing tells the version of {module} ({path} says"
                f" {quote(text)})",
                hint="before XRT 2.15 the driver takes the plugin's requests for others",
            )
        if (int(match[1]), int(match[2])) < defs.OLDEST_DRIVERS:
            raise HardwareError(
                f"card {address} is left alone: {module} is of XRT {match[0]}, which takes the"
                " plugin's requests for others",
                hint="install the drivers of XRT 2.15 (2023.1) or later",
            )


def _refuse_unfit(kernel: Kernel, address: PciAddress, management: str) -> None:
    """A card in which nothing can be programmed in the way that the plugin knows."""
    if value(kernel, f"{management}/recovery"):
        raise HardwareError(
            f"card {address} runs its golden image (recovery): its shell could not be loaded",
            hint="flash its shell again with xbmgmt, and power-cycle the node",
        )
    if value(kernel, f"{management}/ready") != 1:
        raise HardwareError(
            f"card {address} is not ready: xclmgmt has not loaded its shell",
            hint="is the shell's firmware installed below /lib/firmware/xilinx? See the kernel's"
            " log",
        )
    if value(kernel, f"{management}/versal"):
        raise HardwareError(
            f"card {address} is a Versal card, which is not served",
            hint="see docs/compatibility.md",
        )
    for name, why in (
        ("config_mailbox_channel_switch", "its mailbox is passed on to a daemon (mpd, msd)"),
        ("config_xclbin_change", "its management function loads other files in their place"),
    ):
        path = f"{management}/{name}"
        if setting := value(kernel, path):
            raise HardwareError(
                f"card {address} is left alone: {why} ({name} is {setting:#x})",
                hint=f"as root: echo 0 > {path}",
            )


def _render_node(kernel: Kernel, address: PciAddress, user: str) -> tuple[str, DeviceNumber]:
    found = list(children(kernel, f"{user}/drm", r"renderD[0-9]{1,9}"))
    if len(found) != 1:
        raise HardwareError(
            f"the user function of card {address} has {len(found) or 'no'} render nodes",
            hint="a reset takes it away for a moment; else see the kernel's log",
        )
    path = f"{found[0]}/dev"
    number = optional(kernel, path)
    if number is None or not _NUMBER.fullmatch(number):
        raise HardwareError(f"{path} says {quote(number or '')}, which is no device number")
    return f"/dev/dri/{found[0].rpartition('/')[2]}", number


def node_of(kernel: Kernel, region: Region) -> str:
    """A region's render node as it is now.

    Raises:
        HardwareError: it has none, or the kernel says nonsense.
        OSError: it cannot be looked up.
    """
    address = PciAddress.parse(region.card)
    return _render_node(kernel, address, directories(address)[1])[0]


def numbers(kernel: Kernel, region: Region) -> Mapping[str, DeviceNumber]:
    """The device number of a region's node as it is now.

    Raises:
        HardwareError: it has none, or the kernel says nonsense.
        OSError: it cannot be read.
    """
    address = PciAddress.parse(region.card)
    return dict([_render_node(kernel, address, directories(address)[1])])


def qdma_nodes(kernel: Kernel, user: str) -> tuple[str, ...]:
    """The node of a QDMA shell's engine, which programs need beside the render node.

    The subdevice's directory has it, below the class `xrt_user` (xocl_subdev.c,
    xocl_subdev_cdev_create); sysfs writes `!` for the `/` in its name.

    Raises:
        OSError: a directory cannot be listed.
    """
    names = (
        node.rpartition("/")[2]
        for subdevice in children(kernel, user, r"dma\.qdma\.u\.[0-9]{1,9}")
        for node in children(kernel, f"{subdevice}/xrt_user", r"xfpga!dma\.qdma\.u[0-9.]{1,24}")
    )
    return tuple(f"/dev/{name.replace('!', '/')}" for name in names)


def interface_id(kernel: Kernel, address: PciAddress, management: str) -> InterfaceId:
    """The interface id that a fitting xclbin names; see the module.

    Raises:
        HardwareError: there is none.
        OSError: it cannot be read.
    """
    path = f"{management}/interface_uuids"
    lines = (optional(kernel, path) or "").split()
    if not lines:
        raise HardwareError(
            f"card {address} shows no interface id: {path} is empty or not there",
            hint="see the kernel's log: the shell's metadata may be missing below"
            " /lib/firmware/xilinx",
        )
    text = lines[1] if len(lines) > 1 else lines[0]
    try:
        found = parse_interface_id(text)
    except ValueError as error:
        raise HardwareError(f"{path} says {quote(text)}: {error}") from error
    if found in {"0" * 32, "f" * 32}:
        raise HardwareError(f"{path} says {quote(text)}, which is no interface id")
    return found


def _shell(kernel: Kernel, management: str) -> str:
    """The shell's name (VBNV: vendor, board, name, version); foreign text, so checked."""
    for rom in children(kernel, management, r"rom\.m\.[0-9]{1,9}"):
        text = optional(kernel, f"{rom}/VBNV") or ""
        if _NAME.fullmatch(text):
            return text
    return ""


def _amds_name(kernel: Kernel, user: str) -> str:
    """The resource by which AMD's plugin gives the card out, read where that plugin reads it.

    The time stamp of a shell of two stages is 0 (subdev/feature_rom.c, init_rom_by_dtb).
    """
    for rom in children(kernel, user, r"rom\.u\.[0-9]{1,9}"):
        shell, stamp = (optional(kernel, f"{rom}/{name}") or "" for name in ("VBNV", "timestamp"))
        if name := shell_name(shell, stamp):
            return name
    return ""


def serial_number(kernel: Kernel, management: str) -> str:
    """As the card's controller (XMC) tells it; empty where it does not."""
    for controller in children(kernel, management, r"xmc\.m\.[0-9]{1,9}"):
        text = optional(kernel, f"{controller}/serial_num") or ""
        if _SERIAL.fullmatch(text):
            return text
    return ""


def _guarded(kernel: Kernel, management: str) -> frozenset[DeviceNumber]:
    """The number of `/dev/xclmgmt<N>`: who has it programs the card, under any mask."""
    read = (
        optional(kernel, f"{node}/dev")
        for node in children(kernel, f"{management}/xrt_mgmt", r"xclmgmt[0-9]{1,9}")
    )
    return frozenset(one for one in read if one is not None and _NUMBER.fullmatch(one))
