"""The cache of verified files, by itself; what the store makes of it is in `test_library`."""

import hashlib
import os

import pytest

from fpga_plugin.bitstreams import cache as cache_module
from fpga_plugin.bitstreams.cache import Cache


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "verified"


def keep(cache: Cache, content: bytes) -> str:
    with cache.new(len(content), where="a", evict=True) as file:
        file.write(content)
        cache.keep(file, evict=True)
    return hashlib.sha256(content).hexdigest()


def test_a_directory_that_was_there_is_closed_to_others(directory):
    directory.mkdir(mode=0o755)
    Cache(str(directory), 100)
    assert directory.stat().st_mode & 0o777 == 0o700


def test_what_is_used_goes_last(directory):
    cache = Cache(str(directory), 8)
    used, unused = keep(cache, b"1111"), keep(cache, b"2222")
    for name, at in ((used, 1), (unused, 2)):
        os.utime(directory / name, ns=(at, at))
    later = Cache(str(directory), 8)  # in the next life, too
    assert later.map(used) == b"1111"
    new = keep(later, b"3333")
    assert {path.name for path in directory.iterdir()} == {used, new}


def test_a_damaged_file_is_removed_when_that_is_found(directory):
    name = keep(Cache(str(directory), 100), b"good")
    os.chmod(directory / name, 0o600)
    (directory / name).write_bytes(b"evil")
    assert Cache(str(directory), 100).map(name) is None
    assert list(directory.iterdir()) == []


def test_a_file_that_was_not_kept_can_be_used_and_is_gone(directory):
    cache = Cache(str(directory), 3)
    with cache.new(4, where="a", evict=True) as file:
        file.write(b"1111")
        cache.keep(file, evict=True)
        content = file.map()
    assert content == b"1111"
    assert list(directory.iterdir()) == []


def test_all_files_of_a_file_system_in_memory_have_a_share_of_the_memory(directory, monkeypatch):
    monkeypatch.setattr(cache_module, "lies_in_memory", lambda _: True)
    monkeypatch.setattr(cache_module, "memory_limit", lambda: 6 * cache_module.MEMORY_SHARE)
    cache = Cache(str(directory), 100)
    keep(cache, b"1111")
    last = keep(cache, b"2222")
    assert [path.name for path in directory.iterdir()] == [last]
