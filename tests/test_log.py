"""Log lines for people and for machines."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from pdserve.log import get_logger, setup_logging


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("pdserve")
    handlers, level, our_level = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    ours.setLevel(our_level)


def test_json_lines_carry_level_logger_message_and_extra_fields() -> None:
    stream = io.StringIO()
    setup_logging("info", "json", process="gateway g1", stream=stream)
    get_logger("pdserve.x").info("sent %d", 3, extra={"request_id": "r1"})
    line = json.loads(stream.getvalue())
    assert line["time"].endswith("Z")
    assert {name: line[name] for name in ("level", "logger", "process", "message", "request_id")} == {
        "level": "info",
        "logger": "pdserve.x",
        "process": "gateway g1",
        "message": "sent 3",
        "request_id": "r1",
    }


def test_an_exception_stays_on_one_json_line() -> None:
    stream = io.StringIO()
    setup_logging("info", "json", stream=stream)
    try:
        raise ValueError("broken")
    except ValueError:
        get_logger("pdserve.x").exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: broken" in json.loads(line)["exception"]


def test_console_lines_are_short_and_carry_extra_fields() -> None:
    stream = io.StringIO()
    setup_logging("info", "console", process="decode d1", stream=stream)
    get_logger("pdserve.x").warning("late", extra={"worker_id": "p1"})
    assert stream.getvalue().rstrip().endswith("decode d1 warning: late worker_id=p1")


def test_the_level_holds_for_pdserve_and_libraries_say_only_what_is_wrong() -> None:
    stream = io.StringIO()
    setup_logging("debug", "console", stream=stream)
    get_logger("pdserve.x").debug("ours")
    logging.getLogger("some.library").info("theirs")
    logging.getLogger("some.library").warning("wrong")
    assert "ours" in stream.getvalue()
    assert "theirs" not in stream.getvalue()
    assert "wrong" in stream.getvalue()


def test_setting_it_up_twice_does_not_double_the_lines() -> None:
    stream = io.StringIO()
    setup_logging("info", "console", stream=stream)
    setup_logging("info", "console", stream=stream)
    get_logger("pdserve.x").info("once")
    assert stream.getvalue().count("once") == 1
