"""Atomic replacement of a small file: a reader, or a crash, sees the old or the new content, never a mixture.

Also locks of such files, and files of one user.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

LOCK_S: Final = 1.0
"""Longest wait for other writers. They hold the lock for one small write at a time, unless one of them is suspended."""
_POLL_S: Final = 0.005


def open_private(path: str, flags: int) -> int:
    """Open a file, as ``opener`` of ``open``. If it is new, only its user may access it."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Keep other processes from writing a file. The lock is on another file, because this one is replaced.

    Raises:
        OSError: the lock file cannot be opened, or another process holds the lock for ``LOCK_S``.
    """
    lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        end_s = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end_s:
                    reason = f"another process has held its lock for {LOCK_S:g} s; continue or end that process"
                    raise OSError(errno.EAGAIN, reason) from None
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(lock)


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
