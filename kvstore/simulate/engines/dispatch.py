"""Assignment of requests to engines: the store's own scheduler, or a plain round-robin router."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.core.errors import InvalidArgument
from kvstore.dualpath.groups import Engine
from kvstore.dualpath.scheduler import EngineReport, NewRequest, Scheduler, SchedulerLimits
from kvstore.simulate.engines.job import Job
from kvstore.simulate.network.event_loop import EventLoop

Paired = Callable[[Job, int, int], None]
"""Called with a job, its prefill engine and its decode engine, when it has both."""


class Dispatch(Protocol):
    """Gives each submitted job a pair of engines, sooner or later."""

    def submit(self, job: Job, hbm_bytes: float) -> None:
        """Queue a job that needs a prefill engine and a decode engine."""

    def prefilled(self, job: Job) -> None:
        """The job's prefill has ended."""

    def finished(self, job: Job, hbm_bytes: float) -> None:
        """The job has ended."""


class RoundRobinDispatch:
    """Round robin, independent of the load; a decode engine without space is skipped."""

    def __init__(self, prefill_engines: int, decode_space: Sequence[float], paired: Paired) -> None:
        self._prefill_engines = prefill_engines
        self._space = list(decode_space)
        self._paired = paired
        self._next_prefill = self._next_decode = 0
        self._waiting: deque[tuple[Job, float]] = deque()

    def submit(self, job: Job, hbm_bytes: float) -> None:
        self._waiting.append((job, hbm_bytes))
        self._serve()

    def prefilled(self, job: Job) -> None:
        pass

    def finished(self, job: Job, hbm_bytes: float) -> None:
        self._space[job.decode] += hbm_bytes
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            job, need = self._waiting[0]
            for turn in range(len(self._space)):
                decode = (self._next_decode + turn) % len(self._space)
                if self._space[decode] >= need:
                    break
            else:
                return
            self._waiting.popleft()
            self._space[decode] -= need
            prefill = self._next_prefill
            self._next_prefill = (prefill + 1) % self._prefill_engines
            self._next_decode = (decode + 1) % len(self._space)
            self._paired(job, prefill, decode)


@dataclass(frozen=True, slots=True)
class _RunningRequest:
    job: Job
    generation: int


class SchedulerDispatch:
    """``kvstore.dualpath.scheduler``; its groups fetch at a limited rate."""

    def __init__(
        self,
        loop: EventLoop,
        engines: Sequence[Engine],
        limits: SchedulerLimits,
        fetch_s: float,
        read_tokens: Callable[[str], int],
        paired: Paired,
    ) -> None:
        self._loop = loop
        self._scheduler = Scheduler(limits)
        self._fetch_s = fetch_s
        self._read_tokens = read_tokens
        self._paired = paired
        self._jobs: dict[str, _RunningRequest] = {}
        self._places: dict[str, int] = {}
        self._fetching = False
        self._unpaired = 0
        self._turn = 0
        groups: dict[str, list[Engine]] = {}
        seen: dict[object, int] = {}
        for engine in engines:
            self._scheduler.join(engine)
            groups.setdefault(engine.group, []).append(engine)
            self._places[engine.engine] = seen.setdefault(engine.role, 0)
            seen[engine.role] += 1
        self._groups = list(groups.items())

    def submit(self, job: Job, hbm_bytes: float) -> None:
        self._scheduler.submit(NewRequest(job.name, job.tokens, round(hbm_bytes)))
        self._jobs[job.name] = _RunningRequest(job, 0)
        self._unpaired += 1
        self._wake()

    def prefilled(self, job: Job) -> None:
        self._scheduler.prefill_done(job.name, self._jobs[job.name].generation)
        self._wake()

    def finished(self, job: Job, hbm_bytes: float) -> None:  # noqa: ARG002 - the scheduler knows what it was
        self._scheduler.finish(job.name, self._jobs.pop(job.name).generation)
        self._wake()

    def _wake(self) -> None:
        if not self._fetching and self._unpaired:
            self._fetching = True
            period = int(self._loop.now / self._fetch_s) + 1
            self._loop.at(max(self._loop.now, period * self._fetch_s), self._fetch)

    def _fetch(self) -> None:
        """All groups fetch, each time another one first."""
        self._fetching = False
        self._turn += 1
        for offset in range(len(self._groups)):
            name, engines = self._groups[(offset + self._turn) % len(self._groups)]
            tokens = {node: self._read_tokens(node) for node in {engine.node for engine in engines}}
            reports = [EngineReport(engine.engine, read_tokens=tokens[engine.node]) for engine in engines]
            for pair in self._scheduler.fetch(name, reports).pairs:
                self._unpaired -= 1
                running = self._jobs[pair.request_id] = _RunningRequest(self._jobs[pair.request_id].job, pair.generation)
                self._paired(running.job, self._places[pair.prefill.engine], self._places[pair.decode.engine])


def check_fits(need: float, space: float, what: str) -> None:
    """Check that the longest request can be served.

    Raises:
        InvalidArgument: it needs more bytes than the memory has.
    """
    if need > space:
        raise InvalidArgument(
            f"the longest request exceeds the {what}; use shorter prompts or a larger memory",
            need_bytes=round(need),
            space_bytes=round(space),
        )
