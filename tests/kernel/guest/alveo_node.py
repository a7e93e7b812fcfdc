"""A node whose cards are the guest's Alveo cards: the daemon on AMD's own drivers."""

import re
import time
from collections.abc import Mapping
from typing import Any
from uuid import UUID

import alveo
import daemon_support
import rack
from alveo import A, Alveo, B
from doubles import alveo_files
from doubles.samples import copy_samples

INTERFACE = alveo_files.INTERFACE
REGIONS, CARDS = f"fpga.amd.com/region-{INTERFACE}", f"fpga.amd.com/fpga-{INTERFACE}"
BLANK = UUID("b1a4b1a4-1111-4222-8333-444455556666")
BANK = 16 << 20
"""Bytes of the one bank that the images use, from address 0 on."""


def image(uuid: UUID) -> bytes:
    """An image of the store's; the blank has no kernels."""
    return alveo_files.xclbin(uuid, kernels=uuid != BLANK, used=alveo_files.USED, bank=BANK)


def equip(node: daemon_support.Node) -> None:
    """A store of images for the guest's Alveo cards and others, and the settings to serve them."""
    node.store = node.folder / "both"
    copy_samples(node.store)
    folder = node.store / INTERFACE
    folder.mkdir(exist_ok=True)
    for uuid in (A, B):
        (folder / f"{uuid.hex}.xclbin").write_bytes(image(uuid))
    (folder / "blank.xclbin").write_bytes(image(BLANK))
    done = daemon_support.sign_manifest(node.store)
    assert done.returncode == 0, done.stderr
    node.set(backend="xrt", health_interval="0.5", bitstream_dir=str(node.store))


class AlveoNode(rack.PlainNode):
    """A node that serves the guest's Alveo cards.

    Args:
        fakes: the cards; fresh, and loaded with A.
        settings: in place of the usual ones.
    """

    has_clocks = False

    def __init__(self, *fakes: Alveo, **settings: str) -> None:
        super().__init__("1x1")
        self.fakes = fakes
        equip(self)
        self.set(**settings)

    def prestart(self, region: str, env: Mapping[str, str]) -> None:
        """Start a container as kubelet does: it asks again for what was not finished in time.

        The plugin answers within 25 s. On an emulated processor that others use too that is less
        than the work on a card may take. Any other refusal is raised.
        """
        ends = time.monotonic() + alveo.PATIENCE
        refusals = 0
        while True:
            try:
                self.kubelet.prestart(region, env=env, resource=REGIONS)
                break
            except daemon_support.Refused as refused:
                late = re.search(r"not (?:finished|done) after [0-9.]+ s", refused.message)
                if late is None or time.monotonic() > ends:
                    raise
                refusals += 1
        for _ in range(refusals):
            self.kubelet.poststop(region, resource=REGIONS)  # of containers that did not start

    def state(self) -> dict[str, dict[str, Any]]:
        """By region what the card below the drivers holds."""
        return {f"{card.id}-p0": {"afu_id": card.image.hex} for card in self.fakes}


def request(uuid: UUID) -> dict[str, str]:
    """The environment of a container that wants this image."""
    return {"FPGA_REGION_1": INTERFACE, "FPGA_BITSTREAM_ID_1": uuid.hex}


def dirty(card: Alveo) -> None:
    """What a tenant leaves in all of the card's memory."""
    card.memory.write_bytes(b"\x5a" * alveo_files.CARD_MEMORY)


def dirt(card: Alveo) -> int:
    """How much of it is left in the bank that is to be cleared."""
    with card.memory.open("rb") as memory:
        return BANK - memory.read(BANK).count(0)
