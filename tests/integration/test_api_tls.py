"""The API server over TLS, where it does what no real one can be asked to do.

| what | real API server (`tests/dra/test_api_client.py`) | scripted, over TLS (here) | scripted,
plain (`test_mirror.py`) | |---|---|---|---|
| list in pages, watch, bookmarks | yes | yes | yes |
| another authority, another host's certificate | another authority | both, and no token is sent | |
| the token file is replaced | by a token of another pod, once the first one is refused | at once,
and after a 401 | kubeconfig | | 401, 403 | both | 401 | 401 |
| 410: a watch's version, a list's page | both (etcd compacted) | | both ways of the watch |
| 409 | a stale write | | writes (`test_slices.py`) |
| 429 with Retry-After | by priority and fairness | yes | yes |
| slow | stopped (SIGSTOP) | drip by drip | |
| dead | killed and started again | no handshake; half an answer | silent watch |
| a proxy's 404, 503, pages, redirects | | 404, 503 | all |
| what is no JSON, too long, too deep | | | yes |
"""

import asyncio
import contextlib
import ssl
import time

import msgspec
import pytest
from daemon_support import LIMIT
from doubles.apiserver import ApiServerDouble, Reply, status
from doubles.loops import beside, until
from doubles.tls import certified

from fpga_plugin.dra.claim import ClaimReader, ClaimRef, NoSuchClaimError
from fpga_plugin.host.backoff import Backoff
from fpga_plugin.kubernetes.apiserver import mirror as mirror_module
from fpga_plugin.kubernetes.apiserver.mirror import Metadata, Mirror
from fpga_plugin.kubernetes.apiserver.rest import ApiServerError, session
from fpga_plugin.kubernetes.names import parse_claim_uid

PATH = "/apis/test/v1/things"


class Thing(msgspec.Struct):
    metadata: Metadata


def thing(name: str):
    return {"metadata": {"name": name}}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(mirror_module, "FIRST_DELAY", 0.01)


def told(tmp_path, story, *, name: str = "127.0.0.1") -> ApiServerDouble:
    async def main():
        context, authority = certified(tmp_path, name)
        async with asyncio.timeout(LIMIT), ApiServerDouble(context, authority) as server:
            server.objects[PATH] = {}
            await story(server, server.kubeconfig(tmp_path))
            return server

    return asyncio.run(main())


@contextlib.asynccontextmanager
async def mirrored(kubeconfig):
    mirror = Mirror(
        kubeconfig, PATH, Thing, fields={}, changed=lambda: None, backoff=Backoff(0.01, 0.05)
    )
    async with beside(mirror.run()):
        yield mirror


def test_list_in_pages_and_watch(tmp_path) -> None:
    async def story(server, kubeconfig):
        server.page = 2
        for number in range(5):
            await server.put(PATH, thing(f"n{number}"))
        async with mirrored(kubeconfig) as mirror:
            await until(lambda: len(mirror.items) == 5)
            await server.put(PATH, thing("later"))
            await until(lambda: "later" in mirror.items)
            server.cut()
            await server.remove(PATH, "n0")
            await until(lambda: "n0" not in mirror.items)
        assert set(server.tokens) == {"the-token"}

    told(tmp_path, story)


