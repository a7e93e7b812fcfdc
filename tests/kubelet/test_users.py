"""Programs that do not run as root, by docs/devices.md: the kernel makes ports' nodes for root."""

from collections.abc import Callable

from machine import STAY, Runtime, until
from node import Node, Pod, container

OPENS = '(exec 3<>"$FPGA_DEVICE_1") && echo opened; ' + STAY


def unprivileged(node: Node, name: str) -> Pod:
    """A pod of user 1000 that tries to open its port."""
    user = {"runAsUser": 1000, "runAsGroup": 1000, "runAsNonRoot": True}
    pod = node.pod(name, container(command=f"exec 2>&1; {OPENS}", securityContext=user))
    pod.until_running()
    return pod


def test_another_user_than_root_opens_his_port_only_if_the_runtime_gives_it_to_him(
    make_node: Callable[..., Node], runtime: Runtime
) -> None:
    node = make_node("1x2")
    refused = unprivileged(node, "refused")
    until(lambda: "Permission denied" in refused.output(), "the node is root's")
    with runtime.own_devices():
        served = unprivileged(node, "served")
        until(lambda: served.output() == "opened", "the node is the container's user's")
