"""Lookups: how many leading blocks of a chain the store can serve, and from where."""

from __future__ import annotations

from kvclient.call.context import ClientContext
from kvclient.call.scope import CallScope
from kvclient.results import Lookup
from kvstore.core.cancel_scope import CancelScope
from kvstore.core.chain import ChainSlice
from kvstore.core.errors import KVStoreError
from kvstore.observe.metric_definitions import client as client_metrics


class LookupCall:
    """One lookup of an engine; a ``PreparedCall``."""

    def __init__(self, context: ClientContext, chain: ChainSlice, scope: CallScope) -> None:
        self._context = context
        self._chain = chain
        self.scope = scope

    def run(self) -> Lookup:
        """Do the lookup, and count the blocks that it did not find."""
        found = look_up(self._context, self._chain, self.scope)
        self._context.accounting.looked_up(found)
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
    context.run_ends.record_lookup(chain, [run.end for run in found.runs])
    counters.add(client_metrics.LOOKUP_BLOCKS, len(chain))
    counters.add(client_metrics.LOOKUP_HIT_BLOCKS, found.hit_blocks)
    counters.observe(client_metrics.LOOKUP_SECONDS, found.seconds)
    return found
