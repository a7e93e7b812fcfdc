import errno

import pytest
from doubles.dfl import FakeKernel, failure, served

from fpga_plugin.hardware.dfl import defs
from fpga_plugin.hardware.dfl.handles import fme_of, port_of
from fpga_plugin.hardware.faults import FaultKind

CARD_WIDE = [
    ("fme", "errors/catfatal_errors", "0x10", "fatal: DramFatalErr"),
    ("fme", "errors/catfatal_errors", "0x400", "thermal: ThermCatastErr"),
    ("fme", "errors/catfatal_errors", "0x1000", "fatal: bit 12"),
    ("fme", "errors/catfatal_errors", "0xffffffffffffffff", "unreadable: "),
    ("fme", "errors/catfatal_errors", "nonsense", "unreadable: "),
    ("fme", "errors/catfatal_errors", errno.ENODEV, "unreadable: "),
    ("fme", "errors/nonfatal_errors", "0x200", "thermal: TempThreshAP6"),
    ("fme", "errors/nonfatal_errors", errno.EIO, "unreadable: "),
    ("fme", "hwmon/hwmon3/temp1_crit_alarm", "1", "thermal: "),
    ("fme", "dfl_dev.5/inf0_cal_fail", "1", "memory: "),
    ("fme", "dfl_dev.5/inf0_init_done", "0", "memory: "),
    ("fme", "dfl_dev.5/inf0_init_done", errno.EIO, "unreadable: "),
]
ONE_REGION = [
    ("port", "errors/errors", f"0x{1 << 50:x}", "thermal: AP6"),
    ("port", "errors/errors", "0xffffffffffffffff", "unreadable: "),
    ("port", "errors/errors", errno.ENXIO, "unreadable: "),
    ("port", "power_state", "0x6", "power: "),
    ("port", "afu_id", errno.EBUSY, "poisoned: "),
    ("port", "afu_id", "f" * 32, "hung: "),
    ("port", "afu_id", errno.ENODEV, "unreadable: "),
    ("port", "afu_id", None, "unreadable: "),
]
DEGRADED = [
    ("fme", "errors/nonfatal_errors", "0x1", "thermal: TempThreshAP1"),
    ("fme", "errors/nonfatal_errors", "0x2", "thermal: TempThreshAP2"),
    ("fme", "errors/nonfatal_errors", "0x400", "power: PowerThreshAP1"),
    ("fme", "errors/nonfatal_errors", "0x800", "power: PowerThreshAP2"),
    ("fme", "errors/nonfatal_errors", errno.EACCES, "unreadable: "),
    ("fme", "hwmon/hwmon3/temp1_max_alarm", "1", "thermal: "),
    ("fme", "hwmon/hwmon4/power1_max_alarm", "1", "power: "),
    ("fme", "errors/nonfatal_errors", "0x8", "port: PortFatalErr"),
    ("port", "power_state", "0x1", "power: "),
    ("port", "power_state", "0x2", "power: "),
    ("port", "power_state", "0x5", "power: "),
    ("port", "ap1_event", "1", "power: "),
    ("port", "ap2_event", "1", "power: "),
]
WELL = [
    ("fme", "errors/catfatal_errors", "0x900"),  # injected by somebody's test
    ("fme", "errors/catfatal_errors", None),
    ("fme", "errors", None),
    ("fme", "hwmon", None),
    ("fme", "dfl_dev.5", None),
    ("port", "errors", None),
    ("port", "power_state", None),
    ("port", "ap1_event", None),
    ("port", "errors/errors", f"0x{1 << 32 | 1 << 48 | 1 << 16:x}"),  # a tenant's doing
    ("fme", "dfl-fme-mgr.0/fpga_manager/fpga0/state", "write error"),  # judged after a PR only
    ("fme", "dfl-fme-mgr.0/fpga_manager/fpga0/status", "reconfig CRC error"),
    ("fme", "errors/fme_errors", errno.EIO),  # blocks during a PR: never read
    ("fme", "errors/first_error", errno.EIO),
    ("fme", "errors/next_error", errno.EIO),
    ("fme", "errors/pcie0_errors", errno.EIO),
    ("fme", "errors/inject_errors", errno.EIO),
]


def card_with(where: str, name: str, value: str | int | None):
    kernel = FakeKernel()
    kernel.add_card(ports=(0, 1))
    backend, card = served(kernel)
    directory = fme_of(card).sysfs if where == "fme" else port_of(card.regions[1]).sysfs
    if value is None:
        kernel.remove(f"{directory}/{name}")
    else:
        kernel.files[f"{directory}/{name}"] = value
    return card, backend.health(card)


def test_a_card_without_complaints_is_healthy():
    _, health = card_with("fme", "ports_num", "2")
    assert not health.failed
    assert not health.degraded


