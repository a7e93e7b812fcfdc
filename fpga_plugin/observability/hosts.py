"""Which names the HTTP server answers to.

A web page that is open on a machine which reaches the node can have its own name resolve to
the node's address and then read what is served there, since its browser takes both for one site
(DNS rebinding). The browser still sends the page's name as Host. So only names are answered that no
stranger can own: addresses, names of one label, names under domains that are not delegated on the
Internet (a Service's `name.namespace.svc` and `….svc.cluster.local` among them), the node's own and
those that the operator lists.
"""

import re
import socket
from collections.abc import Iterable
from typing import Final

EVERY_NAME: Final = "*"
"""In the operator's list: whatever the Host is."""

_PRIVATE: Final = (".svc", ".local", ".localhost", ".internal")
"""`svc` is Kubernetes' own (dns/specification.md); RFC 6762, RFC 6761 and ICANN's board (29 July
2024) keep the others out of the Internet's root."""

_HOST = re.compile(r"(\[(?P<six>[^\[\]]*)\]|(?P<name>[^\[\]:@/]*))(:[0-9]*)?")


class Hosts:
    """Names that are answered.

    Args:
        names: the node's, the pod's and the operator's; `*.domain` stands for all names below it.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        given = [name.lower() for name in names if name]
        self._every = EVERY_NAME in given
        self._names = frozenset(given)
        self._below = (*_PRIVATE, *(name[1:] for name in given if name.startswith("*.")))

    def answers(self, host: str | None) -> bool:
        """Whether a request with this Host header is answered; None where it has none.

        Only clients that are no browsers leave it out (HTTP/1.0).
        """
        if host is None or self._every:
            return True
        match = _HOST.fullmatch(host.lower())
        if match is None:
            return False
        if (name := match["name"]) is None:
            return _is_address(match["six"])
        name = name.removesuffix(".")
        if not name:
            return False
        return (
            "." not in name
            or name in self._names
            or name.endswith(self._below)
            or _is_address(name)
        )


def _is_address(text: str) -> bool:
    # Not `ipaddress`: 0.5 MiB of an idle plugin, at its first request.
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, text)
        except (OSError, ValueError):  # a ValueError: characters that no address has
            continue
        return True
    return False
