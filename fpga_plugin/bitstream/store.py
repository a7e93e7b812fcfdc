"""The store: a directory of bitstreams whose names say what is in them.

    <root>/<interface id>/<bitstream id>.gbs    an accelerator, named by its AFU id
    <root>/<interface id>/<bitstream id>.aocx   another, named by its hash
    <root>/<interface id>/blank.gbs             the null image that deprograms a region

A name is a promise that the store checks: the file's own interface id and AFU id must be those of
its path, because the kernel programs an image for another static part without a word. The ids'
types guarantee that they cannot lead out of the root (`fpga_plugin.ids`); links inside it
(ConfigMaps) are followed, links that lead out of it are refused.

Nothing is kept between calls. All of it blocks: call it from a thread.
"""

import os
from dataclasses import dataclass, field
from typing import NoReturn

from fpga_plugin.bitstream.aocx import Begin, read_aocx
from fpga_plugin.bitstream.byte_range import ByteRange
from fpga_plugin.bitstream.files import open_file
from fpga_plugin.bitstream.formats import Kind, kind_of
from fpga_plugin.bitstream.gbs import HEAD_BYTES, Header, parse_header
from fpga_plugin.bitstream.metadata import Frequency, Metadata
from fpga_plugin.errors import BitstreamError, BitstreamNotFoundError, FpgaPluginError, quote
from fpga_plugin.ids import (
    AfuId,
    BitstreamId,
    InterfaceId,
    parse_bitstream_id,
    parse_interface_id,
)
from fpga_plugin.process.trusted_files import TrustedFile

BLANK = "blank"
"""The name of a blank bitstream's file, without its ending."""

INSTALL = "`fpga-plugin bitstream install` on the node, or where the store is filled from"
"""What to do about a file that is not there. In the plugin's pod the store can only be read."""

