"""The status page in a real browser: Debian's Chromium, headless, spoken to over two pipes.

Pictures are kept in .cache/pictures for people to look at.
"""

import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import zlib
from pathlib import Path

import pytest
from daemon_support import (
    CARD,
    CARD_2,
    CARDS,
    HEALTHY,
    P0,
    P1,
    REGIONS,
    ROOT,
    Node,
    Refused,
    command,
    request,
)
from doubles.pictures import size
from test_demo_serve import demo
from test_http import address

from fpga_plugin.allocation.journal.journal import Journal
from fpga_plugin.allocation.journal.records import Change, Condition, DebugHold, RegionRecord
from fpga_plugin.cards.debugging import boot_clock

pytestmark = pytest.mark.needs("chromium")

CARD_3 = "0000-12-00.0"
PICTURES = Path(__file__).parents[2] / ".cache/pictures"
POD = "3f0c6e5e-7a54-4d0a-9f66-9d1f2b9be111"
LIMIT = 60.0


class Browser:
    """A Chromium with one page; DevTools messages over descriptors 3 and 4, each ended by a zero.

    Each test has a page of its own, in a context that shares nothing with the last one's.
    """

    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="chromium-")
        to_it, self._send = os.pipe()
        self._receive, from_it = os.pipe()
        self.process = subprocess.Popen(
            [
                "/bin/bash",
                "-c",
                f'exec chromium "$@" 3<&{to_it} 4>&{from_it}',
                "chromium",
                "--headless",
                "--no-sandbox",  # as root, in CI's container
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                f"--user-data-dir={self.folder}",
                "--remote-debugging-pipe",
                "about:blank",
            ],
            pass_fds=(to_it, from_it),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_it)
        os.close(from_it)
        self._numbers = itertools.count(1)
        self._buffer = b""
        self.events = []
        self._session = None

    def begin(self):
        # Whatever it does, reading from it ends.
        self._watchdog = threading.Timer(LIMIT, self._kill)
        self._watchdog.start()
        self._context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call(
            "Target.createTarget", url="about:blank", browserContextId=self._context
        )["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            self.call(f"{domain}.enable")

    def end(self):
        self._session = None
        self.call("Target.disposeBrowserContext", browserContextId=self._context)
        self.events.clear()
        self._watchdog.cancel()

    def _kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _next(self):
        while b"\0" not in self._buffer:
            piece = os.read(self._receive, 65536)
            assert piece, "Chromium ended"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def call(self, method, **params):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._send, data) :]
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(self, url, *, width=1200, height=1600, scheme="light"):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def evaluate(self, script):
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, name):
        """Its first pixel; it is kept as a file."""
        data = base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        PICTURES.mkdir(parents=True, exist_ok=True)
        (PICTURES / f"{name}.png").write_bytes(data)
        return corner(data)

    def complaints(self):
        """What the console and the content security policy said."""
        return [
            event["params"]
            for event in self.events
            if event.get("method") in {"Log.entryAdded", "Runtime.exceptionThrown"}
            # No page has asked for an icon; browsers do.
            and "favicon" not in json.dumps(event)
        ]

    def accessible(self):
        """(role, name) of all that a screen reader is told."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"]
        ]

    def close(self):
        self._kill()
        self.process.wait(LIMIT)
        os.close(self._send)
        os.close(self._receive)
        shutil.rmtree(self.folder, ignore_errors=True)


def corner(png):
    """The first pixel of a PNG of 8-bit RGB or RGBA: before it there is nothing to filter by."""
    at, data = 8, b""
    while at < len(png):
        length = int.from_bytes(png[at : at + 4], "big")
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + length]
        at += length + 12
    return tuple(zlib.decompress(data)[1:4])


@pytest.fixture(scope="module")
def url():
    """A daemon that serves the page: an owner, a refused pod, a whole card, a failed region."""
    with Node("2x3", http_address="127.0.0.1:0", status_page="true") as node:
        node.settings["NODE_NAME"] = "node-7"
        node.kubelet.start()
        plugin = node.start()
        node.kubelet.until_health(P0, HEALTHY)
        node.kubelet.until_health(CARD_2, HEALTHY, resource=CARDS)
        answer = node.kubelet.allocate(P0)
        node.kubelet.checkpoint((POD, "main", REGIONS, [P0], answer))
        node.kubelet.prestart(P0, env=request())
        node.arm(P1, "pr-error")
        node.kubelet.allocate(P1)
        with pytest.raises(Refused):
            node.kubelet.prestart(P1, env=request())
        node.kubelet.allocate(CARD_2, resource=CARDS)
        yield f"http://{address(plugin)}/"


@pytest.fixture(scope="module")
def chromium():
    browser = Browser()
    try:
        yield browser
    finally:
        browser.close()


@pytest.fixture
def browser(chromium):
    chromium.begin()
    try:
        yield chromium
    finally:
        chromium.end()


@pytest.mark.parametrize(
    ("scheme", "background"), [("light", (0xF5, 0xF6, 0xF8)), ("dark", (0x12, 0x16, 0x1B))]
)
def test_the_page_is_drawn_in_light_and_in_dark_and_nothing_is_refused(
    browser, url, scheme, background
):
    browser.open(url, scheme=scheme)
    assert browser.picture(f"status-{scheme}") == background
    assert browser.complaints() == []
    assert "FPGAs of node-7" in browser.evaluate("document.title")


UNFOLD = "document.querySelectorAll('details').forEach(one => { one.open = true; })"

OUT_OF_TILES = """[...document.querySelectorAll('.tile *')].filter(one =>
  one.getBoundingClientRect().right > one.closest('.tile').getBoundingClientRect().right - 2)
  .map(one => one.textContent)"""
"""What is cut off, or hangs over the edge of its tile."""


@pytest.mark.parametrize("width", [320, 390, 640])
def test_the_page_fits_a_phone_without_scrolling_sideways(browser, url, width):
    browser.open(url, width=width, height=2400)
    browser.evaluate(UNFOLD)
    browser.picture(f"status-phone-{width}")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    wider = "[...document.querySelectorAll('.scroll')].filter(b => b.scrollWidth > b.clientWidth)"
    assert browser.evaluate(f"{wider}.map(b => b.getAttribute('aria-label'))") == []
    assert browser.evaluate(OUT_OF_TILES) == []


def test_a_phones_screen_reader_is_told_of_tables_too(browser, url):
    browser.open(url, width=390)
    browser.evaluate(UNFOLD)
    told = browser.accessible()
    assert ("table", "All regions") in told
    assert ("columnheader", "Pod") in told
    assert [name for role, name in told if role == "rowheader" and P0 in name]
    assert [name for role, name in told if role == "cell" and POD in name]


def test_a_screen_reader_is_told_what_is_drawn(browser, url):
    browser.open(url)
    browser.evaluate(UNFOLD)
    told = browser.accessible()
    assert ("heading", "FPGAs of node-7") in told
    assert ("list", f"Regions of card {CARD}") in told
    assert ("table", "All regions") in told
    for name in ("Region", "Ownership", "Condition", "Health", "Pod"):
        assert ("columnheader", name) in told
    assert ("rowheader", P0) in told
    assert ("region", "Regions") in told
    text = " ".join(name for role, name in told if role == "StaticText")
    for word in ("programmed", "faulted", "unhealthy", "free", "whole", POD):
        assert word in text, word


def test_the_page_refreshes_itself_and_says_when_the_plugin_is_away(browser, url):
    browser.open(url)
    # What the page shows goes, and comes back with the next refresh.
    browser.evaluate("document.querySelector('h1').textContent = 'old'")
    script = """new Promise((done) => {
      const look = () => document.querySelector('h1').textContent === 'old'
        ? setTimeout(look, 20) : done(document.querySelector('h1').textContent);
      document.dispatchEvent(new Event('visibilitychange')); look(); })"""
    assert browser.evaluate(script) == "FPGAs of node-7"
    assert browser.complaints() == []
    assert browser.evaluate("document.getElementById('away').hidden") is True
    script = """new Promise((done) => {
      window.fetch = () => Promise.reject(new Error('away'));
      const look = () => document.getElementById('away').hidden ? setTimeout(look, 20) : done(true);
      document.dispatchEvent(new Event('visibilitychange')); look(); })"""
    assert browser.evaluate(script) is True


def test_without_scripts_the_page_is_the_same(browser, url):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    browser.open(url)
    told = browser.accessible()
    assert ("list", f"Regions of card {CARD}") in told
    assert [name for role, name in told if role == "DisclosureTriangle" and "Regions" in name]


def test_focus_and_open_tables_survive_a_refresh(browser, url):
    browser.open(url)
    browser.evaluate("document.getElementById('history').open = true")
    browser.evaluate("document.querySelectorAll('.tile a')[1].focus()")
    focused = "document.activeElement.closest('[id]').id + document.activeElement.textContent"
    before = browser.evaluate(focused)
    assert before.startswith("region-")
    browser.evaluate("document.querySelector('h1').textContent = 'old'")
    script = """new Promise((done) => {
      const look = () => document.querySelector('h1').textContent === 'old'
        ? setTimeout(look, 20) : done(true);
      document.dispatchEvent(new Event('visibilitychange')); look(); })"""
    assert browser.evaluate(script) is True
    assert browser.evaluate(focused) == before
    shut = "[...document.querySelectorAll('details')].filter(one => !one.open).map(one => one.id)"
    assert "history" not in browser.evaluate(shut)
    assert "regions" in browser.evaluate(shut)


def test_a_printed_page_has_the_tables_and_not_the_form(browser, url):
    browser.open(url)
    browser.call("Emulation.setEmulatedMedia", media="print")
    browser.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert browser.evaluate("document.querySelectorAll('details:not([open])').length") == 0
    assert browser.evaluate("getComputedStyle(document.querySelector('.find')).display") == "none"
    browser.evaluate("dispatchEvent(new Event('afterprint'))")
    assert browser.evaluate("document.querySelectorAll('details[open]').length") == 0


def test_what_is_looked_for_stays_when_the_page_refreshes(browser, url):
    browser.open(f"{url}?find={P1}")
    count = "document.querySelectorAll('.tile').length"
    assert browser.evaluate(count) == 1
    browser.evaluate("document.querySelector('h1').textContent = 'old'")
    script = """new Promise((done) => {
      const look = () => document.querySelector('h1').textContent === 'old'
        ? setTimeout(look, 20) : done(true);
      document.dispatchEvent(new Event('visibilitychange')); look(); })"""
    assert browser.evaluate(script) is True
    assert browser.evaluate(count) == 1
    assert browser.complaints() == []


BADGES = "[...document.querySelectorAll('header .badge')].map(b => b.textContent)"


def drawn(browser, tile):
    """The colours of a tile, by its number."""
    look = f"getComputedStyle(document.querySelectorAll('.tile')[{tile}])"
    return browser.evaluate(f"{look}.color + {look}.backgroundColor + {look}.borderTopStyle")


@contextlib.contextmanager
def shown(hardware):
    """A node on which everything is Healthy, and where its page is."""
    with Node(hardware, http_address="127.0.0.1:0", status_page="true") as node:
        node.settings["NODE_NAME"] = "node-8"
        node.up()
        yield node, f"http://{address(node.plugin)}/"


def test_a_node_without_trouble_looks_like_one(browser):
    with shown("2x3") as (_, url):
        browser.open(url, height=1800)
        browser.picture("status-nothing-wrong")
        assert browser.evaluate(BADGES) == ["ready", "no trouble"]
        assert browser.evaluate("document.querySelectorAll('.bad, .warn, .note').length") == 0


def keep(node, region):
    """Let the plugin find a region that it keeps for a pod whose container failed."""
    node.plugin.kill()
    journal = Journal(str(node.state_dir / "journal.sqlite3"))
    asked = DebugHold(
        region,
        pod=POD,
        namespace="team-video",
        name="transcode-7d9f",
        containers=("main",),
        seconds=1800.0,
        failure="container 'main' ended with exit code 139",
        until=boot_clock() + 1000,
    )
    dirty = RegionRecord(region, Condition.DIRTY, "its owner left")
    journal.write(Change(debug_holds={region: asked}, regions={region: dirty}))
    journal.close()
    node.set(debug_namespaces="*")
    node.restarted()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_trouble_looks_different_and_is_counted_at_the_top(browser, scheme):
    with shown("2x3,1x3+no-clear") as (node, _):
        keep(node, f"{CARD_3}-p1")
        url = f"http://{address(node.plugin)}/"
        # A region that runs, one whose PR failed, one whose pod asks for what is not there.
        answer = node.kubelet.allocate(P0)
        node.kubelet.checkpoint((POD, "main", REGIONS, [P0], answer))
        node.kubelet.prestart(P0, env=request())
        node.arm(P1, "pr-error")
        for device, env in ((P1, request()), (f"{CARD}-p2", request("0" * 32))):
            node.kubelet.allocate(device)
            with pytest.raises(Refused):
                node.kubelet.prestart(device, env=env)
        state = {"FPGA_PLUGIN_STATE_DIR": str(node.state_dir)}
        done = command("card", "drain", CARD_2, settings=state)
        assert done.returncode == 0, done.stderr
        browser.open(url, height=2600, scheme=scheme)
        browser.picture(f"status-trouble-{scheme}")
        badges = browser.evaluate(BADGES)
        assert badges == [
            "ready",
            "1 failed",
            "2 refused",
            "1 drained",
            "1 kept for debugging",
            "1 never cleared",
        ]
        looks = [drawn(browser, i) for i in (0, 1, 2, 3, 6, 7)]
        running, faulted, refused, drained, free, kept = looks
        assert len({running, faulted, drained, free, kept}) == 5
        assert refused == faulted
        assert browser.complaints() == []
        browser.open(url, width=320, height=3600, scheme=scheme)
        browser.picture(f"status-trouble-phone-{scheme}")
        assert browser.evaluate("document.documentElement.scrollWidth") <= 320
        assert browser.evaluate(OUT_OF_TILES) == []


def test_sixty_four_regions_are_seen_at_once(browser):
    with shown("8x8") as (_, url):
        browser.open(url, height=3600)
        browser.picture("status-64-regions")
        assert browser.evaluate("document.querySelectorAll('.tile').length") == 64
        assert browser.evaluate("document.documentElement.scrollWidth") <= 1200
        bottom = "document.querySelectorAll('.tile')[63].getBoundingClientRect().bottom"
        assert browser.evaluate(bottom) < 2400
        browser.open(url, width=390, height=3600)
        assert browser.evaluate("document.documentElement.scrollHeight") < 10_000


def test_the_readmes_picture_is_the_demo(browser):
    """.cache/pictures/readme.png: copy it to docs/status.png when the page's look has changed."""
    with contextlib.ExitStack() as stack:
        folder, store = (
            stack.enter_context(tempfile.TemporaryDirectory(prefix="fpga-", dir="/tmp"))
            for _ in range(2)
        )
        shutil.copytree(ROOT / "bitstreams", store, dirs_exist_ok=True)
        _, url = stack.enter_context(demo("--bitstreams", store, folder=folder))
        tiles = "document.querySelectorAll('.tile.owned').length"
        browser.open(url, height=900)
        deadline = time.monotonic() + LIMIT
        while browser.evaluate(tiles) < 3 or "refused" not in str(browser.evaluate(BADGES)):
            assert time.monotonic() < deadline
            time.sleep(0.5)
            browser.open(url, height=900)
        browser.picture("readme")
        kept = (PICTURES / "readme.png").read_bytes()
        assert size(kept) == size((ROOT / "docs/status.png").read_bytes())
        assert "FPGAs of demo" in browser.evaluate("document.title")
        assert browser.complaints() == []
