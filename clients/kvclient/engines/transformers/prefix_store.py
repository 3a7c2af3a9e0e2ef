"""Connection of one transformers model to the store: makes the caches that ``generate`` uses."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch.nn.functional import pad

from kvclient import CacheSpec, InvalidArgument, LoadHandle, Lookup
from kvclient.engines.options import HookOptions
from kvclient.engines.torch_blocks import KV, import_blocks
from kvclient.engines.transformers.cache import StoredCache
from kvclient.engines.transformers.forward_hooks import ForwardHooks, ForwardObserverHook
from kvclient.engines.transformers.input_tracker import foreign_tensors, tokens_here
from kvclient.engines.transformers.model_facts import ModelFacts, has_adapters, study
from kvclient.engines.transformers.prompts import Ids, Prompts, common_columns, read_prompts, usable_blocks
from kvclient.engines.transformers.row_lookups import look_up_rows
from kvclient.engines.transformers.weights import fingerprint, weights_digest
from kvclient.engines.transformers.writer import StoredChain, Writer, extras_of
from kvstore.core.clock import MonotonicClock
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import hooks as hooks_metrics

_OWN_OPTIONS = ("block_tokens", "background", "max_pending_bytes")
_LOADS_AT_ONCE = 16
"""Batch rows whose blocks are loaded concurrently."""
_LEAST_S = 0.001


class PrefixStore:
    """Connects one model to the store. Create it after forking.

    Thread-safe, except for operations that the model itself does not support from several threads.

    A context manager: on exit it stores the blocks that are still queued and detaches from the model.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401  # transformers is not typed
        facts: ModelFacts,
        spec: CacheSpec,
        options: HookOptions,
        *,
        background: bool,
        max_pending_bytes: int,
    ) -> None:
        """See ``connect``."""
        self.model = model
        self.facts = facts
        self.options = options
        self.background = background
        self.stores = options.store
        self._fingerprint = fingerprint(model)
        self.client = options.connect(spec)
        """The client of the namespace, for example to look up blocks or to wait until they are durable."""
        self._clock = MonotonicClock()
        self.incidents = LimitedLog(logging.getLogger("kvclient"), options.client_options().log_interval_s, self._clock.now_s)
        # a concurrent lookup must find this entry instead of raising KeyError
        self.incidents.counters.add(hooks_metrics.HOOK_LOADED_TOKENS, 0)
        deadline_s = options.store_deadline_s
        self.writer = Writer(self.client, facts.layout, self.incidents, deadline_s, max_pending_bytes, self._clock.now_s)
        self.hooks = ForwardHooks(model)
        self._watch = model.register_forward_pre_hook(ForwardObserverHook(self.before_forward), with_kwargs=True)

    @classmethod
    def connect(
        cls,
        model: Any,  # noqa: ANN401
        options: HookOptions | None = None,
        /,
        *,
        block_tokens: int = 64,
        background: bool = True,
        max_pending_bytes: int = 1 << 30,
        **given: Any,  # noqa: ANN401
    ) -> Self:
        """Connect a model to the store.

        Args:
            model: a decoder-only model of transformers, with its weights.
            options: the options common to all hooks; None: use ``given``.
            block_tokens: tokens per block. Processes that share KV must use the same value.
            background: store in a thread while the model runs; False: store when a cache is closed or committed.
            max_pending_bytes: limit of the KV queued for storing; further blocks are skipped while the queue is full.
            **given: fields of ``HookOptions`` by name, e.g. ``metadata="127.0.0.1:7400"``.

        Raises:
            InvalidArgument: an option is invalid, or KV of this model cannot be stored; the message gives the reason.
            KVStoreError: the store does not answer, and ``require_store`` is set.
        """
        if options is not None and given:
            raise InvalidArgument("pass a HookOptions or options by name, not both", also=sorted(given)[0])
        options = HookOptions.from_mapping(given, _OWN_OPTIONS) if options is None else options
        facts = study(model, block_tokens)
        return cls(
            model, facts, _spec(model, facts, options), options, background=background, max_pending_bytes=max_pending_bytes
        )

    @property
    def spec(self) -> CacheSpec:
        """The namespace."""
        return self.client.spec

    # ---- caches ----
    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run ``model.generate`` with a cache that starts with the longest stored prefix, and store the computed KV.

        Args:
            input_ids: ``[batch, tokens]``, padded on the left.
            attention_mask: 0 at padding; None: no padding, even if the ids contain padding tokens.
            **kwargs: for ``model.generate``; ``prefill_chunk_size`` does not support several answers per prompt.

        Returns:
            What ``model.generate`` returns.
        """
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if why := _no_place_for_a_cache(self.model, kwargs):
            self.incidents.report(hooks_metrics.HOOK_BYPASSED, f"store bypassed: {why}")
            return self.model.generate(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        with self.cache(input_ids, attention_mask) as cache:
            if chunk := _take_chunk_size(self.model, kwargs):
                self._prefill(cache, input_ids, attention_mask, chunk)
            return self.model.generate(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, **kwargs)

    @torch.no_grad()
    def _prefill(self, cache: StoredCache, ids: torch.Tensor, mask: torch.Tensor, chunk: int) -> None:
        """Feed all but the last token in chunks of the given size.

        ``generate`` itself cannot chunk the prefill of a non-empty cache.
        """
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        for start in range(cache.loaded_tokens, ids.shape[1] - 1, chunk):
            stop = min(start + chunk, ids.shape[1] - 1)
            self.model(
                input_ids=ids[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=positions[:, start:stop],
                past_key_values=cache,
                use_cache=True,
            )

    def cache(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, *, extra: bytes = b"") -> StoredCache:
        """Return a cache for ``generate`` (or the model itself) with the longest prefix that the store has for all rows.

        Pass the same complete ids and mask to ``generate``.

        Args:
            input_ids: ``[batch, tokens]``, padded on the left.
            attention_mask: 0 at padding; None: no padding.
            extra: other data that KV depends on (``kvclient.encode_extra``); KV is not shared between different values.

        Raises:
            InvalidArgument: the ids or the mask are invalid.
        """
        mask = None if attention_mask is None else tokens_here(attention_mask)
        prompts = read_prompts(tokens_here(input_ids), mask)
        extras = extras_of(extra)
        cache = StoredCache(self, prompts, extras)
        if why := self.unfit():
            self.incidents.report(hooks_metrics.HOOK_BYPASSED, f"store bypassed: {why}")
            cache.leave(why)
        elif self.options.load:
            self._load(cache, prompts, extras)
        return cache

    def unfit(self) -> str:
        """Return why the model, in its current state and autocast mode, must not use the store; empty: it may."""
        if self.model.training:
            return "the model is in training mode"
        if has_adapters(self.model):
            return "adapters were attached to the model"
        if any(torch.is_autocast_enabled(kind) for kind in {device.type for device in self.facts.devices}):
            return "autocast is on, which changes the KV"
        return self.changed()

    def changed(self) -> str:
        """Return why the KV that the model computes does not match the namespace; empty: it does."""
        if fingerprint(self.model) != self._fingerprint:
            return "the weights are not those of connect: connect again"
        return self.hooks.foreign()

    def _load(self, cache: StoredCache, prompts: Prompts, extras: dict[int, bytes]) -> None:
        """Fill a cache from the store; a miss leaves it empty."""
        count = self.incidents.counters.add
        tokens = self.facts.layout.block_tokens
        wanted = [usable_blocks(prompts, row, tokens) for row in range(prompts.rows)]
        count(hooks_metrics.HOOK_PROMPTS, prompts.rows)
        count(hooks_metrics.HOOK_PROMPT_TOKENS, prompts.ids.size - int(prompts.pads.sum()))
        chains = [
            StoredChain(self.client.keys(prompts.tokens(row)[: blocks * tokens].astype(np.uint32), extras))
            for row, blocks in enumerate(wanted)
        ]
        lookups = self._look_up(chains)
        columns = common_columns(prompts, [lookup.hit_blocks for lookup in lookups], tokens)
        if not columns:
            return
        needed = [-(-max(0, columns - int(begins)) // tokens) for begins in prompts.pads]
        memories = self._load_rows(lookups, chains, needed)
        columns = common_columns(prompts, [chain.stored for chain in chains], tokens)
        if not columns:
            return
        cache.fill(self._join(memories, prompts, columns), columns, chains)
        count(hooks_metrics.HOOK_LOADED_TOKENS, sum(cache.hit_tokens))

    def _look_up(self, chains: Sequence[StoredChain]) -> list[Lookup]:
        """Return the hit of each row. Without an answer of an index, treat every block as a possible hit on this host's node."""
        found = look_up_rows(
            [chain.keys for chain in chains],
            lambda keys, deadline_s: self.client.lookup(keys, deadline_s=deadline_s),
            self.options.lookup_deadline_s,
            self._clock.now_s,
        )
        if late := found.count(None):
            self.incidents.report(
                hooks_metrics.HOOK_LOOKUPS_LATE, "rows of a batch were not looked up within lookup_deadline_s", amount=late
            )
        return [
            lookup
            if lookup is not None and lookup.error is None and self.options.metadata
            else Lookup(chain.keys, hit_blocks=len(chain.keys))
            for chain, lookup in zip(chains, found, strict=True)
        ]

    def _load_rows(self, lookups: Sequence[Lookup], chains: Sequence[StoredChain], needed: Sequence[int]) -> list[torch.Tensor]:
        """Load the first blocks of each row, several rows concurrently; ``StoredChain.stored`` says how many were loaded."""
        memories = [self.facts.layout.allocate(blocks) for blocks in needed]
        end_s = self._clock.now_s() + self.options.load_deadline_s
        for first in range(0, len(memories), _LOADS_AT_ONCE):
            some = range(first, min(len(memories), first + _LOADS_AT_ONCE))
            handles: list[tuple[int, LoadHandle]] = []
            for row in some:
                if needed[row]:
                    part = lookups[row].part(0, needed[row])
                    deadline_s = max(_LEAST_S, end_s - self._clock.now_s())
                    handles.append((row, self.client.start_load(part, memories[row], deadline_s=deadline_s, layerwise=False)))
            for row, handle in handles:
                chains[row].stored = handle.result().hit_blocks
        return memories

    def _join(self, memories: Sequence[torch.Tensor], prompts: Prompts, columns: int) -> list[KV]:
        """Combine the rows' blocks to ``[rows, heads, columns, dim]`` per layer, with zeros at padding."""
        rows: list[list[KV]] = []
        for memory, begins in zip(memories, np.minimum(prompts.pads, columns).tolist(), strict=True):
            layers = import_blocks(memory, self.facts.layout, tokens=columns - begins, devices=self.facts.devices)
            rows.append([(_padded(keys, begins), _padded(values, begins)) for keys, values in layers])
        if len(rows) == 1:
            return rows[0]
        return [
            (torch.cat([row[layer][0] for row in rows]), torch.cat([row[layer][1] for row in rows]))
            for layer in range(len(rows[0]))
        ]

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """Tell the cache which input the model is about to receive.

        Returns:
            Replacement arguments, if the given ones would produce a wrong answer.
        """
        cache = kwargs.get("past_key_values")
        if not isinstance(cache, StoredCache) or cache.store is not self:
            return None
        if kwargs.get("use_cache") is False and cache.is_fed_anew(kwargs.get("position_ids")):
            self.incidents.report(hooks_metrics.HOOK_BYPASSED, "use_cache=False: everything is computed, the cache is unchanged")
            return args, {**kwargs, "past_key_values": None}
        ids = kwargs.get("input_ids", args[0] if args else None)
        unnamed = {f"argument {number}": value for number, value in enumerate(args) if number}
        cache.announce(ids, {**kwargs, **unnamed})
        return None

    def trailing_pads(self, ids: Ids, prompt_columns: int) -> Ids:
        """Count the tokens at the end of each row that only pad it because it ended before the other rows."""
        generated = ids[:, prompt_columns:]
        idle = np.isin(generated, list(self.facts.pad_ids))
        run = np.where(idle.all(axis=1), idle.shape[1], np.argmin(idle[:, ::-1], axis=1)) if idle.size else np.zeros(len(ids))
        return np.maximum(run.astype(np.int64) - 1, 0)  # the first of them may be the end-of-sequence token itself

    # ---- lifecycle ----
    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all queued blocks are stored or skipped; other hosts find them shortly afterwards. False: timeout."""
        return self.writer.flush(timeout_s)

    def stats(self) -> dict[str, int]:
        """Return totals by name: those of the hook (``hook_…``) and of its client."""
        return {**self.client.stats(), **self.incidents.counters.snapshot()}

    def close(self) -> None:
        """Store the queued blocks and detach from the model. Existing caches continue without the store."""
        self._watch.remove()
        self.writer.close()
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _no_place_for_a_cache(model: Any, given: dict[str, Any]) -> str:  # noqa: ANN401
    """Return why ``generate`` would fail or give wrong results with our cache; empty: it works."""
    if not given.get("use_cache", _configured(model, given, "use_cache", True)):
        return "use_cache=False"
    kind = given.get("cache_implementation") or _configured(model, given, "cache_implementation", None)
    if kind not in {None, "hybrid"}:  # some checkpoints contain the latter, and transformers ignores it
        return f"a cache of another kind is asked for: {kind}"
    inputs = {name: value for name, value in given.items() if not hasattr(model.generation_config, name)}
    if foreign := foreign_tensors(inputs):
        return f"the model is fed more than tokens: {', '.join(foreign)}"
    return ""


def _configured(model: Any, given: dict[str, Any], name: str, default: object) -> object:  # noqa: ANN401
    """Return the first value set for an option: in the call's ``generation_config``, else in the model's."""
    for config in (given.get("generation_config"), model.generation_config):
        value = getattr(config, name, None)
        if value is not None:
            return value
    return default


def _take_chunk_size(model: Any, given: dict[str, Any]) -> int | None:  # noqa: ANN401
    """Remove the prefill chunk size from the arguments of ``generate`` and return it; None: no chunks."""
    config = given.get("generation_config") or model.generation_config
    size: int | None = given.pop("prefill_chunk_size", config.prefill_chunk_size)
    if config.prefill_chunk_size:
        given["generation_config"] = copy.deepcopy(config)
        given["generation_config"].prefill_chunk_size = None
    return size


def _padded(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """Prepend columns of zeros to ``[1, heads, tokens, dim]``."""
    return pad(tensor, (0, 0, columns, 0)) if columns else tensor


def _spec(model: Any, facts: ModelFacts, options: HookOptions) -> CacheSpec:  # noqa: ANN401
    """Return the namespace of a model: its configuration, shapes and weights.

    The model's name counts only if it is needed to identify the weights.

    Raises:
        InvalidArgument: neither a name nor the weights identify the model.
    """
    layout = f"transformers/config:{facts.config_digest}"
    if not options.weights_epoch:  # equal weights share KV, regardless of their path on each host
        return facts.layout.spec(type(model).__name__, options.with_epoch(f"xxh3:{weights_digest(model)}"), layout)
    name = options.model or getattr(model.config, "_name_or_path", "")
    if not name:
        raise InvalidArgument("weights_epoch does not identify a model: set `model` too")
    return facts.layout.spec(name, options, layout)
