"""What the DFL code takes for granted about a card, and what sysfs shows of it.

For owners of cards that nobody has tried: `card show --assumptions` prints it, to be sent back. It
reads attributes and follows links; it opens no device node, writes nothing, and takes everything
that it reads for foreign text. What only a programming could show is said to be on trust.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

from fpga_plugin.errors import HardwareError, quote
from fpga_plugin.hardware.dfl import defs
from fpga_plugin.hardware.dfl.discovery import PCI
from fpga_plugin.hardware.dfl.on_trust import Kind, on_trust
from fpga_plugin.hardware.dfl.shared import iommu
from fpga_plugin.hardware.dfl.slot_functions import SlotRule, slot_functions
from fpga_plugin.hardware.dfl.userclock import userclk_features
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.model import Assumption, Iommu, Verdict
from fpga_plugin.hardware.sysfs import children, number, optional
from fpga_plugin.hardware.vfio.binding import DRIVER as VFIO_DRIVER
from fpga_plugin.ids import PciAddress

_ALLOWED_FUNCTIONS = 64


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

    def all(self) -> Iterator[Assumption]:
        for part in (
            self._what_it_is,
            self._identity,
            self._driver,
            self._functions,
            self._fme,
            self._ports,
        ):
            try:
                yield from part()
            except OSError as error:
                where = f" ({error.filename})" if error.filename else ""
                yield Assumption(
                    "sysfs can be read", Verdict.FAILS, f"{error.strerror or 'error'}{where}"
                )
            except HardwareError as error:
                yield Assumption("sysfs makes sense", Verdict.FAILS, error.message)
        yield from on_trust(self._kind(), ports=self._number_of_ports())

    def _what_it_is(self) -> Iterator[Assumption]:
        kind = self._kind()
        verdict = Verdict.UNKNOWN if kind is Kind.UNKNOWN else Verdict.HOLDS
        yield Assumption("it is of a kind that is known", verdict, kind.value)

    def _kind(self) -> Kind:
        """How its accelerators are reached and loaded, as far as sysfs reports."""
        try:
            fmes = list(self._below(r"dfl-fme\.[0-9]{1,9}"))
            if not fmes or not any(self._below(r"dfl-port\.[0-9]{1,9}")):
                return Kind.UNKNOWN
            slot = self._has_slot()
            if not any(children(self._kernel, fmes[0], r"dfl-fme-mgr\.[0-9]{1,9}")):
                return Kind.FLAT if slot else Kind.UNKNOWN
            if self._fixed():
                return Kind.FIXED
        except (OSError, HardwareError):
            return Kind.UNKNOWN  # the part that reads it says why
        return Kind.SLOT if slot else Kind.PORTS

    def _number_of_ports(self) -> int:
        """What the FME says; 1 where it says nothing that is a number."""
        try:
            for fme in self._below(r"dfl-fme\.[0-9]{1,9}"):
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
        try:
            return os.path.basename(self._kernel.realpath(f"{device}/driver"))
        except FileNotFoundError:
            return ""

    def _identity(self) -> Iterator[Assumption]:
        names = ("vendor", "device", "subsystem_vendor", "subsystem_device", "revision")
        seen = ", ".join(f"{name} {self._text(f'{self._function}/{name}')}" for name in names)
        known = self._kernel.exists(self._function)
        yield Assumption(
            "it is a PCI function that the kernel knows",
            Verdict.HOLDS if known else Verdict.FAILS,
            seen,
        )

    def _driver(self) -> Iterator[Assumption]:
        driver = self._driver_of(self._function)
        yield Assumption(
            "dfl-pci has it",
            Verdict.HOLDS if driver == "dfl-pci" else Verdict.FAILS,
            f"its driver is {quote(driver)}" if driver else "it has no driver",
        )

    def _functions(self) -> Iterator[Assumption]:
        links = list(children(self._kernel, self._function, r"virtfn[0-9]{1,5}"))
        seen = [
            f"{os.path.basename(self._kernel.realpath(link))}: {self._driver_of(link) or 'none'}"
            for link in links[:_ALLOWED_FUNCTIONS]
        ]
        foreign = any(self._driver_of(link) != "dfl-pci" for link in links)
        numbers = f"sriov_numvfs {self._text(f'{self._function}/sriov_numvfs')}"
        drivers = "".join(f"; driver of {quote(one)}" for one in seen)
        slot: list[str] = []
        if self._has_slot():
            answer, slot = self._slot()
            yield replace(answer, seen=f"{answer.seen}; {numbers}{drivers}")
            there = self._kernel.exists(VFIO_DRIVER)
            yield Assumption(
                "vfio-pci is there to have these functions",
                Verdict.HOLDS if there else Verdict.FAILS,
                f"{VFIO_DRIVER} is {'' if there else 'not '}there"
                f"{'' if there else ': modprobe vfio-pci'}",
            )
        else:
            yield Assumption(
                "nobody but dfl-pci has its virtual functions",
                Verdict.FAILS if foreign else Verdict.HOLDS,
                f"{numbers}{drivers}",
            )
        mode = iommu(self._kernel, [self._function, *links, *slot])
        group = f"{self._function}/iommu_group"
        members = list(children(self._kernel, f"{group}/devices", r"[0-9a-f:.]{1,20}"))
        yield Assumption(
            "an IOMMU keeps its DMA from the host's memory",
            Verdict.HOLDS if mode is Iommu.TRANSLATE else Verdict.FAILS,
            f"IOMMU: {mode.value}; the group's type {self._text(f'{group}/type')}, it has"
            f" {len(members)} functions",
        )

    def _has_slot(self) -> bool:
        """Whether the AFU is not behind the port, as on OFS cards."""
        return any(
            self._driver_of(port) and not self._kernel.exists(f"{port}/afu_id")
            for port in self._below(r"dfl-port\.[0-9]{1,9}")
        )

    def _slot(self) -> tuple[Assumption, list[str]]:
        """What is behind the slot, and the directories of these functions."""
        says = "its AFU is in PCI functions that vfio-pci may have (an OFS slot)"
        try:
            found = slot_functions(self._kernel, self._rule, self._address, self._function)
        except HardwareError as error:
            return Assumption(says, Verdict.FAILS, str(error)), []
        seen = "; ".join(
            f"{one.address} in group {one.group}, its driver is"
            f" {quote(self._driver_of(one.sysfs) or 'none')}"
            for one in found[:_ALLOWED_FUNCTIONS]
        )
        return Assumption(says, Verdict.HOLDS, seen), [one.sysfs for one in found]

    def _below(self, pattern: str) -> Iterator[str]:
        """Devices of the card's base regions, those of its virtual functions too."""
        kernel = self._kernel
        functions = [self._function, *children(kernel, self._function, r"virtfn[0-9]{1,5}")]
        for function in functions:
            for base in children(kernel, f"{function}/fpga_region", r"region[0-9]{1,9}"):
                yield from children(kernel, base, pattern)

    def _fme(self) -> Iterator[Assumption]:
        fmes = list(self._below(r"dfl-fme\.[0-9]{1,9}"))
        driver = self._driver_of(fmes[0]) if fmes else ""
        yield Assumption(
            "it has one FME, whose driver is dfl-fme",
            Verdict.HOLDS if len(fmes) == 1 and driver == "dfl-fme" else Verdict.FAILS,
            f"{len(fmes)} found; driver: {quote(driver)}",
        )
        for fme in fmes[:1]:
            managers = list(children(self._kernel, fme, r"dfl-fme-mgr\.[0-9]{1,9}"))
            yield Assumption(
                "it can be reconfigured partially",
                Verdict.HOLDS if managers and not self._fixed() else Verdict.FAILS,
                f"{'a card without it by its PCI ids; ' if self._fixed() else ''}"
                f"{len(managers)} FPGA managers below the FME; ports_num"
                f" {self._text(f'{fme}/ports_num')}, bitstream_id"
                f" {self._text(f'{fme}/bitstream_id')}, bitstream_metadata"
                f" {self._text(f'{fme}/bitstream_metadata')}",
            )
            regions = chain.from_iterable(
                children(self._kernel, f"{platform}/fpga_region", r"region[0-9]{1,9}")
                for platform in children(self._kernel, fme, r"dfl-fme-region\.[0-9]{1,9}")
            )
            ids = [self._text(f"{region}/compat_id") for region in regions]
            yield Assumption(
                "it shows one interface id, and fits every bitstream that has it",
                Verdict.HOLDS if ids and len(set(ids)) == 1 and "says" in ids[0] else Verdict.FAILS,
                "; ".join(f"compat_id {one}" for one in ids[:_ALLOWED_FUNCTIONS]) or "none found",
            )
            yield self._memory(fme)

    def _fixed(self) -> bool:
        names = ("vendor", "device")
        ids = ((optional(self._kernel, f"{self._function}/{name}") or "") for name in names)
        return tuple(text.removeprefix("0x") for text in ids) in defs.WITHOUT_PR

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
            Verdict.HOLDS if banks and not stays else Verdict.FAILS,
            "; ".join(banks) or "dfl-emif shows no memory",
        )

    def _ports(self) -> Iterator[Assumption]:
        slot = self._has_slot()
        for port in self._below(r"dfl-port\.[0-9]{1,9}"):
            name = os.path.basename(port)
            driver = self._driver_of(port)
            shown = self._text(f"{port}/afu_id")
            behind = (
                "no AFU, which is in functions" if self._has_slot() else "the AFU that is on it"
            )
            well = slot or "says" in shown
            yield Assumption(
                f"{name} has its driver and shows {behind}",
                Verdict.HOLDS if driver == "dfl-port" and well else Verdict.FAILS,
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
        ways: tuple[tuple[Callable[[], bool], Verdict, str], ...] = (
            (
                lambda: exists(f"{port}/userclk/frequency_max"),
                Verdict.HOLDS,
                "userclk/frequency sets it",
            ),
            (lambda: bool(vendors), Verdict.HOLDS, "the vendor's driver reports it (userclk)"),
            (
                lambda: bool(uio),
                Verdict.HOLDS,
                f"it would be measured by {', '.join(map(os.path.basename, uio))}",
            ),
            (lambda: bool(features), Verdict.FAILS, "feature 0x14 has no driver: load uio_dfl"),
            (
                lambda: exists(f"{port}/userclk_freqcntrcmd"),
                Verdict.HOLDS,
                "it would be measured by userclk_freqcntrcmd",
            ),
        )
        verdict, seen = next(
            ((verdict, seen) for found, verdict, seen in ways if found()),
            (Verdict.FAILS, "nothing sets or measures it"),
        )
        return Assumption(f"the user clock of {name} can be set or measured", verdict, seen)
