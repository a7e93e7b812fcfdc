import errno
import os
from pathlib import Path

import pytest
from doubles.cards import INTERFACE
from doubles.dfl import ADDRESS, CARD, FakeKernel, failure
from hypothesis import given
from hypothesis import strategies as st

from fpga_plugin.errors import HardwareError
from fpga_plugin.hardware.dfl.backend import DflBackend
from fpga_plugin.hardware.dfl.handles import fme_of, port_of
from fpga_plugin.hardware.linux import LinuxKernel
from fpga_plugin.hardware.model import Card, CardProblem
from fpga_plugin.ids import CardId, PciAddress

OTHER = "0000:d8:00.0"


def scan(kernel):
    return DflBackend(kernel).scan()


def problem(kernel, *, others=0) -> CardProblem:
    """The one problem; the other cards have none."""
    inventory = scan(kernel)
    assert len(inventory.cards) == others
    assert CARD not in inventory.cards
    (found,) = inventory.problems.values()
    assert inventory.problems == {CardId(CARD): found}
    assert found.address == PciAddress.parse(ADDRESS)
    return found


def test_a_card_is_read_from_its_attributes():
    kernel = FakeKernel()
    fme = kernel.add_card(ports=(0, 1), number=4)
    (card,) = scan(kernel).cards.values()
    assert card.id == CARD
    assert card.interface_id == INTERFACE
    assert card.numa_node == 1
    assert card.pcie_root == "pci0000:3a"
    assert card.firmware == "0x23000110010309"
    assert card.ports == 2
    assert card.complete
    assert fme_of(card).node == "/dev/dfl-fme.4"
    assert fme_of(card).sysfs == fme
    assert card.clears_memory
    assert card.description == "Intel PAC A10 GX (8086:09c4)"
    assert [(r.id, r.port_id, str(r.grant)) for r in card.regions] == [
        (f"{CARD}-p0", 0, "/dev/dfl-port.4"),
        (f"{CARD}-p1", 1, "/dev/dfl-port.5"),
    ]
    assert port_of(card.regions[1]).sysfs == fme.replace("dfl-fme.4", "dfl-port.5")


def test_a_card_that_tells_no_static_part_is_served_without():
    kernel = FakeKernel()
    fme = kernel.add_card()
    del kernel.files[f"{fme}/bitstream_id"]
    (card,) = scan(kernel).cards.values()
    assert card.firmware == ""


def test_a_tree_mounted_elsewhere_gives_the_nodes_own_paths(tmp_path: Path):
    kernel = FakeKernel()
    kernel.add_card(ports=(0, 1))
    del kernel.files[f"/sys/devices/pci0000:3a/{ADDRESS}/fpga_region/region0/compat_id"]
    kernel.on_disk(tmp_path)
    for port in (0, 1):
        path = f"/sys/devices/pci0000:3a/{ADDRESS}/fpga_region/region0/dfl-port.{port}"
        kernel.instances[path] = os.stat(f"{tmp_path}{path.removeprefix('/sys')}").st_ino
    assert scan(LinuxKernel(str(tmp_path))) == scan(kernel)
    assert scan(kernel).cards


def test_a_node_without_fpga_drivers_has_no_cards():
    assert not scan(FakeKernel()).cards
    assert not scan(FakeKernel()).problems


def test_regions_go_by_port_id_and_not_by_node_number():
    kernel = FakeKernel()
    kernel.add_card(ports=(1, 0))
    (card,) = scan(kernel).cards.values()
    assert [(r.port_id, str(r.grant)) for r in card.regions] == [
        (0, "/dev/dfl-port.1"),
        (1, "/dev/dfl-port.0"),
    ]


