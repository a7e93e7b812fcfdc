"""What kubelet's records show and the journal does not: owners of cards, and other plugins' pods.

Each of these broke without a fast test noticing (`make mutants`).
"""

import asyncio

import pytest
from doubles.cards import PREFIX, REGIONS, WHOLE, device, make_card
from doubles.journal import NoJournal
from doubles.kubelet import POD
from ledger_support import former, make_ledger, start
from structlog.testing import capture_logs

from fpga_plugin.allocation.journal.journal import JournalError
from fpga_plugin.allocation.journal.records import Change, ClaimOwner, Condition
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.obstacles import Stops
from fpga_plugin.allocation.reconcile.owners import Owners
from fpga_plugin.hardware.model import Card
from fpga_plugin.kubernetes.cgroup import PodCgroups, PodPresence
from fpga_plugin.kubernetes.kubelet.checkpoint import Checkpoint, CheckpointEntry
from fpga_plugin.kubernetes.names import ClaimUid, PodUid, ResourceName

CARD, OTHER = make_card(1), make_card(2, nodes=(2, 3))
P0, P1 = device(CARD, 0), device(CARD, 1)
AWAY = f"{CARD.id}-p7"
"""A region that the card does not show, of which kubelet kept no grant: it cannot be adopted."""


def without_journal(*cards: Card) -> Ledger:
    """Nothing is known of who has these cards."""
    ledger = Ledger(prefix=PREFIX, journal=NoJournal(), snapshot=Change(), boot_id="b")
    ledger.device_plugin.kubelet_found("k1")
    for card in cards:
        ledger.hardware.card_found(card, {}, None)
    return ledger


def held(*ids: str, pod: str = POD, resource: ResourceName = REGIONS) -> CheckpointEntry:
    return CheckpointEntry(PodUid(pod), "app", resource, frozenset(ids))


def records(*entries: CheckpointEntry) -> Checkpoint:
    return Checkpoint(entries=entries)


class Records:
    """Kubelet's checkpoint (`PodDirectory`)."""

    async def checkpoint(self) -> Checkpoint:
        return self.present


def owners_of(ledger: Ledger) -> Owners:
    return Owners(ledger, PodCgroups(None), Records())  # type: ignore[arg-type]


def adopt(owners: Owners, checkpoint: Checkpoint) -> None:
    """What a comparison with kubelet's records does with them."""
    owners._pods.present = checkpoint  # type: ignore[attr-defined]
    asyncio.run(owners.read())
    owners._ledger.reconciled(owners.settled)


def test_records_are_read_anew_when_the_card_changes_that_could_not_be_adopted() -> None:
    owners = owners_of(without_journal(CARD))
    assert owners.new_cards
    adopt(owners, records(held(AWAY)))
    assert owners.doubtful
    assert not owners.new_cards, "it is looked at with the rest"
    owners.card_changed(CARD.id)
    assert owners.new_cards


def test_a_card_that_is_away_stays_one_of_which_nothing_is_known() -> None:
    """Else its pods' regions are given out when it comes back."""
    ledger = without_journal(CARD, OTHER)
    ledger.hardware.card_gone(OTHER.id)
    adopt(owners_of(ledger), records())
    assert ledger.unreconciled == {OTHER.id}


def test_what_cannot_be_adopted_of_a_card_that_is_away_keeps_nothing_waiting() -> None:
    """It is asked about when the card comes; until then there would be no end of asking."""
    ledger = without_journal(CARD, OTHER)
    ledger.hardware.card_gone(OTHER.id)
    owners = owners_of(ledger)
    adopt(owners, records(held(f"{OTHER.id}-p7")))
    assert not owners.doubtful
    assert ledger.unreconciled == {OTHER.id}


def test_an_owner_that_the_ledger_knows_does_not_keep_the_card_back() -> None:
    ledger = without_journal(CARD)
    ledger.device_plugin.adopt(REGIONS, P0, POD, {})
    owners = owners_of(ledger)
    adopt(owners, records(held(P0), held(P1, pod="b")))
    assert not owners.doubtful
    assert not ledger.unreconciled
    assert {d: allocation.pod for d, allocation in ledger.allocations.items()} == {P0: POD, P1: "b"}


