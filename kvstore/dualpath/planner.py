"""The path planner: plans reads, maintains the queues, plans failed parts again.

Until a block is reported arrived or its plan ends, exactly one part is responsible for it. Reports may be lost, late or repeated:
progress is cumulative, and reports for ended plans or parts are counted and ignored.

A plan in the queues makes its links look busy. Three rules limit how long it counts:

1. Only progress keeps a plan alive, not reports, and for at most ``MAX_PLAN_LIFE_S``.
2. At one node, a plan counts for at most ``queues.QUEUE_S`` of reading, and so do all plans of one confined tenant together.
3. A plan is stalled if it makes no progress for longer than the work queued before it can take. It then does not count until it
   makes progress.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

from kvstore.core import limits
from kvstore.core.errors import CapacityExceeded, Internal, InvalidArgument, NotFound, Unavailable
from kvstore.dualpath.contract import (
    LoadPlan,
    LoadPrice,
    NodeState,
    PlanPart,
    PlanPolicy,
    PlanRequest,
    PlanUnderWay,
    ReadSide,
    Reasons,
    Share,
    Span,
    finish_seconds,
)
from kvstore.dualpath.queues import Charge, ReadQueues

PLAN_LIFE_S = 60.0
"""A plan without progress for this long expires, because its client is considered dead."""
MAX_PLAN_LIFE_S = 3_600.0
"""A plan expires after this time, even if it makes progress: a client may report progress that it does not make."""
PATIENCE_S = 5.0
"""A plan is stalled after this time without progress, plus twice the time that its nodes need, at their measured rates, for the
work queued before it. Clients give a part to another host after a second (``stall_s``)."""
DEADLINE_GRACE_S = 1.0
"""A plan that still makes progress may exceed its deadline by this time, for bytes in flight."""
DECISIONS_KEPT = 256
"""Default of the maximum number of recent decisions."""
DECISION_PARTS_KEPT = 16_384
"""Maximum number of parts of all recent decisions: about 2 MB."""


@dataclass(slots=True)
class PlannerCounters:
    """Totals since the planner was created."""

    plans: int = 0
    replans: int = 0
    finished: int = 0
    given_up: int = 0
    """Plans that no node could read, or that their client aborted."""
    expired: int = 0
    stalled: int = 0
    """Number of times that a plan stalled."""
    late_reports: int = 0
    """Reports for plans or parts that had ended."""


@dataclass(slots=True)
class _Live:
    """A plan in progress. A failed part has no charge."""

    request: PlanRequest
    policy: PlanPolicy
    """The policy at the time of planning: it also decides later re-plans, even if the planner's policy changes."""
    attempt: int
    deadline: float
    last: float
    """Reports do not move the deadline beyond this."""
    tenant: str | None
    """Tenant that the client is confined to; None: it is not confined."""
    patience: float = 0.0
    """Seconds without progress after which the plan is stalled."""
    stalls_at: float = math.inf
    """Time at which the plan is stalled unless it makes progress."""
    stalled: bool = False
    """Whether the plan is stalled, so that it does not count in the queues."""
    parts: list[PlanPart] = field(default_factory=list)
    charges: list[Charge | None] = field(default_factory=list)
    at: dict[str, Charge] = field(default_factory=dict)
    """First charge of the plan at each node; later charges there share its limit."""
    failed: frozenset[str] = frozenset()
    restored: dict[int, int] | None = None
    """Of a plan of another planner: position in ``parts`` by index of the part. None: the index is the position."""

    @property
    def next_check(self) -> float:
        """Time of the next check by ``Planner.expire``."""
        return self.deadline if self.stalled or self.deadline < self.stalls_at else self.stalls_at


