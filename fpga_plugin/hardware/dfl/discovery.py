"""Finds DFL cards in sysfs and turns each into a value, or into a problem of that card alone.

The kernel shows a card as a base region: an fpga_region below the card's PCI function that has the
platform devices dfl-fme.N and dfl-port.M as children (Documentation/fpga/dfl.rst, "Device
enumeration"). With SR-IOV a virtual function has a base region of its own with just its port. N and
M count over the node and move when cards come and go; the PCI address and the port's own id stay.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fpga_plugin.errors import HardwareError, quote
from fpga_plugin.hardware import pci
from fpga_plugin.hardware.dfl import defs, numbers
from fpga_plugin.hardware.dfl.handles import Fme, PortDevice, SlotDevice, functions_of, port_of
from fpga_plugin.hardware.dfl.memory import memory_clear_knobs, some_memory_stays
from fpga_plugin.hardware.dfl.slot_functions import SlotRule, slot_functions
from fpga_plugin.hardware.grant import Grant
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.model import Card, CardProblem, Region, ScanResult
from fpga_plugin.hardware.sysfs import children, driver_of, number, optional
from fpga_plugin.hardware.vfio.defs import CONTAINER
from fpga_plugin.hardware.vfio.function import PCI
from fpga_plugin.ids import (
    CardId,
    InterfaceId,
    PciAddress,
    functions_variable,
    parse_interface_id,
)

CLASS = "/sys/class/fpga_region"

_MAX_PORTS = 64
"""More ports than any card has: FME_CAP has three bits for the number (drivers/fpga/dfl.h)."""

Skipped = Callable[[str, str], None]
"""Told of a base region that is left out, and why: something without a PCI address is no card."""


@dataclass(frozen=True, slots=True)
class Base:
    """A base region: `path` below the function's directory `parent`, FME and port devices in it."""

    path: str
    parent: str
    fmes: tuple[str, ...]
    ports: tuple[str, ...]


class _NonsenseError(HardwareError):
    """Registers read as no card's do: they may read right again, as after a reset of the bus."""


def card_ids(kernel: Kernel, skipped: Skipped) -> tuple[CardId, ...]:
    """The cards that there are; reads no attribute, so touches no hardware.

    Raises:
        HardwareError: the class of FPGA regions cannot be listed.
    """
    return tuple(address.card_id for address in _bases(kernel, skipped))


def scan(kernel: Kernel, skipped: Skipped, rule: SlotRule) -> ScanResult:
    """All cards. What is wrong with one of them says nothing of the others.

    Raises:
        HardwareError: the class of FPGA regions cannot be listed.
    """
    cards: dict[CardId, Card] = {}
    problems: dict[CardId, CardProblem] = {}
    for address, bases in _bases(kernel, skipped).items():
        match _read(kernel, address, bases, rule):
            case Card() as card:
                cards[address.card_id] = card
            case CardProblem() as problem:
                problems[address.card_id] = problem
    return ScanResult(cards, problems)


def scan_card(
    kernel: Kernel, card: CardId, skipped: Skipped, rule: SlotRule
) -> Card | CardProblem | None:
    """One card; None when there is none of this id.

    Looks only below the card's own functions, so its cost does not grow with the other cards.

    Raises:
        HardwareError: sysfs cannot be listed there.
    """
    address = PciAddress.parse(card)
    try:
        bases = bases_of(kernel, address, skipped)
    except OSError as error:
        raise HardwareError(
            f"card {card} cannot be looked up in {PCI} ({error.strerror})",
            hint="is the node's /sys mounted where FPGA_PLUGIN_SYSFS_ROOT says? Else see the"
            " kernel's log",
        ) from error
    return _read(kernel, address, bases, rule) if bases else None


def bases_of(kernel: Kernel, address: PciAddress, skipped: Skipped) -> list[Base]:
    """The base regions of one card, those of its virtual functions too.

    Raises:
        OSError: sysfs cannot be listed there.
    """
    if not kernel.exists(PCI):
        return _bases(kernel, skipped).get(address, [])
    function = f"{PCI}/{address}"
    parents = [function, *children(kernel, function, r"virtfn[0-9]{1,5}")]
    paths = [path for p in parents for path in children(kernel, f"{p}/fpga_region", r"region.*")]
    return [
        base
        for path in paths
        if (found := _base(kernel, path, skipped)) is not None
        for owner, base in [found]
        if owner == address
    ]


