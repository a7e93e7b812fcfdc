"""Keeps one resource registered, whatever kubelet does.

A life runs from a new socket to the end of the ListAndWatch stream on it:

    kubelet.sock is there -> serve -> Register -> kubelet opens ListAndWatch -> ... -> it ends

and it ends when the stream does, when a new kubelet.sock replaces the one that was registered with,
or when our socket file is gone while kubelet's is there. Then the old server is closed with its
connections and handlers. Only after that does the next life begin, on another socket. This order
serves every way in which kubelets handle a second registration of a resource:

- 1.25 and 1.26 answer OK for the same socket path without connecting, and refuse another path while
  the old stream is open;
- 1.27 to 1.36 take the newest, and when the old stream ends they disconnect the new one
  (kubernetes/kubernetes issues 121994 and 127803);
- 1.37 distinguishes them by their socket paths (kubernetes/kubernetes pull request 135437).
  It refuses a path that is still connected, and then forgets to disconnect it when its stream ends:
  the path is refused for good.

A registration counts once the stream is open: Register's OK alone says little.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from fpga_plugin.deviceplugin.endpoint import Endpoint
from fpga_plugin.deviceplugin.errors import KubeletDirectoryError, NotRegisteredError
from fpga_plugin.deviceplugin.register import register
from fpga_plugin.deviceplugin.service import DevicePlugin
from fpga_plugin.deviceplugin.sockets import KUBELET_SOCKET, check_directory
from fpga_plugin.deviceplugin.watch import KubeletDirectory
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.host.backoff import Backoff
from fpga_plugin.kubernetes.names import ResourceName

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times of a registration, in seconds.

    Attributes:
        register: how long Register may take; kubelet dials us within it (its own limit is 10 s).
        stream: how long after Register's answer kubelet may take to open ListAndWatch.
        steady: a life at least this long was a success, and what follows starts without delay.
        first_delay: before the second attempt; doubles with each further one.
        last_delay: the longest delay between attempts.
        recheck: between looks at kubelet's directory where inotify is not available.
    """

    register: float = 10.0
    stream: float = 5.0
    steady: float = 5.0
    first_delay: float = 0.1
    last_delay: float = 10.0
    recheck: float = 30.0


@dataclass(frozen=True, slots=True)
class ResourceStatus:
    """The state of a resource at kubelet.

    Attributes:
        registered: kubelet answered Register on the present socket with OK.
        streaming: kubelet holds a ListAndWatch stream and was sent the list.
        problem: why not; empty where both hold, or where nothing has gone wrong yet.
    """

    registered: bool = False
    streaming: bool = False
    problem: str = ""


