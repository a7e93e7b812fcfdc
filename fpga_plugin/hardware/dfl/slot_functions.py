"""Which PCI functions are behind a slot, and whether they may be given to containers.

An OFS card's AFU is in virtual functions or in a second physical one, and no register reports in
which: a rule does, or the operator (FPGA_PLUGIN_SLOT_FUNCTIONS). A function that the rule does not
name is never bound, opened or reset: beside the slot's there are static ones, with an Ethernet or
a processor behind them (OFS' pcie_host.ofss has PF1 to PF4).
"""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from fpga_plugin.errors import HardwareError
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.sysfs import children, number, optional
from fpga_plugin.hardware.vfio.function import (
    PCI,
    Function,
    group_type,
    read_function,
    strangers,
)
from fpga_plugin.ids import CardId, PciAddress

IDENTITY = "identity"
"""The type of an IOMMU group whose default domain does not translate."""


@dataclass(frozen=True, slots=True)
class SlotRule:
    """What the operator says of slots.

    Attributes:
        named: functions of a card's slot, in place of the rule's.
        identity: cards whose functions may be in an IOMMU group that does not translate.
    """

    named: Mapping[CardId, tuple[PciAddress, ...]] = field(default_factory=dict, hash=False)
    identity: Collection[CardId] = frozenset()


def slot_functions(
    kernel: Kernel, rule: SlotRule, card: PciAddress, parent: str
) -> tuple[Function, ...]:
    """The functions behind a card's slot.

    Args:
        kernel: where sysfs is.
        rule: of the operator.
        card: the function that has the FME.
        parent: its directory.

    Raises:
        HardwareError: there are none, or they cannot be given away; message and hint say why.
        OSError: sysfs cannot be read.
    """
    named = rule.named.get(card.card_id)
    addresses = _of_rule(kernel, card, parent) if named is None else named
    if named is not None:
        for address in named:
            _check_named(kernel, card, address)
    functions = tuple(read_function(kernel, address) for address in addresses)
    for function in functions:
        if group_type(kernel, function) == IDENTITY and card.card_id not in rule.identity:
            raise HardwareError(
                f"card {card} is left alone: the IOMMU does not translate for its function"
                f" {function.address} (IOMMU group {function.group} is of type identity)",
                hint="take iommu=pt off the kernel's command line, or name the card in"
                " FPGA_PLUGIN_SLOT_IDENTITY",
            )
        if others := strangers(kernel, function, frozenset(addresses)):
            raise HardwareError(
                f"card {card} is left alone: its function {function.address} shares IOMMU group"
                f" {function.group} with {', '.join(map(str, others[:4]))}, which would be given to"
                " the same container",
                hint="put the card into a PCI slot behind a port with ACS, or name all functions of"
                " the slot in FPGA_PLUGIN_SLOT_FUNCTIONS",
            )
    return functions


def _of_rule(kernel: Kernel, card: PciAddress, parent: str) -> tuple[PciAddress, ...]:
    """All virtual functions of PF0.

    Where it can have none, the slot may be behind PF1 (FIMs of two physical functions). But a PF1
    may as well be a static function of the FIM, with the same vendor and device id, which nobody
    may bind, reset or give away: the operator has to say so.
    """
    virtual = tuple(
        PciAddress.parse(os.path.basename(kernel.realpath(link)))
        for link in children(kernel, parent, r"virtfn[0-9]{1,5}")
    )
    if virtual:
        return virtual
    total = f"{parent}/sriov_totalvfs"
    if possible := number(total, optional(kernel, total) or "0"):
        raise HardwareError(
            f"card {card} is used through its virtual functions, and has none now",
            hint=f"make them: `fpga-plugin card functions {card.card_id} --make`, or as root on the"
            f" node: echo 0 > {PCI}/{card}/sriov_drivers_autoprobe;"
            f" echo {possible} > {PCI}/{card}/sriov_numvfs;"
            f" echo 1 > {PCI}/{card}/sriov_drivers_autoprobe",
        )
    second = PciAddress(card.domain, card.bus, card.device, 1)
    likely = "<function>[+<function>...]"
    if kernel.exists(f"{PCI}/{second}"):
        likely = f"{second} of a FIM of two physical functions"
    raise HardwareError(
        f"card {card} does not say which PCI functions are behind its slot",
        hint=f"name them: FPGA_PLUGIN_SLOT_FUNCTIONS={card}={likely}; the documentation of the"
        " card's FIM reports which. A static function of the FIM must not be named",
    )


def _check_named(kernel: Kernel, card: PciAddress, address: PciAddress) -> None:
    """A slip in the setting must not give another device of the node to a container."""
    try:
        physical = os.path.basename(kernel.realpath(f"{PCI}/{address}/physfn"))
    except FileNotFoundError:
        physical = str(address)
    owner = _parse(physical)
    if address == card or owner is None or not _same_device(owner, card):
        raise HardwareError(
            f"FPGA_PLUGIN_SLOT_FUNCTIONS names {address} for card {card}, which is no function of"
            " that card behind its slot",
            hint=f"name virtual functions of the card, or physical ones other than {card} itself",
        )


def _same_device(one: PciAddress, other: PciAddress) -> bool:
    return (one.domain, one.bus, one.device) == (other.domain, other.bus, other.device)


def _parse(name: str) -> PciAddress | None:
    try:
        return PciAddress.parse(name)
    except ValueError:
        return None
