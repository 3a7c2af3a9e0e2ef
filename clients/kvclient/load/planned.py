"""A load over several hosts' storage links: what lies near comes the usual way, what lies in storage by plan.

The plan is made by the metadata server at the last moment, from the queues that it has just charged. Each of its parts runs in a
thread of its own; this one watches them. A part that fails, or in which nothing moves for ``stall_s``, is ended; when nothing
writes to its memory any more, what it did not bring is planned anew over other hosts, and what it brought stays. Without a
planner, or when no other host is left, this host's own node reads the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvclient.call.context import Core
from kvclient.call.operation import Operation
from kvclient.load.layer_progress import LayerBoard
from kvclient.load.layerwise import LayerGate
from kvclient.load.load import Load, fetch_near, finished_load, keep_near
from kvclient.load.outcomes import Tally, spans
from kvclient.load.paths import Paths, Plan, PlannedPart, told_ranges
from kvclient.load.sources.storage_path import LocalPart, Positions, RemotePart, StagedPart, Wanted
from kvclient.memory.buffers import pick_blocks
from kvclient.memory.device_buffer import land
from kvclient.nodes.local_session import Session, means_lost
from kvclient.nodes.metadata_client import Directory
from kvclient.options import Verify
from kvclient.results import PATH_PREFILL, LoadResult, Run, outcome_table
from kvstore.core.buffers import BlockBuffer
from kvstore.core.errors import KVStoreError, Unavailable
from kvstore.core.types import KEY_BYTES, BlockKey, Outcome, Tier

_WATCH_S = 0.05
"""How often stalls are looked for, and progress is told."""
_AGAIN = outcome_table(Outcome.UNAVAILABLE, Outcome.TIMEOUT, Outcome.NO_ROOM)
"""What is worth another path; a MISS or CORRUPT of storage is the same over every path. (What is bent on the way from
another host's node is UNAVAILABLE over it.)"""


@dataclass(slots=True)
class _Running:
    """A part under way."""

    part: StagedPart
    planned: PlannedPart | None
    """None: not of a plan, but what this host reads after planning failed."""
    plan: Plan | None
    future: Future[None]
    told: int = 0
    stalled: bool = False
    last: bool = False
    """Nobody else is left to read its blocks: while its node answers at all, it has until the deadline."""


@dataclass(slots=True)
class PlanTrace:
    """How a load went, for people and benchmarks: its plans, and what became of parts."""

    plans: list[Plan] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class PlannedLoad:
    """One load by plan. ``run`` once, in any thread; arguments as for ``Load``.

    Args:
        core: the client's parts.
        directory: the metadata server.
        pool: threads for parts.
        keys: consecutive keys of a chain.
        packed: the same, packed.
        runs: who is said to hold what.
        parent: key before the first, None at the head.
        depth: position of the first.
        buffer: room for all of them.
        operation: deadline and cancellation.
        verify: see ``Verify``.
        gate: layer-wise: where arrived layers are announced.
        paths: the caller's choices.
    """

    def __init__(
        self,
        core: Core,
        directory: Directory,
        pool: ThreadPoolExecutor,
        keys: Sequence[BlockKey],
        packed: bytes,
        runs: Sequence[Run],
        parent: BlockKey | None,
        depth: int,
        buffer: BlockBuffer,
        operation: Operation,
        verify: Verify,
        gate: LayerGate | None,
        paths: Paths,
    ) -> None:
        self._core = core
        self._directory = directory
        self._pool = pool
        self._keys = keys
        self._packed = packed
        self._runs = sorted(runs, key=lambda run: run.distance)
        self._parent = parent
        self._depth = depth
        self._buffer = buffer
        self._operation = operation
        self._verify = verify
        self._paths = paths
        self._tally = Tally(len(keys))
        self._gate = gate
        self._board = LayerBoard(len(keys), core.shape.layers, gate, buffer)
        self._session: Session | None = None
        self._running: list[_Running] = []
        self._final = np.zeros(len(keys), bool)  # given up: the engine was told that they will not come
        self._replans = 0
        self.trace = PlanTrace()

    def run(self) -> LoadResult:
        """Does it. Errors of ours end in outcomes and ``error``."""
        session = self._core.local.session() if self._core.local is not None else None
        self._session = session
        far = self._far(session)
        if session is None or not len(far):
            return self._plainly()
        here = self._from_pool()
        far = far[far >= here]
        near_done = self._start_near(far, here)
        wanted = Wanted(
            self._core,
            self._keys,
            self._packed,
            self._parent,
            self._depth,
            self._stored(session),
            self._buffer,
            self._operation,
            self._tally,
            self._board,
            verify_copies=session.verifies_copies(self._verify),
            verify_wire=self._verify != "never",
        )
        try:
            if len(far):
                self._start_far(wanted, far)
            with self._operation.phase("parts over storage links"):
                self._watch(wanted, far)
        finally:
            for one in self._running:
                one.part.cancel()
            wait([one.future for one in self._running])  # nobody may have the buffer back before
            try:
                near_done()
            finally:
                self._report(far, finished=True)
        land(self._buffer, self._tally)
        place = (self._keys, self._parent, self._depth, self._buffer)
        keep_near(self._core, *place, self._operation, self._verify, self._tally, here)
        return self._result()

    def note(self, error: KVStoreError) -> None:
        """Something went wrong before the load began: kept for the result."""
        self._tally.note(error)

    # ---- what goes where ----
    def _far(self, session: Session | None) -> Positions:
        """Blocks that lie beyond storage links only: in no engine host's DRAM and on no volume of this one, says the lookup."""
        far = np.zeros(len(self._keys), bool)
        near = np.zeros(len(self._keys), bool)
        for run in self._runs:
            own = session is not None and run.node_id == session.node_id
            (near if own or not _beyond(run) else far)[run.start : run.end] = True
        return np.flatnonzero(far & ~near)

    def _stored(self, session: Session) -> list[Run]:
        """Runs that are read over storage links: what a node has on NVMe is asked of it once, whatever lies in its DRAM too."""
        stored: list[Run] = []
        for run in sorted((run for run in self._runs if _beyond(run)), key=lambda run: run.distance, reverse=True):
            covered = any(one.node_id == run.node_id and one.start <= run.start and run.end <= one.end for one in stored)
            if run.node_id != session.node_id and not covered:
                stored.append(run)
        return stored

    def _plainly(self) -> LoadResult:
        """Everything the usual way: there is nothing to plan, or no node on this host."""
        load = Load(
            self._core,
            self._keys,
            self._packed,
            self._runs,
            self._parent,
            self._depth,
            self._buffer,
            self._operation,
            self._verify,
            self._board if self._gate is not None else None,
        )
        if self._tally.error is not None:
            load.note(self._tally.error)
        return load.run()

    def _from_pool(self) -> int:
        """Leading blocks that the engine's own pool gave: whatever the index says of them, no link is needed."""
        here = fetch_near(self._core, self._keys, self._buffer, self._operation, self._verify, self._tally)
        self._board.arrived(np.arange(here), 0, self._core.shape.layers)
        return here

    def _start_near(self, far: Positions, first: int) -> Callable[[], None]:
        """Loads what lies near from position ``first`` on, in a thread of its own; returns how to wait for it."""
        near = np.setdiff1d(np.arange(first, len(self._keys)), far, assume_unique=True)
        if not len(near):
            return lambda: None
        future = self._pool.submit(copy_context().run, self._load_near, near)
        return lambda: future.result()

    def _load_near(self, near: Positions) -> None:
        for start, stop in spans(near):
            if self._operation.over:
                self._tally.outcomes[start:stop] = Outcome.TIMEOUT
                continue
            runs = [
                Run(max(run.start, start) - start, min(run.end, stop) - max(run.start, start), run.node, run.tier, run.volume_id)
                for run in self._runs
                if max(run.start, start) < min(run.end, stop)
            ]
            load = Load(
                self._core,
                self._keys[start:stop],
                self._packed[start * KEY_BYTES : stop * KEY_BYTES],
                runs,
                self._keys[start - 1] if start else self._parent,
                self._depth + start,
                pick_blocks(self._buffer, np.arange(start, stop)),
                self._operation,
                self._verify,
                None,
            )
            load.bring()
            self._tally.absorb(start, load.tally)
            good = np.flatnonzero(load.tally.outcomes == Outcome.HIT) + start
            self._board.arrived(good, 0, self._core.shape.layers)
            self._board.lost(np.flatnonzero(load.tally.outcomes != Outcome.HIT) + start)

    # ---- parts ----
    def _start_far(self, wanted: Wanted, far: Positions) -> None:
        try:
            with self._operation.phase("plan"):
                plan = self._directory.plan_load(
                    self._session.node_id if self._session is not None else "",
                    self._paths.decode_node,
                    self._paths.policy,
                    len(far),
                    self._core.spec,
                    self._operation.left_s(),
                    relays=self._paths.relays,
                )
        except KVStoreError as error:
            self._core.incidents.report("client_plans_failed_total", "no plan: this host reads everything", error)
            self._start_own(wanted, far)
            return
        self.trace.plans.append(plan)
        if not plan.parts:  # the oracle reads nothing
            self._core.incidents.counters.add("client_oracle_loads_total")
            return
        self._start_parts(wanted, plan, far)

    def _start_parts(self, wanted: Wanted, plan: Plan, far: Positions) -> None:
        for planned in plan.parts:
            positions = far[planned.start : planned.start + planned.count]
            positions = positions[self._missing(positions)]
            if not len(positions):
                continue
            if planned.path == PATH_PREFILL or (self._session is not None and planned.node.node_id == self._session.node_id):
                self._start_own(wanted, positions, planned, plan)
                continue
            part = RemotePart(wanted, positions, planned.path, planned.node, self._paths.layer_group, self._paths.stall_s)
            self._submit(part, planned, plan)

    def _missing(self, positions: Positions) -> npt.NDArray[np.bool_]:
        """Which of some blocks are not here, and may still come."""
        missing: npt.NDArray[np.bool_] = (self._board.ready(positions) < self._core.shape.layers) & ~self._final[positions]
        return missing

    def _give_up(self, positions: Positions) -> None:
        """Some blocks will not come, and the engine is told so: nothing may bring them later on."""
        if len(positions):
            self._final[positions] = True
            self._board.lost(positions)

    def _start_own(
        self, wanted: Wanted, positions: Positions, planned: PlannedPart | None = None, plan: Plan | None = None
    ) -> None:
        session = self._session
        assert session is not None
        part = LocalPart(wanted, positions, PATH_PREFILL, session, self._paths.layer_group, self._paths.stall_s)
        self._submit(part, planned, plan)

    def _submit(self, part: StagedPart, planned: PlannedPart | None, plan: Plan | None) -> None:
        future = self._pool.submit(copy_context().run, part.run)
        self._running.append(_Running(part, planned, plan, future, last=planned is None))

    def _watch(self, wanted: Wanted, far: Positions) -> None:
        """Until all parts have ended: finds stalls, plans again what failed, tells the planner how far everything is."""
        clock, stall_s = self._core.clock, self._paths.stall_s
        while self._running:
            done, _ = wait([one.future for one in self._running], _WATCH_S, FIRST_COMPLETED)
            ended = [one for one in self._running if one.future in done]
            self._running = [one for one in self._running if one.future not in done]
            for one in ended:
                self._ended(wanted, one, far)
            for one in self._running:
                if not one.last and one.part.still_for(clock.now_s()) > stall_s and not one.part.over:
                    self._core.incidents.report("client_parts_stalled_total", f"nothing moves over {one.part.node_id}")
                    one.stalled = True
                    one.part.cancel()
            self._report(far, finished=False)

    def _ended(self, wanted: Wanted, one: _Running, far: Positions) -> None:
        """A part has ended, and nothing writes to its memory: what it did not bring goes over another path."""
        one.future.result()  # a bug of ours is raised here
        part, tally = one.part, self._tally
        left = part.positions[self._missing(part.positions)]
        if not len(left):
            self._tell_arrived(one, far)
            return
        if part.error is not None:
            tally.note(part.error)
            own = isinstance(part, LocalPart)
            hung = self._session is not None and self._session.server.hung
            if own and self._session is not None and means_lost(part.error) and self._core.local is not None and not hung:
                self._core.local.lost(self._session, part.error)
        unanswered = left[tally.outcomes[left] == Outcome.MISS] if part.error is not None or part.over else left[:0]
        tally.outcomes[unanswered] = Outcome.UNAVAILABLE  # never answered: a failure, not a miss
        again = left[_AGAIN[tally.outcomes[left]]]
        final = np.setdiff1d(left, again, assume_unique=True)
        self._give_up(final)
        if not len(again) or self._operation.over:
            self._tell_arrived(one, far)
            if len(again):
                tally.outcomes[again] = Outcome.TIMEOUT
                tally.note(self._operation.error())
                self._give_up(again)
            return
        trouble = f"nothing moved for {self._paths.stall_s:g} s" if one.stalled else part.trouble
        why = f"{part.node_id} over {part.path}: {trouble}"
        self._core.incidents.report("client_parts_failed_total", f"a part of a load goes over another path; {why}")
        if one.planned is not None and one.plan is not None:
            self._failed(wanted, one.planned, one.plan, far, why, stalled=one.stalled)
        else:
            self._no_path(again)

    def _failed(self, wanted: Wanted, planned: PlannedPart, plan: Plan, far: Positions, why: str, *, stalled: bool) -> None:
        """Plans a failed part again. Without a plan this host reads it, unless it has just failed to; a stall is no failure."""
        self.trace.failures.append(why)
        positions = far[planned.start : planned.start + planned.count]
        here = ~self._missing(positions)
        self._replans += 1
        if self._replans <= self._paths.attempts:
            arrived = told_ranges([(planned.start + first, last - first) for first, last in spans(np.flatnonzero(here))])
            try:
                again = self._directory.replan_load(plan, planned, arrived, why, self._operation.left_s())
            except KVStoreError as error:
                self._core.incidents.report("client_plans_failed_total", "no other path: this host reads the rest", error)
            else:
                self.trace.plans.append(again)
                self._start_parts(wanted, again, far)
                return
        session = self._session
        if (stalled or planned.path != PATH_PREFILL) and session is not None and session.alive and not session.server.hung:
            self._start_own(wanted, positions[~here])
        else:
            self._no_path(positions[~here])

    def _no_path(self, positions: Positions) -> None:
        """Nobody is left to read some blocks."""
        self._tally.outcomes[positions] = Outcome.UNAVAILABLE
        self._tally.note(Unavailable("no path to storage is left for a part of the load"))
        self._give_up(positions)

    # ---- the planner's queues ----
    def _report(self, far: Positions, *, finished: bool) -> None:
        plans = {plan.plan_id for plan in self.trace.plans}
        moved: dict[int, list[tuple[int, int]]] = {plan_id: [] for plan_id in plans} if finished else {}
        for one in self._running:
            if one.planned is None or one.plan is None:
                continue
            done = self._arrived(one.planned, far)
            if done > one.told:
                one.told = done
                moved.setdefault(one.plan.plan_id, []).append((one.planned.index, done))
        if moved:
            self._directory.report_loads(moved, finished=finished)

    def _tell_arrived(self, one: _Running, far: Positions) -> None:
        """Of a part that has ended: no more than what came, for the planner learns from it how fast a link is."""
        if one.planned is not None and one.plan is not None:
            done = self._arrived(one.planned, far)
            self._directory.report_loads({one.plan.plan_id: [(one.planned.index, done)]}, finished=False)

    def _arrived(self, planned: PlannedPart, far: Positions) -> int:
        """How much of a part has come, in blocks: layers of several add up."""
        positions = far[planned.start : planned.start + planned.count]
        return int(self._board.ready(positions).sum()) // self._core.shape.layers

    # ---- the end ----
    def _result(self) -> LoadResult:
        for index, done in enumerate(self._board.complete().tolist()):
            if not done and self._tally.outcomes[index] == Outcome.HIT:
                self._tally.outcomes[index] = Outcome.UNAVAILABLE  # by construction there is none; never a hit without its bytes
        return finished_load(self._core, self._tally, self._operation)


def _beyond(run: Run) -> bool:
    """Whether another host would read a run over its storage link."""
    return run.tier is Tier.NVME or run.node.storage_only


__all__ = ["PlanTrace", "PlannedLoad"]
