"""`fpga-plugin bitstream`."""

import argparse
import errno
import gzip
import json
import os
import shutil
import subprocess
import sys
import time
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from doubles.bitstreams import HASH, aocx, document, packed
from doubles.samples import SAMPLES

from fpga_plugin.bitstreams import subcommands
from fpga_plugin.bitstreams.manifest import MAX_VERSION, parse_manifest, write_manifest
from fpga_plugin.bitstreams.places import place_for
from fpga_plugin.bitstreams.seen_manifests import SeenManifests
from fpga_plugin.bitstreams.store import Store
from fpga_plugin.commands.bitstream import add_bitstream_parser, run_bitstream
from fpga_plugin.hardware.image import RawImage
from fpga_plugin.settings.settings import Settings

INTERFACE = "ce48969398f05f33946d560708be108a"
AFU = "850adcc26ceb4b229722d43375b61c66"
SAMPLE = SAMPLES / INTERFACE / f"{AFU}.gbs"
BLANK = SAMPLES / INTERFACE / "blank.gbs"
DOCUMENT = document(AFU, interface=INTERFACE)
KEY = Ed25519PrivateKey.generate()
PRIVATE_KEY = KEY.private_bytes(
    serialization.Encoding.PEM,
    serialization.PrivateFormat.PKCS8,
    serialization.NoEncryption(),
)
PUBLIC_KEY = KEY.public_key().public_bytes(
    serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
)


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def run(store, capsys):
    """Run the command; returns its exit code, output and error lines."""

    def run(*args: object, state_dir: Path | None = None) -> tuple[int, str, list[str]]:
        parser = argparse.ArgumentParser(prog="fpga-plugin")
        add_bitstream_parser(
            parser.add_subparsers(required=True),
            Settings(bitstream_dir=str(store), state_dir=str(state_dir or store / "nowhere")),
        )
        try:
            code = run_bitstream(parser.parse_args(["bitstream", *map(str, args)]))
        except SystemExit as exit_:
            code = exit_.code
        out, err = capsys.readouterr()
        return code, out, err.splitlines()

    return run


@pytest.fixture
def raw(tmp_path):
    path = tmp_path / "image.rbf"
    path.write_bytes(bytes.fromhex(AFU) + b"logic")
    return path


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("unknown",),
        ("inspect",),
        ("remove", INTERFACE, "../x"),
        ("verify", "--afu-id", "x" * 200, "file"),
        ("sign",),
        ("sign", "file"),
        ("sign", "--key", "k", "--expires", "1d", "file"),
        ("sign", "--key", "k", "--manifest-version", "1", "file"),
        ("sign", "--statement"),
        ("sign", "--statement", "one", "two"),
        ("sign", "--statement", "--manifest", "one"),
        ("sign", "--manifest", "--manifest-version", "0"),
        ("sign", "--manifest", "--manifest-version", str(MAX_VERSION + 1)),
        ("sign", "--manifest", "--manifest-version", "9" * 5000),
        ("sign", "--manifest", "--expires", "2020-01-31"),
        ("sign", "--manifest", "--expires", "0d"),
        ("sign", "--manifest", "--expires", "9" * 5000 + "d"),
        ("sign", "--manifest", "--expires", "0001-01-01T00:00:00+14:00"),
        ("sign", "--manifest", "--expires", "soon"),
        ("sign", "--manifest", "--alias", "gzip"),
        ("sign", "--manifest", "--alias", "x=gzip"),
        ("sign", "--manifest", "--alias", f"{'0' * 32}/blank.gbs=blank"),
        ("sign", "--key", "k", "--alias", f"{'0' * 32}/{'1' * 32}.gbs=gzip", "file"),
    ],
)
def test_wrong_usage_exits_with_2(run, args):
    code, out, errors = run(*args)
    assert (code, out) == (2, "")
    assert "x" * 65 not in "".join(errors)


