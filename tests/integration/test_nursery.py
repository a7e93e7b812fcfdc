"""The process that plugins are forked from: what tests rely on."""

import signal
import subprocess
import threading

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
