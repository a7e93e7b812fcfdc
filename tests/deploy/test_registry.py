"""`fpga-plugin bitstream pull` from a real registry, with TLS and a password, as a Kubernetes
pull secret has it: `make test-deploy`."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from doubles.real_registry import REGISTRY, Served, serve
from doubles.samples import copy_samples

pytestmark = pytest.mark.skipif(
    not REGISTRY.exists(), reason="the registry is not built: make test-deploy"
)


@pytest.fixture(scope="module")
def registry(tmp_path_factory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("registry")) as served:
        yield served


def test_a_store_is_pushed_pulled_and_brought_up_to_date(registry: Served, tmp_path) -> None:
    copy_samples(tmp_path / "source")
    first = registry.push(tmp_path / "source", "v1")
    store = tmp_path / "store"
    done = registry.pull(f"fpga/store@{first}", store, "--auth", registry.auth, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["digest"], told["changed"]) == (first, True)
    verify = [sys.executable, "-m", "fpga_plugin", "bitstream", "verify", "--trust", "digest"]
    listed = subprocess.run([*verify, "--dir", store], capture_output=True, text=True, check=False)
    assert listed.returncode == 0, listed.stderr

    gone = next((tmp_path / "source").glob("*/blank.gbs")).relative_to(tmp_path / "source")
    (tmp_path / "source" / gone).unlink()
    (tmp_path / "source/manifest.json").unlink()
    second = registry.push(tmp_path / "source", "v1")
    done = registry.pull("fpga/store:v1", store, "--auth", registry.auth, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["digest"], told["fetched"], told["changed"]) == (second, 0, True)
    assert not (store / gone).exists()


def test_nobody_pulls_without_the_password_or_what_is_not_there(registry: Served, tmp_path) -> None:
    copy_samples(tmp_path / "source")
    registry.push(tmp_path / "source", "v2")
    done = registry.pull("fpga/store:v2", tmp_path / "store")
    assert done.returncode == 1
    assert "--auth names a file" in done.stderr
    done = registry.pull("fpga/store:none", tmp_path / "store", "--auth", registry.auth)
    assert done.returncode == 1
    assert "not there" in done.stderr
    assert not [each for each in (tmp_path / "store").iterdir() if each.name != "..pull-lock"]
