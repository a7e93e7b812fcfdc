"""The ledger's steps in any order, sensible or not, with a real journal that fails and is reopened.

What must hold whatever the callers do: one owner a region, the lists that docs/architecture.md
describes (kept up to date from notifications alone), and a journal that knows what memory knows.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from doubles import schema_3
from doubles.cards import AFU, BLANK, INTERFACE, OTHER_INTERFACE, PREFIX, TOO_HOT, device, make_card
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ledger_support import MemoryJournal, gone, hold, listed, make_lists, remembered, table, trouble
from test_state_unwritten import laxer

from fpga_plugin.allocation import debug_holds
from fpga_plugin.allocation.journal.journal import Journal, JournalError
from fpga_plugin.allocation.journal.records import Change, Condition, DebugHold, TenancyKey
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.names import card_of, is_card, resource_names
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.ids import CardId, DeviceId, RegionId, device_variable
from fpga_plugin.kubernetes.names import PodUid
from fpga_plugin.settings.settings import Advertise, ScrubPolicy

NUMBERS = (1, 2)
PORTS = 3
CARDS = [make_card(n, nodes=range(PORTS)) for n in NUMBERS]
DEBUG = DebugHold(RegionId(""), PodUid("pod"), "space", "name", (), 600.0)
DEVICES = [device(c, p) for c in CARDS for p in (None, *range(PORTS))]
REGION_IDS = [RegionId(d) for d in DEVICES if not is_card(d)]
NAMES = [name for i in (INTERFACE, OTHER_INTERFACE) for name in resource_names(PREFIX, i)]
VIEWS = [
    (Advertise.BOTH, ScrubPolicy.REQUIRED),
    (Advertise.REGION, ScrubPolicy.BEST_EFFORT),
    (Advertise.WHOLE, ScrubPolicy.REQUIRED),
]

some_devices = st.lists(st.sampled_from(DEVICES), max_size=3)
some_regions = st.lists(st.sampled_from(REGION_IDS), min_size=1, max_size=3)
one_region = st.sampled_from(REGION_IDS)
pods = st.sampled_from([PodUid("pod-a"), PodUid("pod-b")])
afus = st.sampled_from([AFU, BLANK])
seen = st.dictionaries(one_region, st.sampled_from([AFU, BLANK, None]))
aliases = st.dictionaries(
    st.sampled_from([INTERFACE, OTHER_INTERFACE]), st.sampled_from(["board", "other-board"])
).filter(lambda told: len(set(told.values())) == len(told))
tolerated = contextlib.suppress(FpgaPluginError)


class Both:
    """The real journal, and what ought to be in it."""

    def __init__(self, path: str) -> None:
        self.real = Journal(path)
        self.model = MemoryJournal(self.real.snapshot)
        self.failing = False

    def write(self, change: Change) -> None:
        if self.failing:
            raise JournalError("journal /state/journal.sqlite3: disk I/O error")
        self.real.write(change)
        self.model.write(change)


class Steps(RuleBasedStateMachine):
    @initialize(found=st.booleans(), scrub=st.sampled_from(ScrubPolicy))
    def begin(self, found, scrub) -> None:
        self.views = [(a, s) for a, s in VIEWS if s is scrub]
        self.folder = tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        self.boot = 1
        self.aliases = True
        self.lost = False  # whether something could not be written since the last start
        self.open()
        for card in CARDS if found else ():
            with tolerated:
                self.ledger.hardware.card_found(card, {r.id: BLANK for r in card.regions}, BLANK)
                self.ledger.reconciled([card.id])

    def open(self, expected: Change | None = None) -> None:
        self.journal = Both(os.path.join(self.folder, "journal.sqlite3"))
        if expected is not None:
            assert self.journal.real.set_aside is None
            assert self.journal.real.snapshot == expected
        self.ledger = Ledger(
            prefix=PREFIX,
            journal=self.journal,
            snapshot=self.journal.real.snapshot,
            boot_id=f"boot {self.boot}",
            aliases=self.aliases,
        )
        self.meant = {}
        self.users: set[TenancyKey] = set()
        self.worked_on: set[RegionId] = set()
        self.ended: set[PodUid] = set()
        self.lists = [make_lists(self.ledger, advertise=a, scrub=s) for a, s in self.views]
        self.lost = False

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            self.journal.real.close()
            shutil.rmtree(self.folder)

    # -------------------------------------------------------------- hardware

    @rule(
        number=st.sampled_from(NUMBERS),
        nodes=st.permutations(range(7)),
        several=st.booleans(),
        ports=st.sampled_from([PORTS, PORTS, PORTS, 1, 2]),
        other=st.sampled_from([False] * 5 + [True]),
        clears_memory=st.booleans(),
        afu=st.sampled_from([BLANK, BLANK, AFU, None]),
        blank=st.sampled_from([BLANK, BLANK, None]),
        reconciled=st.sampled_from([True, True, False]),
    )
    def found(  # noqa: PLR0917  # hypothesis passes by name
        self, number, nodes, several, ports, other, clears_memory, afu, blank, reconciled
    ) -> None:
        interface = OTHER_INTERFACE if other else INTERFACE
        own = list(zip(nodes[::2], nodes[1::2], strict=False)) if several else nodes
        card = make_card(
            number,
            nodes=own[:ports],
            shared=("/dev/shared",),
            ports=PORTS,
            interface_id=interface,
            clears_memory=clears_memory,
        )
        self.learns(
            lambda: self.ledger.hardware.card_found(card, {r.id: afu for r in card.regions}, blank)
        )
        assert self.ledger.cards[card.id] == card
        if reconciled:
            self.happens_or_not(lambda: self.ledger.reconciled([card.id]))

    @rule(told=aliases)
    def named(self, told) -> None:
        """The store's manifest says how interface ids are called."""
        if self.aliases:
            waiting = self.happens_or_not(lambda: self.ledger.naming.call_interfaces(told))
            if waiting is not None:
                assert self.ledger.aliases == {i: a for i, a in told.items() if i not in waiting}

    @invariant()
    def a_allocations_resource_means_the_same_as_long_as_it_lives(self) -> None:
        meant = {
            (allocation.device, allocation.number): self.ledger.naming.resource(allocation.resource)
            for allocation in (self.ledger.allocations.values() if hasattr(self, "ledger") else ())
        }
        assert all(self.meant.get(allocation, of) == of for allocation, of in meant.items())
        self.meant = meant

    @rule(card=st.sampled_from(CARDS))
    def gone(self, card) -> None:
        self.learns(lambda: self.ledger.hardware.card_gone(card.id))
        assert card.id not in self.ledger.cards

    @rule(card=st.sampled_from(CARDS), failing=st.sets(one_region))
    def failing(self, card, failing) -> None:
        signals = dict.fromkeys(failing, TOO_HOT)
        self.learns(lambda: self.ledger.hardware.set_failing(card.id, signals))

    @rule(card=st.sampled_from(CARDS), observed=seen)
    def verified(self, card, observed) -> None:
        self.learns(lambda: self.ledger.hardware.verify(card.id, observed))

    @rule(cards=st.sets(st.sampled_from(CARDS)))
    def foreign(self, cards) -> None:
        self.ledger.hardware.set_foreign({card.id: "another plugin's pod" for card in cards})

    # -------------------------------------------------------------- kubelet

    @rule(number=st.integers(1, 3))
    def kubelet(self, number) -> None:
        self.happens_or_not(lambda: self.ledger.device_plugin.kubelet_found(f"life {number}"))

    @rule()
    def env(self) -> None:
        self.happens_or_not(self.ledger.device_plugin.env_seen)

    @rule(one=st.sampled_from(DEVICES), more=some_devices, other=st.sampled_from([None, *NAMES]))
    def allocate(self, one, more, other) -> None:
        """Mostly of one device, under the resource that has it."""
        resource = other or self.ledger.naming.device_resource(one) or NAMES[0]
        devices = [one, *more] if other else [one]
        allocations = self.happens_or_not(
            lambda: self.ledger.device_plugin.allocate(resource, devices)
        )
        for allocation in allocations or ():
            assert self.ledger.allocations[allocation.device] == allocation
            present = {r.id: r.grant for r in self.ledger.obstacles.regions_of(allocation.device)}
            assert allocation.grants == present
            assert not any(trouble(self.ledger, region) for region in present)
            others = [one for one in self.ledger.tenancies.values() if one.region not in present]
            for node in (node for grant in present.values() for node in grant.nodes):
                assert not any(node in one.nodes for one in others)

    @rule(one=st.sampled_from(DEVICES), pod=pods, nodes=st.lists(st.integers(0, 6), max_size=2))
    def adopt(self, one, pod, nodes) -> None:
        resource = self.ledger.naming.device_resource(one)
        if resource is not None:
            text = ",".join(f"/dev/dfl-port.{node}" for node in nodes)
            env = {device_variable(RegionId(one)): text} if nodes else {}
            self.happens_or_not(lambda: self.ledger.device_plugin.adopt(resource, one, pod, env))

    @rule(devices=some_devices, pod=pods)
    def bind(self, devices, pod) -> None:
        self.happens_or_not(lambda: self.ledger.device_plugin.bind_pod(devices, pod))

    @rule(devices=some_devices)
    def prestart(self, devices) -> None:
        self.learns(lambda: self.ledger.device_plugin.prestart_seen(devices))

    @rule(devices=some_devices, debug=st.sampled_from([None, DEBUG]))
    def started(self, devices, debug) -> None:
        allocations = [c for d in devices if (c := self.ledger.allocations.get(d)) is not None]
        self.happens_or_not(lambda: self.ledger.device_plugin.started(allocations, debug))

    @rule(one=st.sampled_from(DEVICES), program=st.booleans(), debug=st.sampled_from([None, DEBUG]))
    def prepared(self, one, program, debug) -> None:
        """As a whole PreStart does it."""
        allocation = self.ledger.allocations.get(one)
        if allocation is not None:
            self.learns(lambda: self.ledger.device_plugin.prestart_seen([one]))
            with self.tolerated():
                for region in allocation.grants if program else ():
                    self.worked_on.add(region)
                    self.ledger.work.working([region])
                    self.ledger.work.programmed(region, AFU)
                self.ledger.device_plugin.started([allocation], debug)

    @rule(devices=some_devices)
    def poststop(self, devices) -> None:
        for one in (
            self.happens_or_not(lambda: self.ledger.device_plugin.poststop_seen(devices)) or ()
        ):
            assert self.ledger.device_plugin.balanced(one)

    @rule(devices=some_devices)
    def release(self, devices) -> None:
        before = set(self.ledger.allocations)
        used = {d for d, c in self.ledger.allocations.items() if c.started and not c.poststops}
        regions = {d: self.ledger.allocations[d].grants for d in before}
        released = self.happens_or_not(lambda: self.ledger.device_plugin.release(devices))
        if released is not None:
            assert set(released) == before & set(devices)
            assert set(self.ledger.allocations) == before - set(devices)
            for one in used & set(released):
                for region in regions[one]:
                    assert self.ledger.record(region).condition in {
                        Condition.DIRTY,
                        Condition.SCRUBBING,
                        Condition.FAULTED,
                    }

    @rule(uids=st.sets(pods))
    def processes_end(self, uids) -> None:
        self.ended |= uids
        self.happens_or_not(lambda: gone(self.ledger, *uids))
        if not self.journal.failing:
            left = [one.pod for one in self.ledger.tenancies.values() if one.left]
            assert not uids.intersection(left)

    # -------------------------------------------------------------- debugging

    @rule(region=one_region, words=st.sampled_from(["", "it failed"]))
    def failure_noted(self, region, words) -> None:
        self.happens_or_not(lambda: hold(self.ledger, region, failure=words))

    @rule(region=one_region, until=st.sampled_from([1.0, 2.0]))
    def kept(self, region, until) -> None:
        free = self.ledger.region_allocation(region) is None
        if region in self.ledger.debug_holds and free:
            done = self.happens_or_not(lambda: (hold(self.ledger, region, until=until), True))
            assert done is None or trouble(self.ledger, region)

    @rule(regions=some_regions)
    def no_longer_kept(self, regions) -> None:
        self.happens_or_not(lambda: debug_holds.end(self.ledger, regions))

    @invariant()
    def nobody_owns_what_is_kept(self) -> None:
        for region, debug in self.ledger.debug_holds.items() if hasattr(self, "ledger") else ():
            owned = self.ledger.region_allocation(region) is not None
            assert not (debug.until and owned), region

    # -------------------------------------------------------------- work

    @rule(regions=some_regions)
    def working(self, regions) -> None:
        self.happens_or_not(lambda: self.ledger.work.working(regions))

    @rule(regions=some_regions)
    def dirty(self, regions) -> None:
        self.learns(lambda: self.ledger.work.dirty(regions, "x"))
        assert all(self.ledger.record(r).condition is Condition.DIRTY for r in regions)

    @rule(region=one_region)
    def faulted(self, region) -> None:
        self.learns(lambda: self.ledger.work.faulted(region, "x"))
        assert self.ledger.record(region).condition is Condition.FAULTED

    @rule(region=one_region, blank=st.booleans(), afu=afus)
    def clean(self, region, blank, afu) -> None:
        before = self.ledger.record(region).condition
        self.worked_on.add(region)
        self.happens_or_not(lambda: self.ledger.work.clean(region, afu, blank=blank))
        if self.ledger.record(region).condition in {Condition.BLANK, Condition.UNBLANKED}:
            assert before in {Condition.SCRUBBING, Condition.BLANK, Condition.UNBLANKED}

    @rule(region=one_region)
    def programmed(self, region) -> None:
        before = self.ledger.record(region).condition
        self.worked_on.add(region)
        self.happens_or_not(lambda: self.ledger.work.programmed(region, AFU))
        if before not in {Condition.SCRUBBING, Condition.PROGRAMMED}:
            assert self.ledger.record(region).condition is before

    @rule(card=st.sampled_from(CARDS), open_=st.booleans())
    def debt(self, card, open_) -> None:
        self.happens_or_not(lambda: self.ledger.work.set_memory_clear_pending(card.id, open_=open_))

    @rule(regions=some_regions, afu=afus)
    def scrub(self, regions, afu) -> None:
        """As a release does it; random steps alone rarely clean anything."""
        self.worked_on.update(regions)
        with self.tolerated():
            self.ledger.work.working(regions)
            for region in dict.fromkeys(regions):
                self.ledger.work.clean(region, afu, blank=True)
            for card in {card_of(r) for r in regions}:
                self.ledger.work.set_memory_clear_pending(card, open_=False)

    # -------------------------------------------------------------- misfortunes

    @rule(failing=st.sampled_from([True, False, False]))
    def disk(self, failing) -> None:
        self.journal.failing = failing

    @rule(boots=st.sampled_from([False, False, False, True]), named=st.sampled_from([True, False]))
    def restart(self, boots, named) -> None:
        self.aliases = named
        ended = self.journal
        ended.real.close()
        self.boot += boots
        self.open(ended.model.snapshot)
        if not boots:
            assert self.ledger.allocations == ended.model.snapshot.allocations

    @rule()
    def upgrade(self) -> None:
        """From a release that wrote schema 3: who may be using a region may do so still."""
        self.journal.real.close()
        written = self.journal.model.snapshot
        schema_3.rewrite(Path(self.folder) / "journal.sqlite3")
        self.open()
        assert "schema 3" in self.journal.real.doubt
        assert self.ledger.allocations.keys() == written.allocations.keys()
        users = {(one.key.region, one.key.pod) for one in self.ledger.tenancies.values()}
        for one in written.tenancies.values():
            allocation = written.allocations.get(DeviceId(one.key.region)) or (
                written.allocations.get(DeviceId(card_of(one.key.region)))
            )
            named = allocation is not None and allocation.pod == one.key.pod
            if (one.left and one.nodes) or named:
                assert (one.key.region, one.key.pod) in users

    @precondition(lambda self: not self.journal.failing)
    @rule()
    def fold(self) -> None:
        self.journal.real.checkpoint()

    @contextlib.contextmanager
    def written_or_lost(self) -> Iterator[None]:
        try:
            yield
        except JournalError:
            assert self.journal.failing
            self.lost = True

    @contextlib.contextmanager
    def tolerated(self) -> Iterator[None]:
        """Steps of which each may be refused."""
        with tolerated, self.written_or_lost():
            yield

    def learns(self, step) -> None:
        """It holds whether or not it could be written."""
        with self.written_or_lost():
            step()

    def happens_or_not(self, step):
        """A step that raises has given nothing; what it took holds until it is written."""
        before = remembered(self.ledger, "")
        try:
            with self.written_or_lost():
                return step()
        except FpgaPluginError:
            # Allocate ends an allocation that only stands in the way; nothing else is changed.
            allocations = remembered(self.ledger, "").allocations
            assert allocations.items() <= before.allocations.items()
        return None

    # -------------------------------------------------------------- what always holds

    @invariant()
    def one_owner(self) -> None:
        if hasattr(self, "ledger"):
            held: set[RegionId] = set()
            for allocation in self.ledger.allocations.values():
                for region in allocation.grants:
                    assert region not in held
                    held.add(region)
                if is_card(allocation.device):
                    on_card = [
                        c for c in self.ledger.allocations if card_of(c) == allocation.device
                    ]
                    assert on_card == [allocation.device]

    @invariant()
    def who_may_use_a_region_is_forgotten_at_its_end_or_with_work_on_that_region(self) -> None:
        if hasattr(self, "ledger"):
            tenancies = self.ledger.tenancies
            for one in self.users - tenancies.keys():
                assert one.pod in self.ended or one.region in self.worked_on, one
            self.users = {key for key, one in tenancies.items() if one.used and key.pod is not None}
            self.worked_on, self.ended = set(), set()

    @invariant()
    def lists_are_the_table(self) -> None:
        if hasattr(self, "ledger"):
            for lists, (advertise, scrub) in zip(self.lists, self.views, strict=True):
                expected = table(self.ledger, advertise=advertise, scrub=scrub)
                assert listed(self.ledger, lists) == expected

    @invariant()
    def answers_need_no_search(self) -> None:
        """Indexes agree with what a search of all allocations finds."""
        if hasattr(self, "ledger"):
            allocations = self.ledger.allocations
            for card in CARDS:
                on_card = {d for d in allocations if card_of(d) == card.id}
                assert {c.device for c in self.ledger.allocations_on(CardId(card.id))} == on_card
                mine = [r.id for r in card.regions[:1]]
                covered = {r for d in on_card for r in allocations[d].grants}
                others = bool(covered - set(mine)) or bool(on_card - {DeviceId(card.id), *mine})
                others = others or card.id in self.ledger.unreconciled
                assert self.ledger.others_owned(card.id, mine) == others

    @invariant()
    def the_journal_knows_what_memory_knows(self) -> None:
        if not hasattr(self, "ledger"):
            return
        memory = remembered(self.ledger, f"boot {self.boot}")
        written = self.journal.model.snapshot
        self.lost = self.lost and memory != written
        if not self.lost:
            assert memory == written
            return
        assert not laxer(self.ledger, written)


TestSteps = pytest.mark.long(Steps.TestCase)
