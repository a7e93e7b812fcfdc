"""A node to look at: `demo --serve` plays pods that come and go, and serves the plugin's page.

What is served is the plugin's own page and metrics. The pods are of a fixed cast: some load a
bitstream of the store, some want a blank region or a whole card, and one asks for a bitstream that
does not exist, so that a refusal can be seen.
"""

import asyncio
import itertools
import random
import shlex
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final

from grpclib.exceptions import GRPCError

from fpga_plugin.bitstreams.gbs import GBS
from fpga_plugin.bitstreams.store import StoreEntry
from fpga_plugin.demo.double import AdmissionError
from fpga_plugin.demo.node import RESOURCE_PREFIX, DemoNode
from fpga_plugin.demo.plugins import NoEndpointError
from fpga_plugin.demo.pod import DemoContainer, DemoPod
from fpga_plugin.demo.rehearsal import Tell
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.ids import AfuId, InterfaceId, Resource, ResourceKind
from fpga_plugin.kubernetes.names import ResourceName

ARRIVAL: Final = 2.0
"""Seconds between two pods."""

LIVES: Final = (5.0, 15.0)
"""Seconds that a pod runs: at least, at most."""

RETRY: Final = 3.0
"""Seconds after which a container that was refused is tried again; kubelet's are 10 and more."""

TRIES: Final = 3

ADDRESS_SECONDS: Final = 10.0
"""For the page to be served: the plugin begins with it 0.3 s after its start."""

NOBODYS: Final = "0" * 32
"""A bitstream id that is in no store."""

_FINDS: Final = (
    "FPGA_PLUGIN_STATE_DIR",
    "FPGA_PLUGIN_BACKEND",
    "FPGA_PLUGIN_SIMULATED_DIR",
    "FPGA_PLUGIN_BITSTREAM_DIR",
)
"""Settings by which a command finds the plugin, its cards and its store."""

_CAST: Final = ("compress", "match", "filter", "refused", "compress", "render", "blank", "card")
_TEAMS: Final = ("storage", "search", "video")


class ServeError(FpgaPluginError):
    """The page cannot be served."""


async def url(node: DemoNode) -> str:
    """Where the page is, once it is served.

    Raises:
        ServeError: it is not, within seconds.
    """
    try:
        async with asyncio.timeout(ADDRESS_SECONDS):
            while not (served := node.daemon.served):  # noqa: ASYNC110  # nothing reports it
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise ServeError(
            "the address cannot be had: another process has it, or it is not this computer's",
            hint="`--serve` alone takes a free port",
        ) from None
    return f"http://{served[0]}/"


def to_ask(node: DemoNode) -> str:
    """What a shell needs before `fpga-plugin status` or `card list` for them to find this node."""
    given = dict(node.settings.given)
    return " ".join(f"{name}={shlex.quote(given[name])}" for name in _FINDS)


async def pods_come_and_go(
    node: DemoNode, interface_id: InterfaceId, entries: Iterable[StoreEntry], tell: Tell
) -> None:
    """Until it is cancelled.

    Args:
        node: it has free cards of the interface id.
        interface_id: of the cards.
        entries: of the store; bitstreams of the interface id are asked for in turn.
        tell: what happens to pods.
    """
    afus = [
        entry.contents.afu_id
        for entry in entries
        if entry.interface_id == interface_id
        and entry.contents is not None
        and not entry.blank
        # The store may have images for Alveo cards, too.
        and entry.contents.kind.family == GBS.family
    ]
    traffic = _Traffic(node, tell)
    async with asyncio.TaskGroup() as lives:
        for pod in _pods(interface_id, list(dict.fromkeys(afus))):
            if traffic.has_room(pod):
                lives.create_task(traffic.live(pod))
            await asyncio.sleep(ARRIVAL)


def _pods(interface_id: InterfaceId, afus: list[AfuId]) -> Iterator[DemoPod]:
    """The cast, again and again."""
    region, card = (
        Resource(RESOURCE_PREFIX, kind, interface_id).name
        for kind in (ResourceKind.REGION, ResourceKind.WHOLE)
    )
    images = itertools.cycle(afus or [AfuId(NOBODYS)])
    for number, role in enumerate(itertools.cycle(_CAST), 1):
        env = {"FPGA_REGION_1": interface_id, "FPGA_AFU_1": NOBODYS}
        if role in {"blank", "card"}:
            env = {}
        elif role != "refused":
            env["FPGA_AFU_1"] = next(images)
        resource = ResourceName(card if role == "card" else region)
        yield DemoPod(
            name=f"{role}-{number}",
            namespace=_TEAMS[number % len(_TEAMS)],
            containers=(DemoContainer(name="main", devices={resource: 1}, env=env),),
        )


class _Traffic:
    """Pods on a node; kubelet admits and ends one at a time."""

    def __init__(self, node: DemoNode, tell: Tell) -> None:
        self._kubelet, self._tell = node.kubelet, tell
        self._one_at_a_time = asyncio.Lock()
        self._random = random.Random(16)  # noqa: S311  # the same every time

    def has_room(self, pod: DemoPod) -> bool:
        """Whether a scheduler would send the pod here."""
        kubelet = self._kubelet
        held = {(one.resource, device) for one in kubelet.held.values() for device in one.ids}
        return all(
            resource in kubelet.lists
            and any((resource, each) not in held for each in kubelet.lists[resource].healthy)
            for container in pod.containers
            for resource in container.devices
        )

    async def live(self, pod: DemoPod) -> None:
        """A pod's life."""
        kubelet, name = self._kubelet, f"{pod.namespace}/{pod.name}"
        try:
            async with self._one_at_a_time:
                await kubelet.admit(pod)
            devices = ", ".join(
                device for ids in kubelet.devices(pod, "main").values() for device in ids
            )
            if await self._start(pod, name):
                self._tell(f"{name} runs on {devices}")
                await asyncio.sleep(self._random.uniform(*LIVES))
                self._tell(f"{name} ends")
                await kubelet.remove_container(pod, "main")
        except (AdmissionError, GRPCError, NoEndpointError) as error:
            self._tell(f"{name} failed: {error}")
        finally:
            async with self._one_at_a_time:
                with suppress(GRPCError, NoEndpointError):
                    await kubelet.end_pod(pod)

    async def _start(self, pod: DemoPod, name: str) -> bool:
        for tried in range(TRIES):
            try:
                await self._kubelet.start_container(pod, "main")
            except GRPCError as error:
                if not tried:
                    self._tell(f"{name} is refused: {error.message}")
                await asyncio.sleep(RETRY)
            else:
                return True
        self._tell(f"{name} is deleted: it was refused {TRIES} times")
        return False
