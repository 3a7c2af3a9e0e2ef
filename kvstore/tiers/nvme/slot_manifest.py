"""Roster: which block lies in which slot of a slab, told to whoever else mounts the volume's folder.

A shared volume has one owner, who alone writes, evicts and publishes; other nodes read its slots directly. They cannot open the
catalog (LMDB works within one host), and asking the owner would make the volume as mortal as its owner. So the owner writes a
second, derived list beside the slab: a file that only grows, in the order of the catalog's commits, and now and then
begins anew under the same name (each opening, and when it is mostly history).

The roster is a *hint*, like the index: a reader verifies what it reads against the slot's own header and checksums, so an entry
that is late or lost costs a miss and nothing else. That is why it is not synced, why a failure to write it never fails a commit,
and why a reader simply stops at the first frame that is not whole: it is still being written, or will never be.

Little-endian::

    head    8s  magic "KVROST", carriage return, line feed
            Q   xxh3-64 of the rest of the head
            16s edition: random, so that a file that was begun anew is told from one that has grown
            4096 bytes: the superblock (volume id, uid, capacity, epoch)
    frame   Q   xxh3-64 of the rest of the frame      I entries    I removals
            16s * removals: keys that have left; applied first
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
from kvstore.tiers.nvme.superblock import SUPERBLOCK_BYTES, Superblock, pack_superblock, parse_superblock

_log = logging.getLogger(__name__)

ROSTER_FILE = "roster"
Entries = Callable[[], Iterable[tuple[BlockKey, Slot]]]

_MAGIC = b"KVROST\r\n"
_HEAD = struct.Struct("<8sQ16s")
HEAD_BYTES = _HEAD.size + SUPERBLOCK_BYTES
_FRAME = struct.Struct("<QII")
_ENTRY = struct.Struct("<16sQQQ")
_ENTRIES = np.dtype([("key", "V16"), ("offset", "<u8"), ("size", "<u8"), ("generation", "<u8")])
MAX_FRAME_ENTRIES = 65_536
"""Entries, and removals, that one frame may have."""
_FRAME_ENTRIES = 4_096
_LARGEST_FRAME_BYTES = _FRAME.size + MAX_FRAME_ENTRIES * (KEY_BYTES + _ENTRY.size)
_READ_BYTES = 2 * _LARGEST_FRAME_BYTES
_HISTORY_BYTES = 4 << 20
"""History that is worth a new beginning, if it is also more than what counts."""
_MOST_SKIPPED = 1_024


def pack_frame(stored: Sequence[tuple[BlockKey, Slot]], removed: Sequence[BlockKey]) -> bytes:
    """One frame."""
    body = b"".join([*removed, *(_ENTRY.pack(key, *slot) for key, slot in stored)])
    counts = struct.pack("<II", len(stored), len(removed))
    return struct.pack("<Q", xxhash.xxh3_64_intdigest(counts + body)) + counts + body


class SlotManifestWriter:
    """The owner's end. Not thread-safe; no method raises for the file system's sake.

    Args:
        folder: the volume's.
        superblock: of this epoch.
        everything: what the catalog holds now.
        counters: where failures are counted.
    """

    def __init__(self, folder: Path, superblock: Superblock, everything: Entries, counters: Counters) -> None:
        self._path = folder / ROSTER_FILE
        self._superblock = superblock
        self._everything = everything
        self._counters = counters
        self._fd = -1
        self._live = 0
        self._bytes = 0
        self._to_skip = 0
        self._skips = 0

    def begin(self, superblock: Superblock | None = None) -> None:
        """Writes a new edition with all that the catalog holds, and puts it in the place of the old one."""
        self._superblock = superblock or self._superblock
        self.close()
        temporary = self._path.with_suffix(".new")
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
        """Tells of one commit, which the catalog has taken."""
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
        """Closes the file, which stays for the readers."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _failed(self, error: Exception) -> None:
        """Leaves the roster alone for a while: ever longer, until it can be begun anew."""
        self.close()
        self._skips = min(2 * self._skips + 1, _MOST_SKIPPED)
        self._to_skip = self._skips
        self._counters.add(volumes_metrics.ROSTER_ERRORS)
        _log.warning("roster %s cannot be written (%s): who mounts this volume sees no news for a while", self._path, error)


def _write(fd: int, data: bytes) -> int:
    """Appends all of it. A short write leaves a frame that no reader takes, and an error."""
    if os.write(fd, data) != len(data):
        raise OSError(f"a frame of {len(data)} bytes was written short")
    return len(data)


class SlotManifestReader:
    """A mounting node's end: the list in memory, some 300 bytes a block. ``catch_up`` takes one caller at a time.

    Args:
        folder: the volume's, as mounted here.
        entries: False: only its head is read, for who learns in another way where blocks lie.
    """

    def __init__(self, folder: Path, *, entries: bool = True) -> None:
        self._path = folder / ROSTER_FILE
        self._entries = entries
        self._head = b""
        self._position = 0
        self.superblock: Superblock | None = None
        self.slots: dict[BlockKey, Slot] = {}
        """Replaced as a whole when the roster begins anew; otherwise changed in place, an entry at a time."""

    def catch_up(self) -> None:
        """Takes in what the owner has written since.

        The file is opened anew each time: it may have been replaced, and network file systems look for news at an opening.

        Raises:
            CorruptBlock: this is no roster, or one of a version or content that cannot be.
            OSError: the file is not there, or cannot be read.
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
        """Applies the whole frames at the front of some bytes; how many bytes those are."""
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
            raise CorruptBlock("a roster names more blocks than its volume has room for", path=self._path)
        return at


def _entries_of(rows: np.ndarray[tuple[int], np.dtype[np.void]], capacity: int) -> Iterator[tuple[BlockKey, Slot]]:
    """Entries whose slot lies within the volume; others are left out."""
    size, offset = rows["size"], rows["offset"]
    fits = (size > 0) & (size <= capacity) & (offset <= capacity - np.minimum(size, capacity))
    fits &= (size % ALIGNMENT == 0) & (offset % ALIGNMENT == 0)
    good = rows[fits]
    columns = (good["offset"].tolist(), good["size"].tolist(), good["generation"].tolist())
    return zip(good["key"].tolist(), map(Slot, *columns), strict=True)


def _parse_head(head: bytes) -> Superblock:
    if len(head) < HEAD_BYTES:
        raise CorruptBlock("a roster is cut off", bytes=len(head))
    magic, checksum, _ = _HEAD.unpack_from(head)
    if magic != _MAGIC or xxhash.xxh3_64_intdigest(head[16:]) != checksum:
        raise CorruptBlock("no roster here: wrong magic or checksum")
    return parse_superblock(head[_HEAD.size :])
