"""The arena of the local node, mapped into this process: copies out of it and into it, each one call of the native kernel."""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvclient.memory.buffers import LayersOf
from kvclient.memory.device_buffer import ArenaPinner, CopyEvent, DeviceBuffer, Offsets
from kvclient.memory.shared_mapping import MappingUse, is_charged_to_first_user, is_resident, map_file, populate
from kvstore.core.buffers import BlockBuffer, Layout, Positions, ScatteredBlocks, positions
from kvstore.core.checksum import ChecksumArray, block_checksums, piece_checksums
from kvstore.core.errors import DeadlineExceeded, Internal, InvalidArgument, KVStoreError, PermissionDenied, Unavailable
from kvstore.core.types import KEY_BYTES, BlockShape, SessionId
from kvstore.native import CopyBatch, address_of, bounds_of, run
from kvstore.process.threads.submission import start_thread
from kvstore.transport.contract import Checksums
from kvstore.transport.shm import MAGIC, REPLY

_log = logging.getLogger(__name__)

MAP_AHEAD_BYTES = 16 << 20
MAP_AHEAD_MOST_BYTES = 16 << 30
"""Only the beginning of larger arenas is mapped ahead, because page tables take memory too."""
MAP_AHEAD_S = 600.0
"""How long to wait for a node that allocates its arena."""
_MAP_AHEAD_PAUSE_S = 0.05

Mask = npt.NDArray[np.bool_]


def copy_from_arena(
    arena: memoryview,
    offsets: Offsets | Sequence[int],
    destination: BlockBuffer,
    blocks: Sequence[int] | Positions | None = None,
    *,
    first_layer: int = 0,
    layer_count: int | None = None,
    threads: int = 2,
    checksums: Checksums | None = None,
) -> None:
    """Copy layers of blocks from an arena into a buffer.

    Args:
        arena: the whole mapping.
        offsets: byte offset of each full block in the arena.
        destination: the buffer.
        blocks: blocks of the buffer, one per offset; None: the first ones.
        first_layer: layers ``[first_layer, first_layer + layer_count)`` are copied.
        layer_count: None: all layers from ``first_layer`` on.
        threads: maximum number of threads, including this one.
        checksums: ``[len(offsets), layer_count]``, filled with the checksums of the bytes in the buffer; None: not computed.

    Raises:
        InvalidArgument: a block or layer is outside the arena or the buffer, or the memory is read-only.
    """
    _Copy(arena, offsets, destination, blocks, first_layer, layer_count, into_buffer=True).run(threads, checksums)


def copy_to_arena(
    source: BlockBuffer,
    arena: memoryview,
    offsets: Offsets | Sequence[int],
    blocks: Sequence[int] | Positions | None = None,
    *,
    first_layer: int = 0,
    layer_count: int | None = None,
    threads: int = 2,
    checksums: Checksums | None = None,
) -> None:
    """Copy layers of blocks from a buffer into an arena. Arguments and errors as in ``copy_from_arena``."""
    _Copy(arena, offsets, source, blocks, first_layer, layer_count, into_buffer=False).run(threads, checksums)


