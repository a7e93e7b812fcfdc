"""What the image takes from PyPI, checked: `audit.py LOCK OUTPUT`, by way of `make audit`.

Three things, each of which can fail alone:

1. The index still serves the very files that the lock names by their hashes.
2. None of these versions has a known vulnerability, as pip-audit learns it from the index. It calls
   a package that it cannot ask about "skipped" and ends with 0 all the same: here that is no
   success, but an answer of its own.
3. A bill of materials in CycloneDX's form (OUTPUT/sbom.json), by cyclonedx-bom.

Exit codes: 0 checked and none known; 1 a file or a version is bad; 3 it could not be found out.
What the image takes from Debian is not in it: /var/lib/dpkg/status.d of the image has that, for
scanners.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.markers import Marker

BAD = 1
UNKNOWN = 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of one of the three."""

    code: int
    lines: tuple[str, ...]


def pins(lock: str) -> dict[str, str]:
    """Versions by package."""
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", lock, re.MULTILINE))


def installed(lock: str) -> dict[str, str]:
    """Those of the pins that are installed here, and so asked about; not other systems'."""
    marked = re.findall(r"^([A-Za-z0-9._-]+)==\S+ ; (.*?) *\\\\?$", lock, re.MULTILINE)
    others = {name for name, marker in marked if not Marker(marker).evaluate()}
    return {name: version for name, version in pins(lock).items() if name not in others}


def judge_vulnerabilities(report: Mapping[str, Any], expected: Mapping[str, str]) -> Verdict:
    """Of pip-audit's JSON: what it found, and what it was not told of."""
    asked = {one["name"]: one for one in report["dependencies"]}
    found = [
        f"{name} {one.get('version', '')}: {vulnerability['id']}{_fixed(vulnerability)}"
        for name, one in sorted(asked.items())
        for vulnerability in one.get("vulns", ())
    ]
    unknown = sorted(name for name in expected if name not in asked or "vulns" not in asked[name])
    lines = [f"known vulnerability: {one}" for one in found]
    if unknown:
        lines.append(
            f"{len(unknown)} of {len(expected)} packages could not be checked for known"
            f" vulnerabilities: the index does not tell them here ({', '.join(unknown[:5])}"
            + (", ...)" if len(unknown) > 5 else ")")  # noqa: PLR2004  # enough to look into it
        )
    if not lines:
        lines.append(f"{len(expected)} packages, no known vulnerability")
    return Verdict(BAD if found else UNKNOWN if unknown else 0, tuple(lines))


def _fixed(vulnerability: Mapping[str, Any]) -> str:
    versions = vulnerability.get("fix_versions") or ()
    return f", fixed in {', '.join(versions)}" if versions else ", not fixed yet"


def judge_sbom(sbom: Mapping[str, Any], expected: Mapping[str, str]) -> Verdict:
    """Whether the bill of materials has every package, with its version and hashes."""
    listed = {
        one["name"]: one["version"]
        for one in sbom.get("components", ())
        if any(reference.get("hashes") for reference in one.get("externalReferences", ()))
    }
    if missing := sorted(expected.items() - listed.items()):
        names = ", ".join(f"{name} {version}" for name, version in missing)
        return Verdict(BAD, (f"the bill of materials lacks {names}",))
    return Verdict(0, (f"{len(listed)} packages in the bill of materials",))


def _check_hashes(lock: Path, output: Path) -> Verdict:
    done = _run(
        [
            *("pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"),
            *("--require-hashes", "--requirement", str(lock), "--dest", str(output / "wheels")),
        ]
    )
    if done.returncode == 0:
        return Verdict(0, ("the index serves what the lock names",))
    if "DO NOT MATCH THE HASHES" in done.stderr:
        return Verdict(BAD, ("the index serves other files than the lock names:", done.stderr))
    return Verdict(UNKNOWN, ("the packages cannot be had from the index:", done.stderr))


def _check_vulnerabilities(lock: Path, output: Path) -> Verdict:
    report = output / "vulnerabilities.json"
    report.unlink(missing_ok=True)
    done = _run(
        [
            *("pip_audit", "--disable-pip", "--require-hashes", "--progress-spinner", "off"),
            *("--format", "json", "--output", str(report), "--requirement", str(lock)),
        ]
    )
    try:
        loaded = json.loads(report.read_text())
    except (OSError, ValueError):
        return Verdict(UNKNOWN, ("pip-audit could not ask for vulnerabilities:", done.stderr))
    return judge_vulnerabilities(loaded, installed(lock.read_text()))


def _write_sbom(lock: Path, output: Path) -> Verdict:
    sbom = output / "sbom.json"
    sbom.unlink(missing_ok=True)
    done = _run(
        [
            *("cyclonedx_py", "requirements", "--output-reproducible", "--of", "JSON"),
            *("--pyproject", "pyproject.toml", "--output-file", str(sbom), str(lock)),
        ]
    )
    try:
        loaded = json.loads(sbom.read_text())
    except (OSError, ValueError):
        return Verdict(BAD, ("no bill of materials was written:", done.stderr))
    verdict = judge_sbom(loaded, pins(lock.read_text()))
    return Verdict(verdict.code, (*verdict.lines, str(sbom)))


def _run(module: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", *module], check=False, capture_output=True, text=True
    )


def worst(codes: Iterator[int]) -> int:
    """Bad before unknown: what is known to be bad stays bad whatever is not known."""
    found = set(codes)
    return BAD if BAD in found else UNKNOWN if UNKNOWN in found else 0


def main(lock: Path, output: Path) -> int:
    """Check all three and say so; the exit code."""
    output.mkdir(parents=True, exist_ok=True)
    verdicts = {
        "hashes": _check_hashes(lock, output),
        "vulnerabilities": _check_vulnerabilities(lock, output),
        "sbom": _write_sbom(lock, output),
    }
    words = {0: "ok", BAD: "BAD", UNKNOWN: "NOT KNOWN"}
    for name, verdict in verdicts.items():
        for line in verdict.lines:
            sys.stdout.write(f"audit: {name}: {words[verdict.code]}: {line.strip()}\n")
    return worst(verdict.code for verdict in verdicts.values())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
