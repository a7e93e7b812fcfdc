"""What `make release` refuses to sign, with programs that play buildah and helm.

With the real ones and a real registry: tests/image/test_publish.py.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "deploy/release/release.py"
_spec = importlib.util.spec_from_file_location("release_script", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
release = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(release)

IMAGE_ID = "1f" * 32
DIGEST = "sha256:" + "2e" * 32

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)
    return done.stdout.decode().strip()


class Scene:
    """A clone of one commit, an image that says of what it was built, and what was called."""

    def __init__(self, folder: Path) -> None:
        self.clone, self.folder = folder / "clone", folder
        self.clone.mkdir()
        (self.clone / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
        git(self.clone, "init", "--quiet")
        git(self.clone, "add", "pyproject.toml")
        git(self.clone, "commit", "--quiet", "--message", "one")
        self.commit = git(self.clone, "rev-parse", "HEAD")
        (folder / "sbom.json").write_text("{}")
        key = folder / "key.pem"
        subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
        self.program(
            "buildah",
            f'[ "$1" = inspect ] && cat {folder}/inspected && exit\n'
            "for word; do case $word in\n"
            f'--digestfile=*) echo {DIGEST} >"${{word#*=}}";; esac; done',
        )
        self.program(
            "helm", f'[ "$1" = package ] && touch "$4/fpga-plugin-1.2.3.tgz"\necho {DIGEST}'
        )
        self.labels({release.REVISION: self.commit})

    def program(self, name: str, text: str) -> None:
        path = self.folder / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >>{self.folder}/calls\n{text}\n')
        path.chmod(0o755)

    def labels(self, labels: dict[str, str] | None) -> None:
        told = {"FromImageID": IMAGE_ID, "OCIv1": {"config": {"Labels": labels}}}
        (self.folder / "inspected").write_text(json.dumps(told))

    @property
    def pushed(self) -> list[str]:
        """The words of each push."""
        calls = (self.folder / "calls").read_text().splitlines()
        return [one for one in calls if " push " in one]

    def publish(self) -> dict[str, str]:
        made = release.Release(
            registry="registry.example.com/fpga",
            image="fpga-plugin:test",
            key=self.folder / "key.pem",
            output=self.folder / "output",
            buildah=[str(self.folder / "buildah")],
            helm=str(self.folder / "helm"),
            auth=None,
            ca=None,
            plain_http=False,
            sbom=self.folder / "sbom.json",
        )
        told: dict[str, str] = made.publish()
        return told


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    made = Scene(tmp_path)
    monkeypatch.setattr(release, "ROOT", made.clone)
    return made


def test_an_image_of_this_commit_is_pushed_by_its_id_and_signed(scene: Scene) -> None:
    told = scene.publish()
    assert told["commit"] == scene.commit
    image, chart = scene.pushed
    assert f" {IMAGE_ID} docker://registry.example.com/fpga/fpga-plugin:1.2.3" in image
    assert "fpga-plugin:test" not in image, "the name may stand for another image by now"
    assert "oci://registry.example.com/fpga/charts" in chart
    statement = json.loads((scene.folder / "output/provenance.json").read_text())
    of = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert of == [{"digest": {"gitCommit": scene.commit}}]


@pytest.mark.parametrize("labels", [None, {}, {release.REVISION: ""}, {release.REVISION: "main"}])
def test_an_image_that_names_no_commit_is_refused(
    scene: Scene, labels: dict[str, str] | None
) -> None:
    scene.labels(labels)
    with pytest.raises(release.ReleaseError, match="does not say which commit"):
        scene.publish()
    assert not scene.pushed


def test_an_image_of_another_commit_is_refused(scene: Scene) -> None:
    scene.labels({release.REVISION: "a" * 40})
    with pytest.raises(
        release.ReleaseError, match=f"of commit a{{40}}, and this is {scene.commit}"
    ):
        scene.publish()
    assert not scene.pushed


def test_changes_that_are_in_no_commit_are_refused(scene: Scene) -> None:
    (scene.clone / "new").touch()
    with pytest.raises(release.ReleaseError, match="a release is a commit"):
        scene.publish()


def test_it_runs_on_the_standard_library_alone() -> None:
    """Nothing that somebody installed runs beside the signing key."""
    subprocess.run([sys.executable, "-I", "-S", SCRIPT, "--help"], check=True, capture_output=True)
    makefile = (SCRIPT.parents[2] / "Makefile").read_text()
    recipe = makefile.partition("\nrelease:")[2].partition("\n\n")[0]
    assert "python3 -I -S deploy/release/release.py" in recipe
    assert ".ci/setup" not in recipe
