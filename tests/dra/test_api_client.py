"""The plugin's client of the API server against the real one, and what only that one can show.

What no real server can be made to do is in `tests/integration/test_api_tls.py`, with the table of
all that is shown where. The cluster is this module's own: its API server is killed and started
again.
"""

import asyncio
import contextlib
import json
import signal
import urllib.error
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cluster import LIMIT, Cluster
from doubles.loops import beside

from fpga_plugin.host.backoff import Backoff
from fpga_plugin.kubernetes.apiserver import mirror as mirror_module
from fpga_plugin.kubernetes.apiserver.mirror import Metadata, Mirror
from fpga_plugin.kubernetes.apiserver.rest import ApiServerError, Session, session

NAMESPACE = "/api/v1/namespaces/default"
MAPS = f"{NAMESPACE}/configmaps"


class Map(msgspec.Struct):
    """A ConfigMap: of all objects the one that nobody else looks at."""

    metadata: Metadata
    data: dict[str, str] | None = None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("api"))
    yield cluster
    cluster.end()


@pytest.fixture(autouse=True)
def _empty(server: Cluster) -> Iterator[None]:
    yield
    server.call("DELETE", f"{MAPS}?labelSelector=test%3Dyes")


def put(server: Cluster, name: str, colour: str = "red") -> None:
    """Make or change one, as somebody else."""
    body = {"metadata": {"name": name, "labels": {"test": "yes"}}, "data": {"colour": colour}}
    try:
        server.call("POST", MAPS, body)
    except urllib.error.HTTPError as error:
        if error.code != 409:
            raise
        server.call("PATCH", f"{MAPS}/{name}", body, kind="application/merge-patch+json")


def colours(mirror: Mirror[Map]) -> dict[str, str]:
    """What the mirror has of ours; the controllers have some of their own."""
    return {
        name: (one.data or {})["colour"]
        for name, one in mirror.items.items()
        if "colour" in (one.data or {})
    }


async def holds(look: Callable[[], Any], what: str) -> None:
    """Wait, while the loop runs."""
    async with asyncio.timeout(LIMIT):
        while not look():  # noqa: ASYNC110  # nobody announces it
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def mirrored(kubeconfig: str | None) -> AsyncIterator[Mirror[Map]]:
    mirror = Mirror(
        kubeconfig, MAPS, Map, fields={}, changed=lambda: None, backoff=Backoff(0.1, 0.5)
    )
    async with beside(mirror.run()):
        yield mirror


def run(story: Callable[[], Awaitable[None]]) -> None:
    """On a loop of its own, and not for ever."""

    async def main() -> None:
        async with asyncio.timeout(3 * LIMIT):
            await story()

    asyncio.run(main())


async def told(server: Cluster, name: str, colour: str = "red") -> None:
    await asyncio.to_thread(put, server, name, colour)


def test_list_in_pages_then_watch(server: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_module, "PAGE", 2)

    async def story() -> None:
        for number in range(7):
            await told(server, f"n{number}")
        async with mirrored(server.kubeconfig()) as mirror:
            await holds(lambda: len(colours(mirror)) == 7, "all pages")
            await told(server, "n0", "blue")
            await told(server, "new")
            await asyncio.to_thread(server.call, "DELETE", f"{MAPS}/n1")
            expected = dict.fromkeys(("n2", "n3", "n4", "n5", "n6", "new"), "red")
            await holds(lambda: colours(mirror) == expected | {"n0": "blue"}, "the changes")
            assert mirror.lists == 1

    run(story)


def test_a_watch_that_the_server_ends_goes_on_without_a_list(
    server: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "WATCH_SECONDS", 1)

    async def story() -> None:
        async with mirrored(server.kubeconfig()) as mirror:
            await holds(lambda: mirror.synced, "the list")
            for number in range(4):
                await asyncio.sleep(0.8)
                await told(server, f"n{number}")
                await holds(lambda n=number: len(colours(mirror)) == n + 1, "the change")
            assert (mirror.lists, mirror.problem) == (1, "")

    run(story)


def test_a_server_of_another_authority_is_not_spoken_to(server: Cluster, tmp_path: Path) -> None:
    config = json.loads(Path(server.kubeconfig()).read_text())
    from doubles.tls import certified

    _, authority = certified(tmp_path)
    config["clusters"][0]["cluster"]["certificate-authority"] = authority
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))

    async def story() -> None:
        async with session(str(path)) as calls:
            with pytest.raises(ApiServerError, match="CERTIFICATE_VERIFY_FAILED"):
                await calls.call("GET", MAPS)

    run(story)