@pytest.mark.parametrize(
    ("vendor", "device", "subsystem", "product", "reprogrammable"),
    [
        ("8086", "0b30", "0000", "Intel PAC N3000", False),
        ("8086", "0b2b", "0000", "Intel PAC D5005", True),
        ("8086", "bcce", "1771", "OFS N6001", True),
        ("1c2c", "1000", "0000", "Silicom N5010", True),
        ("1c2c", "1001", "0001", "Silicom N5011", True),
    ],
)
def test_a_card_is_known_by_its_pci_ids(
    vendor: str, device: str, subsystem: str, product: str, *, reprogrammable: bool
):
    kernel = FakeKernel()
    kernel.add_card()
    names = ("vendor", "device", "subsystem_vendor", "subsystem_device")
    for name, value in zip(names, (vendor, device, "8086", subsystem), strict=True):
        kernel.files[f"/sys/devices/pci0000:3a/{ADDRESS}/{name}"] = f"0x{value}"
    (found,) = scan(kernel).cards.values()
    assert found.description.startswith(product)
    assert found.reprogrammable is reprogrammable


def test_a_card_whose_static_part_has_no_partial_reconfiguration_is_told_so():
    kernel = FakeKernel()
    fme = kernel.add_card()
    kernel.remove(f"{fme}/dfl-fme-mgr.0")
    kernel.remove(f"{fme}/dfl-fme-region.7")
    found = problem(kernel)
    assert "has no partial reconfiguration" in found.message
    assert "nothing can be programmed there" in found.hint


def test_another_kind_of_fpga_region_is_no_card_and_no_problem():
    kernel = FakeKernel()
    kernel.add_card()
    kernel.files["/sys/devices/platform/soc/fpga_region/region90/compat_id"] = "0"
    kernel.links["/sys/class/fpga_region/region90"] = (
        "/sys/devices/platform/soc/fpga_region/region90"
    )
    inventory = scan(kernel)
    assert list(inventory.cards) == [CARD]
    assert not inventory.problems


@pytest.mark.parametrize("text", ["-1", None])
def test_an_unknown_numa_node_is_none(text: str | None):
    kernel = FakeKernel()
    kernel.add_card()
    path = f"/sys/devices/pci0000:3a/{ADDRESS}/numa_node"
    if text is None:
        del kernel.files[path]
    else:
        kernel.files[path] = text
    (card,) = scan(kernel).cards.values()
    assert card.numa_node is None


def add_virtual_function(kernel: FakeKernel, driver: str) -> str:
    physical = f"/sys/devices/pci0000:3a/{ADDRESS}"
    function = kernel.add_function("0000:3b:00.1", driver=driver)
    kernel.files[f"{physical}/sriov_numvfs"] = "1"
    kernel.links[f"{physical}/virtfn0"] = function
    kernel.links[f"{function}/physfn"] = physical
    return function


def test_the_port_of_a_virtual_function_belongs_to_the_physical_functions_card():
    kernel = FakeKernel()
    fme = kernel.add_card(ports=(0,))
    kernel.files[f"{fme}/ports_num"] = "2"
    port = kernel.add_port(add_virtual_function(kernel, "dfl-pci"), 50, 9, 1)
    inventory = scan(kernel)
    assert not inventory.problems
    (card,) = inventory.cards.values()
    assert card.complete
    assert [(r.id, port_of(r).node, port_of(r).sysfs) for r in card.regions][1] == (
        f"{CARD}-p1",
        "/dev/dfl-port.9",
        port,
    )
    assert DflBackend(kernel).scan_card(card.id) == card


@pytest.mark.parametrize("driver", ["vfio-pci", ""])
def test_a_card_whose_virtual_function_serves_something_else_is_left_alone(driver: str):
    kernel = FakeKernel()
    kernel.add_card()
    kernel.add_card(OTHER, number=4)
    function = add_virtual_function(kernel, driver or "x")
    if not driver:
        del kernel.links[f"{function}/driver"]
    found = problem(kernel, others=1)
    assert "is left alone" in found.message
    assert driver in found.message
    assert "0000:3b:00.1" in found.message
    assert "find out who" in found.hint
    assert "sriov_numvfs" not in found.hint, "it would take them from who uses them"


