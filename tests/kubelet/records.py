"""Kubelet's PodResources, asked with Google's own protobuf and grpcio: no code of ours."""

import time
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_tools import protoc
from machine import PODRESOURCES, SCRATCH

import fpga_plugin.kubernetes


def _pool() -> descriptor_pool.DescriptorPool:
    api = Path(fpga_plugin.kubernetes.__file__).parent
    pool = descriptor_pool.DescriptorPool()
    compiled = SCRATCH / "podresources.set"
    arguments = ["protoc", f"-I{api}", f"--descriptor_set_out={compiled}", "podresources.proto"]
    assert protoc.main(arguments) == 0
    for file in descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes()).file:
        pool.Add(file)
    return pool


_known: list[descriptor_pool.DescriptorPool] = []


def _ask(method: str, request: str, answer: str) -> Any:
    if not _known:
        _known.append(_pool())
    classes = [
        message_factory.GetMessageClass(_known[0].FindMessageTypeByName(f"v1.{name}"))
        for name in (request, answer)
    ]
    with grpc.insecure_channel(f"unix://{PODRESOURCES}") as channel:
        call = channel.unary_unary(
            f"/v1.PodResourcesLister/{method}",
            request_serializer=classes[0].SerializeToString,
            response_deserializer=classes[1].FromString,
        )
        while True:
            try:
                return call(classes[0](), timeout=5)
            except grpc.RpcError as error:
                # The tests ask more often than kubelet lets anybody.
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                time.sleep(0.1)


def podresources() -> dict[tuple[str, str], dict[str, list[str]]]:
    """Device ids by resource, for each pod and container."""
    answer = _ask("List", "ListPodResourcesRequest", "ListPodResourcesResponse")
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for pod in answer.pod_resources:
        for each in pod.containers:
            devices = found.setdefault((pod.name, each.name), {})
            for entry in each.devices:
                devices.setdefault(entry.resource_name, []).extend(entry.device_ids)
    return found


def allocatable() -> dict[str, set[str]]:
    """What kubelet may give out, used devices included, by resource."""
    answer = _ask("GetAllocatableResources", "AllocatableResourcesRequest",
                  "AllocatableResourcesResponse")  # fmt: skip
    found: dict[str, set[str]] = {}
    for entry in answer.devices:
        found.setdefault(entry.resource_name, set()).update(entry.device_ids)
    return found
