"""Kubelet's PodResources API: which running container holds which device.

What it reports: active pods by namespace and name, their app containers and restartable init
containers. It never reports other init containers, uids or environments. Listing has a side effect
that is wanted: kubelet first frees the devices of pods that are no longer active. It answers at
most 100 calls a second, the rest RESOURCE_EXHAUSTED.

A device that is missing from a list may get its region wiped, so a failure is never an empty list:
every failure is an error with its reason. A client that asks at intervals has one connection; it is
closed once it was idle for a while, with the first call that it fails, and where the socket is
another one: it cannot outlive the kubelet that it was made to. The socket's identity is taken
before and after each call; if it changed, the answer may be of either kubelet and counts for
nothing.
"""

import asyncio
import contextlib
import enum
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from grpclib.client import Channel
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from fpga_plugin.errors import NoSourceError, quote
from fpga_plugin.host.file_identity import instance_of
from fpga_plugin.kubernetes.grpc.wire import typed
from fpga_plugin.kubernetes.messages import v1
from fpga_plugin.kubernetes.names import ResourceName, parse_name, parse_resource

CALL_SECONDS = 5.0
"""Kubelet answers in milliseconds; while it starts, it may hold its locks for some seconds."""


class NoListReason(enum.Enum):
    """Why a call to PodResources gave no answer."""

    MISSING = "missing"
    """There is no socket: kubelet never started, or its directory is not mounted."""

    REFUSED = "refused"
    """Nobody listens on the socket: kubelet is down or restarting."""

    RATE_LIMITED = "rate-limited"
    """Others on this node call too often."""

    NOT_SERVED = "not-served"
    """This kubelet does not have the call, or it is switched off."""

    TIMEOUT = "timeout"
    """No answer in time."""

    RESTARTED = "restarted"
    """The socket is another one than when the call began."""

    FAILED = "failed"
    """Anything else: kubelet's own error, a broken connection, an answer that is not understood."""