class Planner:
    """The path planner of a cluster.

    Args:
        policy: divides requests that name none; may be replaced at any time (existing plans keep theirs).
        queues: pending reads and rates; nodes are added there, or with ``add_node``.
        plan_life_s: a plan without progress for this long expires.
        patience_s: a plan is stalled after this time without progress, plus twice the time for the work queued before it.
        decisions_kept: maximum number of recent plans in ``decisions``.
        relays: number of the idlest nodes offered to the policy as relays if a request names none.
        draw: creates plan ids, above 0; by default a counter. If plans outlive the planner, or clients do not trust each other,
            draw random ids from a large range: a caller that knows an id may report on its plan.
    """

    def __init__(
        self,
        policy: PlanPolicy,
        queues: ReadQueues | None = None,
        *,
        plan_life_s: float = PLAN_LIFE_S,
        patience_s: float = PATIENCE_S,
        decisions_kept: int = DECISIONS_KEPT,
        relays: int = 0,
        draw: Callable[[], int] | None = None,
    ) -> None:
        self.policy = policy
        self.queues = ReadQueues() if queues is None else queues
        self.counters = PlannerCounters()
        self.plan_life_s = plan_life_s
        self.patience_s = patience_s
        self.relays = relays
        self._live: dict[int, _Live] = {}
        self._draw = draw or itertools.count(1).__next__
        self._checks: list[tuple[float, int]] = []
        self._decisions: deque[LoadPlan] = deque()
        self._decisions_kept = decisions_kept
        self._parts_kept = 0  # of decisions
        self._parts_live = 0
        self._parts_of: Counter[str] = Counter()  # by tenant

    def __len__(self) -> int:
        """Number of plans in progress."""
        return len(self._live)

    def __contains__(self, plan_id: int) -> bool:
        """Whether the plan is in progress."""
        return plan_id in self._live

    def decisions(self) -> list[LoadPlan]:
        """Return the most recent decisions, oldest first."""
        return list(self._decisions)

    def live(self, most: int, after: int = 0) -> list[PlanUnderWay]:
        """Return up to ``most`` plans in progress, by id, from the first id above ``after``."""
        plans = ((plan_id, self._live[plan_id]) for plan_id in heapq.nsmallest(most, (one for one in self._live if one > after)))
        return [
            PlanUnderWay(
                plan_id,
                live.request,
                live.policy.name,
                live.attempt,
                live.deadline,
                tuple(
                    (part, None if charge is None else charge.blocks)
                    for part, charge in zip(live.parts, live.charges, strict=True)
                ),
            )
            for plan_id, live in plans
        ]

    # ---- nodes ----

    def add_node(self, node: str, snic: float, cnic: float) -> None:
        """Add a node, or one that is alive again, with its configured bandwidths in bytes/s."""
        self.queues.join(node, snic, cnic)

    def remove_node(self, node: str) -> tuple[tuple[int, int], ...]:
        """Remove a dead node: it gets no more work.

        Returns:
            (plan, part index) of the unfinished parts that it was reading. Only their clients know which blocks have arrived:
                they report ``fail``.
        """
        self.queues.leave(node)
        return tuple(
            (plan_id, part.index)
            for plan_id, live in self._live.items()
            for part, charge in zip(live.parts, live.charges, strict=True)
            if part.node == node and charge is not None and charge.blocks
        )

    # ---- plans ----

    def plan(
        self,
        request: PlanRequest,
        now: float,
        life_s: float = 0.0,
        policy: PlanPolicy | None = None,
        tenant: str | None = None,
    ) -> LoadPlan:
        """Decide which nodes read the request, and charge the queues.

        Args:
            request: the request.
            now: current time.
            life_s: the plan expires after this time, or ``DEADLINE_GRACE_S`` later if it makes progress. 0 means
                ``MAX_PLAN_LIFE_S``, which is also the maximum.
            policy: divides this request, also when it is planned again. None: the planner's.
            tenant: tenant that the client is confined to: it may have a quarter of all parts. None: it is not confined.

        Raises:
            InvalidArgument: a negative life.
            CapacityExceeded: too many plans or parts are in progress, of all clients or of the tenant.
            Unavailable: no living candidate.
        """
        self._check_space(1, tenant)
        request = self._with_relays(request, now)
        plan_id = self._draw()
        while plan_id in self._live:
            plan_id = self._draw()
        live = self._new_plan(request, now, life_s, policy, tenant)
        answer = self._decide(plan_id, live, [(0, request.blocks)] if request.blocks else [], now)
        self._keep(plan_id, live)
        self.counters.plans += 1
        return answer

    def restore(
        self,
        plan_id: int,
        request: PlanRequest,
        parts: Sequence[PlanPart],
        now: float,
        life_s: float = 0.0,
        policy: PlanPolicy | None = None,
        tenant: str | None = None,
    ) -> None:
        """Count a plan of another planner in the queues, as its client describes it. A plan that is known stays as it is.

        Only progress and the end of the plan change its charges. Its parts are not planned again, because their indexes and the
        nodes that failed are not known: ``fail`` raises ``NotFound``.

        Args:
            plan_id: the plan.
            request: what was planned.
            parts: parts in progress. Those of unknown nodes are left out, as if they had ended.
            now: current time.
            life_s: as for ``plan``.
            policy: policy that made the plan.
            tenant: tenant that the client is confined to.

        Raises:
            InvalidArgument: a negative life, or parts that overlap, are not within the request, or have the same index.
            CapacityExceeded: too many parts are in progress, of all clients or of the tenant.
        """
        if plan_id in self._live:
            return
        end = 0
        for part in sorted(parts, key=lambda part: part.start):
            if part.start < end or part.count < 1 or part.end > request.blocks:
                raise InvalidArgument(
                    "a part overlaps another one or is not within the request",
                    index=part.index,
                    start=part.start,
                    count=part.count,
                )
            end = part.end
        if len({part.index for part in parts}) < len(parts):
            raise InvalidArgument("two parts have the same index", plan_id=plan_id)
        states = {part.node: state for part in parts if (state := self.queues.state(part.node, now)) is not None}
        parts = [part for part in parts if part.node in states]
        self._check_space(1 + len(parts), tenant)
        live = self._new_plan(request, now, life_s, policy, tenant)
        live.restored = {part.index: position for position, part in enumerate(parts)}
        for part in parts:
            self._add_part(live, part, now)
        self._set_patience(live, states.values(), now)
        self._keep(plan_id, live)

    def price(self, request: PlanRequest, now: float, policy: PlanPolicy | None = None) -> LoadPrice:
        """Return how long a load would take if it were planned now. Changes nothing.

        Raises:
            Unavailable: no living candidate.
        """
        request = self._with_relays(request, now)
        usable, excluded, prefill = self._candidates(request, frozenset(), now)
        policy = copy(policy or self.policy)  # a turn of ``round_robin`` is not taken
        seconds = [
            self._share(policy, replace(request, blocks=blocks), usable, excluded, prefill)[1]
            for blocks in (min(1, request.blocks), request.blocks)
        ]
        return LoadPrice(*seconds)

    def progress(self, plan_id: int, part: int, blocks_done: int, now: float, *, measured: bool = True) -> bool:
        """Record how many blocks of a part have arrived in total, so that a lost or repeated report does no harm.

        Only newly arrived blocks keep a plan alive.

        Args:
            plan_id: the plan.
            part: index of the part.
            blocks_done: blocks that have arrived.
            now: current time.
            measured: the blocks arrived since the last report, so they count in the bandwidth estimate. False: some of them
                arrived before the plan was restored.

        Returns:
            False: the plan or the part has ended, and the client should stop loading it.

        Raises:
            InvalidArgument: the part does not exist, or it has fewer blocks.
        """
        live = self._live.get(plan_id)
        if live is None:
            self.counters.late_reports += 1
            return False
        position = part if live.restored is None else live.restored.get(part)
        if position is None or (charge := self._charge(live, position)) is None:
            self.counters.late_reports += 1
            return False
        count = live.parts[position].count
        if not 0 <= blocks_done <= count:
            raise InvalidArgument("blocks_done out of bounds", blocks_done=blocks_done, count=count)
        new = max(0, blocks_done - (count - charge.blocks))
        if new:
            self._moved(plan_id, live, now)
        self.queues.credit(charge, new, now, moved=measured)
        return True

    def finish(self, plan_id: int, now: float) -> bool:
        """End a plan whose load has ended. Return False if it had ended before."""
        if plan_id not in self._live:
            self.counters.late_reports += 1
            return False
        self._end(plan_id, now)
        self.counters.finished += 1
        return True

    def abort(self, plan_id: int, now: float) -> bool:
        """End a plan that the client aborted. Return False if it had ended before."""
        if plan_id not in self._live:
            self.counters.late_reports += 1
            return False
        self._end(plan_id, now)
        self.counters.given_up += 1
        return True

    def fail(self, plan_id: int, part: int, arrived: Iterable[Span], now: float) -> LoadPlan:
        """Plan the missing blocks of a failed part again, on nodes that have not failed in this plan.

        Args:
            plan_id: the plan.
            part: index of the part that failed.
            arrived: (start, count) of blocks *of this part* that arrived, numbered as in the request.
            now: current time.

        Returns:
            Only the new parts, under the next attempt number; empty if everything had arrived. The other parts continue.

        Raises:
            NotFound: the plan has ended, or another planner made it.
            InvalidArgument: the part has ended or does not exist, or the spans are not in it.
            CapacityExceeded: the plan would have too many parts, or too many are in progress; nothing has changed.
            Unavailable: no node is left; the plan has ended, and the missing blocks are misses.
        """
        live = self._live.get(plan_id)
        if live is None:
            self.counters.late_reports += 1
            raise NotFound("the plan has ended", plan_id=plan_id)
        if live.restored is not None:
            raise NotFound("another planner made this plan: plan the missing blocks as a new load", plan_id=plan_id)
        charge = self._charge(live, part)
        if charge is None:
            raise InvalidArgument("the part has ended", plan_id=plan_id, part=part)
        failed = live.parts[part]
        missing = missing_spans(failed, arrived)
        more = len(missing) + len(live.request.relays) + 2  # a node's share may begin within a span and so divide it
        if len(live.parts) + more > limits.MAX_PLAN_PARTS:
            raise CapacityExceeded("the plan has too many parts", plan_id=plan_id, limit=limits.MAX_PLAN_PARTS)
        self._check_space(more, live.tenant)
        self._moved(plan_id, live, now)
        done = failed.count - sum(count for _, count in missing)
        self.queues.credit(charge, max(0, done - (failed.count - charge.blocks)), now, moved=True)
        self.queues.credit(charge, charge.blocks, now, moved=False)
        live.charges[part] = None
        live.failed |= {failed.node}
        live.attempt += 1
        parts = len(live.parts)
        try:
            answer = self._decide(plan_id, live, missing, now)
        except Unavailable:
            self._end(plan_id, now)
            self.counters.given_up += 1
            raise
        self._count_parts(live, len(live.parts) - parts)
        self._schedule_check(plan_id, live)
        self.counters.replans += 1
        return answer

    def expire(self, now: float) -> list[int]:
        """End the plans whose deadline has passed, and mark plans without progress as stalled.

        Returns:
            Ids of the plans that expired.
        """
        over = []
        while self._checks and self._checks[0][0] <= now:
            _, plan_id = heapq.heappop(self._checks)
            live = self._live.get(plan_id)
            if live is None:
                continue
            if live.deadline <= now:
                self._end(plan_id, now)
                over.append(plan_id)
                continue
            if not live.stalled and live.stalls_at <= now:
                self._count(live, now, stalled=True)
            heapq.heappush(self._checks, (live.next_check, plan_id))  # it made progress since, or only its deadline remains
        self.counters.expired += len(over)
        return over

    # ---- within ----

    def _new_plan(self, request: PlanRequest, now: float, life_s: float, policy: PlanPolicy | None, tenant: str | None) -> _Live:
        if not life_s >= 0:
            raise InvalidArgument("life_s must be at least 0", life_s=life_s)
        first = min(life_s, self.plan_life_s) if life_s else self.plan_life_s
        last = now + min(life_s or MAX_PLAN_LIFE_S, MAX_PLAN_LIFE_S) + DEADLINE_GRACE_S
        return _Live(request, policy or self.policy, 0, now + first, last, tenant)

    def _keep(self, plan_id: int, live: _Live) -> None:
        self._live[plan_id] = live
        self._count_parts(live, 1 + len(live.parts))
        self._schedule_check(plan_id, live)

    def _check_space(self, parts: int, tenant: str | None) -> None:
        most = limits.MAX_PARTS_UNDER_WAY
        if self._parts_live + parts > most:
            raise CapacityExceeded("too many parts are in progress", parts=self._parts_live, limit=most)
        share = most // limits.TENANT_SHARE
        if tenant is not None and self._parts_of[tenant] + parts > share:
            raise CapacityExceeded("too many parts of this tenant are in progress", tenant=tenant, limit=share)

    def _count_parts(self, live: _Live, more: int) -> None:
        """Count parts of a plan as in progress (negative: no longer)."""
        self._parts_live += more
        if live.tenant is not None:
            self._parts_of[live.tenant] += more
            if not self._parts_of[live.tenant]:
                del self._parts_of[live.tenant]

    def _schedule_check(self, plan_id: int, live: _Live) -> None:
        """Schedule the next check of the plan."""
        heapq.heappush(self._checks, (live.next_check, plan_id))
        if len(self._checks) > 2 * len(self._live) + 1_024:  # most belong to plans that have ended
            self._checks = [(one.next_check, number) for number, one in self._live.items()]
            heapq.heapify(self._checks)

    def _moved(self, plan_id: int, live: _Live, now: float) -> None:
        """Record progress of the plan: blocks arrived, or a part was planned again."""
        deadline = now + self.plan_life_s
        if deadline > live.last:
            deadline = live.last
        if deadline > live.deadline:
            live.deadline = deadline
        live.stalls_at = now + live.patience
        if live.stalled:
            self._count(live, now, stalled=False)
            self._schedule_check(plan_id, live)

    def _count(self, live: _Live, now: float, *, stalled: bool) -> None:
        """Exclude a plan from the queues (``stalled``), or include it again."""
        live.stalled = stalled
        self.counters.stalled += stalled and any(charge is not None and charge.blocks for charge in live.charges)
        for charge in live.at.values():
            self.queues.mark_stalled(charge, now, stalled=stalled)

    def _end(self, plan_id: int, now: float) -> None:
        """Remove a plan, and return its charges."""
        live = self._live.pop(plan_id)
        self._count_parts(live, -1 - len(live.parts))
        self._release(live, now)

    @staticmethod
    def _charge(live: _Live, part: int) -> Charge | None:
        if not 0 <= part < len(live.charges):
            raise InvalidArgument("no such part", part=part, parts=len(live.charges))
        return live.charges[part]

    def _release(self, live: _Live, now: float) -> None:
        """Return the rest of a plan's charges, without effect on the rate estimates."""
        for charge in live.charges:
            if charge is not None and charge.blocks:
                self.queues.credit(charge, charge.blocks, now, moved=False)

    def _with_relays(self, request: PlanRequest, now: float) -> PlanRequest:
        """Offer the idlest nodes as relays to a request that names none."""
        if not self.relays or request.relays:
            return request
        pair = {request.prefill_node, request.decode_node or request.prefill_node}
        return request.with_relays(tuple(self.queues.idlest(self.relays, now, pair)))

    def _candidates(
        self, request: PlanRequest, failed: frozenset[str], now: float
    ) -> tuple[list[tuple[NodeState, ReadSide]], list[str], NodeState | None]:
        """Return the nodes that may read, those that may not, and the prefill node: all forwarded bytes use its CNIC."""
        usable: list[tuple[NodeState, ReadSide]] = []
        excluded = []
        prefill = None
        for node, side in request.candidates():
            state = self.queues.state(node, now)
            if side is ReadSide.PREFILL:
                prefill = state
            if state is None or not state.alive or node in failed:
                excluded.append(node)
            else:
                usable.append((state, side))
        return usable, excluded, prefill

    @staticmethod
    def _share(
        policy: PlanPolicy,
        request: PlanRequest,
        usable: Sequence[tuple[NodeState, ReadSide]],
        excluded: Sequence[str],
        prefill: NodeState | None,
    ) -> tuple[Sequence[Share], float]:
        """Let a policy divide a request, and return the shares and the predicted seconds."""
        if not request.blocks:
            return (), 0.0
        if not usable:
            raise Unavailable("no node can read", request=request.request_id, excluded=",".join(excluded))
        shares = policy.choose(request, usable, prefill)
        states = {state.node: state for state, _ in usable}
        seconds = finish_seconds([(states[node], side, count * request.block_bytes) for node, side, count in shares], prefill)
        return shares, seconds

    def _decide(self, plan_id: int, live: _Live, missing: Sequence[Span], now: float) -> LoadPlan:
        """Let the policy assign the missing blocks to nodes, charge them, and record the reasons."""
        request = live.request
        blocks = sum([count for _, count in missing])
        usable, excluded, prefill = self._candidates(request, live.failed, now)
        remaining = request if blocks == request.blocks else replace(request, blocks=blocks)
        shares, predicted = self._share(live.policy, remaining, usable, excluded, prefill)
        parts = parts_of(shares, missing, len(live.parts))
        for part in parts:
            self._add_part(live, part, now)
        self._set_patience(live, [state for state, _ in usable if state.node in live.at], now)
        reasons = Reasons(live.policy.name, now, tuple([state for state, _ in usable]), predicted, tuple(excluded))
        answer = LoadPlan(plan_id, live.attempt, request, parts, reasons)
        self._record(answer)
        return answer

    def _add_part(self, live: _Live, part: PlanPart, now: float) -> None:
        """Charge a part to its node."""
        request = live.request
        sink = None if part.side is ReadSide.PREFILL else request.prefill_node
        charge = self.queues.charge(
            part.node, sink, part.count, request.block_bytes, request.block_tokens, now, live.at.get(part.node), live.tenant
        )
        live.at.setdefault(part.node, charge)
        live.parts.append(part)
        live.charges.append(charge)

    def _set_patience(self, live: _Live, before: Iterable[NodeState], now: float) -> None:
        """Set when a plan is stalled, from the states of its nodes before it was charged."""
        live.patience = self.patience_s + 2 * max([state.pending_bytes / state.snic for state in before], default=0.0)
        live.stalls_at = now + live.patience

    def _record(self, answer: LoadPlan) -> None:
        """Record a decision, and drop the oldest if there are too many decisions or parts."""
        self._decisions.append(answer)
        self._parts_kept += len(answer.parts)
        while len(self._decisions) > self._decisions_kept or self._parts_kept > DECISION_PARTS_KEPT:
            self._parts_kept -= len(self._decisions.popleft().parts)


