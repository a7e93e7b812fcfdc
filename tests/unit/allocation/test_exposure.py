"""Cards whose memory nobody clears, or whose DMA nothing limits: said, and refused where asked."""

import errno
from dataclasses import replace

import pytest
from doubles.cards import PREFIX, REGIONS, WHOLE, device, make_card
from doubles.dfl import FakeKernel, served
from ledger_support import MemoryJournal, found, make_ledger, make_lists, reopened, scrub, shown

from fpga_plugin.allocation.exposure import ExposurePolicy, memory_state
from fpga_plugin.allocation.journal.records import ClaimOwner
from fpga_plugin.dra.desired import Form, desired_slices
from fpga_plugin.dra.names import parse_device_name
from fpga_plugin.errors import RefusedError
from fpga_plugin.hardware.model import Iommu
from fpga_plugin.kubernetes.names import ClaimUid, PodUid
from fpga_plugin.settings.settings import Advertise, Exposure

PARENT = "/sys/devices/pci0000:3a/0000:3b:00.0"
FORGETFUL = make_card(1, clears_memory=True)
FORGETFUL = replace(FORGETFUL, iommu=Iommu.TRANSLATE)
KEEPING = replace(make_card(2, nodes=(2, 3)), iommu=Iommu.TRANSLATE)
OPEN = replace(make_card(3, nodes=(4, 5), clears_memory=True), iommu=Iommu.NONE)
ALL = (FORGETFUL, KEEPING, OPEN)


def ledger_with(policy: ExposurePolicy):
    ledger, _ = make_ledger(*ALL)
    ledger.obstacles.exposure = policy
    return ledger


def healthy(ledger, resource):
    return {name for name, well in shown(make_lists(ledger), resource).items() if well}


def test_by_default_every_card_is_given_to_everybody():
    ledger = ledger_with(ExposurePolicy())
    assert healthy(ledger, WHOLE) == {device(card) for card in ALL}
    assert len(healthy(ledger, REGIONS)) == 6
    assert not any(ledger.obstacles.exposure.note(card) for card in ALL)


@pytest.mark.parametrize(
    ("policy", "refused"),
    [
        (ExposurePolicy(uncleared_memory=Exposure.REFUSE_REGIONS), KEEPING),
        (ExposurePolicy(untranslated_dma=Exposure.REFUSE_REGIONS), OPEN),
    ],
)
def test_a_card_that_is_refused_by_region_is_given_as_a_whole(policy, refused):
    ledger = ledger_with(policy)
    assert healthy(ledger, WHOLE) == {device(card) for card in ALL}
    assert not {device(refused, 0), device(refused, 1)} & healthy(ledger, REGIONS)
    assert len(healthy(ledger, REGIONS)) == 4
    assert "only as a whole" in policy.note(refused)
    with pytest.raises(RefusedError, match="not given by region"):
        ledger.device_plugin.allocate(REGIONS, [device(refused, 0)])
    ledger.device_plugin.allocate(WHOLE, [device(refused)])


@pytest.mark.parametrize(
    ("policy", "refused"),
    [
        (ExposurePolicy(uncleared_memory=Exposure.REFUSE), KEEPING),
        (ExposurePolicy(untranslated_dma=Exposure.REFUSE), OPEN),
    ],
)
def test_a_card_that_is_refused_is_given_to_nobody_and_stays_listed(policy, refused):
    ledger = ledger_with(policy)
    assert healthy(ledger, WHOLE) == {device(card) for card in ALL if card is not refused}
    assert device(refused) in shown(make_lists(ledger), WHOLE)
    assert "given to nobody" in policy.note(refused)
    for resource, which in ((REGIONS, device(refused, 0)), (WHOLE, device(refused))):
        with pytest.raises(RefusedError, match="FPGA_PLUGIN_UN"):
            ledger.device_plugin.allocate(resource, [which])
    assert not ledger.allocations


@pytest.mark.parametrize("mode", [Iommu.IDENTITY, Iommu.NONE, Iommu.UNKNOWN])
def test_dma_counts_as_limited_only_where_the_iommu_is_known_to_translate(mode):
    policy = ExposurePolicy(untranslated_dma=Exposure.REFUSE)
    assert mode.value in policy.refusal(replace(FORGETFUL, iommu=mode), whole=True)
    assert not policy.refusal(FORGETFUL, whole=True)


