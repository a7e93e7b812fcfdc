"""What a tenant or a careless operator may throw at the daemon as a process: it serves on."""

import gzip
import os
from pathlib import Path

import grpc
import pytest
from daemon_support import AFU, AFU_2, ID, LIMIT, NO_REQUEST, P0, REGIONS, Node, Refused, request
from doubles.bitstreams import elf, gbs

from fpga_plugin.ids import parse_afu_id

SAMPLE_HASH = "583046af95883bdc653bc8fcede570d756ac30d9"
HASHES = ("0123456789abcdef0123456789abcdef01234567", "f" * 40)


def put_aocx(store: Path, name: str, kernel: bytes) -> None:
    """An AOCX file; all of them have one AFU id."""
    afu = parse_afu_id(AFU)
    data = gbs(bytes.fromhex(afu) + kernel, afu)
    binary = elf((".acl.gbs.gz", gzip.compress(data, mtime=0)))
    new = store / ID / "new"
    new.write_bytes(elf((".acl.rand_hash", name.encode()), (".acl.fpga.bin", binary)))
    new.chmod(0o644)
    new.rename(store / ID / f"{name}.aocx")


def refusal(node: Node, bitstream: str) -> Refused:
    with pytest.raises(Refused) as caught:
        node.kubelet.prestart(P0, env=request(bitstream))
    return caught.value


def test_aocx_files_have_one_afu_id_and_are_programmed_anew_each_time():
    node = Node()
    store = node.own_store()
    for number, name in enumerate(HASHES):
        put_aocx(store, name, b"kernel %d" % number)
    with node.up():
        node.kubelet.allocate(P0)
        for name in (HASHES[0], HASHES[0], HASHES[1]):  # a restart; another kernel in the same pod
            since = node.plugin.mark
            node.kubelet.prestart(P0, env=request(name))
            assert node.afu(P0) == AFU
            # The port's AFU id said so before: that is no reason to leave a region as it is.
            assert node.steps(P0, since).count("program") == 1
            assert node.plugin.logged("prepared", since)[0]["bitstreams"] == {P0: name}
        refused = refusal(node, "e" * 40)
        assert refused.code == "NOT_FOUND"
        assert f"{'e' * 40}.aocx" in refused.message


def test_the_sample_stores_aocx_file_is_programmed():
    with Node().up() as node:
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request(SAMPLE_HASH))
        assert node.afu(P0) == AFU
        node.plugin.until_logged("prepared", bitstreams={P0: SAMPLE_HASH})


