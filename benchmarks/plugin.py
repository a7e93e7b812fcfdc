"""The process under measurement."""

import contextlib
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Self

_ENDS_WITHIN = 30.0
_SERVES_WITHIN = 30.0


def cpu_of(pid: int) -> float:
    """Seconds of CPU that a process took so far, by all its threads."""
    total = 0
    for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # a thread that ended meanwhile
            # Nanoseconds: see Documentation/scheduler/sched-stats.rst.
            total += int(stat.read_text().split()[0])
    return total / 1e9


def memory_of(pid: int) -> tuple[float, float]:
    """RSS and PSS of a process in MiB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = dict(re.findall(r"^(Rss|Pss):\s+([0-9]+) kB$", text, re.MULTILINE))
    return int(found["Rss"]) / 1024, int(found["Pss"]) / 1024


def switches_of(pid: int) -> int:
    """How often the threads of a process went to sleep so far: as often they were woken.

    These are the voluntary context switches. The others are those of a thread that works and has to
    let another process go first.
    """
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        found = re.findall(
            r"^voluntary_ctxt_switches:\s+([0-9]+)", status.read_text(), re.MULTILINE
        )
        total += sum(map(int, found))
    return total


class Plugin:
    """`fpga-plugin run`, started cold: a new interpreter, with compiled modules and warm caches.

    Attributes:
        began: when it was started.
    """

    def __init__(self, python: Path, settings: Mapping[str, str], log: Path) -> None:
        self._log = log
        with log.open("ab") as stream:
            self.began = time.monotonic()
            self._process = subprocess.Popen(
                [python.parent / "fpga-plugin", "run"],
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **settings},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            print(f"the plugin's log ends:\n{self._log.read_text()[-4000:]}", file=sys.stderr)
        if self._process.returncode is None:
            self.stop()

    def stop(self) -> float:
        """SIGTERM; returns the seconds until the process has ended.

        Raises:
            RuntimeError: it ended badly; says where its log is.
        """
        began = time.monotonic()
        self._process.terminate()
        status = self._process.wait(_ENDS_WITHIN)
        if status != 0:
            msg = f"the plugin ended with {status}:\n{self._log.read_text()[-2000:]}"
            raise RuntimeError(msg)
        return time.monotonic() - began

    def memory(self) -> tuple[float, float]:
        """RSS and PSS in MiB."""
        return memory_of(self.pid)

    def scrape(
        self,
        path: str = "/metrics",
        accept: str = "application/openmetrics-text; version=1.0.0",
    ) -> float:
        """Seconds of one scrape, as Prometheus asks; of another page with another `path`."""
        until = time.monotonic() + _SERVES_WITHIN
        while not (address := self._logged('"serving metrics"')) and time.monotonic() < until:
            time.sleep(0.05)
        url = f"http://{json.loads(address)['addresses'][0]}{path}"
        headers = {"Accept": accept}
        began = time.perf_counter()
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            answer.read()
        return time.perf_counter() - began

    def _logged(self, event: str) -> str:
        """The last line of the log with this in it; empty: none yet."""
        lines = self._log.read_text().splitlines()
        return next((line for line in reversed(lines) if event in line), "")

    def peak(self) -> float:
        """The highest RSS so far in MiB."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(r"^VmHWM:\s+([0-9]+) kB$", text, re.MULTILINE)
        return int(found[1]) / 1024 if found else 0.0

    def cpu(self) -> float:
        """Seconds of CPU so far, in user and kernel."""
        return cpu_of(self.pid)

    def threads(self) -> int:
        """How many threads it has."""
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))

    def wakeups(self, seconds: float) -> float:
        """Wake-ups a minute, watched for `seconds`."""
        before = switches_of(self.pid)
        time.sleep(seconds)
        return (switches_of(self.pid) - before) * 60 / seconds
