"""The kernels of an xclbin: what XRT's driver needs besides it, read from the XML inside.

The driver reads no XML. The loader of an xclbin passes it each kernel's name, address range and
arguments, and for the command queue a slot's size; the tenant's own load of the same uuid is
skipped, so what the first loader said stays. What is passed is what XRT's library passes, at commit
963c58ee of Xilinx/XRT: `xclPrepareAxlf` (src/runtime_src/core/pcie/linux/shim.cpp), which asks
`get_kernels`, `merge_args`, `get_address_range` and `get_max_cu_size`
(core/common/xclbin_parser.cpp) and `get_ert_slots` (core/common/device.cpp):

- It reads `project/platform/device/core`, of each name the first.
- A kernel's address range is the `range` of its first port with the mode `slave`, else 64 KiB.
- Arguments are sorted by `id`, those without one last. Those of one id are parts of one argument:
  the sizes are added, and the lowest offset counts.
- The command queue has 64 KiB, and two slots a compute unit and one more, 16 at least and 128 at
  most; a slot holds the registers of the largest kernel. Above 16 their number is a multiple of 32.

- An empty number is 0. Of an element of this list, an attribute that is not there is an error.

What that library refuses of this, no program in a container could load either: it is refused here,
too, as are names and numbers that the driver's fields cut off.
"""

import re
from dataclasses import dataclass, field
from xml.parsers import expat

from fpga_plugin.bitstreams.byte_range import ByteRange
from fpga_plugin.errors import BitstreamError, quote
from fpga_plugin.hardware.image import ComputeKernel, KernelArgument

MAX_BYTES = 4 << 20
"""Of the XML. Files of 30 kernels have some hundred KiB."""

MAX_KERNELS = 1024
MAX_ARGUMENTS = 16384
"""Of all kernels; the driver copies 76 bytes of each. It has room for 128 compute units."""

MAX_NAME_BYTES = 63
"""Of a kernel and of an argument: the driver's fields have 64, with a null byte."""

_CORE = ("project", "platform", "device", "core")
_DEFAULT_RANGE = 64 << 10
_QUEUE_BYTES = 64 << 10
"""`ERT_CQ_SIZE` (core/include/xrt/detail/ert.h)."""

_LEAST_SLOTS, _MOST_SLOTS, _SLOTS_A_REGISTER = 16, 128, 32
_NO_INDEX = 1 << 32
"""Sorts after every index."""

_MAX_NUMBER = (1 << 32) - 1
_NUMBER = re.compile(r"0[xX][0-9a-fA-F]{1,16}|0[0-7]{0,21}|[1-9][0-9]{0,19}", re.ASCII)
"""As C writes numbers, which is how the library reads them."""

MAX_DEPTH = 64
"""Of elements in elements."""

MAX_TAG_BYTES = 128 << 10
"""Of an element's tag: expat has it in memory as a whole, with all its attributes."""

_PIECE = 64 << 10
_ENCODINGS = {None, "utf-8", "us-ascii", "ascii"}


@dataclass(frozen=True, slots=True)
class Kernels:
    """What the XML says.

    Attributes:
        name: of the project, for people; foreign text.
        kernels: in the file's order.
        slot_size: bytes of a slot of the command queue.
    """

    name: str
    kernels: tuple[ComputeKernel, ...]
    slot_size: int


def read_kernels(xml: ByteRange) -> Kernels:
    """Read the section EMBEDDED_METADATA, a piece at a time.

    Raises:
        BitstreamError: it is not what the library reads; the message says what and where.
    """
    return _Reader(xml).read()


@dataclass(slots=True)
class _Kernel:
    """A kernel while its element is open."""

    name: str
    software_reset: bool
    range: int | None = None
    arguments: list[tuple[int, KernelArgument]] = field(default_factory=list)


