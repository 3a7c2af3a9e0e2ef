"""PendingWork plans over gRPC: the one planner of the cluster, fed with who lives and with what clients report.

The planner itself is pure (``kvstore.dualpath``); here requests are checked, nodes made known to it, and its answers put into
messages. Runs on the event loop only. With several workers each plans for the clients that are connected to it, and sees the
queues that it charged itself.
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
from kvstore.dualpath.contract import LoadPlan, PlanPolicy, PlanRequest, ReadSide
from kvstore.dualpath.planner import Planner
from kvstore.dualpath.policies import policy_named
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.metadata.scheduling.link_rates import LinkRates, link_rates
from kvstore.observe.context import plan_id
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import metadata as metadata_metrics
from kvstore.rpc.codec import check_id, check_name

logger = logging.getLogger(__name__)
limited = LimitedLog(logger)

RELAYS: Final = 8
"""Idle third nodes that one plan considers."""
ANSWERS_KEPT: Final = 4096
"""Plans that a retry of the same operation is answered with."""
MOST_PLAN_ID: Final = (1 << 63) - 1
"""Ids are drawn at random up to it: whoever has a plan's id may report on it, and nobody guesses one."""
MAX_REPORTS: Final = 4096
MAX_RANGES: Final = 65_536

SIDES: Final = {
    ReadSide.PREFILL: pb.READ_SIDE_PREFILL,
    ReadSide.DECODE: pb.READ_SIDE_DECODE,
    ReadSide.RELAY: pb.READ_SIDE_RELAY,
}


class _Known(NamedTuple):
    """A node as the planner was told of it."""

    boot_id: bytes
    measured: int
    rates: LinkRates


