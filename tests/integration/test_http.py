"""Metrics and health of the daemon as a process, over HTTP."""

import http.client
import json
import re
import socket
import subprocess
import sys
import time
from urllib.parse import urlsplit

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

from fpga_plugin.observability.rendered import FRESH

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
POD = "3f0c6e5e-7a54-4d0a-9f66-9d1f2b9be111"


def address(plugin):
    """Where the daemon serves HTTP, by its log."""
    return plugin.until_logged("serving metrics")["addresses"][0]


def ask(plugin, path, *, method="GET", **headers):
    """The answer's head and body."""
    connection = http.client.HTTPConnection(address(plugin), timeout=LIMIT)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response, response.read().decode()
    finally:
        connection.close()


def get(plugin, path, *, accept="", method="GET"):
    """Status and body."""
    response, body = ask(plugin, path, method=method, **({"Accept": accept} if accept else {}))
    return response.status, body


def probe(node, word):
    """Exit code and words of kubelet's exec probe."""
    done = subprocess.run(
        [sys.executable, "-IS", ROOT / "fpga_plugin/probe.py", word],
        env=node.settings, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def metrics(plugin, *, accept=OPENMETRICS):
    """Every sample by its name with labels, as of now."""
    time.sleep(FRESH)  # what was rendered before may be served
    status, text = get(plugin, "/metrics", accept=accept)
    assert status == 200
    samples = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            assert name not in samples, "each sample is there once"
            samples[name] = float(value)
    return samples


@pytest.fixture
def node():
    with Node("1x2", http_address="127.0.0.1:0") as node:
        node.kubelet.start()
        yield node


def serve(node):
    plugin = node.start()
    node.kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
    return plugin


def test_live_and_ready_while_kubelet_is_served_and_not_ready_without(node):
    plugin = serve(node)
    eventually(lambda: get(plugin, "/readyz") == (200, "ok\n"))
    assert get(plugin, "/healthz") == (200, "ok\n")
    node.kubelet.stop()
    status, reasons = eventually(
        lambda: answer if (answer := get(plugin, "/readyz"))[0] == 503 else None
    )
    assert status == 503
    assert REGIONS in reasons
    assert "kubelet" in reasons
    assert get(plugin, "/healthz") == (200, "ok\n"), "starting again would not help"
    assert metrics(plugin)["fpga_plugin_ready"] == 0


def test_a_life_of_an_allocation_is_counted(node):
    plugin = serve(node)
    before = metrics(plugin)
    free = f'fpga_plugin_regions{{card="{CARD}",condition="blank",ownership="free"}}'
    assert before[free] == 2
    node.kubelet.allocate(P0)
    node.kubelet.prestart(P0, env=request())
    during = metrics(plugin)
    programmed = f'fpga_plugin_regions{{card="{CARD}",condition="programmed",ownership="started"}}'
    assert during[programmed] == 1
    assert during[free] == 1
    assert during[f'fpga_plugin_allocations{{ownership="started",resource="{REGIONS}"}}'] == 1
    assert during['fpga_plugin_cards{mode="partitioned"}'] == 1
    ok = 'fpga_plugin_calls_total{method="PreStartContainer",status="OK"}'
    assert during[ok] == 1
    assert ok not in before
    count = 'fpga_plugin_programming_duration_seconds_count{image="bitstream"}'
    assert during[count] == 1
    scrubs = 'fpga_plugin_scrub_duration_seconds_count{outcome="clean"}'
    node.kubelet.poststop(P0)
    node.kubelet.deallocate(P0)
    node.kubelet.until_health(CARD, HEALTHY, resource=CARDS)
    after = eventually(lambda: seen if (seen := metrics(plugin))[scrubs] > before[scrubs] else None)
    assert after['fpga_plugin_releases_total{cause="deallocate"}'] == 1
    assert after[free] == 2
    assert programmed not in after


def test_refusals_and_failures_are_counted_by_reason(node):
    plugin = serve(node)
    node.kubelet.allocate(P0)
    with pytest.raises(Refused):
        node.kubelet.prestart(P0, env=request("0" * 32))
    with pytest.raises(Refused):
        node.kubelet.allocate(CARD, resource=CARDS)
    node.arm(P0, "pr-error")
    with pytest.raises(Refused):
        node.kubelet.prestart(P0, env=request())
    seen = metrics(plugin)
    for name in (
        'fpga_plugin_failures_total{operation="prestart",reason="bitstream_not_found"}',
        'fpga_plugin_failures_total{operation="prestart",reason="programming"}',
        'fpga_plugin_failures_total{operation="prepare",reason="programming"}',
        'fpga_plugin_calls_total{method="Allocate",status="FAILED_PRECONDITION"}',
        'fpga_plugin_calls_total{method="PreStartContainer",status="NOT_FOUND"}',
        f'fpga_plugin_region_failures_total{{card="{CARD}"}}',
    ):
        assert seen[name] == 1, name
    assert seen[f'fpga_plugin_regions_failed{{card="{CARD}"}}'] == 1


def test_an_implied_release_is_counted(node):
    plugin = serve(node)
    for _ in range(2):
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request())
    assert metrics(plugin)['fpga_plugin_releases_total{cause="implied"}'] == 1


