"""Starts, ends and restarts of plugin and kubelet, two plugins at once, wrong settings."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import daemon_support
import pytest
from daemon_support import (
    AFU,
    AFU_2,
    BLANK,
    CARD,
    CARDS,
    HEALTHY,
    LIMIT,
    NO_REQUEST,
    P0,
    P1,
    REGIONS,
    Node,
    Plugin,
    Refused,
    eventually,
    request,
)

from fpga_plugin.demo.double import STOCK, KubeletDouble
from fpga_plugin.kubernetes.names import ResourceName


@pytest.fixture
def as_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start of the daemon is that of a new program, as on a node."""
    monkeypatch.setattr(daemon_support, "launch", daemon_support.program)


# -------------------------------------------------------------------- ends


@pytest.mark.usefixtures("as_a_program")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_kubelet_connected_and_leaves_everything_as_it_is(
    number: signal.Signals,
):
    with Node().up() as node:
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request())
        before = node.state()
        node.plugin.process.send_signal(number)
        assert node.plugin.exit_code() == 0
        assert node.state() == before
        assert [path.name for path in node.kubelet_dir.glob("fpga-plugin-*.sock")] == []
        assert (node.kubelet_dir / "kubelet.sock").is_socket()
        node.restarted()
        assert node.kubelet.endpoints[REGIONS].lists[0] == {P0: HEALTHY, P1: HEALTHY}
        assert node.state() == before


@pytest.mark.usefixtures("as_a_program")
def test_sigterm_before_kubelet_is_there_ends_it_too():
    with Node() as node:
        node.start().until_logged("waiting for kubelet")
        assert node.plugin.stop() == 0


def test_sigterm_during_a_pr_waits_for_it_and_nothing_is_lost():
    with Node().up() as node:
        node.set(simulated_pr_seconds="0.5")
        node.again()
        node.kubelet.allocate(P0)
        call = node.kubelet.begin_prestart(P0, env=request())
        node.until_programming(P0, AFU)
        assert node.plugin.stop() == 0
        assert call.code().name in {"UNAVAILABLE", "CANCELLED", "OK"}
        node.set(simulated_pr_seconds="0.01")
        node.restarted()
        assert node.afu(P0) == AFU
        node.kubelet.prestart(P0, env=request(AFU_2))
        assert node.afu(P0) == AFU_2


def test_a_successor_waits_for_a_predecessor_in_a_pr_and_says_why():
    with Node().up() as node:
        node.set(simulated_pr_seconds="5")  # until it is stopped, on a busy machine
        first = node.again()
        node.kubelet.allocate(P0)
        call = node.kubelet.begin_prestart(P0, env=request())
        node.until_programming(P0, AFU)
        eventually(lambda: P0 in (node.state_dir / "lock").read_text())
        first.process.send_signal(signal.SIGTERM)
        first.process.send_signal(signal.SIGSTOP)  # however long the successor's start takes
        node.set(simulated_pr_seconds="0.01")
        second = node.start()
        waits = second.until_logged("waiting for another fpga-plugin to end")
        first.process.send_signal(signal.SIGCONT)
        assert waits["programming"] == [P0]
        second.until_logged("serving")
        assert first.exit_code() == 0
        assert call.exception() is not None or call.code().name == "OK"


def test_the_state_directory_is_made_for_its_owner_alone():
    with Node().up() as node:
        assert stat.S_IMODE(node.state_dir.stat().st_mode) == 0o700
        assert (node.state_dir / "journal.sqlite3").is_file()
        assert (node.state_dir / "lock").is_file()
        assert (node.kubelet_dir / "fpga-plugin" / "lock").is_file()


@pytest.mark.usefixtures("as_a_program")
def test_sockets_that_a_killed_plugin_left_behind_are_removed_and_nobody_elses():
    with Node().up() as node:
        left = set(node.kubelet_dir.glob("fpga-plugin-*.sock"))
        assert len(left) == 2
        foreign = node.kubelet_dir / "fpga-plugin.txt"
        foreign.touch()
        node.again()
        assert left.isdisjoint(node.kubelet_dir.glob("fpga-plugin-*.sock"))
        assert foreign.exists()


# -------------------------------------------------------------------- kubelet's restarts


def test_kubelet_restarts_and_finds_every_allocation_again():
    with Node().up() as node:
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request())
        before = node.state()
        for _ in range(3):
            mark = node.plugin.mark
            node.kubelet.restart()
            node.kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
            assert node.kubelet.endpoints[REGIONS].lists[0] == {P0: HEALTHY, P1: HEALTHY}
            node.plugin.until_logged("kubelet's records read", mark)
            assert node.state() == before
        node.kubelet.until(CARDS, {})
        # Containers that started while kubelet knew no plugin were not counted.
        mark = node.plugin.mark
        node.kubelet.prestart(P0, env=request(AFU_2))
        node.kubelet.poststop(P0)
        assert node.scrubs(P0, mark) == 0
        node.give_back(P0)
        assert (node.scrubs(P0, mark), node.afu(P0)) == (1, BLANK)


def test_a_deallocate_that_kubelet_never_sent_is_made_up_by_the_next_allocate():
    with Node().up() as node:
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request())
        node.kubelet.restart()
        node.kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
        mark = node.plugin.mark
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=NO_REQUEST)
        assert (node.scrubs(P0, mark), node.afu(P0)) == (1, BLANK)


