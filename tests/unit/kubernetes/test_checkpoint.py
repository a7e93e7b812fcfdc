"""Kubelet's checkpoint: what it says, and when it says nothing."""

import base64
import json
import os

import pytest
from grpclib.const import Status
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fpga_plugin.ids import ours
from fpga_plugin.kubernetes.kubelet import checkpoint
from fpga_plugin.kubernetes.kubelet.checkpoint import (
    Checkpoint,
    CheckpointUnreadableError,
    read_checkpoint,
    read_stamp,
)
from fpga_plugin.kubernetes.kubelet.grants import CachedGrant, cached_grant
from fpga_plugin.kubernetes.messages import v1beta1

PREFIX = "fpga.intel.com"
REGION = f"{PREFIX}/region-ce48969398f05f33946d560708be108a"
UID = "7b9f0c5e-0d2a-4f7e-9a58-2f1f4f0b7c11"
STATIC = "0123456789abcdef0123456789abcdef"


def entry(uid=UID, container="app", resource=REGION, ids=None, **more):
    return {
        "PodUID": uid,
        "ContainerName": container,
        "ResourceName": resource,
        "DeviceIDs": {"0": ["0000-3b-00.0-p0"]} if ids is None else ids,
        "AllocResp": "CgA=",
    } | more


def document(*entries, registered=None):
    return {
        "Data": {"PodDeviceEntries": list(entries), "RegisteredDevices": registered or {}},
        "Checksum": 3_000_000_000,
    }


@pytest.fixture
def read(tmp_path):
    def write_and_read(content):
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        path = tmp_path / checkpoint.FILE_NAME
        path.write_bytes(raw)
        return read_checkpoint(str(path), ours(PREFIX))

    return write_and_read


def unreadable(read, content):
    with pytest.raises(CheckpointUnreadableError) as caught:
        read(content)
    assert caught.value.status is Status.UNAVAILABLE
    assert checkpoint.FILE_NAME in str(caught.value)
    return str(caught.value)


def test_ids_are_read_from_all_numa_nodes(read):
    (found,) = read(document(entry(ids={"0": ["a"], "-1": ["b"], "1": None, "2": []}))).entries
    assert found.devices == {"a", "b"}
    assert (found.pod_uid, found.container, found.resource) == (UID, "app", REGION)
    assert found.response == "CgA="


def test_the_shapes_of_kubelets_that_are_not_supported_are_unreadable(read):
    unreadable(read, document(entry(ids=["a", "b"])))  # before 1.20
    unreadable(read, document(entry())["Data"])  # before 1.10


def test_nulls_are_empty(read):
    data = {"Data": {"PodDeviceEntries": None, "RegisteredDevices": None}, "Checksum": 1}
    assert read(data).entries == ()
    null = entry() | {"DeviceIDs": None, "AllocResp": None}
    (found,) = read(document(null, registered={REGION: None})).entries
    assert found.devices == frozenset()
    assert found.response == ""


def test_unknown_fields_do_no_harm(read):
    data = document(entry(State="granted")) | {"BootID": "b1", "Version": 3}
    data["Data"]["AllDevices"] = {"x": [1]}
    found = read(data)
    assert len(found.entries) == 1
    assert found.boot_id == "b1"


def test_only_our_resources_are_told(read):
    found = read(
        document(
            entry(resource="nvidia.com/gpu"),
            entry(resource="xfpga.intel.com/region-1"),
            entry(resource="fpga.intel.com.evil/region-1"),
            entry(resource=f"{PREFIX}/af-695.d84.aVKNtusxV3qM", ids={"-1": ["dfl-port.0"]}),
            registered={"nvidia.com/gpu": ["g"], REGION: ["a", "b"]},
        )
    )
    assert [e.devices for e in found.entries] == [{"dfl-port.0"}]
    assert found.registered == {REGION: {"a", "b"}}


@pytest.mark.parametrize(
    "ids", [7, "a", ["a"], {"0": "a"}, {"0": [1]}, {"0": ["a", None]}, {"0": {"1": ["a"]}}]
)
def test_ids_of_an_unknown_shape_make_it_unreadable_only_where_they_are_ours(read, ids):
    unreadable(read, document(entry(), entry(ids=ids)))
    assert len(read(document(entry(), entry(resource="nvidia.com/gpu", ids=ids))).entries) == 1


@pytest.mark.parametrize("key", ["PodUID", "ContainerName", "ResourceName", "DeviceIDs"])
def test_an_entry_without_one_of_its_fields_makes_the_checkpoint_unreadable(read, key):
    broken = entry()
    del broken[key]
    unreadable(read, document(entry(), broken))


@pytest.mark.parametrize("uid", ["", "../x", "a/b", "a b", "a" * 65, "é", "a\n", None, 7])
def test_an_invalid_uid_makes_the_checkpoint_unreadable(read, uid):
    unreadable(read, document(entry(uid=uid)))


@pytest.mark.parametrize("container", ["", "../x", "a b", "-a", "a\n", "a" * 300])
def test_an_invalid_container_name_makes_the_checkpoint_unreadable(read, container):
    unreadable(read, document(entry(container=container)))


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a" * 64, "a\n"])
def test_an_invalid_resource_name_makes_the_checkpoint_unreadable(read, name):
    unreadable(read, document(entry(resource=f"{PREFIX}/{name}")))
    unreadable(read, document(registered={f"{PREFIX}/{name}": []}))


