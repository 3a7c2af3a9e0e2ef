"""Patches of SGLang's classes in this process: what SGLang does not report to a storage backend.

**Whole prefixes.** SGLang promises that the keys of a batch and the prefix keys before them form one chain from its head.
SGLang 0.5.23 does so when it stores. When it looks up the continuation of a partly cached prompt, it omits the pages of the last
matching tree node: ``UnifiedRadixCache.get_prefix_hash_values`` returns only those of the node's ancestors. The store then cannot
determine the batch's position. The patch adds the node's own pages if they are missing.

**Weight updates.** SGLang updates the weights of a running engine and flushes its own caches, but does not call the backend. The
patch pauses loads and stores before weights change. They continue in a new generation once SGLang has flushed its caches.

**Sharded pools beside replicated KV.** With MLA, all ranks hold the same KV, and SGLang stores the pools beside it on the first
rank only. The heads of a draft model are sharded, and a hit requires the part of every rank. SGLang 0.5.23 stores these on all
ranks only for Mooncake. The patch does so for this backend.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from kvclient.engines.sglang.generations import Generations
from kvclient.engines.sglang.model_facts import server_arguments
from kvclient.engines.sglang.namespaces import is_sharded

_log = logging.getLogger(__name__)
_TREE = "sglang.srt.mem_cache.unified_radix_cache"
_MENDED = "_kvstore_whole_prefixes"
_CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller"
_SHARDED = "_kvstore_sharded_pools"
_SCHEDULER = "sglang.srt.managers.scheduler_components.weight_updater"
_RUNNER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_FOLLOWED = "_kvstore_weight_updates"


def tell_whole_prefixes() -> bool:
    """Patch SGLang's tree in this process, once. Return whether a patchable tree exists.

    A version of SGLang that returns the node's own pages itself is unaffected: the patch checks each result.
    """
    module = sys.modules.get(_TREE)  # a process that uses the tree has imported its module
    tree = getattr(module, "UnifiedRadixCache", None)
    original = getattr(tree, "get_prefix_hash_values", None)
    if tree is None or original is None:
        return False
    if not getattr(original, _MENDED, False):
        tree.get_prefix_hash_values = _whole(original)
        _log.info("SGLang patched: its radix tree names the pages before a page")
    return True


def _whole(original: Callable[[Any, Any], list[str]]) -> Callable[[Any, Any], list[str]]:
    @wraps(original)
    def get_prefix_hash_values(tree: Any, node_id: Any) -> list[str]:  # noqa: ANN401  # SGLang's tree and its handle of a node
        hashes = list(original(tree, node_id))
        last = tree.get_last_hash_value(node_id)
        if last is not None and hashes[-1:] != [last]:
            hashes += tree.tree_core.get_hash_values(node_id)
        return hashes

    setattr(get_prefix_hash_values, _MENDED, True)
    return get_prefix_hash_values


def store_sharded_pools(backend: type) -> None:
    """Patch SGLang's controller of several pools in this process, once.

    Args:
        backend: the class of backends for which all ranks store their parts.
    """
    controller = getattr(sys.modules.get(_CONTROLLER), "HybridCacheController", None)
    original = getattr(controller, "should_backup", None)
    if controller is not None and original is not None and not getattr(original, _SHARDED, False):
        controller.should_backup = _on_all_ranks(original, backend)


def _on_all_ranks(original: Callable[[Any, Any], bool], backend: type) -> Callable[[Any, Any], bool]:
    @wraps(original)
    def should_backup(controller: Any, transfer: Any) -> bool:  # noqa: ANN401  # SGLang's controller and its PoolTransfer
        if original(controller, transfer):
            return True
        entry = controller.mem_pool_host.entry_map.get(transfer.name)
        return (
            entry is not None and isinstance(controller.storage_backend, backend) and is_sharded(transfer.name, entry.host_pool)
        )

    setattr(should_backup, _SHARDED, True)
    return should_backup


def follow_weight_updates(generations: Generations) -> bool:
    """Patch SGLang's weight updates in this process, once. Return whether patchable classes exist.

    SGLang's dispatcher may already hold bound methods of the classes, so only methods that others call by name are patched.

    Args:
        generations: those of this process.
    """
    scheduler = getattr(sys.modules.get(_SCHEDULER), "SchedulerWeightUpdaterManager", None)
    runner = getattr(sys.modules.get(_RUNNER), "WeightUpdater", None)
    if scheduler is None or runner is None:
        return False
    patches: list[tuple[Any, str, Callable[[Callable[..., Any], Generations], Callable[..., Any]]]] = [
        (scheduler, "_observe_weight_load", _begun),
        (scheduler, "flush_cache_after_weight_update", _resumed),
        (scheduler, "_assert_weight_cache_inactive", _paused_by_release),
        (runner, "begin_weight_update", _paused),
    ]
    if any(getattr(owner, name, None) is None for owner, name, _ in patches):
        return False
    for owner, name, patch in patches:
        original = getattr(owner, name)
        if not getattr(original, _FOLLOWED, False):
            patched = wraps(original)(patch(original, generations))
            setattr(patched, _FOLLOWED, True)
            setattr(owner, name, patched)
    return True


def _begun(original: Callable[..., Any], generations: Generations) -> Callable[..., Any]:
    """Begin a generation at each update. All ranks of an engine get the same updates, so their generations are equal."""

    def observe(updater: Any, source: str) -> AbstractContextManager[None]:  # noqa: ANN401  # SGLang's class
        generations.begin_update()
        _log.debug("loads and stores paused: weight update began (source=%s)", source)
        observed: AbstractContextManager[None] = original(updater, source)
        return observed

    return observe


def _resumed(original: Callable[..., Any], generations: Generations) -> Callable[..., Any]:
    """Continue once SGLang's own caches hold nothing of the old weights."""

    def flush(updater: Any, request: Any, success: bool, message: str) -> tuple[bool, str]:  # noqa: ANN401  # SGLang's classes
        flushed: tuple[bool, str] = original(updater, request, success, message)
        if request.flush_cache and flushed[0]:
            generations.resume()
        return flushed

    return flush


def _paused(original: Callable[..., Any], generations: Generations) -> Callable[..., Any]:
    """Pause before a session of updates, in which others may write weights directly."""

    def begin(updater: Any) -> None:  # noqa: ANN401  # SGLang's class
        generations.pause()
        original(updater)

    return begin


def _paused_by_release(original: Callable[..., Any], generations: Generations) -> Callable[..., Any]:
    """Pause when the memory of the weights is released: without a backup on the host, they must be loaded again."""

    def check(updater: Any, operation: str) -> None:  # noqa: ANN401  # SGLang's class
        original(updater, operation)
        if not getattr(server_arguments(), "enable_weights_cpu_backup", False):
            generations.pause()

    return check
