"""The identifiers of FPGAs that travel through the plugin, parsed once at the edge.

`str` is not a type for an id: what a pod, kubelet or a file wrote becomes one of these types, or a
`ValueError` that says what is wrong with it (invariant 11 in docs/architecture.md). Everything
behind the edge may put such a value into a path, a sysfs write or a log line.
"""

import base64
import enum
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NewType

CardId = NewType("CardId", str)
"""A card: the PCI address of the function that manages it, `-` for `:` (`0000-3b-00.0`)."""

RegionId = NewType("RegionId", str)
"""A region: `<card id>-p<port id>` (`0000-3b-00.0-p0`)."""

DeviceId = NewType("DeviceId", str)
"""What kubelet calls a device: a card id or a region id."""

InterfaceId = NewType("InterfaceId", str)
"""128-bit id of a card's static part, 32 lower-case hex digits."""

AfuId = NewType("AfuId", str)
"""128-bit id of an accelerator, 32 lower-case hex digits."""

BitstreamId = NewType("BitstreamId", str)
"""Names a file in the store: 32 hex digits (GBS: the AFU id) or 40 (AOCX: its hash)."""

Alias = NewType("Alias", str)
"""What people call a bitstream, or an interface id: a DNS label that looks like no id."""

_PCI = re.compile(r"([0-9a-f]{4,8})[:-]([0-9a-f]{2})[:-]([0-1][0-9a-f])\.([0-7])", re.ASCII)
_REGION = re.compile(r"(.+)-p(0|[1-9][0-9]{0,4})", re.ASCII)
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.ASCII)
_HEX32 = re.compile(r"[0-9a-f]{32}", re.ASCII)
_ALIAS = re.compile(r"(?=.*[g-z])[a-z0-9]([a-z0-9-]{0,29}[a-z0-9])?", re.ASCII)
_HEX40 = re.compile(r"[0-9a-f]{40}", re.ASCII)


class ResourceKind(enum.Enum):
    """What each device of a resource is; the values are the words that operators write."""

    REGION = "region"
    WHOLE = "whole"
    AF = "af"
    """A region that is handed over with the accelerator function that is on it."""

    @property
    def stem(self) -> str:
        """How the names of such resources begin, after the `/`."""
        return "fpga" if self is ResourceKind.WHOLE else self.value


_KINDS: Final = {kind.stem: kind for kind in (ResourceKind.REGION, ResourceKind.WHOLE)}
_DOMAIN: Final = r"([a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?)"
_RESOURCE = re.compile(rf"{_DOMAIN}/({'|'.join(_KINDS)})-([0-9a-f]{{32}})", re.ASCII)
_ALIASED = re.compile(rf"{_DOMAIN}/({'|'.join(_KINDS)})-([a-z0-9-]{{1,31}})", re.ASCII)
_SHELL = re.compile(r"amd\.com/(xilinx_[A-Za-z0-9_.-]{1,55}[A-Za-z0-9])", re.ASCII)
_FUNCTION = re.compile(
    rf"{_DOMAIN}/af-[0-9a-f]{{3}}\.[0-9a-f]{{3}}\.([A-Za-z0-9_-]{{43}})", re.ASCII
)


def device_variable(region: RegionId) -> str:
    """`FPGA_DEVICE_<DEVICE ID>`: the variable in which a container finds its region's node."""
    return f"FPGA_DEVICE_{_variable(region)}"


def functions_variable(region: RegionId) -> str:
    """`FPGA_FUNCTIONS_<DEVICE ID>`: the variable with the PCI addresses of a slot's functions."""
    return f"FPGA_FUNCTIONS_{_variable(region)}"


def _variable(region: RegionId) -> str:
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in region.upper())


def numbered_variable(number: int) -> str:
    """`FPGA_DEVICE_<n>`: a container's n-th region of one resource, from 1."""
    return f"FPGA_DEVICE_{number}"


@dataclass(frozen=True, order=True, slots=True)
class PciAddress:
    """A PCI function; orders as the kernel numbers them."""

    domain: int
    bus: int
    device: int
    function: int

    @classmethod
    def parse(cls, text: str) -> "PciAddress":
        """Read `0000:3b:00.0`, or the same with `-` for `:`, in any case.

        Raises:
            ValueError: `text` is no PCI address.
        """
        if not (match := _PCI.fullmatch(text.lower())):
            msg = "not a PCI address (such as 0000:3b:00.0)"
            raise ValueError(msg)
        return cls(*(int(part, 16) for part in match.groups()))

    def __str__(self) -> str:
        return f"{self.domain:04x}:{self.bus:02x}:{self.device:02x}.{self.function:x}"

    @property
    def card_id(self) -> CardId:
        """The id of the card that this function manages."""
        return CardId(str(self).replace(":", "-"))


