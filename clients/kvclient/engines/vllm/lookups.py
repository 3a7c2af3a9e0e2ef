"""Lookups in the background: the scheduler asks whether the answer is there, and never waits for a server."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from kvclient import CacheSpec, KeyChain, KVClient, Lookup
from kvclient.engines.options import HookOptions
from kvclient.engines.vllm.keys import Masked, RequestKeys
from kvclient.engines.vllm.namespaces import chain_spec

_log = logging.getLogger(__name__)
_THREADS = 2


@dataclass(frozen=True, slots=True)
class Found:
    """What the store holds of a request.

    Attributes:
        keys: the request's, as far as they were asked for.
        hit_blocks: leading blocks that every group and shard has.
        by_group: by group and namespace: who holds what.
    """

    keys: RequestKeys
    hit_blocks: int
    by_group: Sequence[Mapping[bytes, Lookup]]


class Finder:
    """Finds what the store holds of requests, over all groups and shards. Thread-safe.

    Args:
        options: where the store is.
        groups: by group: the namespaces of its shards.

    Raises:
        KVStoreError: the store does not answer, and the options insist on it.
    """

    def __init__(self, options: HookOptions, groups: Sequence[Sequence[CacheSpec]]) -> None:
        self.chain = KeyChain(chain_spec([shards[0] for shards in groups]))
        server_only = replace(options, node="none") if options.metadata else options
        client_options = replace(options.client_options(), client_name="vllm-scheduler")
        self._clients: list[list[tuple[KVClient, Masked]]] = []
        try:
            for shards in groups:
                self._clients.append([])
                for spec in shards:
                    client = server_only.connect(spec, client_options)
                    self._clients[-1].append((client, Masked(self.chain.spec.namespace, spec.namespace)))
        except BaseException:
            self.close()
            raise
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvstore-lookup")

    def begin(self, keys: RequestKeys, tokens: Sequence[int], blocks: int) -> Future[Found]:
        """Looks up the first blocks of a request. The keys belong to the lookup until the future is done.

        Args:
            keys: the request's.
            tokens: its token ids; a list of its own, for it is read in another thread.
            blocks: how many.
        """
        return self._threads.submit(self._find, keys, tokens, blocks)

    def _find(self, keys: RequestKeys, tokens: Sequence[int], blocks: int) -> Found:
        wanted = keys.upto(tokens, blocks)
        hit = len(wanted)
        by_group: list[dict[bytes, Lookup]] = []
        for clients in self._clients:
            by_group.append({})
            for client, masked in clients:
                found = client.lookup(masked.keys(wanted))  # never raises for failures of ours: no answer is a miss
                by_group[-1][bytes(client.spec.namespace)] = found
                hit = min(hit, found.hit_blocks)
                if hit == 0:
                    return Found(keys, 0, by_group)
        return Found(keys, hit, by_group)

    def stats(self) -> dict[str, int]:
        """Totals of all clients."""
        totals: dict[str, int] = {}
        for clients in self._clients:
            for client, _ in clients:
                for name, value in client.stats().items():
                    totals[name] = totals.get(name, 0) + value
        return totals

    def close(self) -> None:
        """Ends threads and connections."""
        threads = getattr(self, "_threads", None)
        for clients in self._clients:
            for client, _ in clients:
                client.close()
        if threads is not None:
            threads.shutdown(wait=True, cancel_futures=True)