async def refusal(calls: Session, path: str) -> ApiServerError | None:
    try:
        await calls.call("GET", path)
    except ApiServerError as error:
        return error
    return None


def test_a_token_that_nobody_knows_is_refused_and_one_without_rights_too(
    server: Cluster,
) -> None:
    server.add_node("node-x")
    token = server.plugin_token("node-x")

    async def story() -> None:
        async with session(server.kubeconfig("nonsense", name="nobody")) as calls:
            error = await refusal(calls, MAPS)
            assert error is not None
            assert (error.code, error.reason) == (401, "Unauthorized")
        async with session(server.kubeconfig(token, name="plugin")) as calls:
            error = await refusal(calls, f"{NAMESPACE}/secrets")
            assert error is not None
            assert (error.code, error.reason) == (403, "Forbidden")
            assert "secrets" in error.said

    run(story)


def test_a_service_accounts_token_that_was_replaced_is_taken_up(
    server: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As kubelet mounts it. The first one ends with the pod to which it is bound."""
    from lightkube import KubeConfig

    for number in (1, 2):
        server.add_node(f"node-{number}")
    first, second = (server.plugin_token(f"node-{number}") for number in (1, 2))
    grant(server)
    read = KubeConfig.from_service_account
    monkeypatch.setattr(KubeConfig, "from_service_account", lambda: read(str(tmp_path)))
    host, port = server.url.removeprefix("https://").split(":")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    monkeypatch.setattr(mirror_module, "WATCH_SECONDS", 1)
    (tmp_path / "namespace").write_text("fpga-plugin")
    config = json.loads(Path(server.kubeconfig()).read_text())
    authority = config["clusters"][0]["cluster"]["certificate-authority"]
    (tmp_path / "ca.crt").write_text(Path(authority).read_text())
    (tmp_path / "token").write_text(first)

    async def story() -> None:
        async with mirrored(None) as mirror:
            await holds(lambda: mirror.synced, "the first token serves")
            async with session(None) as calls:
                path = "/api/v1/namespaces/fpga-plugin/pods/fpga-plugin-node-1"
                await asyncio.to_thread(server.call, "DELETE", path, {"gracePeriodSeconds": 0})
                # The server remembers a good token for ten seconds.
                await holds(lambda: "401" in mirror.problem, "the first token is refused")
                (tmp_path / "token").write_text(second)
                await calls.call("GET", MAPS)  # one that was open has the new one, too
            await told(server, "after")
            await holds(lambda: "after" in colours(mirror), "the mirror goes on")
            await holds(lambda: mirror.problem == "", "without a problem")

    run(story)


def grant(server: Cluster) -> None:
    """Let the plugin's account read ConfigMaps."""
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    rule = {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "list", "watch"]}
    subject = {"kind": "ServiceAccount", "name": "fpga-plugin", "namespace": "fpga-plugin"}
    for path, body in (
        ("clusterroles", {"rules": [rule]}),
        (
            "clusterrolebindings",
            {
                "roleRef": {
                    "apiGroup": "rbac.authorization.k8s.io",
                    "kind": "ClusterRole",
                    "name": "maps",
                },
                "subjects": [subject],
            },
        ),
    ):
        with contextlib.suppress(urllib.error.HTTPError):
            server.call("POST", f"{rbac}/{path}", {"metadata": {"name": "maps"}, **body})


def test_a_server_that_has_too_much_to_do_is_left_alone_as_long_as_it_asks(
    server: Cluster,
) -> None:
    """429 with Retry-After: the account's requests have a priority level without any seat."""
    server.add_node("node-busy")
    busy = server.kubeconfig(server.plugin_token("node-busy"), name="busy")
    grant(server)
    api = "/apis/flowcontrol.apiserver.k8s.io/v1"
    limited = {
        "nominalConcurrencyShares": 0,
        "lendablePercent": 0,
        "borrowingLimitPercent": 0,
        "limitResponse": {"type": "Reject"},
    }
    level = {"metadata": {"name": "none"}, "spec": {"type": "Limited", "limited": limited}}
    account = {"name": "fpga-plugin", "namespace": "fpga-plugin"}
    rule = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}
    rules = {
        "subjects": [{"kind": "ServiceAccount", "serviceAccount": account}],
        "resourceRules": [rule | {"namespaces": ["*"], "clusterScope": True}],
    }
    schema = {
        "priorityLevelConfiguration": {"name": "none"},
        "matchingPrecedence": 2,
        "rules": [rules],
    }

    async def told_to_wait(calls: Session) -> ApiServerError | None:
        """One of several that come at once: a single one is let in even so."""
        for error in await asyncio.gather(*(refusal(calls, MAPS) for _ in range(8))):
            if error is not None:
                return error
        return None

    async def story() -> None:
        async with session(busy) as calls:
            await calls.call("GET", MAPS)
            path = f"{api}/prioritylevelconfigurations"
            await asyncio.to_thread(server.call, "POST", path, level)
            schemas = f"{api}/flowschemas"
            metadata = {"metadata": {"name": "busy"}}
            await asyncio.to_thread(server.call, "POST", schemas, metadata | {"spec": schema})
            while (error := await told_to_wait(calls)) is None:  # noqa: ASYNC110  # it learns of it
                await asyncio.sleep(0.1)
            assert error.code == 429
            assert error.retry_after >= 1
            assert Backoff(0.001, 0.001).delay(error) == error.retry_after
            await asyncio.to_thread(server.call, "DELETE", f"{schemas}/busy")
            await asyncio.to_thread(server.call, "DELETE", f"{path}/none")
            while await told_to_wait(calls) is not None:  # noqa: ASYNC110  # the same
                await asyncio.sleep(0.1)

    run(story)


