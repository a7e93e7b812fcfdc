"""Which of a pod's containers starts now, where several hold the same devices.

PreStart names devices, no container. Init containers leave their devices to the pod's later
containers, so the holders of a device run one after the other: plain init containers in order, then
at most one sidecar or app container (pkg/kubelet/cm/devicemanager: devicesToReuse). A wrong guess
would put another container's bitstream into the region, so this module does not guess. It knows
three proofs; without one of them there is no answer, and kubelet tries again in ten seconds.

1. Nothing has started under this allocation: it is the first of them.
2. Kubelet quotes, as the reason why a container waits, the very words in which its last PreStart
   for these devices was refused (pkg/kubelet: reasonCache, convertToAPIContainerStatuses): it is
   that container, as long as the pod keeps its sandbox.
3. The container whose PreStart succeeded last has run since and ended: it starts again, or, if it
   is an init container that succeeded, the next one does. Again as long as the pod keeps its
   sandbox: with a new one all begin again, while the status still shows init containers' old runs.

Where it is not known whether the pod keeps its sandbox (`Pod.sandbox` is None), neither 2 nor 3
proves anything: in a new one the first holder starts, whatever the status still quotes.

A status that lags shows less than what happened. So a container that still runs, or has not run
since, proves nothing, and what a lagging status proves has to hold for a while (`environment`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fpga_plugin.allocation.requests.environment import ContainerRequests
from fpga_plugin.ids import DeviceId
from fpga_plugin.kubernetes.pod import Phase, Pod, Run


@dataclass(frozen=True, slots=True)
class Start:
    """A PreStart that succeeded.

    Attributes:
        container: the one that started.
        at: when it was answered; seconds since the epoch by the node's clock.
        before: the container's latest run that had ended by then. A status that lags shows it still
            afterwards, and its time alone does not say: times have whole seconds, and the clock
            may have been set back.
    """

    container: str
    at: float
    before: Run | None = None


@dataclass(slots=True)
class Trail:
    """The outcomes of a pod's PreStarts, by the devices that they named.

    Attributes:
        starts: the last that succeeded.
        before: the container's latest run that had ended when its turn was proved.
        refusals: the words of the last that was refused.
        ran: cgroups of the pod's containers, its sandbox's among them, at the last question.
        older: some of this may be of an older sandbox than the last question's.
    """

    starts: dict[frozenset[DeviceId], Start] = field(default_factory=dict)
    before: dict[frozenset[DeviceId], Run | None] = field(default_factory=dict)
    refusals: dict[frozenset[DeviceId], str] = field(default_factory=dict)
    ran: frozenset[str] = frozenset()
    older: bool = False

    def forget(self) -> None:
        """All begins again."""
        self.starts.clear()
        self.before.clear()
        self.refusals.clear()
        self.older = False

    def asked(self, running: frozenset[str]) -> None:
        """Note what runs at a question.

        While one of the cgroups of the question before is still there, so is its sandbox: kubelet
        ends all containers before it makes a new one (pkg/kubelet/kuberuntime, SyncPod).
        """
        if running.isdisjoint(self.ran) and (self.starts or self.refusals):
            self.older = True
        self.ran = running

    def words(self, devices: frozenset[DeviceId]) -> tuple[str, ...]:
        """The last refusals: for these devices, then for others of the pod."""
        own = [text for key, text in self.refusals.items() if key == devices]
        return (*own, *(text for key, text in self.refusals.items() if key != devices))


def first(holders: Sequence[ContainerRequests]) -> str | None:
    """Proof 1: the first holder, if kubelet's rule of one after the other holds for them."""
    in_turn = all(holder.passes_on for holder in holders[:-1])
    return holders[0].name if holders and in_turn else None


def refused(pod: Pod, holders: Sequence[ContainerRequests], words: Sequence[str]) -> str | None:
    """Proof 2: the holder that waits because of a refusal in these words.

    Args:
        pod: as its source reports it.
        holders: in order.
        words: what the last PreStarts were refused with; for these devices first, then for others
            that the container may hold too: kubelet keeps one reason a container.
    """
    if not pod.sandbox:
        return None
    for text in words:
        found = [holder.name for holder in holders if text in pod.state(holder.name).message]
        others = [holder.name for holder in holders if holder.name not in found]
        if any(pod.state(name).phase is Phase.RUNNING for name in others):
            return None
        if found:
            return found[0] if len(found) == 1 else None
    return None


def follows(pod: Pod, holders: Sequence[ContainerRequests], last: Start | None) -> str | None:
    """Proof 3: who comes after the run that the last successful PreStart began.

    Args:
        pod: as its source reports it.
        holders: in order.
        last: the last successful PreStart for these devices, if there was one.
    """
    if last is None:
        return None
    names = [holder.name for holder in holders]
    state = pod.state(last.container)
    if not pod.sandbox or last.container not in names or state.phase is Phase.RUNNING:
        return None
    run = state.ended
    if (
        run is None
        or run == last.before
        or run.started < int(last.at)
        or not _in_same_sandbox(pod, last.container, run.started)
    ):
        return None
    holder = holders[names.index(last.container)]
    if not holder.passes_on or run.exit_code != 0:
        return holder.name
    if state.phase is not Phase.TERMINATED:
        return None  # it succeeded and is to start again: something else happened
    after = names[names.index(last.container) + 1 :]
    return after[0] if after else None


def _in_same_sandbox(pod: Pod, container: str, started: int) -> bool:
    """Whether all plain init containers before one have succeeded, and not later than it began.

    One that runs, waits or began later belongs to a newer sandbox.
    """
    for before in pod.init:
        if before.name == container:
            break
        if before.restartable:
            continue
        state = pod.state(before.name)
        run = state.ended
        if state.phase is not Phase.TERMINATED or run is None or run.exit_code != 0:
            return False
        if run.started > started:
            return False
    return True
