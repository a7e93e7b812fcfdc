import ctypes
import errno
import mmap
import os

import pytest
from doubles.cards import AFU
from doubles.dfl import ADDRESS, CARD, FakeKernel, failure, served

from fpga_plugin.errors import (
    CardGoneError,
    HardwareError,
    NotFinishedError,
    PortInUseError,
    PortPoisonedError,
    ProgrammingError,
)
from fpga_plugin.hardware.backend import Port
from fpga_plugin.hardware.dfl import defs
from fpga_plugin.hardware.dfl.backend import DflBackend
from fpga_plugin.hardware.dfl.handles import fme_of, port_of
from fpga_plugin.hardware.dfl.port import read_errors
from fpga_plugin.hardware.image import RawImage

IMAGE = bytes(range(256)) * 33 + b"odd"


def one_card(ports=(0, 1)):
    """A kernel, its backend and card, and the directories of FME and last port."""
    kernel = FakeKernel()
    kernel.add_card(ports=ports)
    backend, card = served(kernel)
    return kernel, backend, card, card.regions[-1]


def failing(number: int):
    def pr(port: int, image: bytes) -> int:
        raise failure(number)

    return pr


def test_a_port_is_opened_exclusively_and_closed_once():
    kernel, backend, card, region = one_card()
    with backend.open_port(card, region) as port:
        proof: Port = port
        assert proof is port
        ((node, flags),) = kernel.opened.values()
        assert node == "/dev/dfl-port.1"
        assert flags & os.O_EXCL
        assert flags & os.O_ACCMODE == os.O_RDWR
    assert not kernel.opened
    port.close()
    assert kernel.log == ["open /dev/dfl-port.1", "close /dev/dfl-port.1"]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_what_the_node_is_short_of_is_no_fault_of_a_port(number):
    """A scrub waits and tries again; two faults would take the region out of service."""
    kernel, backend, card, region = one_card()
    kernel.open_errors[port_of(region).node] = number
    with pytest.raises(NotFinishedError, match="cannot be opened"):
        backend.open_port(card, region)


def test_a_port_is_closed_when_its_use_fails():
    kernel, backend, card, region = one_card()
    with pytest.raises(ZeroDivisionError), backend.open_port(card, region):
        raise ZeroDivisionError
    assert not kernel.opened


def test_a_failing_close_hides_nothing():
    kernel, backend, card, region = one_card()
    kernel.close_error = errno.EIO
    with backend.open_port(card, region) as port:
        port.reset()
    assert not kernel.opened


def test_a_port_in_use_is_told_from_one_that_is_gone():
    kernel, backend, card, region = one_card()
    kernel.open_errors[port_of(region).node] = errno.EBUSY
    with pytest.raises(PortInUseError, match="/dev/dfl-port") as caught:
        backend.open_port(card, region)
    assert "fuser" in caught.value.hint
    for number in (errno.ENOENT, errno.ENXIO, errno.ENODEV):
        kernel.open_errors[port_of(region).node] = number
        with pytest.raises(CardGoneError, match="/dev/dfl-port"):
            backend.open_port(card, region)
    kernel.open_errors[port_of(region).node] = errno.EPERM
    with pytest.raises(HardwareError, match="EPERM"):
        backend.open_port(card, region)


@pytest.mark.parametrize("now", ["gone", "another instance"])
def test_a_node_that_became_another_cards_port_is_closed_untouched(now: str):
    kernel, backend, card, region = one_card()
    if now == "gone":
        kernel.remove(port_of(region).sysfs)
    else:
        kernel.instances[port_of(region).sysfs] = 2
    with pytest.raises(CardGoneError, match="no longer the port"):
        backend.open_port(card, region)
    assert not kernel.opened
    assert not kernel.ioctls


@pytest.mark.parametrize("reads", [AFU, errno.EBUSY, errno.EIO])
@pytest.mark.parametrize("now", ["gone", "another instance"])
def test_the_afu_id_of_a_card_that_came_in_its_place_is_not_taken_for_the_regions(
    now: str, reads: str | int
):
    kernel, backend, card, region = one_card()
    kernel.files[f"{port_of(region).sysfs}/afu_id"] = reads
    if now == "gone":
        kernel.remove(port_of(region).sysfs)
    else:
        kernel.instances[port_of(region).sysfs] = 2
    with pytest.raises(CardGoneError, match="no longer the port"):
        backend.afu_id(region)
    assert region.id in backend.health(card).failed


