"""Runs agents against the engines of a bed: submits their turns, assigns engines, and keeps book of every request.

Requests are assigned by the scheduler of the metadata server, by the same rules without the server, or in turns. A prefill
engine has ``in_flight`` requests at a time; further requests assigned to it wait here, in order.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.core.errors import InvalidArgument
from kvstore.netlab.traffic import LinkRecorder
from netlab.agents import Trajectory
from netlab.assigning import Assigned, Assigner, ByRules, ByServer, InTurns, Wanted
from netlab.bed import machine_times
from netlab.engine_bed import EngineBed

_RUN_S = 150.0
"""A run that takes longer is given up."""


@dataclass(frozen=True, slots=True)
class Variant:
    """How requests are served in a run.

    Attributes:
        name: as shown.
        policy: name of a path policy.
        layerwise: loads, computing and handoff overlap layer by layer.
        scheduled: engines are chosen by the paper's scheduler; else in turns.
        layer_group: layers read from storage together; 0: whole blocks.
        by_server: use the metadata server's scheduler over its RPCs; else the coordinator runs a scheduler.
    """

    name: str
    policy: str
    layerwise: bool = True
    scheduled: bool = True
    layer_group: int = 0
    by_server: bool = False

    def assigner(self, bed: EngineBed) -> Assigner:
        """The chooser of the engines."""
        if not self.scheduled:
            return InTurns(bed)
        return ByServer(bed) if self.by_server else ByRules(bed)


LADDER = (
    Variant("basic", "prefill_only", layerwise=False, scheduled=False),
    Variant("+ layer-wise", "prefill_only", scheduled=False),
    Variant("+ both paths", "round_robin", scheduled=False),
    Variant("+ scheduler", "shorter_queue"),
    Variant("+ split", "split"),
)
"""Step after step, as in the paper; each name includes all steps before it."""
ORACLE = Variant("oracle", "oracle")


@dataclass(slots=True)
class Request:
    """One turn of an agent, and its times (monotonic seconds)."""

    name: str
    agent: int
    turn: int
    prompt: int
    known: int
    out: int
    submitted_s: float
    dispatched_s: float = 0.0
    prefill: str = ""
    decode: str = ""
    generation: int = 0
    paired_s: float = 0.0
    """When its engines were known."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Report of the prefill engine."""
    ends: dict[str, Any] = field(default_factory=dict)
    """Report of the decode engine."""

    @property
    def ttft_s(self) -> float:
        """From submission to the first token, which prefill makes."""
        return float(self.facts["first_s"]) - self.submitted_s

    @property
    def ttst_s(self) -> float:
        """From the first token to the second: the handoff, and one step."""
        return float(self.ends["second_s"]) - float(self.facts["first_s"])

    @property
    def tpot_s(self) -> float:
        """A token, from the first to the last."""
        return (float(self.ends["last_s"]) - float(self.facts["first_s"])) / max(1, self.out - 1)


@dataclass(frozen=True, slots=True)
class RunResult:
    """A finished run."""

    variant: Variant
    requests: tuple[Request, ...]
    began_s: float
    recording: LinkRecorder
    machine_cpu: float
    """Share of all cores that was busy, with any process."""
    engines: tuple[dict[str, Any], ...]

    @property
    def jct_s(self) -> float:
        """From the beginning to the last token of the last request."""
        return max(float(request.ends["last_s"]) for request in self.requests) - self.began_s

    def wrong(self) -> int:
        """Blocks with wrong bytes, on either side."""
        return sum(request.facts["wrong"] + request.ends["wrong"] for request in self.requests)


class Coordinator:
    """One run after the other on a bed.

    Args:
        bed: running.
        trajectories: of all agents; agent i begins with the bed's i-th context.
    """

    def __init__(self, bed: EngineBed, trajectories: Sequence[Trajectory]) -> None:
        if [one.context for one in trajectories] != bed.contexts:
            raise InvalidArgument("agents begin with the bed's contexts")
        self._bed = bed
        self._trajectories = trajectories
        self._runs = itertools.count(1)

    def run(self, variant: Variant, arrivals: Sequence[float], at_once: int | None = None) -> RunResult:
        """Runs agents, each its turns one after the other.

        Args:
            variant: how they are served.
            arrivals: when agents begin, seconds after the beginning, ascending.
            at_once: maximum number of concurrent agents. The next one begins when another has ended.
        """
        bed = self._bed
        number = next(self._runs)
        described = {"policy": variant.policy, "layerwise": variant.layerwise, "layer_group": variant.layer_group}
        bed.tell_all(do="run", run=number, variant=described)
        before = machine_times()
        with bed.lab.record() as recording:
            one = _Run(bed, self._trajectories, number, variant, arrivals, at_once)
            one.drive()
        busy, total = (now - then for now, then in zip(machine_times(), before, strict=True))
        ends = bed.tell_all(do="end")
        if variant.by_server:
            bed.router.tell(do="leave")
        return RunResult(
            variant, tuple(one.requests.values()), one.began_s, recording, busy / total if total else 0.0, tuple(ends)
        )


