"""Recorder of the KV that a sliding-window layer drops before it is stored.

Such a layer keeps only the last tokens. A block must hold the KV of all its tokens in every layer, because another engine may
resume at any of them. The recorder therefore keeps all KV that passes through the layer until its blocks are offered to the
store.
"""

from __future__ import annotations

import torch

from kvclient import InvalidArgument
from kvclient.engines.torch_blocks import KV


class SlidingWindowHistory:
    """KV of columns ``[start, end)`` of one layer, in order of arrival."""

    def __init__(self, start: int) -> None:
        self.start = start
        self._chunks: list[KV] = []

    @property
    def end(self) -> int:
        """The column after the last recorded one."""
        return self.start + sum(int(keys.shape[2]) for keys, _ in self._chunks)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append columns, ``[batch, heads, tokens, dim]``. The caller must not modify them afterwards."""
        self._chunks.append((keys.detach(), values.detach()))

    def window(self) -> KV:
        """Return all recorded KV as one pair of tensors ``[batch, heads, end - start, dim]``.

        Raises:
            InvalidArgument: nothing is recorded.
        """
        if not self._chunks:
            raise InvalidArgument("the window is empty: no KV was recorded", start=self.start)
        if len(self._chunks) > 1:
            keys, values = zip(*self._chunks, strict=True)
            self._chunks = [(torch.cat(keys, 2), torch.cat(values, 2))]
        return self._chunks[0]

    def drop_before(self, column: int) -> None:
        """Drop all columns before the given one and free their memory."""
        gone = min(column, self.end) - self.start
        if gone > 0:
            keys, values = self.window()
            self._chunks = [(keys[:, :, gone:].clone(), values[:, :, gone:].clone())]
            self.start += gone

    def truncate(self, end: int) -> None:
        """Drop the given column and all later ones.

        Raises:
            InvalidArgument: the column is before the first recorded one.
        """
        if end < self.start:
            raise InvalidArgument("end is before the first recorded column", start=self.start, end=end)
        if end < self.end:
            keys, values = self.window()
            self._chunks = [(keys[:, :, : end - self.start], values[:, :, : end - self.start])]
