"""Small file systems, and how to fill them."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(place: Path, size: str) -> Iterator[bool]:
    """Mount a file system in memory at a new or an empty folder. Yields False if this user may not mount one."""
    place.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    is_mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(place)], check=True)


def fill_up(path: Path) -> Path:
    """Write a file until its file system is full."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError, match="No space"):
        deque((os.write(fd, bytes(4096)) for _ in itertools.count()), maxlen=0)
    os.close(fd)
    return path
