"""The path planner: plans reads, keeps the queues true, plans again what failed.

Every block of a plan is owed by exactly one part until it is reported arrived, or the plan ends. Reports may be lost, late or
repeated: progress is cumulative, and reports for plans or parts that are over are counted and ignored.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvstore.core.errors import Internal, InvalidArgument, NotFound, Unavailable
from kvstore.dualpath.contract import (
    LoadPlan,
    NodeState,
    Part,
    PathPolicy,
    PlanUnderWay,
    ReadRequest,
    ReadSide,
    Reasons,
    Share,
    Span,
)
from kvstore.dualpath.predict import finish_seconds
from kvstore.dualpath.queues import Charge, ReadQueues

PLAN_LIFE_S = 60.0
"""A plan without a report for this long is given up: its client is taken to be dead."""
DEADLINE_GRACE_S = 1.0
"""A plan with a life of its own that is still reported on outlives its end by so much, for what was under way; no longer."""
DECISIONS_KEPT = 256


@dataclass(slots=True)
class Counters:
    """What happened, since the start."""

    plans: int = 0
    replans: int = 0
    finished: int = 0
    given_up: int = 0
    """Plans that no node was left for, or that their client aborted."""
    expired: int = 0
    late_reports: int = 0
    """Reports for plans or parts that were over."""


@dataclass(slots=True)
class _Live:
    """A plan under way. A part that is over (failed) has no charge."""

    request: ReadRequest
    policy: PathPolicy
    """As it was when the plan was made: whoever plans with another one meanwhile does not decide about its re-plans."""
    attempt: int
    deadline: float
    last: float
    """Reports do not move the deadline beyond this."""
    parts: list[Part] = field(default_factory=list)
    charges: list[Charge | None] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)


class Planner:
    """One instance per cluster.

    Args:
        policy: how requests are cut; may be replaced at any time (plans under way go on).
        queues: pending reads and rates; nodes are made known there, or with ``node_here``.
        plan_life_s: a plan without a report for this long expires.
        decisions_kept: how many recent plans ``decisions`` shows.
        relays: how many of the idlest nodes to offer to the policy as relays where a request names none.
        first_plan: id of the first plan, above 0. Where plans outlive the planner that made them, planners start at places far
            from each other: or reports of old plans would speak of new ones.
    """

    def __init__(
        self,
        policy: PathPolicy,
        queues: ReadQueues | None = None,
        *,
        plan_life_s: float = PLAN_LIFE_S,
        decisions_kept: int = DECISIONS_KEPT,
        relays: int = 0,
        first_plan: int = 1,
    ) -> None:
        self.policy = policy
        self.queues = ReadQueues() if queues is None else queues
        self.counters = Counters()
        self.plan_life_s = plan_life_s
        self.relays = relays
        self._live: dict[int, _Live] = {}
        self._next = first_plan
        self._deadlines: list[tuple[float, int]] = []
        self._decisions: deque[LoadPlan] = deque(maxlen=decisions_kept)

    def __len__(self) -> int:
        """Plans under way."""
        return len(self._live)

    def decisions(self) -> list[LoadPlan]:
        """The last plans, oldest first."""
        return list(self._decisions)

    def live(self) -> list[PlanUnderWay]:
        """The plans under way, by id."""
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
            for plan_id, live in sorted(self._live.items())
        ]

    # ---- nodes ----

    def node_here(self, node: str, snic: float, cnic: float) -> None:
        """A node is there (again), with its configured bandwidths in bytes/s."""
        self.queues.join(node, snic, cnic)

    def node_gone(self, node: str) -> tuple[tuple[int, int], ...]:
        """A node is dead: it gets no more work.

        Returns:
            (plan, part index) of the unfinished parts that it was to read. What of them has arrived only their clients know: they
            report ``fail``.
        """
        self.queues.leave(node)
        return tuple(
            (plan_id, part.index)
            for plan_id, live in self._live.items()
            for part, charge in zip(live.parts, live.charges, strict=True)
            if part.node == node and charge is not None and charge.blocks
        )

    # ---- plans ----

    def plan(self, request: ReadRequest, now: float, life_s: float = 0.0) -> LoadPlan:
        """Decides who reads the request, and charges the queues.

        Args:
            request: what to read.
            now: when.
            life_s: the load is over by then: whatever is reported, the plan is given up ``DEADLINE_GRACE_S`` later, and without
                reports at that very time. 0: it lives as long as it is reported on.

        Raises:
            InvalidArgument: a life below 0.
            Unavailable: no candidate is alive.
        """
        if not life_s >= 0:
            raise InvalidArgument("a plan's life is not below 0", life_s=life_s)
        if self.relays and not request.relays:
            pair = {request.prefill_node, request.decode_node or request.prefill_node}
            request = replace(request, relays=tuple(self.queues.idlest(self.relays, now, pair)))
        plan_id = self._next
        first = min(life_s, self.plan_life_s) if life_s else self.plan_life_s
        last = now + life_s + DEADLINE_GRACE_S if life_s else math.inf
        live = _Live(request, self.policy, 0, now + first, last)
        answer = self._decide(plan_id, live, [(0, request.blocks)] if request.blocks else [], now)
        self._next += 1
        self._live[plan_id] = live
        heapq.heappush(self._deadlines, (live.deadline, plan_id))
        self.counters.plans += 1
        return answer

    def progress(self, plan_id: int, part: int, blocks_done: int, now: float) -> bool:
        """Blocks of a part that have arrived by now, in all: so a lost or repeated report does no harm.

        Returns:
            False: the plan or the part is over; the client had better stop.

        Raises:
            InvalidArgument: there was never such a part, or it has fewer blocks.
        """
        live = self._live.get(plan_id)
        if live is None:
            self.counters.late_reports += 1
            return False
        charge = self._charge(live, part)
        if charge is None:
            self.counters.late_reports += 1
            return False
        count = live.parts[part].count
        if not 0 <= blocks_done <= count:
            raise InvalidArgument("blocks_done out of bounds", blocks_done=blocks_done, count=count)
        self._heard_of(live, now)
        self.queues.credit(charge, max(0, blocks_done - (count - charge.blocks)), now, moved=True)
        return True

    def finish(self, plan_id: int, now: float) -> bool:
        """The load is over; what was not told to have arrived never will. False: the plan was over before."""
        live = self._live.pop(plan_id, None)
        if live is None:
            self.counters.late_reports += 1
            return False
        self._release(live, now)
        self.counters.finished += 1
        return True

    def abort(self, plan_id: int, now: float) -> bool:
        """The client wants no more of it. False: the plan was over before."""
        live = self._live.pop(plan_id, None)
        if live is None:
            self.counters.late_reports += 1
            return False
        self._release(live, now)
        self.counters.given_up += 1
        return True

    def fail(self, plan_id: int, part: int, arrived: Iterable[Span], now: float) -> LoadPlan:
        """A part stalled or its node died: plans what of it has not arrived on nodes that have not failed in this plan.

        Args:
            plan_id: the plan.
            part: index of the part that failed.
            arrived: (start, count) of blocks *of this part* that arrived, numbered as in the request; see ``spans_of``.
            now: when.

        Returns:
            The new parts only, under the next generation; empty if everything had arrived. The other parts go on.

        Raises:
            NotFound: the plan is over.
            InvalidArgument: the part is over or was never, or the spans are not in it.
            Unavailable: no node is left; the plan is over, what is missing is a miss.
        """
        live = self._live.get(plan_id)
        if live is None:
            self.counters.late_reports += 1
            raise NotFound("plan is over", plan_id=plan_id)
        charge = self._charge(live, part)
        if charge is None:
            raise InvalidArgument("part is over", plan_id=plan_id, part=part)
        failed = live.parts[part]
        missing = missing_spans(failed, arrived)
        done = failed.count - sum(count for _, count in missing)
        self.queues.credit(charge, max(0, done - (failed.count - charge.blocks)), now, moved=True)
        self.queues.credit(charge, charge.blocks, now, moved=False)
        live.charges[part] = None
        live.failed.add(failed.node)
        live.attempt += 1
        self._heard_of(live, now)
        try:
            answer = self._decide(plan_id, live, missing, now)
        except Unavailable:
            del self._live[plan_id]
            self._release(live, now)
            self.counters.given_up += 1
            raise
        self.counters.replans += 1
        return answer

    def expire(self, now: float) -> list[int]:
        """Gives up the plans whose clients have been silent for too long.

        Returns:
            Their ids.
        """
        over = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, plan_id = heapq.heappop(self._deadlines)
            live = self._live.get(plan_id)
            if live is None:
                continue
            if live.deadline > now:  # it was heard of since
                heapq.heappush(self._deadlines, (live.deadline, plan_id))
                continue
            del self._live[plan_id]
            self._release(live, now)
            over.append(plan_id)
        self.counters.expired += len(over)
        return over

    # ---- within ----

    def _heard_of(self, live: _Live, now: float) -> None:
        live.deadline = max(live.deadline, min(now + self.plan_life_s, live.last))

    @staticmethod
    def _charge(live: _Live, part: int) -> Charge | None:
        if not 0 <= part < len(live.charges):
            raise InvalidArgument("no such part", part=part, parts=len(live.charges))
        return live.charges[part]

    def _release(self, live: _Live, now: float) -> None:
        """Gives back what a plan still owes: nobody has read it, and it says nothing of a link."""
        for charge in live.charges:
            if charge is not None:
                self.queues.credit(charge, charge.blocks, now, moved=False)

    def _decide(self, plan_id: int, live: _Live, missing: Sequence[Span], now: float) -> LoadPlan:
        """Asks the policy about the missing blocks, charges the answer, remembers why."""
        request = live.request
        blocks = sum(count for _, count in missing)
        usable: list[tuple[NodeState, ReadSide]] = []
        excluded = []
        for node, side in request.candidates():
            state = self.queues.state(node, now)
            if state is None or not state.alive or node in live.failed:
                excluded.append(node)
            else:
                usable.append((state, side))
        shares: Sequence[Share] = ()
        predicted = 0.0
        if blocks:
            if not usable:
                raise Unavailable("no node can read", request=request.request_id, excluded=",".join(excluded))
            prefill = self.queues.state(request.prefill_node, now)
            asked = request if blocks == request.blocks else replace(request, blocks=blocks)
            shares = live.policy.choose(asked, usable, prefill)
            states = {state.node: state for state, _ in usable}
            predicted = finish_seconds(
                ((states[share.node], share.side, share.blocks * request.block_bytes) for share in shares), prefill
            )
        parts = lay(shares, missing, len(live.parts))
        for part in parts:
            sink = None if part.side is ReadSide.PREFILL else request.prefill_node
            live.parts.append(part)
            live.charges.append(self.queues.charge(part.node, sink, part.count, request.block_bytes, request.block_tokens, now))
        reasons = Reasons(live.policy.name, now, tuple(state for state, _ in usable), predicted, tuple(excluded))
        answer = LoadPlan(plan_id, live.attempt, request, parts, reasons)
        self._decisions.append(answer)
        return answer


def missing_spans(part: Part, arrived: Iterable[Span]) -> list[Span]:
    """Blocks of a part that lie in none of the spans.

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


def lay(shares: Sequence[Share], missing: Sequence[Span], first_index: int) -> tuple[Part, ...]:
    """Parts that give each share its blocks, in order; a share over a gap becomes several parts.

    Args:
        shares: a policy's answer; none: nothing is read.
        missing: the blocks to read, ascending.
        first_index: index of the first part.

    Raises:
        Internal: the shares do not add up to the missing blocks.
    """
    if not shares:
        return ()
    if sum(share.blocks for share in shares) != sum(count for _, count in missing) or min(s.blocks for s in shares) < 1:
        raise Internal("the policy's shares are not the request", shares=[tuple(share) for share in shares])
    parts: list[Part] = []
    spans = iter(missing)
    start, left = 0, 0
    for node, side, wanted in shares:
        while wanted:
            if not left:
                start, left = next(spans)
            count = min(wanted, left)
            parts.append(Part(first_index + len(parts), node, side, start, count))
            start, left, wanted = start + count, left - count, wanted - count
    return tuple(parts)
