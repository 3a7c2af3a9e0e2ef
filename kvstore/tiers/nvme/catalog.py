"""Catalog of a durable volume: block key -> slot header, in LMDB.

A value is a copy of the slot's header (``kvstore.tiers.nvme.slot_header``): the description of the block and its slot. The
catalog is authoritative: a slot without an entry is free, even if it has content. Entries change in groups, by one synced
transaction per batch.

Two more records are the volume's uid, to detect the catalog of another volume, and a copy of the superblock, from which
``kvstore volumes repair`` repairs a slab whose own copies are both damaged.

One process at a time (the volume's lock), any number of threads.

Beside the catalog is a file of *invalid namespaces*. It names two generations for each. Catalog entries below the first, at which
the invalidation began, are dropped at the next opening: the node may have left them out of its table. Slots below the second, at
which the invalidation ended, are left out by a rebuild of a lost catalog: a free slot keeps its block until it is used again. An
owner writes to a file with its token in the name, and the files of all owners are read. Such a file is a header {magic with the
version, xxh3-64 of the rest}, the volume's uid, and per namespace its id and both generations (little-endian uint64).
"""

from __future__ import annotations

import errno
import os
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import lmdb
import xxhash

from kvstore.core.errors import CapacityExceeded, Conflict, CorruptBlock, InvalidArgument, KVStoreError, Unavailable
from kvstore.core.types import BlockKey, NamespaceId
from kvstore.process import lmdb_meta
from kvstore.process.atomic_file import write_atomically
from kvstore.tiers.nvme.superblock import Superblock, UnknownVersion, pack_superblock, parse_superblock

_BLOCKS = b"blocks"
_META = b"meta"
_SUPERBLOCK = b"superblock"
_PAGE_ENTRIES = 4096
_MIN_MAP_BYTES = 256 << 20
CATALOG_FILE = "data.mdb"
INVALID_FILE = "invalid"
_INVALID = re.compile(rf"{INVALID_FILE}(\.\d{{1,18}})?")
_INVALID_MAGIC = b"kvinval2"
_INVALID_HEADER = struct.Struct("<8sQ")
_INVALID_ENTRY = struct.Struct("<16sQQ")
_UID_BYTES = 16
_LOCK_FILE = "lock.mdb"
_LOCK_BYTES = 8192
"""Size of LMDB's reader table with the default number of readers."""

NO_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""Errors of a file system that does not accept writes now."""

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
    lmdb.MapResizedError,  # no other process has it open, so a map size of another writer is damage
)
"""LMDB's errors for a damaged file."""