def test_a_scan_reads_no_attribute_that_waits_for_the_cards_driver():
    class Locked(FakeKernel):
        def read(self, path: str) -> str:
            assert "sriov_numvfs" not in path, "the reader waits for the function's lock"
            return super().read(path)

    kernel = Locked()
    kernel.add_card()
    kernel.files[f"/sys/devices/pci0000:3a/{ADDRESS}/sriov_numvfs"] = "0"
    add_virtual_function(kernel, "dfl-pci")
    assert scan(kernel).cards


GROUPS_OF_A_PORT = ("id", "afu_id", "errors")


@pytest.mark.parametrize("looks", range(12))
def test_a_port_whose_driver_is_bound_again_while_it_is_looked_at_is_no_slot(looks):
    class Toggled(FakeKernel):
        left = 1 << 20

        def _look(self) -> None:
            if self.left == 0:
                for name in GROUPS_OF_A_PORT:
                    self.remove(f"{port}/{name}")
            elif self.left == -1:
                self.files |= whole
                self.instances |= {f"{port}/{name}": 7 for name in (*GROUPS_OF_A_PORT, "errors")}
            self.left -= 1

        def exists(self, path: str) -> bool:
            if path.startswith(port):
                self._look()
            return super().exists(path)

        def instance(self, path: str) -> int:
            if path.startswith(port):
                self._look()
            return super().instance(path)

    kernel = Toggled()
    port = f"/sys/devices/pci0000:3a/{ADDRESS}/fpga_region/region0/dfl-port.0"
    kernel.add_card()
    whole = {path: text for path, text in kernel.files.items() if path.startswith(port)}
    kernel.left = looks
    found = DflBackend(kernel).scan_card(CardId(CARD))
    assert "slot" not in str(found)
    assert "PCI functions" not in str(found)


@pytest.mark.parametrize("upwards", [False, True])
@pytest.mark.parametrize("looks", range(12))
def test_a_port_whose_driver_is_unbound_while_it_is_looked_at_is_no_slot(looks, upwards):
    """Its attributes go one group after the other, and may come again at once."""

    class Leaving(FakeKernel):
        left = looks

        def _look(self) -> None:
            if self.left == 0:
                for name in GROUPS_OF_A_PORT[:: -1 if upwards else 1]:
                    if name == "afu_id":
                        self.left = -1
                        self.remove(f"{port}/{name}")
                        return
                    self.remove(f"{port}/{name}")
            self.left -= 1

        def exists(self, path: str) -> bool:
            if path.startswith(port):
                self._look()
            return super().exists(path)

        def instance(self, path: str) -> int:
            if path.startswith(port):
                self._look()
            return super().instance(path)

    kernel = Leaving()
    port = f"/sys/devices/pci0000:3a/{ADDRESS}/fpga_region/region0/dfl-port.0"
    kernel.left = 1 << 20
    kernel.add_card()
    kernel.left = looks
    found = DflBackend(kernel).scan_card(CardId(CARD))
    assert "slot" not in str(found)
    assert "PCI functions" not in str(found)


def test_a_port_without_any_fme_is_a_problem_of_its_own_function():
    kernel = FakeKernel()
    kernel.add_port(kernel.add_function(ADDRESS), 0, 0, 0)
    found = problem(kernel)
    assert "no FME" in found.message
    assert "virtual machine" in found.hint


def test_a_region_without_a_pci_function_is_left_out_and_said_once(monkeypatch):
    said = []
    monkeypatch.setattr(
        "fpga_plugin.hardware.dfl.backend.log",
        type("Log", (), {"warning": staticmethod(lambda text, **names: said.append(names))}),
    )
    kernel = FakeKernel()
    base = "/sys/devices/platform/fake.0/fpga_region/region0"
    kernel.files[f"{base}/dfl-fme.0/ports_num"] = "1"
    kernel.links["/sys/class/fpga_region/region0"] = base
    backend = DflBackend(kernel)
    for _ in range(2):
        inventory = backend.scan()
        assert not inventory.cards
        assert not inventory.problems
    assert [names["path"] for names in said] == [base]