@pytest.mark.parametrize(
    "command", ["list", "inspect", "verify", "install", "remove", "sign", "forget"]
)
def test_help_shows_an_example(run, command):
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"example: fpga-plugin bitstream {command}" in " ".join(out.split())


def test_install_puts_a_file_where_the_store_finds_it(run, store):
    for file, options in ((SAMPLE, ()), (BLANK, ("--blank",))):
        assert run("install", file, *options)[0] == 0

    loaded = Store(str(store))
    for place in (place_for(INTERFACE, AFU, RawImage), place_for(INTERFACE, None, RawImage)):
        assert loaded.check(place) == str(store / place.path)
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in store.glob("*/*"))
    assert sorted(path.name for path in store.glob("*/*")) == [SAMPLE.name, "blank.gbs"]


def test_install_takes_the_place_from_the_metadata_not_from_the_name(run, store, tmp_path):
    renamed = tmp_path / "x.bin"
    renamed.write_bytes(SAMPLE.read_bytes())
    assert run("install", renamed)[0] == 0
    assert (store / INTERFACE / SAMPLE.name).exists()


def test_install_replaces_a_different_file_only_by_force(run, store, tmp_path):
    other = tmp_path / "other.gbs"
    other.write_bytes(SAMPLE.read_bytes() + b"more")
    place = store / INTERFACE / SAMPLE.name
    assert run("install", SAMPLE)[0] == 0

    assert "already" in run("install", SAMPLE)[1]
    code, _, errors = run("install", other)
    assert code == 1
    assert "different file" in errors[0]
    assert "--force" in errors[1]
    assert place.read_bytes() == SAMPLE.read_bytes()

    assert run("install", "--force", other)[0] == 0
    assert place.read_bytes() == other.read_bytes()


def test_install_asks_what_a_file_named_blank_is(run, store):
    code, _, errors = run("install", BLANK)
    assert code == 1
    assert "--blank" in errors[1]
    assert not store.exists()


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"raw image" * 100])
def test_install_refuses_what_is_no_gbs_and_changes_nothing(run, store, tmp_path, content):
    file = tmp_path / "a.gbs"
    file.write_bytes(content)
    code, out, errors = run("install", file)
    assert (code, out, len(errors)) == (1, "", 2)
    assert not store.exists()


def test_install_into_a_directory_that_leads_out_of_the_store_is_reported(run, store, tmp_path):
    store.mkdir()
    (tmp_path / "outside").mkdir()
    (store / INTERFACE).symlink_to(tmp_path / "outside")
    code, _, errors = run("install", SAMPLE)
    assert code == 1
    assert "leads out of the store" in errors[0]


def test_install_to_where_nothing_can_be_written_fails_with_the_reason(run, tmp_path):
    (tmp_path / "file").write_text("")
    for where, reason, help_ in (
        (tmp_path / "file", "Not a directory", "a part of the path is a file"),
        ("/proc/x", "No such file or directory", "name another one"),
    ):
        code, _, (error, hint) = run("install", SAMPLE, "--dir", where)
        assert code == 1
        assert f"{where}" in error
        assert f"the directory cannot be made: {reason}" in error
        assert help_ in hint


def test_an_accelerator_of_the_store_is_no_blank_bitstream_but_by_force(run, store):
    blank = store / INTERFACE / "blank.gbs"
    run("install", SAMPLE)
    code, _, (error, hint) = run("install", "--blank", SAMPLE)
    assert code == 1
    assert f"the store has {INTERFACE}/{SAMPLE.name}, so this is an accelerator" in error
    assert "--force" in hint
    assert not blank.exists()
    assert run("install", "--blank", "--force", SAMPLE)[0] == 0
    assert blank.read_bytes() == SAMPLE.read_bytes()


