"""Slot manifest: which block is in which slot of a slab, for nodes that mount the volume's folder.

A shared volume has one owner, which alone writes, evicts and publishes. Other nodes read its slots directly. They cannot open
the catalog, because LMDB works within one host, and asking the owner would make the volume unavailable without it. So the
owner writes a second list next to the slab, derived from the catalog: an append-only file with one frame per commit.

A new edition replaces the file when the volume is opened, and when most entries of the file are obsolete. In the second case
the new edition is written beside the old one while commits go on: each commit also copies one page of the catalog, so that no
commit waits for a copy of the whole catalog. Each owner's file has its token in its name, so that readers never follow an
owner that was fenced.

The manifest is a *hint*, like the index: a reader verifies each block against the slot's header and checksums, so a late or lost
entry costs a miss. Therefore it is not synced, a failed write never fails a commit, and a reader stops at the first incomplete
frame.

Little-endian::

    head    8s  magic "KVROST", carriage return, line feed
            Q   xxh3-64 of the rest of the head
            16s edition: random; differs after the file was replaced
            4096 bytes: the superblock (volume id, uid, capacity, epoch)
    frame   Q   xxh3-64 of the rest of the frame      I entries    I removals
            16s * removals: removed keys; applied first
            (16s key, Q slot offset, Q slot size, Q generation) * entries
"""

from __future__ import annotations

import logging
import os
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from kvstore.core.errors import CorruptBlock, KVStoreError
from kvstore.core.types import KEY_BYTES, BlockKey
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import volumes as volumes_metrics
from kvstore.tiers.allocator import ALIGNMENT
from kvstore.tiers.contract import Slot
from kvstore.tiers.nvme.ownership import MANIFEST_FILE, name_at
from kvstore.tiers.nvme.superblock import SUPERBLOCK_BYTES, Superblock, pack_superblock, parse_superblock

_log = logging.getLogger(__name__)

Pages = Callable[[], Iterable[Sequence[tuple[BlockKey, Slot]]]]

_MAGIC = b"KVROST\r\n"
_HEAD = struct.Struct("<8sQ16s")
HEAD_BYTES = _HEAD.size + SUPERBLOCK_BYTES
_FRAME = struct.Struct("<QII")
_ENTRY = struct.Struct("<16sQQQ")
_ENTRIES = np.dtype([("key", "V16"), ("offset", "<u8"), ("size", "<u8"), ("generation", "<u8")])
MAX_FRAME_ENTRIES = 65_536
"""Maximum number of entries, and of removals, per frame."""
STEP_ENTRIES = 4_096
"""Entries of the catalog that one commit copies to a new edition, rounded up to whole pages."""
_LARGEST_FRAME_BYTES = _FRAME.size + MAX_FRAME_ENTRIES * (KEY_BYTES + _ENTRY.size)
_READ_BYTES = 2 * _LARGEST_FRAME_BYTES
_HISTORY_BYTES = 4 << 20
"""Minimum size of the history to write a new edition; it must also exceed the size of the current entries."""
_MOST_SKIPPED = 1_024


def pack_frame(stored: Sequence[tuple[BlockKey, Slot]], removed: Sequence[BlockKey]) -> bytes:
    """Encode one frame."""
    body = b"".join([*removed, *(_ENTRY.pack(key, *slot) for key, slot in stored)])
    counts = struct.pack("<II", len(stored), len(removed))
    return struct.pack("<Q", xxhash.xxh3_64_intdigest(counts + body)) + counts + body


@dataclass(slots=True)
class _Edition:
    """An edition that is written."""

    fd: int
    pages: Iterator[Sequence[tuple[BlockKey, Slot]]]
    """Entries of the catalog that are to be copied to it."""
    live: int = 0
    """Number of entries, about."""
    nbytes: int = 0

    @property
    def is_mostly_history(self) -> bool:
        """Whether a new edition would be much smaller."""
        return self.nbytes > 2 * (HEAD_BYTES + self.live * _ENTRY.size) + _HISTORY_BYTES

    def write(self, data: bytes) -> None:
        """Append bytes. After a short write, readers ignore the incomplete frame.

        Raises:
            OSError: they were not written, or not all.
        """
        if os.write(self.fd, data) != len(data):
            raise OSError(f"a frame of {len(data)} bytes was written incompletely")
        self.nbytes += len(data)


