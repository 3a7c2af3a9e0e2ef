"""Order of one node's publish batches: pure rules, and their encoding as a note in an index of one host.

Batches are numbered 1, 2, 3, … within one boot. A batch that was applied before changes nothing and is acknowledged again. A
batch that skips a number means that one was lost. Then only a full inventory helps: the node must register again.

After a registration the numbering may restart at 1 or continue after the last acknowledgement. Applying a batch again is harmless
(``publish`` is idempotent), so a repeated registration is harmless, too.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

from kvstore.core.types import BootId

_FORMAT: Final = struct.Struct("<16sQB")


class SequenceMode(IntEnum):
    """Numbers that the next batch may have. The values are stored on disk."""

    RUNNING = 0  # up to one more than the last
    REOPENED = 1  # after a registration: 1, or up to one more than the last
    LOST = 2  # after a gap: none, until the node registers
    ANEW = 3  # after a gap and a registration: any, because an inventory follows


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
        last: number of the last batch in the index; 0: none.
        mode: numbers that the next batch may have.
    """

    boot_id: BootId
    last: int = 0
    mode: SequenceMode = SequenceMode.REOPENED

    def judge(self, sequence: int) -> tuple[BatchVerdict, SequenceState]:
        """What to do with a batch, and the state after that."""
        if self.mode is SequenceMode.LOST:
            return BatchVerdict.REFUSE, self
        if self.mode is SequenceMode.RUNNING and sequence <= self.last:
            return BatchVerdict.DUPLICATE, self
        fits = sequence <= self.last + 1 or self.mode is SequenceMode.ANEW
        if not fits:
            return BatchVerdict.REFUSE, replace(self, mode=SequenceMode.LOST)
        return BatchVerdict.APPLY, replace(self, last=sequence, mode=SequenceMode.RUNNING)

    def registered(self, boot_id: BootId) -> SequenceState:
        """The state after a boot has registered."""
        if boot_id != self.boot_id:
            return SequenceState(boot_id)
        lost = self.mode in {SequenceMode.LOST, SequenceMode.ANEW}
        return replace(self, mode=SequenceMode.ANEW if lost else SequenceMode.REOPENED)

    def encode(self) -> bytes:
        """Encode as a note."""
        return _FORMAT.pack(self.boot_id, self.last, self.mode)

    @classmethod
    def decode(cls, note: bytes | None, boot_id: BootId) -> SequenceState:
        """Decode a note; without a valid note of this boot, the state of a boot that has not published yet."""
        if note is None or len(note) != _FORMAT.size:
            return cls(boot_id)
        noted_boot, last, mode = _FORMAT.unpack(note)
        return cls(boot_id, last, SequenceMode(mode)) if noted_boot == boot_id else cls(boot_id)