def test_who_has_a_device_keeps_it_when_the_operator_begins_to_refuse_it():
    journal = MemoryJournal()
    ledger = reopened(journal, KEEPING)
    scrub(ledger, KEEPING)
    ledger.device_plugin.allocate(REGIONS, [device(KEEPING, 0)])
    ledger = reopened(journal)
    ledger.obstacles.exposure = ExposurePolicy(uncleared_memory=Exposure.REFUSE)
    found(ledger, KEEPING)
    assert shown(make_lists(ledger), REGIONS) == {
        device(KEEPING, 0): True,
        device(KEEPING, 1): False,
    }


def test_an_owned_device_of_a_refused_card_is_given_to_no_other_pod():
    ledger, _ = make_ledger(KEEPING)
    ledger.device_plugin.allocate(REGIONS, [device(KEEPING, 0)])
    ledger.obstacles.exposure = ExposurePolicy(uncleared_memory=Exposure.REFUSE)
    with pytest.raises(RefusedError):
        ledger.device_plugin.allocate(REGIONS, [device(KEEPING, 0)])
    assert device(KEEPING, 0) in ledger.allocations


def owner(uid: str, *devices) -> ClaimOwner:
    return ClaimOwner(ClaimUid(uid), "n", "c", devices, dict.fromkeys(devices, ("fpga",)))


def tainted(ledger, form=Form(taints=True)):  # noqa: B008  # it is frozen
    """Devices that ResourceSlices show, and whether this keeps them from claims."""
    slices = desired_slices(ledger, form, driver=PREFIX, advertise=Advertise.BOTH)
    return {
        parse_device_name(one["name"]): f"{PREFIX}/exposed"
        in {taint["key"] for taint in one.get("taints", ())}
        for part in slices
        for one in part.get("devices", ())
    }


@pytest.mark.parametrize("exposure", [Exposure.REFUSE, Exposure.REFUSE_REGIONS])
def test_what_is_refused_is_refused_to_resource_claims_too(exposure):
    policy = ExposurePolicy(exposure, exposure)
    ledger = ledger_with(policy)
    expected = {device(card): bool(policy.refusal(card, whole=True)) for card in ALL}
    for card in ALL:
        why = policy.refusal(card, whole=False)
        expected |= {device(card, port): bool(why) for port in (0, 1)}
    assert sum(expected.values()) == (6 if exposure is Exposure.REFUSE else 4)
    assert tainted(ledger) == expected
    for number, (which, refused) in enumerate(expected.items()):
        claim = owner(f"claim-{number}", which)
        if refused:
            with pytest.raises(RefusedError, match="FPGA_PLUGIN_UN"):
                ledger.dra.take(claim, [PodUid("pod")])
        else:
            ledger.dra.take(claim, [PodUid("pod")])
            ledger.dra.end_claim(claim.uid)


def test_a_resource_claim_that_has_a_device_keeps_it_and_gets_no_other():
    ledger, _ = make_ledger(KEEPING)
    ledger.dra.take(owner("a", device(KEEPING, 0)), [PodUid("pod")])
    ledger.obstacles.exposure = ExposurePolicy(uncleared_memory=Exposure.REFUSE)
    assert device(KEEPING, 0) in tainted(ledger, Form(taints=False))
    ledger.dra.take(owner("a", device(KEEPING, 0)), [PodUid("pod")])
    with pytest.raises(RefusedError, match="not given by region"):
        ledger.dra.take(owner("a", device(KEEPING, 0), device(KEEPING, 1)), [PodUid("pod")])
    assert set(ledger.allocations) == {device(KEEPING, 0)}


def test_the_state_of_memory_in_a_word():
    assert memory_state(FORGETFUL, pending=False) == "cleared"
    assert memory_state(FORGETFUL, pending=True) == "not cleared yet"
    assert memory_state(KEEPING, pending=True) == "never cleared"
    assert (
        memory_state(replace(FORGETFUL, some_memory_stays=True), pending=False) == "never cleared"
    )


def test_a_bank_without_a_knob_stays_although_another_one_is_cleared():
    kernel = FakeKernel()
    fme = kernel.add_card()
    assert not served(kernel)[1].never_cleared
    kernel.files[f"{fme}/dfl_dev.6/inf0_init_done"] = "1"
    _, card = served(kernel)
    assert card.clears_memory
    assert card.never_cleared


