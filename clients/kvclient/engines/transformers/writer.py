"""Stores blocks behind the back of whoever computes: in one thread, in order, and never more than there is room for."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvclient import BlockKey, InvalidArgument, KVClient
from kvclient.engines.torch_blocks import KV, KVLayout, export_blocks
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import hooks as hooks_metrics

_STAGING_BYTES = 64 << 20
"""Blocks are packed and stored about so many bytes at a time."""


@dataclass(slots=True)
class StoredChain:
    """One sequence as the store knows it. Belongs to the writer's thread once blocks of it are offered.

    Attributes:
        keys: of its leading blocks, as far as they were needed.
        stored: how many of them the store holds, as far as we know.
        broken: a block was not stored, so that none behind it can be.
    """

    keys: list[BlockKey] = field(default_factory=list)
    stored: int = 0
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """Consecutive full blocks of one sequence.

    Attributes:
        chain: whose.
        first: the position of the first of them.
        tokens: all ids of these blocks, uint32.
        extras: what the chain depends on besides tokens; see ``KVClient.keys``.
        layers: keys and values of just these tokens, ``[1, heads, tokens, dim]``; nobody changes them any more.
    """

    chain: StoredChain
    first: int
    tokens: npt.NDArray[np.uint32]
    extras: dict[int, bytes]
    layers: Sequence[KV]


class Writer:
    """A bounded queue of offers and the thread that stores them. Thread-safe; failures of ours are counted, never raised."""

    def __init__(self, client: KVClient, layout: KVLayout, incidents: LimitedLog, deadline_s: float, pending_bytes: int) -> None:
        self._client = client
        self._layout = layout
        self._incidents = incidents
        self._deadline_s = deadline_s
        self._limit = pending_bytes
        self._lock = threading.Lock()
        self._pending: set[Future[None]] = set()
        self._bytes = 0
        self._closed = False
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="kvclient-transformers")

    def offer(self, offers: Sequence[Offer]) -> Future[None] | None:
        """Takes blocks to be stored, or refuses all of them where too many wait.

        Returns:
            What ends when they are stored, or given up; None: refused, counted.
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
        """Waits until what was offered so far is stored, or given up. False: not in time."""
        with self._lock:
            pending = list(self._pending)
        return not wait(pending, timeout_s).not_done

    def close(self) -> None:
        """Stores what was offered, each within its deadline, and ends the thread."""
        with self._lock:
            self._closed = True
        self._threads.shutdown()

    def _done(self, future: Future[None], size: int) -> None:
        with self._lock:
            self._bytes -= size
            self._pending.discard(future)

    def _store_all(self, offers: Sequence[Offer]) -> None:
        held: set[BlockKey] = set()  # a batch often shares its first blocks: they are packed once
        for offer in offers:
            try:
                self._store(offer, held)
            except Exception as error:  # noqa: BLE001  # the thread's edge: torch may run out of memory; the engine goes on
                offer.chain.broken = True
                self._incidents.report(hooks_metrics.HOOK_STORE_FAILED, "blocks could not be stored", error)

    def _store(self, offer: Offer, held: set[BlockKey]) -> None:
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
            stored = self._store_piece(offer, keys, start, stop, keys[start - 1] if start else parent)
            held.update(keys[start : start + stored])
            start += stored
            if start < stop:
                chain.broken = True
                break
        chain.stored = offer.first + start

    def _store_piece(self, offer: Offer, keys: Sequence[BlockKey], start: int, stop: int, parent: BlockKey | None) -> int:
        """Packs and stores blocks ``[start, stop)`` of an offer. Returns how many leading ones the store holds now."""
        tokens = self._layout.block_tokens
        packed = export_blocks(offer.layers, self._layout, first_token=start * tokens, blocks=stop - start)
        result = self._client.store(
            keys[start:stop], packed, parent=parent, depth=offer.first + start, deadline_s=self._deadline_s
        )
        self._incidents.counters.add(hooks_metrics.HOOK_STORED_BLOCKS, result.held_blocks)
        if result.held_blocks < stop - start:
            self._incidents.report(hooks_metrics.HOOK_STORE_FAILED, "blocks could not be stored", result.error)
        return result.held_blocks


def extras_of(extra: bytes) -> dict[int, bytes]:
    """What a whole sequence depends on, as the extra of its first block: it reaches all later ones through the chain."""
    if not isinstance(extra, bytes):
        raise InvalidArgument("an extra takes bytes: encode_extra makes them", got=type(extra).__name__)
    return {0: extra} if extra else {}
