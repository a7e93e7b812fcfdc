"""What Landlock rules let a process do, as the kernel has it; each in a process of its own."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fpga_plugin.host.sandbox import landlock, system
from fpga_plugin.host.sandbox.landlock import Right


def abi() -> int:
    try:
        return system.syscall(landlock._CREATE_RULESET, None, 0, landlock._VERSION)
    except OSError:
        return 0


ABI = abi()
needs_landlock = pytest.mark.skipif(not ABI, reason="this kernel has no Landlock")

TRY = """
import errno, json, os, socket, sys
from fpga_plugin.host.sandbox import landlock

def attempt(function, *arguments):
    try:
        function(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"

def sock(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path)

folder = sys.argv[1]
os.chdir(folder)
rules = {name: getattr(landlock, right) for name, right in json.loads(sys.argv[2]).items()}
restricted = landlock.restrict(rules | {"/usr": landlock.READ, sys.prefix: landlock.READ})
tries = {
    "read": lambda: open("own/file").read(),
    "write": lambda: open("own/file", "a").write("x"),
    "truncate elsewhere": lambda: os.truncate("other/file", 0),
    "create": lambda: open("own/new", "w").close(),
    "rename": lambda: os.replace("own/new", "own/other"),
    "remove": lambda: os.unlink("own/other"),
    "directory": lambda: os.mkdir("own/directory"),
    "socket": lambda: sock("own/socket"),
    "fifo": lambda: os.mkfifo("own/fifo"),
    "symlink": lambda: os.symlink("a", "own/link"),
    "read elsewhere": lambda: open("other/file").read(),
    "write elsewhere": lambda: open("other/file", "a").close(),
    "list elsewhere": lambda: os.listdir("other"),
    "move elsewhere": lambda: os.rename("own/file", "other/moved"),
    "sysctl": lambda: open("/proc/sys/kernel/core_pattern", "r+").close(),
}
print(json.dumps({name: attempt(each) for name, each in tries.items()}))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    return tmp_path


def attempts(folder: Path, **rules: str) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", TRY, folder, json.dumps(rules)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_landlock
def test_a_directory_of_its_own_is_worked_in_and_nothing_else_is_reached(folder: Path):
    done = attempts(folder, own="OWN")
    refused = {name for name, result in done.items() if result != "done"}
    assert refused == {
        "fifo",
        "symlink",
        "read elsewhere",
        "write elsewhere",
        "list elsewhere",
        "move elsewhere",
        "sysctl",
        *(["truncate elsewhere"] if ABI >= 3 else []),
    }
    assert {done[name] for name in refused} <= {"EACCES", "EXDEV"}


@needs_landlock
def test_what_is_only_read_is_not_written(folder: Path):
    done = attempts(folder, own="READ")
    assert [name for name, result in done.items() if result == "done"] == ["read"]


@needs_landlock
def test_a_rule_of_what_is_not_there_is_left_out(folder: Path):
    assert attempts(folder, own="READ", missing="OWN")["read"] == "done"


@pytest.mark.parametrize(("version", "truncates"), [(1, False), (2, False), (3, True), (99, True)])
def test_an_older_kernel_is_not_asked_for_what_it_does_not_know(
    monkeypatch, *, version: int, truncates: bool
):
    handled: list[int] = []

    def kernel(number: int, *arguments: object) -> int:
        match number, arguments:
            case landlock._CREATE_RULESET, (None, 0, 1):
                return version
            case landlock._CREATE_RULESET, (landlock._Attributes() as attributes, 8, 0):
                handled.append(attributes.handled_access_fs)
                return os.open(os.devnull, os.O_RDONLY)
            case landlock._RESTRICT_SELF, (_, 0):
                return 0
            case _:
                raise AssertionError((number, arguments))

    monkeypatch.setattr(system, "syscall", kernel)
    monkeypatch.setattr(system, "forbid_new_privileges", lambda: None)
    monkeypatch.setattr(system, "require_one_thread", lambda: None)
    assert landlock.restrict({}).abi == version
    first = (1 << 13) - 1  # of the first version, from EXECUTE to MAKE_SYM
    assert handled == [first | Right.TRUNCATE if truncates else first]


def test_a_kernel_without_landlock_is_told(monkeypatch):
    def lacks(*_: object) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(system, "syscall", lacks)
    monkeypatch.setattr(system, "require_one_thread", lambda: None)
    with pytest.raises(OSError, match="not implemented"):
        landlock.restrict({})
