"""Logs of all programs: set up in one place, on standard error."""

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
from kvstore.observe.context import plan_id, request_id

_TALKATIVE = ("httpx",)
"""Libraries that log each call at level info: a program that calls others every second would log little else."""

_SHARP = re.compile("[\x7f-\x9f\u2028\u2029]")
"""What JSON lets through, though terminals obey it or some readers end a line at it."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, the request and plan it is about, and the error if any."""

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
    """For people: time, level, logger and message, with the request and plan it is about behind it.

    A record is one line, and nothing in it reaches the terminal as a control sequence: what others send is logged, too. Only a
    traceback has further lines. They are indented, whatever its error says: none of them passes for a record.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        record.asctime = self.formatTime(record, self.datefmt)
        about = " ".join(f"{name}={value}" for name, value in _about().items())
        line = self.formatMessage(record)
        lines = [f"{line} [{about}]" if about else line]
        if record.exc_info:  # what another formatter left in exc_text is not as ours
            lines += _indented(self.formatException(record.exc_info))
        if record.stack_info:
            lines += _indented(self.formatStack(record.stack_info))
        return "\n".join(clean(one) for one in lines)


def _indented(lines: str) -> list[str]:
    return [f"  {line}" for line in lines.split("\n")]


def _about() -> dict[str, str]:
    """What is worked for at the moment: a record is formatted in the thread, and the context, that logs it."""
    found = {"request_id": request_id.get(), "plan_id": plan_id.get()}
    return {name: value for name, value in found.items() if value}


if TYPE_CHECKING:
    _TextHandler = logging.StreamHandler[TextIO]
else:
    _TextHandler = logging.StreamHandler


class StderrHandler(_TextHandler):
    """Writes to what ``sys.stderr`` is at the time, so that a redirection is followed."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        """Standard error."""
        return sys.stderr

    @stream.setter
    def stream(self, _stream: TextIO) -> None:
        raise AttributeError("the stream is always standard error")


def set_up_logs(section: LogSection) -> None:
    """Sends all logs of this process to standard error, as the configuration asks. May be called again."""
    handler = StderrHandler()
    handler.setFormatter(JsonFormatter() if section.format == "json" else ConsoleFormatter())
    root = logging.getLogger()
    root.handlers[:] = [old for old in root.handlers if not isinstance(old, StderrHandler)]
    root.addHandler(handler)
    root.setLevel(section.level.upper())
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.NOTSET if root.level < logging.INFO else max(root.level, logging.WARNING))


class _FirstLines(logging.Filter):
    """Lets so many records pass, and counts the others."""

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
    """While it lasts, no more than ``most`` lines are logged; at its end one more says how many were not shown."""
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
