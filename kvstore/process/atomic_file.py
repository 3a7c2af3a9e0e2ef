"""Atomic replacement of a small file: a reader, or a crash, sees the old or the new content, never a mixture."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, raw: bytes) -> None:
    """Write a synced temporary file with mode 0600, rename it to ``path``, and sync the folder.

    Raises:
        OSError: the file could not be written; the old content is unchanged.
    """
    scratch = path.with_name(f".{path.name}.new")
    try:
        with scratch.open("wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
