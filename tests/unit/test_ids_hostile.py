"""Tricks in every id, name and parameter: a value that is known to be harmless, or an error."""

import json
import os
import re
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from fpga_plugin import ids
from fpga_plugin.allocation.requests.parse import REQUEST_PREFIXES, parse_requests
from fpga_plugin.bitstreams.manifest import ManifestFile, parse_manifest, write_manifest
from fpga_plugin.bitstreams.places import all_places, place_of_path
from fpga_plugin.bitstreams.store import Store
from fpga_plugin.errors import FpgaPluginError, InvalidRequestError, SettingsError
from fpga_plugin.ids import ours
from fpga_plugin.kubernetes.names import parse_name, parse_pod_uid, parse_resource
from fpga_plugin.observability.routes import _strings
from fpga_plugin.policy.parse import parse_policy
from fpga_plugin.policy.rules import parse_pattern
from fpga_plugin.settings import values
from fpga_plugin.settings.settings import SETTINGS, load_settings

INTERFACE = "ce48969398f05f33946d560708be108a"
DASHED = "18b79ffa-2ee5-4aa0-96ef-4230dafacb5f"
HASH = "0123456789abcdef" * 2 + "01234567"

TRICKS = (
    *("", ".", "..", "/", "//", "../x", "../../etc/passwd", "/etc/passwd", "a/../b", "..\\..\\x"),
    *("%2e%2e%2f", "..%c0%af", "....//", "\0", "x\0y", "\n", "\r\n", "\t", " ", "\x0b", "\x85"),
    *("\x1b[31m", "\x7f", "\u202e", "\u2028", "\ufeff", "\ud800", "\udcff", "\udc2e\udc2e/"),
    *("\u0660", "\uff11", "\U0001d7ce", "\u00b2", "\u212a", "\u0130", "\u017f", "\u00e9"),
    *("$(id)", "`id`", ";id", "|id", "&", "*", "?", "[a-z]", "{a,b}", "~", "#", "!", "=", ","),
    *("%s%n", "{0}", "{{.}}", "${HOME}", "<script>", "'", '"', "\\", "-", "--", "-p", "+1", "0x"),
    *("1_0", "1e3", "NaN", "None", "true", "null", "A" * 100_000, "../" * 30_000, "0" * 100_000),
)
"""What somebody who may choose a text may choose."""


class Reader(NamedTuple):
    """Something that reads a foreign text.

    Attributes:
        read: raises ValueError or an error of the plugin's.
        good: what it takes.
        harmless: every value that it gives, whole.
    """

    read: Callable[[str], str]
    good: str
    harmless: str


HEX32, HEX40 = "[0-9a-f]{32}", "[0-9a-f]{40}"
CARD = r"[0-9a-f]{4,8}-[0-9a-f]{2}-[0-9a-f]{2}\.[0-7]"
NAME = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?"


def _store_path(text: str) -> str:
    place = place_of_path(f"/store/{INTERFACE}/{text}")
    return f"{place.interface_id}/{place.bitstream_id}"


def _store_directory(text: str) -> str:
    return str(place_of_path(f"/store/{text}/blank.gbs").interface_id)


def _manifest(text: str) -> str:
    line = ManifestFile(text.encode(errors="replace").decode(), "0" * 64, 1)
    return next(iter(parse_manifest(write_manifest([line]), where="m").files))


def _policy(field: str) -> Callable[[str], str]:
    """What a policy makes of a text in one field of a rule."""

    def read(text: str) -> str:
        value = text if field in {"name", "action"} else [text]
        rule = {"name": "r", "action": "allow", field: value}
        document = {"version": "1", "default": "deny", "rules": [rule]}
        raw = json.dumps(document, ensure_ascii=False).encode(errors="surrogatepass")
        (parsed,) = parse_policy(raw, as_json=True).rules
        found = getattr(parsed, field)
        if isinstance(found, tuple | frozenset):
            (found,) = found
        return str(getattr(found, "value", found))

    return read


ALIAS = "(?=.*[g-z])[a-z0-9-]{1,31}"

