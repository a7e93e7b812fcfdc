"""The metrics, in Prometheus' terms: what is counted, and gauges taken at the time of the scrape.

Names and labels follow Prometheus' conventions (prometheus.io/docs/practices/naming). No label has
a pod's name, nor anything else that a tenant chose: docs/metrics.md lists them all. The gauges of
cards and regions are counts of what status and page show (`cards`).

Imported by the first scrape.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, cast

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from fpga_plugin import __version__
from fpga_plugin.allocation.exposure import NEVER_CLEARED
from fpga_plugin.allocation.journal.records import CardMode, Condition, Ownership
from fpga_plugin.hardware.model import Readings
from fpga_plugin.host.instruments import Histogram, Labels
from fpga_plugin.ids import CardId
from fpga_plugin.observability.cards import look
from fpga_plugin.observability.counters import Counters
from fpga_plugin.observability.health import not_ready
from fpga_plugin.observability.schema import CardView, ResourceView
from fpga_plugin.observability.status_context import StatusContext
from fpga_plugin.observability.unusable import Unusable
from fpga_plugin.observability.view import resources
from fpga_plugin.plugin import Plugin
from fpga_plugin.settings.settings import ScrubPolicy

PREFIX = "fpga_plugin"

Samples = Iterable[tuple[Labels, float]]

_OF_A_CARD: Final[Sequence[tuple[str, str, Callable[[Plugin, CardView], float]]]] = (
    (
        "regions_failed",
        "Regions that cannot be given to anybody: faulted, or their hardware reports a failure.",
        lambda _, card: sum(region["failed"] for region in card["regions"]),
    ),
    (
        "regions_kept",
        "Regions that are kept for debugging: nobody owns them, and nobody is given them.",
        lambda _, card: sum(region["kept"] is not None for region in card["regions"]),
    ),
    (
        "card_left_alone",
        "Whether a card is left alone because another plugin's pods hold it.",
        lambda plugin, card: card["card"] in plugin.ledger.foreign,
    ),
    (
        "card_drained",
        "Whether the operator has taken a card out of service.",
        lambda _, card: card["drained"],
    ),
    (
        "card_degraded",
        "Signals that a card throttles or was in trouble and works on; the log names them.",
        lambda plugin, card: len(plugin.inventory.degraded.get(CardId(card["card"]), ())),
    ),
    (
        "memory_clear_pending",
        "Whether a card's on-card memory may still hold an earlier tenant's data.",
        lambda plugin, card: card["card"] in plugin.ledger.memory_clear_pending,
    ),
    (
        "memory_never_cleared",
        "Whether a card has on-card memory that is not cleared between two tenants.",
        lambda _, card: card["memory"] == NEVER_CLEARED,
    ),
)
"""Gauges with the label `card`."""


def exposition(
    context: StatusContext, readings: Mapping[CardId, Readings], *, newer: bool
) -> tuple[bytes, str]:
    """All metrics as text, and its content type, on the event loop.

    Args:
        context: what is shown.
        readings: the cards' sensors.
        newer: OpenMetrics, for those who ask for it, as Prometheus does; else the older format.
    """
    collected = cast(Collector, _Collected(collect(context, readings)))
    if newer:
        body: bytes = openmetrics.generate_latest(collected)  # type: ignore[no-untyped-call]  # has none
        return body, openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(collected), CONTENT_TYPE_PLAIN_0_0_4


class _Collected:
    """A registry, as the library's writers expect it."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def collect(context: StatusContext, readings: Mapping[CardId, Readings]) -> Iterator[Metric]:
    """Everything as of now."""
    yield _gauge("build_info", "Version of the plugin.", ["version"], [((__version__,), 1)])
    yield _one(
        "ready",
        "Whether every resource is registered and kubelet holds its stream.",
        not not_ready(context),
    )
    yield _gauge(
        "confined",
        "Whether a measure of the sandbox holds.",
        ["measure"],
        [((one.name,), one.holds) for one in context.sandbox],
    )
    yield from _counted(context.counters)
    if (plugin := context.plugin) is not None:
        cards = look(context, plugin, readings)
        present = [card for card in cards if card["present"]]
        yield from _kubelet(plugin, resources(plugin))
        yield from _cards(plugin, present)
        yield from _regions(present)
        yield _one(
            "cards_missing", "Cards that are gone and have owners.", len(cards) - len(present)
        )
        yield from _work(plugin)
        yield from _best_effort(context, plugin, present)
    yield from _sensors(readings)
    # CPU, memory and open files of this process, under the names that every exporter uses.
    yield from ProcessCollector(registry=None).collect()


