"""Background writer: stores blocks in one thread, in order, from a bounded queue."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvclient import BlockKey, InvalidArgument, KVClient
from kvclient.engines.torch_blocks import KV, KVLayout, export_blocks
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import hooks as hooks_metrics

_STAGING_BYTES = 64 << 20
"""Approximate size in bytes of one pack-and-store batch."""


@dataclass(slots=True)
class StoredChain:
    """The store's state of one sequence. Owned by the writer's thread after the first offer.

    Attributes:
        keys: keys of its leading blocks, computed on demand.
        stored: how many of them the store is known to hold.
        broken: a block could not be stored, so no later block can be stored either.
    """

    keys: list[BlockKey] = field(default_factory=list)
    stored: int = 0
    broken: bool = False

    def copied(self) -> StoredChain:
        """Return a copy. Safe while the writer's thread adds blocks: that thread adds keys before it raises ``stored``."""
        stored = self.stored
        return StoredChain(list(self.keys), stored)


@dataclass(frozen=True, slots=True)
class OfferedRun:
    """Consecutive full blocks of one sequence.

    Attributes:
        chain: the sequence.
        first: position of the first block.
        tokens: the token ids of these blocks, uint32.
        extras: inputs of the chain besides tokens; see ``KVClient.keys``.
        layers: keys and values of exactly these tokens, ``[1, heads, tokens, dim]``; must not change any more.
    """

    chain: StoredChain
    first: int
    tokens: npt.NDArray[np.uint32]
    extras: dict[int, bytes]
    layers: Sequence[KV]


class Writer:
    """A bounded queue of offers and the thread that stores them. Thread-safe; store failures are counted, never raised.

    Args:
        client: the client of the namespace.
        layout: the layout of its blocks.
        incidents: counts and logs failures.
        deadline_s: bound of a store of 64 MiB. Waits for the queue are bounded by its bytes at this speed.
        pending_bytes: limit of the queue.
        now_s: the clock.
    """

    def __init__(
        self,
        client: KVClient,
        layout: KVLayout,
        incidents: LimitedLog,
        deadline_s: float,
        pending_bytes: int,
        now_s: Callable[[], float],
    ) -> None:
        self._client = client
        self._layout = layout
        self._incidents = incidents
        self._deadline_s = deadline_s
        self._limit = pending_bytes
        self._now_s = now_s
        self._end_s = math.inf
        self._lock = threading.Lock()
        self._pending: set[Future[None]] = set()
        self._bytes = 0
        self._closed = False
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="kvclient-transformers")

    def offer(self, offers: Sequence[OfferedRun]) -> Future[None] | None:
        """Queue blocks for storing, or reject and count all of them if the queue is full.

        Returns:
            A future that completes when the blocks are stored or skipped; None: rejected.
        """
        size = sum(len(offer.tokens) for offer in offers) // self._layout.block_tokens * self._layout.block_bytes
        with self._lock:
            if self._closed:
                self._incidents.counters.add(hooks_metrics.HOOK_STORE_REFUSED)
                return None
            if self._bytes and self._bytes + size > self._limit:
                self._incidents.report(hooks_metrics.HOOK_STORE_REFUSED, "too many blocks wait to be stored: not offered yet")
                return None
            self._bytes += size
            future = self._threads.submit(self._store_all, offers)
            self._pending.add(future)
        future.add_done_callback(lambda done: self._done(done, size))
        return future

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until all blocks offered so far are stored or skipped. False: timeout."""
        with self._lock:
            pending = list(self._pending)
        return not wait(pending, timeout_s).not_done

    def settle(self, futures: Collection[Future[None]]) -> bool:
        """Wait until some offers are stored or skipped, no longer than the whole queue may take. False: they stay queued."""
        with self._lock:
            bound_s = self._bound_s()
        if not wait(futures, bound_s).not_done:
            return True
        self._incidents.report(hooks_metrics.HOOK_STORES_LATE, f"blocks are still being stored after {bound_s:.0f} s")
        return False

    def close(self) -> None:
        """Store the queued blocks, no longer than the whole queue may take, and stop the thread. The rest is skipped."""
        with self._lock:
            self._closed = True
            self._end_s = self._now_s() + self._bound_s()
        self._threads.shutdown()

    def _bound_s(self) -> float:
        """Return how long the queue may take: the deadline of a store for each 64 MiB."""
        return self._deadline_s * max(1, -(-self._bytes // _STAGING_BYTES))

    def _done(self, future: Future[None], size: int) -> None:
        with self._lock:
            self._bytes -= size
            self._pending.discard(future)

    def _store_all(self, offers: Sequence[OfferedRun]) -> None:
        held: set[BlockKey] = set()  # rows of a batch often share their first blocks: pack them once
        for offer in offers:
            try:
                self._store(offer, held)
            except Exception as error:  # noqa: BLE001  # the thread's edge: torch may run out of memory; the engine continues
                offer.chain.broken = True
                self._incidents.report(hooks_metrics.HOOK_STORE_FAILED, "blocks could not be stored", error)

    def _store(self, offer: OfferedRun, held: set[BlockKey]) -> None:
        chain, layout = offer.chain, self._layout
        blocks = len(offer.tokens) // layout.block_tokens
        if chain.broken or chain.stored < offer.first:
            self._incidents.counters.add(hooks_metrics.HOOK_STORE_SKIPPED_BLOCKS, blocks)
            return
        parent = chain.keys[offer.first - 1] if offer.first else None
        keys = self._client.keys(offer.tokens, offer.extras, parent, offer.first)
        chain.keys[offer.first :] = keys
        start = next((at for at, key in enumerate(keys) if key not in held), blocks)
        step = max(1, _STAGING_BYTES // layout.block_bytes)
        while start < blocks:
            stop = min(blocks, start + step)
            deadline_s = min(self._deadline_s, self._end_s - self._now_s())
            if deadline_s <= 0:
                self._incidents.counters.add(hooks_metrics.HOOK_STORE_SKIPPED_BLOCKS, blocks - start)
                chain.broken = True
                break
            stored = self._store_piece(offer, keys, start, stop, keys[start - 1] if start else parent, deadline_s)
            held.update(keys[start : start + stored])
            start += stored
            if start < stop:
                chain.broken = True
                break
        chain.stored = offer.first + start

    def _store_piece(
        self, offer: OfferedRun, keys: Sequence[BlockKey], start: int, stop: int, parent: BlockKey | None, deadline_s: float
    ) -> int:
        """Pack and store blocks ``[start, stop)`` of an offer. Return how many leading blocks the store now holds."""
        tokens = self._layout.block_tokens
        packed = export_blocks(offer.layers, self._layout, first_token=start * tokens, blocks=stop - start)
        result = self._client.store(keys[start:stop], packed, parent=parent, depth=offer.first + start, deadline_s=deadline_s)
        self._incidents.counters.add(hooks_metrics.HOOK_STORED_BLOCKS, result.held_blocks)
        if result.held_blocks < stop - start:
            self._incidents.report(hooks_metrics.HOOK_STORE_FAILED, "blocks could not be stored", result.error)
        return result.held_blocks


def extras_of(extra: bytes) -> dict[int, bytes]:
    """Return a sequence's extra as the extra of its first block: the chain carries it to all later blocks."""
    if not isinstance(extra, bytes):
        raise InvalidArgument("an extra must be bytes; create it with encode_extra", got=type(extra).__name__)
    return {0: extra} if extra else {}
