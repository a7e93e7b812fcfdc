"""The policy as a value: an ordered list of rules; the first that matches decides.

The language is small so that the very same decisions can be made by CEL in the API server
(`policy.admission`): exact ids and words everywhere, and one kind of pattern, `*` in the names of
namespaces. docs/policy.md describes it for operators.
"""

import enum
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from fpga_plugin.ids import BitstreamId, InterfaceId, ResourceKind

MAX_STARS: Final = 3
"""Stars in one pattern. Each more multiplies the time that a long name may take to compare."""

_PATTERN: Final = re.compile(r"[a-z0-9*]([a-z0-9*-]{0,61}[a-z0-9*])?", re.ASCII)


class Action(enum.Enum):
    """What becomes of a request that a rule matches."""

    ALLOW = "allow"
    DENY = "deny"


def parse_pattern(text: str) -> str:
    """The name of a namespace, in which `*` stands for any characters or none.

    Raises:
        ValueError: no namespace can be called so.
    """
    if not _PATTERN.fullmatch(text):
        msg = "no name of a namespace (lower-case letters, digits, '-'), with or without '*'"
        raise ValueError(msg)
    if text.count("*") > MAX_STARS:
        msg = f"more than {MAX_STARS} '*'"
        raise ValueError(msg)
    return text


def pattern_regex(patterns: Collection[str] | None) -> str:
    """A regular expression for whole names, in the syntax that Python and RE2 share."""
    if patterns is None:
        return ".*"
    return "|".join(pattern.replace("*", "[a-z0-9-]*") for pattern in patterns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One thing that the policy is asked about.

    Attributes:
        kind: what the container gets.
        interface_id: of the card.
        bitstream_id: to be programmed; None: the container asks for devices and for no bitstream.
    """

    kind: ResourceKind
    interface_id: InterfaceId
    bitstream_id: BitstreamId | None

    def __str__(self) -> str:
        what = "no bitstream" if self.bitstream_id is None else f"bitstream {self.bitstream_id}"
        device = {
            ResourceKind.REGION: "a region",
            ResourceKind.WHOLE: "a whole card",
            ResourceKind.AF: "a preprogrammed region",
        }[self.kind]
        return f"{device} of interface {self.interface_id} with {what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule; None in a field matches everything.

    Attributes:
        name: unique in the policy; messages name it.
        action: what becomes of what it matches.
        namespaces: names, or patterns with `*`.
        interfaces: interface ids.
        bitstreams: bitstream ids; None in it stands for devices without a bitstream.
        devices: what the container gets.
    """

    name: str
    action: Action
    namespaces: tuple[str, ...] | None = None
    interfaces: frozenset[InterfaceId] | None = None
    bitstreams: frozenset[BitstreamId | None] | None = None
    devices: frozenset[ResourceKind] | None = None
    _namespace: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compile the namespaces, once a policy."""
        object.__setattr__(self, "_namespace", re.compile(pattern_regex(self.namespaces), re.ASCII))

    def matches(self, namespace: str, ask: Ask) -> bool:
        """Whether this rule is about that."""
        return (
            (self.interfaces is None or ask.interface_id in self.interfaces)
            and (self.bitstreams is None or ask.bitstream_id in self.bitstreams)
            and (self.devices is None or ask.kind in self.devices)
            and self._namespace.fullmatch(namespace) is not None
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the policy says.

    Attributes:
        allowed: or not.
        rule: the name of the rule that decided; empty: none matched, the default did.
    """

    allowed: bool
    rule: str


@dataclass(frozen=True, slots=True)
class Policy:
    """A whole policy.

    Attributes:
        default: what becomes of what no rule matches.
        rules: in order.
    """

    default: Action
    rules: tuple[Rule, ...] = ()

    @property
    def needs_namespace(self) -> bool:
        """Whether any decision depends on who asks."""
        return any(rule.namespaces is not None for rule in self.rules)

    def judge(self, namespace: str, ask: Ask) -> Verdict:
        """The first rule that matches decides, else the default."""
        for rule in self.rules:
            if rule.matches(namespace, ask):
                return Verdict(rule.action is Action.ALLOW, rule.name)
        return Verdict(self.default is Action.ALLOW, "")
