"""What a card's own signals say of it: which regions have failed, and what is worth a log line.

Reads only attributes that a running PR does not block (dfl-fme-error.c takes the FME's lock for
fme_errors, first_error, next_error and pcie*_errors; not for the two read here). A port's errors
that a tenant's image can cause, such as MMIO time-outs and page faults, fail no region: a scrub
clears them. Neither card errors that an image can cause, nor a hung accelerator, bar a scrub.

An FPGA manager's state is not judged: it reports the region that was programmed last, and that
region's programmer has looked.
"""

import errno
from collections.abc import Callable

from fpga_plugin.errors import (
    AcceleratorSilentError,
    CardGoneError,
    HardwareError,
    PortPoisonedError,
)
from fpga_plugin.hardware import hwmon
from fpga_plugin.hardware.aer import AerCounters, fatal_link
from fpga_plugin.hardware.dfl import defs
from fpga_plugin.hardware.dfl.bmc import board
from fpga_plugin.hardware.dfl.handles import fme_of, functions_of, port_of, slot_of
from fpga_plugin.hardware.faults import Fault, FaultKind
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.model import Card, CardHealth, Region
from fpga_plugin.hardware.sysfs import bare_hex, children, number, optional
from fpga_plugin.ids import AfuId, RegionId

_DEAD = frozenset({errno.EIO, errno.ENODEV, errno.ENXIO, errno.ETIMEDOUT})
"""What reading an attribute says when the hardware behind it is failing or gone."""

_Parse = Callable[[str, str], int]


def health(
    kernel: Kernel, card: Card, aer: AerCounters, *, afu_id: Callable[[Region], AfuId]
) -> CardHealth:
    """Read a card's signals; never raises for what a dying card answers.

    Not to be called during a PR of the plugin's own on this card: the port's AFU id is then EBUSY,
    which at any other time means a poisoned port.

    `afu_id` reads a port's; a slot's is known only once the plugin has held it.
    """
    reading = _Reading(kernel)
    if reading.exists(fme_of(card).sysfs):
        _judge_link(reading, card, aer)
        _judge_errors(reading, card)
        _judge_sensors(reading, card)
        _judge_board(reading, card)
        _judge_memory(reading, card)
    failed: dict[RegionId, Fault] = {}
    degraded = list(reading.degraded)
    for region in card.regions:
        port = _Reading(kernel)
        own = FaultKind.TRANSIENT if reading.failed else _judge_port(port, region, afu_id)
        degraded += port.degraded
        if reasons := reading.failed or port.failed:
            # Only what is alone may be rebound, or scrubbed, away.
            kind = own if len(reasons) == 1 else FaultKind.TRANSIENT
        else:
            kind = FaultKind.CURABLE
        if told := [*reasons, *reading.curable]:
            failed[region.id] = Fault(kind, "; ".join(dict.fromkeys(told)), reading.hint)
    return CardHealth(failed, tuple(dict.fromkeys(degraded)))


class _Reading:
    """Attributes read one after the other, and what was concluded from them."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.failed: list[str] = []
        self.curable: list[str] = []
        self.degraded: list[str] = []
        self.hint = ""

    def value(self, path: str, parse: _Parse = number) -> int:
        """An attribute's value; 0, which means well everywhere, when it is absent or unreadable."""
        try:
            text = optional(self.kernel, path)
            value = 0 if text is None else parse(path, text)
        except HardwareError as error:
            self.failed.append(f"unreadable: {error.message}")
            return 0
        except OSError as error:
            self.unreadable(path, error)
            return 0
        if value == defs.ALL_ONES_64:
            self.failed.append(f"unreadable: {path} reads all ones")
            return 0
        return value

    def exists(self, directory: str) -> bool:
        """Whether the card is still there; if not, it has failed."""
        try:
            there = self.kernel.exists(directory)
        except OSError as error:
            self.unreadable(directory, error)
            return False
        if not there:
            self.failed.append(f"unreadable: {directory} is gone")
        return there

    def children(self, directory: str, pattern: str) -> list[str]:
        """Paths of the entries that match; none when they cannot be listed."""
        try:
            return list(children(self.kernel, directory, pattern))
        except OSError as error:
            self.unreadable(directory, error)
            return []

    def unreadable(self, path: str, error: OSError) -> None:
        """Failed hardware fails the card; another reason (EINTR, EACCES) says nothing of it."""
        says = self.failed if error.errno in _DEAD else self.degraded
        says.append(f"unreadable: {path} ({error.strerror})")


def _judge_link(reading: _Reading, card: Card, aer: AerCounters) -> None:
    functions = [f.address for region in card.regions for f in functions_of(region)]
    if count := aer.fatal(reading.kernel, card, *functions):
        what, reading.hint = fatal_link(card.id, count)
        reading.failed.append(what)
    if aer.correctable(reading.kernel, card, *functions):
        # Without the number: each look would be another line in the log.
        reading.degraded.append(
            f"pcie: the link of card {card.id} had errors that it corrected (aer_dev_correctable)"
        )