def _bases(kernel: Kernel, skipped: Skipped) -> Mapping[PciAddress, list[Base]]:
    """Base regions by the function that has the FME. Reads no attribute, so touches no hardware."""
    found: dict[PciAddress, list[Base]] = {}
    try:
        names = sorted(kernel.listdir(CLASS))
    except FileNotFoundError:
        return found  # no FPGA driver was ever loaded
    except OSError as error:
        raise HardwareError(
            f"{CLASS} cannot be listed ({error.strerror})",
            hint="is the node's /sys mounted where FPGA_PLUGIN_SYSFS_ROOT says?",
        ) from error
    for name in names:
        if (one := _base(kernel, f"{CLASS}/{name}", skipped)) is not None:
            found.setdefault(one[0], []).append(one[1])
    return dict(sorted(found.items()))


def _base(kernel: Kernel, link: str, skipped: Skipped) -> tuple[PciAddress, Base] | None:
    """A base region with the function that has its FME; None where `link` is something else."""
    try:
        path = kernel.realpath(link)
        base = Base(
            path,
            parent=os.path.dirname(os.path.dirname(path)),
            fmes=tuple(children(kernel, path, r"dfl-fme\.[0-9]{1,9}")),
            ports=tuple(children(kernel, path, r"dfl-port\.[0-9]{1,9}")),
        )
        if not base.fmes and not base.ports:
            return None  # a region of one FME's own, or of another kind of FPGA
        address = _owner(kernel, base.parent)
    except (FileNotFoundError, NotADirectoryError):
        return None  # went while we looked
    except OSError as error:
        skipped(link, f"cannot be read ({error.strerror})")
        return None
    if address is None:
        skipped(path, "is not below a PCI function, so it has no lasting name")
        return None
    return address, base


def _owner(kernel: Kernel, parent: str) -> PciAddress | None:
    """The function that has the FME: the physical one where `parent` is a virtual one."""
    try:
        function = kernel.realpath(f"{parent}/physfn")
    except FileNotFoundError:
        function = parent
    try:
        return PciAddress.parse(os.path.basename(function))
    except ValueError:
        return None


def _read(
    kernel: Kernel, address: PciAddress, bases: list[Base], rule: SlotRule
) -> Card | CardProblem | None:
    try:
        return _card(kernel, address, bases, rule)
    except HardwareError as error:
        # The others report drivers, functions or a FIM, which change with an event or not at all.
        passing = isinstance(error, _NonsenseError)
        return CardProblem(address, error.message, error.hint, passing=passing)
    except OSError as error:
        if not any(kernel.exists(base.path) for base in bases):
            return None
        where = f" ({error.filename})" if error.filename else ""
        return CardProblem(
            address,
            f"card {address} cannot be read: {error.strerror}{where}",
            "see the kernel's log; the card or its driver may be failing",
            passing=True,
        )


def _card(kernel: Kernel, address: PciAddress, bases: list[Base], rule: SlotRule) -> Card:
    """Read a card's attributes, none of them one that a running PR blocks.

    Raises:
        HardwareError: the card cannot be served; message and hint say why.
        OSError: an attribute cannot be read.
    """
    base = _base_with_fme(address, bases)
    fme = base.fmes[0]
    _refuse_released_port(kernel, address, base.parent, bases)
    slot = shows_no_afu(kernel, bases)
    if not slot:
        _leave_foreign_functions_alone(kernel, address, base.parent)
    firmware = _firmware(kernel, address, fme)
    ports = _ports_number(kernel, address, fme)
    regions = _regions(kernel, address, bases)
    functions = [one.parent for one in bases]
    if slot:
        regions = (_slot(kernel, address, base.parent, regions, rule),)
        functions += [f.sysfs for region in regions for f in functions_of(region)]
    if len(regions) > ports or any(region.port_id >= ports for region in regions):
        found = ", ".join(str(region.port_id) for region in regions)
        raise _NonsenseError(
            f"card {address} says that it has {ports} ports, but has ports {found}"
        )
    return Card(
        address=address,
        family="dfl",
        interface_id=interface_id(kernel, address, fme),
        numa_node=pci.numa_node(kernel, base.parent),
        regions=regions,
        ports=ports,
        clears_memory=any(memory_clear_knobs(kernel, fme)),
        some_memory_stays=some_memory_stays(kernel, fme),
        iommu=pci.iommu(kernel, functions),
        description=_description(kernel, base.parent),
        vendor=defs.VENDORS.get(pci.ids(kernel, base.parent)[0], ""),
        model=_product(pci.ids(kernel, base.parent)),
        handle=Fme(f"/dev/{os.path.basename(fme)}", fme),
        reprogrammable=pci.ids(kernel, base.parent)[:2] not in defs.WITHOUT_PR,
        pcie_root=pci.root_complex(base.parent),
        firmware=firmware,
        guarded=numbers.guarded(kernel, fme, map(port_of, regions)),
    )


