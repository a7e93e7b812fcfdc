"""Adopts what kubelet's checkpoint names and the ledger lacks: owners of devices.

At the first answer of each kubelet, and at each later one, whatever the plugin knew before: a lost
or exchanged journal, a card that was put in, a pod of another setting or API. Until it was read
nothing of a card is given out (`Ledger.unreconciled`).

An entry does not count if the cgroup of its pod is known to be gone (the checkpoint keeps entries
of dead pods), or if it is older than a call about the device that was answered since. Where two
pods have entries for one device, the device's card is kept back until one of them is gone.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import structlog

from fpga_plugin.errors import FpgaPluginError, RefusedError
from fpga_plugin.ids import CardId, DeviceId, PodUid, is_device_id
from fpga_plugin.ledger.journal import JournalError
from fpga_plugin.ledger.ledger import Ledger, card_of
from fpga_plugin.pods.cgroup import PodCgroups, known_gone
from fpga_plugin.pods.checkpoint import Checkpoint, CheckpointEntry
from fpga_plugin.pods.identity import granted_nodes
from fpga_plugin.stock.foreign import entries_of, foreign_entries
from fpga_plugin.stock.owners import Owners

log = structlog.get_logger()


class Adoption:
    """Belongs to the event loop.

    Args:
        ledger: gets the claims.
        owners: knows when each device was allocated last.
        cgroups: tell which pods are gone.
    """

    def __init__(self, ledger: Ledger, owners: Owners, cgroups: PodCgroups) -> None:
        self._ledger = ledger
        self._owners = owners
        self._cgroups = cgroups
        self._not_adopted: dict[CardId, str] = {}

    def card_changed(self, card: CardId) -> None:
        """What stood in the way may be gone."""
        self._not_adopted.pop(card, None)

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
        """Present cards of which kubelet's checkpoint names nobody who is no owner."""
        return self._ledger.cards.keys() - self._not_adopted.keys()

    def before(self) -> Counter[DeviceId]:
        """What was done to each device: ask before a checkpoint is read."""
        return Counter(self._ledger.activity)

    async def adopt(self, checkpoint: Checkpoint, before: Mapping[DeviceId, int]) -> int:
        """Make the claims that kubelet's records name and the ledger lacks; returns how many.

        A stale entry is released later. What cannot become a claim keeps its card from being given
        out, and is tried again until it can, or kubelet has forgotten it.

        Args:
            checkpoint: as read.
            before: what `before` returned before it was read.

        Raises:
            JournalError: they cannot be written down.
        """
        named = _by_device(checkpoint)
        gone = await asyncio.to_thread(self._gone, self._asked_about(named))
        ledger = self._ledger
        problems: dict[CardId, str] = {}
        adopted = 0
        for device in sorted(named):
            # What came to the device meanwhile is newer than the record.
            if ledger.activity[device] != before.get(device, 0):
                continue
            if self._owners.is_older(device, checkpoint):
                continue
            holders = {pod: of for pod, of in named[device].items() if pod not in gone}
            try:
                adopted += self._adopt(device, holders)
            except JournalError:
                raise
            except FpgaPluginError as error:
                if card_of(device) in ledger.cards:  # else it is asked about when it comes
                    problems[card_of(device)] = f"{device} of pod {min(holders)}: {error}"
        for card, problem in problems.items():
            if self._not_adopted.get(card) != problem:
                log.warning("claim not adopted", card=card, error=problem)
        self._not_adopted = problems
        ledger.unreconciled |= problems.keys()
        self._look_for_foreign(checkpoint)
        return adopted

    def _adopt(self, device: DeviceId, holders: Mapping[PodUid, Iterable[CheckpointEntry]]) -> bool:
        """Make one claim, if kubelet's records name another owner than the ledger.

        Raises:
            FpgaPluginError: it cannot become one.
        """
        ledger = self._ledger
        claim = ledger.claims.get(device)
        if not holders or (claim is not None and claim.pod in {None, *holders}):
            return False
        if len(holders) > 1:
            pods = ", ".join(sorted(holders))
            raise RefusedError(f"kubelet's checkpoint names several pods: {pods}")
        ((pod, entries),) = holders.items()
        env = {name: nodes for each in entries for name, nodes in granted_nodes(each).items()}
        if claim is None:
            resource = next(iter(entries)).resource
            # Of a card that is not there yet the pod holds nodes, which another card may get.
            ledger.adopt(resource, device, pod, env)
        elif ledger.holder_of(device) is not None:
            raise RefusedError("a ResourceClaim has it, too")
        else:
            ledger.bind_pod([device], pod, env)
        log.warning("claim adopted", device=device, pod=pod)
        return True

    def _asked_about(
        self, named: Mapping[DeviceId, Mapping[PodUid, Iterable[CheckpointEntry]]]
    ) -> set[PodUid]:
        """Pods that the ledger does not have as the owners of what the checkpoint names."""
        claims = self._ledger.claims
        return {
            pod
            for device, pods in named.items()
            for pod in pods
            if (claim := claims.get(device)) is None or claim.pod not in {None, pod}
        }

    def _gone(self, pods: Iterable[PodUid]) -> set[PodUid]:
        return known_gone(self._cgroups, pods)

    def _look_for_foreign(self, checkpoint: Checkpoint) -> None:
        """Keep back the cards of which another plugin's pods may have devices."""
        foreign = foreign_entries(checkpoint)
        cards: dict[CardId, str] = {}
        for card in self._ledger.cards.values():
            if entries := entries_of(card, foreign):
                # Kubelet writes them in another order each time.
                resource, pod = min((entry.resource, entry.pod_uid) for entry in entries)
                cards[card.id] = (
                    f"pod {pod} holds devices of {resource} that another plugin gave it; drain the"
                    " node of such pods"
                )
        if cards != self._ledger.foreign:
            for card_id, reason in cards.items():
                log.warning("card left alone", card=card_id, reason=reason)
            self._ledger.set_foreign(cards)


def _by_device(checkpoint: Checkpoint) -> dict[DeviceId, dict[PodUid, list[CheckpointEntry]]]:
    """Who has each device, by kubelet's records."""
    named: defaultdict[DeviceId, dict[PodUid, list[CheckpointEntry]]] = defaultdict(dict)
    for entry in checkpoint.entries:
        for device in map(DeviceId, filter(is_device_id, entry.devices)):
            named[device].setdefault(entry.pod_uid, []).append(entry)
    return dict(named)
