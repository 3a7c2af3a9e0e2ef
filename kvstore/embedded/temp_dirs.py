"""Temporary folders of clusters. Each run removes the folders of killed runs.

A run that is killed with SIGKILL cannot clean up, and its volumes use gigabytes. So each folder contains a file that its owner
keeps locked (flock) until it ends. A folder is removed only if its name has one of our prefixes, this user owns it, it contains
the file, and no process holds the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

_log = logging.getLogger(__name__)

_OWNER = ".kvstore-owner"
_OURS = re.compile(r"(kvstore|kvstore-dual|kvs)-[a-z0-9_]{8}")
"""Names that ``tempfile`` creates with our prefixes."""


class TempDir:
    """A temporary folder. ``close`` removes it; if this process is killed, the next run does.

    Args:
        prefix: prefix of the name: ``kvstore-``, ``kvstore-dual-`` or ``kvs-``.
        parent: parent folder; None: the default of ``tempfile``.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        temporary = self.path / f"{_OWNER}.new"
        self._fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        temporary.rename(self.path / _OWNER)  # locked before it is visible

    def close(self) -> None:
        """Remove the folder; idempotent."""
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1


def sweep(folder: Path) -> list[Path]:
    """Remove the folders of killed runs. Returns the removed folders."""
    removed = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for path in [Path(entry.path) for entry in entries if _OURS.fullmatch(entry.name)]:
            if _remove_if_dead(path):
                removed.append(path)
                _log.info("temporary folder of a killed run removed: %s", path)
    return removed


def _remove_if_dead(path: Path) -> bool:
    try:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return False
        fd = os.open(path / _OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # its owner lives, or another run is removing it
        return False
    else:
        shutil.rmtree(path, ignore_errors=True)
        return True
    finally:
        os.close(fd)
