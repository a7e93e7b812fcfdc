"""What `bitstream inspect` and `list` show of a bitstream: for scripts and for people."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import NotRequired, TypedDict, cast

from fpga_plugin.bitstreams.contents import Contents, XclbinDetails
from fpga_plugin.bitstreams.files import Content
from fpga_plugin.bitstreams.gbs_metadata import Accelerator
from fpga_plugin.errors import quote
from fpga_plugin.hardware.image import ComputeKernel, MemoryBank

FOREIGN = frozenset({"name", "platform_name", "top_interface"})
"""Facts that are texts of who built the file."""

_ARGUMENTS = 8
"""Arguments of a kernel that a line names."""


class FactsView(TypedDict):
    """What a file says of itself.

    GBS and AOCX files have `total_contexts` to `version`, the version of their metadata's schema;
    xclbin files have `xrt_version`, of the XRT that they were built with, to `slot_size`.
    """

    interface_id: str
    afu_id: str
    name: str
    platform_name: str | None
    total_contexts: NotRequired[int]
    power: NotRequired[float | None]
    clock_frequency_high: NotRequired[float | str | None]
    clock_frequency_low: NotRequired[float | str | None]
    top_interface: NotRequired[str | None]
    version: NotRequired[int]
    xrt_version: NotRequired[str]
    dataflow: NotRequired[bool]
    slot_size: NotRequired[int]


class MemoryView(TypedDict):
    """A memory of an xclbin's topology, in bytes.

    `clearable`: a scrub with this file as the blank bitstream clears it.
    """

    tag: str
    type: str
    used: bool
    on_card: bool
    base: int
    size: int
    clearable: bool


class SectionView(TypedDict):
    """A section of an AOCX or xclbin file."""

    name: str
    bytes: int


class InspectedView(FactsView):
    """A file; `accelerators` of GBS and AOCX, `kernels` and `memory_banks` of xclbin files."""

    file: str
    bytes: int
    format: str
    bitstream_id: str
    image_bytes: int
    sha256: str
    accelerators: NotRequired[list[Accelerator]]
    kernels: NotRequired[list[ComputeKernel]]
    memory_banks: NotRequired[list[MemoryView]]
    sections: list[SectionView]


class FileProblemView(TypedDict):
    """Why the plugin does not use a file, and what to do."""

    message: str
    hint: str


class StoredView(TypedDict):
    """A file of a store; `trust` says why it is trusted, and is empty where it is not."""

    path: str
    interface_id: str | None
    bitstream_id: str | None
    blank: bool
    bytes: int | None
    metadata: FactsView | None
    problem: FileProblemView | None
    alias: str | None
    interface_alias: str | None
    trust: str


def facts_of(contents: Contents) -> FactsView:
    """What a file says of itself, in one value each."""
    said = {
        name: getattr(said_by, name)
        for name in FactsView.__annotations__
        for said_by in (contents, contents.details)
        if hasattr(said_by, name)
    }
    return cast("FactsView", said)


def inspected(file: str, contents: Contents, content: Content) -> InspectedView:
    """All that a file says of itself."""
    view = {
        "file": file,
        "bytes": content.size,
        "format": contents.kind.ending,
        "bitstream_id": contents.bitstream_id,
        "image_bytes": contents.image_bytes,
        "sha256": content.sha256,
        **facts_of(contents),
        "sections": [{"name": name, "bytes": size} for name, size in contents.sections],
    }
    details = contents.details
    if isinstance(details, XclbinDetails):
        view["kernels"] = [asdict(kernel) for kernel in details.kernels]
        view["memory_banks"] = [
            asdict(bank) | {"clearable": bank.clearable} for bank in details.memory_banks
        ]
    else:
        view["accelerators"] = [asdict(one) for one in details.accelerators]
    return cast("InspectedView", view)


def lines_of(contents: Contents) -> Iterator[tuple[str, str]]:
    """The lists of `inspected` for people: what a line is about, and the line."""
    details = contents.details
    if isinstance(details, XclbinDetails):
        for kernel in details.kernels:
            yield "kernel", _of_kernel(kernel)
        for bank in details.memory_banks:
            yield "memory", _of_bank(bank)
    else:
        # The first one is among the facts: it is what a port shows, and what names a GBS file.
        for each in details.accelerators[1:]:
            contexts = each.total_contexts
            yield "and accelerator", f"{each.afu_id}  {quote(each.name)}, total contexts {contexts}"
    for section, size in contents.sections:
        yield "section", f"{section}, {size} bytes"


def _of_kernel(kernel: ComputeKernel) -> str:
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
        where = f"{bank.size} bytes at {bank.base:#x}"
        return f"{name}, {where}: a scrub with this file as the blank clears it"
    if not bank.on_card:
        return f"{name}: no memory of the card with addresses"
    return f"{name}: not used, so a scrub with this file as the blank leaves it as it is"
