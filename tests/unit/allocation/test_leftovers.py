"""What pods still have by the API that served before: it ends by the rule of every other device.

Kubelet's word, read, and the pods' processes: without both nothing of it is touched or given out,
and the rest of the node is served.
"""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from doubles.cards import AFU, BLANK, PREFIX, REGIONS, device, make_card
from ledger_support import former, make_ledger, reopened, scrub, start
from structlog.testing import capture_logs
from test_reconcile_lost_claims import NO_BLANKS, Queue

from fpga_plugin.allocation.dra_steps import DeviceOwnedError
from fpga_plugin.allocation.journal.records import ClaimOwner, Condition
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.reconcile.leftovers import DevicePluginLeftovers
from fpga_plugin.allocation.reconcile.owners import Owners
from fpga_plugin.cards.operations import CardOperations
from fpga_plugin.dra import reconcile
from fpga_plugin.dra.cdi import CdiError, CdiFiles
from fpga_plugin.dra.ends import ClaimEnds
from fpga_plugin.dra.files import ClaimFiles
from fpga_plugin.dra.names import device_name
from fpga_plugin.dra.reconcile import ClaimReconciler
from fpga_plugin.errors import FpgaPluginError, NoSourceError
from fpga_plugin.ids import DeviceId
from fpga_plugin.kubernetes.cgroup import PodPresence
from fpga_plugin.kubernetes.kubelet.checkpoint import (
    Checkpoint,
    CheckpointEntry,
    CheckpointUnreadableError,
)
from fpga_plugin.kubernetes.kubelet.dra_record import FILE_NAME
from fpga_plugin.kubernetes.names import ClaimUid, PodUid, ResourceName

CARD = make_card()
P0, P1 = device(CARD, 0), device(CARD, 1)
REGION = CARD.regions[0].id
POD_A, POD_B = PodUid("pod-a"), PodUid("pod-b")
UID = ClaimUid("0b1a1e5e-0000-4000-8000-000000000001")


class Pods:
    """Cgroups; those of pods that are not named are gone."""

    def __init__(self, **states: PodPresence) -> None:
        self.states = {name.replace("_", "-"): state for name, state in states.items()}

    def state(self, uid: PodUid) -> PodPresence:
        assert isinstance(uid, str), "there is no cgroup to ask about"
        return self.states.get(uid, PodPresence.GONE)

    def may_live(self, uid: PodUid) -> bool:
        return self.state(uid) in {PodPresence.ALIVE, PodPresence.UNKNOWN}

    def instance_gone(self, _cgroups: object) -> bool:
        return False


def alive(*names: str) -> Pods:
    return Pods(**dict.fromkeys((name.replace("-", "_") for name in names), PodPresence.ALIVE))


def operations(ledger: Ledger, pods: Pods) -> CardOperations:
    nothing = SimpleNamespace()
    return CardOperations(ledger, nothing, nothing, nothing, pods, nothing)  # type: ignore[arg-type]


# ------------------------------------------------------------------ from DRA to the device plugin


