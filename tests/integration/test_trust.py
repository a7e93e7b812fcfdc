"""Which bitstreams a node programs: manifest, signatures, and files that change under it."""

import json
import shutil
from pathlib import Path

import daemon_support
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from daemon_support import (
    AFU,
    AFU_2,
    BLANK,
    HEALTHY,
    ID,
    P0,
    UNHEALTHY,
    Node,
    Refused,
    request,
)


def command(*args: object, node: Node | None = None, code: int = 0) -> str:
    """`fpga-plugin bitstream ...`, on a node if it is named; what it printed."""
    words = ["bitstream", *map(str, args)]
    done = daemon_support.command(*words, settings=node.settings if node else {})
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def key(folder: Path, name: str) -> Path:
    """A private key, and its public half in `<folder>/keys`."""
    (folder / "keys").mkdir(exist_ok=True)
    key = Ed25519PrivateKey.generate()
    private = folder / f"{name}.pem"
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    (folder / "keys" / f"{name}.pem").write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return private


def tamper(path: Path) -> None:
    """One byte of the image, put there by renaming."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    new = path.with_suffix(".new")
    new.write_bytes(data)
    new.replace(path)


def refusal(node: Node, afu: str = AFU) -> Refused:
    with pytest.raises(Refused) as refused:
        node.kubelet.prestart(P0, env=request(afu))
    return refused.value


def test_a_tampered_file_is_refused_when_it_arrives_and_to_the_pod_and_a_repaired_one_works():
    node = Node()
    file = node.own_store(manifest=True) / ID / f"{AFU}.gbs"
    good = file.read_bytes()
    with node.up():
        node.plugin.until_logged("bitstream verified", file=f"{ID}/{AFU}.gbs")
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request(AFU))
        since = node.plugin.mark
        tamper(file)
        line = node.plugin.until_logged("bitstream refused", since)  # nobody asked for it yet
        assert "SHA-256" in line["reason"]
        refused = refusal(node)
        assert refused.code == "PERMISSION_DENIED"
        assert "manifest.json says" in str(refused)
        node.kubelet.prestart(P0, env=request(AFU_2))  # the others are served
        new = file.with_suffix(".new")
        new.write_bytes(good)
        new.replace(file)
        node.kubelet.prestart(P0, env=request(AFU))
        assert node.afu(P0) == AFU


def test_digest_programs_what_the_manifest_names_and_only_that():
    node = Node(trust="digest")
    store = node.own_store()
    command("sign", "--manifest", "--dir", store)
    extra = store / ID / f"{AFU}.gbs"
    content = extra.read_bytes()
    extra.unlink()
    command("sign", "--manifest", "--dir", store)
    extra.write_bytes(content)
    with node.up():
        node.kubelet.allocate(P0)
        refused = refusal(node)
        assert refused.code == "PERMISSION_DENIED"
        assert "manifest.json does not name it" in str(refused)
        node.kubelet.prestart(P0, env=request(AFU_2))
        since = node.plugin.mark
        command("sign", "--manifest", "--dir", store)
        node.plugin.until_logged("bitstream verified", since, file=f"{ID}/{AFU}.gbs")
        node.kubelet.prestart(P0, env=request(AFU))


def test_signed_takes_signed_files_and_a_blank_that_is_not_is_missing():
    node = Node(trust="signed")
    private = key(node.folder, "site")
    node.set(keys_dir=str(node.folder / "keys"))
    store = node.own_store()
    command("sign", "--key", private, store / ID / f"{AFU}.gbs")
    with node:
        node.kubelet.start()
        node.start()
        line = node.plugin.until_logged("blank bitstream missing", interface_id=ID)
        assert "blank.gbs: not signed" in line["reason"]
        told = command("sign", "--key", private, store / ID / "blank.gbs")
        assert "it needs a signed manifest that names it" in told
        two = store / ID / f"{AFU_2}.gbs"
        away = two.rename(node.folder / two.name)
        command("sign", "--manifest", "--key", private, "--dir", store)
        away.rename(two)
        node.settled()
        assert node.afu(P0) == BLANK
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request(AFU))
        refused = refusal(node, AFU_2)
        assert refused.code == "PERMISSION_DENIED"
        assert f"there is no {AFU_2}.gbs.sig" in str(refused)
        command("sign", "--key", private, two)  # beside a manifest that never named it
        node.kubelet.prestart(P0, env=request(AFU_2))
        assert node.afu(P0) == AFU_2


@pytest.mark.parametrize("memory", ["kept", "lost"])
@pytest.mark.parametrize("kind", ["of the file", "of the bare bytes", "for that place"])
def test_without_the_manifest_nothing_becomes_the_blank_bitstream(kind, memory):
    """Who can write to the store, and cannot sign, puts an accelerator in the blank's place."""
    node = Node(trust="signed")
    private = key(node.folder, "site")
    node.set(keys_dir=str(node.folder / "keys"))
    store = node.own_store()
    accelerator, blank = store / ID / f"{AFU}.gbs", store / ID / "blank.gbs"
    command("sign", "--key", private, accelerator)
    command("sign", "--manifest", "--key", private, "--dir", store)
    with node.up():
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request(AFU))
        if memory == "lost":
            node.plugin.stop()
            (node.state_dir / "seen-manifests.json").unlink()
        since = node.plugin.mark if memory == "kept" else 0
        for name in ("manifest.json", "manifest.json.sig"):
            (store / name).unlink()
        shutil.copy(accelerator, blank)
        signature = blank.with_name("blank.gbs.sig")
        if kind == "of the file":
            shutil.copy(f"{accelerator}.sig", signature)
        elif kind == "of the bare bytes":
            made = serialization.load_pem_private_key(private.read_bytes(), None)
            signature.write_bytes(made.sign(blank.read_bytes()))
        else:
            command("sign", "--key", private, blank)
        if memory == "lost":
            node.restarted()
        node.kubelet.deallocate(P0)
        line = node.plugin.until_logged("blank bitstream missing", since, interface_id=ID)
        assert "a blank bitstream's own signature does not count" in line["reason"]
        node.kubelet.until_health(P0, UNHEALTHY)
        assert node.scrubs(P0, since) == 0