def _counted(counters: Counters) -> Iterator[Metric]:
    for name, help_, labels, counter in (
        (
            "calls",
            "Calls of kubelet by method and gRPC status.",
            ["method", "status"],
            counters.calls,
        ),
        (
            "failures",
            "Refused or failed PreStarts, and work on regions that failed, by kind of error.",
            ["operation", "reason"],
            counters.failures,
        ),
        (
            "region_failures",
            "Work on a region that failed, by card.",
            ["card"],
            counters.port_failures,
        ),
        (
            "http_connections_dropped",
            "HTTP connections that were closed before they had their answer, by reason.",
            ["reason"],
            counters.http_dropped,
        ),
    ):
        yield _counter(name, help_, labels, counter.items())
    for name, help_, label, durations in (
        (
            "call_duration_seconds",
            "Time from a call to its answer.",
            "method",
            counters.call_seconds,
        ),
        (
            "programming_duration_seconds",
            "Time of a partial reconfiguration, with a container's bitstream or the blank one.",
            "image",
            counters.program_seconds,
        ),
        (
            "scrub_duration_seconds",
            "Time of a region's scrub, its on-card memory included.",
            "outcome",
            counters.scrub_seconds,
        ),
    ):
        yield _histogram(name, help_, label, durations)


def _kubelet(plugin: Plugin, views: Sequence[ResourceView]) -> Iterator[Metric]:
    yield _gauge(
        "resource_registered",
        "Whether a resource is registered and kubelet holds its stream.",
        ["resource"],
        [((one["resource"],), one["registered"] and one["streaming"]) for one in views],
    )
    health: dict[Labels, float] = {}
    for one in views:
        health[one["resource"], "healthy"] = one["healthy"]
        health[one["resource"], "unhealthy"] = one["devices"] - one["healthy"]
    yield _gauge(
        "devices",
        "Devices on the list that kubelet has, by health.",
        ["resource", "health"],
        sorted(health.items()),
    )
    allocations: Counter[Labels] = Counter(
        (allocation.resource, allocation.ownership.value.lower())
        for allocation in plugin.ledger.allocations.values()
    )
    for one in views:
        for ownership in (Ownership.CLAIMED, Ownership.STARTED):
            allocations.setdefault((one["resource"], ownership.value.lower()), 0)
    yield _gauge(
        "allocations",
        "Devices that have an owner.",
        ["resource", "ownership"],
        sorted(allocations.items()),
    )
    api = plugin.device_plugin
    last = 0.0 if api is None else api.reconciler.last_read
    yield _gauge(
        "last_reconcile_timestamp_seconds",
        "When kubelet's records were last read; nothing is polled while nothing is owned.",
        [],
        [((), last)] if last else [],
    )
    yield _one(
        "kubelet_records_unreadable",
        "Whether kubelet's records could not be read at the last try: nothing is released.",
        bool(plugin.records_problem),
    )
    yield _counter(
        "registrations",
        "How often kubelet opened the stream of a resource's device list.",
        ["resource"],
        plugin.link.opened,
    )
    yield _one(
        "foreign_resource_slices",
        "ResourceSlices of others in this node's pool, when it was last looked at.",
        0 if plugin.pool is None else len(plugin.pool.foreign),
    )
    yield _counter(
        "pod_source_answers",
        "Containers' requests that were not in the call, by the source that they were read from.",
        ["source"],
        (((source,), number) for source, number in sorted(plugin.node.pods.answers.items())),
    )


def _cards(plugin: Plugin, cards: Sequence[CardView]) -> Iterator[Metric]:
    for name, help_, value in _OF_A_CARD:
        yield _gauge(name, help_, ["card"], [((one["card"],), value(plugin, one)) for one in cards])
    modes = Counter(one["mode"] for one in cards)
    yield _gauge(
        "cards",
        "Cards by how they are used.",
        ["mode"],
        [((mode.value,), modes[mode.value]) for mode in CardMode],
    )
    yield _one(
        "cards_skipped",
        "Cards that are there and cannot be served.",
        len(plugin.inventory.problems),
    )
    yield _gauge(
        "card_info",
        "What a card is.",
        ["card", "interface_id"],
        [((one["card"], one["interface_id"]), 1) for one in cards],
    )
    yield _gauge(
        "card_iommu",
        "What limits a card's DMA: translate, shared, identity, none or unknown.",
        ["card", "mode"],
        [((one["card"], one["iommu"]), 1) for one in cards],
    )


