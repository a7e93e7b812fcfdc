"""What sysfs shows of a simulated card: the layout that the real drivers gave in a virtual machine.

Linux 6.1, one PAC A10 GX (8086:09c4) with the parts that dfl-fme, dfl-afu and dfl-emif add. Only
what the plugin, or a person, may want to read is there. The user clock stands in
`dfl-port.M/userclk`, in kHz, to be set (`clock`): real cards' drivers can only measure it.
"""

import errno
from functools import partial

from fpga_plugin.hardware.simulated import functions
from fpga_plugin.hardware.simulated.board import Binding, Board
from fpga_plugin.hardware.simulated.tree import Attribute, Fixed, Lazy, Node, Symlink, failure
from fpga_plugin.settings.settings import SimulatedKind

PCI_DRIVER = "/sys/bus/pci/drivers/dfl-pci"
FME_MAJOR, PORT_MAJOR, VFIO_MAJOR = 242, 241, 243

_FME_LOCKED_ERRORS = ("fme_errors", "first_error", "next_error", "pcie1_errors")


def root_name(board: Board) -> str:
    """The PCI root bus above a card."""
    return f"pci{board.address.domain:04x}:{board.address.bus:02x}"


def pci_path(board: Board) -> str:
    """The card's PCI function."""
    return f"/sys/devices/{root_name(board)}/{board.address}"


def base_path(board: Board, binding: Binding) -> str:
    """The base region: the container of the FME and the ports."""
    return f"{pci_path(board)}/fpga_region/region{binding.base}"


def fme_path(board: Board, binding: Binding) -> str:
    """The FME's device."""
    return f"{base_path(board, binding)}/dfl-fme.{binding.fme}"


def port_path(board: Board, binding: Binding, port: int) -> str:
    """A port's device."""
    return f"{base_path(board, binding)}/dfl-port.{binding.nodes[port]}"


def manager_path(board: Board, binding: Binding) -> str:
    """The FPGA manager."""
    fme = binding.fme
    return f"{fme_path(board, binding)}/dfl-fme-mgr.{fme}/fpga_manager/fpga{fme}"


def region_path(board: Board, binding: Binding, port: int) -> str:
    """A port's FPGA region as the FME has it; its number says nothing of the port id."""
    number = binding.regions[port]
    return f"{fme_path(board, binding)}/dfl-fme-region.{number}/fpga_region/region{number}"


def sensor_paths(board: Board, binding: Binding) -> tuple[str, str]:
    """The FME's thermal sensor and its power sensor."""
    sensors = f"{fme_path(board, binding)}/hwmon"
    first = 2 * binding.fme
    return f"{sensors}/hwmon{first}", f"{sensors}/hwmon{first + 1}"


def memory_path(board: Board, binding: Binding) -> str:
    """The FME's memory feature, on the bus of DFL's features."""
    return f"{fme_path(board, binding)}/dfl_dev.{binding.fme}"


def pci_entries(board: Board, vfio: functions.VfioDriver) -> dict[str, Node]:
    """The directory of the card's PCI function."""
    entries: dict[str, Node] = {
        "vendor": "0x8086",
        "device": "0x0b30" if SimulatedKind.NO_PR in board.shape.kinds else "0x09c4",
        "subsystem_vendor": "0x8086",
        "subsystem_device": "0x0000",
        "class": "0x120000",
        "numa_node": str(board.address.bus & 1),
        "sriov_totalvfs": "0",
        "sriov_numvfs": "0",
        "aer_dev_correctable": "TOTAL_ERR_COR 0",
        "aer_dev_nonfatal": "TOTAL_ERR_NONFATAL 0",
        "aer_dev_fatal": "TOTAL_ERR_FATAL 0",
        "subsystem": Symlink("/sys/bus/pci"),
    }
    if SimulatedKind.NO_IOMMU not in board.shape.kinds:
        entries["iommu_group"] = Fixed({"type": "DMA-FQ"})
    if functions.is_ofs(board):
        entries |= {"device": "0xbcce", "subsystem_device": "0x1771", **vfio.physical(board)}
    if (binding := board.binding) is not None:
        entries["driver"] = Symlink(PCI_DRIVER)
        base = Lazy(partial(_base, board, binding))
        entries["fpga_region"] = Fixed({f"region{binding.base}": base})
    return entries


def _base(board: Board, binding: Binding) -> dict[str, Node]:
    entries: dict[str, Node] = {
        "device": Symlink(pci_path(board)),
        "subsystem": Symlink("/sys/class/fpga_region"),
        "compat_id": Attribute(_no_compat_id),
        f"dfl-fme.{binding.fme}": Lazy(partial(_fme, board, binding)),
    }
    instance = binding.instance
    if functions.is_ofs(board):
        instance = functions.instance(board, board.binds)
    for port in board.ports:
        entries[f"dfl-port.{binding.nodes[port]}"] = Lazy(
            partial(_port, board, binding, port), instance=instance
        )
    return entries


def _no_compat_id() -> str:
    raise failure(errno.ENOENT)  # only the FME's regions have one


