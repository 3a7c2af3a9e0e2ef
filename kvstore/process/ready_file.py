"""The ready file of a daemon. It appears when the daemon serves, and has its addresses for the process that started it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import aiofiles
import aiofiles.os


def write_ready_file(path: Path, **content: object) -> None:
    """Write ``content`` and the process id, as JSON, so that a reader sees the whole file or none.

        write_ready_file(config.ready_file, address="127.0.0.1:7400")

    Raises:
        OSError: the file cannot be written.
    """
    partial = _partial(path)
    partial.write_text(_text(content))
    partial.replace(path)


async def write_ready_file_aio(path: Path, **content: object) -> None:
    """As :func:`write_ready_file`, for an event loop, which must not wait for a disk."""
    partial = _partial(path)
    async with aiofiles.open(partial, "w") as file:
        await file.write(_text(content))
    await aiofiles.os.replace(partial, path)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def _text(content: dict[str, object]) -> str:
    return json.dumps({**content, "pid": os.getpid()})
