"""What a node remembers of signed manifests: no older one, none at all, and no clock undoes it."""

import hashlib
import os
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from test_signatures import FILE, INTERFACE, public_pem, signature, write

from fpga_plugin.bitstreams import seen_manifests as seen_module
from fpga_plugin.bitstreams import trust as trust_module
from fpga_plugin.bitstreams.files import Content
from fpga_plugin.bitstreams.manifest import ManifestFile, parse_manifest, write_manifest
from fpga_plugin.bitstreams.seen_manifests import SEEN, Seen, SeenManifests
from fpga_plugin.bitstreams.trust import Trust
from fpga_plugin.errors import BitstreamError, NotFinishedError, NotPermittedError
from fpga_plugin.settings.settings import TrustMode

OTHER = f"{INTERFACE}/{'b' * 32}.gbs"
CONTENT = b"content"
KNOWN = Content(hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))
NOW = datetime(2026, 11, 22, 1, 30, tzinfo=UTC)


class Node:
    """A store, its keys, and the plugin's lives on one node."""

    def __init__(self, folder):
        self.root = folder / "store"
        self.keys = folder / "keys"
        self.state = folder / "state"
        (self.root / INTERFACE).mkdir(parents=True)
        self.keys.mkdir()
        self.state.mkdir()
        self.key = Ed25519PrivateKey.generate()
        write(self.keys / "site.pem", public_pem(self.key))
        self.trust = self.life()

    def life(self, *, owner=True) -> Trust:
        """Begin another run of the plugin; or look, as a command does."""
        seen = SeenManifests(str(self.state), owner=owner)
        return Trust(str(self.root), TrustMode.SIGNED, str(self.keys), seen=seen)

    def manifest(self, version, *paths, signed=True, **rest) -> bytes:
        files = [ManifestFile(path, KNOWN.sha256, KNOWN.size) for path in paths]
        data = write_manifest(files, version=version, **rest)
        self.put(data)
        if not signed:
            (self.root / "manifest.json.sig").unlink()
        return data

    def put(self, data: bytes) -> None:
        write(self.root / "manifest.json", data)
        write(self.root / "manifest.json.sig", signature(self.key, "manifest.json", data))

    def remove(self) -> None:
        for name in ("manifest.json", "manifest.json.sig"):
            (self.root / name).unlink()

    def sign(self, path=FILE) -> None:
        write(self.root / f"{path}.sig", signature(self.key, path, CONTENT))

    def good(self, path=FILE) -> str:
        return self.trust.check(path, KNOWN)

    def refused(self, path=FILE) -> str:
        with pytest.raises(NotPermittedError) as caught:
            self.trust.check(path, KNOWN)
        assert caught.value.hint
        return str(caught.value)


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


@pytest.fixture
def clock(monkeypatch):
    class Clock(datetime):
        time = NOW

        @classmethod
        def now(cls, tz=None):
            return cls.time.astimezone(tz)

    monkeypatch.setattr(trust_module, "datetime", Clock)
    return Clock


def test_an_older_manifest_with_its_good_signature_is_refused(node):
    old = node.manifest(5, FILE)
    assert node.good()
    node.manifest(6, FILE, OTHER)
    assert node.good(OTHER)
    node.put(old)
    told = node.refused()
    assert "its version 5 is older than version 6, which this node has seen" in told
    assert "--manifest-version 7" in told
    node.trust = node.life()
    assert "older" in node.refused()
    node.manifest(7, FILE)
    assert node.good()


def test_two_manifests_of_one_version_are_not_both_believed(node):
    node.manifest(5, FILE)
    assert node.good()
    node.manifest(5, FILE, OTHER)
    assert "another manifest of the same version 5" in node.refused()


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("how", ["removed", "unsigned", "dropped"])
def test_what_a_signed_manifest_once_named_is_refused_without_it(node, how, restarted):
    node.sign()
    node.manifest(5, FILE)
    assert node.good()
    if how == "removed":
        node.remove()
    else:
        node.manifest(6, *([FILE] if how == "unsigned" else [OTHER]), signed=how == "dropped")
    if restarted:
        node.trust = node.life()
    assert "revoked: a signed manifest named it once" in node.refused()
    node.manifest(7, FILE)
    assert node.good()


def test_a_signed_file_that_no_manifest_ever_named_is_trusted_beside_one(node):
    node.sign()
    node.manifest(5, OTHER)
    assert node.good() == "signed with site.pem"
    node.remove()
    assert node.good() == "signed with site.pem"


def test_a_manifest_is_noted_before_anything_that_it_names_is_used(node, monkeypatch):
    """The disk is full: nothing is trusted that the next life would not know of."""
    node.manifest(5, FILE)

    def full(*_args, **_kwargs):
        raise BitstreamError("no space left", hint="make room")

    with monkeypatch.context() as patch:
        patch.setattr(seen_module, "write_atomically", full)
        with pytest.raises(NotFinishedError, match=r"note its version: no space left: make room"):
            node.good()
        with pytest.raises(NotFinishedError):
            node.good()
    assert node.good()