def missing_spans(part: PlanPart, arrived: Iterable[Span]) -> list[Span]:
    """Return the spans of a part's blocks that are in none of the given spans.

    Raises:
        InvalidArgument: a span is empty or not within the part.
    """
    missing: list[Span] = []
    position = part.start
    for start, count in sorted(arrived):
        if start < part.start or count < 1 or start + count > part.end:
            raise InvalidArgument("span is not within the part", start=start, count=count, part=part.index)
        if start > position:
            missing.append((position, start - position))
        position = max(position, start + count)
    if position < part.end:
        missing.append((position, part.end - position))
    return missing


def parts_of(shares: Sequence[Share], missing: Sequence[Span], first_index: int) -> tuple[PlanPart, ...]:
    """Return the parts that give each share its blocks, in order. A share that spans a gap becomes several parts.

    Args:
        shares: the answer of a policy; empty: nothing is read.
        missing: the blocks to read, ascending.
        first_index: index of the first part.

    Raises:
        Internal: the shares do not add up to the missing blocks.
    """
    if not shares:
        return ()
    parts: list[PlanPart] = []
    spans = iter(missing)
    start, left, fits = 0, 0, True
    for node, side, blocks in shares:
        fits = fits and blocks > 0
        while blocks > 0:
            if not left:
                start, left = next(spans, (0, 0))
                if not left:
                    fits = False
                    break
            count = min(blocks, left)
            parts.append(PlanPart(first_index + len(parts), node, side, start, count))
            start, left, blocks = start + count, left - count, blocks - count
    if not fits or left or next(spans, None):
        raise Internal("the shares of the policy do not add up to the request", shares=[tuple(share) for share in shares])
    return tuple(parts)