def _fme(board: Board, binding: Binding) -> dict[str, Node]:
    thermal, power = (path.rpartition("/")[2] for path in sensor_paths(board, binding))
    entries: dict[str, Node] = {
        "ports_num": str(board.shape.regions),
        "bitstream_id": "0x23000110010309",
        "bitstream_metadata": "0x1706140000000000",
        "cache_size": "0",
        "fabric_version": "0",
        "socket_id": "0",
        "dev": f"{FME_MAJOR}:{binding.fme}",
        "uevent": _uevent("fme", FME_MAJOR, binding.fme),
        "driver": Symlink("/sys/bus/platform/drivers/dfl-fme"),
        "subsystem": Symlink("/sys/bus/platform"),
        "errors": Fixed(_fme_errors(board)),
        f"dfl-fme-mgr.{binding.fme}": Fixed(
            {"fpga_manager": Fixed({f"fpga{binding.fme}": Fixed(_manager(binding))})}
        ),
        "hwmon": Fixed({thermal: Fixed(_thermal()), power: Fixed(_power())}),
        f"dfl_dev.{binding.fme}": Fixed(_memory(board)),
    }
    for number in binding.regions:
        region = Fixed(
            {"compat_id": board.shape.interface_id, "subsystem": Symlink("/sys/class/fpga_region")}
        )
        entries[f"dfl-fme-region.{number}"] = Fixed(
            {"fpga_region": Fixed({f"region{number}": region})}
        )
    return entries


def _fme_errors(board: Board) -> dict[str, Node]:
    locked = Attribute(partial(board.behind_fme_lock, "0x0"))
    return {
        "nonfatal_errors": Attribute(board.nonfatal_errors),
        "pcie0_errors": Attribute(board.pcie_errors, board.clear_pcie_errors),
        "catfatal_errors": "0x0",
        "inject_errors": locked,
        **dict.fromkeys(_FME_LOCKED_ERRORS, locked),
    }


def _manager(binding: Binding) -> dict[str, Node]:
    return {
        "name": "DFL FME FPGA Manager",
        "state": Attribute(lambda: binding.manager_state),
        "status": Attribute(lambda: binding.manager_status),
    }


def _thermal() -> dict[str, Node]:
    return {
        "name": "dfl_fme_thermal",
        "temp1_input": "45000",
        "temp1_max": "90000",
        "temp1_crit": "100000",
        "temp1_emergency": "105000",
        "temp1_max_alarm": "0",
        "temp1_crit_alarm": "0",
        "temp1_max_policy": "0",
    }


def _power() -> dict[str, Node]:
    return {
        "name": "dfl_fme_power",
        "power1_input": "22000000",
        "power1_max": "70000000",
        "power1_crit": "90000000",
        "power1_max_alarm": "0",
        "power1_crit_alarm": "0",
        "power1_ltr": "0",
    }


def _memory(board: Board) -> dict[str, Node]:
    knobs: dict[str, Node] = {}
    if SimulatedKind.NO_CLEAR not in board.shape.kinds:
        knobs["inf0_clear"] = Attribute(store=board.clear_memory)
    return {
        **knobs,
        "type": "0x0",
        "feature_id": "0x9",
        "driver": Symlink("/sys/bus/dfl/drivers/dfl-emif"),
        "subsystem": Symlink("/sys/bus/dfl"),
        "inf0_init_done": "1",
        "inf0_cal_fail": "0",
    }


def _port(board: Board, binding: Binding, port: int) -> dict[str, Node]:
    event = Attribute(partial(board.event, port), _clear_event)
    register = Attribute(partial(board.other_register, port))
    behind_port: dict[str, Node] = {"afu_id": Attribute(partial(board.afu_id, port))}
    return {
        "id": str(port),
        **({} if functions.is_ofs(board) else behind_port),
        "power_state": Attribute(partial(board.power_state, port)),
        "ap1_event": event,
        "ap2_event": event,
        "ltr": "0",
        "dev": f"{PORT_MAJOR}:{binding.nodes[port]}",
        "uevent": _uevent("port", PORT_MAJOR, binding.nodes[port]),
        "driver": Symlink("/sys/bus/platform/drivers/dfl-port"),
        "subsystem": Symlink("/sys/bus/platform"),
        "errors": Fixed(
            {
                "errors": Attribute(partial(board.errors, port), partial(board.clear_errors, port)),
                "first_error": register,
                "first_malformed_req": register,
            }
        ),
        **_clock(board, port),
    }


def _clock(board: Board, port: int) -> dict[str, Node]:
    entries: dict[str, Node] = {
        "userclk_freqcntrcmd": Attribute(store=partial(board.select_clock, port)),
        "userclk_freqcntrsts": Attribute(partial(board.counted_clock, port)),
    }
    if SimulatedKind.FIXED_CLOCK not in board.shape.kinds:
        frequency = Attribute(
            lambda: str(board.state(port).clock * 1000), partial(board.set_clock, port)
        )
        entries["userclk"] = Fixed({"frequency": frequency})
    return entries


def _clear_event(text: str) -> None:
    if text.removesuffix("\n") != "1":
        raise failure(errno.EINVAL)


def _uevent(kind: str, major: int, minor: int) -> str:
    return (
        f"MAJOR={major}\nMINOR={minor}\nDEVNAME=dfl-{kind}.{minor}\n"
        f"DRIVER=dfl-{kind}\nMODALIAS=platform:dfl-{kind}"
    )