@pytest.mark.parametrize(
    "words", [("list",), ("verify",), ("remove", INTERFACE, AFU), ("sign", "--manifest")]
)
def test_a_store_that_the_option_names_and_is_none_is_said_of_the_option(run, tmp_path, words):
    (tmp_path / "text").write_text("")
    for name, wrong in (("nowhere", "no such directory"), ("text", "a file, not a directory")):
        path = tmp_path / name
        code, _, errors = run(*words, "--dir", path)
        assert (code, errors[0]) == (1, f"fpga-plugin: --dir {path}: {wrong}")
        assert "FPGA_PLUGIN_BITSTREAM_DIR" not in errors[1]


def test_a_directory_in_place_of_a_file_says_to_name_a_file_in_it(run, tmp_path):
    for words in (("inspect",), ("verify",), ("install",)):
        code, _, (error, hint) = run(*words, tmp_path)
        listed = f"`fpga-plugin bitstream list --dir {tmp_path}` lists a store"
        assert (code, hint) == (1, f"  name a file in it; {listed}")
        assert "a directory, not a regular file" in error


def test_remove_takes_out_files_and_then_the_directory(run, store):
    run("install", SAMPLE)
    run("install", "--blank", BLANK)

    assert run("remove", INTERFACE, "850adcc2-6ceb-4b22-9722-d43375b61c66")[0] == 0
    assert [path.name for path in store.glob("*/*")] == ["blank.gbs"]
    assert run("remove", INTERFACE, "blank")[0] == 0
    assert list(store.iterdir()) == []

    code, _, errors = run("remove", INTERFACE, "blank")
    assert code == 1
    assert str(store / INTERFACE / "blank.gbs") in errors[0]


def test_list_prints_a_table_and_then_the_problems(run, store):
    run("install", SAMPLE)
    run("install", "--blank", BLANK)
    (store / INTERFACE / f"{'a' * 32}.gbs").write_bytes(SAMPLE.read_bytes())

    code, out, errors = run("list")

    header, first, second, problem, hint = out.splitlines()
    assert (code, errors) == (0, [])
    assert header.split() == ["INTERFACE", "ID", "BITSTREAM", "BYTES", "NAME", "TRUST"]
    size = str(SAMPLE.stat().st_size)
    assert first.split() == [INTERFACE, AFU, size, "'hello_afu'", "-"]
    assert second.split()[:2] == [INTERFACE, "blank"]
    assert problem.startswith("problem: ")
    assert hint.strip()


def test_list_prints_json_with_the_problems(run, store):
    run("install", SAMPLE)
    (store / INTERFACE / "bad.gbs").write_bytes(b"")

    code, out, _ = run("list", "--json")

    good, bad = json.loads(out)
    assert code == 0
    assert (good["bitstream_id"], good["metadata"]["afu_id"], good["problem"]) == (AFU, AFU, None)
    assert bad["metadata"] is None
    assert "bad" in bad["problem"]["message"]


def test_list_tells_the_size_of_a_file_that_is_not_what_its_name_says(run, store):
    (store / INTERFACE).mkdir(parents=True)
    (store / INTERFACE / f"{'a' * 32}.gbs").write_bytes(SAMPLE.read_bytes())

    (wrong,) = json.loads(run("list", "--json")[1])

    assert (wrong["bytes"], wrong["metadata"]) == (SAMPLE.stat().st_size, None)
    assert "not the one of its name" in wrong["problem"]["message"]


def test_list_of_an_empty_and_of_a_missing_store(run, store):
    code, _, errors = run("list")
    assert code == 1
    assert str(store) in errors[0]
    store.mkdir()
    assert run("list") == (0, f"{store}: no bitstreams\n", [])
    assert run("list", "--json") == (0, "[]\n", [])


def test_names_that_no_terminal_should_see_are_not_printed(run, store):
    (store / INTERFACE).mkdir(parents=True)
    (store / INTERFACE / "\x1b[31m\udcff.gbs").write_bytes(b"")
    code, out, _ = run("list")
    assert code == 0
    assert "problem" in out
    assert "\x1b" not in out
    out.encode()


