"""The metrics, in Prometheus' terms: what is counted, and gauges taken at the time of the scrape.

Names and labels follow Prometheus' conventions (prometheus.io/docs/practices/naming). No label has
a pod's name, nor anything else that a tenant chose: docs/metrics.md lists them all.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from fpga_plugin import __version__
from fpga_plugin.config.settings import ScrubPolicy
from fpga_plugin.hardware.model import Card, Readings
from fpga_plugin.ids import CardId
from fpga_plugin.ledger.ledger import card_of
from fpga_plugin.ledger.records import Condition, Mode, Ownership
from fpga_plugin.operator.health import not_ready
from fpga_plugin.operator.prometheus import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    process_metrics,
    render,
)
from fpga_plugin.operator.survey import Survey
from fpga_plugin.operator.unusable import Unusable, unusable
from fpga_plugin.plugin import Plugin
from fpga_plugin.telemetry.instruments import Histogram, Labels

PREFIX = "fpga_plugin"


def collect(survey: Survey, readings: Mapping[CardId, Readings]) -> Iterator[Metric]:
    """Everything as of now, on the event loop; `readings` are the cards' sensors."""
    yield _gauge("build_info", "Version of the plugin.", ["version"], [((__version__,), 1)])
    yield _gauge(
        "ready",
        "Whether every resource is registered and kubelet holds its stream.",
        [],
        [((), int(not not_ready(survey)))],
    )
    yield _gauge(
        "confined",
        "Whether a measure of the sandbox holds.",
        ["measure"],
        [((one.name,), int(one.holds)) for one in survey.sandbox],
    )
    yield from _counted(survey)
    if survey.plugin is not None:
        yield from _kubelet(survey.plugin)
        yield from _regions(survey, survey.plugin)
        yield from _cards(survey.plugin)
        yield from _releases(survey.plugin)
        yield from _recoveries(survey.plugin)
        yield from _bitstreams(survey.plugin)
        yield from _best_effort(survey, survey.plugin)
    yield from _sensors(readings)
    yield from process_metrics()


def exposition(
    survey: Survey, readings: Mapping[CardId, Readings], *, newer: bool
) -> tuple[bytes, str]:
    """All metrics as text, and its content type; `newer` is OpenMetrics."""
    return render(collect(survey, readings), newer=newer)


def _counted(survey: Survey) -> Iterator[Metric]:
    counters = survey.counters
    yield _counter(
        "calls", "Calls of kubelet by method and gRPC status.", ["method", "status"],
        counters.calls.items(),
    )  # fmt: skip  # one metric a line or two
    yield _histogram(
        "call_duration_seconds",
        "Time from a call to its answer.",
        ["method"],
        counters.call_seconds,
    )
    yield _histogram(
        "programming_duration_seconds",
        "Time of a partial reconfiguration, with a container's bitstream or the blank one.",
        ["image"],
        counters.program_seconds,
    )
    yield _histogram(
        "scrub_duration_seconds",
        "Time of a region's scrub, its on-card memory included.",
        ["outcome"],
        counters.scrub_seconds,
    )
    yield _counter(
        "failures",
        "PreStarts that were refused or failed, and work on regions that failed, by kind of error.",
        ["operation", "reason"],
        counters.failures.items(),
    )
    yield _counter(
        "region_failures", "Work on a region that failed, by card.", ["card"],
        counters.port_failures.items(),
    )  # fmt: skip
    yield _counter(
        "http_connections_dropped",
        "HTTP connections that were closed before they had their answer, by reason.",
        ["reason"],
        counters.http_dropped.items(),
    )


