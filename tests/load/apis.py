"""A node under load: kubelet, the plugin, and pods that come and go, on either api.

`DevicePluginNode` has the demo's kubelet double, extended or stock. `DraNode` has the double of
the DRA tests, and an API server that keeps claims and ResourceSlices. The plugin is a program of
its own, as on a node; its log is a file.
"""

import asyncio
import contextlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from daemon_support import AFU, AFU_2, AFU_3, CARDS, REGIONS, ROOT, STORE, request
from doubles.apiserver import ApiServerDouble
from dra_support import NAMESPACE, NODE, Claim, DraKubelet, config
from grpclib.exceptions import GRPCError
from pods_support import PodsServer, as_kubelet_has_it, serving

from fpga_plugin.demo.double import EXTENDED, STOCK, AdmissionError, KubeletDouble
from fpga_plugin.demo.pod import DemoContainer, DemoPod
from fpga_plugin.hardware.simulated.slots import card_at
from fpga_plugin.kubernetes.names import ResourceName

LIMIT = 300.0
"""Seconds for what has to come about by itself: all devices Healthy at the start and at the end."""

REGION, CARD = ResourceName(REGIONS), ResourceName(CARDS)
PORTS = 4
"""Regions a card."""

CLAIMS = f"/apis/resource.k8s.io/v1/namespaces/{NAMESPACE}/resourceclaims"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"