@pytest.mark.parametrize(
    ("files", "mode"),
    [
        ({}, Iommu.NONE),
        ({"type": "DMA"}, Iommu.TRANSLATE),
        ({"type": "DMA-FQ\n"}, Iommu.TRANSLATE),
        ({"type": "unmanaged"}, Iommu.TRANSLATE),
        ({"type": "identity"}, Iommu.IDENTITY),
        ({"type": "blocked"}, Iommu.UNKNOWN),
        ({"type": "\x1b[2J"}, Iommu.UNKNOWN),
        ({"type": errno.EIO}, Iommu.UNKNOWN),
        ({"reserved_regions": ""}, Iommu.UNKNOWN),
        ({"type": "DMA", "name": "vfio-noiommu"}, Iommu.NONE),
    ],
)
def test_the_iommus_mode_is_that_of_the_functions_group(files, mode):
    kernel = FakeKernel()
    kernel.add_card()
    if files:
        group = "/sys/kernel/iommu_groups/3"
        kernel.links[f"{PARENT}/iommu_group"] = group
        kernel.files |= {f"{group}/{name}": text for name, text in files.items()}
    assert served(kernel)[1].iommu is mode


OTHER_CARD, NETWORK, BRIDGE, SIBLING = (
    f"0000:{at}" for at in ("3c:00.0", "3d:00.0", "3a:00.0", "3b:00.1")
)


@pytest.mark.parametrize(
    ("members", "mode"),
    [
        ((), Iommu.TRANSLATE),
        ((BRIDGE, SIBLING), Iommu.TRANSLATE),
        ((NETWORK,), Iommu.SHARED),
        ((OTHER_CARD, BRIDGE), Iommu.SHARED),
        (("x",), Iommu.UNKNOWN),
    ],
)
def test_a_group_with_strangers_limits_no_dma_between_them(members, mode):
    kernel = FakeKernel()
    kernel.add_card()
    group = "/sys/kernel/iommu_groups/3"
    kernel.links[f"{PARENT}/iommu_group"] = group
    kernel.files[f"{group}/type"] = "DMA-FQ"
    kernel.files[f"/sys/bus/pci/devices/{BRIDGE}/class"] = "0x060400"
    kernel.files |= {f"{group}/devices/{one}/class": "" for one in ("0000:3b:00.0", *members)}
    card = served(kernel)[1]
    assert card.iommu is mode
    refused = ExposurePolicy(untranslated_dma=Exposure.REFUSE).refusal(card, whole=True)
    assert ("IOMMU mode is" in refused) is (mode is not Iommu.TRANSLATE)


def test_a_virtual_function_shares_its_group_with_its_own_card():
    kernel = FakeKernel()
    kernel.add_card()
    group = "/sys/kernel/iommu_groups/3"
    kernel.links[f"{PARENT}/iommu_group"] = group
    kernel.files[f"{group}/type"] = "DMA"
    virtual = kernel.add_function("0000:3c:01.2")
    kernel.files[f"{group}/devices/0000:3c:01.2/class"] = ""
    assert served(kernel)[1].iommu is Iommu.SHARED
    kernel.links[f"{virtual}/physfn"] = PARENT
    assert served(kernel)[1].iommu is Iommu.TRANSLATE


def test_the_weakest_function_of_a_card_counts():
    kernel = FakeKernel()
    kernel.add_card(ports=(0, 1))
    virtual = kernel.add_function("0000:3b:00.1")
    kernel.links[f"{virtual}/physfn"] = PARENT
    kernel.links[f"{PARENT}/virtfn0"] = virtual
    kernel.files[f"{PARENT}/sriov_numvfs"] = "1"
    port = f"{PARENT}/fpga_region/region0/dfl-port.1"
    kernel.remove(port)
    kernel.add_port(virtual, 9, 1, 1)
    kernel.files[f"{PARENT}/iommu_group/type"] = "DMA"
    kernel.files[f"{virtual}/iommu_group/type"] = "DMA"
    assert served(kernel)[1].iommu is Iommu.TRANSLATE
    kernel.files[f"{virtual}/iommu_group/type"] = "identity"
    assert served(kernel)[1].iommu is Iommu.IDENTITY
