"""Lookups, and loads. A load asks its sources one after the other, nearest first, until no block is missing.

1. The engine's own pool, if it has one.
2. Disks of the local node, read directly into the pool or a landing ring if GPUDirect Storage works.
3. The local node: it brings blocks from its own tiers and from the nodes that the lookup named into its arena.
4. The other nodes that the lookup named, for blocks that the local node could not bring, or for all blocks without a session.

With ``paths``, blocks that only other hosts' storage links reach are loaded by plan, beside steps 2 to 4 for the others.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvclient.call.context import ClientContext
from kvclient.call.execution import CallScope
from kvclient.load.accounting import LoadTrace
from kvclient.load.layerwise import LayerBarrier
from kvclient.load.paths import Paths
from kvclient.load.planned import PlannedSource, may_need_plan
from kvclient.load.sink import BlockSink, LoadRequest, LoadSource, fetch_from
from kvclient.load.sources.engine_pool import EnginePoolSource
from kvclient.load.sources.gds import GdsSource
from kvclient.load.sources.local_node import LocalNodeSource
from kvclient.load.sources.peers import PeerSource
from kvclient.memory.engine_pool import PoolNamespace
from kvclient.options import VERIFY_CHOICES, Verify
from kvclient.results import HeadLookup, LoadResult, Lookup
from kvstore.core.buffers import BlockBuffer
from kvstore.core.cancel_scope import CancelScope
from kvstore.core.chain import ChainSlice
from kvstore.core.errors import InvalidArgument, KVStoreError
from kvstore.core.types import Outcome
from kvstore.observe import tracing
from kvstore.observe.metric_definitions import client as client_metrics

_LOOKUP_SHARE = 0.5
"""Share of a load's time that the lookup within it may take."""


def checked_verify(verify: Verify | None, default: Verify) -> Verify:
    """Return a caller's choice, or ``default`` if it made none.

    Raises:
        InvalidArgument: it is not one of the choices.
    """
    if verify is None:
        return default
    if verify not in VERIFY_CHOICES:
        raise InvalidArgument("unknown choice", option="verify", value=verify, choices=VERIFY_CHOICES)
    return verify


class LookupCall:
    """One lookup of an engine; a ``PreparedCall``."""

    def __init__(self, context: ClientContext, chain: ChainSlice, scope: CallScope) -> None:
        self._context = context
        self._chain = chain
        self.scope = scope

    def run(self) -> Lookup:
        """Do the lookup, and count the blocks that it did not find."""
        found = look_up(self._context, self._chain, self.scope)
        self._context.accounting.not_found(len(found.keys) - found.hit_blocks, found.error)
        return found

    def refused(self, error: KVStoreError) -> Lookup:
        """Return a lookup that found nothing."""
        self._context.accounting.refused(len(self._chain), error)
        return Lookup(self._chain.keys, error=error)


def look_up(context: ClientContext, chain: ChainSlice, scope: CancelScope) -> Lookup:
    """Ask the metadata server. Without an answer the result is a miss."""
    counters = context.incidents.counters
    counters.add(client_metrics.LOOKUPS)
    if not len(chain) or context.metadata is None:
        return Lookup(chain.keys)
    try:
        found = context.metadata.lookup(chain, scope.left_s(), context.run_ends.of(chain))
    except KVStoreError as error:
        context.incidents.report(client_metrics.LOOKUPS_FAILED, "lookup failed", error)
        return Lookup(chain.keys, seconds=scope.elapsed_s(), error=error)
    _reopen_session(context)
    context.run_ends.record_lookup(chain, [run.end for run in found.runs])
    _record_nodes(context, found)
    counters.add(client_metrics.LOOKUP_BLOCKS, len(chain))
    counters.add(client_metrics.LOOKUP_HIT_BLOCKS, found.hit_blocks)
    counters.observe(client_metrics.LOOKUP_SECONDS, found.seconds)
    return found


def _record_nodes(context: ClientContext, lookup: Lookup) -> None:
    """Remember the nodes that a lookup named, for hints about sessions."""
    own = context.local.node_id if context.local is not None else None
    context.chain_nodes.record(lookup.keys, lookup.hit_blocks, lookup.runs, own or "", context.options.hint_nodes)


def _reopen_session(context: ClientContext) -> None:
    """Begin to open a lost session again, so that the load or store which follows the lookup has one. Does not wait."""
    if context.local is not None:
        context.local.session()


class HeadLookupCall:
    """One lookup of heads of chains; a ``PreparedCall``."""

    def __init__(self, context: ClientContext, heads: ChainSlice, scope: CallScope) -> None:
        self._context = context
        self._heads = heads
        self.scope = scope

    def run(self) -> HeadLookup:
        """Do the lookup, and count the blocks that it did not find."""
        context, heads = self._context, self._heads
        counters = context.incidents.counters
        counters.add(client_metrics.LOOKUPS)
        found = HeadLookup(heads.keys)
        if len(heads) and context.metadata is not None:
            try:
                found = context.metadata.lookup_heads(heads, self.scope.left_s())
            except KVStoreError as error:
                context.incidents.report(client_metrics.LOOKUPS_FAILED, "lookup failed", error)
                found = HeadLookup(heads.keys, seconds=self.scope.elapsed_s(), error=error)
            else:
                _reopen_session(context)
                counters.add(client_metrics.LOOKUP_BLOCKS, len(heads))
                counters.add(client_metrics.LOOKUP_HIT_BLOCKS, int(np.count_nonzero(found.held)))
                counters.observe(client_metrics.LOOKUP_SECONDS, found.seconds)
        context.accounting.not_found(int(np.count_nonzero(~found.held)), found.error)
        return found

    def refused(self, error: KVStoreError) -> HeadLookup:
        """Return a lookup that found nothing."""
        self._context.accounting.refused(len(self._heads), error)
        return HeadLookup(self._heads.keys, error=error)


