"""`python tests/kernel`: the plugin on the real DFL drivers, in a virtual machine.

    python tests/kernel [pytest's arguments]      the tests in tests/kernel/guest
    python tests/kernel -- COMMAND [ARGUMENTS]    anything else in the guest

Everything that it needs is downloaded and built in `.cache/kernel` of the clone. Ends with pytest's
exit code, or the command's; with 1 and the reason where the machine cannot run it.
"""

import fcntl
import shlex
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import modules
import sources
from machine import Machine

CLONE = Path(__file__).resolve().parents[2]
CACHE = CLONE / ".cache/kernel"
LIMIT = 900.0
"""Seconds that the guest may take."""

_CHOSEN = {
    "test_crash.py": (
        "test_killed_inside",
        "test_killed_inside_the_first_scrub",
        "test_a_whole_card_stays_with_its_owner_over_a_kill",
    ),
    "test_orders.py": (
        "test_an_implied_release_is_scrubbed_before_the_next_owner_is_programmed",
        "test_a_later_call_waits_for_the_preparation_that_runs",
        "test_a_call_that_is_cut_off_does_not_stop_its_preparation",
        "test_a_claim_that_ends_while_it_is_prepared_is_scrubbed_and_its_prestart_refused",
    ),
    "test_exclusive.py": ("test_tenants_of_both_modes_come_and_go_and_each_finds_its_own_image",),
    "test_restart.py": (
        "test_sigterm_during_a_pr_waits_for_it_and_nothing_is_lost",
        "test_a_successor_waits_for_a_predecessor_in_a_pr_and_says_why",
    ),
}
"""What else is worth the time: the processor is emulated, a start of the plugin takes seconds."""

SUITE = (
    (
        "tests/kernel/guest",
        "tests/integration/test_life.py",
        "tests/integration/test_recovery.py",
    ),
    (
        "tests/integration/test_faults.py",
        "tests/integration/test_draining.py",
        *(f"tests/integration/{file}::{test}" for file, tests in _CHOSEN.items() for test in tests),
    ),
)
"""What runs in the guests: their own tests, and those of the daemon that simulated cards pass too.

In two machines at once: the plugin and its test take turns, so that one uses one processor.
"""

_ENVIRONMENT = """\
export HOME=/root PATH=/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin TERM=dumb
export PYTHONDONTWRITEBYTECODE=1 HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis CI=true
export PYTHONPATH=tests/kernel/guest:tests/integration"""

_TESTS = "-p on_real_cards -p no:cacheprovider -o faulthandler_timeout=120"


def _say(text: str) -> None:
    sys.stderr.write(f"test-kernel: {text}\n")
    sys.stderr.flush()


def main(arguments: list[str]) -> int:
    """Prepare, boot, run."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the machine goes with us
    pytest = f"{CLONE / '.venv/bin/python'} -m pytest {_TESTS}"
    if arguments[:1] == ["--"]:
        commands = [shlex.join(arguments[1:])]
    elif arguments:
        commands = [f"{pytest} {shlex.join(arguments)}"]
    else:
        commands = [f"{pytest} {' '.join(part)}" for part in SUITE]
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one at a time in a clone
        try:
            begin = time.monotonic()
            unpacked = sources.fetch(CACHE)
            built = modules.build(CACHE, unpacked)
            _say(f"Linux {unpacked.release} and its drivers: {time.monotonic() - begin:.0f} s")
            machine = Machine(sources=unpacked, card_modules=built, clone=CLONE, cache=CACHE)
            begin = time.monotonic()
            codes = _run(machine, commands)
            _say(f"{_many(len(commands))} ran for {time.monotonic() - begin:.0f} s")
        except sources.CannotRunError as error:
            _say(str(error))
            return 1
    return max(codes)


def _run(machine: Machine, commands: list[str]) -> list[int]:
    """Run each in a guest of its own, all at once; the first one's console is shown as it comes."""
    consoles: list[list[str]] = [[] for _ in commands]
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        futures = []
        for number, command in enumerate(commands):
            guest = machine.start(f"{_ENVIRONMENT}\n{command}", limit=LIMIT, number=number)
            stack.callback(guest.stop)
            say = consoles[number].append if number else _show
            futures.append(pool.submit(guest.follow, say))
        codes = []
        for future, console in zip(futures, consoles, strict=True):
            try:
                codes.append(future.result())
            finally:
                for line in console:
                    _show(line)
    return codes


def _show(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _many(machines: int) -> str:
    return "the machine" if machines == 1 else f"{machines} machines"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
