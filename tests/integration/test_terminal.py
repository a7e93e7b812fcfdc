"""Every command as a person runs it: full disks, closed pipes, Ctrl-C, a setting that is wrong."""

import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import nursery
import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "FPGA_PLUGIN_BACKEND": "simulated",
    "FPGA_PLUGIN_BITSTREAM_DIR": str(ROOT / "bitstreams"),
}
COMMANDS = {
    "version": ["version"],
    "card-list": ["card", "list"],
    "card-show": ["card", "show", "--assumptions"],
    "devices": ["devices"],
    "devices-json": ["devices", "--json"],
    "list": ["bitstream", "list"],
    "verify": ["bitstream", "verify"],
    "policy": ["policy", "check", "--file", str(ROOT / "deploy/admission/policy.yaml")],
    "demo": ["demo", "--json"],
    "completion": ["completion", "fish"],
    "bare": [],
}
each_command = pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)


def run(*arguments, env=ENVIRONMENT):
    return nursery.run(arguments, env, str(ROOT), timeout=60)


def forked(stdout, *arguments):
    """Run a command with this standard output; its exit code and standard error."""
    process = nursery.launch(arguments, ENVIRONMENT, str(ROOT), stdout=stdout)
    with process.stderr as stderr:
        said = stderr.read().decode()
    return process.wait(60), said


