"""The pool as the clients of one namespace use it: what is there is copied out, what was loaded or stored is copied in.

All decisions are the block table's: pins while bytes move, room by eviction, one writer a block. Here bytes are moved, between
the pool and host memory or between the pool and other memory of the same device, and failures of the device become misses. A
device's pages are copied from and to without leaving it (``far.FarBlocks.read_pool``), within the pins, wherever that goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvclient.call.operation import Operation
from kvclient.hbm.gds_reader import DiskRead, GdsReader
from kvclient.hbm.pool_state import PoolState
from kvclient.hbm.tensors import gather, scatter, tensor_blocks, until_done
from kvclient.hbm.volume import HbmVolume
from kvclient.memory.buffers import pick_blocks
from kvclient.memory.device_buffer import DeviceHung, FarBlocks, PoolMemory
from kvclient.memory.engine_pool import StoredPlaces, StoredVolume
from kvstore.core.buffers import BlockBuffer
from kvstore.core.checksum import block_checksums
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import BlockKey
from kvstore.node.eviction.allocation import PIECE_BLOCKS
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.tiers.contract import Slot
from kvstore.tiers.nvme.slot_header import slot_bytes

COPY_BYTES = 64 << 20
"""Copied between two looks at the deadline."""
POOL_SHARE = 2
"""Read from disks at a time: at most this part of the pool, so that it is there at once before it is copied on."""

Positions = npt.NDArray[np.intp]
FillSlots = Callable[[Sequence[Slot], Positions], Sequence[bytes]]
"""``move(slots, positions)``: brings the blocks at some positions into slots. One entry for each of the leading ones that came:
its packed checksums, empty where none were made."""


@dataclass(frozen=True, slots=True)
class PinnedBlocks:
    """Leading blocks of a chain that lie in the pool, and stay there until they are given back."""

    offsets: npt.NDArray[np.int64]
    """Where in the volume's memory each Full Block begins."""
    blocks: Sequence[Block]

    def __len__(self) -> int:
        return len(self.blocks)


