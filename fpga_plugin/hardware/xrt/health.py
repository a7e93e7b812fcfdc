"""What a card's own signals say of it.

A tenant's image can bring the card into a bad state, or trip a firewall: a scrub ends it, which
resets the card. The kind of a fault says whether it passes by itself.
"""

from fpga_plugin.errors import FpgaPluginError, HardwareError
from fpga_plugin.hardware import hwmon
from fpga_plugin.hardware.aer import AerCounters, fatal_link
from fpga_plugin.hardware.faults import Fault, FaultKind
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.model import Card, CardHealth, Readings
from fpga_plugin.hardware.sysfs import children
from fpga_plugin.hardware.xrt import defs
from fpga_plugin.hardware.xrt.attributes import is_offline, value
from fpga_plugin.hardware.xrt.handles import Functions, check_instance, functions_of
from fpga_plugin.hardware.xrt.mask import is_ready, masked
from fpga_plugin.hardware.xrt.port import errors
from fpga_plugin.hardware.xrt.reset import advice


def health(kernel: Kernel, card: Card, aer: AerCounters) -> CardHealth:
    """Read a card's signals; never raises for what a dying card answers."""
    degraded: list[str] = []
    fault = _fault(kernel, card, aer, degraded)
    failed = {} if fault is None else {region.id: fault for region in card.regions}
    return CardHealth(failed, tuple(dict.fromkeys(degraded)), unguarded(kernel, functions_of(card)))


def unguarded(kernel: Kernel, functions: Functions, *allowed: int) -> str:
    """What is wrong with the mask of mailbox requests; empty: nothing, or it cannot be read.

    `allowed`: the masks that it may be, beside the one of a card that nobody else may load.
    """
    try:
        of_management, of_user = masked(kernel, functions)
    except (HardwareError, OSError):
        return ""  # the card's signals say why
    if None in {of_management, of_user}:
        return ""
    if of_management == of_user and of_user in {defs.MASK, *allowed}:
        return ""
    return f"the mask of its mailbox is {of_management:#x}, the user function's copy {of_user:#x}"


def _fault(kernel: Kernel, card: Card, aer: AerCounters, degraded: list[str]) -> Fault | None:
    """The worst that is wrong."""
    try:
        for region in card.regions:
            check_instance(kernel, region)
        if value(kernel, f"{functions_of(card).management}/recovery"):
            return Fault(
                FaultKind.LASTING,
                f"recovery: card {card.id} runs its golden image",
                "flash its shell again with xbmgmt, and power-cycle the node",
            )
        if count := aer.fatal(kernel, card):
            return Fault(FaultKind.TRANSIENT, *fatal_link(card.id, count))
        if why := _passing(kernel, card) or _hot(kernel, card, degraded):
            return Fault(FaultKind.TRANSIENT, why)
        return _curable(kernel, card)
    except FpgaPluginError as error:
        why = error.message
    except OSError as error:
        why = f"card {card.id} cannot be read ({error.strerror})"
    return Fault(FaultKind.TRANSIENT, f"unreadable: {why}")


def _passing(kernel: Kernel, card: Card) -> str:
    """Why the card does not answer; empty: it does."""
    functions = functions_of(card)
    if is_offline(kernel, functions.management):
        return f"unreadable: card {card.id} is offline"
    if value(kernel, f"{functions.management}/ready") != 1 or not is_ready(kernel, functions):
        return f"unreadable: card {card.id} is not ready"
    return ""


def _curable(kernel: Kernel, card: Card) -> Fault | None:
    functions = functions_of(card)
    if not (found := errors(kernel, functions.management, functions.user)):
        return None
    says = ", ".join(f"{name} {number:#x}" for name, number in found.items())
    return Fault(FaultKind.CURABLE, f"bad state: card {card.id} ({says})", advice(card.address))


def _hot(kernel: Kernel, card: Card, degraded: list[str]) -> str:
    """Which sensor has reached its critical temperature; empty: none.

    That of an optical module, or a sensor that cannot be read, says nothing of the FPGA.
    """
    try:
        for channel in _channels(kernel, card):
            if hwmon.kind(channel) != "temp" or (now := hwmon.value(kernel, channel)) is None:
                continue
            name = hwmon.name(kernel, channel)
            for attribute, word in (("crit", "critical"), ("max", "highest")):
                limit = hwmon.value(kernel, channel, attribute)
                if limit is None or not 0 < limit <= now:
                    continue
                text = (
                    f"thermal: {name} of card {card.id} has reached its {word} temperature,"
                    f" {limit / 1000:g} C"
                )
                if word == "critical" and "cage" not in name:
                    return text
                degraded.append(text)
                break
    except (HardwareError, OSError) as error:
        why = error.message if isinstance(error, HardwareError) else error.strerror
        degraded.append(f"unreadable: the sensors of card {card.id} ({why})")
    return ""


def _channels(kernel: Kernel, card: Card) -> list[str]:
    """Sensors of PF0's controllers (subdev/xmc.c, sysmon.c, hwmon_sdm.c)."""

    def listed(directory: str, pattern: str) -> list[str]:
        return list(children(kernel, directory, pattern))

    devices = hwmon.own(listed, functions_of(card).management)
    return [channel for device in devices for channel in hwmon.channels(listed, device)]


def readings(kernel: Kernel, card: Card) -> Readings:
    """Sensors and error states; what is not there, or cannot be read now, is left out."""
    per_unit = {"temp": 1_000, "power": 1_000_000}
    found: dict[str, dict[str, float]] = {"temp": {}, "power": {}}
    functions = functions_of(card)
    try:
        for channel in _channels(kernel, card):
            if (amount := hwmon.value(kernel, channel)) is not None:
                kind = hwmon.kind(channel)
                found[kind][hwmon.name(kernel, channel)] = amount / per_unit[kind]
    except (HardwareError, OSError):
        pass  # up to one that does not answer
    try:
        bad = {"device_bad_state": 0, "firewall_level": 0}
        now = bad | errors(kernel, functions.management, functions.user)
    except (HardwareError, OSError):
        now = {}
    return Readings(found["temp"], found["power"], now)
