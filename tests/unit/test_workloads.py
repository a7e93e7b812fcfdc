"""The workloads file: what is understood, what is refused, and what containers get by it."""

import asyncio
import json
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from fpga_plugin.build import open_workloads
from fpga_plugin.claims.calls import Allocation
from fpga_plugin.config.settings import load_settings
from fpga_plugin.errors import MAX_MESSAGE_BYTES
from fpga_plugin.hardware.grant import Grant, Mount
from fpga_plugin.ids import RegionId, Resource
from fpga_plugin.workloads.file import WorkloadsFile
from fpga_plugin.workloads.parse import (
    MAX_ENTRIES,
    MAX_ITEMS,
    MAX_VALUE,
    WorkloadsError,
    parse_workloads,
)
from fpga_plugin.workloads.paths import Guarded
from fpga_plugin.workloads.rules import Extras, Workloads

INTERFACE = "ce48969398f05f33946d560708be108a"
OTHER = "38d782e3b6125343b9342433e348ac4c"
REGIONS = Resource.parse(f"fpga.intel.com/region-{INTERFACE}")
CARDS = Resource.parse(f"fpga.intel.com/fpga-{INTERFACE}")
OTHERS = Resource.parse(f"fpga.intel.com/region-{OTHER}")

TEXT = f"""\
version: 1
workloads:
- name: opencl
  interfaces: [CE489693-98F0-5F33-946D-560708BE108A]
  mounts:
  - hostPath: /opt/intel/opencl
  - {{hostPath: /srv/scratch, containerPath: /scratch, readOnly: false}}
  env: {{CL_CONTEXT_COMPILER_MODE_INTELFPGA: 3, OCL_ICD_VENDORS: /opt/intel/opencl}}
- name: whole-cards
  resources: [fpga-{INTERFACE}]
  devices: [/dev/hugepool]
- name: all
  mounts: [{{hostPath: /opt/intel/opencl}}]
"""

OPENCL = Mount("/opt/intel/opencl", "/opt/intel/opencl")
SCRATCH = Mount("/srv/scratch", "/scratch", read_only=False)
NAMES = ["opencl", "whole-cards", "all"]
ENV = {"CL_CONTEXT_COMPILER_MODE_INTELFPGA": "3", "OCL_ICD_VENDORS": "/opt/intel/opencl"}


def workloads(text: str = TEXT) -> Workloads:
    return parse_workloads(text.encode())


@pytest.mark.parametrize(
    ("resource", "names", "extras"),
    [
        (REGIONS, ["opencl", "all"], Extras((OPENCL, SCRATCH), ENV)),
        (
            CARDS,
            ["opencl", "whole-cards", "all"],
            Extras((OPENCL, SCRATCH), ENV, ("/dev/hugepool",)),
        ),
        (OTHERS, ["all"], Extras((OPENCL,))),
    ],
    ids=["region", "card", "other card"],
)
def test_a_resource_gets_what_the_entries_about_it_add(resource, names, extras):
    assert [entry.name for entry in workloads().of(resource)] == names
    assert workloads().extras(resource) == extras


def test_the_example_of_the_page_is_right():
    page = (Path(__file__).parents[2] / "docs/workloads.md").read_text(encoding="utf-8")
    example = page.partition("```yaml\n")[2].partition("```")[0]
    assert [entry.name for entry in workloads(example).entries] == ["opencl", "opae-plugins"]


def test_json_says_the_same_as_yaml():
    entry = {"name": "a", "mounts": [{"hostPath": "/a", "readOnly": False}], "env": {"A": "1"}}
    raw = json.dumps({"version": 1, "workloads": [entry]}).encode()
    yaml = (
        "version: 1\nworkloads: [{name: a, mounts: [{hostPath: /a, readOnly: false}], env: {A: 1}}]"
    )
    assert parse_workloads(raw, as_json=True) == workloads(yaml)


