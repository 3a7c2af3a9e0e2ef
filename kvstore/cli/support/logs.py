"""Logging of all programs, on standard error."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from kvstore.cli.support.output import clean
from kvstore.config.model import LogSection
from kvstore.observe.tracing import plan_id, request_id

_TALKATIVE = ("httpx",)
"""Libraries that log each call at level info, which would dominate the log."""

_SHARP = re.compile("[\x7f-\x9f\u2028\u2029]")
"""Characters that JSON does not escape, but that terminals interpret or readers treat as line ends."""


class JsonFormatter(logging.Formatter):
    """Format a record as one line of JSON: time (UTC), level, logger, message, request, plan and error."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        entry = {
            "time": stamp,
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": os.getpid(),
            "message": record.getMessage(),
            **_about(),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return _SHARP.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(entry, ensure_ascii=False))


class ConsoleFormatter(logging.Formatter):
    """Format a record as plain text: time, level, logger and message, followed by request and plan.

    Messages can contain remote input. A record is therefore one line without control sequences. Only a traceback has further
    lines. All of them are indented, so that none can be mistaken for a record.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        record.asctime = self.formatTime(record, self.datefmt)
        about = " ".join(f"{name}={value}" for name, value in _about().items())
        line = self.formatMessage(record)
        lines = [f"{line} [{about}]" if about else line]
        if record.exc_info:  # another formatter may have cached a different text in exc_text
            lines += _indented(self.formatException(record.exc_info))
        if record.stack_info:
            lines += _indented(self.formatStack(record.stack_info))
        return "\n".join(clean(one) for one in lines)


def _indented(lines: str) -> list[str]:
    return [f"  {line}" for line in lines.split("\n")]


def _about() -> dict[str, str]:
    """Current request and plan. A record is formatted in the thread and context that log it."""
    found = {"request_id": request_id.get(), "plan_id": plan_id.get()}
    return {name: value for name, value in found.items() if value}


if TYPE_CHECKING:
    _TextHandler = logging.StreamHandler[TextIO]
else:
    _TextHandler = logging.StreamHandler


class StderrHandler(_TextHandler):
    """Handler that writes to the current ``sys.stderr``, so that it follows redirection."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        """Return the current standard error."""
        return sys.stderr

    @stream.setter
    def stream(self, _stream: TextIO) -> None:
        raise AttributeError("the stream is always standard error")


def set_up_logs(section: LogSection) -> None:
    """Send all logs of this process to standard error in the configured format. May be called again."""
    handler = StderrHandler()
    handler.setFormatter(JsonFormatter() if section.format == "json" else ConsoleFormatter())
    root = logging.getLogger()
    root.handlers[:] = [old for old in root.handlers if not isinstance(old, StderrHandler)]
    root.addHandler(handler)
    root.setLevel(section.level.upper())
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.NOTSET if root.level < logging.INFO else max(root.level, logging.WARNING))


class _FirstLines(logging.Filter):
    """Filter that passes a limited number of records and counts the others."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._left = most
        self.held_back = 0

    def filter(self, record: logging.LogRecord) -> bool:  # noqa: ARG002
        if self._left > 0:
            self._left -= 1
            return True
        self.held_back += 1
        return False


@contextmanager
def first_lines(most: int) -> Iterator[None]:
    """Context manager that logs at most ``most`` records, and at the end the number of suppressed ones."""
    handlers = [handler for handler in logging.getLogger().handlers if isinstance(handler, StderrHandler)]
    limit = _FirstLines(most)
    for handler in handlers:
        handler.addFilter(limit)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(limit)
        if limit.held_back:
            logging.getLogger(__name__).warning("%d further lines of the log are not shown", limit.held_back)
