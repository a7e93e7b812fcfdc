"""What a file is known by: SHA-256 by the interpreter for small files, by libcrypto for large."""

import hashlib
import subprocess
import sys

import pytest

from fpga_plugin.bitstream import files
from fpga_plugin.bitstream.files import Content, content_of, read_digest

SMALL, PIECE = 1000, 64


@pytest.fixture(autouse=True)
def _limits(monkeypatch):
    monkeypatch.setattr(files, "_SMALL", SMALL)
    monkeypatch.setattr(files, "_HASHED_PIECE", PIECE)


@pytest.mark.parametrize("own", ["with its own", "without"])
@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, SMALL, SMALL + 1, 5000])
def test_a_files_digest_is_that_of_all_its_bytes(size, own, tmp_path, monkeypatch):
    if own == "without":  # as where the interpreter was built with libcrypto's hashes only
        for name in ("_sha2", "_sha256"):
            monkeypatch.setitem(sys.modules, name, None)
    data = bytes(n * 7 % 251 for n in range(size))
    path = tmp_path / "file"
    path.write_bytes(data)
    expected = Content(hashlib.sha256(data).hexdigest(), size)
    assert read_digest(str(path), inside=None, guarded=False) == expected
    assert content_of(data) == expected


@pytest.mark.parametrize(("size", "loaded"), [(SMALL, False), (SMALL + 1, True)])
def test_only_a_large_file_loads_libcrypto(size, loaded):
    code = (
        "import sys\n"
        "from fpga_plugin.bitstream import files\n"
        f"files._SMALL = {SMALL}\n"
        f"files.content_of(bytes({size}))\n"
        f"assert ('_hashlib' in sys.modules) is {loaded}, sorted(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
