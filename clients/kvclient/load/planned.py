"""Loads over the storage links of several hosts.

Blocks in DRAM or on this host come from the usual sources. Blocks that other hosts must read from storage come by a plan, which
the metadata server makes from the queues of all links. Each part of the plan runs in a separate thread; this one watches them:

1. A part that fails, or makes no progress for ``stall_s``, is cancelled.
2. When nothing writes to its blocks any more, the blocks that it did not bring are planned again over other hosts.
3. Without a planner, or when no other host is left, this host's own node reads the rest. No other host can, so that part is not
   cancelled for a stall: while its node answers, it may run until the deadline.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, replace

import numpy as np

from kvclient.load.paths import Paths, Plan, PlannedPart, largest_ranges
from kvclient.load.sink import BlockSink, LoadRequest, LoadSource, Mask, Positions, fetch_from, spans
from kvclient.load.sources.storage_path import PrefillPath, RemotePath, StoragePathSource
from kvclient.nodes.local_session import LocalNode, Session, is_session_lost
from kvclient.nodes.metadata_client import MetadataClient
from kvclient.results import PATH_PREFILL, Run, outcome_table
from kvproto.v1 import metadata_pb2
from kvstore.core.errors import KVStoreError, NotFound, Unavailable
from kvstore.core.types import Outcome, Tier
from kvstore.observe.metric_definitions import client as client_metrics

_WATCH_S = 0.05
"""Interval of the checks for stalls, and of progress reports."""
_END_S = 5.0
"""Parts that have not ended this long after the load's deadline or cancellation are reported: a bug blocks their threads."""
_DESCRIPTIONS = 3
"""Maximum number of times that a plan is described to a planner that does not know it. A description may be lost."""
_RETRIED = outcome_table(Outcome.UNAVAILABLE, Outcome.TIMEOUT, Outcome.NO_SPACE)
"""Outcomes after which another path is tried. MISS and CORRUPT in storage are the same over every path; damage between another
host's node and this one is reported as UNAVAILABLE."""


class PlannedSource:
    """Storage links by plan, beside the usual sources for near blocks.

    Args:
        usual: sources for blocks that need no plan, nearest first; iterated once.
        local: the local node; without it nothing is planned.
        metadata: the planner.
        paths: choices of the caller.
    """

    def __init__(self, usual: Iterable[LoadSource], local: LocalNode | None, metadata: MetadataClient, paths: Paths) -> None:
        self._usual = usual
        self._local = local
        self._metadata = metadata
        self._paths = paths

    def fetch(self, request: LoadRequest, missing: Positions, sink: BlockSink) -> None:
        """See ``LoadSource``."""
        session = self._local.session() if self._local is not None else None
        if self._local is None or session is None:
            fetch_from(self._usual, request, sink, missing)
            return
        planned = missing[blocks_beyond(request.runs, len(request.chain), session.node_id)[missing]]
        if not len(planned):
            fetch_from(self._usual, request, sink, missing)
            return
        near = np.setdiff1d(missing, planned, assume_unique=True)
        near_done = None
        if len(near):
            threads = request.context.part_threads
            near_done = threads.submit(copy_context().run, self._fetch_near, request, near, sink)
        try:
            planned_load = _PlannedLoad(request, sink, self._local, session, self._metadata, self._paths, planned)
            planned_load.run()
        finally:
            if near_done is not None:
                request.scope.join(near_done)
        if near_done is not None and near_done.cancelled():
            end_unread(request, near, sink)
        elif near_done is not None:
            near_done.result()

    def _fetch_near(self, request: LoadRequest, near: Positions, sink: BlockSink) -> None:
        """Load blocks that need no plan, block by block, while the planned ones arrive."""
        fetch_from(self._usual, replace(request, layerwise=False), sink, near)
        sink.settle(near)
        sink.give_up(near[sink.outcomes[near] != Outcome.HIT])


@dataclass(slots=True)
class _RunningPart:
    """A part under way."""

    source: StoragePathSource
    positions: Positions
    planned: PlannedPart | None
    """None: not of a plan. This host reads these blocks after planning failed, and no other host is left to read them."""
    plan: Plan | None
    future: Future[None]
    reported: int = 0
    stalled: bool = False


