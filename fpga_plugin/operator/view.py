"""The running daemon's status: who has what (`schema.StatusView`).

Pods' names and messages are foreign text. Their number is bounded here; whoever shows them makes
them safe for a terminal or a page.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from fpga_plugin import __version__
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.hardware.model import Card, Readings, Region
from fpga_plugin.ids import CardId, DeviceId, InterfaceId
from fpga_plugin.ledger.exposure import memory_state
from fpga_plugin.ledger.ledger import Ledger, card_of
from fpga_plugin.ledger.records import Claim, Condition, Debug, RegionRecord
from fpga_plugin.operator.health import not_ready
from fpga_plugin.operator.owners import UNKNOWN, Use, by_device, who
from fpga_plugin.operator.refusals import Refusal, Refusals
from fpga_plugin.operator.schema import (
    BitstreamView,
    CardView,
    ClockView,
    HistoryView,
    KeptView,
    OwnerView,
    ProblemView,
    RefusalView,
    RegionView,
    ResourceView,
    StatusView,
)
from fpga_plugin.operator.survey import Survey
from fpga_plugin.operator.unusable import unusable
from fpga_plugin.plugin import Plugin
from fpga_plugin.pods.directory import PodDirectory
from fpga_plugin.regions import functions

NAMES_SECONDS = 1.0
"""How long kubelet may take to tell pods' names; without them there are uids."""

ADMISSION_SECONDS: Final = 3600.0
"""For how long a pod whose admission failed counts as refused."""

PREPARE_SECONDS: Final = 300.0
"""After how long a claim that was refused is asked for no more: kubelet tries each 60 to 90 s."""

NOT_VERIFIED: Final = "not verified yet"


async def view(survey: Survey) -> StatusView:
    """Everything as of now."""
    plugin = survey.plugin
    readings = await survey.readings()
    if plugin is not None:
        await learn_names(plugin.ledger, plugin.node.pods)
        await survey.catalogue.refresh(plugin.node.store)
    used = {} if plugin is None else await survey.past.last_used()
    reasons = not_ready(survey)
    refusals = _refusals(survey, survey.refusals)
    cards = [] if plugin is None else _cards(survey, plugin, readings, refusals)
    problems = [] if plugin is None else _problems(plugin)
    return {
        "version": __version__,
        "node": survey.settings.node_name or "",
        "time": time.time(),
        "started": survey.began,
        "ready": not reasons,
        "not_ready": reasons,
        "notes": [] if plugin is None else plugin.notes(),
        "trouble": {
            "refused": sum(one["open"] for one in refusals),
            "drained": sum(card["drained"] for card in cards),
            "failed": len(problems) + sum(map(_failed, cards)),
            "unusable": Counter(
                region["unusable"]
                for card in cards
                for region in card["regions"]
                if region["unusable"]
            ),
            "never_cleared": 0 if plugin is None else _never_cleared(plugin.ledger),
            "kept": sum(region["kept"] is not None for card in cards for region in card["regions"]),
        },
        "scrub": survey.settings.scrub.value,
        "sandbox": [
            {"name": one.name, "holds": one.holds, "detail": one.detail} for one in survey.sandbox
        ],
        "resources": [] if plugin is None else _resources(plugin),
        "cards": cards,
        "problems": problems,
        "refusals": refusals,
        "warnings": _refusals(survey, survey.warnings),
        "bitstreams": _bitstreams(survey, used),
    }


def _failed(card: CardView) -> int:
    """Regions that nobody can use before somebody mends them; a card that is gone counts as one."""
    if not card["present"]:
        return 1
    return sum(region["failed"] for region in card["regions"])


def _never_cleared(ledger: Ledger) -> int:
    """Cards that have no knob to clear their memory with."""
    return sum(not card.clears_memory for card in ledger.cards.values())


async def past(survey: Survey, words: str = "") -> HistoryView:
    """What happened to the regions; `words` as for `selection`."""
    if survey.plugin is not None:
        await survey.catalogue.refresh(survey.plugin.node.store)
    return {"time": time.time(), "events": await survey.past.events(words)}


async def learn_names(ledger: Ledger, pods: PodDirectory) -> None:
    """Ask kubelet what the owners are called, unless all of them are known."""
    unknown = {
        device: (claim.pod, claim.generation)
        for device, claim in ledger.claims.items()
        if claim.pod is not None and pods.known(claim.pod) is None
    }
    if not unknown:
        return
    try:
        async with asyncio.timeout(NAMES_SECONDS):
            holders = await pods.holders()
    except (FpgaPluginError, TimeoutError):
        return
    for device, (pod, generation) in unknown.items():
        claim, names = ledger.claims.get(device), holders.get(device, ())
        # Of another generation it may be the name of another pod, which has the device by now.
        same = claim is not None and (claim.pod, claim.generation) == (pod, generation)
        if same and len(names) == 1:
            pods.learn(pod, *names)