def test_what_keeps_a_card_back_is_told_once() -> None:
    ledger = without_journal(CARD)
    owners = owners_of(ledger)
    told = []
    for entry in (held(AWAY), held(AWAY), held(AWAY, pod="b"), held(AWAY, pod="b")):
        with capture_logs() as logs:
            adopt(owners, records(entry))
        told.append([line["error"].partition(":")[0] for line in logs])
    assert told == [[f"{AWAY} of pod {POD}"], [], [f"{AWAY} of pod b"], []]


def test_a_card_that_is_kept_back_later_is_taken_off_the_lists() -> None:
    """Its devices were offered: whoever sends the lists hears of it, and asks again."""
    ledger, _ = make_ledger(CARD)
    owners = owners_of(ledger)
    changes: list[object] = []
    ledger.subscribe(changes.append)
    for _ in range(2):
        adopt(owners, records(held(P0), held(P0, pod="b")))
    assert changes == [CARD.id]
    assert owners.doubtful
    assert not owners.new_cards


def test_a_card_left_alone_is_told_once_and_changes_nothing_again() -> None:
    ledger, _ = make_ledger(CARD)
    owners = owners_of(ledger)
    changes = []
    ledger.subscribe(changes.append)
    with capture_logs() as logs:
        for _ in range(2):
            adopt(owners, records(held("dfl-fme.0", resource=WHOLE)))
    assert [line["event"] for line in logs] == ["card left alone"]
    assert changes == [CARD.id]


def test_an_owner_that_cannot_be_written_down_is_no_reason_to_call_the_card_known() -> None:
    """Its records are read again; until then nothing of the card is given out."""
    ledger, journal = make_ledger()
    ledger.hardware.card_found(CARD, {}, None)
    journal.failing = 1
    with pytest.raises(JournalError):
        adopt(owners_of(ledger), records(held(P0)))
    assert ledger.unreconciled == {CARD.id}


@pytest.mark.parametrize("ids", [["dfl-port.0"], ["dfl-port.0", P0]], ids=["alone", "beside ours"])
def test_a_pod_with_any_device_of_another_plugin_leaves_the_card_alone(ids: list[str]) -> None:
    ledger, _ = make_ledger(CARD)
    adopt(owners_of(ledger), records(held(*ids)))
    assert set(ledger.foreign) == {CARD.id}


class Cgroups:
    """Of pods that are known to be gone, and of others.

    Attributes:
        asked: about which pods.
        others: what is seen of the others.
    """

    def __init__(self, *gone: str, others: PodPresence = PodPresence.ALIVE) -> None:
        self.gone, self.others = gone, others
        self.asked: list[str] = []

    def state(self, pod: PodUid) -> PodPresence:
        self.asked.append(pod)
        return PodPresence.GONE if pod in self.gone else self.others


SETTLED = "fpga_plugin.allocation.reconcile.owners.SETTLED"


def test_another_plugins_pod_without_a_cgroup_has_its_card_while_the_checkpoint_is_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kubelet writes it before it makes the cgroup."""
    ledger, _ = make_ledger(CARD)
    owners = Owners(ledger, Cgroups("a", "b"), Records())  # type: ignore[arg-type]
    theirs = records(held("dfl-port.0", pod="a"))
    for _ in range(2):
        adopt(owners, theirs)
        assert set(ledger.foreign) == {CARD.id}
    monkeypatch.setattr(SETTLED, 0.0)  # time passes
    adopt(owners, theirs)
    assert not ledger.foreign
    monkeypatch.setattr(SETTLED, 10.0)
    adopt(owners, records(held("dfl-port.1", pod="b")))
    assert set(ledger.foreign) == {CARD.id}, "b came since"


def test_a_card_is_left_alone_until_all_of_another_plugins_pods_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With DRA kubelet never writes its checkpoint: it names dead pods for good."""
    monkeypatch.setattr(SETTLED, 0.0)
    ledger, _ = make_ledger(CARD)
    theirs = records(
        held("dfl-port.0", pod="a"),
        held("dfl-fme.0", pod="b", resource=WHOLE),
        held("gpu-0", pod="c", resource=ResourceName("acme.example/gpu")),
    )
    cgroups = Cgroups()
    owners = Owners(ledger, cgroups, Records())  # type: ignore[arg-type]
    for gone, named in ((), "ab"), (("b",), "a"), (("a",), "b"), (("a", "b"), ""):
        cgroups.gone, cgroups.asked = gone, []
        adopt(owners, theirs)
        assert set(ledger.foreign) == ({CARD.id} if named else set())
        assert not named or any(f"pod {one} holds" in ledger.foreign[CARD.id] for one in named)
        assert sorted(cgroups.asked) == ["a", "b"], "of other devices nobody has to know"
    assert not owners.doubtful