class Claims:
    """A claim that is prepared, with its file, on a node that the device plugin serves now.

    Attributes:
        root: kubelet's root directory, without a record.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder / "kubelet"
        self.root.mkdir()
        self.pods = alive()
        self.ledger, self.journal = make_ledger(CARD)
        self.files = CdiFiles(str(folder / "cdi"), PREFIX)
        owner = ClaimOwner(
            UID, "space", "claim", (P0,), {P0: ("fpga",)}, PREFIX, self.files.path(UID)
        )
        self.ledger.dra.take(owner, [POD_A])
        start(self.ledger, P0)
        self.ledger.dra.prepared(UID, {})
        self.files.write(self.ledger.claim_owners[UID], [self.ledger.allocations[P0]], {})
        self.path = Path(self.files.path(UID))
        self.live()

    def live(self) -> None:
        """A run of the plugin."""
        self.ledger = reopened(self.journal)
        there = {one.id: AFU if one.id == REGION else BLANK for one in CARD.regions}
        self.ledger.hardware.card_found(CARD, there, BLANK)
        self.ledger.reconciled([CARD.id])
        self.queue = Queue()
        of = operations(self.ledger, self.pods)
        files = ClaimFiles(self.ledger, self.files)
        ends = ClaimEnds(self.ledger, NO_BLANKS, self.queue, files)  # type: ignore[arg-type]
        root = str(self.root)
        self.leftovers = ClaimReconciler(of, self.queue, ends, files, root=root, driver=PREFIX)  # type: ignore[arg-type]

    def record(self, *pods: PodUid, uid: ClaimUid = UID, device: str = P0) -> None:
        """Kubelet's, of one claim; of none, if it has no pods."""
        state = {"Devices": [{"DeviceName": device_name(DeviceId(device)), "RequestNames": ["r"]}]}
        claim = {
            "ClaimUID": uid,
            "ClaimName": "claim",
            "Namespace": "space",
            "PodUIDs": {pod: {} for pod in pods},
            "DriverState": {PREFIX: state},
        }
        data = json.dumps({"ClaimInfoStateList": [claim] if pods else []})
        (self.root / FILE_NAME).write_text(json.dumps({"Data": data}))

    def look(self, *living: str) -> None:
        self.pods.states = alive(*living).states
        self.read = asyncio.run(self.leftovers.reconcile())

    @property
    def held(self) -> bool:
        """Whether the claim has all that it had, and nobody else gets it; the rest is served."""
        owner = self.ledger.claim_owners.get(UID)
        if owner is None or owner.ended:
            assert not self.ledger.allocations
            assert not self.path.exists(), "its file goes with it"
            return False
        assert self.path.exists()
        assert self.ledger.record(REGION).condition is Condition.PROGRAMMED
        assert self.queue.added == []
        with pytest.raises(FpgaPluginError):
            self.ledger.device_plugin.allocate(REGIONS, [P0])
        self.ledger.device_plugin.allocate(REGIONS, [P1])
        self.ledger.device_plugin.release([P1])
        return True


@pytest.fixture
def claims(tmp_path: Path) -> Claims:
    return Claims(tmp_path)


def test_a_claim_that_the_record_lacks_ends_once_its_pods_are_gone(claims: Claims) -> None:
    claims.record()
    claims.look("pod-a")
    assert claims.held, "kubelet lost sight of a pod that runs"
    claims.look()
    assert not claims.held
    assert claims.queue.added == [CARD.id]
    assert claims.ledger.record(REGION).condition is Condition.DIRTY, "it is scrubbed"
    assert claims.read


def test_a_claim_that_the_record_names_is_kept_though_its_pod_is_between_two_containers(
    claims: Claims,
) -> None:
    """Its cgroup is empty then: kubelet's word is needed, too."""
    claims.record(POD_A)
    for state in (PodPresence.EMPTY, PodPresence.GONE, PodPresence.UNKNOWN):
        claims.pods.states = {POD_A: state}
        asyncio.run(claims.leftovers.reconcile())
        assert claims.held


@pytest.mark.parametrize("record", ["none", "garbage", "directory"])
def test_without_a_record_that_can_be_read_nothing_ends(claims: Claims, record: str) -> None:
    """Kubelet's root directory may not be mounted, or its version be unknown: no pod is seen, and
    one may have joined the claim while no plugin ran."""
    path = claims.root / FILE_NAME
    if record == "garbage":
        path.write_text("{garbage")
    elif record == "directory":
        path.mkdir()
    with capture_logs() as logs:
        for _ in range(2):
            claims.look()
            assert claims.held
            assert not claims.read
    (line,) = logs
    assert line["claims"] == ["space/claim"]
    assert "FPGA_PLUGIN_MODE=dra" in line["hint"]
    assert str(path) in claims.leftovers.problem
    if path.is_dir():
        path.rmdir()
    claims.record()
    claims.look()
    assert not claims.held
    assert claims.leftovers.problem == ""


