"""What a ledger would want of ResourceSlices, in the form that the API server keeps."""

from collections.abc import Iterable

from fpga_plugin.dra.desired import CounterSet, Device, Form, Slice

COUNTERS = Slice(counter_sets=(CounterSet("card", ("region-0", "region-1")),))


def wanted(parts: Iterable[Iterable[Device]], form: Form) -> tuple[Slice, ...]:
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
    return (COUNTERS, *slices) if form.counters else slices
