"""Writes the schema of the chart's values, and its README, from the plugin's settings: `make docs`.

A misspelt value, a setting that does not exist and one that the chart sets itself are then refused
by helm, before any pod starts: `--set obsrve=true` would render a serving, privileged pod. So every
object is closed, but for those that are Kubernetes' own (the API server looks at these) and
`global`, which a parent chart hands to all of its children. What the chart takes from
`deploy/monitoring` is copied beside it.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import yaml

from fpga_plugin.settings.settings import SETTINGS, Setting
from fpga_plugin.settings.values import parse_bool

HERE = Path(__file__).parent
CHART = HERE / "fpga-plugin"
MONITORING = HERE.parent / "monitoring"

Schema = dict[str, Any]

CHARTS_OWN = {
    "FPGA_PLUGIN_OBSERVE": "observe",
    "FPGA_PLUGIN_MODE": "mode",
    "FPGA_PLUGIN_KUBELET_ROOT": "paths.kubelet",
    "FPGA_PLUGIN_CDI_DIR": "paths.cdi",
    "FPGA_PLUGIN_EVENTS": "events",
    "FPGA_PLUGIN_POLICY_FILE": "policy",
    "FPGA_PLUGIN_KEYS_DIR": "keysConfigMap",
    "FPGA_PLUGIN_STATE_DIR": "paths.state",
    "FPGA_PLUGIN_BITSTREAM_DIR": "paths.bitstreams",
}
"""Settings that `settings` may not name, and the value that is there instead."""

FIXED = {
    "FPGA_PLUGIN_KUBELET_DIR": "kubelet has it at one place, whatever its --root-dir is",
    "FPGA_PLUGIN_SYSFS_ROOT": "where the pod mounts the node's /sys",
    "FPGA_PLUGIN_DEV_ROOT": "where the pod mounts the node's /dev",
    "FPGA_PLUGIN_CGROUP_ROOT": "where the pod mounts the node's /sys/fs/cgroup",
    "NODE_NAME": "the downward API says it",
}
"""Settings that no value changes, and why."""

BOOLEANS = [True, False, "true", "false", 1, 0, "1", "0"]

PORT = r"^$|:([1-9][0-9]{0,4})$"
"""Of FPGA_PLUGIN_HTTP_ADDRESS: the pod says its port, so it has to be a certain one."""


def of_setting(setting: Setting) -> Schema:
    """What `settings` may have for one setting: a text, or what YAML makes of one."""
    base: Schema = {"description": f"{setting.meaning} Allowed: {setting.allowed}."}
    if setting.name == "FPGA_PLUGIN_HTTP_ADDRESS":
        return base | {"type": "string", "pattern": PORT}
    if setting.parse is parse_bool:
        return base | {"enum": BOOLEANS}
    if words := _words(setting):
        return base | {"enum": words}
    if limits := re.fullmatch(r"seconds, ([0-9.]+) to ([0-9.]+)", setting.allowed):
        low, high = map(float, limits.groups())
        number = {"type": "number", "minimum": low, "maximum": high}
        return base | {"anyOf": [number, {"type": "string", "pattern": r"^[0-9]*\.?[0-9]*$"}]}
    if setting.allowed.startswith("an absolute path"):
        empty = "" if "empty" not in setting.allowed else "^$|"
        return base | {"type": "string", "pattern": f"{empty}^/"}
    return base | {"type": ["string", "number"]}


def _words(setting: Setting) -> list[str]:
    """The words of a setting that takes one of a few."""
    words = re.split(r", | or ", setting.allowed.replace("`", ""))
    for word in words:
        try:
            parsed = setting.value(word)
        except ValueError:
            return []
        if getattr(parsed, "value", None) != word:
            return []
    return words


def text(description: str, **more: Any) -> Schema:
    """A value that is a text."""
    return {"type": "string", "description": description} | more


def boolean(description: str) -> Schema:
    """A value that is true or false."""
    return {"type": "boolean", "description": description}


def closed(description: str, properties: dict[str, Schema], **more: Any) -> Schema:
    """An object that has these properties and no others."""
    return {
        "type": "object",
        "description": description,
        "properties": properties,
        "additionalProperties": False,
    } | more


def texts(description: str) -> Schema:
    """Names and texts: labels, annotations."""
    strings = {"type": "string"}
    return {"type": "object", "description": description, "additionalProperties": strings}


def each(description: str, item: Schema) -> Schema:
    """A list."""
    return {"type": "array", "description": description, "items": item}


def kubernetes(description: str) -> Schema:
    """An object of Kubernetes' own, which the API server looks at."""
    return {"type": "object", "description": f"{description} As Kubernetes has it."}