@pytest.mark.parametrize("uid", [UID, STATIC, "a", "A" * 64])
def test_uids_of_all_kinds_of_pods_are_taken(read, uid):
    assert read(document(entry(uid=uid))).entries[0].pod_uid == uid


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"Data": null}',
        b'{"Data": {}}',
        b'{"Data": {"RegisteredDevices": {}}}',
        b'{"Data": {"Entries": []}, "Checksum": 1}',
        b'{"Data": {"PodDeviceEntries": {}}}',
        b'{"Data": {"PodDeviceEntries": [null]}}',
        b'{"Data": {"PodDeviceEntries": []}',
        b'{"Data": {"PodDeviceEntries": [], "RegisteredDevices": []}}',
        b'{"Data": {"PodDeviceEntries": [{"PodUID": "\xff"}]}}',
        b"\0" * 100,
        b"[" * 100_000,
        b'{"Data": ' + b"[" * 100_000,
    ],
)
def test_bytes_that_are_no_checkpoint_are_unreadable(read, content):
    unreadable(read, content)


def test_a_torn_checkpoint_is_unreadable_wherever_it_is_torn(read):
    raw = json.dumps(document(entry(), entry(uid=STATIC))).encode()
    for length in range(len(raw) - 1):
        unreadable(read, raw[:length])


def test_no_file_means_no_entries(tmp_path):
    path = str(tmp_path / checkpoint.FILE_NAME)
    assert read_checkpoint(path, ours(PREFIX)) == Checkpoint()
    assert read_stamp(path) is None


def test_no_directory_does_not_mean_no_entries(tmp_path):
    path = str(tmp_path / "not-mounted" / checkpoint.FILE_NAME)
    with pytest.raises(CheckpointUnreadableError, match="FPGA_PLUGIN_KUBELET_DIR"):
        read_checkpoint(path, ours(PREFIX))
    with pytest.raises(CheckpointUnreadableError, match="not-mounted"):
        read_stamp(path)


def test_anything_but_a_regular_file_is_unreadable(tmp_path):
    path = tmp_path / checkpoint.FILE_NAME
    path.mkdir()
    with pytest.raises(CheckpointUnreadableError):
        read_checkpoint(str(path), ours(PREFIX))
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(CheckpointUnreadableError, match="is no file"):
        read_checkpoint(str(path), ours(PREFIX))
    path.unlink()
    path.symlink_to(path.name)
    with pytest.raises(CheckpointUnreadableError):
        read_checkpoint(str(path), ours(PREFIX))
    with pytest.raises(CheckpointUnreadableError):
        read_stamp(str(path))


def test_a_file_too_large_is_unreadable(read, monkeypatch):
    small = document(entry())
    monkeypatch.setattr(checkpoint, "MAX_BYTES", len(json.dumps(small)))
    assert len(read(small).entries) == 1
    assert "more than" in unreadable(read, document(entry(), entry()))


def test_a_file_that_never_holds_still_is_unreadable(read, monkeypatch):
    stamps = iter(range(100))
    monkeypatch.setattr(checkpoint, "_stamp", lambda _: (next(stamps), 0, 0))
    assert "changes while it is read" in unreadable(read, document(entry()))


def test_the_stamp_tells_a_rewrite_even_of_the_same_content(read, tmp_path):
    first = read(document(entry()))
    path = tmp_path / checkpoint.FILE_NAME
    assert read_stamp(str(path)) == first.stamp
    fresh = tmp_path / ".tmp"
    fresh.write_bytes(path.read_bytes())
    fresh.rename(path)
    second = read_checkpoint(str(path), ours(PREFIX))
    assert second.entries == first.entries
    assert second.stamp != first.stamp
    assert read_stamp(str(path)) == second.stamp


def test_holders_are_all_containers_that_hold_the_device(read):
    found = read(
        document(
            entry(container="init", ids={"0": ["a"]}),
            entry(container="app", ids={"1": ["a", "b"]}),
            entry(uid=STATIC, ids={"-1": ["c"]}),
        )
    )
    init, app, static = found.entries
    assert found.holders("a") == (init, app)
    assert found.holders("c") == (static,)
    assert found.holders("d") == ()


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["Data", "PodDeviceEntries", "RegisteredDevices", "DeviceIDs", "PodUID", REGION]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=10,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(junk)
def test_any_json_is_a_checkpoint_or_unreadable(read, content):
    try:
        found = read(content)
    except CheckpointUnreadableError:
        return
    assert found.stamp is not None


def grant_of(read, response):
    return cached_grant(read(document(entry(AllocResp=response))).entries[0])


def test_the_cached_answer_to_allocate_tells_the_nodes(read):
    answer = v1beta1.ContainerAllocateResponse(
        envs={"FPGA_DEVICE_0000_3B_00_0_P0": "/dev/dfl-port.3"},
        devices=[v1beta1.DeviceSpec("/dev/dfl-port.3", "/dev/dfl-port.3", "rw")],
    )
    assert grant_of(read, base64.b64encode(bytes(answer)).decode()) == CachedGrant(
        envs={"FPGA_DEVICE_0000_3B_00_0_P0": "/dev/dfl-port.3"},
        nodes=frozenset({"/dev/dfl-port.3"}),
    )


@pytest.mark.parametrize("response", [None, ""])
def test_without_a_cached_answer_nothing_is_said_of_nodes(read, response):
    assert grant_of(read, response) is None


@pytest.mark.parametrize(
    "response", ["x", "?", "CgA", "é", "GgMKAf8=", "AAAAGhtDUE1BP19ERkdJVjCEOf1ldisCcnc="]
)
def test_an_invalid_cached_answer_is_an_error(read, response):
    with pytest.raises(CheckpointUnreadableError, match=UID):
        grant_of(read, response)


def test_bytes_that_only_look_like_an_answer_grant_nothing(read):
    grant = grant_of(read, base64.b64encode(b"\xff" * 9).decode())
    assert grant is not None
    assert not grant.nodes