def test_registrations_are_counted_over_kubelets_lives(node):
    plugin = serve(node)
    name = f'fpga_plugin_registrations_total{{resource="{REGIONS}"}}'
    assert metrics(plugin)[name] == 1
    node.kubelet.restart()
    eventually(lambda: metrics(plugin)[name] == 2)


def test_sensors_are_read_and_what_is_absent_is_left_out(node):
    seen = metrics(serve(node))
    temperature = (
        f'fpga_plugin_card_temperature_celsius{{card="{CARD}",sensor="dfl_fme_thermal_temp1"}}'
    )
    assert seen[temperature] == 45
    assert (
        seen[f'fpga_plugin_card_power_watts{{card="{CARD}",sensor="dfl_fme_power_power1"}}'] == 22
    )
    assert seen[f'fpga_plugin_card_errors{{card="{CARD}",register="catfatal_errors"}}'] == 0


def test_best_effort_scrubbing_is_seen_wherever_it_is_in_force():
    with Node("1x2", http_address="127.0.0.1:0", scrub="best-effort") as node:
        (node.own_store() / ID / "blank.gbs").unlink()
        node.kubelet.start()
        seen = metrics(serve(node))
        assert seen["fpga_plugin_scrub_best_effort"] == 1
        assert seen["fpga_plugin_regions_unblanked"] == 2
        assert seen[f'fpga_plugin_blank_bitstream_missing{{interface_id="{ID}"}}'] == 1


def test_required_scrubbing_without_a_blank_bitstream_is_seen():
    with Node("1x2", http_address="127.0.0.1:0") as node:
        (node.own_store() / ID / "blank.gbs").unlink()
        node.kubelet.start()
        plugin = node.start()
        node.kubelet.until(REGIONS, {P0: UNHEALTHY, P1: UNHEALTHY})
        seen = eventually(lambda: metrics(plugin))
        assert seen["fpga_plugin_scrub_best_effort"] == 0
        assert seen[f'fpga_plugin_blank_bitstream_missing{{interface_id="{ID}"}}'] == 1
        name = f'fpga_plugin_devices{{health="unhealthy",resource="{REGIONS}"}}'
        assert seen[name] == 2
        assert seen['fpga_plugin_regions_unusable{reason="no_blank_bitstream"}'] == 2
        assert seen['fpga_plugin_regions_unusable{reason="held_by_another_plugin"}'] == 0
        assert get(plugin, "/readyz") == (200, "ok\n"), "kubelet is served"


def test_the_older_format_has_the_same_samples(node):
    plugin = serve(node)
    node.kubelet.allocate(P0)

    def steady(samples):
        return {name for name in samples if not re.match("process_|.*_created", name)}

    assert steady(metrics(plugin, accept="text/plain")) == steady(metrics(plugin))


def test_each_metric_is_documented(node):
    _, text = get(serve(node), "/metrics", accept="text/plain")
    names = set(re.findall(r"(?m)^# TYPE (fpga_plugin_\w+?)(?:_created)? ", text))
    documented = (ROOT / "docs/metrics.md").read_text()
    assert {name for name in names if f"`{name}`" not in documented} == set()


def test_no_label_has_anything_of_a_pods(node):
    plugin = serve(node)
    answer = node.kubelet.allocate(P0)
    node.kubelet.checkpoint((POD, "secret-container", REGIONS, [P0], answer))
    node.kubelet.prestart(P0, env=request())
    with pytest.raises(Refused):
        node.kubelet.prestart(P0, env=request("TENANT"))
    _, text = get(plugin, "/metrics", accept=OPENMETRICS)
    for foreign in (POD, "secret-container", AFU, "TENANT"):
        assert foreign not in text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/", 404),  # the page is off
        ("GET", "/status.json", 404),
        ("GET", "/status", 404),  # the local socket's
        ("POST", "/card", 405),
        ("DELETE", "/metrics", 405),
        ("HEAD", "/healthz", 200),
    ],
)
def test_over_tcp_there_is_little_and_nothing_that_changes_anything(node, method, path, status):
    assert get(serve(node), path, method=method)[0] == status


def test_over_tcp_post_is_refused_and_so_is_a_host_name_that_a_stranger_may_own(node):
    plugin = serve(node)
    response, _ = ask(plugin, "/metrics", method="POST")
    assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD")
    for path in ("/metrics", "/healthz", "/nothing"):
        response, body = ask(plugin, path, Host="rebound.example:9102")
        assert response.status == 421
        assert "FPGA_PLUGIN_HTTP_HOSTS" in body
        assert "fpga_plugin_" not in body
    for host in ("10.0.0.7:9102", "fpga-plugin.monitoring.svc:9102", "localhost"):
        assert ask(plugin, "/healthz", Host=host)[0].status == 200


