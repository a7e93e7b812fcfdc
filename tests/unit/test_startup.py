"""What a plugin that runs has in memory; each test in a new interpreter, which has nothing yet."""

import subprocess
import sys
from functools import cache

import pytest


def fresh(code):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )


IMPORTED = "import sys; from fpga_plugin import cli; run = cli._import_daemon(); "


@cache
def imported():
    """Names of the modules that a running plugin has imported."""
    done = fresh(f"{IMPORTED} print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    return frozenset(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "ssl",
        "importlib.metadata",
        "email",
        "inspect",
        "ast",
        "ctypes.util",
        "shutil",
        "tempfile",
        "pickle",
        "decimal",
        "uuid",
        "ipaddress",
        "typing_extensions",
        "rich",
        "pydantic",
        "h11",
        "prometheus_client",
        "pyudev",
        "yaml",
        "fpga_plugin.commands.demo",
    ],
)
def test_a_running_plugin_has_not_imported(module):
    assert "fpga_plugin.daemon" in imported()
    assert module not in imported()


def test_modules_that_were_hidden_for_the_start_can_be_imported_afterwards():
    done = fresh(f"{IMPORTED} import ssl; ssl.create_default_context()")
    assert done.returncode == 0, done.stderr


def test_an_ssl_that_was_imported_before_stays():
    done = fresh(f"import ssl; {IMPORTED} assert sys.modules['ssl'] is ssl")
    assert done.returncode == 0, done.stderr


def test_a_package_still_knows_its_version_and_metadata_can_be_read_afterwards():
    done = fresh(
        f"{IMPORTED} import betterproto2; from importlib.metadata import version;"
        " assert version('betterproto2') == betterproto2.__version__"
    )
    assert done.returncode == 0, done.stderr


def test_garbage_is_collected_again_after_the_start():
    done = fresh(f"{IMPORTED} import gc; assert gc.isenabled()")
    assert done.returncode == 0, done.stderr
