"""The block that `make bench BENCH_ARGS=--write` puts into docs/performance.md."""

import json
from pathlib import Path

import pytest
from bench_support import bench_module

ROOT = Path(__file__).parents[3]


@pytest.fixture
def document(monkeypatch, tmp_path):
    with bench_module("document") as module:
        page = tmp_path / "performance.md"
        page.write_text(f"before\n{module.BEGIN}old\n{module.END}after\n")
        monkeypatch.setattr(module, "PAGE", page)
        monkeypatch.setattr(module, "KEPT", tmp_path / "measured.json")
        monkeypatch.setattr(module, "LISTING", tmp_path / "measured.txt")
        yield module


def figures(document, *, start=150.0, rss=31.0):
    kind = document.Figure
    return [
        kind("1x4", "start to registered, first resource", start, "ms", reference=100.0),
        kind("1x4", "RSS at once", rss, "MiB"),
        kind("16x4", "start to registered, first resource", 300.0, "ms", reference=100.0),
        kind("memory by feature", "dra, idle, RSS at once", 43.9, "MiB"),
    ]


def test_the_block_is_replaced_and_what_stands_around_it_stays(document):
    document.write({"cores": 2, "load": 0.5}, figures(document), "23 November 2026")
    text = document.PAGE.read_text()
    assert text.startswith(f"before\n{document.BEGIN}")
    assert text.endswith(f"{document.END}after\n")
    assert "old" not in text
    assert "Measured on 23 November 2026. cores 2; load 0.5." in text
    assert "| cards x regions | 1x4 | 16x4 |\n|---|---|---|\n" in text
    assert (
        "| start to registered, first resource, ms | 150 | 300 |\n| of a bare start | 1.5 | 3 |\n"
        in text
    )
    assert "| RSS at once, MiB | 31 | - |\n" in text
    listing = document.LISTING.read_text()
    assert listing.startswith("Measured on 23 November 2026. cores 2; load 0.5.\n")
    assert "dra, idle, RSS at once" in listing


def test_the_next_run_says_what_got_slower_or_larger(document):
    document.write({}, figures(document), "the first day")
    document.write({}, figures(document), "the second day")
    text = document.PAGE.read_text()
    assert "Nothing is more than a tenth slower or larger than on the first day.\n" in text
    document.write({}, figures(document, start=180.0, rss=40.0), "the third day")
    text = document.PAGE.read_text()
    assert "| slower or larger | the second day | now |\n" in text
    assert "| 1x4: start to registered, first resource, of its reference | 1.5 | 1.8 |\n" in text
    assert "| 1x4: RSS at once, MiB | 31 | 40 |\n" in text
    assert "16x4: start" not in text
    assert json.loads(document.KEPT.read_text())["day"] == "the third day"


def test_a_page_without_the_block_is_left_alone(document):
    document.PAGE.write_text("nothing")
    with pytest.raises(ValueError, match="has no block between"):
        document.write({}, figures(document), "today")
    with pytest.raises(ValueError, match="has no block between"):
        document.around()
    assert document.PAGE.read_text() == "nothing"


def test_figures_of_another_machine_are_not_held_against_each_other(document):
    document.write({"cpu": "a", "load": 1.0}, figures(document), "the first day")
    document.write({"cpu": "a", "load": 9.0}, figures(document, rss=60.0), "the second day")
    assert "| slower or larger | the first day | now |" in document.PAGE.read_text()
    document.write({"cpu": "b", "load": 9.0}, figures(document, rss=99.0), "the third day")
    text = document.PAGE.read_text()
    assert "slower or larger" not in text
    assert "Not held against the figures of the second day: they are of another machine." in text


def test_what_the_trend_names_is_measured(document):
    """It names figures by their text, and has `-` for one that is not there."""
    listing = (ROOT / "benchmarks" / "measured.txt").read_text()
    for _, name, _ in document._TREND:
        assert f"\n  {name}  " in listing, name


def test_the_projects_page_has_the_block(document):
    text = (ROOT / "docs" / "performance.md").read_text()
    assert text.count(document.BEGIN) == text.count(document.END) == 1
    assert text.index(document.BEGIN) < text.index(document.END)
