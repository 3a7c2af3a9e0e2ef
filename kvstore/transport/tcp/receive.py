"""Receives and sends blocks, and hashes them while their bytes are in the CPU cache.

Hashing a layer block costs a third of receiving it if its bytes are in the core's own cache, and twice as much if they come from
memory. Payloads are therefore moved in segments that fit the cache, and each segment is hashed before the next one is moved. A
Layer block longer than a segment is hashed as it grows. A sender hashes a segment while the other side receives the one before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.core.checksum import LayerHasher
from kvstore.transport.contract import Checksums
from kvstore.transport.wire import IOV_MAX, Wire

SEGMENT_BYTES = 192 << 10
"""Received and then hashed at once: fits the second-level cache of any server core, beside the socket's own buffers.
Measured: with 32 KiB the calls cost more than the cache saves; with 1 MiB hashing takes half as long again."""
SENT_SEGMENT_BYTES = 1 << 20
"""Hashed and then sent at once: hashing leaves the segment in the second-level cache, from which the kernel copies it. Measured:
with 128 KiB a write is a tenth slower."""
SEGMENTS_AHEAD = 3
"""Segments that a sender hashes while it waits for the grant: about as long as the grant takes on loopback."""
UNVERIFIED_SEGMENT_BYTES = 4 << 20
"""Received at once if nothing is hashed. Progress is reported once per segment."""


def receive_blocks(
    wire: Wire,
    pieces: Sequence[memoryview],
    expected: Checksums,
    layer_block_bytes: int,
    deadline_s: float,
    *,
    verify: bool,
    on_bytes: Callable[[int], None] | None = None,
) -> npt.NDArray[np.bool_]:
    """Receive layer blocks into pieces of memory.

    Args:
        wire: delivers the layer blocks in the order of ``expected``.
        pieces: destination; as long as all layer blocks together, split anywhere.
        expected: ``[blocks, layers]``.
        layer_block_bytes: length of each layer block.
        deadline_s: when to give up.
        verify: compare checksums. False: accept the bytes as they are.
        on_bytes: called with the number of bytes after each segment.

    Returns:
        One per block: whether all its layers matched. All True without ``verify``.

    Raises:
        KVStoreError: as ``Wire.receive_into``.
    """
    if not verify:
        for segment in _segments(pieces, UNVERIFIED_SEGMENT_BYTES):
            wire.receive_into(segment, deadline_s)
            if on_bytes is not None:
                on_bytes(sum(map(len, segment)))
        return np.ones(len(expected), np.bool_)
    found = receive_and_hash(wire, pieces, layer_block_bytes, deadline_s, on_bytes)
    good: npt.NDArray[np.bool_] = (found.reshape(expected.shape) == expected).all(axis=1)
    return good


def receive_and_hash(
    wire: Wire,
    pieces: Sequence[memoryview],
    layer_block_bytes: int,
    deadline_s: float,
    on_bytes: Callable[[int], None] | None = None,
) -> npt.NDArray[np.uint64]:
    """Receive whole layer blocks into pieces of memory.

    Returns:
        One checksum per layer block, of the bytes received.

    Raises:
        KVStoreError: as ``Wire.receive_into``.
    """
    hasher = LayerHasher(layer_block_bytes, sum(map(len, pieces)) // layer_block_bytes)
    for segment in _segments(pieces, _segment_bytes(layer_block_bytes, SEGMENT_BYTES)):
        wire.receive_into(segment, deadline_s)
        hasher.update(segment)
        if on_bytes is not None:
            on_bytes(sum(map(len, segment)))
    return hasher.digests()


class ChecksummedSend:
    """Sends whole layer blocks and hashes them. The first segments may be hashed before the other side grants the write.

    Args:
        pieces: memory of the layer blocks.
        layer_block_bytes: length of each layer block.
    """

    def __init__(self, pieces: Sequence[memoryview], layer_block_bytes: int) -> None:
        self._segments = deque(_segments(pieces, _segment_bytes(layer_block_bytes, SENT_SEGMENT_BYTES)))
        self._hasher = LayerHasher(layer_block_bytes, sum(map(len, pieces)) // layer_block_bytes)
        self._hashed: deque[list[memoryview]] = deque()

    def hash_ahead(self) -> None:
        """Hash ``SEGMENTS_AHEAD`` segments, to use the time until the other side answers."""
        while self._segments and len(self._hashed) < SEGMENTS_AHEAD:
            self._hashed.append(self._segments.popleft())
            self._hasher.update(self._hashed[-1])

    def run(self, wire: Wire, head: bytes, deadline_s: float) -> npt.NDArray[np.uint64]:
        """Send the head of a frame and all layer blocks.

        Returns:
            One checksum per layer block.

        Raises:
            KVStoreError: as ``Wire.send``.
        """
        before: tuple[bytes, ...] = (head,)
        while self._hashed or self._segments:
            if self._hashed:
                segment = self._hashed.popleft()
            else:
                segment = self._segments.popleft()
                self._hasher.update(segment)
            wire.send((*before, *segment), deadline_s)
            before = ()
        return self._hasher.digests()


def _segments(pieces: Sequence[memoryview], segment_bytes: int) -> Iterator[list[memoryview]]:
    """Yield the same memory in lists of at most ``segment_bytes``, each with no more pieces than one system call takes."""
    segment: list[memoryview] = []
    held = 0
    for piece in pieces:
        at = 0
        while at < len(piece):
            part = piece[at : at + segment_bytes - held]
            segment.append(part)
            at += len(part)
            held += len(part)
            if held == segment_bytes or len(segment) == IOV_MAX:
                yield segment
                segment, held = [], 0
    if segment:
        yield segment


def _segment_bytes(layer_block_bytes: int, target: int) -> int:
    """Return a size near ``target`` that holds whole layer blocks, unless a layer block is far longer than that."""
    if layer_block_bytes <= target:
        return target // layer_block_bytes * layer_block_bytes
    return layer_block_bytes if layer_block_bytes <= 2 * target else target
