"""The life of allocations, whatever happens between any two of its steps.

The real ledger and lifecycle run against a world (`ledger_world`) in which cards remember whose
data is on them. Kubelet is honest but forgetful: it sends its calls in any order, late, twice or
never, restarts, and starts containers without PreStart where real kubelets do. Cards go, come back
under other numbers and fail. The plugin dies at any step of its own.
"""

import functools
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest
import structlog
from doubles.cards import BLANK, REGIONS, WHOLE
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from ledger_support import MemoryJournal, ProcessDiedError, listed, table, trouble
from ledger_world import (
    AFUS,
    INSTANCES,
    Board,
    Images,
    Plugin,
    Pod,
    Rack,
    env_for,
    make_boards,
    start_job,
)

from fpga_plugin.allocation.journal.journal import JournalError
from fpga_plugin.allocation.journal.records import Condition, Fact
from fpga_plugin.allocation.names import card_of, is_card
from fpga_plugin.errors import FpgaPluginError, RefusedError
from fpga_plugin.hardware.grant import Grant
from fpga_plugin.ids import AfuId, DeviceId, RegionId, device_variable
from fpga_plugin.kubernetes.names import PodUid
from fpga_plugin.settings.settings import RecoveryPolicy, ScrubPolicy

INDEX = st.integers(0, 7)
JOBS = st.sampled_from([99, 99, 0, 1, 2, 3, 5])
ACTS = (
    "pod runs",
    "pod runs",
    "pod is admitted",
    "next container is admitted",
    "prestart",
    "prestart",
    "container ends",
    "container ends",
    "poststop",
    "pod ends",
    "pod is deleted by force",
    "deallocate",
    "deallocate",
    "look",
    "kubelet answers",
)
WANTS = ([], [AFUS[0]], [AFUS[1]], [AFUS[0], AFUS[1]])
MOSTLY = st.sampled_from([True, True, True, False])