def test_a_pod_that_joined_while_no_plugin_ran_keeps_the_claim(claims: Claims) -> None:
    """No call reports it, then or later."""
    claims.record(POD_A, POD_B)
    claims.look("pod-b")
    assert claims.held
    claims.record()
    claims.look("pod-b")
    assert claims.held, "it runs, and it is known by now"
    claims.live()
    claims.look("pod-b")
    assert claims.held, "to a later life, too"
    claims.look()
    assert not claims.held


def test_pods_that_are_done_with_a_claim_are_forgotten_once_they_are_gone(claims: Claims) -> None:
    claims.record(POD_B)
    claims.look("pod-a", "pod-b")
    assert {one.pod for one in claims.ledger.dra.tenancies_of_claim(UID)} == {
        POD_A,
        POD_B,
    }
    claims.look("pod-b")
    assert {one.pod for one in claims.ledger.dra.tenancies_of_claim(UID)} == {POD_B}


def test_a_claim_that_kubelet_ended_leaves_only_its_tenancies(claims: Claims) -> None:
    """Its region waits for the pod as any earlier tenant's does."""
    claims.ledger.dra.end_claim(UID)
    claims.record()
    claims.look("pod-a")
    assert not claims.held
    assert former(claims.ledger, REGION) == {POD_A}


def test_a_claim_that_the_record_names_and_the_journal_lacks_is_adopted(claims: Claims) -> None:
    other = ClaimUid("0b1a1e5e-0000-4000-8000-000000000002")
    claims.record(POD_B, uid=other, device=P1)
    claims.look("pod-a", "pod-b")
    assert claims.ledger.pods_of([P1]) == {POD_B}
    with pytest.raises(FpgaPluginError):
        claims.ledger.device_plugin.allocate(REGIONS, [P1])


