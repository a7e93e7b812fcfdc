"""What a tenant can do who writes to PF0's mailbox by PF1's BAR, under each mask."""

import ctypes
import mmap
import struct
import time
from collections.abc import Iterator

import alveo
import alveo_mailbox
import pytest
from alveo import ALL, TENANT_LOADS, A, Alveo, B

pytestmark = pytest.mark.skipif(not alveo.MODULES, reason="the guest's: make test-alveo")

HUGE = 2 << 20
MAP_HUGETLB = 0x40000
ADDRESS_AND_SLOT = struct.Struct("<QI4x")


@pytest.fixture(scope="module")
def plugged() -> Iterator[Alveo]:
    (card,) = alveo.install()
    yield card
    alveo.remove()


@pytest.fixture
def card(plugged: Alveo) -> Alveo:
    plugged.fresh()
    return plugged


@pytest.fixture
def in_kernel() -> Iterator[int]:
    """Where the kernel has this process' copy of image B: memory in one piece."""
    with open("/proc/sys/vm/nr_hugepages", "w") as pages:
        pages.write("1")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_HUGETLB
    with mmap.mmap(-1, HUGE, flags=flags) as memory:
        content = alveo.image(B)
        memory[: len(content)] = content
        view = ctypes.c_char.from_buffer(memory)
        yield alveo_mailbox.kernel_address(alveo_mailbox.physical_address(ctypes.addressof(view)))
        del view
    with open("/proc/sys/vm/nr_hugepages", "w") as pages:
        pages.write("0")


def send_load(card: Alveo, address: int) -> None:
    """A request to program what is at an address in the kernel."""
    alveo_mailbox.send(card, alveo_mailbox.LOAD_SLOT_KADDR, ADDRESS_AND_SLOT.pack(address, 0))
    time.sleep(2)


def test_whoever_has_the_node_may_map_the_whole_bar(card: Alveo):
    size = (card.pf1 / "resource0").stat().st_size
    with card.opened() as descriptor:
        mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED).close()


def test_under_the_narrow_mask_pf0_follows_a_tenants_address(card: Alveo, in_kernel: int):
    card.set_mask(TENANT_LOADS)
    send_load(card, in_kernel)
    assert (card.uuid, card.image) == (A, B)


def test_under_the_full_mask_it_does_not(card: Alveo, in_kernel: int):
    card.set_mask(ALL)
    send_load(card, in_kernel)
    assert (card.uuid, card.image) == (A, A)