READERS = {
    "alias": Reader(ids.parse_alias, "compress-2", ALIAS),
    "CDI device": Reader(
        lambda text: values.parse_cdi_devices(f"*={text}").items[0][1],
        "vendor.com/opencl=board:0",
        "[A-Za-z0-9._-]+/[A-Za-z0-9._-]+=[A-Za-z0-9._:-]+",
    ),
    "resource of a CDI device": Reader(
        lambda text: values.parse_cdi_devices(f"{text}=a/b=c").items[0][0],
        f"region-{INTERFACE}",
        r"\*|([a-z0-9.-]+/)?(region|fpga|af)-[A-Za-z0-9._-]+",
    ),
    "interface id": Reader(ids.parse_interface_id, INTERFACE, HEX32),
    "AFU id": Reader(ids.parse_afu_id, DASHED, HEX32),
    "bitstream id": Reader(ids.parse_bitstream_id, HASH, f"{HEX32}|{HEX40}"),
    "card": Reader(ids.parse_device_id, "0000-3b-00.0", f"{CARD}(-p[0-9]{{1,5}})?"),
    "region": Reader(ids.parse_device_id, "0000-3b-00.0-p0", f"{CARD}(-p[0-9]{{1,5}})?"),
    "PCI address": Reader(
        lambda text: str(ids.PciAddress.parse(text)),
        "0000:3b:00.0",
        r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]",
    ),
    "pod uid": Reader(parse_pod_uid, DASHED, "[A-Za-z0-9-]{1,64}"),
    "name": Reader(parse_name, "kube-system", NAME),
    "resource": Reader(
        lambda text: parse_resource(text, ours("fpga.intel.com")),
        f"fpga.intel.com/region-{INTERFACE}",
        r"fpga\.intel\.com/[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
        r"|[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/(region|fpga)-[0-9a-f]{32}",
    ),
    "resource of this plugin": Reader(
        lambda text: ids.Resource.parse(text).name,
        f"fpga.intel.com/region-{INTERFACE}",
        r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/(region|fpga)-[0-9a-f]{32}",
    ),
    "pattern of namespaces": Reader(parse_pattern, "team-*", "[a-z0-9*-]{1,63}"),
    "name in a policy": Reader(
        _policy("name"), "team-a", "[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
    ),
    "namespace in a policy": Reader(_policy("namespaces"), "team-*", "[a-z0-9*-]{1,63}"),
    "interface in a policy": Reader(_policy("interfaces"), INTERFACE, HEX32),
    "bitstream in a policy": Reader(_policy("bitstreams"), DASHED, f"{HEX32}|{HEX40}|None"),
    "device in a policy": Reader(_policy("devices"), "region", "region|whole"),
    "action in a policy": Reader(_policy("action"), "deny", "allow|deny"),
    "file in a store": Reader(_store_path, f"{HASH}.aocx", f"{HEX32}/({HEX32}|{HEX40}|None)"),
    "directory in a store": Reader(_store_directory, INTERFACE, HEX32),
    "path in a manifest": Reader(
        _manifest,
        f"{INTERFACE}/blank.gbs",
        rf"{HEX32}/(blank\.gbs|{HEX32}\.gbs|{HEX40}\.aocx)",
    ),
}


def clean(error: FpgaPluginError, *, named: str = "") -> None:
    """Short, on one line, printable, and about what it should be about."""
    assert len(str(error).encode()) < 1024
    assert str(error).isprintable()
    assert named in error.message


def variants(good: str) -> list[str]:
    """Each trick alone, around, inside and in place of a part of what is good."""
    return [
        text
        for trick in TRICKS
        for text in (
            trick,
            trick + good,
            good + trick,
            good[:3] + trick + good[3:],
            trick + good[len(trick) :],
            good[: -len(trick)] + trick if trick else good + "x",
        )
        if text != good
    ]


@pytest.mark.parametrize("name", READERS)
def test_a_trick_gives_a_harmless_value_or_a_clean_error(name):
    reader = READERS[name]
    harmless = re.compile(reader.harmless, re.ASCII)
    if reader.good:
        assert harmless.fullmatch(reader.read(reader.good))
    refused = 0
    for text in variants(reader.good):
        try:
            value = reader.read(text)
        except FpgaPluginError as error:
            refused += 1
            assert len(str(error).encode()) < 1024  # noqa: PT017  # whether it is raised is the question
            continue
        except ValueError as error:
            refused += 1
            clean(FpgaPluginError(str(error)))
            continue
        assert harmless.fullmatch(value), (text, value)
    assert refused > len(TRICKS)


def test_no_letter_of_another_script_becomes_a_digit_of_an_id():
    digits = set("0123456789abcdefABCDEF")
    others = [c for n in range(sys.maxunicode + 1) if (c := chr(n)) not in digits]
    assert not [c for c in others if c.lower() in digits or c.upper().lower() in digits]
    for c in ("\u0660", "\uff11", "\uff41"):
        with pytest.raises(ValueError, match="not 32 hex digits"):
            ids.parse_hex128(c * 32)


