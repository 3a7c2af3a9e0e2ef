"""Second copies: each durable block of a namespace with two copies gets a replica on another node.

Theory of operation.

1. Each block of such a namespace that becomes durable here is checked about a second later: the index says who holds it. The
   delay lets the replicas of other nodes be published, e.g. that of the node whose second copy this block is.
2. If this node must act (``placement``), the partner is asked to pull the block, as in a drain: it reads and verifies the block,
   and answers once its copy is durable. The store that made the block waits for nothing of this.
3. Passes over all blocks repair what was lost. A pass begins if a namespace gets two copies (also after a start), if a durable
   volume is lost, with its node or alone, if partners in another zone or on another host appear, and if blocks were left out of
   the queue. Blocks in DRAM are checked from time to time, because the partner may have evicted its copy: it does not know what
   is used here.
4. At most ``bytes_per_s`` are copied, in offers of ``window_bytes``. At most ``CHECKS_PER_S`` blocks are checked, and fewer in a
   large cluster, so that the index has time for lookups. Blocks that a lost node probably shared are checked first. Without such
   a namespace, the thread does nothing. Without changes, it does nothing but the check of blocks in DRAM.
5. No state here must survive: the index and the rules say what is missing. The index may know less than there is, while it is
   rebuilt. So a block is only copied if the index names this node as a holder, and none is for ``REBUILD_S`` after a new index.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from kvproto.v1 import metadata_pb2
from kvstore.core.clock import Clock
from kvstore.core.errors import KVStoreError
from kvstore.core.types import BlockKey, NamespaceId, NodeId, StoreOutcome
from kvstore.node.control.admission_gate import AdmissionGate
from kvstore.node.control.pull_client import LOCATE_KEYS, PullClient
from kvstore.node.copies.copy_queue import Candidate, CopyOffer, CopyQueue, Partners, plan_offers
from kvstore.node.copies.membership import Membership
from kvstore.node.copies.placement import Members, unit_of
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import node as node_metrics

log: Final = logging.getLogger(__name__)
_limited: Final = LimitedLog(log)

TICK_S: Final = 0.25
SETTLE_S: Final = 1.0
"""Delay between a block's durability and its check."""
MAX_NEW: Final = 65_536
"""Blocks that became durable since the last tick."""
CHECKS_PER_S: Final = 4_096
ALL_CHECKS_PER_S: Final = 262_144
"""Checks of all nodes together."""
LOCKED_BLOCKS: Final = 32
"""Blocks whose units are found under one hold of the table's lock: up to ``UNIT_BLOCKS`` steps each."""
SIFTED_BLOCKS: Final = 1_024
"""Blocks per check of which ones a lost node shared."""
SIFTED_PER_S: Final = 65_536
OFFER_BLOCKS: Final = 1_024
RETRY_S: Final = 5.0
"""Delay after a failed call to the metadata server, and before the second try of a block that is not ready."""
REBUILD_S: Final = 60.0
"""Time in which all nodes send their inventories to a new index."""
HOT_CHECK_S: Final = 600.0
"""Time between two checks of the blocks in DRAM."""
LEFT_OUT_S: Final = 3_600.0
"""Least time between two passes over blocks that were left out of the queue."""
MAX_RETRY_S: Final = 300.0
LATE_S: Final = 600.0
"""A second copy that is not made within this time after its block became durable, or after a pass began, is late."""
_ALONE: Final = "there is no other node with a durable volume"


class _MembershipChange(NamedTuple):
    """What the last list of nodes changed.

    Attributes:
        before: the nodes until then.
        lost: nodes that lost a durable volume, or left with it.
        moved: nodes that are in another zone now, by name.
    """

    before: Members
    lost: frozenset[NodeId]
    moved: Sequence[NodeId]