def test_a_record_that_is_up_to_date_need_not_be_written(node, monkeypatch):
    node.manifest(5, FILE)
    assert node.good()
    monkeypatch.setattr(seen_module, "write_atomically", None)
    node.trust = node.life()
    assert node.good()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"format": 2}',
        b'{"version": -1}',
        b'{"version": 1, "more": 1}',
        b'{"named": "x"}',
    ],
)
def test_a_record_that_is_damaged_or_of_a_later_plugin_trusts_nothing(node, content):
    node.sign(OTHER)
    node.manifest(5, FILE)
    write(node.state / SEEN, content)
    for path in (FILE, OTHER):
        told = node.refused(path)
        assert "damaged, or of a later version of the plugin" in told
        assert "fpga-plugin bitstream forget" in told
    SeenManifests(str(node.state), owner=False).forget()
    assert node.good()
    assert node.good(OTHER)


def test_a_record_that_is_removed_while_it_is_in_use_is_put_back(node):
    node.manifest(5, FILE)
    assert node.good()
    (node.state / SEEN).unlink()
    node.manifest(4, FILE)
    assert "older than version 5" in node.refused()
    node.trust = node.life()
    assert "older than version 5" in node.refused()


def test_a_lost_state_directory_costs_the_memory_and_not_the_blank(node):
    """`test_signatures` has the blank; here: the node begins again, as a new one would."""
    node.sign()
    node.manifest(5, FILE)
    assert node.good()
    node.remove()
    (node.state / SEEN).unlink()
    node.trust = node.life()
    assert node.good() == "signed with site.pem"
    blank = f"{INTERFACE}/blank.gbs"
    node.sign(blank)
    assert "a blank bitstream's own signature does not count" in node.refused(blank)


def test_whoever_only_looks_judges_by_the_record_and_leaves_it_alone(node):
    node.manifest(5, FILE)
    assert node.good()
    before = (node.state / SEEN).read_bytes()
    node.trust = node.life(owner=False)
    node.manifest(6, FILE)
    assert node.good()
    assert (node.state / SEEN).read_bytes() == before
    node.manifest(4, FILE)
    assert "older than version 5" in node.refused()


def test_a_record_that_may_not_be_looked_at_is_not_a_missing_one(node, monkeypatch):
    def denied(_path, **_rest):
        raise PermissionError(13, "Permission denied")

    node.manifest(5, FILE)
    monkeypatch.setattr(seen_module.os, "stat", denied)
    with pytest.raises(NotPermittedError, match="cannot be looked at: Permission denied"):
        SeenManifests(str(node.state), owner=False).get()
    with pytest.raises(NotPermittedError):
        SeenManifests(str(node.state), owner=False).forget()


def test_forgetting_begins_anew_and_a_plugin_that_runs_takes_it_up(node):
    node.sign()
    node.manifest(5, FILE)
    assert node.good()
    node.remove()
    assert node.refused()
    command = SeenManifests(str(node.state), owner=False)
    assert command.forget().version == 5
    assert command.forget() == Seen()
    assert node.good() == "signed with site.pem"
    node.manifest(3, FILE)
    assert node.good()
    assert "version" not in os.listdir(node.state)


def test_nothing_to_forget_is_no_error(tmp_path):
    assert SeenManifests(str(tmp_path / "none"), owner=False).forget() == Seen()
    assert SeenManifests(None, owner=False).forget() == Seen()
    assert not (tmp_path / "none").exists()


def test_an_expired_manifest_counts_no_more_from_that_moment_on(node, clock):
    node.sign()
    node.manifest(5, FILE, expires=NOW + timedelta(days=1))
    before = node.trust.version(FILE)
    assert node.good()
    assert node.trust.seconds_left() == 24 * 60 * 60
    clock.time = NOW + timedelta(days=1)
    assert node.trust.version(FILE) != before
    told = node.refused()
    assert "expired at 2026-11-23T01:30:00Z" in told
    assert "the clock says 2026-11-23T01:30:00Z" in told
    assert node.trust.seconds_left() is None
    node.manifest(6, FILE, expires=NOW + timedelta(days=30))
    assert node.good()


@pytest.mark.parametrize("restarted", [False, True])
def test_a_clock_that_is_put_back_does_not_make_an_expired_manifest_good(node, clock, restarted):
    node.manifest(5, FILE, expires=NOW + timedelta(days=1))
    clock.time = NOW + timedelta(days=2)
    assert "expired" in node.refused()
    clock.time = NOW
    if restarted:
        node.trust = node.life()
    assert "its clock was put back" in node.refused()
    clock.time = datetime(1970, 1, 1, tzinfo=UTC)
    assert "its clock was put back" in node.refused()
    node.manifest(6, FILE)
    assert node.good()


def test_with_too_many_names_to_remember_only_what_the_manifest_names_is_trusted(node, monkeypatch):
    monkeypatch.setattr(seen_module, "_MAX_NAMED", 1)
    node.sign()
    node.manifest(5, OTHER)
    assert node.good() == "signed with site.pem"
    node.manifest(6, f"{INTERFACE}/{'c' * 32}.gbs")
    node.trust.check(f"{INTERFACE}/{'c' * 32}.gbs", KNOWN)
    assert "revoked" in node.refused()


def test_the_record_is_the_plugins_alone(node):
    node.manifest(5, FILE)
    assert node.good()
    assert (node.state / SEEN).stat().st_mode & 0o777 == 0o600


def test_a_path_that_a_manifest_revokes_is_remembered_as_named(node):
    manifest = parse_manifest(write_manifest([], version=2, revoked=[FILE]), where="m")
    seen = SeenManifests(str(node.state), owner=True)
    assert seen.admit(manifest, "a" * 64, NOW).has_named(FILE)
