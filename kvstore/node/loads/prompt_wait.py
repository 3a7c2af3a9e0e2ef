"""The decode side's wait for a whole prompt: a prefill engine, loads over this node and its own volumes bring the blocks.

The whole prompt is admitted to the decode buffer before any block is pinned. Then every block is pinned as soon as it is in DRAM,
so that none is evicted while others arrive. Blocks on this node's volumes are loaded at once: a prefill engine sends only blocks
that this node lacks. Blocks that are not in DRAM at the deadline are answered as such, and the decode engine loads or recomputes
them. A caller that disconnects releases admission and pins at once, because other prompts wait for them. The prefill side may
abandon a transfer, before or after the wait for it begins; then the wait ends with the blocks that have arrived.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

from kvstore.core.cancel_scope import CancelScope, current
from kvstore.core.types import NodeId, Outcome, Tier
from kvstore.node.base.buffer_budget import BufferBudget
from kvstore.node.loads.loader import Loader
from kvstore.node.loads.runs import BlockRequest, LoadedRun, Runs, equal_stretches
from kvstore.node.state.model import Block, Recent
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.rpc.auth.interceptor import tenant


class PromptWaits:
    """Waits of decode engines on this host for their prompts. Thread-safe; any thread may iterate a wait."""

    def __init__(self, node_id: NodeId, table: BlockTable, loader: Loader, budget: BufferBudget, counters: Counters) -> None:
        self._node_id = node_id
        self._table = table
        self._loader = loader
        self._budget = budget
        self._counters = counters
        self._lock = threading.Lock()
        self._scopes: dict[str, tuple[tuple[CancelScope, str | None], ...]] = {}
        """Waits per transfer, each with the tenant of its namespace."""
        self._abandoned: Recent[tuple[str | None, str]] = Recent()

    @property
    def of_transfers(self) -> int:
        """Number of waits that belong to a transfer; for tests."""
        with self._lock:
            return sum(map(len, self._scopes.values()))

    def wait(self, request: BlockRequest, transfer_id: str = "") -> Runs:
        """Wait until all blocks are in DRAM, the deadline, or the transfer is abandoned. Then return them in one run.

        No run is returned earlier, because the caller's lease begins with it.
        """
        namespace, count = request.namespace, len(request.chain)
        size, of_tenant = count * namespace.shape.block_bytes, tenant()
        with self._transfer_scope(namespace, transfer_id) as scope:
            context = scope.context()
            if not context.run(self._budget.admit, size, request.deadline_s, of_tenant):
                yield LoadedRun(0, [Outcome.NO_SPACE] * count, [None] * count, Tier.DRAM, self._node_id)
                return
            try:
                blocks = context.run(self._gather, request)
                if current().cancelled:
                    result, missing = node_metrics.PROMPTS_LEFT, Outcome.TIMEOUT
                elif scope.cancelled:
                    result, missing = node_metrics.PROMPTS_ABANDONED, Outcome.UNAVAILABLE
                else:
                    result, missing = node_metrics.PROMPTS_INCOMPLETE, Outcome.TIMEOUT
                self._counters.add(result if None in blocks else node_metrics.PROMPTS_COMPLETE)
                outcomes = [Outcome.HIT if block is not None else missing for block in blocks]
                yield LoadedRun(0, outcomes, blocks, Tier.DRAM, self._node_id)
            finally:
                self._budget.release(size, of_tenant)

    def abandon(self, transfer_id: str, only_tenant: str | None = None) -> int:
        """End the waits for a transfer, now and in the near future, because its missing blocks will not come.

        Args:
            transfer_id: the transfer. Transfers of several tenants may have the same name.
            only_tenant: end waits for namespaces of this tenant only; None: of any tenant.

        Returns:
            The number of waits that were ended.
        """
        with self._lock:
            self._abandoned.add((only_tenant, transfer_id))
            scopes = [
                scope for scope, of_tenant in self._scopes.get(transfer_id, ()) if only_tenant is None or of_tenant == only_tenant
            ]
        for scope in scopes:
            scope.cancel()
        return len(scopes)

    @contextmanager
    def _transfer_scope(self, namespace: NodeNamespace, transfer_id: str) -> Iterator[CancelScope]:
        """Yield a scope that is cancelled with the call, or if the transfer is abandoned."""
        scope = CancelScope()
        if not transfer_id:
            yield scope
            return
        of_tenant = None if namespace.spec is None else namespace.spec.tenant
        with self._lock:
            self._scopes[transfer_id] = (*self._scopes.get(transfer_id, ()), (scope, of_tenant))
            if (None, transfer_id) in self._abandoned or (of_tenant, transfer_id) in self._abandoned:
                scope.cancel()
        try:
            yield scope
        finally:
            with self._lock:
                others = tuple(entry for entry in self._scopes.pop(transfer_id) if entry[0] is not scope)
                if others:
                    self._scopes[transfer_id] = others

    def _gather(self, request: BlockRequest) -> list[Block | None]:
        """Return the prompt's blocks, pinned; None for those that are not in DRAM in time."""
        blocks: list[Block | None] = [None] * len(request.chain)
        missing = len(blocks)
        waiter = self._table.subscribe(request.namespace, request.chain.keys)
        try:
            self._load_durable(request)
            while missing and (arrivals := self._table.next_arrivals(waiter, request.deadline_s)):
                for index, block in arrivals:
                    blocks[index] = block
                missing -= len(arrivals)
        finally:
            self._table.unsubscribe(waiter)
        return blocks

    def _load_durable(self, request: BlockRequest) -> None:
        """Load blocks on this node's volumes into DRAM, where the waiter pins them."""
        found = self._table.find(request.namespace, request.chain.keys)
        durable = [block is not None and block.nvme_volume is not None for block in found]
        for start, stop in equal_stretches(durable):
            if not durable[start]:
                continue
            with closing(self._loader.load(request.part(start, stop))) as runs:
                for run in runs:
                    if run.tier is not Tier.DRAM:
                        self._counters.add(node_metrics.PROMPT_NVME_BLOCKS, len(run.pinned()))
                    self._table.unpin(run.pinned())
