"""Default folders: data, and the unix sockets by which programs on a host find a node."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import stat
import tempfile
from pathlib import Path
from typing import Final

from kvstore.config.model import Config
from kvstore.core.errors import InvalidArgument

_MAX_FOLDER_NAME = 32
_MAX_RUN_DIRS = 48
_UNIT_FOLDER: Final = Path("/run/kvstore")
"""``RuntimeDirectory`` of the systemd unit, and ``runDir`` of the chart."""


def data_dir(config: Config) -> Path:
    """Default folder of persistent data."""
    if config.data_dir is not None:
        return config.data_dir
    home = os.environ.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "kvstore"


def run_dir(name: str) -> Path:
    """Short private folder for the unix sockets of one daemon. Socket paths are limited to 107 bytes."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    if plain != name or len(plain) > _MAX_FOLDER_NAME:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        plain = f"{plain[: _MAX_FOLDER_NAME - 9]}-{digest}"
    return run_dirs() / plain


def run_dirs() -> Path:
    """Parent of the socket folders of this user's daemons."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "kvstore" if base else Path(tempfile.gettempdir()) / f"kvstore-{os.getuid()}"


def short_run_dirs() -> Path:
    """Return ``run_dirs``, or a folder in /tmp if socket paths below it would be too long."""
    usual = run_dirs()
    return usual if len(str(usual)) <= _MAX_RUN_DIRS else Path("/tmp") / f"kvstore-{os.getuid()}"  # noqa: S108  # made with 0700


def make_run_dir(folder: Path) -> None:
    """Make ``run_dirs``, ``short_run_dirs`` or a folder in one of them, which only this user may write.

    Their names can be guessed, so another user could make them first, and later replace the sockets in them.

    Raises:
        InvalidArgument: a level of the folder is a link, or belongs to another user.
        OSError: the folder cannot be made.
    """
    base = next((one for one in (run_dirs(), short_run_dirs()) if folder.is_relative_to(one)), folder)
    levels = [base]
    for part in folder.relative_to(base).parts:
        levels.append(levels[-1] / part)
    for level in levels:
        with contextlib.suppress(FileExistsError):
            level.mkdir(parents=True, mode=0o700)
        found = level.lstat()
        if not _is_own(found):
            raise InvalidArgument(
                f"the folder of unix sockets {level} is a link or belongs to another user: "
                "remove it, or set XDG_RUNTIME_DIR to a folder of your own with a short path",
                owner=found.st_uid,
            )
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):  # made by an earlier version under a umask such as 002
            level.chmod(0o700)


def _is_own(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def node_socket(config: Config) -> Path:
    """Unix socket of the configured node."""
    node_id = config.node.node_id or socket.gethostname()
    return (config.node.run_dir or run_dir(node_id)) / f"{node_id}.sock"


def socket_folders(config: Config) -> list[Path]:
    """Folders with sockets of nodes: of the configuration, of this user and of the systemd unit."""
    folders, default = [node_socket(config).parent, _UNIT_FOLDER], run_dirs()
    with contextlib.suppress(OSError):
        if _is_own(default.lstat()):
            folders += sorted(default.iterdir())
        else:  # another user made it, and may have made sockets in it
            folders = [folder for folder in folders if not folder.is_relative_to(default)]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()] or folders[:1]
