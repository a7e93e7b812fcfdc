"""`fpga-plugin bitstream pull`: a store becomes what an artifact holds, or stays as it was."""

import base64
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from doubles.registry import RegistryDouble, digest_of, manifest_of, serve
from doubles.samples import copy_samples

from fpga_plugin.bitstream.artifact import files_of
from fpga_plugin.bitstream.pull import pull
from fpga_plugin.bitstream.seen_manifests import SeenManifests
from fpga_plugin.bitstream.store import Store
from fpga_plugin.bitstream.trust import Trust
from fpga_plugin.cli import main
from fpga_plugin.config.settings import TrustMode
from fpga_plugin.errors import BitstreamError
from fpga_plugin.registry import client
from fpga_plugin.registry.client import Access, Registry, RegistryError
from fpga_plugin.registry.credentials import CredentialsError, read_credentials
from fpga_plugin.registry.reference import parse_reference

INTERFACE = "ce48969398f05f33946d560708be108a"


@pytest.fixture
def source(tmp_path) -> Path:
    """A store that somebody prepared."""
    copy_samples(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def registry() -> Iterator[RegistryDouble]:
    with serve(RegistryDouble()) as double:
        yield double


@pytest.fixture
def other() -> Iterator[RegistryDouble]:
    with serve(RegistryDouble(token="t0k3n")) as double:
        yield double


@pytest.fixture
def run(tmp_path, registry, capsys):
    """Run the command; returns exit code, output, errors."""

    def run(name: str, *args: object, store: Path | None = None) -> tuple[int, str, str]:
        where = store or tmp_path / "store"
        words = ["bitstream", "pull", f"{registry.host}/{name}", "--plain-http", "--dir", where]
        try:
            code = main([str(word) for word in (*words, *args)])
        except SystemExit as exit_:
            code = exit_.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


def content(store: Path) -> dict[str, bytes]:
    """What a reader sees under the names that the plugin looks for."""
    return {
        str(Path(root, name).relative_to(store)): Path(root, name).read_bytes()
        for root, directories, names in os.walk(store, followlinks=True)
        if not directories.sort() and ".." not in str(Path(root).relative_to(store))
        for name in names
        if name != "..pull-lock"
    }


def test_a_store_becomes_what_the_artifact_holds(run, registry, source, tmp_path) -> None:
    digest = registry.put(source)
    code, out, err = run("fpga/store:v1")
    assert code == 0, err
    assert content(tmp_path / "store") == content(source)
    assert all(entry.problem is None for entry in Store(str(tmp_path / "store")).list())
    assert f"{len(content(source))} fetched" in out
    assert f"@{digest}" in err, "how to pin it"
    assert all(f"{path}: fetching" in err for path in content(source))


def test_what_did_not_change_is_not_fetched_again(run, registry, source, tmp_path) -> None:
    registry.put(source)
    assert run("s:v1")[0] == 0
    registry.seen.clear()
    code, out, _ = run("s:v1", "--json")
    assert (code, json.loads(out)["changed"], registry.fetched()) == (0, False, [])
    gone = next(source.glob("*/blank.gbs"))
    gone.unlink()
    (source / "manifest.json").unlink()
    new = registry.put(source)
    code, out, err = run(f"s@{new}", "--json")
    told = json.loads(out)
    assert (code, told["changed"], told["fetched"], told["digest"]) == (0, True, 0, new), err
    assert content(tmp_path / "store") == content(source), "what it no longer holds is gone"
    assert "note" not in err
    left = [name for name in os.listdir(tmp_path / "store") if name.startswith("..sha256")]
    assert left == [f"..{new.replace(':', '-')}"]


def test_a_file_that_was_damaged_in_the_store_is_mended(run, registry, source, tmp_path) -> None:
    registry.put(source)
    assert run("s:v1")[0] == 0
    victim = next((tmp_path / "store").glob("*/blank.gbs"))
    victim.write_bytes(b"rot")
    code, out, err = run("s:v1", "--json")
    assert (code, json.loads(out)["fetched"]) == (0, 1), err
    assert content(tmp_path / "store") == content(source)
    assert json.loads(run("s:v1", "--json")[1])["changed"] is False
    next((tmp_path / "store").glob("*/blank.gbs")).write_bytes(b"rot again")
    assert run("s:v1")[0] == 0, "as often as it takes, by a process of the same number too"
    assert content(tmp_path / "store") == content(source)


def test_readers_see_all_of_the_old_or_all_of_the_new(run, registry, source, tmp_path) -> None:
    """The step is one rename: looked at before every request, and before the rename itself."""
    registry.put(source)
    assert run("s:v1")[0] == 0
    old = content(tmp_path / "store")
    more = source / INTERFACE / ("0" * 32 + ".gbs")
    (source / "manifest.json").unlink()
    for path in source.glob("*/*.gbs"):
        path.unlink() if path.name != "blank.gbs" else None
    shutil.copyfile(next(source.glob("*/blank.gbs")), more)
    more.unlink()
    registry.put(source)

    def looked(_path: str) -> None:
        assert content(tmp_path / "store") == old

    registry.hook = looked
    assert run("s:v1")[0] == 0
    assert content(tmp_path / "store") == content(source)


# ------------------------------------------------------------------ what is refused


def refused(run, tmp_path, *args: object, why: str) -> str:
    """A refusal leaves the store as it was, with nothing left over but the lock."""
    store = tmp_path / "store"
    before = content(store) if store.exists() else {}
    names = set(os.listdir(store)) if store.exists() else set()
    code, out, err = run(*args)
    assert (code, out) == (1, ""), out
    assert why in err
    assert "Traceback" not in err
    assert (content(store) if store.exists() else {}) == before
    if store.exists():
        left = set(os.listdir(store)) - names - {"..pull-lock"}
        assert all(name.startswith("..sha256-") for name in left), left
    return err


def test_another_manifest_than_the_digest_names_is_refused(run, registry, source, tmp_path) -> None:
    digest = registry.put(source)
    registry.manifests[digest] += b" "
    refused(run, tmp_path, f"s@{digest}", why="sent another manifest")


@pytest.mark.parametrize("change", ["longer", "shorter", "other"])
def test_another_blob_than_the_manifest_names_is_refused(
    run, registry, source, tmp_path, change: str
) -> None:
    registry.put(source)
    assert run("s:v1")[0] == 0
    blank = next(source.glob("*/blank.gbs"))
    (source / "manifest.json").unlink()
    blank.write_bytes(blank.read_bytes() + b"new")
    registry.put(source)
    digest = digest_of(blank.read_bytes())
    data = registry.blobs[digest]
    registry.blobs[digest] = {
        "longer": data + b"x",
        "shorter": data[:-1],
        "other": b"x" * len(data),
    }[change]
    refused(run, tmp_path, "s:v1", why="blob")


def test_a_file_that_the_plugin_would_not_use_is_refused(run, registry, source, tmp_path) -> None:
    next(source.glob("*/blank.gbs")).write_bytes(b"no bitstream")
    (source / "manifest.json").unlink()
    registry.put(source)
    err = refused(run, tmp_path, "s:v1", why=f"{INTERFACE}/blank.gbs")
    assert str(tmp_path) not in err, "a directory that is gone by then"


def test_a_file_that_its_manifest_knows_otherwise_is_refused(
    run, registry, source, tmp_path
) -> None:
    files = content(source)
    named = json.loads(files["manifest.json"])
    named["files"][0]["sha256"] = "0" * 64
    files["manifest.json"] = json.dumps(named).encode()
    registry.manifests["v1"] = manifest_of(files)
    registry.blobs |= {digest_of(data): data for data in files.values()}
    refused(run, tmp_path, "s:v1", why=named["files"][0]["path"])


def test_an_unsigned_artifact_is_refused_where_signatures_are_wanted(
    run, registry, source, tmp_path
) -> None:
    registry.put(source)
    (tmp_path / "keys").mkdir()
    refused(run, tmp_path, "s:v1", "--trust", "signed", "--keys", tmp_path / "keys", why="sign")


def test_a_manifest_that_names_what_is_not_there_is_refused(
    run, registry, source, tmp_path
) -> None:
    next(source.glob("*/blank.gbs")).unlink()
    registry.put(source)
    refused(run, tmp_path, "s:v1", why="does not have it")


@pytest.mark.parametrize(
    "title",
    [
        "",
        "../evil.gbs",
        f"/{INTERFACE}/blank.gbs",
        f"{INTERFACE}/../../blank.gbs",
        f"{INTERFACE}/blank.gbs/x",
        f"{INTERFACE}/blank.gbs\n",
        "..data",
        "manifest.json/x",
        f"{INTERFACE}/notes.txt.sig",
        f"{INTERFACE.upper()}/blank.gbs",
    ],
)
def test_no_title_becomes_another_path_than_a_stores(title: str) -> None:
    with pytest.raises(BitstreamError, match="no file of a store"):
        files_of(manifest_of({title: b"x"}), where="here")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no manifest"),
        (b"[" * 100_000, "no manifest"),
        (b'{"schemaVersion": 2, "manifests": []}', "a list of images"),
        (b'{"schemaVersion": 2, "layers": []}', "0 files"),
        (b'{"schemaVersion": 2, "layers": [{"digest": "md5:0", "size": 1}]}', "no manifest"),
        (
            manifest_of({f"{INTERFACE}/blank.gbs": b"x"}).replace(b'"size": 1,', b'"size": -1,'),
            "no",
        ),
        (
            manifest_of({f"{INTERFACE}/blank.gbs": b"x"}).replace(
                b'"size": 1,', b'"size": 9999999999,'
            ),
            "at most",
        ),
        (manifest_of({"manifest.json": b"x"}).replace(b"]", b", 1]"), "no manifest"),
    ],
)
def test_what_is_no_manifest_of_a_store_is_told(data: bytes, why: str) -> None:
    with pytest.raises(BitstreamError, match=why):
        files_of(data, where="here")