@dataclass(frozen=True, slots=True)
class Resource:
    """What the name of one of this plugin's resources says.

    Attributes:
        domain: `fpga.intel.com`, or what the operator calls it.
        kind: what each of its devices is.
        interface_id: of the cards.
        afu_id: of the function that is on the regions; None but for AF.
        alias: what the name has in place of the interface id; None: the id.
        shell: what AMD's plugin calls such cards: the shell's name and time stamp, in place of kind
            and interface id; empty: the name has these.
    """

    domain: str
    kind: ResourceKind
    interface_id: InterfaceId
    afu_id: AfuId | None = None
    alias: Alias | None = None
    shell: str = ""

    @classmethod
    def parse(cls, name: str) -> "Resource":
        """Like `known_resource`.

        Raises:
            ValueError: `name` is none that this plugin gives.
        """
        if (resource := known_resource(name)) is None:
            msg = "none of region-<interface id>, fpga-<interface id> and af-... of a domain"
            raise ValueError(msg)
        return resource

    @property
    def name(self) -> str:
        """`<domain>/region-<interface id>`, `<domain>/fpga-<interface id>` or `<domain>/af-...`.

        In the first two an alias may stand in place of the id. The last is the Intel plugin's
        (pkg/fpga/devtypes.go, GetAfuDevType): three digits of each id for people, and both ids in
        base64 of the URL alphabet. A resource's name has room for 63 characters, not for two ids in
        hex. A `shell` is a name by itself.
        """
        if self.shell:
            return f"{self.domain}/{self.shell}"
        if self.afu_id is None:
            return f"{self.domain}/{self.kind.stem}-{self.alias or self.interface_id}"
        both = base64.urlsafe_b64encode(bytes.fromhex(self.interface_id + self.afu_id))
        short = f"{self.interface_id[:3]}.{self.afu_id[:3]}"
        return f"{self.domain}/af-{short}.{both.decode().rstrip('=')}"

    @property
    def variable(self) -> str:
        """`FPGA_DEVICES_<KIND>_<8>`: where a container finds the nodes of all that it has of it.

        Of the interface id there are the first 8 digits. A container with two resources gets two
        answers, each numbered from 1, so that `numbered_variable` says nothing there.
        """
        return f"FPGA_DEVICES_{self.kind.stem.upper()}_{self.interface_id[:8].upper()}"


@functools.lru_cache(maxsize=4096)
def known_resource(name: str) -> Resource | None:
    """What a resource is a resource of, if it is called as this plugin calls its own.

    Names in its domain may be another plugin's: they are None.
    """
    if match := _RESOURCE.fullmatch(name):
        return Resource(match[1], _KINDS[match[2]], InterfaceId(match[3]))
    if not (match := _FUNCTION.fullmatch(name)):
        return None
    both = base64.urlsafe_b64decode(match[2] + "=").hex()
    resource = Resource(match[1], ResourceKind.AF, InterfaceId(both[:32]), AfuId(both[32:]))
    return resource if resource.name == name else None  # the digits say so too


@dataclass(frozen=True, slots=True)
class AliasedName:
    """What the name of a resource says that does not have the interface id.

    Which interface id it stands for, the ledger knows (`ledger.alias_bindings`).

    Attributes:
        domain: as of `Resource`.
        kind: REGION or WHOLE.
        alias: of the interface id; None where a shell names the resource.
        shell: as of `Resource`.
    """

    domain: str
    kind: ResourceKind
    alias: Alias | None
    shell: str = ""

    def of(self, interface_id: InterfaceId) -> Resource:
        """The resource, if the name stands for this interface id."""
        return Resource(self.domain, self.kind, interface_id, alias=self.alias, shell=self.shell)


@functools.lru_cache(maxsize=4096)
def aliased_name(name: str) -> AliasedName | None:
    """The parts of `<domain>/region-<alias>`, `<domain>/fpga-<alias>` and AMD's; None: it is none.

    AMD's plugin has one name for each shell, `amd.com/<shell>-<time stamp>`. A name may be another
    plugin's, as with `known_resource`.
    """
    if match := _SHELL.fullmatch(name):
        return AliasedName("amd.com", ResourceKind.REGION, None, shell=match[1])
    if not (match := _ALIASED.fullmatch(name)):
        return None
    try:
        return AliasedName(match[1], _KINDS[match[2]], parse_alias(match[3]))
    except ValueError:
        return None


def kind_of(resource: str) -> ResourceKind | None:
    """What each device of a resource is; None: it is not called as this plugin calls its own."""
    known = known_resource(resource) or aliased_name(resource)
    return None if known is None else known.kind


