"""The values that settings take, and how their text is read.

A parser gets one variable's text and returns a typed value, or raises a `ValueError` that says what
is wrong with it. It never quotes the text: `load_settings` does that, once, for all of them.
"""

import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import NamedTuple, TypeVar

from fpga_plugin.ids import CardId, InterfaceId, PciAddress, Resource, parse_interface_id

E = TypeVar("E", bound=Enum)

MAX_VALUE = 8192
"""Characters that any value may have; a list of 500 PCI addresses fits."""

MAX_PATH = 1024
"""Characters of a path; what the plugin appends stays below the kernel's PATH_MAX of 4096 bytes."""

MAX_SIMULATED_CARDS = 4096
MAX_SIMULATED_REGIONS = 64

DEFAULT_INTERFACE_ID = InterfaceId("ce48969398f05f33946d560708be108a")
"""The interface id of the KEP's example, of simulated cards and of the sample store."""

_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*", re.ASCII)
_DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)
_SIZE = re.compile(r"([0-9]{1,15})(Ki|Mi|Gi|Ti)?", re.ASCII)
_ADDRESS = re.compile(r"(\[(?P<six>[^\[\]]*)\]|(?P<host>[^\[\]:]*)):(?P<port>[0-9]{1,5})", re.ASCII)
_EVERY = "*"
_ADDED_TO = re.compile(
    rf"({_LABEL}(\.{_LABEL})*/)?(region|fpga|af)-[A-Za-z0-9._-]{{1,63}}", re.ASCII
)
_KIND = r"[A-Za-z]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_CDI_DEVICE = re.compile(  # container-device-interface v1.1, pkg/parser
    rf"(?P<vendor>{_KIND})/(?P<class>{_KIND})=[A-Za-z0-9]([A-Za-z0-9_.:-]{{0,125}}[A-Za-z0-9])?",
    re.ASCII,
)
_GROUP = re.compile(r"([0-9]{1,6})x([0-9]{1,6})(?P<kinds>(?:\+[^+@]*)*)(?P<id>@.*)?", re.ASCII)


class Advertise(Enum):
    """Which resources of a card are registered."""

    BOTH = "both"
    REGION = "region"
    WHOLE = "whole"
    AF = "af"
    """Its regions, by the accelerator function that is on each; nothing is programmed."""


class BackendKind(Enum):
    """Which hardware is driven; AUTO never means simulated cards."""

    AUTO = "auto"
    DFL = "dfl"
    XRT = "xrt"
    SIMULATED = "simulated"


class ScrubPolicy(Enum):
    """What happens to a region that has no blank bitstream."""

    REQUIRED = "required"
    BEST_EFFORT = "best-effort"


class UnknownVariables(Enum):
    """What happens to a container that has an FPGA and a variable FPGA_* without meaning."""

    WARN = "warn"
    REFUSE = "refuse"


class RecoveryPolicy(Enum):
    """What the plugin may do about a port that a failed PR has poisoned."""

    NONE = "none"
    REBIND = "rebind"


class Exposure(Enum):
    """Who is given a card on which an earlier tenant's data, or the host's memory, is exposed."""

    ALLOW = "allow"
    REFUSE_REGIONS = "refuse-regions"
    REFUSE = "refuse"


class ServedApi(Enum):
    """By which of kubelet's APIs pods get devices."""

    DEVICE_PLUGIN = "device-plugin"
    DRA = "dra"


class TrustMode(Enum):
    """What a bitstream needs before it is programmed."""

    ANY = "any"
    DIGEST = "digest"
    SIGNED = "signed"


class SandboxMode(Enum):
    """Whether the process gives up the rights that it does not need."""

    AUTO = "auto"
    OFF = "off"


class LogLevel(Enum):
    """The least serious event that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(Enum):
    """JSON for machines, console for people; one line an event either way."""

    JSON = "json"
    CONSOLE = "console"


@dataclass(frozen=True, slots=True)
class CardSelection:
    """Which cards the plugin serves; it does not touch the others.

    Attributes:
        only: the cards named; None: all.
        excluded: cards that are left out.
    """

    only: frozenset[CardId] | None = None
    excluded: frozenset[CardId] = frozenset()

    def selects(self, card: CardId) -> bool:
        """Whether the plugin serves this card."""
        return card not in self.excluded and (self.only is None or card in self.only)


class SimulatedKind(StrEnum):
    """How a simulated card differs from a PAC A10."""

    OFS = "ofs"
    """Its one slot is used by virtual functions through vfio-pci; the port shows no AFU."""
    NO_PR = "no-pr"
    """A PAC N3000: its accelerators come with the card's whole image, and nothing programs them."""

    NO_CLEAR = "no-clear"
    """Its memory has no knob that clears it."""

    NO_IOMMU = "no-iommu"
    """It is on a node without an IOMMU."""

    FIXED_CLOCK = "fixed-clock"
    """Its user clock can be measured, and not be set."""

    ALVEO = "alveo"
    """An AMD Alveo U55C, which XRT's drivers serve; it has one region."""