def test_a_server_of_another_authority_gets_no_token(tmp_path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    certified(other)

    async def story(server, kubeconfig):
        server.authority = str(other / "127.0.0.1.crt")
        server.kubeconfig(tmp_path)
        async with session(kubeconfig) as calls:
            with pytest.raises(ApiServerError, match="CERTIFICATE_VERIFY_FAILED"):
                await calls.call("GET", PATH)
        assert server.tokens == []

    told(tmp_path, story)


def test_a_server_with_another_hosts_certificate_gets_no_token(tmp_path) -> None:
    async def story(server, kubeconfig):
        async with session(kubeconfig) as calls:
            with pytest.raises(ApiServerError, match="cannot be asked"):
                await calls.call("GET", PATH)
        assert server.tokens == []

    told(tmp_path, story, name="somebody.example")


def test_a_service_accounts_token_is_taken_up_when_its_file_is_replaced(
    tmp_path, monkeypatch
) -> None:
    from lightkube import KubeConfig

    account = tmp_path / "serviceaccount"
    account.mkdir()
    read = KubeConfig.from_service_account
    monkeypatch.setattr(KubeConfig, "from_service_account", lambda: read(str(account)))

    async def story(server, _):
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
        (account / "namespace").write_text("fpga-plugin")
        (account / "ca.crt").write_text((tmp_path / "127.0.0.1.crt").read_text())
        (account / "token").write_text("first")
        await server.put(PATH, thing("a"))
        async with session(None) as calls:
            await calls.call("GET", PATH)
        assert server.tokens == ["first"]
        # The next connection has the new one.
        (account / "token").write_text("second")
        async with session(None) as calls:
            await calls.call("GET", PATH)
            assert server.tokens == ["first", "second"]
            # One that is open takes it up once the old one is refused.
            (account / "token").write_text("third")
            server.accepted_token = "third"
            await calls.call("GET", PATH)
            assert server.tokens[-2:] == ["second", "third"]
        # And a watch goes on with it.
        async with mirrored(None) as mirror:
            await until(lambda: mirror.items)
            (account / "token").write_text("fourth")
            server.accepted_token = "fourth"
            server.cut()
            await server.put(PATH, thing("b"))
            await until(lambda: "b" in mirror.items)

    told(tmp_path, story)


def test_a_token_that_is_refused_is_an_error_with_the_code(tmp_path) -> None:
    async def story(server, kubeconfig):
        server.accepted_token = "another"
        async with session(kubeconfig) as calls:
            with pytest.raises(ApiServerError, match="answered 401") as caught:
                await calls.call("GET", PATH)
        assert (caught.value.code, caught.value.reason) == (401, "Unauthorized")

    told(tmp_path, story)


def test_a_server_that_asks_to_be_left_alone_is(tmp_path) -> None:
    async def story(server, kubeconfig):
        busy = Reply(429, status(429, "TooManyRequests"), headers={"Retry-After": "1"})
        server.replies.append(busy)
        await server.put(PATH, thing("a"))
        begun = time.monotonic()
        async with mirrored(kubeconfig) as mirror:
            await until(lambda: mirror.items)
        assert time.monotonic() - begun >= 1.0

    told(tmp_path, story)


def test_a_server_that_never_ends_its_answer_is_given_up_by_the_clock(tmp_path) -> None:
    async def story(server, kubeconfig):
        async def drip(writer, reply):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            while not writer.is_closing():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.02)
            return False

        server._send = drip
        async with session(kubeconfig, seconds=0.5) as calls:
            begun = time.monotonic()
            with pytest.raises(ApiServerError, match=r"said nothing for 0\.5 s"):
                await calls.call("GET", PATH)
            assert time.monotonic() - begun < LIMIT / 2

    told(tmp_path, story)


def test_half_an_answer_is_no_answer(tmp_path) -> None:
    async def story(server, kubeconfig):
        usual = server._send
        cuts = [3]

        async def half(writer, reply):
            if not cuts[0]:
                return await usual(writer, reply)
            cuts[0] -= 1
            writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"metadata": {')
            await writer.drain()
            return False

        server._send = half
        await server.put(PATH, thing("a"))
        async with session(kubeconfig) as calls:
            with pytest.raises(ApiServerError, match="cannot be asked"):
                await calls.call("GET", PATH)
        async with mirrored(kubeconfig) as mirror:
            await until(lambda: mirror.items)

    told(tmp_path, story)


def test_a_handshake_that_does_not_end_is_given_up_by_the_clock_and_closed(tmp_path) -> None:
    """Else each attempt would cost a descriptor for as long as the other end says nothing."""

    async def story(server, kubeconfig):
        connected, ended = [], []

        async def silent(reader, writer):
            connected.append(writer)
            with contextlib.suppress(OSError):
                await reader.read(-1)
            ended.append(writer)
            writer.close()

        other = await asyncio.start_server(silent, "127.0.0.1", 0)
        server.port = other.sockets[0].getsockname()[1]
        server.kubeconfig(tmp_path)
        async with session(kubeconfig, seconds=2.5) as calls:
            for _ in range(2):
                with pytest.raises(ApiServerError, match="GET"):
                    await calls.call("GET", PATH)
        await until(lambda: len(ended) == len(connected) == 2)
        other.close()

    told(tmp_path, story)


@pytest.mark.parametrize("reply", [Reply(404, b"<html>"), Reply(503, b"<html>")], ids=str)
def test_what_a_proxy_says_of_a_claim_does_not_end_it(tmp_path, reply: Reply) -> None:
    ref = ClaimRef(parse_claim_uid("11111111-1111-4111-8111-111111111111"), "default", "c")

    async def story(server, kubeconfig):
        claims = ClaimReader(kubeconfig, driver="fpga.intel.com", node="a")
        server.replies.append(reply)
        with pytest.raises(ApiServerError) as caught:
            await claims.get(ref)
        assert not isinstance(caught.value, NoSuchClaimError)
        with pytest.raises(NoSuchClaimError):  # the server itself
            await claims.get(ref)

    told(tmp_path, story)


def test_tls_is_as_new_as_the_server_asks(tmp_path) -> None:
    async def main():
        context, authority = certified(tmp_path)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        async with asyncio.timeout(LIMIT), ApiServerDouble(context, authority) as server:
            server.objects[PATH] = {}
            async with session(server.kubeconfig(tmp_path)) as calls:
                await calls.call("GET", PATH)

    asyncio.run(main())