def _resources(plugin: Plugin) -> list[ResourceView]:
    views: list[ResourceView] = []
    if (api := plugin.device_plugin) is None:
        return views
    for name, status in sorted(plugin.link.status.items()):
        devices = api.claims.devices(name)
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


def _health(plugin: Plugin) -> Mapping[DeviceId, bool]:
    """Whether each device is well; of one that nobody has, whether it is given out."""
    if plugin.door is not None:
        return plugin.door.healthy()
    if (api := plugin.device_plugin) is None:
        return {}
    listed = (device for name in plugin.link.status for device in api.claims.devices(name))
    return {device.id: device.healthy for device in listed}


def _cards(
    survey: Survey,
    plugin: Plugin,
    readings: Mapping[CardId, Readings],
    refusals: Iterable[RefusalView],
) -> list[CardView]:
    ledger = plugin.ledger
    health = _health(plugin)
    refused = {
        (device, one["claim"]): one["message"]
        for one in refusals
        if one["open"] and one["method"] != "Allocate"
        for device in one["devices"]
    }
    holders = by_device(ledger)
    gone = {card_of(device) for device in ledger.claims} - ledger.cards.keys()
    return [
        _card(
            plugin,
            card_id,
            readings.get(card_id, Readings()),
            lambda interface_id: _alias(survey, plugin, interface_id),
            lambda region: _region(
                survey, plugin, region, health, refused=refused, holders=holders
            ),
        )
        for card_id in sorted(ledger.cards.keys() | gone)
    ]


def _card(
    plugin: Plugin,
    card_id: CardId,
    readings: Readings,
    alias: Callable[[InterfaceId], str],
    shown: Callable[[Region], RegionView],
) -> CardView:
    ledger = plugin.ledger
    card = ledger.cards.get(card_id)
    return {
        "card": card_id,
        "interface_id": "" if card is None else card.interface_id,
        "interface_alias": "" if card is None else alias(card.interface_id),
        "description": "" if card is None else card.description,
        "numa_node": None if card is None else card.numa_node,
        "present": card is not None,
        "mode": ledger.mode(card_id).value,
        "drained": card_id in ledger.drained,
        "memory": "" if card is None else memory_state(card, debt=card_id in ledger.debts),
        "iommu": "" if card is None else card.iommu.value,
        "note": _note(plugin, card_id, card),
        "temperatures": dict(readings.temperatures),
        "power": dict(readings.power),
        "regions": [shown(region) for region in _present(plugin, card_id, card)],
    }


def _alias(survey: Survey, plugin: Plugin, interface_id: InterfaceId) -> str:
    """What people call it: as resources do, else as the store's manifest does now."""
    return plugin.ledger.aliases.get(interface_id) or survey.catalogue.interface_alias(interface_id)


def _present(plugin: Plugin, card_id: CardId, card: Card | None) -> list[Region]:
    """The card's regions; of one that is gone, those that still have an owner."""
    if card is not None:
        return list(card.regions)
    return [
        Region(card_id, int(region.rpartition("-p")[2]), grant)
        for claim in plugin.ledger.claims_on(card_id)
        for region, grant in claim.grants.items()
    ]


def _note(plugin: Plugin, card_id: CardId, card: Card | None) -> str:
    ledger = plugin.ledger
    if card is None:
        return "the card is gone, and its owner is still there"
    notes = []
    if (why := ledger.foreign.get(card_id)) is not None:
        notes.append(f"left alone: {why}")
    notes += filter(None, (ledger.exposure.note(card), functions.note(ledger, card)))
    if problem := plugin.blanks.problem(card.interface_id):
        notes.append(f"no-blank-image: {problem}")
    if not card.complete:
        notes.append(f"{len(card.regions)} of {card.ports} regions have a driver")
    if card_id in ledger.unreconciled:
        notes.append("who has it is not known: kubelet's records were not read since it was found")
    strangers = [one for region in card.regions for one in ledger.strangers(region) if one.left]
    if lent := sorted({one.pod for one in strangers if one.pod is not None}):
        notes.append(
            f"pod {', '.join(lent)} still runs and may open a region of it: device numbers changed"
            " after it was given its node"
        )
    if card_id in ledger.debts:
        notes.append("its memory is not cleared yet" + _memory_waits_for(plugin, card_id))
    return "; ".join(notes)


