"""Which pods live, as kubelet streams it (WatchPods of its Pods API, Kubernetes 1.37).

While the stream is open no source has to be polled for ended pods: an end is an event. The stream
decides nothing: it gives a reason to read kubelet's records, which end a claim.

If an end was missed, the pod would seem to live, and its devices would stay allocated. Kubelet
drops events when it has too many to send (pkg/kubelet/apis/pods, Broadcast). So the stream is
opened again now and then: a new stream reports every pod. While kubelet starts, 1.36 reports no
pods at all (1.37 refuses). A pod that was never reported does not count as living here.
"""

import asyncio
import os
import time
from collections.abc import Callable
from typing import Final

import structlog
from grpclib.client import Channel
from grpclib.exceptions import GRPCError

from fpga_plugin.errors import quote
from fpga_plugin.host.backoff import Backoff
from fpga_plugin.kubernetes.names import PodUid

log = structlog.get_logger()

RENEW_SECONDS: Final = 60.0
"""After which the stream is opened again: so long may a missed end keep a claim."""

FIRST_DELAY, LAST_DELAY = 0.5, 60.0
"""Seconds before another try; doubled each time. Most kubelets do not have the call."""

OPEN_SECONDS: Final = 10.0
"""In which kubelet has to have told all pods that there are."""

MAX_PODS: Final = 4096
"""Kubelet runs 110 pods unless told otherwise."""


class PodWatch:
    """The pods that live, by kubelet's stream of them.

    Args:
        socket_path: of kubelet's Pods API.
        changed: is called when a pod has ended, and when the stream opens or breaks.

    Attributes:
        open: all pods that there are have been told, and what happens to them is.
        told_at: Unix time at which the present stream, or the last one, had told all pods; 0: none.
    """

    def __init__(self, socket_path: str, changed: Callable[[], None]) -> None:
        self._path = socket_path
        self._changed = changed
        self._living: set[PodUid] = set()
        self._wanted = asyncio.Event()
        self.open = False
        self.told_at = 0.0

    def want(self) -> None:
        """There is a pod whose end matters: open the stream, if kubelet has one."""
        self._wanted.set()

    def lives(self, pod: PodUid) -> bool:
        """Whether kubelet told this pod and not its end; False while the stream is not open."""
        return self.open and pod in self._living

    async def run(self) -> None:
        """Until cancelled."""
        await self._wanted.wait()
        backoff = Backoff(FIRST_DELAY, LAST_DELAY)
        said = ""
        while True:
            problem = await self._one_stream()
            if self.open:
                backoff.reset()
            if not problem:
                continue  # renewed: the former list holds until the next stream has sent everything
            if self.open:
                self.open = False
                self._changed()
            if problem != said:
                said = problem
                log.info(
                    "kubelet does not stream its pods: its records are read at intervals",
                    socket=self._path,
                    reason=problem,
                )
            await asyncio.sleep(backoff.delay())

    async def _one_stream(self) -> str:
        """Follow one, to its end; why it ended, empty where it is only to be renewed."""
        try:
            os.stat(self._path)  # where there is none, its messages are not loaded
            async with asyncio.timeout(RENEW_SECONDS):
                return await self._follow()
        except TimeoutError:
            return ""
        except OSError as error:
            return error.strerror or type(error).__name__
        except GRPCError as error:
            return f"{error.status.name} {quote(error.message or '')}"
        except Exception as error:  # noqa: BLE001  # h2, grpclib and betterproto2 raise many types
            return f"{type(error).__name__}: {quote(error)}"

    async def _follow(self) -> str:
        """One stream, to its end; why it ended.

        Raises:
            Exception: of many types.
        """
        from fpga_plugin.kubernetes.kubelet.podsapi import decode
        from fpga_plugin.kubernetes.messages import (
            v1alpha1,  # brings core/v1 along: only where needed
        )

        told: set[PodUid] = set()
        synced = False
        channel = Channel(path=self._path)
        try:
            async with asyncio.timeout(OPEN_SECONDS) as opening:
                async for event in v1alpha1.PodsStub(channel).watch_pods():
                    if event.type is v1alpha1.EventType.INITIAL_SYNC_COMPLETE:
                        synced = True
                        opening.reschedule(None)
                        self._opened(told)
                        continue
                    pod = decode(event.pod)
                    if pod.ended or event.type is v1alpha1.EventType.DELETED:
                        if pod.uid in told:
                            told.discard(pod.uid)
                            if synced:
                                self._changed()
                    else:
                        told.add(pod.uid)
                    if len(told) > MAX_PODS:
                        return f"more than {MAX_PODS} pods"
        except TimeoutError:
            if opening.expired():
                return f"not all pods within {OPEN_SECONDS:g} s"
            raise
        finally:
            channel.close()
        return "kubelet ended the stream"

    def _opened(self, told: set[PodUid]) -> None:
        self._living, self.open, self.told_at = told, True, time.time()
        self._changed()
