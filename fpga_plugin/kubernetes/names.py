"""Names that kubelet's records carry, parsed before anything else sees them.

Kubelet validated them when the pod was admitted, so a name that does not parse here means that the
record has changed its shape: the reader then has to say that it knows nothing, rather than skip the
entry, because a missing entry means "released" to others.
"""

import re
from typing import NamedTuple

from fpga_plugin.errors import quote
from fpga_plugin.ids import PodUid, ResourceName, kind_of

_UID = re.compile(r"[A-Za-z0-9-]{1,64}", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?", re.ASCII)
_RESOURCE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", re.ASCII)


class PodName(NamedTuple):
    """What a pod is called."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def parse_pod_uid(text: str) -> PodUid:
    """A pod's uid.

    Usually 8-4-4-4-12; static pods from a file have 32 hex digits (a hash of the file), and the
    API promises no more than "an opaque string", so any letters, digits and dashes will do.

    Raises:
        ValueError: `text` is empty, too long, or has other characters.
    """
    if not _UID.fullmatch(text):
        msg = f"{quote(text)} is no pod uid"
        raise ValueError(msg)
    return PodUid(text)


def parse_name(text: str) -> str:
    """The name of a namespace, pod or container: letters, digits, `-`, `.`, `_`, at most 253.

    Raises:
        ValueError: `text` is something else.
    """
    if not _NAME.fullmatch(text):
        msg = f"{quote(text)} is no name of a namespace, pod or container"
        raise ValueError(msg)
    return text


_AMDS = re.compile(r"(amd\.com/|xilinx\.com/fpga-)xilinx_[A-Za-z0-9._-]{1,56}", re.ASCII)
"""A shell's name and time stamp, by AMD's plugin and by its versions under Xilinx's name."""


def is_ours(resource: str, prefix: str) -> bool:
    """Whether devices of a resource may be devices of this node's cards.

    So is every resource in the domain `prefix` (`fpga.intel.com`), whoever serves it. And every one
    that is called as this plugin calls its own, in whatever domain: pods keep what they were given
    when the operator changes the prefix, and kubelet keeps its name. And those by which AMD's own
    plugin gives out cards.
    """
    return (
        resource.startswith(f"{prefix}/")
        or kind_of(resource) is not None
        or _AMDS.fullmatch(resource) is not None
    )


def parse_resource(text: str, prefix: str) -> ResourceName:
    """A resource of `is_ours`; kubelet's rule for the part after the `/`.

    Raises:
        ValueError: `text` is something else.
    """
    domain, _, name = text.partition("/")
    of_prefix = domain == prefix and _RESOURCE.fullmatch(name) is not None
    if not of_prefix and kind_of(text) is None and not _AMDS.fullmatch(text):
        msg = f"{quote(text)} is no resource of {quote(prefix)}"
        raise ValueError(msg)
    return ResourceName(text)
