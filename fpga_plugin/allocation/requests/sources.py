"""The two sources of a whole pod: kubelet's Pods API, by uid, and the API server, by name.

Imported at the first question to one of them (`directory`).
"""

import asyncio
from typing import TYPE_CHECKING, Final

from fpga_plugin.allocation.requests.environment import ContainerRequests, container_requests
from fpga_plugin.errors import NoSourceError
from fpga_plugin.host.bounded import BoundedDict
from fpga_plugin.kubernetes.kubelet.podsapi import PodsApi
from fpga_plugin.kubernetes.names import PodName, PodUid
from fpga_plugin.kubernetes.pod import NoSuchPodError, Pod, PodSourceError

if TYPE_CHECKING:
    from fpga_plugin.kubernetes.apiserver.pods import ApiServer

KEPT_PODS: Final = 512
"""Pods of which it is remembered that kubelet told them; it runs 110 unless told otherwise."""


class PodSources:
    """Asks kubelet's Pods API and the API server for a pod.

    Args:
        pods_socket: of kubelet's Pods API; None: it is not asked.
        kubeconfig: credentials for the API server; None: the plugin's service account.
    """

    hint: Final = (
        "mount the socket of kubelet's Pods API (FPGA_PLUGIN_PODS_SOCKET), or let the plugin's"
        " service account get pods (or set FPGA_PLUGIN_KUBECONFIG)"
    )

    def __init__(self, *, pods_socket: str | None, kubeconfig: str | None) -> None:
        self._pods_api = None if pods_socket is None else PodsApi(pods_socket)
        self._kubeconfig = kubeconfig
        self._api_server: ApiServer | None = None
        self._told = BoundedDict[PodUid, None](KEPT_PODS)  # by this kubelet instance
        self._instances = 0

    def new_kubelet(self) -> None:
        """Another kubelet instance, which has told no pod yet."""
        self._told.clear()
        self._instances += 1

    async def from_kubelet(self, uid: PodUid) -> Pod:
        """The pod, by the Pods API.

        Raises:
            NoSuchPodError: kubelet has no such pod, or (1.36) does not have its pods yet.
            PodSourceError: it does not say it, or is not asked.
        """
        if self._pods_api is None:
            raise PodSourceError("kubelet's Pods API is switched off")
        instances = self._instances
        pod = await self._pods_api.get(uid)
        if instances == self._instances:
            self._told[uid] = None
        return pod

    async def from_api_server(self, uid: PodUid, name: PodName) -> Pod:
        """The pod, by the API server.

        Raises:
            NoSuchPodError: it says that there is no pod of this name.
            PodSourceError: it does not say it, or the name is another pod's by now.
        """
        pod = await (await self._api()).get(*name)
        if pod.uid != uid:
            raise PodSourceError(f"the API server's pod {name} is another one ({pod.uid})")
        return pod

    async def ended(self, uid: PodUid, name: PodName | None) -> bool:
        """Whether a pod is gone or has ended; without its name the API server is not asked.

        A kubelet that waits for its API server knows no pods yet, and some say so of each (1.36:
        pkg/kubelet/apis/pods, GetPod). So its word that there is none counts only of a pod that the
        same life of it has told.

        Raises:
            NoSourceError: it is unknown.
        """
        problems = []
        if self._pods_api is not None:
            try:
                return (await self.from_kubelet(uid)).ended
            except NoSuchPodError as error:
                if uid in self._told:
                    return True
                problems.append(f"{error.message}, and has not since it started")
            except PodSourceError as error:
                problems.append(error.message)
        if name is None:
            problems.append("its name is not known, so that the API server cannot be asked")
        else:
            try:
                pod = await (await self._api()).get(*name)
            except NoSuchPodError:
                return True
            except PodSourceError as error:
                problems.append(error.message)
            else:
                return pod.ended or pod.uid != uid
        raise NoSourceError(
            f"no source reports whether pod {uid} is still there: {'; '.join(problems)}",
            hint=self.hint,
        )

    @staticmethod
    def requests(pod: Pod) -> tuple[tuple[ContainerRequests, ...], bool]:
        """What each container of a pod asks for, and whether that lasts as long as the pod."""
        return container_requests(pod)

    async def _api(self) -> "ApiServer":
        if self._api_server is None:
            self._api_server = await asyncio.to_thread(_open, self._kubeconfig)
        return self._api_server


def _open(kubeconfig: str | None) -> "ApiServer":
    from fpga_plugin.kubernetes.apiserver.pods import ApiServer  # only where needed

    return ApiServer(kubeconfig)
