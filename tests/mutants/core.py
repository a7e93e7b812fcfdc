"""What is mutated, which results there are, and what was judged equivalent."""

import dataclasses
import hashlib
import json
import os
import tomllib
from pathlib import Path

from mutations import Mutant, mutants

ROOT = Path(__file__).resolve().parents[2]
WORK = Path(os.environ.get("MUTANTS_DIR") or ROOT / ".cache" / "mutants")
PACKAGE = ROOT / "fpga_plugin"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")

AREAS = {
    "allocation": ("allocation/*.py", "allocation/journal/*.py", "allocation/reconcile/*.py"),
    "cards": ("cards/*.py",),
    "deviceplugin": tuple(
        f"deviceplugin/{name}.py"
        for name in (
            *("service", "prestart", "reconcile", "allocatable", "environment"),
            *("turn", "missed_prestarts"),
        )
    ),
    "port": ("hardware/dfl/port.py", "hardware/grant.py", "hardware/dfl/rebind.py"),
    "alveo": ("hardware/xrt/*.py", "hardware/families.py"),
    "policy": ("policy/*.py",),
    "trust": ("bitstreams/trust.py", "bitstreams/signatures.py", "bitstreams/verdicts.py"),
    "dra": ("dra/*.py", "kubernetes/apiserver/nodecheck.py"),
}
"""The core: what decides who has a region, and in which condition it is given out."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a mutant."""

    key: str
    source: str
    """Of the function that was mutated, hashed: another function is another mutant."""
    what: str
    """killed; slow: a test did not end in time, so it is killed, too; survived; untouched: by any
    fast test; impossible: the function could not be replaced."""
    by: str = ""
    """The test that failed."""
    tests: str = ""
    """Which tests did not fail, hashed: with others, the mutant is tried again."""
    integration: str = ""
    """The same of the integration tests, if they were tried (`second`)."""

    @property
    def dead(self) -> bool:
        return self.what in {"killed", "slow", "impossible"}

    def still_holds(self, now: "Result") -> bool:
        """Whether it needs no other try."""
        return self.source == now.source and (self.dead or self.tests == now.tests)


def core_files() -> list[str]:
    patterns = [pattern for of_area in AREAS.values() for pattern in of_area]
    paths = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def chosen(areas: list[str], only: list[str]) -> dict[str, list[Mutant]]:
    """The mutants of some areas (of all, without one), by area; `only` are parts of their names."""
    found = {}
    for area in areas or list(AREAS):
        paths = sorted(path for pattern in AREAS[area] for path in PACKAGE.glob(pattern))
        all_of_it = [
            mutant
            for path in paths
            for mutant in mutants(path.read_text(), path.relative_to(ROOT).as_posix())
        ]
        found[area] = [
            each for each in all_of_it if not only or any(part in each.key for part in only)
        ]
    return found


def equivalent() -> dict[str, str]:
    """The mutants that do nothing wrong, each with the reason."""
    entries = tomllib.loads(EQUIVALENT.read_text()).get("equivalent", [])
    return {
        f"{each['file']}::{each['function']}::{each['change']}": each["why"] for each in entries
    }


def stale(judged: dict[str, str]) -> list[str]:
    """Judgements about mutants that there are not any more: the code has changed."""
    there = {
        mutant.key
        for file in {key.split("::")[0] for key in judged}
        for mutant in mutants((ROOT / file).read_text(), file)
    }
    return sorted(set(judged) - there)


def results() -> dict[str, Result]:
    """The last result of each mutant that was tried in this clone."""
    path = WORK / "results.jsonl"
    if not path.exists():
        return {}
    rows = (Result(**json.loads(line)) for line in path.read_text().splitlines())
    return {row.key: row for row in rows}


def keep(result: Result) -> None:
    with (WORK / "results.jsonl").open("a") as file:
        file.write(json.dumps(dataclasses.asdict(result)) + "\n")


def digest(*parts: bytes | str) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(hashlib.sha256(part.encode() if isinstance(part, str) else part).digest())
    return whole.hexdigest()[:16]
