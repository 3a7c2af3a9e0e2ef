"""Makes SGLang tell all pages before a batch that it asks for.

SGLang says of the keys of a batch that together with those before it they are one chain from its head. SGLang 0.5.23 keeps to
that when it stores. When it looks for what follows a prompt that it has in part, it leaves out the pages of the last tree node
that it has (``UnifiedRadixCache.get_prefix_hash_values`` gives those of the node's ancestors), so that nobody can tell where the
batch belongs. Here the node's own pages are added, where they are missing.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

_log = logging.getLogger(__name__)
_TREE = "sglang.srt.mem_cache.unified_radix_cache"
_MENDED = "_kvstore_whole_prefixes"


def tell_whole_prefixes() -> bool:
    """Mends SGLang's tree in this process, once; whether there is a tree that could be mended.

    A version of SGLang that gives the node's own pages itself is left as it is: each answer is looked at.
    """
    module = sys.modules.get(_TREE)  # who has a tree has loaded it
    tree = getattr(module, "UnifiedRadixCache", None)
    original = getattr(tree, "get_prefix_hash_values", None)
    if tree is None or original is None:
        return False
    if not getattr(original, _MENDED, False):
        tree.get_prefix_hash_values = _whole(original)
        _log.info("SGLang's tree tells all pages before what it asks for, those of the node it continues among them")
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
