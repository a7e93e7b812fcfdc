"""What sysfs shows of a simulated Alveo card: a U55C with its shell of one stage (XRT 2.25.0)."""

import errno
import uuid
from collections.abc import Callable
from functools import partial

from fpga_plugin.hardware.simulated.alveo.board import AlveoBoard
from fpga_plugin.hardware.simulated.faults import SimulatedFault
from fpga_plugin.hardware.simulated.state import NO_IMAGE
from fpga_plugin.hardware.simulated.tree import Attribute, Fixed, Lazy, Node, Symlink, failure
from fpga_plugin.settings.settings import SimulatedKind

MANAGEMENT_DRIVER = "/sys/bus/pci/drivers/xclmgmt"
USER_DRIVER = "/sys/bus/pci/drivers/xocl"
VERSION = "2.25.0,0000000000000000000000000000000000000000"
SHELL = "xilinx_u55c_gen3x16_xdma_base_3"
DRM_MAJOR, MANAGEMENT_MAJOR = 226, 237


def root_name(board: AlveoBoard) -> str:
    """The PCI root bus above a card."""
    return f"pci{board.address.domain:04x}:{board.address.bus:02x}"


def management_path(board: AlveoBoard) -> str:
    """PF0."""
    return f"/sys/devices/{root_name(board)}/{board.address}"


def user_path(board: AlveoBoard) -> str:
    """PF1."""
    return f"/sys/devices/{root_name(board)}/{board.user_address}"


def _function(board: AlveoBoard, device: str) -> dict[str, Node]:
    entries: dict[str, Node] = {
        "vendor": "0x10ee",
        "device": device,
        "subsystem_vendor": "0x10ee",
        "subsystem_device": "0x000e",
        "class": "0x120000",
        "numa_node": str(board.address.bus & 1),
        "sriov_totalvfs": "0",
        "aer_dev_correctable": "TOTAL_ERR_COR 0",
        "aer_dev_fatal": "TOTAL_ERR_FATAL 0",
        "subsystem": Symlink("/sys/bus/pci"),
    }
    if SimulatedKind.NO_IOMMU not in board.shape.kinds:
        entries["iommu_group"] = Fixed({"type": "DMA-FQ"})
    return entries


def management_entries(board: AlveoBoard) -> dict[str, Node]:
    """The directory of PF0."""
    entries = _function(board, "0x505c")
    if not board.state.management:
        return entries

    def is_ready() -> str:
        return str(int(not board.is_offline and board.fault() is not SimulatedFault.RECOVERY))

    def interfaces() -> str:
        # The base stage's, then those of the whole tree, which a shell of one stage repeats.
        return f"{board.shape.interface_id}\n{board.shape.interface_id}"

    def temperature() -> str:
        return "104000" if board.fault() is SimulatedFault.THERMAL else "41000"

    instance = board.address.bus << 8 | board.address.device << 3
    return entries | {
        "driver": Symlink(MANAGEMENT_DRIVER),
        "ready": Attribute(is_ready),
        "recovery": Attribute(lambda: str(int(board.fault() is SimulatedFault.RECOVERY))),
        "dev_offline": Attribute(lambda: str(int(board.is_offline))),
        "versal": "0",
        "instance": str(instance),
        "error": "",
        "interface_uuids": Attribute(interfaces),
        "logic_uuids": "8d2c3b0a1f4e4d5c9b8a7f6e5d4c3b2a",
        "config_mailbox_channel_disable": Attribute(
            lambda: f"{board.state.mask:#x}", board.set_mask
        ),
        "config_mailbox_channel_switch": "0x0",
        "config_xclbin_change": "0",
        "xrt_mgmt": Fixed(
            {f"xclmgmt{instance}": Fixed({"dev": f"{MANAGEMENT_MAJOR}:{instance & 0xFF}"})}
        ),
        f"rom.m.{instance}": Fixed({"VBNV": SHELL}),
        f"icap.m.{instance}": Fixed({"sec_level": "0"}),
        f"firewall.m.{instance}": Fixed(
            {"level": Attribute(lambda: "2" if board.state.bad == SimulatedFault.FIREWALL else "0")}
        ),
        f"xmc.m.{instance}": Fixed({"serial_num": f"XFL1{instance:08X}"}),
        "hwmon": Fixed(
            {
                f"hwmon{instance}": Fixed(
                    {
                        "name": "xclmgmt_hwmon",
                        "temp1_input": Attribute(temperature),
                        "temp1_label": "FPGA temperature",
                        "temp1_crit": "97000",
                        "power1_input": "23000000",
                    }
                )
            }
        ),
    }


def user_entries(board: AlveoBoard) -> dict[str, Node]:
    """The directory of PF1: of the driver's attributes only `shutdown` outlives a reset."""
    entries = _function(board, "0x505d")
    if not board.state.user:
        return entries
    entries |= {
        "driver": Symlink(USER_DRIVER),
        "shutdown": Attribute(lambda: str(int(board.state.shutdown)), board.set_shutdown),
    }
    if not board.is_online:
        return entries
    minor = board.state.minor
    node = Lazy(lambda: {"dev": f"{DRM_MAJOR}:{minor}"}, instance=board.openings)
    return entries | {
        "ready": Attribute(partial(_ready, board)),
        "dev_offline": Attribute(lambda: str(int(board.is_offline))),
        "device_bad_state": Attribute(
            lambda: str(int(board.state.bad == SimulatedFault.BAD_STATE))
        ),
        "xclbinuuid": Attribute(partial(_uuid, board)),
        "interface_uuids": str(board.shape.interface_id),
        "logic_uuids": "8d2c3b0a1f4e4d5c9b8a7f6e5d4c3b2a",
        "ulp_uuids": Attribute(_crash(board)),
        "kdsstat": Attribute(partial(_contexts, board)),
        "mig_calibration": "0x1",
        f"rom.u.{board.address.bus << 8}": Fixed({"VBNV": SHELL, "timestamp": "0"}),
        "config_mailbox_channel_disable": Attribute(lambda: f"{board.copy:#x}"),
        "config_mailbox_channel_switch": "0x0",
        "drm": Fixed({f"card{minor}": Fixed({}), f"renderD{minor}": node}),
    }


def _ready(board: AlveoBoard) -> str:
    return "0x0" if board.is_offline else "0x1"


def _uuid(board: AlveoBoard) -> str:
    record = board.state.record
    return "" if record == NO_IMAGE else str(uuid.UUID(record))


def _contexts(board: AlveoBoard) -> str:
    held = board.fault() is SimulatedFault.PORT_OPEN
    pids = "\t\t\t4711\n" if held else ""
    return f"outstanding execs:\t0\ncontexts:\t\t{int(held)}\nclient pid:\n{pids}"


class UlpUuidsReadError(RuntimeError):
    """The real kernel would have crashed here. No OSError: nobody may take it for an answer."""


def _crash(board: AlveoBoard) -> Callable[[], str]:
    def show() -> str:
        raise UlpUuidsReadError(f"ulp_uuids of {board.user_address} was read")

    return show


def write_only() -> str:
    """What reading a driver's `bind` says."""
    raise failure(errno.EACCES)
