"""Whether files were put where they are while this process was running: what it has read may then have been others.

An engine reads its weights first, and what names them is looked at later. Between the two somebody may put others there, by
writing, by renaming (files, or a folder above them), or by pointing a link elsewhere. Each of these sets a time of change
(ctime), which no program chooses: none of them newer than the process means that it has read what is there now.

An engine that runs inside of the process which has just written its model says when it begins: ``engine_starts``.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

_STATUS = Path("/proc/self/stat")
_START_FIELD = 22 - 3
"""When the process started, counted from the field behind its name, which may hold anything."""
_TICK_S = 0.02
"""Files are stamped with the time of the kernel's last tick: they may look older than they are by so much, at most."""
_MOST_LINKS = 40
"""As many as the kernel follows."""


_said_s = 0.0


def engine_starts() -> None:
    """An engine is about to be made in this process: what was written before is what it will read.

    For whoever makes model and engine in one process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``). Without it no KV of such an engine
    is shared, for what was written after the process began might be newer than what the engine has read.
    """
    global _said_s  # of the process, as is what it has read
    time.sleep(_TICK_S)  # what was written just now is older than this, beyond doubt
    _said_s = time.time()


def reading_since_s() -> float:
    """Since when an engine of this process may have been reading, in seconds of the clock that files are stamped by.

    That is since the process began, or since somebody said that an engine does; 0 where the system does not tell.
    """
    try:
        fields = _STATUS.read_text().rpartition(")")[2].split()
        since_boot_s = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
        began_s = time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)
    except (OSError, ValueError, IndexError, AttributeError):
        began_s = 0.0
    return max(_said_s, began_s)


def put_there_since(paths: Iterable[Path], moment_s: float) -> Path | None:
    """Something that decides what a path reads and was put there since; None: nothing was.

    Looked at are the files and folders named, each link that leads to them, and of the folders above whether they themselves
    were moved: that changes them and the folder that they lie in. What else comes and goes in one of the two says nothing; in
    both, it cannot be told from a move, for what is written into a folder later hides that it was moved. On a network's file
    system the times are its server's. Not seen are mounts that cover or uncover something, what a program writes through a map of
    a file that it had written to before, and what was put there before the clock was set forward.

    Args:
        paths: files; or folders, first, of which every entry that came or went matters.
        moment_s: seconds since the epoch.

    Raises:
        OSError: something is not there, or cannot be looked at.
    """
    since_ns = int((moment_s - _TICK_S) * 1e9)
    looked: dict[Path, os.stat_result] = {}

    def at(place: Path) -> os.stat_result:
        if place not in looked:
            looked[place] = place.lstat()
        return looked[place]

    def is_new(place: Path) -> bool:
        return at(place).st_ctime_ns >= since_ns

    for path in paths:
        for place, follows in _places(path if path.is_absolute() else Path.cwd() / path):
            if is_new(place) and (not follows or not stat.S_ISDIR(at(place).st_mode) or is_new(place.parent)):
                return place
    return None


def _places(path: Path) -> Iterator[tuple[Path, int]]:
    """Each folder, link and file that is gone through to a path's end; with how many steps are left to it.

    Raises:
        OSError: links go round.
    """
    left = list(reversed(path.parts[1:]))
    at = Path(path.anchor)
    links = 0
    while left:
        name = left.pop()
        if name == "..":
            at = at.parent
            continue
        here = at / name
        yield here, len(left)
        if here.is_symlink():
            links += 1
            if links > _MOST_LINKS:
                raise OSError(f"too many links: {path}")
            target = here.readlink()
            left.extend(part for part in reversed(target.parts) if part != target.anchor)
            at = Path(target.anchor) if target.is_absolute() else at
        else:
            at = here
