"""docs/bitstreams.md's way of a signed store from CI to the nodes, by its own commands.

What CI and a cluster would do is done here: a stand-in for `docker` pushes to a real registry,
kubectl prints the objects, and helm renders the chart. Then the image volume that helm rendered is
fetched by its digest, and judged with the keys of those objects. `make test-image` runs it.
"""

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from doubles.real_registry import REGISTRY, Served, serve
from doubles.samples import copy_samples

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".cache/deploy"
PLACE = "registry.example:5000"
"""The registry, as the document calls it."""

pytestmark = pytest.mark.skipif(
    not all(path.exists() for path in (REGISTRY, TOOLS / "helm", TOOLS / "kubectl")),
    reason="registry, helm or kubectl are not built: make test-image",
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


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("registry")) as served:
        yield served


def blocks() -> list[str]:
    text = (ROOT / "docs/bitstreams.md").read_text()
    part = text.partition("\n### From CI to the nodes, signed\n")[2].partition("\n### ")[0]
    return re.findall(r"^```sh\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)


@dataclass
class Site:
    """A folder in which CI and an operator type the document's commands."""

    folder: Path
    registry: Served

    def __post_init__(self) -> None:
        copy_samples(self.folder / "store")
        (self.folder / "store/manifest.json").unlink()
        (self.folder / "deploy").symlink_to(ROOT / "deploy")
        (self.folder / "config.json").write_text(self.registry.auth.read_text())
        subprocess.run(
            ["openssl", "genpkey", "-algorithm", "ed25519", "-out", self.folder / "private.pem"],
            check=True,
            capture_output=True,
        )
        ours = f'exec {sys.executable} -m fpga_plugin "$@"'

        self._program("fpga-plugin", ours)
        self._program("kubectl", f'exec {TOOLS / "kubectl"} "$@" --dry-run=client -o json')
        render = f'exec {TOOLS / "helm"} template fpga-plugin "$@" --set image.repository=x'
        self._program("helm", f"shift 2\n{render}")  # in place of `upgrade fpga-plugin`
        docker = self.folder / "docker.py"
        path = [str(ROOT / "tests"), str(ROOT)]
        docker.write_text(DOCKER.format(path=path, ca=str(self.registry.ca)))
        self._program("docker", f'exec {sys.executable} {docker} "$@"')

    def _program(self, name: str, line: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)

    def types(self, commands: str) -> str:
        text = commands.replace(PLACE, self.registry.host).replace(" --reset-then-reuse-values", "")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.folder,
            env=os.environ
            | {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def starts(
        self, objects: list[dict[str, Any]], rendered: str, node: Path
    ) -> subprocess.CompletedProcess[str]:
        """What a node's kubelet and plugin do with the store, its volumes being folders."""
        kinds = {one["kind"]: one for one in objects}
        made = next(o for o in yaml.safe_load_all(rendered) if o and o["kind"] == "DaemonSet")
        spec = made["spec"]["template"]["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        (source,) = volumes["keys"]["projected"]["sources"]
        assert source["configMap"]["name"] == kinds["ConfigMap"]["metadata"]["name"]
        assert spec["imagePullSecrets"] == [{"name": kinds["Secret"]["metadata"]["name"]}]
        env = {one["name"]: one.get("value") for one in spec["containers"][0]["env"]}
        assert env["FPGA_PLUGIN_TRUST"] == "signed"
        (node / "keys").mkdir(parents=True)
        for name, text in kinds["ConfigMap"]["data"].items():
            (node / "keys" / name).write_text(text)
        digest = volumes["bitstreams"]["image"]["reference"].partition("@")[2]
        self.registry.mount(digest, node / "store")
        words = ["verify", "--dir", "store", "--trust", "signed", "--keys", "keys"]
        return subprocess.run(
            [sys.executable, "-m", "fpga_plugin", "bitstream", *words],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            cwd=node,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )


def decoded(text: str) -> list[dict[str, Any]]:
    """One JSON object after the other."""
    decoder, found = json.JSONDecoder(), []
    while text := text.strip():
        one, end = decoder.raw_decode(text)
        found.append(one)
        text = text[end:]
    return found


def test_nodes_take_what_ci_signed_and_nothing_that_somebody_else_did(
    registry: Served, tmp_path: Path
) -> None:
    tmp_path.chmod(stat.S_IRWXU)
    site = Site(tmp_path, registry)
    sign, once, upgrade = blocks()
    site.types(sign)
    objects = decoded(site.types(once))
    done = site.starts(objects, site.types(upgrade), tmp_path / "one")
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "reference").read_text()
    # Whoever has only the registry's password signs with another key: no file of his is taken.
    site.types("openssl genpkey -algorithm ed25519 -out private.pem")
    site.types(sign)
    assert (tmp_path / "reference").read_text() != reference
    done = site.starts(objects, site.types(upgrade), tmp_path / "two")
    assert done.returncode == 1
    assert "sign" in done.stdout + done.stderr
