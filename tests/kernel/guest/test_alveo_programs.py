"""AMD's own programs, from Debian, against the cards: what a tenant and an operator type."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import alveo
import pytest
from alveo import ALL, LOADS, A, Alveo, B, until

pytestmark = pytest.mark.skipif(not alveo.MODULES, reason="the guest's: make test-alveo")

TOOLS = Path(*alveo.MODULES[-1:]).parent / "tools"
"""A root of their own (tests/kernel/xrt.py)."""


def run(*command: str | Path, root: Path = TOOLS) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        ["/usr/sbin/chroot", root, *command],
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
        env={"PATH": "/usr/bin:/bin", "HOME": "/tmp"},
    )
    print(*command, done.returncode, done.stdout, done.stderr)  # noqa: T201  # shown with a failure
    return done


@pytest.fixture(scope="module")
def plugged() -> Iterator[list[Alveo]]:
    cards = alveo.install(cards=2)
    mounted = [("--bind", f"/{name}", TOOLS / name) for name in ("proc", "sys", "dev")]
    mounted.append(("-t", "tmpfs", TOOLS / "tmp"))
    for how, what, where in mounted:
        source = ["tmpfs"] if how == "-t" else []
        subprocess.run(["mount", how, what, *source, where], check=True)
    for uuid, name in ((A, "a"), (B, "b")):
        (TOOLS / f"tmp/{name}.xclbin").write_bytes(alveo.image(uuid))
    yield cards
    for *_, where in mounted:
        subprocess.run(["umount", where], check=True)
    alveo.remove()


@pytest.fixture
def card(plugged: list[Alveo]) -> Alveo:
    for each in plugged:
        each.fresh()
    return plugged[0]


def user(card: Alveo) -> str:
    return card.pf1.name


def program(card: Alveo, name: str) -> bool:
    """What a tenant types, and whether it was done."""
    typed = ("xrt-smi", "--batch", "program", "-d", user(card), "-u", f"/tmp/{name}.xclbin")
    return run(*typed).returncode == 0


def reset(card: Alveo) -> bool:
    """The same."""
    typed = ("xrt-smi", "--batch", "reset", "--force", "-d", user(card))
    return run(*typed).returncode == 0


def behind(card: Alveo, name: str) -> bool:
    """What an operator types who programs by PF0."""
    typed = ("xbmgmt", "--batch", "program", "--force", "-d", card.address)
    return run(*typed, "--user", f"/tmp/{name}.xclbin").returncode == 0


def held(card: Alveo) -> tuple[UUID | None, UUID]:
    return card.uuid, card.image


def test_they_see_every_card_whoever_asks(card: Alveo, plugged: list[Alveo]):
    """sysfs has no tenants: only the device cgroup keeps one from another's card."""
    assert "Multiple devices found" in run("xrt-smi", "--batch", "examine").stdout
    for each in plugged:
        shown = run("xrt-smi", "--batch", "examine", "-d", user(each), "-r", "platform").stdout
        assert user(each) in shown


def test_a_tenant_programs_without_a_mask_and_not_under_it(card: Alveo):
    assert program(card, "b")
    assert held(card) == (B, B)
    card.set_mask(ALL)
    assert not program(card, "a")
    assert card.image == B
    card.set_mask(0)
    assert program(card, "b")
    card.set_mask(ALL)
    assert program(card, "b")  # which is loaded already: as a pod finds its card
    assert held(card) == (B, B)


def test_a_tenant_resets_the_card_only_where_the_mask_lets_him(card: Alveo):
    card.set_mask(ALL)
    before = card.resets
    reset(card)
    assert card.resets == before
    card.set_mask(LOADS)
    assert reset(card)
    until(lambda: card.resets > before, "the card is reset")
    until(lambda: card.tells("dev_offline", "0", pf0=True), "PF0 is back")
    card.settle()


def test_xbmgmt_programs_behind_everybodys_back(card: Alveo):
    card.set_mask(ALL)
    assert behind(card, "b")
    assert held(card) == (A, B)
