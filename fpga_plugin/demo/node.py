"""A node of its own for each demo: the real daemon, simulated cards, and the kubelet double.

Everything lives in one temporary folder, which is removed at any end.
Nothing else of the machine is touched or read, and no setting is taken from the environment.
"""

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Container, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from fpga_plugin.bitstreams.files import read_bytes
from fpga_plugin.bitstreams.kinds import image_of
from fpga_plugin.bitstreams.store import Store, StoreEntry
from fpga_plugin.bitstreams.xclbin import XCLBIN
from fpga_plugin.daemon.logs import configure_logging
from fpga_plugin.daemon.process import Daemon
from fpga_plugin.demo.double import KubeletDouble, Profile
from fpga_plugin.demo.pod import DemoPod
from fpga_plugin.demo.recorder import Recorder
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.hardware.image import RawImage
from fpga_plugin.ids import InterfaceId, known_resource
from fpga_plugin.kubernetes.grpc.unix_socket import socket_path
from fpga_plugin.plugin import Plugin
from fpga_plugin.settings.settings import (
    DEFAULT_INTERFACE_ID,
    LogFormat,
    LogLevel,
    Settings,
    load_settings,
)

RESOURCE_PREFIX, XRT_RESOURCE_PREFIX = "fpga.intel.com", "fpga.amd.com"

PR_SECONDS = 0.25
"""How long a simulated partial reconfiguration takes: long enough to be seen. Real ones take
0.1 s to 2 s."""

RECONCILE_SECONDS = 0.1
"""Between two looks at a stock kubelet's records, which alone show that a pod is gone: the default
of 2 s would make the demo as long again."""

_LOG = LogLevel.INFO, LogFormat.CONSOLE

CARDS, REGIONS = 2, 3
"""Simulated cards of each kind, and regions of each card (FPGA_PLUGIN_SIMULATED_CARDS' default)."""


@dataclass(frozen=True, slots=True)
class DemoNode:
    """A running node.

    Attributes:
        daemon: the process around the plugin.
        plugin: the real one.
        kubelet: its kubelet.
        settings: the plugin's, all of them given by the demo.
    """

    daemon: Daemon
    plugin: Plugin
    kubelet: KubeletDouble
    settings: Settings


def interface_ids(pod: DemoPod, entries: Iterable[StoreEntry]) -> tuple[InterfaceId, ...]:
    """The interface ids of the cards to simulate: the usual one, and those that the pod asks for.

    A kind that the store knows nothing about is not simulated, so that a mistyped resource is what
    it would be in a cluster: one that no node has.
    """
    stored = {entry.interface_id for entry in entries if entry.interface_id is not None}
    wanted: list[InterfaceId] = []
    for container in pod.all_containers:
        for resource in container.devices:
            known = known_resource(resource)
            if known is None or known.interface_id in wanted:
                continue
            if known.interface_id in stored | {DEFAULT_INTERFACE_ID}:
                wanted.append(known.interface_id)
    if DEFAULT_INTERFACE_ID not in wanted and (DEFAULT_INTERFACE_ID in stored or not wanted):
        wanted.insert(0, DEFAULT_INTERFACE_ID)
    return tuple(wanted)


def made_for_real_cards(kinds: Container[InterfaceId], entries: Iterable[StoreEntry]) -> list[str]:
    """Paths of the bitstreams that a simulated card programs and then shows another AFU id for.

    It cannot know what a circuit would answer, so it shows an image's first 16 bytes, which are
    the AFU id in images that were made for it, as those in `bitstreams/` are.
    """
    paths = []
    for entry in entries:
        interface_id = entry.interface_id
        if interface_id is None or interface_id not in kinds or entry.problem is not None:
            continue
        try:
            contents, image = image_of(read_bytes(entry.path), entry.path)
        except FpgaPluginError:
            continue  # the plugin will say so
        if isinstance(image, RawImage) and image.data[:16].hex() != contents.afu_id:
            paths.append(entry.path)
    return paths


