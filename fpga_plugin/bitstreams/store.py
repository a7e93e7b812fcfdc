"""The store: a directory of bitstreams whose names say what is in them (`bitstreams.places`).

Links inside it (ConfigMaps) are followed, links that lead out of it are refused.

Nothing is kept between calls. All of it blocks: call it from a thread.
"""

import os
import re
from dataclasses import dataclass
from typing import NoReturn

from fpga_plugin.bitstreams.byte_range import ByteRange
from fpga_plugin.bitstreams.contents import Contents
from fpga_plugin.bitstreams.files import Content, Progress, digest_of, no_progress, open_file
from fpga_plugin.bitstreams.gbs_metadata import Frequency
from fpga_plugin.bitstreams.kinds import read
from fpga_plugin.bitstreams.places import (
    ADD,
    ENDINGS,
    Place,
    is_blank,
    place_of_path,
)
from fpga_plugin.errors import BitstreamError, BitstreamNotFoundError, FpgaPluginError
from fpga_plugin.hardware.image import Image
from fpga_plugin.host.trusted_files import TrustedFile
from fpga_plugin.ids import AfuId, BitstreamId, InterfaceId, parse_interface_id

_BITSTREAM = re.compile(rf"[^.].*\.({ENDINGS})", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Bitstream:
    """A bitstream in memory, ready to be programmed.

    Attributes:
        path: where it was read.
        interface_id: the cards that it fits.
        bitstream_id: its name in the store; for a blank bitstream its AFU id.
        afu_id: what the region must read after programming.
        image: what is programmed.
        clock_frequency_high: the user clock that it was built for.
        clock_frequency_low: its half-rate clock.
    """

    path: str
    interface_id: InterfaceId
    bitstream_id: BitstreamId
    afu_id: AfuId
    image: Image
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
        contents: what it says of itself; None where there is a problem.
        problem: why the plugin would not use it.
    """

    path: str
    interface_id: InterfaceId | None = None
    bitstream_id: BitstreamId | None = None
    blank: bool = False
    size: int | None = None
    contents: Contents | None = None
    problem: FpgaPluginError | None = None


class Store:
    """Where bitstreams are, and what is there; reads only, and never an image to program it."""

    def __init__(self, root: str) -> None:
        self.root = root

    def at(self, place: Place) -> str:
        """Where the file of a place is expected."""
        return os.path.join(self.root, place.path)

    def relative(self, path: str) -> str:
        """A file's path from the root."""
        return os.path.relpath(path, self.root)

    def check(self, place: Place) -> str:
        """Check that a bitstream is what its path says; returns its path.

        Nothing of it stays in memory, and its permissions are not checked.

        Raises:
            BitstreamNotFoundError: there is none; the message names the path.
            BitstreamError: the file cannot be used, or is not what its name says.
        """
        path = self.at(place)
        try:
            with open_file(path, inside=self.root) as opened:
                _read(opened, place)
        except BitstreamNotFoundError:
            self.not_found(place)
        return path

    def list(self, *, read: bool = True) -> tuple[StoreEntry, ...]:
        """Everything that is, or seems meant to be, a bitstream; in order of path.

        Of a GBS file only the header is read, of an xclbin only the tables, and of none anything if
        not `read`. Directories and files of other names are not the store's business.

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

    def not_found(self, place: Place) -> NoReturn:
        """Raise the `BitstreamNotFoundError` that says how much of a path there is."""
        path = self.at(place)
        if not os.path.isdir(self.root):
            raise _no_store(self.root) from None
        which, more = "bitstream id", ""
        if not os.path.isdir(os.path.dirname(path)):
            which = "interface id"
            more = f": the store has no directory for interface id {place.interface_id}"
        raise BitstreamNotFoundError(
            f"no bitstream {path}{more}", hint=f"check the {which}, or {ADD}"
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
            if _BITSTREAM.fullmatch(file)
        )

    def _entry(self, interface_id: InterfaceId, file: str, *, read: bool) -> StoreEntry:
        path = os.path.join(self.root, interface_id, file)
        place = contents = size = problem = None
        try:
            place = place_of_path(path)
            if read:
                with open_file(path, inside=self.root) as opened:
                    size = opened.size  # told of a file that is not what its name says, too
                    contents = _read(opened, place)
        except BitstreamError as error:
            problem = error
        except (OSError, BitstreamNotFoundError):
            problem = BitstreamError(f"{path}: went away while it was read")
        return StoreEntry(
            path=path,
            interface_id=interface_id,
            bitstream_id=None if place is None else place.bitstream_id,
            blank=is_blank(path),
            size=size,
            contents=contents,
            problem=problem,
        )


def look(path: str, progress: Progress = no_progress) -> tuple[Contents, Content]:
    """What any bitstream file says of itself, and its digest; it is not held in memory.

    Raises:
        BitstreamNotFoundError: there is no such file.
        BitstreamError: it cannot be used.
    """
    check_no_directory(path)
    with open_file(path, inside=None) as opened:
        contents = read(ByteRange.of_file(opened.file.fileno(), opened.size, path))
        return contents, digest_of(opened, progress=progress)


def check_no_directory(path: str) -> None:
    """Refuse a directory where a file is asked for: its reader may mean a store.

    Raises:
        BitstreamError: it is a directory.
    """
    if os.path.isdir(path):
        raise BitstreamError(
            f"{path}: a directory, not a regular file",
            hint=f"name a file in it; `fpga-plugin bitstream list --dir {path}` lists a store",
        )


def _read(opened: TrustedFile, place: Place) -> Contents:
    file = ByteRange.of_file(opened.file.fileno(), opened.size, opened.path)
    contents = place.read(file)
    opened.check_read(opened.size)
    return contents


def _no_store(root: str) -> BitstreamNotFoundError:
    return BitstreamNotFoundError(
        f"no bitstream store at {root}",
        hint="mount it there, or set FPGA_PLUGIN_BITSTREAM_DIR to where it is",
    )
