"""Manifests, signatures and keys: what counts, and what is said of what does not."""

import hashlib
import json
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fpga_plugin.bitstreams.files import Content, content_of
from fpga_plugin.bitstreams.manifest import (
    MAX_INTERFACES,
    MAX_VERSION,
    ManifestFile,
    parse_manifest,
    write_manifest,
)
from fpga_plugin.bitstreams.signatures import load_keys, sign, signer, statement
from fpga_plugin.bitstreams.trust import Trust
from fpga_plugin.errors import BitstreamError, NotPermittedError
from fpga_plugin.ids import Alias, InterfaceId
from fpga_plugin.settings.settings import TrustMode

INTERFACE = "ce48969398f05f33946d560708be108a"
FILE = f"{INTERFACE}/18b79ffa2ee54aa096ef4230dafacb5f.gbs"
BLANK = f"{INTERFACE}/blank.gbs"
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
    return json.dumps({"format": 2, "version": 1, "files": list(files)} | values).encode()


def test_a_manifest_reads_as_it_was_written():
    files = [
        ManifestFile(FILE, DIGEST, 0),
        ManifestFile(f"{INTERFACE}/blank.gbs", "0" * 64, 1 << 40),
        ManifestFile(f"{INTERFACE}/{'b' * 40}.aocx", "1" * 64, 1),
    ]
    end = datetime(2027, 1, 31, 12, tzinfo=UTC)
    data = write_manifest(files, version=MAX_VERSION, expires=end, revoked=[FILE.replace("1", "2")])
    read = parse_manifest(data, where="m")
    assert read.files == {file.path: file for file in files}
    assert (read.version, read.expires) == (MAX_VERSION, end)
    assert read.revoked == {FILE.replace("1", "2")}
    empty = parse_manifest(write_manifest([]), where="m")
    assert (empty.files, empty.version, empty.expires, empty.revoked) == ({}, 1, None, frozenset())


def aliased(*names: tuple[str, str | None]) -> bytes:
    return write_manifest([ManifestFile(path, DIGEST, 1, alias) for path, alias in names])


def test_a_manifest_says_what_bitstreams_are_called():
    other = FILE.replace(INTERFACE, "1" * 32)
    aocx = f"{INTERFACE}/{'b' * 40}.aocx"
    data = aliased((FILE, "gzip"), (other, "gzip"), (aocx, None))
    assert data.count(b"alias") == 2
    read = parse_manifest(data, where="m")
    afu = FILE.rpartition("/")[2].removesuffix(".gbs")
    assert read.aliases == {(INTERFACE, "gzip"): afu, ("1" * 32, "gzip"): afu}
    assert read.files[FILE].alias == "gzip"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([(FILE, "gzip"), (f"{INTERFACE}/{'b' * 40}.aocx", "gzip")], "have the alias gzip"),
        ([(f"{INTERFACE}/blank.gbs", "gzip")], "a blank bitstream has no alias"),
        ([(FILE, "blank")], "no name"),
        ([(FILE, "a" * 31)], "no name"),
        ([(FILE, "../../x")], "no name"),
        ([(FILE, "Gzip")], "no name"),
        ([(FILE, "")], "no name"),
        ([(FILE, "g" * 32)], "not a manifest"),
    ],
)
def test_a_name_that_means_nothing_or_two_things_is_refused(names, words):
    with pytest.raises(BitstreamError, match=words):
        parse_manifest(aliased(*names), where="m")


def test_under_signed_only_a_signed_manifest_says_what_bitstreams_are_called(root, keys, key):
    write(root / "manifest.json", aliased((FILE, "gzip")))
    trust = Trust(str(root), TrustMode.SIGNED, str(keys), guarded=False)
    assert trust.names().bitstreams == {}
    assert list(Trust(str(root), TrustMode.ANY, None, guarded=False).names().bitstreams) == [
        (INTERFACE, "gzip")
    ]
    sign_manifest(root, key)
    assert list(trust.names().bitstreams) == [(INTERFACE, "gzip")]
    write(root / "manifest.json", aliased((FILE, "zip")))  # somebody else's words
    assert trust.names().bitstreams == {}