def test_inspect_shows_ids_and_digest(run):
    code, out, _ = run("inspect", "--json", SAMPLE)
    facts = json.loads(out)
    assert code == 0
    assert (facts["interface_id"], facts["afu_id"], facts["name"]) == (INTERFACE, AFU, "hello_afu")
    assert facts["image_bytes"] == 4096
    assert len(facts["sha256"]) == 64

    code, out, _ = run("inspect", SAMPLE)
    assert code == 0
    assert facts["sha256"] in out
    assert AFU in out


def test_inspect_shows_every_accelerator_and_the_sections_of_an_aocx_file(run, tmp_path):
    document = json.loads(json.dumps(DOCUMENT))
    second = {"accelerator-type-uuid": "b" * 32, "name": "second", "total-contexts": 3}
    document["afu-image"]["accelerator-clusters"].append(second)
    gbs = packed(document, b"logic")
    file = tmp_path / "two.aocx"
    file.write_bytes(aocx(gzip.compress(gbs, mtime=0)))
    _, out, _ = run("inspect", "--json", file)
    facts = json.loads(out)
    assert [each["afu_id"] for each in facts["accelerators"]] == [AFU, "b" * 32]
    assert (facts["format"], facts["bitstream_id"], facts["afu_id"]) == ("aocx", HASH, AFU)
    assert facts["sections"][0] == {"name": ".acl.rand_hash", "bytes": 40}
    _, out, _ = run("inspect", file)
    assert f"and accelerator       {'b' * 32}  'second', total contexts 3" in out
    assert "section               .acl.fpga.bin, " in out


def test_an_aocx_file_is_installed_by_its_hash_listed_verified_and_removed(run, store, tmp_path):
    file = tmp_path / "kernel.aocx"
    file.write_bytes(aocx())
    code, out, _ = run("install", file)
    place = store / INTERFACE / f"{HASH}.aocx"
    assert (code, out) == (0, f"{place}: installed\n")
    assert HASH in run("list")[1]
    assert run("verify")[:2] == (0, f"{place}: good\n")
    assert run("install", "--blank", file)[0] == 1
    assert run("remove", INTERFACE, HASH)[0] == 0
    assert not place.exists()


def test_progress_is_shown_to_people_on_large_files(run, tmp_path, monkeypatch):
    # Each phase of a test has another sys.stderr: it becomes a terminal here, not in a fixture.
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(subcommands, "_LARGE", 1)
    key = tmp_path / "key.pem"
    key.write_bytes(PRIVATE_KEY)
    file = tmp_path / "big.gbs"
    file.write_bytes(packed(DOCUMENT, bytes(10 << 20)))
    for command, shown in (
        (("inspect", file), "big.gbs: 79 %"),
        (("sign", "--key", key, file), "big.gbs: 79 %"),
        (("install", file), "big.gbs: 79 %"),
        (("verify",), f"{AFU}.gbs: 9 %"),
    ):
        code, _, errors = run(*command)
        assert (code, shown in "\n".join(errors)) == (0, True), (command, errors)


def test_progress_is_not_shown_to_scripts(run, tmp_path, monkeypatch):
    monkeypatch.setattr(subcommands, "_LARGE", 1)
    assert run("inspect", SAMPLE)[2] == []


def test_inspect_of_no_file_has_two_lines(run, tmp_path):
    code, out, errors = run("inspect", tmp_path / "nowhere")
    assert (code, out, len(errors)) == (1, "", 2)


def test_verify_checks_files_against_their_path_and_the_options(run, tmp_path):
    misplaced = tmp_path / ("a" * 32) / SAMPLE.name
    misplaced.parent.mkdir()
    misplaced.write_bytes(SAMPLE.read_bytes())
    anywhere = tmp_path / "mine.gbs"
    anywhere.write_bytes(SAMPLE.read_bytes())
    anywhere.chmod(0o664)  # as a clone has them where the umask is 002: no matter here

    assert run("verify", SAMPLE, BLANK, anywhere)[0] == 0
    assert run("verify", "--interface-id", INTERFACE, "--afu-id", AFU, anywhere)[0] == 0
    assert run("verify", "--afu-id", "a" * 32, anywhere)[0] == 1
    code, out, errors = run("verify", misplaced, SAMPLE)
    assert code == 1
    assert str(SAMPLE) in out  # one bad file does not hide the others
    assert INTERFACE in errors[0]


