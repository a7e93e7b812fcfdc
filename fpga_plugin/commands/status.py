"""`fpga-plugin status` and `fpga-plugin card`: questions to the daemon that runs on this node."""
# ruff: noqa: T201  # a command prints

import argparse
import json
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final
from urllib.parse import urlencode

from fpga_plugin.commands.arguments import Commands
from fpga_plugin.errors import FpgaPluginError, quote
from fpga_plugin.ids import PciAddress
from fpga_plugin.observability.client import ask
from fpga_plugin.observability.table import (
    MEANINGS,
    NO_LIMIT,
    card_table,
    functions_table,
    history_table,
    programmed_words,
    table,
)
from fpga_plugin.observability.trouble import needs_somebody, problems
from fpga_plugin.settings.settings import Settings

LIST_HELP: Final = """\
List the cards and regions of this node, what is on them, and what is
missing. Only looks: nothing is touched, and a running plugin is asked only
where these settings find no card.
"""

_FOUND: Final = ("cards", "problems", "refusals", "warnings")
"""The parts of a status that `--find` selects from (`observability.selection`)."""

WATCH_SECONDS: Final = 1.0
"""Between two questions while somebody watches; nobody asks otherwise."""

_CLEAR = "\x1b[H\x1b[J"  # cursor home, clear to the end of the screen (ECMA-48)
_WITHOUT_DOMAIN: Final = re.compile(r"[0-9a-fA-F]{2}[:-][0-9a-fA-F]{2}\.[0-7]")
"""A PCI address as lspci shows it."""

_OPERATIONS: Final = {
    "drain": "give it to no new pod; pods that have it keep it",
    "undrain": "bring it back into service",
    "retry": "check it again now, and try again what failed",
    "release": "scrub what is kept of it for debugging now, and give it out again",
}


def add_status_parser(commands: Commands) -> None:
    """`status`."""
    status = commands.add_parser(
        "status",
        help="show every card, who has it, and why pods were refused",
        description="Show every card and region of this node: who has it, since when, with\n"
        "which bitstream, its health, and the last refusal of each pod. Asks the plugin\n"
        "that runs here.",
        epilog=MEANINGS,
    )
    status.set_defaults(run=run_status)
    status.add_argument(
        "--history",
        action="store_true",
        help="what happened last: allocations, programmings, scrubs and refusals of each region",
    )
    status.add_argument("--watch", action="store_true", help="show it again when it changes")
    status.add_argument(
        "--find",
        metavar="TEXT",
        default="",
        help="only what has it in a pod's, card's or region's name; exit with 1 if nothing has",
    )
    status.add_argument("--problems", action="store_true", help="only what needs somebody, and why")
    status.add_argument(
        "--exit-code",
        action="store_true",
        help="exit with 1 if anything failed, is unusable or refused, or the plugin is not ready",
    )
    status.add_argument("--json", action="store_true", help="JSON instead of a table")


def add_card_parser(commands: Commands) -> None:
    """`card`."""
    card = commands.add_parser(
        "card",
        help="take a card out of service, or bring it back",
        description="Take a card out of service before it is pulled, bring it back, or have it"
        " tried again. Asks the plugin that runs on this node.",
    )
    operations = card.add_subparsers(dest="operation", required=True, metavar="OPERATION")
    for word, meaning in _OPERATIONS.items():
        operation = operations.add_parser(
            word,
            help=meaning,
            description=f"{meaning.capitalize()}. Then print which pods still have something of"
            f" the card{', and whether it may be pulled' if word == 'drain' else ''}.",
        )
        operation.set_defaults(run=_operate)
        _card_argument(operation)
        operation.add_argument("--json", action="store_true", help="JSON instead of words")

    listed = operations.add_parser(
        "list", help="list the cards and regions of this node", description=LIST_HELP
    )
    _list_options(listed)
    show = operations.add_parser(
        "show",
        help="show a card: functions, what would be done with it, what its hardware says now",
        description="Show cards of this node: their PCI functions, and what the plugin would do"
        " with each, as text to send to others. Of one card also what the plugin that runs here"
        " says of it: its regions and their owners, AFU ids, error registers, what happened last."
        " Reads only: it opens no device node, and a container that has a region does not notice.",
    )
    show.set_defaults(run=_show_cards)
    _card_argument(show, " (default: all)", nargs="?")
    show.add_argument(
        "--assumptions",
        action="store_true",
        help="also everything that the plugin takes for granted about it, and whether it holds",
    )
    show.add_argument("--json", action="store_true", help="JSON instead of text")
    program = operations.add_parser(
        "program",
        help="program a region of a drained card by hand, with a bitstream of the store",
        description="Program a region of a card that is out of service (`card drain`) with a"
        " bitstream of the store: trusted, scrubbed before, verified afterwards, as for a"
        " container. `card undrain` scrubs it, and so does a restart of the plugin.",
    )
    program.set_defaults(run=_program)
    _card_argument(program)
    program.add_argument("region", metavar="REGION", help="its id, or the number of its port")
    program.add_argument("bitstream", metavar="BITSTREAM", help="its id in the store, or its name")
    program.add_argument("--json", action="store_true", help="JSON instead of words")
    functions = operations.add_parser(
        "functions",
        help="make or remove a card's virtual PCI functions",
        description="Make or remove the virtual PCI functions of a card that is out of service"
        " (`card drain`), or that cannot be served. `card show` shows them.",
    )
    functions.set_defaults(run=_functions)
    _card_argument(functions)
    change = functions.add_mutually_exclusive_group(required=True)
    change.add_argument("--make", action="store_true", help="make all that it can have")
    change.add_argument("--remove", action="store_true", help="remove those that it has")
    functions.add_argument("--json", action="store_true", help="JSON instead of a table")