AOCX_ID_DIGITS = 40
"""A bitstream id of this length names an AOCX file."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Bitstream:
    """A bitstream in memory, ready to be programmed.

    Attributes:
        path: where it was read.
        interface_id: the cards that it fits.
        bitstream_id: its name in the store; for a blank bitstream its AFU id.
        afu_id: what the port must read after programming.
        image: the raw image: a private copy, or a private mapping of a file that nobody writes.
        clock_frequency_high: the user clock that it was built for.
        clock_frequency_low: its half-rate clock.
    """

    path: str
    interface_id: InterfaceId
    bitstream_id: BitstreamId
    afu_id: AfuId
    image: bytes | memoryview = field(repr=False)
    clock_frequency_high: Frequency = None
    clock_frequency_low: Frequency = None


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """A file of the store: what it is, or what is wrong with it.

    Attributes:
        path: the file or directory.
        interface_id: None where the directory's name is no interface id.
        bitstream_id: None for a blank bitstream, and where the name is no bitstream id.
        blank: whether it is a blank bitstream.
        size: in bytes; None where it could not be read.
        metadata: None where there is a problem.
        problem: why the plugin would not use it.
    """

    path: str
    interface_id: InterfaceId | None = None
    bitstream_id: BitstreamId | None = None
    blank: bool = False
    size: int | None = None
    metadata: Metadata | None = None
    problem: FpgaPluginError | None = None


class Store:
    """Where bitstreams are, and what is there; reads only, and never an image to program it."""

    def __init__(self, root: str) -> None:
        self.root = root

    def path(self, interface_id: InterfaceId, bitstream_id: BitstreamId | None) -> str:
        """Where a bitstream is expected; None: the blank one."""
        if bitstream_id is None:
            return self.blank_path(interface_id)
        ending = "aocx" if is_aocx(bitstream_id) else "gbs"
        return os.path.join(self.root, interface_id, f"{bitstream_id}.{ending}")

    def blank_path(self, interface_id: InterfaceId) -> str:
        """Where the blank bitstream of an interface id is expected."""
        return os.path.join(self.root, interface_id, f"{BLANK}.gbs")

    def relative(self, path: str) -> str:
        """A file's path from the root."""
        return os.path.relpath(path, self.root)

    def check(self, interface_id: InterfaceId, bitstream_id: BitstreamId | None) -> str:
        """Check that a bitstream is what its path says; returns its path.

        Nothing of it stays in memory, and who may write it is not asked.

        Args:
            interface_id: of the cards.
            bitstream_id: its name; None: the blank bitstream.

        Raises:
            BitstreamNotFoundError: there is none; the message names the path.
            BitstreamError: the file cannot be used, or is not what its name says.
        """
        path = self.path(interface_id, bitstream_id)
        try:
            with open_file(path, inside=self.root) as opened:
                _check_file(opened, path, interface_id, bitstream_id)
        except (FileNotFoundError, NotADirectoryError):
            self.not_found(path, interface_id)
        return path

    def list(self, *, read: bool = True) -> tuple[StoreEntry, ...]:
        """Everything that is, or seems meant to be, a bitstream; in order of path.

        Of GBS files only headers are read, and of none anything if not `read`. Directories and
        files of other names are not the store's business.

        Raises:
            BitstreamNotFoundError: there is no store.
            BitstreamError: its directory cannot be read.
        """
        try:
            names = sorted(os.listdir(self.root))
        except (FileNotFoundError, NotADirectoryError):
            raise _no_store(self.root) from None
        except OSError as error:
            raise BitstreamError(
                f"{self.root}: the store cannot be read: {error.strerror}",
                hint="check the directory's permissions",
            ) from error
        return tuple(
            entry
            for name in names
            if os.path.isdir(os.path.join(self.root, name))
            for entry in self._directory(name, read=read)
        )

    def not_found(self, path: str, interface_id: InterfaceId) -> NoReturn:
        """Raise the `BitstreamNotFoundError` that says how much of a path there is."""
        directory = os.path.join(self.root, interface_id)
        if not os.path.isdir(self.root):
            raise _no_store(self.root) from None
        if not os.path.isdir(directory):
            raise BitstreamNotFoundError(
                f"no bitstream {path}: the store has no directory for interface id {interface_id}",
                hint=f"check the interface id, or put the bitstream there: {INSTALL}",
            ) from None
        raise BitstreamNotFoundError(
            f"no bitstream {path}",
            hint=f"check the bitstream id, or put the bitstream there: {INSTALL}",
        ) from None

    def _directory(self, name: str, *, read: bool) -> tuple[StoreEntry, ...]:
        path = os.path.join(self.root, name)
        try:
            interface_id = parse_interface_id(name)
        except ValueError:
            return ()
        if interface_id != name:
            problem = BitstreamError(
                f"{path}: interface ids are written as 32 lower-case hex digits without dashes",
                hint=f"rename the directory to {interface_id}",
            )
            return (StoreEntry(path=path, problem=problem),)
        try:
            files = sorted(os.listdir(path))
        except OSError as error:
            problem = BitstreamError(f"{path}: cannot be read: {error.strerror}")
            return (StoreEntry(path=path, interface_id=interface_id, problem=problem),)
        return tuple(
            self._entry(interface_id, file, read=read)
            for file in files
            if file.endswith((".gbs", ".aocx")) and not file.startswith(".")
        )

    def _entry(self, interface_id: InterfaceId, file: str, *, read: bool) -> StoreEntry:
        path = os.path.join(self.root, interface_id, file)
        bitstream_id: BitstreamId | None = None
        metadata: Metadata | None = None
        size: int | None = None
        problem: FpgaPluginError | None = None
        try:
            _, bitstream_id = ids_of(path)
            if read:
                with open_file(path, inside=self.root) as opened:
                    size = opened.size  # told of a file that is not what its name says, too
                    metadata = _check_file(opened, path, interface_id, bitstream_id)
        except BitstreamError as error:
            problem = error
        except OSError:
            problem = BitstreamError(f"{path}: went away while it was read")
        return StoreEntry(
            path=path,
            interface_id=interface_id,
            bitstream_id=bitstream_id,
            blank=file == f"{BLANK}.gbs",
            size=size,
            metadata=metadata,
            problem=problem,
        )


def ids_of(path: str) -> tuple[InterfaceId, BitstreamId | None]:
    """The ids in a file's path; no bitstream id for a blank bitstream.

    Raises:
        BitstreamError: the file's name, or its directory's, is none of a store.
    """
    directory, file = os.path.split(path)
    name = os.path.basename(directory)
    stem, ending = os.path.splitext(file)
    try:
        interface_id = parse_interface_id(name)
    except ValueError as error:
        raise BitstreamError(f"{path}: the directory's name {quote(name)} is {error}") from None
    if file == f"{BLANK}.gbs":
        return interface_id, None
    bitstream_id = _name(path, stem)
    if (ending == ".aocx") != is_aocx(bitstream_id):
        raise BitstreamError(
            f"{path}: {len(bitstream_id)} hex digits do not name a file that ends in {ending}",
            hint=f"{INSTALL}, names files as the store expects them",
        )
    return interface_id, bitstream_id


