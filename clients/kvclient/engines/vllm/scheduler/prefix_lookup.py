"""Lookups in the background: the scheduler asks whether the answer is there, and never waits for a server."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from kvclient import BlockKey, CacheSpec, KeyChain, KVClient, Lookup
from kvclient.engines.options import HookOptions
from kvclient.engines.vllm.counters import ConnectorCounters
from kvclient.engines.vllm.identity.keys import RequestKeys
from kvclient.engines.vllm.identity.kv_groups import GroupBlocks
from kvclient.engines.vllm.identity.namespaces import chain_spec
from kvclient.engines.vllm.options import RECONNECT_S
from kvclient.engines.vllm.scheduler.load_prices import LoadPrices, PriceQuery, QuotedPrice
from kvclient.engines.vllm.scheduler.other_ranks import OtherRanks
from kvstore.core.errors import Unavailable
from kvstore.core.keys import NamespaceKeyMask
from kvstore.observe.limited_log import LimitedLog
from kvstore.process.threads.submission import submit

_log = logging.getLogger(__name__)
_limited = LimitedLog(_log)
_REQUESTS_AT_ONCE = 2
_MOST_THREADS = 16
_LEAST_CONNECT_S = 0.01


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The blocks of a request that the store holds.

    Attributes:
        hit_blocks: leading blocks that every part and shard has whole.
        by_group: the lookup of each namespace, by part, in pages.
        price: the planner's price of loading them; None: it was not asked, or did not answer in time.
    """

    hit_blocks: int
    by_group: Sequence[Mapping[bytes, Lookup]]
    price: QuotedPrice | None = None

    @property
    def lookup(self) -> Lookup:
        """The found blocks, at least one, of the first namespace. All workers load theirs at once, from the same places."""
        return next(iter(self.by_group[0].values())).part(0, self.hit_blocks)


NOTHING = PrefixMatch(0, ())


