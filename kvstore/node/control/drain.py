"""Draining: this node takes nothing new, serves what it holds, and sees to it that nothing is lost when it is stopped.

The order comes with answers of the metadata server, and how far it is goes out with heartbeats. In rounds: what lies in DRAM
only is written behind; with ``move``, others take what lies nowhere else (``kvstore.node.control.migrator``). Once there is
nothing left to do the node is *drained*, and looks again now and then, for others may leave as well. Where it can do no more and
blocks would be lost, it is *blocked*, says why, and tries again: a disk may take writes again, another node may get room.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvproto.v1 import common_pb2
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
from kvstore.core.types import BlockKey
from kvstore.node.base.admission_gate import Gate
from kvstore.node.control.migrator import Mover
from kvstore.node.durability.shutdown_flush import by_namespace
from kvstore.node.state.model import Block
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters

log = logging.getLogger(__name__)

BUSY_S = 0.1
"""Between rounds while something moves."""
BLOCKED_S = 3.0
"""Between rounds while nothing can be done."""
WRITTEN_S = 0.5
"""Between looks at what is being written behind."""
DRAINED_S = 30.0
"""Between looks at what was drained."""
TRIES = 3
"""Rounds that bring nothing before the node says that it is blocked."""


class Drainer:
    """Carries out the order. ``told`` from any thread; ``start`` and ``stop`` once each.

    Args:
        gate: shut while there is an order.
        table: what this node holds.
        busy: whether something that began before still goes on here: stores, staged loads, awaited prompts.
        writes_behind: whether blocks become durable here at all.
        counters: events.
        clock: time.
        patience_s: how long ``busy`` is waited for: an engine that was stopped in a store never ends it.
    """

    def __init__(
        self,
        gate: Gate,
        table: BlockTable,
        busy: Callable[[], bool],
        counters: Counters,
        clock: Clock,
        *,
        writes_behind: bool,
        patience_s: float,
    ) -> None:
        self._gate = gate
        self._table = table
        self._busy = busy
        self._writes_behind = writes_behind
        self._counters = counters
        self._clock = clock
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._order: DrainOrder | None = None
        self._stopping = False
        self._state: NodeState = NODE_STATE_DRAINING
        self._why = ""
        self._not_durable = 0
        self.mover: Mover | None = None
        """Set before ``start``; None: there is no metadata server, and so nobody to move anything to."""
        self._thread = threading.Thread(target=self._run, name="kvstore-drain", daemon=True)

    def start(self) -> None:
        """Begins to carry out orders."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ends; what is under way is left at the next batch."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self.mover is not None:
            self.mover.close()

    # ---- what is to be done, and how far it is ----
    def told(self, order: DrainOrder | None) -> None:
        """What the metadata server says that this node is to do; the same again changes nothing."""
        with self._changed:
            if order == self._order:
                return
            self._order = order
            self._state, self._why = NODE_STATE_DRAINING, ""
            self._gate.draining = order is not None
            self._changed.notify_all()
        if order is None:
            log.warning("this node no longer drains")
        else:
            self._counters.add("drains_begun_total")
            log.warning("this node drains%s", ", and its blocks move to others" if order.move else "")

    @property
    def order(self) -> DrainOrder | None:
        """What this node is to do."""
        return self._order

    def progress(self) -> DrainProgress | None:
        """How far it is; None: there is no order."""
        with self._changed:
            order, state, why = self._order, self._state, self._why
        if order is None:
            return None
        mover = self.mover if order.move else None
        return DrainProgress(
            operation_id=order.operation_id,
            state=state,
            waiting_blocks=self._table.counts()[1],
            not_durable_blocks=self._not_durable,
            left_blocks=mover.left if mover is not None else 0,
            moved_blocks=mover.moved_blocks if mover is not None else 0,
            moved_bytes=mover.moved_bytes if mover is not None else 0,
            why=why[:MAX_REASON],
        )

    def pause(self, seconds: float) -> bool:
        """Waits, for the mover; True: the order is another than when it began, or the node ends."""
        order = self._order
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._order is not order, seconds)
            return self._stopping or self._order is not order

    # ---- doing it ----
    def _run(self) -> None:
        while not self._stopping:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._order is not None)
                order = self._order
            if order is None or self._stopping:
                continue
            try:
                self._carry_out(order)
            except Exception:  # process edge: an order that nobody works on any more would never end
                self._counters.add("drain_bugs_total")
                log.exception("draining failed, trying again")
                self.pause(BLOCKED_S)

    def _over(self, order: DrainOrder) -> bool:
        return self._stopping or self._order is not order

    def _carry_out(self, order: DrainOrder) -> None:
        """Rounds, until the order changes or the node ends."""
        began_s = self._clock.now_s()
        if self.mover is not None:
            self.mover.forget()
        tries, before = 0, -1
        while not self._over(order):
            undone, why = self._round(order)
            if self._over(order):
                return
            busy = self._busy() and self._clock.now_s() < began_s + self._patience_s
            if busy:
                self._say(order, NODE_STATE_DRAINING, "stores, staged loads or awaited prompts that began before")
                self.pause(BUSY_S)
            elif not undone:
                tries, before = 0, -1
                self._say(order, NODE_STATE_DRAINED, "")
                self.pause(DRAINED_S)
            else:
                tries = tries + 1 if undone == before else 0
                before = undone
                blocked = tries >= TRIES
                self._say(order, NODE_STATE_DRAIN_BLOCKED if blocked else NODE_STATE_DRAINING, why)
                self.pause(BLOCKED_S if blocked else BLOCKED_S / TRIES if tries else BUSY_S)

    def _round(self, order: DrainOrder) -> tuple[int, str]:
        """Once through everything. How many blocks would still be lost (or are to move), and why."""
        self._write_behind(order)
        left, why = 0, ""
        if order.move and self.mover is None:
            left, why = 1, "there is no metadata server to find other nodes by"
        elif order.move and self.mover is not None:
            try:
                done = self.mover.round(self._table.snapshot())
                left, why = done.left, done.why
            except KVStoreError as error:
                left, why = max(1, self.mover.left), f"the metadata server does not answer: {error}"
        self._not_durable = len(self._volatile(order))
        if self._not_durable and not why:
            why = "no volume or storage node takes them" if self._writes_behind else "this node keeps blocks in DRAM only"
        return left + self._not_durable, why

    def _volatile(self, order: DrainOrder) -> list[Block]:
        """Blocks stored here that would be lost with this process."""
        for node_volume in self._table.node_volumes:
            node_volume.volume.check_files()
        moved: Callable[[BlockKey], bool] = self.mover.is_safe if order.move and self.mover is not None else lambda _key: False
        return [block for block in self._table.snapshot() if block.ours and not block.durable and not moved(block.key)]

    def _write_behind(self, order: DrainOrder) -> None:
        """Sends what lies in DRAM only to where it is durable, and waits for it, as long as this order holds."""
        if not self._writes_behind:
            return
        for namespace, keys in by_namespace(sorted(self._volatile(order), key=lambda block: block.depth)):
            self._table.write_again(namespace, keys)
        while not self._over(order) and not self._table.wait_written(self._clock.now_s() + WRITTEN_S):
            self._not_durable = len(self._volatile(order))

    def _say(self, order: DrainOrder, state: NodeState, why: str) -> None:
        with self._changed:
            if self._order is not order:
                return
            changed, self._state, self._why = state != self._state, state, why
        if changed:
            name = common_pb2.NodeState.Name(state).removeprefix("NODE_STATE_").lower().replace("_", " ")
            log.warning("draining: %s%s; %d blocks would be lost", name, f" ({why})" if why else "", self._not_durable)
