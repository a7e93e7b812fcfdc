"""`make release` against a real registry: what it pushes is what it signs. `make test-image`."""

import dataclasses
import hashlib
import importlib.util
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from doubles.real_registry import REGISTRY, Served, serve

import fpga_plugin

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / ".cache/image"
HELM = ROOT / ".cache/deploy/helm"

pytestmark = pytest.mark.skipif(
    not REGISTRY.exists() or not HELM.exists() or not (IMAGES / "built").exists(),
    reason="image, helm or registry are not built: make test-image",
)

_spec = importlib.util.spec_from_file_location("release", ROOT / "deploy/release/release.py")
assert _spec is not None
assert _spec.loader is not None
release = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(release)


@pytest.fixture(scope="module")
def registry(tmp_path_factory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("registry")) as served:
        yield served


@pytest.fixture
def key(tmp_path) -> Path:
    path = tmp_path / "key.pem"
    path.write_bytes(
        Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return path


@pytest.fixture
def wanted(registry: Served, tmp_path, key, monkeypatch):
    storage = ["--storage-driver", "vfs", "--root", str(IMAGES / "storage")]
    (tmp_path / "sbom.json").write_text('{"bomFormat": "CycloneDX"}')
    monkeypatch.setenv("BUILDAH_ISOLATION", "chroot")
    return release.Release(
        registry=f"{registry.host}/fpga",
        image="localhost/fpga-plugin:test",
        key=key,
        output=tmp_path / "release",
        buildah=["buildah", *storage, "--runroot", str(IMAGES / "run")],
        helm=str(HELM),
        auth=registry.auth,
        ca=registry.ca,
        plain_http=False,
        sbom=tmp_path / "sbom.json",
    )


def test_what_is_pushed_is_what_is_signed(registry: Served, wanted, tmp_path, monkeypatch) -> None:
    version = fpga_plugin.__version__
    # The image of this tier was built of some commit and whatever lay around; the refusal names it.
    with pytest.raises(release.ReleaseError, match="was built of commit") as caught:
        wanted._built_of("c" * 40)
    (commit,) = re.findall("commit ([0-9a-f]{40}),", str(caught.value))
    checked = version, commit, wanted._built_of(commit)
    monkeypatch.setattr(release.Release, "check", lambda _self: checked)
    told = wanted.publish()
    for name, repository in (("image", "fpga/fpga-plugin"), ("chart", "fpga/charts/fpga-plugin")):
        digest = told[name].partition("@")[2]
        kinds = {"Accept": "application/vnd.oci.image.manifest.v1+json"}
        for reference in (digest, version):
            answer = registry.http.get(f"/v2/{repository}/manifests/{reference}", headers=kinds)
            assert answer.status_code == 200, answer.text
            assert f"sha256:{hashlib.sha256(answer.content).hexdigest()}" == digest
    out = wanted.output
    assert json.loads((out / "release.json").read_text()) == told
    subjects = json.loads((out / "provenance.json").read_text())["subject"]
    assert [f"{s['name']}@sha256:{s['digest']['sha256']}" for s in subjects] == [
        told["image"],
        told["chart"],
    ]
    subprocess.run(
        ["openssl", "pkey", "-in", wanted.key, "-pubout", "-out", tmp_path / "pub.pem"], check=True
    )
    checked = ["-in", out / "SHA256SUMS", "-sigfile", out / "SHA256SUMS.sig"]
    verify = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", tmp_path / "pub.pem", "-rawin"]
    subprocess.run([*verify, *checked], check=True, capture_output=True)
    subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=out, check=True, capture_output=True)
    listed = {line.split()[1] for line in (out / "SHA256SUMS").read_text().splitlines()}
    assert listed == {"release.json", "provenance.json", "sbom.json", f"fpga-plugin-{version}.tgz"}
    (out / "release.json").write_text("{}")
    changed = subprocess.run(
        ["sha256sum", "--check", "SHA256SUMS"], cwd=out, check=False, capture_output=True
    )
    assert changed.returncode == 1


def test_nothing_is_pushed_without_what_a_release_needs(
    registry: Served, wanted, monkeypatch
) -> None:
    known = registry.http.get("/v2/_catalog").json()
    plain = release._run
    states = {"dirty": " M README.md", "clean": ""}
    state = "dirty"

    def run(*command: str, both: bool = False) -> str:
        return states[state] if command[1:2] == ("status",) else plain(*command, both=both)

    monkeypatch.setattr(release, "_run", run)
    with pytest.raises(release.ReleaseError, match="a release is a commit"):
        wanted.publish()
    state = "clean"
    wanted.key.write_text("no key")
    with pytest.raises(release.ReleaseError, match="no private key"):
        wanted.publish()
    wanted.sbom.unlink()
    with pytest.raises(release.ReleaseError, match="make audit"):
        wanted.publish()
    assert not wanted.output.exists()
    assert registry.http.get("/v2/_catalog").json() == known


def test_an_image_that_comes_from_another_machine_says_of_which_commit_it_is(
    wanted, tmp_path
) -> None:
    """As .github/workflows/release.yml hands it on: an archive, pulled where the key is."""
    archive = f"oci-archive:{tmp_path}/image.tar"
    push = [*wanted.buildah, "push", "--quiet", wanted.image, f"{archive}:fpga-plugin:release"]
    subprocess.run(push, check=True, capture_output=True)
    there = ["buildah", "--storage-driver", "vfs", "--root", f"{tmp_path}/storage"]
    there += ["--runroot", f"{tmp_path}/run"]
    subprocess.run([*there, "pull", archive], check=True, capture_output=True)
    pulled = dataclasses.replace(wanted, buildah=there, image="localhost/fpga-plugin:release")
    with pytest.raises(release.ReleaseError, match="was built of commit") as caught:
        pulled._built_of("c" * 40)
    (commit,) = re.findall("commit ([0-9a-f]{40}),", str(caught.value))
    assert pulled._built_of(commit) == wanted._built_of(commit), "the same image, by its content"