def test_verify_without_files_checks_the_store(run):
    code, out, _ = run("verify", "--dir", SAMPLES)
    assert code == 0
    assert len(out.splitlines()) == 12


def test_verify_of_a_store_with_a_bad_file_exits_with_1(run, store):
    run("install", SAMPLE)
    (store / INTERFACE / "blank.gbs").write_bytes(b"")
    code, out, errors = run("verify")
    assert code == 1
    assert SAMPLE.name in out
    assert "blank.gbs: too short" in errors[0]


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "private.pem"
    path.write_bytes(PRIVATE_KEY)
    return path


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    path.mkdir()
    (path / "site.pem").write_bytes(PUBLIC_KEY)
    return path


def manifest(store) -> dict:
    return json.loads((store / "manifest.json").read_text())


def test_a_file_is_signed_before_it_is_installed_for_the_place_that_it_gets(
    run, key, keys, tmp_path, raw
):
    """The documentation's example, word by word."""
    hello = tmp_path / "hello_afu.gbs"
    hello.write_bytes(packed(DOCUMENT, raw.read_bytes()))
    code, out, _ = run("sign", "--key", key, hello)
    assert code == 0
    assert out == f"{hello}.sig: written, for {INTERFACE}/{AFU}.gbs\n"
    code, _, errors = run("verify", "--trust", "signed", hello)
    assert code == 1
    assert "--keys" in "".join(errors)
    assert run("verify", "--trust", "signed", "--keys", keys, hello)[0] == 0
    assert run("install", "--trust", "signed", "--keys", keys, hello)[0] == 0
    code, out, _ = run("verify", "--trust", "signed", "--keys", keys)
    assert code == 0
    assert "good (signed with site.pem)" in out


def test_an_aocx_file_is_signed_by_its_hash(run, key, tmp_path):
    file = tmp_path / "kernel.aocx"
    file.write_bytes(aocx())
    code, out, _ = run("sign", "--key", key, file)
    assert code == 0
    assert f"/{HASH}.aocx" in out


def test_a_signature_does_not_go_with_its_file_to_another_place(run, store, key, keys, tmp_path):
    hello = tmp_path / "hello_afu.gbs"
    hello.write_bytes(SAMPLE.read_bytes())
    run("sign", "--key", key, hello)
    code, _, errors = run("install", "--blank", "--keys", keys, hello)
    assert code == 1
    assert f"of another path than {INTERFACE}/blank.gbs" in errors[0]
    assert not store.exists()


def test_a_path_that_does_not_tell_is_refused_clearly(run, key, tmp_path):
    blank = tmp_path / "blank.gbs"
    blank.write_bytes(BLANK.read_bytes())
    code, _, errors = run("sign", "--key", key, blank)
    assert code == 1
    assert "its path does not name the interface id that it is for" in errors[0]
    assert "install --blank" in errors[1]
    assert not Path(f"{blank}.sig").exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("e" * 32 + ".gbs", SAMPLE, "has the AFU id"),
        (f"{AFU}.gbs", None, "too short"),
        ("e" * 40 + ".aocx", SAMPLE, "holds GBS, and its name is that of AOCX"),
    ],
)
def test_what_is_not_what_its_path_says_is_not_signed(  # noqa: PLR0917  # fixtures
    run, store, key, name, content, words
):
    file = store / INTERFACE / name
    file.parent.mkdir(parents=True)
    file.write_bytes(b"" if content is None else content.read_bytes())
    code, _, errors = run("sign", "--key", key, file)
    assert code == 1
    assert words in errors[0]
    assert not Path(f"{file}.sig").exists()


