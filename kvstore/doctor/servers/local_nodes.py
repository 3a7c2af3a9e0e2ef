"""Find the nodes of this host by their unix sockets, without a metadata server. A killed node leaves a socket that refuses."""

from __future__ import annotations

import re
import socket
import stat
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MOST_SOCKETS = 32
_CONNECT_S = 1.0
_CREDENTIALS = struct.Struct("3i")
_OPEN_FILES = re.compile(r"^Max open files\s+(\d+|unlimited)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class LocalSocket:
    """A socket of a node.

    Attributes:
        path: path of the socket.
        process: id of the listening process; None: there is none, or the kernel does not say.
        open_files: limit of open files of that process; None: unknown or unlimited.
        error: why the connection failed; None: it was accepted.
    """

    path: Path
    process: int | None = None
    open_files: int | None = None
    error: str | None = None


def sockets_in(folders: Iterable[Path]) -> tuple[list[LocalSocket], list[Path]]:
    """Find the sockets of nodes in some folders, and connect to each.

    Returns:
        The sockets, ``MOST_SOCKETS`` at most; and the folders that this user cannot read.
    """
    found: dict[Path, None] = {}
    closed = []
    for folder in folders:
        try:
            for path in sorted(folder.iterdir()):
                if path.suffix == ".sock" and stat.S_ISSOCK(path.lstat().st_mode):
                    found[path] = None
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            closed.append(folder)
    return [_asked(path) for path in list(found)[:MOST_SOCKETS]], closed


def _asked(path: Path) -> LocalSocket:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_CONNECT_S)
        try:
            connection.connect(str(path))
            pid = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
        except OSError as error:
            return LocalSocket(path, error=error.strerror or str(error))
    return LocalSocket(path, pid or None, _open_files(pid))


def _open_files(pid: int) -> int | None:
    try:
        found = _OPEN_FILES.search(Path(f"/proc/{pid}/limits").read_text(encoding="ascii", errors="replace"))
    except OSError:
        return None
    return None if found is None or found[1] == "unlimited" else int(found[1])