@pytest.mark.parametrize(("where", "name", "value", "reason"), CARD_WIDE)
def test_a_failed_card_fails_all_its_regions(where, name, value, reason):
    card, health = card_with(where, name, value)
    assert health.failed.keys() == {region.id for region in card.regions}
    assert all(fault.message.startswith(reason) for fault in health.failed.values())
    assert {fault.kind for fault in health.failed.values()} == {FaultKind.TRANSIENT}


@pytest.mark.parametrize(("where", "name", "value", "reason"), ONE_REGION)
def test_a_failed_port_fails_its_region_only(where, name, value, reason):
    card, health = card_with(where, name, value)
    ((region, fault),) = health.failed.items()
    assert region == card.regions[1].id
    assert fault.message.startswith(reason)
    kinds = {"poisoned: ": FaultKind.POISONED, "hung: ": FaultKind.CURABLE}
    assert fault.kind is kinds.get(reason, FaultKind.TRANSIENT)


@pytest.mark.parametrize(("where", "name", "value", "reason"), DEGRADED)
def test_a_card_that_throttles_or_warns_fails_nothing(where, name, value, reason):
    _, health = card_with(where, name, value)
    assert not health.failed
    (said,) = health.degraded
    assert said.startswith(reason)


@pytest.mark.parametrize(("where", "name", "value"), WELL)
def test_absent_signals_and_errors_that_a_tenant_can_cause_fail_nothing(where, name, value):
    _, health = card_with(where, name, value)
    assert not health.failed
    assert not health.degraded


def test_a_card_that_is_gone_fails_all_its_regions():
    kernel = FakeKernel()
    kernel.add_card(ports=(0, 1))
    backend, card = served(kernel)
    kernel.remove("/sys/devices")
    health = backend.health(card)
    assert health.failed.keys() == {region.id for region in card.regions}
    assert all(fault.message.startswith("unreadable: ") for fault in health.failed.values())


def test_two_failures_are_both_named():
    kernel = FakeKernel()
    fme = kernel.add_card()
    backend, card = served(kernel)
    kernel.files[f"{fme}/errors/catfatal_errors"] = "0x10"
    kernel.files[f"{fme}/dfl_dev.5/inf0_cal_fail"] = "1"
    (fault,) = backend.health(card).failed.values()
    assert fault.message.startswith("fatal: DramFatalErr")
    assert "; memory: " in fault.message


def test_a_port_that_is_poisoned_and_worse_is_not_helped_by_a_rebind():
    kernel = FakeKernel()
    kernel.add_card()
    backend, card = served(kernel)
    kernel.files[f"{port_of(card.regions[0]).sysfs}/afu_id"] = errno.EBUSY
    kernel.files[f"{port_of(card.regions[0]).sysfs}/power_state"] = f"0x{defs.POWER_AP6:x}"
    (fault,) = backend.health(card).failed.values()
    assert "; poisoned: " in fault.message
    assert fault.kind is FaultKind.TRANSIENT


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("errors/errors", "0xffffffffffffffff"),
        ("errors/errors", errno.EIO),
        ("errors/errors", f"0x{defs.PORT_AP6_EVENT:x}"),
        ("power_state", "0xf"),
        ("power_state", f"0x{defs.POWER_AP6:x}"),
    ],
)
def test_an_accelerator_that_is_silent_behind_a_port_that_is_not_well_is_worth_no_scrub(
    name: str, value: str | int
):
    kernel = FakeKernel()
    kernel.add_card()
    backend, card = served(kernel)
    port = port_of(card.regions[0]).sysfs
    kernel.files[f"{port}/afu_id"] = "f" * 32
    kernel.files[f"{port}/{name}"] = value
    (fault,) = backend.health(card).failed.values()
    assert fault.kind is FaultKind.TRANSIENT
    assert fault.stops_work


def test_a_pcie_error_keeps_a_card_back_and_bars_no_scrub():
    card, health = card_with("fme", "errors/nonfatal_errors", "0x4")
    assert health.failed.keys() == {region.id for region in card.regions}
    for fault in health.failed.values():
        assert fault.message.startswith("pcie: PcieError")
        assert not fault.stops_work


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("afu_id", errno.EBUSY, FaultKind.POISONED),
        ("afu_id", "f" * 32, FaultKind.CURABLE),
        ("power_state", "0x6", FaultKind.TRANSIENT),
    ],
)
def test_a_pcie_error_does_not_hide_what_else_is_wrong(
    name: str, value: str | int, kind: FaultKind
):
    kernel = FakeKernel()
    fme = kernel.add_card()
    backend, card = served(kernel)
    kernel.files[f"{fme}/errors/nonfatal_errors"] = "0x4"
    kernel.files[f"{port_of(card.regions[0]).sysfs}/{name}"] = value
    (fault,) = backend.health(card).failed.values()
    assert fault.kind is kind
    assert "; pcie: PcieError" in fault.message


