"""Patches SGLang to report all pages before a requested batch.

SGLang promises that the keys of a batch and the prefix keys before them form one chain from its head. SGLang 0.5.23 does so when
it stores. When it looks up the continuation of a partly cached prompt, it omits the pages of the last matching tree node:
``UnifiedRadixCache.get_prefix_hash_values`` returns only those of the node's ancestors. The store then cannot determine the
batch's position. The patch adds the node's own pages if they are missing.
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
        _log.info("prefixes taken from SGLang's tree")
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
