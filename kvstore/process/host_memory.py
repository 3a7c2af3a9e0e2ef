"""How much memory this process may have: the host's, or less where it is in a control group with a limit, as containers are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_MEMINFO = Path("/proc/meminfo")
_GROUPS = Path("/proc/self/cgroup")
_TREE = Path("/sys/fs/cgroup")


def memory_total(meminfo: Path = _MEMINFO, groups: Path = _GROUPS, tree: Path = _TREE) -> int | None:
    """Bytes that this process may use at most, all its memory together; None where the host does not say.

    Args:
        meminfo: the host's figures.
        groups: the control groups of this process, as the kernel lists them.
        tree: where control groups are mounted.
    """
    known = [value for value in (_host_total(meminfo), _group_limit(groups, tree)) if value is not None]
    return min(known, default=None)


def memory_available(meminfo: Path = _MEMINFO, groups: Path = _GROUPS, tree: Path = _TREE) -> int | None:
    """Bytes that this process may take now without swapping; None where the host does not say.

    Of the host, what its kernel says is available; of each control group with a limit, what all in it leave of that. Pages of
    files that were not used lately count as free there: they go first. Arguments as of ``memory_total``.
    """
    rooms = [
        max(0, limit - max(0, used - (_statistic(folder / "memory.stat", idle) or 0)))
        for folder, limit, usage, idle in _limited(groups, tree)
        if (used := _number(folder / usage)) is not None
    ]
    host = _host(meminfo, "MemAvailable:")
    return min([*rooms, *([host] if host is not None else [])], default=None)


def huge_pages_free(meminfo: Path = _MEMINFO) -> int:
    """Bytes of huge pages of the usual size that are reserved and that nobody uses; 0 where the host does not say."""
    try:
        values = {line.split()[0]: int(line.split()[1]) for line in meminfo.read_text(encoding="ascii").splitlines() if line}
    except (OSError, ValueError, IndexError):
        return 0
    free = values.get("HugePages_Free:", 0) - values.get("HugePages_Rsvd:", 0)  # reserved: promised to a mapping already
    return max(0, free) * (values.get("Hugepagesize:", 0) << 10)


def _host_total(meminfo: Path) -> int | None:
    return _host(meminfo, "MemTotal:")


def _host(meminfo: Path, name: str) -> int | None:
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith(name)), None)
    except (OSError, ValueError, IndexError):
        return None


def _group_limit(groups: Path, tree: Path) -> int | None:
    """The least limit of the groups that this process is in and of all above them."""
    return min((limit for _, limit, _, _ in _limited(groups, tree)), default=None)


def _limited(groups: Path, tree: Path) -> Iterator[tuple[Path, int, str, str]]:
    """The groups that this process is in and all above them, where they have a limit.

    Yields:
        Folder, limit in bytes, the file that says what is used, and which line of ``memory.stat`` counts idle pages of files.
    """
    try:
        lines = groups.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            top, name, usage, idle = tree, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, name = tree / "memory", "memory.limit_in_bytes"
            usage, idle = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        own = PurePosixPath(path.lstrip("/"))
        if ".." in own.parts:  # a group outside of what this process sees
            own = PurePosixPath()
        for folder in (top / part for part in (own, *own.parents)):
            if (limit := _number(folder / name)) is not None:
                yield folder, limit, usage, idle


def _statistic(path: Path, name: str) -> int | None:
    """One line's number of a group's statistics."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
        return next((int(words[1]) for line in lines if (words := line.split())[:1] == [name]), None)
    except (OSError, ValueError, IndexError):
        return None


def _number(path: Path) -> int | None:
    """A file's number; None where there is none, or it is ``max``."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
