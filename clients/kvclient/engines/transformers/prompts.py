"""Batches of prompts: the start of each row, and how many leading columns all rows can load from the store. No I/O.

A batch is a matrix of token ids, padded on the left: row ``r`` has ``pads[r]`` columns of padding, then its tokens. A cache has
one length for all rows, so the hook loads whole *columns*, as many as every row can provide. Padding columns need no KV because
no token attends to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvclient import InvalidArgument

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prompts:
    """The token ids of a batch.

    Attributes:
        ids: ``[rows, columns]``.
        pads: leading columns of each row that are padding.
    """

    ids: Ids
    pads: npt.NDArray[np.int64]

    @property
    def rows(self) -> int:
        """Sequences in the batch."""
        return int(self.ids.shape[0])

    @property
    def columns(self) -> int:
        """Tokens per row, including padding."""
        return int(self.ids.shape[1])

    def tokens(self, row: int) -> Ids:
        """Return a row without its padding."""
        part: Ids = self.ids[row, self.pads[row] :]
        return part

    def repeated(self, times: int) -> Prompts:
        """Repeat each row consecutively, as ``generate`` does for beams or several answers."""
        return self.picked(np.repeat(np.arange(self.rows), times))

    def picked(self, rows: npt.NDArray[np.int64]) -> Prompts:
        """Select rows in the given order."""
        return Prompts(self.ids[rows], self.pads[rows])


def read_prompts(ids: npt.NDArray[np.integer], mask: npt.NDArray[np.integer] | None) -> Prompts:
    """Validate the input that a caller is about to feed to the model.

    Args:
        ids: ``[rows, columns]`` token ids.
        mask: ``[rows, columns]``: 0 at padding, which must be on the left; None: no padding.

    Raises:
        InvalidArgument: wrong shape, no rows, a negative id, or padding that is not on the left.
    """
    if ids.ndim != 2 or not ids.shape[0]:
        raise InvalidArgument("token ids must have the shape [rows, columns], with at least one row", shape=ids.shape)
    own: Ids = ids.astype(np.int64, copy=True)  # the caller may modify its array
    if (own < 0).any():
        raise InvalidArgument("a token id is negative", least=int(own.min()))
    if mask is None:
        return Prompts(own, np.zeros(len(own), np.int64))
    if mask.shape != ids.shape:
        raise InvalidArgument("the attention mask must have the shape of the token ids", mask=mask.shape, ids=ids.shape)
    seen = mask != 0
    pads: Ids = ids.shape[1] - seen.sum(axis=1, dtype=np.int64)
    if not (seen == (np.arange(ids.shape[1]) >= pads[:, None])).all():
        raise InvalidArgument("padding must be on the left: tokenizer(..., padding_side='left')")
    return Prompts(own, pads)


def usable_blocks(prompts: Prompts, row: int, block_tokens: int) -> int:
    """Return the full blocks of a row that may be loaded. The last token is always computed, because its logits are needed."""
    tokens = prompts.columns - int(prompts.pads[row])
    return max(0, tokens - 1) // block_tokens


def common_columns(prompts: Prompts, hit_blocks: Sequence[int], block_tokens: int) -> int:
    """Return the leading columns that every row can load from its hit; 0 if all of them are padding.

    Args:
        prompts: the batch.
        hit_blocks: leading blocks that are hits, per row.
        block_tokens: tokens per block.
    """
    ends = prompts.pads + np.asarray(hit_blocks, np.int64) * block_tokens
    columns = min(int(ends.min()), prompts.columns - 1)
    return columns if columns > int(prompts.pads.min()) else 0
