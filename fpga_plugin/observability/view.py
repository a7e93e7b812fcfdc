"""The running daemon's status: who has what (`schema.StatusView`).

Pods' names and messages are foreign text. Their number is bounded here; the code that shows
them makes them safe for a terminal or a page.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from typing import Final

from fpga_plugin import __version__
from fpga_plugin.allocation.exposure import NEVER_CLEARED
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.requests.directory import PodDirectory
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.ids import InterfaceId
from fpga_plugin.observability.cards import look
from fpga_plugin.observability.device_owners import UNKNOWN
from fpga_plugin.observability.health import not_ready
from fpga_plugin.observability.refusals import Refusal, Refusals
from fpga_plugin.observability.schema import (
    BitstreamView,
    CardView,
    HistoryView,
    ProblemView,
    RefusalView,
    ResourceView,
    StatusView,
)
from fpga_plugin.observability.status_context import StatusContext
from fpga_plugin.plugin import Plugin

NAMES_SECONDS = 1.0
"""How long kubelet may take to tell pods' names; without them there are uids."""

ADMISSION_SECONDS: Final = 3600.0
"""For how long a pod whose admission failed counts as refused."""

PREPARE_SECONDS: Final = 300.0
"""After how long a claim that was refused is asked for no more: kubelet tries each 60 to 90 s."""

NOT_VERIFIED: Final = "not verified yet"


async def view(context: StatusContext) -> StatusView:
    """Everything as of now."""
    plugin = context.plugin
    readings = await context.readings()
    if plugin is not None:
        await learn_names(plugin.ledger, plugin.node.pods)
        await context.catalogue.refresh(plugin.node.store)
    used = {} if plugin is None else await context.history.last_used()
    reasons = not_ready(context)
    refusals = _refusals(context, context.refusals)
    shown = [] if plugin is None else look(context, plugin, readings, refusals)
    problems = [] if plugin is None else _problems(plugin)
    return {
        "version": __version__,
        "node": context.settings.node_name or "",
        "time": time.time(),
        "started": context.began,
        "ready": not reasons,
        "not_ready": reasons,
        "notes": [] if plugin is None else plugin.notes(),
        "trouble": {
            "refused": sum(one["open"] for one in refusals),
            "drained": sum(card["drained"] for card in shown),
            "failed": len(problems) + sum(map(_failed, shown)),
            "unusable": Counter(
                region["unusable"]
                for card in shown
                for region in card["regions"]
                if region["unusable"]
            ),
            "never_cleared": sum(card["memory"] == NEVER_CLEARED for card in shown),
            "kept": sum(region["kept"] is not None for card in shown for region in card["regions"]),
        },
        "scrub": context.settings.scrub.value,
        "sandbox": [
            {"name": one.name, "holds": one.holds, "detail": one.detail} for one in context.sandbox
        ],
        "resources": [] if plugin is None else resources(plugin),
        "cards": shown,
        "problems": problems,
        "refusals": refusals,
        "warnings": _refusals(context, context.warnings),
        "bitstreams": _bitstreams(context, used),
    }


def _failed(card: CardView) -> int:
    """Regions that no pod can use before a repair; a card that is gone counts as one."""
    if not card["present"]:
        return 1
    return sum(region["failed"] for region in card["regions"])


async def past(context: StatusContext, words: str = "") -> HistoryView:
    """What happened to the regions; `words` as for `selection`."""
    if context.plugin is not None:
        await context.catalogue.refresh(context.plugin.node.store)
    return {"time": time.time(), "events": await context.history.events(words)}


async def learn_names(ledger: Ledger, pods: PodDirectory) -> None:
    """Ask kubelet what the owners are called, unless all of them are known."""
    unknown = {
        device: (allocation.pod, allocation.number)
        for device, allocation in ledger.allocations.items()
        if allocation.pod is not None and pods.known(allocation.pod) is None
    }
    if not unknown:
        return
    try:
        async with asyncio.timeout(NAMES_SECONDS):
            holders = await pods.holders()
    except (FpgaPluginError, TimeoutError):
        return
    for device, (pod, generation) in unknown.items():
        allocation, names = ledger.allocations.get(device), holders.get(device, ())
        # Of another generation it may be the name of another pod, which has the device by now.
        same = allocation is not None and (allocation.pod, allocation.number) == (pod, generation)
        if same and len(names) == 1:
            pods.learn(pod, *names)


def resources(plugin: Plugin) -> list[ResourceView]:
    """How each resource stands with kubelet."""
    views: list[ResourceView] = []
    if (api := plugin.device_plugin) is None:
        return views
    for name, status in sorted(plugin.link.status.items()):
        devices = api.lists.devices(name)
        views.append(
            {
                "resource": name,
                "registered": status.registered,
                "streaming": status.streaming,
                "problem": status.problem,
                "devices": len(devices),
                "healthy": sum(device.healthy for device in devices),
            }
        )
    return views


def _problems(plugin: Plugin) -> list[ProblemView]:
    return [
        {"card": card, "error": problem.message, "hint": problem.hint}
        for card, problem in sorted(plugin.inventory.problems.items())
    ]


def _refusals(context: StatusContext, refusals: Refusals) -> list[RefusalView]:
    views: list[RefusalView] = []
    for one in refusals.latest():
        known = None if context.plugin is None else context.plugin.node.pods.known(one.pod)
        name = one.name or known or UNKNOWN
        views.append(
            {
                "at": one.at,
                "first": one.since,
                "times": one.times,
                "method": one.method,
                "devices": list(one.devices),
                "status": one.status,
                "message": one.message,
                "pod_uid": one.pod or "",
                "namespace": name.namespace,
                "pod": name.name,
                "claim": one.claim,
                "open": _open(context, one),
            }
        )
    return views


def _open(context: StatusContext, refusal: Refusal) -> bool:
    """Whether it still keeps a pod waiting; kubelet does not try an admission again."""
    if refusal.over or context.plugin is None:
        return False
    if refusal.method == "Allocate":
        return time.time() - refusal.at < ADMISSION_SECONDS
    if refusal.claim:
        return time.time() - refusal.at < PREPARE_SECONDS
    allocations = context.plugin.ledger.allocations
    return any(
        allocation.since <= refusal.at and refusal.pod in {None, allocation.pod}
        for allocation in map(allocations.get, refusal.devices)
        if allocation is not None
    )


def _bitstreams(context: StatusContext, used: Mapping[str, float]) -> list[BitstreamView]:
    mode = context.settings.trust.value
    return [
        {
            "interface_id": one.interface_id,
            "interface_alias": context.catalogue.interface_alias(InterfaceId(one.interface_id)),
            "bitstream_id": one.bitstream_id,
            "afu_id": one.afu_id,
            "name": one.name,
            "size": one.size,
            "last_used": used.get(one.afu_id),
            "trust": "refused" if one.problem else mode if one.examined else NOT_VERIFIED,
            "problem": one.problem,
        }
        for one in context.catalogue.listed
    ]
