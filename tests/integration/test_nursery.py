"""The process that plugins are forked from: what tests rely on."""

import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import nursery
import pytest
from daemon_support import LIMIT, ROOT


def test_the_end_of_a_process_is_seen_while_somebody_kills_it():
    """The thread that reads the log kills at a line, and again at the next one like it."""
    for _ in range(40):
        process = nursery.launch(["run", "--help"], {"PATH": ""}, str(ROOT))
        seen = threading.Event()

        def kill(process=process, seen=seen):
            while not seen.is_set():
                process.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            assert process.wait(LIMIT) in {0, -signal.SIGKILL}
        finally:
            seen.set()
            killer.join()
        process.stderr.close()


def test_a_process_that_does_not_end_is_waited_for_no_longer_than_asked():
    process = nursery.launch(["demo"], {"PATH": ""}, str(ROOT))
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.001)
    process.kill()
    assert process.wait(LIMIT) == -signal.SIGKILL
    process.stderr.close()


def test_what_a_command_says_comes_with_its_exit_code():
    done = nursery.run(["bitstream", "list", "--help"], {"PATH": ""}, str(ROOT), timeout=LIMIT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: fpga-plugin bitstream list ")
    done = nursery.run(["nonsense"], {"PATH": ""}, str(ROOT), timeout=LIMIT)
    assert (done.returncode, done.stdout) == (2, "")
    assert "nonsense" in done.stderr


def test_a_command_that_does_not_end_is_killed(tmp_path):
    env = {"PATH": "", "TMPDIR": str(tmp_path)}
    with pytest.raises(subprocess.TimeoutExpired):
        nursery.run(["demo", "--serve"], env, str(ROOT), timeout=0.01)


def test_commands_that_run_at_once_do_not_get_each_others_words():
    def words(name: str) -> str:
        return nursery.run([name, "--help"], {"PATH": ""}, str(ROOT), timeout=LIMIT).stdout

    names = ["run", "demo", "devices", "status", "fleet", "card"] * 3
    with ThreadPoolExecutor(len(names)) as pool:
        for name, said in zip(names, pool.map(words, names), strict=True):
            assert said.startswith(f"usage: fpga-plugin {name}")
