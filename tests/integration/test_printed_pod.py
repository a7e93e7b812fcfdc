"""`bitstream manifest FILE` prints a pod that asks for the file, and is served as it is."""

import subprocess
from pathlib import Path

import pytest
import yaml
from daemon_support import ROOT, command

ID = "ce48969398f05f33946d560708be108a"
STORE = ROOT / "bitstreams" / ID
FILES = [file for file in sorted(STORE.iterdir()) if file.stem != "blank" and len(file.stem) >= 32]
FILES = [file for file in FILES if file.suffix in {".gbs", ".aocx"}]


def run(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return command(*arguments, settings=settings)


@pytest.mark.parametrize("file", FILES, ids=[file.suffix + file.stem[:4] for file in FILES])
def test_the_pod_asks_for_the_file_and_for_a_region_that_it_fits(file: Path):
    done = run("bitstream", "manifest", str(file), FPGA_PLUGIN_RESOURCE_PREFIX="a.example")
    assert done.returncode == 0, done.stderr
    (container,) = yaml.safe_load(done.stdout)["spec"]["containers"]
    assert container["resources"]["limits"] == {f"a.example/region-{ID}": 1}
    assert {one["name"]: one["value"] for one in container["env"]} == {
        "FPGA_REGION_1": ID,
        "FPGA_BITSTREAM_ID_1": file.stem,
    }


def test_the_pod_is_served_as_it_is(tmp_path: Path):
    pod = tmp_path / "pod.yaml"
    pod.write_text(run("bitstream", "manifest", str(FILES[0]), "--image", "app:2").stdout)
    assert "image: app:2 " in pod.read_text()
    done = run("demo", "-q", "--pod", str(pod))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("Served: ")


@pytest.mark.parametrize("image", ["", "a b", "a\nb: c", "a#", "{x}"])
def test_an_image_that_would_be_other_yaml_is_wrong_usage(image: str):
    done = run("bitstream", "manifest", str(FILES[0]), "--image", image)
    assert done.returncode == 2
    assert "image" in done.stderr


def test_a_file_that_is_no_bitstream_is_refused():
    done = run("bitstream", "manifest", str(ROOT / "README.md"))
    assert done.returncode == 1
    assert not done.stdout
