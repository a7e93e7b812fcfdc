"""Slots that cannot be given away, on the real drivers: what kubelet hears, and what mends it.

Each refusal is made of the node as it is: a real IOMMU group with a stranger in it, a function
behind no IOMMU, a port that dfl-pci released. It meets an allocation that kubelet granted before,
so the pod's own call is what is refused; once its reason is gone the same call succeeds.
"""

import contextlib
import fcntl
import json
import os
import re
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import rack
from daemon_support import (
    AFU,
    BLANK,
    CARD,
    CARDS,
    HEALTHY,
    P0,
    REGIONS,
    UNHEALTHY,
    Node,
    Refused,
    eventually,
    request,
)

from fpga_plugin.errors import SlotUnusableError
from fpga_plugin.hardware.linux import LinuxKernel
from fpga_plugin.hardware.vfio.function import read_function
from fpga_plugin.hardware.vfio.groups import Groups
from fpga_plugin.ids import PciAddress
from fpga_plugin.observability.client import ask

pytestmark = pytest.mark.skipif(not rack.DEBUGFS.exists(), reason="the guest's: make test-kernel")

PORT_RELEASE, PORT_ASSIGN = 0x4004B681, 0x4004B682
"""DFL_FPGA_FME_PORT_RELEASE, DFL_FPGA_FME_PORT_ASSIGN (linux/fpga-dfl.h)."""

FIRST, SECOND = rack.FUNCTIONS
STUB = rack.PCI.parent / "drivers/pci-stub"


@contextlib.contextmanager
def bound(function: str, driver: Path) -> Iterator[None]:
    """Somebody else on the node gives a function to a driver."""
    (rack.PCI / function / "driver_override").write_text(driver.name)
    (driver / "bind").write_text(function)
    try:
        yield
    finally:
        if (driver / function).exists():
            (driver / "unbind").write_text(function)
        (rack.PCI / function / "driver_override").write_text("\n")


@contextlib.contextmanager
def a_stranger_holds_a_group() -> Iterator[None]:
    with bound(FIRST, rack.VFIO):
        descriptor = os.open(rack.group(FIRST), os.O_RDWR)
        try:
            yield
        finally:
            os.close(descriptor)


def another_driver_has_a_function() -> AbstractContextManager[None]:
    return bound(SECOND, STUB)


@contextlib.contextmanager
def an_identity_domain() -> Iterator[None]:
    kind = (rack.PCI / SECOND / "iommu_group").resolve() / "type"
    before = kind.read_text()
    kind.write_text("identity")
    rack.tell(CARD)
    try:
        yield
    finally:
        rack.free_functions()
        kind.write_text(before)
        rack.tell(CARD)


@contextlib.contextmanager
def functions(*wanted: str) -> Iterator[None]:
    rack.have_functions(CARD, *wanted)
    try:
        yield
    finally:
        rack.have_functions(CARD, *rack.FUNCTIONS)


def a_function_behind_no_iommu() -> AbstractContextManager[None]:
    assert not (rack.PCI / rack.OPEN / "iommu_group").exists()
    return functions(FIRST, rack.OPEN)


def a_group_with_a_stranger_in_it() -> AbstractContextManager[None]:
    members = (rack.PCI / rack.SHARED / "iommu_group/devices").iterdir()
    assert {member.name for member in members} == {rack.SHARED, rack.STRANGER}
    return functions(FIRST, rack.SHARED)


@contextlib.contextmanager
def no_functions() -> Iterator[None]:
    rack.have_functions(CARD)
    try:
        yield
    finally:
        # What the message said was typed; nothing else made them again.
        assert (rack.PCI / rack.address(CARD) / "virtfn1").exists()
        rack.tell(CARD)


@contextlib.contextmanager
def a_released_port() -> Iterator[None]:
    (fme,) = (rack.PCI / rack.address(CARD) / "fpga_region").glob("region*/dfl-fme.*")
    node = f"/dev/{fme.name}"

    def command(number: int) -> None:
        descriptor = os.open(node, os.O_RDWR)
        try:
            fcntl.ioctl(descriptor, number, struct.pack("i", 0))
        finally:
            os.close(descriptor)

    command(PORT_RELEASE)
    try:
        yield
    finally:
        command(PORT_ASSIGN)
        rack.take_driver_off(CARD)
        rack.plug(CARD)


@dataclass(frozen=True)
class Refusal:
    """Why a slot is refused.

    Attributes:
        arrange: brings it about, and ends it.
        says: what the operator reads in the status, in this order; kubelet hears the first.
        card: the card is left alone; otherwise it is only this call.
        mends: what the message says to type mends it.
    """

    arrange: Callable[[], AbstractContextManager[None]]
    says: tuple[str, ...]
    card: bool = True
    mends: bool = False


