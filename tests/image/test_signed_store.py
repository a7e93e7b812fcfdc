"""docs/bitstreams.md's way of a signed store from CI to the nodes, by its own commands.

What CI and a cluster would do is done here: a stand-in for `oras` pushes to a real registry,
kubectl prints the objects, and helm renders the chart. Then the init container that helm rendered
pulls, with the keys and the password of those objects. `make test-image` runs it.
"""

import base64
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

ORAS = """\
import os, sys
sys.path[:0] = {path!r}
from pathlib import Path
import ssl, httpx2
from doubles.real_registry import Served, USER
words = [word for word in sys.argv[1:] if not word.startswith("--")]
assert words[:1] == ["push"] and "--format" in sys.argv, sys.argv
reference, *files = words[2:]
there = {{str(path) for path in Path().rglob("*") if path.is_file()}}
assert set(files) == there, there ^ set(files)
host, _, rest = reference.partition("/")
repository, _, tag = rest.partition(":")
assert repository == "fpga/store"
trusted = ssl.create_default_context(cafile={ca!r})
url = f"https://{{host}}"
with httpx2.Client(base_url=url, verify=trusted, auth=USER, trust_env=False, timeout=60) as http:
    print(Served(host, None, None, http).push(Path.cwd(), tag))
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
        oras = self.folder / "oras.py"
        path = [str(ROOT / "tests"), str(ROOT)]
        oras.write_text(ORAS.format(path=path, ca=str(self.registry.ca)))
        self._program("oras", f'exec {sys.executable} {oras} "$@"')

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

    def pulls(
        self, objects: list[dict[str, Any]], rendered: str
    ) -> subprocess.CompletedProcess[str]:
        """What a node's init container does, its volumes being folders."""
        node = self.folder / "node"
        node.mkdir(exist_ok=True)
        kinds = {one["kind"]: one for one in objects}
        made = next(o for o in yaml.safe_load_all(rendered) if o and o["kind"] == "DaemonSet")
        spec = made["spec"]["template"]["spec"]
        (pull,) = spec["initContainers"]
        at = {mount["name"]: mount["mountPath"] for mount in pull["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        (source,) = volumes["keys"]["projected"]["sources"]
        assert source["configMap"]["name"] == kinds["ConfigMap"]["metadata"]["name"]
        assert volumes["registry"]["secret"]["secretName"] == kinds["Secret"]["metadata"]["name"]
        files = {f"keys/{name}": text.encode() for name, text in kinds["ConfigMap"]["data"].items()}
        for name, text in kinds["Secret"]["data"].items():
            files[f"registry/{name}"] = base64.b64decode(text)
        for name, content in files.items():
            (node / name).parent.mkdir(exist_ok=True)
            (node / name).write_bytes(content)

        def here(text: str) -> str:
            for name, path in at.items():
                text = text.replace(path, str(node / name))
            return text

        (node / "state").mkdir(exist_ok=True)
        environment = {each["name"]: here(each["value"]) for each in pull["env"]}
        assert environment["FPGA_PLUGIN_TRUST"] == "signed"
        environment |= {
            "FPGA_PLUGIN_STATE_DIR": str(node / "state"),
            "FPGA_PLUGIN_BITSTREAM_DIR": str(node / "bitstreams"),
        }
        words = [here(word) for word in pull["args"] if word != "--or-keep"]
        return subprocess.run(
            [sys.executable, "-m", "fpga_plugin", *words, f"--ca={self.registry.ca}", "--json"],
            env=os.environ | environment,
            cwd=ROOT,
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


def test_nodes_pull_what_ci_signed_and_nothing_that_somebody_else_did(
    registry: Served, tmp_path: Path
) -> None:
    tmp_path.chmod(stat.S_IRWXU)
    site = Site(tmp_path, registry)
    sign, once, upgrade = blocks()
    site.types(sign)
    objects = decoded(site.types(once))
    done = site.pulls(objects, site.types(upgrade))
    assert done.returncode == 0, done.stderr
    digest = (tmp_path / "digest").read_text().strip()
    assert json.loads(done.stdout)["digest"] == digest
    store = tmp_path / "node/bitstreams"
    assert {path.name for path in (tmp_path / "store").glob("*/*.gbs")} <= {
        path.name for path in store.glob("*/*.gbs")
    }
    # Whoever has only the registry's password signs with another key: the store stays as it was.
    site.types("openssl genpkey -algorithm ed25519 -out private.pem")
    site.types(sign)
    assert (tmp_path / "digest").read_text().strip() != digest
    done = site.pulls(objects, site.types(upgrade))
    assert done.returncode == 1
    assert "sign" in done.stderr, done.stderr
    kept = json.loads((store / "manifest.json").read_text())
    assert kept != json.loads((tmp_path / "store/manifest.json").read_text())
