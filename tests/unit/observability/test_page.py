"""The status page as a document: escaped, labelled, readable, and nothing but itself may run."""

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest
from doubles.pictures import size
from repository import ROOT

from fpga_plugin.observability.page import HEADERS, SCRIPT, STYLE, page
from fpga_plugin.observability.states import STATES
from fpga_plugin.observability.table import card_table, history_table, table
from fpga_plugin.observability.trouble import needs_somebody, problems

LIGHT, DARK = (
    dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", block))
    for block in STYLE.split("@media (prefers-color-scheme: dark)")
)

EVIL = "<script>alert(1)</script>\"'&\x1b[2J"


def owner(**changes):
    return {
        "device": "0000-10-00.0-p0",
        "resource": "fpga.intel.com/region-x",
        "ownership": "STARTED",
        "pod_uid": "3f0c6e5e",
        "namespace": "team",
        "pod": "compress",
        "claim": "",
        "claim_uid": "",
        "requests": [],
        "pods": [],
        "since": 1000.0,
    } | changes


def region(number=0, **changes):
    return {
        "region": f"0000-10-00.0-p{number}",
        "node": f"/dev/dfl-port.{number}",
        "ownership": "FREE",
        "condition": "BLANK",
        "reason": "",
        "afu_id": "4cc434ceb4374bd69d69b7e3fdc04577",
        "bitstream": "",
        "failed": False,
        "unusable": "",
        "clock": None,
        "healthy": True,
        "refused": "",
        "kept": None,
        "owner": None,
    } | changes


def kept(**changes):
    return {
        "pod_uid": "3f0c6e5e",
        "namespace": "team",
        "pod": "compress",
        "failure": "container 'app' ended with exit code 3",
        "seconds_left": 840.0,
    } | changes


def trouble(**changes):
    none = {"refused": 0, "drained": 0, "failed": 0, "never_cleared": 0, "kept": 0}
    return none | {"unusable": {}} | changes


def bitstream(**changes):
    return {
        "interface_id": "ce48969398f05f33946d560708be108a",
        "bitstream_id": "18b79ffa2ee54aa096ef4230dafacb5f",
        "afu_id": "18b79ffa2ee54aa096ef4230dafacb5f",
        "name": "compress",
        "size": 4096,
        "last_used": 1180.0,
        "trust": "digest",
        "problem": "",
    } | changes


def event(**changes):
    return {
        "at": 1180.0,
        "region": "0000-10-00.0-p0",
        "event": "programmed",
        "seconds": 0.25,
        "pod_uid": "3f0c6e5e",
        "pod": "team/compress",
        "claim": "",
        "afu_id": "18b79ffa2ee54aa096ef4230dafacb5f",
        "bitstream": "compress",
        "message": "",
    } | changes


HOSTILE_EVENTS = [
    event(region=EVIL, pod=EVIL, bitstream=EVIL, message=EVIL),
    event(pod="", pod_uid=EVIL, bitstream="", afu_id=EVIL),
    event(pod=EVIL, claim=EVIL),
]


def card(*regions, **changes):
    return {
        "card": "0000-10-00.0",
        "interface_id": "ce48969398f05f33946d560708be108a",
        "description": "",
        "numa_node": 0,
        "present": True,
        "mode": "partitioned",
        "drained": False,
        "memory": "cleared",
        "iommu": "translate",
        "note": "",
        "temperatures": {"t": 45.0},
        "power": {"p": 22.0},
        "regions": list(regions),
    } | changes


def status(*cards, **changes):
    return {
        "version": "0.1.0",
        "node": "node-7",
        "time": 1240.0,
        "started": 0.0,
        "ready": True,
        "not_ready": [],
        "trouble": trouble(),
        "scrub": "required",
        "sandbox": [],
        "notes": [],
        "resources": [],
        "cards": list(cards),
        "problems": [],
        "refusals": [],
        "bitstreams": [],
        "warnings": [],
    } | changes