def kinds(description: str, properties: dict[str, Schema]) -> Schema:
    """At most one of these."""
    return closed(description, properties, maxProperties=1)


def timing(description: str) -> Schema:
    """A probe's numbers."""
    numbers = {"periodSeconds", "timeoutSeconds", "failureThreshold"}
    return closed(
        description, {name: {"type": "integer", "minimum": 1} for name in sorted(numbers)}
    )


MODES = ["device-plugin", "dra"]
NAME = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
NODE_PATH = {"type": "string", "pattern": "^/"}
NAMED = {"name": {"type": "string"}}


def values() -> dict[str, Schema]:
    """Every value of the chart."""
    of_settings = {
        "description": "Settings of docs/configuration.md, by their own names.",
        "$ref": "#/definitions/settings",
    }
    volume = {
        "hostPath": closed("A directory of the node.", {"path": NODE_PATH, "type": text("Kind.")}),
        "persistentVolumeClaim": closed(
            "A claim that many nodes can mount.",
            {"claimName": text("Its name."), "readOnly": boolean("Always true in the pod.")},
        ),
        "nfs": closed(
            "A directory of an NFS server; root has to be able to read it (no_root_squash).",
            {"server": text("Host."), "path": NODE_PATH, "readOnly": boolean("Read only.")},
        ),
        "configMap": closed(
            "A ConfigMap in the plugin's namespace: at most 1 MiB, so for blank or small images.",
            NAMED
            | {
                "items": each(
                    "Which key is which file.",
                    closed("One file.", {"key": text("Key."), "path": text("Path in the store.")}),
                ),
                "optional": boolean("It may be missing."),
            },
        ),
        "image": closed(
            "An OCI image or artifact whose root is the store (Kubernetes 1.35, or ImageVolume).",
            {
                "reference": text("With its digest."),
                "pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
            },
        ),
    }
    return {
        "global": {"type": "object", "description": "What a parent chart hands down; not used."},
        "image": closed(
            "The plugin's image.",
            {
                "repository": text("Where it is; has to be set."),
                "tag": {
                    "type": ["string", "number"],
                    "description": "Empty: the chart's appVersion.",
                },
                "digest": text("In place of a tag.", pattern="^$|^sha256:"),
                "pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
            },
        ),
        "imagePullSecrets": each("Credentials for the registry.", closed("A Secret.", NAMED)),
        "nameOverride": text(
            "What the application is called, in labels and names. Empty: the chart's name.",
            pattern=f"^$|{NAME}",
        ),
        "fullnameOverride": text("Name of the objects.", pattern=f"^$|{NAME}"),
        "enabled": boolean("For the `condition` of a chart that depends on this one; not used."),
        "observe": boolean("Only look and log: nothing is touched, and the pod has no privileges."),
        "mode": {
            "description": "By which API pods ask for devices; a node has one of them.",
            "enum": MODES,
        },
        "deviceClasses": closed(
            "DeviceClasses, where a node is in mode dra.",
            {
                "interfaceIDs": each(
                    "Of which cards.", {"type": "string", "pattern": "^[0-9a-f]{32}$"}
                ),
                "extendedResources": boolean("Pods get them by their limits, too."),
            },
        ),
        "settings": of_settings,
        "nodeConfigurations": closed(
            "Configurations of single nodes, chosen by a label of the node.",
            {
                "label": text("The label's key; its value is a configuration's name."),
                "named": {
                    "type": "object",
                    "description": "Configurations by name; what they leave out is as for all.",
                    "additionalProperties": closed(
                        "One configuration.",
                        {
                            "settings": of_settings,
                            "observe": boolean("As above."),
                            "mode": {"enum": MODES},
                        },
                    ),
                    "propertyNames": {"pattern": NAME, "maxLength": 20},
                },
            },
        ),
        "events": boolean("Post Events on pods and nodes, with the right to do so."),
        "readPods": boolean("The plugin may `get` pods, to learn what a container asks for."),
        "policy": text("Text of the policy file (docs/policy.md); empty: none."),
        "keysConfigMap": text("ConfigMap with the keys that sign bitstreams; empty: none."),
        "bitstreams": closed(
            "The store of bitstreams.",
            {
                "volume": kinds("One kind of volume; none: paths.bitstreams.", volume),
            },
        ),
        "paths": closed(
            "Directories of the node.",
            {
                "kubelet": text("Kubelet's --root-dir.", pattern="^/"),
                "hidden": each(
                    "In mode dra: directories of kubelet's root of which the pod sees nothing."
                    " Each has to be there.",
                    text("Its name.", pattern="^[^/]+$"),
                ),
                "bitstreams": text("The store.", pattern="^/"),
                "state": text("Journal, locks, verified copies.", pattern="^/"),
                "cdi": text(
                    "In mode dra: where the container runtime looks for CDI files.", pattern="^/"
                ),
            },
        ),
        "serviceAccount": closed(
            "The pod's service account.",
            {
                "create": boolean("Make it."),
                "name": text("Empty: the DaemonSet's name. Needed where `create` is false."),
                "annotations": texts("Its annotations."),
            },
        ),
        "updateStrategy": closed(
            "How an upgrade goes over the nodes. Two plugins never share a node.",
            {
                "type": {"enum": ["RollingUpdate", "OnDelete"]},
                "maxUnavailable": {
                    "description": "How many nodes at a time.",
                    "anyOf": [
                        {"type": "integer", "minimum": 1},
                        {"type": "string", "pattern": "^[1-9][0-9]?%$|^100%$"},
                    ],
                },
            },
        ),
        "affinity": closed(
            "On which nodes it runs.",
            {
                name: kubernetes(f"{name}.")
                for name in ("nodeAffinity", "podAffinity", "podAntiAffinity")
            },
        ),
        "nodeSelector": texts("Labels that its nodes have."),
        "tolerations": each(
            "Taints that it tolerates.",
            closed(
                "One of them.",
                {
                    **{name: {"type": "string"} for name in ("key", "value")},
                    "operator": {"enum": ["Exists", "Equal"]},
                    "effect": {"enum": ["", "NoSchedule", "PreferNoSchedule", "NoExecute"]},
                    "tolerationSeconds": {"type": "integer"},
                },
            ),
        ),
        "priorityClassName": text("Its priority."),
        "resources": closed(
            "What the container may use.",
            {"requests": kubernetes("Requests."), "limits": kubernetes("Limits.")},
        ),
        "nodeFeatureRule": closed(
            "Node Feature Discovery's rule that labels the nodes.", {"create": boolean("Make it.")}
        ),
        "podMonitor": closed(
            "For the Prometheus operator.",
            {
                "create": boolean("Make it."),
                "labels": texts("By which Prometheus selects it."),
                "interval": text("How often it asks.", pattern="^([0-9]+(ms|s|m|h))+$"),
            },
        ),
        "prometheusRule": closed(
            "The alerts of deploy/monitoring, for the Prometheus operator.",
            {"create": boolean("Make it."), "labels": texts("By which Prometheus selects it.")},
        ),
        "dashboards": closed(
            "The dashboards of deploy/monitoring, in a ConfigMap.",
            {"create": boolean("Make it."), "labels": texts("By which Grafana finds it.")},
        ),
        "service": closed(
            "A headless Service of metrics and page.",
            {"create": boolean("Make it."), "annotations": texts("Its annotations.")},
        ),
        "networkPolicy": closed(
            "Who may reach metrics and page; by default nobody.",
            {
                "create": boolean("Make it."),
                "from": each("Peers.", kubernetes("A NetworkPolicyPeer.")),
            },
        ),
        "openshift": closed(
            "OpenShift's SecurityContextConstraints.", {"create": boolean("Make it.")}
        ),
        "seLinuxOptions": closed(
            "The container's SELinux context.",
            {name: text(f"Its {name}.") for name in ("type", "level", "role", "user")},
        ),
        "probes": closed(
            "When kubelet asks the plugin whether it is well.",
            {
                "startup": timing("Until it has started."),
                "liveness": timing("After that: a plugin that fails is restarted."),
                "readiness": timing("Whether the pod counts as ready."),
            },
        ),
        "securityContext": kubernetes("Of the container, over the chart's own."),
        "podSecurityContext": kubernetes("Of the pod."),
        "annotations": texts("Of the DaemonSet."),
        "podAnnotations": texts("Of its pods."),
        "podLabels": texts("Of its pods, besides its own."),
        "extraEnv": each(
            "Further variables of the container; the plugin's own are `settings`.",
            closed(
                "One variable.",
                {
                    "name": {"type": "string", "not": {"pattern": "^(FPGA_PLUGIN_.*|NODE_NAME)$"}},
                    "value": {"type": "string"},
                    "valueFrom": kubernetes("Its source."),
                },
                required=["name"],
            ),
        ),
        "extraVolumes": each("Further volumes of the pod.", kubernetes("A Volume.")),
        "extraVolumeMounts": each("Where they are mounted.", kubernetes("A VolumeMount.")),
    }  # fmt: skip


