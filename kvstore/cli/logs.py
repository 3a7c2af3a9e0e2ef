"""Logs of all programs: set up in one place, on standard error."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, TextIO

from kvstore.core.config import LogSection


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
