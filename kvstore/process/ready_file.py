"""The ready file of a daemon: tells the process that started it that it serves, and at which addresses."""

from __future__ import annotations

import json
import os
from pathlib import Path


def write_ready_file(path: Path, **content: object) -> None:
    """Write ``content`` and the process id, as JSON, so that a reader sees the whole file or none.

        write_ready_file(config.ready_file, address="127.0.0.1:7400")

    Raises:
        OSError: the file cannot be written.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps({**content, "pid": os.getpid()}))
    scratch.replace(path)
