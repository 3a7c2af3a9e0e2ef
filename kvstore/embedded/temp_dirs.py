"""Temporary folders of clusters: those of runs that were killed are removed by the next run.

A run that is killed with SIGKILL cannot tidy up, and its volumes take gigabytes. So each folder holds a file that its owner keeps
locked (flock) while it lives, which the kernel sees to. A folder is removed only if all of this holds: it has the name of one of
ours, it is this user's, it has that file, and nobody has it locked.
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
"""Names as ``tempfile`` makes them of the prefixes that are used."""


class TempDir:
    """A temporary folder, removed by ``close``, or after the death of this process by the next one that makes some.

    Args:
        prefix: how its name begins: ``kvstore-``, ``kvstore-dual-`` or ``kvs-``.
        place: folder to make it in; None: the usual one.
    """

    def __init__(self, prefix: str, place: Path | None = None) -> None:
        place = place or Path(tempfile.gettempdir())
        sweep(place)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        temporary = self.path / f"{_OWNER}.new"
        self._fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        temporary.rename(self.path / _OWNER)  # locked before it can be seen

    def close(self) -> None:
        """Removes it. Once is enough."""
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1


def sweep(place: Path) -> list[Path]:
    """Removes what dead runs left in a folder, and says what that was. Whatever is not surely theirs stays."""
    removed = []
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for path in [Path(entry.path) for entry in entries if _OURS.fullmatch(entry.name)]:
            if _remove_if_dead(path):
                removed.append(path)
                _log.info("removed %s, which a run that was killed had left", path)
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
