"""Runs tests on nodes with containerd 2: `pods_namespace.py 1.36 python -m pytest ...`.

Each module of pods has a node of its own, with a control plane, and they run side by side: they
wait most of the time, for what kubelet does once a minute. Namespaces and cgroups are those of
`tests/kubelet/namespace.py`. With `--one` the command runs on one node, as it is.
"""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "kubelet"))

import namespace  # found by the line above

HERE = Path(__file__).parent
PROGRAMS = ("kubelet", "etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager")


def main(version: str, command: list[str]) -> int:
    """Build, run, remove; the command's exit code."""
    if why := namespace.missing():
        sys.exit(f"test-dra: {why}")
    if running := namespace.kubelets():
        sys.exit(f"test-dra: a kubelet is running here (pid {running[0]}), and stays alone")
    for build in ((namespace.HERE / "build", version, *PROGRAMS), (HERE / "build",)):
        if subprocess.run(build, check=False).returncode != 0:
            sys.exit(f"test-dra: {build[0].parent.name}'s programs cannot be built")
    namespace.sweep()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, namespace.interrupted)
    # containerd finds its shim by the path.
    os.environ["PATH"] = f"{namespace.BUILT / 'containerd'}:{os.environ['PATH']}"
    if command[0] == "--one":
        return _run(version, {"": (command[1:], None)})
    modules = {path.stem.removeprefix("test_"): path for path in HERE.glob("test_pods*.py")}
    return _run(
        version,
        {
            name.replace("_", "-"): ([*command, str(path)], namespace.BUILT / f"{name}.log")
            for name, path in sorted(modules.items())
        },
    )


def _run(version: str, parts: dict[str, tuple[list[str], Path | None]]) -> int:
    """Commands side by side, their output one after the other."""
    began: dict[str, Path | None] = {}
    with ExitStack() as nodes:
        try:
            runs = []
            for name, (command, output) in parts.items():
                whole = f"{namespace.PREFIX}{os.getpid()}-dra{name and f'-{name}'}"
                node = namespace.Node(whole, version, "", command, output)
                nodes.callback(node.close)
                runs.append(node)
                began[name] = output
            codes = [node.wait() for node in runs]
        finally:
            namespace.show(began)
    # A part may have none of the tests that were asked for.
    return max((code for code in codes if code != namespace.NO_TESTS), default=0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
