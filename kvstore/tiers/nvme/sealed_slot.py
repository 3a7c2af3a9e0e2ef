"""Slots of the node's own volumes whose checksums are not in memory: they are in the slot's header, and a seal verifies them.

A node has millions of blocks on NVMe only. Eight bytes of checksum per layer for each would be most of its memory, so it keeps
an eight-byte *seal* per block: the hash of all checksums. A read gets the checksums from the header, which it reads with the
payload. Every field of the header must be as expected, and its checksums must match the seal.
"""

from __future__ import annotations

from kvstore.core import checksum
from kvstore.core.errors import CorruptBlock
from kvstore.core.types import Outcome
from kvstore.tiers.contract import BlockRecord, Slot
from kvstore.tiers.nvme.slab_io import SlotIO
from kvstore.tiers.nvme.slot_header import FIXED_BYTES, parse_header, seal_of


class SealedSlotIO(SlotIO):
    """Read of one slot. After a HIT, ``record`` has the checksums.

    Args:
        volume_uid: uid of the volume.
        slot: the slot.
        span: first chunk and number of chunks of its span.
        header_space: bytes of the header in the slot.
        record: record of the block, with a seal.
        payload: destination of the payload.
    """

    __slots__ = ("generation", "span", "volume_uid")

    def __init__(
        self, volume_uid: bytes, slot: Slot, span: tuple[int, int], header_space: int, record: BlockRecord, payload: memoryview
    ) -> None:
        super().__init__(slot.offset, slot.size, bytes(FIXED_BYTES + 8 * record.shape.layers), header_space, record, payload)
        self.volume_uid = volume_uid
        self.generation = slot.generation
        self.span = span

    def judge(self, header: memoryview, *, verify: bool) -> Outcome:
        try:
            found = parse_header(header)
        except CorruptBlock:
            return Outcome.CORRUPT
        record, wanted = found.record, self.record
        same = (
            found.volume_uid == self.volume_uid
            and found.slot == (self.offset, self.size, self.generation)
            and (found.first_chunk, found.chunks) == self.span
            and (record.namespace, record.key, record.parent) == (wanted.namespace, wanted.key, wanted.parent)
            and (record.depth, record.shape) == (wanted.depth, wanted.shape)
            and seal_of(record.checksums) == wanted.seal
        )
        if not same or (verify and not checksum.verify(self.payload, record.shape, record.checksums)):
            return Outcome.CORRUPT
        self.record = record
        return Outcome.HIT