ENTRY = "version: 1\nworkloads:\n- {name: a, "


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("version: 2\nworkloads: []", "version"),
        ("version: 1", "workloads"),
        ("version: 1\nworkloads: [{env: {A: 1}}]", "name"),
        ("version: 1\nworkloads: [{name: a b, env: {A: 1}}]", "'a b' is no name"),
        (ENTRY + "env: {A: 1}}\n- {name: a, env: {B: 1}}", "another workload a"),
        (ENTRY + "environment: {A: 1}}", "environment"),
        (ENTRY + "}", "workload a: adds nothing"),
        (ENTRY + "resources: []}", "resources is empty"),
        (ENTRY + "interfaces: []}", "interfaces is empty"),
        (ENTRY + "resources: [fpga.intel.com/region-x]}", "resources: 'fpga.intel.com/region-x'"),
        (ENTRY + "interfaces: [abc]}", "interfaces: 'abc'"),
        # Nobody takes the place of what the pod asks for or the plugin says.
        (ENTRY + "env: {FPGA_REGION_1: x}}", "'FPGA_REGION_1': FPGA_* are"),
        (ENTRY + "env: {fpga_device_1: x}}", "'fpga_device_1': FPGA_* are"),
        (ENTRY + "env: {A-B: x}}", "'A-B' is no name"),
        (ENTRY + 'env: {A: "x\\ny"}}', "env: A is no line"),
        (ENTRY + "env: {A: " + "x" * (MAX_VALUE + 1) + "}}", "env: A is no line"),
        # No container gets what programs cards, or somebody else's region.
        (ENTRY + "devices: [/dev/dfl-fme.0]}", "leads to a card"),
        (ENTRY + "devices: [/dev/dfl-port.1]}", "leads to a card"),
        (ENTRY + "devices: [/dev/intel-fpga-fme.0]}", "leads to a card"),
        (ENTRY + "devices: [/dev/vfio/7]}", "leads to a card"),
        (ENTRY + "devices: [/dev/x/../dfl-fme.0]}", "not an absolute path"),
        (ENTRY + "devices: [/dev//dfl-fme.0]}", "not an absolute path"),
        (ENTRY + "devices: [//dev/dfl-fme.0]}", "not an absolute path"),
        (ENTRY + "devices: [dfl-fme.0]}", "not an absolute path"),
        (ENTRY + "devices: [/dev/mem]}", "the node's memory"),
        (ENTRY + "devices: [/opt/x]}", "no path below /dev"),
        (ENTRY + "mounts: [{hostPath: opt}]}", "hostPath 'opt': not an absolute path"),
        (ENTRY + "mounts: [{hostPath: /}]}", "hostPath '/': not an absolute path"),
        (ENTRY + "mounts: [{hostPath: /a/}]}", "not an absolute path"),
        (ENTRY + "mounts: [{hostPath: /a/../dev}]}", "not an absolute path"),
        (ENTRY + "mounts: [{hostPath: /dev}]}", "is in /dev"),
        (ENTRY + "mounts: [{hostPath: /dev/dfl-fme.0, containerPath: /x}]}", "is in /dev"),
        (ENTRY + "mounts: [{hostPath: /sys}]}", "is in /sys"),
        (ENTRY + "mounts: [{hostPath: /var}]}", "in /var/run"),
        (ENTRY + "mounts: [{hostPath: /run/containerd}]}", "is in /run"),
        (
            ENTRY + "mounts: [{hostPath: /etc, readOnly: false}]}",
            "/etc, which no container may write",
        ),
        (ENTRY + "mounts: [{hostPath: /a, containerPath: /proc/x}]}", "containerPath '/proc/x'"),
        (ENTRY + "mounts: [{hostPath: /a, readOnly: no}]}", "readOnly"),
        (
            ENTRY + "mounts: [{hostPath: /a}, {hostPath: /b, containerPath: /a}]}",
            "two of them at /a",
        ),
        (
            ENTRY
            + "mounts: [{hostPath: /a}]}\n- {name: b, mounts: [{hostPath: /b, containerPath: /a}]}",
            "workload b: mounts something else at /a than a",
        ),
        (ENTRY + "env: {A: 1}}\n- {name: b, env: {A: 2}}", "b: sets A to something else than a"),
        (ENTRY + "devices: [" + "/dev/x, " * (MAX_ITEMS + 1) + "]}", "devices has more than 50"),
        ("version: 1\nworkloads: [" + "{name: a}, " * (MAX_ENTRIES + 1) + "]", "more than 100"),
    ],
)
def test_what_is_wrong_or_dangerous_is_refused_by_name(text, says):
    with pytest.raises(WorkloadsError) as caught:
        workloads(text)
    assert says in caught.value.message
    assert "docs/workloads.md" in caught.value.hint
    assert len(str(caught.value).encode()) <= MAX_MESSAGE_BYTES


def test_entries_that_no_container_gets_together_may_differ():
    text = (
        f"version: 1\nworkloads:\n- {{name: a, interfaces: [{INTERFACE}], env: {{A: 1}}}}\n"
        f"- {{name: b, interfaces: [{OTHER}], env: {{A: 2}}}}\n"
        f"- {{name: c, resources: [fpga-{'0' * 32}], env: {{A: 3}}}}"
    )
    with pytest.raises(WorkloadsError, match="workload c: sets A"):
        workloads(text)  # of which card its resource is, its name alone does not say
    assert workloads(text.rpartition("\n")[0]).extras(OTHERS).env == {"A": "2"}


@pytest.mark.parametrize("path", ["/dev/hugepages", "/dev/hugepages-1G", "/dev/shm", "/etc/OpenCL"])
def test_what_opae_and_opencl_need_may_be_mounted(path):
    text = f"{ENTRY}mounts: [{{hostPath: {path}}}]}}"
    if path == "/dev/hugepages-1G":  # no such mount is usual: refused like the rest of /dev
        with pytest.raises(WorkloadsError):
            workloads(text)
        return
    assert workloads(text).extras(REGIONS).mounts == (Mount(path, path),)


