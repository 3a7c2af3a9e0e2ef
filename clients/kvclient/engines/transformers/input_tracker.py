"""Records the actual input of a model by column, and checks that it is storable: tokens at their own positions.

Recording must not slow down decoding, possibly on a GPU. Inputs stay on their device; ``settle`` copies them to the host and
checks them only when blocks are about to be stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvclient.engines.transformers.prompts import Ids, Prompts

_UNDERSTOOD = frozenset(
    {
        "input_ids",
        "attention_mask",
        "position_ids",
        "past_key_values",
        "cache_position",
        "labels",
        "logits_to_keep",
        "num_logits_to_keep",
    }
)
"""Tensor arguments of a forward pass that do not make KV depend on anything but tokens and their positions."""


@dataclass(frozen=True, slots=True)
class _Pass:
    """One forward pass that was not checked yet."""

    ids: torch.Tensor
    positions: torch.Tensor | None
    seen: torch.Tensor | None
    """Columns that the mask shows per row; None: all."""


class InputTracker:
    """The columns of a cache: first the loaded ones, then those that were fed to the model."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._ids: Ids = prompts.ids[:, :0]
        self._stored_ends = prompts.pads
        self._pending: list[_Pass] = []
        self._mask: torch.Tensor | None = None
        self.columns = 0
        """The length of the cache, including the current pass."""
        self.fresh = True
        """Whether nothing was fed yet."""
        self.contradicts = False
        """Whether the first pass did not prove that the loaded prefix belongs to this prompt."""

    @property
    def rows(self) -> int:
        """Sequences in the batch."""
        return self._prompts.rows

    @property
    def pads(self) -> Ids:
        """Leading columns of padding, per row."""
        return self._prompts.pads

    @property
    def ids(self) -> Ids:
        """Token ids ``[rows, columns]``, as of the last ``settle``."""
        return self._ids

    def loaded(self, columns: int, stored_blocks: Ids, block_tokens: int) -> None:
        """Start with columns that were loaded from the store.

        Args:
            columns: their number.
            stored_blocks: leading blocks that the store holds, per row. They may end after the loaded columns. Later blocks of a
                row are stored after them, so ``settle`` rejects other tokens at their columns than the prompt has.
            block_tokens: tokens per block.
        """
        self._ids = self._prompts.ids[:, :columns]
        self._stored_ends = self.pads + stored_blocks * block_tokens
        self.columns = columns

    def forget_loaded(self) -> None:
        """Start again without the loaded columns, before any input was fed."""
        self._ids = self._prompts.ids[:, :0]
        self.columns = 0

    def starts_over(self, ids: torch.Tensor | None, given: Mapping[str, Any]) -> bool:
        """Check whether the first pass starts at the first token although a prefix was loaded.

        Assisted decoding and chunked prefill of ``generate`` ignore the content of a cache.
        """
        if not (self.fresh and self.columns) or ids is None or ids.ndim != 2 or ids.shape[0] != self.rows:
            return False
        columns = np.arange(ids.shape[1])
        real = columns >= self.pads[:, None]
        positions = given.get("position_ids")
        if positions is not None:
            fits = positions.shape in {(1, ids.shape[1]), tuple(ids.shape)} and bool(real.any())
            return fits and bool(((tokens_here(positions) == columns - self.pads[:, None]) | ~real).all())
        fed, announced = tokens_here(ids), self._prompts.ids
        behind = announced[:, self.columns : self.columns + fed.shape[1]]
        goes_on = (fed[:, : behind.shape[1]] == behind).all()
        width = min(fed.shape[1], announced.shape[1])
        return not goes_on and bool((fed[:, :width] == announced[:, :width]).all())

    def take(self, ids: torch.Tensor | None, given: Mapping[str, Any]) -> str | None:
        """Record a forward pass that is about to start.

        Args:
            ids: ``[rows, tokens]``.
            given: the other arguments of the forward pass.

        Returns:
            Why its KV cannot be stored; None: storable, as far as can be determined without reading tensor values.
        """
        continues_loaded = self.fresh and self.columns > 0
        reason = self._recorded(ids, given)
        self.contradicts = continues_loaded and reason is not None
        return reason

    def _recorded(self, ids: torch.Tensor | None, given: Mapping[str, Any]) -> str | None:
        if ids is None or ids.ndim != 2 or ids.shape[0] != self.rows:
            return "no token ids, or another number of rows"
        if foreign := foreign_tensors(given):
            return f"the model was fed more than tokens: {', '.join(foreign)}"
        end = self.columns + ids.shape[1]
        positions, mask = given.get("position_ids"), given.get("attention_mask")
        if positions is not None and positions.shape not in {(1, ids.shape[1]), tuple(ids.shape)}:
            return "positions of another shape"
        if mask is not None and (not isinstance(mask, torch.Tensor) or mask.shape != (self.rows, end)):
            return "a mask of another shape"
        if self.pads.any() and (mask is None or positions is None):
            return "padded rows without their mask and positions"
        seen = None if mask is None else torch.count_nonzero(mask, 1)
        self._pending.append(_Pass(ids.detach().clone(), positions, seen))
        self._mask = mask
        begins, self.columns, first = self.columns, end, self.fresh
        self.fresh = False
        if not first or not begins:
            return None
        reason = self.settle()
        if reason is None and not self._as_announced(begins):
            reason = "other tokens than the store was asked for"
        return reason

    def _as_announced(self, begins: int) -> bool:
        """Check whether the first input continues the prompts after the loaded prefix."""
        stop = min(self.columns, self._prompts.columns)
        same = self._ids[:, begins:stop] == self._prompts.ids[:, begins:stop]
        padding = np.arange(begins, stop) < self.pads[:, None]
        return stop > begins and bool((same | padding).all())

    def settle(self) -> str | None:
        """Check all inputs since the last call and bring ``ids`` up to date.

        Returns:
            Why the KV cannot be stored; None: it is storable.
        """
        at = self._ids.shape[1]
        pending, self._pending = self._pending, []
        if not pending:
            return None
        self._ids = np.concatenate([self._ids, tokens_here(torch.cat([one.ids for one in pending], 1))], 1)
        for one in pending:
            end = at + one.ids.shape[1]
            if one.seen is not None and (tokens_here(one.seen) != end - np.minimum(self.pads, end)).any():
                return "a mask that is more than padding on the left"
            if one.positions is not None:
                columns = np.arange(at, end)
                wrong = tokens_here(one.positions) != columns - self.pads[:, None]
                if (wrong & (columns >= self.pads[:, None])).any():
                    return "positions that are not those of the tokens"
            at = end
        if self._mask is not None:
            shown = tokens_here(self._mask) != 0
            if (shown != (np.arange(shown.shape[1]) >= self.pads[:, None])).any():
                return "a mask that is more than padding on the left"
        if (self._ids < 0).any():
            return "token ids below 0"
        if not self._stored_as_announced():
            return "other tokens than those of blocks that the store holds"
        return None

    def _stored_as_announced(self) -> bool:
        """Check whether the columns of blocks that the store held before contain the tokens of the prompts."""
        stop = min(self._ids.shape[1], int(self._stored_ends.max()))
        columns = np.arange(stop)
        stored = (columns >= self.pads[:, None]) & (columns < self._stored_ends[:, None])
        return not (stored & (self._ids[:, :stop] != self._prompts.ids[:, :stop])).any()

    def widen(self, prompts: Prompts) -> None:
        """Replace the batch by one that repeats each of its rows, before any input was fed."""
        self._stored_ends = np.repeat(self._stored_ends, prompts.rows // self.rows)
        self._prompts = prompts
        self._ids = prompts.ids[:, : self.columns]

    def truncate(self, columns: int) -> None:
        """Crop to the first columns and drop the record of later input."""
        begins = self._ids.shape[1]
        kept = []
        for one in self._pending:
            part = max(0, min(one.ids.shape[1], columns - begins))
            begins += one.ids.shape[1]
            if part == one.ids.shape[1]:
                kept.append(one)
            elif part:
                positions = None if one.positions is None else one.positions[:, :part]
                seen = None if one.seen is None else one.seen - (one.ids.shape[1] - part)
                kept.append(_Pass(one.ids[:, :part], positions, seen))
        self._pending = kept
        self._ids = self._ids[:, :columns]
        self._mask = None if self._mask is None else self._mask[:, :columns]
        self.columns = columns


def foreign_tensors(given: Mapping[str, Any]) -> list[str]:
    """Return the names of arguments with tensors that may make KV depend on more than tokens and their positions."""
    return sorted(name for name, value in given.items() if name not in _UNDERSTOOD and _has_tensor(value))


def _has_tensor(value: object) -> bool:
    """Check whether an argument is, or contains, a tensor."""
    if isinstance(value, Mapping):
        value = value.values()
    if isinstance(value, Iterable) and not isinstance(value, torch.Tensor | str | bytes):
        return any(isinstance(part, torch.Tensor) for part in value)
    return isinstance(value, torch.Tensor)


def tokens_here(tensor: torch.Tensor) -> Ids:
    """Convert an integer tensor to an int64 array."""
    array: Ids = tensor.detach().to("cpu", torch.int64).numpy()
    return array
