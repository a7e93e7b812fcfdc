"""The policy's language: what is understood, what is refused, and which rule decides."""

import asyncio
import contextlib
import io
import json
import os
from pathlib import Path

import pytest
import yaml
from structlog.testing import capture_logs

from fpga_plugin.allocation.permission import asks
from fpga_plugin.allocation.requests.parse import parse_requests
from fpga_plugin.commands.main import main
from fpga_plugin.errors import MAX_MESSAGE_BYTES, InvalidRequestError, RefusedError
from fpga_plugin.host.strict_yaml import MAX_BYTES
from fpga_plugin.ids import BitstreamId, InterfaceId, Resource, ResourceKind
from fpga_plugin.policy import admission
from fpga_plugin.policy.admission import admission_policy, not_applied
from fpga_plugin.policy.file import PolicyFile, read_policy
from fpga_plugin.policy.parse import MAX_ENTRIES, MAX_RULES, PolicyError, parse_policy
from fpga_plugin.policy.rules import MAX_STARS, Ask, Policy, parse_pattern

INTERFACE = InterfaceId("ce48969398f05f33946d560708be108a")
OTHER = InterfaceId("38d782e3b6125343b9342433e348ac4c")
AFU = BitstreamId("18b79ffa2ee54aa096ef4230dafacb5f")
AFU_2 = BitstreamId("850adcc26ceb4b229722d43375b61c66")
REGIONS = Resource.parse(f"fpga.intel.com/region-{INTERFACE}")

TEXT = f"""\
version: 1
default: deny
rules:
- name: no-debug-image
  action: deny
  namespaces: ["team-*"]
  bitstreams: [{AFU_2}]
- name: teams
  action: allow
  namespaces: [team-a, "team-b-*"]
  interfaces: [CE489693-98F0-5F33-946D-560708BE108A]
  devices: [region]
- name: blank-for-all
  action: allow
  bitstreams: [blank]
"""


def policy(text: str = TEXT) -> Policy:
    return parse_policy(text.encode())


def ask(bitstream=AFU, *, interface=INTERFACE, kind=ResourceKind.REGION) -> Ask:
    return Ask(kind=kind, interface_id=interface, bitstream_id=bitstream)


@pytest.mark.parametrize(
    ("namespace", "what", "allowed", "rule"),
    [
        ("team-a", ask(), True, "teams"),
        ("team-b-1", ask(), True, "teams"),
        ("team-b-", ask(), True, "teams"),
        ("team-b", ask(), False, ""),
        ("team-ab", ask(), False, ""),
        ("xteam-a", ask(), False, ""),
        ("team-a\n", ask(), False, ""),
        ("team-a", ask(AFU_2), False, "no-debug-image"),
        ("team-a", ask(interface=OTHER), False, ""),
        ("team-a", ask(kind=ResourceKind.WHOLE), False, ""),
        ("anybody", ask(None), True, "blank-for-all"),
        ("anybody", ask(), False, ""),
    ],
)
def test_the_first_rule_that_matches_decides(namespace, what, allowed, rule):
    verdict = policy().judge(namespace, what)
    assert (verdict.allowed, verdict.rule) == (allowed, rule)


def test_a_policy_without_rules_is_its_default():
    assert policy("version: 1\ndefault: allow").judge("x", ask()).allowed
    assert not policy("version: 1\ndefault: deny\nrules: []").judge("x", ask()).allowed


def test_only_rules_about_namespaces_need_one():
    assert policy().needs_namespace
    text = f"version: 1\ndefault: allow\nrules:\n- {{name: a, action: deny, bitstreams: [{AFU}]}}"
    assert not policy(text).needs_namespace


def test_words_that_yaml_takes_for_numbers_and_truths_are_text():
    digits = "0" * 31 + "7"
    text = f"""\
version: 1
default: deny
rules:
- name: on
  action: allow
  namespaces: [no, 1e3, 0123]
  bitstreams: [{digits}]
"""
    (rule,) = policy(text).rules
    assert (rule.name, rule.namespaces) == ("on", ("no", "1e3", "0123"))
    assert rule.bitstreams == {digits}


def test_json_says_the_same_as_yaml():
    data = {"version": 1, "default": "deny", "rules": [{"name": "a", "action": "allow"}]}
    raw = json.dumps(data, indent="\t").encode()
    assert parse_policy(raw, as_json=True) == policy(
        "version: 1\ndefault: deny\nrules: [{name: a, action: allow}]"
    )


