"""One namespace of the pool, as clients use it: loads copy blocks out, and loads and stores copy blocks in.

The block table decides: pins during copies, evictions for space, one writer per block. This module copies bytes, between the
pool and host memory or other memory of the same device, and turns device failures into misses. Pages on the device are copied
without leaving it (``DeviceBuffer.read_pool``), under the pins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvclient.gds.volume_reader import DiskRead, GdsReader
from kvclient.hbm.pool_state import PoolState
from kvclient.hbm.tensors import gather, scatter, tensor_blocks, until_done
from kvclient.hbm.volume import HbmVolume
from kvclient.memory.buffers import pick_blocks
from kvclient.memory.device_buffer import DeviceBuffer, DeviceHung, PoolMemory
from kvclient.memory.engine_pool import DiskLocations, StoredVolume
from kvstore.core.buffers import BlockBuffer
from kvstore.core.cancel_scope import CancelScope
from kvstore.core.checksum import block_checksums
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import BlockKey
from kvstore.node.eviction.allocation import PIECE_BLOCKS
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.observe.metric_definitions import device as device_metrics
from kvstore.tiers.contract import Slot
from kvstore.tiers.nvme.slot_header import slot_bytes

COPY_BYTES = 64 << 20
"""Bytes copied between two checks of the deadline."""
POOL_SHARE = 2
"""Direct disk reads use at most one part in this many of the pool at a time, so that the blocks are not evicted before they are
copied out."""

Positions = npt.NDArray[np.intp]
FillSlots = Callable[[Sequence[Slot], Positions], Sequence[bytes]]
"""``fill(slots, positions)``: writes the blocks at some positions into slots. One entry per leading block that was written: its
packed checksums, empty if none were computed."""


@dataclass(frozen=True, slots=True)
class PinnedBlocks:
    """Leading blocks of a chain in the pool, pinned until the context ends."""

    offsets: npt.NDArray[np.int64]
    """Offset of each full block in the volume's memory."""
    blocks: Sequence[Block]

    def __len__(self) -> int:
        return len(self.blocks)