def test_a_blank_bitstream_is_signed_with_the_word_that_it_does_not_suffice(run, store, key, keys):
    run("install", "--blank", BLANK)
    blank = store / INTERFACE / "blank.gbs"
    code, out, errors = run("sign", "--key", key, blank)
    assert code == 0
    assert out.endswith(f"for {INTERFACE}/blank.gbs\n")
    assert "it needs a signed manifest that names it" in errors[0]
    code, _, errors = run("verify", "--trust", "signed", "--keys", keys)
    assert code == 1
    assert "a blank bitstream's own signature does not count" in errors[1]
    assert run("sign", "--key", key, "--manifest")[0] == 0
    code, out, _ = run("verify", "--trust", "signed", "--keys", keys)
    assert code == 0
    assert "named by the manifest, signed with site.pem" in out


def test_what_a_bitstream_is_called_is_signed_kept_and_listed(run, store, key):
    folder = SAMPLE.parent
    shutil.copytree(folder, store / folder.name)
    files = sorted(file.name for file in folder.glob("*.gbs") if file.name != "blank.gbs")
    path, other = (f"{folder.name}/{name}" for name in files[:2])
    code, out, _ = run("sign", "--manifest", "--key", key, "--alias", f"{path}=gzip")
    assert code == 0
    assert "gives 1 aliases" in out
    run("sign", "--manifest", "--key", key, "--alias", f"{other}=zip")
    named = {file["path"]: file.get("alias") for file in manifest(store)["files"]}
    assert {path: alias for path, alias in named.items() if alias} == {path: "gzip", other: "zip"}
    _, out, _ = run("list")
    assert {"gzip", "zip"} <= {cell for line in out.splitlines() for cell in line.split()}
    _, out, _ = run("list", "--json")
    assert {one["alias"] for one in json.loads(out)} == {None, "gzip", "zip"}
    before = (store / "manifest.json").read_bytes()
    code, _, error = run("sign", "--manifest", "--alias", f"{other}=gzip")
    assert code == 1
    assert "have the alias gzip" in error[0]
    code, _, error = run("sign", "--manifest", "--alias", f"{'0' * 32}/{'1' * 32}.gbs=x")
    assert code == 1
    assert "no such bitstream to be named" in error[0]
    assert (store / "manifest.json").read_bytes() == before
    run("sign", "--manifest", "--alias", f"{path}=")
    assert [file["alias"] for file in manifest(store)["files"] if "alias" in file] == ["zip"]


def test_what_an_interface_id_is_called_is_signed_kept_and_listed(run, store, key):
    folder = SAMPLE.parent
    shutil.copytree(folder, store / folder.name)
    option = f"{folder.name}=board"
    code, out, _ = run("sign", "--manifest", "--key", key, "--interface-alias", option)
    assert code == 0
    assert "names 1 interface ids" in out
    code, out, _ = run("sign", "--manifest", "--key", key)
    assert "names 1 interface ids, unchanged" in out
    assert manifest(store)["interfaces"] == [{"id": folder.name, "alias": "board"}]
    _, out, _ = run("list")
    assert folder.name not in out
    assert "board" in out
    _, out, _ = run("list", "--json")
    assert {(one["interface_id"], one["interface_alias"]) for one in json.loads(out)} == {
        (folder.name, "board")
    }
    run("sign", "--manifest", "--interface-alias", f"{folder.name}=")
    assert "interfaces" not in manifest(store)


