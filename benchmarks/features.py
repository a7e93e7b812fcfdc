"""Memory by feature: what each takes at once after a pod's life, and again after a while.

All of them are one card of four regions, after a first start: every region is scrubbed, a pod is
allocated, programmed and released, and the process is watched from then on, how often it wakes too.
By DRA a claim is prepared and unprepared. Pages of files that several processes use (the
interpreter, libcrypto) count as a whole in RSS and by shares in PSS.
"""

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from dra_plugin import dra
from figures import Figure, Goal
from kubelet import listed
from node import CARDS, REGIONS, Node
from plugin import Plugin, memory_of, switches_of
from reference import Echo

AFU_ID = f"{7:032x}"


@dataclass(frozen=True, slots=True)
class Feature:
    """A way to run the plugin.

    Attributes:
        name: of the row.
        settings: beyond the usual ones.
        most: MiB that the project allows; None: nothing said.
        scraped: asked for its metrics and its page.
        signed: every bitstream has a signature.
    """

    name: str
    settings: dict[str, str]
    most: float | None = None
    scraped: bool = False
    signed: bool = False


FEATURES = (
    Feature("device-plugin, no HTTP", {"FPGA_PLUGIN_HTTP_ADDRESS": ""}, 32),
    Feature("device-plugin", {}, 32),
    Feature("and page and metrics asked for", {"FPGA_PLUGIN_STATUS_PAGE": "true"}, scraped=True),
    Feature("and trust=signed", {"FPGA_PLUGIN_TRUST": "signed"}, signed=True),
)


def memory(python: Path, folder: Path, store: Path, seconds: float) -> list[Figure]:
    """All features side by side, for `seconds`."""
    with ExitStack() as stack:
        echo = stack.enter_context(Echo(python, folder / "memory-echo.sock"))
        for _ in range(100):
            echo.allocate()
        bare = echo.memory()[0]
        rows: list[tuple[str, float | None, int]] = []
        for number, feature in enumerate(FEATURES):
            (folder / f"memory-{number}").mkdir()
            node = Node(
                folder / f"memory-{number}",
                store / f"memory-{number}",
                python,
                count=1,
                pr_seconds=0.01,
            )
            stack.callback(node.kubelet.close)
            plugin = stack.enter_context(_lived(node, feature))
            rows.append((feature.name, feature.most, plugin.pid))
        rows.append(("dra", 44, stack.enter_context(dra(python))))
        pids = [pid for _, _, pid in rows]
        at_once, woken = [memory_of(pid) for pid in pids], [switches_of(pid) for pid in pids]
        time.sleep(seconds)
        later = [memory_of(pid) for pid in pids]
        wakes = [switches_of(pid) - past for pid, past in zip(pids, woken, strict=True)]
    figures = []
    for (name, most, _), (begun, _), (rss, pss), count in zip(
        rows, at_once, later, wakes, strict=True
    ):
        figures += [
            Figure("memory by feature", f"{name}, RSS at once", begun, "MiB", Goal(most), bare),
            Figure(
                "memory by feature",
                f"{name}, RSS after {seconds:g} s",
                rss,
                "MiB",
                Goal(most),
                bare,
            ),
            Figure("memory by feature", f"{name}, PSS then", pss, "MiB"),
            Figure(
                "memory by feature", f"{name}, wake-ups", count * 60 / seconds, "/min", Goal(0, 300)
            ),
        ]
    return figures


@contextmanager
def _lived(node: Node, feature: Feature) -> Iterator[Plugin]:
    """A plugin that saw one pod's life."""
    node.extra = dict(feature.settings)
    node.add_bitstream(AFU_ID, 8)
    if feature.signed:
        _sign(node)
    region, card = node.regions[0], node.cards[0]
    with node.start() as plugin:
        node.wait_clean()
        began = time.monotonic()
        node.allocate(REGIONS, region)
        node.prestart(REGIONS, region, AFU_ID)
        node.deallocate(REGIONS, region)
        node.kubelet.wait_list(CARDS, listed(card, healthy=True), since=began)
        if feature.scraped:
            plugin.scrape()
            plugin.scrape("/", "text/html")
        yield plugin


def _sign(node: Node) -> None:
    """Sign what is in the store with a new key, and have the plugin trust it."""
    key = Ed25519PrivateKey.generate()
    keys, private = node.folder / "keys", node.folder / "key.pem"
    keys.mkdir()
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    (keys / "operator.pem").write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    program = str(node.python.parent / "fpga-plugin")
    sign = [program, "bitstream", "sign", "--key", str(private)]
    for file in sorted(node.store.glob("*/*.gbs")):
        subprocess.run([*sign, str(file)], check=True, stdout=subprocess.DEVNULL)
    manifest = [*sign, "--manifest", "--dir", str(node.store)]
    subprocess.run(manifest, check=True, stdout=subprocess.DEVNULL)
    node.extra["FPGA_PLUGIN_KEYS_DIR"] = str(keys)