def _kubelet(plugin: Plugin) -> Iterator[Metric]:
    status, api = sorted(plugin.link.status.items()), plugin.device_plugin
    yield _gauge(
        "resource_registered",
        "Whether a resource is registered and kubelet holds its stream.",
        ["resource"],
        [((name,), int(one.registered and one.streaming)) for name, one in status],
    )
    health: Counter[Labels] = Counter()
    for name, _ in status:
        health[name, "healthy"] = health[name, "unhealthy"] = 0
        for device in () if api is None else api.claims.devices(name):
            health[name, "healthy" if device.healthy else "unhealthy"] += 1
    yield _gauge(
        "devices", "Devices on the list that kubelet has, by health.", ["resource", "health"],
        sorted(health.items()),
    )  # fmt: skip
    claims: Counter[Labels] = Counter()
    for claim in plugin.ledger.claims.values():
        claims[claim.resource, claim.ownership.value.lower()] += 1
    for name, _ in status:
        for ownership in (Ownership.CLAIMED, Ownership.STARTED):
            claims.setdefault((name, ownership.value.lower()), 0)
    yield _gauge(
        "claims", "Devices that have an owner.", ["resource", "ownership"], sorted(claims.items())
    )
    last = 0.0 if api is None else api.reconciler.last_read
    yield _gauge(
        "last_reconcile_timestamp_seconds",
        "When kubelet's records were last read; nothing is polled while nothing is owned.",
        [],
        [((), last)] if last else [],
    )
    yield _gauge(
        "kubelet_records_unreadable",
        "Whether kubelet's records could not be read at the last try: nothing is released.",
        [],
        [((), int(bool(plugin.records_problem)))],
    )
    yield _counter(
        "registrations",
        "How often kubelet opened the stream of a resource's device list.",
        ["resource"],
        plugin.link.opened,
    )
    yield _gauge(
        "foreign_resource_slices",
        "ResourceSlices of others in this node's pool, when it was last looked at.",
        [],
        [((), 0 if plugin.pool is None else len(plugin.pool.foreign))],
    )
    yield _counter(
        "pod_source_answers",
        "Containers' requests that were not in the call, by the source that they were read from.",
        ["source"],
        (((source,), number) for source, number in sorted(plugin.node.pods.answers.items())),
    )


def _regions(survey: Survey, plugin: Plugin) -> Iterator[Metric]:
    ledger = plugin.ledger
    states: Counter[Labels] = Counter()
    troubled: Counter[Labels] = Counter()
    kept: Counter[Labels] = Counter()
    for card in ledger.cards.values():
        troubled[card.id,] = kept[card.id,] = 0
        for region in card.regions:
            condition = ledger.record(region.id).condition
            states[card.id, ledger.ownership(region.id).value.lower(), condition.value.lower()] += 1
            if ledger.kept(region.id) is not None:
                kept[card.id,] += 1
            elif ledger.trouble(region.id):
                troubled[card.id,] += 1
    yield _gauge(
        "regions",
        "Regions by ownership and condition.",
        ["card", "ownership", "condition"],
        sorted(states.items()),
    )
    yield _gauge(
        "regions_failed",
        "Regions that cannot be given to anybody: faulted, or their hardware reports a failure.",
        ["card"],
        sorted(troubled.items()),
    )
    why_not = Counter(
        unusable(plugin, survey.settings.scrub, region)
        for card in ledger.cards.values()
        for region in card.regions
    )
    yield _gauge(
        "regions_unusable",
        "Free regions that nobody can be given until somebody acts, by reason.",
        ["reason"],
        [((why.name.lower(),), why_not[why]) for why in Unusable],
    )
    yield _gauge(
        "regions_kept",
        "Regions that are kept for debugging: nobody owns them, and nobody is given them.",
        ["card"],
        sorted(kept.items()),
    )


def _cards(plugin: Plugin) -> Iterator[Metric]:
    ledger = plugin.ledger
    modes = Counter(ledger.mode(card) for card in ledger.cards)
    yield _gauge(
        "cards", "Cards by how they are used.", ["mode"],
        [((mode.value,), modes[mode]) for mode in Mode],
    )  # fmt: skip
    yield _gauge(
        "cards_skipped",
        "Cards that are there and cannot be served.",
        [],
        [((), len(plugin.inventory.problems))],
    )
    missing = {card_of(device) for device in ledger.claims} - ledger.cards.keys()
    yield _gauge("cards_missing", "Cards that are gone and have owners.", [], [((), len(missing))])
    yield _gauge(
        "card_info",
        "What a card is.",
        ["card", "interface_id"],
        [((card.id, card.interface_id), 1) for card in _sorted(ledger.cards)],
    )
    yield _gauge(
        "card_left_alone",
        "Whether a card is left alone because another plugin's pods hold it.",
        ["card"],
        [((card.id,), int(card.id in ledger.foreign)) for card in _sorted(ledger.cards)],
    )
    yield _gauge(
        "card_drained",
        "Whether the operator has taken a card out of service.",
        ["card"],
        [((card.id,), int(card.id in ledger.drained)) for card in _sorted(ledger.cards)],
    )
    yield _gauge(
        "card_degraded",
        "Signals that a card throttles or was in trouble and works on; the log names them.",
        ["card"],
        [((card.id,), len(plugin.inventory.degraded(card.id))) for card in _sorted(ledger.cards)],
    )
    yield _gauge(
        "memory_debt",
        "Whether a card's on-card memory may still hold a former tenant's data.",
        ["card"],
        [((card.id,), int(card.id in ledger.debts)) for card in _sorted(ledger.cards)],
    )
    yield _gauge(
        "memory_never_cleared",
        "Whether a card has on-card memory that nobody clears between two tenants.",
        ["card"],
        [((card.id,), int(card.never_cleared)) for card in _sorted(ledger.cards)],
    )
    yield _gauge(
        "card_iommu",
        "What limits a card's DMA: translate, identity, none or unknown.",
        ["card", "mode"],
        [((card.id, card.iommu.value), 1) for card in _sorted(ledger.cards)],
    )


