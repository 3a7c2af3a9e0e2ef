"""Faults of a connector's storage, its servers and its engines. File faults are the same for every storage that has files."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Final

SECTOR: Final = 4096
_GONE = ".gone"


class ConnectorFault(StrEnum):
    """A fault between storing and loading, or while an engine loads."""

    NONE = "none"
    BYTES_CHANGED = "bits flipped on disk"
    SECTORS_SWAPPED = "sectors on disk exchanged"
    FILES_CUT = "files cut in half"
    FILES_REMOVED = "files removed"
    FOLDER_LOST = "folder replaced by a file"
    SERVER_KILLED = "servers killed"
    SERVER_STALLED = "servers stopped for a while"
    ENGINE_KILLED = "engine killed while it stores"
    OTHER_WEIGHTS = "weights replaced in the model's folder"


def files_of(folder: Path, *, skip_bytes: int) -> Iterator[Path]:
    """Yield the files below a folder that have more than ``skip_bytes``."""
    for path in sorted(folder.rglob("*")):
        with suppress(FileNotFoundError):
            if path.is_file() and not path.is_symlink() and path.stat().st_size > skip_bytes:
                yield path


def flip_bits(path: Path, dice: random.Random, skip_bytes: int) -> None:
    """Flip one bit of each sector."""
    with path.open("r+b") as file:
        for start in range(skip_bytes, path.stat().st_size, SECTOR):
            place = min(start + dice.randrange(SECTOR), path.stat().st_size - 1)
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes((byte ^ 1 << dice.randrange(8),)))
        file.flush()
        os.fsync(file.fileno())


def swap_sectors(path: Path, _dice: random.Random, skip_bytes: int) -> None:
    """Exchange each sector with its neighbour, as misdirected writes would: all numbers are valid."""
    with path.open("r+b") as file:
        for start in range(skip_bytes, path.stat().st_size - SECTOR, 2 * SECTOR):
            file.seek(start)
            both = file.read(2 * SECTOR)
            file.seek(start)
            file.write(both[SECTOR:] + both[:SECTOR])
        file.flush()
        os.fsync(file.fileno())


def cut(path: Path, _dice: random.Random, skip_bytes: int) -> None:
    """Cut the file in half."""
    os.truncate(path, max(skip_bytes, path.stat().st_size // 2))


def remove(path: Path, _dice: random.Random, _skip_bytes: int) -> None:
    """Remove the file."""
    path.unlink()


_FILE_FAULTS: Final[Mapping[ConnectorFault, Callable[[Path, random.Random, int], None]]] = {
    ConnectorFault.BYTES_CHANGED: flip_bits,
    ConnectorFault.SECTORS_SWAPPED: swap_sectors,
    ConnectorFault.FILES_CUT: cut,
    ConnectorFault.FILES_REMOVED: remove,
}
FOLDER_FAULTS: Final = (*_FILE_FAULTS, ConnectorFault.FOLDER_LOST)
"""Faults of a folder."""


def strike_folder(folder: Path, fault: ConnectorFault, dice: random.Random, *, skip_bytes: int = 0) -> None:
    """Damage the files of a folder.

    Args:
        folder: the folder.
        fault: one of ``FOLDER_FAULTS``.
        dice: chooses places.
        skip_bytes: smaller files stay as they are, as does the beginning of larger ones.
    """
    if fault is ConnectorFault.FOLDER_LOST:
        folder.rename(folder.with_name(folder.name + _GONE))
        folder.write_text("not a folder")
        return
    for path in files_of(folder, skip_bytes=skip_bytes):
        with suppress(FileNotFoundError):  # removed or renamed by the connector
            _FILE_FAULTS[fault](path, dice, skip_bytes)


def heal_folder(folder: Path) -> None:
    """Put a lost folder back. Damaged files stay damaged."""
    gone = folder.with_name(folder.name + _GONE)
    if gone.exists():
        if folder.is_dir():  # the connector made a new one
            shutil.rmtree(folder)
        else:
            folder.unlink(missing_ok=True)
        shutil.move(gone, folder)
