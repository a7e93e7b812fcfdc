"""A plugin of pytest's, for the guest: tests of simulated cards run on the real drivers.

`daemon_support.Node` becomes `rack.RealNode` before any test imports it. What a test asks of the
cards that the machine cannot do is listed here, with the reason. After each test the kernel's log
is looked at: a warning or an oops fails the test that ran then.
"""

import inspect
import os
import re
import sys
from collections.abc import Iterator

import daemon_support
import mortal
import nursery
import pytest
import rack

daemon_support.Node = rack.RealNode  # type: ignore[misc]  # that is the point
nursery.program = mortal.__file__

PATIENCE = 5.0
"""The guest has no KVM: how many times as long a test waits there for what has to come.

Where others used the processors, too, the plugin did not serve two minutes after its test began.
"""


def _be_patient() -> None:
    """Limits are default arguments of `daemon_support`'s functions."""
    before = daemon_support.LIMIT
    daemon_support.LIMIT = after = before * PATIENCE

    def stretch(value: object) -> object:
        return after if value == before else value

    owners = [daemon_support, *filter(inspect.isclass, vars(daemon_support).values())]
    for owner in owners:
        for function in filter(inspect.isfunction, vars(owner).values()):
            function.__defaults__ = tuple(map(stretch, function.__defaults__ or ()))
            function.__kwdefaults__ = {
                name: stretch(value) for name, value in (function.__kwdefaults__ or {}).items()
            }


_be_patient()

NOT_HERE = {
    "test_driver_parameters_hold_for_the_allocation": "real ports have no documented user clock",
    "test_a_card_that_was_never_there_can_be_plugged_in": "the machine has three cards",
    "test_a_card_that_is_pulled_during_a_pr": "Linux 6.1 does not survive it: a port is open",
    "test_a_card_that_is_swapped_during": "Linux 6.1 does not survive it: a port is open",
    "test_a_card_that_is_swapped_unseen_during": "the same",
    "test_a_pr_that_never_ends": "test_drivers.py has one of its own",
    "test_a_region_that_is_silent_with_the_blank_too": "the machine's accelerators are registers",
    "test_garbage_among_faults_and_cards_is_ignored": "a matter of the simulation's files",
}

KIND_NOT_HERE = "OFS]"
"""The machine has one card of that kind: test_real_slots.py kills at each of its steps."""

TROUBLE = re.compile(r"BUG:|WARNING:|Oops|general protection|Call Trace|INFO: task .* blocked")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [
        item
        for item in items
        if item.name.startswith(tuple(NOT_HERE)) or item.name.endswith(KIND_NOT_HERE)
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Show a failure at once: the machine may be switched off before the summary."""
    if report.failed:
        sys.__stdout__.write(f"\n{report.longreprtext}\n")
        for title, content in report.sections:
            sys.__stdout__.write(f"--- {title} ---\n{content}\n")


def follow_log() -> int:
    """A descriptor of the kernel's log, from here on."""
    log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.lseek(log, 0, os.SEEK_END)
    return log


def written(log: int) -> list[str]:
    """What the kernel has written since then, or since this was asked; a read is a message."""
    found = []
    while True:
        try:
            found.append(os.read(log, 8192).decode(errors="replace").partition(";")[2].rstrip())
        except BlockingIOError:
            return found
        except BrokenPipeError:
            continue  # the kernel has overwritten some: the next are there


@pytest.fixture(autouse=True)
def _the_kernel_has_nothing_to_complain_of() -> Iterator[None]:
    log = follow_log()
    try:
        yield
        new = written(log)
    finally:
        os.close(log)
    assert not [line for line in new if TROUBLE.search(line)], "\n".join(new)