class Registration:
    """One resource and its registrations; `run` is the task that keeps it registered.

    Attributes:
        opened: how often kubelet opened its stream.
    """

    def __init__(
        self,
        resource: ResourceName,
        api: DevicePlugin,
        directory: KubeletDirectory,
        timing: Timing,
    ) -> None:
        self._resource = resource
        self._api = api
        self._directory = directory
        self._timing = timing
        self._log = _log.bind(resource=resource)
        self._looked = asyncio.Event()
        self._endpoint: Endpoint | None = None
        self._registered = False
        self._problem = ""
        self._end: Callable[[str], None] | None = None
        self.opened = 0

    @property
    def status(self) -> ResourceStatus:
        """The resource's state at kubelet now."""
        streaming = self._endpoint is not None and self._endpoint.streams.streaming
        problem = "" if self._registered and streaming else self._problem
        return ResourceStatus(self._registered, streaming, problem)

    def resend(self) -> None:
        """Send the list again on the present stream, if there is one."""
        if self._endpoint is not None:
            self._endpoint.streams.resend()

    @property
    def behind(self) -> bool:
        """Whether the present list has not been sent to kubelet yet."""
        return self._endpoint is not None and self._endpoint.streams.behind

    def renew(self, reason: str) -> None:
        """End the present life, if there is one: the next begins on another socket."""
        if self._end is not None:
            self._end(reason)

    async def run(self) -> None:
        """Register, and again whenever that is due, until cancelled."""
        backoff = Backoff(self._timing.first_delay, self._timing.last_delay)
        with self._directory.listening(self._looked.set):
            while True:
                instance = await self._kubelet()
                began = asyncio.get_running_loop().time()
                try:
                    self._api.reconciler.kubelet_found(instance)
                    await self._serve(instance)
                except FpgaPluginError as error:
                    self._problem = str(error)
                except Exception:  # noqa: BLE001  # a defect must not end the registrations for good
                    self._problem = "an error in fpga-plugin: see its log"
                    self._log.exception("unexpected error in a registration")
                delay = backoff.delay()
                if asyncio.get_running_loop().time() - began >= self._timing.steady:
                    backoff.reset()
                    delay = 0.0
                self._log.warning(
                    "not registered with kubelet", reason=self._problem, retry_in=round(delay, 3)
                )
                await self._pause(delay, instance)

    async def _kubelet(self) -> str:
        """Wait until kubelet has a socket."""
        while (instance := self._directory.instance) is None:
            problem = self._why_no_kubelet()
            if problem != self._problem:
                self._problem = problem
                self._log.warning("waiting for kubelet", reason=problem)
            self._looked.clear()
            await self._looked.wait()
        return instance

    def _why_no_kubelet(self) -> str:
        try:
            check_directory(self._directory.path)
        except KubeletDirectoryError as error:
            return str(error)
        return str(
            NotRegisteredError(
                f"{KUBELET_SOCKET} is not in '{self._directory.path}'",
                hint="kubelet is not running, or FPGA_PLUGIN_KUBELET_DIR is not its directory",
            )
        )

    async def _pause(self, delay: float, failed: str) -> None:
        """Wait for `delay`, or until a kubelet other than the one that failed is there."""
        try:
            async with asyncio.timeout(delay):
                while self._directory.instance in {failed, None}:
                    self._looked.clear()
                    await self._looked.wait()
        except TimeoutError:
            pass

    async def _serve(self, instance: str) -> None:
        """One socket from binding to the end of its stream.

        Raises:
            NotRegisteredError: always, saying how it ended.
            KubeletDirectoryError: no socket can be made.
        """
        endpoint = self._endpoint = Endpoint(self._resource, self._api, self._directory.path)
        outdated = ""

        def end(reason: str) -> None:
            nonlocal outdated
            if reason and not outdated:
                outdated = reason
                scope.reschedule(0)

        def look() -> None:
            end(self._why_outdated(instance, endpoint))

        try:
            await endpoint.start()
            # Used as a scope: it has no time limit, it ends by `end`.
            async with asyncio.timeout(None) as scope:
                with self._directory.listening(look):
                    self._end = end
                    look()
                    began = asyncio.get_running_loop().time()
                    await register(
                        self._directory.path, self._resource, endpoint.name, self._timing.register
                    )
                    self._registered = True
                    await self._streaming(endpoint, began)
                    await endpoint.streams.lost.wait()
            raise NotRegisteredError("kubelet ended the stream of the device list")
        except TimeoutError:
            raise NotRegisteredError(outdated) from None
        finally:
            self._registered = False
            self._end = None
            await endpoint.stop()
            self._endpoint = None

    def _why_outdated(self, instance: str, endpoint: Endpoint) -> str:
        present = self._directory.instance
        if present is None:
            return ""  # no kubelet to register with: keep a stream that may still be read
        if present != instance:
            return "kubelet was restarted"
        if not endpoint.in_place:
            return f"{endpoint.name} was removed from kubelet's directory"
        return ""

    async def _streaming(self, endpoint: Endpoint, began: float) -> None:
        """Wait until kubelet opens its stream.

        Raises:
            NotRegisteredError: it opens none.
        """
        try:
            async with asyncio.timeout(self._timing.stream):
                await endpoint.streams.opened.wait()
        except TimeoutError:
            raise NotRegisteredError(
                f"kubelet accepted the registration of {endpoint.name} and did not ask for the"
                f" device list within {self._timing.stream:g} s"
            ) from None
        self.opened += 1
        self._problem = ""
        self._log.info(
            "registered with kubelet",
            endpoint=endpoint.name,
            seconds=round(asyncio.get_running_loop().time() - began, 6),
        )
