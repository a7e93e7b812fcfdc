"""Bugs of AMD's drivers by which a process on the node, or a tenant, hurts the kernel.

Each leaves the guest's kernel damaged, so they run last (`tests/kernel/__main__.py`) and in the
order in which they stand; pytest finds them only by name. When one fails, the driver has changed:
look whether the plugin may do what it forbears to do because of it (docs/security.md).
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import alveo
import alveo_mailbox
import pytest
from alveo import ALL, Alveo, until
from on_real_cards import follow_log, written

pytestmark = pytest.mark.skipif(not alveo.MODULES, reason="the guest's: make test-alveo")


@pytest.fixture(autouse=True)
def _the_kernel_has_nothing_to_complain_of() -> None:
    """In place of the one that fails a test whose kernel complains: here it has to."""


@pytest.fixture(scope="module")
def cards() -> list[Alveo]:
    """They stay: a driver that was hurt cannot be taken away."""
    Path("/proc/sys/kernel/panic_on_oops").write_text("0")
    return alveo.install(cards=2)


@pytest.fixture
def hurt() -> Iterator[Callable[[str], None]]:
    """Waits until the kernel has told of its damage, in a function of this name."""
    log = follow_log()
    new: list[str] = []

    def ended() -> bool:
        new.extend(written(log))
        return any("end trace" in line for line in new)

    def told(function: str) -> None:
        until(ended, "the kernel tells of its damage")
        assert any("BUG: " in line for line in new)
        assert any(f"{function}+" in line for line in new), "\n".join(new)

    yield told
    os.close(log)
    alveo.console(alveo.QUIET)  # from its first trouble on the kernel shows everything


def child(code: str, *arguments: object) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-S", "-c", code, *map(str, arguments)])


def test_who_reads_ulp_uuids_where_nothing_is_loaded_is_killed(
    cards: list[Alveo], hurt: Callable[[str], None]
):
    card = cards[0]
    assert card.uuid is None
    with child("import sys; open(sys.argv[1]).read()", card.pf1 / "ulp_uuids") as reader:
        assert reader.wait(alveo.PATIENCE) == -signal.SIGKILL
    hurt("ulp_uuids_show")


def test_who_writes_the_mask_while_pf0_resets_is_killed(
    cards: list[Alveo], hurt: Callable[[str], None]
):
    card = cards[1]
    write = "import sys\nwhile True: open(sys.argv[1], 'w').write('0x0')"
    reset = "import sys; open(sys.argv[1], 'w').write('1')"
    with child(write, card.pf0 / alveo.DISABLE) as writer:
        time.sleep(1)
        with child(reset, card.pf0 / "mgmt_reset"):
            assert writer.wait(alveo.PATIENCE) == -signal.SIGKILL
    hurt("config_mailbox_channel_disable_store")


def test_a_tenant_crashes_pf0s_driver_under_any_mask(
    cards: list[Alveo], hurt: Callable[[str], None]
):
    """USER_PROBE: PF0 reads a page at an address of the tenant's, if its physical address is right.

    The one follows from the other by a number that a randomised kernel chose among thousands. This
    test knows it; a tenant would try them, some a second.
    """
    card = cards[0]
    card.set_mask(ALL)
    text = min(
        (one for one in alveo_mailbox.segments() if one.address >= 0xFFFFFFFF80000000),
        key=lambda one: one.address,
    )
    nowhere = 0xFFFFFFFF80000000
    physical = text.physical - (text.address - nowhere)
    alveo_mailbox.probe(card, nowhere, physical & ((1 << 64) - 1))
    hurt("xclmgmt_mailbox_srv")
