#!/usr/bin/env python3
"""Builds the sample store anew from its sources, with the project's own packer.

    .venv/bin/python bitstreams/sources/build.py [STORE]

A sample's image is what simulated cards need of one and nothing else: the AFU id, which such a card
shows after programming as its first 16 bytes, then the description beside the metadata, then a
counter up to the size of an image. The same sources give the same bytes.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from fpga_plugin.bitstream.command import add_bitstream_parser, run_bitstream
from fpga_plugin.ids import parse_afu_id

SOURCES = Path(__file__).resolve().parent
IMAGE_BYTES = 4096


def image(description: bytes, afu_id: str) -> bytes:
    """The raw image of a sample."""
    start = bytes.fromhex(afu_id) + description
    counter = bytes(n % 256 for n in range(IMAGE_BYTES))
    return start + counter[len(start) :]


def build(store: Path) -> int:
    """Build every sample into a store; returns the exit code."""
    parser = argparse.ArgumentParser()
    add_bitstream_parser(parser.add_subparsers(required=True), str(store))
    with tempfile.TemporaryDirectory() as work:
        raw = os.path.join(work, "image.rbf")
        for metadata in sorted(SOURCES.glob("*/*.json")):
            cluster = json.loads(metadata.read_text())["afu-image"]["accelerator-clusters"][0]
            afu_id = parse_afu_id(cluster["accelerator-type-uuid"])
            Path(raw).write_bytes(image(metadata.with_suffix(".txt").read_bytes(), afu_id))
            target = store / metadata.relative_to(SOURCES).with_suffix(".gbs")
            target.parent.mkdir(parents=True, exist_ok=True)
            command = ["pack", "--metadata", str(metadata), raw, "-o", str(target)]
            if code := run_bitstream(parser.parse_args(["bitstream", *command])):
                return code
    return run_bitstream(
        parser.parse_args(["bitstream", "sign", "--manifest", "--dir", str(store)])
    )


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCES.parent))