def test_a_file_that_is_there_twice_is_refused() -> None:
    one = json.loads(manifest_of({"manifest.json": b"x"}))
    one["layers"] *= 2
    with pytest.raises(BitstreamError, match="twice"):
        files_of(json.dumps(one).encode(), where="here")


@pytest.mark.parametrize("what", ["file", "directory", "link"])
def test_a_store_that_somebody_else_filled_is_left_alone(
    run, registry, source, tmp_path, what: str
) -> None:
    registry.put(source)
    store = tmp_path / "store"
    if what == "link":
        store.mkdir()
        (store / INTERFACE).symlink_to(source / INTERFACE)
    elif what == "directory":
        copy_samples(store)
    else:
        store.mkdir()
        (store / "notes").write_text("mine")
    before = content(store)
    refused(run, tmp_path, "s:v1", why="was not put there by a pull")
    assert content(store) == before
    assert not registry.seen, "not even asked for"


def test_of_two_pulls_one_is_refused(run, registry, source, tmp_path) -> None:
    registry.put(source)
    (tmp_path / "store").mkdir()
    with (tmp_path / "store/..pull-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(run, tmp_path, "s:v1", why="another pull")
    assert run("s:v1")[0] == 0


def test_what_a_killed_pull_left_is_swept(registry, source, tmp_path) -> None:
    registry.put(source)
    store = tmp_path / "store"
    registry.drip = 0.2  # of a hundred bytes each: the kill comes in the middle of a file
    command = [sys.executable, "-m", "fpga_plugin", "bitstream", "pull", "--plain-http"]
    process = subprocess.Popen([*command, f"{registry.host}/s:v1", "--dir", str(store)])
    deadline = time.monotonic() + 60
    while not any(store.glob("..sha256*/*/*")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert content(store) == {}
    registry.drip = 0.0
    finished = subprocess.run(
        [*command, f"{registry.host}/s:v1", "--dir", str(store)], check=True, capture_output=True
    )
    assert b"fetched" in finished.stdout
    assert content(store) == content(source)
    assert len(list(store.glob("..sha256*"))) == 1


def test_a_pull_that_dies_after_its_step_is_finished_by_the_next(
    registry, source, tmp_path, monkeypatch
) -> None:
    registry.put(source)
    store = tmp_path / "store"
    with monkeypatch.context() as patched:
        patched.setattr("fpga_plugin.bitstream.pull._link", died)
        with pytest.raises(KeyboardInterrupt):
            pulled(registry, store)
    assert content(store) == {}, "in force, and not named yet"
    assert not pulled(registry, store).changed
    assert content(store) == content(source)


def died(*_: object) -> None:
    raise KeyboardInterrupt


def pulled(registry: RegistryDouble, store: Path):
    reference = parse_reference(f"{registry.host}/s:v1")
    with Registry(reference, Access({}, plain_http=True)) as opened:
        return pull(
            opened,
            str(store),
            name="s",
            trust=lambda root: Trust(root, TrustMode.ANY, None, guarded=False),
            said=lambda _path: lambda _done, _size: None,
        )


def test_a_store_that_cannot_be_written_is_told(registry, source, tmp_path) -> None:
    registry.put(source)
    (tmp_path / "file").write_text("")
    with pytest.raises(BitstreamError, match="directory"):
        pulled(registry, tmp_path / "file")


# ------------------------------------------------------------------ who asks


def auth_file(tmp_path: Path, host: str, user: str = "pull:secret") -> Path:
    path = tmp_path / "auth.json"
    path.write_text(
        json.dumps({"auths": {host: {"auth": base64.b64encode(user.encode()).decode()}}})
    )
    return path


@pytest.mark.parametrize("how", ["token", "basic"])
def test_a_registry_that_asks_who_it_is_is_told(run, registry, source, tmp_path, how: str) -> None:
    registry.put(source)
    registry.token = "t0k3n"
    registry.realm = "basic" if how == "basic" else ""
    code, _, err = run("s:v1", "--auth", auth_file(tmp_path, registry.host))
    assert code == 0, err
    assert "secret" not in err
    assert content(tmp_path / "store") == content(source)


@pytest.mark.parametrize("wrong", ["password", "none"])
def test_a_registry_that_refuses_says_so(run, registry, source, tmp_path, wrong: str) -> None:
    registry.put(source)
    registry.token = "t0k3n"
    auth = auth_file(tmp_path, registry.host, "pull:wrong")
    args = ("--auth", auth) if wrong == "password" else ()
    err = refused(run, tmp_path, "s:v1", *args, why="--auth names a file")
    assert "wrong" not in err


def test_a_password_goes_to_no_realm_that_the_operator_did_not_name(
    run, registry, other, source, tmp_path
) -> None:
    registry.put(source)
    registry.token = other.token
    registry.realm = f"http://{other.host}/token"
    auth = auth_file(tmp_path, registry.host)
    refused(run, tmp_path, "s:v1", "--auth", auth, why=f"--realm {other.host}")
    assert not other.seen
    assert run("s:v1", "--auth", auth, "--realm", other.host)[0] == 0
    assert [path.split("?")[0] for path, _ in other.seen] == ["/token"]


def test_without_a_password_any_realm_may_be_asked(run, registry, other, source) -> None:
    registry.put(source)
    registry.token, other.user = other.token, ""
    registry.realm = f"http://{other.host}/token"
    assert run("s:v1")[0] == 0
    assert [sent for _, sent in other.seen] == [""]


def test_who_is_known_to_one_registry_is_not_told_to_another(
    run, registry, source, tmp_path
) -> None:
    registry.put(source)
    registry.token = "t0k3n"
    refused(
        run, tmp_path, "s:v1", "--auth", auth_file(tmp_path, "elsewhere.example"), why="not known"
    )
    assert not any("Basic" in sent for _, sent in registry.seen)


def test_a_blob_that_lies_elsewhere_is_fetched_there_without_the_token(
    run, registry, other, source, tmp_path
) -> None:
    registry.put(source)
    registry.token = "t0k3n"
    other.token, other.blobs = "", registry.blobs
    registry.hook = lambda path: f"http://{other.host}{path}" if "/blobs/" in path else None
    code, _, err = run("s:v1", "--auth", auth_file(tmp_path, registry.host))
    assert code == 0, err
    assert len(other.seen) == len(content(source))
    assert {sent for _, sent in other.seen} == {""}


def test_redirections_end(run, registry, source, tmp_path) -> None:
    registry.put(source)
    registry.hook = lambda path: path
    refused(run, tmp_path, "s:v1", why="redirected more than 5 times")


@pytest.mark.parametrize("to", ["ftp://there/x", "file:///etc/passwd", ""])
def test_a_redirection_to_something_else_is_refused(
    run, registry, source, tmp_path, to: str
) -> None:
    registry.put(source)
    registry.hook = lambda _path: to
    refused(run, tmp_path, "s:v1", why="redirected")


@pytest.mark.parametrize(
    ("status", "why"), [(404, "not there"), (503, "answers 503"), (403, "who")]
)
def test_an_answer_that_is_none_is_told(  # noqa: PLR0917  # fixtures
    run, registry, source, tmp_path, status: int, why: str
) -> None:
    registry.put(source)
    registry.hook = lambda path: status if "/blobs/" in path else None
    refused(run, tmp_path, "s:v1", why=why)


def test_a_manifest_without_end_is_refused(run, registry, tmp_path) -> None:
    registry.manifests["v1"] = b" " * (client.MAX_MANIFEST_BYTES + 1)
    refused(run, tmp_path, "s:v1", why="more than")


def test_a_registry_that_drips_is_given_up(registry, source, tmp_path, monkeypatch) -> None:
    registry.put(source)
    registry.drip = 0.05
    monkeypatch.setattr(client, "_SLOWEST", 1 << 30)
    reference = parse_reference(f"{registry.host}/s:v1")
    access = Access({}, plain_http=True)
    with (
        Registry(reference, access, step_seconds=0.3) as opened,
        pytest.raises(RegistryError, match="only"),
    ):
        opened.blob(
            max(registry.blobs, key=lambda d: len(registry.blobs[d])), 1 << 20, lambda _: None
        )


def test_what_has_to_start_starts_with_the_store_that_is_there(
    run, registry, source, tmp_path
) -> None:
    registry.put(source)
    assert run("s:v1")[0] == 0
    registry.hook = lambda _path: 503
    code, out, err = run("s:v1", "--or-keep")
    assert code == 0
    assert "kept as it is" in out
    assert "answers 503" in err
    assert content(tmp_path / "store") == content(source)


@pytest.mark.parametrize("slow", ["the head of an answer", "a file"])
def test_what_has_to_start_waits_for_no_registry_that_drips(
    run, registry, source, tmp_path, slow: str
) -> None:
    registry.put(source)
    if slow == "a file":
        registry.drip = 0.05
    else:
        registry.hook = lambda _path: time.sleep(5)
    code, out, err = run("s:v1", "--or-keep", "--within", "0.5")
    assert code == 0
    assert "kept as it is" in out
    assert "within 0.5 s" in err
    assert content(tmp_path / "store") == {}
    registry.drip, registry.hook = 0.0, lambda _path: None
    assert run("s:v1", "--within", "60")[0] == 0
    assert content(tmp_path / "store") == content(source)


def test_an_artifact_older_than_the_node_has_seen_is_refused(
    run, registry, source, tmp_path, monkeypatch
) -> None:
    key = Ed25519PrivateKey.generate()
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys/site.pem").write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    private = tmp_path / "private.pem"
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    state, store = tmp_path / "state", tmp_path / "store"
    state.mkdir()
    for name, value in (("BITSTREAM_DIR", store), ("STATE_DIR", state), ("TRUST", "signed")):
        monkeypatch.setenv(f"FPGA_PLUGIN_{name}", str(value))
    monkeypatch.setenv("FPGA_PLUGIN_KEYS_DIR", str(tmp_path / "keys"))
    sign = ["bitstream", "sign", "--dir", str(source), "--manifest", "--key", str(private)]
    for version, tag in (("5", "old"), ("6", "new")):
        assert main([*sign, "--manifest-version", version]) == 0
        registry.put(source, tag)
    assert run("s:new")[0] == 0
    seen = SeenManifests(str(state), owner=True)
    blank = next(iter(source.glob("*/blank.gbs"))).relative_to(source)
    Trust(
        str(store), TrustMode.SIGNED, str(tmp_path / "keys"), guarded=False, seen=seen
    ).check_file(str(blank))
    before = content(store)
    code, _, err = run("s:old")
    assert code == 1
    assert "older" in err or "version" in err
    assert content(store) == before


def test_a_registry_that_is_not_there_is_told(tmp_path, capsys) -> None:
    assert main(["bitstream", "pull", "127.0.0.1:1/s", "--plain-http", "--dir", str(tmp_path)]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_without_tls_nothing_is_said_in_the_clear_unless_asked_for(
    registry, source, tmp_path, capsys
):
    registry.put(source)
    assert main(["bitstream", "pull", f"{registry.host}/s:v1", "--dir", str(tmp_path / "x")]) == 1
    assert not registry.seen
    assert "--plain-http" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "x/y",
        "host.example",
        "host.example/",
        "host.example/A",
        "host.example/a:b:c",
        "host.example/a@sha256:0",
        "host.example/a@md5:0",
        "https://host.example/a",
        "-a.b/c",
        "host.example/../a",
        "host.example/a b",
        "host.example/a\n",
        "h.e/" + "a" * 600,
    ],
)
def test_what_is_no_reference_is_told(text: str) -> None:
    with pytest.raises(ValueError, match="no reference"):
        parse_reference(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("h.example/a", "h.example/a:latest"),
        ("localhost/a:1", "localhost/a:1"),
        ("127.0.0.1:5000/a/b-c:T_1", "127.0.0.1:5000/a/b-c:T_1"),
        (f"[::1]:5000/a@sha256:{'0' * 64}", f"[::1]:5000/a@sha256:{'0' * 64}"),
        (f"h.example/a:1@sha256:{'0' * 64}", f"h.example/a:1@sha256:{'0' * 64}"),
    ],
)
def test_a_reference_is_read(text: str, shown: str) -> None:
    assert str(parse_reference(text)) == shown


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"auths": {"h": {"auth": "!"}}}',
        b'{"auths": {"h": {"auth": "dQ=="}}}',
        b'{"auths": {"h": {"identitytoken": "s3cret"}}}',
        b"{" * 100_000,
        b" " * (1 << 21),
    ],
)
def test_a_file_of_credentials_that_is_none_is_told_and_not_shown(tmp_path, content: bytes) -> None:
    (tmp_path / "auth").write_bytes(content)
    with pytest.raises(CredentialsError, match="no file of registry credentials") as told:
        read_credentials(str(tmp_path / "auth"))
    assert "s3cret" not in str(told.value)


def test_credentials_are_read_in_each_form(tmp_path) -> None:
    auth = base64.b64encode(b"u:p:q").decode()
    (tmp_path / "auth").write_text(
        json.dumps(
            {
                "auths": {
                    "https://A.example/v1/": {"auth": auth},
                    "b": {"username": "n", "password": "w"},
                }
            }
        )
    )
    found = read_credentials(str(tmp_path / "auth"))
    assert {host: (c.user, c.password) for host, c in found.items()} == {
        "a.example": ("u", "p:q"),
        "b": ("n", "w"),
    }
    assert "p:q" not in repr(found)
    with pytest.raises(CredentialsError, match="cannot be read"):
        read_credentials(str(tmp_path / "none"))