@pytest.mark.parametrize("nothing", ["NaN", "-Infinity", "1e999", "1.5"])
def test_what_json_has_no_word_for_is_not_taken_for_nothing(nothing):
    rule = f'{{"name": "a", "action": "allow", "namespaces": {nothing}}}'
    raw = f'{{"version": 1, "default": "deny", "rules": [{rule}]}}'.encode()
    with pytest.raises(PolicyError):
        parse_policy(raw, as_json=True)


HEAD = "version: 1\ndefault: deny\n"
RULE = HEAD + "rules:\n- {name: a, action: allow, "


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("version: 2\ndefault: deny", "version"),
        ("default: deny", "version"),
        ("version: 1", "default"),
        ("version: 1\ndefault: maybe", "default"),
        (HEAD + "rule: []", "rule"),
        (HEAD + "default: allow", "line 3: key 'default' is there twice"),
        (HEAD + "rules: {}", "rules"),
        (HEAD + "rules:\n- {action: allow}", "name"),
        (HEAD + "rules:\n- {name: a}", "action"),
        (HEAD + "rules:\n- {name: a/b, action: deny}", "rule 1: 'a/b' is no name"),
        (HEAD + "rules:\n- {name: a, action: deny}\n- {name: a, action: deny}", "another rule a"),
        (RULE + "namespace: [x]}", "namespace"),
        (RULE + "namespaces: []}", "rule a: namespaces is empty"),
        (RULE + "namespaces: [Team]}", "rule a: namespaces: 'Team': no name"),
        (RULE + "namespaces: ['a/../b']}", "'a/../b'"),
        (RULE + "namespaces: ['****']}", "more than 3"),
        (RULE + "namespaces: x}", "array"),
        (RULE + "interfaces: [abc]}", "rule a: interfaces: 'abc': not 32 hex digits"),
        (RULE + "interfaces: ['../../etc']}", "'../../etc'"),
        (RULE + "bitstreams: ['*']}", "rule a: bitstreams: '*'"),
        (RULE + "devices: [card]}", "devices"),
        ("version: 1\ndefault: &a deny\nrules: *a", "line 3: references"),
        (HEAD + "rules: " + "[" * 50, "nested too deeply"),
        (HEAD + "---\n", "a second document"),
        (HEAD + "rules: [", "line 4"),
        (HEAD + "? [x]\n: y", "a key that is no text"),
        (HEAD + "!!python/object/apply:os.system [x]: y", ""),
        (HEAD + "<<: {default: allow}", "<<"),
        ("\x00", ""),
    ],
)
def test_what_is_not_understood_is_refused(text, says):
    with pytest.raises(PolicyError) as caught:
        policy(text)
    assert says in caught.value.message
    assert "\n" not in caught.value.message
    assert len(str(caught.value).encode()) <= MAX_MESSAGE_BYTES


def test_json_with_a_key_twice_is_refused():
    with pytest.raises(PolicyError, match="'default' is there twice"):
        parse_policy(b'{"version": 1, "default": "allow", "default": "deny"}', as_json=True)


@pytest.mark.parametrize("raw", [b"[" * 100_000, b"{" * 100_000, b'{"a":' * 50_000])
def test_deep_json_is_refused(raw):
    with pytest.raises(PolicyError):
        parse_policy(raw, as_json=True)


@pytest.mark.parametrize("text", ["", "# version: 1\n", "---\n"])
def test_an_empty_file_is_said_to_be_empty(text):
    with pytest.raises(PolicyError, match="the file is empty"):
        policy(text)


def test_a_file_that_is_too_large_or_not_utf8_is_refused():
    with pytest.raises(PolicyError, match="bytes"):
        parse_policy(b"#" * (MAX_BYTES + 1))
    with pytest.raises(PolicyError, match="UTF-8"):
        parse_policy(b"\xff")


def test_a_long_unknown_key_does_not_flood_the_message():
    with pytest.raises(PolicyError) as caught:
        policy(HEAD + "k" * 5000 + ": x")
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("text", ["", "-a", "a-", "a.b", "a_b", "ä", "a" * 64, "a\n"])
def test_a_pattern_that_no_namespace_can_match_is_refused(text):
    with pytest.raises(ValueError, match="no name of a namespace"):
        parse_pattern(text)


def test_each_request_that_fits_is_a_question():
    env = {
        "FPGA_REGION_1": INTERFACE, "FPGA_AFU_1": AFU,
        "FPGA_REGION_2": INTERFACE.upper(), "FPGA_BITSTREAM_ID_2": AFU_2,
        "FPGA_REGION_3": OTHER, "FPGA_AFU_3": AFU,
    }  # fmt: skip
    assert asks(REGIONS, parse_requests(env)) == (ask(AFU), ask(AFU_2))
    assert asks(Resource.parse(f"x.y/fpga-{OTHER}"), parse_requests(env)) == (
        ask(AFU, interface=OTHER, kind=ResourceKind.WHOLE),
    )