def map_bytes_for(capacity_bytes: int) -> int:
    """Address space for a catalog: more than slots of the smallest size need."""
    return max(_MIN_MAP_BYTES, capacity_bytes // 2 // 4096 * 4096)


class Catalog:
    """An open catalog. Methods raise ``KVStoreError`` only; LMDB's errors are converted.

    Args:
        path: folder of the LMDB files; created if missing, unless ``readonly``.
        map_bytes: address space (``map_bytes_for``).
        readonly: open without changing or allocating anything.

    Raises:
        CorruptBlock: the catalog is damaged.
        InvalidArgument: the process does not get that much address space.
        Unavailable: the file system does not accept writes now.
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
            if os.strerror(errno.ENOMEM) in str(error):
                raise InvalidArgument("not enough address space for the catalog", map_bytes=map_bytes) from error
            raise self._not_opened(error) from error
        try:
            self._blocks = self._env.open_db(_BLOCKS, create=not readonly)
            self._meta = self._env.open_db(_META, create=not readonly)
        except lmdb.Error as error:
            self._env.close()
            raise self._not_opened(error) from error

    def _not_opened(self, error: Exception) -> KVStoreError:
        """The error of a failed open: damage, or a file system that does not accept writes."""
        text = str(error)
        if isinstance(error, lmdb.DiskError) or any(os.strerror(number) in text for number in NO_WRITING):
            return _no_writing(self._path, text)
        return CorruptBlock("the catalog cannot be opened", path=self._path, reason=text)

    @property
    def file(self) -> Path:
        """Path of the LMDB file."""
        return self._path / CATALOG_FILE

    def superblock(self) -> Superblock | None:
        """The copy of the superblock; None: a new catalog.

        Raises:
            CorruptBlock: the copy is damaged.
        """
        try:
            with self._env.begin(self._meta) as txn:
                page = txn.get(_SUPERBLOCK)
        except lmdb.Error as error:
            raise self._translated(error) from error
        return None if page is None else parse_superblock(page)

    def put_superblock(self, superblock: Superblock, *, anew: bool = False) -> None:
        """Write the copy of the superblock, synced. With ``anew``, first drop the remains of an unfinished volume.

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
        """Apply one batch, atomically and synced: first ``removed`` (unknown keys are ignored), then ``stored``.

        Raises:
            CapacityExceeded: the file system or the address space is full.
            Unavailable: another I/O error.
        """
        try:
            with self._env.begin(self._blocks, write=True) as txn:
                for key in removed:
                    txn.delete(key)
                if stored:
                    with txn.cursor() as cursor:
                        cursor.putmulti(sorted(stored))  # in order of keys, so that neighbours share pages
        except lmdb.Error as error:
            raise self._translated(error) from error

    def header(self, key: BlockKey) -> bytes | None:
        """The header of a key; None: there is none."""
        try:
            with self._env.begin(self._blocks) as txn:
                found = txn.get(key)
                return None if found is None else bytes(found)
        except lmdb.Error as error:
            raise self._translated(error) from error

    def entries(self) -> Iterator[tuple[bytes, bytes]]:
        """All (key, header), in order of keys."""
        for page in self.pages():
            yield from page

    def pages(self) -> Iterator[list[tuple[bytes, bytes]]]:
        """As ``entries``, in pages. Each is read when it is asked for: no transaction stays open between them."""
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
            if page:
                yield page
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
        """Close the file."""
        self._env.close()

    def _translated(self, error: lmdb.Error) -> KVStoreError:
        """Convert LMDB's errors. A full disk is an ENOSPC within a general error."""
        text = str(error)
        if isinstance(error, (lmdb.MapFullError, lmdb.DiskError)) or os.strerror(errno.ENOSPC) in text:
            return CapacityExceeded("not enough space for the catalog", reason=text)
        if isinstance(error, _DAMAGE):
            return CorruptBlock(f"the catalog is damaged; {mend_hint(self._path.parent)}", reason=text)
        return Unavailable("the catalog cannot be used", reason=text)


class Invalid(NamedTuple):
    """Generations below which catalog entries and slots of a namespace are invalid."""

    entries_below: int = 0
    slots_below: int = 0

    def merged(self, other: Invalid) -> Invalid:
        """Return what both say."""
        return Invalid(max(self.entries_below, other.entries_below), max(self.slots_below, other.slots_below))


def note_invalid(path: Path, uid: bytes, namespace: NamespaceId, invalid: Invalid) -> None:
    """Add a namespace to a file of invalid namespaces, synced. A crash leaves the file as it was before or after.

    Args:
        path: the file.
        uid: of the volume.
        namespace: the namespace.
        invalid: its generations.

    Raises:
        CorruptBlock: the file is damaged, or of another version (``UnknownVersion``).
        OSError: it could not be written.
    """
    known = _read_invalid(path, uid)
    known[namespace] = known.get(namespace, Invalid()).merged(invalid)
    body = uid + b"".join(_INVALID_ENTRY.pack(name, *noted) for name, noted in known.items())
    write_atomically(path, _INVALID_HEADER.pack(_INVALID_MAGIC, xxhash.xxh3_64_intdigest(body)) + body)


def invalid_namespaces(folder: Path, uid: bytes) -> dict[NamespaceId, Invalid]:
    """The invalid namespaces of a volume, as all its owners have noted them.

    Raises:
        CorruptBlock: a file is damaged, or of another version (``UnknownVersion``).
        OSError: a file cannot be read.
    """
    found: dict[NamespaceId, Invalid] = {}
    for name in os.listdir(folder):
        if _INVALID.fullmatch(name):
            for namespace, noted in _read_invalid(folder / name, uid).items():
                found[namespace] = found.get(namespace, Invalid()).merged(noted)
    return found


def _read_invalid(path: Path, uid: bytes) -> dict[NamespaceId, Invalid]:
    """The namespaces in one file; none if it does not exist, or is that of an earlier volume in the folder."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return {}
    body = raw[_INVALID_HEADER.size :]
    if raw[:7] == _INVALID_MAGIC[:7] and raw[7:8] != _INVALID_MAGIC[7:]:
        raise UnknownVersion(
            "the file of invalid namespaces was written by another version of kvstore: use that version", path=path,
            found=raw[7:8].decode(errors="replace"), known=_INVALID_MAGIC[7:].decode(),
        )  # fmt: skip
    if (
        len(body) < _UID_BYTES
        or (len(body) - _UID_BYTES) % _INVALID_ENTRY.size
        or _INVALID_HEADER.unpack_from(raw) != (_INVALID_MAGIC, xxhash.xxh3_64_intdigest(body))
    ):
        raise CorruptBlock(
            "the file of invalid namespaces is damaged; move it away and invalidate the namespaces again", path=path
        )
    if body[:_UID_BYTES] != uid:
        return {}
    return {NamespaceId(namespace): Invalid(*noted) for namespace, *noted in _INVALID_ENTRY.iter_unpack(body[_UID_BYTES:])}


def mend_hint(path: Path) -> str:
    """The remedy for a damaged volume, for error messages."""
    return f"repair it with: kvstore volumes repair {path}"


def _no_writing(path: Path, reason: str) -> KVStoreError:
    full = any(os.strerror(number) in reason for number in (errno.ENOSPC, errno.EDQUOT))
    kind = CapacityExceeded if full else Unavailable
    return kind("the catalog cannot be opened for writing", path=path, reason=reason)


def _reserve_lock_file(path: Path) -> None:
    """Allocate LMDB's lock file before LMDB maps it. On a full file system, its first use would be a SIGBUS."""
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
    """Raise ``CorruptBlock`` if the file is truncated, which would crash LMDB. A missing or empty file is new."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CorruptBlock("the catalog cannot be opened", path=path, reason=error) from error
    try:
        size = os.fstat(fd).st_size
        if size and not lmdb_meta.is_whole(lambda: os.fstat(fd).st_size, lambda offset, length: os.pread(fd, length, offset)):
            raise CorruptBlock("the catalog is damaged or truncated", path=path, bytes=size)
    except OSError as error:
        raise CorruptBlock("the catalog cannot be read", path=path, reason=error) from error
    finally:
        os.close(fd)
