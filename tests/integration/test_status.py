"""`fpga-plugin status` and `fpga-plugin card`, as commands that ask the daemon as a process."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from functools import partial

import msgspec
import nursery
import pytest
from daemon_support import (
    AFU,
    CARD,
    CARDS,
    HEALTHY,
    ID,
    LIMIT,
    P0,
    P1,
    REGIONS,
    ROOT,
    UNHEALTHY,
    Node,
    Refused,
    eventually,
    request,
)
from doubles.samples import copy_samples

from fpga_plugin.commands.schemas import SCHEMAS

POD = "3f0c6e5e-7a54-4d0a-9f66-9d1f2b9be111"
NAME = "'opencl' / 'vector_add'"


def keeps_to(name, answer):
    """Holds an answer to its published schema: what is missing raises, and nothing is beyond."""
    assert msgspec.convert(answer, SCHEMAS[name]) == answer


def command(state_dir, *arguments, **settings):
    env = {k: v for k, v in os.environ.items() if not k.startswith("FPGA_PLUGIN_")}
    env |= {"FPGA_PLUGIN_STATE_DIR": str(state_dir)} | settings
    return nursery.run(arguments, env, str(ROOT), timeout=60)


def told(node, *arguments):
    """What a command's `--json` says, once the daemon answers."""

    def answered():
        done = command(node.state_dir, *arguments, "--json")
        return done if "no fpga-plugin runs here" not in done.stderr else None

    done = eventually(answered)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def card_show(node, *arguments):
    """`card show`, which looks at the node itself: with the plugin's settings."""
    return nursery.run(("card", "show", *arguments), dict(node.settings), str(ROOT), timeout=60)


def region(node, region_id):
    return next(
        one
        for card in told(node, "status")["cards"]
        for one in card["regions"]
        if one["region"] == region_id
    )


@pytest.fixture
def node():
    with Node("1x2") as node:
        node.kubelet.start()
        node.start()
        node.kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
        yield node.told()


def claim(node, device=P0):
    answer = node.kubelet.allocate(device)
    node.kubelet.checkpoint((POD, "main", REGIONS, [device], answer))
    node.kubelet.prestart(device, env=request())


def test_status_tells_who_has_what_since_when_and_with_which_bitstream(node):
    before = time.time()
    claim(node)
    keeps_to("status", told(node, "status"))
    keeps_to("status-history", told(node, "status", "--history"))
    keeps_to("card-state", told(node, "card", "retry", CARD))
    keeps_to("card-show", json.loads(card_show(node, CARD, "--json").stdout))
    shown = region(node, P0)
    assert (shown["ownership"], shown["condition"]) == ("STARTED", "PROGRAMMED")
    assert (shown["afu_id"], shown["healthy"]) == (AFU, True)
    assert shown["owner"]["pod_uid"] == POD
    assert before <= shown["owner"]["since"] <= time.time()
    assert region(node, P1)["owner"] is None
    (card,) = told(node, "status")["cards"]
    assert card["mode"] == "partitioned"


def test_since_when_outlives_the_plugin(node):
    claim(node)
    since = region(node, P0)["owner"]["since"]
    node.plugin.kill()
    node.again()
    assert region(node, P0)["owner"]["since"] == since


def test_status_tells_the_last_refusal_of_a_pod_and_why(node):
    answer = node.kubelet.allocate(P0)
    node.kubelet.checkpoint((POD, "main", REGIONS, [P0], answer))
    for _ in range(2):
        with pytest.raises(Refused) as refused:
            node.kubelet.prestart(P0, env=request("0" * 32))
    (one,) = told(node, "status")["refusals"]
    assert (one["pod_uid"], one["times"], one["status"]) == (POD, 2, "NOT_FOUND")
    assert one["message"] == refused.value.message
    assert one["devices"] == [P0]


def test_a_refused_claim_counts_as_trouble_until_its_container_starts(node):
    assert told(node, "status")["trouble"]["refused"] == 0
    answer = node.kubelet.allocate(P0)
    node.kubelet.checkpoint((POD, "main", REGIONS, [P0], answer))
    with pytest.raises(Refused) as refused:
        node.kubelet.prestart(P0, env=request("0" * 32))
    assert told(node, "status")["trouble"]["refused"] == 1
    assert region(node, P0)["refused"] == refused.value.message
    node.kubelet.prestart(P0, env=request())
    status = told(node, "status")
    assert status["trouble"]["refused"] == 0
    assert region(node, P0)["refused"] == ""
    (one,) = status["refusals"]
    assert not one["open"], "it is still told, and waits for nothing"


