"""A ``DynamicCache`` that starts with KV from the store and offers newly computed blocks to the store.

The cache does not trust the caller about the model's input. A hook on the forward pass calls ``announce`` with the actual tokens,
positions and mask of each pass. Blocks are stored under the keys of exactly these tokens; after unusual input nothing is stored.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import torch
from transformers import DynamicCache

from kvclient import BlockKey, InvalidArgument
from kvclient.engines.torch_blocks import KV
from kvclient.engines.transformers.forward_hooks import ForwardHooks
from kvclient.engines.transformers.input_tracker import InputTracker
from kvclient.engines.transformers.model_facts import ModelFacts
from kvclient.engines.transformers.prompts import Ids, Prompts
from kvclient.engines.transformers.sliding_window import SlidingWindowHistory
from kvclient.engines.transformers.writer import OfferedRun, StoredChain, Writer
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import hooks as hooks_metrics

_COPY_BELOW = 4
"""Offered KV smaller than this part of the cache is copied: a view would keep the whole old cache in memory."""


class CacheOwner(Protocol):
    """The methods of ``PrefixStore`` that a cache needs."""

    model: Any  # transformers is not typed
    facts: ModelFacts
    hooks: ForwardHooks
    writer: Writer
    incidents: LimitedLog
    background: bool
    stores: bool

    def changed(self) -> str:
        """Return why the model's KV no longer matches the namespace, or an empty string."""
        ...

    def trailing_pads(self, ids: Ids, prompt_columns: int) -> Ids:
        """Count the padding tokens at the end of each row."""
        ...


