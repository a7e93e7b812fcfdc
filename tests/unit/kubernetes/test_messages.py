"""The generated messages against Google's own protobuf: same bytes, same values, every message."""

import dataclasses
import filecmp
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import betterproto2
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from grpc_tools import protoc
from hypothesis import given, settings
from hypothesis import strategies as st

import fpga_plugin.kubernetes
from fpga_plugin.kubernetes.generate import PROTOS, generate
from fpga_plugin.kubernetes.messages import core_v1, pluginregistration, v1, v1alpha1, v1beta1
from fpga_plugin.kubernetes.messages.k8s.io.kubelet.pkg.apis.dra import v1 as dra_v1
from fpga_plugin.kubernetes.messages.message_pool import default_message_pool

API = Path(fpga_plugin.kubernetes.__file__).parent

# Values by field number; None for a submessage or optional field that is not set.
Values = Mapping[int, Any]


@cache
def google_pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    with tempfile.TemporaryDirectory() as folder:
        for name in PROTOS:
            compiled = Path(folder) / name
            arguments = ["protoc", f"-I{API}", f"--descriptor_set_out={compiled}", name]
            assert protoc.main(arguments) == 0
            for file in descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes()).file:
                pool.Add(file)
    return pool


@cache
def every_message() -> dict[str, Descriptor]:
    """All messages of all .proto files, nested ones included, but for the entries of maps."""
    found: dict[str, Descriptor] = {}
    waiting = [
        message
        for name in PROTOS
        for message in google_pool().FindFileByName(name).message_types_by_name.values()
    ]
    while waiting:
        message = waiting.pop()
        waiting += message.nested_types
        if not message.GetOptions().map_entry:
            found[message.full_name] = message
    return found


def ours(message: Descriptor) -> type[betterproto2.Message]:
    return default_message_pool.url_to_type[f"type.googleapis.com/{message.full_name}"]


SCALARS = {
    FieldDescriptor.TYPE_STRING: st.text(),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=40),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT64: st.integers(0, 2**64 - 1),
}


ENUMS = {
    "v1alpha1.EventType": v1alpha1.EventType,
    "v1alpha1.HealthStatus": v1alpha1.HealthStatus,
    "v1.HealthStatus": v1.HealthStatus,
}


def map_of_messages(field: FieldDescriptor) -> Descriptor | None:
    """What a map's values are, where they are messages."""
    return field.message_type.fields[1].message_type if is_map(field) else None


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


@cache
def values(message: Descriptor) -> st.SearchStrategy[dict[int, Any]]:
    return st.fixed_dictionaries({field.number: field_values(field) for field in message.fields})


def field_values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if is_map(field):
        key, value = field.message_type.fields
        of = values(value.message_type) if value.message_type else SCALARS[value.type]
        return st.dictionaries(SCALARS[key.type], of, max_size=4)
    if field.message_type is not None:
        one: st.SearchStrategy[Any] = values(field.message_type)
    elif field.enum_type is not None:
        one = st.sampled_from(sorted(field.enum_type.values_by_number))
    else:
        one = SCALARS[field.type]
    if field.is_repeated:
        return st.lists(one, max_size=3)
    return st.none() | one if field.has_presence else one


def as_google(message: Descriptor, given_values: Values) -> Message:
    made = message_factory.GetMessageClass(message)()
    for field in message.fields:
        value = given_values[field.number]
        if value is None:
            continue
        if (of := map_of_messages(field)) is not None:
            for key, part in value.items():
                getattr(made, field.name)[key].CopyFrom(as_google(of, part))
        elif is_map(field):
            getattr(made, field.name).update(value)
        elif field.message_type is not None:
            many = value if field.is_repeated else [value]
            parts = [as_google(field.message_type, each) for each in many]
            if field.is_repeated:
                getattr(made, field.name).extend(parts)
            else:
                getattr(made, field.name).CopyFrom(parts[0])
        elif field.is_repeated:
            getattr(made, field.name).extend(value)
        else:
            setattr(made, field.name, value)
    return made


def as_ours(message: Descriptor, given_values: Values) -> betterproto2.Message:
    kind = ours(message)
    names = {field.metadata["betterproto"].number: field.name for field in dataclasses.fields(kind)}
    assert set(names) == {field.number for field in message.fields}
    arguments: dict[str, Any] = {}
    for field in message.fields:
        value = given_values[field.number]
        if (of := map_of_messages(field)) is not None:
            value = {key: as_ours(of, part) for key, part in value.items()}
        elif value is not None and field.message_type is not None and not is_map(field):
            if field.is_repeated:
                value = [as_ours(field.message_type, each) for each in value]
            else:
                value = as_ours(field.message_type, value)
        elif field.enum_type is not None:
            value = ENUMS[field.enum_type.full_name](value)
        arguments[names[field.number]] = value
    return kind(**arguments)