def _judge_errors(reading: _Reading, card: Card) -> None:
    catfatal = reading.value(f"{fme_of(card).sysfs}/errors/catfatal_errors")
    if fatal := catfatal & ~defs.CATFATAL_INJECTED:
        names = [defs.CATFATAL_BITS.get(bit, f"bit {bit}") for bit in range(64) if fatal >> bit & 1]
        word = "thermal" if fatal & defs.CATFATAL_THERMAL else "fatal"
        reading.failed.append(f"{word}: {', '.join(names)} (catfatal_errors 0x{catfatal:x})")
    nonfatal = reading.value(f"{fme_of(card).sysfs}/errors/nonfatal_errors")
    for bits, says in (
        (defs.NONFATAL_FAILED, reading.failed),
        (defs.NONFATAL_CURABLE, reading.curable),
        (defs.NONFATAL_DEGRADED, reading.degraded),
    ):
        for bit, (word, name) in bits.items():
            if nonfatal >> bit & 1:
                says.append(f"{word}: {name} on card {card.id} (nonfatal_errors 0x{nonfatal:x})")


def _judge_sensors(reading: _Reading, card: Card) -> None:
    for sensor in hwmon.own(reading.children, fme_of(card).sysfs):
        if reading.value(f"{sensor}/temp1_crit_alarm"):
            reading.failed.append(f"thermal: card {card.id} is above its critical temperature")
        if reading.value(f"{sensor}/temp1_max_alarm"):
            reading.degraded.append(f"thermal: card {card.id} is above its highest temperature")
        for alarm in ("power1_max_alarm", "power1_crit_alarm"):
            if reading.value(f"{sensor}/{alarm}"):
                reading.degraded.append(f"power: card {card.id} draws too much ({alarm})")


def _judge_board(reading: _Reading, card: Card) -> None:
    """The board's management controller; that it cannot be read says nothing of the FPGA."""
    for sensors in board(reading.children, fme_of(card).sysfs):
        try:
            for channel in hwmon.channels(reading.children, sensors):
                if hwmon.kind(channel) == "temp":
                    _judge_temperature(reading, card, channel)
        except (HardwareError, OSError) as error:
            why = error.message if isinstance(error, HardwareError) else error.strerror
            reading.degraded.append(
                f"unreadable: the management controller of card {card.id} ({why})"
            )


def _judge_temperature(reading: _Reading, card: Card, channel: str) -> None:
    """Raises HardwareError or OSError where it cannot be read."""
    value = hwmon.value(reading.kernel, channel)
    if value is None:
        return
    name = hwmon.name(reading.kernel, channel)
    # An optical module that is too hot is not the FPGA's failure.
    critical = reading.degraded if name.startswith("qsfp") else reading.failed
    for attribute, says, word in (
        ("crit", critical, "critical"),
        ("max", reading.degraded, "highest"),
    ):
        limit = hwmon.value(reading.kernel, channel, attribute)
        if limit is not None and 0 < limit <= value:  # 0: the controller was given none
            says.append(
                f"thermal: {name} of card {card.id} has reached its {word} temperature,"
                f" {limit / 1000:g} C"
            )
            return


def _judge_memory(reading: _Reading, card: Card) -> None:
    """The memory's calibration (drivers/memory/dfl-emif.c)."""
    for device in reading.children(fme_of(card).sysfs, r"dfl_dev\.[0-9]{1,9}"):
        for path in reading.children(device, r"inf[0-7]_cal_fail"):
            if reading.value(path):
                reading.failed.append(f"memory: calibration failed ({path})")
        for path in reading.children(device, r"inf[0-7]_init_done"):
            before = len(reading.failed)
            if not reading.value(path) and len(reading.failed) == before:
                reading.failed.append(f"memory: initialisation is not done ({path})")


def _judge_port(reading: _Reading, region: Region, afu_id: Callable[[Region], AfuId]) -> FaultKind:
    """Returns the kind of what the AFU id reports, if that is all that is wrong."""
    errors = reading.value(f"{port_of(region).sysfs}/errors/errors")
    if errors & defs.PORT_AP6_EVENT:
        reading.failed.append(
            f"thermal: AP6 has shut down region {region.id} (errors 0x{errors:x})"
        )
    answers = _judge_power(reading, region)
    try:
        afu_id(region)
    except PortPoisonedError as error:
        reading.failed.append(f"poisoned: {error.message}")
        return FaultKind.POISONED
    except AcceleratorSilentError as error:
        reading.failed.append(f"{'hung' if answers else 'unreadable'}: {error.message}")
        return FaultKind.CURABLE if answers else FaultKind.TRANSIENT
    except CardGoneError as error:
        reading.failed.append(f"unreadable: {error.message}")
    except HardwareError as error:
        if slot_of(region) is None:
            reading.failed.append(f"unreadable: {error.message}")
    return FaultKind.TRANSIENT


def _judge_power(reading: _Reading, region: Region) -> bool:
    """Returns whether the port's status register reads as that of a port that answers."""
    power = reading.value(f"{port_of(region).sysfs}/power_state")
    if power == defs.POWER_AP6:
        reading.failed.append(f"power: region {region.id} is in power state AP6")
    elif power:
        state = defs.POWER_THROTTLED.get(power, f"0x{power:x}")
        reading.degraded.append(f"power: region {region.id} is in power state {state}")
    for name in ("ap1_event", "ap2_event"):
        if reading.value(f"{port_of(region).sysfs}/{name}", bare_hex):
            reading.degraded.append(f"power: region {region.id} had an {name}")
    return power != defs.POWER_ALL_ONES
