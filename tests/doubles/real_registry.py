"""A real OCI registry as a process, with TLS and a password; tests/deploy/build makes it."""

import base64
import contextlib
import datetime as dt
import hashlib
import io
import ipaddress
import json
import socket
import ssl
import subprocess
import tarfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx2
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

REGISTRY = Path(__file__).parents[2] / ".cache/deploy/registry"

MANIFEST = "application/vnd.oci.image.manifest.v1+json"

USER = ("pull", "secret")
HTPASSWD = "pull:$2b$04$ULMD730zwFA.8MMhET3r4u5LDZjviLbtq7TYpl09dMcRV0yaDneR.\n"  # bcrypt


@dataclass(frozen=True)
class Served:
    host: str
    ca: Path
    auth: Path
    http: httpx2.Client
    process: "subprocess.Popen[bytes] | None" = None

    def end(self) -> None:
        """Nobody can pull any more. It is killed: asked to end it waits for open connections."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def push(self, store: Path, tag: str, owners: Mapping[str, int] | None = None) -> str:
        """What `docker push` does with an image of one layer; returns its digest.

        Args:
            store: the files of the layer.
            tag: of the image.
            owners: of files that are not root's, by their path in the store.
        """
        manifest, blobs = image(store, owners or {})
        for data in blobs:
            begun = self.http.post("/v2/fpga/store/blobs/uploads/")
            assert begun.status_code == 202, begun.text
            where = httpx2.URL(begun.headers["location"]).copy_merge_params(
                {"digest": digest_of(data)}
            )
            assert self.http.put(where, content=data).status_code == 201
        kind = {"Content-Type": MANIFEST}
        put = self.http.put(f"/v2/fpga/store/manifests/{tag}", content=manifest, headers=kind)
        assert put.status_code == 201, put.text
        return str(put.headers["docker-content-digest"])


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def image(store: Path, owners: Mapping[str, int]) -> tuple[bytes, tuple[bytes, ...]]:
    """The manifest and the blobs of `FROM scratch` and `COPY . /`."""

    def owned(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = owners.get(entry.name.removeprefix("./"), 0)
        entry.uname = entry.gname = ""
        return entry

    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        archive.add(store, arcname=".", filter=owned)
    data = layer.getvalue()
    rootfs = {"type": "layers", "diff_ids": [digest_of(data)]}
    config = json.dumps({"architecture": "amd64", "os": "linux", "rootfs": rootfs}).encode()

    def described(blob: bytes, kind: str) -> dict[str, object]:
        return {"mediaType": kind, "digest": digest_of(blob), "size": len(blob)}

    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": described(config, "application/vnd.oci.image.config.v1+json"),
        "layers": [described(data, "application/vnd.oci.image.layer.v1.tar")],
    }
    return json.dumps(manifest).encode(), (data, config)


def certificate(directory: Path) -> tuple[Path, Path]:
    """Of 127.0.0.1, its own authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "registry")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert, private = directory / "ca.pem", directory / "key.pem"
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return cert, private


@contextlib.contextmanager
def serve(scratch: Path) -> Iterator[Served]:
    """With its files in a directory of its own."""
    cert, private = certificate(scratch)
    (scratch / "htpasswd").write_text(HTPASSWD)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    host = f"127.0.0.1:{port}"
    (scratch / "config.json").write_text(  # JSON is YAML
        json.dumps(
            {
                "version": "0.1",
                "log": {"level": "warn"},
                "storage": {"filesystem": {"rootdirectory": str(scratch / "data")}},
                "auth": {"htpasswd": {"realm": "test", "path": str(scratch / "htpasswd")}},
                "http": {
                    "addr": host,
                    "secret": "x",
                    "tls": {"certificate": str(cert), "key": str(private)},
                },
            }
        )
    )
    auth = scratch / ".dockerconfigjson"
    trusted = ssl.create_default_context(cafile=str(cert))
    word = base64.b64encode(":".join(USER).encode()).decode()
    auth.write_text(json.dumps({"auths": {host: {"auth": word}}}))
    with (
        (scratch / "log").open("wb") as log,
        subprocess.Popen(
            [REGISTRY, "serve", scratch / "config.json"], stdout=log, stderr=log
        ) as process,
        httpx2.Client(
            base_url=f"https://{host}", verify=trusted, auth=USER, trust_env=False, timeout=60
        ) as http,
    ):
        try:
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(httpx2.TransportError):
                    if http.get("/v2/").status_code == 200:
                        break
                assert process.poll() is None, (scratch / "log").read_text()
                assert time.monotonic() < deadline, (scratch / "log").read_text()
                time.sleep(0.1)
            yield Served(host, cert, auth, http, process)
        finally:
            process.kill()
