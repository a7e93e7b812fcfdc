"""A node in a temporary folder: kubelet, simulated cards, a store, the plugin's state.

Everything lies on a real file system, as on a node: the journal's cost is part of what is measured.
"""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from kubelet import Kubelet, healthy, listed
from plugin import Plugin

from fpga_plugin.bitstreams.gbs import GUID
from fpga_plugin.hardware.simulated.slots import card_at
from fpga_plugin.kubernetes.messages import v1beta1

INTERFACE = "ce48969398f05f33946d560708be108a"
REGIONS = f"fpga.intel.com/region-{INTERFACE}"
CARDS = f"fpga.intel.com/fpga-{INTERFACE}"
PORTS = 4
"""Regions a card."""

BLANK = "0" * 31 + "1"


class Node:
    """See the module.

    Attributes:
        extra: settings beyond the usual ones.

    Args:
        folder: an empty one.
        store: another one, in a place where nobody else makes and removes files: the plugin watches
            the folders that lead to its store.
        python: of the environment that the plugin runs in.
        count: how many cards.
        pr_seconds: how long a PR takes.
    """

    def __init__(
        self, folder: Path, store: Path, python: Path, *, count: int, pr_seconds: float
    ) -> None:
        self.folder = folder
        self.cards = [card_at(index) for index in range(count)]
        self.pr_seconds = pr_seconds
        self.extra: dict[str, str] = {}
        self.python = python
        self.kubelet = Kubelet(folder)
        (store / INTERFACE).mkdir(parents=True)
        self.store = store
        self.add_bitstream(BLANK, 1, name="blank")

    @property
    def regions(self) -> list[str]:
        """All region ids."""
        return [f"{card}-p{port}" for card in self.cards for port in range(PORTS)]

    def settings(self) -> Mapping[str, str]:
        """The plugin's environment."""
        return {
            "FPGA_PLUGIN_BACKEND": "simulated",
            "FPGA_PLUGIN_SIMULATED_CARDS": f"{len(self.cards)}x{PORTS}",
            "FPGA_PLUGIN_SIMULATED_PR_SECONDS": str(self.pr_seconds),
            "FPGA_PLUGIN_KUBELET_DIR": str(self.kubelet.directory),
            "FPGA_PLUGIN_PODRESOURCES_SOCKET": str(self.kubelet.podresources),
            "FPGA_PLUGIN_PODS_SOCKET": "",
            "FPGA_PLUGIN_BITSTREAM_DIR": str(self.store),
            "FPGA_PLUGIN_STATE_DIR": str(self.folder / "state"),
            "FPGA_PLUGIN_HTTP_ADDRESS": "127.0.0.1:0",
            **self.extra,
        }

    def add_bitstream(self, afu_id: str, mebibytes: float, *, name: str = "") -> None:
        """Put a bitstream of that size into the store."""
        cluster = {"accelerator-type-uuid": afu_id, "name": "afu", "total-contexts": 1}
        of_image = {"magic-no": 488605312, "interface-uuid": INTERFACE}
        metadata = {"version": 1, "afu-image": of_image | {"accelerator-clusters": [cluster]}}
        text = json.dumps(metadata).encode()
        image = bytes.fromhex(afu_id) + os.urandom(int(mebibytes * 2**20) - 16)
        path = self.store / INTERFACE / f"{name or afu_id}.gbs"
        path.write_bytes(GUID + len(text).to_bytes(4, "little") + text + image)

    def start(self) -> Plugin:
        """Start the plugin; it may leave the state folder behind from before."""
        (self.folder / "state").mkdir(exist_ok=True)
        self.kubelet.forget()
        return Plugin(self.python, self.settings(), self.folder / "plugin.log")

    def wait_clean(self) -> float:
        """When every region and card was Healthy in kubelet's lists."""
        regions, cards = len(self.cards) * PORTS, len(self.cards)
        return max(
            self.kubelet.wait_list(REGIONS, lambda data: healthy(data) == regions),
            self.kubelet.wait_list(CARDS, lambda data: healthy(data) == cards),
        )

    def allocate(self, resource: str, device: str) -> float:
        """Seconds of one Allocate."""
        request = v1beta1.AllocateRequest(
            container_requests=[v1beta1.ContainerAllocateRequest(devices_ids=[device])]
        )
        return self._timed(resource, "Allocate", bytes(request))

    def deallocate(self, resource: str, device: str) -> float:
        """Seconds of one Deallocate."""
        request = v1beta1.DeallocateRequest(
            container_requests=[v1beta1.ContainerDeallocateRequest(devices_i_ds=[device])]
        )
        return self._timed(resource, "Deallocate", bytes(request))

    def prestart(self, resource: str, device: str, afu_id: str) -> float:
        """Seconds of one PreStartContainer that asks for a bitstream."""
        request = v1beta1.PreStartContainerRequest(
            devices_ids=[device],
            env={"FPGA_REGION_1": INTERFACE, "FPGA_BITSTREAM_ID_1": afu_id},
        )
        return self._timed(resource, "PreStartContainer", bytes(request))

    def _timed(self, resource: str, method: str, request: bytes) -> float:
        call = self.kubelet.call(resource, method)
        began = time.perf_counter()
        call(request)
        return time.perf_counter() - began

    def plug(self, card: str) -> float:
        """Plug a card in; seconds until kubelet has a list with it."""
        self.kubelet.trim()
        began = time.monotonic()
        (self.folder / "state" / "simulated" / "cards" / card).touch()
        return self.kubelet.wait_list(REGIONS, listed(f"{card}-p0"), since=began) - began

    def unplug(self, card: str) -> float:
        """Unplug a card; seconds until kubelet has a list without it."""
        self.kubelet.trim()
        there = listed(f"{card}-p0")
        began = time.monotonic()
        (self.folder / "state" / "simulated" / "cards" / card).unlink()
        return self.kubelet.wait_list(REGIONS, lambda data: not there(data), since=began) - began
