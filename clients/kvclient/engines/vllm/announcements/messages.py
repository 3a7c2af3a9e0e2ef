"""KV events of vLLM for blocks of this engine that the store holds.

Each event has vLLM's hashes, tokens, extra keys and kind of KV cache group, like those for pages of a GPU. The medium is ``CPU``
for DRAM and ``STORAGE`` for NVMe, on any host of the store. There is one event per run of blocks, medium and KV cache group.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Final

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_GPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    DEFAULT_NONE_HASH_SEED,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_none_hash_seed,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvclient.engines.vllm.announcements.announcer import Announcement, ordered_parts
from kvclient.engines.vllm.announcements.engine_run import EngineRun
from kvclient.events.block_groups import GroupBlockId
from kvstore.core.types import Tier

MEDIA: Final = {Tier.HBM: MEDIUM_GPU, Tier.DRAM: MEDIUM_CPU, Tier.NVME: MEDIUM_STORAGE}
OWNER: Final = "kvstore"

GroupKind = tuple[str, int | None]
"""vLLM's kind of a KV cache group, and its window."""


def group_kinds(kv_cache_config: Any) -> list[GroupKind]:  # noqa: ANN401
    """Return the kind of each KV cache group."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return [(str(get_kv_cache_spec_kind(spec).value), get_kv_cache_spec_sliding_window(spec)) for spec in specs]


def engine_hash_name(vllm_config: Any) -> str:  # noqa: ANN401
    """Name algorithm and seed of vLLM's block hashes; empty: the seed is random, so each engine computes other hashes."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    function = get_hash_fn_by_name(algorithm)
    seed = resolve_none_hash_seed(function)
    if seed != resolve_none_hash_seed(function):
        return ""
    return algorithm if seed == DEFAULT_NONE_HASH_SEED else f"{algorithm}-{hashlib.sha256(seed.encode()).hexdigest()[:8]}"


def engine_run(
    request: Any,  # noqa: ANN401
    first: int,
    ids: Sequence[GroupBlockId],
    block_tokens: int,
    hashes: int = 1,
    step: int = 1,
    **tier: Any,  # noqa: ANN401
) -> EngineRun | None:
    """Return consecutive blocks of a request; None: vLLM has not hashed all of them.

    Args:
        request: vLLM's.
        first: position of the first block.
        ids: of the blocks.
        block_tokens: tokens of a block of the store.
        hashes: vLLM's hashes of a block of the store.
        step: of these, each ``step``-th ends a page.
        **tier: ``keys`` and ``group``.
    """
    start, stop = first * hashes, (first + len(ids)) * hashes
    raw = request.block_hashes[start:stop]
    if len(raw) < stop - start or not ids:
        return None
    tokens = array("I", request.all_token_ids[first * block_tokens : (first + len(ids)) * block_tokens])
    lora = request.lora_request
    return EngineRun(
        first,
        tuple(ids),
        tuple(bytes(one) for one in raw[step - 1 :: step]),
        bytes(request.block_hashes[start - 1]) if start else b"",
        tokens,
        lora.adapter_id if lora is not None else None,
        lora.name if lora is not None else "",
        _extra_keys(request, first * block_tokens, len(tokens), block_tokens * step // hashes),
        **tier,
    )


def _extra_keys(request: Any, start: int, tokens: int, page_tokens: int) -> tuple[Any, ...] | None:  # noqa: ANN401
    """Return what entered the hash of each page, as vLLM's own events have it."""
    if request.lora_request is None and not request.mm_features and not request.cache_salt:
        return None
    pages = range(start, start + tokens, page_tokens)
    found = [generate_block_hash_extra_keys(request, page, page + page_tokens, 0)[0] for page in pages]
    keys = to_event_extra_keys(found)
    return tuple(keys) if keys and any(one is not None for one in keys) else None


def kv_events(
    announcements: Iterable[Announcement], kinds: Sequence[GroupKind], block_tokens: int, locality: str | None
) -> list[Any]:
    """Return the events of announcements for vLLM's publisher.

    Stored blocks precede removed ones, so that a block enters a medium before it leaves another one. The exception is a hash that
    is stored again in the medium that it was removed from: its second event is in a later part (``ordered_parts``).

    Args:
        announcements: in order.
        kinds: by KV cache group.
        block_tokens: tokens of a page.
        locality: ``LOCAL`` or ``REMOTE``; None: unspecified.
    """
    return [event for part in ordered_parts(announcements) for event in _part_events(part, kinds, block_tokens, locality)]


def _part_events(
    announcements: Iterable[Announcement], kinds: Sequence[GroupKind], block_tokens: int, locality: str | None
) -> list[Any]:
    """Return the events of one part: stored blocks first."""
    events: list[Any] = []
    removed: dict[str, list[Any]] = {}
    open_runs: dict[str, tuple[EngineRun, int, int]] = {}

    def close(medium: str) -> None:
        if medium in open_runs:
            run, first, stop = open_runs.pop(medium)
            events.extend(_stored(run, first, stop, medium, group, kinds, block_tokens, locality) for group in range(len(kinds)))

    for one in announcements:
        for tier, medium in MEDIA.items():
            if one.stored & 1 << tier:
                run, first, stop = open_runs.get(medium, (None, 0, 0))
                if run is not one.run or stop != one.at:
                    close(medium)
                    first = one.at
                open_runs[medium] = (one.run, first, one.at + 1)
            if one.removed & 1 << tier:
                removed.setdefault(medium, []).append(maybe_convert_block_hash(one.run.hashes[one.at]))
    for medium in MEDIA.values():
        close(medium)
    for medium, hashes in removed.items():
        events += [
            BlockRemoved(block_hashes=list(hashes), medium=medium, group_idx=group, locality=locality, ownership=OWNER)
            for group in range(len(kinds))
        ]
    return events


def _stored(
    run: EngineRun,
    first: int,
    stop: int,
    medium: str,
    group: int,
    kinds: Sequence[GroupKind],
    block_tokens: int,
    locality: str | None,
) -> BlockStored:
    parent = run.hashes[first - 1] if first else run.parent
    kind, window = kinds[group]
    return BlockStored(
        block_hashes=[maybe_convert_block_hash(one) for one in run.hashes[first:stop]],
        parent_block_hash=maybe_convert_block_hash(parent) if parent else None,
        token_ids=run.tokens[first * block_tokens : stop * block_tokens].tolist(),
        block_size=block_tokens,
        lora_id=run.lora_id,
        medium=medium,
        lora_name=run.lora_name or None,
        extra_keys=None if run.extra_keys is None else list(run.extra_keys[first:stop]),
        group_idx=group,
        kv_cache_spec_kind=kind,
        kv_cache_spec_sliding_window=window,
        locality=locality,
        ownership=OWNER,
    )
