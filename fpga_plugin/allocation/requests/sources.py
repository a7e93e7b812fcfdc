"""The two sources of a whole pod: kubelet's Pods API, by uid, and the API server, by name.

Each costs memory and time to import, so it is imported at the first question to it, in a thread.
"""

import asyncio
from typing import TYPE_CHECKING, Final

from fpga_plugin.errors import NoSourceError
from fpga_plugin.host.bounded import BoundedDict
from fpga_plugin.kubernetes.names import PodName, PodUid
from fpga_plugin.kubernetes.pod import NoSuchPodError, Pod, PodSourceError

if TYPE_CHECKING:
    from fpga_plugin.kubernetes.apiserver.pods import ApiServer
    from fpga_plugin.kubernetes.kubelet.podsapi import PodsApi

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
        self._pods_socket = pods_socket
        self._pods_api: PodsApi | None = None
        self._kubeconfig = kubeconfig
        self._api_server: ApiServer | None = None
        self.new_kubelet()

    def new_kubelet(self) -> None:
        """Another kubelet instance, which has told no pod yet."""
        self._told = BoundedDict[PodUid, None](KEPT_PODS)

    async def from_kubelet(self, uid: PodUid) -> Pod:
        """The pod, by the Pods API.

        Raises:
            NoSuchPodError: kubelet has no such pod, or (1.36) does not have its pods yet.
            PodSourceError: it does not say it, or is not asked.
        """
        if self._pods_socket is None:
            raise PodSourceError("kubelet's Pods API is switched off")
        told = self._told  # by the instance that is asked
        if self._pods_api is None:
            self._pods_api = await asyncio.to_thread(_pods_api, self._pods_socket)
        pod = await self._pods_api.get(uid)
        told[uid] = None
        return pod

    async def from_api_server(self, uid: PodUid, name: PodName) -> Pod:
        """The pod, by the API server.

        Raises:
            NoSuchPodError: it has no pod of this name, or the name is another pod's by now.
            PodSourceError: it does not say it.
        """
        pod = await (await self._api()).get(*name)
        if pod.uid != uid:
            raise NoSuchPodError(f"the API server's pod {name} is another one ({pod.uid})")
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
                return (await self.from_api_server(uid, name)).ended
            except NoSuchPodError:
                return True
            except PodSourceError as error:
                problems.append(error.message)
        raise NoSourceError(
            f"no source reports whether pod {uid} is still there: {'; '.join(problems)}",
            hint=self.hint,
        )

    async def _api(self) -> "ApiServer":
        if self._api_server is None:
            self._api_server = await asyncio.to_thread(_api_server, self._kubeconfig)
        return self._api_server


def _pods_api(socket: str) -> "PodsApi":
    from fpga_plugin.kubernetes.kubelet.podsapi import PodsApi  # only where needed

    return PodsApi(socket)


def _api_server(kubeconfig: str | None) -> "ApiServer":
    from fpga_plugin.kubernetes.apiserver.pods import ApiServer  # only where needed

    return ApiServer(kubeconfig)
