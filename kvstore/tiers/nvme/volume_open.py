"""Opening a volume's folder: its lock, its creation, the check that its files belong together, and the next epoch.

Only the node that owns the volume opens it (``kvstore.tiers.nvme.ownership``). An owner that follows another one first publishes
its token and copies the catalog, also if an earlier attempt ended in the middle.

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
from kvstore.core.types import NamespaceId, NodeId, VolumeId
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import volumes as volumes_metrics
from kvstore.tiers.allocator import chunk_bytes_for
from kvstore.tiers.nvme.catalog import CATALOG_FILE, NO_WRITING, Catalog, Invalid, invalid_namespaces, map_bytes_for, mend_hint
from kvstore.tiers.nvme.ownership import (
    CATALOG_FOLDER,
    LOCK_FILE,
    SLAB_FILE,
    Claim,
    ClaimsMissing,
    Owner,
    Step,
    VolumeAdopted,
    VolumeObservation,
    claim_in_force,
    copy_catalog,
    home_of,
    name_at,
    newest_catalog,
    next_step,
    sync_folder,
)
from kvstore.tiers.nvme.slab_io import IoChoice, SlabFile
from kvstore.tiers.nvme.superblock import (
    DATA_START,
    SUPERBLOCK_BYTES,
    Superblock,
    UnknownVersion,
    newest_superblock,
    pack_superblock,
)

_log = logging.getLogger(__name__)

_MOST_STEPS = 4
"""Steps from a claim to an opening, and one more."""
_TIB = 1 << 40


class CannotWriteError(Exception):
    """The file system does not accept writes now; the message has the reason. The volume is not damaged."""


class VolumeLock:
    """Exclusive use of a volume by one process of its owner. The kernel releases it when the process ends.

    It keeps processes of one host apart. Nodes of several hosts are kept apart by claims, so the lock need not work across hosts.

    Args:
        path: folder of the volume.
        token: of the owner.

    Raises:
        Conflict: another process has the volume open.
        NotFound: the folder does not exist.
    """

    def __init__(self, path: Path, token: int) -> None:
        try:
            self._fd = _open_lock(path / name_at(LOCK_FILE, token))
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
    invalid: dict[NamespaceId, Invalid]
    """Namespaces whose older blocks are invalid."""
    read_only: str | None
    """Why nothing can be written; None: it can."""


def owned_claim(path: Path, volume_id: VolumeId, node_id: NodeId) -> Claim:
    """The claim in force, which must be that of ``node_id``.

    Raises:
        VolumeAdopted: it is another node's.
    """
    found = claim_in_force(path, home_of(volume_id))
    if found.node_id != node_id:
        raise VolumeAdopted(path, volume_id, found.node_id, found.token)
    return found


def open_parts(
    path: Path, volume_id: VolumeId, capacity_bytes: int, engine: IoChoice, counters: Counters, owned: Claim
) -> OpenParts:
    """Open an existing volume, read-only if the file system accepts no writes.

    Args:
        path: folder of the volume.
        volume_id: its name.
        capacity_bytes: space for slots; 0: the present one.
        engine: I/O engine.
        counters: count failures.
        owned: the claim of the caller.

    Raises:
        As ``NvmeSlab.open``.
    """

    def opened(writable: bool) -> OpenParts:
        with contextlib.ExitStack() as undo:
            with writing() if writable else contextlib.nullcontext():
                file = engine.open(path / SLAB_FILE, writable=writable, counters=counters)
                undo.callback(file.close)
                current = _current(path, file, volume_id)
                capacity = capacity_bytes or current.capacity_bytes
                current = _take_over(path, file, current, owned, writable=writable)
                catalog = open_catalog(path, capacity, owned.token, readonly=not writable)
                undo.callback(catalog.close)
            superblock = _checked(path, file, catalog, current, capacity)
            invalid = invalid_namespaces(path, superblock.uid)
            if writable:
                _grow(file, superblock, capacity)
                superblock = begin_epoch(file, catalog, replace(superblock, capacity_bytes=capacity))
            undo.pop_all()
            return OpenParts(file, catalog, superblock, invalid, None)

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


def _take_over(path: Path, file: SlabFile, current: Superblock, owned: Claim, *, writable: bool) -> Superblock:
    """Do the steps that are left between a claim and the opening of the volume. Returns the superblock then.

    Raises:
        VolumeAdopted: another node has claimed a higher token since.
        Unavailable: something is left, and the volume is to be opened read-only.
        CorruptBlock: claims are missing, or the old catalog is damaged.
    """
    for _ in range(_MOST_STEPS):
        claim = owned_claim(path, current.volume_id, owned.node_id)
        if claim.token != owned.token:
            raise VolumeAdopted(path, current.volume_id, claim.node_id, claim.token)
        catalog = newest_catalog(path, owned.token)
        step = next_step(VolumeObservation(Owner.SELF, owned.token, current.token, catalog))
        if step is Step.OPEN:
            return current
        if step is Step.REFUSE:
            raise ClaimsMissing(path, current.token)
        if not writable:
            raise Unavailable("the volume must be taken over first, and its file system accepts no writes", path=path)
        if step is Step.PUBLISH:
            current = publish_token(path, file, current, owned.token)
        else:
            copy_catalog(path, catalog, owned.token)
            _log.info("catalog copied: %s (token=%d -> %d)", current.volume_id, catalog, owned.token)
    raise Unavailable("the volume changes while it is taken over", path=path)


def publish_token(path: Path, file: SlabFile, current: Superblock, token: int) -> Superblock:
    """Write a token to both copies of the superblock, synced, which fences nodes with lower tokens.

    The epoch grows too, so slots that the old owner still writes have other generations than those of the new one.

    Raises:
        VolumeAdopted: another node has claimed a higher token.
        CannotWriteError: the file system does not accept writes.
    """
    following = replace(current, epoch=current.epoch + 1, token=token)
    page = pack_superblock(following)
    for position in (0, SUPERBLOCK_BYTES):
        found = claim_in_force(path, home_of(current.volume_id))
        if found.token > token:
            raise VolumeAdopted(path, current.volume_id, found.node_id, found.token)
        with writing():
            file.pwrite(position, page)
            file.sync()
    _log.info("volume token published: %s (token=%d)", following.volume_id, token)
    return following


def open_catalog(path: Path, capacity_bytes: int, token: int = 0, *, readonly: bool = False) -> Catalog:
    """Open the catalog of the volume at ``path`` and of an owner's token.

    Raises:
        CorruptBlock: the catalog is lost or damaged; the message has the command that repairs it.
        CapacityExceeded, Unavailable: the catalog cannot be opened for writing now.
        InvalidArgument: the volume is too large for the address space of the process.
    """
    folder = path / name_at(CATALOG_FOLDER, token)
    if not (folder / CATALOG_FILE).exists():
        raise CorruptBlock(f"the catalog of this volume is lost; {mend_hint(path)}")
    try:
        return _map_catalog(folder, capacity_bytes, readonly=readonly)
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


def _current(path: Path, file: SlabFile, volume_id: VolumeId) -> Superblock:
    """The superblock in the slab, after the check that it is the volume's."""
    try:
        current, _ = newest_superblock(file.pread(0, 2 * SUPERBLOCK_BYTES))
    except UnknownVersion:
        raise
    except CorruptBlock as error:
        raise CorruptBlock(
            f"{path / SLAB_FILE} has no good superblock ({error.message}); if it is a volume, {mend_hint(path)}"
        ) from error
    if current.volume_id != volume_id:
        raise Conflict("the folder has another volume", path=path, found=current.volume_id, expected=volume_id)
    return current


