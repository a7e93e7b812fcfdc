"""The calls of one resource: kubelet's messages to `DevicePlugin`, and their answers.

Decoding is lenient (a truncated message parses as a shorter one), so this module checks what has to
be there: it refuses Allocate and PreStartContainer without device ids. `DevicePlugin` checks what
the ids mean. Deallocate and PostStopContainer answer OK even without ids, because kubelet could do
nothing about a refusal.

Each answer is logged, and an observer gets it: method, devices, status, message and time.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import structlog
from grpclib.const import Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.metadata import Deadline
from grpclib.server import Stream

from fpga_plugin.allocation.calls import AllocateAnswer, Caller
from fpga_plugin.deviceplugin.device_stream import DeviceStreams
from fpga_plugin.deviceplugin.service import DevicePlugin
from fpga_plugin.errors import FpgaPluginError, InvalidRequestError
from fpga_plugin.ids import DeviceId, is_device_id
from fpga_plugin.kubernetes.grpc.server import receive
from fpga_plugin.kubernetes.grpc.unary import WENT_AWAY, statuses
from fpga_plugin.kubernetes.messages import v1beta1
from fpga_plugin.kubernetes.names import ResourceName

OPTIONS = v1beta1.DevicePluginOptions(
    pre_start_required=True,
    get_preferred_allocation_available=True,
    post_stop_required=True,
    deallocate_required=True,
)
"""All that kubelets of any kind may read; deviceplugin.proto says why all four are true."""

_LOGGED_DEVICES = 16

_OF_A_LIFE = frozenset({"Allocate", "PreStartContainer", "PostStopContainer"})
"""Calls that are logged although they went well: they show an allocation's life. The release
logs its end, even if kubelet makes no call for it."""

_log = structlog.get_logger()


@dataclass(slots=True)
class _Call:
    """One call on its way."""

    method: str
    deadline: Deadline | None
    devices: tuple[DeviceId, ...] = ()
    caller: Caller = field(default_factory=Caller)

    @property
    def time_left(self) -> float | None:
        return None if self.deadline is None else self.deadline.time_remaining()

    def names(self, *containers: Iterable[str]) -> None:
        """Note the call's devices; text that is no device id stays out of the logs."""
        self.devices = tuple(map(DeviceId, filter(is_device_id, chain(*containers))))


_Stream = Stream[Any, Any]
_Unary = Callable[[Any, _Call], Awaitable[Any]]


