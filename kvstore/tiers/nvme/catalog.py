"""Catalog of a durable volume: block key -> slot header, in LMDB.

A value is the slot's header, byte for byte (``kvstore.tiers.nvme.slot_header``): where the block lies and all that is known of
it. What the catalog holds is what counts; a slot it does not name is free, whatever lies in it. Changes come in groups: one
synced transaction makes a batch of blocks durable, all or none.

Two small records lie beside it: the volume's uid (a catalog of another volume is told at once) and a copy of the superblock
(from which ``kvstore volume check`` mends a slab whose own copies are both damaged).

One process at a time (the volume's lock), any number of threads.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import lmdb

from kvstore.core import lmdb_meta
from kvstore.core.errors import CapacityExceeded, Conflict, CorruptBlock, KVStoreError, Unavailable
from kvstore.core.types import BlockKey
from kvstore.tiers.nvme.superblock import Superblock, pack_superblock, parse_superblock

_BLOCKS = b"blocks"
_META = b"meta"
_SUPERBLOCK = b"superblock"
_PAGE_ENTRIES = 4096
_MIN_MAP_BYTES = 256 << 20
CATALOG_FILE = "data.mdb"
_LOCK_FILE = "lock.mdb"
_LOCK_BYTES = 8192
"""What LMDB's table of readers takes with the usual number of them."""

NO_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""What a file system says that takes no writes now."""

_DAMAGE = (
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.IncompatibleError,
    lmdb.BadTxnError,
    lmdb.BadValsizeError,
    lmdb.CursorFullError,
    lmdb.PageFullError,
    lmdb.MapResizedError,  # nobody else has it open: a map size that is not ours was never written by us
)
"""What LMDB says of a file that is not as it left it."""


def map_bytes_for(capacity_bytes: int) -> int:
    """Address space for a catalog: more than slots of the smallest size (two pages, a header of hundreds of bytes) can need."""
    return max(_MIN_MAP_BYTES, capacity_bytes // 2 // 4096 * 4096)


class Catalog:
    """One catalog. Methods raise ``KVStoreError`` only: LMDB's own errors become typed ones here.

    Args:
        path: folder of the LMDB files; made where it is missing, unless ``readonly``.
        map_bytes: address space (``map_bytes_for``).
        readonly: for a look that changes nothing and needs no room.

    Raises:
        CorruptBlock: it is damaged.
        Unavailable: the file system takes no writes now.
    """

    def __init__(self, path: Path, *, map_bytes: int, readonly: bool = False) -> None:
        self._path = path
        _check_whole(path / CATALOG_FILE)
        if not readonly:
            _reserve_lock_file(path / _LOCK_FILE)
        try:
            self._env = lmdb.open(
                str(path),
                map_size=map_bytes,
                max_dbs=2,
                readonly=readonly,
                create=not readonly,
                lock=not readonly,
                readahead=False,
            )
        except (lmdb.Error, OSError) as error:
            raise self._not_opened(error) from error
        try:
            self._blocks = self._env.open_db(_BLOCKS, create=not readonly)
            self._meta = self._env.open_db(_META, create=not readonly)
        except lmdb.Error as error:
            self._env.close()
            raise self._not_opened(error) from error

    def _not_opened(self, error: Exception) -> KVStoreError:
        """Damage, unless the file system says that it takes no writes."""
        text = str(error)
        if isinstance(error, lmdb.DiskError) or any(os.strerror(number) in text for number in NO_WRITING):
            return _no_writing(self._path, text)
        return CorruptBlock("the catalog cannot be opened", path=self._path, reason=text)

    @property
    def file(self) -> Path:
        """The file that holds it."""
        return self._path / CATALOG_FILE

    def superblock(self) -> Superblock | None:
        """The copy kept here, or None where there is none (a catalog that was just made).

        Raises:
            CorruptBlock: it is damaged.
        """
        try:
            with self._env.begin(self._meta) as txn:
                page = txn.get(_SUPERBLOCK)
        except lmdb.Error as error:
            raise self._translated(error) from error
        return None if page is None else parse_superblock(page)

    def put_superblock(self, superblock: Superblock, *, anew: bool = False) -> None:
        """Keeps a copy, synced. ``anew``: whatever is left of a volume that was never finished gives way.

        Raises:
            Conflict: the catalog belongs to another volume.
        """
        known = None if anew else self.superblock()
        if known is not None and known.uid != superblock.uid:
            raise Conflict("the catalog belongs to another volume", volume_id=known.volume_id)
        try:
            with self._env.begin(self._meta, write=True) as txn:
                txn.put(_SUPERBLOCK, pack_superblock(superblock))
        except lmdb.Error as error:
            raise self._translated(error) from error

    def commit(self, stored: Sequence[tuple[BlockKey, bytes]], removed: Sequence[BlockKey]) -> None:
        """Applies one batch, atomically and synced: first ``removed`` (unknown keys are no error), then ``stored``.

        Raises:
            CapacityExceeded: the file system or the address space is full.
            Unavailable: any other trouble with the file.
        """
        try:
            with self._env.begin(self._blocks, write=True) as txn:
                for key in removed:
                    txn.delete(key)
                if stored:
                    with txn.cursor() as cursor:
                        cursor.putmulti(sorted(stored))  # in order of keys: neighbours share pages
        except lmdb.Error as error:
            raise self._translated(error) from error

    def entries(self) -> Iterator[tuple[bytes, bytes]]:
        """All (key, header), in order of keys. Read in pages: no transaction stays open while the caller works."""
        after: bytes | None = None
        while True:
            page: list[tuple[bytes, bytes]] = []
            try:
                with self._env.begin(self._blocks) as txn, txn.cursor() as cursor:
                    found = cursor.first() if after is None else cursor.set_range(after)
                    if found and after is not None and cursor.key() == after:
                        found = cursor.next()
                    if found:
                        for entry in cursor.iternext(keys=True, values=True):
                            page.append(entry)
                            if len(page) == _PAGE_ENTRIES:
                                break
            except lmdb.Error as error:
                raise self._translated(error) from error
            yield from page
            if len(page) < _PAGE_ENTRIES:
                return
            after = page[-1][0]

    def __len__(self) -> int:
        try:
            with self._env.begin(self._blocks) as txn:
                return int(txn.stat(self._blocks)["entries"])
        except lmdb.Error as error:
            raise self._translated(error) from error

    def close(self) -> None:
        """Closes the file."""
        self._env.close()

    def _translated(self, error: lmdb.Error) -> KVStoreError:
        """LMDB's errors as ours. A full disk shows as ENOSPC within a general error."""
        text = str(error)
        if isinstance(error, (lmdb.MapFullError, lmdb.DiskError)) or os.strerror(errno.ENOSPC) in text:
            return CapacityExceeded("no room for the catalog", reason=text)
        if isinstance(error, _DAMAGE):
            return CorruptBlock(f"the catalog is damaged; {mend_hint(self._path.parent)}", reason=text)
        return Unavailable("the catalog cannot be used", reason=text)


