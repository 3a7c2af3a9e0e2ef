"""The arena of the local node, mapped into this process: copies out of it and into it."""

from __future__ import annotations

import ctypes
import logging
import os
import threading

import numpy as np
import numpy.typing as npt

from kvclient.memory.buffers import LayersOf
from kvclient.memory.device_buffer import ArenaPinner, DeviceBuffer
from kvstore.core.buffers import BlockBuffer, ScatteredBlocks
from kvstore.core.checksum import ChecksumArray, block_checksums
from kvstore.core.errors import Internal, KVStoreError
from kvstore.core.types import BlockShape, SessionId
from kvstore.native import address_of
from kvstore.transport.copy import copy_from_arena, copy_to_arena
from kvstore.transport.shm import ArenaMapping, open_arena

_log = logging.getLogger(__name__)

MAP_AHEAD_BYTES = 16 << 20
MAP_AHEAD_MOST_BYTES = 16 << 30
"""Only the beginning of larger arenas is mapped ahead, because page tables take memory too."""
MADV_POPULATE_WRITE = 23
"""Since Linux 5.14; the mmap module does not define it."""

Offsets = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


class ClientArena:
    """A mapping of the arena, and the connection that keeps its slots granted. Copies must run as users of the session."""

    def __init__(self, mapping: ArenaMapping, *, map_ahead: bool, pinner: ArenaPinner | None = None) -> None:
        self._mapping = mapping
        self.size = mapping.size
        self.stuck = False
        """Whether a device may still write to slots for an unknown time, so that they must not be given back."""
        self._guard = pinner.mapped(mapping.view) if pinner is not None else None
        self._closing = threading.Event()
        self._ahead = threading.Thread(target=self._map_ahead, name="kvclient-map-ahead", daemon=True) if map_ahead else None
        if self._ahead is not None:
            self._ahead.start()

    @classmethod
    def open(
        cls,
        path: str,
        session_id: SessionId,
        size: int,
        timeout_s: float,
        *,
        map_ahead: bool,
        pinner: ArenaPinner | None = None,
    ) -> ClientArena:
        """Map the arena that an arena server shares over its socket.

        Args:
            path: socket of the arena server.
            session_id: presented to the server.
            size: bytes of the arena according to the node.
            timeout_s: bound of the exchange.
            map_ahead: enter the arena's pages into this process's page table in the background. Without it, every page costs a
                fault at its first use: the first gigabyte copied is several times slower than the next.
            pinner: pins the arena; None: nothing does.

        Raises:
            KVStoreError: the arena cannot be mapped.
            Internal: it has another size than the node said, so offsets into it could not be trusted.
        """
        mapping = open_arena(path, session_id, timeout_s)
        if mapping.size != size:
            mapping.close()
            raise Internal("the arena has another size than the node said", mapped=mapping.size, said=size)
        return cls(mapping, map_ahead=map_ahead and pinner is None, pinner=pinner)  # a pinner enters the pages itself

    def _map_ahead(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)  # releases the interpreter lock, unlike mmap.madvise
        base = address_of(self._mapping.view)
        for start in range(0, min(self.size, MAP_AHEAD_MOST_BYTES), MAP_AHEAD_BYTES):
            length = min(MAP_AHEAD_BYTES, self.size - start)
            if self._closing.is_set():
                return
            if libc.madvise(ctypes.c_void_p(base + start), ctypes.c_size_t(length), MADV_POPULATE_WRITE):
                _log.info("arena not mapped ahead: %s", os.strerror(ctypes.get_errno()))  # kernels before 5.14
                return

    @property
    def alive(self) -> bool:
        """Whether the node still holds its end of the connection."""
        return self._mapping.alive

    def copy_out(
        self,
        offsets: Offsets,
        buffer: BlockBuffer,
        first: int,
        first_layer: int,
        layer_count: int,
        threads: int,
        expected: ChecksumArray | None = None,
    ) -> Mask:
        """Copy layers of blocks from the arena to blocks ``[first, first + len(offsets))`` of a buffer.

        Args:
            offsets: of the blocks in the arena.
            buffer: the destination.
            first: its first block.
            first_layer: first layer to copy.
            layer_count: number of layers to copy.
            threads: at most so many copy.
            expected: checksums ``[blocks, layer_count]``; None: not compared.

        Returns:
            Which blocks match ``expected``; all without it.
        """
        good = self.begin_copy_out(offsets, buffer, first, first_layer, layer_count, threads, expected)
        if isinstance(buffer, DeviceBuffer):
            buffer.drain()
        return good

    def begin_copy_out(
        self,
        offsets: Offsets,
        buffer: BlockBuffer,
        first: int,
        first_layer: int,
        layer_count: int,
        threads: int,
        expected: ChecksumArray | None = None,
    ) -> Mask:
        """Copy as ``copy_out``, but do not wait for a device: its ``drain`` must return before the lease ends.

        Checksums are computed of the bytes that are copied, in the same pass. A device's copy cannot be read here, so the blocks
        in the arena are checked instead.
        """
        if isinstance(buffer, DeviceBuffer):
            buffer.read_arena(self._mapping.view, offsets, first, first_layer, layer_count)
            if expected is None:
                return np.ones(len(offsets), bool)
            blocks = self.blocks(offsets, buffer.shape)
            layers = blocks if layer_count == buffer.shape.layers else LayersOf(blocks, first_layer, layer_count)
            return matches(block_checksums(layers, range(len(offsets))), expected)
        found = None if expected is None else np.empty((len(offsets), layer_count), np.uint64)
        copy_from_arena(
            self._mapping.view,
            offsets,
            buffer,
            np.arange(first, first + len(offsets), dtype=np.int64),
            first_layer=first_layer,
            layer_count=layer_count,
            threads=threads,
            checksums=found,
        )
        return np.ones(len(offsets), bool) if found is None or expected is None else matches(found, expected)

    def copy_in(self, buffer: BlockBuffer, offsets: Offsets) -> npt.NDArray[np.uint64]:
        """Copy all blocks of a buffer to the arena, each to its offset. Return checksums of the bytes, ``[blocks, layers]``."""
        if isinstance(buffer, DeviceBuffer):
            return self._copy_in_from_device(buffer, offsets)
        checksums = np.empty((buffer.count, buffer.shape.layers), np.uint64)
        copy_to_arena(buffer, self._mapping.view, offsets, checksums=checksums)
        return checksums

    def _copy_in_from_device(self, buffer: DeviceBuffer, offsets: Offsets) -> npt.NDArray[np.uint64]:
        """Copy from a device. The checksums are of the bytes in the arena, because a device's memory cannot be read here."""
        try:
            buffer.write_arena(self._mapping.view, offsets)
        finally:
            try:
                buffer.drain()
            except KVStoreError:
                self.stuck = True
                raise
        return block_checksums(self.blocks(offsets, buffer.shape), range(len(offsets)))

    def blocks(self, offsets: Offsets, shape: BlockShape) -> BlockBuffer:
        """Return blocks in the arena as a buffer. No bytes are copied. Drop it before the session ends."""
        view, size = self._mapping.view, shape.block_bytes
        return ScatteredBlocks([view[at : at + size] for at in offsets.tolist()], shape)

    def close(self) -> None:
        """Unmap the arena and end the connection."""
        self._closing.set()
        if self._ahead is not None:
            self._ahead.join()  # a few milliseconds
        if self._guard is not None and not self._guard.close():
            _log.error("arena not unmapped: a device may still access it")
            return
        try:
            self._mapping.close()
        except KVStoreError as error:  # a view is still in use: the kernel cleans up at exit
            _log.error("arena not unmapped: %s", error)


def matches(found: ChecksumArray, expected: ChecksumArray) -> Mask:
    """Return which blocks have the expected checksums in all layers; both arrays are ``[blocks, layers]``."""
    good: Mask = (found == expected).all(axis=1)
    return good