def refusal(**changes):
    return {
        "at": 1180.0,
        "first": 1000.0,
        "times": 3,
        "method": "PreStartContainer",
        "devices": ["0000-10-00.0-p0"],
        "status": "NOT_FOUND",
        "message": "no bitstream",
        "pod_uid": "3f0c6e5e",
        "namespace": "team",
        "pod": "compress",
        "claim": "",
        "open": True,
    } | changes


class Outline(HTMLParser):
    """What a browser would build, as far as these tests look at it."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text, self.open = [], "", []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "br", "wbr", "input"}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, "each element is closed in its order"

    def handle_data(self, data):
        self.text += data

    def of(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


def everything_foreign():
    hostile = owner(pod_uid=EVIL, namespace=EVIL, pod=EVIL)
    return status(
        card(
            region(reason=EVIL, node=EVIL, afu_id=EVIL, refused=EVIL, owner=hostile),
            region(1, owner=owner(pod="", pod_uid=EVIL), condition="PROGRAMMED", bitstream=EVIL),
            region(2, owner=owner(claim=EVIL, requests=[EVIL], pods=[EVIL], namespace=EVIL)),
            region(3, kept=kept(pod=EVIL, namespace=EVIL, failure=EVIL, pod_uid=EVIL)),
            note=EVIL,
        ),
        node=EVIL,
        ready=False,
        not_ready=[EVIL],
        notes=[EVIL],
        scrub=EVIL,
        resources=[
            {
                "resource": EVIL,
                "registered": False,
                "streaming": False,
                "problem": EVIL,
                "devices": 1,
                "healthy": 0,
            }
        ],
        problems=[{"card": EVIL, "error": EVIL, "hint": EVIL}],
        refusals=[
            refusal(message=EVIL, namespace=EVIL, pod=EVIL, method=EVIL, status=EVIL),
            refusal(pod="", pod_uid="", devices=[EVIL]),
            refusal(claim=EVIL),
        ],
        bitstreams=[bitstream(name=EVIL, bitstream_id=EVIL, trust=EVIL, problem=EVIL)],
    )


def test_nothing_foreign_becomes_markup():
    html = page(everything_foreign(), words=f'"><script>alert(1)</script>{EVIL}')
    html += page(everything_foreign(), HOSTILE_EVENTS)
    assert html.count("<script>") == 2
    assert "alert(1)&lt;/script&gt;" in html
    assert "\x1b" not in html
    assert len(Outline(html).of("script")) == 2


def test_the_content_security_policy_allows_the_pages_script_and_style_by_hash():
    policy = dict(HEADERS)["Content-Security-Policy"]
    html = page(status(card(region())))
    for tag, code in (("style", STYLE), ("script", SCRIPT)):
        assert f"<{tag}>{code}</{tag}>" in html
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    # Attributes that run or style would be refused by the policy, and so must not be needed.
    assert not any(
        name == "style" or name.startswith("on") for _, a in Outline(html).tags for name in a
    )


def test_it_refers_to_nothing_elsewhere():
    html = page(everything_foreign())
    tags = Outline(html).tags
    assert not [a for _, a in tags if {"src", "action"} & a.keys()]
    links = {a["href"] for _, a in tags if "href" in a}
    ids = {a["id"] for _, a in tags if "id" in a}
    assert links <= {f"#{one}" for one in ids}
    assert "url(" not in STYLE
    assert "@import" not in STYLE


def test_tables_have_captions_and_headers_that_a_screen_reader_can_tell():
    outline = Outline(page(everything_foreign(), HOSTILE_EVENTS))
    tables = len(outline.of("table"))
    assert tables == 5
    assert len(outline.of("caption")) == tables
    assert all(a.get("scope") in {"row", "col"} for a in outline.of("th"))
    boxes = [a for a in outline.of("div") if a.get("role") == "region"]
    assert len(boxes) == tables
    assert all(a["aria-label"] and a["tabindex"] == "0" for a in boxes)


def test_headings_and_labels_name_every_part():
    outline = Outline(page(status(card(region(), region(1)))))
    assert next(tag for tag, _ in outline.tags if tag in {"h1", "h2"}) == "h1"
    assert len(outline.of("h1")) == 1
    (labelled,) = [a for a in outline.of("section") if "aria-labelledby" in a]
    assert labelled["aria-labelledby"] in {a.get("id") for a in outline.of("h2")}
    assert {"aria-label": "Regions of card 0000-10-00.0", "class": "board"} in outline.of("ul")
    assert outline.of("html") == [{"lang": "en"}]


@pytest.mark.parametrize(
    ("condition", "has_owner", "word"),
    [
        ("FAULTED", False, "faulted"),
        ("DIRTY", True, "dirty"),
        ("PROGRAMMED", True, "programmed"),
        ("BLANK", False, "free"),
    ],
)
def test_a_state_is_told_by_words_not_by_colour_alone(condition, has_owner, word):
    shown = region(condition=condition, owner=owner() if has_owner else None, healthy=False)
    html = page(status(card(shown)))
    tile = re.search(r'<li class="tile.*?</li>', html)[0]
    text = Outline(tile).text
    assert word in text
    assert "unhealthy" in text
    assert ("team/compress" in text) == has_owner


def tiles(html):
    return re.findall(r'<li class="tile (\w+)" id="[^"]+">(.*?)</li>', html)


def test_the_readmes_picture_is_one_of_the_size_that_is_made():
    """`pytest tests/integration/test_browser.py -k readme` makes .cache/pictures/readme.png."""
    picture = (ROOT / "docs/status.png").read_bytes()
    assert size(picture) == (1200, 900)


def test_a_refused_claim_has_not_the_colour_of_one_that_runs():
    started = region(condition="PROGRAMMED", owner=owner())
    waits = region(1, condition="BLANK", owner=owner(ownership="CLAIMED"), refused="no bitstream")
    html = page(status(card(started, waits)))
    (runs, _), (refused, text) = tiles(html)
    assert (runs, refused) == ("owned", "failed")
    assert "refused" in text
    assert "refused: no bitstream" in html


def test_a_drained_tile_says_so_and_is_not_called_unhealthy_for_it():
    html = page(status(card(region(healthy=False), drained=True)))
    ((colour, text),) = tiles(html)
    assert "took it out of service" in html
    assert colour == "drained"
    assert "drained" in text
    assert "by <code>fpga-plugin card drain</code>" in text
    assert "unhealthy" not in text
    owned = page(status(card(region(healthy=False, owner=owner()), drained=True)))
    assert "unhealthy" in tiles(owned)[0][1], "an owned device is unhealthy for another reason"


def test_each_state_of_the_legend_names_its_part_of_the_runbook():
    html = page(status(card(region())))
    for state in STATES:
        assert f"<small>docs/runbook.md#{state.part}</small>" in html


def test_a_region_that_is_kept_says_for_whom_and_how_long():
    held = region(condition="DIRTY", healthy=False, reason="kept for debugging", kept=kept())
    ((colour, text),) = tiles(page(status(card(held))))
    assert colour == "kept"
    assert "team/<wbr>compress had it" in text
    assert "14 min left" in text
    assert "unhealthy" not in text
    assert "free" not in text
    assert "scrubbed in 14 min, or by `fpga-plugin card release`" in table(status(card(held)))


def test_a_free_region_that_is_not_offered_has_not_the_colour_of_one_that_is():
    (offered, _), (withheld, _) = tiles(page(status(card(region(), region(1, healthy=False)))))
    assert offered == "free"
    assert withheld == "busy"


def test_a_tile_names_the_bitstream_and_how_long_its_owner_has_had_it():
    afu = "18b79ffa2ee54aa096ef4230dafacb5f"
    named = region(condition="PROGRAMMED", afu_id=afu, bitstream="compress-v2", owner=owner())
    other = region(1, condition="PROGRAMMED", afu_id=afu, owner=owner())
    (_, one), (_, two) = tiles(page(status(card(named, other))))
    assert "compress-v2" in one
    assert "4 min" in one
    assert afu not in one
    assert afu in two, "what has no name is told by its id"


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("refused", "refused"),
        ("drained", "drained"),
        ("failed", "failed"),
        ("never_cleared", "never cleared"),
        ("kept", "kept for debugging"),
    ],
)
def test_the_header_counts_each_kind_of_trouble_in_page_and_table(kind, word):
    shown = status(card(region()), trouble=trouble(**{kind: 3}))
    head = re.search(r"<header>.*?</header>", page(shown), re.DOTALL)[0]
    assert f"3 {word}" in Outline(head).text
    assert "no trouble" not in head
    line = table(shown).splitlines()[1]
    assert word in line.lower()
    assert "3" in line


def test_the_table_has_the_reason_of_pods_that_wait_and_a_line_of_those_that_do_not():
    waits = refusal(message="no bitstream f")
    gone = [refusal(pod=f"gone-{n}", message="the long story", open=False) for n in range(7)]
    text = table(status(card(region()), refusals=[*gone, waits]))
    _, _, listed = text.partition("refused, the last time of each pod (1 now, 7 over):\n")
    first, second, third, *rest = listed.splitlines()
    assert "team/compress " in first
    assert second.strip() == "no bitstream f"
    assert "--json" in third, "the history has no refusal that concerns no region, and not all"
    assert [line.split()[0] for line in rest] == [f"team/gone-{n}" for n in range(7)]
    assert "the long story" not in text


def test_regions_that_nobody_can_be_given_are_trouble_with_its_reason():
    why = "no blank bitstream"
    shown = status(
        card(region(), card="0000-20-00.0"),
        card(*(region(i, healthy=False, unusable=why) for i in range(6))),
        trouble=trouble(unusable={why: 6}),
    )
    html = page(shown)
    assert (
        '<a class="badge bad" href="#region-0000-10-00.0-p0">6 unusable: no blank bitstream</a>'
        in html
    )
    assert html.count('class="tile failed"') == 6
    assert table(shown).splitlines()[1].strip() == "6 unusable: no blank bitstream"
    assert needs_somebody(shown)
    assert [one["card"] for one in problems(shown)["cards"]] == ["0000-10-00.0"]


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, False),
        ({"ready": False}, True),
        ({"trouble": trouble(failed=1)}, True),
        ({"trouble": trouble(refused=1)}, True),
        ({"trouble": trouble(drained=1, kept=1, never_cleared=1)}, False),
    ],
)
def test_what_an_operator_did_on_purpose_needs_nobody(changes, needed):
    assert needs_somebody(status(card(region()), **changes)) is needed


def test_troubled_cards_come_first_and_the_title_counts_what_is_urgent():
    well, ill = card(region()), card(region(failed=True), card="0000-20-00.0")
    html = page(status(well, ill, trouble=trouble(failed=1, drained=1)))
    assert html.index("Card 0000-20-00.0") < html.index("Card 0000-10-00.0")
    assert "<title>(1!) FPGAs of node-7</title>" in html
    assert "<title>FPGAs of node-7</title>" in page(status(well, trouble=trouble(drained=1)))
    assert "<title>(1!) " in page(status(ready=False, not_ready=["starting"]))


@pytest.mark.parametrize(
    ("changes", "trouble", "id_"),
    [
        ({"failed": True}, {"failed": 1}, "region-0000-10-00.0-p1"),
        ({"refused": "no"}, {"refused": 1}, "region-0000-10-00.0-p1"),
        ({"kept": kept()}, {"kept": 1}, "region-0000-10-00.0-p1"),
        ({"unusable": "no blank bitstream"}, {"unusable": {"x": 1}}, "region-0000-10-00.0-p1"),
        ({}, {"drained": 1}, "card-0000-11-00.0"),
        ({}, {"never_cleared": 1}, "card-0000-12-00.0"),
    ],
)
def test_a_badge_leads_to_what_it_counts(changes, trouble, id_):
    told = status(
        card(region(), region(1, **changes)),
        card(card="0000-11-00.0", drained=True),
        card(card="0000-12-00.0", memory="never cleared"),
    )
    told["trouble"] |= trouble
    html = page(told)
    outline = Outline(html)
    assert next(a["href"] for a in outline.of("a") if "badge" in a.get("class", "")) == f"#{id_}"
    assert [a for _, a in outline.tags if a.get("id") == id_]
    elsewhere = page(told, words="nothing has this name")
    assert f"#{id_}" not in elsewhere, "it leads nowhere"


def test_tables_are_folded_and_say_how_much_is_in_them():
    outline = Outline(page(everything_foreign(), HOSTILE_EVENTS))
    folds = outline.of("details")
    assert [a["id"] for a in folds] == ["regions", "history", "bitstreams", "resources"]
    assert not any("open" in a for a in folds)


def test_without_trouble_the_header_says_so():
    assert "no trouble" in page(status(card(region())))
    assert "no trouble" in table(status(card(region())))
    starting = status(ready=False, not_ready=["starting"])
    assert "no trouble" not in page(starting) + table(starting), "it cannot tell yet"


def test_the_page_shows_what_is_looked_for_and_says_that_there_is_more():
    shown = status(
        card(region(owner=owner()), region(1)),
        card(region(0, region="0000-11-00.0-p0"), card="0000-11-00.0"),
    )
    html = page(shown, words="team/comp")
    assert len(tiles(html)) == 1
    assert "0000-11-00.0" not in html
    assert 'href="?"' in html
    assert "no card or region" in page(shown, words="nobody")
    assert "2 cards, 3 regions" in html, "the header is the node's"


def test_the_bitstreams_of_the_store_are_listed_with_size_and_trust():
    refused = bitstream(name="old", trust="refused", problem="not in the manifest")
    html = page(status(bitstreams=[bitstream(), refused]))
    text = Outline(html).text
    assert "4.0 KiB" in text
    assert "refused: not in the manifest" in text


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize(
    ("text", "back"),
    [("text", "page"), ("text", "sheet"), ("quiet", "page"), ("quiet", "sheet")]
    + [(name, f"{name}-back") for name in ("good", "warn", "bad", "own")],
)
def test_text_has_the_contrast_of_wcag_aa(colours, text, back):
    assert contrast(colours[text], colours[back]) >= 4.5


def test_light_and_dark_have_the_same_colours_by_name():
    assert LIGHT.keys() == DARK.keys()
    assert set(re.findall(r"var\(--([a-z-]+)\)", STYLE)) <= LIGHT.keys()


# ---------------------------------------------------------------- the table, of the same view


def test_the_history_moves_no_cursor_and_is_no_wider_than_the_terminal():
    long = [*HOSTILE_EVENTS, event(message="because " * 100)]
    text = history_table({"time": 0.0, "events": long}, width=80)
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_a_claim_is_named_with_its_request_and_its_pods():
    one = owner(claim="nlb0", requests=["fpga"], pods=["team/compress"])
    many = owner(claim="nlb0", pods=["team/a", "team/b"], device="0000-10-00.0")
    shown = status(card(region(owner=one), region(1, owner=many)))
    for text in (table(shown), Outline(page(shown)).text):
        assert "claim team/nlb0 (request fpga), pod team/compress" in text
        assert "claim team/nlb0, 2 pods" in text
    events = [event(claim="team/nlb0"), event(claim="team/nlb0", pod="", pod_uid="")]
    text = history_table({"time": 0.0, "events": events})
    assert "claim team/nlb0, pod team/compress" in text
    assert text.splitlines()[-1].endswith("claim team/nlb0")
    refused = status(refusals=[refusal(claim="team/nlb0")])
    for text in (table(refused), Outline(page(refused)).text):
        assert "claim team/nlb0" in text


def test_the_history_says_what_happened_how_long_it_took_and_why_not():
    shown = [
        event(),
        event(event="released", seconds=3600.0, afu_id="", bitstream=""),
        event(event="scrubbed", message="it is hot", seconds=1.5, afu_id="", bitstream=""),
        event(event="claimed", seconds=None, afu_id="", bitstream=""),
    ]
    text = history_table({"time": 0.0, "events": shown})
    html = Outline(page(status(), shown)).text
    for words in (
        "programmed compress in 0.250 s",
        "released after 1 h",
        "not scrubbed in 1.500 s",
    ):
        assert words in text
        assert words in html
    assert "    it is hot" in text.splitlines()


def test_a_cards_model_is_shown():
    told = status(card(region(), description="Intel PAC N3000"))
    assert "Intel PAC N3000" in table(told).splitlines()[3]
    assert "<dt>Model</dt><dd>Intel PAC N3000</dd>" in page(told)


@pytest.mark.parametrize("operation", ["undrain", "retry", "release"])
@pytest.mark.parametrize("pullable", [True, False])
def test_only_after_a_drain_is_it_said_whether_a_card_may_be_pulled(operation, pullable):
    state = {
        "card": "0000-10-00.0",
        "present": True,
        "drained": False,
        "may_be_pulled": pullable,
        "holders": [],
        "waits_for": [] if pullable else ["a scrub is under way"],
        "not_clean": [],
    }
    assert card_table(state, operation) == "card 0000-10-00.0: in service"
    drained = card_table({**state, "drained": True}, "drain")
    assert ("it may be pulled now" in drained) == pullable
    assert ("a scrub is under way" in drained) != pullable


def test_the_table_moves_no_cursor():
    assert "\x1b" not in table(everything_foreign())


@pytest.mark.parametrize("width", [60, 80, 100, 132, 200])
def test_the_table_is_no_wider_than_the_terminal(width):
    long = owner(pod="a" * 63, namespace="b" * 63)
    shown = status(
        card(region(owner=long, reason="because " * 40), region(1), note="word " * 50),
        refusals=[refusal(message="x" * 900)],
        not_ready=["reason " * 30],
    )
    assert max(len(line) for line in table(shown, width=width).splitlines()) <= width


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_table_still_says_who_has_it_and_for_how_long(width):
    shown = owner(pod="intel-fpga-demo-compress", namespace="team")
    text = table(status(card(region(owner=shown), region(1))), width=width)
    assert "team/intel-fpga-demo-compress, for 4 min" in text


def test_a_narrow_table_breaks_no_path_and_no_measured_value():
    path = "/var/lib/kubelet/device-plugins/kubelet.sock"
    for width in range(60, 120):
        text = table(status(card(region()), not_ready=[f"{path} is not there"]), width=width)
        assert path in text
        assert "45 C" in text


def test_of_a_board_full_of_sensors_the_highest_is_shown():
    sensors = {"board": 31.0, "fpga_core": 61.2, "dimm0": 40.0, "dimm1": 41.0}
    full = status(card(region(), temperatures=sensors))
    for shown in (table(full), page(full)):
        text = re.sub(r"<[^>]*>|\s+", " ", shown)
        assert re.search(r"fpga_core +61 (C|°C), highest of 4", text)
        assert "dimm" not in text


def test_two_sensors_are_named():
    text = table(status(card(region(), temperatures={"board": 31.0, "fpga_core": 61.2})))
    assert "board 31 C  fpga_core 61 C" in text


def test_a_table_that_goes_to_a_file_is_cut_nowhere():
    long = owner(pod="a" * 63, namespace="b" * 63)
    assert f"{'b' * 63}/{'a' * 63}" in table(status(card(region(owner=long))))


def test_what_the_hardware_said_is_said_once():
    why = "programming region 0000-10-00.0-p0 failed: the FPGA reported an error"
    refused = f"{why}: ask the node's operator"
    shown = status(
        card(region(condition="FAULTED", failed=True, reason=why, refused=refused, healthy=False))
    )
    for text in (table(shown, width=500), page(shown)):
        assert text.count("the FPGA reported an error") == 1
        assert "refused: " in text


def test_what_passes_by_itself_is_not_marked_as_what_needs_somebody():
    waits = region(condition="DIRTY", healthy=False, reason="a former owner; its scrub waits: gone")
    broken = region(1, condition="FAULTED", healthy=False, failed=True, reason="thermal: AP6")
    shown = status(card(waits, broken, passing="its memory is not cleared yet", note="left alone"))
    text = table(shown)
    assert "  ! left alone" in text
    assert "    its memory is not cleared yet" in text
    assert "    0000-10-00.0-p0: a former owner" in text
    assert "  ! 0000-10-00.0-p1: thermal" in text
    html = page(shown)
    assert '<p class="passing">its memory is not cleared yet</p>' in html
    assert re.search(r'<p class="passing"><strong>[^<]*p0[^<]*:</strong> a former owner', html)
    assert re.search(r'<p class="note"><strong>[^<]*p1[^<]*:</strong> thermal', html)
    assert not re.search(r"\.(tile\.busy|passing)\{[^}]*--warn", STYLE), "amber means that"


def test_the_table_says_since_when_and_why():
    text = table(status(card(region(owner=owner())), refusals=[refusal()]))
    assert re.search(r"4 min +team/compress", text)
    assert "1 min ago, 3 times  PreStartContainer NOT_FOUND" in text


def test_commands_between_backquotes_are_code_and_a_single_one_stays_a_character():
    message = "`<b>` is unknown: run `fpga-plugin status`; 5` long"
    html = page(status(refusals=[refusal(message=message)]))
    assert "<code>&lt;b&gt;</code> is unknown: run <code>fpga-plugin status</code>; 5` long" in html


def test_a_refused_pod_that_nobody_knows_is_told_by_its_devices():
    text = table(status(refusals=[refusal(pod="", pod_uid="")]))
    assert "a pod not known yet, devices 0000-10-00.0-p0" in text


def test_what_the_plugin_has_taken_from_itself_is_said_and_what_is_missing_stands_out():
    measures = [
        {"name": "capabilities", "holds": True, "detail": "none"},
        {"name": "landlock", "holds": False, "detail": "the kernel does not allow it"},
        {"name": "seccomp", "holds": True, "detail": "75 system calls refused"},
    ]
    lines = table(status(sandbox=measures)).splitlines()
    assert "  confined by capabilities (none), seccomp (75 system calls refused)" in lines
    assert "  ! landlock: the kernel does not allow it" in lines


def test_a_node_without_cards_is_shown_as_such():
    assert "no FPGA cards" in table(status())


def test_a_warning_about_a_pod_is_shown_and_its_words_are_only_text():
    warned = refusal(status="OK", message="'FPGA_<b>' (did you mean FPGA_AFU_1?)")
    html = page(status(warnings=[warned]))
    assert "perhaps not as meant" in html
    assert "<b>" not in html
    text = table(status(warnings=[warned]))
    assert "perhaps not as meant" in text
    assert "did you mean FPGA_AFU_1?" in text


def test_a_clean_region_of_a_card_with_a_memory_clear_pending_says_so_beside_it():
    clean = region(condition="BLANK", healthy=True)
    assert "BLANK (memory not cleared yet)" in table(status(card(clean, memory="not cleared yet")))
    assert "(memory" not in table(status(card(clean)))
    dirty = region(condition="DIRTY", healthy=False)
    assert "(memory" not in table(status(card(dirty, memory="not cleared yet")))


def test_status_says_what_nobody_has_seen_on_hardware():
    text = table(status(card(untested="memory clear untested on hardware")))
    assert "memory: cleared  memory clear untested on hardware  IOMMU: translate" in text
    assert "untested" not in table(status(card(untested="")))