def is_aocx(bitstream_id: BitstreamId | None) -> bool:
    """Whether an id names an AOCX file."""
    return bitstream_id is not None and len(bitstream_id) == AOCX_ID_DIGITS


def check_contents(
    file: ByteRange,
    interface_id: InterfaceId,
    bitstream_id: BitstreamId | None,
    *,
    unpack: Begin | None = None,
) -> tuple[Header, int]:
    """Check that a file is of the format that its path says, and has the ids that its path says.

    Args:
        file: its bytes; of a GBS file only the header is read, an AOCX file is unpacked.
        interface_id: the name of its directory.
        bitstream_id: its own name; None for a blank bitstream.
        unpack: takes the GBS file that is packed in an AOCX file (`read_aocx`); None: it is only
            checked.

    Returns:
        The header of the GBS file; and the bytes of that if it was packed, else 0.

    Raises:
        BitstreamError: it is something else.
    """
    head = file.read(0, HEAD_BYTES)
    if not is_aocx(bitstream_id):
        header = parse_header(head, size=file.size, where=file.where)
        check_names(file.where, header.metadata, interface_id, bitstream_id)
        return header, 0
    if kind_of(head) is Kind.GBS:
        parse_header(head, size=file.size, where=file.where)
        raise BitstreamError(
            f"{file.where}: holds GBS, and its name is that of AOCX",
            hint=f"{INSTALL}, names files as the store expects them",
        )
    aocx = read_aocx(file, where=file.where, begin=unpack)
    check_names(file.where, aocx.header.metadata, interface_id, bitstream_id, claimed=aocx.hash)
    return aocx.header, aocx.gbs_bytes


def check_names(
    path: str,
    metadata: Metadata,
    interface_id: InterfaceId,
    bitstream_id: BitstreamId | None,
    *,
    claimed: BitstreamId | None = None,
) -> None:
    """Check that a file is what its path says.

    Args:
        path: the file, for the message.
        metadata: what it says of itself.
        interface_id: the name of its directory.
        bitstream_id: its own name; None for a blank bitstream, which may have any AFU id.
        claimed: what names it by its content, where that is not its AFU id (AOCX).

    Raises:
        BitstreamError: it is something else.
    """
    if metadata.interface_id != interface_id:
        raise BitstreamError(
            f"{path}: was built for interface id {metadata.interface_id}, not {interface_id}",
            hint=f"{INSTALL}, puts a file where it belongs",
        )
    if is_aocx(claimed) and claimed != bitstream_id:
        raise BitstreamError(
            f"{path}: has the hash {claimed}, not the one of its name",
            hint=f"{INSTALL}, puts a file where it belongs",
        )
    if not is_aocx(claimed) and bitstream_id not in {None, BitstreamId(metadata.afu_id)}:
        raise BitstreamError(
            f"{path}: has the AFU id {metadata.afu_id}, not the one of its name",
            hint=f"{INSTALL}, puts a file where it belongs",
        )


def _check_file(
    opened: TrustedFile, path: str, interface_id: InterfaceId, bitstream_id: BitstreamId | None
) -> Metadata:
    file = ByteRange.of_file(opened.file.fileno(), opened.size, path)
    header, _ = check_contents(file, interface_id, bitstream_id)
    if is_aocx(bitstream_id):
        opened.check_read(opened.size)
    return header.metadata


def _name(path: str, stem: str) -> BitstreamId:
    try:
        bitstream_id = parse_bitstream_id(stem)
    except ValueError as error:
        raise BitstreamError(
            f"{path}: the name {quote(stem)} is {error}",
            hint=f"{INSTALL}, names files as the store expects them",
        ) from None
    if bitstream_id != stem:
        raise BitstreamError(
            f"{path}: bitstream ids are written as lower-case hex digits without dashes",
            hint=f"rename the file to {bitstream_id}{os.path.splitext(path)[1]}",
        )
    return bitstream_id


def _no_store(root: str) -> BitstreamNotFoundError:
    return BitstreamNotFoundError(
        f"no bitstream store at {root}",
        hint="mount it there, or set FPGA_PLUGIN_BITSTREAM_DIR to where it is",
    )
