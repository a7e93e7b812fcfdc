"""Whose word counts for a bitstream, and until when: what the tests of signatures passed over."""

import contextlib
import os
from datetime import timedelta
from unittest import mock

import pytest
from structlog.testing import capture_logs
from test_seen_manifests import CONTENT, KNOWN, NOW, Node, clock  # noqa: F401  # a fixture
from test_signatures import FILE, write

from fpga_plugin.bitstreams import seen_manifests as seen_module
from fpga_plugin.bitstreams.files import content_of
from fpga_plugin.bitstreams.manifest import in_utc
from fpga_plugin.bitstreams.trust import Trust, check_signed
from fpga_plugin.errors import BitstreamError, NotFinishedError, NotPermittedError
from fpga_plugin.settings.settings import TrustMode


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def test_a_key_that_is_taken_away_vouches_for_nothing_any_more(node):
    """The keys directory is a ConfigMap: a key is withdrawn while the plugin runs."""
    node.sign()
    assert node.good() == "signed with site.pem"
    (node.keys / "site.pem").unlink()
    assert "there is no key" in node.refused()


def test_a_key_that_comes_vouches_from_then_on(node):
    node.sign()
    (node.keys / "site.pem").rename(node.keys / "site.old")
    node.refused()
    (node.keys / "site.old").rename(node.keys / "site.pem")
    assert node.good() == "signed with site.pem"


def test_a_hidden_file_is_no_key(node):
    """Editors and ConfigMaps leave such files behind: nobody meant them as keys."""
    node.sign()
    (node.keys / "site.pem").rename(node.keys / ".site.pem")
    assert "there is no key" in node.refused()


def test_without_a_keys_directory_no_key_counts_wherever_the_process_was_started(node, monkeypatch):
    node.sign()
    monkeypatch.chdir(node.keys)
    trust = Trust(str(node.root), TrustMode.SIGNED, None)
    with pytest.raises(NotPermittedError, match="no key in FPGA_PLUGIN_KEYS_DIR"):
        trust.check(FILE, KNOWN)


def test_what_is_wrong_with_the_keys_is_told_once(node):
    write(node.keys / "bad.pem", b"no key")
    with capture_logs() as told:
        node.sign()
        node.good()
        node.good()
    assert [one["event"] for one in told] == ["a key is left out"]
    for path in node.keys.iterdir():
        path.unlink()
    with capture_logs() as told:
        node.refused()
        node.refused()
    assert [one["event"] for one in told] == ["no keys: no bitstream is trusted"]


@pytest.mark.parametrize("mode", TrustMode)
def test_what_is_installed_is_compared_with_what_the_manifest_names(node, mode):
    """`bitstream install` puts nothing in the place of the file that the manifest means."""
    node.manifest(1, FILE)
    trust = Trust(str(node.root), mode, str(node.keys))
    trust.check_named(FILE, KNOWN)
    trust.check_named(FILE.replace("1", "2"), content_of(b"of which it says nothing"))
    with pytest.raises(NotPermittedError, match="SHA-256"):
        trust.check_named(FILE, content_of(b"another"))
    with pytest.raises(NotPermittedError, match="bytes where"):
        trust.check_named(FILE, content_of(b"one of another length"))


def test_a_manifest_that_cannot_be_used_changes_the_version_and_raises_nothing(node):
    """Whoever compares versions hears of the refusal when the file is judged."""
    node.manifest(1, FILE)
    before = node.trust.version(FILE)
    node.put(b"{")
    broken = node.trust.version(FILE)
    node.manifest(1, FILE)
    assert broken != before
    node.good()


def test_the_time_that_is_left_to_a_manifest_is_told_to_the_end(node, clock):  # noqa: F811  # a fixture
    """The index waits that long: what expires is judged again at that moment."""
    node.manifest(1, FILE)
    node.good()
    assert node.trust.seconds_left() is None, "it has no end"
    node.manifest(2, FILE, expires=NOW + timedelta(seconds=60))
    node.good()
    assert node.trust.seconds_left() == 60
    clock.time = NOW + timedelta(seconds=59.5)
    assert node.trust.seconds_left() == 0.5
    clock.time = NOW + timedelta(seconds=60)
    assert node.trust.seconds_left() is None, "it is over: there is nothing to wait for"
    node.refused()