def shell_name(shell: str, stamp: str) -> str:
    """What AMD's plugin calls the resource of a card; empty where it would be no such name.

    It reads both in sysfs, and writes a `-` between them (FPGA_as_a_Service k8s-device-plugin,
    server.go). Kubernetes has room for 63 letters, digits and `-_.` after the domain.
    """
    name = f"amd.com/{shell}-{stamp}"
    return name if _SHELL.fullmatch(name) else ""


_AMDS = re.compile(r"(amd\.com/|xilinx\.com/fpga-)xilinx_[A-Za-z0-9._-]{1,56}", re.ASCII)
"""A shell's name and time stamp, by AMD's plugin and by its versions under Xilinx's name."""


def ours(prefix: str) -> Callable[[str], bool]:
    """Whether devices of a resource may be devices of this node's cards.

    So is every resource in the domain `prefix` (`fpga.intel.com`), whichever plugin serves it;
    every one that is called as this plugin calls its own, in any domain (pods keep what they had
    when the operator changed the prefix, and kubelet keeps its name); and those by which AMD's own
    plugin gives out cards.
    """
    return lambda resource: (
        resource.startswith(f"{prefix}/")
        or kind_of(resource) is not None
        or _AMDS.fullmatch(resource) is not None
    )


def region_id(card: CardId, port_id: int) -> RegionId:
    """The id of the region behind a card's port."""
    return RegionId(f"{card}-p{port_id}")


@functools.lru_cache(maxsize=4096)
def device_order(device: DeviceId | CardId | RegionId) -> tuple[PciAddress, int]:
    """Sort key of devices: PCI address, then port id; a whole card comes before its regions.

    Raises:
        ValueError: `device` was not made by this plugin.
    """
    if match := _REGION.fullmatch(device):
        return PciAddress.parse(match[1]), int(match[2])
    return PciAddress.parse(device), -1


@functools.lru_cache(maxsize=4096)
def parse_device_id(text: str) -> DeviceId:
    """A device id in the one form in which this plugin writes it.

    Raises:
        ValueError: `text` is neither a card id nor a region id.
    """
    address, port = device_order(DeviceId(text))
    canonical = DeviceId(address.card_id if port < 0 else region_id(address.card_id, port))
    if canonical != text:
        msg = "not a device id (such as 0000-3b-00.0 or 0000-3b-00.0-p0)"
        raise ValueError(msg)
    return canonical


def is_device_id(text: str) -> bool:
    """Whether this plugin may have written a device's id."""
    try:
        parse_device_id(text)
    except ValueError:
        return False
    return True


def parse_hex128(text: str) -> str:
    """128 bits as 32 lower-case hex digits; takes any case, and the 8-4-4-4-12 form.

    Raises:
        ValueError: `text` is something else.
    """
    lower = text.lower()
    if _UUID.fullmatch(lower):
        return lower.replace("-", "")
    if not _HEX32.fullmatch(lower):
        msg = "not 32 hex digits, nor the 8-4-4-4-12 form"
        raise ValueError(msg)
    return lower


def parse_interface_id(text: str) -> InterfaceId:
    """Like `parse_hex128`, for an interface id."""
    return InterfaceId(parse_hex128(text))


def parse_afu_id(text: str) -> AfuId:
    """Like `parse_hex128`, for an AFU id."""
    return AfuId(parse_hex128(text))


def parse_bitstream_id(text: str) -> BitstreamId:
    """An AFU id in any of its forms (GBS), or 40 hex digits (AOCX).

    Raises:
        ValueError: `text` is neither.
    """
    lower = text.lower()
    if _HEX40.fullmatch(lower):
        return BitstreamId(lower)
    try:
        return BitstreamId(parse_hex128(lower))
    except ValueError:
        msg = "not 32 hex digits, nor the 8-4-4-4-12 form, nor 40 hex digits"
        raise ValueError(msg) from None


def parse_alias(text: str) -> Alias:
    """A name that people gave a bitstream or an interface id.

    Shorter than any id and with a letter that none has, so that no misspelt id is a name. `blank`
    means something else in the store and in policies.

    Raises:
        ValueError: `text` is no such name.
    """
    if not _ALIAS.fullmatch(text) or text == "blank":
        msg = "no name (at most 31 of a-z, 0-9 and '-', one of g-z among them; not 'blank')"
        raise ValueError(msg)
    return Alias(text)


def with_name(of: str, name: str) -> str:
    """An id with its name, if it has one: who reads it may have neither store nor manifest."""
    return f"{name} ({of})" if name else of
