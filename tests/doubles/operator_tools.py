"""Stands in for the programs that a document's commands call: kubectl, helm, sudo, curl, make.

A directory of a test's PATH has a script of each name that calls this, the name first. What is ours
is run for real (`kubectl exec ... -- fpga-plugin`, `sudo fpga-plugin`); what a cluster would do is
answered from files of the test; what is written is held against what the project has: values of the
chart, targets of the Makefile, labels of the pods, files.
"""
# ruff: noqa: T201  # these programs print

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import NoReturn

import yaml

HERE = Path(os.environ["TOOLS_HERE"])
ROOT = Path(os.environ["TOOLS_ROOT"])
CHART = ROOT / "deploy/helm/fpga-plugin"

FLAGS_WITH_VALUE = {
    *("-n", "--namespace", "-l", "--selector", "-o", "--field-selector", "-f", "-k", "--set"),
}
VERBS = {
    *(
        "annotate",
        "apply",
        "cordon",
        "create",
        "delete",
        "describe",
        "drain",
        "exec",
        "get",
        "label",
    ),
    *("logs", "patch", "port-forward", "rollout", "uncordon", "wait"),
}
LABELS = {"app.kubernetes.io/part-of": "fpga-plugin"}
PODS = """\
team   app     map[cpu:1 fpga.intel.com/region-0:1]
team   init    map[fpga.intel.com/fpga-0:1]
team   none    <none>
team   other   map[cpu:1]
"""
"""What the real kubectl says of such pods; tests/kubelet/test_install.py asks it."""


def fail(why: str) -> None:
    """This command could not have been meant."""
    sys.exit(f"{why}: {sys.argv[1:]}")


def options(words: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Words, and options with their values."""
    plain: list[str] = []
    found: dict[str, list[str]] = {}
    rest = iter(words)
    for word in rest:
        name, is_given, value = word.partition("=")
        if word.startswith("-") and name in FLAGS_WITH_VALUE:
            found.setdefault(name, []).append(value if is_given else next(rest))
        elif word.startswith("-") and word != "-":
            found.setdefault(name, []).append(value)
        else:
            plain.append(word)
    return plain, found


def of_chart(path: str) -> None:
    """A value that is set is one of the chart's schema."""
    at = json.loads((CHART / "values.schema.json").read_text())
    root = at
    for name in re.sub(r"\[[0-9]+\]", ".[]", path).split("."):
        if "$ref" in at:
            at = root["definitions"]["settings"]
        properties = at.get("properties", {"[]": at["items"]} if "items" in at else {})
        if name not in properties and not isinstance(at.get("additionalProperties"), dict):
            fail(f"the chart has no value {path}")
        at = properties.get(name) or at["additionalProperties"]


def helm(words: list[str]) -> int:
    """The chart is there, and each value that is set."""
    plain, found = options(words)
    verb, name = plain[:2]
    if verb not in {"install", "upgrade", "uninstall", "test"} or name != "fpga-plugin":
        fail("not what the documents call the release")
    if verb in {"install", "upgrade"}:
        if not (Path(plain[2]) / "Chart.yaml").exists():
            fail("no chart there")
        if verb == "upgrade" and "--reset-then-reuse-values" not in found:
            fail("loses the new chart's defaults, or the values that were given")
        sets = [value.partition("=") for value in found.get("--set", [])]
        for path, _, _ in sets:
            of_chart(path)
        if verb == "install" and "image.repository" not in {path for path, _, _ in sets}:
            fail("no image")
    return 0


def kubectl(words: list[str]) -> int:
    """A cluster with the plugin's pods, and two pods that have FPGAs."""
    if "--" in words:
        inside = words[words.index("--") + 1 :]
        return subprocess.run(inside, check=False).returncode
    plain, found = options(words)
    if not plain or plain[0] not in VERBS:
        fail("no such verb")
    for selector in [*found.get("-l", []), *found.get("--selector", [])]:
        key, _, value = selector.partition("=")
        if LABELS.get(key) != value:
            fail("selects no pod of every release")
    for path in found.get("-f", []):
        text = sys.stdin.read() if path == "-" else Path(path).read_text()
        if not all(each["kind"] for each in yaml.safe_load_all(text)):
            fail("no objects")
    for path in found.get("-k", []):
        kustomization = yaml.safe_load((Path(path) / "kustomization.yaml").read_text())
        parts = [*kustomization["resources"], *kustomization.get("components", [])]
        if not all((Path(path) / part / "kustomization.yaml").exists() for part in parts):
            fail("no such part of deploy/kustomize")
    _answer(plain[0], found.get("-o"))
    return 0


def _answer(verb: str, form: list[str] | None) -> None:
    if verb == "logs":
        print((HERE / "log").read_text())
    elif form and ".limits" in form[0]:
        print(PODS)
    elif form == ["name"]:
        print("pod/fpga-plugin-x")
    elif verb == "get":
        print("uid")


def curl(words: list[str]) -> int:
    """The page of the plugin that runs here, whatever its port."""
    address = words[-1].replace("localhost:9102", os.environ["TOOLS_HTTP"])
    with urllib.request.urlopen(f"http://{address}", timeout=30) as answer:
        print(answer.read().decode())
    return 0


def make(words: list[str]) -> int:
    """What it would do, without doing it."""
    real = [p for p in os.environ["PATH"].split(os.pathsep) if p != str(HERE / "bin")]
    environment = os.environ | {"PATH": os.pathsep.join(real)}
    command = ["make", "-n", "-C", str(ROOT), *words]
    return subprocess.run(
        command, env=environment, stdout=subprocess.DEVNULL, check=False
    ).returncode


def sudo(words: list[str]) -> NoReturn:
    """The same, by whoever runs the test."""
    command = [word for word in words if word != "-E"]
    os.execvp(command[0], command)


TOOLS = {"helm": helm, "kubectl": kubectl, "curl": curl, "make": make, "sudo": sudo}

if __name__ == "__main__":
    sys.exit(TOOLS[sys.argv[1]](sys.argv[2:]))