@pytest.mark.parametrize(
    ("path", "read_only", "allowed"),
    [
        ("/var/lib/kubelet/device-plugins", True, False),
        ("/var/lib", True, False),
        ("/state/verified", True, False),
        ("/store", True, True),
        ("/store", False, False),
        ("/store/x", False, False),
        ("/", False, False),
        ("/stores", False, True),
    ],
)
def test_the_plugins_and_kubelets_directories_are_not_handed_over(path, read_only, allowed):
    text = f"{ENTRY}mounts: [{{hostPath: {path}, readOnly: {str(read_only).lower()}}}]}}"
    guarded = Guarded(private=("/var/lib/kubelet", "/state"), kept=("/store",))
    if allowed:
        assert parse_workloads(text.encode(), guarded=guarded).entries
        return
    with pytest.raises(WorkloadsError):
        parse_workloads(text.encode(), guarded=guarded)


@pytest.mark.parametrize(
    ("path", "allowed"), [("/data/s/x", False), ("/data/k", False), ("/data/b", True)]
)
def test_directories_that_the_node_has_elsewhere_are_guarded_there(tmp_path, path, allowed):
    file = tmp_path / "workloads.yaml"
    file.write_text(f"{ENTRY}mounts: [{{hostPath: {path}}}]}}")
    environment = {
        "FPGA_PLUGIN_BACKEND": "simulated",
        "FPGA_PLUGIN_WORKLOADS": str(file),
        "FPGA_PLUGIN_HOST_PATHS": "/data/k/, /data/s,/data/b:ro",
    }
    found = open_workloads(load_settings(environment))
    assert found is not None
    assert bool(found.problem) is not allowed, found.problem


def test_a_store_that_the_node_has_elsewhere_is_not_written(tmp_path):
    file = tmp_path / "workloads.yaml"
    file.write_text(f"{ENTRY}mounts: [{{hostPath: /data/b/x, readOnly: false}}]}}")
    settings = {"FPGA_PLUGIN_BACKEND": "simulated", "FPGA_PLUGIN_WORKLOADS": str(file)}
    free = open_workloads(load_settings(settings))
    kept = open_workloads(load_settings(settings | {"FPGA_PLUGIN_HOST_PATHS": "/data/b:ro"}))
    assert free is not None
    assert kept is not None
    assert not free.problem
    assert "/data/b" in kept.problem


def test_the_plugins_own_wins_over_what_is_added():
    grant = Grant(("/dev/a",), mounts=(Mount("/own", "/lib"),), env={"OWN": "1"})
    own = Allocation.of(REGIONS, {RegionId("0000-3b-00.0-p0"): grant})
    more = Extras(
        (Mount("/x", "/lib"), Mount("/x", "/y")), {"OWN": "2", "A": "1"}, ("/dev/a", "/dev/b")
    )
    both = own.plus(more)
    assert both.envs == {**own.envs, "A": "1"}
    assert both.nodes == ("/dev/a", "/dev/b")
    assert both.mounts == (Mount("/own", "/lib"), Mount("/x", "/y"))


@pytest.fixture
def opened(tmp_path: Path):
    """Opens a file of these entries, with `dev` as the node's `/dev`."""
    (tmp_path / "dev").mkdir()

    def open_(text: str) -> WorkloadsFile:
        path = tmp_path / "workloads.yaml"
        path.write_text(text)
        dev = str(tmp_path / "dev")
        return WorkloadsFile(str(path), guarded=False, dev_root=dev, paths=Guarded())

    return open_


def test_a_wrong_first_version_adds_nothing_and_the_next_is_taken(opened):
    with capture_logs() as logs:
        file = opened("version: 1")
    assert file.content == Workloads()
    assert "workloads" in file.problem
    assert [line["log_level"] for line in logs] == ["error"]
    Path(file.path).write_text(TEXT)
    assert [entry.name for entry in asyncio.run(file.current()).entries] == NAMES
    assert not file.problem
    os.unlink(file.path)
    assert [entry.name for entry in asyncio.run(file.current()).entries] == NAMES
    assert "cannot be read" in file.problem


def test_a_file_that_others_may_write_adds_nothing(tmp_path):
    path = tmp_path / "workloads.yaml"
    path.write_text(TEXT)
    path.chmod(0o666)
    file = WorkloadsFile(str(path), guarded=True, dev_root="/dev", paths=Guarded())
    assert file.content == Workloads()
    assert "may be written by anybody" in file.problem


@pytest.mark.parametrize("target", ["dfl-fme.0", "{dev}/dfl-fme.0", "/dev/vfio/7", "/dev/mem"])
def test_a_link_to_a_node_that_nobody_gets_is_refused(opened, tmp_path, target):
    (tmp_path / "dev/x").symlink_to(target.format(dev=tmp_path / "dev"))
    file = opened(f"{ENTRY}devices: [/dev/x]}}")
    assert file.content == Workloads()
    assert "workload a: devices: /dev/x is a link to" in file.problem


def test_a_node_that_is_not_there_is_told_and_refuses_nothing(opened, tmp_path):
    with capture_logs() as logs:
        file = opened(f"{ENTRY}devices: [/dev/x, /dev/y]}}")
        (tmp_path / "dev/y").touch()
    (entry,) = file.content.entries
    assert file.absent(entry) == ("/dev/x",)
    assert [line.get("absent") for line in logs if line["log_level"] == "warning"] == [
        {"a": ("/dev/x", "/dev/y")}
    ]
