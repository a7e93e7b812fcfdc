"""Manifests, signatures and keys: what counts, and what is said of what does not."""

import json
import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fpga_plugin.bitstream.manifest import ManifestFile, parse_manifest, write_manifest
from fpga_plugin.bitstream.signatures import load_keys, sign, signer
from fpga_plugin.bitstream.trust import Trust
from fpga_plugin.bitstream.verified import in_memory
from fpga_plugin.config import TrustMode
from fpga_plugin.errors import BitstreamError, NotPermittedError

INTERFACE = "ce48969398f05f33946d560708be108a"
FILE = f"{INTERFACE}/18b79ffa2ee54aa096ef4230dafacb5f.gbs"
DIGEST = "a" * 64


def pem(key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def public_pem(key) -> bytes:
    return key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def entry(**values) -> dict:
    return {"path": FILE, "sha256": DIGEST, "size": 1} | values


def text(*files, **values) -> bytes:
    return json.dumps({"version": 1, "files": list(files)} | values).encode()


def test_a_manifest_reads_as_it_was_written():
    files = [
        ManifestFile(FILE, DIGEST, 0),
        ManifestFile(f"{INTERFACE}/blank.gbs", "0" * 64, 1 << 40),
        ManifestFile(f"{INTERFACE}/{'b' * 40}.aocx", "1" * 64, 1),
    ]
    read = parse_manifest(write_manifest(files), where="m")
    assert read.files == {file.path: file for file in files}
    assert parse_manifest(write_manifest([]), where="m").files == {}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a manifest"),
        (b"\xff", "not a manifest"),
        (b"[]", "not a manifest"),
        (b"[" * 100_000, "not a manifest"),
        (b'{"version": 1}', "files"),
        (text(version=2), "version"),
        (text(version="1"), "version"),
        (text(extra=1), "extra"),
        (text(entry(extra=1)), "extra"),
        (text(entry(size=-1)), ">= 0"),
        (text(entry(size=1.5)), "int"),
        (text(entry(size="1")), "int"),
        (text(entry(sha256="A" * 64)), "regex"),
        (text(entry(sha256="a" * 63)), "regex"),
        (text(entry(sha256="a" * 64 + "\n")), "regex"),
        (text(entry(), entry(sha256="b" * 64)), "twice"),
        (text(entry(path="../" + FILE)), "no bitstream's path"),
        (text(entry(path="/" + FILE)), "no bitstream's path"),
        (text(entry(path=FILE + "\n")), "no bitstream's path"),
        (text(entry(path=f"{INTERFACE}//blank.gbs")), "no bitstream's path"),
        (text(entry(path=FILE.upper())), "no bitstream's path"),
        (text(entry(path=f"{INTERFACE}/{'b' * 32}.aocx")), "no bitstream's path"),
        (text(entry(path="x" * 1000)), "length"),
        (b" " * (5 << 20), "at most"),
    ],
)
def test_what_is_no_manifest_is_refused(data, words):
    with pytest.raises(BitstreamError) as caught:
        parse_manifest(data, where="m")
    assert caught.value.message.startswith("m: ")
    assert words in caught.value.message


@pytest.fixture
def key():
    return Ed25519PrivateKey.generate()


@pytest.fixture
def keys(tmp_path, key):
    path = tmp_path / "keys"
    path.mkdir()
    os.chmod(path, 0o755)
    write(path / "site.pem", public_pem(key))
    return path


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "store"
    (path / INTERFACE).mkdir(parents=True)
    for above in (path, path / INTERFACE):
        os.chmod(above, 0o755)
    (path / FILE).write_bytes(b"content")
    return path


def judge(root: Path, mode: TrustMode, keys: Path | None, content: bytes = b"content") -> str:
    trust = Trust(str(root), mode, keys and str(keys))
    return trust.check(FILE, in_memory(content).content)


def refusal(*args) -> str:
    with pytest.raises(NotPermittedError) as caught:
        judge(*args)
    return caught.value.message


def write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    os.chmod(path, 0o644)


def named(root: Path, content: bytes = b"content") -> bytes:
    known = in_memory(content).content
    data = write_manifest([ManifestFile(FILE, known.sha256, known.size)])
    write(root / "manifest.json", data)
    return data


def test_any_takes_what_no_manifest_names(root):
    assert judge(root, TrustMode.ANY, None) == ""
    write(root / "manifest.json", write_manifest([]))
    assert judge(root, TrustMode.ANY, None) == ""


@pytest.mark.parametrize("mode", TrustMode)
def test_what_the_manifest_names_must_match_in_every_mode(root, keys, key, mode):
    named(root)
    write(root / f"{FILE}.sig", key.sign(b"contents"))
    assert "8 bytes where manifest.json says 7" in refusal(root, mode, keys, b"contents")
    write(root / f"{FILE}.sig", key.sign(b"CONTENT"))
    assert "SHA-256" in refusal(root, mode, keys, b"CONTENT")


def test_signed_takes_a_files_own_signature(root, keys, key):
    write(root / f"{FILE}.sig", key.sign(b"content"))
    assert judge(root, TrustMode.SIGNED, keys) == "signed with site.pem"


