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

from fpga_plugin.bitstream.files import open_file, read_gbs, read_header
from fpga_plugin.bitstream.formats import Contents, Kind, kind_of, read_packed
from fpga_plugin.bitstream.gbs import HEAD_BYTES, parse_header
from fpga_plugin.bitstream.metadata import Frequency, Metadata
from fpga_plugin.bitstream.span import Span
from fpga_plugin.errors import BitstreamError, BitstreamNotFoundError, FpgaPluginError, quote
from fpga_plugin.ids import (
    AfuId,
    BitstreamId,
    InterfaceId,
    parse_bitstream_id,
    parse_interface_id,
)

BLANK = "blank"
"""The name of a blank bitstream's file, without its ending."""

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
    """Reads bitstreams from a directory; never writes."""

    def __init__(self, root: str) -> None:
        self.root = root

    def path(self, interface_id: InterfaceId, bitstream_id: BitstreamId) -> str:
        """Where a bitstream is expected."""
        ending = "aocx" if len(bitstream_id) == AOCX_ID_DIGITS else "gbs"
        return os.path.join(self.root, interface_id, f"{bitstream_id}.{ending}")

    def blank_path(self, interface_id: InterfaceId) -> str:
        """Where the blank bitstream of an interface id is expected."""
        return os.path.join(self.root, interface_id, f"{BLANK}.gbs")

    def relative(self, path: str) -> str:
        """A file's path from the root."""
        return os.path.relpath(path, self.root)

    def load(self, interface_id: InterfaceId, bitstream_id: BitstreamId) -> Bitstream:
        """Read a bitstream.

        Raises:
            BitstreamNotFoundError: there is none; the message names the path.
            BitstreamError: the file cannot be used, or is not what its name says.
        """
        path = self.path(interface_id, bitstream_id)
        try:
            return self._read(path, interface_id, bitstream_id)
        except (FileNotFoundError, NotADirectoryError):
            self.not_found(path, interface_id)

    def blank(self, interface_id: InterfaceId) -> Bitstream | None:
        """Read the blank bitstream of an interface id; None when there is none.

        Raises:
            BitstreamError: the file cannot be used, or is for another interface id.
        """
        try:
            return self._read(self.blank_path(interface_id), interface_id, None)
        except (FileNotFoundError, NotADirectoryError):
            return None

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

    def _read(
        self, path: str, interface_id: InterfaceId, bitstream_id: BitstreamId | None
    ) -> Bitstream:
        contents = read_contents(path, bitstream_id, inside=self.root)
        return bitstream_of(path, contents, interface_id, bitstream_id)

    def not_found(self, path: str, interface_id: InterfaceId) -> NoReturn:
        """Raise the `BitstreamNotFoundError` that says how much of a path there is."""
        directory = os.path.join(self.root, interface_id)
        if not os.path.isdir(self.root):
            raise _no_store(self.root) from None
        if not os.path.isdir(directory):
            raise BitstreamNotFoundError(
                f"no bitstream {path}: the store has no directory for interface id {interface_id}",
                hint="check the interface id, or put the bitstream there with"
                " `fpga-plugin bitstream install`",
            ) from None
        raise BitstreamNotFoundError(
            f"no bitstream {path}",
            hint="check the bitstream id, or put the bitstream there with"
            " `fpga-plugin bitstream install`",
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
        blank = file == f"{BLANK}.gbs"
        bitstream_id = None
        metadata: Metadata | None = None
        claimed: BitstreamId | None = None
        size = None
        problem: FpgaPluginError | None = None
        try:
            _, bitstream_id = ids_of(path)
            if is_aocx(bitstream_id) and read:
                contents = read_contents(path, bitstream_id, inside=self.root, keep_image=False)
                metadata, size = contents.metadata, os.stat(path).st_size
                claimed = contents.bitstream_id
            elif read:
                header, size = read_header(path, inside=self.root)
                metadata, claimed = header.metadata, None
            if metadata is not None:
                check_names(path, metadata, interface_id, bitstream_id, claimed=claimed)
        except BitstreamError as error:
            problem, metadata = error, None
        except OSError:
            problem = BitstreamError(f"{path}: went away while it was read")
        return StoreEntry(
            path=path,
            interface_id=interface_id,
            bitstream_id=bitstream_id,
            blank=blank,
            size=size,
            metadata=metadata,
            problem=problem,
        )


def bitstream_of(
    path: str, contents: Contents, interface_id: InterfaceId, bitstream_id: BitstreamId | None
) -> Bitstream:
    """What a file has for the driver.

    Raises:
        BitstreamError: it is not what its path says.
    """
    metadata = contents.metadata
    check_names(path, metadata, interface_id, bitstream_id, claimed=contents.bitstream_id)
    return Bitstream(
        path=path,
        interface_id=interface_id,
        bitstream_id=bitstream_id or BitstreamId(metadata.afu_id),
        afu_id=metadata.afu_id,
        image=contents.image,
        clock_frequency_high=metadata.clock_frequency_high,
        clock_frequency_low=metadata.clock_frequency_low,
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
            hint="`fpga-plugin bitstream install` names files as the store expects them",
        )
    return interface_id, bitstream_id


def is_aocx(bitstream_id: BitstreamId | None) -> bool:
    """Whether an id names an AOCX file."""
    return bitstream_id is not None and len(bitstream_id) == AOCX_ID_DIGITS


def read_contents(
    path: str,
    bitstream_id: BitstreamId | None,
    *,
    inside: str | None = None,
    keep_image: bool = True,
) -> Contents:
    """Read a file as what its name says that it is; only the image is in memory as a whole.

    Args:
        path: the file.
        bitstream_id: by its name.
        inside: a directory that it must lie in, all links followed.
        keep_image: False: an AOCX file's is unpacked and checked only.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such file.
        BitstreamError: it cannot be used.
    """
    if not is_aocx(bitstream_id):
        gbs = read_gbs(path, inside=inside)
        return Contents(Kind.GBS, BitstreamId(gbs.metadata.afu_id), gbs.metadata, gbs.image)
    with open_file(path, inside=inside) as original:
        file = Span.of_file(original.file.fileno(), original.size, path)
        check_kind(file, bitstream_id, where=path)
        contents = read_packed(file, where=path, keep_image=keep_image)
        original.check_read(original.size)
    return contents


def check_kind(file: Span, bitstream_id: BitstreamId | None, *, where: str) -> None:
    """Check that a file is of the format that its name says, or of none that is known.

    Raises:
        BitstreamError: it is a GBS file, and its name is that of an AOCX file.
    """
    if not is_aocx(bitstream_id):
        return  # whoever reads a GBS file's header says what else it is
    head = file.read(0, HEAD_BYTES)
    if kind_of(head) is Kind.GBS:
        parse_header(head, size=file.size, where=where)
        raise BitstreamError(
            f"{where}: holds GBS, and its name is that of AOCX",
            hint="`fpga-plugin bitstream install` names files as the store expects them",
        )


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
            hint="`fpga-plugin bitstream install` puts a file where it belongs",
        )
    if is_aocx(claimed) and claimed != bitstream_id:
        raise BitstreamError(
            f"{path}: has the hash {claimed}, not the one of its name",
            hint="`fpga-plugin bitstream install` puts a file where it belongs",
        )
    if not is_aocx(claimed) and bitstream_id not in {None, BitstreamId(metadata.afu_id)}:
        raise BitstreamError(
            f"{path}: has the AFU id {metadata.afu_id}, not the one of its name",
            hint="`fpga-plugin bitstream install` puts a file where it belongs",
        )


def _name(path: str, stem: str) -> BitstreamId:
    try:
        bitstream_id = parse_bitstream_id(stem)
    except ValueError as error:
        raise BitstreamError(
            f"{path}: the name {quote(stem)} is {error}",
            hint="`fpga-plugin bitstream install` names files as the store expects them",
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
