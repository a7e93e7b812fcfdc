"""What the DFL code takes for granted about a card, and what sysfs shows of it.

For owners of untested cards: `card show --assumptions` prints it, to be sent back. It
asks discovery what the card is, and shows by which attributes; it opens no device node, writes
nothing, touches no register, and takes everything that it reads for foreign text. What only a
programming could show is said to be on trust.
"""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

from fpga_plugin.errors import HardwareError, quote
from fpga_plugin.hardware import pci
from fpga_plugin.hardware.dfl import defs, discovery
from fpga_plugin.hardware.dfl.on_trust import CardKind, on_trust
from fpga_plugin.hardware.dfl.slot_functions import SlotRule, slot_functions
from fpga_plugin.hardware.dfl.userclock import userclk_features
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.model import Assumption, AssumptionVerdict, Iommu
from fpga_plugin.hardware.sysfs import children, driver_of, number, optional
from fpga_plugin.hardware.vfio.binding import DRIVER as VFIO_DRIVER
from fpga_plugin.hardware.vfio.function import PCI, Function
from fpga_plugin.ids import PciAddress

_ALLOWED_FUNCTIONS = 64
_PAGE = 4096


def assumptions(kernel: Kernel, address: PciAddress, rule: SlotRule) -> tuple[Assumption, ...]:
    """What is taken for granted about a card; never raises for what the card answers.

    Args:
        kernel: where sysfs is.
        address: the function that has the FME.
        rule: which functions are behind the slots of OFS cards.
    """
    return tuple(_Look(kernel, address, rule).all())


