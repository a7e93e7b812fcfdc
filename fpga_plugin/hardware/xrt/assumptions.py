"""What the XRT code takes for granted about a card, and what sysfs shows of it.

For owners of untested cards: `card show --assumptions` prints it, to be sent back. It
reads attributes by their names; it opens no device node and writes nothing.
"""

from collections.abc import Callable, Iterator

from fpga_plugin.errors import HardwareError, quote
from fpga_plugin.hardware import pci
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.model import Assumption, AssumptionVerdict, Iommu
from fpga_plugin.hardware.sysfs import children, optional
from fpga_plugin.hardware.vfio.function import driver
from fpga_plugin.hardware.xrt import defs, discovery
from fpga_plugin.hardware.xrt.handles import directories, user_function
from fpga_plugin.hardware.xrt.mask import ATTRIBUTE
from fpga_plugin.ids import PciAddress

_ON_TRUST = (
    (
        "PF1's xclbinuuid follows what the logic is",
        "it is the driver's record, made once ICAP and calibration succeeded",
    ),
    ("a hot reset stops the accelerator and its DMA", "only a reset shows it"),
    ("the blank image runs nothing", "it is the operator's, built for the platform"),
    (
        f"zeros written by address reach all of a bank ({defs.UNTESTED})",
        "samples are read back when it is done; what the blank has no controller for stays",
    ),
    (
        "of several interface ids a fitting xclbin names the one above",
        "the driver takes the same (xclmgmt_get_interface_uuid)",
    ),
)


def assumptions(kernel: Kernel, address: PciAddress) -> tuple[Assumption, ...]:
    """What is taken for granted about a card; never raises for what the card answers."""
    return tuple(_Look(kernel, address).all())


class _Look:
    """One look at a card's two functions."""

    def __init__(self, kernel: Kernel, address: PciAddress) -> None:
        self._kernel = kernel
        self._address = address
        self._management, self._user = directories(address)

    def all(self) -> Iterator[Assumption]:
        parts: tuple[Callable[[], Iterator[Assumption]], ...] = (
            self._identity,
            self._drivers,
            self._shell,
            self._state,
            self._mask,
            self._dma,
        )
        for part in parts:
            try:
                yield from part()
            except OSError as error:
                where = f" ({error.filename})" if error.filename else ""
                yield Assumption(
                    "sysfs can be read",
                    AssumptionVerdict.FAILS,
                    f"{error.strerror or 'error'}{where}",
                )
        for says, why in _ON_TRUST:
            yield Assumption(says, AssumptionVerdict.UNKNOWN, why)

    def _text(self, path: str) -> str:
        try:
            text = optional(self._kernel, path)
        except OSError as error:
            return f"cannot be read ({error.strerror})"
        return "is not there" if text is None else f"says {quote(' '.join(text.split()))}"

    def _named(self, function: str, *names: str) -> str:
        return ", ".join(f"{name} {self._text(f'{function}/{name}')}" for name in names)

    def _identity(self) -> Iterator[Assumption]:
        _, device, *_ = pci.ids(self._kernel, self._management)
        yield Assumption(
            "it is a card that is known",
            AssumptionVerdict.HOLDS if device in defs.PRODUCTS else AssumptionVerdict.FAILS,
            f"{defs.PRODUCTS.get(device, 'not in the list of cards')};"
            f" PF0: {self._named(self._management, 'vendor', 'device', 'subsystem_device')};"
            f" PF1: {self._named(self._user, 'vendor', 'device', 'subsystem_device')};"
            f" serial number"
            f" {quote(discovery.serial_number(self._kernel, self._management) or 'not told')}",
        )

    def _drivers(self) -> Iterator[Assumption]:
        for role, address, wanted in (
            ("PF0", self._address, defs.MANAGEMENT_DRIVER),
            ("PF1", user_function(self._address), defs.USER_DRIVER),
        ):
            has = driver(self._kernel, address) or "none"
            version = self._text(f"/sys/module/{wanted}/version")
            yield Assumption(
                f"{role} has the driver {wanted}, of XRT 2.15 or later",
                AssumptionVerdict.HOLDS if has == wanted else AssumptionVerdict.FAILS,
                f"driver: {quote(has)}; version {version}",
            )

    def _shell(self) -> Iterator[Assumption]:
        try:
            found = discovery.interface_id(self._kernel, self._address, self._management)
        except HardwareError as error:
            found = None
            seen = str(error)
        else:
            seen = f"it would be {found}"
        roms = children(self._kernel, self._management, r"rom\.m\.[0-9]{1,9}")
        yield Assumption(
            "its shell shows the interface id that a fitting xclbin names",
            AssumptionVerdict.FAILS if found is None else AssumptionVerdict.HOLDS,
            f"{seen}; PF0: {self._named(self._management, 'interface_uuids', 'logic_uuids')};"
            f" PF1: {self._named(self._user, 'interface_uuids')};"
            + "; ".join(f" VBNV {self._text(f'{rom}/VBNV')}" for rom in roms),
        )

    def _state(self) -> Iterator[Assumption]:
        management = ("ready", "recovery", "dev_offline", "versal")
        expected = ("1", "0", "0", "0")
        values = [optional(self._kernel, f"{self._management}/{name}") for name in management]
        user = ("ready", "dev_offline", "shutdown", "device_bad_state", "xclbinuuid")
        well = all(value in {None, want} for value, want in zip(values, expected, strict=True))
        yield Assumption(
            "it is ready",
            AssumptionVerdict.HOLDS if well and values[0] == "1" else AssumptionVerdict.FAILS,
            f"PF0: {self._named(self._management, *management)};"
            f" PF1: {self._named(self._user, *user)}",
        )
        nodes = list(children(self._kernel, f"{self._user}/drm", r"renderD[0-9]{1,9}"))
        yield Assumption(
            "PF1 has one render node",
            AssumptionVerdict.HOLDS if len(nodes) == 1 else AssumptionVerdict.FAILS,
            ", ".join(node.rpartition("/")[2] for node in nodes) or "none",
        )

    def _mask(self) -> Iterator[Assumption]:
        here = optional(self._kernel, f"{self._management}/{ATTRIBUTE}")
        there = optional(self._kernel, f"{self._user}/{ATTRIBUTE}")
        settings = ("config_mailbox_channel_switch", "config_xclbin_change")
        yield Assumption(
            "the mask of mailbox requests reaches PF1",
            AssumptionVerdict.HOLDS
            if here is not None and here == there
            else AssumptionVerdict.FAILS,
            f"PF0: {quote(here or 'not there')}, PF1's copy: {quote(there or 'not there')};"
            f" {self._named(self._management, *settings)}",
        )
        levels = [
            self._text(f"{one}/sec_level")
            for one in children(self._kernel, self._management, r"icap\.m\.[0-9]{1,9}")
        ]
        yield Assumption(
            "it takes xclbins without a signature",
            AssumptionVerdict.HOLDS
            if any("'0'" in level for level in levels)
            else AssumptionVerdict.UNKNOWN,
            "; ".join(f"sec_level {level}" for level in levels) or "icap shows no sec_level",
        )

    def _dma(self) -> Iterator[Assumption]:
        mode = pci.iommu(self._kernel, (self._management, self._user))
        yield Assumption(
            "an IOMMU keeps its DMA from the host's memory",
            AssumptionVerdict.HOLDS if mode is Iommu.TRANSLATE else AssumptionVerdict.FAILS,
            f"IOMMU: {mode.value}",
        )