@pytest.mark.parametrize("now", ["gone", "another instance"])
def test_a_card_that_came_meanwhile_is_not_programmed_through_its_node(now: str):
    kernel, backend, card, region = one_card()
    with backend.open_port(card, region) as port:
        if now == "gone":
            kernel.remove(fme_of(card).sysfs)
        else:
            kernel.instances[port_of(region).sysfs] = 2
        with pytest.raises(ProgrammingError, match="no longer the FME"):
            port.program(RawImage(b"image"))
    assert not kernel.opened
    assert not kernel.ioctls


def test_a_region_that_is_replaced_while_it_is_read_does_not_lend_its_id():
    kernel, backend, _, region = one_card()
    read = kernel.read

    def replaced(path: str) -> str:
        text = read(path)
        kernel.instances[port_of(region).sysfs] = 2
        return text

    kernel.read = replaced
    with pytest.raises(CardGoneError):
        backend.afu_id(region)


def test_a_reset_passes_zero():
    kernel, backend, card, region = one_card()
    with backend.open_port(card, region) as port:
        port.reset()
    assert kernel.ioctls == [("/dev/dfl-port.1", 0xB640, 0)]


def test_a_reset_that_is_not_acknowledged_is_an_error():
    kernel, backend, card, region = one_card()
    kernel.reset_error = errno.ETIMEDOUT
    with (
        backend.open_port(card, region) as port,
        pytest.raises(HardwareError, match="acknowledge") as caught,
    ):
        port.reset()
    assert f"echo {ADDRESS} > /sys/bus/pci/drivers/dfl-pci/unbind" in caught.value.hint
    assert "/sys" not in str(caught.value.for_tenant())


def test_the_driver_gets_exactly_the_image_of_this_port():
    kernel, backend, card, region = one_card()
    got = []
    kernel.pr = lambda port, image: got.append((port, image)) or 0
    with backend.open_port(card, region) as port:
        port.program(RawImage(IMAGE))
    assert got == [(1, IMAGE)]
    ((node, request, argument),) = kernel.ioctls
    assert (node, request) == ("/dev/dfl-fme.0", 0xB680)
    assert len(argument) == 24
    # The FME is open for the PR only, inside the time in which the port is held.
    assert kernel.log == [
        "open /dev/dfl-port.1",
        "open /dev/dfl-fme.0",
        "close /dev/dfl-fme.0",
        "close /dev/dfl-port.1",
    ]


def test_an_image_that_is_mapped_reaches_the_driver_from_where_it_lies(tmp_path):
    kernel, backend, card, region = one_card()
    got = []
    kernel.pr = lambda port, image: got.append(image) or 0
    (tmp_path / "image").write_bytes(b"head" + IMAGE)
    with (tmp_path / "image").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
    with backend.open_port(card, region) as port:
        port.program(RawImage(memoryview(mapped)[4:]))
    assert got == [IMAGE]
    begins = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    ((_, _, argument),) = kernel.ioctls
    assert defs.PORT_PR.unpack(argument) == (24, 0, 1, len(IMAGE), begins + 4)


def test_an_image_of_no_size_or_too_great_a_size_never_reaches_the_driver(monkeypatch):
    kernel, backend, card, region = one_card()
    monkeypatch.setattr(defs, "MAX_IMAGE_BYTES", 8)
    with backend.open_port(card, region) as port:
        for image in (b"", b"123456789"):
            with pytest.raises(ProgrammingError, match=f"{len(image)} bytes"):
                port.program(RawImage(image))
    assert not kernel.ioctls
    assert "open /dev/dfl-fme.0" not in kernel.log


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.EIO, "while it was reconfigured"),
        (errno.ETIMEDOUT, "in time"),
        (errno.EINVAL, "port does not exist"),
        (errno.ENOENT, "dfl-afu"),
        (errno.ENOMEM, "memory"),
        (errno.EFAULT, "disk of FPGA_PLUGIN_STATE_DIR"),
        (errno.EPERM, "Operation not permitted"),
    ],
)
def test_a_failed_pr_says_what_the_driver_meant_and_closes_the_fme(number: int, says: str):
    kernel, backend, card, region = one_card()
    kernel.pr = failing(number)
    with backend.open_port(card, region) as port:
        with pytest.raises(ProgrammingError) as caught:
            port.program(RawImage(IMAGE))
        assert [node for node, _ in kernel.opened.values()] == [port_of(region).node]
    assert says in str(caught.value)
    assert errno.errorcode[number] in caught.value.why
    assert errno.errorcode[number] not in str(caught.value), "a tenant can do nothing with it"
    assert region.id in caught.value.message
    assert len(str(caught.value).encode()) < 1024


def manager(kernel: FakeKernel, name: str, text: str | int) -> None:
    (path,) = [path for path in kernel.files if path.endswith(f"/fpga0/{name}")]
    kernel.files[path] = text


