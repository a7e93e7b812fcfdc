"""What kubelet and the API server say: calls, records, pods."""

import base64
import json
from contextlib import suppress

import msgspec
from doubles import kubelet
from doubles.cards import AFU, INTERFACE, REGIONS
from operators import scratch
from target import Target

from fpga_plugin.allocation.requests.environment import request_variables
from fpga_plugin.errors import InvalidRequestError
from fpga_plugin.ids import ours
from fpga_plugin.kubernetes.apiserver import pods as apiserver
from fpga_plugin.kubernetes.apiserver.rest import ApiServerError, decoded
from fpga_plugin.kubernetes.grpc.codec import Codec
from fpga_plugin.kubernetes.grpc.wire import typed
from fpga_plugin.kubernetes.kubelet import podsapi
from fpga_plugin.kubernetes.kubelet.checkpoint import CheckpointUnreadableError, read_checkpoint
from fpga_plugin.kubernetes.kubelet.grants import cached_grant
from fpga_plugin.kubernetes.kubelet.podresources import PodResourcesClient
from fpga_plugin.kubernetes.messages import core_v1, v1, v1beta1
from fpga_plugin.kubernetes.pod import Pod

_CODEC = Codec()
_CALLS = (
    v1beta1.AllocateRequest,
    v1beta1.PreStartContainerRequest,
    v1beta1.PostStopContainerRequest,
    v1beta1.DeallocateRequest,
    v1beta1.PreferredAllocationRequest,
)
_DECODER = msgspec.json.Decoder(apiserver.ApiPod)
_CLIENT = PodResourcesClient("/nowhere", ours("fpga.intel.com"))


def _checkpoint(data: bytes) -> None:
    path = scratch("kubelet_internal_checkpoint", data)
    with suppress(CheckpointUnreadableError):
        for entry in read_checkpoint(path, ours("fpga.intel.com")).entries:
            cached_grant(entry)


def _grant(data: bytes) -> None:
    entry = {**_ENTRY, "AllocResp": base64.b64encode(data).decode()}
    _checkpoint(json.dumps(kubelet.document(entry)).encode())


def _calls(data: bytes) -> None:
    """The first byte says which call."""
    for kind in (_CALLS[data[0] % len(_CALLS)],) if data else ():
        with suppress(InvalidRequestError):
            message = _CODEC.decode(data[1:], kind)
            if kind is v1beta1.PreStartContainerRequest:
                assert all(isinstance(each, str) for each in message.devices_ids)
                assert all(isinstance(each, str) for each in message.env.values())
            if kind is v1beta1.PreferredAllocationRequest:
                for container in message.container_requests:
                    assert isinstance(container.allocation_size, int)


def _understood(pod: Pod) -> None:
    """What a container asks for is known, or refused."""
    for container in (*pod.init, *pod.containers):
        pod.state(container.name)
        with suppress(InvalidRequestError):
            request_variables(pod, container)


def _pods_api(data: bytes) -> None:
    try:
        pod = podsapi.decode(data)
    except Exception:  # noqa: BLE001  # documented: betterproto2 raises many types
        return
    _understood(pod)


def _api_server(data: bytes) -> None:
    try:
        pod = apiserver.convert(decoded(_DECODER, data, "a pod"))
    except (ApiServerError, ValueError):
        return
    assert isinstance(pod.uid, str)


def _pod_resources(data: bytes) -> None:
    """What comes of kubelet's answer is a documented error or whole."""
    try:
        answer = typed(v1.ListPodResourcesResponse.parse(data))
        for pod in answer.pod_resources:
            for container in pod.containers:
                for resource, devices in _CLIENT._devices_of(container.devices).items():
                    assert resource.count("/") == 1
                    assert resource.partition("/")[2].isascii()
                    assert all(isinstance(device, str) for device in devices)
    except AssertionError:
        raise
    except Exception:  # noqa: BLE001  # documented: each becomes a PodResourcesError
        return


_ENTRY = kubelet.entry("0000-10-00.0-p0")
_RESPONSE = bytes(
    v1beta1.ContainerAllocateResponse(
        envs={"FPGA_DEVICE_0000_10_00_0_P0": "/dev/dfl-port.0"},
        devices=[v1beta1.DeviceSpec("/dev/dfl-port.0", "/dev/dfl-port.0", "rw")],
    )
)
_POD = core_v1.Pod(
    metadata=core_v1.ObjectMeta(name="p", namespace="n", uid="u", labels={"l": "v"}),
    spec=core_v1.PodSpec(
        containers=[
            core_v1.Container(
                name="c",
                env=[
                    core_v1.EnvVar(name="FPGA_REGION_1", value=INTERFACE),
                    core_v1.EnvVar(name="FPGA_AFU_1", value=AFU),
                ],
            )
        ]
    ),
)
_API_POD = {
    "metadata": {"name": "p", "namespace": "n", "uid": "u"},
    "spec": {
        "containers": [{"name": "c", "env": [{"name": "FPGA_REGION_1", "value": INTERFACE}]}],
        "initContainers": [{"name": "i", "restartPolicy": "Always"}],
    },
    "status": {
        "containerStatuses": [
            {
                "name": "c",
                "image": "i",
                "imageID": "i",
                "ready": False,
                "restartCount": 0,
                "state": {"waiting": {"message": "m"}},
            }
        ],
        "conditions": [{"type": "PodReadyToStartContainers", "status": "True"}],
    },
}
_LIST = v1.ListPodResourcesResponse(
    pod_resources=[
        v1.PodResources(
            name="p",
            namespace="n",
            containers=[
                v1.ContainerResources(
                    name="c",
                    devices=[v1.ContainerDevices(REGIONS, ["0000-10-00.0-p0"])],
                )
            ],
        )
    ]
)
_CALL = v1beta1.PreStartContainerRequest(["0000-10-00.0-p0"], {"FPGA_REGION_1": INTERFACE})

TARGETS = {
    "checkpoint": Target(
        _checkpoint,
        (
            json.dumps(kubelet.document(_ENTRY)).encode(),
            json.dumps(
                {"Data": {"PodDeviceEntries": None, "RegisteredDevices": {REGIONS: ["a"]}}}
            ).encode(),
        ),
        tuple(f'"{name}"'.encode() for name in (*_ENTRY, "Data", "RegisteredDevices", REGIONS)),
    ),
    "grant": Target(_grant, (_RESPONSE,)),
    "calls": Target(
        _calls,
        (b"\1" + bytes(_CALL), *(bytes([n]) + b"\x0a\3\x0a\1a" for n in range(len(_CALLS)))),
    ),
    "pods-api": Target(_pods_api, (bytes(_POD),)),
    "api-server": Target(
        _api_server,
        (json.dumps(_API_POD).encode(),),
        (b'"env"', b'"valueFrom"', b'"fieldRef"', b'"envFrom"', b'"startedAt"', b'"terminated"'),
    ),
    "pod-resources": Target(_pod_resources, (bytes(_LIST),)),
}
