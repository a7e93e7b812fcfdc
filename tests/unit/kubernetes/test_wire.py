"""Decoded messages have the types of their definition, or are refused at the edge."""

import dataclasses
import inspect
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpga_plugin.errors import InvalidRequestError
from fpga_plugin.kubernetes.grpc.codec import Codec
from fpga_plugin.kubernetes.grpc.wire import well_typed
from fpga_plugin.kubernetes.kubelet.podsapi import decode
from fpga_plugin.kubernetes.messages import core_v1, v1, v1alpha1, v1beta1


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
def test_a_message_of_the_right_types_is_well_typed(message):
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
        # One number's record written as a packed list's is:
        (v1beta1.ContainerPreferredAllocationRequest, b"\x1a\x02\x01\x02"),
        (v1beta1.ContainerPreferredAllocationRequest, b"\x1a\x00"),
        (v1beta1.PreferredAllocationRequest, b"\x0a\x03\x1a\x01\x01"),  # ... inside
        (v1beta1.DevicePluginOptions, b"\x0a\x01\x01"),  # a truth
        (v1alpha1.WatchPodsEvent, b"\x0a\x01\x01"),  # an enumeration
        (core_v1.Time, b"\x0a\x01\x01"),
    ],
)
def test_a_message_of_other_types_is_not_well_typed(kind, raw):
    try:
        message = kind.parse(raw)
    except Exception:  # noqa: BLE001  # betterproto2 raises many types: refused there already
        return
    assert not well_typed(message)


def test_a_pod_whose_name_is_a_number_is_not_understood():
    with pytest.raises(ValueError, match="another type"):
        decode(b"\x0a\x02\x08\x01")


def test_a_list_in_place_of_a_number_is_the_callers_mistake():
    with pytest.raises(InvalidRequestError, match="a field of it is of another type"):
        Codec().decode(b"\x0a\x03\x1a\x01\x01", v1beta1.PreferredAllocationRequest)


MESSAGES = [
    kind
    for package in (core_v1, v1, v1alpha1, v1beta1)
    for kind in vars(package).values()
    if inspect.isclass(kind) and dataclasses.is_dataclass(kind)
]
SCALARS = {
    "str": str,
    "int": int,
    "bool": int,
    "bytes": bytes,
    "EventType": int,
    "HealthStatus": int,
}


def varint(number: int) -> bytes:
    head = bytes([number & 0x7F | (0x80 if number > 0x7F else 0)])
    return head + varint(number >> 7) if number > 0x7F else head


def record(number: int, wire_type: int, content: bytes) -> bytes:
    """One field; of a number the content's first byte counts, of a group nothing does."""
    head = varint(number << 3 | wire_type)
    match wire_type:
        case 0:
            return head + varint(content[0] if content else 0)
        case 1:
            return head + content.ljust(8, b"\0")[:8]
        case 2:
            return head + varint(len(content)) + content
        case 5:
            return head + content.ljust(4, b"\0")[:4]
        case _:
            return head


records = st.builds(
    record,
    st.integers(1, 25),
    st.sampled_from((0, 1, 2, 2, 2, 3, 4, 5)),
    st.deferred(lambda: st.binary(max_size=6) | contents),
)
contents = st.lists(records, max_size=4).map(b"".join)


def check(message) -> None:
    """Each value is what the field's annotation says, read without what `well_typed` reads."""
    for field in dataclasses.fields(message):
        if field.name.startswith("_"):
            continue
        value, hint = getattr(message, field.name), field.type
        if match := re.fullmatch(r'"?dict\[str, (.*)\]"?', hint):
            assert all(type(key) is str for key in value)
            values, hint = list(value.values()), match[1]
        elif match := re.fullmatch(r"list\[(.*)\]", hint):
            assert type(value) is list
            values, hint = value, match[1]
        elif match := re.fullmatch(r"(.*) \| None", hint):
            values, hint = [] if value is None else [value], match[1]
        else:
            values = [value]
        for each in values:
            if hint.strip('"') in SCALARS:
                assert isinstance(each, SCALARS[hint.strip('"')]), (message, field.name)
            else:
                check(each)


@given(st.sampled_from(MESSAGES), contents)
def test_what_is_well_typed_has_the_types_that_it_is_annotated_with(kind, raw):
    try:
        message = kind.parse(raw)
    except Exception:  # noqa: BLE001  # betterproto2 raises many types: refused there already
        return
    if well_typed(message):
        check(message)
        bytes(message)
