"""What a ledger would want of ResourceSlices, and a reader of what it does want.

Both know resource.k8s.io/v1 by themselves, so that a wrong encoding does not go unnoticed.
"""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fpga_plugin.dra.desired import Form, Spec

DOMAIN = "fpga.intel.com"


class Effect(enum.StrEnum):
    NO_SCHEDULE = "NoSchedule"
    NO_EXECUTE = "NoExecute"


@dataclass(frozen=True)
class Taint:
    """Why a device is not given out; the key without its domain."""

    key: str
    value: str = ""
    effect: Effect = Effect.NO_SCHEDULE

    def spec(self) -> Spec:
        value = {"value": self.value} if self.value else {}
        return {"key": f"{DOMAIN}/{self.key}", "effect": self.effect.value, **value}


@dataclass(frozen=True)
class CounterSet:
    name: str
    counters: tuple[str, ...]

    def spec(self) -> Spec:
        return {"name": self.name, "counters": {one: {"value": "1"} for one in self.counters}}


@dataclass(frozen=True)
class Device:
    """`consumes`: the counters that it takes, one of each, by counter set."""

    name: str
    attributes: Mapping[str, Any]
    consumes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()

    def spec(self) -> Spec:
        kinds = {bool: "bool", int: "int", str: "string"}
        attributes = {name: {kinds[type(one)]: one} for name, one in self.attributes.items()}
        spec: Spec = {"name": self.name, "attributes": attributes}
        if self.consumes:
            spec["consumesCounters"] = [
                {"counterSet": name, "counters": {one: {"value": "1"} for one in counters}}
                for name, counters in self.consumes.items()
            ]
        if self.taints:
            spec["taints"] = [one.spec() for one in self.taints]
        return spec


@dataclass(frozen=True)
class Slice:
    counter_sets: tuple[CounterSet, ...] = ()
    devices: tuple[Device, ...] = ()

    def spec(self) -> Spec:
        parts = {"sharedCounters": self.counter_sets, "devices": self.devices}
        return {name: [one.spec() for one in part] for name, part in parts.items() if part}

    @classmethod
    def of(cls, spec: Spec) -> "Slice":
        """A slice as it is wanted; it says nothing that this reader leaves out."""
        sets = spec.get("sharedCounters", ())
        counters = tuple(CounterSet(one["name"], (*one["counters"],)) for one in sets)
        told = cls(counters, tuple(map(_device, spec.get("devices", ()))))
        assert told.spec() == spec
        return told


def _device(spec: Spec) -> Device:
    return Device(
        spec["name"],
        {name: next(iter(value.values())) for name, value in spec["attributes"].items()},
        {one["counterSet"]: (*one["counters"],) for one in spec.get("consumesCounters", ())},
        tuple(map(_taint, spec.get("taints", ()))),
    )


def _taint(spec: Spec) -> Taint:
    key = spec["key"].removeprefix(f"{DOMAIN}/")
    return Taint(key, spec.get("value", ""), Effect(spec["effect"]))


COUNTERS = Slice(counter_sets=(CounterSet("card", ("region-0", "region-1")),))


def wanted(parts: Iterable[Iterable[Device]], form: Form) -> tuple[Spec, ...]:
    """Slices of these devices, a slice a part, without what the form lacks."""
    slices = tuple(
        Slice(
            devices=tuple(
                Device(
                    one.name,
                    one.attributes,
                    one.consumes if form.counters else {},
                    one.taints if form.taints else (),
                )
                for one in part
            )
        )
        for part in parts
    )
    return tuple(one.spec() for one in ((COUNTERS, *slices) if form.counters else slices))
