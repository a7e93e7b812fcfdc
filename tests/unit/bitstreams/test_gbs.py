"""The strict reader of GBS files."""

import copy
import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpga_plugin.bitstreams.byte_range import ByteRange
from fpga_plugin.bitstreams.gbs import GUID, HEAD_BYTES, MAX_METADATA_BYTES, read_gbs
from fpga_plugin.errors import BitstreamError
from fpga_plugin.ids import parse_afu_id, parse_interface_id

INTERFACE = parse_interface_id("ce489693-98f0-5f33-946d-560708be108a")
AFU = parse_afu_id("d8424dc4-a4a3-c413-f89e-433683f9040b")
IMAGE = bytes.fromhex(AFU) + b"\0rest of the image"

# In the form in which OPAE's packager writes it.
DOCUMENT = {
    "version": 1,
    "platform-name": "DCP",
    "afu-image": {
        "magic-no": 488605312,
        "interface-uuid": "CE489693-98F0-5F33-946D-560708BE108A",
        "power": 50,
        "clock-frequency-high": 312.5,
        "clock-frequency-low": "auto-156.25",
        "afu-top-interface": {"class": "ccip_std_afu", "module-ports": [{"class": "x"}]},
        "accelerator-clusters": [
            {
                "accelerator-type-uuid": "d8424dc4-a4a3-c413-f89e-433683f9040b",
                "name": "nlb_400",
                "total-contexts": 1,
            }
        ],
    },
}


def gbs(document=DOCUMENT, image: bytes = IMAGE) -> bytes:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return GUID + len(text).to_bytes(4, "little") + text + image


def parse_gbs(data: bytes, *, where: str) -> SimpleNamespace:
    contents = read_gbs(ByteRange.of_bytes(data[:HEAD_BYTES], where, size=len(data)))
    return SimpleNamespace(metadata=contents.details, image=contents.image(data).data)


def changed(path: str, value: object) -> bytes:
    """A GBS file with one field set; `...` takes the field out."""
    document = copy.deepcopy(DOCUMENT)
    *parents, last = path.split("/")
    target = document
    for part in parents:
        target = target[int(part) if part.isdigit() else part]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return gbs(document)


def refusal(data: bytes) -> str:
    with pytest.raises(BitstreamError) as caught:
        parse_gbs(data, where="/store/a.gbs")
    assert caught.value.message.startswith("/store/a.gbs: ")
    return str(caught.value)


def test_a_file_of_opaes_packager_is_read_whole():
    read = parse_gbs(gbs(), where="a")

    assert read.image == IMAGE
    metadata = read.metadata
    assert (metadata.interface_id, metadata.afu_id) == (INTERFACE, AFU)
    assert (metadata.version, metadata.platform_name, metadata.power) == (1, "DCP", 50)
    assert (metadata.clock_frequency_high, metadata.clock_frequency_low) == (312.5, "auto-156.25")
    assert metadata.top_interface == "ccip_std_afu"
    (accelerator,) = metadata.accelerators
    assert (accelerator.name, accelerator.total_contexts) == ("nlb_400", 1)


def test_what_the_schema_leaves_out_may_be_absent():
    document = copy.deepcopy(DOCUMENT)
    del document["platform-name"]
    for name in ("power", "clock-frequency-high", "clock-frequency-low", "afu-top-interface"):
        del document["afu-image"][name]

    metadata = parse_gbs(gbs(document), where="a").metadata

    assert metadata.afu_id == AFU
    assert (metadata.power, metadata.clock_frequency_high, metadata.top_interface) == (None,) * 3


@pytest.mark.parametrize("version", [1, 640, 650])
def test_the_versions_that_mean_the_same_are_read(version):
    assert parse_gbs(changed("version", version), where="a").metadata.version == version


def test_of_several_accelerators_the_first_is_what_the_port_shows():
    first = DOCUMENT["afu-image"]["accelerator-clusters"][0]
    second = {**first, "accelerator-type-uuid": "0" * 31 + "1", "name": "second"}
    data = changed("afu-image/accelerator-clusters", [first, second])
    metadata = parse_gbs(data, where="a").metadata
    assert metadata.afu_id == AFU
    assert [cluster.name for cluster in metadata.accelerators] == ["nlb_400", "second"]


def test_every_accelerator_of_several_has_a_proper_id():
    first = DOCUMENT["afu-image"]["accelerator-clusters"][0]
    data = changed(
        "afu-image/accelerator-clusters", [first, {**first, "accelerator-type-uuid": "../x"}]
    )
    assert "accelerator-clusters[1].accelerator-type-uuid: '../x'" in refusal(data)


def test_a_name_the_schema_lacks_is_ignored():
    assert parse_gbs(changed("afu-image/vendor", {"x": 1}), where="a").metadata.afu_id == AFU


