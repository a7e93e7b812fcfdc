"""`fpga-plugin demo --serve`: a page to look at, pods that come and go, and nothing left behind."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 60.0


@contextlib.contextmanager
def demo(*options, folder):
    """A running one, and its address."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("FPGA_PLUGIN_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "fpga_plugin", "demo", "--serve", *options],
        env=env | {"TMPDIR": str(folder)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"page (http://127\.0\.0\.1:[0-9]+/)", line)
        assert found, line + process.stderr.read()
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


def ask(variables, *words):
    env = {k: v for k, v in os.environ.items() if not k.startswith("FPGA_PLUGIN_")}
    return subprocess.run(
        [sys.executable, "-m", "fpga_plugin", *words],
        env=env | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def get(url):
    with urllib.request.urlopen(url, timeout=LIMIT) as answer:
        return answer.read().decode()


def until(look):
    deadline = time.monotonic() + LIMIT
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


@pytest.fixture
def folder():
    # Short: kubelet's sockets are in it, and their paths have at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="serve-", dir="/tmp") as path:
        yield Path(path)


def test_pods_come_and_go_on_a_page_until_ctrl_c(folder):
    with demo(folder=folder) as (process, url):

        def pods():
            status = json.loads(get(f"{url}status.json"))
            regions = [region for card in status["cards"] for region in card["regions"]]
            names = {
                one["owner"]["pod"]: one["condition"]
                for one in regions
                if one["owner"] is not None and one["owner"]["pod"]
            }
            return names if "PROGRAMMED" in names.values() else None

        first = until(pods)
        page = get(url)
        assert "FPGAs of demo" in page
        assert any(name in page for name in first)
        assert "fpga_plugin_calls_total" in get(f"{url}metrics")

        def went():
            events = json.loads(get(f"{url}history.json"))["events"]
            return {one["event"] for one in events} == {
                "claimed",
                "released",
                "programmed",
                "scrubbed",
                "refused",
            }

        until(went)
        assert process.stderr is not None
        offered = re.fullmatch(
            r"fpga-plugin: try: (.*) fpga-plugin status  \(or .*\)\n", process.stderr.readline()
        )
        assert offered
        given = dict(one.split("=", 1) for one in shlex.split(offered[1]))
        assert "FREE" in ask(given, "status").stdout
        assert "0000-10-00.0-p0" in ask(given, "card", "list").stdout
        assert "the hardware says now" in ask(given, "card", "show", "0000-10-00.0").stdout

        # With the state directory alone the plugin answers, and its cards are not found.
        state = {"FPGA_PLUGIN_STATE_DIR": given["FPGA_PLUGIN_STATE_DIR"]}
        assert "FREE" in ask(state, "status").stdout
        for words in (("card", "list"), ("card", "show", "0000-10-00.0")):
            assert "set FPGA_PLUGIN_BACKEND" in ask(state, *words).stderr
        process.send_signal(signal.SIGINT)
        told, complaints = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, complaints
    assert "runs on 0000-10-00.0-p" in told
    # The store has images for Alveo cards, too; nobody asks for them here.
    assert set(re.findall(r"/([a-z]+)-[0-9]+ is refused: no bitstream", told)) == {"refused"}
    assert "Traceback" not in complaints
    assert list(folder.iterdir()) == []


def test_trouble_comes_and_is_told_with_the_file_that_makes_it(folder):
    with demo("--trouble", folder=folder) as (process, url):

        def failed():
            status = json.loads(get(f"{url}status.json"))
            return [
                region
                for card in status["cards"]
                for region in card["regions"]
                if region["failed"] and "AP6" in region["reason"]
            ]

        (region,) = until(failed)
        assert f'id="region-{region["region"]}"' in get(url)
        process.send_signal(signal.SIGINT)
        told, complaints = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, complaints
    line = next(line for line in told.splitlines() if "trouble: " in line)
    assert f"region {region['region']}: thermal (" in line
    assert f"/faults/{region['region']})" in line
    assert "Traceback" not in complaints
    assert list(folder.iterdir()) == []


def test_trouble_without_a_page_is_wrong_usage():
    done = subprocess.run(
        [sys.executable, "-m", "fpga_plugin", "demo", "--trouble"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
    )
    assert done.returncode == 2
    assert "--trouble needs --serve" in done.stderr


def test_it_ends_when_nobody_reads_it_any_more(folder):
    with demo(folder=folder) as (process, _):
        process.stdout.close()
        process.stdout = None
        process.wait(LIMIT)
    assert list(folder.iterdir()) == []


def test_an_address_that_cannot_be_had_is_told(folder):
    with demo(folder=folder) as (_, url):
        address = url.removeprefix("http://").rstrip("/")
        done = subprocess.run(
            [sys.executable, "-m", "fpga_plugin", "demo", "--serve", address],
            env=os.environ | {"TMPDIR": str(folder)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT,
        )
    assert done.returncode == 1
    assert "another process has it" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_page_and_a_pod_of_ones_own_are_one_too_many(folder):
    done = subprocess.run(
        [sys.executable, "-m", "fpga_plugin", "demo", "--serve", "--pod", "x.yaml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
    )
    assert done.returncode == 2
    assert "not allowed with" in done.stderr