def test_a_refusal_is_no_trouble_any_more_once_its_pod_is_gone(node):
    node.kubelet.allocate(P0)
    with pytest.raises(Refused):
        node.kubelet.prestart(P0, env=request("0" * 32))
    assert told(node, "status")["trouble"]["refused"] == 1
    node.kubelet.deallocate(P0)
    assert told(node, "status")["trouble"]["refused"] == 0
    node.kubelet.allocate(P0)
    assert region(node, P0)["refused"] == "", "its next owner was not refused"


def test_what_failed_and_what_is_drained_is_counted(node):
    told(node, "card", "drain", CARD)
    node.arm(P0, "thermal")
    told(node, "card", "retry", CARD)
    trouble = eventually(
        lambda: t if (t := told(node, "status")["trouble"])["failed"] else None, limit=LIMIT
    )
    counts = {"refused": 0, "drained": 1, "failed": 1, "never_cleared": 0, "kept": 0}
    assert trouble == counts | {"unusable": {}}


def test_an_empty_store_is_trouble_though_kubelet_is_served():
    with Node("1x2") as node:
        (node.own_store() / ID / "blank.gbs").unlink()
        node.kubelet.start()
        node.start()
        node.kubelet.until(REGIONS, {P0: UNHEALTHY, P1: UNHEALTHY})
        status = told(node, "status")
        assert status["ready"], "the rollout of a DaemonSet waits for no store"
        assert status["trouble"]["unusable"] == {"no blank bitstream": 2}
        done = command(node.state_dir, "status", "--problems", "--exit-code")
        assert done.returncode == 1
        assert "2 unusable: no blank bitstream" in done.stdout
        assert str(node.store / ID / "blank.gbs") in done.stdout
        node.kubelet.allocate(P0)
        assert told(node, "status")["trouble"]["unusable"] == {"no blank bitstream": 1}
        node.kubelet.deallocate(P0)
        copy_samples(node.store)
        node.kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
        done = command(node.state_dir, "status", "--exit-code")
        assert (done.returncode, done.stderr) == (0, "")
        assert "no trouble" in done.stdout
        assert "no FPGA cards" not in command(node.state_dir, "status", "--problems").stdout


def test_bitstreams_are_listed_and_named_by_what_the_store_says_of_them(node):
    claim(node)
    status = eventually(
        lambda: (
            s
            if (s := told(node, "status"))["bitstreams"]
            and all(one["trust"] != "not verified yet" for one in s["bitstreams"])
            else None
        )
    )
    by_id = {one["afu_id"]: one for one in status["bitstreams"]}
    assert by_id[AFU]["size"] > 0
    assert by_id[AFU]["trust"] == "any"
    assert by_id[AFU]["problem"] == ""
    names = [one["name"] for one in status["bitstreams"] if one["afu_id"] == AFU]
    assert names == ["'opencl'", "'vector_add'"], "two files, which a port cannot tell apart"
    assert region(node, P0)["bitstream"] == NAME
    assert region(node, P1)["bitstream"] == "blank"


def test_find_shows_only_what_is_looked_for(node):
    claim(node)
    found = told(node, "status", "--find", POD)
    assert [one["region"] for card in found["cards"] for one in card["regions"]] == [P0]
    nobody = ("status", "--find", "nobody & co")
    done = command(node.state_dir, *nobody)
    said = "fpga-plugin: nothing here has 'nobody & co' in its name\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)
    done = command(node.state_dir, *nobody, "--json")
    assert (done.returncode, json.loads(done.stdout)["cards"]) == (1, [])


def history(node, *arguments):
    """Oldest first."""
    return list(reversed(told(node, "status", "--history", *arguments)["events"]))


def test_the_history_tells_a_regions_life_and_outlives_the_plugin(node):
    answer = node.kubelet.allocate(P0)
    node.kubelet.checkpoint((POD, "main", REGIONS, [P0], answer))
    with pytest.raises(Refused):
        node.kubelet.prestart(P0, env=request("0" * 32))
    node.kubelet.prestart(P0, env=request())
    node.kubelet.poststop(P0)
    node.kubelet.checkpoint()
    node.kubelet.deallocate(P0)

    def life():
        found = [one for one in history(node, "--find", P0) if one["event"] != "scrubbed"]
        return found if found[-1:] and found[-1]["event"] == "released" else None

    events = eventually(life)
    assert [one["event"] for one in events] == ["claimed", "refused", "programmed", "released"]
    assert [one["pod_uid"] for one in events[1:]] == [POD] * 3
    assert "no bitstream" in events[1]["message"]
    assert events[2]["seconds"] > 0
    assert (events[2]["afu_id"], events[2]["bitstream"]) == (AFU, NAME)
    assert {one["region"] for one in history(node)} == {P0, P1}, "both were scrubbed at the start"
    node.kubelet.until_health(P0, HEALTHY)
    node.plugin.stop()
    node.again()
    kept = [one for one in history(node, "--find", POD) if one["event"] != "scrubbed"]
    assert kept == [one for one in events if one["pod_uid"]]
    used = {one["afu_id"]: one["last_used"] for one in told(node, "status")["bitstreams"]}
    assert used[AFU] == events[2]["at"]