@pytest.mark.parametrize("others", [one for one in PodPresence if one is not PodPresence.GONE])
def test_a_pod_of_another_plugin_of_which_nothing_is_known_has_its_card(
    others: PodPresence,
) -> None:
    ledger, _ = make_ledger(CARD)
    owners = Owners(ledger, Cgroups(others=others), Records())  # type: ignore[arg-type]
    adopt(owners, records(held("dfl-port.0")))
    assert set(ledger.foreign) == {CARD.id}


def test_what_keeps_a_card_back_beside_another_plugins_pod_goes_on_doing_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever hears of the card's change asks again what kept it back (`Reconciler`)."""
    monkeypatch.setattr(SETTLED, 0.0)
    ledger = without_journal(CARD)
    cgroups = Cgroups()
    owners = Owners(ledger, cgroups, Records())  # type: ignore[arg-type]
    ledger.subscribe(lambda card: owners.card_changed(card or CARD.id))
    for gone, foreign in ((), {CARD.id}), (("b",), set()):
        cgroups.gone = gone
        adopt(owners, records(held(AWAY), held("dfl-port.0", pod="b")))
        assert set(ledger.foreign) == foreign
        assert ledger.unreconciled == {CARD.id}


# ------------------------------------------------------------------ whose an allocation is


def owned(pod: str | None = "a") -> Ledger:
    """A ledger that knows who has P0."""
    ledger, _ = make_ledger(CARD)
    ledger.device_plugin.allocate(REGIONS, [P0])
    if pod is not None:
        ledger.device_plugin.bind_pod([P0], PodUid(pod))
    return ledger


def test_a_record_of_a_pod_that_is_gone_takes_nothing_from_the_owner() -> None:
    """Kubelet's checkpoint keeps what dead pods had."""
    ledger = owned()
    number = ledger.allocations[P0].number
    owners = Owners(ledger, Cgroups("b"), Records())  # type: ignore[arg-type]
    adopt(owners, records(held(P0, pod="b")))
    assert (ledger.allocations[P0].pod, ledger.allocations[P0].number) == ("a", number)
    adopt(owners, records(held(P0, pod="c")))
    assert ledger.allocations[P0].pod == "c", "of one that runs, it does"


def test_another_pod_has_a_device_under_the_name_that_kubelet_has() -> None:
    """By which kubelet admits it again; the journal may be of a time of another prefix."""
    ledger = owned()
    theirs = ResourceName(REGIONS.replace(PREFIX, "former.example.com"))
    adopt(owners_of(ledger), records(held(P0, pod="b", resource=theirs)))
    assert (ledger.allocations[P0].pod, ledger.allocations[P0].resource) == ("b", theirs)
    assert theirs in ledger.resources
    adopt(owners_of(ledger), records(held(P0, pod="c", resource=ResourceName("acme.example/x"))))
    assert ledger.allocations[P0].pod == "b", "it is no device of that"
    assert ledger.unreconciled == {CARD.id}


