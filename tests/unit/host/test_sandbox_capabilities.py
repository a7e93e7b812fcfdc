"""What is left of root's privileges, as the kernel says it; each test in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has capabilities to lose")

STATUS = """
import json, sys, threading
from fpga_plugin.host.sandbox.capabilities import drop_privileges

def status():
    with open("/proc/thread-self/status") as file:
        return dict(line.split() for line in file if line.startswith(("Cap", "NoNewPrivs")))
"""

SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")


def run(code: str, *arguments: str | Path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", STATUS + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@root
def test_every_capability_is_gone_and_none_comes_back():
    left = run("drop_privileges(readable=[]); print(json.dumps(status()))")
    assert {left[f"{name}:"] for name in SETS} == {"0" * 16}
    assert left["NoNewPrivs:"] == "1"


@root
def test_threads_and_programs_that_come_later_have_no_capability_either():
    thread, program = run("""
drop_privileges(readable=[])
seen = []
thread = threading.Thread(target=lambda: seen.append(status()))
thread.start()
thread.join()
import subprocess
text = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout
seen.append(dict(line.split() for line in text.splitlines() if line.startswith("Cap")))
print(json.dumps(seen))
""")
    for left in (thread, program):
        assert {left[f"{name}:"] for name in SETS} == {"0" * 16}


def test_dropping_capabilities_is_refused_where_another_thread_would_keep_its_own():
    said = run("""
stop = threading.Event()
thread = threading.Thread(target=stop.wait)
thread.start()
try:
    drop_privileges(readable=[])
except RuntimeError as error:
    print(json.dumps(str(error)))
stop.set()
thread.join()
""")
    assert "second" in said


@root
def test_files_that_their_modes_open_to_root_are_still_read(tmp_path: Path):
    tmp_path.chmod(0o700)
    (tmp_path / "file").write_text("x")
    (tmp_path / "file").chmod(0o600)
    assert run(
        """
path = sys.argv[1]
drop_privileges(readable=[path], writable=[path])
print(json.dumps(open(path + "/file").read()))
""",
        tmp_path,
    ) == "x"  # fmt: skip


@root
@pytest.mark.parametrize(
    ("mode", "readable", "writable"), [(0o700, 1, 0), (0o755, 0, 1), (0o700, 1, 1)]
)
def test_a_directory_that_is_not_roots_keeps_the_one_capability_that_it_takes(
    tmp_path: Path, mode: int, readable: int, writable: int
):
    theirs, missing = tmp_path / "theirs", tmp_path / "missing"
    theirs.mkdir()
    theirs.chmod(mode)
    os.chown(theirs, 12345, 12345)
    left, foreign = run(
        """
path, missing = sys.argv[1:3]
readable, writable = map(int, sys.argv[3:])
left = drop_privileges(readable=[missing] + [path] * readable, writable=[path] * writable)
print(json.dumps([status(), left.foreign]))
""",
        theirs,
        missing,
        str(readable),
        str(writable),
    )
    assert set(foreign) == {str(theirs)}
    assert {left[f"{name}:"] for name in ("CapPrm", "CapEff")} == {"0" * 15 + "2"}
    assert {left[f"{name}:"] for name in ("CapInh", "CapBnd", "CapAmb")} == {"0" * 16}


@root
def test_a_directory_of_others_that_all_may_read_takes_none(tmp_path: Path):
    os.chown(tmp_path, 12345, 12345)
    tmp_path.chmod(0o755)
    left = run("drop_privileges(readable=[sys.argv[1]]); print(json.dumps(status()))", tmp_path)
    assert left["CapPrm:"] == "0" * 16


def test_an_unprivileged_user_is_confined_too_and_gains_nothing():
    demote = "import os; os.geteuid() or os.setuid(65534); "
    left = run(demote + "drop_privileges(readable=[]); print(json.dumps(status()))")
    assert {left[f"{name}:"] for name in ("CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    assert left["NoNewPrivs:"] == "1"
