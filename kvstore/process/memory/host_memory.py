"""Memory available to this process: that of the host, or the limit of its control group, e.g. in a container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_MEMINFO = Path("/proc/meminfo")
_GROUPS = Path("/proc/self/cgroup")
_TREE = Path("/sys/fs/cgroup")


def memory_total(meminfo: Path = _MEMINFO, groups: Path = _GROUPS, tree: Path = _TREE) -> int | None:
    """Maximum number of bytes that this process may use; None: unknown.

    Args:
        meminfo: path of the host's memory statistics.
        groups: path of the kernel's list of this process's control groups.
        tree: mount point of the control groups.
    """
    known = [value for value in (_host_total(meminfo), _group_limit(groups, tree)) if value is not None]
    return min(known, default=None)


def memory_available(meminfo: Path = _MEMINFO, groups: Path = _GROUPS, tree: Path = _TREE) -> int | None:
    """Number of bytes that this process can allocate now without swapping; None: unknown.

    The minimum of the host's available memory and the unused part of each control group's limit. Inactive file pages count as
    unused, because the kernel reclaims them first. Arguments: see ``memory_total``.
    """
    unused = [
        max(0, limit - max(0, used - (_statistic(folder / "memory.stat", idle) or 0)))
        for folder, limit, usage, idle in _limited(groups, tree)
        if (used := _number(folder / usage)) is not None
    ]
    host = _host(meminfo, "MemAvailable:")
    return min([*unused, *([host] if host is not None else [])], default=None)


def huge_pages_free(meminfo: Path = _MEMINFO) -> int:
    """Bytes of reserved huge pages of the default size that are free; 0: unknown."""
    try:
        values = {line.split()[0]: int(line.split()[1]) for line in meminfo.read_text(encoding="ascii").splitlines() if line}
    except (OSError, ValueError, IndexError):
        return 0
    free = values.get("HugePages_Free:", 0) - values.get("HugePages_Rsvd:", 0)  # HugePages_Rsvd: committed to existing mappings
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
    """Minimum limit of this process's control groups and their ancestors."""
    return min((limit for _, limit, _, _ in _limited(groups, tree)), default=None)


def _limited(groups: Path, tree: Path) -> Iterator[tuple[Path, int, str, str]]:
    """This process's control groups and their ancestors that have a limit.

    Yields:
        Folder, limit in bytes, name of the file with the usage, and name of the inactive file pages in ``memory.stat``.
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
        if ".." in own.parts:  # a group outside of this process's cgroup namespace
            own = PurePosixPath()
        for folder in (top / part for part in (own, *own.parents)):
            if (limit := _number(folder / name)) is not None:
                yield folder, limit, usage, idle


def _statistic(path: Path, name: str) -> int | None:
    """One value of a group's statistics."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
        return next((int(words[1]) for line in lines if (words := line.split())[:1] == [name]), None)
    except (OSError, ValueError, IndexError):
        return None


def _number(path: Path) -> int | None:
    """The number in a file; None: no such file, or no number (``max``)."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
