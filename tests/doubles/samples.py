"""The sample store of the repository."""

from pathlib import Path

SAMPLES = Path(__file__).parents[2] / "bitstreams"


def copy_samples(to: Path) -> None:
    """Make a store of them that no group may write, as it may in a clone made under umask 002."""
    for file in (*SAMPLES.glob("*/*.[gax]*"), SAMPLES / "manifest.json"):
        copy = to / file.relative_to(SAMPLES)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
