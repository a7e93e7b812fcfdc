"""What the directory keeps of pods, and what it makes of a name."""

import asyncio

import pytest
from doubles.cards import PREFIX, REGIONS, device, make_card
from doubles.kubelet import Kubelet
from ledger_support import MemoryJournal

from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.requests import directory
from fpga_plugin.allocation.requests.directory import PodDirectory
from fpga_plugin.allocation.requests.identity import Identity, identify
from fpga_plugin.errors import NoSourceError
from fpga_plugin.ids import DeviceId
from fpga_plugin.kubernetes.kubelet.checkpoint import Checkpoint, CheckpointEntry
from fpga_plugin.kubernetes.names import PodName, PodUid
from fpga_plugin.kubernetes.pod import Container, Pod, PodSourceError, Variable
from fpga_plugin.observability.view import learn_names

CARD = make_card(2)
P0, P1 = device(CARD, 0), device(CARD, 1)
A, B = PodUid("a"), PodUid("b")
NAME = PodName("tenant", "compress")


class ApiServer:
    """An API server's pods, by name."""

    def __init__(self, *pods: Pod) -> None:
        self.pods = {pod.full_name: pod for pod in pods}

    async def get(self, namespace: str, name: str) -> Pod:
        if (found := self.pods.get(PodName(namespace, name))) is None:
            raise PodSourceError("the API server is away")
        return found


def pod(uid: PodUid = A, **fields) -> Pod:
    return Pod(
        namespace=NAME.namespace, name=NAME.name, uid=uid, containers=(Container("app"),), **fields
    )


def of(listed: Kubelet | None = None, *pods: Pod) -> PodDirectory:
    made = PodDirectory(kubelet_dir="/nowhere", prefix=PREFIX, podresources=listed)  # type: ignore[arg-type]
    made._api_server = ApiServer(*pods)
    return made


def test_a_name_is_asked_for_once_whoever_needs_it() -> None:
    listed = Kubelet("/nowhere", ("compress", P0))
    pods = of(listed, pod())

    async def story() -> None:
        assert await pods.name(Identity(A), [P0], lambda: None) == NAME
        assert await pods.name(Identity(A), [P0], lambda: None) == NAME
        assert (await pods.read(A, frozenset({P0}))).pod == pod()

    asyncio.run(story())
    assert pods.known(A) == NAME
    assert listed.calls == 1


@pytest.mark.parametrize("held", [(), (("one", P0), ("two", P1))])
def test_devices_that_are_not_one_pods_tell_no_name(held) -> None:
    with pytest.raises(NoSourceError, match=r"shows (no pod|several pods) with the devices"):
        asyncio.run(of(Kubelet("/nowhere", *held)).holder([P0, P1]))


def test_the_name_of_a_pod_that_nobody_knows_is_nobodys() -> None:
    pods = of(Kubelet("/nowhere", ("compress", P0)))
    asyncio.run(pods.name(Identity(), [P0], lambda: None))
    assert not pods._known
    assert pods.known(None) is None


def test_a_name_alone_ends_no_pod() -> None:
    """PodResources may have told a static pod's: its copy at the API server may be deleted."""
    pods = of(Kubelet("/nowhere", ("compress", P0)))
    asyncio.run(pods.name(Identity(A), [P0], lambda: None))
    with pytest.raises(NoSourceError, match="its name is not known"):
        asyncio.run(pods.ended(A))


def test_the_name_of_a_static_pod_that_was_read_ends_nothing_either() -> None:
    pods = of(Kubelet("/nowhere", ("compress", P0)), pod(static=True))
    asyncio.run(pods.requests(A, frozenset({P0})))
    assert pods.known(A) == NAME
    with pytest.raises(NoSourceError, match="its name is not known"):
        asyncio.run(pods.ended(A))


def test_a_name_that_is_told_later_does_not_make_it_forget_what_a_pod_asks_for() -> None:
    pods = of(Kubelet("/nowhere", ("compress", P0)), pod())

    async def story() -> None:
        known, answer = await pods.requests(A, frozenset({P0}))
        assert answer is not None
        pods.learn(A, NAME)
        await pods.read(A, frozenset({P0}))
        assert await pods.requests(A, frozenset({P0})) == (known, None)

    asyncio.run(story())