def test_metadata_may_be_as_long_as_opae_accepts_and_no_longer():
    def padded(length: int) -> bytes:
        text = json.dumps(DOCUMENT).encode()
        return gbs(text + b" " * (length - len(text)))

    assert parse_gbs(padded(MAX_METADATA_BYTES), where="a").image == IMAGE
    assert "byte 16 is 8192; 1 to 8191" in refusal(padded(MAX_METADATA_BYTES + 1))


@pytest.mark.parametrize("length", range(20))
def test_a_file_shorter_than_the_header_is_refused(length):
    assert f"{length} bytes" in refusal(gbs()[:length])


def test_another_guid_is_refused_with_what_is_there():
    message = refusal(b"\xff" * 100)
    assert "ff" * 16 in message
    assert "OPAE's packager" in message


def test_empty_metadata_are_refused():
    assert "byte 16 is 0" in refusal(gbs(b""))


def test_metadata_beyond_the_end_of_the_file_are_refused():
    data = GUID + (100).to_bytes(4, "little") + b"{}"
    assert "byte 120, but the file has 22 bytes" in refusal(data)


def test_a_file_without_an_image_is_refused():
    assert "no image" in refusal(gbs(image=b""))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'{"version": 1,}', "not JSON at byte "),
        (b'{"version": 1} x', "not JSON at byte 35"),
        ("\N{SNOWMAN}".encode(), "not JSON at byte 20"),
        ('{"\N{SNOWMAN}" x'.encode(), "not JSON at byte 27"),
        (b"[]", "not a JSON object"),
        (b'"text"', "not a JSON object"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 27"),
        (b'{"a": NaN}', "NaN"),
        (b'{"version": 1, "version": 1}', "'version' is there twice"),
        (b'{"a": [{"b": 1, "c": 2, "b": 3}]}', "'b' is there twice"),
        (b"[" * 5000, "too deeply|not JSON"),  # how deep is too deep varies with Python
        (b'{"a": ' + b"9" * 5000 + b"}", "too long"),
        (b'{"version": "\\ud800"}', "schema|JSON"),
    ],
)
def test_what_is_no_json_object_is_refused_with_its_place(text, expected):
    message = refusal(gbs(text))
    assert any(part in message for part in expected.split("|")), message


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("version", ..., "`version`"),
        ("version", "1", "at `$.version`"),
        ("version", True, "at `$.version`"),
        ("version", 2, "2 - at `$.version`"),
        ("platform-name", 7, "at `$.platform-name`"),
        ("afu-image", [], "at `$.afu-image`"),
        ("afu-image/magic-no", ..., "`magic-no`"),
        ("afu-image/magic-no", 488605313, "488605313 - at `$.afu-image.magic-no`"),
        ("afu-image/interface-uuid", ..., "`interface-uuid`"),
        ("afu-image/interface-uuid", 5, "at `$.afu-image.interface-uuid`"),
        ("afu-image/interface-uuid", "../../etc", "$.afu-image.interface-uuid: '../../etc'"),
        ("afu-image/interface-uuid", "f" * 32, "all ones"),
        ("afu-image/power", -1, ">= 0 - at `$.afu-image.power`"),
        ("afu-image/power", "5", "at `$.afu-image.power`"),
        ("afu-image/clock-frequency-high", "fast", "at `$.afu-image.clock-frequency-high`"),
        ("afu-image/clock-frequency-low", -5, ">= 0 - at `$.afu-image.clock-frequency-low`"),
        ("afu-image/afu-top-interface", "ccip", "at `$.afu-image.afu-top-interface`"),
        ("afu-image/accelerator-clusters", ..., "`accelerator-clusters`"),
        ("afu-image/accelerator-clusters", [], ">= 1 - at `$.afu-image.accelerator-clusters`"),
        (
            "afu-image/accelerator-clusters",
            [*DOCUMENT["afu-image"]["accelerator-clusters"], {"accelerator-type-uuid": "x"}],
            "at `$.afu-image.accelerator-clusters[1]`",
        ),
        ("afu-image/accelerator-clusters/0/name", ..., "`name`"),
        (
            "afu-image/accelerator-clusters/0/total-contexts",
            -1,
            ">= 0 - at `$.afu-image.accelerator-clusters[0].total-contexts`",
        ),
        (
            "afu-image/accelerator-clusters/0/accelerator-type-uuid",
            "d8424dc4a4a3",
            "$.afu-image.accelerator-clusters[0].accelerator-type-uuid: 'd8424dc4a4a3'",
        ),
        (
            "afu-image/accelerator-clusters/0/accelerator-type-uuid",
            "F" * 32,
            "all ones",
        ),
    ],
)
def test_what_does_not_fit_the_schema_is_refused_with_its_path(path, value, expected):
    assert expected in refusal(changed(path, value))


