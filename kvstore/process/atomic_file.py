"""A small file that is there as it was before a change or as it is after it, and never in between."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, raw: bytes) -> None:
    """Writes a file anew: beside it, synced, then renamed, and the folder synced. Nobody but its owner may read it.

    Raises:
        OSError: it could not be written; the one of before is there.
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
