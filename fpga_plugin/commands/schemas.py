"""The published JSON Schemas of what commands print with `--json` (docs/schema), from the types.

`python -m fpga_plugin.commands.schemas DIRECTORY` writes them; `make docs` does.
"""

import inspect
import json
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from fpga_plugin.bitstreams.facts import InspectedView, StoredView
from fpga_plugin.commands.card_list import Listing
from fpga_plugin.commands.card_show import Shown
from fpga_plugin.observability.schema import CardStateView, HistoryView, ProgrammedView, StatusView

SCHEMAS: Final = {
    "bitstream-inspect": InspectedView,
    "bitstream-list": list[StoredView],
    "card-list": Listing,
    "card-show": Shown,
    "card-state": CardStateView,
    "card-program": ProgrammedView,
    "status": StatusView,
    "status-history": HistoryView,
}
"""By the command's name; `card-state` is what `card drain`, `undrain`, `retry`, `release` print."""


def text(name: str) -> str:
    """One of them, as it is published."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps(dialect | _cleaned(msgspec.json.schema(SCHEMAS[name])), indent=1) + "\n"


def _cleaned(schema: Any) -> Any:
    """With docstrings as they are meant: Python keeps their indentation before 3.13."""
    if isinstance(schema, list):
        return [_cleaned(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    cleaned = {name: _cleaned(of) for name, of in schema.items()}
    if isinstance(said := cleaned.get("description"), str):
        cleaned["description"] = inspect.cleandoc(said)
    return cleaned


if __name__ == "__main__":
    for each in SCHEMAS:
        (Path(sys.argv[1]) / f"{each}.json").write_text(text(each))