def mend_hint(path: Path) -> str:
    """What to tell a person whose volume is damaged."""
    return f"mend it with: kvstore volume check --repair {path}"


def _no_writing(path: Path, reason: str) -> KVStoreError:
    full = any(os.strerror(number) in reason for number in (errno.ENOSPC, errno.EDQUOT))
    kind = CapacityExceeded if full else Unavailable
    return kind("the catalog cannot be opened for writing", path=path, reason=reason)


def _reserve_lock_file(path: Path) -> None:
    """Takes the room for LMDB's lock file before LMDB maps it: on a full file system its first touch would be a SIGBUS."""
    try:
        path.parent.mkdir(exist_ok=True, mode=0o700)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, _LOCK_BYTES)
        finally:
            os.close(fd)
    except OSError as error:
        raise _no_writing(path, str(error.strerror)) from error


def _check_whole(path: Path) -> None:
    """Raises ``CorruptBlock`` where LMDB would run into a part of the file that is not there. None, or an empty one, is new."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CorruptBlock("the catalog cannot be opened", path=path, reason=error) from error
    try:
        size = os.fstat(fd).st_size
        if size and not lmdb_meta.is_whole(size, lambda offset, length: os.pread(fd, length, offset)):
            raise CorruptBlock("the catalog is damaged or was cut off", path=path, bytes=size)
    except OSError as error:
        raise CorruptBlock("the catalog cannot be read", path=path, reason=error) from error
    finally:
        os.close(fd)