class _Reader:
    """One reading of one document. Handlers raise, and expat passes that on."""

    def __init__(self, xml: ByteRange) -> None:
        self._xml = xml
        self._path: list[str] = []
        self._core = 0  # of the path's names, so many lead to the core
        self._seen = 0  # so many of them were there once, open or not
        self._name = ""
        self._kernel: _Kernel | None = None
        self._kernels: dict[str, ComputeKernel] = {}
        self._arguments = 0
        self._units = 0
        self._largest = 0
        # Its own word on the encoding counts: two readers would disagree on another one.
        self._parser = parser = expat.ParserCreate("UTF-8")
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.XmlDeclHandler = self._declared
        parser.StartDoctypeDeclHandler = self._document_type

    def read(self) -> Kernels:
        size = self._content_bytes()
        if not 0 < size <= MAX_BYTES:
            raise self._refused(f"has {size} bytes; 1 to {MAX_BYTES} are read")
        try:
            fed = 0
            for piece in self._xml.part(0, size).pieces(_PIECE):
                self._parser.Parse(piece, False)
                fed += len(piece)
                if fed - self._parser.CurrentByteIndex > MAX_TAG_BYTES:
                    raise self._refused(f"has a tag or text of more than {MAX_TAG_BYTES} bytes")
            self._parser.Parse(b"", True)
        except expat.ExpatError as error:
            raise self._refused(f"is not XML: {error}") from None
        if self._seen < len(_CORE):
            raise self._refused(f"has no element {'/'.join(_CORE)}")
        return Kernels(self._name, tuple(self._kernels.values()), self._slot_size())

    def _content_bytes(self) -> int:
        """Without null bytes at the end, which the library takes for it."""
        tail = self._xml.read(max(self._xml.size - _PIECE, 0))
        return self._xml.size - len(tail) + len(tail.rstrip(b"\0"))

    def _declared(self, _version: str, encoding: str | None, _standalone: int) -> None:
        if (encoding.lower() if encoding else None) not in _ENCODINGS:
            raise self._refused(f"is in {quote(encoding)}; only UTF-8 is read")

    def _document_type(self, *_: object) -> None:
        raise self._refused("has a document type: entities and external files are not read")

    def _start(self, element: str, attributes: dict[str, str]) -> None:
        depth = len(self._path)
        if depth == MAX_DEPTH:
            raise self._refused(f"has elements deeper than {MAX_DEPTH} in each other")
        self._path.append(element)
        if depth < len(_CORE):
            if self._core == self._seen == depth and element == _CORE[depth]:
                self._core = self._seen = depth + 1
                if depth == 0:
                    self._name = attributes.get("name", "")
        elif self._core == len(_CORE):
            self._inside(tuple(self._path[len(_CORE) :]), attributes)

    def _inside(self, path: tuple[str, ...], attributes: dict[str, str]) -> None:
        match path:
            case ("kernel",):
                name = self._name_of(attributes, "kernel")
                if name in self._kernels:
                    raise self._refused(f"has two kernels {quote(name)}")
                if len(self._kernels) == MAX_KERNELS:
                    raise self._refused(f"has more than {MAX_KERNELS} kernels")
                self._kernel = _Kernel(name, attributes.get("swReset") == "true")
            case ("kernel", "port") if self._kernel is not None:
                self._port(self._kernel, attributes)
            case ("kernel", "arg") if self._kernel is not None:
                self._argument(self._kernel, attributes)
            case ("kernel", "instance", "addrRemap"):
                self._number(attributes, "base", "an addrRemap", most=(1 << 64) - 1)
                self._units += 1

    def _port(self, kernel: _Kernel, attributes: dict[str, str]) -> None:
        if kernel.range is not None:
            return
        of = f"a port of kernel {quote(kernel.name)}"
        if self._attribute(attributes, "mode", of) == "slave":
            kernel.range = self._number(attributes, "range", of)

    def _argument(self, kernel: _Kernel, attributes: dict[str, str]) -> None:
        self._arguments += 1
        if self._arguments > MAX_ARGUMENTS:
            raise self._refused(f"has more than {MAX_ARGUMENTS} arguments")
        name = self._name_of(attributes, f"argument of kernel {quote(kernel.name)}")
        of = f"argument {quote(name)} of kernel {quote(kernel.name)}"
        index = _NO_INDEX
        if self._attribute(attributes, "id", of):
            index = self._number(attributes, "id", of)
        offset, size = (self._number(attributes, what, of) for what in ("offset", "size"))
        kernel.arguments.append((index, KernelArgument(name, offset, size)))

    def _end(self, _element: str) -> None:
        self._path.pop()
        depth = len(self._path)
        self._core = min(self._core, depth)
        if self._kernel is not None and depth == len(_CORE):
            self._kernels[self._kernel.name] = self._finished(self._kernel)
            self._kernel = None

    def _finished(self, kernel: _Kernel) -> ComputeKernel:
        address_range = _DEFAULT_RANGE if kernel.range is None else kernel.range
        for _, argument in kernel.arguments:
            end = argument.offset + argument.size
            if end > address_range:
                raise self._refused(
                    f"argument {quote(argument.name)} of kernel {quote(kernel.name)} ends at"
                    f" {end:#x}, behind the kernel's address range of {address_range:#x}"
                )
            self._largest = max(self._largest, end)
        return ComputeKernel(
            kernel.name, address_range, kernel.software_reset, self._merged(kernel)
        )

    def _merged(self, kernel: _Kernel) -> tuple[KernelArgument, ...]:
        merged: list[KernelArgument] = []
        before = -1
        for index, argument in sorted(kernel.arguments, key=lambda one: one[0]):
            if index == before != _NO_INDEX:
                first = merged[-1]
                size = first.size + argument.size
                if size > _MAX_NUMBER:
                    raise self._refused(f"the parts of an argument have {size} bytes together")
                merged[-1] = KernelArgument(first.name, min(first.offset, argument.offset), size)
                continue
            if index not in {len(merged), _NO_INDEX}:
                raise self._refused(
                    f"the arguments of kernel {quote(kernel.name)} lack the id {len(merged)}"
                )
            merged.append(argument)
            before = index
        return tuple(merged)

    def _slot_size(self) -> int:
        slots = min(_MOST_SLOTS, max(_LEAST_SLOTS, 2 * self._units + 1))
        slots = _QUEUE_BYTES // max(_QUEUE_BYTES // slots, self._largest)
        if not slots:
            raise self._refused(
                f"a kernel's registers end at byte {self._largest}, and a slot of the command queue"
                f" has at most {_QUEUE_BYTES}"
            )
        if slots > _LEAST_SLOTS:
            slots = -(-slots // _SLOTS_A_REGISTER) * _SLOTS_A_REGISTER
        return _QUEUE_BYTES // slots

    def _name_of(self, attributes: dict[str, str], of: str) -> str:
        name = self._attribute(attributes, "name", f"a {of}")
        if not 1 <= len(name.encode()) <= MAX_NAME_BYTES:
            raise self._refused(f"{of} {quote(name)}: a name has 1 to {MAX_NAME_BYTES} bytes")
        return name

    def _attribute(self, attributes: dict[str, str], name: str, of: str) -> str:
        if (value := attributes.get(name)) is None:
            raise self._refused(f"{of} has no attribute {name}")
        return value

    def _number(
        self, attributes: dict[str, str], name: str, of: str, *, most: int = _MAX_NUMBER
    ) -> int:
        text = self._attribute(attributes, name, of) or "0"
        if not _NUMBER.fullmatch(text):
            raise self._refused(f"{of}: {name} is {quote(text)}, no number")
        octal = text.startswith("0") and text.isdigit()
        value = int(text, 8 if octal else 0)
        if value > most:
            raise self._refused(f"{of}: {name} is {text}, above {most:#x}")
        return value

    def _refused(self, what: str) -> BitstreamError:
        return self._xml.wrong(what, hint="build the file again")