def _memory_waits_for(plugin: Plugin, card_id: CardId) -> str:
    ledger = plugin.ledger
    if ledger.claims_on(card_id):
        return ", because a region of it is in use"
    if former := sorted({one.pod for one in ledger.left_on(card_id) if one.pod is not None}):
        return f", because pod {', '.join(former)}, which had a region of it, may still run"
    return ""


def _region(
    survey: Survey,
    plugin: Plugin,
    region: Region,
    health: Mapping[DeviceId, bool],
    *,
    refused: Mapping[tuple[str, str], str],
    holders: Mapping[DeviceId, Use],
) -> RegionView:
    ledger = plugin.ledger
    record = ledger.record(region.id)
    claim = ledger.region_claim(region.id)
    device = DeviceId(region.id) if claim is None else claim.device
    holder = None if claim is None else holders.get(claim.device)
    trouble = ledger.trouble(region.id)
    kept = ledger.kept(region.id)
    why = unusable(plugin, survey.settings.scrub, region)
    return {
        "region": region.id,
        "node": str(region.grant),
        "ownership": ledger.ownership(region.id).value,
        "condition": record.condition.value,
        "reason": trouble or record.reason,
        "failed": (bool(trouble) and kept is None) or record.condition is Condition.FAULTED,
        "unusable": "" if why is None else why.value,
        "afu_id": record.afu_id or "",
        "bitstream": survey.catalogue.name(record.afu_id or ""),
        "clock": _clock(plugin, record),
        "healthy": health.get(device, False),
        "refused": "" if claim is None else refused.get((claim.device, _asks(holder)), ""),
        "kept": None if kept is None else _kept(plugin, kept),
        "owner": None if claim is None else _owner(plugin, claim, holders),
    }


def _kept(plugin: Plugin, kept: Debug) -> KeptView:
    return {
        "pod_uid": kept.pod,
        "namespace": kept.namespace,
        "pod": kept.name,
        "failure": kept.failure,
        "seconds_left": 0.0 if plugin.debugging is None else plugin.debugging.left(kept),
    }


def _clock(plugin: Plugin, record: RegionRecord) -> ClockView | None:
    plan = plugin.operations.clocks.get(record.region)
    if plan is None or record.condition is not Condition.PROGRAMMED:
        return None
    return {"state": plan.state.value, "detail": plan.detail}


def _asks(use: Use | None) -> str:
    """By which ResourceClaim an owner asked; empty: by none."""
    return "" if use is None else use.claim.full_name


def _owner(plugin: Plugin, claim: Claim, holders: Mapping[DeviceId, Use]) -> OwnerView:
    return {
        **who(claim.device, claim.pod, holders, plugin.node.pods.known),
        "device": claim.device,
        "resource": claim.resource,
        "ownership": claim.ownership.value,
        "since": claim.since or None,
    }


def _problems(plugin: Plugin) -> list[ProblemView]:
    return [
        {"card": card, "error": problem.message, "hint": problem.hint}
        for card, problem in sorted(plugin.inventory.problems.items())
    ]


def _refusals(survey: Survey, refusals: Refusals) -> list[RefusalView]:
    views: list[RefusalView] = []
    for one in refusals.latest():
        known = None if survey.plugin is None else survey.plugin.node.pods.known(one.pod)
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
                "open": _open(survey, one),
            }
        )
    return views


def _open(survey: Survey, refusal: Refusal) -> bool:
    """Whether it still keeps a pod waiting; kubelet does not try an admission again."""
    if refusal.over or survey.plugin is None:
        return False
    if refusal.method == "Allocate":
        return time.time() - refusal.at < ADMISSION_SECONDS
    if refusal.claim:
        return time.time() - refusal.at < PREPARE_SECONDS
    claims = survey.plugin.ledger.claims
    return any(
        claim.since <= refusal.at and refusal.pod in {None, claim.pod}
        for claim in map(claims.get, refusal.devices)
        if claim is not None
    )


def _bitstreams(survey: Survey, used: Mapping[str, float]) -> list[BitstreamView]:
    mode = survey.settings.trust.value
    return [
        {
            "interface_id": one.interface_id,
            "interface_alias": survey.catalogue.interface_alias(InterfaceId(one.interface_id)),
            "bitstream_id": one.bitstream_id,
            "afu_id": one.afu_id,
            "name": one.name,
            "size": one.size,
            "last_used": used.get(one.afu_id),
            "trust": "refused" if one.problem else mode if one.examined else NOT_VERIFIED,
            "problem": one.problem,
        }
        for one in survey.catalogue.listed
    ]