class _PlannedLoad:
    """The planned blocks of one load. ``run`` once."""

    def __init__(
        self,
        request: LoadRequest,
        sink: BlockSink,
        local: LocalNode,
        session: Session,
        metadata: MetadataClient,
        paths: Paths,
        blocks: Positions,
    ) -> None:
        self._request = replace(request, runs=storage_runs(request.runs, session.node_id))
        self._context = request.context
        self._scope = request.scope
        self._sink = sink
        self._local = local
        self._session = session
        self._metadata = metadata
        self._paths = paths
        self._blocks = blocks
        """Positions of the planned blocks in the load."""
        self._numbered: dict[int, Positions] = {}
        """By plan: its blocks, which it numbers from 0."""
        self._plan_ids: list[int] = []
        """Plans that the planner counts in its queues."""
        self._described: Counter[int] = Counter()
        """How often each plan was described to a planner that did not know it."""
        self._parts: list[_RunningPart] = []
        self._replans = 0
        self._predicted_s = 0.0
        """Of the first plan."""
        self._late_s = math.inf
        """Time from which parts are late; NaN once that is reported."""

    def run(self) -> None:
        """Load the planned blocks; parts that fail are planned again."""
        try:
            self._start()
            began_s = self._context.clock.now_s()
            with self._request.trace.phase("parts over storage links"):
                self._watch()
            self._count_prediction(self._context.clock.now_s() - began_s)
        finally:
            for part in self._parts:
                part.source.scope.cancel()
            wait([part.future for part in self._parts if not part.future.cancel()])  # until then they may write to the buffer
            self._report(finished=True)

    def _count_prediction(self, took_s: float) -> None:
        """Count how well the planner predicted a load that its first plan brought whole."""
        if not self._predicted_s or self._replans or len(self._missing(self._blocks)):
            return
        counters = self._context.incidents.counters
        counters.observe(client_metrics.PLAN_PREDICTED_SECONDS, self._predicted_s)
        counters.observe(client_metrics.PLAN_ERROR_SECONDS, abs(self._predicted_s - took_s))

    # ---- starting parts ----
    def _start(self) -> None:
        ahead, depth = self._paths.ahead, self._request.chain.depth
        if ahead is not None and (plan := ahead.plan_for(depth + self._blocks)) is not None:
            self._context.incidents.counters.add(client_metrics.PLANS_READ_AHEAD)
            self._numbered[plan.plan_id] = self._blocks
            self._start_parts(plan)
            return
        try:
            with self._request.trace.phase("plan"):
                plan = self._plan(self._blocks)
        except KVStoreError as error:
            self._context.incidents.report(client_metrics.PLANS_FAILED, "load not planned: this host reads all blocks", error)
            self._start_here(self._blocks)
            return
        self._predicted_s = plan.predicted_s
        if not plan.parts:  # the oracle policy reads nothing
            self._context.incidents.counters.add(client_metrics.ORACLE_LOADS)
            return
        self._start_parts(plan)

    def _plan(self, blocks: Positions) -> Plan:
        plan = self._metadata.plan_load(
            self._session.node_id,
            self._paths.decode_node,
            self._paths.policy,
            len(blocks),
            self._context.shape.block_bytes,
            self._context.spec.block_tokens,
            self._scope.left_s(),
            relays=self._paths.relays,
        )
        self._plan_ids.append(plan.plan_id)
        self._numbered[plan.plan_id] = blocks
        return plan

    def _start_parts(self, plan: Plan) -> None:
        for planned in plan.parts:
            positions = self._missing(self._positions(plan, planned))
            if not len(positions):
                continue
            if planned.path == PATH_PREFILL or planned.node.node_id == self._session.node_id:
                self._start_here(positions, planned, plan)
                continue
            source = RemotePath(self._scope, planned.path, planned.node, self._paths.layer_group, self._paths.stall_s)
            self._submit(source, positions, planned, plan)

    def _start_here(self, positions: Positions, planned: PlannedPart | None = None, plan: Plan | None = None) -> None:
        source = PrefillPath(self._scope, PATH_PREFILL, self._session, self._paths.layer_group, self._paths.stall_s)
        self._submit(source, positions, planned, plan)

    def _submit(self, source: StoragePathSource, positions: Positions, planned: PlannedPart | None, plan: Plan | None) -> None:
        run = copy_context().run
        future = self._context.part_threads.submit(run, source.fetch, self._request, positions, self._sink)
        self._parts.append(_RunningPart(source, positions, planned, plan, future))

    def _positions(self, plan: Plan, planned: PlannedPart) -> Positions:
        return self._numbered[plan.plan_id][planned.start : planned.start + planned.count]

    def _missing(self, positions: Positions) -> Positions:
        """Return which blocks are not complete and may still come."""
        open_ = self._sink.missing(positions)
        return open_[self._sink.ready_layers(open_) < self._context.shape.layers]

    # ---- watching parts ----
    def _watch(self) -> None:
        """Until all parts have ended: cancel parts that stall, plan failed ones again, report progress."""
        clock, stall_s = self._context.clock, self._paths.stall_s
        while self._parts:
            wait([part.future for part in self._parts], _WATCH_S, FIRST_COMPLETED)
            ended: list[_RunningPart] = []
            running: list[_RunningPart] = []
            for part in self._parts:
                if part.source.scope.ended:
                    part.future.cancel()  # no effect unless the part waits for a thread
                (ended if part.future.done() else running).append(part)
            self._parts = running
            for part in ended:
                self._handle_end(part)
            for part in self._parts:
                source = part.source
                replaceable = part.planned is not None
                if replaceable and source.seconds_without_progress(clock.now_s()) > stall_s and not source.scope.ended:
                    message = f"part of a load stalled: node {source.node_id}"
                    self._context.incidents.report(client_metrics.PARTS_STALLED, message)
                    part.stalled = True
                    source.scope.cancel()
            self._report_late(clock.now_s())
            self._report(finished=False)

    def _report_late(self, now_s: float) -> None:
        """Report once that this load waits for parts although its time is over: they may still write to the buffer."""
        if self._late_s == math.inf and self._scope.ended:
            self._late_s = now_s + _END_S
        if self._parts and self._late_s <= now_s:
            self._late_s = math.nan
            self._context.incidents.report(client_metrics.PARTS_LATE, "a load is over but waits for its parts, which do not end")

    def _handle_end(self, part: _RunningPart) -> None:
        """Handle a part that has ended: nothing writes to its blocks any more. Find another path for its missing blocks."""
        if not part.future.cancelled():
            part.future.result()  # raises if the part ended by a bug
        source, sink = part.source, self._sink
        left = self._missing(part.positions)
        if not len(left):
            self._report_end(part)
            return
        if source.error is not None:
            sink.record_error(source.error)
            if source.on_this_host and is_session_lost(source.error) and not self._session.server.hung:
                self._local.lost(self._session, source.error)
        if source.error is not None or source.scope.ended:  # never answered: a failure, not a miss
            sink.outcomes[left[sink.outcomes[left] == Outcome.MISS]] = Outcome.UNAVAILABLE
        retried = _RETRIED[sink.outcomes[left]]
        sink.give_up(left[~retried])
        left = left[retried]
        if not len(left) or self._scope.ended:
            self._report_end(part)
            if len(left):
                end_unread(self._request, left, sink)
            return
        cause = f"no progress for {self._paths.stall_s:g} s" if part.stalled else source.failure
        why = f"{source.node_id} over {source.path}: {cause}"
        self._context.incidents.report(client_metrics.PARTS_FAILED, f"part of a load failed, another path is tried: {why}")
        if part.planned is None or part.plan is None:
            self._no_path(left)
        else:
            self._replan(part.planned, part.plan, why, stalled=part.stalled)

    def _replan(self, planned: PlannedPart, plan: Plan, why: str, *, stalled: bool) -> None:
        """Plan a failed part again. Without a plan this host reads it, unless it has just failed to; a stall is not a failure."""
        positions = self._positions(plan, planned)
        left = self._missing(positions)
        self._replans += 1
        if self._replans <= self._paths.attempts:
            try:
                again = self._plan_again(planned, plan, positions, left, why)
            except KVStoreError as error:
                message = "part of a load not planned again: this host reads it"
                self._context.incidents.report(client_metrics.PLANS_FAILED, message, error)
            else:
                self._start_parts(again)
                return
        session = self._session
        if (stalled or planned.path != PATH_PREFILL) and session.alive and not session.server.hung:
            self._start_here(left)
        else:
            self._no_path(left)

    def _plan_again(self, planned: PlannedPart, plan: Plan, positions: Positions, left: Positions, why: str) -> Plan:
        """Plan the blocks that are ``left`` of a part: in its plan, or as a new load if the planner does not have its plan.

        The plan may be one of a read ahead or of another planner, or may have ended.
        """
        if plan.plan_id in self._plan_ids and not self._described[plan.plan_id]:
            arrived = np.flatnonzero(~np.isin(positions, left, assume_unique=True))
            ranges = largest_ranges([(planned.start + first, last - first) for first, last in spans(arrived)])
            with suppress(NotFound):
                return self._metadata.replan_load(plan, planned, ranges, why, self._scope.left_s())
        return self._plan(left)

    def _no_path(self, positions: Positions) -> None:
        """Give up blocks that no host is left to read."""
        self._sink.outcomes[positions] = Outcome.UNAVAILABLE
        self._sink.record_error(Unavailable("no path to storage is left for a part of the load"))
        self._sink.give_up(positions)

    # ---- the planner's queues ----
    def _report(self, *, finished: bool) -> None:
        """Report progress of the parts under way."""
        moved: dict[int, list[tuple[int, int]]] = {plan_id: [] for plan_id in self._plan_ids} if finished else {}
        for part in self._parts:
            if part.planned is None or part.plan is None or part.plan.plan_id not in self._plan_ids:
                continue
            done = self._arrived(part.plan, part.planned)
            if done > part.reported:
                part.reported = done
                moved.setdefault(part.plan.plan_id, []).append((part.planned.index, done))
        restored = {} if finished else self._plans_to_restore(moved)
        if moved:
            self._metadata.report_loads(moved, finished=finished, restored=restored)

    def _plans_to_restore(self, moved: dict[int, list[tuple[int, int]]]) -> dict[int, metadata_pb2.PlanInProgress]:
        """Describe plans that the planner does not know, because it replaced theirs. Add all their progress to ``moved``."""
        forgotten: dict[int, metadata_pb2.PlanInProgress] = {}
        for plan_id in self._metadata.take_forgotten(self._plan_ids):
            if self._described[plan_id] == _DESCRIPTIONS:
                continue
            self._described[plan_id] += 1
            described = metadata_pb2.PlanInProgress()
            progress = moved[plan_id] = []
            for part in self._parts:
                planned, plan = part.planned, part.plan
                if planned is None or plan is None or plan.plan_id != plan_id or plan.request is None:
                    continue
                described.parts.add(index=planned.index, start=planned.start, count=planned.count, node_id=planned.node.node_id)
                described.load.CopyFrom(plan.request)
                described.load.budget_ms = max(1, int(self._scope.left_s() * 1000))
                progress.append((planned.index, part.reported))
            if progress:
                forgotten[plan_id] = described
        return forgotten

    def _report_end(self, part: _RunningPart) -> None:
        """Report a part that has ended, with the blocks that arrived: the planner estimates the speed of a link from it."""
        if part.planned is not None and part.plan is not None and part.plan.plan_id in self._plan_ids:
            done = self._arrived(part.plan, part.planned)
            self._metadata.report_loads({part.plan.plan_id: [(part.planned.index, done)]}, finished=False)

    def _arrived(self, plan: Plan, planned: PlannedPart) -> int:
        """Return how much of a part has arrived, in blocks: layers of several blocks add up."""
        return int(self._sink.ready_layers(self._positions(plan, planned)).sum()) // self._context.shape.layers


