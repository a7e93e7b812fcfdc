"""Which bitstreams a node programs: manifest, signatures, and files that change under it."""

import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from daemon_support import AFU, AFU_2, BLANK, HEALTHY, ID, P0, ROOT, Node, Refused, request


def command(*args: object) -> None:
    subprocess.run(
        [sys.executable, "-m", "fpga_plugin", "bitstream", *map(str, args)],
        check=True,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )


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
        command("sign", "--key", private, store / ID / "blank.gbs")
        node.settled()
        assert node.afu(P0) == BLANK
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request(AFU))
        refused = refusal(node, AFU_2)
        assert refused.code == "PERMISSION_DENIED"
        assert f"there is no {AFU_2}.gbs.sig" in str(refused)
        command("sign", "--manifest", "--key", private, "--dir", store)
        node.kubelet.prestart(P0, env=request(AFU_2))
        assert node.afu(P0) == AFU_2


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