def test_the_nodes_name_and_what_the_operator_lists_are_answered_to():
    with Node("1x2", http_address="127.0.0.1:0", http_hosts="fpga.example.com") as node:
        node.settings["NODE_NAME"] = "node7.example.com"
        node.kubelet.start()
        plugin = serve(node)
        for host in ("node7.example.com:9102", "FPGA.example.com"):
            assert ask(plugin, "/healthz", Host=host)[0].status == 200
        assert ask(plugin, "/healthz", Host="example.com")[0].status == 421


def test_the_status_socket_answers_the_probes(node):
    plugin = serve(node)
    eventually(lambda: probe(node, "readyz") == (0, "ok\n"))
    assert probe(node, "healthz") == (0, "ok\n")
    node.kubelet.stop()
    code, reasons = eventually(lambda: said if (said := probe(node, "readyz"))[0] else None)
    assert code == 1
    assert REGIONS in reasons
    assert probe(node, "healthz") == (0, "ok\n"), "starting again would not help"
    plugin.kill()
    code, said = probe(node, "healthz")
    assert code == 1
    assert said.startswith(f"{node.state_dir}/status.sock does not answer: ")


def test_the_status_socket_takes_no_other_method(node):
    plugin = serve(node)
    eventually(lambda: probe(node, "healthz")[0] == 0)
    for path, method, allowed in (("/card", "GET", "POST"), ("/status", "POST", "GET, HEAD")):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(node.state_dir / "status.sock"))
            client.sendall(f"{method} {path} HTTP/1.0\r\n\r\n".encode())
            response = http.client.HTTPResponse(client)
            response.begin()
            assert (response.status, response.headers["Allow"]) == (405, allowed)
    assert plugin.process.poll() is None


def test_half_sent_requests_hold_up_neither_the_probes_nor_other_requests(node):
    """As many as may be open at once, and more: each new request takes the place of an old one."""
    plugin = serve(node)
    eventually(lambda: probe(node, "readyz") == (0, "ok\n"))
    url = urlsplit(f"http://{address(plugin)}")

    def half():
        client = socket.create_connection((url.hostname, url.port))
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost:")
        return client

    held = [half() for _ in range(200)]
    try:
        for _ in range(15):
            assert get(plugin, "/healthz") == (200, "ok\n")
            assert get(plugin, "/readyz") == (200, "ok\n")
            assert probe(node, "healthz") == (0, "ok\n")
            held += [half() for _ in range(5)]
        seen = metrics(plugin)
        assert seen['fpga_plugin_http_connections_dropped_total{reason="limit_of_address"}'] > 0
        lines = plugin.logged("too many HTTP connections: the oldest unfinished ones are closed")
        assert len(lines) == 1, "once a minute"
    finally:
        for one in held:
            one.close()


def test_a_port_that_is_taken_disturbs_nobody_and_is_taken_later(node):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        node.set(http_address=f"127.0.0.1:{port}")
        plugin = serve(node)
        line = plugin.until_logged(
            "metrics and status are not served there; the plugin goes on without"
        )
        assert line["level"] == "error"
        assert str(port) in line["address"]
        node.kubelet.allocate(P0)
    plugin.until_logged("serving metrics")
    assert get(plugin, "/healthz")[0] == 200


def test_a_directory_in_the_place_of_the_status_socket_disturbs_nobody(node):
    socket_path = node.state_dir / "status.sock"
    socket_path.mkdir(parents=True)
    plugin = serve(node)
    line = plugin.until_logged("a directory in the place of the status socket is moved aside")
    assert (node.state_dir / line["moved_to"]).is_dir()
    eventually(lambda: probe(node, "healthz") == (0, "ok\n"))


def test_metrics_are_served_before_kubelet_is_there():
    with Node("1x2", http_address="127.0.0.1:0") as node:
        plugin = node.start()
        plugin.until_logged("waiting for kubelet")
        status, reasons = get(plugin, "/readyz")
        assert status == 503
        assert "kubelet.sock is not in" in reasons
        assert metrics(plugin)["fpga_plugin_ready"] == 0


def test_a_node_without_cards_is_ready():
    with Node("1x2", http_address="127.0.0.1:0", cards="0000:77:00.0") as node:
        node.kubelet.start()
        plugin = node.start()
        plugin.until_logged("serving")
        assert get(plugin, "/readyz") == (200, "ok\n")


def test_many_clients_at_once_do_not_hold_up_kubelet(node):
    plugin = serve(node)
    url = urlsplit(f"http://{address(plugin)}")
    idle = [socket.create_connection((url.hostname, url.port)) for _ in range(60)]
    try:
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request())
    finally:
        for one in idle:
            one.close()
    eventually(lambda: get(plugin, "/healthz")[0] == 200)


def test_the_page_is_served_where_it_is_switched_on():
    with Node("1x2", http_address="127.0.0.1:0", status_page="true") as node:
        node.kubelet.start()
        plugin = serve(node)
        status, html = get(plugin, "/")
        assert status == 200
        assert f"Card {CARD}" in html
        status, text = get(plugin, "/status.json")
        assert json.loads(text)["cards"][0]["card"] == CARD
