"""A file that is replaced is the old one or the new one, whatever happens in between."""

import os
from collections.abc import Iterator

import pytest

from fpga_plugin.host.atomic_file import replace_file


def broken() -> Iterator[bytes]:
    yield b"half"
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("several_writers", [False, True])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, several_writers):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="No space"):
        replace_file(str(path), broken(), several_writers=several_writers)
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("file", b"old")]


def test_what_a_killed_process_left_is_in_nobodys_way(tmp_path):
    (tmp_path / ".file.tmp").write_bytes(b"half")
    (tmp_path / ".file.tmp").chmod(0o400)
    replace_file(str(tmp_path / "file"), [b"ne", memoryview(b"w")])
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("file", b"new")]


def test_two_writers_do_not_write_into_one_file(tmp_path, monkeypatch):
    path = str(tmp_path / "file")
    numbers = iter([1, 2])
    monkeypatch.setattr(os, "getpid", lambda: next(numbers))

    def overtaken() -> Iterator[bytes]:
        yield b"first"
        replace_file(path, [b"second"], several_writers=True)

    replace_file(path, overtaken(), several_writers=True)
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("file", b"first")]


def test_the_mode_is_what_was_asked_for_whatever_the_umask_is(tmp_path):
    before = os.umask(0o077)
    try:
        replace_file(str(tmp_path / "file"), [b""], mode=0o644)
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644