@pytest.mark.parametrize(
    ("pod", "entries", "adopted"),
    [
        ("a", [held(P0, pod="a")], 0),
        (None, [held(P0, pod="a")], 0),
        ("a", [held(P0, pod="b")], 1),
        ("a", [held(P0, pod="a"), held(P1, pod="b")], 1),
    ],
)
def test_what_the_ledger_knew_is_not_counted_as_adopted(
    pod: str | None, entries: list[CheckpointEntry], adopted: int
) -> None:
    owners = owners_of(owned(pod))
    assert owners.adopted == 0
    adopt(owners, records(*entries))
    assert not owners.doubtful
    assert owners.adopted == adopted


R0 = CARD.regions[0].id
BOTH = (held(P0, pod="a"), held(P0, pod="b"))


def stopped(ledger: Ledger) -> set[Stops]:
    """What is not done now with P0, which has an owner."""
    asked = (Stops.OWNER, Stops.REPEAT, Stops.START, Stops.SCRUB)
    return {what for what in asked if ledger.obstacles.first(R0, what)}


@pytest.mark.parametrize("says", ["record", "cgroup"])
@pytest.mark.parametrize("first", ["a", "b"])
def test_a_device_of_two_pods_is_kept_back_until_one_of_them_is_gone(first: str, says: str) -> None:
    """The ledger's owner goes on; the other's processes are known to nobody."""
    ledger = owned("a")
    start(ledger, P0)
    number = ledger.allocations[P0].number
    cgroups = Cgroups()
    owners = Owners(ledger, cgroups, Records())  # type: ignore[arg-type]
    for _ in range(2):
        adopt(owners, records(*BOTH))
        assert ledger.unreconciled == {CARD.id}
        assert ledger.allocations[P0].pod == "a"
        assert stopped(ledger) == {Stops.REPEAT, Stops.SCRUB}
    if says == "cgroup":
        cgroups.gone = (first,)
        adopt(owners, records(*BOTH))
    else:
        adopt(owners, records(*(one for one in BOTH if one.pod_uid != first)))
    assert ledger.unreconciled == set()
    assert stopped(ledger) == set()
    allocation = ledger.allocations[P0]
    if first == "b":
        assert (allocation.pod, allocation.number) == ("a", number)
        assert ledger.record(R0).condition is Condition.PROGRAMMED
    else:
        assert allocation.pod == "b"
        assert allocation.used, "it may run: nothing is scrubbed under it"
        assert ledger.record(R0).condition is Condition.DIRTY
        assert former(ledger, R0) == {"a"}
    ledger.device_plugin.release([P0])
    assert former(ledger, R0) == {"a", allocation.pod}, "both are waited for before the scrub"


def test_an_owner_that_did_not_start_yet_is_not_gone_without_a_cgroup() -> None:
    """Kubelet makes a pod's cgroup after it has called Allocate."""
    ledger = owned("a")
    owners = Owners(ledger, Cgroups("a"), Records())  # type: ignore[arg-type]
    adopt(owners, records(*BOTH))
    assert ledger.unreconciled == {CARD.id}
    assert ledger.allocations[P0].pod == "a"


def test_of_two_pods_that_may_have_an_allocation_none_is_its_owner_and_the_card_waits() -> None:
    ledger = owned(None)
    owners = Owners(ledger, Cgroups("a", "b"), Records())  # type: ignore[arg-type]
    adopt(owners, records(*BOTH))
    assert ledger.unreconciled == {CARD.id}
    assert ledger.allocations[P0].pod is None
    adopt(owners, records(held(P0, pod="b")))
    assert ledger.unreconciled == set()
    assert ledger.allocations[P0].pod == "b"


def test_who_has_the_device_by_another_resource_keeps_the_card_of_the_owner_back() -> None:
    ledger = owned(None)
    old = ResourceName(REGIONS.replace(PREFIX, "old.example"))
    adopt(owners_of(ledger), records(held(P0, pod="a"), held(P0, pod="b", resource=old)))
    assert ledger.allocations[P0].pod == "a"
    assert ledger.unreconciled == {CARD.id}


def test_one_of_a_pods_entries_for_a_device_names_the_allocations_resource() -> None:
    """Another container of the pod may still have it by the name of before."""
    ledger = owned(None)
    old = ResourceName(REGIONS.replace(PREFIX, "old.example"))
    adopt(owners_of(ledger), records(held(P0, pod="a", resource=old), held(P0, pod="a")))
    assert ledger.allocations[P0].pod == "a"


