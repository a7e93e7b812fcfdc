"""`deploy/examples/store/fetch.sh`, with a stand-in for oras that has a folder for a registry."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from daemon_support import ROOT
from doubles.samples import copy_samples

from fpga_plugin.bitstreams.store import Store

EXAMPLE = ROOT / "deploy/examples/store"

ORAS = """\
#!/bin/sh
set -eu
case "$1" in
manifest) cat "$REGISTRY/manifest";;
pull) mkdir "$3"; cp -r "$REGISTRY/files/." "$3"; test ! -e "$REGISTRY/breaks";;
esac
"""


class Site:
    def __init__(self, folder: Path) -> None:
        self.registry, self.store = folder / "registry", folder / "store"
        self.store.mkdir()
        copy_samples(self.registry / "files")
        self.bin = folder / "bin"
        self.bin.mkdir()
        (self.bin / "oras").write_text(ORAS)
        (self.bin / "oras").chmod(0o755)
        self.pushes("v1")

    def pushes(self, version: str, size: int = 1000) -> None:
        layers = [{"digest": version, "size": size}, {"digest": "x", "size": 5}]
        (self.registry / "manifest").write_text(json.dumps({"layers": layers}))

    def fetches(self) -> subprocess.CompletedProcess[str]:
        where = {"REGISTRY": self.registry, "STORE": self.store, "REFERENCE": "h.example/s:v1"}
        return subprocess.run(
            ["sh", EXAMPLE / "fetch.sh"],
            env={"PATH": f"{self.bin}:{os.environ['PATH']}"}
            | {name: str(value) for name, value in where.items()},
            capture_output=True,
            text=True,
            check=False,
        )

    def found(self) -> set[str]:
        return {
            entry.path.removeprefix(f"{self.store}/") for entry in Store(str(self.store)).list()
        }


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def pushed(site: Site) -> set[str]:
    files = site.registry / "files"
    return {str(path.relative_to(files)) for path in files.glob("*/*")}


def test_the_store_becomes_what_the_registry_has_and_follows_it(site: Site) -> None:
    assert site.fetches().returncode == 0
    assert site.found() == pushed(site)
    assert not any(path.stat().st_mode & 0o022 for path in site.store.rglob("..*/*/*.gbs"))
    gone = next((site.registry / "files").glob("*/blank.gbs")).parent
    shutil.rmtree(gone)
    assert site.fetches().stdout == "", "nothing was pushed"
    site.pushes("v2")
    assert site.fetches().returncode == 0
    assert site.found() == pushed(site)
    assert not (site.store / gone.name).is_symlink()
    assert len([path for path in site.store.glob("..*") if not path.is_symlink()]) == 1


@pytest.mark.parametrize("what", ["breaks", "no room", "foreign"])
def test_what_cannot_be_fetched_leaves_the_store_as_it_was(site: Site, what: str) -> None:
    site.fetches()
    before = site.found()
    link = os.readlink(site.store / "..data")
    site.pushes("v2", size=1 << 50 if what == "no room" else 1000)
    if what == "breaks":
        (site.registry / "breaks").touch()
    if what == "foreign":
        (site.store / "mine").mkdir()
    done = site.fetches()
    assert done.returncode != 0
    said = {"breaks": "", "no room": "64 MiB have to stay free", "foreign": "is not of this script"}
    assert said[what] in done.stderr
    assert (site.found(), os.readlink(site.store / "..data")) == (before, link)


def test_a_run_ends_what_another_began(site: Site) -> None:
    site.fetches()
    for link in site.store.glob("[!.]*"):
        link.unlink()
    (site.store / "..0123456789abcdef").mkdir()
    (site.store / "..data.new").symlink_to("nowhere")
    site.pushes("v2")
    assert site.fetches().returncode == 0
    assert site.found() == pushed(site)
    assert len([path for path in site.store.glob("..*") if not path.is_symlink()]) == 1


def test_the_daemonset_runs_the_script_where_the_plugin_has_its_store() -> None:
    spec = yaml.safe_load((EXAMPLE / "daemonset.yaml").read_text())["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    values = yaml.safe_load((ROOT / "deploy/helm/fpga-plugin/values.yaml").read_text())
    assert volumes[mounts[env["STORE"]]]["hostPath"]["path"] == values["paths"]["bitstreams"]
    assert "/script/fetch.sh" in container["command"][-1]
    assert volumes[mounts[env["DOCKER_CONFIG"]]]["secret"]["items"][0]["path"] == "config.json"