def test_the_history_is_a_table_for_people_too(node):
    claim(node)
    eventually(lambda: [one for one in history(node) if one["event"] == "programmed"])
    lines = command(node.state_dir, "status", "--history").stdout.splitlines()
    assert lines[0].split() == ["WHEN", "REGION", "WHAT", "POD"]
    line = next(line for line in lines if f"programmed {NAME} in 0." in line)
    assert P0 in line
    assert POD in line
    nothing = command(node.state_dir, "status", "--history", "--find", "nobody").stdout
    assert "nothing happened" in nothing


def test_inspecting_a_card_tells_what_its_hardware_says_now(node):
    claim(node)
    eventually(lambda: [one for one in history(node) if one["event"] == "programmed"])
    node.arm(P1, "fatal")
    found = eventually(
        lambda: (
            f
            if any(
                (f := json.loads(card_show(node, CARD, "--json").stdout)["now"])["errors"].values()
            )
            else None
        )
    )
    assert (found["regions"][0]["region"], found["regions"][0]["afu_id"]) == (P0, AFU)
    assert found["regions"][0]["bitstream"] == NAME
    assert found["card"]["regions"][0]["owner"]["pod_uid"] == POD
    assert "programmed" in {one["event"] for one in found["events"]}
    text = card_show(node, CARD.replace("-", ":", 2)).stdout
    assert f"{P0}  AFU id {AFU} ({NAME})" in text
    assert re.search(r"error registers: \w.* 0x[0-9a-f]*[1-9a-f]", text)
    assert "programmed" in text
    assert f"0000:{CARD[5:7]}:00.0  card" in text, "its PCI functions"
    assert region(node, P0)["condition"] == "PROGRAMMED", "its owner did not notice"


def test_a_card_may_be_named_as_lspci_does_and_an_option_is_not_abbreviated(node):
    found = json.loads(card_show(node, CARD[5:].replace("-", ":"), "--json").stdout)
    assert [card["card"] for card in found["cards"]] == [CARD]
    done = command(node.state_dir, "status", "--watc")
    assert done.returncode == 2
    assert done.stderr.startswith("usage: fpga-plugin status [")
    assert done.stderr.endswith("error: no option '--watc'; did you mean --watch?\n")


def test_a_card_that_is_not_there_cannot_be_inspected(node):
    eventually((node.state_dir / "status.sock").exists)
    done = card_show(node, "0000-99-00.0")
    assert done.returncode == 1
    assert "no card" in done.stderr


def test_the_table_has_the_same_for_people(node):
    claim(node)
    eventually((node.state_dir / "status.sock").exists)
    done = command(node.state_dir, "status")
    assert done.returncode == 0
    assert "ready" in done.stdout
    line = next(line for line in done.stdout.splitlines() if P0 in line)
    for word in ("STARTED", "PROGRAMMED", NAME, "Healthy", POD):
        assert word in line


def test_without_a_daemon_it_says_where_it_looked_and_what_to_do(tmp_path):
    for arguments in (["status"], ["card", "drain", CARD]):
        done = command(tmp_path, *arguments)
        assert done.returncode == 1
        assert str(tmp_path / "status.sock") in done.stderr
        assert "fpga-plugin run" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_socket_that_a_killed_daemon_left_is_no_daemon(node):
    eventually((node.state_dir / "status.sock").exists)
    node.plugin.kill()
    done = command(node.state_dir, "status")
    assert done.returncode == 1
    assert "no fpga-plugin runs here" in done.stderr
    node.again()
    assert told(node, "status")["ready"] in {True, False}, "the next one takes its place"


def test_the_socket_is_roots_alone(node):
    eventually((node.state_dir / "status.sock").exists)
    # Nobody can connect before it listens, and it listens with this mode only.
    told(node, "status")
    assert stat.S_IMODE((node.state_dir / "status.sock").stat().st_mode) == 0o600


def test_the_status_socket_is_gone_after_a_proper_end(node):
    eventually((node.state_dir / "status.sock").exists)
    assert node.plugin.stop() == 0
    assert not (node.state_dir / "status.sock").exists()