def add_devices_parser(commands: Commands) -> None:
    """`devices`, once the name of `card list`."""
    devices = commands.add_parser(
        "devices",
        help="the old name of `card list`",
        description="The old name of `fpga-plugin card list`.",
        epilog="example:\n  FPGA_PLUGIN_BACKEND=simulated fpga-plugin devices",
    )
    _list_options(devices)


def _list_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_list)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def _card_argument(parser: argparse.ArgumentParser, more: str = "", **how: Any) -> None:
    parser.add_argument(
        "card",
        metavar="CARD",
        type=_card_id,
        help=f"such as 0000-3b-00.0, or 0000:3b:00.0{more}",
        **how,
    )


def run_status(args: argparse.Namespace, settings: Settings) -> int:
    """`status`, once or until Ctrl-C."""
    if args.history:
        history = ask(settings.state_dir, "GET", _path(args.find, "/history"))
        return _print(args, history, partial(history_table, width=_columns()))
    if not args.watch:
        status = ask(settings.state_dir, "GET", _path(args.find))
        if args.find and not any(status[part] for part in _FOUND):
            return _found_nothing(status, args)
        _show(status, args)
        return int(args.exit_code and needs_somebody(status))
    try:
        _watch(settings.state_dir, args)
    except KeyboardInterrupt:
        print()
    return 0


def _print(args: argparse.Namespace, answer: Any, words: Callable[[Any], str]) -> int:
    print(json.dumps(answer, indent=2) if args.json else words(answer))
    return 0


def _found_nothing(status: Any, args: argparse.Namespace) -> int:
    """Exit code 1, as of `grep`; nothing of the node, which was not asked for."""
    if args.json:
        _show(status, args)
    else:
        print(f"fpga-plugin: nothing here has {quote(args.find)} in its name", file=sys.stderr)
    return 1


def _list(args: argparse.Namespace, settings: Settings) -> int:
    from fpga_plugin.commands.card_list import run_list

    return run_list(args, settings)


def _show_cards(args: argparse.Namespace, settings: Settings) -> int:
    from fpga_plugin.commands.card_show import run_show

    return run_show(args, settings)


def _operate(args: argparse.Namespace, settings: Settings) -> int:
    """Ask for an operation on a card, and print the card's state."""
    body = {"operation": args.operation, "card": args.card}
    state = ask(settings.state_dir, "POST", "/card", body)
    return _print(args, state, partial(card_table, operation=args.operation))


def _functions(args: argparse.Namespace, settings: Settings) -> int:
    """Have a card's virtual PCI functions made or removed; print those that it has then."""
    body = {"operation": f"functions-{'make' if args.make else 'remove'}", "card": args.card}
    found = ask(settings.state_dir, "POST", "/card", body)
    return _print(args, found, functions_table)


def _program(args: argparse.Namespace, settings: Settings) -> int:
    """Have a region programmed; asks again, as long as it takes, under a name of its own."""
    body = {
        "id": secrets.token_hex(16),
        "card": args.card,
        "region": args.region,
        "bitstream": args.bitstream,
    }
    while not (done := ask(settings.state_dir, "POST", "/program", body))["finished"]:
        pass  # each answer comes after seconds
    return _print(args, done, programmed_words)


def _path(find: str, path: str = "/status") -> str:
    return f"{path}?{urlencode({'find': find})}" if find else path


def _columns() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else NO_LIMIT


def _card_id(text: str) -> str:
    """A card's id, of its PCI address in either spelling; what is none is for the plugin to say."""
    whole = f"0000:{text}" if _WITHOUT_DOMAIN.fullmatch(text) else text
    try:
        return PciAddress.parse(whole).card_id
    except ValueError:
        return text


def _watch(state_dir: str, args: argparse.Namespace) -> None:
    """Until interrupted; a plugin that is away may come back."""
    before: object = None
    while True:
        try:
            status = ask(state_dir, "GET", _path(args.find))
        except FpgaPluginError as error:
            if before != str(error):
                before = str(error)
                print(f"fpga-plugin: {error}", file=sys.stderr, flush=True)
        else:
            steady = _steady(status)
            redraw = sys.stdout.isatty() and not args.json  # there the times go on
            if redraw or steady != before:
                before = steady
                if redraw:
                    print(_CLEAR, end="")
                _show(status, args, indent=None)
        time.sleep(WATCH_SECONDS)


def _steady(status: Any) -> str:
    """What has to change before another line is printed: not the clock, and no sensor."""
    kept = {key: value for key, value in status.items() if key != "time"}
    kept["cards"] = [
        {k: v for k, v in card.items() if k not in {"temperatures", "power"}}
        for card in status["cards"]
    ]
    return json.dumps(kept)


def _show(status: Any, args: argparse.Namespace, *, indent: int | None = 2) -> None:
    shown = problems(status) if args.problems else status
    if args.json:
        print(json.dumps(shown, indent=indent), flush=True)
        return
    print(table(shown, width=_columns(), part=bool(args.find or args.problems)), flush=True)
