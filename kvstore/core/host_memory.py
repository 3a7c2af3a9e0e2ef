"""How much memory this process may have: the host's, or less where it is in a control group with a limit, as containers are."""

from __future__ import annotations

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


def _host_total(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemTotal:")), None)
    except (OSError, ValueError, IndexError):
        return None


def _group_limit(groups: Path, tree: Path) -> int | None:
    """The least limit of the groups that this process is in and of all above them."""
    try:
        lines = groups.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    limits = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            top, name = tree, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = tree / "memory", "memory.limit_in_bytes"
        else:
            continue
        own = PurePosixPath(path.lstrip("/"))
        if ".." in own.parts:  # a group outside of what this process sees
            own = PurePosixPath()
        limits += [limit for part in (own, *own.parents) if (limit := _number(top / part / name)) is not None]
    return min(limits, default=None)


def _number(path: Path) -> int | None:
    """A file's number; None where there is none, or it is ``max``."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