def test_an_aocx_that_was_tampered_with_is_refused_and_the_other_one_is_served():
    node = Node()
    store = node.own_store()
    for number, name in enumerate(HASHES):
        put_aocx(store, name, b"kernel %d" % number)
    with node.up():
        node.kubelet.allocate(P0)
        data = bytearray((store / ID / f"{HASHES[0]}.aocx").read_bytes())
        data[data.index(b"\x1f\x8b\x08") + 40] ^= 1
        (store / ID / "new").write_bytes(data)
        since = node.plugin.mark
        (store / ID / "new").rename(store / ID / f"{HASHES[0]}.aocx")
        assert ".aocx" in node.plugin.until_logged("bitstream refused", since)["reason"]
        refused = refusal(node, HASHES[0])
        assert refused.code == "FAILED_PRECONDITION"
        node.kubelet.prestart(P0, env=request(HASHES[1]))


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited field of a protobuf message."""
    size, length = len(content), b""
    while size > 0x7F:
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


def _prestart(env: dict[bytes, bytes]) -> bytes:
    """A PreStartContainerRequest, with bytes where protobuf promises text."""
    entries = (_field(1, name) + _field(2, text) for name, text in env.items())
    return _field(1, P0.encode()) + b"".join(_field(2, entry) for entry in entries)


GOOD = {name.encode(): value.encode() for name, value in request(AFU_2).items()}


def hostile() -> dict[str, bytes]:
    """By name; 40 MB, and so made only where they are sent."""
    return {
        "bytes that are no UTF-8": _prestart({**GOOD, b"FPGA_AFU_1": b"\xff\xfe"}),
        "a name that is no UTF-8": _prestart({**GOOD, b"FPGA_AFU_\xff": AFU.encode()}),
        "an overlong slash": _prestart({**GOOD, b"FPGA_AFU_1": b"..\xc0\xaf"}),
        "a surrogate": _prestart({**GOOD, b"FPGA_AFU_1": b"\xed\xa0\x80"}),
        "nul": _prestart({**GOOD, b"FPGA_AFU_1": b"\0" * 32}),
        "a path": _prestart({**GOOD, b"FPGA_BITSTREAM_ID_1": b"../../../../etc/passwd"}),
        "a path to a blank": _prestart({**GOOD, b"FPGA_BITSTREAM_ID_1": b"blank"}),
        "a line break in a name": _prestart({**GOOD, b"FPGA_AFU_1\n": AFU.encode()}),
        "terminal codes": _prestart({**GOOD, b"FPGA_DRIVER_PARAMS_1": b"\x1b[31mclock=1"}),
        "a value of 3 MB": _prestart({**GOOD, b"FPGA_DRIVER_PARAMS_1": b"a" * 3_000_000}),
        "sixty thousand requests": _prestart(
            {f"FPGA_REGION_{n}".encode(): ID.encode() for n in range(30_000)}
            | {f"FPGA_AFU_{n}".encode(): AFU.encode() for n in range(30_000)}
        ),
        "a value of 30 MB": _prestart({**GOOD, b"FPGA_DRIVER_PARAMS_1": b"a" * 30_000_000}),
        "a name of 3 MB": _prestart({**GOOD, b"FPGA_REGION_" + b"/" * 3_000_000: b"x"}),
        "thirty thousand requests": _prestart(
            {f"FPGA_REGION_{n}".encode(): ID.encode() for n in range(30_000)}
        ),
        "a device that is a number": b"\x08\1",
        "a device that is a group": b"\x0b\x0c",
        "an entry whose name is a number": _prestart(GOOD) + _field(2, b"\x08\1"),
        "a cut message": _prestart(GOOD)[:-3],
        "an entry without a name": _prestart({**GOOD, b"FPGA_REGION_": b"x"}),
        "an entry whose value is a number": _prestart(GOOD)
        + _field(2, _field(1, b"FPGA_AFU_1") + b"\x10\1"),
        "no devices": b"",
        "a device that is a path": _field(1, b"../../etc/passwd"),
        "a device that is no UTF-8": _field(1, b"\xff"),
        "a device of 3 MB": _field(1, b"0" * 3_000_000),
        "a hundred thousand devices": _field(1, P0.encode()) * 100_000,
    }


@pytest.mark.long
def test_whatever_a_prestart_carries_is_refused_and_the_next_one_is_served():
    with Node().up() as node:
        node.kubelet.allocate(P0)
        call = node.kubelet.endpoint(REGIONS).channel.unary_unary(
            "/v1beta1.DevicePlugin/PreStartContainer"
        )
        for name, message in hostile().items():
            with pytest.raises(grpc.RpcError) as caught:
                call(message, timeout=LIMIT)
            told = caught.value.details() or ""
            codes = {"INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"}
            assert caught.value.code().name in codes, (name, told)
            assert len(told.encode()) < 1024, name
            assert told.isprintable(), name
            node.kubelet.prestart(P0, env=request(AFU))
            assert node.afu(P0) == AFU
        assert node.plugin.process.poll() is None
        for line in node.plugin.raw:
            assert line.isascii()
            assert len(line) < 10_000
        node.kubelet.prestart(P0, env=NO_REQUEST)


@pytest.mark.parametrize(
    "size",
    [
        b"\x1a\x01\x01",  # a packed list of one
        b"\x1a\x02\x01\x01",
        b"\x1a\x00",
        b"\x1b\x1c",  # a group
        b"\x1d\1\0\0\0",  # four bytes
        b"\x1a\x02\xff\xff",  # a list that is cut off within a number
    ],
)
def test_a_preferred_allocation_whose_size_is_no_number_is_refused(size):
    with Node().up() as node:
        call = node.kubelet.endpoint(REGIONS).channel.unary_unary(
            "/v1beta1.DevicePlugin/GetPreferredAllocation"
        )
        with pytest.raises(grpc.RpcError) as caught:
            call(_field(1, _field(1, P0.encode()) + size), timeout=LIMIT)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert _field(1, P0.encode()) in call(
            _field(1, _field(1, P0.encode()) + b"\x18\1"), timeout=20
        )


def test_variables_that_are_made_of_each_other_do_not_fill_the_plugins_memory():
    """Kubelet expands `$(A)$(A)` before it calls: a few lines may become any number of bytes."""
    with Node().up() as node:
        node.kubelet.allocate(P0)
        call = node.kubelet.endpoint(REGIONS).channel.unary_unary(
            "/v1beta1.DevicePlugin/PreStartContainer"
        )
        message = _prestart({**GOOD, b"LAUGHS": b"ha" * 100_000_000})
        with pytest.raises(grpc.RpcError) as caught:
            call(message, timeout=LIMIT)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "at most 4194304 are read: the container's environment" in caught.value.details()
        status = Path(f"/proc/{node.plugin.process.pid}/status").read_text()
        (peak,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
        assert int(peak) < 100 * 1024  # KiB: half of the message, and a fifth of the chart's limit
        node.kubelet.prestart(P0, env=request(AFU) | {"LARGE": "x" * 3_000_000})
        assert node.afu(P0) == AFU


def test_a_store_of_odd_names_costs_nobody_their_bitstream():
    node = Node()
    directory = os.fsencode(node.own_store() / ID)
    odd = (
        b"\xff\xfe.gbs",
        b"\n.gbs",
        b"\x1b[31m.gbs",
        b"a" * 250 + b".gbs",
        b"..gbs.gbs",
        b"-.aocx",
    )
    for name in odd:
        with open(directory + b"/" + name, "wb") as file:
            file.write(b"x")
    os.mkfifo(directory + b"/" + b"a" * 32 + b".gbs")
    os.symlink("/dev/zero", directory + b"/" + b"b" * 32 + b".gbs")
    with node.up():
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request(AFU))
        for name in ("a" * 32, "b" * 32):
            refused = refusal(node, name)
            assert refused.code == "FAILED_PRECONDITION"
            assert "not a regular file" in refused.message
        node.kubelet.prestart(P0, env=request(AFU_2))
        node.plugin.signal.until(
            lambda: len(node.plugin.logged("bitstream refused")) >= len(odd), "all are refused"
        )
        assert all(line.isascii() for line in node.plugin.raw)