class _Copy:
    """One copy call: checked arguments and addresses."""

    def __init__(
        self,
        arena: memoryview,
        offsets: Offsets | Sequence[int],
        buffer: BlockBuffer,
        blocks: Sequence[int] | Positions | None,
        first_layer: int,
        layer_count: int | None,
        *,
        into_buffer: bool,
    ) -> None:
        shape = buffer.shape
        self._first_layer = first_layer
        self._layer_count = shape.layers - first_layer if layer_count is None else layer_count
        if not (first_layer >= 0 and 0 < self._layer_count <= shape.layers - first_layer):
            raise InvalidArgument("layers outside the block shape", layers=shape.layers, first=first_layer, count=layer_count)
        starts = np.asarray(offsets, np.int64)
        self._blocks = positions(range(len(starts)) if blocks is None else blocks, buffer.count)
        if starts.ndim != 1 or len(self._blocks) != len(starts):
            raise InvalidArgument("one offset per block is required", offsets=starts.shape, blocks=len(self._blocks))
        if not into_buffer and arena.readonly:
            raise InvalidArgument("the arena is read-only")
        # after this check, all addresses are inside the arena
        if len(starts) and not 0 <= int(starts.min()) <= int(starts.max()) <= arena.nbytes - shape.block_bytes:
            raise InvalidArgument("block outside the arena", arena_bytes=arena.nbytes, block_bytes=shape.block_bytes)
        self._shape = shape
        self._arena_bounds = bounds_of(arena)
        self._starts = starts + (self._arena_bounds[0] + first_layer * shape.layer_block_bytes)
        self._layout = Layout(buffer, writable=into_buffer)
        self._into_buffer = into_buffer

    def run(self, threads: int, checksums: Checksums | None) -> None:
        """Copy with at most ``threads`` threads."""
        if checksums is not None and checksums.shape != (len(self._starts), self._layer_count):
            raise InvalidArgument("one checksum per layer block is required", shape=checksums.shape, blocks=len(self._starts))
        if not len(self._starts) or not self._shape.layer_block_bytes:
            return
        ours, lengths = self._layout.addresses(self._blocks, self._first_layer, self._layer_count)
        block_bytes = self._layer_count * self._shape.layer_block_bytes
        if len(ours) == len(self._starts):
            theirs = self._starts
        else:
            # offset of each piece if all blocks were consecutive; it gives the block and the offset inside the block
            before = np.cumsum(lengths) - lengths
            theirs = self._starts[before // block_bytes] + before % block_bytes
        length = int(lengths[0])
        parts, rest = divmod(length, self._shape.layer_block_bytes)
        if checksums is None or rest or (lengths != length).any():
            self._copy(ours, theirs, lengths, threads)
            if checksums is not None:
                # hash the buffer, not the arena: a load must bring the right bytes there, and a store must not hash a wrong copy
                pieces = self._layout.pieces(self._blocks, self._first_layer, self._layer_count)
                checksums[:] = piece_checksums(pieces, self._shape.layer_block_bytes).reshape(checksums.shape)
            return
        sums = np.empty(checksums.size, np.uint64)
        self._copy(ours, theirs, None, threads, parts, sums)
        checksums[:] = sums.reshape(checksums.shape)

    def _copy(
        self,
        ours: Positions,
        theirs: Positions,
        lengths: Positions | None,
        threads: int,
        parts: int = 1,
        sums: npt.NDArray[np.uint64] | None = None,
    ) -> None:
        """Copy pieces between the buffer (``ours``) and the arena (``theirs``)."""
        region = self._layout.region
        if region is not None:
            bounds = region[0], region[0] + region[1]
        else:  # several regions, whose pieces the layout has checked
            sizes = parts * self._shape.layer_block_bytes if lengths is None else lengths
            bounds = int(ours.min()), int((ours + sizes).max())
        sides = (theirs, ours) if self._into_buffer else (ours, theirs)
        limits = (self._arena_bounds, bounds) if self._into_buffer else (bounds, self._arena_bounds)
        sources, targets = (np.ascontiguousarray(side).view(np.uint64) for side in sides)
        run(
            CopyBatch(
                sources,
                targets,
                *limits,
                size=self._shape.layer_block_bytes if sums is not None else 0,
                parts=parts,
                lengths=None if lengths is None else np.ascontiguousarray(lengths).view(np.uint64),
                threads=threads,
            ),
            sums,
        )


class ClientArena:
    """A mapping of the arena, and the connection that keeps its slots granted. Copies must run as users of the session."""

    def __init__(self, mapping: ArenaMapping, *, map_ahead: bool, pinner: ArenaPinner | None = None) -> None:
        self._mapping = mapping
        self.size = mapping.size
        self.stuck = False
        """Whether a device may still write to slots for an unknown time, so that they must not be given back."""
        self._guard = pinner.mapped(mapping.view, mapping.descriptor) if pinner is not None else None
        self._closing = threading.Event()
        map_ahead = map_ahead and mapping.first_here
        self._ahead = start_thread(self._map_ahead, "kvclient-map-ahead") if map_ahead else None
        if map_ahead and self._ahead is None:
            _log.info("arena not mapped ahead: no more threads")

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
            map_ahead: enter the arena's pages into this process's page table in the background, as the node allocates them.
                Without it, every page costs a fault at its first use: the first gigabyte copied is several times slower than the
                next. Only the first session of a process does so, as long as it is open.
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
        base = address_of(self._mapping.view)
        charged = is_charged_to_first_user(self._mapping.descriptor)
        until_s = time.monotonic() + MAP_AHEAD_S
        for start in range(0, min(self.size, MAP_AHEAD_MOST_BYTES), MAP_AHEAD_BYTES):
            length = min(MAP_AHEAD_BYTES, self.size - start)
            while charged and not is_resident(base + start, length):
                if time.monotonic() > until_s:
                    _log.info("arena not mapped ahead: the node did not allocate it in time (mapped_mib=%d)", start >> 20)
                    return
                if self._closing.wait(_MAP_AHEAD_PAUSE_S):
                    return
            if self._closing.is_set():
                return
            if not populate(base + start, length):
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
            threads: maximum number of threads that copy.
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

        For a buffer in host memory, the copy computes the checksums in the same pass. A device computes them from its copy, and
        the call waits for the result. If the device computes no checksums, the blocks in the arena are checked instead.
        """
        if isinstance(buffer, DeviceBuffer):
            buffer.read_arena(self._mapping.view, offsets, first, first_layer, layer_count)
            if expected is None:
                return np.ones(len(offsets), bool)
            pending = buffer.begin_checksums(first, len(offsets), first_layer, layer_count)
            if pending is not None:
                return matches(pending.result(), expected)
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

    def copy_in(self, buffer: BlockBuffer, offsets: Offsets) -> ChecksumArray:
        """Copy all blocks of a buffer to the arena, each to its offset. Return checksums of the bytes, ``[blocks, layers]``."""
        return self.begin_copy_in(buffer, offsets)()

    def begin_copy_in(self, buffer: BlockBuffer, offsets: Offsets) -> Callable[[], ChecksumArray]:
        """Copy as ``copy_in``, but do not wait for a device.

        Returns:
            A function that waits for the copies and returns the checksums. They are of the device's memory, else (if the device
            computes none) of the bytes in the arena. Until it has returned, or ``drain``, the slots must not be given back.
        """
        if not isinstance(buffer, DeviceBuffer):
            checksums = np.empty((buffer.count, buffer.shape.layers), np.uint64)
            copy_to_arena(buffer, self._mapping.view, offsets, checksums=checksums)
            return lambda: checksums
        pending, begun = None, None
        try:
            buffer.write_arena(self._mapping.view, offsets)
            pending = buffer.begin_checksums(0, buffer.count, 0, buffer.shape.layers)
            begun = buffer.begun()
        finally:
            if begun is None:
                self.drain(buffer)

        def finish() -> ChecksumArray:
            self.drain(buffer, begun)
            if pending is not None:
                return pending.result()
            return block_checksums(self.blocks(offsets, buffer.shape), range(len(offsets)))

        return finish

    def drain(self, buffer: DeviceBuffer, begun: Sequence[CopyEvent] | None = None) -> None:
        """Wait for a device's copies into the arena; see ``DeviceBuffer.drain``. If they do not end, the arena is ``stuck``."""
        try:
            buffer.drain(begun)
        except KVStoreError:
            self.stuck = True
            raise

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


