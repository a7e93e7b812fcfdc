"""What the repository refers to is in the repository, or is a public source that is named."""

import re
from pathlib import PurePosixPath

import pytest
from repository import ROOT, texts

WRONG_ON_PURPOSE = {"tests/unit/project/test_references.py", "tests/unit/project/test_docs.py"}
"""Tests whose examples lead nowhere."""

TEXTS = {name: text for name, text in texts() if name not in WRONG_ON_PURPOSE}
DOCUMENTS = {PurePosixPath(name).name for name in TEXTS if name.endswith(".md")}
ARCHITECTURE = TEXTS["docs/architecture.md"]

OF_OTHER_PROJECTS = {"dns/specification.md"}
"""Documents that belong to others; the text around them says to whom."""

OUTSIDE = re.compile(r"\bthe[\s#/*>]+design\b|\b(?:facts|seeds)/|/work/", re.IGNORECASE)
"""How a text speaks of papers that only its author had."""

DOCUMENT = re.compile(r"(?<![\w./-])[\w./-]*\w\.md\b")
INVARIANT = re.compile(
    r"\binvariants?[\s#]+(\d+)((?:,[\s#]+\d+|[\s#]+(?:and|to)[\s#]+\d+)*)", re.IGNORECASE
)


def unfindable(text: str) -> list[str]:
    """What a text refers to that its reader cannot find."""
    missing = [" ".join(match.group().split()) for match in OUTSIDE.finditer(text)]
    named = set(DOCUMENT.findall(text)) - OF_OTHER_PROJECTS
    return missing + sorted(name for name in named if PurePosixPath(name).name not in DOCUMENTS)


def invariants(text: str) -> list[int]:
    """Every number that a text gives of an invariant."""
    return [
        int(number)
        for match in INVARIANT.finditer(text)
        for number in re.findall(r"\d+", match.group())
    ]


def test_nothing_refers_to_a_document_outside_the_repository():
    assert len(TEXTS) > 300
    assert {name: lost for name, text in TEXTS.items() if (lost := unfindable(text))} == {}


@pytest.mark.parametrize(
    "text",
    [
        "the rules of DESIGN.md section 6",
        "invariant 10 of the design",
        "as the\n# design says",
        "(facts: kubelet.md section 1.7)",
        "see facts/wire",
        "the KEPs in seeds/",
    ],
)
def test_a_reference_to_a_document_outside_the_repository_is_found(text):
    assert unfindable(text)


@pytest.mark.parametrize("text", ["docs/architecture.md", "a design that overheats the card"])
def test_other_text_is_no_such_reference(text):
    assert unfindable(text) == []


def test_the_architecture_has_the_invariants_that_comments_refer_to():
    numbered = re.findall(r"^\*\*(\d+)\. ", ARCHITECTURE, re.MULTILINE)
    assert [int(number) for number in numbered] == list(range(1, 12))
    referred = {number for text in TEXTS.values() for number in invariants(text)}
    assert referred <= set(range(1, 12))
    assert invariants("invariants 6 and 17, invariant\n    # 12") == [6, 17, 12]


def test_the_architecture_names_modules_and_tests_that_exist():
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", ARCHITECTURE)
    assert len(named) > 50
    for path, test in named:
        place = next((p for p in (ROOT / path, ROOT / "fpga_plugin" / path) if p.exists()), None)
        assert place is not None, path
        assert not test or f"def {test}(" in place.read_text(encoding="utf-8"), test


def names_in_modules(text: str) -> list[tuple[str, str]]:
    """What a text says that a module has: `module.py` (`name`, `name`)."""
    return [
        (module, name)
        for module, names in re.findall(r"`([\w/]+\.py)`\s\(((?:`\w+`(?:,\s)?)+)\)", text)
        for name in re.findall(r"\w+", names)
    ]


def test_the_architecture_names_functions_that_exist():
    told = names_in_modules(ARCHITECTURE)
    walks = names_in_modules(ARCHITECTURE.partition("\n## Four walks")[2].partition("\n## ")[0])
    assert len(walks) > 20
    missing = [
        (module, name)
        for module, name in told
        if not re.search(
            rf"^\s*(async def|def|class) {name}\b", TEXTS[f"fpga_plugin/{module}"], re.MULTILINE
        )
    ]
    assert missing == []


def test_each_invariant_has_its_code_and_its_tests():
    section = ARCHITECTURE.partition("## Invariants")[2]
    rows = re.findall(r"^\| (\d+) \| (.+) \| (.+) \|$", section.partition("\n## ")[0], re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 12))
    for number, code, tests in rows:
        assert re.search(r"`[\w/]+\.py", code), number
        assert "`tests/" in tests, number