def _checked(path: Path, file: SlabFile, catalog: Catalog, current: Superblock, capacity_bytes: int) -> Superblock:
    """The superblock of an existing volume, after the check that slab, catalog and arguments belong together."""
    noted = catalog.superblock()
    if noted is None or noted.uid != current.uid:
        raise CorruptBlock(f"the catalog here belongs to another volume; {mend_hint(path)}")
    if noted.epoch > current.epoch:
        # the newer copy in the slab was damaged; its epoch must not be used again
        current = replace(noted, token=current.token)
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
        Unavailable: another node has published a higher token.
        CannotWriteError: the file system does not accept writes.
        KVStoreError, OSError: another error.
    """
    following = replace(current, epoch=current.epoch + 1)
    newest, next_at = newest_superblock(file.pread(0, 2 * SUPERBLOCK_BYTES))
    if newest.token > current.token:
        raise Unavailable("another node has adopted this volume", volume_id=current.volume_id, token=newest.token)
    with writing():
        catalog.put_superblock(following)
        file.pwrite(next_at, pack_superblock(following))
        file.sync()
    return following


def make_volume(path: Path, volume_id: VolumeId, capacity_bytes: int, owned: Claim) -> None:
    """Create an empty volume. The slab gets its name last, so a crash leaves no half-made volume.

    Raises:
        CorruptBlock: a claim, or a catalog with blocks, exists without its slab.
        CapacityExceeded: the file system has not enough space.
        InvalidArgument: the volume is too large for the address space of the process.
    """
    if owned.token:  # only a volume with a slab is ever claimed
        raise CorruptBlock(
            f"the slab of this volume is lost, but its claims are there; put {path / SLAB_FILE} back, or move all files in {path}"
            " away to create a new volume"
        )
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
        sync_folder(catalog_path)
        sync_folder(path)  # the catalog's name reaches the disk before the slab's
        temporary.rename(path / SLAB_FILE)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    sync_folder(path)


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