@dataclass(frozen=True, slots=True)
class SimulatedGroup:
    """Simulated cards of one kind.

    Attributes:
        cards: how many.
        regions: of each card.
        interface_id: of each card.
        kinds: what is special about them.
    """

    cards: int
    regions: int
    interface_id: InterfaceId = DEFAULT_INTERFACE_ID
    kinds: frozenset[SimulatedKind] = frozenset()


SlotFunctions = tuple[tuple[CardId, tuple[PciAddress, ...]], ...]
"""The PCI functions behind a card's slot, for cards whose functions the operator names."""


class HttpAddress(NamedTuple):
    """Where HTTP is served: an empty host means every address of the node, port 0 any free port."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class CdiDevices:
    """CDI devices that containers get beside their FPGAs.

    Attributes:
        items: resources, as the operator names them, each with the full name of one CDI device.
    """

    items: tuple[tuple[str, str], ...] = ()

    def of(self, resource: Resource) -> tuple[str, ...]:
        """What containers get that have devices of this resource."""
        # By its id, also where the resource has an alias: the setting says the same on every node.
        name = replace(resource, alias=None).name
        named = {_EVERY, name, name.partition("/")[2]}
        return tuple(dict.fromkeys(device for of, device in self.items if of in named))


NO_CDI_DEVICES = CdiDevices()


def parse_bool(text: str) -> bool:
    """`true`, `false`, `1` or `0`, in any case."""
    try:
        return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
    except KeyError:
        raise ValueError("neither true nor false") from None


def choice(kind: type[E]) -> Callable[[str], E]:
    """A parser of an enum's values, written exactly so."""

    def parse(text: str) -> E:
        try:
            return kind(text)
        except ValueError:
            raise ValueError("not one of the words allowed") from None

    return parse


def allowed_words(kind: type[Enum]) -> str:
    """The values of an enum, for people: `both, region or whole`."""
    *most, last = (str(member.value) for member in kind)
    return f"{', '.join(most)} or {last}"


def seconds(low: float, high: float) -> Callable[[str], float]:
    """A parser of a decimal number of seconds between two limits, both allowed."""

    def parse(text: str) -> float:
        if not _DECIMAL.fullmatch(text):
            raise ValueError("not a decimal number")
        value = float(text)
        if not low <= value <= high:
            raise ValueError("out of range")
        return value

    return parse


