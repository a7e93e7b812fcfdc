"""The plugin behind the second door (DRA), after a claim's life, with an API server that answers.

Kubelet and the API server are the doubles of the integration tests. Where the benchmark may mount,
the plugin asks by TLS and with a service account, as in a pod; else with credentials in a file,
which takes yaml too (0.9 MiB).
"""

import asyncio
import contextlib
import io
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime import ROOT

from fpga_plugin.hardware.simulated.slots import card_at

NODES = "/api/v1/nodes"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"

_LIMIT = 60.0

_AS_IN_A_POD = """\
mount -t tmpfs none /run && mkdir -p /run/secrets/kubernetes.io/serviceaccount &&
cp "$1"/* /run/secrets/kubernetes.io/serviceaccount && shift && exec "$@"
"""
"""In a mount namespace of its own: /var/run is a link to /run."""


@contextmanager
def dra(python: Path) -> Iterator[int]:
    """The plugin's process id, once its slice is published and a claim has had its life."""
    sys.path[:0] = [str(ROOT / "tests" / "integration"), str(ROOT / "tests")]
    import daemon_support  # the harness of the integration tests, for what is said above
    from doubles.apiserver import ApiServerDouble
    from doubles.tls import certified
    from dra_support import DraNode

    started: list[subprocess.Popen[bytes]] = []
    wrapper: list[str] = []
    address: dict[str, str] = {}

    def launch(_wrapper: Sequence[str], env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [*wrapper, str(python.parent / "fpga-plugin"), "run"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**env, **address},
        )
        started.append(process)
        return process

    usual, daemon_support.launch = daemon_support.launch, launch
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    try:
        with (
            tempfile.TemporaryDirectory() as certificate,
            contextlib.redirect_stdout(io.StringIO()),  # the harness shows the log at the end
            DraNode("1x4", http_address="127.0.0.1:0", log_level="info") as node,
        ):
            api = ApiServerDouble(*certified(Path(certificate)))
            run(api.__aenter__())
            run(api.put(NODES, {"metadata": {"name": node.settings["NODE_NAME"], "uid": "1"}}))
            api.objects.setdefault(SLICES, {})
            if _may_mount():
                account = _account(node.folder / "account", api.authority)
                wrapper += ["unshare", "--mount", "sh", "-c", _AS_IN_A_POD, "sh", str(account)]
                address |= {
                    "KUBERNETES_SERVICE_HOST": "127.0.0.1",
                    "KUBERNETES_SERVICE_PORT": str(api.port),
                }
            node.set(
                kubeconfig="" if address else api.kubeconfig(node.folder), health_interval="30"
            )
            node.up()
            node.plugin.until_logged("serving metrics")
            until = time.monotonic() + _LIMIT
            while not api.objects[SLICES]:
                assert time.monotonic() < until, "no slice was published"
                time.sleep(0.05)
            region = f"{card_at(0)}-p0"
            claim = node.claim("claim", region, bitstream=daemon_support.AFU)
            stored = run(api.put(claim.path.rpartition("/")[0], claim.object()))
            claim.uid = stored["metadata"]["uid"]
            node.dra.prepare(claim)
            assert not node.dra.unprepare(claim)
            yield started[0].pid
            run(api.__aexit__(None, None, None))
    finally:
        daemon_support.launch = usual
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def _may_mount() -> bool:
    """Whether a mount namespace of its own is allowed here; root in a container may not."""
    try:
        subprocess.run(["unshare", "--mount", "true"], check=True, capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return False
    return True


def _account(folder: Path, authority: str) -> Path:
    """What kubelet mounts of a service account."""
    folder.mkdir()
    (folder / "token").write_text("t")
    (folder / "namespace").write_text("default")
    (folder / "ca.crt").write_bytes(Path(authority).read_bytes())
    return folder
