"""The decode side's wait for a whole prompt: its blocks come from a prefill engine, from loads over this node, or from its NVMe.

Room for the whole prompt is taken in the decode buffer before anything is pinned, all or none; then every block is pinned as
soon as it is resident, so that none leaves again while the others are on their way. What lies on this node's own NVMe is brought
in at once: nobody else will, for a prefill engine sends only what this node lacks. What is not here in time is answered as such:
the decode engine loads or recomputes it. Who leaves gives room and pins back at once: others wait for them. And who is told by
the prefill side that the rest will not come does not wait for it, whichever of the two comes first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvstore.core.types import BlockKey, NodeId, Outcome, Tier
from kvstore.node.base.cancellation import Wanted, over
from kvstore.node.loads.loader import Loader, Part
from kvstore.node.loads.provider import runs_of_equal
from kvstore.node.loads.staging_budget import StagingBudget
from kvstore.node.state.model import Block, Recent
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.rpc.auth.interceptor import tenant


class Prompts:
    """Prompts that decode engines of this host wait for. Thread-safe; ``arrive`` may be driven from any thread."""

    def __init__(self, node_id: NodeId, table: BlockTable, loader: Loader, buffer: StagingBudget, counters: Counters) -> None:
        self._node_id = node_id
        self._table = table
        self._loader = loader
        self._buffer = buffer
        self._counters = counters
        self._lock = threading.Lock()
        self._awaiting: dict[str, tuple[tuple[Wanted, str | None], ...]] = {}  # with the tenant whose namespace it is
        self._abandoned: Recent[tuple[str | None, str]] = Recent()

    def arrive(
        self, namespace: NodeNamespace, keys: Sequence[BlockKey], deadline_s: float, transfer_id: str = ""
    ) -> Iterator[Part]:
        """Yields the prompt's blocks, once all are resident or the deadline has passed. Their pins are the caller's.

        Nothing is yielded before, so that the time in which the caller must have copied begins when it can. The wait also ends
        where the transfer is abandoned.
        """
        size, mine = len(keys) * namespace.shape.block_bytes, tenant()
        with self._abandonable(namespace, transfer_id) as wanted:
            waiting = wanted.context()
            if not waiting.run(self._buffer.admit, size, deadline_s, mine):
                yield Part(0, [Outcome.NO_ROOM] * len(keys), [None] * len(keys), Tier.DRAM, self._node_id)
                return
            try:
                found = waiting.run(self._gather, namespace, keys, deadline_s)
                if over():
                    fate, missing = "left", Outcome.TIMEOUT
                elif wanted.over:
                    fate, missing = "abandoned", Outcome.UNAVAILABLE
                else:
                    fate, missing = "incomplete", Outcome.TIMEOUT
                self._counters.add(f"prompts_{fate if None in found else 'complete'}_total")
                outcomes = [Outcome.HIT if block is not None else missing for block in found]
                yield Part(0, outcomes, found, Tier.DRAM, self._node_id)
            finally:
                self._buffer.release(size, mine)

    def abandon(self, transfer_id: str, only: str | None = None) -> int:
        """What is missing of a prompt will not come: whoever waits for it, now or soon, waits no longer. How many did.

        Args:
            transfer_id: the transfer; others may have one of the same name.
            only: of this tenant's namespaces alone; None: whosever.
        """
        with self._lock:
            self._abandoned.add((only, transfer_id))
            awaiting = [one for one, whose in self._awaiting.get(transfer_id, ()) if only is None or whose == only]
        for wanted in awaiting:
            wanted.end()
        return len(awaiting)

    @contextmanager
    def _abandonable(self, namespace: NodeNamespace, transfer_id: str) -> Iterator[Wanted]:
        """What ends with the call that awaits a prompt, and with its transfer."""
        wanted = Wanted()
        if not transfer_id:
            yield wanted
            return
        whose = None if namespace.spec is None else namespace.spec.tenant
        with self._lock:
            self._awaiting[transfer_id] = (*self._awaiting.get(transfer_id, ()), (wanted, whose))
            if (None, transfer_id) in self._abandoned or (whose, transfer_id) in self._abandoned:
                wanted.end()
        try:
            yield wanted
        finally:
            with self._lock:
                others = tuple(entry for entry in self._awaiting.pop(transfer_id) if entry[0] is not wanted)
                if others:
                    self._awaiting[transfer_id] = others

    def _gather(self, namespace: NodeNamespace, keys: Sequence[BlockKey], deadline_s: float) -> list[Block | None]:
        """The prompt's blocks, pinned; None for those that did not come."""
        found: list[Block | None] = [None] * len(keys)
        left = len(keys)
        vigil = self._table.subscribe(namespace, keys)
        try:
            self._bring(namespace, keys, deadline_s)
            while left and (came := self._table.next_arrivals(vigil, deadline_s)):
                for position, block in came:
                    found[position] = block
                left -= len(came)
        finally:
            self._table.unsubscribe(vigil)
        return found

    def _bring(self, namespace: NodeNamespace, keys: Sequence[BlockKey], deadline_s: float) -> None:
        """Reads what lies on NVMe here into DRAM, where the vigil pins it."""
        durable = [node_volume is not None for node_volume in self._table.volumes_of(namespace, keys)]
        for start, stop in ((start, stop) for start, stop in runs_of_equal(durable) if durable[start]):
            for part in self._loader.load(namespace, keys[start:stop], deadline_s):
                if part.tier is not Tier.DRAM:
                    self._counters.add("prompt_nvme_blocks_total", len(part.pinned()))
                self._table.unpin(part.pinned())
