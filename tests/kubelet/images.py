"""Container images out of static programs, without a registry: an OCI layout in a tar file.

What it consists of: the OCI image layout specification, and containerd's annotation for the name
under which `ctr images import` files it.
"""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def write_image(
    path: Path,
    name: str,
    files: Mapping[str, Path],
    *,
    links: Mapping[str, str] | None = None,
    command: Sequence[str],
) -> None:
    """Write the tar of an image of one layer.

    Args:
        path: where to.
        name: with a tag.
        files: programs by their path in the image.
        links: symbolic links: path to target.
        command: what runs when a pod names no command.
    """
    layer = _layer(files, links or {})
    blobs: dict[str, bytes] = {}

    def blob(kind: str, content: bytes) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[digest] = content
        return {
            "mediaType": f"application/vnd.oci.image.{kind}",
            "digest": f"sha256:{digest}",
            "size": len(content),
        }

    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": list(command), "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blob("config.v1+json", json.dumps(config).encode()),
        "layers": [blob("layer.v1.tar+gzip", gzip.compress(layer, 1, mtime=0))],
    }
    reference = blob("manifest.v1+json", json.dumps(manifest).encode())
    reference["annotations"] = {"io.containerd.image.name": name}
    index = {"schemaVersion": 2, "manifests": [reference]}
    with tarfile.open(path, "w") as tar:
        _add(tar, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        _add(tar, "index.json", json.dumps(index).encode())
        for digest, content in blobs.items():
            _add(tar, f"blobs/sha256/{digest}", content)


def _layer(files: Mapping[str, Path], links: Mapping[str, str]) -> bytes:
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for directory in ("bin", "tmp"):
            entry = tarfile.TarInfo(directory)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for name, source in files.items():
            _add(tar, name, source.read_bytes(), mode=0o755)
        for name, target in links.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
    return layer.getvalue()


def _add(tar: tarfile.TarFile, name: str, content: bytes, *, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    tar.addfile(entry, io.BytesIO(content))
