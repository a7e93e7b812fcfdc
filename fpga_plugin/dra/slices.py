"""Keeps this node's ResourceSlices as the ledger requires them.

Others write here too: kubelet deletes the slices of its node at its own start, and a driver's 30 s
after it lost the connection to it; the garbage collector deletes them with the node. So the own
slices are watched. Wrong ones are written again, missing ones made, obsolete ones deleted. A write
that fails is tried again, less and less often, without end.

Nothing happens between two changes. A change waits for a moment before it is written, since most of
the ledger's changes change no slice, or are undone at once (a region between two owners).
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import msgspec
import structlog

from fpga_plugin.dra.desired import Form, Spec
from fpga_plugin.dra.pool import (
    COLLECTION,
    Pool,
    ResourceSlice,
    SlicePlan,
    has_counters,
    lost,
    meaning,
)
from fpga_plugin.errors import NoSourceError, quote
from fpga_plugin.host.backoff import Backoff
from fpga_plugin.kubernetes.apiserver.mirror import Marked, Mirror
from fpga_plugin.kubernetes.apiserver.rest import ApiServerError, Session, decoded, session

log = structlog.get_logger()

SETTLE_SECONDS: Final = 1.0
"""Between a change and what is written of it."""

TELL_SECONDS: Final = 3.0
"""For which the end of a claim waits for the taint of what it leaves. With the 40 s that its scrub
may take it stays below the 45 s after which kubelet gives a call up."""

_CONFLICT, _INVALID = 409, 422

_OF_COUNTERS: Final = ("sharedCounters", "consumesCounters")
"""Fields; a policy that refuses a slice for another reason answers 422, too."""


_node = msgspec.json.Decoder(Marked)
_slice = msgspec.json.Decoder(ResourceSlice)


class SliceReconciler:
    """The slices of one driver on one node.

    Args:
        kubeconfig: path of a file with credentials; None: the pod's service account.
        pool: of which driver, on which node.
        wanted: the desired slices, in a form that the server understands.
        registered: set once kubelet has the driver: before, a pod could be bound for nothing.
        settle: seconds between a change and what is written of it.
        backoff: how long to wait after failures.

    Attributes:
        form: what the server is known to understand. Each new list tests that again: the server
            may be another one by then.
        problem: why the slices may be old; empty if they are not.
        published: they were correct once.
    """

    def __init__(
        self,
        kubeconfig: str | None,
        pool: Pool,
        wanted: Callable[[Form], tuple[Spec, ...]],
        *,
        registered: asyncio.Event,
        settle: float = SETTLE_SECONDS,
        backoff: Callable[[], Backoff] = Backoff,
    ) -> None:
        self._kubeconfig = kubeconfig
        self._pool = pool
        self._wanted = wanted
        self._registered = registered
        self._settle = settle
        self._backoff = backoff()
        self._changed = asyncio.Event()
        self._written = asyncio.Event()
        self._accepted: dict[str, tuple[Spec, Spec]] = {}
        self._mirror = Mirror(
            kubeconfig,
            COLLECTION,
            ResourceSlice,
            fields={"spec.driver": pool.driver, "spec.nodeName": pool.node},
            changed=self.wake,
            backoff=backoff(),
        )
        self.form = Form()
        self._lists = 0
        self.problem = ""
        self.published = False

    def wake(self) -> None:
        """Something changed: compare again."""
        self._changed.set()

    async def caught_up(self) -> None:
        """Wait until the slices show the present state; no longer than TELL_SECONDS.

        Not at all while nothing is published: kubelet lacks the driver, or there is no list yet.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(TELL_SECONDS):
                while self._mirror.synced and self._differs():
                    await self._written.wait()

    async def run(self) -> None:
        """Keep the slices correct; ends only when cancelled."""
        await self._registered.wait()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._mirror.run(), name="watch of slices")
            tasks.create_task(self._publish(), name="slices")

    async def _publish(self) -> None:
        while True:
            await self._changed.wait()
            await asyncio.sleep(self._settle)
            self._changed.clear()
            if not self._mirror.synced:
                continue  # the first list wakes us
            try:
                await self._reconcile()
            except NoSourceError as error:
                delay = self._backoff.delay(error)
                if error.message != self.problem:
                    log.warning(
                        "ResourceSlices not published",
                        error=error.message,
                        hint="it is tried again; until then the scheduler goes by what was"
                        " published last",
                    )
                self.problem = error.message
                await asyncio.sleep(delay)
                self.wake()
            else:
                self._backoff.reset()
                self.problem, self.published = "", True
                written, self._written = self._written, asyncio.Event()
                written.set()

    async def _reconcile(self) -> None:
        """Write every slice that differs.

        Raises:
            NoSourceError: not all of it could be written.
        """
        if self._lists != self._mirror.lists:
            self._lists, self.form = self._mirror.lists, Form()
        if not self._differs():
            return
        async with session(self._kubeconfig) as server:
            # Each round either writes all, or learns that the server understands less.
            while (differs := self._differs()) and not await self._write(server, *differs):
                pass

    def _differs(self) -> tuple[SlicePlan, dict[str, Spec]] | None:
        wanted = self._pool.named(self._wanted(self.form))
        plan = self._pool.plan(wanted, self._mirror.items, accepted=self._accepted)
        return (plan, wanted) if plan else None

    async def _write(self, server: Session, plan: SlicePlan, wanted: Mapping[str, Spec]) -> bool:
        """Whether all was written; else the server understands less than was thought.

        Raises:
            NoSourceError: something could not be written.
        """
        owner = await self._owner(server) if plan.write else {}
        for name in plan.delete:
            await self._asked(server, "DELETE", name)
            self._mirror.forget(name)
        for name in plan.write:
            sent = wanted[name]
            manifest = self._pool.manifest(
                name,
                sent,
                generation=plan.generation,
                count=len(wanted),
                before=self._mirror.items.get(name),
                owner=owner,
            )
            try:
                told = await self._put(server, name, manifest)
            except ApiServerError as error:
                named = any(field in error.said for field in _OF_COUNTERS)
                if error.code != _INVALID or not (named and has_counters(sent)):
                    raise
                self._understands(replace(self.form, counters=False), error.message)
                return False
            form = lost(self.form, sent, told.spec.content)
            if form != self.form:
                self._understands(form, "")
                return False
            self._accepted[name] = (sent, meaning(told.spec.content))
        log.info(
            "ResourceSlices published",
            generation=plan.generation,
            slices=len(wanted),
            devices=sum(len(one.get("devices", ())) for one in wanted.values()),
            written=len(plan.write),
            deleted=len(plan.delete),
        )
        return True

    def _understands(self, form: Form, error: str) -> None:
        log.warning(
            "the API server does not take all that a ResourceSlice may say",
            counters=form.counters,
            taints=form.taints,
            error=error,
            hint="without counters there are regions or cards, not both; without taints what must"
            " not be given out is left out. Kubernetes 1.36 has both; its feature gates are"
            " DRAPartitionableDevices and DRADeviceTaints",
        )
        self.form = form

    async def _owner(self, server: Session) -> Mapping[str, Any]:
        """The node: its end is the slices' end."""
        name = self._pool.node
        body = await server.call("GET", f"/api/v1/nodes/{name}")
        node = decoded(_node, body, f"node {name}").metadata
        return {"apiVersion": "v1", "kind": "Node", "name": name, "uid": node.uid}

    async def _put(self, server: Session, name: str, manifest: Mapping[str, Any]) -> ResourceSlice:
        """Replace or make a slice; what the server made of it.

        Raises:
            ApiServerError: it did not, or not as it is known here.
        """
        known = "resourceVersion" in manifest["metadata"]
        path = f"{COLLECTION}/{name}" if known else COLLECTION
        try:
            body = await server.call("PUT" if known else "POST", path, body=manifest)
        except ApiServerError as error:
            if error.code == _CONFLICT or (known and error.not_found):
                await self._look(server, name)
            raise
        told = _decoded(body, name)
        self._mirror.learn(told)
        return told

    async def _look(self, server: Session, name: str) -> None:
        """Learn how a slice is now, without waiting for the watch.

        Raises:
            ApiServerError: the server does not say, or the name is another's.
        """
        if (body := await self._asked(server, "GET", name)) is None:
            return
        there = _decoded(body, name)
        if not self._pool.owns(there):
            raise ApiServerError(
                f"ResourceSlice {name} is of driver {quote(there.spec.driver)} on node"
                f" {quote(there.spec.nodeName)}: delete it"
            )
        self._mirror.learn(there)

    async def _asked(self, server: Session, method: str, name: str) -> bytes | None:
        """The server's answer about a slice; None: it has none of this name.

        Raises:
            ApiServerError: the server does not say.
        """
        try:
            return await server.call(method, f"{COLLECTION}/{name}")
        except ApiServerError as error:
            if not error.not_found:
                raise
            self._mirror.forget(name)
            return None


def _decoded(body: bytes, name: str) -> ResourceSlice:
    return decoded(_slice, body, f"ResourceSlice {name}")