def test_under_signed_only_a_signed_manifest_says_what_interface_ids_are_called(root, keys, key):
    trust = Trust(str(root), TrustMode.SIGNED, str(keys), guarded=False)
    assert not trust.names().counts, "no manifest: nothing is said"
    write(root / "manifest.json", called(("1" * 32, "board")))
    assert not trust.names().counts
    assert Trust(str(root), TrustMode.ANY, None, guarded=False).names().interfaces == {
        "1" * 32: "board"
    }
    sign_manifest(root, key)
    assert trust.names().interfaces == {"1" * 32: "board"}
    write(root / "manifest.json", called(("1" * 32, "theirs")))
    assert not trust.names().counts


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a manifest"),
        (b"\xff", "not a manifest"),
        (b"[]", "not a manifest"),
        (b"[" * 100_000, "not a manifest"),
        (b'{"version": 1, "files": []}', "format"),
        (b'{"format": 2, "files": []}', "version"),
        (b'{"format": 2, "version": 1}', "files"),
        (text(format=3), "format"),
        (text(format="2"), "format"),
        (text(version=0), "version"),
        (text(version=MAX_VERSION + 1), "version"),
        (text(version="1"), "version"),
        (text(expires="2027-01-31T00:00:00"), "expires"),  # whose midnight?
        (text(expires="tomorrow"), "expires"),
        (text(expires=1795000000), "expires"),
        (text(expires="9999-12-31T23:59:59-12:00"), "not a manifest"),
        (text(revoked=["../x"]), "no bitstream's path"),
        (text(entry(), revoked=[FILE]), "names and revokes"),
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
def test_an_invalid_manifest_is_refused(data, words):
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


def judge(
    root: Path,
    mode: TrustMode,
    keys: Path | None,
    content: bytes = b"content",
    path: str = FILE,
) -> str:
    trust = Trust(str(root), mode, keys and str(keys))
    return trust.check(path, content_of(content))


def refusal(*args, **kwargs) -> str:
    with pytest.raises(NotPermittedError) as caught:
        judge(*args, **kwargs)
    assert caught.value.hint
    return caught.value.message


def signature(key, path: str, content: bytes) -> bytes:
    """Of these bytes at this place in a store."""
    return key.sign(statement(path, content_of(content)))


def write(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)  # another inode: no clock's tick hides the change
    path.write_bytes(data)
    os.chmod(path, 0o644)


def named(root: Path, content: bytes = b"content") -> bytes:
    known = content_of(content)
    data = write_manifest([ManifestFile(FILE, known.sha256, known.size)])
    write(root / "manifest.json", data)
    return data


def sign_manifest(root: Path, key) -> None:
    data = (root / "manifest.json").read_bytes()
    write(root / "manifest.json.sig", signature(key, "manifest.json", data))


def test_any_takes_what_no_manifest_names(root):
    assert judge(root, TrustMode.ANY, None) == ""
    write(root / "manifest.json", write_manifest([]))
    assert judge(root, TrustMode.ANY, None) == ""


@pytest.mark.parametrize("mode", TrustMode)
def test_what_the_manifest_names_must_match_in_every_mode(root, keys, key, mode):
    named(root)
    write(root / f"{FILE}.sig", signature(key, FILE, b"contents"))
    assert "8 bytes where manifest.json says 7" in refusal(root, mode, keys, b"contents")
    write(root / f"{FILE}.sig", signature(key, FILE, b"CONTENT"))
    assert "SHA-256" in refusal(root, mode, keys, b"CONTENT")


def test_signed_takes_an_accelerators_own_signature(root, keys, key):
    write(root / f"{FILE}.sig", signature(key, FILE, b"content"))
    assert judge(root, TrustMode.SIGNED, keys) == "signed with site.pem"


def test_a_statement_is_this_text():
    """What is signed somewhere else, by openssl or an HSM, must never change by accident."""
    assert statement(FILE, Content(DIGEST, 7)) == (
        b"fpga-plugin signed statement 1\n"
        b"role: accelerator\n"
        b"interface id: ce48969398f05f33946d560708be108a\n"
        b"path: ce48969398f05f33946d560708be108a/18b79ffa2ee54aa096ef4230dafacb5f.gbs\n"
        b"sha256: " + b"a" * 64 + b"\n"
        b"size: 7\n"
    )
    assert b"\nrole: blank\n" in statement(BLANK, Content(DIGEST, 7))
    assert statement("manifest.json", Content(DIGEST, 7)) == (
        b"fpga-plugin signed statement 1\nrole: manifest\npath: manifest.json\n"
        b"sha256: " + b"a" * 64 + b"\nsize: 7\n"
    )