class _Look:
    """One look at a card's directories."""

    def __init__(self, kernel: Kernel, address: PciAddress, rule: SlotRule) -> None:
        self._kernel = kernel
        self._address = address
        self._rule = rule
        self._function = f"{PCI}/{address}"

    @cached_property
    def _bases(self) -> list[discovery.Base]:
        """The card's base regions, as discovery finds them, those of its virtual functions too."""
        return discovery.bases_of(self._kernel, self._address, lambda *_: None)

    @property
    def _fmes(self) -> list[str]:
        return [fme for base in self._bases for fme in base.fmes]

    @property
    def _all_ports(self) -> list[str]:
        return [port for base in self._bases for port in base.ports]

    def all(self) -> Iterator[Assumption]:
        for part in (
            self._what_it_is,
            self._identity,
            self._driver,
            self._functions,
            self._dma,
            self._registers,
            self._fme,
            self._ports,
        ):
            try:
                yield from part()
            except OSError as error:
                where = f" ({error.filename})" if error.filename else ""
                yield Assumption(
                    "sysfs can be read",
                    AssumptionVerdict.FAILS,
                    f"{error.strerror or 'error'}{where}",
                )
            except HardwareError as error:
                yield Assumption("sysfs makes sense", AssumptionVerdict.FAILS, error.message)
        yield from on_trust(self._kind(), ports=self._number_of_ports())

    def _what_it_is(self) -> Iterator[Assumption]:
        kind = self._kind()
        verdict = AssumptionVerdict.UNKNOWN if kind is CardKind.UNKNOWN else AssumptionVerdict.HOLDS
        yield Assumption("it is of a kind that is known", verdict, kind.value)

    def _kind(self) -> CardKind:
        """How its accelerators are reached and loaded, as far as sysfs reports."""
        try:
            fmes = self._fmes
            if not fmes or not self._all_ports:
                return CardKind.UNKNOWN
            slot = self._has_slot()
            if not any(children(self._kernel, fmes[0], r"dfl-fme-mgr\.[0-9]{1,9}")):
                return CardKind.FLAT if slot else CardKind.UNKNOWN
            if self._fixed():
                return CardKind.FIXED
        except (OSError, HardwareError):
            return CardKind.UNKNOWN  # the part that reads it says why
        return CardKind.SLOT if slot else CardKind.PORTS

    def _number_of_ports(self) -> int:
        """What the FME says; 1 where it says nothing that is a number."""
        try:
            for fme in self._fmes:
                path = f"{fme}/ports_num"
                return number(path, optional(self._kernel, path) or "1")
        except (OSError, HardwareError):
            pass
        return 1

    def _text(self, path: str) -> str:
        """An attribute as it is shown; what it says may be anything."""
        try:
            text = optional(self._kernel, path)
        except OSError as error:
            return f"cannot be read ({error.strerror})"
        return "is not there" if text is None else f"says {quote(text)}"

    def _driver_of(self, device: str) -> str:
        return driver_of(self._kernel, device) or ""

    def _identity(self) -> Iterator[Assumption]:
        names = ("vendor", "device", "subsystem_vendor", "subsystem_device", "revision")
        seen = ", ".join(f"{name} {self._text(f'{self._function}/{name}')}" for name in names)
        known = self._kernel.exists(self._function)
        yield Assumption(
            "it is a PCI function that the kernel knows",
            AssumptionVerdict.HOLDS if known else AssumptionVerdict.FAILS,
            seen,
        )

    def _driver(self) -> Iterator[Assumption]:
        driver = self._driver_of(self._function)
        yield Assumption(
            "dfl-pci has it",
            AssumptionVerdict.HOLDS if driver == "dfl-pci" else AssumptionVerdict.FAILS,
            f"its driver is {quote(driver)}" if driver else "it has no driver",
        )

    def _functions(self) -> Iterator[Assumption]:
        links = list(children(self._kernel, self._function, r"virtfn[0-9]{1,5}"))
        seen = [
            f"{os.path.basename(self._kernel.realpath(link))}: {self._driver_of(link) or 'none'}"
            for link in links[:_ALLOWED_FUNCTIONS]
        ]
        foreign = any(self._driver_of(link) != "dfl-pci" for link in links)
        numbers = f"{len(links)} virtual functions"
        drivers = "".join(f"; driver of {quote(one)}" for one in seen)
        if self._has_slot():
            answer = self._slot()
            yield replace(answer, seen=f"{answer.seen}; {numbers}{drivers}")
            there = self._kernel.exists(VFIO_DRIVER)
            yield Assumption(
                "vfio-pci is there to have these functions",
                AssumptionVerdict.HOLDS if there else AssumptionVerdict.FAILS,
                f"{VFIO_DRIVER} is {'' if there else 'not '}there"
                f"{'' if there else ': modprobe vfio-pci'}",
            )
        else:
            yield Assumption(
                "nobody but dfl-pci has its virtual functions",
                AssumptionVerdict.FAILS if foreign else AssumptionVerdict.HOLDS,
                f"{numbers}{drivers}",
            )

    def _dma(self) -> Iterator[Assumption]:
        links = children(self._kernel, self._function, r"virtfn[0-9]{1,5}")
        reaching = [self._function, *links]
        if self._has_slot():
            with suppress(HardwareError):  # the part about functions says why
                reaching += [one.sysfs for one in self._slots_functions()]
        mode = pci.iommu(self._kernel, reaching)
        strangers = dict.fromkeys(
            str(one)
            for function in reaching
            if self._kernel.exists(f"{function}/iommu_group")
            for one in pci.others(self._kernel, function)
        )
        yield Assumption(
            "an IOMMU keeps its DMA from the host's memory, and from other devices",
            AssumptionVerdict.HOLDS if mode is Iommu.TRANSLATE else AssumptionVerdict.FAILS,
            f"IOMMU: {mode.value}; the group's type"
            f" {self._text(f'{self._function}/iommu_group/type')}, others in its groups:"
            f" {', '.join([*strangers][:_ALLOWED_FUNCTIONS]) or 'none'}",
        )

    def _registers(self) -> Iterator[Assumption]:
        """Whether a process of user 0 may map the registers that a driver has.

        The kernel refuses that with EINVAL, or under lockdown with EPERM (drivers/pci/pci-sysfs.c,
        pci_mmap_resource; kernel/resource.c, iomem_is_exclusive). A page is mapped for a moment,
        and not read.
        """
        path = f"{self._function}/resource0"
        verdict, seen = (
            AssumptionVerdict.FAILS,
            "can be mapped: is iomem=relaxed on the kernel's command",
        )
        seen += " line, or the kernel without CONFIG_IO_STRICT_DEVMEM? (docs/security.md)"
        try:
            handle = self._kernel.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            verdict, seen = AssumptionVerdict.UNKNOWN, f"cannot be opened ({error.strerror})"
        else:
            try:
                self._kernel.map(handle, _PAGE).close()
            except OSError as error:
                refused = error.errno in {errno.EINVAL, errno.EPERM}
                verdict = AssumptionVerdict.HOLDS if refused else AssumptionVerdict.UNKNOWN
                seen = f"cannot be mapped ({error.strerror})"
            finally:
                self._kernel.close(handle)
        yield Assumption(
            "the kernel keeps root in containers from its registers", verdict, f"{path} {seen}"
        )

    def _has_slot(self) -> bool:
        """Whether the AFU is not behind the port, as on OFS cards."""
        return discovery.shows_no_afu(self._kernel, self._bases)

    def _slots_functions(self) -> tuple[Function, ...]:
        return slot_functions(self._kernel, self._rule, self._address, self._function)

    def _slot(self) -> Assumption:
        """What is behind the slot."""
        says = "its AFU is in PCI functions that vfio-pci may have (an OFS slot)"
        try:
            found = self._slots_functions()
        except HardwareError as error:
            return Assumption(says, AssumptionVerdict.FAILS, str(error))
        seen = "; ".join(
            f"{one.address} in group {one.group}, its driver is"
            f" {quote(self._driver_of(one.sysfs) or 'none')}"
            for one in found[:_ALLOWED_FUNCTIONS]
        )
        return Assumption(says, AssumptionVerdict.HOLDS, seen)

    def _fme(self) -> Iterator[Assumption]:
        fmes = self._fmes
        driver = self._driver_of(fmes[0]) if fmes else ""
        yield Assumption(
            "it has one FME, whose driver is dfl-fme",
            AssumptionVerdict.HOLDS
            if len(fmes) == 1 and driver == "dfl-fme"
            else AssumptionVerdict.FAILS,
            f"{len(fmes)} found; driver: {quote(driver)}",
        )
        for fme in fmes[:1]:
            managers = list(children(self._kernel, fme, r"dfl-fme-mgr\.[0-9]{1,9}"))
            yield Assumption(
                "it can be reconfigured partially",
                AssumptionVerdict.HOLDS
                if managers and not self._fixed()
                else AssumptionVerdict.FAILS,
                f"{'a card without it by its PCI ids; ' if self._fixed() else ''}"
                f"{len(managers)} FPGA managers below the FME; ports_num"
                f" {self._text(f'{fme}/ports_num')}, bitstream_id"
                f" {self._text(f'{fme}/bitstream_id')}, bitstream_metadata"
                f" {self._text(f'{fme}/bitstream_metadata')}",
            )
            try:
                shown = discovery.interface_id(self._kernel, self._address, fme)
                verdict, seen = AssumptionVerdict.HOLDS, f"its compat_id is {shown}"
            except HardwareError as error:
                verdict, seen = AssumptionVerdict.FAILS, str(error)
            yield Assumption(
                "it shows one interface id, and fits every bitstream that has it", verdict, seen
            )
            yield self._memory(fme)

    def _fixed(self) -> bool:
        return pci.ids(self._kernel, self._function)[:2] in defs.WITHOUT_PR

    def _memory(self, fme: str) -> Assumption:
        banks: list[str] = []
        stays = False
        for device in children(self._kernel, fme, r"dfl_dev\.[0-9]{1,9}"):
            for done in children(self._kernel, device, r"inf[0-7]_init_done"):
                knob = self._kernel.exists(f"{done.removesuffix('_init_done')}_clear")
                stays |= not knob
                banks.append(f"{os.path.basename(done)[:4]}: {'' if knob else 'no '}clear knob")
        return Assumption(
            "all of its on-card memory can be cleared",
            AssumptionVerdict.HOLDS if banks and not stays else AssumptionVerdict.FAILS,
            "; ".join(banks) or "dfl-emif shows no memory",
        )

    def _ports(self) -> Iterator[Assumption]:
        slot = self._has_slot()
        for port in self._all_ports:
            name = os.path.basename(port)
            driver = self._driver_of(port)
            shown = self._text(f"{port}/afu_id")
            behind = "no AFU, which is in functions" if slot else "the AFU that is on it"
            well = slot or "says" in shown
            yield Assumption(
                f"{name} has its driver and shows {behind}",
                AssumptionVerdict.HOLDS
                if driver == "dfl-port" and well
                else AssumptionVerdict.FAILS,
                f"driver: {quote(driver)}; id {self._text(f'{port}/id')}; afu_id {shown}; errors"
                f" {self._text(f'{port}/errors/errors')}; power_state"
                f" {self._text(f'{port}/power_state')}",
            )
            yield self._clock(port, name)

    def _clock(self, port: str, name: str) -> Assumption:
        exists = self._kernel.exists
        features = userclk_features(self._kernel, port)
        uio = [u for one in features for u in children(self._kernel, f"{one}/uio", r"uio[0-9]+")]
        vendors = [
            device
            for device in children(self._kernel, port, r"dfl[-_.a-z0-9]{0,60}")
            if exists(f"{device}/userclk/frequency")
        ]
        ways: tuple[tuple[Callable[[], bool], AssumptionVerdict, str], ...] = (
            (
                lambda: bool(vendors),
                AssumptionVerdict.HOLDS,
                "the vendor's driver reports it (userclk)",
            ),
            (
                lambda: bool(uio),
                AssumptionVerdict.HOLDS,
                f"it would be measured by {', '.join(map(os.path.basename, uio))}",
            ),
            (
                lambda: bool(features),
                AssumptionVerdict.FAILS,
                "feature 0x14 has no driver: load uio_dfl",
            ),
            (
                lambda: exists(f"{port}/userclk_freqcntrcmd"),
                AssumptionVerdict.HOLDS,
                "it would be measured by userclk_freqcntrcmd",
            ),
        )
        verdict, seen = next(
            ((verdict, seen) for found, verdict, seen in ways if found()),
            (AssumptionVerdict.FAILS, "nothing measures it"),
        )
        return Assumption(f"the user clock of {name} can be measured", verdict, seen)
