"""How the command line is read: what is wrong is named, and what was probably meant."""

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, Protocol, TypeVar

from fpga_plugin.errors import MAX_QUOTED, quote

T = TypeVar("T")


class Commands(Protocol):
    """What `add_subparsers` returns, whose class has no public name."""

    def add_parser(self, name: str, **kwargs: Any) -> argparse.ArgumentParser:
        """Add a command."""


_NO_CHOICE: Final = re.compile(
    r"(?P<what>.*invalid choice: )'(?P<said>.{0,64})' \(choose from (?P<known>.*)\)", re.DOTALL
)
"""As argparse says it, with or without quotes around the choices (from Python 3.12 without)."""


class _Formatter(argparse.HelpFormatter):
    """Leaves a text of several lines as it is; one line is wrapped."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """Takes no abbreviated options; the parsers of its commands are of its class."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False, formatter_class=_Formatter)
        self.set_defaults(parser=self)  # of the command that is named, as its defaults count

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Say which argument is unknown, and which option was probably meant."""
        option = next((one.partition("=")[0] for one in unknown if one.startswith("-")), None)
        if option is None:
            self.error(f"too many arguments: {' '.join(map(quote, unknown))}")
        known = [text for action in self._actions for text in action.option_strings]
        self.error(_suggesting(f"no option {quote(option)}", option, known))

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and which command was probably meant."""
        if (wrong := _NO_CHOICE.fullmatch(message)) is not None:
            known = [name.strip("'") for name in wrong["known"].split(", ")]
            message = _suggesting(message, wrong["said"], known)
        super().error(message)


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; what no command knows is refused by the one that was named."""
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        args.parser.refuse(unknown)
    return args


def _suggesting(message: str, said: str, known: Sequence[str]) -> str:
    """The message, and what was probably meant, if anything is like what was said."""
    import difflib  # needed for a mistake only; costs 5 ms

    near = difflib.get_close_matches(said[:MAX_QUOTED], known, 1)
    return f"{message}; did you mean {near[0]}?" if near else message


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A parser for argparse, which shows the words of its ValueError."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{quote(text)} is {error}") from None

    return parsed
