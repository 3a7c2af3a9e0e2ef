"""Logs of all programs: set up in one place, on standard error."""

from __future__ import annotations

import json
import logging
import os
import sys
import time

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


def set_up_logs(section: LogSection) -> None:
    """Sends all logs of this process to standard error, as the configuration asks. May be called again."""
    handler = logging.StreamHandler(sys.stderr)
    if section.format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    for old in list(root.handlers):
        if getattr(old, "set_up_by_kvstore", False):
            root.removeHandler(old)
    handler.set_up_by_kvstore = True  # type: ignore[attr-defined]  # how a second call finds it
    root.addHandler(handler)
    root.setLevel(section.level.upper())
