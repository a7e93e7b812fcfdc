"""The daemon as a process: what it has taken from itself, and that it works without."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from daemon_support import AFU, CARD, P0, Node, eventually, request
from test_events import ApiServer
from test_http import get

from fpga_plugin.observability.client import ask

root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has capabilities to lose")


def of_threads(node: Node, *names: str) -> set[tuple[str, ...]]:
    """Lines of /proc/PID/task/*/status by their beginnings, each thread's."""
    found = set()
    for task in Path("/proc", str(node.plugin.process.pid), "task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ends
            lines = (task / "status").read_text().splitlines()
            found.add(tuple(line.split()[1] for line in lines if line.startswith(names)))
    return found


def capabilities(node: Node) -> set[str]:
    """All sets of all threads."""
    return {each for thread in of_threads(node, "Cap") for each in thread}


def shown(node: Node) -> dict[str, dict[str, Any]]:
    status = eventually(lambda: asked(node))
    return {one["name"]: one for one in status["sandbox"]}


def asked(node: Node) -> Any:
    with contextlib.suppress(Exception):
        return ask(str(node.state_dir), "GET", "/status")
    return None


@root
def test_a_plugin_at_work_has_no_capability_in_any_thread():
    with Node("1x2") as node:
        node.up()
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request())
        assert node.afu(P0) == AFU
        assert capabilities(node) == {"0" * 16}


@root
def test_the_plugin_keeps_one_capability_where_its_store_is_another_users():
    with Node("1x2") as node:
        store = node.own_store()
        os.chown(store, 12345, 12345)
        store.chmod(0o700)
        node.up()
        (line,) = node.plugin.logged(
            "CAP_DAC_OVERRIDE is kept: some directories do not belong to root"
        )
        assert line["directories"] == [str(store)]
        assert capabilities(node) == {"0" * 16, "0" * 15 + "2"}
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request())
        assert node.afu(P0) == AFU


def test_every_thread_of_a_plugin_at_work_is_confined_and_the_status_says_so():
    with Node("1x2") as node:
        node.up()
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request())
        assert node.afu(P0) == AFU
        assert of_threads(node, "NoNewPrivs", "Seccomp:") == {("1", "2")}
        (line,) = node.plugin.logged("the plugin is confined")
        assert line["capabilities"] == "none left"
        measures = shown(node)
        assert {name for name, one in measures.items() if one["holds"]} == {
            "capabilities",
            "landlock",
            "seccomp",
        }
        assert {name: one["detail"] for name, one in measures.items()}.items() <= line.items()


def test_switched_off_it_keeps_nothing_but_the_loss_of_capabilities_and_the_status_says_so():
    with Node("1x2", sandbox="off") as node:
        node.up()
        assert of_threads(node, "NoNewPrivs", "Seccomp:") == {("1", "0")}
        (line,) = node.plugin.logged("the plugin is not fully confined")
        assert line["missing"] == ["landlock", "seccomp"]
        for name in line["missing"]:
            assert not shown(node)[name]["holds"]
            assert "FPGA_PLUGIN_SANDBOX" in shown(node)[name]["detail"]


def test_a_confined_plugin_can_still_import_what_it_needs_late(tmp_path: Path):
    """As a new program: what other tests start has imported all of it before it is confined."""
    with (
        ApiServer() as api,
        Node("1x2", http_address="127.0.0.1:0", status_page="true", events="true") as node,
    ):
        node.wrapper = ("env",)
        node.set(kubeconfig=api.kubeconfig(tmp_path))
        node.settings["NODE_NAME"] = "node-1"
        node.up()
        assert node.plugin.logged("the plugin is confined")
        assert get(node.plugin, "/metrics")[0] == get(node.plugin, "/")[0] == 200
        node.unplug(CARD)
        assert eventually(lambda: api.made)


ASKS_A_PROGRAM = """
import asyncio, sys
from fpga_plugin.kubernetes.apiserver.pods import ApiServer
from fpga_plugin.kubernetes.pod import PodSourceError
from fpga_plugin.host.sandbox import seccomp

seccomp.restrict()
try:
    asyncio.run(ApiServer(sys.argv[1]).check())
except PodSourceError as error:
    print(error)
"""


def test_a_kubeconfig_that_runs_a_program_is_told_why_that_does_not_work(tmp_path: Path):
    path = tmp_path / "config"
    program = {"apiVersion": "client.authentication.k8s.io/v1beta1", "command": "/bin/true"}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": "http://127.0.0.1:9"}}],
        "users": [{"name": "u", "user": {"exec": program}}],
    }
    path.write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-c", ASKS_A_PROGRAM, path], capture_output=True, text=True, check=False
    )
    assert "the program that the kubeconfig names for credentials cannot be run" in done.stdout
    assert "FPGA_PLUGIN_SANDBOX=off" in done.stdout


TAKEN_OVER = """
import ctypes, errno, json, os, sys
from fpga_plugin.settings.settings import load_settings
from fpga_plugin.daemon.confinement import confine

libc = ctypes.CDLL(None, use_errno=True)
settings = load_settings(os.environ)

def call(function, *arguments):
    ctypes.set_errno(0)
    return errno.errorcode[ctypes.get_errno()] if function(*arguments) < 0 else "done"

def attempt(function):
    try:
        function()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"

def written(path):
    return lambda: os.close(os.open(path, os.O_WRONLY))

if sys.argv[1] == "confined":
    confine(settings)
fsopen = 430  # the first step of a mount, which asks whether the process may mount at all
kubelets = os.path.join(settings.kubelet_dir, "kubelet_internal_checkpoint")
print(json.dumps({
    "a mount": call(libc.syscall, fsopen, b"tmpfs", 0),
    "the host's name": call(libc.sethostname, b"", -1),
    "kubelet's records, cut off": attempt(lambda: os.truncate(kubelets, 0)),
    "a sysctl": attempt(written("/proc/sys/kernel/core_pattern")),
    "sysfs": attempt(written("/sys/kernel/mm/transparent_hugepage/enabled")),
    "a system file": attempt(written("/etc/passwd")),
    "a file of others": attempt(lambda: os.listdir("/root")),
    "a library": attempt(written(os.__file__)),
    "kubelet's records": attempt(written(kubelets)),
    "a new file": attempt(lambda: open("/var/tmp/fpga-plugin-was-here", "x").close()),
    "a disk": attempt(lambda: os.close(os.open("/dev/kmsg", os.O_RDONLY))),
    "a program": attempt(lambda: os.posix_spawn("/bin/true", ["true"], {})),
    "a user namespace": call(libc.unshare, 0x10000000),
}))
"""


@root
@pytest.mark.parametrize("confined", [False, True])
def test_code_that_takes_the_process_over_is_confined_by_the_sandbox(*, confined: bool):
    """The same attempts without the sandbox succeed: so it is the sandbox that refuses them."""
    with Node("1x2") as node:
        node.kubelet.checkpoint()
        done = subprocess.run(
            [sys.executable, "-c", TAKEN_OVER, "confined" if confined else "free"],
            env=os.environ | node.settings,
            capture_output=True,
            text=True,
            check=False,
        )
        Path("/var/tmp/fpga-plugin-was-here").unlink(missing_ok=True)
        assert done.returncode == 0, done.stderr
        results = json.loads(done.stdout.splitlines()[-1])
        if confined:
            assert set(results.values()) <= {"EPERM", "EACCES"}, results
        else:
            # Nothing of this is refused to root for another reason; a machine may lack some of it.
            assert results["the host's name"] == "EINVAL"
            assert not {"EACCES"} & set(results.values()), results
            whats = ("a mount", "a system file", "a library", "a new file", "a program")
            kubelets = ("kubelet's records", "kubelet's records, cut off")
            assert {results[what] for what in (*whats, *kubelets)} == {"done"}