def test_each_manifest_has_a_higher_version_and_revokes_what_it_drops(run, store, key):
    run("install", SAMPLE)
    run("install", "--blank", BLANK)
    _, out, _ = run("sign", "--manifest", "--key", key)
    first = manifest(store)
    assert f"names 2 files, version {first['version']}\n" in out
    assert abs(first["version"] / 1000 - time.time()) < 3600
    before = (store / "manifest.json").read_bytes(), (store / "manifest.json.sig").read_bytes()
    _, out, _ = run("sign", "--manifest", "--key", key)
    assert "unchanged" in out
    assert before == (
        (store / "manifest.json").read_bytes(),
        (store / "manifest.json.sig").read_bytes(),
    )
    run("remove", INTERFACE, AFU)
    _, out, _ = run("sign", "--manifest", "--key", key)
    assert "revokes 1" in out
    second = manifest(store)
    assert second["version"] > first["version"]
    assert second["revoked"] == [f"{INTERFACE}/{AFU}.gbs"]
    run("sign", "--manifest", "--expires", "90d")
    assert manifest(store)["revoked"] == second["revoked"]
    run("install", SAMPLE)
    run("sign", "--manifest")
    assert "revoked" not in manifest(store)


def test_manifests_that_were_made_in_one_second_have_two_versions(run, store):
    """Though the first was removed before: the node has seen it."""
    run("install", SAMPLE)
    versions = set()
    for _ in range(5):
        run("sign", "--manifest")
        versions.add(manifest(store)["version"])
        (store / "manifest.json").unlink()
        time.sleep(0.01)
    assert len(versions) == 5


def test_a_clock_that_is_behind_that_of_the_one_who_signed_before_makes_no_older_version(
    run, store
):
    run("install", SAMPLE)
    ahead = time.time_ns() // 1_000_000 + 3_600_000
    run("sign", "--manifest", "--manifest-version", ahead)
    run("sign", "--manifest", "--expires", "1d")
    assert manifest(store)["version"] == ahead + 1


def test_a_manifests_version_and_end_can_be_given(run, store):
    run("install", SAMPLE)
    assert run("sign", "--manifest", "--manifest-version", "7")[0] == 0
    assert manifest(store)["version"] == 7
    assert run("sign", "--manifest", "--manifest-version", "7")[0] == 0  # the same
    code, _, errors = run("sign", "--manifest", "--manifest-version", "7", "--expires", "1d")
    assert code == 1
    assert "has version 7, and a changed manifest needs a higher one than 7" in errors[0]
    _, out, _ = run("sign", "--manifest", "--manifest-version", "8", "--expires", "2999-01-31")
    assert "expires 2999-01-31T00:00:00Z" in out
    assert manifest(store)["expires"] == "2999-01-31T00:00:00Z"
    assert run("sign", "--manifest", "--expires", "2999-01-31T12:00:00+02:00")[0] == 0
    assert manifest(store)["expires"] == "2999-01-31T10:00:00Z"


def test_a_version_that_somebody_put_into_the_store_does_not_lead_the_operator(run, store, key):
    """Whoever can write to the store could use up all versions."""
    run("install", SAMPLE)
    (store / "manifest.json").write_bytes(write_manifest([], version=MAX_VERSION))
    code, _, errors = run("sign", "--manifest", "--key", key)
    assert code == 1
    assert "in the future as a time" in errors[0]
    assert "if the manifest there is not yours, remove it" in errors[1]
    (store / "manifest.json").unlink()
    assert run("sign", "--manifest", "--key", key)[0] == 0


def test_a_key_that_cannot_sign_changes_nothing(run, store, key, tmp_path):
    run("install", SAMPLE)
    run("sign", "--manifest", "--key", key)
    before = {path.name: path.read_bytes() for path in store.glob("manifest.json*")}
    run("install", "--blank", BLANK)
    (tmp_path / "broken.pem").write_bytes(b"broken")
    for wrong in ("broken.pem", "none.pem"):
        assert run("sign", "--manifest", "--key", tmp_path / wrong)[0] == 1
        assert {path.name: path.read_bytes() for path in store.glob("manifest.json*")} == before


