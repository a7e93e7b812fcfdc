"""What is deployed, as parsed YAML: mounts and settings fit, privileges are the documented ones."""

import importlib.util
import json
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import yaml

from fpga_plugin.hardware.xrt import defs as xrt
from fpga_plugin.settings.settings import SETTINGS, Settings, load_settings

ROOT = Path(__file__).parents[3]
BASE = ROOT / "deploy/kustomize/base"
CHART = ROOT / "deploy/helm/fpga-plugin"


def daemonset() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((BASE / "daemonset.yaml").read_text())
    return found


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = daemonset()["spec"]["template"]["spec"]
    return spec


def container() -> dict[str, Any]:
    (only,) = pod()["containers"]
    found: dict[str, Any] = only
    return found


def settings() -> Settings:
    env = {e["name"]: e.get("value", "node") for e in container()["env"]}
    return load_settings(env)


def mounted() -> dict[str, tuple[str, bool]]:
    """Path in the pod: (path on the node, whether it can be written)."""
    host = {v["name"]: v["hostPath"]["path"] for v in pod()["volumes"]}
    return {
        m["mountPath"]: (host[m["name"]], not m.get("readOnly", False))
        for m in container()["volumeMounts"]
    }


def test_the_pods_settings_are_valid_and_cause_no_warning():
    assert settings().warnings == ()


def test_every_path_that_the_plugin_uses_is_mounted():
    used = settings()
    mounts = mounted()
    written = {used.kubelet_dir, used.state_dir, used.sysfs_root}
    sockets = {str(Path(s).parent) for s in (used.podresources_socket, used.pods_socket) if s}
    read = {used.bitstream_dir, used.dev_root, used.cgroup_root}
    assert written | read | sockets == mounts.keys()
    assert {path for path, (_, write) in mounts.items() if write} == written


def test_paths_are_the_nodes_own_except_for_the_kernels_trees():
    odd = {path: host for path, (host, _) in mounted().items() if path != host}
    assert odd == {
        "/host/dev": "/dev",
        "/host/sys": "/sys",
        "/host/cgroup": "/sys/fs/cgroup",
    }


def test_the_state_outlives_the_pod():
    (state,) = (v for v in pod()["volumes"] if v["name"] == "state")
    assert state["hostPath"]["type"] == "DirectoryOrCreate"


def test_two_plugins_never_share_a_node_and_a_pr_is_seen_through():
    update = daemonset()["spec"]["updateStrategy"]["rollingUpdate"]
    assert update == {"maxSurge": 0, "maxUnavailable": 1}
    assert pod()["terminationGracePeriodSeconds"] > 60, "the watchdog of a PR"


def test_only_what_is_documented_is_shared_with_the_node():
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod().keys()
    assert container()["securityContext"] == {
        "privileged": True,
        "readOnlyRootFilesystem": True,
        "runAsUser": 0,
        "runAsGroup": 0,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def test_its_rights_are_to_get_pods():
    objects = list(yaml.safe_load_all((BASE / "rbac.yaml").read_text()))
    (role,) = (each for each in objects if each["kind"] == "ClusterRole")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}]


def test_probes_ask_where_only_the_nodes_root_can_and_give_up_before_kubelet_does():
    from fpga_plugin.probe import SECONDS

    for kind, word in (("startup", "healthz"), ("liveness", "healthz"), ("readiness", "readyz")):
        probe = container()[f"{kind}Probe"]
        assert probe["exec"]["command"] == ["/usr/local/bin/fpga-plugin-probe", word]
        assert probe["timeoutSeconds"] > SECONDS[word]
        assert not {"httpGet", "tcpSocket", "grpc"} & probe.keys()


def test_a_status_socket_that_was_removed_is_there_again_before_a_probe_gives_up():
    from fpga_plugin.observability.listeners import RECHECK

    for kind in ("liveness", "readiness"):
        probe = container()[f"{kind}Probe"]
        assert probe["periodSeconds"] * (probe.get("failureThreshold", 3) - 1) >= RECHECK


def test_the_helm_chart_has_the_same_probes():
    """What tests/deploy compares as a whole where helm is there."""
    text = (CHART / "templates/_daemonset.tpl").read_text()
    probes = yaml.safe_load((CHART / "values.yaml").read_text())["probes"]
    assert probes.keys() == {"startup", "liveness", "readiness"}
    for kind, numbers in probes.items():
        own = container()[f"{kind}Probe"]
        command = ", ".join(own.pop("exec")["command"])
        assert own == numbers
        block = f"{kind}Probe:\n          exec: {{command: [{command}]}}\n"
        assert f"{block}          {{{{- toYaml $values.probes.{kind} " in text