class Load:
    """One load of consecutive blocks of a chain, or of heads of chains; a ``PreparedCall``.

    Args:
        context: the client's parts.
        chain: the blocks.
        lookup: names replicas of them; None: look them up.
        buffer: space for all of them.
        scope: deadline and cancellation.
        verify: see ``Verify``.
        barrier: opened as layers arrive; None: no thread waits for layers.
        layerwise: load layer 0 of all blocks first, and open the barrier layer by layer.
        paths: see ``Paths``; None: only this host's storage links.
    """

    def __init__(
        self,
        context: ClientContext,
        chain: ChainSlice,
        lookup: Lookup | HeadLookup | None,
        buffer: BlockBuffer,
        scope: CallScope,
        verify: Verify,
        *,
        barrier: LayerBarrier | None = None,
        layerwise: bool = False,
        paths: Paths | None = None,
    ) -> None:
        self._context = context
        self._chain = chain
        self._lookup = lookup
        self._buffer = buffer
        self.scope = scope
        self._verify = verify
        self._barrier = barrier
        self._layerwise = layerwise
        self._paths = paths

    def run(self) -> LoadResult:
        """Load the blocks. Failures of the store end in outcomes and in ``error``."""
        hit_blocks = 0
        try:
            with tracing.named_request(), tracing.span("kvclient.load"):
                result = self._run()
            hit_blocks = result.hit_blocks if self._barrier is not None else 0
            return result
        finally:
            if self._barrier is not None:
                self._barrier.finish(hit_blocks)

    def refused(self, error: KVStoreError) -> LoadResult:
        """Return the result of a load that brought nothing."""
        if self._barrier is not None:
            self._barrier.finish(0)
        self._context.accounting.refused(len(self._chain), error)
        return LoadResult(np.full(len(self._chain), Outcome.UNAVAILABLE, np.uint8), error=error)

    def _run(self) -> LoadResult:
        context, chain = self._context, self._chain
        trace = LoadTrace(context.clock)
        lookup = self._lookup if self._lookup is not None else self._look_up(trace)
        if isinstance(self._lookup, Lookup):
            _record_nodes(context, self._lookup)  # another client may have looked up
        pool = None if chain.heads else context.pool  # the pool is for prompts
        # The client knows its own pool better than the index does. Equally near runs stay in the order of the index.
        runs = [run for run in lookup.runs if pool is None or run.node_id != pool.node_id]
        runs.sort(key=lambda run: run.distance)
        request = LoadRequest(context, chain, runs, self._buffer, self.scope, self._verify, self._layerwise, trace)
        barrier = self._barrier if self._layerwise else None
        paths = self._paths
        if paths is not None and (context.metadata is None or not may_need_plan(runs, context.local)):
            paths = None
        sink = BlockSink(len(chain), context.shape.layers, self._buffer, barrier, track_layers=paths is not None)
        if lookup.error is not None:
            sink.record_error(lookup.error)
        pool_source = None if pool is None else EnginePoolSource(pool)
        if pool_source is not None:
            fetch_from([pool_source], request, sink)
        if paths is None or context.metadata is None:
            fetch_from(self._sources(pool), request, sink)
        else:
            planned = PlannedSource(self._sources(pool), context.local, context.metadata, paths)
            fetch_from([planned], request, sink)
        sink.flush_to_device()
        if pool_source is not None:
            pool_source.insert(request, sink)
        sink.drop_incomplete()
        result = sink.result(context.shape.block_bytes)
        result.seconds = self.scope.elapsed_s()
        context.accounting.account(result, sink.sources(), trace, cancelled=self.scope.cancelled)
        return result

    def _sources(self, pool: PoolNamespace | None) -> Iterator[LoadSource]:
        """Yield the sources after the engine's own pool, nearest first. A source is made only if blocks are still missing."""
        local = self._context.local
        node = None
        if local is not None:
            reader = pool if pool is not None else self._context.disks
            if reader is not None and not self._chain.heads:
                yield GdsSource(reader, local)
            node = LocalNodeSource(local)
            yield node
        yield PeerSource(node)

    def _look_up(self, trace: LoadTrace) -> Lookup:
        with trace.phase("lookup"):
            # the index knows chains from their head only
            chain = self._chain if self._chain.parent is None else self._chain.part(0, 0)
            scope = self.scope.nested(self.scope.deadline_s - self.scope.left_s() * (1 - _LOOKUP_SHARE))
            found = look_up(self._context, chain, scope)
        trace.named_blocks, trace.index_failed = found.hit_blocks, found.error is not None
        return found
