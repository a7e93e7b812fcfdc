"""`state.json`: what the simulated FPGAs hold, outside the daemon, as real ones do.

One line a region, sorted, without times or counters, so that two equal states are equal files and a
test can compare them byte by byte. The file is replaced by rename before the operation that changed
it returns.
"""

import json
import os
from dataclasses import asdict, dataclass, fields
from typing import Any

from fpga_plugin.hardware.simulated import files
from fpga_plugin.ids import AfuId, RegionId, parse_afu_id

FACTORY_AFU_ID = AfuId("d8424dc4a4a3c413f89e433683f9040b")
"""What a region holds after power-up: an image like the factory's nlb0. It is not blank."""

CLOCK_LOW, CLOCK_HIGH, CLOCK_DEFAULT = 10, 1000, 200
"""User clock in MHz: its limits and what a card comes up with."""

MOST_FUNCTIONS = 2
"""Virtual functions of an OFS card."""


@dataclass(frozen=True, slots=True)
class RegionState:
    """One region.

    Attributes:
        afu_id: the accelerator in it. While a PR runs, the one that it will leave there.
        clock: user clock, MHz.
        poisoned: a failed PR left the port disabled, until the PCI driver is rebound.
        open: descriptors open on the port's node.
        bound: dfl-pci is bound to the card. Without it there are no nodes.
        node: N of `/dev/dfl-port.N`; None while unbound.
        fme: N of the card's `/dev/dfl-fme.N`; None while unbound.
        functions: of an OFS card: the driver of each virtual function, empty for none. Left out of
            the file for other cards.
    """

    afu_id: AfuId = FACTORY_AFU_ID
    clock: int = CLOCK_DEFAULT
    poisoned: bool = False
    open: int = 0
    bound: bool = True
    node: int | None = None
    fme: int | None = None
    functions: tuple[str, ...] | None = None


NO_IMAGE = AfuId("0" * 32)
"""What an Alveo card holds after power-up: its shell alone."""


@dataclass(frozen=True, slots=True)
class AlveoState:
    """An Alveo card's one region, and what its two drivers know.

    Attributes:
        afu_id: the image on the card. While it is loaded, the one that it will leave there.
        record: what PF1's driver believes is loaded; `NO_IMAGE`: nothing.
        mask: of mailbox requests; PF0's driver has it in memory.
        bad: what only a reset ends: `bad-state` or `firewall`; empty: nothing.
        shutdown: PF1's driver has shut the card down.
        management: xclmgmt is bound to PF0.
        user: xocl is bound to PF1.
        minor: of the render node; None while there is none.
        zeroed: where the on-card memory reads zero, as pairs of first address and end.
    """

    afu_id: AfuId = NO_IMAGE
    record: AfuId = NO_IMAGE
    mask: int = 0
    bad: str = ""
    shutdown: bool = False
    management: bool = True
    user: bool = True
    minor: int | None = None
    zeroed: tuple[tuple[int, int], ...] = ()


Stored = RegionState | AlveoState


class StateFile:
    """The regions of all plugged cards, and their file.

    Not thread safe: the kernel's lock covers it.

    Attributes:
        regions: what is there now; changed by the methods only.
    """

    def __init__(self, directory: str) -> None:
        self.regions: dict[RegionId, Stored] = {}
        self._path = os.path.join(directory, "state.json")
        self._lines: dict[RegionId, str] = {}  # of the file, in its order
        self._changed: set[RegionId] = set()  # since the lines were made

    def load(self) -> dict[RegionId, Stored]:
        """What the file says, entry by entry; entries that make no sense are left out."""
        entries = (files.load_object(self._path) or {}).get("regions")
        if not isinstance(entries, dict):
            return {}
        parsed = ((RegionId(name), _parse(entry)) for name, entry in entries.items())
        return {name: state for name, state in parsed if state is not None}

    def commit(self, region: RegionId, state: Stored) -> None:
        """Change a region, the file included.

        Raises:
            OSError: the file cannot be written; the region is then unchanged.
        """
        before = self.regions.get(region)
        if before == state:
            return
        self.put(region, state)
        try:
            self.save()
        except OSError:
            if before is not None:
                self.put(region, before)
            raise

    def put(self, region: RegionId, state: Stored) -> None:
        """Change a region in memory; `save` is then due."""
        self.regions[region] = state
        self._changed.add(region)

    def drop(self, region: RegionId) -> None:
        """Forget a region in memory, its card was unplugged; `save` is then due."""
        self.regions.pop(region, None)
        self._changed.add(region)

    def save(self) -> None:
        """Replace the file.

        Raises:
            OSError: it cannot be written.
        """
        new = False
        for region in self._changed:
            if (state := self.regions.get(region)) is None:
                self._lines.pop(region, None)
                continue
            new |= region not in self._lines
            self._lines[region] = f'"{region}": {_dump(state)}'
        self._changed.clear()
        if new:
            self._lines = dict(sorted(self._lines.items()))
        lines = ",\n".join(self._lines.values())
        files.replace(self._path, f'{{"regions": {{\n{lines}\n}}}}\n')


_DRIVERS = ("", "vfio-pci", "dfl-pci")
"""What a virtual function may have."""

_FIELDS = sorted(field.name for field in fields(RegionState))


def _dump(state: Stored) -> str:
    if isinstance(state, AlveoState):
        return json.dumps(asdict(state), sort_keys=True)
    values = {name: getattr(state, name) for name in _FIELDS}
    if state.functions is None:
        del values["functions"]
    return json.dumps(values)


def _parse(entry: Any) -> Stored | None:
    """One entry of the file. Fields that are missing or senseless read as after power-up.

    `open` is never read: a process that starts owns the directory, and the former process's
    descriptors died with it.
    """
    if not isinstance(entry, dict):
        return None
    try:
        afu_id = parse_afu_id(str(entry.get("afu_id")))
    except ValueError:
        return None
    if "record" in entry:
        return _parse_alveo(afu_id, entry)
    clock = entry.get("clock")
    return RegionState(
        afu_id=afu_id,
        clock=clock if type(clock) is int and CLOCK_LOW <= clock <= CLOCK_HIGH else CLOCK_DEFAULT,
        poisoned=entry.get("poisoned") is True,
        bound=entry.get("bound") is not False,
        node=_number(entry.get("node")),
        fme=_number(entry.get("fme")),
        functions=_drivers(entry.get("functions")),
    )


def _parse_alveo(afu_id: AfuId, entry: dict[str, Any]) -> AlveoState:
    try:
        record = parse_afu_id(str(entry.get("record")))
    except ValueError:
        record = NO_IMAGE
    zeroed = entry.get("zeroed")
    return AlveoState(
        afu_id=afu_id,
        record=record,
        mask=_number(entry.get("mask")) or 0,
        bad=bad if (bad := entry.get("bad")) in {"bad-state", "firewall"} else "",
        shutdown=entry.get("shutdown") is True,
        management=entry.get("management") is not False,
        user=entry.get("user") is not False,
        minor=_number(entry.get("minor")),
        zeroed=tuple(map(_range, zeroed)) if isinstance(zeroed, list) else (),
    )


def _range(value: Any) -> tuple[int, int]:
    if isinstance(value, list) and len(value) == 2:  # noqa: PLR2004  # first address and end
        return _number(value[0]) or 0, _number(value[1]) or 0
    return 0, 0


def _drivers(value: Any) -> tuple[str, ...] | None:
    if not isinstance(value, list) or not all(driver in _DRIVERS for driver in value):
        return None
    return tuple(value[:MOST_FUNCTIONS])


def _number(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
