"""Publishes a release: image and chart to a registry, and what proves where they come from.

`make release REGISTRY=registry.example.com/fpga KEY=private.pem IMAGE=...` after `make image`. It
writes to .cache/release (OUTPUT):

    release.json            version, commit, and the digests of image and chart in the registry
    sbom.json               what the image takes from PyPI, CycloneDX (from `make audit`)
    provenance.json         an in-toto statement (SLSA provenance 1) about image and chart
    fpga-plugin-X.Y.Z.tgz   the chart
    SHA256SUMS, SHA256SUMS.sig   of all of them, signed with KEY (Ed25519)

Whoever has the public key checks it with `openssl pkeyutl -verify -pubin -inkey PUB -rawin -in
SHA256SUMS -sigfile SHA256SUMS.sig`, then `sha256sum --check SHA256SUMS`.

Nothing is pushed before everything that can be checked without the registry was: the image says in
its label which commit it was built of, and that has to be the commit that the provenance names.

It runs beside the signing key, so it imports the standard library alone.
"""

import argparse
import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/fpga-plugin"
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
SOURCE_IS_DIRTY = "the tree has changes that are in no commit: a release is a commit"
REVISION = "org.opencontainers.image.revision"
"""The image's label with its commit (OCI image specification, annotations)."""

COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class ReleaseError(Exception):
    """What keeps the release from being made, for the one who makes it."""


@dataclass(frozen=True)
class Release:
    """What is to be published, and how.

    Attributes:
        registry: host and namespace.
        image: name of the image as `make image` left it, in buildah's storage.
        key: private Ed25519 key in PEM.
        output: directory.
        buildah: the tool and its options.
        helm: the tool.
        auth: credentials as `buildah login` writes them; None: the tools' own.
        ca: certificates of the registry's authority; None: the system's.
        plain_http: the registry has no TLS.
        sbom: the bill of materials that `make audit` made.
    """

    registry: str
    image: str
    key: Path
    output: Path
    buildah: Sequence[str]
    helm: str
    auth: Path | None
    ca: Path | None
    plain_http: bool
    sbom: Path

    def check(self) -> tuple[str, str, str]:
        """Version and commit of the release, and the id of the image that was built of it.

        Raises:
            ReleaseError: something is missing.
        """
        if _run("git", "status", "--porcelain"):
            raise ReleaseError(SOURCE_IS_DIRTY)
        version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
        if not self.sbom.exists():
            raise ReleaseError(f"{self.sbom} is missing: run `make audit` first")
        for program in (self.buildah[0], self.helm, "openssl"):
            if shutil.which(program) is None:
                raise ReleaseError(f"{program} is not here: install it, or say where it is")
        try:
            _run("openssl", "pkey", "-in", str(self.key), "-noout")
        except ReleaseError:
            raise ReleaseError(f"{self.key} is no private key (openssl genpkey)") from None
        commit = _run("git", "rev-parse", "HEAD")
        return version, commit, self._built_of(commit)

    def _built_of(self, commit: str) -> str:
        """The image's id; its name may stand for another image by the time of the push.

        Raises:
            ReleaseError: it was built of something else, or does not say of what.
        """
        told = json.loads(_run(*self.buildah, "inspect", "--type", "image", self.image))
        labels = told["OCIv1"].get("config", {}).get("Labels") or {}
        revision = labels.get(REVISION, "")
        if not COMMIT.fullmatch(revision):
            raise ReleaseError(
                f"{self.image} does not say which commit it was built of (label {REVISION}): run"
                " `make image` in a clean clone"
            )
        if revision != commit:
            raise ReleaseError(
                f"{self.image} was built of commit {revision}, and this is {commit}: run `make"
                " image` here"
            )
        return str(told["FromImageID"])

    def push_image(self, image: str, version: str) -> str:
        """Returns the image's digest in the registry.

        Args:
            image: its id.
            version: its tag there.
        """
        options = [f"--tls-verify={'false' if self.plain_http else 'true'}"]
        options += [f"--authfile={self.auth}"] if self.auth else []
        with tempfile.TemporaryDirectory() as scratch:
            if self.ca is not None:  # the tool takes a directory of *.crt
                shutil.copyfile(self.ca, Path(scratch, "ca.crt"))
                options.append(f"--cert-dir={scratch}")
            told = Path(scratch, "digest")
            to = f"docker://{self.registry}/fpga-plugin:{version}"
            _run(*self.buildah, "push", "--quiet", *options, f"--digestfile={told}", image, to)
            return _digest(told.read_text())

    def package_chart(self, version: str) -> Path:
        """The chart as a file."""
        _run(self.helm, "package", str(CHART), "--destination", str(self.output))
        return self.output / f"fpga-plugin-{version}.tgz"

    def push_chart(self, chart: Path) -> str:
        """Returns the chart's digest in the registry."""
        options = ["--plain-http"] if self.plain_http else []
        options += [f"--ca-file={self.ca}"] if self.ca else []
        options += [f"--registry-config={self.auth}"] if self.auth else []
        to = f"oci://{self.registry}/charts"
        return _digest(_run(self.helm, "push", *options, str(chart), to, both=True))

    def sign(self) -> None:
        """Sums of all files of the output, and a signature of the sums."""
        files = sorted(path for path in self.output.iterdir() if not path.name.startswith("SHA256"))
        sums = "".join(f"{_sha256(path)}  {path.name}\n" for path in files)
        (self.output / "SHA256SUMS").write_text(sums)
        sign = ["openssl", "pkeyutl", "-sign", "-rawin", "-inkey", str(self.key)]
        _run(*sign, "-in", str(self.output / "SHA256SUMS"), "-out", str(self._signature))

    @property
    def _signature(self) -> Path:
        return self.output / "SHA256SUMS.sig"

    def publish(self) -> dict[str, str]:
        """Do all of it; returns what release.json says.

        Raises:
            ReleaseError: it could not be done.
        """
        version, commit, image = self.check()
        if self.output.exists():
            shutil.rmtree(self.output)
        self.output.mkdir(parents=True)
        shutil.copyfile(self.sbom, self.output / "sbom.json")
        chart = self.package_chart(version)
        image_digest = self.push_image(image, version)
        told = {
            "version": version,
            "commit": commit,
            "image": f"{self.registry}/fpga-plugin@{image_digest}",
            "chart": f"{self.registry}/charts/fpga-plugin@{self.push_chart(chart)}",
        }
        _write(self.output / "release.json", told)
        _write(self.output / "provenance.json", provenance(told))
        self.sign()
        return told