class SlotManifestWriter:
    """Writer at the owner. Not thread-safe. No method raises errors of the file system.

    Args:
        folder: folder of the volume.
        superblock: superblock of the current epoch.
        pages: iterates over all entries of the catalog, and reads each page when it is asked for.
        counters: counts failures.
    """

    def __init__(self, folder: Path, superblock: Superblock, pages: Pages, counters: Counters) -> None:
        self._path = folder / name_at(MANIFEST_FILE, superblock.token)
        self._temporary = self._path.with_name(f"{self._path.name}.new")
        self._superblock = superblock
        self._pages = pages
        self._counters = counters
        self._current: _Edition | None = None
        self._next: _Edition | None = None
        self._to_skip = 0
        self._skips = 0

    def begin(self, superblock: Superblock | None = None) -> None:
        """Write a new edition with all entries of the catalog, and replace the old one."""
        self._superblock = superblock or self._superblock
        self.close()
        try:
            self._start_next()
            while self._next is not None:
                self._copy_entries(self._next)
        except (OSError, KVStoreError) as error:
            self._failed(error)

    def append(self, stored: Sequence[tuple[BlockKey, Slot]], removed: Sequence[BlockKey]) -> None:
        """Append one commit of the catalog. Continue or begin to write a new edition, if one is needed."""
        if self._to_skip:
            self._to_skip -= 1
            return
        try:
            if self._next is None and (self._current is None or self._current.is_mostly_history):
                self._start_next()
            for at in range(0, max(len(stored), len(removed)), MAX_FRAME_ENTRIES):
                upto = at + MAX_FRAME_ENTRIES
                frame = pack_frame(stored[at:upto], removed[at:upto])
                for edition in filter(None, (self._current, self._next)):
                    edition.write(frame)
            if self._current is not None:
                self._current.live = max(0, self._current.live + len(stored) - len(removed))
            if self._next is not None:
                self._copy_entries(self._next)
        except (OSError, KVStoreError) as error:
            self._failed(error)

    def close(self) -> None:
        """Close the file. Readers may still use it."""
        for edition in filter(None, (self._current, self._next)):
            os.close(edition.fd)
        self._current = self._next = None

    def _start_next(self) -> None:
        fd = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._next = _Edition(fd, iter(self._pages()))
        head = secrets.token_bytes(16) + pack_superblock(self._superblock)
        self._next.write(struct.pack("<8sQ", _MAGIC, xxhash.xxh3_64_intdigest(head)) + head)

    def _copy_entries(self, edition: _Edition) -> None:
        """Copy ``STEP_ENTRIES`` of the catalog to the next edition. If these were the last ones, it replaces the current one."""
        copied = 0
        while copied < STEP_ENTRIES:
            page = next(edition.pages, None)
            if page is None:
                self._temporary.rename(self._path)
                if self._current is not None:
                    os.close(self._current.fd)
                self._current, self._next = edition, None
                self._skips = 0
                return
            edition.write(pack_frame(page, ()))
            edition.live += len(page)
            copied += len(page)

    def _failed(self, error: Exception) -> None:
        """Stop writing for a growing time; then begin a new edition."""
        self.close()
        self._skips = min(2 * self._skips + 1, _MOST_SKIPPED)
        self._to_skip = self._skips
        self._counters.add(volumes_metrics.SLOT_MANIFEST_ERRORS)
        _log.warning(
            "slot manifest not written: %s (error=%s); nodes that mount this volume miss new blocks meanwhile", self._path, error
        )


class SlotManifestReader:
    """Reader at a mounting node: the entries in memory, about 300 bytes per block. ``catch_up`` is not thread-safe.

    Args:
        folder: folder of the volume, as mounted here.
        token: of the owner; another owner writes another file.
        entries: False: read the head only, if the positions of blocks are known otherwise.
    """

    def __init__(self, folder: Path, token: int = 0, *, entries: bool = True) -> None:
        self.token = token
        self._path = folder / name_at(MANIFEST_FILE, token)
        self._entries = entries
        self._head = b""
        self._position = 0
        self.superblock: Superblock | None = None
        self.slots: dict[BlockKey, Slot] = {}
        """Replaced by a new edition; otherwise changed in place, one entry at a time."""

    def catch_up(self) -> None:
        """Apply what the owner has appended since the last call.

        The file is opened each time: it may have been replaced, and network file systems revalidate at an open.

        Raises:
            CorruptBlock: not a manifest, another version, or invalid content.
            OSError: the file does not exist, or cannot be read.
        """
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            head = os.pread(fd, HEAD_BYTES, 0)
            if head != self._head or self.superblock is None:
                superblock = _parse_head(head)
                self._head, self._position = head, HEAD_BYTES
                self.superblock, self.slots = superblock, {}
            while self._entries and (data := os.pread(fd, _READ_BYTES, self._position)):
                taken = self._take(data)
                if not taken:
                    return
                self._position += taken
        finally:
            os.close(fd)

    def _take(self, data: bytes) -> int:
        """Apply the complete frames at the front of ``data``. Returns their length in bytes."""
        assert self.superblock is not None
        capacity = self.superblock.capacity_bytes
        at = 0
        while len(data) - at >= _FRAME.size:
            checksum, entries, removals = _FRAME.unpack_from(data, at)
            if entries > MAX_FRAME_ENTRIES or removals > MAX_FRAME_ENTRIES:
                break
            body = at + _FRAME.size
            stored_at = body + removals * KEY_BYTES
            end = stored_at + entries * _ENTRY.size
            if end > len(data) or xxhash.xxh3_64_intdigest(memoryview(data)[at + 8 : end]) != checksum:
                break
            for key_at in range(body, stored_at, KEY_BYTES):
                self.slots.pop(BlockKey(data[key_at : key_at + KEY_BYTES]), None)
            self.slots.update(_entries_of(np.frombuffer(data, _ENTRIES, entries, stored_at), capacity))
            at = end
        if len(self.slots) > capacity // ALIGNMENT:
            raise CorruptBlock("a slot manifest has more entries than its volume has slots", path=self._path)
        return at


def _entries_of(rows: np.ndarray[tuple[int], np.dtype[np.void]], capacity: int) -> Iterator[tuple[BlockKey, Slot]]:
    """Entries whose slot is within the volume."""
    size, offset = rows["size"], rows["offset"]
    fits = (size > 0) & (size <= capacity) & (offset <= capacity - np.minimum(size, capacity))
    fits &= (size % ALIGNMENT == 0) & (offset % ALIGNMENT == 0)
    good = rows[fits]
    columns = (good["offset"].tolist(), good["size"].tolist(), good["generation"].tolist())
    return zip(good["key"].tolist(), map(Slot, *columns), strict=True)


def _parse_head(head: bytes) -> Superblock:
    if len(head) < HEAD_BYTES:
        raise CorruptBlock("a slot manifest is truncated", bytes=len(head))
    magic, checksum, _ = _HEAD.unpack_from(head)
    if magic != _MAGIC or xxhash.xxh3_64_intdigest(head[16:]) != checksum:
        raise CorruptBlock("not a slot manifest: wrong magic or checksum")
    return parse_superblock(head[_HEAD.size :])