def test_a_manifest_that_nobody_signed_is_not_noted_as_seen(node):
    """Else whoever can write the store makes the operator's own manifests older ones."""
    node.manifest(5, FILE)
    assert node.good()
    node.manifest(9, FILE, signed=False)
    assert "no manifest.json.sig" in node.refused()
    node.manifest(6, FILE)
    assert node.good()


@pytest.mark.parametrize("mode", [TrustMode.ANY, TrustMode.SIGNED])
def test_a_manifest_that_comes_to_lead_nowhere_is_noticed(node, mode):
    """A link whose target was taken away is a manifest that cannot be read, and no missing one."""
    node.sign()
    trust = Trust(str(node.root), mode, str(node.keys))
    trust.check(FILE, KNOWN)
    (node.root / "manifest.json").symlink_to("nowhere")
    with pytest.raises(NotPermittedError, match="leads nowhere"):
        trust.check(FILE, KNOWN)
    (node.root / "manifest.json").unlink()
    trust.check(FILE, KNOWN)


def test_the_end_of_a_manifest_that_is_gone_is_not_waited_for(node, clock):  # noqa: F811  # a fixture
    node.manifest(2, FILE, expires=NOW + timedelta(seconds=60))
    node.good()
    assert node.trust.seconds_left() == 60
    node.remove()
    node.refused()
    assert node.trust.seconds_left() is None


def test_what_a_manifest_is_worth_is_told_once_each_time_that_it_changes(node, clock):  # noqa: F811  # a fixture
    def told() -> list[dict]:
        with capture_logs() as lines:
            for _ in range(2):
                with contextlib.suppress(NotPermittedError):
                    node.trust.check(FILE, KNOWN)
        return [{k: v for k, v in one.items() if k != "hint"} for one in lines]

    end = NOW + timedelta(days=1)
    node.manifest(1, FILE, expires=end)
    in_force = {"event": "the manifest is in force", "log_level": "info", "key": "site.pem"}
    assert told() == [in_force | {"version": 1, "expires": in_utc(end)}]
    node.manifest(2, FILE)
    assert told() == [in_force | {"version": 2, "expires": None}]
    node.manifest(1, FILE)
    (line,) = told()
    assert line["event"] == "the manifest does not count as signed"
    assert "older than version 2" in line["reason"]
    node.put(b"{")
    (line,) = told()
    assert line["event"] == "nothing of the store is trusted"
    node.manifest(2, FILE)
    assert told() == [in_force | {"version": 2, "expires": None}]


def test_a_manifest_that_cannot_be_noted_is_not_used_and_that_is_told(node, monkeypatch):
    """Invariant 4: a record that cannot be written would let an older manifest in later."""
    monkeypatch.setattr(
        seen_module, "write_atomically", mock.Mock(side_effect=BitstreamError("disk is full"))
    )
    node.manifest(1, FILE)
    with capture_logs() as told, pytest.raises(NotFinishedError, match="disk is full"):
        node.trust.check(FILE, KNOWN)
    (line,) = told
    assert "disk is full" in line["reason"]


def test_a_signature_is_good_wherever_the_file_that_is_installed_lies(node, tmp_path):
    """A download in /tmp, which others may write: what it is, the signature says."""
    file = tmp_path / "image.gbs"
    write(file, CONTENT)
    node.sign()
    (node.root / f"{FILE}.sig").rename(tmp_path / "image.gbs.sig")
    os.chmod(tmp_path / "image.gbs.sig", 0o666)
    assert check_signed(str(file), FILE, KNOWN, str(node.keys)) == "signed with site.pem"
    with pytest.raises(NotPermittedError):
        check_signed(str(file), FILE.replace("1", "2"), KNOWN, str(node.keys))
