"""Logs of all programs: set up in one place, on standard error."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from kvstore.core.config import LogSection

_TALKATIVE = ("httpx",)
"""Libraries that log each call at level info: a program that calls others every second would log little else."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, and the error if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        entry = {
            "time": stamp,
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": os.getpid(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


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
    if section.format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S"))
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
