"""The published schemas of `--json` are those of the types, and real output keeps to them."""

import json
import os
import subprocess
import sys

import msgspec
import pytest
from doubles.samples import SAMPLES
from repository import ROOT

from fpga_plugin.commands.schemas import SCHEMAS, text


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_published_is_what_the_types_say(name):
    assert (ROOT / f"docs/schema/{name}.json").read_text() == text(name), "run: make docs"


def test_no_other_schema_is_published():
    assert {path.stem for path in (ROOT / "docs/schema").iterdir()} == set(SCHEMAS)


@pytest.mark.parametrize(
    ("name", "command"),
    [("card-list", ["card", "list"]), ("card-show", ["card", "show", "--assumptions"])],
)
def test_what_is_printed_keeps_to_its_schema_and_has_nothing_else(tmp_path, name, command):
    settings = {"FPGA_PLUGIN_BACKEND": "simulated", "FPGA_PLUGIN_SIMULATED_CARDS": "1x2,1x1+ofs"}
    done = subprocess.run(
        [sys.executable, "-m", "fpga_plugin", *command, "--json"],
        env=os.environ | settings | {"FPGA_PLUGIN_STATE_DIR": str(tmp_path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    # Decoding raises for what is missing or of another type, and drops what the type lacks.
    assert msgspec.json.decode(done.stdout, type=SCHEMAS[name]) == json.loads(done.stdout)


@pytest.mark.parametrize(
    "relative",
    sorted(str(path.relative_to(SAMPLES)) for path in SAMPLES.glob("*/*.[gax]*")),
)
def test_what_inspect_prints_keeps_to_its_schema_and_has_nothing_else(relative, tmp_path):
    assert _printed("bitstream-inspect", ["inspect", str(SAMPLES / relative)], tmp_path)


def test_what_list_prints_keeps_to_its_schema_and_has_nothing_else(tmp_path):
    assert len(_printed("bitstream-list", ["list", "--dir", str(SAMPLES)], tmp_path)) == 12


def _printed(name, words, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "fpga_plugin", "bitstream", *words, "--json"],
        env=os.environ | {"FPGA_PLUGIN_STATE_DIR": str(tmp_path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    decoded = msgspec.json.decode(done.stdout, type=SCHEMAS[name])
    assert json.loads(msgspec.json.encode(decoded)) == json.loads(done.stdout)
    return decoded
