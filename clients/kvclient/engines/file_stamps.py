"""Detects files that were replaced while this process ran, which it may have read before the replacement.

An engine reads its files first and digests them later. A replacement in between (files written or renamed, a parent folder moved,
a link changed) sets a change time (ctime), which no program can choose. If none of these times is newer than the process, the
process has read the current files.

An engine that runs inside the process that has just written its model calls ``mark_engine_start``.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

_STATUS = Path("/proc/self/stat")
_START_FIELD = 22 - 3
"""Index of the process's start time among the fields after its name, which may contain any character."""
_TICK_S = 0.02
"""File times are those of the kernel's last tick, so they may be early by at most this many seconds."""
_MAX_LINKS = 40
"""The kernel's limit of links in a path."""


_marked_s = 0.0


def mark_engine_start() -> None:
    """Declare that an engine is about to be created in this process, so that it reads the files written so far.

    For processes that create both model and engine. Without this call, such an engine shares no KV, because the model's files are
    newer than the process.
    """
    global _marked_s  # of the process, which counts as the time of its reads
    time.sleep(_TICK_S)  # files written just now are certainly older than this
    _marked_s = time.time()


def process_start_s() -> float:
    """Return when an engine of this process may have begun to read, in seconds of the file system clock.

    That is the start of the process, or the last ``mark_engine_start``; 0 if unknown.
    """
    try:
        fields = _STATUS.read_text().rpartition(")")[2].split()
        since_boot_s = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
        began_s = time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)
    except (OSError, ValueError, IndexError, AttributeError):
        began_s = 0.0
    return max(_marked_s, began_s)


def replaced_since(paths: Iterable[Path], moment_s: float) -> Path | None:
    """Find a file, folder or link on the given paths that was replaced since a moment.

    It examines the files and folders, each link that leads to them, and whether a parent folder was moved, which changes the
    folder and its parent. A change of only one of the two does not count; a change of both is indistinguishable from a move. On
    network file systems the times are those of the server. It does not detect mounts that cover or uncover a path, writes through
    a memory map of a file that was written before, or replacements before the clock was set forward.

    Args:
        paths: files, or folders whose added and removed entries count too; folders first.
        moment_s: seconds since the epoch.

    Raises:
        OSError: a path is missing or cannot be examined.
    """
    since_ns = int((moment_s - _TICK_S) * 1e9)
    known: dict[Path, os.stat_result] = {}

    def status(path: Path) -> os.stat_result:
        if path not in known:
            known[path] = path.lstat()
        return known[path]

    def is_new(path: Path) -> bool:
        return status(path).st_ctime_ns >= since_ns

    for path in paths:
        for step, remaining in _steps(path if path.is_absolute() else Path.cwd() / path):
            if is_new(step) and (not remaining or not stat.S_ISDIR(status(step).st_mode) or is_new(step.parent)):
                return step
    return None


def _steps(path: Path) -> Iterator[tuple[Path, int]]:
    """Yield each folder, link and file on a path, with the number of remaining steps.

    Raises:
        OSError: the links form a cycle.
    """
    left = list(reversed(path.parts[1:]))
    current = Path(path.anchor)
    links = 0
    while left:
        name = left.pop()
        if name == "..":
            current = current.parent
            continue
        step = current / name
        yield step, len(left)
        if step.is_symlink():
            links += 1
            if links > _MAX_LINKS:
                raise OSError(f"too many links: {path}")
            target = step.readlink()
            left.extend(part for part in reversed(target.parts) if part != target.anchor)
            current = Path(target.anchor) if target.is_absolute() else current
        else:
            current = step
