"""Blocks that wait for write-back, or are being written. Guarded by the table's lock."""

from __future__ import annotations

from collections import deque

from kvstore.node.state.model import Block


class WritebackQueue:
    """First in, first out: one thread takes blocks, several report them written, in the same order."""

    __slots__ = ("_waiting", "enqueued", "finished", "in_write", "nbytes")

    def __init__(self) -> None:
        self._waiting: deque[Block] = deque()
        self.nbytes = 0
        """Bytes of blocks that wait or are being written."""
        self.in_write = 0
        """Blocks taken and not yet finished."""
        self.enqueued = 0
        """Blocks ever added."""
        self.finished = 0
        """Number of finished blocks: always the first ones added."""

    def __len__(self) -> int:
        return len(self._waiting) + self.in_write

    @property
    def empty(self) -> bool:
        """Whether no block waits."""
        return not self._waiting

    def add(self, block: Block) -> None:
        """Add a block."""
        self._waiting.append(block)
        self.enqueued += 1
        self.nbytes += block.namespace.shape.block_bytes

    def take(self, max_blocks: int, max_bytes: int) -> list[Block]:
        """Take the oldest blocks, all of one namespace; at least one, if there is one."""
        taken: list[Block] = []
        space = max_bytes
        while self._waiting and len(taken) < max_blocks and (space > 0 or not taken):
            if taken and self._waiting[0].namespace is not taken[0].namespace:
                break
            block = self._waiting.popleft()
            space -= block.namespace.shape.block_bytes
            taken.append(block)
        self.in_write += len(taken)
        return taken

    def take_all(self) -> list[Block]:
        """Take all blocks that wait."""
        taken = list(self._waiting)
        self._waiting.clear()
        self.in_write += len(taken)
        return taken

    def finish(self, block: Block) -> None:
        """Note that a block that was taken was written, or was given up."""
        self.nbytes -= block.namespace.shape.block_bytes
        self.in_write -= 1
        self.finished += 1
