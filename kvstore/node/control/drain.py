"""Drain: the node accepts no new blocks, serves those it holds, and makes sure that stopping it loses none.

The order arrives with responses of the metadata server, and heartbeats report the progress. The drain works in rounds: it writes
DRAM-only blocks back, and, with ``move``, other nodes pull blocks that no other volume holds
(``kvstore.node.control.migrator``). If nothing remains, the node is *drained*, and checks again from time to time because other
nodes may leave too. If it makes no progress and blocks would be lost or must still move, it is *blocked*, reports why, and
retries: a disk may accept writes again, or another node may get free space.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from kvproto.v1 import common_pb2, metadata_pb2
from kvproto.v1.common_pb2 import (
    NODE_STATE_DRAIN_BLOCKED,
    NODE_STATE_DRAINED,
    NODE_STATE_DRAINING,
    DrainOrder,
    DrainProgress,
    NodeState,
)
from kvstore.core.clock import Clock
from kvstore.core.errors import KVStoreError
from kvstore.core.limits import MAX_REASON
from kvstore.node.control.admission_gate import AdmissionGate
from kvstore.node.control.migrator import BlockMigrator
from kvstore.node.state.model import Block
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import node as node_metrics

log = logging.getLogger(__name__)

BUSY_S = 0.1
"""Pause between rounds that make progress."""
BLOCKED_S = 3.0
"""Pause between rounds of a blocked drain."""
WRITTEN_S = 0.5
"""Interval of progress updates while blocks are written back."""
DRAINED_S = 30.0
"""Pause between rounds of a drained node."""
TRIES = 3
"""Rounds without progress after which the drain is blocked."""


class Drainer:
    """Executes drain orders. A ``HeartbeatListener``. ``apply`` from any thread; ``start`` and ``stop`` once each.

    Args:
        node_id: this node.
        gate: closed while there is an order.
        table: the blocks of this node.
        busy: whether earlier work is in progress: stores, layered loads, waits for prompts.
        writes_back: whether blocks of this node become durable at all.
        counters: metrics.
        clock: time.
        patience_s: how long the drain waits for ``busy``: an engine that died during a store never completes it.
    """

    def __init__(
        self,
        node_id: str,
        gate: AdmissionGate,
        table: BlockTable,
        busy: Callable[[], bool],
        counters: Counters,
        clock: Clock,
        *,
        writes_back: bool,
        patience_s: float,
    ) -> None:
        self._node_id = node_id
        self._gate = gate
        self._table = table
        self._busy = busy
        self._writes_back = writes_back
        self._counters = counters
        self._clock = clock
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._order: DrainOrder | None = None
        self._executing: DrainOrder | None = None
        """The order that the thread carries out."""
        self._stopping = False
        self._state: NodeState = NODE_STATE_DRAINING
        self._reason = ""
        self._not_durable = 0
        self.migrator: BlockMigrator | None = None
        """Set before ``start``. None: without a metadata server, blocks cannot be moved to other nodes."""
        self._thread = threading.Thread(target=self._run, name="kvstore-drain", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Stop the thread. A migration stops after its current batch."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self.migrator is not None:
            self.migrator.close()

    # ---- order and progress ----
    def report(self, heartbeat: metadata_pb2.HeartbeatRequest) -> None:
        progress = self.progress()
        if progress is not None:
            heartbeat.drain.CopyFrom(progress)

    def on_heartbeat(self, response: metadata_pb2.HeartbeatResponse) -> None:
        self.apply(response.drain if response.HasField("drain") else None)

    def on_registered(
        self, response: metadata_pb2.RegisterNodeResponse, *, new_index: bool
    ) -> Sequence[metadata_pb2.DrainNodeRequest]:
        order = self._order
        if order is not None and new_index and not response.HasField("drain"):
            return [metadata_pb2.DrainNodeRequest(operation_id=order.operation_id, node_id=self._node_id, move=order.move)]
        self.apply(response.drain if response.HasField("drain") else None)
        return []

    def apply(self, order: DrainOrder | None) -> None:
        """Set the order; None: none. The same order again has no effect."""
        with self._changed:
            if order == self._order:
                return
            self._order = order
            self._state, self._reason = NODE_STATE_DRAINING, ""
            self._gate.set_draining(order is not None)
            self._changed.notify_all()
        if order is None:
            log.warning("drain cancelled: the node accepts blocks again")
        else:
            self._counters.add(node_metrics.DRAINS_BEGUN)
            log.warning("drain started: the node accepts no new blocks (move=%s)", order.move)

    @property
    def order(self) -> DrainOrder | None:
        """The current order; None: none."""
        return self._order

    def progress(self) -> DrainProgress | None:
        """Return the progress. None: no drain was ordered."""
        with self._changed:
            order, state, why = self._order, self._state, self._reason
        if order is None:
            return None
        migrator = self.migrator if order.move else None
        return DrainProgress(
            operation_id=order.operation_id,
            state=state,
            waiting_blocks=self._table.counts()[1],
            not_durable_blocks=self._not_durable,
            left_blocks=migrator.remaining if migrator is not None else 0,
            moved_blocks=migrator.moved_blocks if migrator is not None else 0,
            moved_bytes=migrator.moved_bytes if migrator is not None else 0,
            why=why[:MAX_REASON],
        )

    def pause(self, seconds: float) -> bool:
        """Wait between batches of a migration. Returns whether to stop: the order changed, or the node stops."""
        order = self._executing
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._order is not order, seconds)
            return self._stopping or self._order is not order

    # ---- rounds ----
    def _run(self) -> None:
        while not self._stopping:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._order is not None)
                order = self._order
            if order is None or self._stopping:
                continue
            self._executing = order
            try:
                self._execute(order)
            except Exception:  # thread edge: the drain must go on after a bug
                self._counters.add(node_metrics.DRAIN_BUGS)
                log.exception("drain failed: unexpected error, trying again")
                self.pause(BLOCKED_S)

    def _is_over(self, order: DrainOrder) -> bool:
        return self._stopping or self._order is not order

    def _execute(self, order: DrainOrder) -> None:
        """Do rounds until the order changes or the node stops."""
        began_s = self._clock.now_s()
        if self.migrator is not None:
            self.migrator.reset()
        stuck_rounds, before = 0, -1
        while not self._is_over(order):
            busy = self._busy()  # a store that completes during the round may be missing in it
            remaining, why = self._round(order)
            if self._is_over(order):
                return
            busy = busy and self._clock.now_s() < began_s + self._patience_s
            if busy:
                self._set_state(order, NODE_STATE_DRAINING, "waits for stores, layered loads or prompts that began earlier")
                self.pause(BUSY_S)
            elif not remaining:
                stuck_rounds, before = 0, -1
                self._set_state(order, NODE_STATE_DRAINED, "")
                self.pause(DRAINED_S)
            else:
                stuck_rounds = stuck_rounds + 1 if remaining == before else 0
                before = remaining
                blocked = stuck_rounds >= TRIES
                self._set_state(order, NODE_STATE_DRAIN_BLOCKED if blocked else NODE_STATE_DRAINING, why)
                self.pause(BLOCKED_S if blocked else BLOCKED_S / TRIES if stuck_rounds else BUSY_S)

    def _round(self, order: DrainOrder) -> tuple[int, str]:
        """Do one round. Returns how many blocks would be lost or must still move, and why."""
        self._write_back(order)
        remaining, why = 0, ""
        if order.move and self.migrator is None:
            remaining, why = 1, "without a metadata server there is no other node"
        elif order.move and self.migrator is not None:
            try:
                done = self.migrator.round(self._table.snapshot())
                remaining, why = done.remaining, done.why
            except KVStoreError as error:
                remaining, why = max(1, self.migrator.remaining), f"a call to the metadata server failed: {error}"
        self._not_durable = len(self._volatile(order))
        if self._not_durable and not why:
            accepts = "no volume or storage node accepts the blocks that are only in DRAM"
            why = accepts if self._writes_back else "this node keeps blocks in DRAM only"
        return remaining + self._not_durable, why

    def _volatile(self, order: DrainOrder) -> list[Block]:
        """Return blocks stored on this node that would be lost with the process."""
        for node_volume in self._table.node_volumes:
            node_volume.look_in_place()
        migrator = self.migrator if order.move else None
        volatile = [block for block in self._table.snapshot() if block.volatile]
        return [block for block in volatile if migrator is None or not migrator.is_safe(block.key)]

    def _write_back(self, order: DrainOrder) -> None:
        """Write DRAM-only blocks back, and wait for them while this order is in force."""
        if not self._writes_back:
            return
        self._table.requeue_writeback(sorted(self._volatile(order), key=lambda block: (block.namespace_id, block.depth)))
        while not self._is_over(order) and not self._table.wait_written(self._clock.now_s() + WRITTEN_S):
            self._not_durable = len(self._volatile(order))

    def _set_state(self, order: DrainOrder, state: NodeState, why: str) -> None:
        with self._changed:
            if self._order is not order:
                return
            changed, self._state, self._reason = state != self._state, state, why
        if changed:
            name = common_pb2.NodeState.Name(state).removeprefix("NODE_STATE_").lower().replace("_", " ")
            log.warning("drain state changed: %s (not_durable=%d, reason=%s)", name, self._not_durable, why or "none")
