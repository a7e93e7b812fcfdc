"""What happens before kubelet sees a pod: a node is chosen, or none fits."""

from collections import Counter
from collections.abc import Iterable, Mapping

from fpga_plugin.cards.blanks import NO_BLANK, VENDORS
from fpga_plugin.demo.pod import DemoPod
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.kubernetes.names import ResourceName


class UnschedulableError(FpgaPluginError):
    """The pod stays Pending: no node has what it asks for."""


def effective_requests(pod: DemoPod) -> dict[ResourceName, int]:
    """How many devices the scheduler counts for a pod.

    Init containers run one after the other before the app containers, so they count only where they
    ask for more; restartable ones keep running beside whatever comes later (the scheduler's
    PodRequests, k8s.io/component-helpers/resource).
    """
    running: Counter[ResourceName] = Counter()
    peak: Counter[ResourceName] = Counter()
    for container in pod.init_containers:
        if container.restartable:
            running.update(container.devices)
            peak |= running
        else:
            peak |= running + Counter(container.devices)
    for container in pod.containers:
        running.update(container.devices)
    return dict(peak | running)


def schedule(
    pod: DemoPod, allocatable: Mapping[ResourceName, int], problems: Iterable[str] = ()
) -> None:
    """Whether a node with so many healthy devices can take the pod.

    Args:
        pod: is to be placed.
        allocatable: healthy devices of each resource that is advertised.
        problems: why devices are not healthy.

    Raises:
        UnschedulableError: in the words of the pod's event.
    """
    lacking = {
        resource: (count, allocatable.get(resource))
        for resource, count in effective_requests(pod).items()
        if count > allocatable.get(resource, 0)
    }
    if not lacking:
        return
    told = [*problems]
    if any(problem.startswith(NO_BLANK) for problem in told):
        told.append(VENDORS)
    reasons = ", ".join(f"1 Insufficient {resource}" for resource in lacking)
    details = [
        f"no plugin advertises {resource}"
        if have is None
        else f"the pod asks for {count} of {resource}, and {have} are there to be given"
        for resource, (count, have) in lacking.items()
    ]
    raise UnschedulableError(
        f"FailedScheduling: 0/1 nodes are available: {reasons}",
        hint="; ".join([*details, *told]),
    )
