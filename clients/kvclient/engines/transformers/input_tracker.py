"""What a model was really fed, column by column, and whether that is what blocks are made of: tokens at their own positions.

Feeding goes on at the pace of decoding, maybe on a GPU: what is fed is kept where it is, and brought here and checked
(``settle``) only when blocks are about to be stored.
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
"""Arguments of a forward pass that are tensors and do not make KV depend on anything but tokens and their positions."""


@dataclass(frozen=True, slots=True)
class _Pass:
    """One forward pass, not yet looked at."""

    ids: torch.Tensor
    positions: torch.Tensor | None
    seen: torch.Tensor | None
    """How many columns the mask shows each row; None: all."""


class InputTracker:
    """The columns of a cache: first those from the store, then those that the model was fed."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._ids: Ids = prompts.ids[:, :0]
        self._pending: list[_Pass] = []
        self._mask: torch.Tensor | None = None
        self.columns = 0
        """How long the cache is, or will be when the pass under way has ended."""
        self.fresh = True
        """Whether nothing was fed yet."""
        self.contradicts = False
        """The first pass showed that what came from the store belongs to another prompt."""

    @property
    def rows(self) -> int:
        """Sequences of the batch."""
        return self._prompts.rows

    @property
    def pads(self) -> Ids:
        """Leading columns of padding, a row."""
        return self._prompts.pads

    @property
    def ids(self) -> Ids:
        """Token ids ``[rows, columns]``, as of the last ``settle``."""
        return self._ids

    def loaded(self, columns: int) -> None:
        """The first columns are from the store."""
        self._ids = self._prompts.ids[:, :columns]
        self.columns = columns

    def starts_over(self, ids: torch.Tensor | None, given: Mapping[str, Any]) -> bool:
        """Whether the first pass begins with the first token, as if nothing had come from the store.

        Assisted decoding and prefill in chunks, as ``generate`` does them, take no notice of what a cache holds.
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
        """The model is about to be fed.

        Args:
            ids: ``[rows, tokens]``.
            given: the other arguments of the pass.

        Returns:
            Why its KV cannot be stored; None: as far as can be told without looking at values, it can.
        """
        if ids is None or ids.ndim != 2 or ids.shape[0] != self.rows:
            return "no token ids, or another number of rows"
        foreign = sorted(name for name, value in given.items() if name not in _UNDERSTOOD and _has_tensor(value))
        if foreign:
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
        self.contradicts = reason is not None
        return reason

    def _as_announced(self, begins: int) -> bool:
        """Whether what was fed first is how the prompts go on behind what came from the store."""
        stop = min(self.columns, self._prompts.columns)
        same = self._ids[:, begins:stop] == self._prompts.ids[:, begins:stop]
        padding = np.arange(begins, stop) < self.pads[:, None]
        return stop > begins and bool((same | padding).all())

    def settle(self) -> str | None:
        """Looks at all that was fed since the last time; ``ids`` are whole then.

        Returns:
            Why the KV cannot be stored; None: it can.
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
        return None

    def widen(self, prompts: Prompts) -> None:
        """The batch is another one, of which nothing was fed yet."""
        self._prompts = prompts
        self._ids = prompts.ids[:, : self.columns]

    def truncate(self, columns: int) -> None:
        """The cache was cut to its first columns; what was fed last is forgotten."""
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


def _has_tensor(value: object) -> bool:
    """Whether an argument is, or holds, a tensor."""
    if isinstance(value, Mapping):
        value = value.values()
    if isinstance(value, Iterable) and not isinstance(value, torch.Tensor | str | bytes):
        return any(isinstance(part, torch.Tensor) for part in value)
    return isinstance(value, torch.Tensor)


def tokens_here(tensor: torch.Tensor) -> Ids:
    """A tensor of integers as an array of int64."""
    array: Ids = tensor.detach().to("cpu", torch.int64).numpy()
    return array
