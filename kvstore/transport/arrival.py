"""Receiving and sending blocks, and summing them while their bytes are in the cache.

The checksum of a Layer Block costs a third of what receiving it costs when the bytes come from the core's own cache, and as
much again when they come from memory. So payloads are taken in stretches that fit the cache, each hashed
before the next; a Layer Block longer than a stretch is hashed as it grows. A sender sums a stretch while the other side takes in
the one before.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.transport.contract import Checksums
from kvstore.transport.wire import IOV_MAX, Wire

STRETCH_BYTES = 192 << 10
"""What is received and then hashed at once: fits the second-level cache of any server core beside the socket's own buffers.
Measured: with 32 KiB the calls cost more than the cache saves, with 1 MiB hashing takes half as long again."""
SENT_STRETCH_BYTES = 1 << 20
"""What is hashed and then sent at once: the hash leaves it in the second-level cache, from where the kernel copies it. Measured:
with 128 KiB a write takes a tenth longer."""
SUMMED_AHEAD = 3
"""Stretches that a sender sums while it waits for the grant: about as long as that takes on loopback."""
UNSUMMED_STRETCH_BYTES = 4 << 20
"""What is received at once where nothing is hashed: whoever watches the read hears of it so often."""
_SMALL_BYTES = 32 << 10

_digest = xxhash.xxh3_64_intdigest

_small_hashes = threading.Lock()
"""xxhash lets go of the interpreter lock for every call, however short. Several threads that hash short Layer Blocks would spend
their time passing it around (measured: seven times slower with two threads), so they take turns."""


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
    """Receives Layer Blocks into pieces of memory.

    Args:
        wire: where they come from, in the order of ``expected``.
        pieces: where they go; together as long as all Layer Blocks, cut anywhere.
        expected: ``[blocks, layers]``.
        layer_block_bytes: length of each.
        deadline_s: when to give up.
        verify: False: take the bytes as they come.
        on_bytes: told of bytes as they come, a stretch at a time.

    Returns:
        One a block: whether all its layers matched (True throughout without ``verify``).

    Raises:
        KVStoreError: as ``Wire.receive_into``.
    """
    if not verify:
        for stretch in _stretches(pieces, UNSUMMED_STRETCH_BYTES):
            wire.receive_into(stretch, deadline_s)
            if on_bytes is not None:
                on_bytes(sum(map(len, stretch)))
        return np.ones(len(expected), np.bool_)
    found = receive_summed(wire, pieces, layer_block_bytes, deadline_s, on_bytes)
    good: npt.NDArray[np.bool_] = (found.reshape(expected.shape) == expected).all(axis=1)
    return good


def receive_summed(
    wire: Wire,
    pieces: Sequence[memoryview],
    layer_block_bytes: int,
    deadline_s: float,
    on_bytes: Callable[[int], None] | None = None,
) -> npt.NDArray[np.uint64]:
    """Receives whole Layer Blocks into pieces of memory.

    Returns:
        One checksum a Layer Block, of what has come.

    Raises:
        KVStoreError: as ``Wire.receive_into``.
    """
    hasher = LayerHasher(layer_block_bytes, sum(map(len, pieces)) // layer_block_bytes)
    for stretch in _stretches(pieces, _stretch_bytes(layer_block_bytes, STRETCH_BYTES)):
        wire.receive_into(stretch, deadline_s)
        hasher.update(stretch)
        if on_bytes is not None:
            on_bytes(sum(map(len, stretch)))
    return hasher.digests()


class SummedSend:
    """Sends whole Layer Blocks and sums them; the first may be summed before it is known that they are wanted.

    Args:
        pieces: memory of the Layer Blocks.
        layer_block_bytes: length of each.
    """

    def __init__(self, pieces: Sequence[memoryview], layer_block_bytes: int) -> None:
        self._stretches = deque(_stretches(pieces, _stretch_bytes(layer_block_bytes, SENT_STRETCH_BYTES)))
        self._hasher = LayerHasher(layer_block_bytes, sum(map(len, pieces)) // layer_block_bytes)
        self._summed: deque[list[memoryview]] = deque()

    def sum_ahead(self) -> None:
        """Sums ``SUMMED_AHEAD`` stretches: for the time that the other side takes to say what it wants."""
        while self._stretches and len(self._summed) < SUMMED_AHEAD:
            self._summed.append(self._stretches.popleft())
            self._hasher.update(self._summed[-1])

    def run(self, wire: Wire, head: bytes, deadline_s: float) -> npt.NDArray[np.uint64]:
        """Sends a frame's head and everything.

        Returns:
            One checksum a Layer Block.

        Raises:
            KVStoreError: as ``Wire.send``.
        """
        before: tuple[bytes, ...] = (head,)
        while self._summed or self._stretches:
            if self._summed:
                stretch = self._summed.popleft()
            else:
                stretch = self._stretches.popleft()
                self._hasher.update(stretch)
            wire.send((*before, *stretch), deadline_s)
            before = ()
        return self._hasher.digests()


def _stretches(pieces: Sequence[memoryview], stretch_bytes: int) -> Iterator[list[memoryview]]:
    """The same memory, cut so that each list holds about so many bytes, and no more pieces than one call takes."""
    stretch: list[memoryview] = []
    held = 0
    for piece in pieces:
        at = 0
        while at < len(piece):
            part = piece[at : at + stretch_bytes - held]
            stretch.append(part)
            at += len(part)
            held += len(part)
            if held == stretch_bytes or len(stretch) == IOV_MAX:
                yield stretch
                stretch, held = [], 0
    if stretch:
        yield stretch


def _stretch_bytes(layer_block_bytes: int, about: int) -> int:
    """Whole Layer Blocks where they are not too long."""
    if layer_block_bytes <= about:
        return about // layer_block_bytes * layer_block_bytes
    return layer_block_bytes if layer_block_bytes <= 2 * about else about


class LayerHasher:
    """Digests of consecutive Layer Blocks of a stream of bytes that comes in pieces.

    Args:
        size: bytes of a Layer Block.
        count: how many there will be.
    """

    def __init__(self, size: int, count: int) -> None:
        self._size = size
        self._count = count
        self._digests: list[int] = []
        self._open = xxhash.xxh3_64()
        self._into = 0  # bytes of the open Layer Block so far

    def update(self, pieces: Sequence[memoryview]) -> None:
        """Takes in the next bytes."""
        if self._size < _SMALL_BYTES:
            with _small_hashes:
                self._update(pieces)
        else:
            self._update(pieces)

    def _update(self, pieces: Sequence[memoryview]) -> None:
        size, digest = self._size, _digest
        for piece in pieces:
            if self._into == 0 and len(piece) % size == 0:
                if len(piece) == size:
                    self._digests.append(digest(piece))
                else:
                    self._digests += [digest(piece[at : at + size]) for at in range(0, len(piece), size)]
                continue
            at = 0
            while at < len(piece):
                part = piece[at : at + size - self._into]
                self._open.update(part)
                at += len(part)
                self._into += len(part)
                if self._into == size:
                    self._digests.append(self._open.intdigest())
                    self._open.reset()
                    self._into = 0

    def digests(self) -> npt.NDArray[np.uint64]:
        """One a Layer Block, once all bytes have been taken in."""
        assert len(self._digests) == self._count, "pieces are as long as the Layer Blocks"
        return np.array(self._digests, np.uint64)
