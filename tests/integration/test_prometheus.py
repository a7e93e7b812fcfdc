"""A real Prometheus scrapes the daemon: rules, dashboard, and the metrics' own conventions.

Debian's Prometheus and promtool, on a free port and in a temporary folder.
"""

import json
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from daemon_support import CARD, HEALTHY, LIMIT, P0, REGIONS, Node, Refused, eventually, request
from test_http import address, get

MONITORING = Path(__file__).parents[2] / "deploy/monitoring"

pytestmark = pytest.mark.needs("prometheus")


def promtool(*arguments, text=None):
    return subprocess.run(
        ["promtool", *arguments],
        input=text,
        capture_output=True,
        text=True,
        cwd=MONITORING,
        check=False,
    )


def test_the_alert_rules_are_valid_and_fire_when_they_should():
    checked = promtool("check", "rules", "alerts.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    tested = promtool("test", "rules", "alerts_test.yaml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


class Prometheus:
    """One that scrapes one daemon five times a second."""

    def __init__(self, folder: Path, target: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        config = {
            "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms"},
            "scrape_configs": [
                {"job_name": "fpga-plugin", "static_configs": [{"targets": [target]}]}
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
                "--log.level=warn",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def query(self, expression):
        """Its result; None while it does not answer yet."""
        asked = urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}/api/v1/query?{asked}", timeout=LIMIT
            ) as answer:
                return json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            if error.code == 503:
                return None
            raise AssertionError(f"{expression}: {error.read().decode()}") from None
        except (urllib.error.URLError, ConnectionError):
            return None

    def stop(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(LIMIT)


@pytest.fixture(scope="module")
def scraped(tmp_path_factory):
    """A daemon with some history, and a Prometheus that has scraped it more than once."""
    with Node("2x2", http_address="127.0.0.1:0") as node:
        node.kubelet.start()
        plugin = node.start()
        node.kubelet.until_health(P0, HEALTHY)
        prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), address(plugin))
        try:
            eventually(lambda: prometheus.query("fpga_plugin_ready == 1"))
            for _ in range(2):
                node.kubelet.allocate(P0)
                with pytest.raises(Refused):
                    node.kubelet.prestart(P0, env=request("0" * 32))
                node.kubelet.prestart(P0, env=request())
                node.kubelet.poststop(P0)
                node.give_back(P0)
            node.kubelet.allocate(P0)
            done = 'fpga_plugin_calls_total{method="Allocate"} == 3'
            eventually(lambda: prometheus.query(done))
            yield node, prometheus
        finally:
            prometheus.stop()


def expressions():
    dashboards = [json.loads(path.read_text()) for path in MONITORING.glob("*.json")]
    assert len(dashboards) == 2
    return [
        (panel["title"], target["expr"])
        for dashboard in dashboards
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]


def test_each_query_of_the_dashboard_has_a_result(scraped):
    _node, prometheus = scraped
    assert len(expressions()) > 20
    for title, expression in expressions():
        asked = expression.replace("$__rate_interval", "1m").replace("$instance", ".*")
        if "region_failures" in expression:
            continue  # nothing has failed on this card: an absent series is right
        eventually(lambda asked=asked: prometheus.query(asked), title)


def test_each_alert_asks_for_metrics_that_exist(scraped):
    _node, prometheus = scraped
    every = eventually(lambda: prometheus.query('{__name__=~"fpga_plugin_.+"}'))
    known = {one["metric"]["__name__"] for one in every}
    asked = set(re.findall(r"\bfpga_plugin_\w+", (MONITORING / "alerts.yaml").read_text()))
    assert asked - known == set()
    drawn = {name for _, e in expressions() for name in re.findall(r"\bfpga_plugin_\w+", e)}
    assert drawn - known == {"fpga_plugin_region_failures_total"}


def test_what_prometheus_stored_is_what_the_daemon_says(scraped):
    _node, prometheus = scraped
    for told in (
        f'fpga_plugin_regions{{card="{CARD}",ownership="claimed",condition="blank"}} == 1',
        "up == 1",
        f'fpga_plugin_resource_registered{{resource="{REGIONS}"}} == 1',
    ):
        eventually(lambda told=told: prometheus.query(told), told)


def test_names_follow_the_conventions(scraped):
    node, _prometheus = scraped
    _, text = get(node.plugin, "/metrics", accept="text/plain")
    ours = "".join(
        f"{line}\n" for line in text.splitlines() if re.match(r"(# \w+ )?fpga_plugin_", line)
    )
    ours = re.sub(r"(?m)^.*_created.*\n", "", ours)
    checked = promtool("check", "metrics", text=ours)
    assert checked.returncode == 0, checked.stdout + checked.stderr
