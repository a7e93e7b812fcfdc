"""Where a container's environment comes from when kubelet does not send it.

What can tell it is only needed on stock kubelets and costs memory and time to import, so the daemon
starts without it: see `LazyEnvSource`.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from fpga_plugin.errors import NoSourceError
from fpga_plugin.ids import DeviceId, PodUid
from fpga_plugin.pods.identity import Identity

if TYPE_CHECKING:
    from fpga_plugin.pods.pod import Pod


@dataclass(frozen=True, slots=True)
class Asked:
    """What the container that starts now asks for.

    Attributes:
        env: its FPGA_* request variables.
        container: its name, where the containers that hold the devices ask for different things;
            empty: they all ask for the same.
        namespace: of its pod; empty where it was not needed.
        name: of its pod; empty where it was not needed.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    container: str = ""
    namespace: str = ""
    name: str = ""


class EnvSource(Protocol):
    """Knows what a container asks for. Belongs to the event loop."""

    @property
    def answers(self) -> Mapping[str, int]:
        """How often each place answered, by its name."""

    async def ask(self, identity: Identity, devices: Sequence[DeviceId], *, fresh: bool) -> Asked:
        """What the container asks for that starts now.

        Args:
            identity: who holds the devices.
            devices: of the PreStart.
            fresh: no container has started, or may have, since these devices were allocated.

        Raises:
            NoSourceError: it cannot be told, or not yet.
            InvalidRequestError: a request variable cannot be known outside the container.
        """

    async def pod(self, uid: PodUid, held: frozenset[str]) -> "Pod":
        """A pod as it is now.

        Args:
            uid: of the pod.
            held: all devices of ours that it holds, by which kubelet tells its name.

        Raises:
            NoSourceError: it cannot be told.
        """

    async def ended(self, uid: PodUid) -> bool:
        """Whether a pod is gone or has ended; its processes may still be there.

        Raises:
            NoSourceError: it cannot be told.
        """

    def started(self, identity: Identity, devices: Sequence[DeviceId]) -> None:
        """A PreStart is answered with OK; `identity` has the container that `ask` told."""

    def refused(self, identity: Identity, devices: Sequence[DeviceId], words: str) -> None:
        """A PreStart is refused in these words."""

    def new_kubelet(self) -> None:
        """Another life of kubelet: it starts containers without PreStart until we register."""


class NoEnvSource:
    """There is none: only kubelets that send the environment can be served."""

    @property
    def answers(self) -> Mapping[str, int]:
        """None ever did."""
        return {}

    async def ask(
        self,
        identity: Identity,
        devices: Sequence[DeviceId],
        *,
        fresh: bool,  # noqa: ARG002  # `EnvSource`
    ) -> Asked:
        """Refuse (`EnvSource`)."""
        pod = "" if identity.pod is None else f" of pod {identity.pod}"
        raise NoSourceError(
            f"kubelet sent no environment, so it is not known which bitstream the container{pod}"
            f" asks for on {', '.join(devices)}",
            hint="a source of pods has to be configured (FPGA_PLUGIN_PODS_SOCKET, or the API"
            " server), or a kubelet that sends Env in PreStartContainer",
        )

    async def pod(self, uid: PodUid, held: frozenset[str]) -> "Pod":  # noqa: ARG002  # `EnvSource`
        """Refuse (`EnvSource`)."""
        raise NoSourceError(f"there is no source that tells pod {uid}")

    async def ended(self, uid: PodUid) -> bool:
        """Refuse (`EnvSource`)."""
        raise NoSourceError(f"there is no source that tells pod {uid}")

    def started(self, identity: Identity, devices: Sequence[DeviceId]) -> None:
        """Nothing to do."""

    def refused(self, identity: Identity, devices: Sequence[DeviceId], words: str) -> None:
        """Nothing to do."""

    def new_kubelet(self) -> None:
        """Nothing to do."""


class LazyEnvSource:
    """Makes the source at the first question; on extended kubelets there never is one.

    Args:
        make: imports and makes it; runs in a thread.
    """

    def __init__(self, make: Callable[[], EnvSource]) -> None:
        self._make = make
        self._made: EnvSource | None = None

    @property
    def answers(self) -> Mapping[str, int]:
        """How often each place answered, by its name."""
        return {} if self._made is None else self._made.answers

    async def ask(self, identity: Identity, devices: Sequence[DeviceId], *, fresh: bool) -> Asked:
        """As the source answers."""
        return await (await self._source()).ask(identity, devices, fresh=fresh)

    async def pod(self, uid: PodUid, held: frozenset[str]) -> "Pod":
        """As the source answers."""
        return await (await self._source()).pod(uid, held)

    async def ended(self, uid: PodUid) -> bool:
        """As the source answers."""
        return await (await self._source()).ended(uid)

    async def _source(self) -> EnvSource:
        if self._made is None:
            made = await asyncio.to_thread(self._make)
            # Another question may have been first.
            self._made = self._made or made
        return self._made

    def started(self, identity: Identity, devices: Sequence[DeviceId]) -> None:
        """Pass it on to a source that is there."""
        if self._made is not None:
            self._made.started(identity, devices)

    def refused(self, identity: Identity, devices: Sequence[DeviceId], words: str) -> None:
        """Pass it on to a source that is there."""
        if self._made is not None:
            self._made.refused(identity, devices, words)

    def new_kubelet(self) -> None:
        """Pass it on to a source that is there."""
        if self._made is not None:
            self._made.new_kubelet()