class PodResourcesError(NoSourceError):
    """PodResources gave no answer; nothing follows from that for any device.

    Attributes:
        reason: which kind of failure.
    """

    def __init__(self, message: str, *, reason: NoListReason, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class PodDevices:
    """Devices of one resource that one running container holds.

    Attributes:
        namespace: the pod's namespace.
        pod: the pod's name.
        container: the container.
        resource: the resource, one that the caller serves.
        devices: ids as their plugin wrote them; at least one.
    """

    namespace: str
    pod: str
    container: str
    resource: ResourceName
    devices: frozenset[str]


@dataclass(frozen=True, slots=True)
class PodList:
    """One answer of kubelet's.

    Attributes:
        devices: who holds what.
        instance: the kubelet instance that gave the answer: the identity of its socket.
    """

    devices: tuple[PodDevices, ...]
    instance: str


class PodResourcesClient:
    """Asks one kubelet. Calls may overlap.

    Args:
        socket_path: `/var/lib/kubelet/pod-resources/kubelet.sock`, as this process sees it.
        ours: which resources the caller serves.
        call_seconds: how long a call may take, connecting included.
        idle_seconds: for how long a connection stays open after a call; 0: it ends with the call.
    """

    def __init__(
        self,
        socket_path: str,
        ours: Callable[[str], bool],
        *,
        call_seconds: float = CALL_SECONDS,
        idle_seconds: float = 0.0,
    ) -> None:
        self._path = socket_path
        self._ours = ours
        self._call_seconds = call_seconds
        self._idle_seconds = idle_seconds
        self._kept: tuple[str, Channel] | None = None
        self._calls = 0
        self._idle: asyncio.TimerHandle | None = None

    def instance(self) -> str:
        """The identity of kubelet's socket, `dev:ino:ctime_ns`: another one, another kubelet.

        Raises:
            PodResourcesError: there is no socket.
        """
        try:
            status = os.stat(self._path)
        except OSError as error:
            raise self._os_error(error) from error
        return instance_of(status)

    async def snapshot(self) -> PodList:
        """List every container that holds devices of ours.

        Raises:
            PodResourcesError: there is no answer; `reason` says why.
        """
        async with self._call() as (stub, instance):
            answer = typed(await stub.list(v1.ListPodResourcesRequest()))
            devices = tuple(
                PodDevices(
                    namespace=parse_name(pod.namespace),
                    pod=parse_name(pod.name),
                    container=parse_name(container.name),
                    resource=resource,
                    devices=ids,
                )
                for pod in answer.pod_resources
                for container in pod.containers
                for resource, ids in self._devices_of(container.devices).items()
                if ids
            )
        return PodList(devices, instance)

    async def allocatable(self) -> Mapping[ResourceName, frozenset[str]]:
        """The healthy devices, free or not, of each of our resources that kubelet knows.

        Raises:
            PodResourcesError: there is no answer; NOT_SERVED where kubelet has it switched off.
        """
        async with self._call() as (stub, _):
            answer = typed(await stub.get_allocatable_resources(v1.AllocatableResourcesRequest()))
            return self._devices_of(answer.devices)

    def _devices_of(
        self, groups: Iterable[v1.ContainerDevices]
    ) -> dict[ResourceName, frozenset[str]]:
        """Ids by resource: kubelet has one group a NUMA node, or one a device.

        Raises:
            ValueError: a resource's name or an id is none.
        """
        result: dict[ResourceName, frozenset[str]] = {}
        for group in groups:
            if self._ours(group.resource_name):
                resource = parse_resource(group.resource_name, self._ours)
                if not all(group.device_ids):
                    msg = f"an id of {resource} is empty"
                    raise ValueError(msg)
                result[resource] = result.get(resource, frozenset()).union(group.device_ids)
        return result

    @contextlib.asynccontextmanager
    async def _call(self) -> AsyncIterator[tuple[v1.PodResourcesListerStub, str]]:
        """One call; every failure becomes a `PodResourcesError`."""
        instance = self.instance()
        self._calls += 1
        try:
            with self._failures():
                try:
                    async with asyncio.timeout(self._call_seconds):
                        yield v1.PodResourcesListerStub(self._channel(instance)), instance
                except (GRPCError, asyncio.CancelledError):  # an answer, or nobody waits for it
                    raise
                except BaseException:
                    self.close()
                    raise
        finally:
            self._calls -= 1
            self._rest()
        if self.instance() != instance:
            raise PodResourcesError(
                f"kubelet restarted while it was asked at {self._path}",
                reason=NoListReason.RESTARTED,
            )

    def _channel(self, instance: str) -> Channel:
        """The connection to this kubelet."""
        if self._kept is None or self._kept[0] != instance:
            self.close()
            self._kept = instance, Channel(path=self._path)
        return self._kept[1]

    def _rest(self) -> None:
        """Close the connection in a while, unless there is another call."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if self._calls:
            return
        if self._idle_seconds:
            loop = asyncio.get_running_loop()
            self._idle = loop.call_later(self._idle_seconds, self.close)
        else:
            self.close()

    def close(self) -> None:
        """End the connection; calls on it fail, the next one makes another."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        kept, self._kept = self._kept, None
        if kept is not None:
            kept[1].close()

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise PodResourcesError(
                f"kubelet did not answer at {self._path} within {self._call_seconds:g} s",
                reason=NoListReason.TIMEOUT,
            ) from error
        except OSError as error:
            raise self._os_error(error) from error
        except GRPCError as error:
            raise self._grpc_error(error) from error
        except ValueError as error:
            raise self._not_understood(str(error)) from error
        except Exception as error:  # h2, grpclib and betterproto2 raise many types
            raise self._not_understood(f"{type(error).__name__}: {quote(error)}") from error

    def _not_understood(self, why: str) -> PodResourcesError:
        return PodResourcesError(
            f"the answer of kubelet at {self._path} is not understood ({why})",
            reason=NoListReason.FAILED,
        )

    def _os_error(self, error: OSError) -> PodResourcesError:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return PodResourcesError(
                f"kubelet's PodResources socket {self._path} is not there",
                reason=NoListReason.MISSING,
                hint="mount its directory, and set FPGA_PLUGIN_PODRESOURCES_SOCKET to it",
            )
        if isinstance(error, ConnectionRefusedError):
            return PodResourcesError(
                f"nobody listens on {self._path}",
                reason=NoListReason.REFUSED,
                hint="kubelet is down or restarting",
            )
        return PodResourcesError(
            f"kubelet cannot be asked at {self._path} ({error.strerror or error})",
            reason=NoListReason.FAILED,
        )

    def _grpc_error(self, error: GRPCError) -> PodResourcesError:
        told = f"{error.status.name} {quote(error.message or '')}"
        if error.status is Status.RESOURCE_EXHAUSTED:
            return PodResourcesError(
                f"kubelet refuses to answer so often at {self._path}: {told}",
                reason=NoListReason.RATE_LIMITED,
                hint="another client of PodResources on this node calls too often",
            )
        if error.status is Status.UNIMPLEMENTED:
            return PodResourcesError(
                f"kubelet at {self._path} does not have this call: {told}",
                reason=NoListReason.NOT_SERVED,
            )
        if error.status is Status.DEADLINE_EXCEEDED:
            return PodResourcesError(
                f"kubelet did not answer at {self._path} in time: {told}",
                reason=NoListReason.TIMEOUT,
            )
        return PodResourcesError(
            f"kubelet at {self._path} answered {told}", reason=NoListReason.FAILED
        )
