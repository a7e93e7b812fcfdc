"""What a bitstream says of itself, for `bitstream inspect` and `list`: for scripts and for people.

The names of the first ten facts of GBS and AOCX files are those of every version of the plugin.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict

from fpga_plugin.bitstreams.kinds import Contents
from fpga_plugin.bitstreams.xclbin import XclbinFacts
from fpga_plugin.errors import quote
from fpga_plugin.hardware.image import Kernel, MemoryBank

FOREIGN = frozenset({"name", "platform_name", "top_interface"})
"""Facts that are texts of who built the file."""

_ARGUMENTS = 8
"""Arguments of a kernel that a line names."""


def facts_of(contents: Contents) -> Mapping[str, object]:
    """Facts with one value each, as JSON has them."""
    facts: dict[str, object] = {
        "interface_id": contents.interface_id,
        "afu_id": contents.afu_id,
        "name": contents.name,
    }
    details = contents.details
    if isinstance(details, XclbinFacts):
        return facts | {
            "platform_name": contents.platform_name,
            "xrt_version": details.version,
            "dataflow": details.dataflow,
            "slot_size": details.slot_size,
        }
    return facts | {
        "total_contexts": details.clusters[0].total_contexts,
        "platform_name": contents.platform_name,
        "power": details.power,
        "clock_frequency_high": details.clock_frequency_high,
        "clock_frequency_low": details.clock_frequency_low,
        "top_interface": details.top_interface,
        "version": details.version,
    }


def parts_of(contents: Contents) -> Mapping[str, object]:
    """Facts that are lists, as JSON has them."""
    details = contents.details
    if isinstance(details, XclbinFacts):
        banks = [asdict(bank) | {"clearable": bank.clearable} for bank in details.banks]
        return {"kernels": [asdict(kernel) for kernel in details.kernels], "memory_banks": banks}
    return {"accelerators": [asdict(cluster) for cluster in details.clusters]}


def lines_of(contents: Contents) -> Iterator[tuple[str, str]]:
    """The same lists for people: what a line is about, and the line."""
    details = contents.details
    if isinstance(details, XclbinFacts):
        for kernel in details.kernels:
            yield "kernel", _of_kernel(kernel)
        for bank in details.banks:
            yield "memory", _of_bank(bank)
        return
    # The first one is among the facts: it is what a port shows, and what names a GBS file.
    for each in details.clusters[1:]:
        yield (
            "and accelerator",
            f"{each.afu_id}  {quote(each.name)}, total contexts {each.total_contexts}",
        )


def _of_kernel(kernel: Kernel) -> str:
    arguments = [
        f"{quote(one.name)} {one.size} at {one.offset:#x}" for one in kernel.arguments[:_ARGUMENTS]
    ]
    if len(kernel.arguments) > _ARGUMENTS:
        arguments.append(f"and {len(kernel.arguments) - _ARGUMENTS} more")
    reset = ", software reset" if kernel.software_reset else ""
    return f"{quote(kernel.name)}, {kernel.address_range:#x} bytes of registers{reset}; " + (
        f"arguments: {', '.join(arguments)}" if arguments else "no arguments"
    )


def _of_bank(bank: MemoryBank) -> str:
    name = f"{quote(bank.tag)}, {bank.type}"
    if bank.clearable:
        return f"{name}, {bank.size} bytes at {bank.base:#x}: a blank bitstream with it clears it"
    if not bank.on_card:
        return f"{name}: no memory of the card with addresses"
    return f"{name}, {bank.size} bytes at {bank.base:#x}: not used, so a blank does not clear it"