def test_a_hardware_error_quotes_the_managers_status():
    kernel, backend, card, region = one_card()
    kernel.pr = failing(errno.EIO)
    manager(kernel, "status", "reconfig CRC error\nreconfig fifo overflow error\n")
    with backend.open_port(card, region) as port, pytest.raises(ProgrammingError) as caught:
        port.program(RawImage(IMAGE))
    assert "'reconfig CRC error', 'reconfig fifo overflow error'" in caught.value.why


def test_a_hardware_error_stays_one_when_the_manager_cannot_be_read():
    kernel, backend, card, region = one_card()
    kernel.pr = failing(errno.EIO)
    manager(kernel, "status", errno.EIO)
    with backend.open_port(card, region) as port, pytest.raises(ProgrammingError):
        port.program(RawImage(IMAGE))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("state", "write complete error"),
        ("status", "reconfig incompatible image"),
        ("status", errno.EIO),
    ],
)
def test_a_pr_that_the_manager_calls_failed_is_failed(name: str, text: str | int):
    kernel, backend, card, region = one_card()
    manager(kernel, name, text)
    with backend.open_port(card, region) as port, pytest.raises(ProgrammingError):
        port.program(RawImage(IMAGE))


def test_a_manager_that_never_programmed_before_is_no_error():
    kernel, backend, card, region = one_card()
    manager(kernel, "state", "unknown")
    with backend.open_port(card, region) as port:
        port.program(RawImage(IMAGE))


def test_a_result_that_the_driver_never_gives_is_an_error():
    kernel, backend, card, region = one_card()
    kernel.pr = lambda port, image: 1
    with backend.open_port(card, region) as port, pytest.raises(ProgrammingError, match="gave 1"):
        port.program(RawImage(IMAGE))


def test_nothing_is_programmed_through_an_fme_that_is_busy_or_no_longer_the_cards():
    kernel, backend, card, region = one_card()
    with backend.open_port(card, region) as port:
        kernel.open_errors["/dev/dfl-fme.0"] = errno.EBUSY
        with pytest.raises(ProgrammingError, match="was not programmed"):
            port.program(RawImage(IMAGE))
        del kernel.open_errors["/dev/dfl-fme.0"]
        kernel.remove(fme_of(card).sysfs)
        with pytest.raises(ProgrammingError, match="no longer the FME"):
            port.program(RawImage(IMAGE))
        assert len(kernel.opened) == 1
    assert not kernel.ioctls


def test_the_afu_id_is_read_with_and_without_the_port():
    kernel, backend, card, region = one_card()
    kernel.files[f"{port_of(region).sysfs}/afu_id"] = AFU.upper()
    assert backend.afu_id(region) == AFU
    with backend.open_port(card, region) as port:
        assert port.afu_id() == AFU


def test_a_poisoned_port_names_the_way_out():
    kernel, backend, _, region = one_card()
    kernel.files[f"{port_of(region).sysfs}/afu_id"] = errno.EBUSY
    with pytest.raises(PortPoisonedError) as caught:
        backend.afu_id(region)
    assert f"echo {ADDRESS} > /sys/bus/pci/drivers/dfl-pci/unbind" in caught.value.hint
    assert f"echo {ADDRESS} > /sys/bus/pci/drivers/dfl-pci/bind" in caught.value.hint
    assert "no container" in caught.value.hint


@pytest.mark.parametrize("text", ["f" * 32, "", "nonsense", errno.EIO, errno.ENODEV])
def test_an_unreadable_afu_id_is_an_error_and_no_sign_of_a_poisoned_port(text: str | int):
    kernel, backend, _, region = one_card()
    kernel.files[f"{port_of(region).sysfs}/afu_id"] = text
    with pytest.raises(HardwareError) as caught:
        backend.afu_id(region)
    assert not isinstance(caught.value, PortPoisonedError)


class Register:
    """PORT_ERROR and its attribute: what is written clears those bits, if it is what was read."""

    def __init__(self, kernel: FakeKernel, path: str, value: int, *, again: int = 0) -> None:
        self.kernel, self.path, self.again = kernel, path, again
        self.set(value)
        kernel.stores[path] = self.store

    def set(self, value: int) -> None:
        self.value = value
        self.kernel.files[self.path] = f"0x{value:x}"

    def store(self, text: str) -> None:
        if int(text, 0) != self.value:
            raise failure(errno.EINVAL)
        self.set(self.again)