def test_what_the_manifest_dropped_is_revoked_over_a_restart_and_until_somebody_forgets():
    node = Node(trust="signed")
    private = key(node.folder, "site")
    node.set(keys_dir=str(node.folder / "keys"))
    store = node.own_store()
    file = store / ID / f"{AFU}.gbs"
    command("sign", "--key", private, file)
    command("sign", "--manifest", "--key", private, "--dir", store)
    old = [(store / name).read_bytes() for name in ("manifest.json", "manifest.json.sig")]
    away = file.rename(node.folder / file.name)
    with node.up():
        told = command("sign", "--manifest", "--key", private, "--dir", store)
        assert "revokes 1" in told
        away.rename(file)  # its own signature still lies there
        node.kubelet.allocate(P0)
        assert "revoked" in str(refusal(node))
        for name, content in zip(("manifest.json", "manifest.json.sig"), old, strict=True):
            (store / name).write_bytes(content)
        assert "is older than version" in str(refusal(node))
        node.plugin.stop()
        node.restarted()
        refused = refusal(node)
        assert refused.code == "PERMISSION_DENIED"
        assert "is older than version" in str(refused)
        assert "is older than version" in command("verify", node=node, code=1)
        command("forget", node=node)
        node.kubelet.prestart(P0, env=request(AFU))
        assert node.afu(P0) == AFU


def test_an_expired_manifest_is_refused_and_a_new_one_helps_without_a_restart():
    node = Node(trust="signed")
    private = key(node.folder, "site")
    node.set(keys_dir=str(node.folder / "keys"))
    store = node.own_store()
    command("sign", "--manifest", "--key", private, "--dir", store, "--expires", "90d")
    expiring = json.loads((store / "manifest.json").read_text())["version"]
    with node.up():
        assert node.plugin.until_logged("the manifest is in force", version=expiring)["expires"]
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request(AFU))
        node.plugin.stop()
        record = node.state_dir / "seen-manifests.json"
        seen = json.loads(record.read_text())
        record.write_text(json.dumps(seen | {"expired": True}))  # an earlier life saw it so
        node.start()
        line = node.plugin.until_logged("the manifest does not count as signed")
        assert f"its version {expiring} expired" in line["reason"]
        since = node.plugin.mark
        command("sign", "--manifest", "--key", private, "--dir", store)
        node.plugin.until_logged("the manifest is in force", since, expires=None)
        node.kubelet.until_health(P0, HEALTHY)
        node.kubelet.prestart(P0, env=request(AFU))


