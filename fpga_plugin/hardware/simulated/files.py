"""Small files that another process may read at any time: replaced whole, never half written.

There is no fsync: what these files hold has to survive the death of the process, not of the
machine.
"""

import json
from typing import Any

import structlog

from fpga_plugin.host.atomic_file import replace_file

_log = structlog.get_logger(__name__)


def replace(path: str, text: str) -> None:
    """Put `text` at `path` by rename, so that a reader sees the old file or the new one.

    Raises:
        OSError: the directory is gone, full or not writable; the old file is then untouched.
    """
    replace_file(path, [text.encode("ascii")], mode=0o644)


def load_object(path: str) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no file, or one that cannot be used.

    A file that is no JSON object is reported in one warning: simulated cards then start like cards
    that had no power.
    """
    try:
        with open(path, encoding="utf-8") as file:
            loaded = json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("simulated-file-unusable", path=path, error=str(error)[:200])
        return None
    if not isinstance(loaded, dict):
        _log.warning("simulated-file-unusable", path=path, error="not a JSON object")
        return None
    return loaded
