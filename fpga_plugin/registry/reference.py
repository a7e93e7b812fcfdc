"""What names an artifact in an OCI registry: `<host>[:<port>]/<repository>[:<tag>][@<digest>]`.

The grammar is that of the OCI distribution specification. A host has to be named: no registry is
the one that is meant where none is.
"""

import re
from dataclasses import dataclass
from typing import Final

from fpga_plugin.errors import quote

DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
"""The one algorithm that every registry has."""

_HOST: Final = r"(?:[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?|\[[0-9a-f:]{2,45}\])(?::[0-9]{1,5})?"
_REPOSITORY: Final = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REFERENCE: Final = re.compile(
    rf"(?P<host>{_HOST})/(?P<repository>{_REPOSITORY}(?:/{_REPOSITORY})*)"
    rf"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}}))?(?:@(?P<digest>{DIGEST.pattern}))?",
    re.ASCII,
)
_MAX_LENGTH: Final = 512
"""Characters: the repository may have 255, as in the specification's own advice."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A parsed reference.

    Attributes:
        host: of the registry, with its port where it is not the usual one.
        repository: in it.
        tag: a name that may mean something else tomorrow; `latest` where neither is given.
        digest: of the manifest, which means one thing for ever; None: the tag decides.
    """

    host: str
    repository: str
    tag: str
    digest: str | None

    @property
    def wanted(self) -> str:
        """What to ask the registry for."""
        return self.digest or self.tag

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.host}/{self.repository}{tag}{f'@{self.digest}' if self.digest else ''}"


def parse_reference(text: str) -> Reference:
    """Read a reference.

    Raises:
        ValueError: it is none; the message says what it has to look like.
    """
    found = _REFERENCE.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    # A first part without a dot or port would be a repository of a registry that nobody named.
    if found is None or not re.search(r"[.:]|^localhost$", found["host"]):
        msg = (
            f"{quote(text)} is no reference: write <host>/<repository>@sha256:<64 digits>, or"
            " <host>/<repository>:<tag>"
        )
        raise ValueError(msg)
    tag = found["tag"] or ("" if found["digest"] else "latest")
    return Reference(found["host"], found["repository"], tag, found["digest"])
