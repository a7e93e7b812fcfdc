"""A misspelt FPGA_* variable is told before its container starts, wherever people look."""

import asyncio
import json

import pytest
from daemon_support import AFU, BLANK, CARD, ID, P0, Node, Refused
from pods_support import as_kubelet_has_it, fpga, logged, on_stock_kubelet, request
from test_status import command, told

from fpga_plugin.demo.pod import DemoPod

MISSPELT = {"FPGA_REGON_1": ID, "PATH": "/bin"}
LINE = "FPGA_* variables mean nothing"
TOLD = "'FPGA_REGON_1' (did you mean FPGA_REGION_1?)"


def test_a_container_with_a_misspelt_variable_is_served_and_warned_of():
    with Node().up() as node:
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=MISSPELT)
        assert node.afu(P0) == BLANK
        node.caught_up()
        events = [line["event"] for line in node.plugin.lines]
        (line,) = node.plugin.logged(LINE)
        assert (line["variables"], line["devices"]) == ([TOLD], [P0])
        answers = [
            number
            for number, one in enumerate(node.plugin.lines)
            if one["event"] == "call" and one["method"] == "PreStartContainer"
        ]
        assert events.index(LINE) < answers[0], "before PreStart answers"
        (warning,) = told(node, "status")["warnings"]
        assert TOLD in warning["message"]
        assert warning["devices"] == [P0]
        text = command(node.state_dir, "status").stdout
        assert "perhaps not as meant" in text
        assert TOLD in " ".join(text.split())


def test_a_setting_makes_it_a_refusal():
    with Node(unknown_variables="refuse").up() as node:
        node.kubelet.allocate(P0)
        with pytest.raises(Refused) as caught:
            node.kubelet.prestart(P0, env=MISSPELT)
        assert caught.value.code == "INVALID_ARGUMENT"
        assert TOLD in caught.value.message
        assert not told(node, "status")["warnings"]
        node.kubelet.prestart(P0, env={"PATH": "/bin", "FPGA_DEVICE_1": "/dev/dfl-port.0"})


def test_on_a_stock_kubelet_the_pods_spec_tells():
    async def story(node, kubelet, pods):
        pod = DemoPod(name="compress", containers=(fpga("app", MISSPELT),))
        pods.pods[pod.uid] = as_kubelet_has_it(pod)
        await kubelet.admit(pod)
        await kubelet.start_container(pod, "app")
        await logged(node, LINE, variables=[TOLD], pod=pod.uid)

    on_stock_kubelet(story)


def test_draining_a_card_names_the_pods_that_have_something_of_it():
    async def story(node, kubelet, pods):
        pod = DemoPod(name="compress", containers=(fpga("app", request(AFU)),))
        pods.pods[pod.uid] = as_kubelet_has_it(pod)
        await kubelet.admit(pod)
        await kubelet.start_container(pod, "app")
        address = CARD.replace("-", ":", 2)
        state = await asyncio.to_thread(told, node, "card", "drain", address)
        (holder,) = state["holders"]
        assert (holder["pod_uid"], holder["pod"]) == (pod.uid, "compress")
        shown = await asyncio.to_thread(command, node.state_dir, "card", "drain", CARD)
        assert "in use by tenant/compress" in shown.stdout
        # After a restart nobody has asked for its name: kubelet reports it.
        await asyncio.to_thread(node.plugin.kill)
        await asyncio.to_thread(node.start)
        await logged(node, "kubelet's records read")
        state = await asyncio.to_thread(told, node, "card", "drain", CARD)
        assert [one["pod"] for one in state["holders"]] == ["compress"]

    on_stock_kubelet(story)


def test_commands_warn_of_misspelt_settings_as_run_does():
    with Node().up().told() as node:
        wrong = {"FPGA_PLUGIN_SCRUBB": "required"} | node.settings
        for arguments in (["devices", "--json"], ["status", "--json"], ["bitstream", "list"]):
            done = command(node.state_dir, *arguments, **wrong)
            assert done.returncode == 0, done.stderr
            assert "unknown setting 'FPGA_PLUGIN_SCRUBB' has no effect; did you mean" in done.stderr
            assert "SCRUBB" not in done.stdout
            if "--json" in arguments:
                json.loads(done.stdout)


@pytest.mark.parametrize("observe", ["true", "false"])
def test_the_settings_in_force_are_logged_once_at_the_start(observe: str):
    with Node("1x1", observe=observe, log_level="debug") as node:
        node.kubelet.start()
        plugin = node.start()
        plugin.until_logged("serving" if observe == "false" else "pod specs: no source answers")
        (line,) = plugin.logged("settings in force")
        assert line["given"] == {**node.settings}
        assert "defaults" not in line, "the first line of the log is short"
        (others,) = plugin.logged("settings by default")
        assert others["defaults"]["FPGA_PLUGIN_TRUST"] == "any"
        assert others["defaults"]["NODE_NAME"] == ""
        assert not line["given"].keys() & others["defaults"].keys()
