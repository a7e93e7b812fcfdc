"""Kubelet's record of claims: what it says, that it says nothing, and what is not understood."""

import json
import os

import pytest

from fpga_plugin.kubernetes.kubelet.dra_record import FILE_NAME, RecordUnreadableError, read_record
from fpga_plugin.kubernetes.names import ClaimUid

DRIVER = "fpga.intel.com"


def ours(driver, _devices):
    return driver == DRIVER


def write(root, claims, **other):
    data = json.dumps({"kind": "DRACheckpoint", "ClaimInfoStateList": claims} | other)
    (root / FILE_NAME).write_text(json.dumps({"Data": data, "Checksum": 1}))


def claim(uid="u-1", driver=DRIVER, pods=None, devices=()):
    return {
        "ClaimUID": uid,
        "ClaimName": "c",
        "Namespace": "default",
        "PodUIDs": {"p-1": {}} if pods is None else pods,
        "DriverState": {
            driver: {"Devices": [{"DeviceName": d, "RequestNames": ["r"]} for d in devices]}
        },
    }


def test_our_claims_are_read_and_others_are_passed_over(tmp_path):
    write(tmp_path, [claim(devices=["d"]), claim("u-2", "gpu.example.com")])
    (found,) = read_record(str(tmp_path), ours).values()
    assert (found.uid, found.namespace, found.name) == ("u-1", "default", "c")
    assert found.pods == {"p-1"}
    assert found.devices == {"d": ("r",)}


def test_a_claim_that_is_only_about_to_be_prepared_is_known(tmp_path):
    write(tmp_path, [claim()])
    assert read_record(str(tmp_path), ours)[ClaimUid("u-1")].devices == {}
    write(tmp_path, [claim() | {"DriverState": {DRIVER: None}}])
    assert read_record(str(tmp_path), ours).keys() == {"u-1"}


def test_no_file_and_no_claims_are_none(tmp_path):
    assert read_record(str(tmp_path), ours) == {}
    write(tmp_path, None)
    assert read_record(str(tmp_path), ours) == {}


def test_what_is_not_understood_says_nothing(tmp_path):
    path = tmp_path / FILE_NAME
    for text in ("", "{}", '{"Data": "{}"}', '{"Data": {}}', "[" * 10000):
        path.write_text(text)
        with pytest.raises(RecordUnreadableError):
            read_record(str(tmp_path), ours)
    for wrong in ({"ClaimUID": "../x"}, {"Namespace": ""}, {"PodUIDs": {"a/b": {}}}):
        write(tmp_path, [claim() | wrong])
        with pytest.raises(RecordUnreadableError, match="not understood"):
            read_record(str(tmp_path), ours)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RecordUnreadableError, match="no file"):
        read_record(str(tmp_path), ours)