def test_port_errors_are_cleared_by_what_was_read():
    kernel, backend, card, region = one_card()
    path = f"{port_of(region).sysfs}/errors/errors"
    register = Register(kernel, path, 1 << 32 | 1 << 48)
    kernel.files[f"{port_of(region).sysfs}/ap1_event"] = "1"
    with backend.open_port(card, region) as port:
        assert port.clear_errors() == {"errors": 1 << 32 | 1 << 48, "ap1_event": 1}
    assert register.value == 0
    assert kernel.written == [
        (path, "0x1000100000000"),
        (f"{port_of(region).sysfs}/ap1_event", "1"),
    ]


def test_nothing_is_written_where_there_is_no_error_or_no_such_feature():
    kernel, backend, card, region = one_card()
    with backend.open_port(card, region) as port:
        assert port.clear_errors() == {}
        for name in ("errors", "ap1_event", "ap2_event"):
            kernel.remove(f"{port_of(region).sysfs}/{name}")
        assert port.clear_errors() == {}
    assert not kernel.written


def test_an_error_that_comes_between_reading_and_clearing_is_cleared_too():
    kernel, backend, card, region = one_card()
    register = Register(kernel, f"{port_of(region).sysfs}/errors/errors", 1)
    store = register.store

    def later(text: str) -> None:
        kernel.stores[register.path] = store
        register.set(3)
        store(text)

    kernel.stores[register.path] = later
    with backend.open_port(card, region) as port:
        assert port.clear_errors() == {"errors": 3}
    assert register.value == 0


def test_errors_that_come_back_are_reported_and_fail_nothing():
    kernel, backend, card, region = one_card()
    Register(kernel, f"{port_of(region).sysfs}/errors/errors", 5, again=4)
    with backend.open_port(card, region) as port:
        assert port.clear_errors() == {"errors": 5, "errors_left": 4}


def test_a_port_that_the_card_has_shut_down_cannot_be_cleared():
    kernel, backend, card, region = one_card()
    path = f"{port_of(region).sysfs}/errors/errors"
    with backend.open_port(card, region) as port:
        Register(kernel, path, defs.PORT_AP6_EVENT, again=defs.PORT_AP6_EVENT)
        with pytest.raises(HardwareError, match="AP6"):
            port.clear_errors()

        def refuse(text: str) -> None:
            raise failure(errno.EBUSY)

        kernel.stores[path] = refuse
        with pytest.raises(HardwareError, match="AP6"):
            port.clear_errors()


@pytest.mark.parametrize("text", ["0xffffffffffffffff", "many", errno.EIO])
def test_errors_that_cannot_be_read_are_not_taken_for_none(text: str | int):
    kernel, backend, card, region = one_card()
    kernel.files[f"{port_of(region).sysfs}/errors/errors"] = text
    with backend.open_port(card, region) as port, pytest.raises(HardwareError):
        port.clear_errors()
    assert not kernel.written


def test_what_every_error_says_begins_with_the_region_or_a_path():
    kernel, backend, card, region = one_card(ports=(0,))
    kernel.open_errors[port_of(region).node] = errno.EBUSY
    with pytest.raises(PortInUseError) as caught:
        backend.open_port(card, region)
    assert f"{CARD}-p0" in str(caught.value)


@pytest.mark.parametrize("name", ["errors/errors", "ap1_event", "ap2_event"])
def test_an_error_that_cannot_be_cleared_fails_the_scrub(name: str):
    """Passed over, the region would go to its next owner with it (invariant 4)."""
    kernel, backend, card, region = one_card()
    path = f"{port_of(region).sysfs}/{name}"
    kernel.files[path] = "0x1" if name == "errors/errors" else "1"

    def refuse(text: str) -> None:
        raise failure(errno.EIO)

    kernel.stores[path] = refuse
    with (
        backend.open_port(card, region) as port,
        pytest.raises(HardwareError, match=f"{name} cannot be cleared"),
    ):
        port.clear_errors()


def test_an_image_of_any_size_that_the_driver_takes_reaches_it(monkeypatch):
    kernel, backend, card, region = one_card()
    monkeypatch.setattr(defs, "MAX_IMAGE_BYTES", 8)
    with backend.open_port(card, region) as port:
        for image in (b"1", b"12345678"):
            port.program(RawImage(image))
    assert len(kernel.ioctls) == 2


def test_the_fme_is_opened_to_be_written_and_by_no_child():
    kernel, backend, card, region = one_card()
    flags = []
    kernel.pr = lambda port, image: flags.append(list(kernel.opened.values())[-1][1]) or 0
    with backend.open_port(card, region) as port:
        port.program(RawImage(IMAGE))
    assert [each & (os.O_ACCMODE | os.O_CLOEXEC) for each in flags] == [os.O_RDWR | os.O_CLOEXEC]


