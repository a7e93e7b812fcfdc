"""By which names the HTTP server may be asked."""

import pytest

from fpga_plugin.observability.hosts import Hosts


@pytest.mark.parametrize(
    "host",
    [
        None,  # HTTP/1.0, which no browser speaks
        "10.0.0.7",
        "10.0.0.7:9102",
        "[2001:db8::7]:9102",
        "[::1]",
        "localhost:9102",
        "LocalHost",
        "fpga-plugin:9102",  # a Service of the same namespace
        "fpga-plugin.monitoring.svc:9102",
        "fpga-plugin.monitoring.svc.cluster.local",
        "fpga-plugin.monitoring.svc.cluster.local.:9102",
        "a.internal",
        "node7.example.com",
        "NODE7.example.com:80",
    ],
)
def test_names_that_no_stranger_can_own_are_answered(host):
    assert Hosts(["", "node7.example.com"]).answers(host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:9102",
        "node7.example.com.evil.example",
        "10.0.0.7.evil.example",
        "localhost.evil.example",
        "x.svc.evil.example",
        "evilnode7.example.com",
        "fpga-plugin.zip",  # a name and a namespace, and a domain of the Internet
        "",
        ":9102",
        "[::1",
        "[evil.example]",
        "user@10.0.0.7",
        "10.0.0.7/x",
        "10.0.0.7:9102:1",
        "::1",
    ],
)
def test_a_page_of_a_strangers_is_not_answered(host):
    assert not Hosts(["", "node7.example.com"]).answers(host)


def test_the_operator_may_list_names_domains_or_all():
    assert Hosts(["fpga.example.com"]).answers("fpga.example.com")
    assert Hosts(["*.example.com"]).answers("a.b.example.com:443")
    assert not Hosts(["*.example.com"]).answers("example.com")
    assert not Hosts(["*.example.com"]).answers("evilexample.com")
    assert Hosts(["*"]).answers("whatever.example")