def schema() -> Schema:
    """The chart's values.schema.json."""
    settings = {s.name: of_setting(s) for s in SETTINGS if s.name not in CHARTS_OWN | FIXED}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": values(),
        "additionalProperties": False,
        "definitions": {"settings": closed("By their own names.", settings)},
    }


_NO_LINE_EACH = {"global", "settings", "affinity", "resources", "tolerations", "probes"}
"""Values that have one line in the README for all that is in them."""


def readme() -> str:
    """The chart's README.md."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    lines = [
        "# The chart fpga-plugin",
        "",
        "[docs/install.md](../../../docs/install.md) says how to install it. `make docs` makes",
        "this table of the chart's schema; helm refuses what is not in it. `settings` takes every",
        "setting of [docs/configuration.md](../../../docs/configuration.md) but those that a value",
        "or the pod itself determines.",
        "",
        "| value | default | meaning |",
        "|---|---|---|",
    ]
    for name, of in values().items():
        lines += _rows(name, of, defaults.get(name))
    instead = ", ".join(f"`{name}` (`{value}`)" for name, value in CHARTS_OWN.items())
    fixed = ", ".join(f"`{name}` ({why})" for name, why in FIXED.items())
    lines += [
        "",
        f"Settings that have a value of their own: {instead}.",
        "",
        f"Settings that no value changes: {fixed}.",
        "",
        "helm refuses a name that is not here, at every level. Open are only labels and",
        "annotations, whose names are yours, `global`, which a parent chart hands to all of its",
        f"children, and what the API server checks itself: {_opened()}.",
    ]
    return "\n".join(lines) + "\n"


def _opened() -> str:
    """The values that are Kubernetes' own objects."""
    return ", ".join(f"`{path}`" for name, of in values().items() for path in _open_in(name, of))