class Node:
    """What both apis have.

    Args:
        cards: how many simulated ones.
        rng: what the pods are by.

    Attributes:
        said: what came of the pods.
    """

    def __init__(self, cards: int, rng: random.Random) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fpga-load-"))
        (self.folder / "kubelet").mkdir()
        self.cards = [card_at(index) for index in range(cards)]
        self.rng = rng
        self.said: Counter[str] = Counter()
        self.state_dir = self.folder / "state"
        self.process: subprocess.Popen[bytes] | None = None
        self.settings = {
            "BACKEND": "simulated",
            "SIMULATED_CARDS": f"{cards}x{PORTS}",
            "SIMULATED_PR_SECONDS": "0.01",
            "STATE_DIR": str(self.state_dir),
            "KUBELET_DIR": str(self.folder / "kubelet"),
            "BITSTREAM_DIR": str(STORE),
            "PODRESOURCES_SOCKET": "",
            "PODS_SOCKET": "",
            "CGROUP_ROOT": "",
            "HTTP_ADDRESS": "127.0.0.1:0",
        }

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def logged(self, event: str) -> list[dict[str, Any]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [json.loads(line) for line in lines if f'"{event}"' in line]

    async def until(self, holds: Any, what: str) -> None:
        deadline = time.monotonic() + LIMIT
        while not holds():
            assert self.process is None or self.process.poll() is None, "the plugin has ended"
            assert time.monotonic() < deadline, f"not within {LIMIT:g} s: {what}"
            await asyncio.sleep(0.2)

    async def launch(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(  # noqa: ASYNC220  # nothing runs yet
                [sys.executable, "-m", "fpga_plugin", "run"],
                env={
                    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                    "NODE_NAME": NODE,
                    **{f"FPGA_PLUGIN_{name}": text for name, text in self.settings.items()},
                },
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        await self.until(lambda: self.logged("serving metrics"), "metrics are served")

    def sockets(self) -> list[Path]:
        """Where kubelet calls the plugin."""
        raise NotImplementedError

    def https(self) -> list[Path | tuple[str, int]]:
        """Where it serves HTTP: to the node, and to the operator on it."""
        (address,) = self.logged("serving metrics")[-1]["addresses"]
        host, _, port = address.rpartition(":")
        return [(host, int(port)), self.state_dir / "status.sock"]

    async def pod(self, number: int, seconds: float) -> None:
        """A pod's whole life; it is counted in `said`."""
        raise NotImplementedError

    async def all_clean(self) -> None:
        """Every device is there and may be given out."""
        raise NotImplementedError

    async def terminated(self) -> None:
        """SIGTERM, if it runs, while the loop goes on."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            await asyncio.to_thread(self.process.wait, 60)

    def close(self, *, keep: bool) -> int:
        """SIGTERM; the exit code. The log stays where something is to be looked at."""
        code = 1
        if self.process is not None:
            self.process.terminate()
            try:
                code = self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if keep:
            kept = ROOT / ".cache" / "load.log"
            kept.parent.mkdir(exist_ok=True)
            shutil.copy(self.log, kept)
        shutil.rmtree(self.folder)
        return code


class DevicePluginNode(Node):
    """The device plugin's api."""

    def __init__(self, cards: int, rng: random.Random, *, stock: bool) -> None:
        super().__init__(cards, rng)
        self.settings |= {
            "PODRESOURCES_SOCKET": str(self.folder / "list.sock"),
            "PODS_SOCKET": str(self.folder / "pods.sock"),
        }
        self.kubelet = KubeletDouble(
            str(self.folder / "kubelet"),
            profile=STOCK if stock else EXTENDED,
            podresources_path=str(self.folder / "list.sock"),
        )
        self.pods = PodsServer()
        self._admission = asyncio.Lock()  # kubelet admits one pod after the other

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        await self.kubelet.start()
        try:
            async with serving(self.pods, self.folder / "pods.sock"):
                try:
                    await self.launch()
                    await self.all_clean()
                    yield
                finally:
                    # The plugin first: connections that it makes meanwhile would outlive the loop.
                    await self.terminated()
        finally:
            await self.kubelet.stop()

    def sockets(self) -> list[Path]:
        return list((self.folder / "kubelet").glob("fpga-plugin-*.sock"))

    async def pod(self, number: int, seconds: float) -> None:
        env = self.rng.choice([request(AFU), request(AFU_2), request(AFU_3), {"PATH": "/bin"}])
        devices = {CARD: 1} if number % 16 == 0 else {REGION: self.rng.choice([1, 1, 1, 2])}
        app = DemoContainer(name="app", devices=devices, env=env)
        pod = DemoPod(name=f"pod-{number}", containers=(app,))
        self.pods.pods[pod.uid] = known = as_kubelet_has_it(pod)
        try:
            async with self._admission:
                await self.kubelet.admit(pod)
            await self.kubelet.start_container(pod, "app")
            known.runs("app", started=time.time())
            await asyncio.sleep(seconds)
            await self.kubelet.remove_container(pod, "app")
            self.said["ran"] += 1
        except AdmissionError as error:
            self.said[f"not admitted: {_words(error)}"] += 1
        except GRPCError as error:
            self.said[f"not started: {error.status.name}: {_words(error.message)}"] += 1
        finally:
            self.pods.calls.clear()
            del self.pods.pods[pod.uid]
            async with self._admission:
                await self.kubelet.end_pod(pod)

    async def all_clean(self) -> None:
        def clean() -> bool:
            lists = self.kubelet.lists
            return all(
                resource in lists and len(lists[resource].healthy) == number
                for resource, number in ((REGION, PORTS * len(self.cards)), (CARD, len(self.cards)))
            )

        await self.until(clean, "all devices Healthy")


class Kubelet(DraKubelet):
    """Keeps its record although several of its calls end at once."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._writing = threading.Lock()

    def _write(self) -> None:
        with self._writing:
            super()._write()


class DraNode(Node):
    """Dynamic Resource Allocation's api."""

    def __init__(self, cards: int, rng: random.Random) -> None:
        super().__init__(cards, rng)
        self.dra = Kubelet(self.folder)
        self.api = ApiServerDouble()
        self._forgotten = 0
        self.api.objects = {CLAIMS: {}, SLICES: {}}
        self.api.objects["/api/v1/nodes"] = {NODE: {"metadata": {"name": NODE, "uid": "n"}}}
        self._free = [f"{card}-p{port}" for card in self.cards for port in range(PORTS)]

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        async with self.api:
            self.settings |= {
                "MODE": "dra",
                "CDI_DIR": str(self.folder / "cdi"),
                "KUBECONFIG": self.api.kubeconfig(self.folder),
            }
            self.dra.start()
            try:
                await self.launch()
                await asyncio.to_thread(self.dra.until_registered)
                await self.until(
                    lambda: self.logged("kubelet's record of claims read"), "the record is read"
                )
                await self.all_clean()
                yield
            finally:
                await self.terminated()
                await asyncio.to_thread(self.dra.close)

    def sockets(self) -> list[Path]:
        return [*self.folder.glob("plugins/*/dra.sock"), *self.folder.glob("plugins_registry/*")]

    async def pod(self, number: int, seconds: float) -> None:
        if not self._free:
            self.said["no device was free"] += 1
            return
        device = self._free.pop(self.rng.randrange(len(self._free)))
        claim = Claim(f"claim-{number}", device)
        if afu := self.rng.choice([AFU, AFU_2, AFU_3, ""]):
            claim.config = [config(bitstream=afu)]
        claim.pods = [str(uuid.uuid4())]
        item = claim.object()
        await self.api.put(CLAIMS, item)
        # The server gives each object a uid of its own.
        claim.uid = self.api.objects[CLAIMS][claim.name]["metadata"]["uid"]
        try:
            self.dra.keep(claim)
            answer = (await asyncio.to_thread(self.dra.call, "Prepare", claim))[claim.name]
            if answer.error:
                self.said[f"not prepared: {_words(answer.error)}"] += 1
            else:
                self.dra.keep(claim, answer.devices)
                await asyncio.sleep(seconds)
                self.said["ran"] += 1
            if error := await asyncio.to_thread(self.dra.unprepare, claim):
                self.said[f"not unprepared: {_words(error)}"] += 1
        finally:
            self.dra.record.pop(claim.uid, None)
            await self.api.remove(CLAIMS, claim.name)
            self._free.append(device)
            self._forget()

    def _forget(self) -> None:
        """What the server keeps for tests to look at, and nobody watches any more."""
        self.api.requests.clear()
        self.api.tokens.clear()
        events = self.api._events  # watches count them
        for place in range(self._forgotten, len(events) - 50):
            events[place] = (0, "", "", {})
        self._forgotten = max(self._forgotten, len(events) - 50)

    async def all_clean(self) -> None:
        def clean() -> bool:
            told = self.devices()
            return len(told) == (PORTS + 1) * len(self.cards) and not any(
                "taints" in one for one in told
            )

        await self.until(clean, "all devices without a taint in the ResourceSlices")

    def devices(self) -> list[dict[str, Any]]:
        slices = self.api.objects[SLICES].values()
        return [device for each in slices for device in each["spec"].get("devices", ())]


def _words(text: object) -> str:
    """A refusal without what differs from pod to pod."""
    return " ".join(word for word in str(text).split() if not any(map(str.isdigit, word)))[:160]


APIS = {
    "extended": lambda cards, rng: DevicePluginNode(cards, rng, stock=False),
    "stock": lambda cards, rng: DevicePluginNode(cards, rng, stock=True),
    "dra": DraNode,
}