REFUSALS = {
    "a stranger holds a group": Refusal(
        a_stranger_holds_a_group, (f"(function {FIRST}) is in use", "fuser -v /dev/vfio/"), False
    ),
    "another driver has a function": Refusal(
        another_driver_has_a_function,
        (f"function {SECOND} of the slot has the driver 'pci-stub'", f"echo {SECOND} > "),
        card=False,
        mends=True,
    ),
    "the IOMMU does not translate": Refusal(
        an_identity_domain,
        (f"does not translate for its function {SECOND}", "FPGA_PLUGIN_SLOT_IDENTITY"),
    ),
    "no IOMMU": Refusal(
        a_function_behind_no_iommu,
        (f"function {rack.OPEN} of the slot is behind no IOMMU", "intel_iommu=on"),
    ),
    "a stranger in a group": Refusal(
        a_group_with_a_stranger_in_it,
        (f"its function {rack.SHARED} shares IOMMU group", f"with {rack.STRANGER}", "ACS"),
    ),
    "no virtual functions": Refusal(
        no_functions,
        (
            "is used through its virtual functions, and has none now",
            f"fpga-plugin card functions {CARD} --make",
            "sriov_numvfs",
        ),
        mends=True,
    ),
    "a released port": Refusal(
        a_released_port, ("its port was released to make virtual functions", "linux-dfl-backport")
    ),
}


def type_what_it_says(message: str) -> None:
    """As root on the node."""
    found = re.search(r"as root on the node: (echo .*?)\)*$", message)
    assert found, message
    subprocess.run(["bash", "-euc", found[1]], check=True)


def problems(node: Node) -> list[dict[str, Any]]:
    """The cards that are not served, as `fpga-plugin status` has them."""
    return ask(str(node.state_dir), "GET", "/status")["problems"]


def check(node: Node, refusal: Refusal) -> None:
    """An allocation that meets the refusal, and lives on after it."""
    kubelet = node.kubelet
    # The scrub has given the functions' drivers back a moment after the region was listed.
    eventually(lambda: rack.drivers() == ["", ""], "drivers given back")
    kubelet.allocate(P0)
    prs = rack.count(CARD, "prs")
    with refusal.arrange():
        if refusal.card:
            kubelet.until(REGIONS, {P0: UNHEALTHY})  # it is owned: it stays on the list
            # A look at the card while its functions went says what it missed; the next one, why.
            eventually(lambda: refusal.says[0] in json.dumps(problems(node)), "the last word")
        refused = []
        with pytest.raises(Refused) as caught:
            kubelet.prestart(P0, env=request())
        refused.append(caught.value)
        if refusal.card:
            with pytest.raises(Refused) as caught:
                kubelet.allocate(P0)
            refused.append(caught.value)
            (problem,) = problems(node)
            assert (problem["card"], problem["error"] in caught.value.message) == (CARD, True)
        for error in refused:
            assert (error.code, refusal.says[0] in error.message) == ("FAILED_PRECONDITION", True)
        (shown, *_) = ask(str(node.state_dir), "GET", "/status")["refusals"]
        at = [shown["message"].find(text) for text in refusal.says]
        assert -1 not in at, shown
        assert at == sorted(at), shown
        assert rack.count(CARD, "prs") == prs
        if refusal.mends:
            type_what_it_says(shown["message"])
    kubelet.until(REGIONS, {P0: HEALTHY})
    kubelet.prestart(P0, env=request())
    assert node.afu(P0) == AFU
    kubelet.deallocate(P0)
    kubelet.until(CARDS, {CARD: HEALTHY})
    assert node.afu(P0) == BLANK
    eventually(lambda: rack.drivers() == ["", ""], "drivers given back")


def test_each_refusal_is_told_with_its_reason_and_remedy_and_the_allocation_survives_it():
    with Node("1x1+ofs").up().told() as node:
        for name, refusal in REFUSALS.items():
            print(f"--- {name} ---")  # noqa: T201  # pytest shows it with a failure
            check(node, refusal)
        # The operator allows one of them, by the card's name.
        node.set(slot_identity=CARD)
        with an_identity_domain():
            node.again()
            node.kubelet.allocate(P0)
            node.kubelet.prestart(P0, env=request())
            assert node.afu(P0) == AFU
            node.kubelet.deallocate(P0)
            node.kubelet.until(CARDS, {CARD: HEALTHY})
            eventually(lambda: rack.drivers() == ["", ""], "drivers given back")


def test_vfio_itself_calls_a_group_with_a_hosts_driver_in_it_not_viable():
    """What discovery refuses; a driver may still come between its look and the hold."""
    rack.lay_out("1x1+ofs")
    kernel = LinuxKernel("/sys", "/dev")
    function = read_function(kernel, PciAddress.parse(rack.SHARED))
    says = re.escape(
        f"another member of its IOMMU group has a driver of the host's ({rack.STRANGER}"
    )
    with bound(rack.SHARED, rack.VFIO), pytest.raises(SlotUnusableError, match=says):
        Groups(kernel, [function])
    rack.take_driver_off(CARD)