@asynccontextmanager
async def running_node(
    store: Store,
    kinds: tuple[InterfaceId, ...],
    recorder: Recorder,
    *,
    profile: Profile,
    log: bool = False,
    address: str = "",
) -> AsyncIterator[DemoNode]:
    """A node from start to removal.

    Args:
        store: where bitstreams come from.
        kinds: interface ids of the cards.
        recorder: is notified of everything.
        profile: which kubelet is played.
        log: the plugin's log goes to standard error; else nowhere.
        address: where to serve page and metrics; empty: nowhere.

    Raises:
        FpgaPluginError: the plugin could not start.
    """
    async with AsyncExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="fpga-plugin-demo-")
        stack.push_async_callback(asyncio.to_thread, shutil.rmtree, folder, ignore_errors=True)
        nowhere = stack.enter_context(open(os.devnull, "w"))  # noqa: ASYNC230, SIM115  # the stack closes it; no disk
        configure_logging(*_LOG, sys.stderr if log else nowhere)
        stack.callback(configure_logging, *_LOG)
        environment = _environment(folder, store, kinds)
        if address:
            environment |= {
                "FPGA_PLUGIN_HTTP_ADDRESS": address,
                "FPGA_PLUGIN_STATUS_PAGE": "true",
                "NODE_NAME": "demo",
            }
        if address or not profile.deallocate:
            path = stack.enter_context(socket_path(folder, "podresources.sock"))
            environment["FPGA_PLUGIN_PODRESOURCES_SOCKET"] = path
        if not profile.env:
            path = stack.enter_context(socket_path(folder, "pods.sock"))
            environment["FPGA_PLUGIN_PODS_SOCKET"] = path
        if not profile.deallocate:
            environment["FPGA_PLUGIN_RECONCILE_INTERVAL"] = str(RECONCILE_SECONDS)
        settings = load_settings(environment)
        kubelet = KubeletDouble(
            os.path.join(folder, "kubelet"),
            profile=profile,
            podresources_path=settings.podresources_socket,
            pods_path=settings.pods_socket,
        )
        kubelet.listeners.append(recorder.on_list)
        await kubelet.start()
        stack.push_async_callback(kubelet.stop)
        daemon = Daemon(settings, observer=recorder)
        plugin = await daemon.start()
        stack.push_async_callback(daemon.stop)
        recorder.watch(plugin.ledger)
        # Kubelet goes first: lists that end are not worth a line.
        stack.push_async_callback(kubelet.stop)
        stack.callback(recorder.mute)
        yield DemoNode(daemon, plugin, kubelet, settings)


def _environment(folder: str, store: Store, kinds: Iterable[InterfaceId]) -> dict[str, str]:
    """The settings of a node that touches nothing of this machine."""
    return {
        "FPGA_PLUGIN_RESOURCE_PREFIX": RESOURCE_PREFIX,
        "FPGA_PLUGIN_BACKEND": "simulated",
        "FPGA_PLUGIN_XRT_RESOURCE_PREFIX": XRT_RESOURCE_PREFIX,
        "FPGA_PLUGIN_SIMULATED_CARDS": ",".join(_group(kind, store) for kind in kinds),
        "FPGA_PLUGIN_SIMULATED_DIR": os.path.join(folder, "cards"),
        "FPGA_PLUGIN_SIMULATED_PR_SECONDS": str(PR_SECONDS),
        "FPGA_PLUGIN_STATE_DIR": os.path.join(folder, "state"),
        "FPGA_PLUGIN_KUBELET_DIR": os.path.join(folder, "kubelet"),
        "FPGA_PLUGIN_BITSTREAM_DIR": store.root,
        # Switched off: they would be this machine's, not the demo's.
        "FPGA_PLUGIN_PODRESOURCES_SOCKET": "",
        "FPGA_PLUGIN_PODS_SOCKET": "",
        "FPGA_PLUGIN_CGROUP_ROOT": "",
        "FPGA_PLUGIN_HTTP_ADDRESS": "",
    }


def _group(kind: InterfaceId, store: Store) -> str:
    """Simulated cards of an interface id: Alveo ones where the store has xclbin files alone."""
    paths = [entry.path for entry in store.list() if entry.interface_id == kind]
    alveo = bool(paths) and all(path.endswith(f".{XCLBIN.ending}") for path in paths)
    return f"{CARDS}x1+alveo@{kind}" if alveo else f"{CARDS}x{REGIONS}@{kind}"