def test_no_id_leads_out_of_a_store(tmp_path):
    store = Store(str(tmp_path))
    for text in variants(HASH) + variants(DASHED):
        try:
            bitstream = ids.parse_bitstream_id(text)
        except ValueError:
            continue
        for place in all_places(ids.parse_interface_id(INTERFACE), bitstream):
            path = store.at(place)
            assert os.path.normpath(path) == path
            assert os.path.dirname(os.path.dirname(path)) == str(tmp_path)


GOOD = {
    "FPGA_REGION_1": INTERFACE,
    "FPGA_BITSTREAM_ID_1": DASHED,
    "FPGA_DRIVER_PARAMS_1": "clock=9",
}
KINDS = {**GOOD, "FPGA_AFU_1": DASHED}


@pytest.mark.parametrize("variable", KINDS)
def test_a_trick_in_a_variables_value_gives_a_request_or_a_clean_error(variable):
    base = {**GOOD, "FPGA_AFU_1": DASHED} if variable == "FPGA_AFU_1" else dict(GOOD)
    assert parse_requests(base)
    refused = 0
    for text in variants(KINDS[variable]):
        try:
            requests = parse_requests({**base, variable: text})
        except InvalidRequestError as error:
            refused += 1
            clean(error, named="FPGA_")
            continue
        assert re.fullmatch(HEX32, requests[0].interface_id)
        assert re.fullmatch(f"{HEX32}|{HEX40}|{ALIAS}", str(requests[0].bitstream_id))
    assert refused > len(TRICKS)


@pytest.mark.parametrize("prefix", REQUEST_PREFIXES)
def test_a_trick_in_a_variables_name_gives_a_request_or_a_clean_error(prefix):
    values = {name.removesuffix("1"): value for name, value in KINDS.items()}
    for trick in TRICKS:
        env = {f"{kind}{trick}": values[kind] for kind in REQUEST_PREFIXES}
        for some in (env, {f"{prefix}{trick}": values[prefix]}):
            try:
                requests = parse_requests(some)
            except InvalidRequestError as error:
                clean(error)
            else:
                assert all(re.fullmatch("[A-Za-z0-9_]+", r.suffix) for r in requests)
                assert all(r.region_variable.isprintable() for r in requests)


@pytest.mark.parametrize(
    "name", ["clock", "debug", "", "Clock", "clock\0", "../clock", "__class__"]
)
def test_a_trick_in_a_driver_parameter_is_a_number_or_refused(name):
    for trick in TRICKS:
        try:
            (request,) = parse_requests({**GOOD, "FPGA_DRIVER_PARAMS_1": f"{name}={trick}"})
        except InvalidRequestError as error:
            clean(error, named="FPGA_DRIVER_PARAMS_1")
        else:
            assert (name, set(trick)) == ("clock", {"0"})  # a hundred thousand digits of nothing
            assert request.settings.clock == 0  # no card's limits allow it


def test_ten_thousand_requests_are_read_in_order():
    env = {}
    for n in range(10_000):
        env[f"FPGA_REGION_{n}"] = INTERFACE
        env[f"FPGA_AFU_{n}"] = DASHED
    assert [r.suffix for r in parse_requests(env)] == [str(n) for n in range(10_000)]


BYTES = (
    *(bytes([n]) for n in range(1, 256)),
    *(b"\xff\xfe", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"/\xff"),
    *(b"/" + b"a" * 5000, b"/a" * 100_000, b"\xff" * 1_000_000, bytes(range(1, 256))),
)
"""What `execve` takes as a value: anything without NUL."""


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_any_bytes_in_a_setting_are_taken_or_refused_in_clean_lines(setting):
    for raw in BYTES + tuple(trick.encode(errors="surrogatepass") for trick in TRICKS):
        text = os.fsdecode(raw.replace(b"\0", b""))
        try:
            settings = load_settings({setting.name: text})
        except SettingsError as error:
            for line in error.message.split("\n"):
                clean(FpgaPluginError(line))
        else:
            assert not settings.warnings


def test_any_bytes_in_a_settings_name_are_a_clean_warning():
    for raw in BYTES:
        warnings = load_settings({f"FPGA_PLUGIN_{os.fsdecode(raw)}": "x"}).warnings
        assert all(warning.isprintable() and len(warning) < 400 for warning in warnings)


def test_a_trick_in_an_operation_on_a_card_is_a_text_or_a_clean_error():
    for trick in TRICKS:
        for body in (trick, f'{{"operation": "{trick}", "card": "{trick}"}}', "[" * 50_000):
            try:
                asked = _strings(body.encode(errors="surrogatepass"), ("operation", "card"))
            except InvalidRequestError as error:
                clean(error)
            else:
                assert all(isinstance(one, str) for one in asked.values())
