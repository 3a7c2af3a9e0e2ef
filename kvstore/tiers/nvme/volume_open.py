"""Opening a volume's folder: its lock, its creation, the check that its files belong together, and the next epoch.

Opening for writing needs some space: the catalog is copied on write, and the epoch is written. If the file system accepts no
writes (full, over quota, read-only, failing), an existing volume is opened read-only, because its blocks can still be read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kvstore.core.errors import CapacityExceeded, Conflict, CorruptBlock, InvalidArgument, NotFound, Unavailable
from kvstore.core.types import VolumeId
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import volumes as volumes_metrics
from kvstore.tiers.allocator import chunk_bytes_for
from kvstore.tiers.nvme.catalog import CATALOG_FILE, NO_WRITING, Catalog, map_bytes_for, mend_hint
from kvstore.tiers.nvme.slab_io import IoChoice, SlabFile
from kvstore.tiers.nvme.superblock import DATA_START, SUPERBLOCK_BYTES, Superblock, newest_superblock, pack_superblock

_log = logging.getLogger(__name__)

SLAB_FILE = "slab.kv"
CATALOG_FOLDER = "catalog"
LOCK_FILE = "lock"
_TIB = 1 << 40


class CannotWriteError(Exception):
    """The file system does not accept writes now; the message has the reason. The volume is not damaged."""


class VolumeLock:
    """Exclusive use of a volume by one process. The kernel releases it when the process ends.

    Raises:
        Conflict: another process has the volume open.
        NotFound: the folder does not exist.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._fd = _open_lock(path / LOCK_FILE)
        except FileNotFoundError as error:
            raise NotFound("no volume here", path=path) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            raise Conflict("another process has this volume open", path=path) from error

    def close(self) -> None:
        """Release the lock."""
        os.close(self._fd)


def _open_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.EROFS or not path.exists():
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


@dataclass(frozen=True, slots=True)
class OpenParts:
    """Files of an open volume."""

    file: SlabFile
    catalog: Catalog
    superblock: Superblock
    read_only: str | None
    """Why nothing can be written; None: it can."""