def test_a_name_by_which_the_api_server_tells_another_pod_is_asked_for_again() -> None:
    listed = Kubelet("/nowhere", ("compress", P0))
    pods = of(listed, pod(B))
    pods.learn(A, NAME)
    with pytest.raises(NoSourceError, match="is another one"):
        asyncio.run(pods.read(A, frozenset({P0})))
    assert listed.calls == 0
    pods._api_server = ApiServer(pod())
    asyncio.run(pods.read(A, frozenset({P0})))
    assert listed.calls == 1


def test_what_a_pod_asks_for_is_kept_while_the_api_server_is_away() -> None:
    pods = of(Kubelet("/nowhere", ("compress", P0)), pod())
    asyncio.run(pods.requests(A, frozenset({P0})))
    pods._api_server = ApiServer()
    with pytest.raises(NoSourceError):
        asyncio.run(pods.read(A, frozenset({P0})))
    assert asyncio.run(pods.requests(A, frozenset({P0})))[1] is None


def test_the_pod_that_was_asked_for_the_longest_ago_is_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(directory, "KEPT_PODS", 2)
    pods = of(None, pod())
    for uid in (A, B):
        pods.learn(uid, NAME)
    asyncio.run(pods.name(Identity(A), [P0], lambda: None))
    pods.learn(PodUid("c"), NAME)
    assert list(pods._known) == [A, "c"]


def test_no_value_of_a_variable_is_kept_but_requests() -> None:
    secret = Container("app", (Variable("PASSWORD", "hunter2"),))
    pods = of(
        Kubelet("/nowhere", ("compress", P0)),
        Pod(namespace="tenant", name="compress", uid=A, init=(secret,)),
    )
    asyncio.run(pods.requests(A, frozenset({P0})))
    assert pods._known[A].requests
    assert "hunter2" not in repr([one.env for one in pods._known[A].requests])


# ------------------------------------------------------------------ names of owners


def owners(listed: Kubelet, *allocations: tuple[DeviceId, PodUid]) -> tuple[Ledger, PodDirectory]:
    journal = MemoryJournal()
    ledger = Ledger(prefix=PREFIX, journal=journal, snapshot=journal.snapshot, boot_id="")
    ledger.hardware.card_found(CARD, {}, None)
    ledger.reconciled([CARD.id])
    for one, uid in allocations:
        ledger.device_plugin.allocate(REGIONS, [one])
        ledger.device_plugin.bind_pod([one], uid)
    return ledger, of(listed)


def test_the_names_of_all_owners_are_asked_for_at_once_and_only_if_one_is_not_known() -> None:
    listed = Kubelet("/nowhere", ("one", P0), ("two", P1))
    ledger, pods = owners(listed, (P0, A), (P1, B))
    for _ in range(2):
        asyncio.run(learn_names(ledger, pods))
    assert pods.known(A) == ("tenant", "one")
    assert pods.known(B) == ("tenant", "two")
    assert listed.calls == 1


@pytest.mark.parametrize("heir", [None, B])
def test_a_name_that_was_told_while_the_device_changed_hands_is_nobodys(heir) -> None:
    listed = Kubelet("/nowhere", ("heir", P0))
    ledger, pods = owners(listed, (P0, A))

    def change_hands() -> None:
        ledger.device_plugin.release([P0])
        if heir is not None:
            ledger.device_plugin.allocate(REGIONS, [P0])
            ledger.device_plugin.bind_pod([P0], heir)

    listed.on_call = change_hands
    asyncio.run(learn_names(ledger, pods))
    assert pods.known(A) is None
    assert pods.known(B) is None


def test_a_device_that_several_pods_are_shown_with_tells_no_name() -> None:
    listed = Kubelet("/nowhere", ("one", P0))
    ledger, pods = owners(listed, (P0, A))
    listed.held.add(("two", P0))
    asyncio.run(learn_names(ledger, pods))
    assert pods.known(A) is None


@pytest.mark.parametrize("gone", [(), (A,), (A, B)])
def test_of_several_pods_that_have_a_device_those_that_are_gone_do_not_count(gone) -> None:
    """Kubelet keeps entries of dead pods."""
    entries = tuple(CheckpointEntry(uid, "main", REGIONS, frozenset({P0})) for uid in (A, B))

    def identity() -> Identity:
        return identify(Checkpoint(entries), REGIONS, [P0], {*gone}.intersection)

    if not gone:
        with pytest.raises(NoSourceError, match=r"several pods that hold .*-p0: a, b"):
            identity()
        return
    last = B if gone == (A,) else None
    assert identity().pod == last
    assert identity().entries == tuple(entry for entry in entries if entry.pod_uid == last)
