"""Base of volumes in memory: checks before and after the copy of each block."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from kvstore.core import checksum
from kvstore.core.errors import Internal, InvalidArgument
from kvstore.core.types import BlockShape, Outcome
from kvstore.observe.counters import Counters
from kvstore.observe.metrics import Event
from kvstore.tiers.contract import BlockRecord, Slot
from kvstore.tiers.slot_pool import PooledVolume


class MemoryVolume(PooledVolume):
    """A volume whose blocks a subclass copies, one at a time."""

    _corrupt_event: ClassVar[Event]
    """Counts blocks that are not what the caller asks for."""
    _counters: Counters

    @staticmethod
    def _slot_bytes(shape: BlockShape) -> int:
        return shape.block_bytes

    @abstractmethod
    def _copy_in(self, slot: Slot, shape: BlockShape, payload: memoryview) -> None:
        """Copy a block into its slot, which is held."""

    @abstractmethod
    def _copy_out(self, slot: Slot, shape: BlockShape, destination: memoryview) -> None:
        """Copy a block out of its slot, which may be given to another block during the copy."""

    def write(self, items: Sequence[tuple[Slot, BlockRecord, memoryview]]) -> list[Exception | None]:
        results: list[Exception | None] = []
        for slot, record, payload in items:
            size = record.shape.block_bytes
            if payload.nbytes != size or size > slot.size:
                results.append(
                    InvalidArgument("a payload must be one full block and fit its slot", bytes=payload.nbytes, expected=size)
                )
            elif not self.slot_pool.holds(slot):
                results.append(Internal("the slot of a write is not allocated", slot=slot))
            else:
                self._copy_in(slot, record.shape, payload)
                results.append(None)
        return results

    def read(self, items: Sequence[tuple[Slot, BlockRecord, memoryview]], *, verify: bool = True) -> list[Outcome]:
        """See the contract. The slot is checked again after the copy: a slot that was allocated again is not a hit."""
        outcomes: list[Outcome] = []
        for slot, record, destination in items:
            size = record.shape.block_bytes
            if destination.nbytes != size or size > slot.size:
                raise InvalidArgument("a destination must be one full block", bytes=destination.nbytes, expected=size)
            outcome = Outcome.CORRUPT
            if self.slot_pool.holds(slot):
                self._copy_out(slot, record.shape, destination)
                if (not verify or checksum.verify(destination, record.shape, record.checksums)) and self.slot_pool.holds(slot):
                    outcome = Outcome.HIT
            if outcome is Outcome.CORRUPT:
                self._counters.add(self._corrupt_event)
            outcomes.append(outcome)
        return outcomes
