"""GitHub's workflows call the project's own targets, with the least rights and nothing that floats.

actionlint judges their grammar: tests/deploy/test_workflows.py.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from repository import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z0-9.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
DEBIAN = re.compile(r"debian:[a-z]+-slim@sha256:[0-9a-f]{64}")

pytestmark = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def workflow(path) -> dict[str, Any]:
    # YAML 1.1 reads the key `on` as a truth value.
    loaded = yaml.safe_load(path.read_text())
    return {"on" if key is True else key: of for key, of in loaded.items()}


def steps(path) -> Iterator[dict[str, Any]]:
    for job in workflow(path)["jobs"].values():
        yield from job["steps"]


def test_each_action_is_a_commit_and_says_of_which_release(path) -> None:
    used = re.findall(r"uses: (\S+)(.*)$", path.read_text(), re.MULTILINE)
    assert used
    for action, comment in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action


def test_an_action_is_of_one_commit_in_all_workflows(path) -> None:
    everywhere = "\n".join(each.read_text() for each in WORKFLOWS)
    for action in set(re.findall(r"uses: ([\w/-]+)@", path.read_text())):
        assert len(set(re.findall(rf"uses: {action}@(.*)", everywhere))) == 1, action


def test_each_image_is_named_by_its_digest_and_a_releases_base_is_that_of_the_checks(path) -> None:
    found = re.findall(r"debian:[^\s}]+", path.read_text())
    named = [one for one in found if "@" in one]
    assert all(DEBIAN.fullmatch(one) for one in named)
    bases = {workflow(each).get("env", {}).get("BASE") for each in WORKFLOWS} - {None}
    assert len(bases) == 1


def test_rights_are_read_unless_a_job_says_more_and_every_job_ends(path) -> None:
    of = workflow(path)
    assert of["permissions"] == {"contents": "read"}
    assert "pull_request_target" not in of["on"], "others' code would run with our rights"
    for name, job in of["jobs"].items():
        assert job["timeout-minutes"] <= 30, name
        more = job.get("permissions", {}).keys() - {"contents"}
        assert not more or "environment" in job, f"{name}: whoever runs it is asked"


def test_no_checkout_leaves_its_token_behind(path) -> None:
    for step in steps(path):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"] == {"persist-credentials": False}


def test_what_is_run_is_ours_and_no_text_of_others_is_pasted_into_it(path) -> None:
    run = [step["run"] for step in steps(path) if "run" in step]
    assert not [text for text in run if "${{" in text], "a title or a branch may be a command"
    called = {target for text in run for target in re.findall(r"(?m)^\s*make ([a-z0-9.-]+)", text)}
    assert called
    assert called <= TARGETS


def test_every_target_of_a_change_and_of_a_release_is_called(path) -> None:
    called = set(re.findall(r"\bmake ([a-z0-9.-]+)", path.read_text()))
    wanted = {
        "checks": {"lint", "test", "test-fast", "test-deploy", "image"},
        "docs": {"docs-site"},
        "release": {"audit", "image", "release"},
    }
    assert wanted[path.stem] <= called


def test_the_key_is_where_no_package_was_installed(path) -> None:
    for name, job in workflow(path)["jobs"].items():
        text = yaml.safe_dump(job)
        if "secrets.RELEASE_KEY" in text:
            assert job["environment"] == "release", name
            assert set(re.findall(r"\bmake ([a-z0-9.-]+)", text)) == {"release"}
            assert "pip" not in text