def has_order_to_choose(message: Descriptor, given_values: Values) -> bool:
    """Whether a map in it has several entries: protobuf leaves their order to the writer."""
    for field in message.fields:
        value = given_values[field.number]
        if is_map(field):
            of = map_of_messages(field)
            if len(value) > 1 or (of and any(has_order_to_choose(of, v) for v in value.values())):
                return True
        elif value is not None and field.message_type is not None:
            parts = value if field.is_repeated else [value]
            if any(has_order_to_choose(field.message_type, part) for part in parts):
                return True
    return False


@pytest.mark.parametrize("name", sorted(every_message()))
@settings(max_examples=max(10, settings.default.max_examples // 5))
@given(data=st.data())
def test_a_message_is_the_same_for_google(name, data):
    message = every_message()[name]
    given_values = data.draw(values(message))
    google, mine = as_google(message, given_values), as_ours(message, given_values)
    wire = google.SerializeToString(deterministic=True)
    if not has_order_to_choose(message, given_values):
        assert bytes(mine) == wire
    assert ours(message).parse(wire) == mine
    assert bytes(ours(message).parse(wire)) == wire
    assert type(google).FromString(bytes(mine)) == google
    assert type(google).FromString(bytes(mine)).SerializeToString(deterministic=True) == wire


def package_of(module: ModuleType) -> str:
    return module.__name__.removeprefix("fpga_plugin.kubernetes.messages.")


def test_no_message_is_left_out():
    names = set(every_message())
    registered = {
        url.removeprefix("type.googleapis.com/") for url in default_message_pool.url_to_type
    }
    assert names == registered
    assert len(names) > 30


@pytest.mark.parametrize(
    "package", [v1beta1, v1, v1alpha1, core_v1, pluginregistration, dra_v1], ids=package_of
)
def test_every_method_is_generated_with_its_types(package):
    bases = {
        name.removesuffix("Base"): getattr(package, name)
        for name in package.__all__
        if name.endswith("Base")
    }
    services = {
        service.name: service
        for name in PROTOS
        for service in google_pool().FindFileByName(name).services_by_name.values()
        if service.file.package == package_of(package)
    }
    # betterproto2 writes an acronym in its own way.
    assert {name.lower() for name in bases} == {name.lower() for name in services}
    spelled = {name.lower(): base for name, base in bases.items()}
    for name, service in services.items():
        generated = spelled[name.lower()]().__mapping__()
        assert {
            f"/{service.full_name}/{method.name}": (
                ours(method.input_type),
                ours(method.output_type),
                method.server_streaming,
            )
            for method in service.methods
        } == {
            path: (handler.request_type, handler.reply_type, handler.cardinality.server_streaming)
            for path, handler in generated.items()
        }


@pytest.mark.parametrize(
    ("message", "wire"),
    [
        # As k8s.io/kubelet v0.37.2 has them (dra/v1, pluginregistration/v1, dra-health/v1).
        (dra_v1.Claim(namespace="a", uid="b", name="c"), "0a01611201621a0163"),
        (dra_v1.Device(request_names=["a"], cdi_device_ids=["b"]), "0a0161220162"),
        (dra_v1.Device(pool_name="a", device_name="b", share_id=""), "1201611a01622a00"),
        (
            dra_v1.NodePrepareResourcesResponse(
                claims={"u": dra_v1.NodePrepareResourceResponse(error="e")}
            ),
            "0a080a01751203120165",
        ),
        (
            pluginregistration.PluginInfo(
                type="a", name="b", endpoint="c", supported_versions=["d"]
            ),
            "0a01611201621a0163220164",
        ),
        (
            v1.DeviceHealth(health=v1.HealthStatus.UNHEALTHY, health_check_timeout_seconds=3),
            "10022003",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_numbers_of_the_dra_are_upstreams(message, wire):
    assert bytes(message).hex() == wire


def test_the_options_of_all_kinds_of_kubelet_are_four_numbers():
    options = v1beta1.DevicePluginOptions(
        pre_start_required=True,
        get_preferred_allocation_available=True,
        post_stop_required=True,
        deallocate_required=True,
    )
    assert bytes(options).hex() == "0801100118012001"


def test_an_unset_submessage_is_not_an_empty_one():
    assert bytes(v1beta1.Device(id="a")) == b"\x0a\x01a"
    node_zero = v1beta1.TopologyInfo(nodes=[v1beta1.NumaNode(id=0)])
    assert bytes(v1beta1.Device(id="a", topology=node_zero)) == b"\x0a\x01a\x1a\x02\x0a\x00"
    assert v1beta1.Device.parse(b"\x0a\x01a").topology is None


def test_unknown_fields_of_later_kubelets_are_skipped():
    later = bytes(v1beta1.DeallocateRequest()) + b"\xfa\x7f\x03abc"
    assert v1beta1.DeallocateRequest.parse(later).container_requests == []


def test_what_is_checked_in_is_what_the_generator_makes(tmp_path):
    generate(tmp_path)
    made = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    there = {
        path.relative_to(API / "messages")
        for path in (API / "messages").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert made == there
    _, different, errors = filecmp.cmpfiles(
        tmp_path, API / "messages", map(str, made), shallow=False
    )
    assert (different, errors) == ([], [])