class Servicer:
    """Serves one resource's calls; grpclib reads `__mapping__`.

    Attributes:
        running: the tasks in which calls are being served.
    """

    def __init__(self, resource: ResourceName, api: DevicePlugin, streams: DeviceStreams) -> None:
        self._resource = resource
        self._api = api
        self._streams = streams
        self._log = _log.bind(resource=resource)
        self.running: set[asyncio.Task[Any]] = set()

    def __mapping__(self) -> dict[str, Handler]:
        """Every method of the service by its path; the generated one knows the messages' types."""
        answers: dict[str, _Unary] = {
            "GetDevicePluginOptions": self._options,
            "GetPreferredAllocation": self._preferred,
            "Allocate": self._allocate,
            "PreStartContainer": self._prestart,
            "PostStopContainer": self._poststop,
            "Deallocate": self._deallocate,
        }
        serve = {name: partial(self._serve, name, answer) for name, answer in answers.items()}
        methods = {**serve, "ListAndWatch": self._list_and_watch}
        return {
            path: handler._replace(func=methods[path.rpartition("/")[2]])
            for path, handler in v1beta1.DevicePluginBase().__mapping__().items()
        }

    async def _serve(self, method: str, answer: _Unary, stream: _Stream) -> None:
        """Run one call; turn errors into statuses; report the outcome."""
        self._track()
        call, started = _Call(method, stream.deadline), time.monotonic()
        status, message = Status.OK, ""
        try:
            with statuses(method):
                reply = await answer(await receive(stream), call)
                await stream.send_message(reply)
        except GRPCError as error:
            known = error.__cause__
            operators = isinstance(known, FpgaPluginError)
            status, message = error.status, str(known) if operators else error.message or ""
            raise
        except asyncio.CancelledError:
            # Kubelet gave up or went away, or this endpoint ends. No one reads an answer.
            late = call.time_left == 0
            status = Status.DEADLINE_EXCEEDED if late else Status.CANCELLED
            message = "the call's time was up" if late else WENT_AWAY
            raise
        finally:
            # grpclib ends the answer when this returns, and waits for nothing before that: what the
            # log line costs, some 0.1 ms, kubelet does not wait for. Nor does an observer that
            # fails cost kubelet its answer: asyncio logs it.
            asyncio.get_running_loop().call_soon(
                self._report, call, status, message, time.monotonic() - started
            )

    def _report(self, call: _Call, status: Status, message: str, seconds: float) -> None:
        shown = list(call.devices[:_LOGGED_DEVICES])
        values = {
            "method": call.method,
            "devices": shown,
            "device_count": len(call.devices),
            "status": status.name,
            "seconds": round(seconds, 6),
            **call.caller.known(),
        }
        if status is Status.OK:
            write = self._log.info if call.method in _OF_A_LIFE else self._log.debug
            write("call", **values)
        elif status in {Status.UNAVAILABLE, Status.CANCELLED}:
            self._log.info("call not finished", message=message, **values)
        else:
            self._log.warning("call refused", message=message, **values)
        self._api.on_call(call.method, self._resource, call.devices, status, message, seconds)

    async def _options(self, _request: v1beta1.Empty, _call: _Call) -> v1beta1.DevicePluginOptions:
        return OPTIONS

    async def _preferred(
        self, request: v1beta1.PreferredAllocationRequest, call: _Call
    ) -> v1beta1.PreferredAllocationResponse:
        chosen = [
            self._api.preferred(
                self._resource,
                container.available_deviceIDs,
                container.must_include_deviceIDs,
                container.allocation_size,
            )
            for container in request.container_requests
        ]
        call.names(*chosen)
        return v1beta1.PreferredAllocationResponse(
            container_responses=[
                v1beta1.ContainerPreferredAllocationResponse(device_i_ds=ids) for ids in chosen
            ]
        )

    async def _allocate(
        self, request: v1beta1.AllocateRequest, call: _Call
    ) -> v1beta1.AllocateResponse:
        containers = [container.devices_ids for container in request.container_requests]
        call.names(*containers)
        if not containers:
            raise InvalidRequestError("Allocate names no container")
        for ids in containers:
            _require_ids(call.method, ids)
        return v1beta1.AllocateResponse(
            container_responses=[
                _container_response(self._api.allocate(self._resource, ids)) for ids in containers
            ]
        )

    async def _prestart(
        self, request: v1beta1.PreStartContainerRequest, call: _Call
    ) -> v1beta1.PreStartContainerResponse:
        call.names(request.devices_ids)
        _require_ids(call.method, request.devices_ids)
        await self._api.prestarts.serve(
            self._resource, request.devices_ids, request.env, call.time_left, call.caller
        )
        return v1beta1.PreStartContainerResponse()

    async def _poststop(
        self, request: v1beta1.PostStopContainerRequest, call: _Call
    ) -> v1beta1.Empty:
        call.names(request.devices_i_ds)
        if ids := [text for text in request.devices_i_ds if text]:
            self._api.poststop(self._resource, ids)
        return v1beta1.Empty()

    async def _deallocate(self, request: v1beta1.DeallocateRequest, call: _Call) -> v1beta1.Empty:
        containers = [container.devices_i_ds for container in request.container_requests]
        call.names(*containers)
        for named in containers:
            if ids := [text for text in named if text]:
                self._api.deallocate(self._resource, ids)
        return v1beta1.Empty()

    async def _list_and_watch(self, stream: _Stream) -> None:
        self._track()
        with statuses("ListAndWatch"):
            await receive(stream)
            await self._streams.feed(stream)

    def _track(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.running.add(task)
        task.add_done_callback(self.running.discard)


def _require_ids(method: str, ids: Sequence[str]) -> None:
    if not ids:
        raise InvalidRequestError(f"{method} names no device")
    if not all(ids):
        raise InvalidRequestError(f"{method} names a device with an empty id")
    if len(set(ids)) != len(ids):
        raise InvalidRequestError(f"{method} names a device twice")


def _container_response(given: AllocateAnswer) -> v1beta1.ContainerAllocateResponse:
    return v1beta1.ContainerAllocateResponse(
        envs=dict(given.envs),
        devices=[
            v1beta1.DeviceSpec(container_path=node, host_path=node, permissions="rw")
            for node in given.nodes
        ],
        mounts=[
            v1beta1.Mount(
                container_path=mount.container_path,
                host_path=mount.host_path,
                read_only=mount.read_only,
            )
            for mount in given.mounts
        ],
        cdi_devices=[v1beta1.CdiDevice(name=name) for name in given.cdi_devices],
    )