def test_no_request_is_a_question_about_blank_devices():
    assert asks(REGIONS, ()) == (ask(None),)


def test_requests_of_which_none_fits_are_no_question():
    env = {"FPGA_REGION_3": OTHER, "FPGA_AFU_3": AFU}
    assert asks(REGIONS, parse_requests(env)) == ()


EXAMPLE = Path(__file__).parents[3] / "deploy" / "admission"


def run(*arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(["policy", *arguments])
    return code, out.getvalue()


def test_the_shipped_admission_policy_is_made_of_the_shipped_policy(monkeypatch):
    monkeypatch.chdir(EXAMPLE)
    code, text = run("admission", "--file", "policy.yaml")
    assert (code, text) == (0, (EXAMPLE / "validating-admission-policy.yaml").read_text())


def test_a_rule_may_be_about_preprogrammed_functions():
    judged = policy(HEAD + "rules:\n- {name: fixed, action: allow, devices: [af]}\n")
    assert judged.judge("x", ask(kind=ResourceKind.AF)).allowed
    assert not judged.judge("x", ask()).allowed


def test_the_admission_policy_takes_what_is_no_id_for_a_hidden_request():
    made, _binding = admission_policy(policy(HEAD), prefix="fpga.intel.com")
    variables = {one["name"]: one["expression"] for one in made["spec"]["variables"]}
    hidden = ".map(v, v.matches('^[0-9a-f]{32}([0-9a-f]{8})?$') ? v : '?')"
    assert hidden in variables["refusals"]


def test_rules_about_functions_are_noted_where_no_admission_policy_can_apply_them(tmp_path, capsys):
    path = tmp_path / "policy.yaml"
    rules = "rules:\n- {name: fixed, action: allow, devices: [af]}\n- {name: all, action: allow}\n"
    path.write_text(HEAD + rules)
    code, text = run("admission", "--file", str(path))
    note = "devices: [af] of rule fixed is not in it"
    assert code == 0
    assert f"# {note}" in text
    assert len(list(yaml.safe_load_all(text))) == 2
    assert note in capsys.readouterr().err


def test_the_command_tells_what_the_plugin_would_decide(capsys):
    file = str(EXAMPLE / "policy.yaml")
    of = ("check", "--file", file, "--interface", INTERFACE, "--namespace")
    assert run(*of, "team-storage", "--bitstream", AFU)[0] == 0
    code, text = run(*of, "team-storage", "--bitstream", AFU, "--whole", "--json")
    assert (code, json.loads(text)) == (1, {"allowed": False, "rule": "no-whole-cards"})
    assert run(*of, "stranger") == (
        1,
        f"refused by the default: a region of interface {INTERFACE} with no bitstream\n",
    )
    assert run("check", "--file", file)[1].splitlines()[-1] == "deny   (default)"
    assert run("check", "--file", file, "--namespace", "x")[0] == 2


def test_the_command_is_asked_about_functions_too(tmp_path):
    path = tmp_path / "policy.yaml"
    rule = f"{{name: fixed, action: allow, devices: [af], bitstreams: ['{AFU}']}}"
    path.write_text(f"{HEAD}rules:\n- {rule}\n")
    of = ("check", "--file", str(path), "--interface", INTERFACE, "--namespace", "x")
    code, text = run(*of, "--function", AFU.upper())
    assert (code, text.split(":")[0]) == (0, "allowed by rule fixed")
    assert "a preprogrammed region" in text
    assert run(*of, "--function", "0" * 32)[0] == 1
    assert run(*of, "--bitstream", AFU)[0] == 1, "the same image, to be programmed"
    assert run(*of, "--function", AFU, "--whole")[0] == 2
    assert run(*of, "--function", AFU, "--bitstream", AFU)[0] == 2


def test_the_command_says_what_is_wrong_with_a_file(tmp_path, capsys):
    path = tmp_path / "policy.yaml"
    path.write_text("version: 1\ndefault: never")
    assert main(["policy", "check", "--file", str(path)]) == 1
    assert f"policy file {path}: Invalid enum value 'never'" in capsys.readouterr().err


def test_a_policy_too_large_for_one_expression_is_refused():
    names = ", ".join(f"namespace-{'x' * 40}-{n}" for n in range(1000))
    rules = "".join(f"- {{name: r{n}, action: allow, namespaces: [{names}]}}\n" for n in range(4))
    large = policy(HEAD + "rules:\n" + rules)
    with pytest.raises(RefusedError, match="the API server takes"):
        admission_policy(large, prefix="fpga.intel.com")


@pytest.fixture
def file(tmp_path) -> Path:
    """Laid out as kubelet lays out a projected volume, whose own directory is a tmpfs's."""
    mount = tmp_path / "mount"
    (mount / "..1").mkdir(parents=True)
    os.chmod(mount, 0o1777)
    os.chmod(mount / "..1", 0o755)
    (mount / "..1" / "policy.yaml").write_text(TEXT)
    os.chmod(mount / "..1" / "policy.yaml", 0o644)
    (mount / "..data").symlink_to("..1")
    (mount / "policy.yaml").symlink_to("..data/policy.yaml")
    return mount / "policy.yaml"


@pytest.mark.parametrize(
    ("mode", "above", "says"),
    [
        (0o646, 0o755, r"may be written by anybody"),
        (0o664, 0o755, r"may be written by group"),
        (0o644, 0o777, r"its directory .*/\.\.1 may be written by anybody"),
        (0o644, 0o775, r"its directory .*/\.\.1 may be written by group"),
    ],
)
def test_a_policy_that_others_may_write_is_refused(file, mode, above, says):
    assert read_policy(str(file), guarded=True) == policy()
    os.chmod(file, mode)
    os.chmod(file.parent / "..1", above)
    with pytest.raises(PolicyError, match=f"^policy file {file}: {says}") as caught:
        read_policy(str(file), guarded=True)
    assert caught.value.hint.startswith("`chmod go-w ")
    assert read_policy(str(file)) == policy()  # on a desk, by the command line


def test_a_policy_in_a_volume_that_anybody_may_write_is_refused(file):
    """As kubelet makes the directory of a ConfigMap volume: the links in it may be replaced."""
    os.chmod(file.parent, 0o777)
    with pytest.raises(PolicyError, match=f"its directory {file.parent} may be written by anybody"):
        read_policy(str(file), guarded=True)


def test_a_policy_that_becomes_anybodys_is_not_taken_and_the_one_before_stays(file):
    async def steps() -> None:
        policy_file = PolicyFile(str(file), guarded=True)
        os.chmod(file, 0o666)
        file.write_text("version: 1\ndefault: allow\nrules: []\n")
        assert await policy_file.current() == policy()
        assert "may be written by anybody" in policy_file.problem
        os.chmod(file, 0o644)
        assert (await policy_file.current()).rules == ()
        assert not policy_file.problem

    asyncio.run(steps())


def test_a_version_that_is_not_taken_is_said_once_by_whoever_looks_first(file):
    async def steps() -> None:
        policy_file = PolicyFile(str(file), guarded=True)
        for text in ("version: 9\n", "version: 10\n"):
            file.write_text(text)
            with capture_logs() as logs:
                await policy_file.current()  # a PreStart
                await policy_file.reload()  # the watcher
            assert [line["log_level"] for line in logs] == ["error"]
        with capture_logs() as logs:
            os.chmod(file, 0o646)  # the same text is wrong for another reason
            await policy_file.current()
        assert "may be written by anybody" in logs[0]["error"]

    asyncio.run(steps())


def test_a_policy_file_is_followed_however_it_changes(file):
    async def steps() -> None:
        policy_file = PolicyFile(str(file), guarded=True)
        policy_file.start()

        async def until(condition) -> None:
            async with asyncio.timeout(10):
                while not condition():  # noqa: ASYNC110  # nobody announces it
                    await asyncio.sleep(0.01)

        try:
            file.write_text("version: 1\ndefault: allow\nrules: []\n")
            await until(lambda: policy_file.policy.rules == ())
            link = file.parent / "..data"
            link.rename(file.parent / "gone")
            await until(lambda: "leads nowhere" in policy_file.problem)
            (file.parent / "gone").rename(link)
            (file.parent / "..1" / "policy.yaml").write_text(TEXT)
            await until(lambda: policy_file.policy == policy())
        finally:
            policy_file.close()

    asyncio.run(steps())


def test_a_read_without_a_thread_does_not_end_the_following(file, monkeypatch):
    refused = []

    async def once(*args, to_thread=asyncio.to_thread, **kwargs):
        if len(refused) < 2:
            refused.append(args)
            raise RuntimeError("can't start new thread")
        return await to_thread(*args, **kwargs)

    async def steps() -> None:
        policy_file = PolicyFile(str(file), guarded=True)
        policy_file.start()
        try:
            async with asyncio.timeout(10):
                for text in ("rules: [] # 1", "rules: [] # 2", "rules: []"):
                    file.write_text(f"version: 1\ndefault: allow\n{text}\n")
                    await asyncio.sleep(0.05)
                while policy_file.policy.rules:  # noqa: ASYNC110  # nobody announces it
                    await asyncio.sleep(0.01)
        finally:
            policy_file.close()

    monkeypatch.setattr(asyncio, "to_thread", once)
    with capture_logs() as lines:
        asyncio.run(steps())
    assert [line["event"] for line in lines if line["log_level"] == "error"] == [
        "the policy file cannot be followed"
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="root gives files away")
def test_a_policy_of_another_user_is_refused(file):
    os.chown(file, 12345, 12345)
    with pytest.raises(PolicyError, match="belongs to user 12345") as caught:
        read_policy(str(file), guarded=True)
    assert caught.value.hint.startswith("give it to root: `chown -h root ")


def test_a_name_that_nobody_looked_up_is_not_judged_but_refused():
    env = {"FPGA_REGION_1": INTERFACE, "FPGA_BITSTREAM_ID_1": "gzip"}
    with pytest.raises(InvalidRequestError, match="'gzip': neither"):
        asks(REGIONS, parse_requests(env))


def test_a_policy_is_taken_up_to_its_limits_and_refused_beyond():
    """What is larger would keep the loop busy; what is at its limit is an operator's."""
    rule = "- {name: r%d, action: allow}\n"
    entries = [f"ns-{n}" for n in range(MAX_ENTRIES)]
    at_limits = HEAD + "rules:\n" + "".join(rule % n for n in range(MAX_RULES))
    assert len(policy(at_limits).rules) == MAX_RULES
    with pytest.raises(PolicyError, match=f"more than {MAX_RULES} rules"):
        policy(at_limits + rule % MAX_RULES)
    names = HEAD + "rules:\n- {name: r, action: allow, namespaces: [%s]}\n"
    assert len(policy(names % ", ".join(entries)).rules[0].namespaces) == MAX_ENTRIES
    with pytest.raises(PolicyError, match=f"more than {MAX_ENTRIES} entries"):
        policy(names % ", ".join([*entries, "one-more"]))
    assert parse_pattern("*a" * MAX_STARS)


def test_the_admission_policy_has_every_rule_and_the_default_as_the_last_one():
    """A rule that is narrower here than in the plugin lets pods in that then never start; one that
    is wider keeps out whom the plugin would serve."""
    rule = f"{{name: cards, action: deny, devices: [whole, af], bitstreams: [{AFU}, blank]}}"
    text = f"{TEXT}- {rule}\n"
    spec = admission_policy(policy(text), prefix="fpga.intel.com")[0]["spec"]
    rows = {row["name"][0]: row for row in json.loads(spec["variables"][0]["expression"])}
    every = ["*"]
    assert list(rows) == ["no-debug-image", "teams", "blank-for-all", "cards", ""]
    assert rows["no-debug-image"]["bitstreams"] == [AFU_2]
    assert rows["no-debug-image"]["devices"] == rows["no-debug-image"]["interfaces"] == every
    assert rows["teams"]["interfaces"] == [INTERFACE]
    assert rows["teams"]["devices"] == ["region"]
    assert rows["blank-for-all"]["bitstreams"] == ["blank"]
    assert rows["cards"]["bitstreams"] == [AFU, "blank"]
    assert rows["cards"]["devices"] == ["af", "whole"]
    assert rows[""] == {
        "name": [""],
        "action": ["deny"],
        "namespaces": ["^.*$"],
        "interfaces": every,
        "bitstreams": every,
        "devices": every,
    }
    assert not_applied(policy(text)) == ["cards"], "of the rules with `devices`, that with af"


def test_a_policy_as_large_as_the_api_server_takes_is_taken(monkeypatch):
    variables = admission_policy(policy(), prefix="fpga.intel.com")[0]["spec"]["variables"]
    monkeypatch.setattr(admission, "MAX_EXPRESSION", len(variables[0]["expression"]))
    admission_policy(policy(), prefix="fpga.intel.com")
    monkeypatch.setattr(admission, "MAX_EXPRESSION", admission.MAX_EXPRESSION - 1)
    with pytest.raises(RefusedError, match="the API server takes"):
        admission_policy(policy(), prefix="fpga.intel.com")


def test_a_question_is_told_in_words():
    assert str(ask()) == f"a region of interface {INTERFACE} with bitstream {AFU}"
    assert str(ask(None, kind=ResourceKind.WHOLE)).endswith("with no bitstream")
