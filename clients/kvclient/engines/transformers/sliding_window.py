"""What a sliding-window layer forgets before it is stored.

Such a layer keeps the last tokens only, but a block holds the KV of all of its tokens in every layer: whoever continues elsewhere
may stand at any of them. So what passes through the layer is kept here until its blocks have been offered to the store.
"""

from __future__ import annotations

import torch

from kvclient import InvalidArgument
from kvclient.engines.torch_blocks import KV


class SlidingWindowHistory:
    """KV of columns ``[start, end)`` of one layer, as they came."""

    def __init__(self, start: int) -> None:
        self.start = start
        self._chunks: list[KV] = []

    @property
    def end(self) -> int:
        """The column behind the last one."""
        return self.start + sum(int(keys.shape[2]) for keys, _ in self._chunks)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Takes the next columns: ``[batch, heads, tokens, dim]``, which nobody may change afterwards."""
        self._chunks.append((keys.detach(), values.detach()))

    def window(self) -> KV:
        """All that is held, as one pair of tensors ``[batch, heads, end - start, dim]``.

        Raises:
            InvalidArgument: nothing is held.
        """
        if not self._chunks:
            raise InvalidArgument("nothing is recorded", start=self.start)
        if len(self._chunks) > 1:
            keys, values = zip(*self._chunks, strict=True)
            self._chunks = [(torch.cat(keys, 2), torch.cat(values, 2))]
        return self._chunks[0]

    def drop_before(self, column: int) -> None:
        """Forgets what lies before a column; memory is freed."""
        gone = min(column, self.end) - self.start
        if gone > 0:
            keys, values = self.window()
            self._chunks = [(keys[:, :, gone:].clone(), values[:, :, gone:].clone())]
            self.start += gone

    def truncate(self, end: int) -> None:
        """Forgets what lies at or behind a column.

        Raises:
            InvalidArgument: the column lies before what is held.
        """
        if end < self.start:
            raise InvalidArgument("cut before the first column that is held", start=self.start, end=end)
        if end < self.end:
            keys, values = self.window()
            self._chunks = [(keys[:, :, : end - self.start], values[:, :, : end - self.start])]
