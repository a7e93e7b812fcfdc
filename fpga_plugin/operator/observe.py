"""FPGA_PLUGIN_OBSERVE: what is on this node, what would be wiped, what is missing; only looks.

The first step of an install. It runs without a privilege and without writing: it reads sysfs, the
store, kubelet's records and the plugin's journal, and asks whether the sources of pod specs answer.
What it says of a card is what the first start would do to it. Imported only where it is asked for.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Collection

import structlog

from fpga_plugin.bitstream.store import Store
from fpga_plugin.config.settings import ScrubPolicy, Settings
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.hardware.backend import Backend
from fpga_plugin.hardware.model import Card
from fpga_plugin.ids import parse_device_id
from fpga_plugin.ledger.journal import JournalError
from fpga_plugin.ledger.names import resource_names
from fpga_plugin.ledger.peek import peek
from fpga_plugin.pods.checkpoint import Checkpoint, read_checkpoint
from fpga_plugin.pods.pod import PodSourceError
from fpga_plugin.pods.podresources import PodResourcesClient

log = structlog.get_logger()

Judge = Callable[[str], object]
"""Raises a FpgaPluginError if a file, by its path in the store, is not trusted."""

_SECONDS = 3.0
"""For kubelet to accept a connection."""


async def observe(settings: Settings, backend: Backend, judge: Judge) -> None:
    """Say what is there and what would be done.

    Args:
        settings: all of them.
        backend: the node's hardware.
        judge: says whether a file of the store is trusted.

    Raises:
        FpgaPluginError: the hardware cannot be looked at.
    """
    for warning in settings.warnings:
        log.warning(warning)
    inventory = await asyncio.to_thread(backend.scan)
    for problem in inventory.problems.values():
        log.warning(
            "would skip card",
            card=problem.address.card_id,
            error=problem.message,
            hint=problem.hint,
        )
    checkpoint = await _records(settings)
    claimed = await asyncio.to_thread(_claimed, settings.state_dir)
    for card in inventory.cards.values():
        await _say_of_card(settings, card, checkpoint, claimed, judge)
    if not inventory.cards and not inventory.problems:
        log.warning(
            "no FPGA cards on this node",
            hint="the kernel's dfl-pci driver has to be bound to them: lspci -k -d ::1200",
        )
    await _say_of_pod_specs(settings)
    log.info("observing only: nothing is registered (FPGA_PLUGIN_OBSERVE)")


async def _records(settings: Settings) -> Checkpoint:
    """What kubelet has given out."""
    if settings.podresources_socket is not None:
        try:
            await PodResourcesClient(
                settings.podresources_socket, settings.resource_prefix
            ).snapshot()
        except FpgaPluginError as error:
            log.warning("kubelet's PodResources do not answer", error=str(error))
    try:
        return await asyncio.to_thread(
            read_checkpoint,
            os.path.join(settings.kubelet_dir, "kubelet_internal_checkpoint"),
            settings.resource_prefix,
        )
    except FpgaPluginError as error:
        log.warning("kubelet's checkpoint cannot be read", error=str(error))
        return Checkpoint()


def _claimed(state_dir: str) -> frozenset[str]:
    """Devices with an owner in the journal of an earlier life; empty: there was none."""
    try:
        return frozenset(peek(state_dir).owners)
    except JournalError as error:
        log.warning("the journal cannot be read", error=str(error))
        return frozenset()


async def _say_of_card(
    settings: Settings,
    card: Card,
    checkpoint: Checkpoint,
    claimed: Collection[str],
    judge: Judge,
) -> None:
    if not settings.cards.selects(card.id):
        log.info("would leave card alone", card=card.id, reason="FPGA_PLUGIN_CARDS")
        return
    resources = resource_names(settings.resource_prefix, card)
    ours = [entry for entry in checkpoint.entries if entry.resource in resources]
    foreign = sorted(
        {device for entry in ours for device in entry.devices if not _is_device_id(device)}
    )
    if foreign:
        log.warning(
            "would leave card alone",
            card=card.id,
            reason="another plugin's pods still have devices of this kind",
            foreign=foreign,
            pods=sorted({entry.pod_uid for entry in ours}),
            hint="delete these pods first (docs/migration.md)",
        )
        return
    held = {device for entry in ours for device in entry.devices} | set(claimed)
    regions = [region.id for region in card.regions]
    in_use = [region for region in regions if region in held or card.id in held]
    missing = await _missing(settings, card, judge)
    log.info(
        "would serve card",
        card=card.id,
        interface_id=card.interface_id,
        resources=resources,
        regions=regions,
        in_use=in_use,
        would_wipe=[] if missing else [region for region in regions if region not in in_use],
        missing=missing or None,
        hint=_without_blank(settings) if missing else None,
    )


def _is_device_id(text: str) -> bool:
    try:
        parse_device_id(text)
    except ValueError:
        return False
    return True


async def _missing(settings: Settings, card: Card, judge: Judge) -> str:
    """Why its regions cannot be blanked; empty if they can."""
    store = Store(settings.bitstream_dir)
    try:
        blank = await asyncio.to_thread(store.blank, card.interface_id)
        if blank is not None:
            await asyncio.to_thread(judge, store.relative(blank.path))
            return ""
    except FpgaPluginError as error:
        return str(error)
    return f"no blank bitstream at {store.blank_path(card.interface_id)}"


def _without_blank(settings: Settings) -> str:
    if settings.scrub is ScrubPolicy.BEST_EFFORT:
        return "FPGA_PLUGIN_SCRUB=best-effort: its free regions would be reset, and given out"
    return "its regions would be Unhealthy; FPGA_PLUGIN_SCRUB=best-effort does without"


async def _say_of_pod_specs(settings: Settings) -> None:
    """Which sources can tell what a pod asks for, on a kubelet that does not send it."""
    wrong: list[str] = []
    sources: list[str] = []
    if settings.pods_socket is None:
        wrong.append("FPGA_PLUGIN_PODS_SOCKET is empty")
    elif error := await asyncio.to_thread(_connects, settings.pods_socket):
        wrong.append(f"kubelet's Pods API: {settings.pods_socket} is not served ({error})")
    else:
        sources.append("Pods API")
    try:
        # Only here: it takes 10 MiB, and is nothing for the event loop.
        from fpga_plugin.pods.apiserver import ApiServer

        await ApiServer(settings.kubeconfig).check()
        sources.append("API server")
    except PodSourceError as error:
        wrong.append(str(error))
    if sources:
        log.info("pod specs", sources=sources, without=wrong or None)
    else:
        log.warning(
            "pod specs: no source answers",
            without=wrong,
            hint="a kubelet that sends no environment could start no container with a device",
        )


def _connects(path: str) -> str:
    """Why nobody listens at a socket; empty if somebody does."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_SECONDS)
        try:
            connection.connect(path)
        except OSError as error:
            return error.strerror or type(error).__name__
    return ""
