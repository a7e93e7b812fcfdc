"""The chart's store as an image volume: a signed store from CI to a node's regions.

docs/bitstreams.md's own commands sign the store, push it to a real registry (a stand-in for
`docker` does that) and make the cluster's objects. Then containerd 2 pulls the image by its digest,
the real kubelet mounts it into the chart's pod, and the plugin judges what lies in it. `make
test-image` runs this.
"""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pod_plugin
import pytest
from control_plane import ControlPlane
from daemon_support import AFU, AFU_2, AFU_3, BLANK, ID, P0, P1, REGIONS, request
from doubles.real_registry import REGISTRY, Served, serve
from doubles.samples import SAMPLES, copy_samples
from machine import PLUGIN_IN_A_POD, REGISTRIES, Runtime, until
from node import Node, container
from pod_plugin import PodPlugin, plugin_of

ROOT = Path(__file__).parents[2]
KUBECTL = ROOT / ".cache/deploy/kubectl"
PLACE = "registry.example:5000"
"""The registry, as the document calls it."""

STORE = "srv/intel.com/fpga"
"""Where the plugin's pod has it."""

ADDED = "38d782e3b6125343b9342433e348ac4c/f7df405cbd7acf7222f144b0b93acd18.gbs"
CHANGED = f"{ID}/583046af95883bdc653bc8fcede570d756ac30d9.aocx"
OF_ANOTHER, FOR_ALL = f"{ID}/{AFU_2}.gbs", f"{ID}/{AFU_3}.gbs"
TAMPERED = {
    CHANGED: "its SHA-256 is",
    OF_ANOTHER: "belongs to user 1000",
    FOR_ALL: "may be written by anybody",
}
"""What somebody else did to the files, and what the plugin says of them."""
NOT_NAMED = {ADDED: "manifest.json does not name it"}

pytestmark = pytest.mark.skipif(
    not PLUGIN_IN_A_POD or not REGISTRY.exists() or not KUBECTL.exists(),
    reason="needs the image, a registry, helm and kubectl: make test-image",
)

DOCKER = """\
import ssl, sys
sys.path[:0] = {path!r}
from pathlib import Path
import httpx2
from doubles.real_registry import Served, USER
word, *words = sys.argv[1:]
reference = next(word for word in words if word.endswith("/fpga/store:v1"))
host = reference.partition("/")[0]
if word == "build":
    assert sys.stdin.read() == "FROM scratch\\nCOPY . /\\n"
    Path("built").write_text(words[-1])
elif word == "push":
    trusted = ssl.create_default_context(cafile={ca!r})
    url = f"https://{{host}}"
    store = Path(Path("built").read_text())
    with httpx2.Client(base_url=url, verify=trusted, auth=USER, trust_env=False) as http:
        Path("pushed").write_text(Served(host, None, None, http).push(store, "v1"))
else:
    assert words[:2] == ["--format", "{{{{index .RepoDigests 0}}}}"], words
    print(f"{{host}}/fpga/store@{{Path('pushed').read_text()}}")
"""


class Site:
    """A folder in which CI and an operator type the document's commands.

    Args:
        folder: for their files.
        registry: where the image goes.
        kubeconfig: of the cluster.
    """

    def __init__(self, folder: Path, registry: Served, kubeconfig: str) -> None:
        self.store = folder / "store"
        self._folder, self._registry = folder, registry
        copy_samples(self.store)
        for not_signed in ("manifest.json", ADDED):
            (self.store / not_signed).unlink()
        (folder / "deploy").symlink_to(ROOT / "deploy")
        (folder / "config.json").write_text(registry.auth.read_text())
        self.new_key()
        self._program("fpga-plugin", f'exec {sys.executable} -m fpga_plugin "$@"')
        self._program("kubectl", f'exec {KUBECTL} --kubeconfig {kubeconfig} "$@"')
        say = "import json, sys; print(json.dumps(sys.argv[1:]))"
        self._program("helm", f"exec {sys.executable} -c '{say}' \"$@\"")
        docker = folder / "docker.py"
        path = [str(ROOT / "tests"), str(ROOT)]
        docker.write_text(DOCKER.format(path=path, ca=str(registry.ca)))
        self._program("docker", f'exec {sys.executable} {docker} "$@"')
        text = (ROOT / "docs/bitstreams.md").read_text()
        part = text.partition("\n### From CI to the nodes, signed\n")[2].partition("\n### ")[0]
        blocks = re.findall(r"^```sh\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
        self.sign, self.once, self.upgrade = blocks

    def _program(self, name: str, line: str) -> None:
        path = self._folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)

    def new_key(self) -> None:
        """Another private key."""
        self.types("openssl genpkey -algorithm ed25519 -out private.pem 2>&1")

    def types(self, commands: str) -> str:
        """Commands, by bash; what they said."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands.replace(PLACE, self._registry.host)],
            cwd=self._folder,
            env=os.environ
            | {"PATH": f"{self._folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def signs(self) -> str:
        """What CI does; the image that it made."""
        self.types(self.sign)
        return (self._folder / "reference").read_text().strip()

    def values(self) -> dict[str, str]:
        """The chart's, of the document's `helm upgrade`."""
        words = json.loads(self.types(self.upgrade))
        sets = (word for flag, word in pairwise(words) if flag == "--set")
        return dict(word.split("=", 1) for word in sets)

    def tampered(self) -> str:
        """An image by somebody who has the registry's password, and no key of the site's."""
        bad = self._folder / "bad"
        shutil.copytree(self.store, bad)
        shutil.copy(SAMPLES / ADDED, bad / ADDED)
        (bad / CHANGED).write_bytes((bad / CHANGED).read_bytes()[:-1] + b"?")
        (bad / FOR_ALL).chmod(0o666)
        digest = self._registry.push(bad, "bad", {OF_ANOTHER: 1000})
        return f"{self._registry.host}/fpga/store@{digest}"


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Served]:
    with serve(tmp_path) as served:
        host = f'server = "https://{served.host}"\n[host."https://{served.host}"]\n'
        folder = REGISTRIES / served.host
        folder.mkdir(parents=True)
        (folder / "hosts.toml").write_text(f'{host}ca = "{served.ca}"\n')
        yield served


@pytest.fixture
def node(runtime: Runtime) -> Iterator[Node]:
    pod_plugin.load_image(runtime)
    control_plane = ControlPlane()
    node = Node(runtime, "1x2", {}, control_plane)
    try:
        yield node
    finally:
        node.close()
        control_plane.end()


def replace(node: Node, reference: str) -> PodPlugin:
    """`helm upgrade` to another image: the plugin's pod is another one."""
    plugin_of(node).delete()
    node.chart["bitstreams.volume.image.reference"] = reference
    node.start_plugin()
    return plugin_of(node)


