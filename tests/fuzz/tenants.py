"""What a tenant chooses: variables, ids, names."""

from contextlib import suppress

from doubles.cards import AFU, INTERFACE
from target import Target, pairs

from fpga_plugin import ids
from fpga_plugin.allocation.requests.environment import request_variables
from fpga_plugin.allocation.requests.parse import (
    NamedBitstream,
    assign,
    check_limits,
    parse_requests,
)
from fpga_plugin.errors import FpgaPluginError, InvalidRequestError
from fpga_plugin.hardware.backend import ClockLimits
from fpga_plugin.ids import ours
from fpga_plugin.kubernetes.names import PodUid, parse_name, parse_pod_uid, parse_resource
from fpga_plugin.kubernetes.pod import Container, Pod, Reference, Variable
from fpga_plugin.policy.rules import parse_pattern

_CARD = ids.CardId("0000-10-00.0")
_REGIONS = {ids.region_id(_CARD, port): INTERFACE for port in (0, 1)}


def _requests(data: bytes) -> None:
    with suppress(FpgaPluginError):
        requests = parse_requests(pairs(data))
        for request in requests:
            assert ids.parse_interface_id(request.interface_id) == request.interface_id
            parse = ids.parse_bitstream_id
            if isinstance(request.bitstream_id, NamedBitstream):
                parse = ids.parse_alias
            assert parse(str(request.bitstream_id)) == str(request.bitstream_id)
        for region, request in assign(requests, _REGIONS).items():
            if request is not None:
                check_limits(request, ClockLimits(10, 1000), region)


def _ids(data: bytes) -> None:
    text = data.decode(errors="surrogateescape")
    for read in (
        *(ids.parse_device_id, ids.parse_bitstream_id, ids.parse_hex128),
        lambda text: str(ids.PciAddress.parse(text)),
    ):
        with suppress(ValueError):
            value = read(text)
            assert value.isascii()
            assert not set(value) - set("0123456789abcdef-.:p")
    for name in (parse_pod_uid, parse_name, parse_pattern):
        with suppress(ValueError):
            value = name(text)
            assert value.isascii()
            assert "/" not in value
            assert value not in {".", ".."}
    with suppress(ValueError):
        assert parse_resource(text, ours("fpga.intel.com")).count("/") == 1


def _environment(data: bytes) -> None:
    """Variables made of each other, by kubelet's rules; a name that begins with `<`: a field."""
    env = tuple(
        Variable(name[1:], source=Reference(field=value))
        if name[:1] == "<"
        else Variable(name, value)
        for name, value in pairs(data).items()
    )
    container = Container("c", env)
    pod = Pod(
        namespace="n",
        name="p",
        uid=PodUid("u"),
        labels={"l": "v"},
        annotations={"a": "$(X)"},
        containers=(container,),
    )
    with suppress(InvalidRequestError):
        for name, value in request_variables(pod, container).env.items():
            assert name.startswith("FPGA_")
            assert len(value) <= 4096


_NAMES = tuple(
    f"{name}1={value}".encode()
    for name, value in (
        ("FPGA_REGION_", INTERFACE),
        ("FPGA_BITSTREAM_ID_", AFU),
        ("FPGA_AFU_", "ab" * 20),
        ("FPGA_DRIVER_PARAMS_", "clock=400,debug=1"),
    )
)

TARGETS = {
    "requests": Target(_requests, (b"\0".join(_NAMES[:2] + _NAMES[3:]), _NAMES[0]), _NAMES),
    "ids": Target(
        _ids,
        (b"0000-10-00.0-p0", AFU.encode(), b"ab" * 20, b"kube-system", b"fpga.intel.com/region-a"),
    ),
    "environment": Target(
        _environment,
        (
            b"X=a\0FPGA_REGION_1=$(X)$$(X)$(X",
            b"<FPGA_AFU_1=metadata.annotations['a']\0FPGA_REGION_1=$(FPGA_AFU_1)",
        ),
        (b"$(X)", b"$$", b"$(", b"FPGA_REGION_1=", b"metadata.labels['l']", b"spec.nodeName"),
    ),
}
