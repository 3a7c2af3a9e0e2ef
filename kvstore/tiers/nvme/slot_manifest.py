"""Slot manifest: which block is in which slot of a slab, for nodes that mount the volume's folder.

A shared volume has one owner, which alone writes, evicts and publishes. Other nodes read its slots directly. They cannot open
the catalog, because LMDB works within one host, and asking the owner would make the volume unavailable without it. So the owner
writes a second, derived list next to the slab: an append-only file in the order of the catalog's commits. It is replaced by a
new edition at each opening, and when most of it is history. Each owner's file has its token in its name, so that readers never
follow an owner that was fenced.

The manifest is a *hint*, like the index: a reader verifies each block against the slot's header and checksums, so a late or lost
entry costs a miss. So it is not synced, a failed write never fails a commit, and a reader stops at the first incomplete frame.

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
from itertools import islice
from pathlib import Path

import numpy as np
import xxhash

from kvstore.core.errors import CorruptBlock, KVStoreError
from kvstore.core.types import KEY_BYTES, BlockKey
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import volumes as volumes_metrics
from kvstore.tiers.allocator import ALIGNMENT
from kvstore.tiers.contract import Slot
from kvstore.tiers.nvme.ownership import ROSTER_FILE, name_at
from kvstore.tiers.nvme.superblock import SUPERBLOCK_BYTES, Superblock, pack_superblock, parse_superblock

_log = logging.getLogger(__name__)

Entries = Callable[[], Iterable[tuple[BlockKey, Slot]]]

_MAGIC = b"KVROST\r\n"
_HEAD = struct.Struct("<8sQ16s")
HEAD_BYTES = _HEAD.size + SUPERBLOCK_BYTES
_FRAME = struct.Struct("<QII")
_ENTRY = struct.Struct("<16sQQQ")
_ENTRIES = np.dtype([("key", "V16"), ("offset", "<u8"), ("size", "<u8"), ("generation", "<u8")])
MAX_FRAME_ENTRIES = 65_536
"""Maximum number of entries, and of removals, per frame."""
_FRAME_ENTRIES = 4_096
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


class SlotManifestWriter:
    """Writer at the owner. Not thread-safe. No method raises errors of the file system.

    Args:
        folder: folder of the volume.
        superblock: superblock of the current epoch.
        everything: iterates over all entries of the catalog.
        counters: counts failures.
    """

    def __init__(self, folder: Path, superblock: Superblock, everything: Entries, counters: Counters) -> None:
        self._path = folder / name_at(ROSTER_FILE, superblock.token)
        self._superblock = superblock
        self._everything = everything
        self._counters = counters
        self._fd = -1
        self._live = 0
        self._bytes = 0
        self._to_skip = 0
        self._skips = 0

    def begin(self, superblock: Superblock | None = None) -> None:
        """Write a new edition with all entries of the catalog, and replace the old one."""
        self._superblock = superblock or self._superblock
        self.close()
        temporary = self._path.with_name(f"{self._path.name}.new")
        fd = -1
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
            head = secrets.token_bytes(16) + pack_superblock(self._superblock)
            self._bytes = _write(fd, struct.pack("<8sQ", _MAGIC, xxhash.xxh3_64_intdigest(head)) + head)
            self._live = 0
            entries = iter(self._everything())
            while batch := list(islice(entries, _FRAME_ENTRIES)):
                self._bytes += _write(fd, pack_frame(batch, ()))
                self._live += len(batch)
            temporary.rename(self._path)
        except (OSError, KVStoreError) as error:
            if fd >= 0:
                os.close(fd)
            self._failed(error)
            return
        self._fd = fd
        self._skips = 0

    def append(self, stored: Sequence[tuple[BlockKey, Slot]], removed: Sequence[BlockKey]) -> None:
        """Append one commit of the catalog."""
        if self._to_skip:
            self._to_skip -= 1
            return
        live_bytes = HEAD_BYTES + self._live * _ENTRY.size
        if self._fd < 0 or self._bytes > 2 * live_bytes + _HISTORY_BYTES:
            self.begin()
            return
        try:
            for at in range(0, max(len(stored), len(removed)), MAX_FRAME_ENTRIES):
                upto = at + MAX_FRAME_ENTRIES
                self._bytes += _write(self._fd, pack_frame(stored[at:upto], removed[at:upto]))
        except OSError as error:
            self._failed(error)
            return
        self._live = max(0, self._live + len(stored) - len(removed))

    def close(self) -> None:
        """Close the file. Readers may still use it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _failed(self, error: Exception) -> None:
        """Stop writing for a growing time; then begin a new edition."""
        self.close()
        self._skips = min(2 * self._skips + 1, _MOST_SKIPPED)
        self._to_skip = self._skips
        self._counters.add(volumes_metrics.ROSTER_ERRORS)
        _log.warning(
            "slot manifest not written: %s (error=%s); nodes that mount this volume miss new blocks meanwhile", self._path, error
        )


def _write(fd: int, data: bytes) -> int:
    """Append all bytes. After a short write, readers ignore the incomplete frame."""
    if os.write(fd, data) != len(data):
        raise OSError(f"a frame of {len(data)} bytes was written incompletely")
    return len(data)


class SlotManifestReader:
    """Reader at a mounting node: the entries in memory, about 300 bytes per block. ``catch_up`` is not thread-safe.

    Args:
        folder: folder of the volume, as mounted here.
        token: of the owner; another owner writes another file.
        entries: False: read the head only, if the positions of blocks are known otherwise.
    """

    def __init__(self, folder: Path, token: int = 0, *, entries: bool = True) -> None:
        self.token = token
        self._path = folder / name_at(ROSTER_FILE, token)
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
        """Apply the complete frames at the front of ``raw``. Returns their length in bytes."""
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