def test_signed_takes_what_a_signed_manifest_names_and_not_what_an_unsigned_one_does(
    root, keys, key
):
    data = named(root)
    assert "there is no manifest.json.sig" in refusal(root, TrustMode.SIGNED, keys)
    write(root / "manifest.json.sig", key.sign(data))
    assert "named by the manifest" in judge(root, TrustMode.SIGNED, keys)
    write(root / "manifest.json", write_manifest([]))
    assert "manifest.json does not name it" in refusal(root, TrustMode.SIGNED, keys)


@pytest.mark.parametrize(
    ("signature", "words"),
    [
        (b"", "has 0 bytes"),
        (b"x" * 63, "has 63 bytes"),
        (b"x" * 64, "of other bytes or of no key in site.pem"),
        (b"x" * 5000, "at most"),
    ],
)
def test_a_signature_that_is_none_is_refused_with_the_reason(root, keys, signature, words):
    write(root / f"{FILE}.sig", signature)
    assert words in refusal(root, TrustMode.SIGNED, keys)


def test_another_keys_signature_is_none(root, keys):
    write(root / f"{FILE}.sig", Ed25519PrivateKey.generate().sign(b"content"))
    assert "no key in site.pem" in refusal(root, TrustMode.SIGNED, keys)


def test_a_manifest_that_others_may_write_vouches_for_nothing(root):
    named(root)
    os.chmod(root / "manifest.json", 0o666)
    assert "may be written by anybody" in refusal(root, TrustMode.ANY, None)


def test_a_manifest_that_leads_nowhere_is_not_a_missing_one(root):
    (root / "manifest.json").symlink_to("nowhere")
    assert "leads nowhere" in refusal(root, TrustMode.ANY, None)


def test_the_version_differs_with_all_that_a_verdict_depends_on(root, keys, key):
    def version(mode=TrustMode.SIGNED):
        return Trust(str(root), mode, str(keys)).version(FILE)

    seen = [version(TrustMode.ANY), version(TrustMode.DIGEST), version()]
    write(root / f"{FILE}.sig", key.sign(b"content"))
    seen.append(version())
    named(root)
    seen.append(version())
    write(root / "manifest.json.sig", b"")
    seen.append(version())
    (keys / "other.pem").write_bytes(b"")
    seen.append(version())
    assert version() == seen[-1]
    assert len(set(seen)) == len(seen)


def test_broken_keys_are_left_out_with_the_reason(keys, key):
    write(keys / "broken.pem", b"broken")
    write(keys / "private.pem", pem(key))
    write(keys / "curve.pem", public_pem(generate_private_key(SECP256R1())))
    write(keys / "huge.pem", b"x" * 100_000)
    (keys / "folder.pem").mkdir()
    (keys / "gone.pem").symlink_to("nowhere")
    write(keys / "notes.txt", b"")
    found = load_keys(str(keys), guarded=True)
    assert [key.name for key in found.keys] == ["site.pem"]
    told = "\n".join(found.problems)
    for name in ("broken", "private", "curve", "huge", "folder", "gone"):
        assert f"{name}.pem" in told
    assert "notes" not in told
    assert load_keys(str(keys / "nowhere"), guarded=True).problems


@pytest.mark.parametrize(
    ("mode", "above", "words"),
    [
        (0o646, 0o755, "site.pem: may be written by anybody"),
        (0o664, 0o755, "site.pem: may be written by group"),
        (0o644, 0o777, "may be written by anybody"),
    ],
)
def test_a_key_that_others_may_write_makes_nobody_trusted(  # noqa: PLR0917  # fixtures
    root, keys, key, mode, above, words
):
    write(root / (FILE + ".sig"), key.sign(b"content"))
    assert judge(root, TrustMode.SIGNED, keys) == "signed with site.pem"
    os.chmod(keys / "site.pem", mode)
    os.chmod(keys, above)
    found = load_keys(str(keys), guarded=True)
    assert not found.keys
    assert words in found.problems[0]
    assert "there is no key" in refusal(root, TrustMode.SIGNED, keys)
    assert load_keys(str(keys), guarded=False).keys  # of a clone, by the command line


def test_a_configmaps_keys_are_its_own(keys):
    (keys / "..1").mkdir(mode=0o755)
    (keys / "site.pem").rename(keys / "..1" / "site.pem")
    (keys / "..data").symlink_to("..1")
    (keys / "site.pem").symlink_to("..data/site.pem")
    assert [key.name for key in load_keys(str(keys), guarded=True).keys] == ["site.pem"]


def test_what_is_signed_is_found_signed(tmp_path, keys, key):
    write(tmp_path / "private.pem", pem(key))
    found = load_keys(str(keys), guarded=True).keys
    signature = sign(str(tmp_path / "private.pem"), b"data")
    assert len(signature) == 64
    assert signer(found, signature, b"data").name == "site.pem"
    assert signer(found, signature, b"Data") is None


@pytest.mark.parametrize("kind", ["none", "curve", "password", "public"])
def test_a_key_that_cannot_sign_is_refused(tmp_path, key, kind):
    content = {
        "none": b"none",
        "curve": pem(generate_private_key(SECP256R1())),
        "password": key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        ),
        "public": public_pem(key),
    }[kind]
    write(tmp_path / "private.pem", content)
    with pytest.raises(BitstreamError) as caught:
        sign(str(tmp_path / "private.pem"), b"data")
    assert caught.value.hint