@pytest.mark.parametrize(
    ("reads", "cleared"),
    [("0x0", None), ("0x21", "0x21"), ("0xffffffffffffffff", None), (errno.EIO, None), ("?", None)],
)
def test_pcie_errors_are_cleared_by_what_was_read(reads: str | int, cleared: str | None):
    kernel = FakeKernel()
    fme = kernel.add_card()
    backend, card = served(kernel)
    kernel.files |= {f"{fme}/errors/pcie0_errors": reads, f"{fme}/errors/pcie1_errors": "0x1"}
    found = backend.clear_errors(card)
    written = [(f"{fme}/errors/pcie1_errors", "0x1")]
    if cleared is not None:
        written.insert(0, (f"{fme}/errors/pcie0_errors", cleared))
    assert [(path, text) for path, text in kernel.written] == written
    assert len(found) == len(written)


def test_pcie_errors_that_change_while_they_are_cleared_stay_and_fail_nothing():
    kernel = FakeKernel()
    fme = kernel.add_card()
    backend, card = served(kernel)
    path = f"{fme}/errors/pcie0_errors"
    kernel.files[path] = "0x1"

    def changed(_: str) -> None:
        raise failure(errno.EINVAL, path)

    kernel.stores[path] = changed
    assert not backend.clear_errors(card)


def test_nothing_that_a_dying_card_answers_is_raised():
    class Dead(FakeKernel):
        dead = False

        def listdir(self, path: str) -> list[str]:
            if self.dead:
                raise failure(errno.EIO, path)
            return super().listdir(path)

        def exists(self, path: str) -> bool:
            if self.dead:
                raise failure(errno.EIO, path)
            return super().exists(path)

        def read(self, path: str) -> str:
            if self.dead:
                raise failure(errno.EIO, path)
            return super().read(path)

    kernel = Dead()
    kernel.add_card(ports=(0, 1))
    backend, card = served(kernel)
    kernel.dead = True
    assert backend.health(card).failed.keys() == {region.id for region in card.regions}


PCI = "/sys/devices/pci0000:3a/0000:3b:00.0"


def test_errors_that_the_link_counted_before_the_first_look_fail_nothing():
    kernel = FakeKernel()
    kernel.add_card()
    backend, card = served(kernel)
    assert not backend.health(card).failed
    assert not backend.health(card).degraded


@pytest.mark.parametrize("text", ["", "nonsense", "TOTAL_ERR_FATAL -1", "TOTAL_ERR_FATAL 1"])
def test_counters_that_are_nonsense_or_of_another_function_fail_nothing(text):
    kernel = FakeKernel()
    kernel.add_card()
    backend, card = served(kernel)
    backend.health(card)
    kernel.files[f"{PCI}/aer_dev_fatal"] = text
    assert not backend.health(card).failed


def test_a_fatal_error_of_the_link_fails_the_card_until_the_operator_has_looked():
    kernel = FakeKernel()
    kernel.add_card(ports=(0, 1))
    backend, card = served(kernel)
    backend.health(card)
    kernel.files[f"{PCI}/aer_dev_fatal"] = "DLP 1\nTOTAL_ERR_FATAL 3"
    for _ in range(2):
        failed = backend.health(card).failed
        assert failed.keys() == {region.id for region in card.regions}
        assert all(fault.message.startswith("fatal: 1 PCI Express") for fault in failed.values())
    backend.accept_errors(card.id)
    assert not backend.health(card).failed


def test_another_card_in_the_same_slot_is_judged_by_its_own_counters():
    kernel = FakeKernel()
    kernel.add_card()
    backend, card = served(kernel)
    backend.health(card)
    kernel.remove("/sys/devices")
    assert not isinstance(backend.scan_card(card.id), type(card))
    kernel.add_card()
    kernel.files[f"{PCI}/aer_dev_fatal"] = "TOTAL_ERR_FATAL 9"
    assert not backend.health(card).failed


def test_errors_that_the_link_corrected_are_said_once_and_fail_nothing():
    kernel = FakeKernel()
    kernel.add_card()
    backend, card = served(kernel)
    backend.health(card)
    kernel.files[f"{PCI}/aer_dev_correctable"] = "TOTAL_ERR_COR 8"
    first = backend.health(card)
    assert not first.failed
    (said,) = first.degraded
    assert said.startswith("pcie: ")
    kernel.files[f"{PCI}/aer_dev_correctable"] = "TOTAL_ERR_COR 900"
    assert backend.health(card).degraded == first.degraded, "no line for each look"