def parse_size(text: str) -> int:
    """Bytes, or a number with Ki, Mi, Gi or Ti behind it as in Kubernetes' quantities."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError("not a number of bytes, with or without Ki, Mi, Gi or Ti")
    return int(match[1]) << {"": 0, "Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}[match[2] or ""]


def parse_path(text: str) -> str:
    """An absolute path, returned without slashes at its end."""
    if not text.startswith("/"):
        raise ValueError("not an absolute path")
    if len(text) > MAX_PATH:
        raise ValueError(f"longer than {MAX_PATH} characters")
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed")
    return text.rstrip("/") or "/"


def parse_cdi_devices(text: str) -> CdiDevices:
    """`resource=vendor.com/class=name`, separated by commas."""
    found = []
    for item in _items(text):
        resource, equals, device = item.partition("=")
        if not equals:
            raise ValueError("not <resource>=<vendor>/<class>=<device>")
        if resource != _EVERY and not _ADDED_TO.fullmatch(resource):
            raise ValueError("the resource is neither region-..., fpga-... or af-... nor *")
        match = _CDI_DEVICE.fullmatch(device)
        if match is None:
            raise ValueError("what is added is no CDI device (<vendor>/<class>=<device>)")
        if match["vendor"].startswith("k8s.") and match["class"] == "claim":
            raise ValueError(
                "CDI devices of the kind k8s.<driver>/claim belong to one ResourceClaim"
            )
        found.append((resource, device))
    return CdiDevices(tuple(found))


def parse_subdomain(text: str) -> str:
    """A DNS subdomain as Kubernetes accepts it (RFC 1123, at most 253 characters)."""
    if len(text) > 253 or not _SUBDOMAIN.fullmatch(text):  # noqa: PLR2004  # DNS limit, see above
        raise ValueError("not a DNS subdomain in lower case")
    return text


def parse_resource_prefix(text: str) -> str:
    """A DNS subdomain under which kubelet accepts an extended resource.

    Kubelet wants `requests.<prefix>` to be a DNS subdomain too, and takes names that begin with
    `requests.`, or contain `kubernetes.io/`, for its own (v1helper.IsExtendedResourceName).
    """
    parse_subdomain(text)
    parse_subdomain(f"requests.{text}")
    if text.startswith("requests.") or text.endswith("kubernetes.io"):
        raise ValueError("reserved by Kubernetes")
    return text


def parse_http_address(text: str) -> HttpAddress:
    """`host:port`, `:port` for every address of the node, `[IPv6]:port`."""
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise ValueError("not host:port (an IPv6 address stands in brackets)")
    port = int(match["port"])
    if port > 65535:  # noqa: PLR2004  # the highest port there is
        raise ValueError("the port is above 65535")
    if match["six"] is not None:
        try:
            socket.inet_pton(socket.AF_INET6, match["six"])
        except (OSError, ValueError):
            raise ValueError("not an IPv6 address in the brackets") from None
        return HttpAddress(match["six"], port)
    host = match["host"]
    return HttpAddress(parse_subdomain(host.lower()) if host else "", port)


def parse_http_hosts(text: str) -> tuple[str, ...]:
    """Names, separated by commas; `*.domain` for all names below it, `*` for every name."""
    for item in (items := tuple(item.lower() for item in _items(text))):
        if item != "*":
            parse_subdomain(item.removeprefix("*."))
    return items


def parse_namespaces(text: str) -> tuple[str, ...]:
    """Names of namespaces, separated by commas; `*` for every one."""
    for item in (items := tuple(_items(text))):
        if item != "*" and not re.fullmatch(_LABEL, item, re.ASCII):
            raise ValueError("not the name of a namespace")
    return items


def parse_cards(text: str) -> CardSelection:
    """`all`, or PCI addresses, or both left out with `!`; separated by commas."""
    only: set[CardId] = set()
    excluded: set[CardId] = set()
    everything = False
    for item in _items(text):
        if item == "all":
            everything = True
        elif item.startswith("!"):
            excluded.add(PciAddress.parse(item[1:].strip(" ")).card_id)
        else:
            only.add(PciAddress.parse(item).card_id)
    if everything and only:
        raise ValueError("names cards beside all")
    if both := sorted(only & excluded):
        raise ValueError(f"selects {both[0]} and leaves it out")
    return CardSelection(frozenset(only) if only else None, frozenset(excluded))


def parse_card_list(text: str) -> frozenset[CardId]:
    """PCI addresses, separated by commas."""
    return frozenset(PciAddress.parse(item).card_id for item in _items(text))


def parse_neighbours(text: str) -> tuple[tuple[CardId, ...], ...]:
    """Rings of cards: `card+card+card`, separated by commas; a card is in one ring, once."""
    rings = tuple(
        tuple(PciAddress.parse(name).card_id for name in item.split("+")) for item in _items(text)
    )
    seen: set[CardId] = set()
    for card in (card for ring in rings for card in ring):
        if card in seen:
            raise ValueError(f"card {card} is named twice")
        seen.add(card)
    if any(len(ring) < 2 for ring in rings):  # noqa: PLR2004  # of one card there is no neighbour
        raise ValueError("a ring has at least two cards")
    return rings


def parse_slot_functions(text: str) -> SlotFunctions:
    """`auto`, or `card=function+function`, cards separated by commas."""
    found: dict[CardId, tuple[PciAddress, ...]] = {}
    if text == "auto":
        return ()
    seen: set[PciAddress] = set()
    for item in _items(text):
        card_text, equals, names = item.partition("=")
        if not equals:
            raise ValueError("not <card>=<function>[+<function>...]")
        card = PciAddress.parse(card_text)
        functions = tuple(PciAddress.parse(name) for name in names.split("+"))
        if card.card_id in found:
            raise ValueError(f"names card {card} twice")
        for function in functions:
            if function == card or function in seen:
                raise ValueError(f"function {function} is named twice")
            seen.add(function)
        found[card.card_id] = functions
    return tuple(found.items())


def parse_simulated_cards(text: str) -> tuple[SimulatedGroup, ...]:
    """`cards x regions[+kind][@interface id]`, groups separated by commas."""
    groups = []
    for item in _items(text):
        match = _GROUP.fullmatch(item)
        if match is None:
            raise ValueError("not <cards>x<regions>[+<kind>][@<interface id>]")
        cards, regions = int(match[1]), int(match[2])
        if not cards:
            raise ValueError("a group has no card")
        if not 1 <= regions <= MAX_SIMULATED_REGIONS:
            raise ValueError(f"a card has 1 to {MAX_SIMULATED_REGIONS} regions")
        kinds = frozenset(map(_simulated_kind, match["kinds"].split("+")[1:]))
        for kind in (SimulatedKind.OFS, SimulatedKind.ALVEO):
            if kind in kinds and regions != 1:
                raise ValueError(f"a card of the kind {kind} has one region")
        if SimulatedKind.ALVEO in kinds and kinds - {SimulatedKind.ALVEO, SimulatedKind.NO_IOMMU}:
            raise ValueError("an Alveo card is of no other kind but no-iommu")
        interface = parse_interface_id(match["id"][1:]) if match["id"] else DEFAULT_INTERFACE_ID
        groups.append(SimulatedGroup(cards, regions, interface, kinds))
    if sum(group.cards for group in groups) > MAX_SIMULATED_CARDS:
        raise ValueError(f"more than {MAX_SIMULATED_CARDS} cards in total")
    return tuple(groups)


def _simulated_kind(word: str) -> SimulatedKind:
    try:
        return SimulatedKind(word)
    except ValueError:
        raise ValueError("a kind of card that is not known") from None


def _items(text: str) -> Sequence[str]:
    items = [item.strip(" ") for item in text.split(",")]
    if "" in items:
        raise ValueError("has an empty item between commas")
    return items
