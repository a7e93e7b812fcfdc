"""One node of the fleet: a plugin as a process, and what kubelet does with it, without containers.

Plain grpcio for kubelet's side. The plugin has the credentials and the rights that its pod has: a
token of its service account that is bound to a pod on this node.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from daemon_support import ROOT, STORE, message

DRIVER = "fpga.intel.com"
DRA = "k8s.io.kubelet.pkg.apis.dra.v1"
BLANK = "4cc434ceb4374bd69d69b7e3fdc04577"

LIMIT = 900.0
"""Seconds: hundreds of processes share few processors."""

RETRY = 5.0
"""Seconds until a refused Prepare is tried again; kubelet's own 60 to 90 would only take longer."""

Json = Mapping[str, Any]


class FleetNode:
    """A node.

    Args:
        folder: for its files, with a short path.
        name: of the node.
        kubeconfig: the plugin's credentials.
        hardware: simulated cards, as FPGA_PLUGIN_SIMULATED_CARDS has them.
        python: the interpreter.
        user: whose process the plugin is; 0: ours.

    Attributes:
        held: which claim of ours has each device now.
        wrong: what must never be; empty if all is well.
        refused: answers of Prepare and Unprepare that were errors.
        seconds: of each Prepare and each Unprepare that was answered well.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        kubeconfig: str,
        hardware: str,
        *,
        python: str = sys.executable,
        user: int = 0,
    ) -> None:
        self.folder, self.name = folder, name
        self._python, self._user = python, user
        self.held: dict[str, str] = {}
        self.wrong: list[str] = []
        self.refused: list[str] = []
        self.seconds: dict[str, list[float]] = {"Prepare": [], "Unprepare": []}
        self._record: dict[str, Json] = {}
        self._channel: grpc.aio.Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        for inner in ("plugins_registry", "pods", "kubelet"):
            (folder / inner).mkdir(parents=True)
        self._settings = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "NODE_NAME": name,
            "FPGA_PLUGIN_MODE": "dra",
            "FPGA_PLUGIN_BACKEND": "simulated",
            "FPGA_PLUGIN_SIMULATED_CARDS": hardware,
            "FPGA_PLUGIN_STATE_DIR": str(folder / "state"),
            "FPGA_PLUGIN_KUBELET_DIR": str(folder / "kubelet"),
            "FPGA_PLUGIN_CDI_DIR": str(folder / "cdi"),
            "FPGA_PLUGIN_BITSTREAM_DIR": str(STORE),
            "FPGA_PLUGIN_PODRESOURCES_SOCKET": "",
            "FPGA_PLUGIN_PODS_SOCKET": "",
            "FPGA_PLUGIN_CGROUP_ROOT": "",  # there are no containers: kubelet's word counts
            "FPGA_PLUGIN_HTTP_ADDRESS": "",
            "FPGA_PLUGIN_KUBECONFIG": kubeconfig,
            "PYTHONPATH": os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")]),
        }
        self._write()
        if user:
            for path in (folder, *folder.rglob("*"), kubeconfig):
                os.chown(path, user, user)

    @property
    def log(self) -> Path:
        return self.folder / "log"

    async def start(self) -> None:
        """The plugin, until kubelet has the driver."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220  # some ms
                [*self._as_user(), self._python, "-m", "fpga_plugin", "run"],
                env=self._settings,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        await self._found()

    def _as_user(self) -> list[str]:
        """Not by Popen, which then forks in place of vfork: grpc does not like that."""
        if not self._user:
            return []
        user = str(self._user)
        return ["setpriv", "--reuid", user, "--regid", user, "--clear-groups"]

    async def _found(self) -> None:
        registry = self.folder / "plugins_registry" / f"{DRIVER}-reg.sock"
        deadline = time.monotonic() + LIMIT
        while not registry.exists():
            assert self._process is not None
            code = self._process.poll()
            assert code is None, f"{self.name} ended with {code}: {self.tail()}"
            assert time.monotonic() < deadline, f"{self.name}: no socket: {self.tail()}"
            await asyncio.sleep(0.1)
        package = "pluginregistration"
        async with grpc.aio.insecure_channel(f"unix:{registry}") as channel:
            info = await _call(
                channel,
                f"/{package}.Registration/GetInfo",
                message("InfoRequest", package)(),
                message("PluginInfo", package),
            )
            self._channel = grpc.aio.insecure_channel(f"unix:{info.endpoint}")
            await _call(
                channel,
                f"/{package}.Registration/NotifyRegistrationStatus",
                message("RegistrationStatus", package)(plugin_registered=True),
                message("RegistrationStatusResponse", package),
            )

    async def stop(self) -> None:
        """SIGKILL: nothing of it is needed any more."""
        if self._channel is not None:
            await self._channel.close()
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait, LIMIT)

    def tail(self) -> str:
        """The end of the plugin's log."""
        return self.log.read_text(errors="replace")[-2000:]

    def errors(self) -> list[str]:
        """Lines of the plugin's log that nobody expects."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [f"{self.name}: {one}" for one in lines if not one.startswith("{")] + [
            f"{self.name}: {one}" for one in lines if '"level": "error"' in one
        ]

    def memory(self) -> tuple[float, float]:
        """RSS and PSS of the plugin in MiB."""
        assert self._process is not None
        text = Path(f"/proc/{self._process.pid}/smaps_rollup").read_text()
        found = dict(re.findall(r"^(Rss|Pss):\s+([0-9]+) kB$", text, re.MULTILINE))
        return int(found["Rss"]) / 1024, int(found["Pss"]) / 1024

    # ---------------------------------------------------------------- claims

    async def prepare(self, claim: Json, pod: str, afu: str) -> None:
        """As kubelet does before a pod's sandbox; the devices then have to be as asked."""
        devices = _devices(claim)
        self._keep(claim, pod)
        await self._until_answered("Prepare", claim)
        for device in devices:
            for region in self._regions(device):
                if (other := self.held.get(region, "")) != "":
                    self.wrong.append(f"{self.name}: {region} has {claim['uid']} and {other}")
                self.held[region] = claim["uid"]
                if (reads := self._afu(region)) != afu:
                    self.wrong.append(f"{self.name}: {region} reads {reads} for {claim['uid']}")

    async def unprepare(self, claim: Json, afu: str) -> None:
        """As kubelet does when the containers ended; the devices then have to be clean."""
        mine = [region for region, uid in self.held.items() if uid == claim["uid"]]
        for region in mine:
            if (reads := self._afu(region)) != afu:
                self.wrong.append(f"{self.name}: {region} lost its image: {reads}")
        for region in mine:
            del self.held[region]
        await self._until_answered("Unprepare", claim)
        self._record.pop(claim["uid"], None)
        self._write()

    def check_blank(self) -> None:
        """What nobody has is clean."""
        for region, one in self._state().items():
            if region not in self.held and one["afu_id"] != BLANK:
                self.wrong.append(f"{self.name}: {region} reads {one['afu_id']} at the end")

    async def _until_answered(self, method: str, claim: Json) -> None:
        deadline = time.monotonic() + LIMIT
        while True:
            began = time.monotonic()
            error = await self._ask(method, claim)
            if not error:
                self.seconds[method].append(time.monotonic() - began)
                return
            self.refused.append(f"{self.name}: {method}: {error}")
            assert time.monotonic() < deadline, self.refused[-1]
            await asyncio.sleep(RETRY)

    async def _ask(self, method: str, claim: Json) -> str:
        assert self._channel is not None
        named = message("Claim", DRA)(
            namespace=claim["namespace"], uid=claim["uid"], name=claim["name"]
        )
        answer = await _call(
            self._channel,
            f"/{DRA}.DRAPlugin/Node{method}Resources",
            message(f"Node{method}ResourcesRequest", DRA)(claims=[named]),
            message(f"Node{method}ResourcesResponse", DRA),
        )
        return str(answer.claims[claim["uid"]].error)

    def _keep(self, claim: Json, pod: str) -> None:
        self._record[claim["uid"]] = {
            "ClaimUID": claim["uid"],
            "ClaimName": claim["name"],
            "Namespace": claim["namespace"],
            "PodUIDs": {pod: {}},
            "DriverState": {DRIVER: {"Devices": []}},
        }
        self._write()

    def _write(self) -> None:
        """Kubelet's record of claims, replaced as kubelet does."""
        data = json.dumps({"kind": "DRACheckpoint", "ClaimInfoStateList": [*self._record.values()]})
        path = self.folder / "dra_manager_state"
        path.with_suffix(".new").write_text(json.dumps({"Data": data, "Checksum": 1}))
        path.with_suffix(".new").replace(path)

    # ---------------------------------------------------------------- cards

    def _state(self) -> dict[str, Json]:
        path = self.folder / "state/simulated/state.json"
        return dict(json.loads(path.read_text())["regions"])

    def _afu(self, region: str) -> str:
        return str(self._state()[region]["afu_id"])

    def _regions(self, device: str) -> list[str]:
        """Of a device as the API has it (`0000-10-00-0`), the regions."""
        names = {region.replace(".", "-"): region for region in self._state()}
        return [names[one] for one in names if one == device or one.startswith(f"{device}-p")]


def _devices(claim: Json) -> Sequence[str]:
    return [one["device"] for one in claim["results"]]


async def _call(channel: grpc.aio.Channel, path: str, sent: Any, answer: Any) -> Any:
    unary = channel.unary_unary(
        path,
        request_serializer=lambda each: each.SerializeToString(),
        response_deserializer=answer.FromString,
    )
    # A socket is there an instant before anybody listens at it.
    return await unary(sent, timeout=LIMIT, wait_for_ready=True)
