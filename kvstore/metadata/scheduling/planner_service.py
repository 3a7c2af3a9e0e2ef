"""Load plans over gRPC: the planner of the cluster, with the live nodes and the reports of clients as its input.

The planner itself is pure (``kvstore.dualpath``). This module checks requests, keeps the planner's nodes up to date, and encodes
its answers. It runs on the event loop only. Of several servers that share an index, one plans for all
(``kvstore.metadata.roles``).
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections import OrderedDict
from typing import Final, NamedTuple

from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1.common_pb2 import BANDWIDTH_SOURCE_MEASURED, BANDWIDTH_SOURCE_UNSPECIFIED, BandwidthSource, NodeInfo
from kvstore.core import limits
from kvstore.core.clock import Clock
from kvstore.core.errors import CapacityExceeded, Conflict, InvalidArgument, NotFound
from kvstore.core.types import NodeId
from kvstore.dualpath.contract import LoadPlan, PlanPart, PlanPolicy, PlanRequest, ReadSide
from kvstore.dualpath.planner import Planner
from kvstore.dualpath.policies import policy_named
from kvstore.dualpath.queues import ReadQueues
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.metadata.membership.view import is_engine_cache
from kvstore.metadata.scheduling.link_rates import LinkRates, link_rates
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import metadata as metadata_metrics
from kvstore.observe.tracing import plan_id
from kvstore.rpc.auth.interceptor import tenant
from kvstore.rpc.codec import check_id, check_name

logger = logging.getLogger(__name__)
limited = LimitedLog(logger)

RELAYS: Final = 8
"""Maximum number of idle third nodes per plan."""
ANSWERS_KEPT: Final = 4096
"""Plans that are kept for retries of the same operation."""
MOST_PLAN_ID: Final = (1 << 63) - 1
"""Largest plan id. Ids are random: only a client that got the plan can report on it."""
MAX_REPORTS: Final = 4096
MAX_RANGES: Final = 65_536

SIDES: Final = {
    ReadSide.PREFILL: pb.READ_SIDE_PREFILL,
    ReadSide.DECODE: pb.READ_SIDE_DECODE,
    ReadSide.RELAY: pb.READ_SIDE_RELAY,
}


class _PlannerNode(NamedTuple):
    """The facts of a node that the planner has."""

    boot_id: bytes
    measured: int
    rates: LinkRates


class PlannerService:
    """The planner behind RPCs.

    Args:
        nodes: registrations and liveness.
        policy: path policy of requests that do not name one.
        counters: counters of this process.
        clock: clock.
    """

    def __init__(self, nodes: NodeTable, policy: str, counters: Counters, clock: Clock) -> None:
        self._nodes = nodes
        self._counters = counters
        self._clock = clock
        self._policies: dict[str, PlanPolicy] = {}
        self._default = self._configured = policy
        self.planner = self._new_planner()
        self._known: dict[NodeId, _PlannerNode] = {}  # live nodes of the planner
        self._updates = -1  # of the node table, when the planner's nodes were last brought up to date
        self._answers: OrderedDict[bytes, tuple[bytes, pb.LoadPlan]] = OrderedDict()
        """By operation: a digest of the request without its budget, and the plan."""

    def _new_planner(self, queues: ReadQueues | None = None) -> Planner:
        # clients report to any server at this address: a restarted or another server must not accept their plan ids
        return Planner(self._policy(self._configured), queues, draw=lambda: secrets.randbelow(MOST_PLAN_ID) + 1)

    def _policy(self, name: str) -> PlanPolicy:
        """One instance per policy, because ``round_robin`` keeps a position."""
        if name not in self._policies:
            self._policies[name] = policy_named(name)
        return self._policies[name]

    @property
    def default_policy(self) -> str:
        """Path policy of requests that do not name one."""
        return self._default

    @default_policy.setter
    def default_policy(self, name: str) -> None:
        """Change the policy. Plans in progress stay as they are."""
        self._policy(name)
        self._default = name

    # ---- requests ----
    def plan(self, request: pb.PlanLoadRequest) -> pb.LoadPlan:
        """Plan one load.

        Raises:
            InvalidArgument: the request is malformed.
            Conflict: the operation id was used for another load.
            CapacityExceeded: too many loads are in progress.
            NotFound: a node left during planning; nothing stays charged.
            Unavailable: no node that could read is alive.
        """
        operation = check_id(request.operation_id, "operation_id")
        canonical = pb.PlanLoadRequest()
        canonical.CopyFrom(request)
        canonical.budget_ms = 0  # differs in each retry
        content = hashlib.sha256(canonical.SerializeToString(deterministic=True)).digest()
        earlier = self._answers.get(operation)
        if earlier is not None:
            if earlier[0] != content:
                raise Conflict("this operation id was used for another load: use a new id per load", operation_id=operation.hex())
            return earlier[1]
        now_s = self._clock.now_s()
        read = self._checked_request(request, operation.hex(), now_s)
        try:
            made = self.planner.plan(read, now_s, request.budget_ms / 1000, self._policy_of(request), tenant())
        except CapacityExceeded:
            self._counters.add(metadata_metrics.PLANS_REFUSED)
            raise
        try:
            answer = self._message(made)
        except NotFound:  # no client knows this plan, so no report would ever end it
            self.planner.abort(made.plan_id, now_s)
            raise
        plan_id.set(str(made.plan_id))
        self._counters.add(metadata_metrics.PLANS)
        for part in made.parts:
            planned = metadata_metrics.PLANNED_BYTES[part.side.name.lower()]
            self._counters.add(planned, part.count * request.block_bytes)
        logger.debug("load planned: %s (blocks=%d)", answer.reason, request.blocks)
        self._answers[operation] = content, answer
        if len(self._answers) > ANSWERS_KEPT:
            self._answers.popitem(last=False)
        return answer

    def price(self, request: pb.PlanLoadRequest) -> pb.LoadPrice:
        """Return how long a load would take if it were planned now. Plans nothing and charges no queue.

        Raises:
            InvalidArgument: the request is malformed.
            Unavailable: no node that could read is alive.
        """
        now_s = self._clock.now_s()
        price = self.planner.price(self._checked_request(request, "price", now_s), now_s, self._policy_of(request))
        self._counters.add(metadata_metrics.PRICES)
        return pb.LoadPrice(first_seconds=price.first_seconds, seconds=price.seconds)

    def _policy_of(self, request: pb.PlanLoadRequest) -> PlanPolicy:
        return self._policy(request.policy or self._default)

    def _checked_request(self, request: pb.PlanLoadRequest, name: str, now_s: float) -> PlanRequest:
        """Check a request and return it for the planner, whose nodes are brought up to date."""
        check_name(request.prefill_node, "prefill_node")
        if request.decode_node:
            check_name(request.decode_node, "decode_node")
        self._update_nodes()
        return PlanRequest(
            name,
            request.blocks,
            request.block_bytes,
            request.block_tokens,
            request.prefill_node,
            request.decode_node or None,
            self._relays(request, now_s) if request.relays else (),
        )

    def report(self, request: pb.ReportLoadsRequest) -> pb.ReportLoadsResponse:
        """Process progress reports.

        Raises:
            InvalidArgument: a part does not exist, or has fewer blocks than reported. All other reports took effect.
        """
        if len(request.loads) > MAX_REPORTS:
            raise InvalidArgument("too many loads in one report", got=len(request.loads), limit=MAX_REPORTS)
        parts = sum(len(load.parts) + len(load.restored_plan.parts) for load in request.loads)
        if parts > MAX_RANGES:
            raise InvalidArgument("too many parts in one report", got=parts, limit=MAX_RANGES)
        now_s = self._clock.now_s()
        forgotten = []
        wrong: InvalidArgument | None = None
        for load in request.loads:
            new = load.HasField("restored_plan") and load.plan_id not in self.planner
            try:
                if new:
                    self._restore(load.plan_id, load.restored_plan, now_s)
            except CapacityExceeded:
                self._counters.add(metadata_metrics.PLANS_REFUSED)
            except InvalidArgument as error:
                wrong = error
            known = load.plan_id in self.planner
            for part in load.parts:
                try:
                    self.planner.progress(load.plan_id, part.index, part.blocks_done, now_s, measured=not new)
                except InvalidArgument as error:  # one call reports many loads: the others count
                    wrong = error
            if load.finished:
                self.planner.finish(load.plan_id, now_s)
            if not known:
                forgotten.append(load.plan_id)
        self._counters.add(metadata_metrics.PLAN_REPORTS, len(request.loads))
        if wrong is not None:
            raise wrong
        return pb.ReportLoadsResponse(forgotten=forgotten)

    def _restore(self, number: int, plan: pb.PlanInProgress, now_s: float) -> None:
        """Count a plan that the planner before this one made."""
        if not 0 < number <= MOST_PLAN_ID:
            raise InvalidArgument("plan_id must be 1 to 2**63-1", got=number)
        plan.load.relays = False  # it is not planned again
        read = self._checked_request(plan.load, "restored", now_s)
        sides = {plan.load.decode_node: ReadSide.DECODE, plan.load.prefill_node: ReadSide.PREFILL}  # one host may be both
        parts = [
            PlanPart(one.index, one.node_id, sides.get(one.node_id, ReadSide.RELAY), one.start, one.count) for one in plan.parts
        ]
        life_s = plan.load.budget_ms / 1000
        self.planner.restore(number, read, parts, now_s, life_s, self._policy_of(plan.load), tenant())

    def replan(self, request: pb.ReplanLoadRequest) -> pb.LoadPlan:
        """Plan the missing blocks of a failed part again.

        Raises:
            NotFound: the plan has ended or never existed.
            InvalidArgument: the part has ended, or the ranges are not within it, or there are too many ranges.
            CapacityExceeded: the plan, or all plans together, have too many parts. The plan continues without the failed part.
            Unavailable: no node is left.
        """
        if len(request.arrived) > limits.MAX_REPLAN_RANGES:
            most = limits.MAX_REPLAN_RANGES
            raise InvalidArgument("too many ranges: leave out the smallest", got=len(request.arrived), limit=most)
        plan_id.set(str(request.plan_id))
        now_s = self._clock.now_s()
        self._update_nodes()
        arrived = [(one.start, one.count) for one in request.arrived]
        try:
            plan = self.planner.fail(request.plan_id, request.index, arrived, now_s)
        except CapacityExceeded:
            self._counters.add(metadata_metrics.PLANS_REFUSED)
            raise
        self._counters.add(metadata_metrics.REPLANS)
        limited.warning("part replanned: plan %d (reason=%s)", plan.plan_id, request.why[: limits.MAX_REASON])
        try:
            return self._message(plan)
        except NotFound:  # for the client this ends the plan
            self.planner.abort(plan.plan_id, now_s)
            raise

    def clear(self) -> None:
        """Forget all plans and queues: another server plans now, or this one begins to.

        Reports on forgotten plans are answered as those on plans that have ended.
        """
        queues = self.planner.queues
        for node_id in queues.nodes():  # silent and draining nodes too: no plan is left that would credit their queues
            queues.forget(node_id)
        self._known.clear()
        self._updates = -1
        self._answers.clear()
        self.planner = self._new_planner(queues)

    # ---- time ----
    def expire(self) -> None:
        """End plans of silent clients, stop counting stalled plans, and remove silent nodes. Called several times per second."""
        now_s = self._clock.now_s()
        stalled_before = self.planner.counters.stalled
        if over := self.planner.expire(now_s):
            self._counters.add(metadata_metrics.PLANS_EXPIRED, len(over))
        if stalled := self.planner.counters.stalled - stalled_before:
            self._counters.add(metadata_metrics.PLANS_STALLED, stalled)
            limited.warning("stalled loads: their planned reads no longer count in queues (plans=%d)", stalled)
        self._updates = -1  # measured rates change with each heartbeat
        self._update_nodes()

    # ---- nodes ----
    def _update_nodes(self) -> None:
        """Tell the planner of nodes that joined, restarted or left. It does not use draining nodes.

        Without a change since the last time this costs nothing, so that a call does not cost more with more nodes.
        """
        records = self._nodes.view().nodes
        if self._updates == self._nodes.updates:
            return
        self._updates = self._nodes.updates
        for node_id, record in records.items():
            if is_engine_cache(record):
                continue
            alive = self._nodes.is_alive(node_id) and not self._nodes.is_draining(node_id)
            if not alive and node_id in self._known:
                del self._known[node_id]
                self.planner.remove_node(node_id)
                continue
            measured, known = self._nodes.read_bytes_per_s(node_id), self._known.get(node_id)
            if alive and (known is None or known.boot_id != record.boot_id or known.measured != measured):
                rates = link_rates(record, measured)
                self._known[node_id] = _PlannerNode(record.boot_id, measured, rates)
                self.planner.add_node(node_id, rates.storage, rates.compute)
        for gone in set(self.planner.queues.nodes()).difference(records):
            self._known.pop(NodeId(gone), None)
            self.planner.queues.forget(gone)

    def sources(self, node_id: str, now_s: float) -> tuple[BandwidthSource, BandwidthSource]:
        """Sources of the bandwidths that plans assume for a node's storage and compute link."""
        known = self._known.get(NodeId(node_id))
        if known is None:
            return BANDWIDTH_SOURCE_UNSPECIFIED, BANDWIDTH_SOURCE_UNSPECIFIED
        measured = self.planner.queues.has_learnt(node_id, now_s)
        return BANDWIDTH_SOURCE_MEASURED if measured else known.rates.storage_source, known.rates.compute_source

    def _relays(self, request: pb.PlanLoadRequest, now_s: float) -> tuple[str, ...]:
        """Idle third nodes with engines. Storage nodes lack a compute link to relay over."""
        records = self._nodes.last_view.nodes
        without_engines = {node_id for node_id, record in records.items() if not {"prefill", "decode"}.intersection(record.roles)}
        return tuple(self.planner.queues.idlest(RELAYS, now_s, without_engines | {request.prefill_node, request.decode_node}))

    def _message(self, plan: LoadPlan) -> pb.LoadPlan:
        records = self._nodes.last_view.nodes
        reasons = plan.reasons
        answer = pb.LoadPlan(
            plan_id=plan.plan_id,
            attempt=plan.attempt,
            policy=reasons.policy,
            reason=_explain(plan),
            predicted_seconds=reasons.predicted_seconds,
        )
        for part in plan.parts:
            info: NodeInfo | None = records.get(NodeId(part.node))
            if info is None:
                raise NotFound("a node left while a load was planned over it", node_id=part.node)
            answer.parts.add(
                index=part.index,
                start=part.start,
                count=part.count,
                side=SIDES[part.side],
                node_id=part.node,
                control_address=info.control_address,
                data_address=info.data_address,
            )
        return answer


def _explain(plan: LoadPlan) -> str:
    """The figures of a decision, as text."""
    queues = ", ".join(
        f"{state.node}: {state.pending_bytes / 1e6:.1f} MB queued at {state.snic / 1e6:.0f} MB/s" for state in plan.reasons.nodes
    )
    return f"{queues}; predicted {plan.reasons.predicted_seconds:.3f} s"[: limits.MAX_NAME_BYTES * 4]
