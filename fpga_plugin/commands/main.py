"""The `fpga-plugin` command. The only module that reads the environment.

Exit codes: 0 done, SIGTERM included; 1 refused or failed; 2 usage or a wrong setting; 3 `demo` has
served a pod whose request means nothing; 75 another plugin holds the lock; 130 Ctrl-C. Each command
imports what it needs when it runs: `run` should not pay for `demo`. Ctrl-C and a full disk are no
defects of the plugin: they end a command with one line, not with a traceback. If
the reader of the output goes away (`| head`), a command goes on and keeps its exit code.
"""
# ruff: noqa: T201  # a command prints

import argparse
import asyncio
import errno
import gc
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fpga_plugin import __version__
from fpga_plugin.commands.arguments import Parser, parse
from fpga_plugin.commands.bitstream import add_bitstream_parser
from fpga_plugin.commands.completion import add_completion_parser
from fpga_plugin.commands.demo import add_demo_parser
from fpga_plugin.commands.fleet import add_fleet_parser
from fpga_plugin.commands.policy import add_policy_parser
from fpga_plugin.commands.status import add_card_parser, add_devices_parser, add_status_parser
from fpga_plugin.errors import FpgaPluginError, LockHeldError, SettingsError
from fpga_plugin.settings.docs import help_text
from fpga_plugin.settings.settings import LogFormat, LogLevel, Settings, load_settings

if TYPE_CHECKING:
    from typing_extensions import Buffer  # from Python 3.12 in collections.abc

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_LOCKED = 75  # EX_TEMPFAIL of sysexits.h
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
STDOUT, STDERR = 1, 2
_NOT_WRITTEN = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})

_WITHOUT_SETTINGS = frozenset({None, "version", "completion", "demo", "fleet"})
"""Commands that do not look at this node's plugin: its settings may be wrong."""

_EPILOG = """\
try it without hardware, cluster or root:
  fpga-plugin demo

settings are environment variables: `fpga-plugin run --help` lists them all,
docs/configuration.md explains them.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    _open_standard_streams()
    try:
        return _main(sys.argv[1:] if arguments is None else arguments)
    except FpgaPluginError as error:
        _complain(error)
        if isinstance(error, SettingsError):
            return EXIT_USAGE
        return EXIT_LOCKED if isinstance(error, LockHeldError) else EXIT_FAILED
    except KeyboardInterrupt:
        _drop_output()
        _complain(FpgaPluginError("interrupted"))
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_output()  # of a command that would not end otherwise
        return 0


def _main(arguments: Sequence[str]) -> int:
    """Run a command.

    Raises:
        FpgaPluginError: what it printed cannot be written, or its own.
    """
    if arguments and arguments[0] == "help":
        arguments = [*arguments[1:], "--help"]
    try:
        settings, wrong = load_settings(os.environ), None
    except SettingsError as error:  # help is given whatever they are
        settings, wrong = load_settings({}), error
    args = parse(_parser(settings), arguments)
    if wrong is not None and args.command not in _WITHOUT_SETTINGS:
        raise wrong
    if args.command == "run":
        return _run(settings)
    try:
        code = _command(args, settings)
        sys.stdout.flush()  # at exit the error could not be reported
    except OSError as error:
        # Of an open file the kernel says this without a name; files of our own that are written
        # have errors of their own.
        if error.filename is not None or error.errno not in _NOT_WRITTEN:
            raise
        _drop_output()
        raise FpgaPluginError(f"the output cannot be written: {error.strerror}") from error
    return code


class _Heard(io.FileIO):
    """Standard output that drops what nobody reads any more."""

    def write(self, data: "Buffer", /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def _survive_a_closed_output() -> None:
    """Let a command go on whose output nobody reads any more."""
    out = sys.stdout
    if out is sys.__stdout__ and isinstance(out, io.TextIOWrapper):  # else somebody has replaced it
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_Heard(out.fileno(), "w", closefd=False)),
            encoding=out.encoding,
            errors=out.errors,
            line_buffering=out.line_buffering,
        )


def _drop_output() -> None:
    """Drop what is buffered: Python would try to write it at exit, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_standard_streams() -> None:
    """Open those that are closed (`>&-`): the next file that we open would take their place."""
    if sys.stdin is not None and sys.stdout is not None and sys.stderr is not None:
        return
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or open(STDOUT, "w", closefd=False)  # noqa: SIM115  # for all our life
    sys.stderr = sys.stderr or open(STDERR, "w", closefd=False)  # noqa: SIM115  # for all our life


def _complain(error: FpgaPluginError) -> None:
    print(f"fpga-plugin: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"  {error.hint}", file=sys.stderr)


def _command(args: argparse.Namespace, settings: Settings) -> int:
    if not (getattr(args, "watch", False) or getattr(args, "serve", None)):  # these do not end
        _survive_a_closed_output()
    run: Callable[..., int] = args.run
    if args.command in _WITHOUT_SETTINGS:
        return run(args)
    from fpga_plugin.daemon.logs import configure_logging

    # What a command cannot use, such as a broken key, is said on standard error, as text.
    configure_logging(LogLevel.ERROR, LogFormat.CONSOLE)
    for warning in settings.warnings:  # as the log of `run` has them
        print(f"fpga-plugin: {warning}", file=sys.stderr)
    return run(args, settings)


def _print_help(args: argparse.Namespace) -> int:
    args.parser.print_help()
    return 0


def _print_version(_args: argparse.Namespace) -> int:
    print(f"fpga-plugin {__version__}")
    return 0


def _parser(settings: Settings) -> argparse.ArgumentParser:
    """The command line; options fall back to the settings."""
    parser: argparse.ArgumentParser = Parser(
        prog="fpga-plugin",
        description="Kubernetes device plugin for FPGAs: programs a region for its container and"
        " scrubs it afterwards.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"fpga-plugin {__version__}")
    parser.set_defaults(run=_print_help)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser(
        "run",
        help="serve kubelet on this node",
        description="Serve kubelet on this node until SIGTERM. Settings are environment variables.",
        epilog=help_text(),
    )
    version = commands.add_parser("version", help="print the version")
    version.set_defaults(run=_print_version)
    commands.add_parser("help", help="show the help of a command, as its --help does")
    add_devices_parser(commands)
    add_completion_parser(commands, parser)
    add_status_parser(commands)
    add_card_parser(commands)
    add_fleet_parser(commands)
    add_demo_parser(commands)
    add_policy_parser(commands, settings)
    add_bitstream_parser(commands, settings)
    return parser


def _run(settings: Settings) -> int:
    from fpga_plugin.daemon.logs import configure_logging
    from fpga_plugin.daemon.process import run

    gc.freeze()  # what was imported stays: no later collection looks at it
    configure_logging(settings.log_level, settings.log_format)
    asyncio.run(run(settings))
    return 0