class PlannerService:
    """The planner behind RPCs.

    Args:
        nodes: who is registered and alive.
        policy: name of the policy that decides where a request names none.
        counters: ``metadata_plans_total`` and its like.
        clock: time.
    """

    def __init__(self, nodes: NodeTable, policy: str, counters: Counters, clock: Clock) -> None:
        self._nodes = nodes
        self._counters = counters
        self._clock = clock
        self._policies: dict[str, PlanPolicy] = {}
        self._default = policy
        # clients report to whoever answers at this address: a server started anew, or another worker, must not know their plans
        self.planner = Planner(self._policy(policy), draw=lambda: secrets.randbelow(MOST_PLAN_ID) + 1)
        self._known: dict[NodeId, _Known] = {}  # nodes that the planner believes alive
        self._answers: OrderedDict[bytes, tuple[bytes, pb.LoadPlan]] = OrderedDict()
        """By operation: a digest of the request, but for its time left, and its plan."""

    def _policy(self, name: str) -> PlanPolicy:
        """One instance a policy: ``round_robin`` remembers whose turn it is."""
        if name not in self._policies:
            self._policies[name] = policy_named(name)
        return self._policies[name]

    @property
    def default_policy(self) -> str:
        """Name of the policy that decides where a request names none."""
        return self._default

    @default_policy.setter
    def default_policy(self, name: str) -> None:
        """Plans under way go on as they were decided."""
        self._policy(name)
        self._default = name

    # ---- requests ----
    def plan(self, request: pb.PlanLoadRequest) -> pb.LoadPlan:
        """Plans one load.

        Raises:
            InvalidArgument: malformed.
            Conflict: the operation id was used for another load.
            CapacityExceeded: too many loads are under way.
            NotFound: a node left meanwhile; nothing stays charged.
            Unavailable: no node that could read is alive.
        """
        operation = check_id(request.operation_id, "operation_id")
        asked = pb.PlanLoadRequest()
        asked.CopyFrom(request)
        asked.budget_ms = 0  # less in each retry
        content = hashlib.sha256(asked.SerializeToString(deterministic=True)).digest()
        earlier = self._answers.get(operation)
        if earlier is not None:
            if earlier[0] != content:
                raise Conflict("this operation id was used for another load: draw one for each", operation_id=operation.hex())
            return earlier[1]
        check_name(request.prefill_node, "prefill_node")
        if request.decode_node:
            check_name(request.decode_node, "decode_node")
        now_s = self._clock.now_s()
        self._follow_nodes(now_s)
        read = PlanRequest(
            operation.hex(),
            request.blocks,
            request.block_bytes,
            request.block_tokens,
            request.prefill_node,
            request.decode_node or None,
            self._relays(request, now_s) if request.relays else (),
        )
        self.planner.policy = self._policy(request.policy or self._default)
        try:
            made = self.planner.plan(read, now_s, request.budget_ms / 1000)
        except CapacityExceeded:
            self._counters.add(metadata_metrics.PLANS_REFUSED)
            raise
        try:
            answer = self._message(made)
        except NotFound:  # nobody will ever report on a plan that nobody was told
            self.planner.abort(made.plan_id, now_s)
            raise
        plan_id.set(str(made.plan_id))
        self._counters.add(metadata_metrics.PLANS)
        logger.debug("planned %d blocks: %s", request.blocks, answer.reason)
        self._answers[operation] = content, answer
        if len(self._answers) > ANSWERS_KEPT:
            self._answers.popitem(last=False)
        return answer

    def report(self, request: pb.ReportLoadsRequest) -> pb.ReportLoadsResponse:
        """Takes progress in.

        Raises:
            InvalidArgument: a part that its plan never had, or more blocks than it has; everything else was taken in.
        """
        if len(request.loads) > MAX_REPORTS:
            raise InvalidArgument("too many loads in one report", got=len(request.loads), limit=MAX_REPORTS)
        parts = sum(len(load.parts) for load in request.loads)
        if parts > MAX_RANGES:
            raise InvalidArgument("too many parts in one report", got=parts, limit=MAX_RANGES)
        now_s = self._clock.now_s()
        forgotten = []
        wrong: InvalidArgument | None = None
        for load in request.loads:
            known = True
            for part in load.parts:
                try:
                    known &= self.planner.progress(load.plan_id, part.index, part.blocks_done, now_s)
                except InvalidArgument as error:  # reports of many loads travel together: the others count
                    wrong = error
            if load.finished:
                known &= self.planner.finish(load.plan_id, now_s)
            if not known:
                forgotten.append(load.plan_id)
        self._counters.add(metadata_metrics.PLAN_REPORTS, len(request.loads))
        if wrong is not None:
            raise wrong
        return pb.ReportLoadsResponse(forgotten=forgotten)

    def replan(self, request: pb.ReplanLoadRequest) -> pb.LoadPlan:
        """Plans what a failed part did not bring anew.

        Raises:
            NotFound: the plan is over or was never.
            InvalidArgument: the part is over, or the ranges are not within it, or too many: less is to be said then.
            CapacityExceeded: the plan has too many parts, or too many are under way; it goes on without the failed part.
            Unavailable: no node is left.
        """
        if len(request.arrived) > limits.MAX_REPLAN_RANGES:
            most = limits.MAX_REPLAN_RANGES
            raise InvalidArgument("too many ranges: leave out the smallest", got=len(request.arrived), limit=most)
        plan_id.set(str(request.plan_id))
        limited.warning("a part of a load failed and is planned again: %s", request.why[: limits.MAX_REASON])
        now_s = self._clock.now_s()
        self._follow_nodes(now_s)
        arrived = [(one.start, one.count) for one in request.arrived]
        try:
            plan = self.planner.fail(request.plan_id, request.index, arrived, now_s)
        except CapacityExceeded:
            self._counters.add(metadata_metrics.PLANS_REFUSED)
            raise
        self._counters.add(metadata_metrics.REPLANS)
        try:
            return self._message(plan)
        except NotFound:  # the client takes this for the plan's end
            self.planner.abort(plan.plan_id, now_s)
            raise

    # ---- time ----
    def expire(self) -> None:
        """Forgets plans whose clients are silent, and nodes that are; what does not move counts no more. Called now and then."""
        now_s = self._clock.now_s()
        stalled = self.planner.counters.stalled
        if over := self.planner.expire(now_s):
            self._counters.add(metadata_metrics.PLANS_EXPIRED, len(over))
        if stalled := self.planner.counters.stalled - stalled:
            self._counters.add(metadata_metrics.PLANS_STALLED, stalled)
            limited.warning("of loads that were planned nothing moves: their reads do not count in queues any more (%d)", stalled)
        self._follow_nodes(now_s)

    # ---- nodes ----
    def _follow_nodes(self, now_s: float) -> None:  # noqa: ARG002  # the planner's own times come with each plan
        """Makes joins, restarts and deaths known to the planner; for it, a node that drains is gone."""
        records = self._nodes.view().nodes
        for node_id, record in records.items():
            alive = self._nodes.is_alive(node_id) and not self._nodes.is_draining(node_id)
            if not alive and node_id in self._known:
                del self._known[node_id]
                self.planner.remove_node(node_id)
                continue
            measured, known = self._nodes.read_bytes_per_s(node_id), self._known.get(node_id)
            if alive and (known is None or known.boot_id != record.boot_id or known.measured != measured):
                rates = link_rates(record, measured)
                self._known[node_id] = _Known(record.boot_id, measured, rates)
                self.planner.add_node(node_id, rates.storage, rates.compute)
        for node_id in self._known.keys() - records.keys():
            del self._known[node_id]
            self.planner.remove_node(node_id)

    def sources(self, node_id: str, now_s: float) -> tuple[BandwidthSource, BandwidthSource]:
        """Where the bandwidths come from that a node's storage and compute link are planned with."""
        known = self._known.get(NodeId(node_id))
        if known is None:
            return BANDWIDTH_SOURCE_UNSPECIFIED, BANDWIDTH_SOURCE_UNSPECIFIED
        learnt = self.planner.queues.has_learnt(node_id, now_s)
        return BANDWIDTH_SOURCE_MEASURED if learnt else known.rates.storage_source, known.rates.compute_source

    def _relays(self, request: pb.PlanLoadRequest, now_s: float) -> tuple[str, ...]:
        """Third hosts with engines: a storage node has no link of its own to lend."""
        records = self._nodes.last_view.nodes
        unfit = {node_id for node_id, record in records.items() if not {"prefill", "decode"}.intersection(record.roles)}
        return tuple(self.planner.queues.idlest(RELAYS, now_s, unfit | {request.prefill_node, request.decode_node}))

    def _message(self, plan: LoadPlan) -> pb.LoadPlan:
        records = self._nodes.last_view.nodes
        answer = pb.LoadPlan(plan_id=plan.plan_id, attempt=plan.attempt, policy=plan.reasons.policy, reason=_told(plan))
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


def _told(plan: LoadPlan) -> str:
    """The figures of a decision, for people."""
    queues = ", ".join(
        f"{state.node}: {state.pending_bytes / 1e6:.1f} MB queued at {state.snic / 1e6:.0f} MB/s" for state in plan.reasons.nodes
    )
    return f"{queues}; done in {plan.reasons.predicted_seconds:.3f} s"[: limits.MAX_NAME_BYTES * 4]
