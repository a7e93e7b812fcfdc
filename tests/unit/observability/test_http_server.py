"""The HTTP server on real sockets: what it answers, and what a hostile client can do to it."""

import asyncio
import os
import socket
import stat

import pytest
from doubles import LIMIT
from structlog.testing import capture_logs

from fpga_plugin.host.instruments import Counter
from fpga_plugin.observability.connections import Connections
from fpga_plugin.observability.http import HEAD_SECONDS, MAX_HEAD, Listener, Request, Response, text


async def echo(request: Request) -> Response:
    return text(200, f"{request.method} {request.path} {dict(request.query)} {len(request.body)}")


async def exchange(address: str, sent: bytes, *, end: bool = False) -> bytes:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    try:
        writer.write(sent)
        if end:
            writer.write_eof()
        async with asyncio.timeout(LIMIT):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def connected(listener: Listener, number: int) -> None:
    while listener.connections != number:  # noqa: ASYNC110  # nothing announces it
        await asyncio.sleep(0.005)


def serve(test, handler=echo, **limits):
    """Run `test(listener)` beside a server on a free port of this machine."""

    async def main():
        listener = Listener(handler, **limits)
        await listener.open_tcp("127.0.0.1", 0)
        try:
            return await test(listener)
        finally:
            await listener.close()

    return asyncio.run(main())


def ask(sent, handler=echo, *, end=False, **limits):
    async def test(listener):
        return await exchange(listener.addresses[0], sent, end=end)

    return serve(test, handler, **limits)


