"""What the documents point to is there: links and their anchors, files, make targets, alerts."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path, PurePosixPath
from posixpath import normpath
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token
from repository import ROOT, texts

MARKDOWN = MarkdownIt("commonmark").enable("table")
PAGES = dict(texts(".md"))
MAKEFILE = (ROOT / "Makefile").read_text()


@cache
def parsed(page: str) -> Sequence[Token]:
    return MARKDOWN.parse(PAGES[page])


def tokens(page: str) -> Iterator[Token]:
    for token in parsed(page):
        yield token
        yield from token.children or ()


def links(page: str) -> list[str]:
    targets = (token.attrGet("href") or token.attrGet("src") for token in tokens(page))
    return [str(target) for target in targets if target]


def code(page: str) -> Iterator[str]:
    """What is set as code, within lines and as blocks."""
    kinds = {"code_inline", "code_block", "fence"}
    return (token.content for token in tokens(page) if token.type in kinds)


@cache
def anchors(page: str) -> set[str]:
    """The ids of a page's headings, as GitHub and GitLab make them."""
    found: set[str] = set()
    seen: Counter[str] = Counter()
    parsed = MARKDOWN.parse(PAGES[page])
    for before, token in pairwise(parsed):
        if before.type != "heading_open":
            continue
        text = "".join(child.content for child in token.children or ())
        anchor = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return found


def broken(page: str, link: str) -> str:
    """What is wrong with a link, or nothing."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return ""
    path = normpath(PurePosixPath(page).parent / unquote(parts.path)) if parts.path else page
    if parts.path.startswith("/") or path.startswith(".."):
        return "leads out of the repository"
    if not (ROOT / path).exists():
        return "no such file"
    if parts.fragment and parts.fragment not in anchors(path):
        return "no such heading"
    return ""


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_and_its_anchor_lead_somewhere(page):
    found = {link: why for link in links(page) if (why := broken(page, link))}
    assert not found


@pytest.mark.parametrize(
    ("link", "why"),
    [
        ("docs/nowhere.md", "no such file"),
        ("docs/install.md#nowhere", "no such heading"),
        ("#nowhere", "no such heading"),
        ("../elsewhere.md", "leads out of the repository"),
        ("/etc/passwd", "leads out of the repository"),
        ("docs/install.md#uninstall", ""),
        ("https://keepachangelog.com/en/1.1.0/", ""),
    ],
)
def test_a_link_that_leads_nowhere_is_noticed(link, why):
    assert broken("README.md", link) == why


def pages_of(nav: object) -> list[str]:
    """The pages that a part of the site's navigation leads to."""
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    assert isinstance(entries, Iterable)
    return [page for entry in entries for page in pages_of(entry)]


def test_the_site_leads_to_every_page_of_the_docs_once():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    documents = sorted(page for page in PAGES if page.startswith("docs/"))
    assert sorted(f"docs/{page}" for page in pages_of(site["nav"])) == documents


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/")])
def test_a_page_of_the_site_shows_as_it_does_in_the_repository(page):
    """The site has no other files of the repository, and begins a list after an empty line only."""
    outside = [
        link
        for link in links(page)
        if not urlsplit(link).scheme and normpath(PurePosixPath(page).parent / link)[:5] != "docs/"
    ]
    assert outside == [], "name the file as code, without a link"
    blocks = [block for block in parsed(page) if block.level <= 1 and block.map]
    joined = [
        after.map
        for before, after in pairwise(blocks)
        if before.type == "inline" and before.map[1] == after.map[0]
        if after.type in {"bullet_list_open", "ordered_list_open"}
    ]
    assert joined == [], "put an empty line before the list"


def test_every_page_that_code_or_a_message_names_is_there():
    named = {
        (path, page)
        for path, text in texts()
        for page in re.findall(r"\b(docs/[\w-]+\.md)\b", text)
        if path != "tests/unit/project/test_docs.py"
    }
    assert len(named) > 20
    assert {(path, page) for path, page in named if page not in PAGES} == set()


OURS = re.compile(
    r"(?<![\w./])(?:fpga_plugin|tests|deploy|docs|benchmarks|\.ci|\.github)/[\w./*-]*\w"
)


@pytest.mark.parametrize("page", PAGES)
def test_every_file_of_this_repository_that_a_page_names_is_there(page):
    named = {path for text in code(page) for path in OURS.findall(text)}
    assert {path for path in named if not any(ROOT.glob(path))} == set()


MAKE = r"(?m)^(?:.*[;&] )?make ([a-z][\w.-]*(?: [a-z][\w.-]*)*)"
"""The targets of a command line."""


def targets() -> set[str]:
    return set(re.findall(r"(?m)^([a-z0-9.-]+):", MAKEFILE))


@pytest.mark.parametrize("page", PAGES)
def test_every_make_target_that_a_page_names_is_there(page):
    commands = [line for text in code(page) for line in re.findall(MAKE, text)]
    assert {name for line in commands for name in line.split()} - targets() == set()


def test_every_tier_of_ci_is_explained():
    tiers = re.findall(r"(?m)^  '([\w.-]+) [0-9]+", (ROOT / ".ci/run").read_text())
    explained = set(re.findall(r"(?m)^\| `make ([\w.-]+)` \|", PAGES["docs/testing.md"]))
    assert tiers
    assert set(tiers) - explained == set()


def test_the_runbook_says_what_to_do_about_every_alert_and_about_no_other():
    rules = yaml.safe_load(Path(ROOT, "deploy/monitoring/alerts.yaml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    section = PAGES["docs/runbook.md"].partition("\n## Alerts\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"(?m)^\| `(\w+)` \|", section)) == alerts
