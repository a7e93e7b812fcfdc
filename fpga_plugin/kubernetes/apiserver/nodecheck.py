"""Whether the node's kubelet and container runtime can do what pods with FPGAs need.

ResourceClaims need a kubelet that serves them; they and `FPGA_PLUGIN_CDI_DEVICES` need CDI.

Both versions stand in the Node object, which kubelet writes. A runtime without CDI starts a pod's
container without its devices, or not at all, and says so nowhere near the plugin. What is concluded
from a version may be wrong (distributions carry patches back), so nothing is refused by it: it is a
warning in the log, in the status and in an Event of the node. A kubelet that declares its features
(KEP-5328, on by default since 1.36) is new enough for everything checked here, whatever its version
string says. No feature that 1.37 declares says whether the runtime has CDI.

It is looked at after `wake` (kubelet registers the driver again once it was updated), and again
from time to time while there is something to warn of.
"""

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Final
from urllib.parse import quote as url

import msgspec
import structlog

from fpga_plugin.errors import NoSourceError, quote
from fpga_plugin.host.backoff import Backoff
from fpga_plugin.kubernetes.apiserver.rest import decoded, session

log = structlog.get_logger()

AGAIN_SECONDS: Final = 300.0
"""Between two looks while there is something to warn of: kubelet may write what it is by now only
after it has registered the driver."""

MIN_KUBELET: Final = (1, 34)
"""The first that serves resource.k8s.io/v1 and dra v1 (facts: KEP-4381)."""

_DEVICE_PLUGIN_CDI: Final = (1, 29)
"""The first in which DevicePluginCDIDevices is on by default (KEP-4009)."""

CDI_NOT_KNOWN: Final = (
    "it is not known whether the container runtime adds what FPGA_PLUGIN_CDI_DEVICES names"
    " (containerd does from version 2 on, CRI-O does)"
)

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
    declaredFeatures: list[_Text] | None = None  # noqa: N815  # the API's own name


class _Node(msgspec.Struct):
    status: _Status = msgspec.field(default_factory=_Status)


_node = msgspec.json.Decoder(_Node)


def for_claims(kubelet: str, runtime: str) -> tuple[str, ...]:
    """What ResourceClaims need and these versions lack, and what helps; empty: nothing is known.

    Args:
        kubelet: `v1.36.3`; empty: it is new enough.
        runtime: `containerd://2.1.4`.
    """
    of_kubelet = _too_old(
        kubelet,
        MIN_KUBELET,
        "this way to FPGAs takes Kubernetes 1.34 or later: pods may not get their devices; bring"
        " the node to 1.34, or set FPGA_PLUGIN_MODE=device-plugin",
    )
    return tuple(filter(None, (of_kubelet, _of_runtime(runtime, "their FPGAs"))))


def for_cdi_devices(kubelet: str, runtime: str) -> tuple[str, ...]:
    """The same for what a device plugin adds; an unknown runtime is a concern, too."""
    what = "what FPGA_PLUGIN_CDI_DEVICES adds"
    not_known = (
        f"the container runtime is {quote(runtime)}, and it is not known whether its containers"
        f" get {what}; look into one of them"
    )
    of_kubelet = _too_old(
        kubelet,
        _DEVICE_PLUGIN_CDI,
        f"takes CDI devices of device plugins from 1.29 on: containers do not get {what}; update"
        " it, or give the pods volumes",
    )
    return tuple(filter(None, (of_kubelet, _of_runtime(runtime, what, not_known))))


def _too_old(kubelet: str, first: tuple[int, int], consequence: str) -> str:
    version = _version(kubelet)
    if version is None or version >= first:
        return ""
    return f"kubelet is {quote(kubelet)}, and {consequence}"


def _of_runtime(text: str, what: str, not_known: str = "") -> str:
    match = _RUNTIME.fullmatch(text)
    name, version = ("", None) if match is None else (match[1], _version(match[2]))
    if name == "docker":
        return (
            f"the container runtime is {quote(text)}: cri-dockerd passes no CDI devices, so"
            f" containers do not get {what}; use containerd 2 or CRI-O"
        )
    if name != "containerd" or version is None:
        return "" if name == "cri-o" else not_known  # every CRI-O for such kubelets has CDI
    if version >= _CDI_ON:
        return ""
    if version >= _CDI_FIELD:
        return (
            f"the container runtime is {quote(text)}, in which CDI is off unless its configuration"
            " says `enable_cdi = true` (section io.containerd.grpc.v1.cri), which cannot be seen"
            " from here: set it, or update to containerd 2"
        )
    return (
        f"the container runtime is {quote(text)}, which knows no CDI devices, so containers do not"
        f" get {what}; update to containerd 2"
    )


def _version(text: str) -> tuple[int, ...] | None:
    match = _VERSION.match(text)
    return None if match is None else tuple(int(part) for part in match.groups() if part)


class NodeCheck:
    """Judges the versions of the node's kubelet and container runtime.

    Args:
        kubeconfig: path of a file with credentials; None: the pod's service account.
        node: ours; None: not known, so that nothing is asked.
        judge: what kubelet's and the runtime's versions lack.
        warn: called with each new concern.
        not_known: what to say while the versions are not known; empty: another check says it.
        backoff: how long to wait after failures.

    Attributes:
        concerns: what may keep pods from what they should get, as last heard.
    """

    def __init__(
        self,
        kubeconfig: str | None,
        node: str | None,
        *,
        judge: Callable[[str, str], tuple[str, ...]],
        warn: Callable[[str], None],
        not_known: str = "",
        backoff: Callable[[], Backoff] = lambda: Backoff(1.0, AGAIN_SECONDS),
    ) -> None:
        self._kubeconfig = kubeconfig
        self._node = node
        self._judge = judge
        self._warn = warn
        self._not_known = not_known
        self._backoff = backoff()
        self._wake = asyncio.Event()
        self.concerns: tuple[str, ...] = ()

    def wake(self) -> None:
        """Look again: the plugin starts, or a kubelet instance registered the driver."""
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled; nothing is asked before the first `wake`."""
        delay: float | None = None
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self._look()
            except NoSourceError as error:
                log.debug("versions of the node not known", error=error.message)
                if self._not_known and not self.concerns:
                    self._found((f"{self._not_known}: {error.message}",))
                delay = self._backoff.delay(error)
            else:
                self._backoff.reset()
                delay = AGAIN_SECONDS if self.concerns else None

    async def _look(self) -> None:
        """Read the node's versions.

        Raises:
            NoSourceError: the API server does not say, or cannot be asked.
        """
        if self._node is None:
            raise NoSourceError("NODE_NAME is not set", hint="set it from the downward API")
        path = f"/api/v1/nodes/{url(self._node, safe='')}"
        async with session(self._kubeconfig) as server:
            body = await server.call("GET", path)
        status = decoded(_node, body, path).status
        info = status.nodeInfo
        judged = "" if status.declaredFeatures else info.kubeletVersion
        self._found(self._judge(judged, info.containerRuntimeVersion))
        if not self.concerns:
            log.info(
                "versions of the node",
                kubelet=quote(info.kubeletVersion),
                runtime=quote(info.containerRuntimeVersion),
            )

    def _found(self, concerns: tuple[str, ...]) -> None:
        before, self.concerns = self.concerns, concerns
        for one in concerns:
            if one not in before:
                log.warning("kubelet or the container runtime may be too old", reason=one)
                self._warn(one)
