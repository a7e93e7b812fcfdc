"""How much memory the plugin may have, as control groups of both versions tell."""

import pytest

from fpga_plugin.host.memory import UNKNOWN, lies_in_memory, memory_limit

GIB = 1 << 30


@pytest.fixture
def look(tmp_path):
    def look(groups: str, files: dict[str, str], total: str = "MemTotal: 16777216 kB\n") -> int:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups)
        (tmp_path / "proc/meminfo").write_text(total)
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return memory_limit(proc=str(tmp_path / "proc"), cgroups=str(tmp_path / "cgroup"))

    return look


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        # A container with a cgroup namespace of its own sees its group as the root.
        ("0::/\n", {"memory.max": "536870912\n"}, GIB // 2),
        # A privileged one sees the node's, and each group above limits too.
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": f"{GIB}\n"}, GIB),
        ("0::/a/b\n", {"a/b/memory.max": "1000\n", "a/memory.max": f"{GIB}\n"}, 1000),
        ("4:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "2000\n"}, 2000),
        # In a container of version 1 the path is the node's, and the mount is the group's own.
        ("9:cpu,memory:/a\n", {"memory/memory.limit_in_bytes": "3000\n"}, 3000),
        # No limit, in version 1's words and in version 2's: the machine's own memory.
        ("9:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 16 * GIB),
        ("0::/\n", {"memory.max": "max\n"}, 16 * GIB),
        ("0::/../../x\n", {"x/memory.max": "nonsense\n"}, 16 * GIB),
        ("", {}, 16 * GIB),
    ],
)
def test_the_least_limit_that_holds_is_found(look, groups, files, expected):
    assert look(groups, files) == expected


def test_where_nothing_can_be_read_little_is_assumed(look, tmp_path):
    assert look("", {}, total="") == UNKNOWN
    assert memory_limit(proc=str(tmp_path / "none"), cgroups="/none") == UNKNOWN


def test_a_directory_in_memory_is_told_by_its_mount():
    assert lies_in_memory("/dev/shm")  # tmpfs on every Linux
    assert not lies_in_memory("/proc")
    assert not lies_in_memory("/nowhere")
