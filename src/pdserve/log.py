"""Log lines of a process: for people (console) or for machines (json, one object a line), on stderr.

Prompts, outputs, keys and addresses of clients are never logged.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, TextIO

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def get_logger(name: str) -> logging.Logger:
    """The logger of a module: `get_logger(__name__)`. Fields go into `extra={"request_id": …}`."""
    return logging.getLogger(name)


def setup_logging(level: str, log_format: str, *, process: str = "", stream: TextIO | None = None) -> None:
    """Send everything of this process to one handler.

    Args:
        level: debug, info, warning or error.
        log_format: console or json.
        process: what this process is, for example `decode worker d1`; on every line.
        stream: stderr unless given.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter(process) if log_format == "json" else _ConsoleFormatter(process))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)  # libraries say only what is wrong
    logging.getLogger("pdserve").setLevel(level.upper())


def _extra_of(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class _ConsoleFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = f" {process}" if process else ""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        extra = "".join(f" {name}={value}" for name, value in _extra_of(record).items())
        line = (
            f"{clock}.{int(record.msecs):03d}{self._process} {record.levelname.lower()}: {record.getMessage()}{extra}"
        )
        return line + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= _extra_of(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)