@pytest.mark.parametrize(
    "path", ["", "x", "blank.gbs", f"{FILE}\n", f"../{FILE}", f"{FILE}\nsize: 1", FILE.upper()]
)
def test_nothing_else_can_be_stated(path):
    with pytest.raises(ValueError, match="no path"):
        statement(path, Content(DIGEST, 7))


@pytest.mark.parametrize(
    "elsewhere",
    [
        BLANK,
        FILE.replace("18b79", "28b79"),
        FILE.replace("ce489", "de489"),
        "manifest.json",
    ],
)
def test_a_signature_is_good_at_its_own_place_only(root, keys, key, elsewhere):
    write(root / f"{FILE}.sig", signature(key, elsewhere, b"content"))
    assert f"of another path than {FILE}" in refusal(root, TrustMode.SIGNED, keys)


def test_a_signature_of_the_bare_file_does_not_count(root, keys, key):
    write(root / f"{FILE}.sig", key.sign(b"content"))
    assert "of the bare file, as earlier versions signed" in refusal(root, TrustMode.SIGNED, keys)
    data = named(root)
    write(root / "manifest.json.sig", key.sign(data))
    assert "manifest.json.sig is of other bytes" in refusal(root, TrustMode.SIGNED, keys)


def test_a_files_signature_does_not_count_for_the_manifest(root, keys, key):
    data = named(root)
    write(root / "manifest.json.sig", signature(key, FILE, data))
    assert "of another path than manifest.json" in refusal(root, TrustMode.SIGNED, keys)


def test_a_blank_bitstream_is_trusted_by_a_signed_manifest_alone(root, keys, key):
    """Whatever signatures lie beside it, and whether this node has seen a manifest or not."""
    content = b"content"
    for place in (BLANK, FILE):
        write(root / f"{BLANK}.sig", signature(key, place, content))
        told = refusal(root, TrustMode.SIGNED, keys, content, BLANK)
        assert "the store has no manifest.json" in told
        assert "a blank bitstream's own signature does not count" in told
    write(root / f"{BLANK}.sig", signature(key, BLANK, content))
    named(root)
    sign_manifest(root, key)
    told = refusal(root, TrustMode.SIGNED, keys, content, BLANK)
    assert "manifest.json does not name it" in told
    known = content_of(content)
    data = write_manifest([ManifestFile(BLANK, known.sha256, known.size)])
    write(root / "manifest.json", data)
    told = refusal(root, TrustMode.SIGNED, keys, content, BLANK)
    assert "manifest.json does not count" in told
    sign_manifest(root, key)
    assert judge(root, TrustMode.SIGNED, keys, content, BLANK).endswith("signed with site.pem")


def test_what_a_signed_manifest_revokes_is_refused_whatever_its_own_signature(root, keys, key):
    """On a node that never saw the manifest which named it, too."""
    write(root / f"{FILE}.sig", signature(key, FILE, b"content"))
    write(root / "manifest.json", write_manifest([], revoked=[FILE]))
    assert judge(root, TrustMode.SIGNED, keys) == "signed with site.pem"  # anybody wrote that
    sign_manifest(root, key)
    assert "revoked" in refusal(root, TrustMode.SIGNED, keys)
    write(root / "manifest.json", write_manifest([]))
    sign_manifest(root, key)
    assert judge(root, TrustMode.SIGNED, keys) == "signed with site.pem"


@pytest.mark.parametrize("mode", TrustMode)
def test_a_manifest_without_a_version_is_none_in_any_mode(root, keys, key, mode):
    """An older one could be put in its place."""
    known = content_of(b"content")
    named = entry(sha256=known.sha256, size=known.size)
    write(root / "manifest.json", json.dumps({"format": 2, "files": [named]}).encode())
    sign_manifest(root, key)
    assert "nothing of the store is trusted" in refusal(root, mode, keys)