def end_unread(request: LoadRequest, positions: Positions, sink: BlockSink) -> None:
    """Record that the load ended before some blocks were read."""
    sink.outcomes[positions] = Outcome.TIMEOUT
    sink.record_error(request.scope.error())
    sink.give_up(positions)


def may_need_plan(runs: Iterable[Run], local: LocalNode | None) -> bool:
    """Whether another host might read a run over its storage link for this one. Without a local node nothing is planned."""
    return local is not None and any(_over_storage_link(run) and run.node_id != local.node_id for run in runs)


def blocks_beyond(runs: Iterable[Run], blocks: int, node_id: str) -> Mask:
    """Return a mask of the blocks whose only replicas, according to the lookup, are in the storage of other hosts."""
    beyond = np.zeros(blocks, bool)
    near = np.zeros(blocks, bool)
    for run in runs:
        (near if run.node_id == node_id or not _over_storage_link(run) else beyond)[run.start : run.end] = True
    found: Mask = beyond & ~near
    return found


def storage_runs(runs: Sequence[Run], node_id: str) -> list[Run]:
    """Return runs that hosts without this node read over storage links. A node is asked once for its blocks on NVMe."""
    stored: list[Run] = []
    for run in sorted((run for run in runs if _over_storage_link(run)), key=lambda run: run.distance, reverse=True):
        covered = any(one.node_id == run.node_id and one.start <= run.start and run.end <= one.end for one in stored)
        if run.node_id != node_id and not covered:
            stored.append(run)
    return stored


def _over_storage_link(run: Run) -> bool:
    """Whether another host would read a run over its storage link."""
    return run.tier is Tier.NVME or run.node.storage_only
