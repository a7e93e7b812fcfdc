"""`python tests/kernel`: the plugin on the real drivers, in a virtual machine.

    python tests/kernel [pytest's arguments]      the tests on DFL cards
    python tests/kernel --alveo [the same]        those on Alveo cards, and AMD's drivers built
    python tests/kernel -- COMMAND [ARGUMENTS]    anything else in the guest

Everything that it needs is downloaded and built in `.cache/kernel` of the clone. Ends with pytest's
exit code, or the command's; with 1 and the reason where the machine cannot run it.
"""

import fcntl
import shlex
import signal
import sys
import time
from pathlib import Path

import modules
import sources
import xrt
from machine import Machine

CLONE = Path(__file__).resolve().parents[2]
CACHE = CLONE / ".cache/kernel"
LIMIT = 2300.0
"""Seconds that the guest may take: two and a half times what it takes alone."""

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
        "test_an_allocation_that_ends_while_it_is_prepared_is_scrubbed_and_its_prestart_refused",
    ),
    "test_exclusive.py": ("test_tenants_of_both_modes_come_and_go_and_each_finds_its_own_image",),
    "test_restart.py": (
        "test_sigterm_during_a_pr_waits_for_it_and_nothing_is_lost",
        "test_a_successor_waits_for_a_predecessor_in_a_pr_and_says_why",
    ),
}
"""What else is worth the time: the processor is emulated, a start of the plugin takes seconds."""

SUITE = (
    "--ignore-glob=*alveo*",
    "tests/kernel/guest",
    "tests/integration/test_life.py",
    "tests/integration/test_faults.py",
    "tests/integration/test_recovery.py",
    "tests/integration/test_draining.py",
    *(f"tests/integration/{file}::{test}" for file, tests in _CHOSEN.items() for test in tests),
)
"""What runs in the guest: its own tests, and those of the daemon that simulated cards pass too."""

ALVEO = ("tests/kernel/guest/test_alveo_*.py", "tests/kernel/guest/breaking_alveo.py")
"""Those of Alveo cards; the last damage the kernel."""

_TESTS = "-p on_real_cards -p no:cacheprovider -o faulthandler_timeout=120 --durations=12"


def _say(text: str) -> None:
    sys.stderr.write(f"test-kernel: {text}\n")
    sys.stderr.flush()


def _script(command: str, alveo: list[Path]) -> str:
    """What the guest runs; tests that want Alveo cards load the modules for them."""
    return (
        "export HOME=/root PATH=/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin TERM=dumb\n"
        "export PYTHONDONTWRITEBYTECODE=1 HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis CI=true\n"
        "export PYTHONPATH=tests/kernel/guest:tests/integration:tests\n"
        f"export GUEST_ALVEO_MODULES='{' '.join(map(str, alveo))}'\n"
        f"{command}"
    )


def main(arguments: list[str]) -> int:
    """Prepare, boot, run."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the machine goes with us
    python = CLONE / ".venv/bin/python"
    if alveo := arguments[:1] == ["--alveo"]:
        del arguments[0]
    if arguments[:1] == ["--"]:
        command = shlex.join(arguments[1:])
    else:
        # The patterns of a suite are the shell's in the guest.
        wanted = shlex.join(arguments) if arguments else " ".join(ALVEO if alveo else SUITE)
        command = f"{python} -m pytest {_TESTS} {wanted}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one at a time in a clone
        try:
            begin = time.monotonic()
            unpacked = sources.fetch(CACHE)
            built = modules.build(CACHE, unpacked)
            _say(f"Linux {unpacked.release} and its drivers: {time.monotonic() - begin:.0f} s")
            amd: list[Path] = []
            if alveo:
                begin = time.monotonic()
                amd = xrt.build(CACHE, unpacked)
                _say(f"AMD's drivers: {time.monotonic() - begin:.0f} s")
            machine = Machine(sources=unpacked, card_modules=built, clone=CLONE, cache=CACHE)
            begin = time.monotonic()
            code = machine.run(_script(command, amd), limit=LIMIT)
            _say(f"the machine ran for {time.monotonic() - begin:.0f} s")
        except sources.CannotRunError as error:
            _say(str(error))
            return 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