def claimed(*, known: bool) -> Ledger:
    """A claim has P0; `known`: all owners are."""
    ledger = make_ledger(CARD)[0] if known else without_journal(CARD)
    claim = ClaimOwner(ClaimUid("claim-a"), "space", "claim", (P0,), {P0: ("fpga",)})
    ledger.dra.adopt_claim(claim, [PodUid("a")])
    return ledger


def test_a_card_of_which_a_call_came_while_the_records_were_read_is_not_known_yet() -> None:
    """Kubelet tries a PreStart again and again: what its record says of the device still counts."""
    ledger = without_journal(CARD)
    owners = owners_of(ledger)

    class Busy(Records):
        present = records(held(P0, pod="b"))

        async def checkpoint(self) -> Checkpoint:
            ledger.device_plugin.prestart_seen([P0])
            return await super().checkpoint()

    owners._pods = Busy()  # type: ignore[assignment]
    asyncio.run(owners.read())
    assert owners.settled == set()
    assert owners.new_cards, "it is looked at again"
    owners._pods = Records()  # type: ignore[assignment]
    adopt(owners, records(held(P0, pod="b")))
    assert ledger.allocations[P0].pod == "b"
    assert ledger.unreconciled == set()


def test_what_a_claim_and_a_pod_may_both_have_is_neither_given_out_nor_scrubbed() -> None:
    """Two state directories were exchanged: what each gave out the other does not know."""
    ledger = claimed(known=False)
    owners = owners_of(ledger)
    before = ledger.allocations[P0]
    adopt(owners, records(held(P0, pod="b")))
    assert ledger.allocations[P0] == before
    assert ledger.unreconciled == {CARD.id}
    ledger.dra.end_claim(ClaimUid("claim-a"))
    region = CARD.regions[0].id
    assert ledger.obstacles.first(region, Stops.SCRUB), "the pod may run on it"
    adopt(owners, records(held(P0, pod="b")))
    assert ledger.allocations[P0].pod == "b"
    assert ledger.unreconciled == set()


def test_when_the_pod_is_gone_the_claim_alone_has_it() -> None:
    ledger = claimed(known=False)
    owners = owners_of(ledger)
    adopt(owners, records(held(P0, pod="b")))
    adopt(owners, records())
    assert ledger.unreconciled == set()
    assert ledger.claim_owner_of(P0) is not None


def test_a_dead_pods_entry_does_not_keep_back_what_a_claim_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With DRA kubelet never writes its checkpoint, and the journal may be in doubt."""
    ledger = claimed(known=False)
    owners = owners_of(ledger)
    monkeypatch.setattr(owners._cgroups, "state", lambda _: PodPresence.GONE)
    adopt(owners, records(held(P0, pod="b")))
    assert ledger.unreconciled == set()


def test_an_entry_that_was_there_when_the_claim_got_the_device_is_an_old_one() -> None:
    """With DRA kubelet never writes its checkpoint; without cgroups its pods are not known gone."""
    ledger = claimed(known=True)
    owners = owners_of(ledger)
    for entries in ([held(P0, pod="b")], [held(P0, pod="b"), held(P0, pod="c")]):
        adopt(owners, records(*entries))
        assert ledger.unreconciled == set()
        assert ledger.claim_owner_of(P0) is not None
        assert owners.adopted == 0


def test_one_comparison_ends_before_the_next_begins() -> None:
    """Each applies what it read: the older of two must not come after the newer."""
    ledger, _ = make_ledger(CARD)
    owners = owners_of(ledger)
    order: list[str] = []

    async def checkpoint() -> Checkpoint:
        order.append("begins")
        await asyncio.sleep(0)
        order.append("ends")
        return records()

    owners._pods.checkpoint = checkpoint  # type: ignore[method-assign]

    async def both() -> None:
        await asyncio.gather(owners.read(), owners.read())

    asyncio.run(both())
    assert order == ["begins", "ends"] * 2
