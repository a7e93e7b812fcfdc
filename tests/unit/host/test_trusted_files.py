"""Files that much depends on: nobody else may write them, or put others in their place."""

import os
import stat
from pathlib import Path

import pytest

from fpga_plugin.errors import BitstreamError
from fpga_plugin.host.trusted_files import check_directory, lookups, read_small

SOMEBODY = 12345

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture
def folder(tmp_path):
    """A directory two levels below one that a test may spoil."""
    path = tmp_path / "top" / "store" / "inner"
    path.mkdir(parents=True)
    for each in (path, path.parent, path.parent.parent):
        os.chmod(each, 0o755)
    return path


@pytest.fixture
def file(folder):
    path = folder / "file"
    path.write_bytes(b"content")
    os.chmod(path, 0o644)
    return path


def read(file: Path, *, guarded=True) -> bytes:
    return read_small(str(file), inside=None, guarded=guarded, limit=100)


def refusal(file: Path) -> BitstreamError:
    with pytest.raises(BitstreamError) as caught:
        read(file)
    assert read(file, guarded=False)
    return caught.value


def test_a_file_that_nobody_else_can_write_is_read(file):
    assert read(file) == b"content"


@pytest.mark.parametrize("up", [0, 1, 2])
@pytest.mark.parametrize(
    ("mode", "who"), [(0o777, "anybody"), (0o757, "anybody"), (0o775, "group")]
)
def test_a_directory_that_others_may_write_is_refused_however_far_above(file, up, mode, who):
    spoilt = file.parents[up]
    os.chmod(spoilt, mode)
    error = refusal(file)
    assert f"{file}: its directory {spoilt} may be written by {who}" in error.message
    assert f"chmod go-w {spoilt}" in error.hint


@as_root
@pytest.mark.parametrize("mode", [0o755, 0o700, 0o1777])
@pytest.mark.parametrize("up", [0, 1, 2])
def test_a_directory_of_somebody_else_is_refused_sticky_or_not(file, up, mode):
    """Its owner may rename what is in it, whatever its mode."""
    os.chmod(file.parents[up], mode)
    os.chown(file.parents[up], SOMEBODY, -1)
    error = refusal(file)
    assert f"its directory {file.parents[up]} belongs to user {SOMEBODY}" in error.message
    assert str(file.parents[up]) in error.hint


@pytest.mark.parametrize("up", [0, 1, 2])
def test_a_sticky_directory_may_be_anybodys_to_write_as_what_is_in_it_is_ours(file, up):
    os.chmod(file.parents[up], 0o1777)
    assert read(file) == b"content"


@as_root
def test_a_file_of_somebody_else_in_a_sticky_directory_is_refused(file):
    os.chmod(file.parent, 0o1777)
    os.chown(file, SOMEBODY, -1)
    assert f"belongs to user {SOMEBODY}" in refusal(file).message


def test_a_second_name_in_a_sticky_directory_is_refused(file):
    """Anybody could have made it, for a file of ours that lies elsewhere."""
    other = file.parents[1] / "other"
    other.hardlink_to(file)
    assert read(other) == b"content"
    os.chmod(file.parents[1], 0o1777)
    assert f"others may have made this one in {file.parents[1]}" in refusal(other).message
    assert read(file) == b"content"
    file.unlink()
    assert read(other) == b"content"


@as_root
def test_a_link_of_somebody_else_is_refused_wherever_it_leads(file):
    """In a sticky directory he can make one to any file of ours."""
    link = file.parents[1] / "link"
    os.chmod(file.parents[1], 0o1775)  # as for a group: the kernel's own protection looks at 0o1777
    link.symlink_to(file)
    assert read(link) == b"content"
    os.chown(link, SOMEBODY, -1, follow_symlinks=False)
    error = refusal(link)
    assert f"the link {link} belongs to user {SOMEBODY}" in error.message
    assert f"chown -h root {link}" in error.hint


def test_the_way_of_a_link_and_the_way_of_what_it_leads_to_are_both_looked_at(file, tmp_path):
    for name in ("links", "more"):
        (tmp_path / name).mkdir(mode=0o755)
    (tmp_path / "links" / "a").symlink_to("../more/b")
    (tmp_path / "more" / "b").symlink_to(file)
    link = tmp_path / "links" / "a"
    assert read(link) == b"content"
    for spoilt in (tmp_path / "links", tmp_path / "more", file.parents[1]):
        os.chmod(spoilt, 0o777)
        assert f"its directory {spoilt} may be written by anybody" in refusal(link).message
        os.chmod(spoilt, 0o755)


def test_a_relative_path_is_looked_at_from_the_root_on(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    assert read(Path("file")) == b"content"
    os.chmod(file.parents[2], 0o777)
    assert "may be written by anybody" in refusal(Path("file")).message


def test_the_root_of_the_file_system_counts(file, monkeypatch):
    real = os.lstat

    def lstat(path, **rest):
        found = real(path, **rest)
        if path != "/":
            return found
        return os.stat_result((found.st_mode | stat.S_IWOTH, *tuple(found)[1:]))

    monkeypatch.setattr(os, "lstat", lstat)
    assert "its directory / may be written by anybody" in refusal(file).message


def test_what_cannot_be_looked_at_is_refused(file, monkeypatch):
    real = os.lstat

    def lstat(path, **rest):
        if path == str(file.parents[1]):
            raise PermissionError(13, "Permission denied")
        return real(path, **rest)

    monkeypatch.setattr(os, "lstat", lstat)
    assert "cannot be read: Permission denied" in refusal(file).message


def test_a_directory_itself_counts_and_so_do_those_above(folder):
    check_directory(str(folder))
    os.chmod(folder, 0o777)
    with pytest.raises(BitstreamError, match=f"^{folder}: may be written by anybody") as caught:
        check_directory(str(folder))
    assert caught.value.hint == f"`chmod go-w {folder}`"
    os.chmod(folder, 0o755)
    os.chmod(folder.parent, 0o777)
    with pytest.raises(BitstreamError, match=f"its directory {folder.parent} may be written"):
        check_directory(str(folder))


def test_lookups_follow_links_as_the_kernel_does(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").touch()
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "loop").symlink_to("loop")
    root = str(tmp_path)
    found = [pair for pair in lookups(f"{root}/b/../b/file") if pair[0].startswith(root)]
    assert found == [(root, "b"), (root, "a"), (root, "b"), (root, "a"), (f"{root}/a", "file")]
    assert len(list(lookups(f"{root}/loop"))) < 100
