"""The settings' table as text: for `--help`, and as `docs/configuration.md` (`make docs`)."""

import sys
import textwrap

from fpga_plugin.settings.settings import PREFIX, SETTINGS, Setting

_WIDTH = 79

_INTRODUCTION = f"""\
<!-- Made by `make docs` from fpga_plugin/settings/settings.py: change it there. -->

# Configuration

Every setting of `fpga-plugin run` is an environment variable. The plugin reads and checks all of
them once, at the start.

- A wrong value stops the start with exit code 2 and a message that names every wrong variable.
- An unknown variable whose name begins with `{PREFIX}` is logged as a warning and has no effect.
- An empty value counts as unset, except where the table says what empty means.
- Values count exactly as written: a line break or a blank at the end is part of the value.

"""


def markdown() -> str:
    """The text of `docs/configuration.md`."""
    lines = ["| variable | default | allowed | meaning |", "|---|---|---|---|"]
    for setting in SETTINGS:
        cells = (f"`{setting.name}`", _default(setting), setting.allowed, _meaning(setting))
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return _INTRODUCTION + "\n".join(lines) + "\n"


def help_text() -> str:
    """All settings, for the end of a command's `--help`."""
    parts = ["environment variables:"]
    for setting in SETTINGS:
        default = _default(setting).replace("`", "") or "none"
        parts.append(f"  {setting.name} (default: {default})")
        text = f"{_meaning(setting)} Allowed: {setting.allowed}.".replace("`", "")
        parts += textwrap.wrap(
            text,
            _WIDTH,
            initial_indent="      ",
            subsequent_indent="      ",
            break_long_words=False,
        )
    return "\n".join(parts) + "\n"


def _default(setting: Setting) -> str:
    return setting.default_text or (f"`{setting.default}`" if setting.default else "")


def _meaning(setting: Setting) -> str:
    return setting.meaning + (f" Empty: {setting.empty}." if setting.empty else "")


if __name__ == "__main__":
    sys.stdout.write(markdown())