def test_kubelet_may_be_gone_for_a_while_and_its_directory_too():
    with Node().up() as node:
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request())
        node.kubelet.stop()
        away = node.folder / "away"
        node.kubelet_dir.rename(away)
        node.plugin.until_logged("waiting for kubelet")
        assert node.afu(P0) == AFU
        away.rename(node.kubelet_dir)
        node.kubelet.start()
        node.kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
        assert node.afu(P0) == AFU


def test_a_stock_kubelet_is_told_that_its_pods_bitstream_cannot_be_known():
    async def story(node: Node) -> None:
        double = KubeletDouble(str(node.kubelet_dir), profile=STOCK)
        await double.start()
        region = ResourceName(REGIONS)
        await double.wait_for(region, lambda listed: len(listed.healthy) == 2)
        await double.allocate(region, [P0])
        with pytest.raises(Exception, match="no environment") as caught:
            await double.prestart(region, [P0])
        assert caught.value.status.name == "UNAVAILABLE"  # type: ignore[attr-defined]
        await double.restart()
        await double.wait_for(region, lambda listed: len(listed.healthy) == 2)
        await double.stop()

    with Node() as node:
        node.start()
        asyncio.run(story(node))
        assert node.afu(P0) == BLANK


# -------------------------------------------------------------------- settings


def failed_start(node: Node, code: int, **settings: str) -> str:
    """What a start that fails prints."""
    node.set(**settings)
    plugin = node.start()
    assert plugin.exit_code() == code
    return plugin.text


@pytest.mark.usefixtures("as_a_program")
def test_wrong_settings_stop_the_start_and_every_one_is_named():
    with Node() as node:
        said = failed_start(
            node,
            2,
            advertise="everything",
            simulated_cards="none",
            reconcile_interval="soon",
            kubelet_dir="relative/path",
        )
        for word in (
            *("FPGA_PLUGIN_ADVERTISE", "everything", "region", "whole"),
            *("FPGA_PLUGIN_SIMULATED_CARDS", "none"),
            *("FPGA_PLUGIN_RECONCILE_INTERVAL", "soon"),
            *("FPGA_PLUGIN_KUBELET_DIR", "relative/path"),
        ):
            assert word in said
        assert "Traceback" not in said
        assert not node.state_dir.exists()


def test_an_unknown_variable_of_ours_is_a_warning():
    with Node(advertize="whole") as node:
        node.up()
        warnings = [line["event"] for line in node.plugin.lines if line.get("level") == "warning"]
        assert any("FPGA_PLUGIN_ADVERTIZE" in warning for warning in warnings)


def test_only_one_kind_is_advertised_if_that_is_asked_for():
    for kind, resource in (("region", REGIONS), ("whole", CARDS)):
        with Node(advertise=kind).up() as node:
            assert set(node.kubelet.endpoints) == {resource}


def test_a_card_that_is_left_out_is_not_touched():
    with Node("2x1", cards="!0000:11:00.0").up() as node:
        assert node.kubelet.listed(REGIONS) == {P0: HEALTHY}
        assert node.afu("0000-11-00.0-p0") != BLANK


def test_observing_touches_and_registers_nothing():
    with Node(observe="true") as node:
        node.kubelet.start()
        plugin = node.start()
        plugin.until_logged("observing only: nothing is registered (FPGA_PLUGIN_OBSERVE)")
        assert plugin.logged("would serve card", card=CARD)
        assert plugin.stop() == 0
        assert node.kubelet.registrations == []
        assert not (node.simulated / "state.json").exists()


@pytest.mark.parametrize("name", ["state_dir", "simulated_dir"])
def test_a_directory_that_cannot_be_made_is_named(name: str, tmp_path: Path):
    file = tmp_path / "file"
    file.touch()
    with Node() as node:
        node.kubelet.start()
        said = failed_start(node, 2 if name == "simulated_dir" else 1, **{name: str(file / "x")})
        assert str(file) in said
        assert f"FPGA_PLUGIN_{name.upper()}" in said
        assert "Traceback" not in said


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_it_runs_with_nowhere_to_log_to():
    with Node() as node, open("/dev/full", "w") as full:
        node.kubelet.start()
        process = subprocess.Popen(
            [sys.executable, "-m", "fpga_plugin", "run"],
            env=os.environ | node.settings,
            stdout=full,
            stderr=full,
        )
        try:
            node.kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 0


# -------------------------------------------------------------------- two at once


@pytest.mark.long
@pytest.mark.usefixtures("as_a_program")
def test_a_second_plugin_gives_up_after_ten_seconds_whichever_directory_is_shared():
    with Node().up() as node:
        others = [
            Plugin(node.settings | settings)
            for settings in (
                {},  # all is shared
                {"FPGA_PLUGIN_KUBELET_DIR": str(node.folder)},
                {"FPGA_PLUGIN_STATE_DIR": str(node.folder / "other")},
            )
        ]
        node.lives += others
        for other in others:
            assert other.exit_code() == 75
            assert "another fpga-plugin" in other.text
            assert "lock" in other.text
            assert "Traceback" not in other.text
            assert other.logged("serving") == []
        # The first one has noticed nothing.
        assert node.lives[0].process.poll() is None
        assert node.kubelet.listed(REGIONS) == {P0: HEALTHY, P1: HEALTHY}
        with pytest.raises(Refused, match="NOT_FOUND"):
            node.kubelet.allocate("x")