@pytest.mark.parametrize(("number", "helps"), [(errno.EBUSY, "fpgad"), (errno.EIO, "kernel's log")])
def test_an_fme_that_cannot_be_opened_says_what_helps(number: int, helps: str):
    kernel, backend, card, region = one_card()
    with backend.open_port(card, region) as port:
        kernel.open_errors["/dev/dfl-fme.0"] = number
        with pytest.raises(ProgrammingError) as caught:
            port.program(RawImage(IMAGE))
    assert helps in caught.value.hint


def test_an_empty_line_of_the_managers_status_is_no_error():
    kernel, backend, card, region = one_card()
    manager(kernel, "status", "\n\n")
    with backend.open_port(card, region) as port:
        port.program(RawImage(IMAGE))


def test_the_error_registers_that_are_set_are_read_in_hexadecimal():
    kernel, _, _, region = one_card()
    directory = f"{port_of(region).sysfs}/errors"
    kernel.files[f"{directory}/errors"] = "0x10"
    kernel.files[f"{directory}/first_error"] = "0x0"
    kernel.files[f"{directory}/first_malformed_req"] = "0xff"
    assert read_errors(kernel, region) == {"errors": 16, "first_malformed_req": 255}
    for name in ("errors", "first_error", "first_malformed_req"):
        kernel.files.pop(f"{directory}/{name}")
    assert read_errors(kernel, region) == {}
    kernel.files[f"{directory}/first_error"] = "many"
    with pytest.raises(HardwareError, match="no number"):
        read_errors(kernel, region)


def test_the_largest_image_is_one_that_the_kernel_can_round_up_to_words():
    length = (defs.MAX_IMAGE_BYTES + 3) & ~3 & 0xFFFF_FFFF
    assert length == defs.MAX_IMAGE_BYTES
    assert (defs.MAX_IMAGE_BYTES + 4) & 0xFFFF_FFFF == 0


def of_a_virtual_function(tmp_path):
    """Two ports, the second a virtual function's; what is returned starts the plugin again."""
    kernel = FakeKernel()
    fme = kernel.add_card(ports=(0,))
    kernel.files[f"{fme}/ports_num"] = "2"
    physical = f"/sys/devices/pci0000:3a/{ADDRESS}"
    function = kernel.add_function("0000:3b:00.1")
    kernel.links |= {f"{physical}/virtfn0": function, f"{function}/physfn": physical}
    kernel.add_port(function, 50, 9, 1)

    def start():
        backend = DflBackend(kernel, slots=str(tmp_path / "slots"))
        (card,) = backend.scan().cards.values()
        return backend, card

    return kernel, fme, start


@pytest.mark.parametrize(
    ("number", "stays"), [(errno.EIO, True), (errno.ETIMEDOUT, True), (errno.EINVAL, False)]
)
def test_a_failed_pr_of_a_virtual_functions_port_is_remembered(tmp_path, number, stays):
    kernel, fme, start = of_a_virtual_function(tmp_path)
    backend, card = start()
    region = card.regions[1]
    kernel.pr = failing(number)
    with backend.open_port(card, region) as port:
        with pytest.raises(ProgrammingError):
            port.program(RawImage(IMAGE))
        kernel.pr = lambda port, image: 0  # the kernel says that all went well
        port.program(RawImage(IMAGE))
        if not stays:
            assert port.afu_id() == AFU
            return
        with pytest.raises(PortPoisonedError):
            port.afu_id()
    backend, card = start()  # it outlives the process
    assert backend.afu_id(card.regions[0]) == AFU
    with pytest.raises(PortPoisonedError, match="held in reset"):
        backend.afu_id(card.regions[1])
    assert list(backend.health(card).failed) == [card.regions[1].id]
    # The count is the physical function's driver's: other virtual functions do not end it.
    kernel.instances[port_of(card.regions[1]).sysfs] = 77
    backend, card = start()
    with pytest.raises(PortPoisonedError):
        backend.afu_id(card.regions[1])
    kernel.instances[fme] = 78
    backend, card = start()
    assert backend.afu_id(card.regions[1]) == AFU


def test_a_failed_pr_of_the_cards_own_port_is_left_to_the_port_to_show(tmp_path):
    kernel, _, start = of_a_virtual_function(tmp_path)
    backend, card = start()
    kernel.pr = failing(errno.EIO)
    with backend.open_port(card, card.regions[0]) as port, pytest.raises(ProgrammingError):
        port.program(RawImage(IMAGE))
    assert backend.afu_id(card.regions[0]) == AFU
    assert not (tmp_path / "slots").exists()
