"""Decode engines: continuous batching as a fluid of steps.

All sequences of a unit advance one token a step. A unit counts its steps; a sequence ends when the count has grown by its
tokens. So only joining and leaving are events, and the step time changes with them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from kvstore.roofline.engine_model import EngineModel
from kvstore.simulate.engines.job import Job
from kvstore.simulate.network.event_loop import EventLoop

_TOO_FAST = 1e-9
"""Seconds per step without the time for computing."""


class DecodeUnit:
    """Engines that step together; a step takes as long as that of the slowest."""

    def __init__(
        self, loop: EventLoop, engines: int, first: int, model: EngineModel, *, compute: bool, done: Callable[[Job], None]
    ) -> None:
        self._loop = loop
        self._first = first
        self._model = model
        self._compute = compute
        self._done = done
        self._sequences = [0] * engines
        self._context = [0.0] * engines
        self._seconds = [0.0] * engines
        self._bytes = [0.0] * engines
        self._together = 0
        self._steps = 0.0
        self._at = 0.0
        self._step_s = _TOO_FAST
        self._version = 0
        self._order = 0
        self._ends: list[tuple[float, int, Job]] = []
        self.busy_s = 0.0
        self.tokens = 0
        self.flops = 0.0
        self.hbm_bytes = 0.0

    def join(self, job: Job) -> None:
        """The prompt's KV is in HBM; its first token was made by prefill."""
        self._advance()
        self._place(job, 1)
        self._order += 1
        heapq.heappush(self._ends, (self._steps + job.turn.out - 1, self._order, job))
        self.tokens += job.turn.out - 1
        self._plan()
        job.second_token = self._loop.now + self._step_s

    def _advance(self) -> None:
        passed = self._loop.now - self._at
        self._at = self._loop.now
        if self._together:
            steps = passed / self._step_s
            self._steps += steps
            self.busy_s += passed
            self.flops += steps * self._together * self._model.model.linear_flops(1)
            self.hbm_bytes += steps * sum(self._bytes)

    def _place(self, job: Job, sign: int) -> None:
        engine = job.decode - self._first
        self._together += sign
        self._sequences[engine] += sign
        # half of its answer is context on average; growing it step by step would change times by less than a percent
        self._context[engine] += sign * (job.prompt_tokens + job.turn.out / 2)
        if self._compute:
            sequences = self._sequences[engine]
            work = (sequences, self._context[engine], self._together)
            self._seconds[engine] = self._model.decode_seconds(*work)
            self._bytes[engine] = self._model.decode_bytes(*work)

    def _plan(self) -> None:
        self._step_s = max(_TOO_FAST, *self._seconds)
        self._version += 1
        if self._ends:
            left = max(0.0, self._ends[0][0] - self._steps) * self._step_s
            version = self._version
            self._loop.after(left, lambda: self._leave(version))

    def _leave(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        self._steps = max(self._steps, self._ends[0][0])
        gone = []
        while self._ends and self._ends[0][0] <= self._steps + 1e-6:
            job = heapq.heappop(self._ends)[2]
            self._place(job, -1)
            gone.append(job)
        self._plan()
        for job in gone:
            self._done(job)
