"""The chart and the kustomization, rendered by the real helm and kustomize: `make test-deploy`."""

import copy
import json
import shutil
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
    done = helm("--no-hooks", *sets)
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
            continue  # helm makes none: it is notified which
        for name in HELMS_OWN:
            each["metadata"].get("labels", {}).pop(name, None)
        if key[0] == "DaemonSet":
            (container,) = each["spec"]["template"]["spec"]["containers"]
            container["env"].sort(key=lambda entry: entry["name"])
            container["volumeMounts"].sort(key=lambda entry: entry["name"])
            each["spec"]["template"]["spec"]["volumes"].sort(key=lambda entry: entry["name"])
        compared[key] = each
    return compared


def pod_spec(given: Objects) -> dict[str, Any]:
    spec: dict[str, Any] = given["DaemonSet", "fpga-plugin"]["spec"]["template"]["spec"]
    return spec


SCRAPER = (
    r"networkPolicy.from[0].namespaceSelector.matchLabels.kubernetes\.io/metadata\.name=monitoring"
)
ALL = ("nodeFeatureRule.create=true", "podMonitor.create=true", "events=true", SCRAPER)


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
    for name, config_map in (
        ("policy", "fpga-plugin-policy"),
        ("keys", "keys"),
    ):
        assert volumes[name]["projected"] == {"sources": [{"configMap": {"name": config_map}}]}


@pytest.mark.parametrize(
    "value",
    [
        "settings.FPGA_PLUGIN_CDI_DEVICES=*=vendor.com/opencl=board",
        "nodeConfigurations.named.cl.settings.FPGA_PLUGIN_CDI_DEVICES=*=vendor.com/opencl=board",
    ],
)
def test_who_adds_cdi_devices_may_read_the_nodes_runtime_and_nobody_else(value: str):
    right = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}
    made = rendered("readPods=false", value)
    assert made["ClusterRole", "fpga-plugin"]["rules"] == [right]
    assert pod_spec(made)["automountServiceAccountToken"] is True
    assert right not in rendered("readPods=true")["ClusterRole", "fpga-plugin"]["rules"]


def test_without_the_api_server_there_is_neither_a_right_nor_a_token():
    made = rendered("readPods=false")
    assert {kind for kind, _ in made} == {"ServiceAccount", "DaemonSet", "NetworkPolicy"}
    assert pod_spec(made)["automountServiceAccountToken"] is False


def test_another_release_has_its_name_everywhere():
    done = helm("--no-hooks", "--set", "image.repository=x", release="two")
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


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    "value",
    [
        "obsrve=true",
        "image.repo=x",
        "paths.kubelt=/x",
        "settings.FPGA_PLUGIN_SCRUB=bestefort",
        "settings.FPGA_PLUGIN_STATUS_PAGE=yes",
        "settings.FPGA_PLUGIN_HTTP_ADDRESS=:0",
        "settings.FPGA_PLUGIN_HTTP_ADDRESS=9102",
        "nodeConfigurations.named.a.setings.FPGA_PLUGIN_SCRUB=required",
        "nodeConfigurations.named.a.settings.FPGA_PLUGIN_SCRUBB=required",
        "nodeConfigurations.named.A=",
        "bitstreams.volume.glusterfs.path=x",
        "tolerations[0].opertor=Exists",
        "updateStrategy.maxUnavailable=0",
        "extraEnv[0].name=FPGA_PLUGIN_SCRUB",
        "extraEnv[0].name=NODE_NAME",
    ],
)
def test_a_slip_in_a_value_is_refused(value: str):
    done = helm("--set", "image.repository=x", "--set", value)
    assert done.returncode != 0
    assert "schema" in done.stderr


def test_a_parent_chart_may_hand_down_its_global_values():
    assert rendered("global.anything.at.all=1") == rendered()