def _refuse_released_port(
    kernel: Kernel, address: PciAddress, parent: str, bases: list[Base]
) -> None:
    """Linux' own dfl-pci makes virtual functions only of a port that was released before.

    Its node is gone then, and with it PORT_RESET and what excludes others while a PR runs.
    """
    if any(base.ports for base in bases) or not any(children(kernel, parent, r"virtfn[0-9]{1,5}")):
        return
    raise HardwareError(
        f"card {address} is left alone: its port was released to make virtual functions, and"
        " nothing can reset the slot without it",
        hint="use the vendor's driver (linux-dfl-backport), which makes them with the port in"
        " place, or a FIM whose slot is in a second physical function",
    )


def shows_no_afu(kernel: Kernel, bases: list[Base]) -> bool:
    """Whether a port with a driver has none of the attribute `afu_id`.

    dfl-afu shows it where the port's registers lead to an AFU; one that is held in reset shows it
    too, and answers EBUSY. The attributes come and go in groups when the driver is bound and
    unbound, `id` and `errors` as the first and the last: only while the same two are there before
    and after is the port one whose driver stays.
    """
    for port in (port for base in bases for port in base.ports if kernel.exists(f"{port}/driver")):
        try:
            before = [kernel.instance(f"{port}/{name}") for name in ("id", "errors")]
            missing = not kernel.exists(f"{port}/afu_id")
            after = [kernel.instance(f"{port}/{name}") for name in ("id", "errors")]
        except (FileNotFoundError, NotADirectoryError):
            continue  # another's business once its `bind` event is here
        if missing and before == after:
            return True
    return False


def _slot(
    kernel: Kernel,
    address: PciAddress,
    parent: str,
    regions: tuple[Region, ...],
    rule: SlotRule,
) -> Region:
    """The region of a card whose AFU is in functions of their own (OFS).

    Raises:
        HardwareError: the functions are unknown, or cannot be given away.
    """
    if len(regions) != 1:
        raise HardwareError(
            f"card {address} has {len(regions)} ports of which some show no AFU; one slot a card is"
            " all that is known to exist",
            hint="see docs/compatibility.md",
        )
    (region,) = regions
    functions = slot_functions(kernel, rule, address, parent)
    port = port_of(region)
    grant = Grant(
        nodes=tuple(dict.fromkeys(function.node for function in functions)),
        shared=(CONTAINER,),
        env={functions_variable(region.id): ",".join(str(f.address) for f in functions)},
    )
    device = SlotDevice(port.node, port.sysfs, port.instance, functions=functions)
    return Region(
        region.card, region.port_id, grant, device, numbers=numbers.granted(kernel, device)
    )


def _base_with_fme(address: PciAddress, bases: list[Base]) -> Base:
    having = [base for base in bases if base.fmes]
    if not having:
        raise HardwareError(
            f"{address} has ports, but no FME, and nothing else can program them",
            hint="a virtual function passed into a virtual machine cannot be served there; on the "
            "host, check that dfl-pci is bound to the physical function",
        )
    if len(having) > 1 or len(having[0].fmes) > 1:
        raise HardwareError(f"{address} shows more than one FME")
    return having[0]


def _leave_foreign_functions_alone(kernel: Kernel, address: PciAddress, parent: str) -> None:
    """Refuse a card whose virtual functions serve something else: a PR would hit its user.

    Their links tell, and not `sriov_numvfs`: its reader waits while the card's driver is bound or
    unbound, or functions are made or removed (drivers/pci/iov.c, sriov_numvfs_show), which may be
    for ever. A function without a link is on its way, and its port is no region of the card.
    """
    for link in children(kernel, parent, r"virtfn[0-9]{1,5}"):
        function = os.path.basename(kernel.realpath(link))
        if (driver := driver_of(kernel, link)) != "dfl-pci":
            has = f"has the driver {quote(driver)}" if driver else "has no driver"
            raise HardwareError(
                f"card {address} is left alone: its virtual function {quote(function)} {has}",
                hint="a program or a virtual machine may be using it: find out who, before its "
                "virtual functions are bound to dfl-pci or taken away to serve the card here",
            )