def test_signed_takes_what_a_signed_manifest_names_and_not_what_an_unsigned_one_does(
    root, keys, key
):
    data = named(root)
    assert "there is no manifest.json.sig" in refusal(root, TrustMode.SIGNED, keys)
    write(root / "manifest.json.sig", signature(key, "manifest.json", data))
    assert "named by the manifest" in judge(root, TrustMode.SIGNED, keys)
    write(root / "manifest.json", write_manifest([]))
    assert "manifest.json.sig is of other bytes" in refusal(root, TrustMode.SIGNED, keys)
    sign_manifest(root, key)
    assert "manifest.json does not name it" in refusal(root, TrustMode.SIGNED, keys)


@pytest.mark.parametrize(
    ("signature", "words"),
    [
        (b"", "has 0 bytes"),
        (b"x" * 63, "has 63 bytes"),
        (b"x" * 64, "of no key in site.pem"),
        (b"x" * 5000, "at most"),
    ],
)
def test_an_invalid_signature_is_refused_with_the_reason(root, keys, signature, words):
    write(root / f"{FILE}.sig", signature)
    assert words in refusal(root, TrustMode.SIGNED, keys)


def test_a_signature_by_another_key_does_not_count(root, keys):
    write(root / f"{FILE}.sig", signature(Ed25519PrivateKey.generate(), FILE, b"content"))
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
    write(root / f"{FILE}.sig", signature(key, FILE, b"content"))
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
    assert [*found.keys] == ["site.pem"]
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
    write(root / (FILE + ".sig"), signature(key, FILE, b"content"))
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
    assert [*load_keys(str(keys), guarded=True).keys] == ["site.pem"]


def test_what_is_signed_is_found_signed(tmp_path, keys, key):
    write(tmp_path / "private.pem", pem(key))
    found = load_keys(str(keys), guarded=True).keys
    signature = sign(str(tmp_path / "private.pem"), b"data")
    assert len(signature) == 64
    assert signer(found, signature, b"data") == "site.pem"
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


@pytest.mark.needs("openssl")
def test_openssl_signs_a_statement_as_the_documentation_says(tmp_path, root, keys, key):
    write(tmp_path / "private.pem", pem(key))
    digest = hashlib.sha256(b"content").hexdigest()
    write(tmp_path / "statement", statement(FILE, Content(digest, 7)))
    subprocess.run(
        [
            *("openssl", "pkeyutl", "-sign", "-rawin", "-inkey", tmp_path / "private.pem"),
            *("-in", tmp_path / "statement", "-out", root / f"{FILE}.sig"),
        ],
        check=True,
    )
    assert judge(root, TrustMode.SIGNED, keys) == "signed with site.pem"


def called(*names: tuple[str, str]) -> bytes:
    head = b'{"format": 2, "version": 1, "files": [], "interfaces": '
    return head + json.dumps([{"id": one, "alias": alias} for one, alias in names]).encode() + b"}"


def test_a_manifest_calls_interface_ids_something():
    names = {InterfaceId("1" * 32): Alias("board"), InterfaceId("2" * 32): Alias("other-board")}
    data = write_manifest([], interfaces=names)
    assert parse_manifest(data, where="manifest.json").interfaces == names
    assert b"interfaces" not in write_manifest([], interfaces={})


def test_a_manifest_gives_names_to_so_many_interface_ids_and_no_more():
    names = [(f"{n:032x}", f"board-{n}") for n in range(MAX_INTERFACES + 1)]
    assert len(parse_manifest(called(*names[1:]), where="m").interfaces) == MAX_INTERFACES
    with pytest.raises(BitstreamError, match=f"names {len(names)} interface ids"):
        parse_manifest(called(*names), where="m")


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ([("1" * 32, "board"), ("2" * 32, "board")], "two interface ids have the alias board"),
        ([("1" * 32, "board"), ("1" * 32, "other")], "gives the interface id 1{32} two aliases"),
        ([("1" * 32, "2" * 31)], "no name"),
        ([("1" * 32, "2" * 32)], "not a manifest"),
        ([("1" * 31, "board")], "not 32 hex digits"),
        ([("../" * 10, "board")], "not 32 hex digits"),
    ],
)
def test_a_name_of_an_interface_id_that_could_be_misunderstood_is_refused(names, told):
    with pytest.raises(BitstreamError, match=told):
        parse_manifest(called(*names), where="manifest.json")