def test_a_claim_keeps_its_row_until_its_file_is_removed(
    claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody would know of a file by which a container starts with what is another's."""

    def fails(_path: str, _uid: ClaimUid) -> None:
        raise CdiError("read-only file system")

    claims.record()
    with monkeypatch.context() as patch:
        patch.setattr(claims.files, "remove", fails)
        claims.look()
        assert claims.held
    claims.look()
    assert not claims.held


def test_it_is_looked_again_until_nothing_is_left(
    claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[bool] = []
    look = claims.leftovers.reconcile

    async def counted() -> bool:
        looks.append(await look())
        if len(looks) == 2:
            claims.record()
        elif len(looks) == 4:
            assert not claims.held
            scrub(claims.ledger, CARD)
        assert len(looks) < 9
        return looks[-1]

    monkeypatch.setattr(reconcile, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(claims.leftovers, "reconcile", counted)
    asyncio.run(claims.leftovers.run())
    assert looks == [False, False, True, True, True]
    assert not claims.ledger.claim_owners


# ------------------------------------------------------------------ from the device plugin to DRA


class Devices:
    """A node that DRA serves now, and kubelet's checkpoint of what the device plugin gave out."""

    def __init__(self, pods: Pods, *entries: CheckpointEntry) -> None:
        self.ledger, _ = make_ledger(CARD)
        self.pods, self.entries = pods, list(entries)
        self.podresources = None
        self.failing = False
        self.queue = Queue()

    def look(self) -> DevicePluginLeftovers:
        owners = Owners(self.ledger, self.pods, self)  # type: ignore[arg-type]
        leftovers = DevicePluginLeftovers(self.ledger, self.pods, owners, self, self.queue)  # type: ignore[arg-type]
        self.read = asyncio.run(leftovers.look())
        return leftovers

    async def checkpoint(self) -> Checkpoint:
        if self.failing:
            raise CheckpointUnreadableError("no JSON")
        return Checkpoint(entries=tuple(self.entries))

    def prepare(self) -> None:
        self.ledger.dra.take(ClaimOwner(UID, "space", "claim", (P0,), {P0: ("fpga",)}), [POD_B])


def entry(resource: str, *ids: str) -> CheckpointEntry:
    return CheckpointEntry(POD_A, "main", ResourceName(resource), frozenset(ids))


def owned(devices: Devices, *, pod: PodUid | None = POD_A) -> Devices:
    devices.ledger.device_plugin.allocate(REGIONS, [P0])
    if pod is not None:
        devices.ledger.device_plugin.bind_pod([P0], pod)
    start(devices.ledger, P0)
    return devices


def test_a_card_that_comes_later_is_asked_about() -> None:
    """Of its pods nothing is known, and this API's record does not say."""
    devices = Devices(alive("pod-a"))
    leftovers = devices.look()
    assert not leftovers.waits
    devices.ledger.hardware.card_found(make_card(2, nodes=(2, 3)), {}, None)
    assert leftovers.waits


def test_another_vendors_pod_has_nothing_of_ours() -> None:
    devices = Devices(alive("pod-a"), entry("acme.example/fpga-large", "serial-17"))
    assert not devices.look().waits
    assert not devices.ledger.allocations
    assert not devices.ledger.foreign


@pytest.mark.parametrize(
    "resource", [REGIONS, "old.example/region-board"], ids=["ours", "of another prefix"]
)
@pytest.mark.parametrize("state", [PodPresence.UNKNOWN, PodPresence.EMPTY, PodPresence.ALIVE])
def test_a_pod_that_the_checkpoint_names_keeps_its_device_and_no_other(
    resource: str, state: PodPresence
) -> None:
    """Also one that the journal lacks, and by whatever prefix it came."""
    devices = Devices(Pods(pod_a=state), entry(resource, P0))
    assert devices.look().waits
    assert devices.ledger.pods_of([P0]) == {POD_A}
    with pytest.raises(DeviceOwnedError, match="a pod of the device plugin"):
        devices.prepare()
    other = ClaimOwner(UID, "space", "claim", (P1,), {P1: ("fpga",)})
    assert devices.ledger.dra.take(other, [POD_B]), "the rest is served"


def test_a_pod_that_may_have_a_device_by_another_plugins_name_keeps_its_card_back() -> None:
    devices = Devices(alive("pod-a"), entry(REGIONS.replace(PREFIX, "old.example"), "serial-17"))
    assert devices.look().waits
    assert set(devices.ledger.foreign) == {CARD.id}


FUNCTIONS = str(CARD.address)[:-1]
AMDS = "amd.com/xilinx_u250_gen3x16_xdma_shell_4_1-0"


@pytest.mark.parametrize("device", [f"{FUNCTIONS}1", f"{FUNCTIONS}1-3"])
def test_amds_plugin_names_a_card_by_its_user_functions_address(device: str) -> None:
    devices = Devices(alive("pod-a"), entry(AMDS, device))
    devices.look()
    assert set(devices.ledger.foreign) == {CARD.id}


def test_a_card_is_left_alone_though_a_pod_has_another_ones_function_too() -> None:
    devices = Devices(alive("pod-a"), entry(AMDS, f"{FUNCTIONS}1", "0000:ff:00.1"))
    devices.look()
    assert set(devices.ledger.foreign) == {CARD.id}


@pytest.mark.parametrize("device", [f"{FUNCTIONS}1-x", "0000:ff:00.1", "no-address"])
def test_another_card_of_amds_plugin_keeps_none_back(device: str) -> None:
    devices = Devices(alive("pod-a"), entry(AMDS, device))
    devices.look()
    assert not devices.ledger.foreign


def test_an_entry_of_a_pod_that_is_gone_is_nobodys() -> None:
    """Kubelet rewrites its checkpoint only for a device plugin."""
    devices = Devices(alive("pod-b"), entry(REGIONS, P0))
    assert not devices.look().waits
    devices.prepare()


@pytest.mark.parametrize("pod", [POD_A, None])
def test_what_pods_that_are_gone_had_ends(pod: PodUid | None) -> None:
    """Of a claim whose pod was never known, kubelet's checkpoint is the word."""
    devices = owned(Devices(alive("pod-b")), pod=pod)
    devices.look()
    assert not devices.ledger.allocations
    assert devices.ledger.ends["released"] == 1
    assert devices.queue.added == [CARD.id]
    assert devices.ledger.record(REGION).condition is Condition.DIRTY


def test_a_pod_that_runs_and_that_kubelet_forgot_is_waited_for() -> None:
    """Its device is an earlier tenant's: nobody touches it before the processes have ended."""
    devices = owned(Devices(alive("pod-a")))
    devices.look()
    assert not devices.ledger.allocations
    of = operations(devices.ledger, devices.pods)
    waits = asyncio.run(of.living(devices.ledger.tenancies.of(REGION)))
    assert waits is not None
    assert waits.pod == POD_A


@pytest.mark.parametrize("state", [PodPresence.EMPTY, PodPresence.UNKNOWN])
def test_an_owner_that_the_checkpoint_names_stays_one(state: PodPresence) -> None:
    devices = owned(Devices(Pods(pod_a=state), entry(REGIONS, P0)))
    assert devices.look().waits
    assert set(devices.ledger.allocations) == {P0}


def test_while_the_checkpoint_cannot_be_read_nothing_ends() -> None:
    devices = owned(Devices(alive()))
    devices.failing = True
    leftovers = devices.look()
    assert not devices.read
    assert leftovers.waits
    assert leftovers.problem
    assert set(devices.ledger.allocations) == {P0}


def test_why_the_checkpoint_cannot_be_read_is_said_once_and_forgotten_once_it_can() -> None:
    devices = Devices(alive())
    devices.failing = True
    with capture_logs() as logs:
        leftovers = devices.look()
        assert not leftovers._owners.doubtful
        assert leftovers.waits, "nothing is known to be left, and nothing is known"
        asyncio.run(leftovers.look())
    assert [line["event"] for line in logs] == [
        "kubelet's records cannot be read: nothing is released"
    ]
    devices.failing = False
    asyncio.run(leftovers.look())
    assert not leftovers.problem
    assert not leftovers.waits


def test_what_claims_have_is_theirs_when_their_own_api_serves() -> None:
    devices = Devices(alive("pod-b"))
    devices.prepare()
    devices.look()
    assert set(devices.ledger.claim_owners) == {UID}
    assert set(devices.ledger.allocations) == {P0}


# Kubelet counts the devices of pods that are gone as in use until it is asked for its List.


class Counted(Devices):
    """Where kubelet's PodResources can be asked."""

    def __init__(self, pods: Pods, *entries: CheckpointEntry) -> None:
        super().__init__(pods, *entries)
        self.podresources = object()  # type: ignore[assignment]
        self.lists, self.away = 0, False

    async def holders(self) -> None:
        self.lists += 1
        if self.away:
            raise NoSourceError("kubelet is away")


def test_kubelet_counts_its_devices_when_the_last_of_these_claims_has_ended() -> None:
    devices = Counted(alive("pod-a"), entry(REGIONS, P0), entry(REGIONS, P1))
    leftovers = devices.look()
    assert (len(devices.ledger.allocations), devices.lists) == (2, 0)
    devices.entries.pop()
    asyncio.run(leftovers.look())
    assert (len(devices.ledger.allocations), devices.lists) == (1, 0)
    devices.pods.states.clear()
    devices.away = True
    with capture_logs() as logs:
        asyncio.run(leftovers.look())
        assert (len(devices.ledger.allocations), devices.lists) == (0, 1)
        asyncio.run(leftovers.look())
    told = [line["event"] for line in logs].count("kubelet cannot be made to count its devices")
    assert (told, devices.lists) == (1, 2), "each look would fill the log"
    assert leftovers.waits, "it is asked again"
    assert not leftovers.problem, "claims are served all the same"
    devices.away = False
    for _ in range(2):
        asyncio.run(leftovers.look())
    assert devices.lists == 3, "once"
    assert not leftovers.waits
    devices.pods.states[POD_A] = PodPresence.ALIVE
    asyncio.run(leftovers.look())
    devices.pods.states.clear()
    asyncio.run(leftovers.look())
    assert devices.lists == 4, "and for a claim that is found later"