class Copier:
    """Makes second copies. ``on_heartbeat`` from any thread; ``start`` and ``stop`` once each.

    Args:
        calls: calls to the metadata server and to other nodes.
        table: the blocks of this node.
        gate: closed while this node drains or stops; then it makes no copies.
        counters: metrics.
        clock: time.
        window_bytes: maximum bytes of one offer.
        bytes_per_s: maximum bandwidth; 0: no limit.
        recopy_after_s: how long a silent node counts as a holder.
        pause: waits some seconds between offers; True: the node stops.
    """

    def __init__(
        self,
        calls: PullClient,
        table: BlockTable,
        gate: AdmissionGate,
        counters: Counters,
        clock: Clock,
        *,
        window_bytes: int,
        bytes_per_s: int,
        recopy_after_s: float,
        pause: Callable[[float], bool] | None = None,
    ) -> None:
        self._calls = calls
        self._table = table
        self._gate = gate
        self._counters = counters
        self._clock = clock
        self._window_bytes = window_bytes
        self._bytes_per_s = bytes_per_s
        self._stopping = threading.Event()
        self._pause = pause or self._stopping.wait
        self._new: deque[Block] = deque()
        self._new_left_out = False
        self._queue: CopyQueue[Block] = CopyQueue()
        self._partners = Partners()
        self._membership = Membership(NodeId(calls.node.node_id), recopy_after_s)
        self._addresses: dict[NodeId, str] = {}
        self._token = 0
        self._read_token: int | None = None
        self._reach = 0
        """Smallest reach of the partners in the checks since the last pass; a larger one starts a new pass (0: none)."""
        self._held_until_s = 0.0
        self._lost: frozenset[NodeId] = frozenset()
        """Nodes whose loss the pass repairs."""
        self._before_loss = self._membership.members
        self._namespaces: frozenset[NodeNamespace] = frozenset()
        self._hot_due_s = 0.0
        self._left_out_due_s = 0.0
        self._alone_since_s: float | None = None
        self._late_s = -LATE_S
        """When a block was last found whose second copy is late."""
        self._reason = ""
        self._thread = threading.Thread(target=self._run, name="kvstore-copies", daemon=True)
        table.on_durable_needing_copy = self._became_durable

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Stop the thread after its present call."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._calls.close()

    # ---- what others tell
    def report(self, heartbeat: metadata_pb2.HeartbeatRequest) -> None:
        pass

    def on_heartbeat(self, response: metadata_pb2.HeartbeatResponse) -> None:
        self._token = response.membership_version

    def on_registered(
        self,
        response: metadata_pb2.RegisterNodeResponse,  # noqa: ARG002
        *,
        new_index: bool,
    ) -> Sequence[metadata_pb2.DrainNodeRequest]:
        if new_index:
            self._held_until_s = self._clock.now_s() + REBUILD_S
        return []

    def _became_durable(self, block: Block) -> None:
        """Queue a block. Called under the table's lock."""
        if len(self._new) < MAX_NEW:
            self._new.append(block)
        else:
            self._new_left_out = True

    # ---- what others ask
    @property
    def waiting_blocks(self) -> int:
        """Blocks that wait for a check or a copy."""
        return len(self._queue) + len(self._new)

    def late(self) -> str:
        """Why second copies are late, as a sentence; empty: they are not."""
        now_s, alone_since_s = self._clock.now_s(), self._alone_since_s
        is_alone = alone_since_s is not None and now_s - alone_since_s > LATE_S
        if not self.waiting_blocks or not (is_alone or now_s - self._late_s < LATE_S):
            return ""
        reason = _ALONE if is_alone else self._reason or "node.move_bandwidth limits the copies"
        return f"{self.waiting_blocks:,} durable blocks wait for a second copy, some for more than {LATE_S:.0f} s: {reason}."

    # ---- rounds
    def _run(self) -> None:
        while not self._stopping.wait(TICK_S):
            try:
                while self.round() and not self._stopping.is_set():
                    pass
            except KVStoreError as error:
                self._counters.add(node_metrics.COPIES_FAILED)
                self._reason = f"a call to the metadata server failed: {error}"
                _limited.warning("second copies delayed, trying again: %s", error)
                self._pause(RETRY_S)
            except Exception:  # thread edge: copies must go on after a bug
                self._counters.add(node_metrics.COPY_BUGS)
                self._new_left_out = True
                log.exception("second copies failed: unexpected error, trying again")
                self._pause(RETRY_S)

    def round(self) -> bool:
        """Check some blocks, and have those copied that need it. Returns whether there may be more to do now.

        Raises:
            KVStoreError: a call to the metadata server failed. The blocks stay in the queue.
        """
        now_s = self._clock.now_s()
        namespaces = frozenset(self._table.accounts.twice_held)
        if not namespaces:
            self._new.clear()
            self._queue.clear()
            self._namespaces = namespaces
            self._alone_since_s = None
            return False
        while self._new:
            self._queue.add(Candidate(self._new.popleft(), hot=True, since_s=now_s), now_s + SETTLE_S)
        if self._gate.closed or now_s < self._held_until_s:
            return False
        self._begin_pass_if_due(namespaces, now_s)
        if not self._membership.members.reach:
            self._alone_since_s = self._alone_since_s or now_s
            return False
        self._alone_since_s = None
        candidates = self._queue.take(now_s, SIFTED_BLOCKS if self._queue.sifting else LOCATE_KEYS)
        if not candidates:
            return False
        if candidates[0].may_wait:
            candidates = self._sift(candidates)
            if self._pause(SIFTED_BLOCKS / SIFTED_PER_S):
                return False
            if not candidates:
                return True
        try:
            chosen = self._choose(candidates, now_s)
        except KVStoreError:
            for one in candidates:
                self._queue.add(one, now_s + RETRY_S)
            raise
        self._counters.add(node_metrics.COPIES_CHECKED_BLOCKS, len(candidates))
        if self._pause(len(candidates) / min(CHECKS_PER_S, ALL_CHECKS_PER_S / self._membership.members.count)):
            return False
        offers = plan_offers(chosen, self._window_bytes, OFFER_BLOCKS)
        return not any(self._pause(self._offer(offer)) for offer in offers)

    # ---- passes
    def _begin_pass_if_due(self, namespaces: frozenset[NodeNamespace], now_s: float) -> None:
        """Begin a pass over all blocks if there is a reason, else one over the blocks in DRAM from time to time.

        Args:
            namespaces: those with two copies.
            now_s: the time.

        Raises:
            KVStoreError: the metadata server does not list the nodes. Nothing has changed.
        """
        change = self._refresh_members(now_s)
        reason = self._reason_for_pass(namespaces, change, now_s)
        self._namespaces = namespaces
        if reason:
            self._begin_full_pass(reason, change, now_s)
        elif now_s >= self._hot_due_s and not self._queue.passing:
            self._hot_due_s = now_s + HOT_CHECK_S
            hot, _ = self._held_blocks()
            self._queue.begin_pass(hot, [], now_s)

    def _refresh_members(self, now_s: float) -> _MembershipChange:
        """Read the list of nodes if it has changed, or if a silent node ceases to count."""
        membership = self._membership
        before, volumes, zones = membership.members, membership.volumes, membership.zones
        if self._read_token != self._token or now_s >= membership.until_s:
            token = self._token  # before the list is read: a change during the call is read in the next round
            statuses = self._calls.nodes()
            membership.update(statuses, now_s)
            self._addresses = {NodeId(one.node.node_id): one.node.control_address for one in statuses}
            self._read_token = token
        lost = frozenset(node_id for node_id, _ in volumes - membership.volumes)
        moved = sorted(node_id for node_id, zone in membership.zones.items() if zones.get(node_id, zone) != zone)
        return _MembershipChange(before, lost, moved)

    def _reason_for_pass(self, namespaces: frozenset[NodeNamespace], change: _MembershipChange, now_s: float) -> str:
        """Why a pass over all blocks must begin, for the log; empty: there is no reason."""
        if namespaces - self._namespaces:
            return "a namespace has two copies now"
        if change.lost:
            return f"volumes of nodes {', '.join(sorted(change.lost))} lost"
        if self._membership.members.reach > self._reach > 0:
            return "partners in another zone or on another host appeared"
        if change.moved:
            return f"zones of nodes {', '.join(change.moved)} changed"
        if (self._queue.left_out or self._new_left_out) and now_s >= self._left_out_due_s:
            return "blocks were left out of the queue"
        return ""

    def _begin_full_pass(self, reason: str, change: _MembershipChange, now_s: float) -> None:
        """Begin a pass over all blocks, in place of one that has not ended. After a loss, it checks first what was shared."""
        self._reach = 0
        hot, cold = self._held_blocks()
        self._left_out_due_s, self._new_left_out = now_s + LEFT_OUT_S, False
        self._hot_due_s = now_s + HOT_CHECK_S
        if change.lost:
            repairs_earlier_loss = self._queue.sifting  # the pass that it began has not ended
            self._lost = self._lost | change.lost if repairs_earlier_loss else change.lost
            before = self._before_loss if repairs_earlier_loss else change.before
            self._before_loss = self._membership.members.with_lost(before, self._lost)
        self._queue.begin_pass(hot, cold, now_s, sifting=bool(change.lost))
        self._counters.add(node_metrics.COPY_PASSES)
        log.info("pass over second copies started: %s (blocks=%d)", reason, len(hot) + len(cold))

    def _held_blocks(self) -> tuple[list[Block], list[Block]]:
        """Return the durable blocks of namespaces with two copies: those in DRAM, and the others."""
        held = [block for block in self._table.snapshot() if _is_held(block)]
        return [block for block in held if block.dram is not None], [block for block in held if block.dram is None]

    def _sift(self, candidates: Sequence[Candidate[Block]]) -> list[Candidate[Block]]:
        """Return the blocks that a lost node probably shared. The others are put off to the end of the pass."""
        units = self._units(candidates)
        shared = {unit: self._before_loss.probably_shared(unit, self._lost) for unit in set(units.values())}
        self._queue.put_off(one for one in candidates if not shared[units[one.block.key]])
        return [one for one in candidates if shared[units[one.block.key]]]

    # ---- checks
    def _choose(self, candidates: Sequence[Candidate[Block]], now_s: float) -> list[tuple[NodeId, Candidate[Block]]]:
        """Return the blocks that need a copy now, each with its partner. Those whose partners rest go back to the queue."""
        keys: dict[NamespaceId, list[BlockKey]] = {}
        held = [one for one in candidates if _is_held(one.block)]
        for one in held:
            keys.setdefault(one.block.namespace_id, []).append(one.block.key)
        holders: dict[BlockKey, set[NodeId]] = {}
        for key, node_id in self._calls.holders(keys, lambda _volume: True):
            holders.setdefault(key, set()).add(NodeId(node_id))
        members, units = self._membership.members, self._units(held)
        self._reach = min(self._reach or members.reach, members.reach)
        chosen: list[tuple[NodeId, Candidate[Block]]] = []
        for one in held:
            unit = units[one.block.key]
            if members.here not in holders.get(one.block.key, ()):
                self._queue.add(one, now_s + RETRY_S)
                continue
            if not members.must_copy(unit, holders.get(one.block.key, ())):
                continue
            if now_s - one.since_s > LATE_S:
                self._late_s = now_s
            ranked = members.partners(unit)
            partner = self._partners.choose(ranked, now_s, hot=one.hot)
            if partner is not None and one.block.namespace.spec is not None:
                chosen.append((partner, one))
                continue
            again_s = min((self._partners.rest_end_s(node_id, hot=one.hot) for node_id in ranked), default=now_s)
            self._queue.add(one, max(now_s + RETRY_S, again_s))
        return chosen

    def _units(self, candidates: Sequence[Candidate[Block]]) -> dict[BlockKey, BlockKey]:
        residency = self._table.residency
        known: dict[BlockKey, BlockKey] = {}
        for at in range(0, len(candidates), LOCKED_BLOCKS):
            with residency.lock:
                for one in candidates[at : at + LOCKED_BLOCKS]:
                    unit_of(one.block, residency.blocks, residency.volume_evictor.children, known)
        return known

    # ---- offers
    def _offer(self, offer: CopyOffer[Block]) -> float:
        """Have a partner pull blocks. Returns how long to pause, so that the bandwidth stays in its limit."""
        now_s = self._clock.now_s()
        blocks = [one.block for one in offer.candidates]
        cold = [block for block in blocks if block.dram is None]
        if self._partners.rest_end_s(offer.node_id, hot=offer.hot) > now_s:  # it has refused an earlier offer of this round
            for one in offer.candidates:
                self._queue.add(one, now_s + RETRY_S)
            return 0.0
        try:
            answer = self._calls.pull(self._addresses[offer.node_id], blocks, None, second_copy=True, may_evict=offer.hot)
        except KVStoreError as error:
            self._counters.add(node_metrics.COPIES_FAILED)
            self._refused(offer, str(error))
            self._again(offer.candidates, now_s)
            return offer.nbytes / self._bytes_per_s if self._bytes_per_s else 0.0  # some may have been moved
        finally:
            self._table.drop_staged(cold)
        outcomes = [StoreOutcome(outcome) for outcome in answer.outcomes]
        outcomes += [StoreOutcome.LOST] * (len(blocks) - len(outcomes))
        moved = [block for block, outcome in zip(blocks, outcomes, strict=False) if outcome is StoreOutcome.STORED]
        left = [
            one
            for one, outcome in zip(offer.candidates, outcomes, strict=False)
            if outcome not in (StoreOutcome.STORED, StoreOutcome.EXISTS, StoreOutcome.CORRUPT)
        ]
        nbytes = sum(block.nbytes for block in moved)
        self._counters.add(node_metrics.COPIES_MADE_BLOCKS, len(moved))
        self._counters.add(node_metrics.COPIES_MADE_BYTES, nbytes)
        if left:
            self._counters.add(node_metrics.COPIES_REFUSED_BLOCKS, len(left))
            self._again(left, now_s)
        if StoreOutcome.SKIPPED in outcomes:
            self._refused(offer, answer.why)
        elif moved:
            self._partners.succeeded(offer.node_id, hot=offer.hot)
            self._reason = ""
        return nbytes / self._bytes_per_s if self._bytes_per_s else 0.0

    def _refused(self, offer: CopyOffer[Block], why: str) -> None:
        self._partners.failed(offer.node_id, self._clock.now_s(), hot=offer.hot)
        self._reason = f"{offer.node_id}: {why}"
        _limited.warning("second copies not made: node %s (hot=%s, reason=%s)", offer.node_id, offer.hot, why)

    def _again(self, candidates: Sequence[Candidate[Block]], now_s: float) -> None:
        """Put blocks back into the queue, for another partner or a later time."""
        for one in candidates:
            due_s = now_s + min(MAX_RETRY_S, RETRY_S * 2**one.tries)
            self._queue.add(replace(one, tries=one.tries + 1), due_s)


def _is_held(block: Block) -> bool:
    """Whether a block is durable on a volume here, and needs two copies."""
    return block.namespace.copies > 1 and block.nvme_volume is not None and not block.evicting