def _releases(plugin: Plugin) -> Iterator[Metric]:
    ends, api = plugin.ledger.ends, plugin.device_plugin
    reconciled = 0 if api is None else api.reconciler.released
    yield _counter(
        "releases",
        "Claims that ended: by Deallocate, found by reconciling, or implied by a later Allocate.",
        ["cause"],
        [
            (("deallocate",), ends["released"] - reconciled),
            (("implied",), ends["implied"]),
            (("reconcile",), reconciled),
        ],
    )


def _recoveries(plugin: Plugin) -> Iterator[Metric]:
    yield _counter(
        "recoveries",
        "Times that a card's driver was rebound because of a poisoned port, by outcome.",
        ["outcome"],
        [(("done",), plugin.recovery.done), (("failed",), plugin.recovery.failed)],
    )


def _bitstreams(plugin: Plugin) -> Iterator[Metric]:
    yield _counter(
        "bitstream_verifications",
        "Files of the store that were read, hashed and judged, by outcome.",
        ["outcome"],
        plugin.node.store.library.verifications.items(),
    )


def _best_effort(survey: Survey, plugin: Plugin) -> Iterator[Metric]:
    """What shows that scrubbing is weaker than required."""
    ledger = plugin.ledger
    best_effort = survey.settings.scrub is ScrubPolicy.BEST_EFFORT
    interfaces = sorted({card.interface_id for card in ledger.cards.values()})
    yield _gauge(
        "scrub_best_effort",
        "Whether regions may be given out without being blanked (FPGA_PLUGIN_SCRUB).",
        [],
        [((), int(best_effort))],
    )
    yield _gauge(
        "blank_bitstream_missing",
        "Whether there is no blank bitstream that can be used for an interface id.",
        ["interface_id"],
        [((one,), int(bool(plugin.blanks.problem(one)))) for one in interfaces],
    )
    unblanked = sum(
        ledger.record(region.id).condition is Condition.UNBLANKED
        for card in ledger.cards.values()
        for region in card.regions
    )
    yield _gauge(
        "regions_unblanked",
        "Regions that still hold their last image, reset: functions, and by best-effort scrubbing.",
        [],
        [((), unblanked)],
    )


def _sensors(readings: Mapping[CardId, Readings]) -> Iterator[Metric]:
    def flat(name: str) -> list[tuple[Labels, float]]:
        return [
            ((card, sensor), value)
            for card, one in sorted(readings.items())
            for sensor, value in sorted(getattr(one, name).items())
        ]

    yield _gauge(
        "card_temperature_celsius", "A card's temperature.", ["card", "sensor"],
        flat("temperatures"),
    )  # fmt: skip
    yield _gauge("card_power_watts", "A card's power draw.", ["card", "sensor"], flat("power"))
    yield _gauge(
        "card_errors",
        "How many bits of an error register are set, of the card or of a port.",
        ["card", "register"],
        [(labels, int(value).bit_count()) for labels, value in flat("errors")],
    )


def _sorted(cards: Mapping[CardId, Card]) -> list[Card]:
    return [cards[card] for card in sorted(cards)]


def _gauge(
    name: str, help_: str, labels: list[str], samples: Iterable[tuple[Labels, float]]
) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}_{name}", help_, labels=labels)
    for values, number in samples:
        family.add_metric(values, number)
    return family


def _counter(
    name: str, help_: str, labels: list[str], samples: Iterable[tuple[Labels, float]]
) -> Metric:
    family = CounterMetricFamily(f"{PREFIX}_{name}", help_, labels=labels)
    for values, number in samples:
        family.add_metric(values, number)
    return family


def _histogram(name: str, help_: str, labels: list[str], durations: Histogram) -> Metric:
    family = HistogramMetricFamily(f"{PREFIX}_{name}", help_, labels=labels)
    for values, times in durations.items():
        buckets: list[tuple[str, float]] = []
        count = 0
        for bound, number in zip((*map(str, durations.bounds), "+Inf"), times.counts, strict=True):
            count += number
            buckets.append((bound, count))
        family.add_metric(values, buckets, times.total)
    return family
