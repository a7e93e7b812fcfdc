"""Kubelet's record of ResourceClaims, as the ledger understands it.

The record is asked under each driver's name that a claim of the ledger has, and for devices of
cards that are there under any: what a claim was made with does not change with the settings.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from fpga_plugin.dra.cdi import CdiFiles
from fpga_plugin.dra.names import parse_device_name
from fpga_plugin.ids import ClaimUid, DeviceId
from fpga_plugin.ledger.ledger import Ledger, card_of
from fpga_plugin.ledger.records import Holder
from fpga_plugin.pods.cgroup import PodPresence
from fpga_plugin.pods.dra_record import Ours, RecordedClaim, read_record
from fpga_plugin.regions.operations import CardOperations


class ClaimRecord:
    """Belongs to the event loop.

    Args:
        operations: has the ledger, and pods' cgroups.
        files: for the container runtime.
        root: kubelet's root directory.
        driver: our name.
    """

    def __init__(
        self, operations: CardOperations, files: CdiFiles, *, root: str, driver: str
    ) -> None:
        self._operations = operations
        self._ledger: Ledger = operations.ledger
        self._files = files
        self._root = root
        self._driver = driver

    async def read(self) -> Mapping[ClaimUid, RecordedClaim]:
        """Claims that have devices of this plugin, or are about to get some.

        Raises:
            RecordUnreadableError: nothing can be said about who uses what.
        """
        return await asyncio.to_thread(read_record, self._root, self._ours())

    def _ours(self) -> Ours:
        drivers = {self._driver, *(one.driver for one in self._ledger.holders.values())}
        cards = frozenset(self._ledger.cards)

        def ours(driver: str, devices: frozenset[str]) -> bool:
            return driver in drivers or any(card_of(one) in cards for one in devices_of(devices))

        return ours

    async def gone(self, record: Mapping[ClaimUid, RecordedClaim]) -> set[ClaimUid]:
        """Claims that the ledger lacks, and whose pods' cgroups are all known to be gone."""
        cgroups = self._operations.cgroups
        found = set()
        for uid in record.keys() - self._ledger.holders.keys():
            states = [await asyncio.to_thread(cgroups.state, pod) for pod in record[uid].pods]
            if states and all(state is PodPresence.GONE for state in states):
                found.add(uid)
        return found

    def holder(self, one: RecordedClaim) -> Holder:
        """A claim as the record has it.

        Raises:
            ValueError: a device has no name of ours.
        """
        devices = {parse_device_name(name): names for name, names in one.devices.items()}
        return Holder(
            uid=one.uid,
            namespace=one.namespace,
            name=one.name,
            devices=tuple(sorted(devices)),
            requests=devices,
            driver=one.driver,
            file=self._files.path(one.uid, one.driver),
        )

    async def end_gone(self, uid: ClaimUid) -> bool:
        """Forget pods that are done with a claim and gone; returns whether some of these live.

        Raises:
            JournalError: it cannot be written down.
        """
        left = [each for each in self._ledger.resource_claims.tenancies_of_holder(uid) if each.left]
        gone = [each for each in left if await self._operations.living([each]) is None]
        self._ledger.allocations.end_tenancies(gone)
        return len(gone) < len(left)


def devices_of(names: Iterable[str]) -> Iterator[DeviceId]:
    """The devices of these names; others are none of ours."""
    for name in names:
        with suppress(ValueError):
            yield parse_device_name(name)
