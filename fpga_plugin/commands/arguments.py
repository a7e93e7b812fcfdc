"""How the command line is read: what is wrong is named, and what was probably meant."""

import argparse
import re
from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeVar

from fpga_plugin.errors import quote

T = TypeVar("T")

_NO_CHOICE: Final = re.compile(
    r"(?P<what>.*invalid choice: )'(?P<said>.{0,64})' \(choose from (?P<known>.*)\)", re.DOTALL
)
"""As argparse says it, with or without quotes around the choices (from Python 3.12 without)."""


class Parser(argparse.ArgumentParser):
    """Takes no abbreviated options; the parsers of its commands are of its class."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and which command was probably meant."""
        if (wrong := _NO_CHOICE.fullmatch(message)) is not None:
            import difflib  # needed for a mistake only; costs 5 ms

            known = [name.strip("'") for name in wrong["known"].split(", ")]
            if near := difflib.get_close_matches(wrong["said"], known, 1):
                message = f"{message}; did you mean {near[0]}?"
        super().error(message)


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A parser for argparse, which shows the words of its ValueError."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{quote(text)} is {error}") from None

    return parsed
