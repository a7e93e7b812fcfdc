"""The chart and the kustomization, rendered by the real helm and kustomize: `make test-deploy`."""

import copy
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import fpga_plugin

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/fpga-plugin"
KUSTOMIZE = ROOT / "deploy/kustomize"
TOOLS = ROOT / ".cache/deploy"

pytestmark = pytest.mark.skipif(
    not (TOOLS / "helm").exists() or not (TOOLS / "kustomize").exists(),
    reason="helm and kustomize are not built: make test-deploy",
)

Objects = dict[tuple[str, str], dict[str, Any]]

HELMS_OWN = ("app.kubernetes.io/managed-by", "helm.sh/chart")


def helm(*arguments: str, release: str = "fpga-plugin") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TOOLS / "helm", "template", release, CHART, "--namespace", "fpga-plugin", *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def rendered(*values: str) -> Objects:
    sets = [
        word for value in ("image.repository=fpga-plugin", *values) for word in ("--set", value)
    ]
    done = helm(*sets)
    assert done.returncode == 0, done.stderr
    return objects(done.stdout)


def built(directory: Path) -> Objects:
    done = subprocess.run(
        [TOOLS / "kustomize", "build", directory], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return objects(done.stdout)


def objects(text: str) -> Objects:
    found = {}
    for each in yaml.safe_load_all(text):
        if each is not None:
            key = each["kind"], each["metadata"]["name"]
            assert key not in found
            found[key] = each
    return found


def comparable(given: Objects) -> Objects:
    """Without what only helm says of itself, without the order of what has none."""
    compared = {}
    for key, each in copy.deepcopy(given).items():
        if key[0] == "Namespace":
            continue  # helm makes none: it is told which
        for name in HELMS_OWN:
            each["metadata"].get("labels", {}).pop(name, None)
        if key[0] == "DaemonSet":
            (container,) = each["spec"]["template"]["spec"]["containers"]
            container["env"].sort(key=lambda entry: entry["name"])
            container["volumeMounts"].sort(key=lambda entry: entry["name"])
        compared[key] = each
    return compared


def pod_spec(given: Objects) -> dict[str, Any]:
    spec: dict[str, Any] = given["DaemonSet", "fpga-plugin"]["spec"]["template"]["spec"]
    return spec


ALL = ("nodeFeatureRule.create=true", "podMonitor.create=true", "events=true")


@pytest.mark.parametrize(
    ("values", "directory"),
    [((), "base"), (("observe=true",), "overlays/observe"), (ALL, "overlays/all")],
)
def test_chart_and_kustomization_make_the_same_objects(values: Sequence[str], directory: str):
    assert comparable(rendered(*values)) == comparable(built(KUSTOMIZE / directory))


def test_without_an_image_the_chart_says_how_to_make_one():
    done = helm()
    assert done.returncode != 0
    image = f"REGISTRY/fpga-plugin:{fpga_plugin.__version__}"
    assert f"make image BASE=debian:bookworm-slim@sha256:... IMAGE={image}" in done.stderr
    assert f"docker push {image}" in done.stderr
    assert "image.repository" in done.stderr


def test_a_digest_takes_the_place_of_the_tag():
    spec = pod_spec(rendered("image.repository=r.example/x", "image.digest=sha256:abc"))
    assert spec["containers"][0]["image"] == "r.example/x@sha256:abc"


def test_settings_become_variables_whatever_their_type():
    spec = pod_spec(rendered("settings.FPGA_PLUGIN_RECONCILE_INTERVAL=5"))
    env = {entry["name"]: entry.get("value") for entry in spec["containers"][0]["env"]}
    assert env["FPGA_PLUGIN_RECONCILE_INTERVAL"] == "5"


def test_a_number_of_a_values_file_reaches_the_plugin_as_it_is_written(tmp_path: Path):
    """Helm reads such numbers as floats: 8589934592 must not become 8.589934592e+09."""
    written = {
        "FPGA_PLUGIN_VERIFIED_SIZE": 8589934592,
        "FPGA_PLUGIN_RECONCILE_INTERVAL": 0.5,
        "FPGA_PLUGIN_STATUS_PAGE": True,
        "FPGA_PLUGIN_CARDS": "!0000:3b:00.0",
    }
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"image": {"repository": "x"}, "settings": written}))
    done = helm("--values", str(values))
    assert done.returncode == 0, done.stderr
    env = {
        e["name"]: e.get("value") for e in pod_spec(objects(done.stdout))["containers"][0]["env"]
    }
    assert {name: env[name] for name in written} == {
        "FPGA_PLUGIN_VERIFIED_SIZE": "8589934592",
        "FPGA_PLUGIN_RECONCILE_INTERVAL": "0.5",
        "FPGA_PLUGIN_STATUS_PAGE": "true",
        "FPGA_PLUGIN_CARDS": "!0000:3b:00.0",
    }


@pytest.mark.parametrize("name", ["FPGA_PLUGIN_SCRUBB", "FPGA_PLUGIN_DEV_ROOT", "LD_PRELOAD"])
def test_an_unknown_setting_and_one_that_the_chart_sets_itself_are_refused(name: str):
    done = helm("--set", "image.repository=x", "--set", f"settings.{name}=1")
    assert done.returncode != 0
    assert name in done.stderr


def test_policy_and_keys_are_mounted_where_the_settings_say():
    made = rendered("policy=rules: []", "keysConfigMap=keys")
    spec = pod_spec(made)
    env = {entry["name"]: entry.get("value") for entry in spec["containers"][0]["env"]}
    mounts = {m["name"]: m["mountPath"] for m in spec["containers"][0]["volumeMounts"]}
    (file,) = made["ConfigMap", "fpga-plugin-policy"]["data"]
    assert env["FPGA_PLUGIN_POLICY_FILE"] == f"{mounts['policy']}/{file}"
    assert env["FPGA_PLUGIN_KEYS_DIR"] == mounts["keys"]
    # Not configMap volumes: kubelet makes their directories 0777, and the plugin refuses those.
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    for name, config_map in (("policy", "fpga-plugin-policy"), ("keys", "keys")):
        assert volumes[name]["projected"] == {"sources": [{"configMap": {"name": config_map}}]}


def test_without_the_api_server_there_is_neither_a_right_nor_a_token():
    made = rendered("readPods=false")
    assert {kind for kind, _ in made} == {"ServiceAccount", "DaemonSet"}
    assert pod_spec(made)["automountServiceAccountToken"] is False


def test_another_release_has_its_name_everywhere():
    done = helm("--set", "image.repository=x", release="two")
    assert {name for _, name in objects(done.stdout)} == {"two-fpga-plugin"}


def test_while_observing_nothing_can_be_written_and_nothing_is_privileged():
    (container,) = pod_spec(rendered("observe=true"))["containers"]
    security = container["securityContext"]
    assert security["privileged"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["allowPrivilegeEscalation"] is False
    assert all(mount.get("readOnly") for mount in container["volumeMounts"])


def test_the_chart_lints():
    done = subprocess.run(
        [TOOLS / "helm", "lint", CHART, "--strict", "--set", "image.repository=x"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