class NamespaceView:
    """One namespace in the pool: ``PoolNamespace``, and copies that stay on the engine's device."""

    def __init__(
        self, parts: PoolState, disks: GdsReader, namespace: NodeNamespace, detach: Callable[[NamespaceView], None]
    ) -> None:
        self._parts = parts
        self._disks = disks
        self._namespace = namespace
        self._detach = detach
        self._step = max(1, COPY_BYTES // namespace.shape.block_bytes)

    @property
    def node_id(self) -> str:
        return self._parts.node_id

    @property
    def volume(self) -> HbmVolume:
        """Volume of the blocks."""
        return self._parts.volume

    def detach(self) -> None:
        self._detach(self)

    # ---- copies out of the pool ----
    @contextmanager
    def pinned(self, keys: Sequence[BlockKey]) -> Iterator[PinnedBlocks]:
        """Pin the leading blocks of some keys that are in the pool; the context must not end before the copies.

        For engines with their own copies: ``volume.memory`` is one tensor, and ``offsets`` are the offsets of the blocks in it.
        A caller that reads on a stream waits for it before the context ends, because the slots may be overwritten afterwards.
        """
        parts = self._parts
        found = parts.table.pin_resident(self._namespace, keys) if parts.open else []
        lead = next((at for at, block in enumerate(found) if block is None), len(found))
        parts.table.unpin([block for block in found[lead:] if block is not None])
        blocks = [block for block in found[:lead] if block is not None]
        try:
            if parts.demote:
                parts.table.mark_dirty(blocks)  # used again: offer them for demotion again before eviction
            offsets = np.fromiter((block.dram.offset for block in blocks if block.dram is not None), np.int64, lead)
            yield PinnedBlocks(offsets, blocks)
        finally:
            parts.table.unpin(blocks)

    def fetch(self, keys: Sequence[BlockKey], buffer: BlockBuffer, scope: CancelScope, *, verify: bool) -> int:
        return self._counted(len(keys), self._copy_out(keys, buffer, 0, scope, verify=verify))

    def _copy_out(self, keys: Sequence[BlockKey], buffer: BlockBuffer, first: int, scope: CancelScope, *, verify: bool) -> int:
        """Like ``fetch``, to the blocks of a buffer from ``first`` on."""
        good = 0
        with self._parts.guarded("read from"), self.pinned(keys) as found:
            if len(found) and not scope.ended and (pages := self._on_device(buffer, len(found), checksums=verify)):
                with self._parts.disabled_if_hung("read from"):
                    pages.read_pool(self._memory, found.offsets, first)  # ends before the pins do
                good = len(found)
            while good < len(found) and not scope.ended:
                upto = min(len(found), good + self._step)
                with self._parts.disabled_if_hung("read from"):
                    self.volume.copy_out(found.offsets[good:upto], buffer, first + good)
                sound = self._sound(found.blocks[good:upto], buffer, first + good) if verify else upto - good
                good += sound
                if good < upto:
                    break
        return good

    # ---- direct reads from the node's volumes ----
    def prepare_disks(self, volumes: Sequence[StoredVolume]) -> None:
        self._disks.prepare(volumes)

    def reads_disks(self, volumes: Sequence[StoredVolume]) -> bool:
        return self._parts.open and self._disks.ready(volumes)

    def accepts(self, buffer: BlockBuffer) -> bool:  # noqa: ARG002
        return True  # copies out of the pool may pass through host memory

    def fetch_stored(
        self,
        keys: Sequence[BlockKey],
        parent: BlockKey | None,
        depth: int,
        volumes: Sequence[StoredVolume],
        places: DiskLocations,
        buffer: BlockBuffer,
        first: int,
        scope: CancelScope,
        *,
        verify: bool,
    ) -> int:
        parts = self._parts
        parts.counters.add(device_metrics.HBM_LOCATED_BLOCKS, len(keys))
        size = slot_bytes(self._namespace.shape)
        step = max(1, self.volume.usage().capacity_bytes // POOL_SHARE // self._namespace.shape.block_bytes)
        good = read = 0

        def move(slots: Sequence[Slot], positions: Positions) -> Sequence[bytes]:
            nonlocal read
            wanted = [
                DiskRead(
                    keys[good + at],
                    int(places.volumes[good + at]),
                    Slot(int(places.offsets[good + at]), size, int(places.generations[good + at])),
                    slot,
                )
                for at, slot in zip(positions.tolist(), slots, strict=True)
            ]
            rows = self._disks.read(self._namespace, volumes, wanted, parts.clock.now_s() + scope.left_s())
            read += len(rows)
            return rows

        while good < len(keys) and not scope.ended:
            some = keys[good : good + step]
            self._insert(some, keys[good - 1] if good else parent, depth + good, move, scope, piece=len(some))
            copied = self._copy_out(some, buffer, first + good, scope, verify=verify)
            good += copied
            if copied < len(some):
                break
        parts.counters.add_all((device_metrics.HBM_DISK_BLOCKS, device_metrics.HBM_DISK_FAILED_BLOCKS), (read, len(keys) - good))
        return good

    def copy_to_tensor(self, keys: Sequence[BlockKey], out: torch.Tensor) -> int:
        """Copy leading blocks of some keys into memory on the pool's device.

        The copy does not pass through the host, so no checksum is compared. It is ordered after the calling thread's current
        stream, and the call returns when it is done.

        Args:
            keys: consecutive keys of a chain.
            out: ``len(keys) * block_bytes`` bytes of any dtype, contiguous or with leading axes ``[blocks]`` or ``[blocks,
                layers]`` of any stride (a layer-major cache is ``cache.transpose(0, 1)``).

        Returns:
            Number of leading blocks that are now in ``out``. The bytes after them are undefined.

        Raises:
            InvalidArgument: ``out`` is on another device, has another size, overlaps itself or has an unsupported layout.
        """
        rows = tensor_blocks(out, self._namespace.shape, len(keys), self.volume.device, writable=True)
        good = 0
        with self._parts.guarded("read from"), self.pinned(keys) as found:
            with self._parts.disabled_if_hung("read from"):
                gather(self.volume.memory, found.offsets, rows)
                until_done(self.volume.device)
            good = len(found)
        return self._counted(len(keys), good)

    @property
    def _memory(self) -> PoolMemory:
        return PoolMemory(str(self.volume.device), self.volume.memory)

    def _on_device(self, buffer: BlockBuffer, blocks: int, *, checksums: bool) -> DeviceBuffer | None:
        """Return a buffer of pages if bytes can stay on the device, else None (checksums need host memory).

        Counts copies through the host.
        """
        if not isinstance(buffer, DeviceBuffer):
            return None
        gap = buffer.pool_gap(self._memory)
        if gap or checksums:
            self._parts.count_by_host(gap, blocks)
            return None
        return buffer

    def _counted(self, requested: int, good: int) -> int:
        self._parts.counters.add_all((device_metrics.HBM_ASKED_BLOCKS, device_metrics.HBM_HIT_BLOCKS), (requested, good))
        return good

    def _sound(self, blocks: Sequence[Block], buffer: BlockBuffer, first: int) -> int:
        """Count the leading blocks that match their checksums.

        A block without checksums does not match; a mismatch drops the block.
        """
        sums = block_checksums(buffer, range(first, first + len(blocks)))
        for at, block in enumerate(blocks):
            if not block.checksums:
                return at
            if _packed(sums[at]) != block.checksums:
                self._parts.drop_corrupt(block)
                return at
        return len(blocks)

    # ---- copies into the pool ----
    def insert(
        self,
        keys: Sequence[BlockKey],
        parent: BlockKey | None,
        depth: int,
        buffer: BlockBuffer,
        scope: CancelScope | None,
        *,
        checksums: bool,
    ) -> int:
        if checksums:
            self._add_checksums(keys, buffer)

        def move(slots: Sequence[Slot], positions: Positions) -> Sequence[bytes]:
            offsets = _offsets(slots)
            if pages := self._on_device(buffer, len(positions), checksums=checksums):
                some = pages.pick(positions.tolist())
                with self._parts.disabled_if_hung("write to"):
                    some.write_pool(self._memory, offsets)
                return [b""] * len(slots)
            sums = np.empty((len(positions), self._namespace.shape.layers), np.uint64) if checksums else None
            with self._parts.disabled_if_hung("write to"):
                self.volume.copy_in(offsets, pick_blocks(buffer, positions), sums)
            return [b""] * len(slots) if sums is None else [_packed(row) for row in sums]

        return self._insert(keys, parent, depth, move, scope)

    def insert_tensor(self, keys: Sequence[BlockKey], parent: BlockKey | None, depth: int, source: torch.Tensor) -> int:
        """Copy blocks from memory on the pool's device into the pool, like ``keep``, but without checksums.

        Args:
            keys: consecutive keys of a chain.
            parent: key before the first, None at the head.
            depth: position of the first.
            source: the bytes, in a layout of ``copy_to_tensor``; ready in the order of the calling thread's current stream.

        Returns:
            Number of copied blocks.

        Raises:
            InvalidArgument: as for ``copy_to_tensor``.
        """
        rows = tensor_blocks(source, self._namespace.shape, len(keys), self.volume.device, writable=False)

        def move(slots: Sequence[Slot], positions: Positions) -> Sequence[bytes]:
            source = rows[int(positions[0]) : int(positions[-1]) + 1]  # a run without gaps
            with self._parts.disabled_if_hung("write to"):
                scatter(source, self.volume.memory, _offsets(slots))
                until_done(self.volume.device)
            return [b""] * len(slots)

        return self._insert(keys, parent, depth, move, None)

    def _insert(
        self,
        keys: Sequence[BlockKey],
        parent: BlockKey | None,
        depth: int,
        move: FillSlots,
        scope: CancelScope | None,
        *,
        piece: int | None = None,
    ) -> int:
        """Insert blocks with ``move``; see ``keep``. Blocks are visible piece by piece, prefix first.

        Args:
            keys: consecutive keys of a chain.
            parent: key before the first, None at the head.
            depth: position of the first.
            move: fills the slots.
            scope: ends the copies early; None: no limit.
            piece: blocks at a time; None: as many as are copied quickly.

        Returns:
            Number of inserted blocks.
        """
        parts = self._parts
        if not parts.open or not keys:
            return 0
        table = parts.table
        guard = [] if parent is None else table.pin_resident(self._namespace, [parent])
        claim = table.claim(self._namespace, keys)
        # resident ancestors stay pinned while space for their children is reclaimed
        held = [*claim.resident.values(), *(block for block in guard if block is not None)]
        wanted = claim.claimed_absent
        done = 0
        try:
            with parts.guarded("write to"):
                if wanted and (wanted[0] == 0 or wanted[0] - 1 in claim.resident):  # no gaps within a run
                    wanted = wanted[: next((at for at, one in enumerate(wanted) if one != wanted[0] + at), len(wanted))]
                    wait_s = parts.space_wait_s if scope is None else min(parts.space_wait_s, scope.left_s())
                    deadline_s = parts.clock.now_s() + wait_s
                    while done < len(wanted) and not (scope is not None and scope.ended):
                        slots = self._space(min(len(wanted) - done, piece or min(PIECE_BLOCKS, self._step)), deadline_s)
                        if not slots:
                            parts.counters.add(device_metrics.HBM_NO_SPACE_BLOCKS, len(wanted) - done)
                            break
                        inserted = self._piece(keys, parent, depth, wanted[done : done + len(slots)], slots, move)
                        held += inserted
                        done += len(inserted)
                        if len(inserted) < len(slots):
                            break
        finally:
            if parts.lost:
                table.mark_clean(held, transient=True)
            table.unclaim([keys[at] for at in claim.claimed_absent[done:]], ())
            table.unpin(held)
        parts.counters.add(device_metrics.HBM_INSERTED_BLOCKS, done)
        return done

    def _add_checksums(self, keys: Sequence[BlockKey], buffer: BlockBuffer) -> None:
        """Add checksums to blocks that were kept without any, computed from the same blocks in a buffer."""
        with self.pinned(keys) as found:
            for at, block in enumerate(found.blocks):
                if not block.checksums:
                    block.checksums = _packed(block_checksums(buffer, (at,))[0])

    def _space(self, count: int, deadline_s: float) -> list[Slot]:
        """Reserve slots for up to ``count`` blocks; none if there is no space in time."""
        table, shape = self._parts.table, self._namespace.shape
        try:
            while count:
                # wait only for a single slot: a smaller piece may be free at once
                slots = table.reserve(shape, count, deadline_s if count == 1 else 0.0)
                if slots is not None:
                    return slots
                count //= 2
        except InvalidArgument:  # the pool was resized: no block of this namespace fits
            self._parts.counters.add(device_metrics.HBM_TOO_SMALL)
        return []

    def _piece(
        self,
        keys: Sequence[BlockKey],
        parent: BlockKey | None,
        depth: int,
        positions: Sequence[int],
        slots: Sequence[Slot],
        move: FillSlots,
    ) -> list[Block]:
        """Fill slots and insert their blocks into the table. Returns the blocks, pinned."""
        table, demote = self._parts.table, self._parts.demote
        try:
            rows = move(slots, np.array(positions, np.intp))
        except DeviceHung:  # the device may still write to these slots: they stay reserved
            raise
        except BaseException:
            table.unreserve(slots)
            raise
        if len(rows) < len(slots):
            table.unreserve(slots[len(rows) :])
        blocks = []
        for position, slot, row in zip(positions, slots, rows, strict=False):
            block = Block(self._namespace, keys[position], keys[position - 1] if position else parent, depth + position, row)
            table.insert_fetched(block, slot, clean=not demote)
            blocks.append(block)
        return blocks


def _offsets(slots: Sequence[Slot]) -> npt.NDArray[np.int64]:
    return np.array([slot.offset for slot in slots], np.int64)


def _packed(row: npt.NDArray[np.uint64]) -> bytes:
    return row.astype("<u8", copy=False).tobytes()
