"""What a workloads file adds to containers, by the daemon as a process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from daemon_support import CARD, CARDS, HEALTHY, P0, P1, REGIONS, ROOT, Node, eventually, request
from dra_support import DraNode

INTERFACE = REGIONS.rpartition("-")[2]

GOOD = f"""\
version: 1
workloads:
- name: opencl
  resources: [region-{INTERFACE}]
  mounts: [{{hostPath: /opt/opencl}}, {{hostPath: /srv/x, containerPath: /x, readOnly: false}}]
  env: {{CL_CONTEXT_COMPILER_MODE_INTELFPGA: 3}}
  devices: [/dev/null]
"""
OTHER = "version: 1\nworkloads: [{name: other, env: {A: 1}}]\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "workloads.yaml"
    path.write_text(GOOD)
    return path


def put(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def status(node: Node, *arguments: str) -> str:
    """What the command says, once the daemon answers it."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("FPGA_PLUGIN_")}

    def answered() -> subprocess.CompletedProcess[str] | None:
        done = subprocess.run(
            [sys.executable, "-m", "fpga_plugin", "status", *arguments],
            env=env | {"FPGA_PLUGIN_STATE_DIR": str(node.state_dir), "COLUMNS": "10000"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        return None if "no fpga-plugin runs here" in done.stderr else done

    done = eventually(answered)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_allocate_adds_what_the_file_says_of_the_resource(file):
    with Node("1x2", workloads=str(file)).up() as node:
        answer = node.kubelet.allocate(P0)
        assert answer.envs["CL_CONTEXT_COMPILER_MODE_INTELFPGA"] == "3"
        assert answer.envs["FPGA_DEVICE_1"] == "/dev/dfl-port.0"
        assert [(m.container_path, m.host_path, m.read_only) for m in answer.mounts] == [
            ("/opt/opencl", "/opt/opencl", True),
            ("/x", "/srv/x", False),
        ]
        assert [d.host_path for d in answer.devices] == ["/dev/dfl-port.0", "/dev/null"]
        node.kubelet.prestart(P0, env=request())
        (shown,) = eventually(lambda: json.loads(status(node, "--json"))["workloads"])
        assert shown["name"] == "opencl"
        assert shown["resources"] == [REGIONS]
        assert f"workload opencl: region-{INTERFACE}" in status(node)


def test_a_claims_containers_get_what_the_file_says_and_a_card_is_another_resource(file):
    """By DRA: from the claim's CDI file, as of its Prepare or the plugin's start."""
    with DraNode("2x2", workloads=str(file)).up() as node:
        claim = node.claim("c", P0, P1)
        node.dra.prepare(claim)
        for number, region in enumerate((P0, P1)):
            edits = node.file(claim)["devices"][number]["containerEdits"]
            assert "CL_CONTEXT_COMPILER_MODE_INTELFPGA=3" in edits["env"]
            path = f"/dev/dfl-port.{number}"
            assert [one["path"] for one in edits["deviceNodes"]] == [path, "/dev/null"]
            assert "FPGA_REQUEST_FPGA=/dev/dfl-port.0,/dev/dfl-port.1" in edits["env"], region
            assert edits["mounts"] == [
                {
                    "hostPath": host,
                    "containerPath": inside,
                    "options": ["rbind", "rprivate", access],
                }
                for host, inside, access in (("/opt/opencl",) * 2 + ("ro",), ("/srv/x", "/x", "rw"))
            ]
        card = node.claim("card", "0000-11-00.0")
        node.dra.prepare(card)
        edits = node.file(card)["devices"][0]["containerEdits"]
        assert "mounts" not in edits
        assert not any(line.startswith("CL_") for line in edits["env"])
        put(file, OTHER)
        node.plugin.until_logged("workloads in force", workloads=["other"])
        assert "A" not in node.env(claim)
        node.again()
        assert node.env(claim)["A"] == "1"
        (shown,) = eventually(lambda: json.loads(status(node, "--json"))["workloads"])
        assert shown["name"] == "other"


def test_a_file_that_is_wrong_at_the_start_takes_nothing_from_prepared_claims(file):
    """An upgrade with a slip in it: containers that start again have their mounts as before."""
    with DraNode("1x2", workloads=str(file)).up() as node:
        kept, lost = node.claim("c", P0), node.claim("d", P1)
        node.dra.prepare(kept)
        node.dra.prepare(lost)
        before = node.file(kept)
        assert before["devices"][0]["containerEdits"]["mounts"]
        node.plugin.kill()
        for path in node.cdi.glob(f"*{lost.uid}*"):
            path.unlink()
        put(file, "version: 1\nworkloads: [{name: x, env: {FPGA_A: 1}}]")
        node.restarted()
        said = "claim's file has not what the workloads file may add"
        assert node.plugin.logged(said, claim=lost.uid)
        assert not node.plugin.logged(said, claim=kept.uid)
        node.dra.prepare(kept)  # kubelet restarted
        assert node.file(kept) == before
        edits = node.file(lost)["devices"][0]["containerEdits"]
        assert [one["path"] for one in edits["deviceNodes"]] == ["/dev/dfl-port.1"]
        assert "mounts" not in edits
        put(file, OTHER)
        node.plugin.until_logged("workloads in force", workloads=["other"])
        node.dra.prepare(lost)
        assert node.env(lost)["A"] == "1"


def test_that_nobody_is_debugged_by_dra_is_said(file):
    with DraNode(debug_namespaces="team").up() as node:
        node.plugin.until_logged("no pod is debugged with FPGA_PLUGIN_MODE=dra")


def test_a_whole_card_is_another_resource(file):
    with Node("1x2", workloads=str(file)).up() as node:
        answer = node.kubelet.allocate(CARD, resource=CARDS)
        assert not answer.mounts
        assert [d.host_path for d in answer.devices] == ["/dev/dfl-port.0", "/dev/dfl-port.1"]


def test_a_new_version_is_taken_and_a_wrong_one_takes_nothing_away(file):
    with Node("1x2", workloads=str(file)).up() as node:
        mark = node.plugin.mark
        put(file, OTHER)
        node.plugin.until_logged("workloads in force", mark, workloads=["other"])
        assert node.kubelet.allocate(P0).envs["A"] == "1"
        put(file, "version: 1\nworkloads: [{name: x, devices: [/dev/dfl-fme.0]}]")
        node.plugin.until_logged(
            "the new workloads file is not taken; what was in force before stays in force", mark
        )
        answer = node.kubelet.allocate(P1)
        assert answer.envs["A"] == "1"
        assert [d.host_path for d in answer.devices] == ["/dev/dfl-port.1"]
        assert "leads to a card" in json.loads(status(node, "--json"))["workloads_problem"]
        assert "leads to a card" in status(node)


@pytest.mark.parametrize("text", [None, "", "version: 1\nworkloads: [{name: x, env: {FPGA_A: 1}}]"])
def test_a_wrong_file_at_the_start_keeps_devices_from_nobody(file, text):
    file.unlink()
    if text is not None:
        file.write_text(text)
    with Node("1x2", workloads=str(file)).up() as node:
        node.kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
        assert node.kubelet.allocate(P0).envs.keys() == {
            "FPGA_DEVICES_REGION_CE489693",
            "FPGA_DEVICE_0000_10_00_0_P0",
            "FPGA_DEVICE_1",
        }
        mark = node.plugin.mark
        put(file, GOOD)
        node.plugin.until_logged("workloads in force", mark, workloads=["opencl"])
        assert node.kubelet.allocate(P1).mounts