class StoredCache(DynamicCache):
    """The cache of one ``generate`` call, or of several turns of one conversation. Made by ``PrefixStore.cache``.

    A context manager: on exit it offers all full blocks that were not offered yet. Not thread-safe.
    """

    layers: list[Any]  # transformers is not typed

    def __init__(self, store: CacheOwner, prompts: Prompts, extras: dict[int, bytes]) -> None:
        super().__init__(config=store.model.config)
        self._store = store
        self._prompts = prompts
        self._extras = extras
        self._fed = InputTracker(prompts)
        self._chains = [StoredChain() for _ in range(prompts.rows)]
        self._offered = [0] * prompts.rows
        self._recorders: dict[int, SlidingWindowHistory] = {}
        self._off: str | None = None
        self._waiting: list[Future[None]] = []
        self._next_offer = 0  # in columns: no row has a new full block before this length
        self.loaded_tokens = 0
        """Leading columns that were loaded from the store."""
        self.hit_tokens = [0] * prompts.rows
        """Leading tokens that were loaded from the store, per row, without padding."""

    @property
    def store(self) -> CacheOwner:
        """The ``PrefixStore`` that made this cache."""
        return self._store

    @property
    def stored_keys(self) -> list[list[BlockKey]]:
        """Keys of the leading blocks that the store is known to hold, per row."""
        return [chain.keys[: chain.stored] for chain in self._chains]

    def leave(self, why: str) -> None:
        """Whether the cache is detached from the store."""
        self._off = why
        self._recorders.clear()

    # ---- loading ----
    def fill(self, layers: list[KV], columns: int, chains: list[StoredChain]) -> None:
        """Initialize the cache with KV from the store. Call it once, before any other method.

        Args:
            layers: ``[rows, heads, columns, dim]`` each; padding columns may hold any values.
            columns: number of columns.
            chains: the known state of each row's blocks in the store.
        """
        for number, (keys, values) in enumerate(layers):
            super().update(keys, values, number)
        self.loaded_tokens = columns
        self.hit_tokens = [max(0, columns - int(pad)) for pad in self._prompts.pads]
        self._chains = chains
        self._offered = [chain.stored for chain in chains]
        self._fed.loaded(columns, np.array(self._offered, np.int64), self._store.facts.layout.block_tokens)

    # ---- forward passes ----
    def announce(self, input_ids: torch.Tensor | None, given: Mapping[str, Any]) -> None:
        """Record a forward pass that is about to start. Called by the hook on the model.

        Args:
            input_ids: ``[batch, tokens]``.
            given: the other arguments of the forward pass.

        Raises:
            InvalidArgument: the loaded prefix belongs to other tokens than these.
        """
        if self._off is not None:
            return
        if hooked := self._store.hooks.appeared():
            self._other_pass_found(hooked)
            return
        if input_ids is not None and input_ids.ndim == 2 and not len(input_ids) % self._fed.rows and self._fed.fresh:
            self._widen(len(input_ids) // self._fed.rows)
        if self._fed.starts_over(input_ids, given):
            self._forget_prefix()
        if self._store.background and self._fed.columns >= self._next_offer:
            self.offer()
        if self.get_seq_length() != self._fed.columns:
            self._stop("a forward pass did not end, or passed by the hook")
        elif (reason := self._fed.take(input_ids, given)) is not None:
            self._stop(reason)
            if self._fed.contradicts:
                raise InvalidArgument(
                    "the cache holds the prefix of another prompt; pass the same token ids to PrefixStore.cache and to the model",
                    reason=reason,
                )

    def is_fed_anew(self, positions: torch.Tensor | None) -> bool:
        """Check whether a pass starts at the first token of each row regardless of the cache. Without positions: False."""
        return positions is not None and self.get_seq_length() > 0 and bool((positions.amin(-1) == 0).all())

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._off is None and torch.is_autocast_enabled(key_states.device.type):
            self._other_pass_found("computed under autocast")
        if self._off is None and self._store.facts.sliding[layer_idx]:
            recorder = self._recorders.setdefault(layer_idx, SlidingWindowHistory(self.layers[layer_idx].get_seq_length()))
            recorder.append(key_states, value_states)
        states: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return states

    # ---- storing ----
    def offer(self) -> None:
        """Offer to the writer all full blocks that were not offered yet. Store failures are not raised."""
        columns = self._fed.columns
        tokens = self._store.facts.layout.block_tokens
        self._next_offer = columns + int(((self._fed.pads - columns - 1) % tokens).min()) + 1
        if self._off is not None or not self._store.stores or not any(self._new_blocks(columns)):
            return
        if any(layer.get_seq_length() != columns for layer in self.layers):
            self._stop("the layers are of different lengths")
            return
        if changed := self._store.changed():
            self._stop(changed)
            return
        if (reason := self._fed.settle()) is not None:
            self._stop(reason)
            return
        blocks = self._new_blocks(columns - self._store.trailing_pads(self._fed.ids, self._prompts.columns))
        offers = [self._row_offer(row, count) for row, count in enumerate(blocks) if count]
        if not offers:
            return
        future = self._store.writer.offer(offers)
        if future is None:
            return
        self._waiting = [one for one in self._waiting if not one.done()] + [future]
        for row, count in enumerate(blocks):
            self._offered[row] += count
        done = min(self._first_column(row) for row in range(len(self._offered)))
        for recorder in self._recorders.values():
            recorder.drop_before(done)

    def commit(self, *, wait: bool = True) -> None:
        """Offer the remaining blocks. With ``wait``, return once all offered blocks are stored, skipped or late."""
        self.offer()
        if wait and self._waiting:
            self._store.writer.settle(self._waiting)
            self._waiting = [future for future in self._waiting if not future.done()]

    def _new_blocks(self, columns: int | np.ndarray[Any, np.dtype[np.int64]]) -> list[int]:
        """Count the full blocks per row that were not offered yet, given the number of columns (or one number per row)."""
        full = (columns - self._fed.pads) // self._store.facts.layout.block_tokens
        return [max(0, int(count) - offered) for count, offered in zip(full, self._offered, strict=True)]

    def _first_column(self, row: int) -> int:
        """Return the column of a row's first block that was not offered yet."""
        return int(self._fed.pads[row]) + self._offered[row] * self._store.facts.layout.block_tokens

    def _row_offer(self, row: int, blocks: int) -> OfferedRun:
        start = self._first_column(row)
        stop = start + blocks * self._store.facts.layout.block_tokens
        layers = [self._columns(number, row, start, stop) for number in range(len(self.layers))]
        tokens = self._fed.ids[row, start:stop].astype(np.uint32)
        return OfferedRun(self._chains[row], self._offered[row], tokens, self._extras, layers)

    def _columns(self, number: int, row: int, start: int, stop: int) -> KV:
        """Return the KV of some columns of a row in one layer as tensors that no one modifies any more."""
        layer, base = self.layers[number], 0
        keys, values = layer.keys, layer.values
        if self._store.facts.sliding[number]:
            recorder = self._recorders[number]
            (keys, values), base = recorder.window(), recorder.start
        part = slice(start - base, stop - base)
        pair = (keys.detach()[row : row + 1, :, part], values.detach()[row : row + 1, :, part])
        if (stop - start) * _COPY_BELOW < keys.shape[2]:
            return pair[0].clone(), pair[1].clone()
        return pair

    def _forget_prefix(self) -> None:
        """Discard the loaded KV: the upcoming pass is correct only on an empty cache, so the model computes everything.

        The store still holds the blocks, so the tracker keeps comparing the input with their tokens.
        """
        empty = DynamicCache(config=self._store.model.config).layers
        for old, new in zip(self.layers, empty, strict=True):
            if getattr(old, "record_past", False):  # assisted decoding requests it, so that it can crop past a sliding window
                new.activate_past_recording()
        self.layers = empty
        self._fed.forget_loaded()
        self.loaded_tokens, self.hit_tokens = 0, [0] * self._prompts.rows
        self._store.incidents.report(
            hooks_metrics.HOOK_PREFIX_UNUSED,
            "the model was fed its whole prompt (assisted decoding?): what was loaded is not used",
        )

    def _stop(self, reason: str) -> None:
        """Stop storing blocks of this cache."""
        self.leave(reason)
        self._store.incidents.report(hooks_metrics.HOOK_STORE_STOPPED, f"a cache is not stored any further: {reason}")

    def _other_pass_found(self, why: str) -> None:
        """Handle KV that depends on more than the weights, such as autocast. Detected here regardless of who enabled it.

        Raises:
            InvalidArgument: the loaded prefix was computed in another way; mixing both would give a wrong answer.
        """
        first = self.get_seq_length() == self.loaded_tokens
        self._stop(why)
        if first and self.loaded_tokens:
            raise InvalidArgument(
                "the loaded prefix was computed without autocast and hooks; create the cache under the same conditions",
                now=why,
            )

    # ---- other cache operations ----
    def _widen(self, times: int) -> None:
        """Repeat each row. For beams and several answers ``generate`` repeats its inputs, but not a cache."""
        if times > 1:
            super().batch_repeat_interleave(times)
            self._prompts = self._prompts.repeated(times)
            self._fed.widen(self._prompts)
            self._chains = [chain.copied() for chain in self._chains for _ in range(times)]
            self._offered = [offered for offered in self._offered for _ in range(times)]
            self.hit_tokens = [tokens for tokens in self.hit_tokens for _ in range(times)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._fed.fresh:
            self._widen(repeats)
        else:
            self._leave_rows("rows were repeated")
            super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._leave_rows("rows were picked")
        super().batch_select_indices(indices)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._leave_rows("beams were reordered")
        super().reorder_cache(beam_idx)

    def _leave_rows(self, why: str) -> None:
        """Offer the current blocks and stop storing, because the rows are about to change."""
        if self._off is None:
            self.offer()
            self.leave(why)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        columns = int(self.get_seq_length())  # assisted decoding of some versions passes numbers as tensors
        if self._off is not None or columns == self._fed.columns:
            return
        if columns < max(self._first_column(row) for row in range(self._fed.rows)):
            self._stop("cut back into blocks that were offered")
            return
        self._fed.truncate(columns)
        for recorder in self._recorders.values():
            recorder.truncate(columns)

    def reset(self) -> None:
        self._stop("reset")
        super().reset()

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return an independent copy with its own tensors, connected to the same store."""
        self.commit()  # the writer updates its chain state per cache; the copy would miss the updates
        other: Self = type(self)(self._store, self._prompts, self._extras)
        other.layers = copy.deepcopy(self.layers, memo)
        other._fed = copy.deepcopy(self._fed, memo)
        other._recorders = copy.deepcopy(self._recorders, memo)
        other._chains = [chain.copied() for chain in self._chains]
        other._offered = list(self._offered)
        other._off = self._off
        other.loaded_tokens, other.hit_tokens = self.loaded_tokens, list(self.hit_tokens)
        return other

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.commit(wait=not self._store.background)
