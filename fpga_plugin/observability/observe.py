"""FPGA_PLUGIN_OBSERVE: what is on this node, what would be wiped, what is missing; only looks.

The first step of an install. It logs what the first start would do to each card, and which of
kubelet's and the API server's interfaces answer. Imported only where it is asked for.
"""

import asyncio
import socket

import structlog

from fpga_plugin.build import log_settings
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.hardware.backend import BIND_DRIVERS
from fpga_plugin.ids import is_device_id, ours
from fpga_plugin.kubernetes.kubelet.podresources import PodResourcesClient
from fpga_plugin.kubernetes.pod import PodSourceError
from fpga_plugin.observability.node_facts import NodeCard, look, resources
from fpga_plugin.settings.settings import Advertise, Settings

log = structlog.get_logger()

_SECONDS = 3.0
"""For kubelet to accept a connection."""


async def observe(settings: Settings) -> None:
    """Log what is there and what the first start would do.

    Raises:
        FpgaPluginError: the hardware cannot be looked at.
    """
    log_settings(settings)
    node = await asyncio.to_thread(look, settings)
    for problem in node.problems:
        log.warning(
            "would skip card",
            card=problem.address.card_id,
            error=problem.message,
            hint=problem.hint,
        )
    await _log_podresources(settings)
    if node.checkpoint_error:
        log.warning("kubelet's checkpoint cannot be read", error=node.checkpoint_error)
    if node.journal_error:
        log.warning("the journal cannot be read", error=node.journal_error)
    for card in node.cards:
        _log_card(settings, card)
    if not node.cards and not node.problems:
        log.warning(
            "no FPGA cards on this node",
            hint=BIND_DRIVERS,
        )
    await _log_pod_specs(settings)
    log.info("observing only: nothing is registered (FPGA_PLUGIN_OBSERVE)")


async def _log_podresources(settings: Settings) -> None:
    """Warn if kubelet's PodResources, which tell that a device was released, do not answer."""
    if settings.podresources_socket is None:
        return
    try:
        await PodResourcesClient(
            settings.podresources_socket, ours(settings.resource_prefix)
        ).snapshot()
    except FpgaPluginError as error:
        log.warning("kubelet's PodResources do not answer", error=str(error))


def _log_card(settings: Settings, seen: NodeCard) -> None:
    if seen.left_alone:
        foreign = {text for one in seen.foreign for text in one.devices if not is_device_id(text)}
        told = {
            "card": seen.card.id,
            "description": seen.card.description,
            "reason": seen.left_alone,
            "foreign": sorted(foreign) or None,
            "pods": sorted({one.pod_uid for one in seen.foreign}) or None,
        }
        if foreign or not seen.card.reprogrammable:
            log.warning("would leave card alone", **told)
        else:
            log.info("would leave card alone", **told)
        return
    functions = settings.advertise is Advertise.AF
    free = [each.region.id for each in seen.regions if not each.in_use]
    log.info(
        "would serve card",
        card=seen.card.id,
        interface_id=seen.card.interface_id,
        interface_alias=seen.alias,
        resources=resources(settings, seen),
        regions=[region.id for region in seen.card.regions],
        in_use=[each.region.id for each in seen.regions if each.in_use],
        memory=seen.memory,
        iommu=seen.card.iommu.value,
        given=seen.exposed or None,
        would_wipe=[] if seen.no_blank or functions else free,
        would_reset=free if functions else None,
        missing=seen.no_blank or None,
        hint=seen.without_blank if seen.no_blank else None,
    )


async def _log_pod_specs(settings: Settings) -> None:
    """Log which sources can tell what a pod asks for, on a kubelet that does not send it."""
    wrong: list[str] = []
    sources: list[str] = []
    if settings.pods_socket is None:
        wrong.append("FPGA_PLUGIN_PODS_SOCKET is empty")
    elif error := await asyncio.to_thread(_connects, settings.pods_socket):
        wrong.append(f"kubelet's Pods API: {settings.pods_socket} is not served ({error})")
    else:
        sources.append("Pods API")
    try:
        from fpga_plugin.kubernetes.apiserver.pods import ApiServer

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
