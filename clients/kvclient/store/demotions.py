"""Blocks that leave the engine's own pool, offered to the node of this host."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from kvclient.call.context import ClientContext
from kvclient.call.execution import CallScope
from kvclient.store.store import Store
from kvstore.core.buffers import BlockBuffer
from kvstore.core.chain import ChainSlice
from kvstore.core.types import BlockKey

_DEMOTION_S: Final = 1.0
"""Bound of one demotion, including the wait for space in the node."""


class Demotions:
    """The demotions of one client. Thread-safe.

    Args:
        context: the client's parts; its pool is not used.
    """

    def __init__(self, context: ClientContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._scopes: set[CallScope] = set()
        self._closed = False

    def demote(self, keys: Sequence[BlockKey], parent: BlockKey | None, depth: int, blocks: BlockBuffer) -> bool:
        """Offer blocks to the node, which copies only what it lacks. Return whether it holds all now."""
        scope = CallScope.after(_DEMOTION_S, self._context.clock)
        scope.cancellable = True
        with self._lock:
            if self._closed:
                return False
            self._scopes.add(scope)
        try:
            chain = ChainSlice(self._context.namespace, keys, parent, depth)
            return Store(self._context, chain, blocks, scope).run().held_blocks == len(chain)
        finally:
            with self._lock:
                self._scopes.discard(scope)

    def close(self) -> None:
        """Cancel what runs. Later calls demote nothing."""
        with self._lock:
            self._closed = True
            scopes = list(self._scopes)
        for scope in scopes:
            scope.cancel()
