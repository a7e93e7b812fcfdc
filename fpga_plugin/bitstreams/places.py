"""Places in a store: a file's path says what has to be in it.

    <interface id>/<bitstream id>.gbs      an accelerator, named by its AFU id
    <interface id>/<bitstream id>.aocx     another, named by its hash
    <interface id>/<bitstream id>.xclbin   one for cards with XRT's driver, named by its uuid
    <interface id>/blank.gbs               the null image that deprograms a region
    <interface id>/blank.xclbin            the same for cards with XRT's driver

A path is a promise that the file's reader checks, because the kernel programs an image for
another static part without a word. The ids' types guarantee that they cannot lead out of the store
(`fpga_plugin.ids`). Which ending an id has depends on the card: files that its driver cannot read
do not count as its bitstreams.
"""

import os
from dataclasses import dataclass

from fpga_plugin.bitstreams.byte_range import ByteRange
from fpga_plugin.bitstreams.contents import Begin, Contents, FileKind
from fpga_plugin.bitstreams.kinds import BLANK, KINDS, kind_of
from fpga_plugin.errors import BitstreamError, BitstreamNotFoundError, quote
from fpga_plugin.hardware.image import Image
from fpga_plugin.ids import BitstreamId, InterfaceId, parse_bitstream_id, parse_interface_id

INSTALL = "`fpga-plugin bitstream install --dir STORE FILE`"
ADD = f"add the file to the store: {INSTALL}, then copy STORE to the node (docs/bitstreams.md)"
"""What to do about a file that is not there: nodes have no such program, and the pod reads only."""

ENDINGS = "|".join(kind.ending for kind in KINDS)
"""Of bitstreams' files, for regular expressions."""

_BLANKS = [f"{BLANK}.{kind.ending}" for kind in KINDS if kind.blank]


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a store a bitstream belongs.

    Attributes:
        interface_id: the name of its directory.
        bitstream_id: its own name; None: the blank bitstream, which may have any AFU id.
        kind: the format that the file has to have.
    """

    interface_id: InterfaceId
    bitstream_id: BitstreamId | None
    kind: FileKind

    @property
    def path(self) -> str:
        """From the store's root."""
        return f"{self.interface_id}/{self.bitstream_id or BLANK}.{self.kind.ending}"

    def check(self, contents: Contents, where: str) -> None:
        """Check that a file is what its path says.

        Args:
            contents: what it says of itself.
            where: the file, for the message.

        Raises:
            BitstreamError: it is something else.
        """
        if contents.interface_id != self.interface_id:
            raise BitstreamError(
                f"{where}: was built for interface id {contents.interface_id},"
                f" not {self.interface_id}",
                hint=f"{INSTALL} puts a file where it belongs",
            )
        self._check_kind(contents.kind, where)
        if self.bitstream_id not in {None, contents.bitstream_id}:
            raise BitstreamError(
                f"{where}: has the {self.kind.named_by} {contents.bitstream_id},"
                " not the one of its name",
                hint=f"{INSTALL} puts a file where it belongs",
            )

    def read(self, file: ByteRange, begin: Begin | None = None) -> Contents:
        """Read a file, and check that it is what this place says; as `kinds.read`.

        Raises:
            BitstreamError: it cannot be used, or is something else.
        """
        if (kind := kind_of(file)) is not None:
            self._check_kind(kind, file.where)
        contents = self.kind.read(file, begin)
        self.check(contents, file.where)
        return contents

    def _check_kind(self, kind: FileKind, where: str) -> None:
        if kind is not self.kind:
            raise BitstreamError(
                f"{where}: holds {kind}, and its name is that of {self.kind}",
                hint=f"{INSTALL} names files as the store expects them",
            )


def all_places(interface_id: InterfaceId, bitstream_id: BitstreamId | None) -> tuple[Place, ...]:
    """Where a bitstream may be, whatever the cards are.

    Args:
        interface_id: the directory's name.
        bitstream_id: its own; None: the blank bitstream.
    """
    return tuple(
        Place(interface_id, bitstream_id, kind)
        for kind in KINDS
        if (kind.blank if bitstream_id is None else kind.digits == len(bitstream_id))
    )


def place_for(
    interface_id: InterfaceId, bitstream_id: BitstreamId | None, takes: type[Image]
) -> Place:
    """Where a bitstream is for cards whose driver reads one kind of image.

    Args:
        interface_id: of the cards.
        bitstream_id: its name; None: the blank bitstream.
        takes: what the driver reads.

    Raises:
        BitstreamNotFoundError: no bitstream for such cards has a name of so many digits.
    """
    for place in all_places(interface_id, bitstream_id):
        if place.kind.makes is takes:
            return place
    raise BitstreamNotFoundError(
        f"no bitstream {bitstream_id} for cards of interface id {interface_id}: what their driver"
        " reads has no name of so many digits",
        hint=f"their driver reads {takes.files}",
    )


def find_place(relative: str) -> Place | None:
    """The place of a path from a store's root; None: no bitstream can be there."""
    try:
        place = place_of_path(relative)
    except BitstreamError:
        return None
    return place if place.path == relative else None


def is_blank(relative: str) -> bool:
    """Whether a path from a store's root is that of a blank bitstream."""
    return relative.rpartition("/")[2] in _BLANKS


def place_of_path(path: str) -> Place:
    """The place of any path that ends in a directory's and a file's name.

    Raises:
        BitstreamError: a store has no file or directory of that name.
    """
    directory, file = os.path.split(path)
    name = os.path.basename(directory)
    try:
        interface_id = parse_interface_id(name)
    except ValueError as error:
        raise BitstreamError(f"{path}: the directory's name {quote(name)} is {error}") from None
    stem, ending = os.path.splitext(file)
    try:
        bitstream_id = None if stem == BLANK else parse_bitstream_id(stem)
    except ValueError as error:
        raise BitstreamError(
            f"{path}: the name {quote(stem)} is {error}",
            hint=f"{INSTALL} names files as the store expects them",
        ) from None
    if bitstream_id not in {None, stem}:
        raise BitstreamError(
            f"{path}: bitstream ids are written as lower-case hex digits without dashes",
            hint=f"rename the file to {bitstream_id}{ending}",
        )
    for place in all_places(interface_id, bitstream_id):
        if ending == f".{place.kind.ending}":
            return place
    what = f"{len(stem)} hex digits do" if bitstream_id else "`blank` does"
    raise BitstreamError(
        f"{path}: {what} not name a file that ends in {ending}",
        hint=f"{INSTALL} names files as the store expects them",
    )
