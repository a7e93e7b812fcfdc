"""`fpga-plugin completion`: what a shell completes, made of the command line's own parsers.

The script has every command and option, and asks nothing when it runs: a plugin that starts for
each press of Tab would be slow. Where a value is wanted, the shell completes files.
"""

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  # has no other name

SHELLS = ("bash", "zsh", "fish")

_DESCRIPTION = """\
Print a script that makes a shell complete commands and options:
  bash  source <(fpga-plugin completion bash)
  zsh   source <(fpga-plugin completion zsh)
  fish  fpga-plugin completion fish | source
"""


@dataclass(frozen=True, slots=True)
class _Command:
    """What may follow some words.

    Attributes:
        words: the command, `card drain`; empty: the program itself.
        commands: with what they do.
        options: with what they do.
    """

    words: tuple[str, ...]
    commands: dict[str, str]
    options: dict[str, str]


def add_completion_parser(commands: "Commands") -> None:
    """`completion`."""
    parser = commands.add_parser(
        "completion",
        help="make a shell complete commands and options",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS, metavar="|".join(SHELLS))


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """The script of a shell, for the commands of a parser."""
    found = list(_walk(parser, ()))
    if shell == "fish":
        return _fish(found)
    bash = _bash(found)
    return bash if shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{bash}"


def _walk(parser: argparse.ArgumentParser, words: tuple[str, ...]) -> "list[_Command]":
    commands: dict[str, str] = {}
    options: dict[str, str] = {}
    below: list[_Command] = []
    for action in parser._actions:  # noqa: SLF001  # argparse has no public way to look at a parser
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001  # the same
            help_of = {one.dest: one.help or "" for one in action._choices_actions}  # noqa: SLF001
            for name, inner in action.choices.items():
                commands[name] = help_of.get(name, "")
                below += _walk(inner, (*words, name))
        elif action.option_strings:
            options[action.option_strings[-1]] = (action.help or "").partition(" (default")[0]
        else:
            commands |= dict.fromkeys(map(str, action.choices or ()), "")
    return [_Command(words, commands, options), *below]


def _bash(commands: "list[_Command]") -> str:
    cases = "\n".join(
        f"    '{' '.join(one.words)}') words='{' '.join([*one.commands, *one.options])}' ;;"
        for one in commands
    )
    known = " ".join(f"'{' '.join(one.words)}'" for one in commands if one.words)
    return f"""\
_fpga_plugin() {{
  local at='' word next known words=''
  for word in "${{COMP_WORDS[@]:1:$((COMP_CWORD - 1))}}"; do
    next="${{at:+$at }}$word"
    for known in {known}; do
      if [[ $known == "$next" ]]; then at=$next; break; fi
    done
  done
  case $at in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _fpga_plugin fpga-plugin"""


def _fish(commands: "list[_Command]") -> str:
    lines = []
    for one in commands:
        inside = "".join(f"; and __fish_seen_subcommand_from {word}" for word in one.words)
        none = f"not __fish_seen_subcommand_from {' '.join(one.commands)}" if one.commands else ""
        when = "; and ".join(filter(None, (inside.removeprefix("; and "), none)))
        condition = f" -n {_quoted(when)}" if when else ""
        lines += [
            f"complete -c fpga-plugin{condition} -f -a {name} -d {_quoted(meaning)}"
            for name, meaning in one.commands.items()
        ]
        lines += [
            f"complete -c fpga-plugin{condition} -l {name[2:]} -d {_quoted(meaning)}"
            for name, meaning in one.options.items()
            if name.startswith("--")
        ]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """One word of fish."""
    escaped = " ".join(text.split()).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
