"""Blocks whose labels could not be read, and when to read them again. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from kvclient.events.block_groups import GroupBlockId
from kvstore.core.types import NamespaceId

Block = tuple[NamespaceId, GroupBlockId]
"""A label namespace, and a block in it."""

PAUSES_S: Final = (30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1_920.0, 3_600.0)
"""After the first failure, the second one, and so on. The last pause repeats."""


class LabelRetries:
    """Remembers failures, each block's with a longer pause than before.

    Args:
        most_blocks: blocks that are remembered. Beyond that, the oldest is forgotten.
    """

    def __init__(self, most_blocks: int) -> None:
        self._most = most_blocks
        self._failures: OrderedDict[Block, int] = OrderedDict()
        self._due_s: list[OrderedDict[Block, float]] = [OrderedDict() for _ in PAUSES_S]
        """By pause: when blocks that wait are due. Equal pauses end in the order of their begin."""
        self.forgotten = 0
        """Blocks that were forgotten, in total."""

    def __len__(self) -> int:
        return len(self._failures)

    def failed(self, block: Block, now_s: float) -> bool:
        """Record a failure. Returns whether it is the first of this block."""
        before = self._failures.get(block, 0)
        self._stop_waiting(block, before)
        self._failures[block] = min(before + 1, len(PAUSES_S))
        pause = self._failures[block] - 1
        self._due_s[pause][block] = now_s + PAUSES_S[pause]
        if len(self._failures) > self._most:
            oldest, failures = self._failures.popitem(last=False)
            self._stop_waiting(oldest, failures)
            self.forgotten += 1
        return not before

    def succeeded(self, block: Block) -> None:
        """Forget a block: its label is known, or the store dropped it."""
        self._stop_waiting(block, self._failures.pop(block, 0))

    def is_waiting(self, block: Block) -> bool:
        """Whether a block failed and is not due yet; see ``take_due``."""
        failures = self._failures.get(block, 0)
        return failures > 0 and block in self._due_s[failures - 1]

    def take_due(self, now_s: float, most: int) -> Iterator[Block]:
        """Yield blocks that are due now. They no longer wait, but their failures are remembered."""
        for waiting in self._due_s:
            while waiting and most > 0:
                block, due_s = next(iter(waiting.items()))
                if due_s > now_s:
                    break
                del waiting[block]
                most -= 1
                yield block

    def _stop_waiting(self, block: Block, failures: int) -> None:
        if failures:
            self._due_s[failures - 1].pop(block, None)
