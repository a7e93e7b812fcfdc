"""`fpga-plugin completion`: what a shell completes, made by shtab of the command line's parsers.

The script has every command and option, and asks nothing when it runs: a plugin that starts for
each press of Tab would be slow.
"""

import argparse
from collections.abc import Iterator

from fpga_plugin.commands.arguments import Commands

SHELLS = ("bash", "zsh", "fish")

_PATHS = frozenset({"DIR", "FILE", "IMAGE", "OUT", "PEM", "STORE"})
"""What stands for an argument that names a file or directory."""

_DESCRIPTION = """\
Print a script that makes a shell complete commands and options:
  bash  source <(fpga-plugin completion bash)
  zsh   eval "$(fpga-plugin completion zsh)"
  fish  fpga-plugin completion fish | source
"""


def add_completion_parser(commands: Commands, whole: argparse.ArgumentParser) -> None:
    """`completion` of the whole command line."""
    parser = commands.add_parser(
        "completion",
        help="make a shell complete commands and options",
        description=_DESCRIPTION,
    )
    parser.set_defaults(run=lambda args: _print_script(args.shell, whole))
    parser.add_argument("shell", choices=SHELLS, metavar="|".join(SHELLS))


def _print_script(shell: str, parser: argparse.ArgumentParser) -> int:
    import shtab  # only here

    for action in _actions(parser):
        if action.metavar in _PATHS:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # where shtab looks for it
    print(shtab.complete(parser, shell))  # noqa: T201  # a command prints
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:  # noqa: SLF001  # argparse has no public way to look at a parser
        yield action
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001  # the same
            for below in action.choices.values():
                yield from _actions(below)
