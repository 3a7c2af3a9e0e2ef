"""Detects files that were replaced while this process ran, so that it may have read others.

An engine reads its files first; a digest of them is made later. A replacement between the two (files written or renamed, a folder
above them moved, a link changed) sets a time of change (ctime), which no program can choose. If none of these times is newer than
the process, it has read what is there now.

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
"""The process's start time, counted from the field after its name, which may contain anything."""
_TICK_S = 0.02
"""File times are those of the kernel's last tick, so they may be early by at most this much."""
_MAX_LINKS = 40
"""The kernel's own limit."""


_marked_s = 0.0


def mark_engine_start() -> None:
    """Declare that an engine is about to be made in this process, so that it reads what was written before.

    For processes that make both model and engine. Without it no KV of such an engine is shared, since the model's files are newer
    than the process.
    """
    global _marked_s  # of the process, as is what it has read
    time.sleep(_TICK_S)  # what was written just now is certainly older than this
    _marked_s = time.time()


def process_start_s() -> float:
    """When an engine of this process may have begun to read, in seconds of the clock of file times.

    That is the start of the process, or the last ``mark_engine_start``; 0 if the system does not tell.
    """
    try:
        fields = _STATUS.read_text().rpartition(")")[2].split()
        since_boot_s = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
        began_s = time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)
    except (OSError, ValueError, IndexError, AttributeError):
        began_s = 0.0
    return max(_marked_s, began_s)


def replaced_since(paths: Iterable[Path], moment_s: float) -> Path | None:
    """Find something on the way to the given files that was replaced since a moment.

    Examined are the files and folders given, each link that leads to them, and whether a folder above them was moved, which
    changes the folder and its parent. A change of only one of the two does not count; a change of both cannot be told from a
    move. On network file systems the times are those of the server. Not detected are mounts that cover or uncover something,
    writes through a memory map of a file that was written before, and replacements before the clock was set forward.

    Args:
        paths: files, or folders of which every entry that came or went counts; folders first.
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
    """Yield each folder, link and file on the way to a path, with the number of steps left after it.

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