def open_parts(path: Path, volume_id: VolumeId, capacity_bytes: int, engine: IoChoice, counters: Counters) -> OpenParts:
    """Open an existing volume, read-only if the file system accepts no writes.

    Raises:
        As ``NvmeSlab.open``.
    """

    def opened(writable: bool) -> OpenParts:
        with contextlib.ExitStack() as undo:
            with writing() if writable else contextlib.nullcontext():
                file = engine.open(path / SLAB_FILE, writable=writable, counters=counters)
                undo.callback(file.close)
                catalog = open_catalog(path, capacity_bytes, readonly=not writable)
                undo.callback(catalog.close)
            superblock = _checked(path, file, catalog, volume_id, capacity_bytes)
            if writable:
                _grow(file, superblock, capacity_bytes)
                superblock = begin_epoch(file, catalog, replace(superblock, capacity_bytes=capacity_bytes))
            undo.pop_all()
            return OpenParts(file, catalog, superblock, None)

    try:
        return opened(writable=True)
    except CannotWriteError as error:
        reason = str(error)
    counters.add(volumes_metrics.NVME_OPENED_READ_ONLY)
    _log.warning(
        "volume opened read-only: %s (path=%s, reason=%s); its blocks can be read, and it stores blocks again "
        "once the file system takes writes",
        volume_id, path, reason,
    )  # fmt: skip
    return replace(opened(writable=False), read_only=reason)


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Convert errors of a file system that does not accept writes to ``CannotWriteError``."""
    try:
        yield
    except (CapacityExceeded, Unavailable) as error:
        raise CannotWriteError(error.fields.get("reason", error.message)) from error
    except OSError as error:
        if error.errno not in NO_WRITING:
            raise
        raise CannotWriteError(error.strerror) from error


def open_catalog(path: Path, capacity_bytes: int, *, readonly: bool = False) -> Catalog:
    """Open the catalog of the volume at ``path``.

    Raises:
        CorruptBlock: the catalog is lost or damaged; the message has the command that repairs it.
        CapacityExceeded, Unavailable: the catalog cannot be opened for writing now.
        InvalidArgument: the volume is too large for the address space of the process.
    """
    if not (path / CATALOG_FOLDER / CATALOG_FILE).exists():
        raise CorruptBlock(f"the catalog of this volume is lost; {mend_hint(path)}")
    try:
        return _map_catalog(path / CATALOG_FOLDER, capacity_bytes, readonly=readonly)
    except CorruptBlock as error:
        raise CorruptBlock(f"{error}; {mend_hint(path)}") from error


def _map_catalog(path: Path, capacity_bytes: int, *, readonly: bool = False) -> Catalog:
    try:
        return Catalog(path, map_bytes=map_bytes_for(capacity_bytes), readonly=readonly)
    except InvalidArgument as error:
        needed = int(error.fields["map_bytes"])
        raise InvalidArgument(
            f"a volume of {capacity_bytes / _TIB:,.1f} TiB is too large: its catalog requires {needed / _TIB:,.1f} TiB of address"
            " space, and the process does not get that much; configure a smaller size in node.nvme, or several volumes, or raise"
            " the limit of address space (ulimit -v)",
            path=path.parent,
        ) from error


def _checked(path: Path, file: SlabFile, catalog: Catalog, volume_id: VolumeId, capacity_bytes: int) -> Superblock:
    """The superblock of an existing volume, after the check that slab, catalog and arguments belong together."""
    try:
        current, _ = newest_superblock(file.pread(0, 2 * SUPERBLOCK_BYTES))
    except CorruptBlock as error:
        raise CorruptBlock(
            f"{path / SLAB_FILE} has no good superblock ({error.message}); if it is a volume, {mend_hint(path)}"
        ) from error
    if current.volume_id != volume_id:
        raise Conflict("the folder has another volume", path=path, found=current.volume_id, expected=volume_id)
    noted = catalog.superblock()
    if noted is None or noted.uid != current.uid:
        raise CorruptBlock(f"the catalog here belongs to another volume; {mend_hint(path)}")
    if noted.epoch > current.epoch:
        current = noted  # the newer copy in the slab was damaged; its epoch must not be used again
    if capacity_bytes < current.capacity_bytes:
        raise InvalidArgument(
            "a volume cannot shrink; set at least its current capacity, or create a new volume",
            path=path, capacity_bytes=capacity_bytes, has=current.capacity_bytes,
        )  # fmt: skip
    size = os.fstat(file.fd).st_size
    if size < current.file_bytes:
        raise CorruptBlock(f"{path / SLAB_FILE} is truncated ({size} of {current.file_bytes} bytes); {mend_hint(path)}")
    return current


def _grow(file: SlabFile, current: Superblock, capacity_bytes: int) -> None:
    if capacity_bytes > current.capacity_bytes:
        reserve(file.fd, DATA_START + capacity_bytes)
        os.fsync(file.fd)
        _log.info("volume grown: %s (mib=%d -> %d)", current.volume_id, current.capacity_bytes >> 20, capacity_bytes >> 20)


def begin_epoch(file: SlabFile, catalog: Catalog, current: Superblock) -> Superblock:
    """Begin the next epoch: write it to catalog and slab, synced.

    Raises:
        CannotWriteError: the file system does not accept writes.
        KVStoreError, OSError: another error.
    """
    following = replace(current, epoch=current.epoch + 1)
    _, next_at = newest_superblock(file.pread(0, 2 * SUPERBLOCK_BYTES))
    with writing():
        catalog.put_superblock(following)
        file.pwrite(next_at, pack_superblock(following))
        file.sync()
    return following


def make_volume(path: Path, volume_id: VolumeId, capacity_bytes: int) -> None:
    """Create an empty volume. The slab gets its name last, so a crash leaves no half-made volume.

    Raises:
        CorruptBlock: a catalog with blocks exists without its slab.
        CapacityExceeded: the file system has not enough space.
        InvalidArgument: the volume is too large for the address space of the process.
    """
    superblock = Superblock(secrets.token_bytes(16), volume_id, capacity_bytes, chunk_bytes_for(capacity_bytes), 0)
    catalog_path = path / CATALOG_FOLDER
    catalog_path.mkdir(exist_ok=True, mode=0o700)
    catalog = _map_catalog(catalog_path, capacity_bytes)
    try:
        if len(catalog):
            raise CorruptBlock(
                f"the slab of this volume is lost, but its catalog is there; move {catalog_path} away to create a new volume"
            )
        catalog.put_superblock(superblock, anew=True)
    finally:
        catalog.close()
    temporary = path / f"{SLAB_FILE}.new"
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        reserve(fd, superblock.file_bytes)
        os.pwrite(fd, pack_superblock(superblock), 0)
        os.fsync(fd)
        temporary.rename(path / SLAB_FILE)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    _sync_folder(path)


def reserve(fd: int, size: int) -> None:
    """Preallocate the file. Later writes then need no new extents, cannot run out of space, and are twice as fast."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise CapacityExceeded(
                "the file system has not enough space for this volume", bytes=size, reason=error.strerror
            ) from error
        raise


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