def test_the_statement_is_printed_for_whoever_signs_elsewhere(store, key, keys, raw, tmp_path):
    """By openssl or an HSM; run as a process, as the documentation does."""
    hello = tmp_path / "hello_afu.gbs"
    hello.write_bytes(SAMPLE.read_bytes())

    def command(*args: object) -> bytes:
        words = [sys.executable, "-m", "fpga_plugin", "bitstream", *map(str, args)]
        return subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout

    Path(f"{hello}.sig").write_bytes(KEY.sign(command("sign", "--statement", hello)))
    assert b"good (signed with site.pem)" in command(
        "verify", "--trust", "signed", "--keys", keys, hello
    )
    run = ("install", "--dir", store, "--blank", BLANK), ("sign", "--dir", store, "--manifest")
    for args in run:
        command(*args)
    path = store / "manifest.json"
    Path(f"{path}.sig").write_bytes(KEY.sign(command("sign", "--statement", path)))
    assert b"named by the manifest, signed with site.pem" in command(
        "verify", "--trust", "signed", "--keys", keys, "--dir", store
    )


def test_a_manifest_without_a_version_is_written_again_before_it_is_signed(run, store, key):
    store.mkdir()
    path = store / "manifest.json"
    path.write_text('{"version": 1, "files": []}')
    code, _, errors = run("sign", "--key", key, path)
    assert code == 1
    assert "not a manifest" in errors[0]
    assert "bitstream sign --manifest" in errors[1]
    assert run("sign", "--key", key, "--manifest")[0] == 0
    assert manifest(store)["format"] == 2


def test_verify_judges_by_what_this_node_has_seen_and_says_where_it_cannot(  # fixtures
    run, store, key, keys, tmp_path
):
    state = tmp_path / "state"
    state.mkdir()
    run("install", "--blank", BLANK)
    run("sign", "--manifest", "--key", key)
    options = "--trust", "signed", "--keys", keys
    code, _, errors = run("verify", *options, state_dir=state)
    assert code == 0
    assert "nothing is known here of the manifests that nodes have seen" in errors[0]
    version = manifest(store)["version"]
    newer = parse_manifest(write_manifest([], version=version + 1), where="m")
    SeenManifests(str(state), owner=True).admit(newer, "a" * 64, datetime.now(UTC))
    for words in ((), (store / INTERFACE / "blank.gbs",), ("--dir", f"{store}/")):
        code, _, errors = run("verify", *options, *words, state_dir=state)
        assert code == 1
        assert f"version {version} is older than version {version + 1}" in errors[0]
    code, out, _ = run("forget", state_dir=state)
    assert (code, out) == (0, f"{state}/seen-manifests.json: version {version + 1} forgotten\n")
    assert run("verify", *options, state_dir=state)[0] == 0
    assert "no manifest to forget" in run("forget", state_dir=state)[1]
    other = tmp_path / "other"
    shutil.copytree(store, other)
    code, _, errors = run("verify", *options, "--dir", other, state_dir=state)
    assert code == 0
    assert "nothing is known here" in errors[0]


def test_a_store_that_can_only_be_read_says_where_to_install(run, monkeypatch):
    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    file = next(SAMPLES.glob("*/blank.gbs"))
    for function in ("makedirs", "rename"):
        with monkeypatch.context() as patched:
            patched.setattr(os, function, read_only)
            code, _, (message, hint) = run("install", "--blank", file)
        assert code == 1
        assert message.startswith("fpga-plugin: ")
        assert "Read-only file system" in message
        assert "on the node" in hint
    assert run("install", "--blank", file)[0] == 0


@pytest.mark.parametrize("words", [("inspect",), ("inspect", "--json"), ("verify",), ("install",)])
def test_what_a_small_file_unpacks_to_is_never_in_memory(run, tmp_path, words):
    """A file of 1 MiB may unpack to 1 GiB; the daemon unpacks it a piece at a time, too."""
    gbs = packed(DOCUMENT, bytes(64 << 20))
    file = tmp_path / "large.aocx"
    file.write_bytes(aocx(gzip.compress(gbs, 1, mtime=0)))
    tracemalloc.start()
    try:
        code, out, err = run(*words, file)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert code == 0, err
    assert most < 16 << 20
    if words[0] == "inspect":
        assert str(64 << 20) in out, "the image's size is told all the same"
