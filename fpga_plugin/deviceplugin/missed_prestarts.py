"""Finds containers that kubelet started without PreStart.

After its own restart kubelet starts containers of known pods without asking until the plugin has
registered again: it has no options of the plugin yet, so it skips the call
(pkg/kubelet/cm/devicemanager/manager.go). Such a container runs on whatever its region held.
Usually that is its own bitstream as its predecessor left it, or a blank region. If an earlier pod
had not ended for certain by the time of the restart, it is what that pod left. The plugin cannot
repair a running container, so it reports it, and which of the two it is.

Such a container began after kubelet's socket was made and before kubelet opened the resource's
stream. A status has whole seconds: a container that began in the second of the socket may have
begun before it, with a PreStart, and is not reported. Nor is one that began between two restarts of
kubelet while the plugin was away for both.
"""

import asyncio
import os
import time
from collections import defaultdict
from typing import Final

import structlog

from fpga_plugin.allocation.journal.records import CLEAN, Condition
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.recorder import EventRecorder
from fpga_plugin.allocation.requests.directory import PodDirectory
from fpga_plugin.errors import NoSourceError
from fpga_plugin.ids import DeviceId
from fpga_plugin.kubernetes.kubelet.checkpoint import CheckpointEntry
from fpga_plugin.kubernetes.names import PodUid, ResourceName
from fpga_plugin.kubernetes.pod import Pod

log = structlog.get_logger()

LOOKS: Final = (0.0, 5.0, 15.0)
"""Seconds after kubelet's first answer at which pods are asked for: its status lags, and the
API server's copy of it more so."""

SOCKET: Final = "kubelet.sock"
"""In kubelet's device plugin directory; as old as this kubelet instance."""


class MissedPreStarts:
    """Finds and reports containers that kubelet started without PreStart.

    Args:
        pods: finds the devices' pods, and reads them.
        kubelet_dir: where kubelet's socket is.
        recorder: makes an Event of each container that was found.
        looks: see `LOOKS`.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        pods: PodDirectory,
        kubelet_dir: str,
        recorder: EventRecorder,
        looks: tuple[float, ...] = LOOKS,
    ) -> None:
        self._ledger = ledger
        self._pods = pods
        self._socket = os.path.join(kubelet_dir, SOCKET)
        self._recorder = recorder
        self._looks = looks
        self._opened: dict[ResourceName, float] = {}
        self._before: dict[DeviceId, int] = {}
        self._unscrubbed: frozenset[str] = frozenset()
        self._new = False
        self._task: asyncio.Task[None] | None = None
        self.found: set[tuple[PodUid, str, int]] = set()

    def new_kubelet(self) -> None:
        """Another kubelet instance: containers start without PreStart as of its birth."""
        self.close()
        self._new = True
        self._opened.clear()
        self.found.clear()
        self._before = {
            device: self._ledger.activity[device] for device in self._ledger.allocations
        }
        self._unscrubbed = frozenset(
            device
            for device, allocation in self._ledger.allocations.items()
            if not allocation.started
            and any(
                self._ledger.record(region).condition not in {*CLEAN, Condition.PROGRAMMED}
                for region in allocation.grants
            )
        )

    def stream_opened(self, resource: ResourceName) -> None:
        """From now on kubelet asks before it starts a container with this resource."""
        self._opened.setdefault(resource, time.time())

    def look(self) -> None:
        """Kubelet's records were read: look for such containers, in the background.

        If the journal knows this kubelet, the plugin's last run answered its PreStarts.
        """
        self.close()
        if self._new and self._ledger.allocations:
            self._task = asyncio.create_task(self._run(), name="containers without PreStart")

    def close(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        problem: NoSourceError | None = None
        try:
            birth = (await asyncio.to_thread(os.stat, self._socket)).st_ctime
            for look in self._looks:
                await asyncio.sleep(began + look - loop.time())
                problem = await self._look(birth)
        except FileNotFoundError:
            return  # kubelet is gone again; its next life is looked at in its turn
        except Exception:
            log.exception("containers that started without PreStart cannot be looked for")
        if problem is not None:  # of the last look: at the first, kubelet is often still starting
            log.warning(
                "cannot find out whether containers started without PreStart",
                error=str(problem),
                unscrubbed=sorted(filter(self._may_have_run, self._unscrubbed)),
            )

    async def _look(self, birth: float) -> NoSourceError | None:
        """Look once; returns the first reason why some pod could not be read."""
        try:
            checkpoint = await self._pods.checkpoint()
        except NoSourceError as error:
            return error
        held: dict[PodUid, list[CheckpointEntry]] = defaultdict(list)
        for entry in checkpoint.entries:
            if any(self._may_have_run(device) for device in entry.devices):
                held[entry.pod_uid].append(entry)
        problem: NoSourceError | None = None
        for uid, entries in held.items():
            devices = frozenset[str]().union(*(entry.devices for entry in entries))
            try:
                pod = await self._pods.pod(uid, devices)
            except NoSourceError as error:
                problem = problem or error
            else:
                self._judge(uid, pod, entries, birth)
        return problem

    def _may_have_run(self, text: str) -> bool:
        """Whether the device has an allocation from before, and no PreStart came since."""
        device = DeviceId(text)
        allocations, activity = self._ledger.allocations, self._ledger.activity
        return device in allocations and activity[device] == self._before.get(device, 0)

    def _judge(self, uid: PodUid, pod: Pod, entries: list[CheckpointEntry], birth: float) -> None:
        for entry in entries:
            opened = self._opened.get(entry.resource)
            started = pod.state(entry.container).started
            if opened is None or not birth <= started <= opened:
                continue
            key = (uid, entry.container, started)
            if key in self.found or not all(map(self._may_have_run, entry.devices)):
                continue
            self.found.add(key)
            unscrubbed = entry.devices & self._unscrubbed
            what = "not programmed again; restart the container if that matters"
            if unscrubbed:
                what = "still held what an earlier pod left; delete the pod"
            what = f"{', '.join(sorted(unscrubbed or entry.devices)[:3])} {what}"
            log.warning(
                "container started without PreStart",
                pod=uid,
                namespace=pod.namespace,
                name=pod.name,
                container=entry.container,
                devices=sorted(entry.devices),
                started=started,
                unscrubbed=sorted(unscrubbed),
                hint=what,
            )
            note = f"container {entry.container} was started without PreStart after kubelet's"
            note += f" restart: {what}"
            self._recorder.about_pod(uid, pod.full_name, "FpgaNotProgrammed", note)
