"""Who may load what, by the daemon as a process: namespaces, reloads, refusals."""

import asyncio
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from daemon_support import (
    AFU,
    AFU_2,
    BLANK,
    CARD,
    CARDS,
    ID,
    LIMIT,
    NO_REQUEST,
    P0,
    P1,
    REGIONS,
    ROOT,
    Node,
    Refused,
    request,
)
from pods_support import UID, FakePod, PodResources, PodsServer, serving

POLICY = f"""\
version: 1
default: deny
rules:
- {{name: no-second, action: deny, namespaces: ["ten*"], bitstreams: [{AFU_2}]}}
- {{name: regions, action: allow, namespaces: [tenant], devices: [region], bitstreams: [{AFU}]}}
"""
ALLOW_ALL = "version: 1\ndefault: allow\n"
DENY_ALL = "version: 1\ndefault: deny\n"


@contextmanager
def served(service, path: Path) -> Iterator[None]:
    """One of kubelet's other APIs, in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    api = serving(service, path)
    asyncio.run_coroutine_threadsafe(api.__aenter__(), loop).result(LIMIT)
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(api.__aexit__(None, None, None), loop).result(LIMIT)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class ConfigMap:
    """A mounted one: the file is a link by way of `..data`, which is switched."""

    def __init__(self, directory: Path, text: str) -> None:
        self.path = directory / "policy.yaml"
        self._directory = directory
        self._version = 0
        directory.mkdir()
        self.set(text)
        self.path.symlink_to("..data/policy.yaml")

    def set(self, text: str) -> None:
        self._version += 1
        version = self._directory / f"..{self._version}"
        version.mkdir()
        (version / "policy.yaml").write_text(text)
        self.switch(version.name)

    def switch(self, to: str) -> None:
        new = self._directory / "..data_tmp"
        new.symlink_to(to)
        new.replace(self._directory / "..data")


@contextmanager
def node(
    text: str = POLICY, hardware: str = "1x2", **settings: str
) -> Iterator[tuple[Node, ConfigMap]]:
    with Node(hardware, **settings) as made:
        policy = ConfigMap(made.folder / "policy", text)
        made.set(policy_file=str(policy.path))
        yield made, policy


def list_socket(node: Node) -> Path:
    node.set(podresources_socket=str(node.folder / "list.sock"))
    return node.folder / "list.sock"


def pods_socket(node: Node) -> Path:
    node.set(pods_socket=str(node.folder / "pods.sock"))
    return node.folder / "pods.sock"


def test_podresources_tells_whose_pod_an_extended_kubelet_starts():
    service = PodResources(compress=P0)
    with node() as (n, _), served(service, list_socket(n)):
        n.up()
        n.kubelet.allocate(P0)
        n.kubelet.prestart(P0, env=request(AFU))
        assert n.afu(P0) == AFU
        with pytest.raises(Refused) as caught:
            n.kubelet.prestart(P0, env=request(AFU_2))
        assert caught.value.code == "PERMISSION_DENIED"
        assert "namespace tenant may not have a region" in caught.value.message
        assert f"rule no-second of {n.folder}/policy/policy.yaml denies it" in caught.value.message
        assert n.afu(P0) == AFU
        n.plugin.until_logged("refused by the policy", namespace="tenant", rule="no-second")


def test_what_no_rule_allows_is_denied_by_default():
    with node() as (n, _), served(PodResources(compress=P0), list_socket(n)):
        n.up()
        n.kubelet.allocate(P0)
        with pytest.raises(Refused, match=r"no rule of .* allows it, and the default is deny"):
            n.kubelet.prestart(P0, env=NO_REQUEST)
        assert n.afu(P0) == BLANK


def test_whole_cards_are_a_kind_of_their_own():
    with node() as (n, _), served(PodResources(compress=CARD), list_socket(n)):
        n.up()
        n.kubelet.allocate(CARD, resource=CARDS)
        with pytest.raises(Refused, match="a whole card of interface"):
            n.kubelet.prestart(CARD, env=request(AFU), resource=CARDS)


def test_the_pods_api_tells_by_uid_once_a_pod():
    service = PodsServer(FakePod())
    with node() as (n, _), served(service, pods_socket(n)):
        n.up()
        n.kubelet.checkpoint((UID, "app", REGIONS, [P0], n.kubelet.allocate(P0)))
        for _ in range(3):
            n.kubelet.prestart(P0, env=request(AFU))
        assert service.calls == [UID]
        with pytest.raises(Refused, match="no-second"):
            n.kubelet.prestart(P0, env=request(AFU_2))


def test_on_a_stock_kubelet_the_spec_tells_and_nothing_else_is_asked():
    good = PodsServer(FakePod(app={"app": request(AFU)}))
    with node() as (n, _), served(good, pods_socket(n)):
        n.up()
        n.kubelet.checkpoint((UID, "app", REGIONS, [P0], n.kubelet.allocate(P0)))
        n.kubelet.prestart(P0, env={})
        assert n.afu(P0) == AFU
        assert good.calls == [UID]


def test_on_a_stock_kubelet_it_is_refused_too():
    bad = PodsServer(FakePod(app={"app": request(AFU_2)}))
    with node() as (n, _), served(bad, pods_socket(n)):
        n.up()
        n.kubelet.checkpoint((UID, "app", REGIONS, [P0], n.kubelet.allocate(P0)))
        with pytest.raises(Refused, match="rule no-second") as caught:
            n.kubelet.prestart(P0, env={})
        assert caught.value.code == "PERMISSION_DENIED"
        assert n.afu(P0) == BLANK


def test_a_namespace_that_nothing_tells_is_not_guessed():
    with node() as (n, _), served(PodResources(a=P0, b=P0), list_socket(n)):
        n.up()
        n.kubelet.allocate(P0)
        with pytest.raises(Refused, match="shows several pods with the devices") as caught:
            n.kubelet.prestart(P0, env=request(AFU))
        assert caught.value.code == "UNAVAILABLE"
        n.kubelet.allocate(P1)
        with pytest.raises(Refused, match="shows no pod with the devices"):
            n.kubelet.prestart(P1, env=request(AFU))


def test_a_policy_that_needs_no_namespace_asks_nobody():
    text = f"{ALLOW_ALL}rules: [{{name: one, action: deny, bitstreams: [{AFU_2}]}}]\n"
    with node(text) as (n, _):
        n.up()
        n.kubelet.allocate(P0)
        n.kubelet.prestart(P0, env=request(AFU))
        with pytest.raises(Refused, match=r"nobody may have .*: rule one of"):
            n.kubelet.prestart(P0, env=request(AFU_2))


def test_a_new_version_is_taken_and_a_broken_one_is_not():
    with node(ALLOW_ALL) as (n, policy):
        n.up()
        n.kubelet.allocate(P0)
        n.kubelet.prestart(P0, env=request(AFU))

        mark = n.plugin.mark
        policy.set(DENY_ALL)
        n.plugin.until_logged("policy in force", mark, default="deny")
        with pytest.raises(Refused, match="the default is deny"):
            n.kubelet.prestart(P0, env=request(AFU))

        refused = "the new policy is not taken; the one before stays in force"
        for broken, says in (
            (lambda: policy.set("version: 1\ndefault: allw"), "allw"),
            (policy.path.unlink, "No such file"),
        ):
            mark = n.plugin.mark
            broken()
            line = n.plugin.until_logged(refused, mark, level="error")
            assert says in line["error"]
            with pytest.raises(Refused, match="the default is deny"):
                n.kubelet.prestart(P0, env=request(AFU))

        mark = n.plugin.mark
        policy.path.write_text(ALLOW_ALL)
        n.plugin.until_logged("policy in force", mark, default="allow")
        n.kubelet.prestart(P0, env=request(AFU))


def test_a_policy_that_forbids_it_meanwhile_is_obeyed():
    with node(ALLOW_ALL) as (n, policy):
        n.up()
        n.set(simulated_pr_seconds="3")  # until it has read the policy
        n.again()
        n.kubelet.allocate(P0)
        call = n.kubelet.begin_prestart(P0, env=request(AFU))
        n.plugin.until_logged("call", method="Allocate")
        policy.set(DENY_ALL)
        assert "the default is deny" in call.exception(LIMIT).details()


def test_a_wrong_policy_at_the_start_is_a_wrong_setting():
    with node("version: 1\ndefault: allow\nrules: [{name: x}]") as (n, policy):
        n.kubelet.start()
        plugin = n.start()
        assert plugin.exit_code() == 2
        assert f"FPGA_PLUGIN_POLICY_FILE: policy file {policy.path}:" in plugin.text
        assert "action" in plugin.text
    with Node("1x1", policy_file="/nonexistent/policy.yaml") as n:
        n.kubelet.start()
        assert n.start().exit_code() == 2


@pytest.mark.parametrize("make", ["fifo", "directory"])
def test_only_a_regular_file_is_a_policy(make):
    with Node("1x1") as n:
        path = n.folder / "policy.yaml"
        os.mkfifo(path) if make == "fifo" else path.mkdir()
        n.set(policy_file=str(path))
        n.kubelet.start()
        assert n.start().exit_code() == 2


def own_loads(namespace: str) -> str:
    """The rules of docs/alveo.md: who may load an xclbin of his own, and who may not."""
    (page,) = re.findall(
        r"```yaml\n(- \{name: research, .*?)```", (ROOT / "docs/alveo.md").read_text(), re.DOTALL
    )
    rules = page.replace("<interface id>", ID).replace("[research]", f"[{namespace}]")
    return f"version: 1\ndefault: allow\nrules:\n{rules}"


@pytest.mark.parametrize("namespace", ["tenant", "research"])
def test_the_policy_says_who_may_load_an_xclbin_of_his_own(namespace):
    service = PodResources(compress=P0)
    service.resource = f"fpga.amd.com/region-{ID}"
    settings = {"hardware": "1x1+alveo", "xrt_tenant_loads": "true"}
    with node(own_loads(namespace), **settings) as (n, _), served(service, list_socket(n)):
        n.up()
        n.kubelet.allocate(P0, resource=service.resource)
        if namespace == "tenant":
            n.kubelet.prestart(P0, env=NO_REQUEST, resource=service.resource)
            assert n.state()[P0]["mask"] == 0x4220
            return
        with pytest.raises(Refused) as caught:
            n.kubelet.prestart(P0, env=NO_REQUEST, resource=service.resource)
        assert caught.value.code == "PERMISSION_DENIED"
        assert "rule others" in caught.value.message
        assert n.state()[P0]["mask"] == 0x643A0