def test_the_port_follows_the_address_everywhere():
    made = rendered(
        "settings.FPGA_PLUGIN_HTTP_ADDRESS=:9200",
        "service.create=true",
        "podMonitor.create=true",
        "networkPolicy.from[0].namespaceSelector.matchLabels.a=b",
    )
    (container,) = pod_spec(made)["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": 9200, "protocol": "TCP"}]
    (port,) = made["Service", "fpga-plugin"]["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (9200, "http")
    (rule,) = made["NetworkPolicy", "fpga-plugin"]["spec"]["ingress"]
    assert rule["ports"] == [{"port": "http", "protocol": "TCP"}]
    labels = made["DaemonSet", "fpga-plugin"]["spec"]["template"]["metadata"]["labels"]
    for kind, where in (("Service", "selector"), ("NetworkPolicy", "podSelector")):
        selector = made[kind, "fpga-plugin"]["spec"][where]
        assert selector.get("matchLabels", selector).items() <= labels.items()


def test_where_nothing_is_served_there_is_no_port_and_nothing_that_leads_to_it():
    made = rendered("settings.FPGA_PLUGIN_HTTP_ADDRESS=", "networkPolicy.from[0].ipBlock.cidr=::/0")
    (container,) = pod_spec(made)["containers"]
    assert "ports" not in container
    assert "ingress" not in made["NetworkPolicy", "fpga-plugin"]["spec"]
    for kind in ("service", "podMonitor"):
        off = ("--set", "settings.FPGA_PLUGIN_HTTP_ADDRESS=", "--set", f"{kind}.create=true")
        done = helm("--set", "image.repository=x", *off)
        assert done.returncode != 0
        assert "FPGA_PLUGIN_HTTP_ADDRESS is empty" in done.stderr


def test_nobody_reaches_metrics_until_somebody_says_who():
    policy = rendered()["NetworkPolicy", "fpga-plugin"]["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    assert "ingress" not in policy
    for kind in ("service", "podMonitor"):
        done = helm("--set", "image.repository=x", "--set", f"{kind}.create=true")
        assert done.returncode != 0
        assert "networkPolicy.from is empty" in done.stderr
        made = rendered(f"{kind}.create=true", "networkPolicy.create=false")
        assert not [one for one, _ in made if one == "NetworkPolicy"]


def test_two_releases_have_no_object_of_one_name():
    everything = [
        word
        for kind in ("nodeFeatureRule", "podMonitor", "prometheusRule", "dashboards", "service",
                     "openshift")
        for word in ("--set", f"{kind}.create=true")
    ]  # fmt: skip
    everything += ["--set", "networkPolicy.from[0].namespaceSelector.matchLabels.a=b"]
    values = ("--set", "image.repository=x", "--set", "policy=rules: []", *everything)
    one, two = (objects(helm(*values, release=name).stdout) for name in ("fpga-plugin", "two"))
    assert one.keys().isdisjoint(two.keys())
    assert len(one) == len(two) == 13
    named = objects(helm(*values, "--set", "fullnameOverride=cards", release="two").stdout)
    assert all(name.startswith("cards") for _, name in named)


def node_terms(given: Objects, name: str) -> list[dict[str, Any]]:
    affinity = given["DaemonSet", name]["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    ((term,),) = (
        each["nodeSelectorTerms"]
        for each in [affinity["requiredDuringSchedulingIgnoredDuringExecution"]]
    )
    found: list[dict[str, Any]] = term["matchExpressions"]
    return found


def test_a_nodes_label_chooses_its_configuration_and_each_node_has_one():
    label = "fpga.intel.com/plugin-configuration"
    made = rendered(
        "settings.FPGA_PLUGIN_SCRUB=best-effort",
        "nodeConfigurations.named.whole.settings.FPGA_PLUGIN_ADVERTISE=whole",
        "nodeConfigurations.named.look.observe=true",
    )
    names = ["fpga-plugin", "fpga-plugin-look", "fpga-plugin-whole"]
    assert sorted(name for kind, name in made if kind == "DaemonSet") == names
    present = {
        "key": "feature.node.kubernetes.io/fpga-dfl.present", "operator": "In", "values": ["true"]
    }  # fmt: skip
    for name, which in zip(
        names,
        [
            {"key": label, "operator": "NotIn", "values": ["look", "whole"]},
            {"key": label, "operator": "In", "values": ["look"]},
            {"key": label, "operator": "In", "values": ["whole"]},
        ],
        strict=True,
    ):
        assert node_terms(made, name) == [present, which]
    env = {}
    selectors = []
    for name in names:
        spec = made["DaemonSet", name]["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        env[name] = {e["name"]: e.get("value") for e in container["env"]}
        assert env[name]["FPGA_PLUGIN_SCRUB"] == "best-effort", "what is not said is as for all"
        labels = spec["template"]["metadata"]["labels"]
        selectors.append(spec["selector"]["matchLabels"])
        assert selectors[-1].items() <= labels.items()
        assert labels["app.kubernetes.io/instance"] == "fpga-plugin"
        observes = name.endswith("look")
        assert container["securityContext"]["privileged"] is not observes
        assert ("livenessProbe" in container) is not observes
    assert env["fpga-plugin-whole"]["FPGA_PLUGIN_ADVERTISE"] == "whole"
    assert "FPGA_PLUGIN_ADVERTISE" not in env["fpga-plugin"]
    assert len({tuple(s.items()) for s in selectors}) == len(names), "none selects another's pods"


def test_configurations_are_chosen_among_all_nodes_where_the_affinity_names_none():
    made = rendered("affinity=null", "nodeConfigurations.named.look.observe=true")
    (which,) = node_terms(made, "fpga-plugin-look")
    assert which["values"] == ["look"]


@pytest.mark.parametrize(
    ("values", "volume"),
    [
        ((), {"hostPath": {"path": "/srv/intel.com/fpga", "type": "DirectoryOrCreate"}}),
        (
            ("bitstreams.volume.persistentVolumeClaim.claimName=store",),
            {"persistentVolumeClaim": {"claimName": "store"}},
        ),
        (
            ("bitstreams.volume.nfs.server=s", "bitstreams.volume.nfs.path=/fpga"),
            {"nfs": {"server": "s", "path": "/fpga"}},
        ),
        (
            ("bitstreams.volume.image.reference=r/x@sha256:0",),
            {"image": {"reference": "r/x@sha256:0"}},
        ),
        (
            (
                "bitstreams.volume.configMap.name=blanks",
                "bitstreams.volume.configMap.items[0].key=a",
                "bitstreams.volume.configMap.items[0].path=i/blank.gbs",
            ),
            {
                "projected": {
                    "sources": [
                        {
                            "configMap": {
                                "name": "blanks",
                                "items": [{"key": "a", "path": "i/blank.gbs"}],
                            }
                        }
                    ]
                }
            },
        ),
    ],
)
def test_the_store_may_be_any_of_these_volumes(values: Sequence[str], volume: dict[str, Any]):
    (found,) = (v for v in pod_spec(rendered(*values))["volumes"] if v["name"] == "bitstreams")
    assert found == {"name": "bitstreams"} | volume


def test_the_store_is_one_volume():
    done = helm(
        "--set", "image.repository=x",
        "--set", "bitstreams.volume.nfs.server=s",
        "--set", "bitstreams.volume.hostPath.path=/x",
    )  # fmt: skip
    assert done.returncode != 0


def test_alerts_and_dashboards_are_those_of_the_project():
    made = rendered("prometheusRule.create=true", "dashboards.create=true")
    rule = made["PrometheusRule", "fpga-plugin"]["spec"]
    assert rule == yaml.safe_load((ROOT / "deploy/monitoring/alerts.yaml").read_text())
    boards = made["ConfigMap", "fpga-plugin-dashboards"]
    assert boards["metadata"]["labels"]["grafana_dashboard"] == "1"
    for path in (ROOT / "deploy/monitoring").glob("*.json"):
        text = boards["data"][f"fpga-plugin-{path.name}"]
        assert json.loads(text) == json.loads(path.read_text())


def test_the_pods_service_account_may_be_another_one():
    refused = helm("--set", "image.repository=fpga-plugin", "--set", "serviceAccount.create=false")
    assert refused.returncode != 0, "the namespace's default account is everybody's"
    assert "serviceAccount.name is empty" in refused.stderr
    made = rendered("serviceAccount.create=false", "serviceAccount.name=given")
    assert ("ServiceAccount", "fpga-plugin") not in made
    assert pod_spec(made)["serviceAccountName"] == "given"
    (subject,) = made["ClusterRoleBinding", "fpga-plugin"]["subjects"]
    assert subject["name"] == "given"


def test_what_is_added_to_the_pod_is_there_beside_the_charts_own():
    made = rendered(
        "extraEnv[0].name=HTTPS_PROXY,extraEnv[0].value=x",
        "extraVolumes[0].name=a,extraVolumes[0].secret.secretName=s",
        "extraVolumeMounts[0].name=a,extraVolumeMounts[0].mountPath=/a",
        "annotations.a=b",
        "updateStrategy.maxUnavailable=10%",
    )
    spec = pod_spec(made)
    (container,) = spec["containers"]
    assert container["env"][-1] == {"name": "HTTPS_PROXY", "value": "x"}
    assert spec["volumes"][-1] == {"name": "a", "secret": {"secretName": "s"}}
    assert container["volumeMounts"][-1] == {"name": "a", "mountPath": "/a"}
    daemonset = made["DaemonSet", "fpga-plugin"]
    assert daemonset["metadata"]["annotations"] == {"a": "b"}
    rolling = daemonset["spec"]["updateStrategy"]["rollingUpdate"]
    assert rolling == {"maxSurge": 0, "maxUnavailable": "10%"}
    by_hand = rendered("updateStrategy.type=OnDelete")["DaemonSet", "fpga-plugin"]["spec"]
    assert by_hand["updateStrategy"] == {"type": "OnDelete"}


def test_openshift_allows_what_the_pod_asks_for_and_no_more():
    for observe in ("true", "false"):
        made = rendered("openshift.create=true", f"observe={observe}")
        allowed = made["SecurityContextConstraints", "fpga-plugin"]
        spec = pod_spec(made)
        (container,) = spec["containers"]
        assert allowed["allowPrivilegedContainer"] is container["securityContext"]["privileged"]
        kinds = {kind for volume in spec["volumes"] for kind in volume if kind != "name"}
        assert kinds <= set(allowed["volumes"])
        assert allowed["users"] == ["system:serviceaccount:fpga-plugin:fpga-plugin"]


@pytest.mark.parametrize(
    ("observe", "named", "privileged"),
    [("true", "false", True), ("false", "true", True), ("true", "true", False)],
)
def test_openshift_allows_what_any_configuration_needs(observe, named, privileged):
    made = rendered(
        "openshift.create=true",
        f"observe={observe}",
        f"nodeConfigurations.named.a.observe={named}",
        "nodeConfigurations.named.b.settings.FPGA_PLUGIN_SCRUB=best-effort",
    )
    allowed = made["SecurityContextConstraints", "fpga-plugin"]
    assert allowed["allowPrivilegedContainer"] is privileged
    assert allowed["allowPrivilegeEscalation"] is privileged


def test_helm_test_asks_a_node_of_the_plugins_over_its_status_socket():
    made = objects(helm("--set", "image.repository=x").stdout)
    pod = made["Pod", "fpga-plugin-ready"]
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["fpga-plugin", "status", "--problems", "--exit-code"]
    assert container["securityContext"]["privileged"] is False
    assert pod["spec"]["affinity"] == pod_spec(made)["affinity"]
    daemonset = made["DaemonSet", "fpga-plugin"]["spec"]["selector"]["matchLabels"]
    assert not daemonset.items() <= pod["metadata"]["labels"].items()
    observing = objects(helm("--set", "image.repository=x", "--set", "observe=true").stdout)
    assert not [kind for kind, _ in observing if kind == "Pod"]


DRA = ROOT / "deploy/dra"
CARD = "ce48969398f05f33946d560708be108a"


def rules(given: Objects) -> list[str]:
    """All that the plugin may do, whichever roles say so."""
    roles = (each for (kind, _), each in given.items() if kind == "ClusterRole")
    return sorted(str(sorted(rule.items())) for role in roles for rule in role["rules"])


def test_chart_and_kustomization_make_the_same_dra_driver() -> None:
    chart, kustomization = rendered("mode=dra"), built(KUSTOMIZE / "overlays/dra")
    assert rules(chart) == rules(kustomization)
    chart, kustomization = comparable(chart), comparable(kustomization)
    assert chart["DaemonSet", "fpga-plugin"] == kustomization["DaemonSet", "fpga-plugin"]
    for kind in ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"):
        for name in ("fpga-plugin-resourceslices", "fpga-plugin-regionconfigs"):
            assert chart[kind, name]["spec"] == kustomization[kind, name]["spec"]


def mounts(given: Objects) -> dict[str, tuple[dict[str, Any], bool]]:
    """Path in the pod: what is mounted there, and whether it can be written."""
    spec = pod_spec(given)
    volumes = {one["name"]: one for one in spec["volumes"]}
    (container,) = spec["containers"]
    return {
        one["mountPath"]: (
            {kind: of for kind, of in volumes[one["name"]].items() if kind != "name"},
            not one.get("readOnly", False),
        )
        for one in container["volumeMounts"]
    }


@pytest.mark.parametrize(
    ("values", "root", "driver", "hidden"),
    [
        ((), "/var/lib/kubelet", "fpga.intel.com", {"pods", "pki"}),
        (
            (
                "paths.kubelet=/data/kubelet",
                "paths.hidden={pods}",
                "settings.FPGA_PLUGIN_RESOURCE_PREFIX=fpga.example.com",
            ),
            "/data/kubelet",
            "fpga.example.com",
            {"pods"},
        ),
    ],
)
def test_a_dra_driver_reaches_no_more_than_it_needs(
    values: Sequence[str], root: str, driver: str, hidden: set[str]
) -> None:
    dra = rendered("mode=dra", "paths.cdi=/etc/cdi", *values)
    made = mounts(dra)
    of_nobody: dict[str, Any] = {"emptyDir": {}}
    assert {path: made[path] for path in made.keys() - mounts(rendered(*values)).keys()} == {
        root: ({"hostPath": {"path": root, "type": "Directory"}}, False),
        **{f"{root}/{name}": (of_nobody, False) for name in hidden},
        f"{root}/plugins": (of_nobody, True),  # the runtime makes the next one's place in it
        **{
            path: ({"hostPath": {"path": path, "type": "DirectoryOrCreate"}}, True)
            for path in (
                f"{root}/plugins/{driver}",
                f"{root}/plugins_registry",
            )
        },
        "/var/run/cdi": ({"hostPath": {"path": "/etc/cdi", "type": "DirectoryOrCreate"}}, True),
    }
    (container,) = pod_spec(dra)["containers"]
    (kubelet,) = (one for one in container["volumeMounts"] if one["mountPath"] == root)
    assert kubelet["mountPropagation"] == "HostToContainer", "else unmounted volumes stay in use"
    env = {one["name"]: one.get("value") for one in container["env"]}
    assert (env["FPGA_PLUGIN_MODE"], env["FPGA_PLUGIN_KUBELET_ROOT"]) == ("dra", root)
    looking = mounts(rendered("mode=dra", "observe=true", *values))
    assert not any(written for _, written in looking.values())


@pytest.mark.parametrize("observe", ["true", "false"])
def test_by_the_device_plugin_api_kubelets_root_is_not_mounted(observe: str) -> None:
    made = rendered(f"observe={observe}", "nodeConfigurations.named.claims.mode=dra")
    root = "/var/lib/kubelet"
    assert {path for path in mounts(made) if path.startswith(root)} == {
        f"{root}/{name}" for name in ("device-plugins", "pod-resources", "pods-api")
    }


def test_each_kind_of_card_gets_its_classes() -> None:
    made = rendered("mode=dra", f"deviceClasses.interfaceIDs={{{CARD}}}")
    known = objects((DRA / "deviceclasses.yaml").read_text())
    assert {key: each["spec"] for key, each in made.items() if key[0] == "DeviceClass"} == {
        key: each["spec"] for key, each in known.items()
    }
    plain = rendered(
        "mode=dra",
        f"deviceClasses.interfaceIDs={{{CARD}}}",
        "deviceClasses.extendedResources=false",
    )
    specs = [each["spec"] for key, each in plain.items() if key[0] == "DeviceClass"]
    assert len(specs) == 2
    assert all("extendedResourceName" not in spec for spec in specs)
    assert "values" in helm("--set", "image.repository=r", "--set", "mode=claims").stderr


def test_one_node_may_be_a_dra_driver() -> None:
    made = rendered("nodeConfigurations.named.claims.mode=dra", "readPods=false")
    apis = {}
    for (kind, name), each in made.items():
        if kind == "DaemonSet":
            (container,) = each["spec"]["template"]["spec"]["containers"]
            apis[name] = [e["value"] for e in container["env"] if e["name"] == "FPGA_PLUGIN_MODE"]
    assert apis == {"fpga-plugin": [], "fpga-plugin-claims": ["dra"]}
    assert any("resourceslices" in rule for rule in rules(made))
    assert ("ValidatingAdmissionPolicy", "fpga-plugin-resourceslices") in made


def test_a_device_plugin_has_nothing_of_a_dra_drivers() -> None:
    made = rendered(f"deviceClasses.interfaceIDs={{{CARD}}}")
    assert not any("resource.k8s.io" in rule for rule in rules(made))
    assert not {kind for kind, _ in made} & {"DeviceClass", "ValidatingAdmissionPolicy"}
    names = {each["name"] for each in pod_spec(made)["volumes"]}
    assert not names & {"kubelet", "plugins", "plugins-registry", "cdi"}


def names_labels(labels: dict[str, str]) -> tuple[str, str, str]:
    kinds = ("name", "instance", "component")
    return tuple(labels[f"app.kubernetes.io/{kind}"] for kind in kinds)


def test_selectors_have_helms_own_names() -> None:
    """They are immutable: application and release, and which configuration it is."""
    named = "nodeConfigurations.named.look.observe=true"
    sets = ["--set", "image.repository=fpga-plugin", "--set", named]
    made = objects(helm("--no-hooks", *sets, release="lab").stdout)
    plain, look = (
        names_labels(made["DaemonSet", name]["spec"]["selector"]["matchLabels"])
        for name in ("lab-fpga-plugin", "lab-fpga-plugin-look")
    )
    assert plain == ("fpga-plugin", "lab", "plugin")
    assert look == ("fpga-plugin", "lab", "plugin-look")
    labels = made["ClusterRole", "lab-fpga-plugin"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/name"] == "fpga-plugin"
    assert labels["app.kubernetes.io/instance"] == "lab"


def test_the_next_version_of_the_chart_changes_nothing_that_cannot_be_changed(
    tmp_path: Path,
) -> None:
    """An upgrade, and a rollback, that the API server would refuse."""
    later = tmp_path / "fpga-plugin"
    shutil.copytree(CHART, later)
    about = later / "Chart.yaml"
    about.write_text(about.read_text().replace(fpga_plugin.__version__, "99.1.2"))
    every = (
        "events=true",
        "mode=dra",
        f"deviceClasses.interfaceIDs={{{CARD}}}",
        "policy=rules: []",
    )
    sets = [word for value in ("image.repository=x", *every) for word in ("--set", value)]
    done = subprocess.run(
        [TOOLS / "helm", "template", "fpga-plugin", later, "--namespace", "fpga-plugin",
         "--no-hooks", *sets],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    now, then = rendered(*every), objects(done.stdout)
    assert now.keys() == then.keys(), "no object is made twice under two names"
    changed = pod_spec(then)["containers"][0]["image"]
    assert changed.endswith(":99.1.2")
    for key, each in now.items():
        for field in ("roleRef", "selector"):
            fixed = each.get(field) or each.get("spec", {}).get(field)
            assert fixed == (then[key].get(field) or then[key].get("spec", {}).get(field)), key


def test_what_selects_the_pods_selects_those_of_each_configuration() -> None:
    create = ("podMonitor.create=true", "service.create=true", SCRAPER)
    made = rendered("nodeConfigurations.named.look.observe=true", *create)
    selectors = (
        made["PodMonitor", "fpga-plugin"]["spec"]["selector"]["matchLabels"],
        made["Service", "fpga-plugin"]["spec"]["selector"],
        made["NetworkPolicy", "fpga-plugin"]["spec"]["podSelector"]["matchLabels"],
    )
    for name in ("fpga-plugin", "fpga-plugin-look"):
        labels = made["DaemonSet", name]["spec"]["template"]["metadata"]["labels"]
        for selector in selectors:
            assert len(selector) == 2
            assert selector.items() <= labels.items()


def test_the_application_may_be_called_otherwise() -> None:
    made = rendered("nameOverride=boards", "nodeFeatureRule.create=true")
    assert made["DaemonSet", "fpga-plugin-boards"]["spec"]["selector"]["matchLabels"] == {
        "app.kubernetes.io/name": "boards",
        "app.kubernetes.io/instance": "fpga-plugin",
        "app.kubernetes.io/component": "plugin",
    }
    assert ("NodeFeatureRule", "fpga-plugin-boards") in made
    assert ("DaemonSet", "given") in rendered("nameOverride=boards", "fullnameOverride=given")


def test_a_parent_chart_switches_it_on_and_off(tmp_path: Path) -> None:
    (tmp_path / "charts").mkdir()
    (tmp_path / "charts/fpga-plugin").symlink_to(CHART)
    (tmp_path / "Chart.yaml").write_text(
        "apiVersion: v2\nname: parent\nversion: 1.0.0\ndependencies:\n"
        "- {name: fpga-plugin, version: '*', condition: fpga-plugin.enabled}\n"
    )

    def kinds(enabled: str) -> list[str]:
        sets = f"fpga-plugin.image.repository=r,fpga-plugin.enabled={enabled}"
        done = subprocess.run(
            [TOOLS / "helm", "template", "all", tmp_path, "--set", sets],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [each["kind"] for each in yaml.safe_load_all(done.stdout) if each]

    assert "DaemonSet" in kinds("true")
    assert kinds("false") == []


def test_probes_wait_as_long_as_the_operator_says() -> None:
    made = rendered("probes.startup.failureThreshold=90", "probes.liveness.periodSeconds=60")
    (container,) = pod_spec(made)["containers"]
    assert container["startupProbe"]["failureThreshold"] == 90
    assert container["startupProbe"]["periodSeconds"] == 5, "what is not said is the chart's"
    assert container["livenessProbe"]["periodSeconds"] == 60
    refused = helm("--set", "image.repository=r", "--set", "probes.startup.initialDelay=1")
    assert "initialDelay" in refused.stderr


def test_security_contexts_are_the_charts_but_for_what_is_given() -> None:
    made = rendered(
        "securityContext.capabilities.drop={ALL}",
        "securityContext.readOnlyRootFilesystem=false",
        "podSecurityContext.fsGroup=7",
    )
    spec = pod_spec(made)
    assert spec["securityContext"] == {"fsGroup": 7}
    (container,) = spec["containers"]
    (plain,) = pod_spec(rendered())["containers"]
    assert container["securityContext"] == plain["securityContext"] | {
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": False,
    }
    assert "securityContext" not in pod_spec(rendered())


@pytest.mark.parametrize("value", ["mode=dra", "nodeConfigurations.named.claims.mode=dra"])
def test_claims_need_a_kubernetes_that_has_them(value: str) -> None:
    sets = ("--set", "image.repository=r", "--set", value, "--kube-version")
    assert "needs Kubernetes 1.34 or later, and this is v1.33.9" in helm(*sets, "1.33.9").stderr
    for version in ("1.34.0", "v1.34.1-gke.100", "1.37.0"):
        assert helm(*sets, version).returncode == 0, version
    assert helm("--set", "image.repository=r", "--kube-version", "1.33.9").returncode == 0
