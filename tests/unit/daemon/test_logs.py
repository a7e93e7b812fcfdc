"""Logs: one clean line an event, whatever is in it."""

import io
import json
import logging
import threading

import pytest
import structlog

from fpga_plugin.daemon import logs
from fpga_plugin.daemon.logs import FOREIGN_LOGGERS, configure_logging
from fpga_plugin.settings.settings import LogFormat, LogLevel

HOSTILE = "a\nb\r\x1b[31m\x00\u2028\u0085\udcff" + "x" * 10


ROOT = logging.getLogger()


@pytest.fixture(autouse=True)
def restore_logging():
    levels = {name: logging.getLogger(name).level for name in FOREIGN_LOGGERS}
    yield
    for handler in ours():
        ROOT.removeHandler(handler)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def ours() -> list[logging.Handler]:
    return [handler for handler in ROOT.handlers if type(handler).__module__ == logs.__name__]


def configured(style: LogFormat, level: LogLevel = LogLevel.INFO) -> io.StringIO:
    stream = io.StringIO()
    configure_logging(level, style, stream)
    # pytest's own handlers, which it puts back for the next test, do not take all of what follows.
    ROOT.handlers[:] = ours()
    return stream


def only_line(stream: io.StringIO) -> str:
    text = stream.getvalue()
    assert text.endswith("\n")
    # splitlines knows every line break that Unicode has
    (line,) = text.splitlines()
    return line


def test_json_has_time_level_and_event_first():
    stream = configured(LogFormat.JSON)
    structlog.get_logger().info("programmed", region="0000-3b-00.0-p0", seconds=0.5, tries=1)
    event = json.loads(only_line(stream))
    assert list(event) == ["timestamp", "level", "event", "region", "seconds", "tries"]
    assert event["timestamp"].endswith("Z")
    assert (event["level"], event["event"]) == ("info", "programmed")
    assert (event["region"], event["seconds"], event["tries"]) == ("0000-3b-00.0-p0", 0.5, 1)


def test_console_is_readable():
    stream = configured(LogFormat.CONSOLE)
    structlog.get_logger().warning("card skipped", card="0000-3b-00.0", reason="no FME")
    line = only_line(stream)
    assert line[2] == line[5] == ":"
    assert line[12:] == " warning  card skipped card=0000-3b-00.0 reason='no FME'"


@pytest.mark.parametrize("style", LogFormat)
def test_a_hostile_value_stays_on_its_line(style):
    stream = configured(style)
    structlog.get_logger().info(HOSTILE, value=HOSTILE, nested=[HOSTILE], **{HOSTILE: 1})
    assert only_line(stream).isprintable()


class Unshowable:
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("style", LogFormat)
@pytest.mark.parametrize(
    "value",
    [float("nan"), {(1, 2): 3}, {1, "a"}, b"\xff\n", Unshowable(), object(), LogLevel.INFO, None],
    ids=lambda value: type(value).__name__,
)
def test_no_value_makes_logging_fail(style, value):
    stream = configured(style)
    structlog.get_logger().info("event", value=value)
    assert "event" in only_line(stream)


@pytest.mark.parametrize("style", LogFormat)
def test_a_value_that_contains_itself_does_not_make_logging_fail(style):
    stream = configured(style)
    value: list[object] = []
    value.append(value)
    structlog.get_logger().info("event", value=value)
    assert "event" in only_line(stream)


def fail_with_a_secret() -> None:
    secret_in_a_local = "hunter" + "2"
    raise RuntimeError(f"failed\nafter {len(secret_in_a_local)} tries")


def test_json_has_a_traceback_without_locals_on_the_same_line():
    stream = configured(LogFormat.JSON)
    try:
        fail_with_a_secret()
    except RuntimeError:
        structlog.get_logger().exception("it failed")
    line = only_line(stream)
    assert "hunter2" not in line
    event = json.loads(line)
    assert event["level"] == "error"
    assert "fail_with_a_secret" in event["exception"]
    assert event["exception"].endswith("RuntimeError: failed\nafter 7 tries")


