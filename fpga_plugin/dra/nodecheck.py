"""Whether the node's kubelet and container runtime can do what this door takes.

Both versions stand in the Node object, which kubelet writes. A runtime without CDI starts a pod's
container without its devices, or not at all, and says so nowhere near the plugin. What is concluded
from a version may be wrong (distributions carry patches back), so nothing is refused by it: it is a
warning in the log, in the status and in an Event of the node.

It is looked at when kubelet registers the driver, which a kubelet that was updated does anew, and
again from time to time while there is something to warn of.
"""

import asyncio
import re
from collections.abc import Callable
from typing import Annotated, Final
from urllib.parse import quote as url

import msgspec
import structlog

from fpga_plugin.api.rest import decoded, session
from fpga_plugin.backoff import Backoff
from fpga_plugin.errors import NoSourceError, quote

log = structlog.get_logger()

AGAIN_SECONDS: Final = 300.0
"""Between two looks while there is something to warn of: kubelet may write what it is by now only
after it has registered the driver."""

MIN_KUBELET: Final = (1, 34)
"""The first that serves resource.k8s.io/v1 and dra v1 (facts: KEP-4381)."""

_CDI_FIELD: Final = (1, 7, 2)
"""containerd that knows the CRI's field for CDI devices, which its configuration has to allow."""
_CDI_ON: Final = (2,)
"""containerd that allows it by default."""

_VERSION: Final = re.compile(r"v?([0-9]{1,6})\.([0-9]{1,6})(?:\.([0-9]{1,6}))?(?![0-9])")
_RUNTIME: Final = re.compile(r"([a-z][a-z0-9.-]{0,62})://(.{1,128})", re.DOTALL)

_Text = Annotated[str, msgspec.Meta(max_length=1024)]


class _Info(msgspec.Struct):
    kubeletVersion: _Text = ""  # noqa: N815  # the API's own name
    containerRuntimeVersion: _Text = ""  # noqa: N815  # the API's own name


class _Status(msgspec.Struct):
    nodeInfo: _Info = msgspec.field(default_factory=_Info)  # noqa: N815  # the API's own name


class _Node(msgspec.Struct):
    status: _Status = msgspec.field(default_factory=_Status)


_node = msgspec.json.Decoder(_Node)


def concerns(kubelet: str, runtime: str) -> tuple[str, ...]:
    """What these versions lack, and what helps; empty where nothing is known against them.

    Args:
        kubelet: `v1.36.3`.
        runtime: `containerd://2.1.4`.
    """
    return tuple(filter(None, (_of_kubelet(kubelet), _of_runtime(runtime))))


def _of_kubelet(text: str) -> str:
    version = _version(text)
    if version is None or version >= MIN_KUBELET:
        return ""
    return (
        f"kubelet is {quote(text)}, and this way to FPGAs takes Kubernetes 1.34 or later: pods may"
        " not get their devices; bring the node to 1.34, or set FPGA_PLUGIN_MODE=device-plugin"
    )


def _of_runtime(text: str) -> str:
    match = _RUNTIME.fullmatch(text)
    if match is None:
        return ""
    name, version = match[1], _version(match[2])
    if name == "docker":
        return (
            f"the container runtime is {quote(text)}: cri-dockerd passes no CDI devices, so"
            " containers do not get their FPGAs; use containerd 2 or CRI-O"
        )
    if name != "containerd" or version is None or version >= _CDI_ON:
        return ""
    if version >= _CDI_FIELD:
        return (
            f"the container runtime is {quote(text)}, in which CDI is off unless its configuration"
            " says `enable_cdi = true` (section io.containerd.grpc.v1.cri), which cannot be seen"
            " from here: set it, or update to containerd 2"
        )
    return (
        f"the container runtime is {quote(text)}, which knows no CDI devices, so containers do not"
        " get their FPGAs; update to containerd 2"
    )


def _version(text: str) -> tuple[int, ...] | None:
    match = _VERSION.match(text)
    return None if match is None else tuple(int(part) for part in match.groups() if part)


class NodeCheck:
    """Belongs to the event loop.

    Args:
        kubeconfig: path of a file with credentials; None: the pod's service account.
        node: ours.
        warn: is told of each concern, when it is new.
        backoff: how long to wait after failures.

    Attributes:
        concerns: what may keep pods from their devices, as last heard.
    """

    def __init__(
        self,
        kubeconfig: str | None,
        node: str,
        *,
        warn: Callable[[str], None],
        backoff: Callable[[], Backoff] = lambda: Backoff(1.0, AGAIN_SECONDS),
    ) -> None:
        self._kubeconfig = kubeconfig
        self._path = f"/api/v1/nodes/{url(node, safe='')}"
        self._warn = warn
        self._backoff = backoff()
        self._wake = asyncio.Event()
        self.concerns: tuple[str, ...] = ()

    def wake(self) -> None:
        """A life of kubelet registered the driver."""
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled; nothing is asked before the first `wake`."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            delay: float | None
            try:
                await self._look()
            except NoSourceError as error:
                # The slices need the same server: that it is away is told there.
                log.debug("versions of the node not known", error=error.message)
                delay = self._backoff.delay(error)
            else:
                self._backoff.reset()
                delay = AGAIN_SECONDS if self.concerns else None
            try:
                async with asyncio.timeout(delay):
                    await self._wake.wait()
            except TimeoutError:
                self._wake.set()

    async def _look(self) -> None:
        """Read the node's versions.

        Raises:
            NoSourceError: the API server does not tell.
        """
        async with session(self._kubeconfig) as server:
            body = await server.call("GET", self._path)
        info = decoded(_node, body, self._path).status.nodeInfo
        before, self.concerns = (
            self.concerns,
            concerns(info.kubeletVersion, info.containerRuntimeVersion),
        )
        for one in self.concerns:
            if one not in before:
                log.warning("the node may not serve claims", reason=one)
                self._warn(one)
        if not self.concerns:
            log.info(
                "versions of the node",
                kubelet=quote(info.kubeletVersion),
                runtime=quote(info.containerRuntimeVersion),
            )