def _open_in(path: str, of: Schema) -> list[str]:
    if of.get("type") == "array":
        return _open_in(f"{path}[]", of["items"])
    if "properties" in of:
        return [
            each
            for name, one in of["properties"].items()
            for each in _open_in(f"{path}.{name}", one)
        ]
    extra = of.get("additionalProperties")
    if isinstance(extra, dict):
        return _open_in(f"{path}.*", extra)
    is_open = of.get("type") == "object" and extra is not False and path != "global"
    return [path] if is_open else []


def _rows(name: str, of: Schema, default: object) -> list[str]:
    inner = of.get("properties")
    if inner and name.partition(".")[0] not in _NO_LINE_EACH and not name.endswith(".volume"):
        given = default if isinstance(default, dict) else {}
        return [
            row
            for each_name, each_of in inner.items()
            for row in _rows(
                f"{name}.{each_name}",
                {**of, "properties": None} if each_name == "create" else each_of,
                given.get(each_name),
            )
        ]
    meaning = of.get("description", "")
    if "enum" in of:
        meaning = f"{meaning} One of {', '.join(map(str, of['enum']))}.".strip()
    if name.endswith(".volume"):
        meaning += " " + "; ".join(f"`{k}`: {v['description']}" for k, v in (inner or {}).items())
    shown = "" if default in ("", None) else f"`{json.dumps(default)}`"
    return [f"| `{name}` | {shown} | {meaning.replace('|', chr(92) + '|')} |"]


def copies() -> dict[Path, Path]:
    """What the chart has of deploy/monitoring: copy and original."""
    boards = sorted(MONITORING.glob("*.json"))
    return {
        CHART / "files/alerts.yaml": MONITORING / "alerts.yaml",
        **{CHART / "files/dashboards" / path.name: path for path in boards},
    }


def main() -> None:
    """Write them."""
    (CHART / "values.schema.json").write_text(json.dumps(schema(), indent=2) + "\n")
    (CHART / "README.md").write_text(readme())
    for copy, original in copies().items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(original, copy)


if __name__ == "__main__":
    main()