def test_a_port_without_a_driver_is_no_region_and_leaves_the_card_incomplete():
    for kind in ("attributes", "driver"):
        kernel = FakeKernel()
        port = kernel.add_card(ports=(0, 1)).replace("dfl-fme.0", "dfl-port.1")
        if kind == "attributes":
            kernel.remove(port)
            kernel.files[f"{port}/uevent"] = ""
        else:
            del kernel.links[f"{port}/driver"]
        (card,) = scan(kernel).cards.values()
        assert [region.port_id for region in card.regions] == [0]
        assert not card.complete


def test_a_card_without_any_driven_port_is_a_problem():
    kernel = FakeKernel()
    port = kernel.add_card().replace("dfl-fme.0", "dfl-port.0")
    del kernel.links[f"{port}/driver"]
    assert "dfl-afu" in problem(kernel).hint


def test_two_ports_of_one_id_are_a_problem_of_that_card_only():
    kernel = FakeKernel()
    kernel.add_card(ports=(0, 0))
    kernel.add_card(OTHER, number=4)
    found = problem(kernel, others=1)
    assert "two ports with the id 0" in found.message


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("dfl-fme.0/ports_num", "1"),  # it has two
        ("dfl-fme.0/ports_num", "0"),
        ("dfl-fme.0/ports_num", "many"),
        ("dfl-fme.0/ports_num", "99"),
        ("dfl-fme.0/ports_num", errno.EIO),
        ("dfl-fme.0/bitstream_id", "0xffffffffffffffff"),
        ("dfl-fme.0/bitstream_id", "\x1b[31m"),
        ("dfl-port.0/id", "2"),  # no such port
        ("dfl-port.0/id", "-1"),
        ("dfl-port.0/id", ""),
        ("dfl-port.0/id", errno.ENODEV),
        ("dfl-port.0/id", errno.EIO),
        ("../../numa_node", "1;rm"),
        ("dfl-fme.0/dfl-fme-region.7/fpga_region/region1/compat_id", "f" * 32),
        ("dfl-fme.0/dfl-fme-region.7/fpga_region/region1/compat_id", "0" * 32),
        ("dfl-fme.0/dfl-fme-region.7/fpga_region/region1/compat_id", "../../etc"),
        ("dfl-fme.0/dfl-fme-region.7/fpga_region/region1/compat_id", INTERFACE[:-1]),
        ("dfl-fme.0/dfl-fme-region.7/fpga_region/region1/compat_id", errno.ENOENT),
    ],
)
def test_a_nonsense_attribute_is_a_problem_of_that_card_only(attribute, value):
    kernel = FakeKernel()
    kernel.add_card(ports=(0, 1))
    kernel.add_card(OTHER, number=4)
    directory = f"/sys/devices/pci0000:3a/{ADDRESS}/fpga_region/region0"
    path = f"{directory}/{attribute}".replace("/fpga_region/region0/../..", "")
    if value == errno.ENOENT:
        kernel.remove(path.removesuffix("/compat_id"))
    else:
        kernel.files[path] = value
    found = problem(kernel, others=1)
    assert found.message.isascii()
    assert found.message.isprintable()


ALL_ONES = "0xffffffffffffffff"
COMPAT_ID = "dfl-fme.0/dfl-fme-region.7/fpga_region/region1/compat_id"


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("dfl-fme.0/bitstream_id", ALL_ONES),
        ("dfl-fme.0/ports_num", "0"),
        ("dfl-fme.0/ports_num", "1"),  # it has two
        ("dfl-port.0/id", "1"),  # so has the other
        (COMPAT_ID, "f" * 32),
        (COMPAT_ID, "none"),
        ("dfl-fme.0/ports_num", errno.EIO),
        ("dfl-port.0/id", errno.ENFILE),
    ],
)
def test_what_a_reset_of_the_bus_shows_for_a_moment_is_looked_at_again(attribute, value):
    """No event tells that it has passed."""
    kernel = FakeKernel()
    kernel.add_card(ports=(0, 1))
    kernel.files[f"/sys/devices/pci0000:3a/{ADDRESS}/fpga_region/region0/{attribute}"] = value
    assert problem(kernel).passing