@pytest.mark.parametrize("spoilt", ["state", "folder"])
def test_a_state_directory_that_others_may_write_stops_the_start(spoilt):
    """Not where cards are simulated, as everywhere else here."""
    node = Node(backend="dfl", sysfs_root="/nonexistent", dev_root="/nonexistent")
    node.state_dir.mkdir(mode=0o755)
    place = node.state_dir if spoilt == "state" else node.folder
    place.chmod(0o777)
    with node:
        node.kubelet.start()
        plugin = node.start()
        assert plugin.exit_code() == 1
        assert "FPGA_PLUGIN_STATE_DIR" in plugin.text
        assert "may be written by anybody" in plugin.text
        assert f"chmod go-w {place}" in plugin.text


def test_a_key_that_is_taken_away_takes_its_trust_with_it_and_one_that_comes_brings_it():
    node = Node(trust="signed")
    private = key(node.folder, "site")
    key(node.folder, "other")
    (node.folder / "keys" / "broken.pem").write_text("broken")
    node.set(keys_dir=str(node.folder / "keys"))
    store = node.own_store()
    command("sign", "--manifest", "--key", private, "--dir", store)
    public = node.folder / "keys" / "site.pem"
    with node.up():
        assert "broken.pem" in node.plugin.until_logged("a key is left out")["error"]
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request(AFU))
        public.rename(node.folder / "away.pem")
        assert refusal(node).code == "PERMISSION_DENIED"
        (node.folder / "away.pem").rename(public)
        node.kubelet.prestart(P0, env=request(AFU))


def test_without_any_key_nothing_is_trusted_and_the_log_says_so():
    node = Node(trust="signed")
    node.own_store()
    with node:
        node.kubelet.start()
        node.start()
        node.plugin.until_logged("no keys: no bitstream is trusted")
        node.plugin.until_logged("blank bitstream missing", interface_id=ID)
        assert set(node.kubelet.listed().values()) <= {"Unhealthy"}


def test_a_broken_manifest_stops_programming_until_it_is_repaired():
    node = Node()
    store = node.own_store(manifest=True)
    good = (store / "manifest.json").read_bytes()
    with node.up():
        node.kubelet.allocate(P0)
        (store / "manifest.json").write_bytes(good[:-3])
        refused = refusal(node)
        assert refused.code == "PERMISSION_DENIED"
        assert "nothing of the store is trusted" in str(refused)
        (store / "manifest.json").write_bytes(good)
        node.kubelet.prestart(P0, env=request(AFU))
        assert node.kubelet.listed()[P0] == HEALTHY


def test_a_file_that_is_still_being_copied_is_verified_when_its_writer_closes_it():
    node = Node()
    file = node.own_store() / ID / f"{AFU}.gbs"
    content = file.read_bytes()
    with node.up():
        node.kubelet.allocate(P0)
        since = node.plugin.mark
        with file.open("wb") as writing:
            writing.write(content[:1000])
            writing.flush()
            refused = refusal(node)
            assert refused.code == "UNAVAILABLE"
            assert "still being written" in str(refused)
            writing.write(content[1000:])
        node.plugin.until_logged("bitstream verified", since, file=f"{ID}/{AFU}.gbs")
        node.kubelet.prestart(P0, env=request(AFU))
        assert node.plugin.logged("bitstream refused", since) == []


def test_the_driver_gets_the_copy_and_a_restart_verifies_nothing_again():
    node = Node()
    with node.up():
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request(AFU))
        node.plugin.until_logged("bitstream verified", file=f"{ID}/{AFU}.gbs")
        copies = {path.name for path in (node.state_dir / "verified").iterdir()}
        assert len([name for name in copies if len(name) == 64]) >= 2
        node.plugin.stop()
        node.restarted()
        node.kubelet.prestart(P0, env=request(AFU))
        assert node.afu(P0) == AFU
        assert node.plugin.logged("bitstream verified", file=f"{ID}/{AFU}.gbs") == []
