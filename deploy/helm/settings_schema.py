"""Writes the schema of the chart's values from the plugin's settings: `make docs` runs it.

A misspelt setting or one that the chart sets itself is then refused by helm, before any pod starts.
"""

import json
from pathlib import Path

from fpga_plugin.config.settings import SETTINGS

CHARTS_OWN = {
    "FPGA_PLUGIN_OBSERVE": "observe",
    "FPGA_PLUGIN_EVENTS": "events",
    "FPGA_PLUGIN_POLICY_FILE": "policy",
    "FPGA_PLUGIN_KEYS_DIR": "keysConfigMap",
    "FPGA_PLUGIN_KUBELET_DIR": "",
    "FPGA_PLUGIN_STATE_DIR": "paths.state",
    "FPGA_PLUGIN_BITSTREAM_DIR": "paths.bitstreams",
    "FPGA_PLUGIN_SYSFS_ROOT": "",
    "FPGA_PLUGIN_DEV_ROOT": "",
    "FPGA_PLUGIN_CGROUP_ROOT": "",
    "FPGA_PLUGIN_HTTP_ADDRESS": "",
    "FPGA_PLUGIN_KUBECONFIG": "",
    "NODE_NAME": "",
}
"""Settings that `settings` may not name, and the value that is there instead."""


def schema() -> dict[str, object]:
    """The chart's values.schema.json; the kind of the other values is helm's own business."""
    text = {"type": ["string", "number", "boolean"]}
    names = [setting.name for setting in SETTINGS if setting.name not in CHARTS_OWN]
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "observe": {"type": "boolean"},
            "events": {"type": "boolean"},
            "readPods": {"type": "boolean"},
            "policy": {"type": "string"},
            "keysConfigMap": {"type": "string"},
            "settings": {
                "type": "object",
                "properties": dict.fromkeys(names, text),
                "additionalProperties": False,
            },
        },
    }


if __name__ == "__main__":
    path = Path(__file__).parent / "fpga-plugin/values.schema.json"
    path.write_text(json.dumps(schema(), indent=2) + "\n")
