"""What all tests share: prerequisites of the machine, and how long hypothesis looks."""

import functools
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest
import structlog
from hypothesis import HealthCheck, Phase, settings

CI = os.environ.get("CI", "").lower() in {"1", "true"}

# Bitstreams that a group may write are refused; tests write theirs as an operator has to.
os.umask(0o022)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So a shell starts what runs in the background; the programs under test would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _umockdev() -> str:
    if shutil.which("umockdev-wrapper") is None:
        return "umockdev-wrapper is not installed (make deps)"
    program = "import gi; gi.require_version('UMockdev', '1.0'); from gi.repository import UMockdev"
    try:
        subprocess.run(
            ["/usr/bin/python3", "-c", program], check=True, capture_output=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return "/usr/bin/python3 cannot import UMockdev through gi (make deps)"
    return ""


def _openssl() -> str:
    return "" if shutil.which("openssl") else "openssl is not installed (make deps)"


def _prometheus() -> str:
    absent = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
    return f"{' and '.join(absent)} is not installed (make deps)" if absent else ""


def _chromium() -> str:
    return "" if shutil.which("chromium") else "chromium is not installed (make deps)"


def _gcc() -> str:
    headers = ("/usr/include/stdlib.h", "/usr/include/linux/fpga-dfl.h")
    if shutil.which("gcc") and all(os.path.exists(header) for header in headers):
        return ""
    return "gcc or the headers of libc and Linux are not installed (make deps)"


def _zsh() -> str:
    return "" if shutil.which("zsh") else "zsh is not installed (make deps)"


def _fish() -> str:
    return "" if shutil.which("fish") else "fish is not installed (make deps)"


def _jq() -> str:
    return "" if shutil.which("jq") else "jq is not installed (make deps)"


PREREQUISITES: dict[str, Callable[[], str]] = {
    "chromium": _chromium,
    "fish": _fish,
    "gcc": _gcc,
    "jq": _jq,
    "openssl": _openssl,
    "prometheus": _prometheus,
    "umockdev": _umockdev,
    "zsh": _zsh,
}
"""What `@pytest.mark.needs(...)` may name: each function says what is missing, or nothing."""


@functools.cache
def missing(what: str) -> str:
    """Why a prerequisite is not there; empty if it is."""
    return PREREQUISITES[what]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in item.iter_markers("needs"):
            for what in marker.args:
                if what not in PREREQUISITES:
                    raise pytest.UsageError(f"{item.nodeid} needs {what!r}: see tests/conftest.py")
    if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        _long_ones_first(items, workers)


def _long_ones_first(items: list[pytest.Item], workers: int) -> None:
    """Spread long tests over the workers, early: one that began last would be waited for alone.

    Each worker begins with an equal share of the list, in its order (xdist's worksteal).
    """
    long = [item for item in items if item.get_closest_marker("long")]
    others = [item for item in items if not item.get_closest_marker("long")]
    items.clear()
    for worker in range(workers):
        begin, end = (len(others) * each // workers for each in (worker, worker + 1))
        early = min(begin + workers, end)  # shares begin within so many of here
        items += [*others[begin:early], *long[worker::workers], *others[early:end]]


@pytest.fixture(autouse=True)
def _logging_of_its_own() -> Iterator[None]:
    """A command that a test runs in this process has only errors logged: not for the next test."""
    yield
    structlog.reset_defaults()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs"):
        for what in marker.args:
            if reason := missing(what):
                if CI:
                    pytest.fail(f"with CI=true nothing is skipped: {reason}", pytrace=False)
                pytest.skip(reason)


# 60 examples of 50 steps: 3,000 steps of a state machine in `make test`, more than twice as many
# as `make mutants` has; `make soak` searches for what they do not find. hypothesis has a profile of
# its own for CI, on which these would build: what it changes is set here.
settings.register_profile(
    "default",
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    derandomize=False,
    print_blob=True,
)
# `make test-fast`: few examples find what a change broke in most cases, and not what it did in rare
# ones: those are left to `make test`.
settings.register_profile("fast", settings.get_profile("default"), max_examples=10)
# `make mutants`: a counterexample is not made smaller, nor remembered for the next mutant.
settings.register_profile(
    "mutants",
    settings.get_profile("fast"),
    max_examples=25,
    phases=[Phase.explicit, Phase.generate],
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
# `make campaign-bugs`: until a deliberate bug is found.
settings.register_profile("bugs", settings.get_profile("mutants"), max_examples=3000)
settings.register_profile(
    "soak",
    settings.get_profile("default"),
    max_examples=2000,
    stateful_step_count=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