def test_a_server_that_stands_still_is_given_up_in_time_and_found_again(
    server: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections stay open, and nothing comes by them."""
    monkeypatch.setattr(mirror_module, "SILENCE_SECONDS", 2.0)

    async def story() -> None:
        await told(server, "before")
        async with mirrored(server.kubeconfig()) as mirror:
            await holds(lambda: "before" in colours(mirror), "a list")
            async with session(server.kubeconfig(), seconds=8.0) as calls:
                await calls.call("GET", MAPS)
                server.signal("kube-apiserver", signal.SIGSTOP)
                try:
                    for _ in range(2):  # by the connection that it has, and by a new one
                        error = await refusal(calls, MAPS)
                        assert error is not None
                        assert error.code == 0
                    await holds(lambda: mirror.problem, "the watch is given up")
                    assert colours(mirror) == {"before": "red"}
                finally:
                    server.signal("kube-apiserver", signal.SIGCONT)
            await told(server, "after")
            await holds(lambda: "after" in colours(mirror), "the change")

    run(story)


def test_what_the_server_no_longer_keeps_is_gone_and_makes_a_new_list(server: Cluster) -> None:
    """A watch's version and a list's page: compacted in etcd, and in no cache of a new server."""

    async def story() -> None:
        for number in range(3):
            await told(server, f"n{number}")
        async with session(server.kubeconfig()) as calls:
            page = json.loads(await calls.call("GET", MAPS, params={"limit": "1"}))["metadata"]
        for number in range(3):
            await told(server, f"n{number}", "blue")
        await asyncio.to_thread(server.compact)
        await asyncio.to_thread(server.restart, "kube-apiserver")
        async with session(server.kubeconfig(), seconds=60.0) as calls:
            error = await _asked(calls, {"limit": "1", "continue": page["continue"]})
            assert error is not None
            assert error.gone, error.message
        mirror = Mirror(
            server.kubeconfig(), MAPS, Map, fields={}, changed=lambda: None, backoff=Backoff(0.1, 1)
        )
        mirror._version = page["resourceVersion"]  # as of a watch that was away for long
        async with beside(mirror.run()):
            await holds(lambda: len(colours(mirror)) == 3, "a list")
            assert set(colours(mirror).values()) == {"blue"}
            assert mirror.lists == 1

    run(story)


async def _asked(calls: Session, params: dict[str, str]) -> ApiServerError | None:
    try:
        await calls.call("GET", MAPS, params=params)
    except ApiServerError as error:
        return error
    return None


def test_a_write_that_is_too_late_is_a_conflict(server: Cluster) -> None:
    async def story() -> None:
        await told(server, "a")
        async with session(server.kubeconfig()) as calls:
            old = json.loads(await calls.call("GET", f"{MAPS}/a"))
            await told(server, "a", "blue")
            with pytest.raises(ApiServerError) as caught:
                await calls.call("PUT", f"{MAPS}/a", body=old)
        assert (caught.value.code, caught.value.reason) == (409, "Conflict")

    run(story)


def test_a_server_that_was_killed_is_found_when_it_is_back(server: Cluster) -> None:
    async def story() -> None:
        await told(server, "before")
        async with mirrored(server.kubeconfig()) as mirror:
            await holds(lambda: "before" in colours(mirror), "a list")
            await asyncio.to_thread(server.restart, "kube-apiserver")
            await told(server, "after")
            await holds(lambda: "after" in colours(mirror), "the change")
            assert colours(mirror) == {"before": "red", "after": "red"}

    run(story)