def program(stdout, *arguments, **more):
    """The same as a new program."""
    done = subprocess.run(
        [sys.executable, "-m", "fpga_plugin", *arguments],
        env=ENVIRONMENT, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60,
        check=False, **more,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.fixture
def unread():
    """A pipe that nobody reads any more."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


each_way = pytest.mark.parametrize(
    ("into", "command"),
    [
        *(pytest.param(forked, command, id=name) for name, command in COMMANDS.items()),
        pytest.param(program, COMMANDS["demo"], id="a new program"),
    ],
)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@each_way
def test_output_that_cannot_be_written_is_a_failure_in_one_line(into, command):
    with open("/dev/full", "w") as full:
        code, said = into(full.fileno(), *command)
    assert code == 1
    assert said == ("fpga-plugin: the output cannot be written: No space left on device\n")


@each_way
def test_a_reader_who_has_had_enough_hears_no_complaint(unread, into, command):
    assert into(unread, *command) == (0, "")


def test_a_command_that_fails_says_so_to_a_reader_who_has_had_enough(unread):
    code, _ = forked(unread, "bitstream", "verify", str(ROOT / "bitstreams/README.md"))
    assert code == 1


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        (["stauts"], "did you mean status?"),
        (["card", "drian", "0000-10-00.0"], "did you mean drain?"),
        (["bitstream", "verfy"], "did you mean verify?"),
        (
            ["policy", "check", "--file", "x", "--bitstream", "hello_afu"],
            "argument --bitstream: 'hello_afu' is not 32 hex digits",
        ),
        (
            ["policy", "check", "--file", "x", "--interface", "hello"],
            "argument --interface: 'hello' is not 32 hex digits",
        ),
        (["card", "show", "--asumptions"], "no option '--asumptions'; did you mean --assumptions?"),
        (["version", "now"], "fpga-plugin version: error: too many arguments: 'now'"),
        (["demo", "--serve", "foo"], "argument --serve: 'foo' is not host:port or :port"),
    ],
)
def test_a_mistake_on_the_command_line_is_named_with_what_was_meant(command, meant):
    done = run(*command)
    assert done.returncode == 2
    assert meant in done.stderr


@pytest.mark.parametrize("command", [[], ["card"], ["bitstream", "verify"]])
def test_help_is_a_command_too(command):
    asked, option = (run(*words) for words in (["help", *command], [*command, "--help"]))
    assert asked.returncode == 0
    assert asked.stdout == option.stdout
    assert asked.stdout.startswith(" ".join(["usage: fpga-plugin", *command]))


def test_a_policy_file_that_the_option_names_is_said_of_the_option():
    done = run("policy", "check", "--file", "nosuch.yaml")
    assert done.returncode == 1
    assert done.stderr == "fpga-plugin: --file nosuch.yaml: no such file\n  check the path\n"


def test_fleet_outside_a_cluster_says_which_credentials_it_looks_for(tmp_path):
    done = run("fleet", env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)})
    assert done.returncode == 1
    assert "ConfigError" not in done.stderr
    assert "--kubeconfig" in done.stderr


@each_command
def test_without_standard_streams_it_does_its_work(command):
    def close():
        os.close(0)
        os.close(1)

    # `<&- >&-` of a shell
    assert program(None, *command, preexec_fn=close) == (0, "")


@pytest.mark.parametrize("command", [["status"], ["card", "drain", "0000-10-00.0"]])
def test_an_interrupt_is_one_line(tmp_path, command):
    """A plugin that does not answer, and somebody who does not want to wait for it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "status.sock"))
        listener.listen()
        listener.settimeout(60)
        with subprocess.Popen(
            [sys.executable, "-m", "fpga_plugin", *command],
            env={**ENVIRONMENT, "FPGA_PLUGIN_STATE_DIR": str(tmp_path)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as asking:  # fmt: skip
            asked, _ = listener.accept()
            with asked:
                asking.send_signal(signal.SIGINT)
                out, err = asking.communicate(timeout=60)
    assert (asking.returncode, out, err) == (130, "", "fpga-plugin: interrupted\n")


@pytest.mark.parametrize(
    "command",
    [["--help"], ["run", "--help"], ["status", "--help"], ["bitstream", "list", "--help"]],
    ids=" ".join,
)
def test_help_is_given_while_a_setting_is_wrong(command):
    done = run(*command, env={**ENVIRONMENT, "FPGA_PLUGIN_SCRUB": "often"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: fpga-plugin")


def test_a_wrong_setting_still_stops_a_command_that_uses_it():
    done = run("bitstream", "list", env={**ENVIRONMENT, "FPGA_PLUGIN_SCRUB": "often"})
    assert done.returncode == 2
    assert "FPGA_PLUGIN_SCRUB='often'" in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["devices"],
        ["demo"],
        ["run"],
        ["status"],
        ["card", "drain"],
        ["card", "list"],
        ["card", "show"],
        ["policy", "check"],
        ["policy", "admission"],
        ["completion"],
    ]
    + [["bitstream", word] for word in ("list", "verify", "install", "remove", "sign", "forget")],
    ids=" ".join,
)
def test_help_fits_a_terminal_of_eighty_columns(command):
    done = run(*command, "--help", env={**ENVIRONMENT, "COLUMNS": "80"})
    *_, prose = done.stdout.partition("\n\n")
    # What is to be copied has its own lines.
    prose, _, _ = prose.partition("\nexample:")
    # A path is not broken.
    lines = [line for line in prose.splitlines() if "(default: /" not in line]
    assert max(map(len, lines)) <= 80


def test_without_a_command_it_says_which_there_are():
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run("--help").stdout


def test_errors_of_all_commands_look_alike(tmp_path):
    for command in (["bitstream", "inspect", str(tmp_path / "none.gbs")], ["policy", "check"]):
        done = run(*command)
        first, *hints = done.stderr.splitlines()
        assert done.returncode in {1, 2}
        assert first.startswith(("fpga-plugin: ", "usage: "))
        if first.startswith("fpga-plugin: "):
            assert all(hint.startswith("  ") for hint in hints)


def completed(*words):
    """What bash would offer for the last of these words."""
    script = run("completion", "bash").stdout
    asked = " ".join(f"'{word}'" for word in words)
    script += f"""
COMP_WORDS=({asked}); COMP_CWORD={len(words) - 1}
_shtab_fpga_plugin
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return set(done.stdout.split())


def test_bash_completes_commands_and_options():
    every = completed("fpga-plugin", "")
    assert {"run", "demo", "devices", "status", "card", "bitstream", "policy"} <= every
    assert completed("fpga-plugin", "bitstream", "ins") == {"inspect", "install"}
    assert "--blank" in completed("fpga-plugin", "bitstream", "install", "--")
    assert "--blank" in completed("fpga-plugin", "bitstream", "install", "--force", "x", "--b")
    assert completed("fpga-plugin", "card", "un") == {"undrain"}
    assert completed("fpga-plugin", "completion", "z") == {"zsh"}
    assert completed("fpga-plugin", "nonsense", "run") == {"run"}


class Zsh:
    """A zsh on a terminal of its own, in which `fpga-plugin` says with which words it was called.

    Nothing but its line editor completes as it does for a person.
    """

    def __init__(self, folder):
        script = folder / "completion.zsh"
        script.write_text(run("completion", "zsh").stdout)
        self._said = b""
        self._terminal, its = pty.openpty()
        self._process = subprocess.Popen(
            ["zsh", "-f", "-i", "+m"],
            stdin=its,
            stdout=its,
            stderr=its,
            env={"PATH": os.environ["PATH"], "HOME": str(folder), "TERM": "dumb"},
            start_new_session=True,
        )
        os.close(its)
        self._type(
            "PS1='REA''DY> '; autoload -U compinit && compinit -u -D;"
            f' eval "$(<{script})";'
            ' fpga-plugin() { print -r -- "CAL""LED:$*:" }\n'
        )
        self._until(b"READY> ")

    def _type(self, text):
        os.write(self._terminal, text.encode())

    def _until(self, mark):
        deadline = time.monotonic() + 60
        while mark not in self._said:
            left = max(0, deadline - time.monotonic())
            ready, _, _ = select.select([self._terminal], [], [], left)
            assert ready, self._said
            self._said += os.read(self._terminal, 4096)
        before, _, self._said = self._said.partition(mark)
        return before

    def completes(self, line):
        """The words of the command that Tab and Return make of a line."""
        # Both at once: the line editor works on its input in order.
        self._type(f"{line}\t\n")
        self._until(b"CALLED:")
        words = self._until(b":")
        self._until(b"READY> ")
        return words.decode()

    def close(self):
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)


@pytest.mark.needs("zsh")
def test_zsh_completes_commands_and_options(tmp_path):
    zsh = Zsh(tmp_path)
    try:
        assert zsh.completes("fpga-plugin card un") == "card undrain"
        assert zsh.completes("fpga-plugin bitstream ins") == "bitstream ins", "two begin so"
        assert zsh.completes("fpga-plugin bitstream install --bl") == "bitstream install --blank"
        assert zsh.completes("fpga-plugin completion fi") == "completion fish"
    finally:
        zsh.close()


@pytest.mark.needs("fish")
def test_fish_completes_commands_and_options(tmp_path):
    script = tmp_path / "completion.fish"
    script.write_text(run("completion", "fish").stdout)

    def completes(line):
        done = subprocess.run(
            ["fish", "--no-config", "-c", f"source {script}; complete -C '{line}'"],
            capture_output=True,
            text=True,
            check=True,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
            timeout=60,
        )
        assert done.stderr == ""
        return {each.split("\t")[0] for each in done.stdout.splitlines()}

    assert {"run", "demo", "devices", "status", "card", "policy"} <= completes("fpga-plugin ")
    assert completes("fpga-plugin card un") == {"undrain"}
    assert completes("fpga-plugin bitstream ins") == {"inspect", "install"}
    assert completes("fpga-plugin bitstream install --bl") == {"--blank"}
    assert "drain" not in completes("fpga-plugin bitstream ")