def test_a_driver_that_is_missing_is_looked_at_at_its_event_or_on_request():
    kernel = FakeKernel()
    fme = kernel.add_card()
    kernel.remove(f"{fme}/ports_num")
    assert not problem(kernel).passing


def test_an_fme_without_a_driver_is_a_problem_that_names_the_module():
    kernel = FakeKernel()
    fme = kernel.add_card()
    kernel.remove(fme)
    kernel.files[f"{fme}/uevent"] = ""
    assert "dfl-fme" in problem(kernel).hint


def test_a_second_fme_under_one_function_is_a_problem():
    kernel = FakeKernel()
    fme = kernel.add_card()
    kernel.files[f"{fme[:-1]}8/ports_num"] = "1"
    assert "more than one FME" in problem(kernel).message


def test_a_card_that_goes_while_it_is_read_is_simply_not_there():
    class Going(FakeKernel):
        def read(self, path: str) -> str:
            if path.endswith("/compat_id"):
                self.remove(f"/sys/devices/pci0000:3a/{ADDRESS}")
                self.remove("/sys/class/fpga_region/region0")
                raise failure(errno.ENODEV, path)
            return super().read(path)

    kernel = Going()
    kernel.add_card()
    inventory = scan(kernel)
    assert not inventory.cards
    assert not inventory.problems


def test_a_card_is_scanned_alone_as_with_all():
    kernel = FakeKernel()
    kernel.add_card()
    kernel.add_card(OTHER, number=4)
    kernel.files[f"/sys/devices/pci0000:3a/{OTHER}/numa_node"] = "nonsense"
    backend = DflBackend(kernel)
    assert backend.scan_card(CardId(CARD)) == backend.scan().cards[CardId(CARD)]
    other = PciAddress.parse(OTHER).card_id
    assert isinstance(backend.scan_card(other), CardProblem)
    assert backend.scan_card(PciAddress.parse("0000:01:00.0").card_id) is None


def test_memory_that_has_no_clear_knob_is_not_said_to_be_cleared():
    kernel = FakeKernel()
    fme = kernel.add_card()
    del kernel.files[f"{fme}/dfl_dev.5/inf0_clear"]
    (card,) = scan(kernel).cards.values()
    assert not card.clears_memory


def test_an_unlistable_class_is_an_error_and_no_empty_inventory():
    class Closed(FakeKernel):
        def listdir(self, path: str) -> list[str]:
            raise failure(errno.EACCES, path)

    with pytest.raises(HardwareError, match="FPGA_PLUGIN_SYSFS_ROOT"):
        scan(Closed())


@given(data=st.data())
def test_whatever_one_card_says_the_other_is_served(data: st.DataObject):
    kernel = FakeKernel()
    kernel.add_card(ports=(0, 1))
    kernel.files[f"/sys/devices/pci0000:3a/{ADDRESS}/sriov_numvfs"] = "0"
    damaged = sorted(kernel.files)
    kernel.add_card(OTHER, number=4)
    for path in data.draw(st.lists(st.sampled_from(damaged), min_size=1, max_size=3)):
        kernel.files[path] = data.draw(
            st.one_of(st.text(max_size=40), st.sampled_from([errno.EIO, errno.ENODEV]))
        )
    backend = DflBackend(kernel)
    inventory = backend.scan()
    assert PciAddress.parse(OTHER).card_id in inventory.cards
    assert len(inventory.cards) + len(inventory.problems) == 2
    for card in inventory.cards.values():
        assert isinstance(card, Card)
        assert backend.health(card).failed.keys() <= {region.id for region in card.regions}