def test_a_request_is_parsed_and_answered():
    answer = ask(b"GET /a%20b?x=1&x=2&y HTTP/1.1\r\nHost: h\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"connection: close" in head.lower()
    assert body == b"GET /a b {'x': '2'} 0\n"


def test_http_1_0_is_understood():
    assert ask(b"GET / HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")


def test_head_gets_the_headers_alone():
    answer = ask(b"HEAD /x HTTP/1.1\r\nHost: h\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-length: 13" in head.lower()
    assert body == b""


def test_a_body_is_read():
    answer = ask(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello")
    assert answer.endswith(b"POST / {} 5\n")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET / HTTP/1.1\r\nHost: h\r\nContent-Length: x\r\n\r\n", 400),
        (b"GET /" + b"a" * (MAX_HEAD + 8192) + b" HTTP/1.1\r\nHost: h\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"a" * (MAX_HEAD + 8192) + b"\r\n\r\n", 431),
        (b"GET /?" + b"&".join(b"a" for _ in range(100)) + b" HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n", 400),  # a TLS client
    ],
)
def test_a_malformed_http_request_is_refused(sent, status):
    answer = ask(sent)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()) or answer == b""


def test_a_body_that_is_too_large_is_refused():
    sent = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 100000\r\n\r\n" + b"a" * 100000
    answer = ask(sent)
    assert answer.startswith(b"HTTP/1.1 413 ") or answer == b""


def test_a_client_that_says_nothing_and_goes_gets_nothing():
    assert ask(b"", end=True) == b""


def test_an_error_of_ours_is_a_500_without_its_text():
    async def broken(_request):
        raise RuntimeError("secret")

    answer = ask(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", broken)
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"secret" not in answer


def test_a_client_that_does_not_finish_its_requests_head_is_ended_soon():
    async def test(listener):
        return await exchange(listener.addresses[0], b"GET / HT")  # never the rest

    dropped = Counter()
    connections = Connections(dropped=dropped)
    assert serve(test, connections=connections, head_seconds=0.05, seconds=3600) == b""
    assert dict(dropped.items()) == {("slow_request",): 1}
    assert HEAD_SECONDS == 2.0


def test_a_client_that_does_not_finish_its_body_has_the_time_of_a_whole_request():
    async def test(listener):
        sent = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n"
        return await exchange(listener.addresses[0], sent)

    dropped = Counter()
    connections = Connections(dropped=dropped)
    assert serve(test, connections=connections, head_seconds=3600, seconds=0.05) == b""
    assert dict(dropped.items()) == {("slow_request",): 1}


def test_a_client_that_does_not_read_is_ended_and_others_are_served():
    async def large(request):
        return Response(200, b"a" * (64 << 20 if request.path == "/large" else 1))

    async def test(listener):
        host, _, port = listener.addresses[0].rpartition(":")
        _reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /large HTTP/1.1\r\nHost: h\r\n\r\n")
        await writer.drain()
        answer = await exchange(listener.addresses[0], b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        async with asyncio.timeout(LIMIT):
            await connected(listener, 0)
        writer.transport.abort()
        return answer

    assert serve(test, large, seconds=0.3).endswith(b"a")


WHOLE = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"
HALF = b"GET / HTTP/1.1\r\nHost:"


async def begin(address: str, sent: bytes, *, source: str = "127.0.0.1"):
    """A connection that has sent so much."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
    writer.write(sent)
    return reader, writer


async def ended(reader) -> bool:
    async with asyncio.timeout(LIMIT):
        try:
            return await reader.read() == b""
        except ConnectionResetError:
            return True


def test_at_the_limit_the_oldest_unfinished_connection_makes_room_for_the_new_one():
    dropped = Counter()

    async def test(listener):
        held = []
        for number in range(3):
            held.append(await begin(listener.addresses[0], HALF))
            await connected(listener, number + 1)
        with capture_logs() as lines:
            answer = await exchange(listener.addresses[0], WHOLE)
        gone = await ended(held[0][0])
        still = listener.connections
        for _, writer in held:
            writer.close()
        return answer, gone, still, lines

    connections = Connections(most=3, dropped=dropped)
    answer, gone, still, lines = serve(
        test, connections=connections, head_seconds=3600, seconds=3600
    )
    assert answer.startswith(b"HTTP/1.1 200")
    assert gone
    assert still == 2, "the younger ones stay"
    assert dict(dropped.items()) == {("limit",): 1}
    (line,) = lines
    assert line["event"] == "too many HTTP connections: the oldest unfinished ones are closed"
    assert (line["reason"], line["source"], line["closed"]) == ("limit", "127.0.0.1", 1)


def test_a_connection_that_is_being_answered_outlives_younger_ones_that_ask_for_nothing():
    release = asyncio.Event()

    async def waiting(_request):
        await release.wait()
        return text(200, "done")

    async def test(listener):
        first = asyncio.create_task(exchange(listener.addresses[0], WHOLE))
        await connected(listener, 1)
        halves = [await begin(listener.addresses[0], HALF) for _ in range(8)]
        assert await ended(halves[0][0])
        release.set()
        for _, writer in halves:
            writer.close()
        return await first

    connections = Connections(most=3)
    assert serve(test, waiting, connections=connections, head_seconds=3600).endswith(b"done\n")


def test_where_all_are_being_answered_the_new_one_is_still_not_refused():
    release = asyncio.Event()

    async def waiting(request):
        if request.path == "/wait":
            await release.wait()
        return text(200, "done")

    async def test(listener):
        wait = b"GET /wait HTTP/1.0\r\n\r\n"
        first = asyncio.create_task(exchange(listener.addresses[0], wait))
        await connected(listener, 1)
        second = await exchange(listener.addresses[0], WHOLE)
        release.set()
        return await first, second

    first, second = serve(test, waiting, connections=Connections(most=1))
    assert first == b""
    assert second.endswith(b"done\n")


def test_a_flood_from_one_address_ends_its_own_connections_alone():
    dropped = Counter()

    async def test(listener):
        other = await begin(listener.addresses[0], HALF, source="127.0.0.2")
        await connected(listener, 1)
        flood = [await begin(listener.addresses[0], HALF) for _ in range(20)]
        assert await ended(flood[0][0])
        other[1].write(b" h\r\n\r\n")
        answer = await other[0].read()
        for _, writer in [other, *flood]:
            writer.close()
        return answer

    connections = Connections(most=10, most_from_one=4, dropped=dropped)
    assert serve(test, connections=connections, head_seconds=3600).startswith(b"HTTP/1.1 200")
    assert {reason for (reason,), _ in dropped.items()} == {"limit_of_address"}


def test_a_prober_at_the_flooders_address_is_answered_each_time():
    """A flood of half-sent requests, each of which comes back as soon as it is closed."""

    async def flood(address):
        while True:
            reader, writer = await begin(address, HALF)
            try:
                await reader.read()
            except ConnectionResetError:
                pass
            finally:
                writer.close()

    async def test(listener):
        address = listener.addresses[0]
        floods = [asyncio.create_task(flood(address)) for _ in range(40)]
        await connected(listener, 32)
        answers = [await exchange(address, WHOLE) for _ in range(15)]
        for task in floods:
            task.cancel()
        await asyncio.wait(floods)
        return answers

    connections = Connections(most=64, most_from_one=32)
    answers = serve(test, connections=connections, head_seconds=3600)
    assert [answer[:12] for answer in answers] == [b"HTTP/1.1 200"] * 15


def test_answers_that_nobody_reads_make_room_for_others():
    dropped = Counter()

    async def large(request):
        return Response(200, b"a" * (8 << 20 if request.path == "/large" else 1))

    async def test(listener):
        ask = b"GET /large HTTP/1.0\r\n\r\n"
        held = []
        for _ in range(4):
            reader, writer = await begin(listener.addresses[0], ask)
            held.append(writer)
            await reader.readexactly(1)  # nobody reads the rest
        async with asyncio.timeout(LIMIT):
            await connected(listener, 2)
        answer = await exchange(listener.addresses[0], WHOLE)
        for writer in held:
            writer.transport.abort()
        return answer

    connections = Connections(most_unread=17 << 20, dropped=dropped)
    assert serve(test, large, connections=connections).endswith(b"\r\n\r\na")
    assert dict(dropped.items()) == {("unread_answers",): 2}


def test_one_answer_that_is_larger_than_all_may_be_is_given():
    async def large(_request):
        return Response(200, b"a" * 100_000)

    assert ask(WHOLE, large, connections=Connections(most_unread=1000)).endswith(b"a" * 100_000)


def test_closing_ends_a_connection_that_waits():
    async def main():
        listener = Listener(echo)
        await listener.open_tcp("127.0.0.1", 0)
        task = asyncio.create_task(exchange(listener.addresses[0], b"GET /"))
        await connected(listener, 1)
        async with asyncio.timeout(LIMIT):
            await listener.close()
        return await task

    assert asyncio.run(main()) == b""


def test_a_port_that_is_taken_is_an_error_and_leaves_nothing_open():
    async def main():
        first, second = Listener(echo), Listener(echo)
        await first.open_tcp("127.0.0.1", 0)
        port = int(first.addresses[0].rpartition(":")[2])
        try:
            with pytest.raises(OSError, match="in use"):
                await second.open_tcp("127.0.0.1", port)
            with pytest.raises(OSError, match="in use"):
                await second.open_tcp("", port)
        finally:
            await first.close()

    asyncio.run(main())


def test_an_empty_host_means_every_address():
    async def main():
        listener = Listener(echo)
        await listener.open_tcp("", 0)
        (address,) = listener.addresses
        port = address.rpartition(":")[2]
        try:
            return await exchange(f"127.0.0.1:{port}", b"GET / HTTP/1.0\r\n\r\n")
        finally:
            await listener.close()

    assert asyncio.run(main()).startswith(b"HTTP/1.1 200")


def test_a_unix_socket_is_its_owners_alone_and_replaces_a_left_over_one(tmp_path):
    async def main():
        left = socket.socket(socket.AF_UNIX)
        left.bind(str(tmp_path / "s.sock"))
        left.close()
        listener = Listener(echo)
        await listener.open_unix(str(tmp_path), "s.sock")
        mode = stat.S_IMODE(os.stat(tmp_path / "s.sock").st_mode)
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s.sock"))
        writer.write(b"GET /u HTTP/1.0\r\n\r\n")
        answer = await reader.read()
        writer.close()
        await listener.close()
        return mode, answer

    mode, answer = asyncio.run(main())
    assert mode == 0o600
    assert answer.endswith(b"GET /u {} 0\n")
    assert not (tmp_path / "s.sock").exists()


def test_a_directory_with_a_long_path_has_a_socket_too(tmp_path):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()

    async def main():
        listener = Listener(echo)
        await listener.open_unix(str(deep), "s.sock")
        there = (deep / "s.sock").is_socket()
        await listener.close()
        return there

    assert asyncio.run(main())


def test_a_directory_in_the_place_of_a_unix_socket_is_moved_aside(tmp_path):
    (tmp_path / "s.sock").mkdir()
    (tmp_path / "s.sock/kept").touch()

    async def main():
        listener = Listener(echo)
        with capture_logs() as lines:
            await listener.open_unix(str(tmp_path), "s.sock")
        there = (tmp_path / "s.sock").is_socket()
        await listener.close()
        return there, lines

    there, (line,) = asyncio.run(main())
    assert there
    assert (tmp_path / line["moved_to"] / "kept").exists()


def test_a_unix_socket_that_was_replaced_is_noticed_and_not_removed(tmp_path):
    async def main():
        listener = Listener(echo)
        await listener.open_unix(str(tmp_path), "s.sock")
        before = listener.in_place
        (tmp_path / "s.sock").unlink()
        (tmp_path / "s.sock").touch()
        after = listener.in_place
        await listener.close()
        return before, after

    assert asyncio.run(main()) == (True, False)
    assert (tmp_path / "s.sock").is_file()