def _firmware(kernel: Kernel, address: PciAddress, fme: str) -> str:
    """The number of the static part, with its version (Documentation/ABI: dfl-fme, bitstream_id).

    A card whose registers read all ones is refused: its port numbers would be nonsense too.
    """
    path = f"{fme}/bitstream_id"
    text = optional(kernel, path)
    if text is None:
        return ""
    value = number(path, text)
    if value == defs.ALL_ONES_64:
        raise _NonsenseError(
            f"card {address} does not answer: {path} reads all ones",
            hint="the card has dropped off the bus; power-cycle the node and see the kernel's log",
        )
    return f"{value:#x}"


def _ports_number(kernel: Kernel, address: PciAddress, fme: str) -> int:
    path = f"{fme}/ports_num"
    text = optional(kernel, path)
    if text is None:
        raise HardwareError(
            f"the FME of card {address} has no driver",
            hint="load the module dfl-fme",
        )
    ports = number(path, text)
    if not 1 <= ports <= _MAX_PORTS:
        raise _NonsenseError(f"{path} says {quote(text)}, which is no number of ports")
    return ports


def _regions(kernel: Kernel, address: PciAddress, bases: list[Base]) -> tuple[Region, ...]:
    """Ports with a bound driver; before that they have neither attributes nor a use."""
    regions: dict[int, Region] = {}
    for base, port in ((one, port) for one in bases for port in one.ports):
        path = f"{port}/id"
        # First: a port that is replaced while it is read must not pass for its successor.
        instance = kernel.instance(port)
        text = optional(kernel, path)
        if text is None or not kernel.exists(f"{port}/driver"):
            continue
        port_id = number(path, text)
        if port_id in regions:
            raise _NonsenseError(
                f"card {address} has two ports with the id {port_id}: "
                f"{port_of(regions[port_id]).sysfs} and {port}"
            )
        node = f"/dev/{os.path.basename(port)}"
        physical = None if base.fmes else kernel.instance(_base_with_fme(address, bases).fmes[0])
        device = PortDevice(node, port, instance, physical)
        regions[port_id] = Region(
            address.card_id,
            port_id,
            Grant((node,)),
            device,
            numbers=numbers.granted(kernel, device),
        )
    if not regions:
        raise HardwareError(
            f"no port of card {address} has a driver",
            hint="load the module dfl-afu",
        )
    return tuple(region for _, region in sorted(regions.items()))


def interface_id(kernel: Kernel, address: PciAddress, fme: str) -> InterfaceId:
    """The compat id of the FME, which each of its PR regions repeats (dfl-fme-pr.c)."""
    for platform in children(kernel, fme, r"dfl-fme-region\.[0-9]{1,9}"):
        for region in children(kernel, f"{platform}/fpga_region", r"region[0-9]{1,9}"):
            path = f"{region}/compat_id"
            if (text := optional(kernel, path)) is None:
                continue
            try:
                found = parse_interface_id(text)
            except ValueError as error:
                raise _NonsenseError(f"{path} says {quote(text)}: {error}") from error
            if found in {"0" * 32, defs.ALL_ONES_ID}:
                raise _NonsenseError(f"{path} says {quote(text)}, which is no interface id")
            return found
    if not list(children(kernel, fme, r"dfl-fme-(mgr|region)\.[0-9]{1,9}")):
        # The driver makes both for the feature, whether or not their own drivers are loaded
        # (dfl-fme-pr.c, pr_mgmt_init), and `ports_num` was there: it is bound.
        raise HardwareError(
            f"card {address} has no partial reconfiguration: its static part (FIM) was built "
            "without it, and shows no interface id",
            hint="nothing can be programmed there, and nothing reports what its functions are: it"
            " is not served (docs/compatibility.md)",
        )
    raise HardwareError(
        f"card {address} shows no interface id",
        hint="load the modules dfl-fme-mgr and dfl-fme-region",
    )


def _description(kernel: Kernel, parent: str) -> str:
    """The product's name where it is known, and the PCI ids."""
    ids = pci.ids(kernel, parent)
    if not all(re.fullmatch(r"[0-9a-f]{4}", part, re.ASCII) for part in ids[:2]):
        return ""
    numbers = ":".join(ids[:2])
    product = _product(ids)
    return f"{product} ({numbers})" if product else numbers


def _product(ids: tuple[str, ...]) -> str:
    return defs.PRODUCTS.get(ids) or defs.PRODUCTS.get(ids[:2]) or ""