def test_a_node_programs_what_ci_signed_and_pushed_and_nothing_else(
    node: Node, registry: Served, tmp_path: Path
) -> None:
    control_plane = node.kubelet.control_plane
    assert control_plane is not None
    pod_plugin.make_namespace(control_plane)
    tmp_path.chmod(stat.S_IRWXU)
    site = Site(tmp_path, registry, control_plane.kubeconfig("admin"))
    good = site.signs()
    site.types(site.once)
    node.chart |= site.values()
    assert node.chart["bitstreams.volume.image.reference"] == good
    node.up()
    (volume,) = (v for v in plugin_of(node).pod.seen()["spec"]["volumes"] if "image" in v)
    assert volume["image"] == {"reference": good, "pullPolicy": "IfNotPresent"}
    store = Path("/proc", str(plugin_of(node).pid()), "root", STORE)
    assert {path.stat().st_uid for path in store.rglob("*")} == {0}
    with pytest.raises(OSError, match="Read-only file system"):
        (store / "file").touch()
    tenant = node.pod("tenant", container(env=request()))
    ran = tenant.until_running()
    assert node.afu(P0) == AFU

    # Whoever has the registry's password cannot change, add or give away a file.
    replace(node, site.tampered())
    node.until_offered(REGIONS, [P0, P1])
    for trust in ("any", "digest", "signed"):
        found = refused(node, trust)
        expected = TAMPERED if trust == "any" else TAMPERED | NOT_NAMED
        assert found.keys() == expected.keys()
        assert all(expected[file] in found[file] for file in found), found

    # Nor can he sign.
    site.new_key()
    replace(node, site.signs())
    node.until_offered(REGIONS, [P0])
    assert not refused(node, "digest")
    assert refused(node, "signed").keys() == {
        str(path.relative_to(site.store)) for path in site.store.glob("*/*")
    }

    # What cannot be pulled keeps the plugin from starting; pods run on, and nothing is scrubbed.
    life = replace(node, f"{registry.host}/fpga/store@sha256:{'0' * 64}")
    message = life.pod.until_waiting("ErrImagePull", "fpga-plugin")
    assert "fpga/store@sha256:000" in message
    life.pod.until_waiting("ImagePullBackOff", "fpga-plugin")
    node.until_offered(REGIONS, [])
    assert tenant.until_running() == ran
    tenant.delete()
    tenant.until_gone()
    assert node.afu(P0) == AFU

    # A node that has an image asks no registry.
    registry.end()
    replace(node, good)
    until(lambda: node.afu(P0) == BLANK, "scrubbed")
    node.until_offered(REGIONS, [P0, P1])


def refused(node: Node, trust: str) -> dict[str, str]:
    """Which files of its store the plugin refuses, and why.

    Its command says so in its pod, as on a node with real cards: with simulated ones it does not
    look at who may write a file.
    """
    process = str(plugin_of(node).pid())
    done = subprocess.run(
        [
            *("nsenter", "--target", process, "--mount", "--pid", "/usr/local/bin/fpga-plugin"),
            *("bitstream", "verify", "--trust", trust, "--keys", "/etc/fpga-plugin/keys"),
        ],
        env={"FPGA_PLUGIN_BITSTREAM_DIR": f"/{STORE}"},
        capture_output=True,
        text=True,
        check=False,
    )
    return dict(re.findall(rf"^fpga-plugin: /{STORE}/(\S+): (.*)$", done.stderr, re.MULTILINE))
