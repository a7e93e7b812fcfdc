"""Kubernetes' own ids and names, parsed before anything else sees them.

Kubelet validated them when the pod was admitted, so a name that does not parse here means that the
record has changed its shape: the reader then has to say that it knows nothing, rather than skip the
entry, because a missing entry means "released" to others.
"""

import re
from collections.abc import Callable
from typing import NamedTuple, NewType

from fpga_plugin.errors import quote

PodUid = NewType("PodUid", str)
"""`metadata.uid` of a pod, as kubelet's checkpoint writes it."""

ClaimUid = NewType("ClaimUid", str)
"""`metadata.uid` of a ResourceClaim; it may be a part of a file's name."""

ResourceName = NewType("ResourceName", str)
"""An extended resource as kubelet calls it."""

_UID = re.compile(r"[A-Za-z0-9-]{1,64}", re.ASCII)
_CLAIM_UID = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,62}[A-Za-z0-9])?", re.ASCII)
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


def parse_claim_uid(text: str) -> ClaimUid:
    """A claim's uid: usually 8-4-4-4-12; the API promises no more than an opaque string.

    Raises:
        ValueError: `text` is empty, too long, or has other characters than letters, digits, dashes.
    """
    if not _CLAIM_UID.fullmatch(text):
        msg = "not a claim's uid"
        raise ValueError(msg)
    return ClaimUid(text)


def parse_resource(text: str, ours: Callable[[str], bool]) -> ResourceName:
    """A resource that the caller serves (`ours`); kubelet's rule for the part after the `/`.

    Raises:
        ValueError: `text` is something else.
    """
    if not _RESOURCE.fullmatch(text.partition("/")[2]) or not ours(text):
        msg = f"{quote(text)} is no resource of this plugin"
        raise ValueError(msg)
    return ResourceName(text)