def test_console_indents_a_traceback_so_that_no_line_of_it_passes_for_an_event():
    stream = configured(LogFormat.CONSOLE)
    try:
        fail_with_a_secret()
    except RuntimeError:
        structlog.get_logger().exception("it failed")
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith(" error    it failed")
    assert rest[-2:] == ["    RuntimeError: failed", "    after 7 tries"]
    assert all(line.startswith("    ") for line in rest)
    assert "hunter2" not in stream.getvalue()


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (LogLevel.DEBUG, ["debug", "info", "warning", "error"]),
        (LogLevel.INFO, ["info", "warning", "error"]),
        (LogLevel.WARNING, ["warning", "error"]),
        (LogLevel.ERROR, ["error"]),
    ],
)
def test_events_below_the_level_are_not_written(level, expected):
    stream = configured(LogFormat.JSON, level)
    log = structlog.get_logger()
    for name in ("debug", "info", "warning", "error"):
        getattr(log, name)("event")
    assert [json.loads(line)["level"] for line in stream.getvalue().splitlines()] == expected


@pytest.mark.parametrize("name", ["asyncio", "grpclib.server", "h2.connection", "other"])
def test_libraries_logs_take_the_same_way_out_from_warning_up(name):
    stream = configured(LogFormat.JSON)
    log = logging.getLogger(name)
    log.info("not this")
    log.warning("a %s", "b\nc")
    event = json.loads(only_line(stream))
    assert (event["level"], event["event"], event["logger"]) == ("warning", "a b\nc", name)


def test_a_librarys_traceback_and_its_broken_format_are_logged():
    stream = configured(LogFormat.JSON)
    try:
        fail_with_a_secret()
    except RuntimeError:
        logging.getLogger("grpclib.server").exception("%d of 100% went wrong", "none")
    event = json.loads(only_line(stream))
    assert event["event"] == "%d of 100% went wrong"
    assert "RuntimeError" in event["exception"]


def test_a_level_of_a_librarys_own_is_logged():
    stream = configured(LogFormat.JSON)
    logging.getLogger("asyncio").log(35, "between warning and error")
    logging.getLogger("asyncio").log(99, "above all")
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [event["level"] for event in events] == ["warning", "critical"]


def test_configuring_again_replaces_the_first():
    first = configured(LogFormat.JSON)
    log = structlog.get_logger()
    log.info("one")
    second = configured(LogFormat.CONSOLE)
    log.info("two")
    logging.getLogger("asyncio").warning("three")
    assert len(first.getvalue().splitlines()) == 1
    assert len(second.getvalue().splitlines()) == 2


class Broken(io.StringIO):
    def write(self, _text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("stream", [Broken(), io.StringIO()], ids=["broken", "closed"])
def test_a_lost_stream_loses_lines_and_nothing_else(stream):
    if not isinstance(stream, Broken):
        stream.close()
    configure_logging(LogLevel.INFO, LogFormat.JSON, stream)
    structlog.get_logger().info("event")


def test_lines_of_several_threads_do_not_mix():
    class Slow(io.StringIO):
        # A write in small pieces: only a lock keeps a line together.
        def write(self, text: str) -> int:
            for start in range(0, len(text), 7):
                super().write(text[start : start + 7])
            return len(text)

    stream = Slow()
    configure_logging(LogLevel.INFO, LogFormat.JSON, stream)

    def work(number: int) -> None:
        log = structlog.get_logger()
        for _ in range(50):
            log.info("event", number=number, filler="x" * 200)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 200
    assert all(json.loads(line)["event"] == "event" for line in lines)


def test_that_a_caller_went_while_its_call_was_refused_is_told_by_the_calls_own_line():
    stream = configured(LogFormat.JSON)
    grpclib = logging.getLogger("grpclib.server")
    grpclib.error("Failed to handle cancellation")
    grpclib.error("Application error")
    assert json.loads(only_line(stream))["event"] == "Application error"
