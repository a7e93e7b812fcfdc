"""Compares the ledger's owners with kubelet's checkpoint, by one rule.

It does so at each answer of kubelet, and right after each Allocate, which names no pod. The plugin
adopts a device that the checkpoint names and the ledger lacks. It gives an allocation without a
known pod its pod, and releases and makes again an allocation of another pod. The reason does not
matter (a lost or exchanged journal, a card that was put in, a pod of another setting or API). Until
a card was compared, no device of it is given out (`Ledger.unreconciled`).

An entry does not count if a call about the device was answered since kubelet wrote it: kubelet
writes its checkpoint after it has its answer, and until then an entry may be that of a pod that
ended. (Of several pods, at least one did not.) Nor does it count if its pod's cgroup is known to be
gone, as the checkpoint keeps entries of dead pods. But the pod of an Allocate has no cgroup yet,
and another plugin's has none for a moment. Where two pods have entries for one device, the device's
card is kept back until one of them is gone, whether the ledger knows one of them or none.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

import structlog

from fpga_plugin.allocation.journal.journal import JournalError
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.names import card_of
from fpga_plugin.allocation.reconcile.foreign import entries_of, foreign_entries
from fpga_plugin.allocation.requests.directory import PodDirectory
from fpga_plugin.allocation.requests.identity import granted_nodes
from fpga_plugin.errors import FpgaPluginError, RefusedError
from fpga_plugin.host.backoff import Backoff
from fpga_plugin.ids import CardId, DeviceId, is_device_id
from fpga_plugin.kubernetes.cgroup import PodCgroups, known_gone
from fpga_plugin.kubernetes.kubelet.checkpoint import Checkpoint, CheckpointEntry, Stamp
from fpga_plugin.kubernetes.names import PodUid

log = structlog.get_logger()

FIRST_LOOK, LONGEST_WAIT = 0.05, 30.0
"""Seconds from Allocate to the first look, as kubelet writes within milliseconds; and between two
looks in the end."""

SETTLED: Final = 10.0
"""Seconds that another plugin's pod has to be without a cgroup to count as gone: kubelet makes it
right after it wrote its checkpoint."""

_UNREADABLE: Final[Stamp] = (0, 0, 0)
"""In place of a stamp that could not be read: the next one that can be counts as it."""


class Owners:
    """Compares the ledger with kubelet's checkpoint.

    Args:
        ledger: gets the owners.
        cgroups: tell which pods are gone.
        pods: reads kubelet's checkpoint.

    Attributes:
        adopted: how many allocations were made of what the checkpoint names.
    """

    def __init__(self, ledger: Ledger, cgroups: PodCgroups, pods: PodDirectory) -> None:
        self._ledger, self._cgroups, self._pods = ledger, cgroups, pods
        self._answered: dict[DeviceId, Stamp | None] = {}
        self._not_adopted: dict[CardId, str] = {}
        self._not_compared: set[CardId] = set()
        self._reading = asyncio.Lock()
        self._wake = asyncio.Event()
        self._at_once = False
        self._said = ""
        self._without: dict[PodUid, float] = {}
        self.adopted = 0

    # ---------------------------------------------------------------- what others tell

    def answered(self, devices: Iterable[DeviceId]) -> None:
        """An Allocate or Deallocate of these is about to be answered.

        What the checkpoint says of them by now is about others.
        """
        try:
            stamp = self._pods.stamp()
        except FpgaPluginError:
            stamp = _UNREADABLE
        self._answered |= dict.fromkeys(devices, stamp)
        self._wake.set()

    def new_kubelet(self) -> None:
        """Kubelet starts containers without PreStart: learn the allocations' owners at once."""
        self._at_once = True
        self._wake.set()

    def card_changed(self, card: CardId) -> None:
        """What kept it back may be gone."""
        self._not_adopted.pop(card, None)

    # ---------------------------------------------------------------- what others ask

    @property
    def unknown(self) -> bool:
        """Whether there is an allocation without a pod."""
        return any(allocation.pod is None for allocation in self._ledger.pod_allocations())

    @property
    def new_cards(self) -> bool:
        """Whether there is a card of which kubelet's records were not read yet."""
        present = self._ledger.unreconciled & self._ledger.cards.keys()
        return bool(present - self._not_adopted.keys())

    @property
    def doubtful(self) -> bool:
        """Whether kubelet's records name somebody who keeps a card from being given out."""
        return bool(self._ledger.foreign or self._not_adopted)

    @property
    def settled(self) -> set[CardId]:
        """Present cards for which kubelet's checkpoint names only pods that the ledger knows."""
        return self._ledger.cards.keys() - self._not_adopted.keys() - self._not_compared

    # ---------------------------------------------------------------- the comparison

    async def read(self) -> Checkpoint:
        """Compare the ledger with kubelet's checkpoint; returns what was read.

        A stale entry is released later. What cannot become an allocation keeps its card from being
        given out, and is tried again until it can, or kubelet has forgotten it.

        Raises:
            NoSourceError: the checkpoint cannot be read.
            JournalError: an owner cannot be written down.
        """
        async with self._reading:
            before = Counter(self._ledger.activity)
            checkpoint = await self._pods.checkpoint()
            named = _by_device(checkpoint)
            foreign = {each.pod_uid for of in self._foreign(checkpoint).values() for each in of}
            asked = self._strangers(named) | foreign
            gone = await asyncio.to_thread(known_gone, self._cgroups, asked)
            self._compare(checkpoint, named, gone - self._new(gone & foreign), before)
            return checkpoint

    def _new(self, gone: Collection[PodUid]) -> set[PodUid]:
        """Those of these pods without a cgroup that may yet get one."""
        now = asyncio.get_running_loop().time()
        self._without = {pod: self._without.get(pod, now) for pod in gone}
        return {pod for pod, since in self._without.items() if now - since < SETTLED}

    def _strangers(self, named: Mapping[DeviceId, "_Holders"]) -> set[PodUid]:
        """Pods that the ledger does not have as the owners of what the checkpoint names.

        Where several are named, the owner is one of them, once it must have had a cgroup.
        """
        ledger = self._ledger
        return {
            pod
            for device, pods in named.items()
            for pod in pods
            if (allocation := ledger.allocations.get(device)) is None
            or allocation.pod not in {None, pod}
            or (allocation.used and len(pods) > 1)
            or ledger.claim_owner_of(device) is not None
        }

    def _compare(
        self,
        checkpoint: Checkpoint,
        named: Mapping[DeviceId, "_Holders"],
        gone: Collection[PodUid],
        before: Mapping[DeviceId, int],
    ) -> None:
        ledger = self._ledger
        problems: dict[CardId, str] = {}
        # What came to a device meanwhile is newer than the record: it is read once more.
        busy = {each for each in named if ledger.activity[each] != before.get(each, 0)}
        self._not_compared = set(map(card_of, busy))
        for device in sorted(named.keys() - busy):
            holders = {pod: of for pod, of in named[device].items() if pod not in gone}
            older = self._is_older(device, checkpoint.stamp)
            try:
                if not older:
                    self._learn(device, holders)
                elif holders:  # of several, one at least is not whom the last call was about
                    _check_one(named[device])
            except JournalError:
                raise
            except FpgaPluginError as error:
                if card_of(device) in ledger.cards:  # else it is asked about when it comes
                    problems[card_of(device)] = f"{device} of pod {min(holders)}: {error}"
        self._look_for_foreign(checkpoint, gone)
        for card, problem in problems.items():
            if self._not_adopted.get(card) != problem:
                log.warning("allocation not adopted", card=card, error=problem)
        try:
            ledger.keep_back(problems)
        finally:  # afterwards: the change is told to listeners, and one calls `card_changed`
            self._not_adopted = problems

    def _is_older(self, device: DeviceId, stamp: Stamp | None) -> bool:
        """Whether the checkpoint may be older than the last answered call about a device."""
        if device not in self._answered:
            return False
        if self._answered[device] not in {_UNREADABLE, stamp}:
            del self._answered[device]  # all that is written from now on is newer, too
            return False
        self._answered[device] = stamp
        return True

    def _learn(self, device: DeviceId, holders: "_Holders") -> None:
        """Make kubelet's records and the ledger name one owner of a device.

        Raises:
            FpgaPluginError: they cannot.
        """
        ledger = self._ledger
        allocation = ledger.allocations.get(device)
        if ledger.claim_owner_of(device) is not None:
            # Else the claim got it after all of its owners were known: the entry is an old one.
            if holders and card_of(device) in ledger.unreconciled:
                raise RefusedError("a ResourceClaim has it, too")
            return
        if allocation is not None and allocation.pod is None:
            pods = [
                p for p, of in holders.items() if any(e.resource == allocation.resource for e in of)
            ]
            if not pods:
                return
            _check_one(pods)
            ledger.device_plugin.bind_pod([device], pods[0])
            log.debug("owner of an allocation found", device=device, pod=pods[0])
            allocation = ledger.allocations[device]
        # Of several the ledger may know one: the others' processes are known to nobody.
        _check_one(holders)
        if not holders or (allocation is not None and allocation.pod in holders):
            return
        ((pod, entries),) = holders.items()
        env = granted_nodes(entries)
        if allocation is None:
            # Of a card that is not there yet the pod holds nodes, which another card may get.
            ledger.device_plugin.adopt(entries[0].resource, device, pod, env)
        else:
            resource = entries[0].resource
            ledger.device_plugin.bind_pod([device], pod, env, resource=resource)
        self.adopted += 1
        log.warning("allocation adopted", device=device, pod=pod)

    def _foreign(self, checkpoint: Checkpoint) -> dict[CardId, Sequence[CheckpointEntry]]:
        """What another plugin's pods may have of each card, by kubelet's records."""
        foreign = foreign_entries(checkpoint)
        return {card.id: entries_of(card, foreign) for card in self._ledger.cards.values()}

    def _look_for_foreign(self, checkpoint: Checkpoint, gone: Collection[PodUid]) -> None:
        """Keep back the cards of which another plugin's pods may have devices."""
        cards: dict[CardId, str] = {}
        for card, held in self._foreign(checkpoint).items():
            if entries := [entry for entry in held if entry.pod_uid not in gone]:
                # Kubelet writes them in another order each time.
                resource, pod = min((entry.resource, entry.pod_uid) for entry in entries)
                cards[card] = (
                    f"pod {pod} holds devices of {resource} that another plugin gave it; drain the"
                    " node of such pods"
                )
        if cards != self._ledger.foreign:
            for card_id, reason in cards.items():
                log.warning("card left alone", card=card_id, reason=reason)
            self._ledger.hardware.set_foreign(cards)

    # ---------------------------------------------------------------- after an Allocate

    async def run(self) -> None:
        """Look for the pods of allocations, ever less often, until cancelled."""
        backoff = Backoff(FIRST_LOOK, LONGEST_WAIT)
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(backoff.delay() if self.unknown else None):
                    await self._wake.wait()
                self._wake.clear()
                backoff.reset()
                if not self._at_once:
                    continue
                self._at_once = False
            if self.unknown:
                await self._look()

    async def _look(self) -> None:
        try:
            await self.read()
        except FpgaPluginError as error:  # a journal that cannot be written, too
            if self._said != str(error):  # once for each new reason, not once a look
                self._said = str(error)
                log.warning("the owners of allocations cannot be read", error=str(error))
        else:
            self._said = ""


_Holders = Mapping[PodUid, Sequence[CheckpointEntry]]


def _check_one(pods: Collection[PodUid]) -> None:
    """Check that kubelet's checkpoint names no more than one pod for a device.

    Raises:
        RefusedError: it names several.
    """
    if len(pods) > 1:
        raise RefusedError(f"kubelet's checkpoint names several pods: {', '.join(sorted(pods))}")


def _by_device(checkpoint: Checkpoint) -> dict[DeviceId, _Holders]:
    """Who has each device, by kubelet's records."""
    named: defaultdict[DeviceId, dict[PodUid, list[CheckpointEntry]]] = defaultdict(dict)
    for entry in checkpoint.entries:
        for device in map(DeviceId, filter(is_device_id, entry.devices)):
            named[device].setdefault(entry.pod_uid, []).append(entry)
    return dict(named)
