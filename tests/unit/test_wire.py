"""Decoded messages have the types of their definition, or are refused at the edge."""

import pytest

from fpga_plugin.api.messages import core_v1, v1beta1
from fpga_plugin.api.wire import well_typed
from fpga_plugin.pods.podsapi import decode


@pytest.mark.parametrize(
    "message",
    [
        v1beta1.PreStartContainerRequest(),
        v1beta1.PreStartContainerRequest(devices_ids=["a"], env={"b": "c"}),
        v1beta1.PreferredAllocationRequest(
            container_requests=[
                v1beta1.ContainerPreferredAllocationRequest(["a"], ["b"], allocation_size=-1)
            ]
        ),
        core_v1.Pod(
            metadata=core_v1.ObjectMeta(name="a", namespace="b", uid="c", labels={"d": "e"}),
            spec=core_v1.PodSpec(containers=[core_v1.Container(name="f")]),
            status=core_v1.PodStatus(),
        ),
    ],
)
def test_what_was_encoded_rightly_is_well_typed(message):
    assert well_typed(type(message).parse(bytes(message)))


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        (v1beta1.PreStartContainerRequest, b"\x08\x01"),  # a number as device
        (v1beta1.PreStartContainerRequest, b"\x0b\x0c"),  # a group as device
        (v1beta1.PreStartContainerRequest, b"\x12\x05\x0a\x01a\x10\x01"),  # ... as value
        (v1beta1.PreStartContainerRequest, b"\x12\x02\x08\x01"),  # ... as name
        (v1beta1.AllocateRequest, b"\x0a\x02\x08\x01"),  # ... inside
        (v1beta1.AllocateRequest, b"\x08\x01"),  # ... in place of a message
        (core_v1.Pod, b"\x0a\x02\x08\x01"),  # as the pod's name
        (core_v1.EnvVar, b"\x0b\x0c"),  # a group as the variable's name
        (v1beta1.ContainerAllocateResponse, b"\x1b\x1c"),  # a group as device
    ],
)
def test_what_was_encoded_otherwise_is_not(kind, raw):
    try:
        message = kind.parse(raw)
    except Exception:  # noqa: BLE001  # betterproto2 raises many types: refused there already
        return
    assert not well_typed(message)


def test_a_pod_whose_name_is_a_number_is_not_understood():
    with pytest.raises(ValueError, match="another type"):
        decode(b"\x0a\x02\x08\x01")
