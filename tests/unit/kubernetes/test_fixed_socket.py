"""Sockets under fixed names, and that their paths can be dialled."""

import os
import socket
from pathlib import Path

import pytest

from fpga_plugin.errors import SettingsError
from fpga_plugin.kubernetes.grpc.fixed_socket import (
    SUN_PATH,
    SocketError,
    check_length,
    listen_at,
    registry_path,
    remove_own,
)
from fpga_plugin.settings.settings import load_settings


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a path of any length
    return "a.sock"


def test_what_an_earlier_process_left_is_replaced_and_only_the_owner_may_dial(path):
    left = socket.socket(socket.AF_UNIX)
    left.bind(path)
    left.close()
    listener, _ = listen_at(path)
    with listener:
        assert os.stat(path).st_mode & 0o777 == 0o600
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)


def test_a_file_that_is_no_socket_stays(path):
    Path(path).write_text("somebody's")
    with pytest.raises(SocketError, match=r"a\.sock.*Address already in use"):
        listen_at(path)
    assert Path(path).read_text() == "somebody's"


def test_a_successors_socket_is_not_removed(path):
    first, mine = listen_at(path)
    second, others = listen_at(path)
    with first, second:
        remove_own(path, mine)
        assert Path(path).is_socket()
        remove_own(path, others)
        remove_own(path, others)
        assert not Path(path).exists()


def test_a_socket_without_its_directory_says_what_to_do(tmp_path):
    with pytest.raises(SocketError, match="mount the node's directory"):
        listen_at(str(tmp_path / "no" / "a"))


def test_the_length_is_that_of_the_kernel():
    check_length("x" * SUN_PATH, "A")
    with pytest.raises(SettingsError, match=r"108 bytes.*107.*set A"):
        check_length("x" * (SUN_PATH + 1), "A")
    with socket.socket(socket.AF_UNIX) as one, pytest.raises(OSError, match="too long"):
        one.connect("x" * (SUN_PATH + 1))


def test_a_resources_socket_is_one_file_below_kubelets_root():
    assert registry_path("/k", "a.b/region-0") == "/k/plugins_registry/a.b_region-0-reg.sock"


def test_kubelets_root_follows_its_device_plugin_directory():
    assert load_settings({}).kubelet_root == "/var/lib/kubelet"
    assert load_settings({"FPGA_PLUGIN_KUBELET_DIR": "/a/b/"}).kubelet_root == "/a"
    assert load_settings({"FPGA_PLUGIN_KUBELET_DIR": "/"}).kubelet_root == "/"
    assert load_settings({"FPGA_PLUGIN_KUBELET_ROOT": "/r"}).kubelet_root == "/r"