def test_the_image_has_the_probes_command_which_needs_no_package():
    import ast

    script = ROOT / "fpga_plugin/probe.py"
    collect = (ROOT / "deploy/image/collect.py").read_text()
    assert '"fpga-plugin-probe"' in collect
    imported = {
        alias.name
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert imported == {"_socket", "os", "sys"}


def test_probes_outlast_the_wait_for_a_predecessors_pr():
    from fpga_plugin.host.locks import WAIT_PROGRAMMING

    probe = container()["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > WAIT_PROGRAMMING
    (port,) = container()["ports"]
    address = settings().http_address
    assert address is not None
    assert port["containerPort"] == address.port


def schema_module() -> Any:
    path = ROOT / "deploy/helm/settings_schema.py"
    spec = importlib.util.spec_from_file_location("settings_schema", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_charts_schema_is_that_of_the_settings():
    written = json.loads((CHART / "values.schema.json").read_text())
    assert written == schema_module().schema(), "make docs"


def test_the_charts_readme_and_copies_are_those_of_their_sources():
    module = schema_module()
    assert (CHART / "README.md").read_text() == module.readme(), "make docs"
    files = {path for path in (CHART / "files").rglob("*") if path.is_file()}
    assert files == module.copies().keys(), "make docs"
    for copy, original in module.copies().items():
        assert copy.read_text() == original.read_text(), "make docs"


def test_a_setting_that_the_chart_has_not_has_a_value_of_its_own_or_a_reason():
    module = schema_module()
    settings = module.schema()["definitions"]["settings"]["properties"].keys()
    assert {s.name for s in SETTINGS} == settings | module.CHARTS_OWN.keys() | module.FIXED.keys()
    assert all(module.FIXED.values())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    for value in module.CHARTS_OWN.values():
        at = defaults
        for name in value.split("."):
            at = at[name]
    told = (CHART / "README.md").read_text()
    assert "`resources.limits`" in told.partition("checks itself: ")[2], "what is open is said"


def objects_of(of: dict[str, Any], where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema of an object, by its path."""
    if of.get("type") == "object":
        yield where, of
    for name, inner in of.get("properties", {}).items():
        yield from objects_of(inner, f"{where}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(of.get(key), dict):
            yield from objects_of(of[key], where)


def test_every_object_of_the_charts_values_is_closed():
    module = schema_module()
    written = module.schema()
    found = dict(objects_of(written, "values"))
    found |= dict(objects_of(written["definitions"]["settings"], "settings"))
    open_ones = {where for where, of in found.items() if "additionalProperties" not in of}
    for where in open_ones - {"values.global"}:
        assert "As Kubernetes has it." in found[where]["description"], f"{where} is open"
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    assert defaults.keys() == written["properties"].keys() - {"global"}


def test_the_schema_takes_what_a_setting_takes_and_no_other_word():
    settings = schema_module().schema()["definitions"]["settings"]["properties"]
    assert settings["FPGA_PLUGIN_SCRUB"]["enum"] == ["required", "best-effort"]
    assert True in settings["FPGA_PLUGIN_STATUS_PAGE"]["enum"]
    for setting in SETTINGS:
        known = settings.get(setting.name, {})
        for word in known.get("enum", []):
            setting.value(json.dumps(word) if isinstance(word, bool) else str(word))
        if "enum" not in known and setting.name in settings:
            # Whatever is one of a few words is told by its parser, and so in the schema.
            assert not isinstance(getattr(Settings(), _attribute(setting.name)), Enum | bool)


def _attribute(name: str) -> str:
    return name.removeprefix("FPGA_PLUGIN_").lower()


# ---------------------------------------------------------------- NFD

KERNELS = {
    ("8086", "bcbd", None),  # PCIE_DEVICE_ID_PF_INT_5_X
    ("8086", "bcc0", None),  # PCIE_DEVICE_ID_PF_INT_6_X
    ("8086", "09c4", None),  # PCIE_DEVICE_ID_PF_DSC_1_X
    ("8086", "0b30", None),  # PCIE_DEVICE_ID_INTEL_PAC_N3000
    ("8086", "0b2b", None),  # PCIE_DEVICE_ID_INTEL_PAC_D5005
    ("1c2c", "1000", None),  # PCIE_DEVICE_ID_SILICOM_PAC_N5010
    ("1c2c", "1001", None),  # PCIE_DEVICE_ID_SILICOM_PAC_N5011
    ("8086", "bcce", "138d"),  # PCIE_SUBDEVICE_ID_INTEL_D5005
    ("8086", "bcce", "1770"),  # PCIE_SUBDEVICE_ID_INTEL_N6000
    ("8086", "bcce", "1771"),  # PCIE_SUBDEVICE_ID_INTEL_N6001
    ("8086", "bcce", "17d4"),  # PCIE_SUBDEVICE_ID_INTEL_C6100
}
"""The physical functions of cci_pcie_id_tbl in drivers/fpga/dfl-pci.c of Linux 6.1."""

PRESENT = "feature.node.kubernetes.io/fpga-dfl.present"


def rules() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((CHART / "nodefeaturerule.yaml").read_text())[
        "spec"
    ]["rules"]
    return found


def selected(rule: dict[str, Any]) -> tuple[str, str, str | None]:
    (feature,) = rule["matchFeatures"]
    assert feature["feature"] == "pci.device"
    values = {}
    for attribute, expression in feature["matchExpressions"].items():
        assert expression["op"] == "In"
        (values[attribute],) = expression["value"]
    assert set(values) <= {"vendor", "device", "subsystem_vendor", "subsystem_device"}
    assert ("subsystem_vendor" in values) == ("subsystem_device" in values)
    assert values.get("subsystem_vendor", "8086") == "8086"
    return values["vendor"], values["device"], values.get("subsystem_device")


def test_the_nfd_rule_knows_every_card_that_a_familys_drivers_serve():
    alveo = {(xrt.VENDOR, device, None) for device in xrt.PRODUCTS}
    assert sorted(map(selected, rules()), key=str) == sorted(KERNELS | alveo, key=str)


def test_the_nfd_rule_is_that_of_the_kernels_source():
    source = ROOT / ".cache/kernel/source/drivers/fpga/dfl-pci.c"
    if not source.exists():
        pytest.skip("the kernel's source is not here: make test-kernel gets it")
    text = source.read_text()
    ids = {
        name: value.lower().removeprefix("0x")
        for name, value in re.findall(r"#define (PCIE_\w+)\s+(0x[0-9A-Fa-f]{4})", text)
    }
    vendors = {"PCI_VENDOR_ID_INTEL": "8086", "PCI_VENDOR_ID_SILICOM_DENMARK": "1c2c"}
    table = {
        (vendors[vendor], ids[device], ids[sub] if sub else None)
        for vendor, device, sub in re.findall(
            r"PCI_DEVICE(?:_SUB)?\((\w+), (\w+)(?:,\s*\w+, (\w+))?\)", text
        )
        if "_VF" not in device
    }
    assert table == KERNELS


def test_each_card_has_the_label_that_the_daemonset_asks_for_and_one_of_its_own():
    affinity = pod()["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert affinity["nodeSelectorTerms"] == [
        {"matchExpressions": [{"key": PRESENT, "operator": "In", "values": ["true"]}]}
    ]
    for rule in rules():
        assert rule["labels"][PRESENT] == "true"
        assert len(rule["labels"]) == 2
    assert len({rule["name"] for rule in rules()}) == len(rules())


def test_helm_and_kustomize_have_the_same_rule():
    copy = ROOT / "deploy/kustomize/components/nfd/nodefeaturerule.yaml"
    assert copy.read_text() == (CHART / "nodefeaturerule.yaml").read_text()


# ---------------------------------------------------------------- samples


@pytest.mark.parametrize("path", sorted((ROOT / "deploy/examples").glob("*.yaml")), ids=str)
def test_samples_ask_for_what_they_are_limited_to(path: Path):
    manifest = yaml.safe_load(path.read_text())
    spec = manifest["spec"]
    spec = spec["template"]["spec"] if manifest["kind"] == "Deployment" else spec
    for each in [*spec["containers"], *spec.get("initContainers", [])]:
        limits = each["resources"]["limits"]
        interfaces = {
            name.partition("-")[2] for name in limits if name.startswith("fpga.intel.com/")
        }
        asked = {e["value"] for e in each["env"] if e["name"].startswith("FPGA_REGION_")}
        assert asked == interfaces
        for entry in each["env"]:
            if entry["name"].startswith(("FPGA_BITSTREAM_ID_", "FPGA_AFU_")):
                store = ROOT / "bitstreams"
                assert list(store.glob(f"*/{entry['value']}.gbs")), entry


def test_there_is_a_sample_of_each_kind():
    texts = [path.read_text() for path in (ROOT / "deploy/examples").glob("*.yaml")]
    for sign in ("/region-", "/fpga-", "initContainers:", "kind: Deployment"):
        assert any(sign in text for text in texts)
