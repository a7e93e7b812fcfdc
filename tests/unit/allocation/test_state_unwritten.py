"""What cannot be written: what takes trust away holds, and nothing that gives trust goes ahead.

A journal that fails at any call (a full disk) must not make the ledger believe more than the plugin
would after its death (invariant 4).
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from doubles.cards import AFU, PREFIX, REGIONS, WHOLE, device, make_card
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from ledger_support import MemoryJournal, found, make_ledger, remembered, scrub, start

from fpga_plugin.allocation.journal.journal import JournalError
from fpga_plugin.allocation.journal.records import (
    CLEAN,
    Change,
    ClaimOwner,
    Condition,
    Prepared,
)
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.names import card_of
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.kubernetes.names import ClaimUid, PodUid

CARD = make_card(1, nodes=(0, 1), clears_memory=True)
OTHER = make_card(2, nodes=(2, 3))
CARDS = (CARD, OTHER)
DEVICES = [device(c, p) for c in CARDS for p in (None, 0, 1)]
REGION_IDS = [region.id for card in CARDS for region in card.regions]
P0, R0 = device(CARD, 0), CARD.regions[0].id
POD, NEXT = PodUid("pod-a"), PodUid("pod-b")
UIDS = [ClaimUid("claim-a"), ClaimUid("claim-b")]
TRUSTED = CLEAN | {Condition.PROGRAMMED, Condition.SCRUBBING}


def owner(uid: ClaimUid, *devices) -> ClaimOwner:
    return ClaimOwner(uid, "space", uid, tuple(devices), dict.fromkeys(devices, ("main",)))


def laxer(ledger: Ledger, told: Change) -> list[object]:
    """What memory believes, allows or has forgotten, and the journal does not."""
    regions = [
        record
        for region, record in ledger.regions.items()
        if record.condition in TRUSTED and told.regions.get(region) != record
    ]
    now = remembered(ledger, ledger.boot_id)
    kinds = ("allocations", "tenancies", "memory_clear_pending", "drained", "images", "resources")
    forgotten = [key for kind in kinds for key in getattr(told, kind).keys() - getattr(now, kind)]
    return [
        *regions,
        *forgotten,
        *_laxer_allocations(ledger, told),
        *_laxer_claim_owners(ledger, told),
    ]


def _laxer_allocations(ledger: Ledger, told: Change) -> Iterator[object]:
    for device_, claim in ledger.allocations.items():
        was = told.allocations.get(device_)
        if was is None:
            was = replace(claim, missed_prestart=True, started=False)
        runs, ran = claim.prestarts - claim.poststops, was.prestarts - was.poststops
        if claim.started > was.started or claim.missed_prestart < was.missed_prestart or runs < ran:
            yield claim
    for key, tenancy in ledger.tenancies.items():
        was = told.tenancies.get(key)
        if was is not None and (tenancy.used < was.used or tenancy.left > was.left):
            yield tenancy


def _laxer_claim_owners(ledger: Ledger, told: Change) -> Iterator[object]:
    yield from told.claim_owners.keys() - ledger.claim_owners.keys()
    for uid, owner_ in ledger.claim_owners.items():
        was = told.claim_owners.get(uid) or replace(owner_, boot="", ended=False)
        if owner_.ended > was.ended or owner_.boot not in {"", was.boot}:
            yield owner_


class Unwritten(RuleBasedStateMachine):
    """The ledger's steps in any order; which of the journal's calls fail is drawn beforehand."""

    @initialize(clean=st.booleans())
    def begin(self, clean) -> None:
        self.ledger, self.journal = make_ledger(*CARDS, blank=clean)
        self.number = 1

    def attempt(self, step) -> None:
        """Written, all that memory knows is; else it is written with the next step."""
        writes = self.journal.writes
        try:
            step()
        except JournalError:
            assert self.journal.writes == writes
        except FpgaPluginError:
            pass
        else:
            if self.journal.writes > writes:
                now = remembered(self.ledger, "boot")
                now.claim_owners = dict(self.ledger.claim_owners)
                assert self.journal.snapshot == now

    @rule(failing=st.integers(1, 4))
    def disk_fills(self, failing) -> None:
        self.journal.failing = failing

    @rule(one=st.sampled_from(DEVICES))
    def allocate(self, one) -> None:
        self.attempt(
            lambda: self.ledger.device_plugin.allocate(
                WHOLE if one == card_of(one) else REGIONS, [one]
            )
        )

    @rule(one=st.sampled_from(DEVICES), pod=st.sampled_from([POD, NEXT]), adopt=st.booleans())
    def learn(self, one, pod, adopt) -> None:
        resource = WHOLE if one == card_of(one) else REGIONS
        if adopt:
            self.attempt(lambda: self.ledger.device_plugin.adopt(resource, one, pod, {}))
        self.attempt(lambda: self.ledger.device_plugin.bind_pod([one], pod))

    @rule(one=st.sampled_from(DEVICES))
    def begins(self, one) -> None:
        if one in self.ledger.allocations:
            self.attempt(lambda: self.ledger.device_plugin.prestart_seen([one]))
            self.attempt(lambda: start(self.ledger, one))

    @rule(one=st.sampled_from(DEVICES))
    def stops(self, one) -> None:
        self.attempt(lambda: self.ledger.device_plugin.poststop_seen([one]))

    @rule(one=st.sampled_from(DEVICES))
    def ends(self, one) -> None:
        self.attempt(lambda: self.ledger.device_plugin.release([one]))

    @rule()
    def processes_end(self) -> None:
        self.attempt(lambda: self.ledger.work.end_tenancies(list(self.ledger.tenancies.values())))

    @rule()
    def kubelet(self) -> None:
        self.number += 1
        self.attempt(lambda: self.ledger.device_plugin.kubelet_found(f"life {self.number}"))
        assert self.ledger.kubelet_instance == f"life {self.number}"
        assert all(claim.missed_prestart for claim in self.ledger.allocations.values())

    @rule(region=st.sampled_from(REGION_IDS), image=st.sampled_from([None, AFU]))
    def work(self, region, image) -> None:
        self.attempt(lambda: self.ledger.work.working([region], image=image))

    @rule(card=st.sampled_from(CARDS))
    def cleans(self, card) -> None:
        self.attempt(lambda: scrub(self.ledger, card))

    @rule(region=st.sampled_from(REGION_IDS), fails=st.booleans())
    def spoils(self, region, fails) -> None:
        if fails:
            self.attempt(lambda: self.ledger.work.faulted(region, "x"))
        else:
            self.attempt(lambda: self.ledger.work.dirty([region], "x"))
        assert self.ledger.record(region).condition in {Condition.DIRTY, Condition.FAULTED}

    @rule(card=st.sampled_from(CARDS), on=st.booleans())
    def operator(self, card, on) -> None:
        self.attempt(lambda: self.ledger.hardware.set_drained(card.id, drained=on))
        assert not on or card.id in self.ledger.drained
        self.attempt(lambda: self.ledger.work.set_memory_clear_pending(card.id, open_=on))
        assert not on or card.id in self.ledger.memory_clear_pending

    @rule(card=st.sampled_from(CARDS), comes=st.booleans())
    def hardware(self, card, comes) -> None:
        self.attempt(lambda: self.ledger.hardware.card_gone(card.id))
        if comes:
            self.attempt(lambda: found(self.ledger, card))

    @rule(uid=st.sampled_from(UIDS), one=st.sampled_from(DEVICES), adopt=st.booleans())
    def claim(self, uid, one, adopt) -> None:
        if not adopt:
            self.attempt(lambda: self.ledger.dra.take(owner(uid, one), [POD]))
        elif uid not in self.ledger.claim_owners:
            self.attempt(lambda: self.ledger.dra.adopt_claim(owner(uid, one), [POD]))

    @rule(
        uid=st.sampled_from(UIDS), what=st.sampled_from(["prepared", "un", "join", "part", "end"])
    )
    def claim_goes_on(self, uid, what) -> None:
        if uid not in self.ledger.claim_owners or self.ledger.claim_owners[uid].ended:
            self.attempt(lambda: self.ledger.dra.forget_claim(uid))
        elif what == "prepared":
            if not self.ledger.dra.grant_error(self.ledger.claim_owners[uid]):
                self.attempt(lambda: self.ledger.dra.prepared(uid, {R0: Prepared()}))
        elif what == "unprepared":
            self.attempt(lambda: self.ledger.dra.unprepared(uid))
        elif what == "join":
            self.attempt(lambda: self.ledger.dra.join({uid: [NEXT]}))
        elif what == "part":
            self.attempt(lambda: self.ledger.dra.part(uid, [NEXT]))
        else:
            self.attempt(lambda: self.ledger.dra.end_claim(uid))

    @invariant()
    def memory_is_as_strict_as_what_a_restart_would_read(self) -> None:
        if hasattr(self, "ledger"):
            assert not laxer(self.ledger, self.journal.snapshot)

    @invariant()
    def a_tenancy_of_no_allocation_is_over_by_kubelets_word(self) -> None:
        """Else nothing would ever end it."""
        if hasattr(self, "ledger"):
            kept = self.ledger.tenancies.values()
            assert all(one.left or self.ledger.allocation_of(one.key) for one in kept)


TestUnwritten = Unwritten.TestCase


# ------------------------------------------------------------------ one by one


def failing(ledger: Ledger, journal: MemoryJournal, step) -> None:
    journal.failing = 1
    before = journal.snapshot
    with pytest.raises(JournalError):
        step(ledger)
    assert journal.snapshot == before


@pytest.mark.parametrize(
    ("step", "holds"),
    [
        (
            lambda one: one.device_plugin.kubelet_found("life 2"),
            lambda one: one.allocations[P0].missed_prestart,
        ),
        (
            lambda one: one.device_plugin.kubelet_found("life 2"),
            lambda one: one.tenancies.users(one.allocations[P0])[0].used,
        ),
        (lambda one: one.work.dirty([R0], "x"), lambda one: one.record(R0).condition == "DIRTY"),
        (lambda one: one.work.faulted(R0, "x"), lambda one: one.record(R0).condition == "FAULTED"),
        (
            lambda one: one.work.set_memory_clear_pending(CARD.id, open_=True),
            lambda one: CARD.id in one.memory_clear_pending,
        ),
        (
            lambda one: one.hardware.set_drained(CARD.id, drained=True),
            lambda one: CARD.id in one.drained,
        ),
        (lambda one: one.work.working([R0], image=AFU), lambda one: AFU in one.images[R0]),
        (
            lambda one: one.device_plugin.prestart_seen([P0]),
            lambda one: one.allocations[P0].prestarts == 1,
        ),
        (
            lambda one: one.device_plugin.started([one.allocations[P0]]),
            lambda one: (
                one.tenancies.users(one.allocations[P0])[0].used and not one.allocations[P0].started
            ),
        ),
        (
            lambda one: one.device_plugin.bind_pod([P0], POD),
            lambda one: one.allocations[P0].pod == POD,
        ),
        (lambda one: one.device_plugin.release([P0]), lambda one: P0 in one.allocations),
    ],
)
def test_what_takes_trust_away_holds_and_is_written_with_the_next_change(step, holds) -> None:
    ledger, journal = make_ledger(CARD)
    ledger.device_plugin.allocate(REGIONS, [P0])
    failing(ledger, journal, step)
    assert holds(ledger)
    ledger.hardware.set_drained(OTHER.id, drained=True)
    assert holds(Ledger(prefix=PREFIX, journal=journal, snapshot=journal.snapshot, boot_id="boot"))


def test_no_work_on_hardware_begins_while_something_is_not_written() -> None:
    """A scrub under a container that kubelet started in a life of which nothing is written."""
    ledger, journal = make_ledger(CARD)
    ledger.device_plugin.allocate(REGIONS, [P0])
    failing(ledger, journal, lambda one: one.device_plugin.kubelet_found("life 2"))
    failing(ledger, journal, lambda one: one.work.working([R0]))
    assert ledger.record(R0).condition is Condition.BLANK
    with pytest.raises(FpgaPluginError, match="changed while it was worked on"):
        ledger.work.programmed(R0, AFU)
    ledger.work.working([R0])
    assert journal.snapshot.allocations[P0].missed_prestart, "it went with it"


def test_a_step_that_changes_nothing_writes_what_is_not_written() -> None:
    """A container's start whose claim is known to be used already, among others."""
    ledger, journal = make_ledger(CARD)
    ledger.device_plugin.allocate(REGIONS, [P0])
    start(ledger, P0)
    failing(ledger, journal, lambda one: one.work.set_memory_clear_pending(OTHER.id, open_=True))
    failing(ledger, journal, lambda one: one.device_plugin.started([one.allocations[P0]]))
    ledger.device_plugin.started([ledger.allocations[P0]])
    assert OTHER.id in journal.snapshot.memory_clear_pending
    writes = journal.writes
    ledger.device_plugin.started([ledger.allocations[P0]])
    assert journal.writes == writes


def test_a_pod_whose_name_could_not_be_written_is_there_once() -> None:
    """Two tenancies of one pod: neither is forgotten, and the next look makes them one."""
    ledger, journal = make_ledger(CARD)
    ledger.device_plugin.allocate(REGIONS, [P0])
    failing(ledger, journal, lambda one: one.device_plugin.bind_pod([P0], POD, cgroups=["/a"]))
    assert {one.pod for one in ledger.tenancies.users(ledger.allocations[P0])} == {None, POD}
    failing(ledger, journal, lambda one: one.device_plugin.started([one.allocations[P0]]))
    ledger.device_plugin.bind_pod([P0], POD, cgroups=["/b"])
    (one,) = ledger.tenancies.users(ledger.allocations[P0])
    assert (one.pod, one.used, set(one.cgroups)) == (POD, True, {"/a", "/b"})