class BackgroundLookup:
    """Finds what the store holds of requests, over all groups and shards. Thread-safe.

    Args:
        options: address of the store, and deadlines.
        groups: by part of a KV cache group: the namespaces of its shards.
        counters: where lookups are counted.
        running: the engine runs already, and does not wait for the store.

    Raises:
        KVStoreError: the store does not answer, and the options insist on it.
    """

    def __init__(
        self, options: HookOptions, groups: Sequence[Sequence[CacheSpec]], counters: ConnectorCounters, *, running: bool = False
    ) -> None:
        self.groups = groups
        self.blocks = GroupBlocks([shards[0].block_tokens for shards in groups])
        self.chain = KeyChain(chain_spec([shards[0] for shards in groups]))
        self._counters = counters
        self._deadline_s = options.lookup_deadline_s
        self._other_ranks = OtherRanks(groups[0][0])
        self._prices = LoadPrices(sum(spec.shape.block_bytes for spec in groups[0]), counters)
        self._places: list[tuple[int, KVClient, NamespaceKeyMask]] = []
        client_options = replace(options.client_options(), client_name="vllm-scheduler")
        until_s = time.monotonic() + RECONNECT_S
        server_only = replace(options, node="none") if options.metadata else options
        try:
            for group, shards in enumerate(groups):
                for spec in shards:
                    if running:  # the engine waits: one deadline for all
                        left_s = max(_LEAST_CONNECT_S, until_s - time.monotonic())
                        client_options = replace(client_options, require_store=False, connect_deadline_s=left_s)
                    client = server_only.connect(spec, client_options)
                    self._places.append((group, client, NamespaceKeyMask(self.chain.spec.namespace, spec.namespace)))
        except BaseException:
            self._close_clients()
            raise
        self._requests = ThreadPoolExecutor(_REQUESTS_AT_ONCE, thread_name_prefix="kvstore-find")
        others = min(_MOST_THREADS, (len(self._places) - 1) * _REQUESTS_AT_ONCE)
        self._others = ThreadPoolExecutor(others, thread_name_prefix="kvstore-lookup") if others else None
        self._is_closed = False

    def begin(
        self, keys: RequestKeys, tokens: Sequence[int], blocks: int, query: PriceQuery | None = None
    ) -> Future[PrefixMatch]:
        """Look up the first blocks of a request in the background. It never fails. Callers of ``keys`` may wait for it.

        A lookup that waited for a thread past the deadline of lookups finds nothing: the engine holds the request back meanwhile.

        Args:
            keys: the request's.
            tokens: a copy of its token ids, since another thread reads it.
            blocks: how many; see ``GroupBlocks``.
            query: question to the planner about loading them, for models with one group; None: it is not asked.
        """
        until_s = time.monotonic() + self._deadline_s
        try:
            return submit(self._requests, self._find, keys, tokens, blocks, query, until_s)
        except Unavailable as error:
            self._count_failure(error)
            answered: Future[PrefixMatch] = Future()
            answered.set_result(NOTHING)
            return answered

    def _find(
        self, keys: RequestKeys, tokens: Sequence[int], blocks: int, query: PriceQuery | None, until_s: float
    ) -> PrefixMatch:
        if self._is_closed:
            return NOTHING
        if time.monotonic() > until_s:
            self._counters.add("lookups_late")
            return NOTHING
        try:
            match = self._found(keys.upto(tokens, blocks * self.blocks.keys_per_block))
            if query is None or not match.hit_blocks:
                return match
            _, client, _ = self._places[0]
            lookup = match.by_group[0][client.spec.namespace].part(0, match.hit_blocks)
            return replace(match, price=self._prices.ask(client, lookup, query))
        except Unavailable as error:
            self._count_failure(error)
            return NOTHING
        except Exception:  # noqa: BLE001  # the edge to the engine: a failure of the store must not end it and is a miss
            self._counters.add("bugs")
            _log.exception("lookup failed: unexpected error, counted as a miss")
            return NOTHING

    def _count_failure(self, error: Unavailable) -> None:
        self._counters.add("lookup_failures")
        _limited.warning("lookup not started, counted as a miss (error=%s)", error)

    def _found(self, keys: Sequence[BlockKey]) -> PrefixMatch:
        """Look up in all namespaces at once: each lookup requires a round trip."""
        keys = keys[: len(keys) // self.blocks.keys_per_block * self.blocks.keys_per_block]
        first, *others = self._places
        futures = []
        if self._others is not None:
            futures = [submit(self._others, self._look_up, *place, keys) for place in others]
        answers = [self._look_up(*first, keys), *(future.result() for future in futures)]
        by_group: list[dict[bytes, Lookup]] = [{} for _ in self.groups]
        hit = len(keys) // self.blocks.keys_per_block
        for (group, client, _), answer in zip(self._places, answers, strict=True):
            by_group[group][client.spec.namespace] = answer
            hit = min(hit, answer.hit_blocks // self.blocks.pages_per_block(group))
        self._counters.add("lookups")
        self._counters.add("lookup_blocks", len(keys) // self.blocks.keys_per_block)
        self._counters.add("hit_blocks", hit)
        if any(answer.error is not None for answer in answers):
            self._counters.add("lookup_failures")
        elif keys and not hit and self._other_ranks.due:
            self._other_ranks.look(first[1])
        return PrefixMatch(hit, by_group)

    def _look_up(self, group: int, client: KVClient, masked: NamespaceKeyMask, keys: Sequence[BlockKey]) -> Lookup:
        return client.lookup(masked.keys(self.blocks.page_keys(group, keys)))  # failures of ours are misses, not exceptions

    def close(self) -> None:
        """Close the connections and then the threads; lookups under way, and those that wait, are misses."""
        self._is_closed = True
        self._close_clients()
        for threads in (self._requests, self._others):
            if threads is not None:
                threads.shutdown(wait=True)

    def _close_clients(self) -> None:
        for _, client, _ in self._places:
            client.close()