def _regions(cards: Sequence[CardView]) -> Iterator[Metric]:
    states: Counter[Labels] = Counter(
        (card["card"], region["ownership"].lower(), region["condition"].lower())
        for card in cards
        for region in card["regions"]
    )
    yield _gauge(
        "regions",
        "Regions by ownership and condition.",
        ["card", "ownership", "condition"],
        sorted(states.items()),
    )
    why_not = Counter(region["unusable"] for card in cards for region in card["regions"])
    yield _gauge(
        "regions_unusable",
        "Free regions that nobody can be given until somebody acts, by reason.",
        ["reason"],
        [((why.name.lower(),), why_not[why.value]) for why in Unusable],
    )


def _work(plugin: Plugin) -> Iterator[Metric]:
    ends, api = plugin.ledger.ends, plugin.device_plugin
    reconciled = 0 if api is None else api.reconciler.released
    yield _counter(
        "releases",
        "Allocations that ended: by Deallocate, by reconciling, or implied by a later Allocate.",
        ["cause"],
        [
            (("deallocate",), ends["released"] - reconciled),
            (("implied",), ends["implied"]),
            (("reconcile",), reconciled),
        ],
    )
    yield _counter(
        "recoveries",
        "Times that a card's driver was rebound because of a poisoned port, by outcome.",
        ["outcome"],
        [(("done",), plugin.recovery.done), (("failed",), plugin.recovery.failed)],
    )
    yield _counter(
        "bitstream_verifications",
        "Files of the store that were read, hashed and judged, by outcome.",
        ["outcome"],
        plugin.node.store.library.verifications.items(),
    )


def _best_effort(
    context: StatusContext, plugin: Plugin, cards: Sequence[CardView]
) -> Iterator[Metric]:
    """What shows that scrubbing is weaker than required."""
    interfaces = sorted({card.interface_id for card in plugin.ledger.cards.values()})
    yield _one(
        "scrub_best_effort",
        "Whether regions may be given out without being blanked (FPGA_PLUGIN_SCRUB).",
        context.settings.scrub is ScrubPolicy.BEST_EFFORT,
    )
    yield _gauge(
        "blank_bitstream_missing",
        "Whether there is no blank bitstream that can be used for an interface id.",
        ["interface_id"],
        [((one,), bool(plugin.blanks.problem(one))) for one in interfaces],
    )
    yield _one(
        "regions_unblanked",
        "Regions that still hold their last image, reset: functions, and by best-effort scrubbing.",
        sum(
            region["condition"] == Condition.UNBLANKED.value
            for card in cards
            for region in card["regions"]
        ),
    )


def _sensors(readings: Mapping[CardId, Readings]) -> Iterator[Metric]:
    def flat(name: str) -> list[tuple[Labels, float]]:
        return [
            ((card, sensor), value)
            for card, one in sorted(readings.items())
            for sensor, value in sorted(getattr(one, name).items())
        ]

    labels = ["card", "sensor"]
    yield _gauge("card_temperature_celsius", "A card's temperature.", labels, flat("temperatures"))
    yield _gauge("card_power_watts", "A card's power draw.", labels, flat("power"))
    yield _gauge(
        "card_errors",
        "How many bits of an error register are set, of the card or of a port.",
        ["card", "register"],
        [(labels, int(value).bit_count()) for labels, value in flat("errors")],
    )


def _one(name: str, help_: str, value: float) -> Metric:
    """A gauge without labels."""
    return _gauge(name, help_, [], [((), value)])


def _gauge(name: str, help_: str, labels: list[str], samples: Samples) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}_{name}", help_, labels=labels)
    for values, number in samples:
        family.add_metric(values, float(number))
    return family


def _counter(name: str, help_: str, labels: list[str], samples: Samples) -> Metric:
    family = CounterMetricFamily(f"{PREFIX}_{name}", help_, labels=labels)
    for values, number in samples:
        family.add_metric(values, number)
    return family


def _histogram(name: str, help_: str, label: str, durations: Histogram) -> Metric:
    family = HistogramMetricFamily(f"{PREFIX}_{name}", help_, labels=[label])
    for values, times in durations.items():
        buckets: list[tuple[str, float]] = []
        count = 0
        for bound, number in zip((*map(str, durations.bounds), "+Inf"), times.counts, strict=True):
            count += number
            buckets.append((bound, count))
        family.add_metric(values, buckets, times.total)
    return family
