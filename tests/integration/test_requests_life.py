"""What a container may ask for, row by row (docs/requests.md), down to what the card holds."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest
from daemon_support import (
    AFU,
    AFU_2,
    AFU_3,
    BLANK,
    CARD,
    CARD_2,
    CARDS,
    ID,
    NO_REQUEST,
    OTHER_BLANK,
    OTHER_ID,
    OTHER_REGIONS,
    P0,
    P1,
    REGIONS,
    Node,
    Refused,
    request,
)

UNKNOWN = "0123456789abcdef0123456789abcdef"


def dashed(text: str) -> str:
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Node(f"1x2,1x1@{OTHER_ID}").up() as node:
        yield node


@dataclass(frozen=True)
class Row:
    """A container's variables, its devices, and what comes of it.

    Attributes:
        env: the container's variables.
        gives: what the devices hold afterwards, in device order.
        status: instead: how it is refused.
        words: what the refusal's message says, among other things.
        devices: of `resource`.
    """

    env: Mapping[str, str]
    gives: tuple[str, ...] = ()
    status: str = ""
    words: tuple[str, ...] = ()
    devices: tuple[str, ...] = (P0,)
    resource: str = field(default=REGIONS)


def good(
    env: Mapping[str, str], *gives: str, devices: tuple[str, ...] = (P0,), resource: str = REGIONS
) -> Row:
    return Row(env, gives, devices=devices, resource=resource)


def bad(
    status: str,
    env: Mapping[str, str],
    *words: str,
    devices: tuple[str, ...] = (P0,),
    resource: str = REGIONS,
) -> Row:
    return Row(env, (), status, words, devices, resource)


BOTH = (P0, P1)
WRONG, NOT_FOUND, REFUSED = "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION"

ROWS = {
    # What is granted.
    "the KEP's names": good(request(), AFU),
    "the Intel plugin's name": good({"FPGA_REGION_0": ID, "FPGA_AFU_0": AFU_2}, AFU_2),
    "both names, equal": good(request() | {"FPGA_AFU_1": dashed(AFU)}, AFU),
    "ids in upper case": good(request(AFU.upper(), interface=ID.upper()), AFU),
    "ids with dashes": good(request(dashed(AFU), interface=dashed(ID)), AFU),
    "ids with dashes in mixed case": good(request(dashed(AFU).title(), interface=dashed(ID)), AFU),
    "a suffix of letters": good(request(n="the_Left_1"), AFU),
    "an underscore for a suffix": good(request(n="_"), AFU),
    "a long suffix": good(request(n="x" * 200), AFU),
    "other variables": good(request() | {"FPGA_DEVICE_X": "", "FPGA_FOO_1": "", "FPGA": "1"}, AFU),
    "no request": good(NO_REQUEST, BLANK),
    "no request for two": good(NO_REQUEST, BLANK, BLANK, devices=BOTH),
    "fewer requests than devices": good(request(), AFU, BLANK, devices=BOTH),
    "requests in order of number": good(
        request(AFU_2, n="10") | request(AFU, n="9"), AFU, AFU_2, devices=BOTH
    ),
    "numbers before other suffixes": good(
        request(AFU_2, n="A") | request(AFU, n="99999999999999999999"), AFU, AFU_2, devices=BOTH
    ),
    "equal numbers in order of text": good(
        request(AFU_2, n="1") | request(AFU, n="01"), AFU, AFU_2, devices=BOTH
    ),
    "the same bitstream twice": good(
        request(AFU, n="1") | request(AFU, n="2"), AFU, AFU, devices=BOTH
    ),
    "a request for another resource's devices too": good(
        request(AFU_3, interface=OTHER_ID, n="0") | request(AFU), AFU
    ),
    "and that resource's call": good(
        request(AFU_3, interface=OTHER_ID, n="0") | request(AFU),
        AFU_3,
        devices=(f"{CARD_2}-p0",),
        resource=OTHER_REGIONS,
    ),
    "a whole card": good(request(), AFU, BLANK, devices=(CARD,), resource=CARDS),
    "a whole card's second region": good(
        request(AFU, n="1") | request(AFU_2, n="2"), AFU, AFU_2, devices=(CARD,), resource=CARDS
    ),
    "all parameters": good(request(params="debug=1,clock=10"), AFU),
    "the fastest clock": good(request(params="clock=1000"), AFU),
    # What is malformed.
    "a region alone": bad(WRONG, {"FPGA_REGION_1": ID}, "FPGA_REGION_1", "FPGA_BITSTREAM_ID_1"),
    "a bitstream alone": bad(WRONG, {"FPGA_BITSTREAM_ID_1": AFU}, "FPGA_REGION_1"),
    "an AFU alone": bad(WRONG, {"FPGA_AFU_1": AFU}, "FPGA_REGION_1"),
    "parameters alone": bad(WRONG, {"FPGA_DRIVER_PARAMS_1": "clock=10"}, "FPGA_REGION_1"),
    "suffixes that do not meet": bad(
        WRONG, {"FPGA_REGION_1": ID, "FPGA_BITSTREAM_ID_01": AFU}, "FPGA_"
    ),
    "a malformed variable beside a good request": bad(
        WRONG, request() | {"FPGA_REGION_2": "x"}, "FPGA_REGION_2"
    ),
    "syntax comes before everything": bad(
        WRONG, request(UNKNOWN) | {"FPGA_AFU_2": "x"}, "FPGA_AFU_2"
    ),
    "both names, different": bad(WRONG, request() | {"FPGA_AFU_1": AFU_2}, "FPGA_AFU_1"),
    "an empty region": bad(WRONG, request(interface=""), "FPGA_REGION_1", "empty"),
    "an empty bitstream": bad(WRONG, request(""), "FPGA_BITSTREAM_ID_1", "empty"),
    "empty parameters": bad(
        WRONG, request() | {"FPGA_DRIVER_PARAMS_1": ""}, "FPGA_DRIVER_PARAMS_1", "empty"
    ),
    "no suffix": bad(WRONG, {"FPGA_REGION_": ID, "FPGA_BITSTREAM_ID_": AFU}, "FPGA_"),
    "a suffix with a dash": bad(WRONG, request(n="a-b"), "a-b"),
    "a suffix of foreign digits": bad(WRONG, request(n="\N{FULLWIDTH DIGIT ONE}"), "FPGA_"),
    "an id with a dash astray": bad(WRONG, request(AFU[:4] + "-" + AFU[4:]), "FPGA_BITSTREAM_ID_1"),
    "an id with a blank": bad(WRONG, request(f" {AFU}"), "FPGA_BITSTREAM_ID_1"),
    "an id with a line break": bad(WRONG, request(f"{AFU}\n"), "FPGA_BITSTREAM_ID_1"),
    "an id that is a path": bad(WRONG, request("../blank"), "FPGA_BITSTREAM_ID_1", "../blank"),
    "the word blank": bad(WRONG, request("blank"), "FPGA_BITSTREAM_ID_1"),
    "an id with 0x": bad(WRONG, request("0x" + AFU[2:]), "FPGA_BITSTREAM_ID_1"),
    "a long value": bad(WRONG, request("z" * 100_000), "FPGA_BITSTREAM_ID_1", "z" * 64),
    "no UTF-8 to speak of": bad(WRONG, request("\x00\x1b[31mé"), "FPGA_BITSTREAM_ID_1"),
    "parameters with a blank": bad(WRONG, request(params="clock=10, debug=1"), "PARAMS_1"),
    "a parameter without a value": bad(WRONG, request(params="clock"), "PARAMS_1"),
    "a parameter with an empty value": bad(WRONG, request(params="clock="), "PARAMS_1"),
    "a comma at the end": bad(WRONG, request(params="clock=10,"), "PARAMS_1"),
    "a parameter twice": bad(WRONG, request(params="clock=10,clock=10"), "PARAMS_1", "twice"),
    "an unknown parameter": bad(WRONG, request(params="voltage=1"), "PARAMS_1", "voltage"),
    "a clock below the limit": bad(WRONG, request(params="clock=9"), "PARAMS_1", "10", "1000"),
    "a clock above the limit": bad(WRONG, request(params="clock=1001"), "PARAMS_1", "1000"),
    "a clock that is no number": bad(WRONG, request(params="clock=fast"), "PARAMS_1"),
    "a clock with a sign": bad(WRONG, request(params="clock=+100"), "PARAMS_1"),
    "a clock with a fraction": bad(WRONG, request(params="clock=100.5"), "PARAMS_1"),
    "debug neither 0 nor 1": bad(WRONG, request(params="debug=2"), "PARAMS_1", "debug"),
    # What does not fit.
    "another interface id": bad(WRONG, request(AFU_3, interface=OTHER_ID), OTHER_ID, ID),
    "an unknown interface id": bad(WRONG, request(interface=UNKNOWN), UNKNOWN, ID),
    "an unknown bitstream": bad(NOT_FOUND, request(UNKNOWN), UNKNOWN),
    "an unknown AOCX": bad(NOT_FOUND, request("ab" * 20), "ab" * 20),
    "a bitstream of another interface": bad(NOT_FOUND, request(OTHER_BLANK), OTHER_BLANK),
    "more requests than devices": bad(
        REFUSED, request(AFU, n="1") | request(AFU_2, n="2"), "FPGA_REGION_2", "2", "1"
    ),
    "more requests than a card has regions": bad(
        REFUSED,
        request(AFU, n="1") | request(AFU, n="2") | request(AFU, n="3"),
        "FPGA_REGION_3",
        devices=(CARD,),
        resource=CARDS,
    ),
    "one of two bitstreams unknown": bad(
        NOT_FOUND, request(AFU) | request(UNKNOWN, n="2"), UNKNOWN, devices=BOTH
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_request_is_answered_as_documented(name: str, node: Node) -> None:
    row, kubelet = ROWS[name], node.kubelet
    before = node.state()
    kubelet.allocate(*row.devices, resource=row.resource)
    try:
        if not row.status:
            kubelet.prestart(*row.devices, env=row.env, resource=row.resource)
            held = tuple(
                node.afu(region) for region in sorted(before) if region.startswith(row.devices)
            )
            assert held == row.gives
            return
        with pytest.raises(Refused) as refused:
            kubelet.prestart(*row.devices, env=row.env, resource=row.resource)
        assert refused.value.code == row.status
        text = refused.value.message
        assert all(word in text for word in row.words), text
        assert len(text.encode()) < 1024
        assert text.isprintable()
        assert "z" * 65 not in text
        # Nothing was touched, and the same container may start when it asks for what is right.
        assert node.state() == before
    finally:
        node.give_back(*row.devices, resource=row.resource)


def test_region_and_whole_card_of_one_interface_in_one_container_are_refused() -> None:
    with Node("2x1").up() as node:
        answers = [
            ("uid-1", "app", REGIONS, [P0], node.kubelet.allocate(P0)),
            ("uid-1", "app", CARDS, [CARD_2], node.kubelet.allocate(CARD_2, resource=CARDS)),
        ]
        node.kubelet.checkpoint(*answers)
        for device, resource in ((P0, REGIONS), (CARD_2, CARDS)):
            with pytest.raises(Refused, match=ID) as refused:
                node.kubelet.prestart(device, env=request(), resource=resource)
            assert refused.value.code == "FAILED_PRECONDITION"
        assert {node.afu(region) for region in node.state()} == {BLANK}


def test_a_kubelet_that_never_sent_an_environment_is_taken_for_one_that_cannot() -> None:
    with Node().up() as node:
        node.kubelet.allocate(P0)
        with pytest.raises(Refused) as refused:
            node.kubelet.prestart(P0, env={})
        assert refused.value.code == "UNAVAILABLE"
        # Once it has sent one, an empty one means that there is no request.
        node.kubelet.prestart(P0, env=request())
        node.kubelet.prestart(P0, env={})
        assert node.afu(P0) == BLANK


def test_a_bitstream_that_is_broken_or_for_another_card_is_refused_with_its_path() -> None:
    with Node() as node:
        folder = node.own_store() / ID
        (folder / f"{AFU}.gbs").write_bytes(b"Xeon" + (folder / f"{AFU}.gbs").read_bytes())
        (folder / f"{AFU_2}.gbs").write_bytes((folder / f"{AFU_3}.gbs").read_bytes())
        node.up()
        node.kubelet.allocate(P0)
        for afu in (AFU, AFU_2):
            with pytest.raises(Refused, match=afu) as refused:
                node.kubelet.prestart(P0, env=request(afu))
            assert refused.value.code == "FAILED_PRECONDITION"
        assert node.afu(P0) == BLANK
        node.kubelet.prestart(P0, env=request(AFU_3))
        assert node.afu(P0) == AFU_3


def test_a_blank_that_is_needed_and_gone_is_named() -> None:
    with Node() as node:
        blank = node.own_store() / ID / "blank.gbs"
        node.up()
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request())
        blank.unlink()
        with pytest.raises(Refused, match=str(blank)) as refused:
            node.kubelet.prestart(P0, env=NO_REQUEST)
        assert refused.value.code == "FAILED_PRECONDITION"
        assert node.afu(P0) == AFU