class NamespaceView:
    """One namespace in the pool: ``NearBlocks``, and beyond it what an engine needs that stays on its device."""

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
        """Where the blocks lie."""
        return self._parts.volume

    def detach(self) -> None:
        self._detach(self)

    # ---- out ----
    @contextmanager
    def pinned(self, keys: Sequence[BlockKey]) -> Iterator[PinnedBlocks]:
        """The leading blocks of some keys that lie in the pool; pinned within the context, whose end must follow all copies.

        For engines with copies of their own: ``volume.memory`` is one tensor, and ``offsets`` say where in it each block begins.
        Whoever reads on a stream waits for it before the context ends, as the slots may be written to after that.
        """
        parts = self._parts
        found = parts.table.pin_resident(self._namespace, keys) if parts.open else []
        lead = next((at for at, block in enumerate(found) if block is None), len(found))
        parts.table.unpin([block for block in found[lead:] if block is not None])
        blocks = [block for block in found[:lead] if block is not None]
        try:
            if parts.demote:
                parts.table.mark_dirty(blocks)  # used again: should it leave after all, those below are asked once more
            offsets = np.fromiter((block.dram.offset for block in blocks if block.dram is not None), np.int64, lead)
            yield PinnedBlocks(offsets, blocks)
        finally:
            parts.table.unpin(blocks)

    def fetch(self, keys: Sequence[BlockKey], buffer: BlockBuffer, operation: Operation, *, verify: bool) -> int:
        return self._counted(len(keys), self._copy_out(keys, buffer, 0, operation, verify=verify))

    def _copy_out(self, keys: Sequence[BlockKey], buffer: BlockBuffer, first: int, operation: Operation, *, verify: bool) -> int:
        """As ``fetch``, to a buffer's blocks from ``first`` on."""
        good = 0
        with self._parts.guarded("read from"), self.pinned(keys) as found:
            if len(found) and not operation.over and (far := self._on_device(buffer, len(found), checksums=verify)):
                with self._parts.kept_if_stuck("read from"):
                    far.read_pool(self._memory, found.offsets, first)  # has ended before the pins do
                good = len(found)
            while good < len(found) and not operation.over:
                upto = min(len(found), good + self._step)
                self.volume.copy_out(found.offsets[good:upto], buffer, first + good)
                sound = self._sound(found.blocks[good:upto], buffer, first + good) if verify else upto - good
                good += sound
                if good < upto:
                    break
        return good

    # ---- from the node's disks ----
    def prepare_disks(self, volumes: Sequence[StoredVolume]) -> None:
        self._disks.prepare(volumes)

    def reads_disks(self, volumes: Sequence[StoredVolume]) -> bool:
        return self._parts.open and self._disks.ready(volumes)

    def fetch_stored(
        self,
        keys: Sequence[BlockKey],
        parent: BlockKey | None,
        depth: int,
        volumes: Sequence[StoredVolume],
        places: StoredPlaces,
        buffer: BlockBuffer,
        first: int,
        operation: Operation,
        *,
        verify: bool,
    ) -> int:
        parts = self._parts
        parts.counters.add("hbm_located_blocks_total", len(keys))
        size = slot_bytes(self._namespace.shape)
        step = max(1, self.volume.usage().capacity_bytes // POOL_SHARE // self._namespace.shape.block_bytes)
        good = came = 0

        def move(slots: Sequence[Slot], positions: Positions) -> Sequence[bytes]:
            nonlocal came
            wanted = [
                DiskRead(
                    keys[good + at],
                    int(places.volumes[good + at]),
                    Slot(int(places.offsets[good + at]), size, int(places.generations[good + at])),
                    slot,
                )
                for at, slot in zip(positions.tolist(), slots, strict=True)
            ]
            rows = self._disks.read(self._namespace, volumes, wanted, parts.clock.now_s() + operation.left_s())
            came += len(rows)
            return rows

        while good < len(keys) and not operation.over:
            some = keys[good : good + step]
            self.bring(some, keys[good - 1] if good else parent, depth + good, move, operation, piece=len(some))
            here = self._copy_out(some, buffer, first + good, operation, verify=verify)
            good += here
            if here < len(some):
                break
        parts.counters.add_all(("hbm_disk_blocks_total", "hbm_disk_failed_blocks_total"), (came, len(keys) - good))
        return good

    def copy_to_tensor(self, keys: Sequence[BlockKey], out: torch.Tensor) -> int:
        """Copies leading blocks of some keys into memory on the pool's device.

        Nothing passes through the host, so no checksum is compared. Ordered behind what the calling thread's current stream has
        to do; returns when the bytes are there.

        Args:
            keys: consecutive keys of a chain.
            out: room for all of them: ``len(keys) * block_bytes`` bytes of any dtype, contiguous or with its leading axes
                ``[blocks]`` or ``[blocks, layers]`` of any stride (a layer-major cache is ``cache.transpose(0, 1)``).

        Returns:
            How many leading blocks are in ``out`` now. What lies behind them is not defined.

        Raises:
            InvalidArgument: ``out`` is on another device, of another size, overlaps itself or lies in an unknown way.
        """
        rows = tensor_blocks(out, self._namespace.shape, len(keys), self.volume.device, writable=True)
        good = 0
        with self._parts.guarded("read from"), self.pinned(keys) as found:
            gather(self.volume.memory, found.offsets, rows)
            until_done(self.volume.device)
            good = len(found)
        return self._counted(len(keys), good)

    @property
    def _memory(self) -> PoolMemory:
        return PoolMemory(str(self.volume.device), self.volume.memory)

    def _on_device(self, buffer: BlockBuffer, blocks: int, *, checksums: bool) -> FarBlocks | None:
        """A buffer of pages, if bytes stay on the device; else None: checksums are of host memory. Counted if it has pages."""
        if not isinstance(buffer, FarBlocks):
            return None
        gap = buffer.pool_gap(self._memory)
        if gap or checksums:
            self._parts.by_host(gap, blocks)
            return None
        return buffer

    def _counted(self, asked: int, good: int) -> int:
        self._parts.counters.add_all(("hbm_asked_blocks_total", "hbm_hit_blocks_total"), (asked, good))
        return good

    def _sound(self, blocks: Sequence[Block], buffer: BlockBuffer, first: int) -> int:
        """How many leading blocks match their checksums. Without any a block does not; one that has others leaves the pool."""
        sums = block_checksums(buffer, range(first, first + len(blocks)))
        for at, block in enumerate(blocks):
            if not block.checksums:
                return at
            if _packed(sums[at]) != block.checksums:
                self._parts.condemn(block)
                return at
        return len(blocks)

    # ---- in ----
    def keep(
        self,
        keys: Sequence[BlockKey],
        parent: BlockKey | None,
        depth: int,
        buffer: BlockBuffer,
        operation: Operation | None,
        *,
        checksums: bool,
    ) -> int:
        if checksums:
            self._add_checksums(keys, buffer)

        def move(slots: Sequence[Slot], positions: Positions) -> Sequence[bytes]:
            offsets = _offsets(slots)
            if far := self._on_device(buffer, len(positions), checksums=checksums):
                some = far.pick(positions.tolist())
                with self._parts.kept_if_stuck("write to"):
                    some.write_pool(self._memory, offsets)
                return [b""] * len(slots)
            sums = np.empty((len(positions), self._namespace.shape.layers), np.uint64) if checksums else None
            self.volume.copy_in(offsets, pick_blocks(buffer, positions), sums)
            return [b""] * len(slots) if sums is None else [_packed(row) for row in sums]

        return self.bring(keys, parent, depth, move, operation)

    def keep_tensor(self, keys: Sequence[BlockKey], parent: BlockKey | None, depth: int, source: torch.Tensor) -> int:
        """Copies blocks from memory on the pool's device into the pool, as ``keep`` does from host memory; without checksums.

        Args:
            keys: consecutive keys of a chain.
            parent: key before the first, None at the head.
            depth: position of the first.
            source: their bytes, as ``copy_to_tensor`` takes them; ready in the order of the calling thread's current stream.

        Returns:
            How many were copied.

        Raises:
            InvalidArgument: as for ``copy_to_tensor``.
        """
        rows = tensor_blocks(source, self._namespace.shape, len(keys), self.volume.device, writable=False)

        def move(slots: Sequence[Slot], positions: Positions) -> Sequence[bytes]:
            source = rows[int(positions[0]) : int(positions[-1]) + 1]  # a run without holes
            scatter(source, self.volume.memory, _offsets(slots))
            until_done(self.volume.device)
            return [b""] * len(slots)

        return self.bring(keys, parent, depth, move, None)

    def bring(
        self,
        keys: Sequence[BlockKey],
        parent: BlockKey | None,
        depth: int,
        move: FillSlots,
        operation: Operation | None,
        *,
        piece: int | None = None,
    ) -> int:
        """Brings blocks in by whatever moves them; see ``keep``. Pieces are visible as they are there, prefix first.

        ``piece``: so many blocks at a time; None: as many as are copied soon.
        """
        parts = self._parts
        if not parts.open or not keys:
            return 0
        table = parts.table
        guard = [] if parent is None else table.pin_resident(self._namespace, [parent])
        claim = table.claim(self._namespace, keys)
        # children come behind what is here already: that stays while room is made for them
        held = [*claim.resident.values(), *(block for block in guard if block is not None)]
        wanted = claim.claimed_absent
        done = 0
        try:
            with parts.guarded("write to"):
                if wanted and (wanted[0] == 0 or wanted[0] - 1 in claim.resident):  # no holes within a run
                    wanted = wanted[: next((at for at, one in enumerate(wanted) if one != wanted[0] + at), len(wanted))]
                    wait_s = parts.room_wait_s if operation is None else min(parts.room_wait_s, operation.left_s())
                    deadline_s = parts.clock.now_s() + wait_s
                    while done < len(wanted) and not (operation is not None and operation.over):
                        slots = self._room(min(len(wanted) - done, piece or min(PIECE_BLOCKS, self._step)), deadline_s)
                        if not slots:
                            parts.counters.add("hbm_no_room_blocks_total", len(wanted) - done)
                            break
                        came = self._piece(keys, parent, depth, wanted[done : done + len(slots)], slots, move)
                        held += came
                        done += len(came)
                        if len(came) < len(slots):
                            break
        finally:
            if parts.lost:
                table.discard_after_use(held)
            table.unclaim([keys[at] for at in claim.claimed_absent[done:]], ())
            table.unpin(held)
        parts.counters.add("hbm_kept_blocks_total", done)
        return done

    def _add_checksums(self, keys: Sequence[BlockKey], buffer: BlockBuffer) -> None:
        """Blocks that came in without checksums get those of the same blocks in a buffer: wrong bytes here are found by them."""
        with self.pinned(keys) as found:
            for at, block in enumerate(found.blocks):
                if not block.checksums:
                    block.checksums = _packed(block_checksums(buffer, (at,))[0])

    def _room(self, count: int, deadline_s: float) -> list[Slot]:
        """Slots for some of so many blocks; none where there is no room in time."""
        table, shape = self._parts.table, self._namespace.shape
        try:
            while count:
                # large pieces are not waited for: a smaller one may be had at once
                slots = table.reserve(shape, count, deadline_s if count == 1 else 0.0)
                if slots is not None:
                    return slots
                count //= 2
        except InvalidArgument:  # no block of this namespace fits any more: the pool has been made smaller
            self._parts.counters.add("hbm_too_small_total")
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
        """Fills slots and puts the blocks that came into the table; they are returned pinned."""
        table, demote = self._parts.table, self._parts.demote
        try:
            rows = move(slots, np.array(positions, np.intp))
        except DeviceHung:  # a device may write to these slots for ever: they stay taken
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
