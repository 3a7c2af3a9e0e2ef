"""Prices of loads over storage links, asked of the planner in the thread of a lookup: the scheduler does not wait for them."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Final

from kvclient import KVClient, KVStoreError, Lookup, Paths
from kvclient.engines.vllm.counters import ConnectorCounters
from kvclient.load.planned import blocks_beyond
from kvstore.observe.limited_log import LimitedLog
from kvstore.recompute.link_price import LinkPrice

_limited = LimitedLog(logging.getLogger(__name__))
TIMEOUT_S: Final = 0.04
"""A request waits at most this long for its price. The client's circuit breaker does not count such short timeouts."""
PAUSE_S: Final = 1.0
"""After a failure, the planner is not asked for this time."""


@dataclass(frozen=True, slots=True)
class PriceQuery:
    """Facts of a request that the planner needs.

    Attributes:
        prefill_node: the node of the workers' host.
        paths: the storage links that the request names; None: the client's.
    """

    prefill_node: str
    paths: Paths | None


@dataclass(frozen=True, slots=True)
class QuotedPrice:
    """A price, and when it was asked (``time.monotonic``)."""

    price: LinkPrice
    asked_s: float


class LoadPrices:
    """Asks the planner. Thread-safe.

    Args:
        block_bytes: bytes of a block in all workers: they load it at the same time, over the same links.
        counters: receive the count of prices that are missing.
    """

    def __init__(self, block_bytes: int, counters: ConnectorCounters) -> None:
        self._block_bytes = block_bytes
        self._counters = counters
        self._lock = threading.Lock()
        self._paused_until_s = 0.0

    def ask(self, client: KVClient, lookup: Lookup, query: PriceQuery) -> QuotedPrice | None:
        """Return the price of found blocks that only other hosts' storage has; None: there are none, or no price for them.

        Args:
            client: the client that looked up.
            lookup: the found blocks.
            query: the request's facts.
        """
        context = client.context
        paths = query.paths or context.options.paths
        blocks = int(blocks_beyond(lookup.runs, lookup.hit_blocks, query.prefill_node).sum())
        if context.metadata is None or paths is None or not blocks:
            return None
        asked_s = time.monotonic()
        with self._lock:
            paused = asked_s < self._paused_until_s
        if not paused:
            try:
                price = context.metadata.price_load(
                    query.prefill_node, paths, blocks, self._block_bytes, client.spec.block_tokens, TIMEOUT_S
                )
            except KVStoreError as error:
                _limited.warning("load not priced: earlier loads count instead (%s)", error)
                with self._lock:
                    self._paused_until_s = time.monotonic() + PAUSE_S
            else:
                return QuotedPrice(price, asked_s)
        self._counters.add("prices_missed")
        return None