def test_draining_a_card_tells_who_still_has_it_and_undrain_brings_it_back(node):
    claim(node)
    state = told(node, "card", "drain", CARD)
    assert state["drained"]
    assert not state["may_be_pulled"]
    assert [(one["device"], one["pod_uid"]) for one in state["holders"]] == [(P0, POD)]
    node.kubelet.until(REGIONS, {P0: HEALTHY})
    assert told(node, "status")["cards"][0]["drained"]
    node.kubelet.poststop(P0)
    node.kubelet.deallocate(P0)
    eventually(lambda: told(node, "card", "drain", CARD)["may_be_pulled"])
    text = command(node.state_dir, "card", "drain", CARD.replace("-", ":", 2).upper()).stdout
    assert "may be pulled now" in text
    short = command(node.state_dir, "card", "undrain", CARD.removeprefix("0000-").replace("-", ":"))
    assert short.stdout.startswith(f"card {CARD}: in service\n"), "named as lspci shows it"
    assert "pulled" not in short.stdout
    assert not told(node, "card", "undrain", CARD)["drained"]
    node.kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
    node.kubelet.until(CARDS, {CARD: HEALTHY})


def test_retry_works_on_what_failed(node):
    node.arm(P0, "pr-error")
    node.kubelet.allocate(P0)
    with pytest.raises(Refused):
        node.kubelet.prestart(P0, env=request())
    node.kubelet.until_health(P0, UNHEALTHY)
    assert region(node, P0)["condition"] == "FAULTED"
    state = told(node, "card", "retry", CARD)
    assert state["card"] == CARD


def test_releasing_a_card_of_which_nothing_is_kept_says_so(node):
    eventually((node.state_dir / "status.sock").exists)
    told(node, "card", "drain", CARD)
    done = command(node.state_dir, "card", "release", CARD)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"fpga-plugin: nothing of card {CARD} is kept for debugging\n")


@pytest.mark.parametrize("card", ["nonsense", "0000-ff-00.0", "../../etc", "\x1b[2J", "é"])
def test_an_operation_on_an_unknown_card_is_refused(node, card):
    eventually((node.state_dir / "status.sock").exists)
    done = command(node.state_dir, "card", "drain", card)
    assert done.returncode == 1
    assert "no card" in done.stderr
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize("arguments", [["card"], ["card", "pull", CARD], ["status", "--wach"]])
def test_wrong_usage_is_exit_code_2(tmp_path, arguments):
    assert command(tmp_path, *arguments).returncode == 2


def test_watching_prints_what_changes_and_ends_with_ctrl_c(node):
    eventually((node.state_dir / "status.sock").exists)
    env = {k: v for k, v in os.environ.items() if not k.startswith("FPGA_PLUGIN_")}
    watcher = subprocess.Popen(
        [sys.executable, "-m", "fpga_plugin", "status", "--watch", "--json"],
        env=env | {"FPGA_PLUGIN_STATE_DIR": str(node.state_dir)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert watcher.stdout is not None
        assert json.loads(watcher.stdout.readline())["cards"][0]["mode"] == "free"
        node.kubelet.allocate(P0)
        while json.loads(watcher.stdout.readline())["cards"][0]["mode"] != "partitioned":
            pass
        watcher.send_signal(signal.SIGINT)
        _, complaints = watcher.communicate(timeout=LIMIT)
    finally:
        watcher.kill()
        watcher.communicate()
    assert watcher.returncode == 0
    assert complaints == ""


def test_pod_and_operator_read_what_mends_a_poisoned_port(node):
    node.arm(P0, "pr-error")
    node.kubelet.allocate(P0)
    with pytest.raises(Refused) as refused:
        node.kubelet.prestart(P0, env=request())
    (one,) = told(node, "status")["refusals"]
    for message in (refused.value.message, one["message"]):
        assert "ask the node's operator: set FPGA_PLUGIN_RECOVERY=rebind, or, when no" in message
        assert "/sys/bus/pci/drivers/dfl-pci/unbind" in message


@pytest.mark.parametrize(
    ("wrong", "method", "for_the_operator"),
    [
        ("in use", "PreStartContainer", "`fuser -v /dev/dfl-port."),
        ("out of service", "Allocate", f"`fpga-plugin card undrain {CARD}`"),
    ],
)
def test_pods_are_refused_without_commands_and_status_and_log_have_them(
    node, wrong, method, for_the_operator
):
    eventually((node.state_dir / "status.sock").exists)
    if method == "Allocate":
        assert command(node.state_dir, "card", "drain", CARD).returncode == 0
    else:
        node.kubelet.allocate(P0)
        node.arm(P0, "port-open")
    start = partial(node.kubelet.prestart, env=request())
    call = node.kubelet.allocate if method == "Allocate" else start
    with pytest.raises(Refused) as refused:
        call(P0)
    assert refused.value.code == "FAILED_PRECONDITION"
    assert wrong in refused.value.message
    assert "ask the node's operator" in refused.value.message
    assert "`" not in refused.value.message
    logged = node.plugin.until_logged("call refused", method=method)
    (one,) = told(node, "status")["refusals"]
    for message in (logged["message"], one["message"]):
        assert for_the_operator in message