class Life(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cleanup = ExitStack()
        self.failures: list[object] = []
        self.cleanup.enter_context(mock.patch("asyncio.to_thread", self.to_thread))
        structlog.configure(processors=[self.logged], cache_logger_on_first_use=False)
        self.cleanup.callback(structlog.reset_defaults)
        self.pods: list[Pod] = []
        self.images = Images()
        self.journal = MemoryJournal()
        self.instance = 1
        self.uids = 0
        self.admitting: Pod | None = None
        self.answered = False
        self.bound: set[str] = set()
        self.view: dict[str, dict[DeviceId, bool]] = {}

    async def to_thread(self, function, *args, **kwargs):
        return await start_job(self.plugin, functools.partial(function, *args, **kwargs))

    def logged(self, _logger, _method, event):
        """Errors that nobody expects are logged with their traceback, and nowhere else."""
        if event.get("exc_info"):
            self.failures.append(event)
        raise structlog.DropEvent

    @initialize(
        cards=st.sampled_from(
            [[(2, True)], [(1, True), (2, True)], [(2, False), (2, True)], [(3, True)]]
        ),
        failed_starts_count=st.booleans(),
        recovery=st.sampled_from(RecoveryPolicy),
    )
    def power_on(self, cards, failed_starts_count, recovery) -> None:
        self.recovery = recovery
        self.rack = Rack(make_boards(cards), self.touched)
        self.failed_starts_count = failed_starts_count
        self.begin_plugin()
        self.answer()
        self.settle_all()
        self.look()

    # -------------------------------------------------------------- the plugin's process

    def begin_plugin(self) -> None:
        self.plugin = Plugin(
            self.rack,
            self.pods,
            self.images,
            self.journal,
            scrub=ScrubPolicy.REQUIRED,
            recovery=self.recovery,
        )
        self.plugin.begin(self.plugin.hardware.scan())
        self.plugin.work()
        if self.plugin.ledger.rebinding:
            self.plugin.begin(self.plugin.recovery.resume())
            self.plugin.work()
        self.answered = False
        self.report_instance()

    def report_instance(self) -> None:
        self.attempt(lambda: self.plugin.reconciler.kubelet_found(f"life {self.instance}"))

    def attempt(self, function) -> object:
        """One of kubelet's calls; an error that kubelet would see is its answer."""
        try:
            return self.plugin.call(function)
        except (FpgaPluginError, ProcessDiedError) as error:
            return error

    def after(self, jobs: int = 0) -> None:
        """Some threads of the plugin come to an end; if the process died, it is started again."""
        for _ in range(jobs):
            if self.journal.died or not self.plugin.job(0):
                break
            self.write()
        self.write()
        if self.answered and not self.journal.died:
            self.plugin.call(self.learn_owners)
        if self.journal.died:
            self.restart()

    def restart(self) -> None:
        boot = self.rack.boot_id()
        self.plugin.end()
        self.journal.died = False
        self.journal.failing = 0
        for pod in self.pods:
            pod.call = None
        before = self.journal.snapshot
        self.begin_plugin()
        if before.facts.get(Fact.BOOT) == boot:
            for record in before.regions.values():
                clean = record.condition is Condition.BLANK and record.afu_id == BLANK
                if clean and self.images.has_blank and self.rack.slot(record.region).afu == BLANK:
                    now = self.plugin.ledger.record(record.region).condition
                    assert now is Condition.BLANK, f"{record.region} was clean and is {now}"

    def settle_all(self) -> None:
        for _ in range(300):
            self.after(99)
            if not self.plugin.jobs and not self.plugin.loop.pass_time():
                break

    # -------------------------------------------------------------- what really happens

    def touched(self, region: RegionId) -> None:
        """The plugin resets or programs a region."""
        for pod in self.pods:
            if pod.running and region in pod.attached:
                self.failures.append(f"{region} is worked on under pod {pod.uid}")

    def write(self) -> None:
        """Containers use their regions and the memory of their cards.

        What a container reaches follows the numbers of its nodes, and those move. A pod of which
        nobody told the plugin uses its own region only, which it has open.
        """
        owners = {allocation.pod for allocation in self.plugin.ledger.allocations.values()}
        latest = {pod.uid: pod for pod in self.pods}
        self.bound |= {pod.mark for uid, pod in latest.items() if uid in owners}
        for pod in self.pods:
            for node in pod.nodes.values() if pod.running and pod.mark in self.bound else ():
                slot = self.rack.find(node)
                if slot is not None and not slot.held:
                    pod.attached.add(slot.id)
            for region in pod.attached if pod.running else ():
                self.rack.slot(region).data.add(pod.mark)
                self.rack.boards[card_of(region)].memory.add(pod.mark)

    def run_container(self, pod: Pod, *, holds: bool) -> None:
        pod.running = True
        pod.owed += 1
        pod.attached = set()
        for node in pod.nodes.values():
            slot = self.rack.find(node)
            if slot is not None and not slot.held:
                pod.attached.add(slot.id)
                if holds:
                    slot.opens.add(pod.mark)
        self.write()

    def stop_container(self, pod: Pod) -> None:
        self.write()
        pod.running = False
        for region in pod.attached:
            self.rack.slot(region).opens.discard(pod.mark)
        pod.attached = set()

    def answered_prestart(self, pod: Pod, task, *, holds: bool) -> None:
        pod.call = None
        if self.journal.died or task.cancelled():
            pod.owed += self.failed_starts_count
            pod.unheard += self.failed_starts_count and self.journal.died
            return
        error = task.exception()
        if error is not None:
            if not isinstance(error, FpgaPluginError) or "unexpected" in str(error):
                self.failures.append(error)
            pod.owed += self.failed_starts_count
            pod.unheard += self.failed_starts_count and isinstance(
                error, JournalError | ProcessDiedError
            )
            return
        for region, node in pod.nodes.items():
            board = self.rack.boards[card_of(region)]
            if self.plugin.ledger.cards.get(board.card.id) != board.card or not board.present:
                continue  # the plugin could not know yet
            slot = self.rack.find(node)
            if slot is None or slot.id != region:
                self.failures.append(f"{pod.uid} of {region} was given {node} of {slot}")
                continue
            if slot.data - {pod.mark}:
                self.failures.append(f"{pod.uid} starts on {region} with data of {slot.data}")
            if slot.afu != pod.asked.get(region, BLANK):
                self.failures.append(f"{pod.uid} starts on {region} with image {slot.afu}")
            alone = board.card.ports == sum(r in board.slots for r in pod.nodes)
            if alone and board.card.clears_memory and board.memory - {pod.mark}:
                self.failures.append(f"{pod.uid} starts on {region} with memory {board.memory}")
        self.run_container(pod, holds=holds)

    # -------------------------------------------------------------- kubelet

    def active(self) -> list[Pod]:
        return [pod for pod in self.pods if pod.active]

    def assigned(self) -> set[DeviceId]:
        return {device for pod in self.active() for device in pod.devices}

    def pick(self, pods: list[Pod], index: int) -> Pod | None:
        """Counted from the youngest."""
        return pods[-1 - index % len(pods)] if pods else None

    @rule(
        acts=st.lists(
            st.tuples(st.sampled_from(ACTS), INDEX, INDEX, JOBS),
            min_size=3,
            max_size=8,
        )
    )
    def kubelet(self, acts) -> None:
        """Some calls and events in a row, so that examples get far."""
        steps = {
            "kubelet answers": lambda index, number, jobs: self.answer(jobs),
            "look": lambda index, number, jobs: self.look(),
            "pod runs": lambda index, number, jobs: self.pod_runs(index, number),
            "pod is admitted": self.admit_sometimes_late,
            "next container is admitted": lambda index, number, jobs: self.admit_next_container(),
            "prestart": self.prestart,
            "container ends": lambda index, number, jobs: self.container_ends(index),
            "poststop": lambda index, number, jobs: self.poststop(index, jobs),
            "pod ends": lambda index, number, jobs: self.pod_ends(index, force=False),
            "pod is deleted by force": lambda index, number, jobs: self.pod_ends(index, force=True),
            "deallocate": lambda index, number, jobs: self.deallocate(index, jobs),
        }
        for act, index, number, jobs in acts:
            steps[act](index, number, jobs)

    def admit_sometimes_late(self, index: int, number: int, jobs: int) -> None:
        self.admit(index, number, fresh=number % 4 > 0, jobs=jobs)

    def look(self) -> None:
        """Kubelet takes the lists in."""
        lists = listed(self.plugin.ledger, self.plugin.lists)
        self.view = {resource: dict(devices) for resource, devices in lists.items()}

    def admit(self, index: int, number: int, *, fresh: bool, jobs: int) -> None:
        if fresh:
            self.look()
        resource, count = (WHOLE, 1) if number < 2 else (REGIONS, 1 + (number == 7))
        taken = self.assigned()
        free = sorted(d for d, ok in self.view.get(resource, {}).items() if ok and d not in taken)
        if len(free) < count:
            return
        devices = tuple(free[(index + n) % len(free)] for n in range(count))
        out = [d for d in devices if card_of(d) in self.plugin.ledger.drained]
        held = set(self.plugin.ledger.allocations)
        answer = self.attempt(lambda: self.plugin.calls.allocate(resource, devices))
        if out and not set(out) <= held and not isinstance(answer, BaseException):
            self.failures.append(f"{devices} given away while {out} is out of service")
        if isinstance(answer, BaseException):
            if number % 2:
                self.attempt(lambda: self.plugin.calls.deallocate(resource, devices))
        else:
            nodes = {
                region: node
                for device in devices
                for region, grant in self.plugin.ledger.allocations[device].grants.items()
                for node in grant.nodes
            }
            assert sorted(answer.nodes) == sorted(nodes.values())
            for pod in self.pods:
                if set(pod.devices) & set(devices):
                    # No more than the call that kubelet had begun.
                    pod.owed = min(max(pod.owed - pod.unheard, 0), 1)
            self.admitting = Pod(self.uid(static=number % 2 > 0), resource, devices, nodes)
            self.pods.append(self.admitting)
        self.after(jobs)

    def uid(self, *, static: bool) -> PodUid:
        """A static pod that was removed comes again: with its uid, and a cgroup of its own."""
        there = {pod.uid for pod in self.pods if pod.active or pod.running}
        gone = [pod.uid for pod in self.pods if pod.uid not in there]
        if static and gone:
            return gone[-1]
        self.uids += 1
        return PodUid(f"pod-{self.uids}")

    def admit_next_container(self) -> None:
        """Init containers and their successors share devices, and are all admitted first."""
        pod = self.admitting
        if pod is None:
            return
        answer = self.attempt(lambda: self.plugin.calls.allocate(pod.resource, pod.devices))
        if isinstance(answer, BaseException):
            pod.active = False
            self.admitting = None
        else:
            assert sorted(answer.nodes) == sorted(pod.nodes.values())
        self.after()

    def pod_runs(self, index: int, number: int) -> None:
        """A pod's way to its container, without anything in between."""
        before = len(self.pods)
        self.admit(index, number, fresh=True, jobs=0)
        if len(self.pods) > before:
            self.call_prestart(self.pods[-1], number, jobs=99)

    def prestart(self, index: int, number: int, jobs: int) -> None:
        pods = [p for p in self.active() if not p.running and not p.call]
        if (pod := self.pick(pods, index)) is not None:
            self.call_prestart(pod, number, jobs=jobs)

    def call_prestart(self, pod: Pod, number: int, *, jobs: int) -> None:
        wants = WANTS[number % len(WANTS)][: len(pod.nodes)]
        self.admitting = None
        pod.asked = dict(zip(sorted(pod.nodes), wants, strict=False))
        task = pod.call = self.plugin.begin(
            self.plugin.prestarts.serve(pod.resource, pod.devices, env_for(wants), 30.0)
        )
        task.add_done_callback(functools.partial(self.answered_prestart, pod, holds=number % 3 > 0))
        self.plugin.loop.settle()
        self.after(jobs)

    def container_ends(self, index: int) -> None:
        if (pod := self.pick([p for p in self.pods if p.running], index)) is not None:
            self.stop_container(pod)

    def poststop(self, index: int, jobs: int) -> None:
        """Of a container that is removed; its pod may be long gone."""
        if (pod := self.pick([p for p in self.pods if p.owed > p.running], index)) is not None:
            pod.owed -= 1
            self.attempt(lambda: self.plugin.calls.poststop(pod.resource, pod.devices))
            self.after(jobs)

    def pod_ends(self, index: int, *, force: bool) -> None:
        """By force, kubelet forgets the pod while its container runs on."""
        if (pod := self.pick(self.active(), index)) is None:
            return
        pod.active = False
        self.admitting = None
        allocations = self.plugin.ledger.allocations
        known = all(d in allocations and allocations[d].pod == pod.uid for d in pod.devices)
        if pod.call is not None and not (force and known):
            # Where the pod is not known, kubelet's word is all there is: it calls off the start.
            pod.call.cancel()
            self.plugin.loop.settle()
        if not force:
            self.stop_container(pod)
        self.after()

    def deallocate(self, index: int, jobs: int) -> None:
        """Once, twice, or never; or reconcile finds the release."""
        taken = self.assigned()
        pods = [p for p in self.pods if not p.active and not taken & set(p.devices)]
        if (pod := self.pick(pods, index)) is not None:
            self.attempt(lambda: self.plugin.calls.deallocate(pod.resource, pod.devices))
            self.after(jobs)

    @rule(ungated=st.sets(st.integers(0, 3), max_size=2), answered=MOSTLY)
    def kubelet_restarts(self, ungated, answered) -> None:
        """Until the plugin has registered again, kubelet starts containers without PreStart."""
        for pod in self.pods:
            if pod.call is not None:
                pod.call.cancel()
        self.plugin.loop.settle()
        waiting = [p for p in self.active() if not p.running]
        for index in ungated:
            if index < len(waiting):
                self.run_container(waiting[index], holds=True)
        for pod in self.pods:
            if not pod.active:
                pod.owed = 0  # a new kubelet does not know which devices they had
        self.admitting = None
        self.instance += 1
        self.answered = False
        self.report_instance()
        self.after()
        if answered:
            self.answer(0)

    def answer(self, jobs: int = 99) -> None:
        """Kubelet's records were read: the gate opens."""
        self.report_instance()
        if self.plugin.ledger.kubelet_instance == f"life {self.instance}":
            self.answered = self.learn_owners()
            if self.answered:
                self.plugin.call(self.plugin.queue.sync)
        self.after(jobs)

    def learn_owners(self) -> bool:
        """What `Reconciler` does with kubelet's records; returns whether it came to an end."""
        ledger = self.plugin.ledger
        cards = ledger.unreconciled & ledger.cards.keys()
        try:
            for pod in self.active():
                for device in pod.devices:
                    if device not in ledger.allocations:
                        granted = {device_variable(r): node for r, node in pod.nodes.items()}
                        try:
                            ledger.device_plugin.adopt(pod.resource, device, pod.uid, granted)
                        except RefusedError:
                            cards -= {card_of(device)}
                    elif device in ledger.allocations and ledger.allocations[device].pod is None:
                        ledger.device_plugin.bind_pod([device], pod.uid)
            ledger.reconciled(cards)
        except (JournalError, ProcessDiedError):
            return False
        return True

    # -------------------------------------------------------------- hardware

    @precondition(lambda self: self.plugin.jobs)
    @rule(order=st.lists(INDEX, min_size=1, max_size=6))
    def threads(self, order) -> None:
        for index in order:
            if not self.journal.died and self.plugin.job(index):
                self.write()
        self.after()

    @rule(long=MOSTLY)
    def time(self, long) -> None:
        if long:
            self.settle_all()
        else:
            self.plugin.loop.pass_time()
            self.after()

    def event(self, board: Board) -> None:
        self.plugin.call(lambda: self.plugin.hardware.changed(board.card.id))

    def pull(self, board: Board) -> None:
        self.write()
        board.present, board.unbound = False, False
        for slot in board.slots.values():
            slot.opens.clear()
        for pod in self.pods:
            pod.attached -= set(board.slots)

    def push(self, board: Board, order: int) -> None:
        used = {
            node
            for other in self.rack.boards.values()
            if other.present
            for region in other.card.regions
            for node in region.grant.nodes
        }
        free = [n for n in (f"/dev/dfl-port.{i}" for i in range(20)) if n not in used]
        slots = sorted(board.slots)
        nodes = free[: len(slots)]
        turn = order % len(nodes)
        nodes = nodes[turn:] + nodes[:turn]
        model = make_boards([(len(slots), board.card.clears_memory)])[0].card
        board.card = replace(
            board.card,
            regions=tuple(
                replace(region, card=board.card.id, grant=Grant((node,)), handle=next(INSTANCES))
                for region, node in zip(model.regions, nodes, strict=True)
            ),
        )
        board.present, board.unbound = True, False
        for slot in board.slots.values():
            if slot.afu is None or order % 2:
                slot.afu = AfuId("c" * 32)

    @rule(
        kind=st.sampled_from(["goes", "comes", "unbinds", "health"]),
        index=INDEX,
        order=INDEX,
        told=st.booleans(),
        jobs=JOBS,
    )
    def hardware(self, kind, index, order, told, jobs) -> None:
        boards = list(self.rack.boards.values())
        board = boards[index % len(boards)]
        match kind:
            case "health":
                slot = list(board.slots.values())[order % len(board.slots)]
                slot.failing = "thermal: AP6" if order > 3 else ""
                self.plugin.begin(self.plugin.hardware.check(board.card.id))
                self.after(jobs)
                return
            case "unbinds" if board.present and len(board.card.regions) > 1:
                self.unbind(board, order)
            case "comes" if not board.present:
                self.push(board, order)
            case "goes":
                # And perhaps comes back at once, before the plugin looked.
                if board.present:
                    self.pull(board)
                    if told:
                        self.event(board)
                        self.after(jobs)
                if order:
                    self.push(board, order - 1)
        self.event(board)
        self.after(jobs)

    @rule(operation=st.sampled_from(["drain", "drain", "undrain", "retry"]), index=INDEX, jobs=JOBS)
    def operator(self, operation, index, jobs) -> None:
        """Takes a card out, brings it back or has it looked at, whatever is under way on it."""
        boards = list(self.rack.boards.values())
        board = boards[index % len(boards)]
        actions = self.plugin.actions
        function = {
            "drain": actions.drain,
            "undrain": functools.partial(actions.drain, drained=False),
            "retry": actions.retry,
        }
        task = self.plugin.begin(function[operation](board.card.id))
        task.add_done_callback(functools.partial(self.answered_operator, board, life=self.plugin))
        self.plugin.loop.settle()
        self.after(jobs)

    def answered_operator(self, board: Board, task, *, life) -> None:
        if life is not self.plugin or self.journal.died or task.cancelled():
            return
        if (error := task.exception()) is not None:
            if not isinstance(error, FpgaPluginError | ProcessDiedError):
                self.failures.append(error)
            return
        state = task.result()
        if not (state.present and state.may_be_pulled) or self.plugin.jobs:
            return
        users = [p.uid for p in self.pods if p.running and set(board.slots) & p.attached]
        if users:
            self.failures.append(f"{board.card.id} may be pulled under {users}")

    def unbind(self, board: Board, port: int) -> None:
        """The card shows fewer regions than its FME implements."""
        lost = board.card.regions[port % len(board.card.regions)]
        self.write()
        board.card = replace(board.card, regions=tuple(r for r in board.card.regions if r != lost))
        board.slots[lost.id].opens.clear()
        for pod in self.pods:
            pod.attached.discard(lost.id)

    # -------------------------------------------------------------- the plugin's own misfortunes

    @rule(operations=st.integers(0, 4), answered=MOSTLY, jobs=JOBS)
    def dies(self, operations, answered, jobs) -> None:
        """A thread may be in the middle of its work; an ioctl completes."""
        self.rack.operations = operations
        try:
            if self.plugin.jobs:
                self.plugin.jobs[0].run()
        except ProcessDiedError:
            pass
        self.rack.operations = None
        self.restart()
        if answered:
            self.answer(jobs)
            self.settle_all()

    @rule(kind=st.sampled_from(["boot", "disk", "death", "blank", "pr", "journal"]), number=INDEX)
    def misfortune(self, kind, number) -> None:
        match kind:
            case "boot":
                self.node_boots(number)
            case "disk":
                self.journal.failing = number
            case "death":  # at one of the next writes, before it or after
                self.journal.dies_in = 1 + number // 2
                self.journal.dies_after = bool(number % 2)
            case "blank":
                self.blank_image(there=number > 0)
            case "pr":
                self.rack.bad_prs = ["error" if number % 2 else "poison"]
            case "journal":
                self.journal_is_lost(absent=number)

    def journal_is_lost(self, *, absent: int) -> None:
        """With it goes what was known of pods that kubelet has forgotten; those have ended.

        A card may not be there yet when the plugin starts again.
        """
        for pod in self.pods:
            if not pod.active:
                self.stop_container(pod)
                pod.owed = 0
        boards = list(self.rack.boards.values())
        late = boards[absent] if absent < len(boards) and boards[absent].present else None
        if late is not None:
            self.pull(late)
        self.plugin.end()
        self.journal = MemoryJournal()
        for pod in self.pods:
            pod.call = None
        self.begin_plugin()
        self.answer()
        if late is not None:
            self.push(late, absent)
            self.event(late)
            self.after(99)

    def blank_image(self, *, there: bool) -> None:
        self.images.has_blank = there
        self.plugin.hardware._operations.blanks.forget(None)
        for card in list(self.plugin.ledger.cards):
            self.plugin.call(functools.partial(self.plugin.queue.add, card))
        self.after()

    def node_boots(self, order: int) -> None:
        self.admitting = None
        for pod in self.pods:
            self.stop_container(pod)
            pod.owed = 0
        self.rack.boot += 1
        self.instance += 1
        boards = list(self.rack.boards.values())
        for board in boards:
            self.pull(board)
        for board in boards if order % 2 else reversed(boards):
            self.push(board, order // 2)
        self.restart()
        self.answer(99)

    # -------------------------------------------------------------- what always holds

    @invariant()
    def nothing_unexpected(self) -> None:
        assert not self.failures, self.failures

    @invariant()
    def lists_are_the_table(self) -> None:
        ledger = self.plugin.ledger
        assert listed(ledger, self.plugin.lists) == table(ledger)

    @invariant()
    def one_owner(self) -> None:
        owners: dict[RegionId, PodUid] = {}
        for pod in self.active():
            for region in pod.nodes:
                assert owners.setdefault(region, pod.uid) == pod.uid

    @invariant()
    def owners_keep_their_devices(self) -> None:
        lists = listed(self.plugin.ledger, self.plugin.lists)
        for pod in self.active():
            for device in pod.devices:
                assert device in lists.get(pod.resource, {}), f"{device} of {pod.uid} not listed"
                if not lists[pod.resource][device]:
                    assert any(self.unsound(region) for region in pod.nodes), f"{device} unhealthy"

    def unsound(self, region: RegionId) -> bool:
        """Hardware is gone or has failed, as far as the plugin can know."""
        ledger = self.plugin.ledger
        rebinding = card_of(region) in ledger.rebinding
        return ledger.region(region) is None or rebinding or bool(trouble(ledger, region))

    @invariant()
    def what_is_offered_is_clean(self) -> None:
        ledger = self.plugin.ledger
        for devices in listed(ledger, self.plugin.lists).values():
            for device, healthy in devices.items():
                board = self.rack.boards[card_of(device)]
                known = board.present and ledger.cards.get(board.card.id) == board.card
                if not healthy or device in ledger.allocations or not known:
                    continue
                slots = [s for s in board.slots.values() if is_card(device) or s.id == device]
                for slot in slots:
                    assert not slot.data, f"{slot.id} is offered with data of {slot.data}"
                    assert slot.afu in {BLANK, None}, f"{slot.id} is offered with {slot.afu}"
                    assert not any(p.running and slot.id in p.attached for p in self.pods)
                if is_card(device) and board.card.clears_memory:
                    assert not board.memory, f"{device} is offered with data of {board.memory}"

    def teardown(self) -> None:
        """When all pods have ended and all faults are mended, everything is clean and offered."""
        try:
            if hasattr(self, "plugin") and not self.failures:
                self.everything_ends()
        finally:
            if hasattr(self, "plugin"):
                self.plugin.end()
            self.cleanup.close()

    def everything_ends(self) -> None:
        self.journal.failing = 0
        self.journal.dies_in = None
        self.rack.bad_prs = []
        self.settle_all()
        for card in list(self.plugin.ledger.drained):
            self.plugin.call(
                functools.partial(self.plugin.ledger.hardware.set_drained, card, drained=False)
            )
        self.blank_image(there=True)
        for pod in self.pods:
            pod.active = False
            self.stop_container(pod)
        for board in self.rack.boards.values():
            poisoned = any(slot.afu is None for slot in board.slots.values())
            if not board.present or poisoned or len(board.card.regions) < board.card.ports:
                self.pull(board)
                self.event(board)
                self.settle_all()
                self.push(board, 0)
                self.event(board)
            for slot in board.slots.values():
                slot.failing = ""
            self.plugin.begin(self.plugin.hardware.check(board.card.id))
        self.settle_all()
        self.answer()
        for allocation in list(self.plugin.ledger.allocations.values()):
            self.plugin.call(
                functools.partial(
                    self.plugin.calls.deallocate, allocation.resource, [allocation.device]
                )
            )
        self.settle_all()
        for card in list(self.plugin.ledger.cards):  # as the daemon does all the time
            self.plugin.begin(self.plugin.hardware.check(card))
        self.settle_all()
        self.nothing_unexpected()
        self.lists_are_the_table()
        self.what_is_offered_is_clean()
        every = listed(self.plugin.ledger, self.plugin.lists)
        records = {r: str(self.plugin.ledger.record(r)) for r in self.plugin.ledger.regions}
        assert all(all(devices.values()) for devices in every.values()), records
        assert set(every[WHOLE]) == set(self.rack.boards), every


TestLife = pytest.mark.long(Life.TestCase)
