"""What a plugin that runs has not imported; in a new interpreter, which has nothing yet."""

import subprocess
import sys
from functools import cache

import pytest


@cache
def imported():
    """Names of the modules that a running plugin has imported."""
    done = subprocess.run(
        [
            *(sys.executable, "-W", "error", "-c"),
            (
                "import sys, fpga_plugin.commands.main as _, fpga_plugin.daemon.process;"
                " print(*sys.modules)"
            ),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return frozenset(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "cryptography",
        "h11",
        "httpx2",
        "lightkube",
        "jinja2",
        "prometheus_client",
        "pyudev",
        "yaml",
        "fpga_plugin.demo",
        "fpga_plugin.observability.page",
    ],
)
def test_a_running_plugin_has_not_imported(module):
    assert "fpga_plugin.daemon.process" in imported()
    assert module not in imported()
