"""Logs: one line an event on standard error, as JSON for machines or as text for people.

Modules call `structlog.get_logger()` and log an event with values; nothing else of theirs knows how
that is written. What other libraries log through the standard library takes the same way out, from
WARNING up.

Three things hold for every line. A value from outside cannot break it: line breaks and control
characters are escaped. A traceback shows no local variables, which may hold bitstreams and
credentials. And logging never raises: a scrub is not given up because standard error is gone.
"""

import json
import logging
import sys
import threading
import traceback
from collections.abc import Mapping
from enum import Enum
from typing import Final, TextIO

import structlog
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

from fpga_plugin.settings.settings import LogFormat, LogLevel

FOREIGN_LOGGERS: Final = ("asyncio", "grpclib", "h2")
"""Libraries whose own logs are known to matter; they are set to WARNING whatever was set before."""

_TOLD: Final = frozenset({("grpclib.server", "Failed to handle cancellation")})
"""What libraries log beside a line of ours that reports the same: here that a caller went away in
the turn in which its call was refused, with a traceback."""

_MAX_FRAMES = 20
_FIRST = ("timestamp", "level", "event")
_LEVELS = {
    LogLevel.DEBUG: logging.DEBUG,
    LogLevel.INFO: logging.INFO,
    LogLevel.WARNING: logging.WARNING,
    LogLevel.ERROR: logging.ERROR,
}


def configure_logging(level: LogLevel, style: LogFormat, stream: TextIO | None = None) -> None:
    """Set up logging for the process; a later call replaces an earlier one.

    Args:
        level: the least serious event that is written.
        style: JSON or console.
        stream: where to; standard error if None.
    """
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.ExceptionRenderer(_traceback_text),
            _RENDERERS[style],
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=_LineLoggerFactory(sys.stderr if stream is None else stream),
        # A cached logger would keep the first configuration; the demo, which runs the daemon in its
        # own process, and the tests make more than one. Costs a microsecond an event.
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _Forward)]:
        root.removeHandler(handler)
    root.addHandler(_Forward(logging.WARNING))
    for name in FOREIGN_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)


class _LineLogger:
    """Writes lines; a stream that fails loses them."""

    def __init__(self, stream: TextIO, lock: threading.Lock) -> None:
        self._stream = stream
        self._lock = lock

    def msg(self, line: str) -> None:
        with self._lock:
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except (OSError, ValueError):  # gone, full or closed: there is nowhere to say it
                pass

    # The names under which structlog's bound logger hands over what it has rendered.
    debug = info = warning = warn = error = critical = exception = log = msg


class _LineLoggerFactory:
    """Makes loggers that share one stream and one lock: lines of several threads do not mix."""

    def __init__(self, stream: TextIO) -> None:
        self._logger = _LineLogger(stream, threading.Lock())

    def __call__(self, *_names: object) -> WrappedLogger:
        return self._logger


class _Forward(logging.Handler):
    """Hands standard library records to structlog, so that there is one way out."""

    def emit(self, record: logging.LogRecord) -> None:
        if (record.name, record.msg) in _TOLD:
            return
        try:
            message = record.getMessage()
        except Exception:  # noqa: BLE001  # a library's broken format string must not reach its caller
            message = str(record.msg)
        # A level of the library's own, between ours, counts as the one below it.
        level = max(logging.WARNING, min(record.levelno // 10 * 10, logging.CRITICAL))
        structlog.get_logger().log(level, message, logger=record.name, exc_info=record.exc_info)


def _traceback_text(exc_info: ExcInfo) -> str:
    """The traceback without local variables, causes included."""
    lines = traceback.format_exception(*exc_info, limit=-_MAX_FRAMES)
    return "".join(lines).rstrip("\n")


def _ordered(event: EventDict) -> dict[str, object]:
    first = {key: event.pop(key) for key in _FIRST if key in event}
    return {**first, **event}


def _render_json(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    fields = _ordered(event)
    try:
        return json.dumps(fields, default=_plain, allow_nan=False)
    except Exception:  # noqa: BLE001  # a key, a number or a __str__ that JSON cannot take: still log
        return json.dumps({str(key): _safe(value) for key, value in fields.items()})


def _render_console(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    fields = _ordered(event)
    exception = fields.pop("exception", None)
    # 2026-01-02T03:04:05.678901Z: people read the clock, to the millisecond
    clock = str(fields.pop("timestamp", ""))[11:23]
    level = str(fields.pop("level", ""))
    text = f"{clock} {level:<8} {_printable(_safe(fields.pop('event', '')))}"
    for key, value in fields.items():
        text += f" {_printable(str(key))}={_console_value(value)}"
    if exception is not None:
        lines = _safe(exception).split("\n")
        text += "".join(f"\n    {_printable(line)}" for line in lines)
    return text


def _console_value(value: object) -> str:
    text = _safe(value)
    if isinstance(value, str) and (not text or " " in text or "=" in text):
        return f"'{_printable(text)}'"
    return _printable(text)


def _printable(text: str) -> str:
    """The text with everything that is not printable escaped: no line breaks, no terminal codes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _plain(value: object) -> object:
    """What JSON has no form for, in one that it has."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return str(value)


def _safe(value: object) -> str:
    try:
        return str(_plain(value))
    except Exception:  # noqa: BLE001  # whatever a value's __str__ raises
        return f"<{type(value).__name__} that cannot be shown>"


_RENDERERS: Final[Mapping[LogFormat, Processor]] = {
    LogFormat.JSON: _render_json,
    LogFormat.CONSOLE: _render_console,
}
