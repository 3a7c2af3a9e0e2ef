"""Measure planner and scheduler: decisions per second on one core, and the cost per decision in a cluster 192 times as large.

A decision covers the whole life of a request: submit, assignment of a prefill and a decode engine by fetches of their groups
(with a report of every engine), planning and charging the read, two progress reports per part, end of the prompt, end of the
request. Per tick each engine gets one request and every group fetches once. A request ends three ticks later. There are two
decode engines per prefill engine. ``groups`` is the grouping: the engines of one node, or all engines of one role. Each round
runs all clusters.
"""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections import deque
from dataclasses import dataclass

import harness
from harness import CpuCost, Figure, Reference, Target
from kvstore.dualpath.contract import LoadPlan, PlanRequest
from kvstore.dualpath.groups import Engine, EngineKind
from kvstore.dualpath.planner import Planner
from kvstore.dualpath.policies import policy_named
from kvstore.dualpath.scheduler import EngineReport, NewRequest, PairedRequest, Scheduler, SchedulerLimits
from kvstore.process import gc_tuning

ENGINES_A_NODE = 8
BLOCK_TOKENS = 64
BLOCK_BYTES = 3 << 20
SNIC, CNIC = 50e9, 400e9
HBM_BYTES = 64 << 30
TICK_S = 0.2
TICKS_A_REQUEST = 3
RELAYS = 4


@dataclass(slots=True)
class UnderWay:
    """A request with its engines and its read plan."""

    pair: PairedRequest
    plan: LoadPlan


class Cluster:
    """A scheduler, a planner and simulated engines."""

    def __init__(self, engines: int, groups: str, policy: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.scheduler = Scheduler(SchedulerLimits(alpha_tokens=4_000_000, beta_tokens=400_000))
        self.planner = Planner(policy_named(policy), relays=RELAYS)
        a_node = ENGINES_A_NODE if engines >= 3 * ENGINES_A_NODE else 1
        self.engines: dict[str, list[Engine]] = {}
        for number in range(engines):
            node = number // a_node
            role = EngineKind.DECODE if node % 3 else EngineKind.PREFILL
            group = f"node{node}" if groups == "node" else role
            engine = Engine(f"e{number}", role, group, f"node{node}", HBM_BYTES)
            self.scheduler.join(engine)
            self.engines.setdefault(group, []).append(engine)
            if not number % a_node:
                self.planner.add_node(engine.node, SNIC, CNIC)
        self.names = itertools.count()
        self.now = 0.0
        self.asked: dict[str, int] = {}
        self.running: deque[list[UnderWay]] = deque()
        self.count = engines
        self.decided = 0
        self.cpu_s = 0.0

    def tick(self) -> int:
        """Run one tick and return the number of decided requests."""
        for _ in range(self.count):
            name, tokens = f"r{next(self.names)}", self.random.randrange(2_000, 60_000)
            self.asked[name] = tokens
            self.scheduler.submit(NewRequest(name, tokens, tokens * 48_000 // 8))
        started: list[UnderWay] = []
        for group, engines in self.engines.items():
            reports = [EngineReport(engine.engine, read_tokens=self.pending_tokens(engine.node)) for engine in engines]
            started.extend(UnderWay(pair, self.plan(pair)) for pair in self.scheduler.fetch(group, reports).pairs)
        self.running.append(started)
        self.now += TICK_S
        if len(self.running) > TICKS_A_REQUEST:
            self.end(self.running.popleft())
        return len(started)

    def pending_tokens(self, node: str) -> int:
        """Queue report of a node, as engines send it."""
        state = self.planner.queues.state(node, self.now)
        return state.pending_tokens if state is not None else 0

    def plan(self, pair: PairedRequest) -> LoadPlan:
        """Plan the read of an assigned request."""
        blocks = self.asked.pop(pair.request_id) // BLOCK_TOKENS
        request = PlanRequest(pair.request_id, blocks, BLOCK_BYTES, BLOCK_TOKENS, pair.prefill.node, pair.decode.node)
        return self.planner.plan(request, self.now)

    def end(self, done: list[UnderWay]) -> None:
        """Send all reports of the clients and engines of these requests."""
        for entry in done:
            plan_id = entry.plan.plan_id
            for part in entry.plan.parts:
                self.planner.progress(plan_id, part.index, part.count // 2, self.now)
            for part in entry.plan.parts:
                self.planner.progress(plan_id, part.index, part.count, self.now)
            self.planner.finish(plan_id, self.now)
            self.scheduler.prefill_done(entry.pair.request_id, entry.pair.generation)
            self.scheduler.finish(entry.pair.request_id, entry.pair.generation)

    def microseconds(self, decisions: int) -> float:
        """Measure the time per decision over about ``count`` decisions."""
        decided = 0
        begun, cpu_begun = time.perf_counter(), time.process_time()
        while decided < decisions:
            decided += self.tick()
        took_s = time.perf_counter() - begun
        self.cpu_s += time.process_time() - cpu_begun
        self.decided += decided
        return took_s / decided * 1e6


def main() -> None:
    """Measure all cluster sizes."""
    options = harness.options("planner", __doc__)
    decisions = options.pick(full=4_000, quick=1_200, smoke=12)
    large = options.pick(full=1_152, quick=1_152, smoke=24)
    kinds = [(policy, groups) for policy in ("split", "shorter_queue") for groups in ("node", "role")]
    clusters = {(size, *kind): Cluster(size, kind[1], kind[0], options.seed) for size in (6, large) for kind in kinds}
    for cluster in clusters.values():
        for _ in range(TICKS_A_REQUEST + 2):
            cluster.tick()
    gc_tuning.freeze_startup_objects()  # same setting as in the metadata server
    samples = harness.interleave(
        {repr(key): functools.partial(cluster.microseconds, decisions) for key, cluster in clusters.items()},
        options.repetitions,
    )
    for (size, policy, groups), cluster in clusters.items():
        parameters: dict[str, str | int | float | bool] = {"engines": size, "policy": policy, "groups": groups}
        took = samples[repr((size, policy, groups))]
        options.keep(
            Figure("planner_decisions", "Planner and scheduler: decisions per second, one core", parameters, "1/s"),
            [1e6 / microseconds for microseconds in took],
            target=Target("value", 5_000),
            cpu=CpuCost("operation", {"planner": cluster.cpu_s / cluster.decided}),
        )
        if size == large:
            options.keep(
                Figure("planner_growth", "Planner and scheduler: time per decision", parameters, "us", lower_is_better=True),
                took,
                peer=Reference("6 engines", samples[repr((6, policy, groups))]),
                target=Target("peer", 2.0),
            )


if __name__ == "__main__":
    main()
