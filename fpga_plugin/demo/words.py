"""What the timeline says of each part of a pod's life, for each kind of kubelet."""

from dataclasses import dataclass
from typing import Final

from fpga_plugin.demo.double import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What is said where one kind of kubelet differs from the other.

    Attributes:
        kubelet: which kind it is.
        start: how the plugin knows what a container asks for.
        restart: what comes with a container that crashed.
        ends: what the pod does at its end.
        release: how the plugin knows that a pod has ended.
    """

    kubelet: str
    start: str
    restart: str
    ends: str
    release: str


_STOCK: Final = Words(
    kubelet="a stock kubelet",
    start="PreStartContainer carries no environment: the plugin reads the pod's spec.",
    restart="Kubelet calls PreStartContainer before each start.",
    ends="ends, and no call tells the plugin",
    release="No call reports the end of the pod. Two Lists of kubelet's PodResources API and its"
    " checkpoint lack the pod: then the allocation ends, and the scrub begins.",
)

_EXTENDED: Final = Words(
    kubelet="a kubelet with both KEPs",
    start="PreStartContainer carries the container's environment.",
    restart="Kubelet reports the removal of the old container late. That must not disturb the new"
    " one.",
    ends="ends",
    release="PostStopContainer: no container is left, the scrub may begin. Deallocate: the"
    " allocation ends, and what it hid is shown again.",
)


def words(profile: Profile) -> Words:
    """Those of a kubelet that is played."""
    return _EXTENDED if profile.deallocate else _STOCK