class ArenaMapping:
    """An engine's mapping of its node's arena, with the connection that keeps the session alive.

    Args:
        sock: connection to the arena server; owned from now on.
        use: this session's use of the process's mapping; owned from now on.
        size: bytes of the arena.
    """

    def __init__(self, sock: socket.socket, use: MappingUse, size: int) -> None:
        self._sock = sock
        self._use = use
        self.size = size
        self._closed = False

    @property
    def view(self) -> memoryview:
        """The whole arena, writable."""
        return self._use.view

    @property
    def descriptor(self) -> int:
        """Descriptor of the arena's memory, open as long as this mapping."""
        return self._use.descriptor

    @property
    def first_here(self) -> bool:
        """Whether no other session of this process used the memory."""
        return self._use.first

    @property
    def alive(self) -> bool:
        """Whether the node still holds its end. If not, the node has stopped, and the contents of the arena are invalid."""
        if self._closed:
            return False
        try:
            return bool(self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """End the use of the mapping, then the connection, after which the node may reuse the session's slots. Idempotent.

        The last session of the process unmaps the arena.

        Raises:
            Conflict: views of this session are still referenced. Nothing has changed: their holders may still access the arena.
        """
        if self._closed:
            return
        self._use.close()
        self._closed = True
        self._sock.close()


def open_arena(path: Path | str, session_id: SessionId, timeout_s: float) -> ArenaMapping:
    """Map the arena of a node on this host.

    Args:
        path: the node's arena socket.
        session_id: the session id that ``OpenSession`` returned.
        timeout_s: bound for connecting and for the answer.

    Raises:
        Unavailable: the node does not answer, or the arena cannot be mapped.
        DeadlineExceeded: the answer did not come in time.
        PermissionDenied: the node refused the session, or this user may not connect.
    """
    if len(session_id) != KEY_BYTES:
        raise InvalidArgument("a session id must have 16 bytes", bytes=len(session_id))
    sock = socket.socket(socket.AF_UNIX)
    descriptors: list[int] = []
    try:
        sock.settimeout(timeout_s)
        sock.connect(str(path))
        sock.sendall(session_id)
        # the answer is one short message, and nothing else is sent before it, so one call receives all of it
        answer, descriptors, _, _ = socket.recv_fds(sock, REPLY.size, 1)
        size = _size_granted(answer, descriptors)
        use = map_file(descriptors[0], size)
        sock.settimeout(None)
        return ArenaMapping(sock, use, size)
    except BaseException as error:
        sock.close()
        if isinstance(error, TimeoutError):
            raise DeadlineExceeded("the arena's socket did not answer in time", path=path, timeout_s=timeout_s) from error
        if isinstance(error, PermissionError):
            raise PermissionDenied("this user may not connect to the arena's socket", path=path) from error
        if isinstance(error, (OSError, ValueError)):
            raise Unavailable("cannot map the arena", path=path, error=error) from error
        raise
    finally:
        for descriptor in descriptors:
            os.close(descriptor)  # the mapping keeps the memory alive


def _size_granted(answer: bytes, descriptors: list[int]) -> int:
    if len(answer) != REPLY.size:
        raise Unavailable("the node closed the arena's socket")
    magic, granted, size = REPLY.unpack(answer)
    if magic != MAGIC:
        raise Unavailable("not an arena socket")
    if not granted or not descriptors:
        raise PermissionDenied("the node does not know the session, or the session has its arena already")
    return int(size)
