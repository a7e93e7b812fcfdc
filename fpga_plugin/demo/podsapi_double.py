"""Kubelet's Pods API as the double serves it: each pod by uid, with its spec and its status.

A stock kubelet sends no environment with PreStartContainer, so this is where the plugin learns what
a pod asks for, and from the status which of its containers starts. Kubelet 1.36 has the call GetPod
alone: the others are UNIMPLEMENTED here too.
"""

import time
from collections.abc import Mapping

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from fpga_plugin.demo.pod import DemoContainer, DemoPod
from fpga_plugin.kubernetes.messages import core_v1, v1alpha1
from fpga_plugin.kubernetes.names import PodUid
from fpga_plugin.kubernetes.pod import SANDBOX_CONDITION

_REASON = "CreateContainerConfigError"
"""Why a container waits whose PreStartContainer failed (pkg/kubelet/kuberuntime)."""


class PodsApiDouble(v1alpha1.PodsBase):
    """Answers GetPod, from what kubelet notes of its pods' containers.

    Args:
        pods: those that kubelet has, by uid.
    """

    def __init__(self, pods: Mapping[PodUid, DemoPod]) -> None:
        self._pods = pods
        self._states: dict[tuple[PodUid, str], core_v1.ContainerState] = {}

    # ---------------------------------------------------------------- what kubelet notes

    def waits(self, pod: DemoPod, container: str, message: str) -> None:
        """Its start failed."""
        self._states[pod.uid, container] = core_v1.ContainerState(
            waiting=core_v1.ContainerStateWaiting(reason=_REASON, message=message)
        )

    def runs(self, pod: DemoPod, container: str) -> None:
        """It started just now."""
        now = core_v1.Time(seconds=int(time.time()))
        self._states[pod.uid, container] = core_v1.ContainerState(
            running=core_v1.ContainerStateRunning(started_at=now)
        )

    def ended(self, pod: DemoPod, container: str, exit_code: int) -> None:
        """Its process ended."""
        running = self._states[pod.uid, container].running
        self._states[pod.uid, container] = core_v1.ContainerState(
            terminated=core_v1.ContainerStateTerminated(
                exit_code=exit_code, started_at=None if running is None else running.started_at
            )
        )

    def forget(self, pod: DemoPod) -> None:
        """Kubelet has the pod no longer."""
        for key in [key for key in self._states if key[0] == pod.uid]:
            del self._states[key]

    # ---------------------------------------------------------------- what it answers

    async def get_pod(self, message: v1alpha1.GetPodRequest) -> v1alpha1.GetPodResponse:
        """`Pods/GetPod`."""
        pod = self._pods.get(PodUid(message.pod_uid))
        if pod is None:
            raise GRPCError(Status.NOT_FOUND, "pod not found")
        return v1alpha1.GetPodResponse(pod=bytes(self._message(pod)))

    def _message(self, pod: DemoPod) -> core_v1.Pod:
        return core_v1.Pod(
            metadata=core_v1.ObjectMeta(namespace=pod.namespace, name=pod.name, uid=pod.uid),
            spec=core_v1.PodSpec(
                init_containers=[_container(one) for one in pod.init_containers],
                containers=[_container(one) for one in pod.containers],
            ),
            status=core_v1.PodStatus(
                phase="Running",
                conditions=[core_v1.PodCondition(type=SANDBOX_CONDITION, status="True")],
                init_container_statuses=[self._status(pod, one) for one in pod.init_containers],
                container_statuses=[self._status(pod, one) for one in pod.containers],
            ),
        )

    def _status(self, pod: DemoPod, container: DemoContainer) -> core_v1.ContainerStatus:
        state = self._states.get((pod.uid, container.name))
        return core_v1.ContainerStatus(name=container.name, state=state)


def _container(container: DemoContainer) -> core_v1.Container:
    return core_v1.Container(
        name=container.name,
        env=[core_v1.EnvVar(name=name, value=value) for name, value in container.env.items()],
        restart_policy="Always" if container.restartable else "",
    )