def provenance(told: dict[str, str]) -> dict[str, object]:
    """An in-toto statement with SLSA's provenance predicate: what was built of which commit."""
    subjects = [told[name].partition("@sha256:") for name in ("image", "chart")]
    now = datetime.now(UTC).replace(microsecond=0).isoformat()
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, _, digest in subjects],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "fpga-plugin/make-release/v1",
                "externalParameters": {"version": told["version"]},
                "resolvedDependencies": [{"digest": {"gitCommit": told["commit"]}}],
            },
            "runDetails": {
                "builder": {"id": "fpga-plugin/deploy/release/release.py"},
                "metadata": {"finishedOn": now},
            },
        },
    }


def _digest(text: str) -> str:
    found = DIGEST.search(text)
    if found is None:
        raise ReleaseError(f"the registry told no digest: {text.strip()[:200]}")
    return found.group()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _run(*command: str, both: bool = False) -> str:
    """What a program prints, with its errors if `both` (helm tells digests there)."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ReleaseError(f"{Path(command[0]).name}: {done.stderr.strip()[-500:]}")
    return (done.stdout + done.stderr if both else done.stdout).strip()


def main(arguments: Sequence[str]) -> int:
    """The command line; 0, or 1 with what is wrong."""
    parser = argparse.ArgumentParser(prog="release", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--registry", required=True, help="host and namespace")
    parser.add_argument("--image", required=True, help="the image that `make image` made")
    parser.add_argument("--key", required=True, type=Path, help="private Ed25519 key, PEM")
    parser.add_argument("--output", type=Path, default=ROOT / ".cache/release")
    parser.add_argument("--buildah", default="buildah", help="with options (default: %(default)s)")
    parser.add_argument("--helm", default="helm")
    parser.add_argument("--auth", type=Path, help="credentials for the registry")
    parser.add_argument("--ca", type=Path, help="certificates of the registry's authority")
    parser.add_argument("--plain-http", action="store_true", help="the registry has no TLS")
    parser.add_argument("--sbom", type=Path, default=ROOT / ".cache/audit/sbom.json")
    given = vars(parser.parse_args(arguments))
    release = Release(**{**given, "buildah": shlex.split(given["buildah"])})
    try:
        told = release.publish()
    except (ReleaseError, OSError) as error:
        sys.stderr.write(f"release: {error}\n")
        return 1
    for name, value in told.items():
        sys.stdout.write(f"{name}: {value}\n")
    sys.stdout.write(f"signed: {release.output}/SHA256SUMS.sig\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
