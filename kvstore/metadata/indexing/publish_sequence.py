"""Order of one node's publish batches: pure rules, and their form as a note in the index.

Batches are numbered 1, 2, 3, … within one boot. One that was applied before changes nothing and is acknowledged again; one that
skips ahead means that something was lost on the way, and then only a full inventory helps: the node must register again.

Registering reopens the count: the first batch after it may begin anew at 1 or go on where the last acknowledgement ended.
Re-applying a batch is harmless (the index's ``publish`` is idempotent), so a retried registration is harmless too.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

from kvstore.core.types import BootId

_FORMAT: Final = struct.Struct("<16sQB")


class SequenceMode(IntEnum):
    """What the next batch may be numbered."""

    RUNNING = 0  # up to one more than the last
    REOPENED = 1  # registered again: 1, or up to one more than the last
    LOST = 2  # a gap was seen: nothing, until the node registers
    ANEW = 3  # registered after a gap: anything, an inventory follows


class BatchVerdict(IntEnum):
    """What to do with a batch."""

    APPLY = 0
    DUPLICATE = 1
    REFUSE = 2


@dataclass(frozen=True, slots=True)
class SequenceState:
    """How far one boot of a node has published.

    Args:
        boot_id: the boot.
        last: the last batch that is in the index; 0: none.
        mode: what may come next.
    """

    boot_id: BootId
    last: int = 0
    mode: SequenceMode = SequenceMode.REOPENED

    def judge(self, sequence: int) -> tuple[BatchVerdict, SequenceState]:
        """What to do with a batch, and the state once that is done."""
        if self.mode is SequenceMode.LOST:
            return BatchVerdict.REFUSE, self
        if self.mode is SequenceMode.RUNNING and sequence <= self.last:
            return BatchVerdict.DUPLICATE, self
        fits = sequence <= self.last + 1 or self.mode is SequenceMode.ANEW
        if not fits:
            return BatchVerdict.REFUSE, replace(self, mode=SequenceMode.LOST)
        return BatchVerdict.APPLY, replace(self, last=sequence, mode=SequenceMode.RUNNING)

    def registered(self, boot_id: BootId) -> SequenceState:
        """The state after the node has registered a boot."""
        if boot_id != self.boot_id:
            return SequenceState(boot_id)
        lost = self.mode in {SequenceMode.LOST, SequenceMode.ANEW}
        return replace(self, mode=SequenceMode.ANEW if lost else SequenceMode.REOPENED)

    def encode(self) -> bytes:
        """As a note."""
        return _FORMAT.pack(self.boot_id, self.last, self.mode)

    @classmethod
    def decode(cls, note: bytes | None, boot_id: BootId) -> SequenceState:
        """From a note; of no note or one of another boot, the state of a boot that has not published yet."""
        if note is None or len(note) != _FORMAT.size:
            return cls(boot_id)
        noted_boot, last, mode = _FORMAT.unpack(note)
        return cls(boot_id, last, SequenceMode(mode)) if noted_boot == boot_id else cls(boot_id)
