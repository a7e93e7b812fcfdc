import errno
import os

import pytest
from doubles.dfl import ADDRESS, CARD, FakeKernel, failure, served

from fpga_plugin.errors import CardGoneError, HardwareError, PortInUseError, RefusedError
from fpga_plugin.hardware.dfl import defs
from fpga_plugin.hardware.dfl.handles import fme_of, port_of

DEVICE = f"/sys/bus/pci/devices/{ADDRESS}"
FUNCTION = f"/sys/devices/pci0000:3a/{ADDRESS}"
UNBIND, BIND = f"{defs.PCI_DRIVER}/unbind", f"{defs.PCI_DRIVER}/bind"


def bound(virtual_functions: str | int | None = "0"):
    kernel = FakeKernel()
    kernel.add_card(ports=(0, 1))
    kernel.files |= {UNBIND: "", BIND: ""}
    kernel.stores[UNBIND] = lambda _: kernel.links.pop(f"{FUNCTION}/driver") and None
    backend, card = served(kernel)
    if virtual_functions is not None:
        kernel.files[f"{FUNCTION}/sriov_numvfs"] = virtual_functions
    kernel.log.clear()
    return kernel, backend, card


@pytest.mark.parametrize("virtual_functions", ["0", None])
def test_it_unbinds_and_binds_with_every_port_tried_and_closed(virtual_functions):
    kernel, backend, card = bound(virtual_functions)
    backend.rebind(card)
    assert kernel.written == [(UNBIND, ADDRESS), (BIND, ADDRESS)]
    assert not kernel.opened, "the kernel crashes when a port that was open is closed"
    assert [line for line in kernel.log if line.startswith("open")] == [
        f"open {fme_of(card).node}",
        *(f"open {port_of(region).node}" for region in card.regions),
    ]


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EBUSY, PortInUseError), (errno.EIO, RefusedError)]
)
def test_an_fme_that_a_process_has_open_keeps_the_driver_on(number, kind):
    kernel, backend, card = bound()
    kernel.open_errors[fme_of(card).node] = number
    with pytest.raises(kind, match=r"dfl-fme\.0"):
        backend.rebind(card)
    assert not kernel.written
    assert not kernel.opened


def test_the_fme_is_tried_exclusively():
    kernel, backend, card = bound()
    tried = []
    opens = kernel.open
    kernel.open = lambda node, flags: tried.append((node, flags & os.O_EXCL)) or opens(node, flags)
    backend.rebind(card)
    assert (fme_of(card).node, os.O_EXCL) in tried


@pytest.mark.parametrize("virtual_functions", ["1", "nonsense", errno.EIO])
def test_virtual_functions_or_doubt_about_them_keep_the_driver_on(virtual_functions):
    kernel, backend, card = bound(virtual_functions)
    with pytest.raises(RefusedError, match="virtual functions"):
        backend.rebind(card)
    assert not kernel.written


def test_an_open_port_keeps_the_driver_on():
    kernel, backend, card = bound()
    kernel.open_errors[port_of(card.regions[1]).node] = errno.EBUSY
    with pytest.raises(PortInUseError):
        backend.rebind(card)
    assert not kernel.written
    assert not kernel.opened


def test_a_card_without_driver_is_not_touched():
    kernel, backend, card = bound()
    kernel.remove(f"{FUNCTION}/driver")
    with pytest.raises(CardGoneError, match="no driver"):
        backend.rebind(card)
    assert not kernel.written


def refuses(number: int):
    def store(_: str) -> None:
        raise failure(number)

    return store


@pytest.mark.parametrize(("file", "kind"), [(UNBIND, RefusedError), (BIND, HardwareError)])
def test_a_driver_that_does_not_go_or_come_is_told_with_the_command(file, kind):
    kernel, backend, card = bound()
    kernel.stores[file] = refuses(errno.ENODEV)
    with pytest.raises(kind) as caught:
        backend.rebind(card)
    assert CARD in caught.value.message
    assert f"echo {ADDRESS} > {BIND}" in caught.value.hint
    assert "writable" not in caught.value.hint, "it is the driver that refuses, not the mount"


def test_a_tree_that_is_read_only_is_named():
    kernel, backend, card = bound()
    kernel.stores[UNBIND] = refuses(errno.EROFS)
    with pytest.raises(RefusedError) as caught:
        backend.rebind(card)
    assert "writable" in caught.value.hint


def test_a_card_that_lost_its_driver_is_bound_and_one_that_has_it_is_left_alone():
    kernel, backend, card = bound()
    backend.bind(card.id)
    assert not kernel.written
    kernel.remove(f"{FUNCTION}/driver")
    backend.bind(card.id)
    assert kernel.written == [(BIND, ADDRESS)]


def test_a_card_that_is_pulled_cannot_be_bound():
    kernel, backend, card = bound()
    kernel.remove(FUNCTION)
    with pytest.raises(CardGoneError, match="is gone"):
        backend.bind(card.id)
