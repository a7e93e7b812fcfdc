"""A kubelet of DRA: finds the driver, asks it for claims, and keeps a record of them.

As kubelet does, it writes a claim down before it asks for it, and with its devices afterwards, and
takes it off when Unprepare was answered. An answer that does not come is None.
"""

import asyncio
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doubles.plugin_manager import PluginManager
from dra_support import NAMESPACE, Claim
from grpclib.client import Channel
from grpclib.encoding.proto import ProtoCodec
from grpclib.exceptions import GRPCError, StreamTerminatedError

from fpga_plugin.kubernetes.messages.k8s.io.kubelet.pkg.apis.dra import v1 as dra
from fpga_plugin.kubernetes.messages.pluginregistration import PluginInfo

# grpclib (0.4) fails with an AttributeError on a connection that was just lost.
GONE = (GRPCError, StreamTerminatedError, OSError, TimeoutError, AttributeError)
"""What a call ends with when the driver is not there, or dies, or kubelet does not wait for it."""


@dataclass
class Entry:
    """What the record has of a claim; `told`: the driver's answer."""

    claim: Claim
    driver: str
    devices: Sequence[str]
    pods: list[str]
    told: Sequence[Any] = ()

    def state(self) -> dict[str, Any]:
        """As kubelet writes it."""
        devices = [
            {
                "PoolName": one.pool_name,
                "DeviceName": one.device_name,
                "RequestNames": list(one.request_names),
                "CDIDeviceIDs": list(one.cdi_device_ids),
            }
            for one in self.told
        ]
        return {
            "ClaimUID": self.claim.uid,
            "ClaimName": self.claim.name,
            "Namespace": NAMESPACE,
            "PodUIDs": {uid: {} for uid in self.pods},
            "DriverState": {self.driver: {"Devices": devices}},
        }


class ClaimKubelet:
    """One kubelet, which stops and starts.

    Attributes:
        record: by the claims' uids.
        channel: to the driver; None while it is not registered.
        driver: its name.
        how: the record's file is `there`, `half` written, or `away`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.record: dict[str, Entry] = {}
        self.channel: Channel | None = None
        self.driver = ""
        self.how = "there"
        self._manager: PluginManager | None = None
        (root / "plugins_registry").mkdir()

    def start(self) -> None:
        self._manager = PluginManager(self.root / "plugins_registry", self._found, self._gone)
        self._manager.start()

    async def stop(self) -> None:
        if self._manager is not None:
            await self._manager.stop()
            self._manager = None
        self._gone(None)

    async def _found(self, info: PluginInfo) -> None:
        self._gone(None)
        self.driver = info.name
        self.channel = Channel(path=info.endpoint, codec=ProtoCodec())

    def _gone(self, _: PluginInfo | None) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    # ---------------------------------------------------------------- calls

    async def prepare(self, claims: Sequence[Claim], seconds: float) -> list[Any]:
        """What the driver answers for each."""
        if self.channel is None:
            return [None] * len(claims)
        sent = dra.NodePrepareResourcesRequest(claims=_named(claims))
        try:
            async with asyncio.timeout(seconds):
                told = await dra.DraPluginStub(self.channel).node_prepare_resources(sent)
        except GONE:
            return [None] * len(claims)
        return [told.claims[claim.uid] for claim in claims]

    async def unprepare(self, claim: Claim, seconds: float) -> Any:
        """What the driver answers."""
        if self.channel is None:
            return None
        sent = dra.NodeUnprepareResourcesRequest(claims=_named([claim]))
        try:
            async with asyncio.timeout(seconds):
                told = await dra.DraPluginStub(self.channel).node_unprepare_resources(sent)
        except GONE:
            return None
        return told.claims[claim.uid]

    # ---------------------------------------------------------------- the record

    def keep(
        self,
        claim: Claim,
        driver: str,
        devices: Sequence[str],
        pods: Sequence[str],
        told: Sequence[Any] = (),
    ) -> None:
        """A claim is about to be prepared, or was."""
        before = self.record.get(claim.uid)
        told = told or (() if before is None else before.told)
        self.record[claim.uid] = Entry(claim, driver, devices, list(pods), told)
        self._write()

    def used(self, claim: Claim, pods: Sequence[str]) -> None:
        """These pods use it now."""
        if (entry := self.record.get(claim.uid)) is not None:
            entry.pods = list(pods)
            self._write()

    def is_written(self, how: str) -> None:
        """From now on its file is so."""
        self.how = how
        self._write()

    def forget(self, claim: Claim) -> None:
        """It was unprepared."""
        self.record.pop(claim.uid, None)
        self._write()

    def wipe(self) -> None:
        """As after `rm dra_manager_state`."""
        self.record.clear()
        self._write()

    def names_devices_of(self, claim: Claim) -> bool:
        """Whether its record says what a claim has: not before an answer, nor once it was lost."""
        entry = self.record.get(claim.uid)
        return entry is not None and bool(entry.told)

    def _write(self) -> None:
        states = [entry.state() for entry in self.record.values()]
        data = json.dumps({"kind": "DRACheckpoint", "ClaimInfoStateList": states})
        path = self.root / "dra_manager_state"
        if self.how == "away":
            path.unlink(missing_ok=True)
            return
        text = json.dumps({"Data": data, "Checksum": 1})
        new = path.with_suffix(".new")
        new.write_text(text[: len(text) // 2] if self.how == "half" else text)
        os.replace(new, path)


def _named(claims: Iterable[Claim]) -> list[dra.Claim]:
    return [dra.Claim(namespace=NAMESPACE, uid=one.uid, name=one.name) for one in claims]
