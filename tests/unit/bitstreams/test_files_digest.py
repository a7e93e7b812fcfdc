"""What a file is known by: the SHA-256 of all its bytes."""

import hashlib

import pytest

from fpga_plugin.bitstreams import files
from fpga_plugin.bitstreams.files import Content, content_of, read_digest

PIECE = 64


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 5000])
def test_a_files_digest_is_that_of_all_its_bytes(size, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_HASHED_PIECE", PIECE)
    data = bytes(n * 7 % 251 for n in range(size))
    path = tmp_path / "file"
    path.write_bytes(data)
    expected = Content(hashlib.sha256(data).hexdigest(), size)
    assert read_digest(str(path), inside=None, guarded=False) == expected
    assert content_of(data) == expected
