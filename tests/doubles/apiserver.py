"""An API server for tests: a few collections over HTTP, with list, watch and what goes wrong.

It keeps objects as JSON, counts versions, and streams events, as the real one does for those who
list and watch. It checks nothing: what a real one refuses, a test asks it to refuse.
"""

import asyncio
import contextlib
import copy
import json
import re
import ssl
import urllib.parse
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

Json = dict[str, Any]


@dataclass
class Reply:
    """One answer in place of the usual one.

    Attributes:
        code: HTTP status; 0: the connection is cut without an answer.
        body: JSON if it is a dictionary.
        headers: besides those that there always are.
        hangs: nothing is answered until the client goes away.
        when: of which request it is the answer, by method and path; any, if empty.
    """

    code: int = 200
    body: Json | bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    hangs: bool = False
    when: str = ""


def status(code: int, reason: str, message: str = "because") -> Json:
    """What the API server says when it refuses."""
    return {"kind": "Status", "code": code, "reason": reason, "message": message}


class ApiServerDouble:
    """Serves on a port of its own for as long as it is entered.

    Attributes:
        objects: by path of the collection, then by name.
        requests: method and path with its question, in order.
        tokens: each with which somebody came, in order.
        replies: the next answers that are not the usual ones.
        made: what the server makes of an object that it is sent.
        oldest: versions before it are no longer kept: 410.
        authority: path of the certificate that clients are to trust; empty: there is no TLS.
    """

    def __init__(self, tls: ssl.SSLContext | None = None, authority: str = "") -> None:
        self._tls = tls
        self.authority = authority
        self.objects: dict[str, dict[str, Json]] = {}
        self.requests: list[str] = []
        self.tokens: list[str] = []
        self.replies: deque[Reply] = deque()
        self.made: Callable[[Json], None] = lambda _: None
        self.accepted_token = ""
        self.oldest = 0
        self.version = 100
        self.page = 0
        self._events: list[tuple[int, str, str, Json]] = []
        self._news = asyncio.Condition()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------ what tests do

    async def put(self, collection: str, item: Json) -> Json:
        """Make or replace an object, as somebody else."""
        name = item["metadata"]["name"]
        kind = "MODIFIED" if name in self.objects.get(collection, {}) else "ADDED"
        return await self._store(collection, item, kind)

    async def remove(self, collection: str, name: str) -> None:
        """Delete an object, as somebody else."""
        item = self.objects[collection].pop(name)
        await self._tell(collection, item, "DELETED")

    def cut(self) -> None:
        """Cut all connections."""
        for writer in list(self._writers):
            writer.transport.abort()

    def count(self, pattern: str) -> int:
        """How many requests there were like this."""
        return sum(re.search(pattern, request) is not None for request in self.requests)

    def kubeconfig(self, folder: Path, token: str = "the-token") -> str:
        """Credentials, in a file."""
        path = folder / "kubeconfig"
        config = {
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [{"name": "k", "cluster": self._cluster()}],
            "users": [{"name": "u", "user": {"token": token}}],
        }
        path.write_text(json.dumps(config))  # JSON is YAML
        return str(path)

    def _cluster(self) -> Json:
        if self._tls is None:
            # A client without an authority reads the machine's 140, a quarter of a second; a real
            # cluster has one.
            return {"server": f"http://127.0.0.1:{self.port}", "insecure-skip-tls-verify": True}
        return {
            "server": f"https://127.0.0.1:{self.port}",
            "certificate-authority": self.authority,
        }

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks)

    # ------------------------------------------------------------ objects

    async def _store(self, collection: str, item: Json, kind: str) -> Json:
        item = copy.deepcopy(item)
        self.made(item)
        before = self.objects.setdefault(collection, {}).get(item["metadata"]["name"])
        item["metadata"]["uid"] = before["metadata"]["uid"] if before else str(uuid.uuid4())
        self.objects[collection][item["metadata"]["name"]] = item
        await self._tell(collection, item, kind)
        return item

    async def _tell(self, collection: str, item: Json, kind: str) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        async with self._news:
            self._events.append((self.version, collection, kind, copy.deepcopy(item)))
            self._news.notify_all()

    # ------------------------------------------------------------ HTTP

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        # A cancelled handler would make asyncio complain.
        over = (OSError, asyncio.IncompleteReadError, asyncio.CancelledError)
        try:
            with contextlib.suppress(*over):
                while await self._request(reader, writer):
                    pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.transport.abort()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.split("\r\n")
        method, target, _ = first.split(" ")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines if line)
        }
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path, _, query = target.partition("?")
        params = dict(urllib.parse.parse_qsl(query))
        self.requests.append(f"{method} {urllib.parse.unquote(target)}")
        token = headers.get("authorization", "").removeprefix("Bearer ")
        self.tokens.append(token)
        if self.replies and re.search(self.replies[0].when, self.requests[-1]):
            reply = self.replies.popleft()
            if reply.hangs:
                await reader.read()
                return False
            if reply.code == 0:
                return False
            return await self._send(writer, reply)
        if self.accepted_token and token != self.accepted_token:
            return await self._send(writer, Reply(401, status(401, "Unauthorized")))
        if params.get("watch"):
            await self._watch(path, params, writer)
            return False
        sent = json.loads(body) if body else {}
        return await self._send(writer, await self._answer(method, path, params, sent))

    async def _answer(self, method: str, path: str, params: Json, sent: Json) -> Reply:
        if path in self.objects:
            if method != "POST":
                return Reply(200, self._list(path, params))
            if sent["metadata"]["name"] in self.objects[path]:
                return Reply(409, status(409, "AlreadyExists"))
            return Reply(201, await self._store(path, sent, "ADDED"))
        return await self._of_one(method, path, sent)

    async def _of_one(self, method: str, path: str, sent: Json) -> Reply:
        collection, _, name = path.rpartition("/")
        have = self.objects.get(collection, {}).get(name)
        if have is None:
            return Reply(404, status(404, "NotFound"))
        if method == "PUT":
            if sent["metadata"]["resourceVersion"] != have["metadata"]["resourceVersion"]:
                return Reply(409, status(409, "Conflict"))
            return Reply(200, await self._store(collection, sent, "MODIFIED"))
        if method == "DELETE":
            await self.remove(collection, name)
        return Reply(200, have)

    def _list(self, path: str, params: Json) -> Json:
        items = [one for one in self.objects[path].values() if _selected(one, params)]
        metadata = {"resourceVersion": str(self.version)}
        if self.page:
            begin = int(params.get("continue", 0))
            end = begin + self.page
            if end < len(items):
                metadata["continue"] = str(end)
            items = items[begin:end]
        return {"kind": "List", "metadata": metadata, "items": items}

    async def _watch(self, path: str, params: Json, writer: asyncio.StreamWriter) -> None:
        head = "Content-Type: application/json\r\nTransfer-Encoding: chunked"
        writer.write(f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n".encode())
        since = int(params["resourceVersion"])

        async def tell(kind: str, item: Json) -> None:
            line = json.dumps({"type": kind, "object": item}).encode() + b"\n"
            writer.write(b"%x\r\n%s\r\n" % (len(line), line))
            await writer.drain()

        if since < self.oldest:
            await tell("ERROR", status(410, "Expired", "too old resource version"))
            writer.write(b"0\r\n\r\n")
            await writer.drain()
            return
        place = 0
        while True:
            for version, collection, kind, item in self._events[place:]:
                place += 1
                if version > since and collection == path and _selected(item, params):
                    await tell(kind, item)
            async with self._news:
                while place == len(self._events):
                    await self._news.wait()

    @staticmethod
    async def _send(writer: asyncio.StreamWriter, reply: Reply) -> bool:
        body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        kind = "text/html" if body.startswith(b"<") else "application/json"
        headers = {"Content-Type": kind, "Content-Length": str(len(body))} | reply.headers
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"HTTP/1.1 {reply.code} X\r\n{lines}\r\n".encode() + body)
        await writer.drain()
        return True


def _selected(item: Json, params: Json) -> bool:
    for selector in filter(None, params.get("fieldSelector", "").split(",")):
        name, _, value = selector.partition("=")
        found: Any = item
        for part in name.split("."):
            found = found.get(part, {})
        if found != value:
            return False
    return True
