"""One node's pool of ResourceSlices: the writes that bring it to the desired content.

The slices of a pool count together: the scheduler uses those of the highest generation, once there
are as many of them as each of them says. So a single changed slice is replaced in place. Further
changes make a new generation, and the scheduler does not use the pool until it is complete.

A slice's name follows from its kind and number: if the answer to a write was lost, the next try
finds the slice.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from fpga_plugin.dra.desired import Form, Spec
from fpga_plugin.kubernetes.apiserver.mirror import Metadata

API_VERSION: Final = "resource.k8s.io/v1"
COLLECTION: Final = f"/apis/{API_VERSION}/resourceslices"

MAX_NAME: Final = 253
"""Of an object, in characters (a DNS subdomain)."""

_MAX_GENERATION: Final = 1 << 62
"""Far beyond what we ever write: it leaves room for more (the API has 64 bits with a sign)."""


class PoolOf(msgspec.Struct):
    """The pool of a slice."""

    name: str = ""
    generation: int = 0
    resourceSliceCount: int = 0  # noqa: N815  # the API's own name


class SliceSpec(msgspec.Struct):
    """A slice's content; devices and counters as raw JSON."""

    driver: str = ""
    nodeName: str = ""  # noqa: N815  # the API's own name
    pool: PoolOf = msgspec.field(default_factory=PoolOf)
    sharedCounters: list[dict[str, Any]] | None = None  # noqa: N815  # the API's own name
    devices: list[dict[str, Any]] | None = None

    @property
    def content(self) -> Spec:
        """The part that says something."""
        told = {"sharedCounters": self.sharedCounters, "devices": self.devices}
        return {key: value for key, value in told.items() if value}


class ResourceSlice(msgspec.Struct):
    """A slice as the API server has it."""

    metadata: Metadata
    spec: SliceSpec = msgspec.field(default_factory=SliceSpec)

    @property
    def generation(self) -> int:
        """The pool's generation; 0: one that no other can follow."""
        told = self.spec.pool.generation
        return told if 0 < told < _MAX_GENERATION else 0


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """The writes to do.

    Attributes:
        delete: names of slices that are no part of the pool any more.
        write: names of slices to replace or make, in this order.
        generation: of the pool afterwards.
    """

    generation: int
    delete: tuple[str, ...] = ()
    write: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.delete or self.write)


@dataclass(frozen=True, slots=True)
class Pool:
    """The pool of one node.

    Attributes:
        driver: its name.
        node: its name, which is the pool's too.
    """

    driver: str
    node: str

    def owns(self, one: ResourceSlice) -> bool:
        """Whether a slice is of this driver and node."""
        return (one.spec.driver, one.spec.nodeName) == (self.driver, self.node)

    def name(self, kind: str, number: int) -> str:
        """A slice's; the policies of deploy/dra and of the chart hold each node to its own."""
        suffix = f"{self.driver}-{self.node}"
        if len(suffix) > MAX_NAME - 6:
            digest = hashlib.sha256(suffix.encode()).hexdigest()[:16]
            suffix = f"{suffix[: MAX_NAME - 6 - 17].rstrip('.-')}-{digest}"
        return f"{kind}{number:04x}-{suffix}"

    def named(self, slices: Sequence[Spec]) -> dict[str, Spec]:
        """The slices by the names that they get; counters before devices."""
        counts = {"c": 0, "d": 0}
        named: dict[str, Spec] = {}
        for one in slices:
            kind = "c" if "sharedCounters" in one else "d"
            named[self.name(kind, counts[kind])] = one
            counts[kind] += 1
        return named

    def plan(
        self,
        wanted: Mapping[str, Spec],
        have: Mapping[str, ResourceSlice],
        *,
        accepted: Mapping[str, tuple[Spec, Spec]],
    ) -> SlicePlan:
        """Plan the writes, if any are needed.

        Args:
            wanted: the desired slices by name.
            have: the API server's slices. A server that ignores the field selector lists other
                nodes' slices too, which the plugin must not delete.
            accepted: by name, what was sent and what the server made of it; no write is needed for
                such a difference.
        """
        have = {name: one for name, one in have.items() if self.owns(one)}
        obsolete = tuple(sorted(have.keys() - wanted.keys()))
        latest = max((one.generation for one in have.values()), default=0)
        made = {name: meaning(one.spec.content) for name, one in have.items()}
        changed = tuple(
            name
            for name, sent in wanted.items()
            if made.get(name) != sent and accepted.get(name) != (sent, made.get(name))
        )
        pool = PoolOf(self.node, latest, len(wanted))
        sound = latest > 0 and all(name in have and have[name].spec.pool == pool for name in wanted)
        alone = all(have[name].generation < latest for name in obsolete)
        if sound and alone and len(changed) <= 1:
            return SlicePlan(latest, obsolete, changed)
        # Present slices first: the pool is not used until the last one is made.
        names = sorted(wanted, key=lambda name: (name not in have, name))
        return SlicePlan(latest + 1, obsolete, tuple(names))

    def manifest(
        self,
        name: str,
        one: Spec,
        *,
        generation: int,
        count: int,
        before: ResourceSlice | None,
        owner: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The object to send."""
        metadata: dict[str, Any] = {"name": name, "ownerReferences": [owner]}
        if before is not None:
            metadata["resourceVersion"] = before.metadata.resourceVersion
        spec = {
            "driver": self.driver,
            "nodeName": self.node,
            "pool": {"name": self.node, "generation": generation, "resourceSliceCount": count},
        } | deepcopy(one)
        if before is not None:
            _keep_times(spec, before.spec.content)
        return {
            "apiVersion": API_VERSION,
            "kind": "ResourceSlice",
            "metadata": metadata,
            "spec": spec,
        }


def meaning(content: Spec) -> Spec:
    """A slice's content, without the times that the server adds to taints."""
    if not _has_taints(content):
        return content
    told = deepcopy(content)
    for _, taint in _taints(told):
        taint.pop("timeAdded", None)
    return told


def lost(form: Form, sent: Spec, told: Spec) -> Form:
    """What the server understands, by what it made of a slice.

    A server silently drops the fields of a feature that is off or unknown to it.
    """
    return Form(
        counters=form.counters and has_counters(told) >= has_counters(sent),
        taints=form.taints and _has_taints(told) >= _has_taints(sent),
    )


def has_counters(content: Spec) -> int:
    """How many entries of a slice concern counters."""
    sets = content.get("sharedCounters") or ()
    return len(sets) + sum("consumesCounters" in device for device in content.get("devices", ()))


def _has_taints(content: Spec) -> int:
    return sum(bool(device.get("taints")) for device in content.get("devices", ()))


def _keep_times(spec: Spec, before: Spec) -> None:
    """Keep the time of each taint: the server would set the present time instead."""
    times = {key: taint.get("timeAdded") for key, taint in _taints(before)}
    for key, taint in _taints(spec):
        if isinstance(time := times.get(key), str):
            taint["timeAdded"] = time


def _taints(content: Spec) -> Iterator[tuple[bytes, Spec]]:
    """Each taint, and which one of which device it is.

    Others may have written any JSON there.
    """
    for device in content.get("devices", ()):
        taints = device.get("taints")
        for one in taints if isinstance(taints, list) else ():
            if isinstance(one, dict):
                key = (device.get("name"), one.get("key"), one.get("value"), one.get("effect"))
                yield msgspec.json.encode(key), one
