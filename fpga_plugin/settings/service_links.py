"""The variables that kubelet makes of Services: their names may look like settings.

Kubelet gives every container variables of the Services in its namespace, unless the pod's
`enableServiceLinks` is false; those of a Service that is called `fpga...` begin with `FPGA`
(Kubernetes documentation, "Discovering services").
"""

import re
from typing import Final

_LINK: Final = re.compile(
    r"(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)",
    re.ASCII,
)
_URLS: Final = ("tcp://", "udp://", "sctp://")


def is_service_link(name: str, value: str, *, prefix: str) -> bool:
    """Whether a variable whose name begins with `prefix` is one of a Service's."""
    if _LINK.fullmatch(name.removeprefix(prefix)):
        return True
    return name.endswith("PORT") and value.startswith(_URLS)
