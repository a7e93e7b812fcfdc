"""An OCI registry in a thread, which can be told to misbehave; and what puts a store into one."""

import base64
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TITLE = "org.opencontainers.image.title"


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def artifact(store: Path) -> tuple[bytes, dict[str, bytes]]:
    """The manifest that oras makes of a store, and its blobs."""
    files = {
        str(p.relative_to(store)): p.read_bytes() for p in sorted(store.rglob("*.*")) if p.is_file()
    }
    return manifest_of(files), {digest_of(data): data for data in files.values()}


def manifest_of(files: dict[str, bytes]) -> bytes:
    layers = [
        {
            "mediaType": "application/vnd.oci.image.layer.v1.tar",
            "digest": digest_of(data),
            "size": len(data),
            "annotations": {TITLE: path},
        }
        for path, data in files.items()
    ]
    empty = {
        "mediaType": "application/vnd.oci.empty.v1+json",
        "digest": digest_of(b"{}"),
        "size": 2,
    }
    return json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "artifactType": "application/vnd.unknown.artifact.v1",
            "config": empty,
            "layers": layers,
        }
    ).encode()


@dataclass
class RegistryDouble:
    """What it has, and how it behaves.

    Attributes:
        token: what a bearer of which may read; "" for no authentication at all.
        realm: where it sends for tokens; "" for itself; "basic" for none.
        hook: is asked before each answer; what it returns is sent in place of it.
        seen: path and Authorization of each request.
    """

    manifests: dict[str, bytes] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    token: str = ""
    realm: str = ""
    user: str = "pull:secret"
    hook: Callable[[str], bytes | int | str | None] = lambda _path: None
    seen: list[tuple[str, str]] = field(default_factory=list)
    port: int = 0
    drip: float = 0.0

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def put(self, store: Path, tag: str = "v1") -> str:
        """What is in a directory, as an artifact; returns its digest."""
        manifest, blobs = artifact(store)
        self.blobs.update(blobs)
        self.manifests[tag] = self.manifests[digest := digest_of(manifest)] = manifest
        return digest

    def fetched(self) -> list[str]:
        return [path for path, _ in self.seen if "/blobs/" in path]


class _Handler(BaseHTTPRequestHandler):
    double: RegistryDouble

    def do_GET(self) -> None:
        double, sent = self.double, self.headers.get("Authorization", "")
        double.seen.append((self.path, sent))
        basic = "Basic " + base64.b64encode(double.user.encode()).decode()
        if self.path.startswith("/token"):
            granted = sent == basic if double.user else not sent
            self._send(json.dumps({"token": double.token}).encode() if granted else 401)
            return
        wanted = basic if double.realm == "basic" else f"Bearer {double.token}"
        if double.token and sent != wanted:
            self._challenge()
            return
        name = self.path.rsplit("/", 1)[1]
        kind = double.manifests if "/manifests/" in self.path else double.blobs
        told = double.hook(self.path)
        self._send(kind.get(name, 404) if told is None else told)

    def _challenge(self) -> None:
        realm = self.double.realm or f"http://{self.double.host}/token"
        how = f'Bearer realm="{realm}",service="s",scope="r"'
        self.send_response(401)
        self.send_header("WWW-Authenticate", 'Basic realm="x"' if realm == "basic" else how)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, what: bytes | int | str) -> None:
        body = what if isinstance(what, bytes) else b""
        status = 307 if isinstance(what, str) else what if isinstance(what, int) else 200
        self.send_response(status)
        if isinstance(what, str):
            self.send_header("Location", what)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        step = 100 if self.double.drip else len(body) or 1
        with suppress(OSError):  # nobody listens any more
            for at in range(0, len(body), step):
                self.wfile.write(body[at : at + step])
                time.sleep(self.double.drip)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def serve(double: RegistryDouble) -> Iterator[RegistryDouble]:
    handler = type("Handler", (_Handler,), {"double": double})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    double.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield double
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