@pytest.mark.parametrize(
    ("start", "what"),
    [
        ((0x1D1F8680).to_bytes(4, "little"), "legacy"),
        ((0xB6EAFD19).to_bytes(4, "little"), "PACSign"),
        (b"xclbin2\0", "xclbin"),
        (b"\x7fELF\x02\x01\x01", "AOCX"),
    ],
)
def test_other_containers_are_recognised_however_short_the_file(start, what):
    for rest in (b"", b"\0" * 2000):
        with pytest.raises(BitstreamError) as caught:
            parse_gbs(start + rest, where="a")
        assert what in caught.value.message
        assert caught.value.hint


@pytest.mark.parametrize(
    ("image", "what"),
    [
        (b"\x19\xfd\xea\xb6" + bytes(1020), "signed with PACSign"),
        (b"\x80\x86\x1f\x1d" + bytes(16), "a legacy GBS"),
        (b"xclbin2\0", "an xclbin"),
        (b"\x7fELF\2\1", "an ELF file"),
        (gbs(), "a GBS file"),
    ],
)
def test_an_image_that_is_a_container_itself_is_refused(image, what):
    assert f"the image at byte {len(gbs()) - len(IMAGE)} is no raw one but {what}" in refusal(
        gbs(image=image)
    )


def test_a_container_in_place_of_the_image_shows_by_the_head_of_the_longest_metadata_too():
    padding = MAX_METADATA_BYTES - len(json.dumps({**DOCUMENT, "x": ""}))
    data = gbs({**DOCUMENT, "x": "y" * padding}, GUID + bytes(5000))
    assert len(data) - 5000 == HEAD_BYTES
    with pytest.raises(BitstreamError, match="no raw one but a GBS file"):
        read_gbs(ByteRange.of_bytes(data[:HEAD_BYTES], "a", size=len(data)))


@pytest.mark.parametrize("text", ["auto-....", "auto-", "auto-1.", "auto-.5", "Auto", "auto-1e3"])
def test_a_frequency_that_is_open_names_a_number_or_none(text):
    message = refusal(changed("afu-image/clock-frequency-high", text))
    assert "matching regex" in message
    assert " - at `$.afu-image.clock-frequency-high`" in message


def test_no_more_than_64_characters_of_a_file_are_quoted():
    long = "x" * 2000
    for path in (
        "afu-image/interface-uuid",
        "afu-image/accelerator-clusters/0/accelerator-type-uuid",
        long,
    ):
        data = changed(path, long)
        if path == long:
            data = gbs(b'{"' + long.encode() + b'": 1, "' + long.encode() + b'": 1}')
        message = refusal(data)
        assert "x" * 64 in message
        assert "x" * 65 not in message


def test_control_characters_of_a_file_do_not_reach_the_message():
    assert "\x1b" not in refusal(changed("afu-image/interface-uuid", "\x1b[31m"))


def test_the_header_is_read_without_the_image():
    data = gbs(image=bytes(HEAD_BYTES))
    contents = read_gbs(ByteRange.of_bytes(data[:HEAD_BYTES], "a", size=len(data)))
    assert contents.image_bytes == HEAD_BYTES


@settings(deadline=None)  # machines are slow at times
@given(st.binary(max_size=300))
def test_any_bytes_give_a_value_or_a_bitstream_error(data):
    for candidate in (data, GUID + data, gbs(data), gbs(b"{" + data + b"}")):
        try:
            parse_gbs(candidate, where="a")
        except BitstreamError as error:
            assert len(error.message) < 500  # noqa: PT017 - no error is right as well


@settings(deadline=None)  # machines are slow at times
@given(
    at=st.integers(0, len(gbs()) - 1),
    cut=st.integers(0, 8),
    put=st.binary(max_size=8),
)
def test_a_damaged_file_gives_a_value_or_a_bitstream_error(at, cut, put):
    data = gbs()
    try:
        read = parse_gbs(data[:at] + put + data[at + cut :], where="a")
    except BitstreamError as error:
        assert len(str(error)) <= 1003  # noqa: PT017 - no error is right as well
    else:
        assert read.image


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=80),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
FIELDS = [
    "version",
    "platform-name",
    "afu-image",
    *(f"afu-image/{name}" for name in DOCUMENT["afu-image"]),
    "afu-image/afu-top-interface/class",
    "afu-image/accelerator-clusters/0",
    *(
        f"afu-image/accelerator-clusters/0/{name}"
        for name in DOCUMENT["afu-image"]["accelerator-clusters"][0]
    ),
]


@settings(deadline=None)  # machines are slow at times
@given(path=st.sampled_from(FIELDS), value=JSON)
def test_any_value_in_any_field_gives_a_value_or_a_bitstream_error(path, value):
    target = copy.deepcopy(DOCUMENT)
    inner = target
    *parents, last = path.split("/")
    for part in parents:
        inner = inner[0 if part == "0" else part]
    inner[0 if last == "0" else last] = value
    try:
        metadata = parse_gbs(gbs(target), where="a").metadata
    except BitstreamError as error:
        assert len(error.message) < 500  # noqa: PT017 - no error is right as well
    else:
        assert len(metadata.afu_id) == len(metadata.interface_id) == 32