class _Run:
    def __init__(
        self,
        bed: EngineBed,
        trajectories: Sequence[Trajectory],
        number: int,
        variant: Variant,
        arrivals: Sequence[float],
        at_once: int | None,
    ) -> None:
        self._bed = bed
        self._trajectories = trajectories
        self._number = number
        self._variant = variant
        self._oracle = variant.policy == "oracle"
        self.requests: dict[str, Request] = {}
        self._assigner = variant.assigner(bed)
        self._waiting: dict[str, deque[Request]] = {name: deque() for name in bed.bed.prefill_hosts}
        self._busy = dict.fromkeys(bed.bed.prefill_hosts, 0)
        self.began_s = time.monotonic()
        self._arrivals = [(self.began_s + at, agent) for agent, at in enumerate(arrivals)]
        heapq.heapify(self._arrivals)
        self._space = len(arrivals) if at_once is None else at_once
        self._left = sum(len(trajectories[agent].turns) for _, agent in self._arrivals)

    def drive(self) -> None:
        """Until every turn is done."""
        while self._left:
            now_s = time.monotonic()
            if now_s - self.began_s > _RUN_S:
                raise SystemExit(f"{self._left} turns were not done after {_RUN_S:.0f} s")
            while self._space and self._arrivals and self._arrivals[0][0] <= now_s:
                self._space -= 1
                self._submit(heapq.heappop(self._arrivals)[1], 0)
            wait_s = self._arrivals[0][0] - now_s if self._arrivals and self._space else 1.0
            try:
                _, event = self._bed.next_event(max(0.0005, wait_s))
            except queue.Empty:
                continue
            self._take(event)

    def _submit(self, agent: int, turn: int) -> None:
        trajectory = self._trajectories[agent]
        prompt, known = trajectory.prompt(turn), trajectory.known(turn)
        request = Request(
            f"{self._number}-{agent}-{turn}", agent, turn, prompt, known, trajectory.turns[turn].out, time.monotonic()
        )
        self.requests[request.name] = request
        self._paired(self._assigner.submit(Wanted(request.name, prompt, self._expect(request), request.out)))

    def _paired(self, found: Sequence[Assigned]) -> None:
        for one in found:
            request = self.requests[one.name]
            request.prefill, request.decode, request.generation = one.prefill, one.decode, one.generation
            request.paired_s = time.monotonic()
            self._waiting[one.prefill].append(request)
            self._dispatch(one.prefill)

    def _expect(self, request: Request) -> int:
        """Tokens of it that should be in storage."""
        tokens = self._bed.spec.block_tokens
        return min(request.known, request.prompt - 1) // tokens * tokens

    def _dispatch(self, prefill: str) -> None:
        waiting = self._waiting[prefill]
        while waiting and self._busy[prefill] < self._bed.settings.in_flight:
            request = waiting.popleft()
            self._busy[prefill] += 1
            request.dispatched_s = time.monotonic()
            if not self._oracle:
                self._decode(request, bare=False)  # awaited before the first layer can be handed over
            expect = self._expect(request) // self._bed.spec.block_tokens
            self._bed.engines[prefill].tell(do="prefill", **self._named(request), expect=expect, decode=request.decode)

    def _decode(self, request: Request, *, bare: bool) -> None:
        self._bed.engines[request.decode].tell(do="decode", **self._named(request), out=request.out, bare=bare)

    def _named(self, request: Request) -> dict[str, Any]:
        return {"id": request.name, "agent": request.agent, "run": self._number, "prompt": request.prompt}

    def _take(self, event: dict[str, Any]) -> None:
        request = self.requests[event["id"]]
        if event["did"] == "paired":
            self._paired([self._assigner.assigned(event)])
            return
        if event["did"] == "prefilled":
            request.facts = event
            self._busy[request.prefill] -= 1
            if self._oracle:
                self._decode(request, bare=True)
            self._paired(self._assigner.prefilled(request.name))
            self._dispatch(request.prefill)
        else:
            request.ends = event
        if request.facts and request.ends:
            self._left -= 1
            self._paired(self._assigner.finished(request.name))
            if request.turn + 1 < len(self._trajectories[request.agent].turns):
                self._submit(request.agent, request.turn + 1)
            else:
                self._space += 1
