"""The request scheduler: assigns a prefill engine and a decode engine to each request (section 6 of the paper).

A request waits in two queues at once: a global one for a prefill engine, in order of arrival, and a global one for a decode
engine, from which it moves to the private queue of a decode group. It is *paired* when it has both engines; then the planner
decides which nodes read its blocks. If a request loses an engine, its generation increases: reports under an older generation
are ignored.

Engines may report their own numbers (``EngineReport`` with ``tok`` and ``seq``). The scheduler tracks the numbers that an engine
does not report, from its assignments and the reported completions. It does so again if an engine stops reporting a number, so
that old values do not remain. A report must include the work that earlier fetches assigned.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvstore.core.errors import CapacityExceeded, Conflict, InvalidArgument, NotFound
from kvstore.dualpath.groups import DecodeGroups, Engine, EngineGroup, EngineKind, assign_decode, assign_prefill, decode_watermark

MAX_TOKENS = 1 << 40
MAX_HBM_UNITS = 1 << 50


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of the assignment rules.

    Attributes:
        alpha_tokens: a node's reading queue above this is long: the tokens that its storage link reads in 3 s.
        beta_tokens: an engine with more tokens than this is overloaded: the tokens that it processes in 5 s.
        z: factor of the decode watermark.
        max_waiting: maximum number of requests in progress or waiting; more are rejected.
    """

    alpha_tokens: int
    beta_tokens: int
    z: float = 1.05
    max_waiting: int = 1_000_000

    def __post_init__(self) -> None:
        if not (0 <= self.alpha_tokens <= MAX_TOKENS and 0 <= self.beta_tokens <= MAX_TOKENS and self.z > 0):
            raise InvalidArgument("scheduler limits out of bounds", alpha=self.alpha_tokens, beta=self.beta_tokens, z=self.z)


@dataclass(slots=True)  # not frozen, as there are many: see the contract
class NewRequest:
    """A new request. Immutable.

    Attributes:
        request_id: unique among the requests in progress.
        tokens: length of the prompt, used as the cost of the request.
        hbm_units: KV memory that it needs on a decode engine, in the unit of ``Engine.hbm_units``.
        cached_tokens: by prefill engine: tokens of the prompt that the engine already holds.
    """

    request_id: str
    tokens: int
    hbm_units: int = 0
    cached_tokens: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (0 < self.tokens <= MAX_TOKENS and 0 <= self.hbm_units <= MAX_HBM_UNITS):
            raise InvalidArgument("request out of bounds", tokens=self.tokens, hbm_units=self.hbm_units)

    def cached_on(self, engine: Engine) -> int:
        """Return the prompt tokens that an engine already holds; 0 for decode engines."""
        return min(self.tokens, self.cached_tokens.get(engine.engine, 0)) if engine.role is EngineKind.PREFILL else 0

    def cost(self, engine: Engine) -> int:
        """Return the tokens that the request adds to an engine: those that it does not hold."""
        return self.tokens - self.cached_on(engine)


@dataclass(slots=True)
class EngineReport:
    """An engine's own numbers when its group fetches; None: not reported. Immutable.

    Attributes:
        seq: number of assigned, unfinished requests; reported together with ``tok``.
        tok: tokens of these requests. If an engine reports them, the scheduler does not subtract completions.
        hbm_free: HBM free for KV, in the unit of ``Engine.hbm_units``; decode engines only.
        read_tokens: disk reading queue of the engine's node; None: no known reads.
    """

    engine: str
    seq: int | None = None
    tok: int | None = None
    hbm_free: int | None = None
    read_tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.seq is None) != (self.tok is None):
            raise InvalidArgument("seq and tok must be reported together", engine=self.engine)
        for value in (self.seq, self.tok, self.hbm_free, self.read_tokens):
            if value is not None and not 0 <= value <= MAX_HBM_UNITS:
                raise InvalidArgument("engine report out of bounds", engine=self.engine, value=value)


class EngineAssignment(NamedTuple):
    """A request was given to an engine of the group that fetched."""

    request_id: str
    generation: int
    engine: str


class PairedRequest(NamedTuple):
    """A request that has both engines, so that its read can be planned."""

    request_id: str
    generation: int
    prefill: Engine
    decode: Engine


@dataclass(frozen=True, slots=True)
class FetchResult:
    """Answer to a group's fetch, in the order of assignment."""

    assigned: tuple[EngineAssignment, ...]
    pairs: tuple[PairedRequest, ...]


@dataclass(frozen=True, slots=True)
class RequeuedRequest:
    """A request that lost an engine and waits again, under a new generation.

    ``remaining`` is its other engine, which must drop the older generation; None: it had no other engine.
    """

    request_id: str
    generation: int
    remaining: Engine | None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load of one engine as the assignment rules see it, for operators."""

    engine: Engine
    seq: int
    tok: int
    hbm_free: int
    read_tokens: int


@dataclass(frozen=True, slots=True)
class WaitingCounts:
    """Numbers of requests without a prefill engine and without a decode engine."""

    prefill: int
    decode: int


@dataclass(slots=True)
class _EngineState:
    """State of an engine: its unfinished requests, and the numbers that it does not report itself."""

    engine: Engine
    jobs: dict[str, _Job]
    """Unfinished requests assigned to the engine, by name."""
    tracks_load: bool = True
    """Whether the scheduler tracks the tokens and sequences, because the engine does not report them."""
    tracks_hbm: bool = True
    """Whether the scheduler tracks the free HBM, because the engine does not report it."""

    @property
    def tokens(self) -> int:
        """Tokens of the unfinished requests that the scheduler assigned."""
        return sum(job.ask.cost(self.engine) for job in self.jobs.values())

    @property
    def free_hbm(self) -> int:
        """HBM that the assigned requests leave free; negative if they need more than the engine has."""
        used = sum(job.ask.hbm_units for job in self.jobs.values()) if self.engine.role is EngineKind.DECODE else 0
        return self.engine.hbm_units - used


@dataclass(slots=True)
class _Job:
    """A request and its engines."""

    ask: NewRequest
    generation: int = 0
    prefill: Engine | None = None
    decode: Engine | None = None
    prefilled: bool = False
    group: str | None = None
    """Decode group in whose private queue the request waits."""


_Queue = OrderedDict[str, _Job]


class Scheduler:
    """The request scheduler of a cluster. It never blocks: the leaders of groups fetch work."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self._jobs: dict[str, _Job] = {}
        self._groups: dict[str, EngineGroup] = {}
        self._engines: dict[str, _EngineState] = {}
        self._prefill_queue: _Queue = OrderedDict()
        self._decode_queue: _Queue = OrderedDict()
        self._private: dict[str, _Queue] = {}
        self._private_tokens: dict[str, int] = {}
        self._decode_groups = DecodeGroups()
        self._excluded: frozenset[str] = frozenset()

    def __len__(self) -> int:
        """Number of requests that wait or are in progress."""
        return len(self._jobs)

    def waiting(self) -> WaitingCounts:
        """Return how many requests wait for each kind of engine."""
        return WaitingCounts(len(self._prefill_queue), len(self._decode_queue) + sum(map(len, self._private.values())))

    def loads(self) -> list[EngineLoad]:
        """Return the load of all engines, group by group."""
        return [
            EngineLoad(engine, *(int(column[index]) for column in (group.seq, group.tok, group.free, group.read)))
            for group in self._groups.values()
            for index, engine in enumerate(group.engines)
        ]

    # ---- engines ----

    def join(self, engine: Engine) -> None:
        """Add an idle engine.

        Raises:
            Conflict: its name is taken, or its group has the other role.
        """
        if engine.engine in self._engines:
            raise Conflict("engine has joined already", engine=engine.engine)
        _check_hbm(engine.engine, engine.hbm_units)
        group = self._groups.get(engine.group)
        if group is None:
            group = self._groups[engine.group] = EngineGroup(engine.group, engine.role)
            if engine.role is EngineKind.DECODE:
                self._decode_groups.join(group)
                self._private[engine.group] = OrderedDict()
                self._private_tokens[engine.group] = 0
        elif group.role is not engine.role:
            raise Conflict("group has the other role", group=engine.group, role=group.role)
        group.join(engine, self._excluded)
        self._engines[engine.engine] = _EngineState(engine, {})
        self._refresh(group)

    def resize(self, engine: str, hbm_units: int) -> None:
        """Change the idle capacity of an engine; its assigned requests remain.

        Requests in the private queue that no longer fit any engine of the group return to the head of the global queue.

        Raises:
            NotFound: no such engine.
            InvalidArgument: an invalid size.
        """
        state = self._engines.get(engine)
        if state is None:
            raise NotFound("engine is not known", engine=engine)
        _check_hbm(engine, hbm_units)
        group, changed = self._groups[state.engine.group], replace(state.engine, hbm_units=hbm_units)
        group.resize(changed)
        state.engine = changed
        if state.tracks_hbm:
            group.free[group.index_of(engine)] = state.free_hbm
        if group.role is EngineKind.DECODE:
            self._reroute(group)
            self._refresh(group)

    def exclude_nodes(self, nodes: frozenset[str]) -> None:
        """Stop assigning requests to engines of these nodes; assigned requests remain. Engines of all other nodes are open.

        Requests in the queue of a decode group that can no longer hold them return to the head of the global queue.
        """
        if nodes == self._excluded:
            return
        self._excluded = nodes
        for group in self._groups.values():
            if group.exclude_nodes(nodes) and group.role is EngineKind.DECODE:
                self._reroute(group)
                self._refresh(group)

    def remove_engine(self, engine: str) -> tuple[RequeuedRequest, ...]:
        """Remove an engine that died or left. Its unfinished requests return, in order, to the head of their queues.

        A decode engine held the KV of its prompts, so a request whose prompt was already computed needs a prefill engine again.

        Raises:
            NotFound: no such engine.
        """
        state = self._engines.pop(engine, None)
        if state is None:
            raise NotFound("engine is not known", engine=engine)
        gone = state.engine
        group = self._groups[gone.group]
        group.leave(engine)
        back = []
        for job in reversed(state.jobs.values()):
            job.generation += 1
            if gone.role is EngineKind.PREFILL:
                job.prefill = None
            else:
                job.decode = None
                self._to_head(self._decode_queue, job)
            if job.prefilled or gone.role is EngineKind.PREFILL:
                job.prefill, job.prefilled = None, False
                self._to_head(self._prefill_queue, job)
            back.append(RequeuedRequest(job.ask.request_id, job.generation, job.prefill or job.decode))
        if gone.role is EngineKind.DECODE:
            self._reroute(group)
            self._refresh(group)
        return tuple(reversed(back))

    def remove_group(self, group: str) -> None:
        """Forget an empty group; its name may be reused with either role.

        Raises:
            NotFound: no such group.
            Conflict: it still has engines.
        """
        known = self._groups.get(group)
        if known is None:
            raise NotFound("group is not known", group=group)
        if len(known):
            raise Conflict("group has engines", group=group, engines=len(known))
        del self._groups[group]
        if known.role is EngineKind.DECODE:  # its private queue went back to the global one with its last engine
            self._decode_groups.leave(group)
            del self._private[group], self._private_tokens[group]

    def report(self, reports: Iterable[EngineReport]) -> None:
        """Apply reports of engines; unknown engines are ignored."""
        touched = {}
        for report in reports:
            state = self._engines.get(report.engine)
            if state is None:
                continue
            group = touched[state.engine.group] = self._groups[state.engine.group]
            index = group.index_of(report.engine)
            if report.tok is not None and report.seq is not None:
                group.tok[index], group.seq[index] = report.tok, report.seq
                state.tracks_load = False
            elif not state.tracks_load:  # no longer reported: use the tracked number
                group.tok[index], group.seq[index] = state.tokens, len(state.jobs)
                state.tracks_load = True
            if report.hbm_free is not None:
                group.free[index] = report.hbm_free
                state.tracks_hbm = False
            elif not state.tracks_hbm:
                group.free[index] = state.free_hbm
                state.tracks_hbm = True
            group.read[index] = report.read_tokens or 0
        for group in touched.values():
            self._refresh(group)

    # ---- requests ----

    def submit(self, ask: NewRequest) -> None:
        """Add a request, which then waits for its engines.

        Raises:
            Conflict: a request of this name is in progress.
            CapacityExceeded: too many requests are in progress.
        """
        if ask.request_id in self._jobs:
            raise Conflict("request is under way", request=ask.request_id)
        if len(self._jobs) >= self.limits.max_waiting:
            raise CapacityExceeded("too many requests", requests=len(self._jobs))
        job = self._jobs[ask.request_id] = _Job(ask)
        self._prefill_queue[ask.request_id] = self._decode_queue[ask.request_id] = job

    def prefill_done(self, request_id: str, generation: int) -> bool:
        """Record that the decode engine has the prompt's KV. Return False for an older generation or an unknown request."""
        job = self._job(request_id, generation)
        if job is None or job.prefill is None or job.decode is None or job.prefilled:
            return False
        job.prefilled = True
        self._take_off(job.prefill, job)
        return True

    def finish(self, request_id: str, generation: int) -> bool:
        """Remove a finished request. Return False for an older generation or an unknown request."""
        job = self._job(request_id, generation)
        if job is None or job.prefill is None or job.decode is None:
            return False
        self._drop(job)
        return True

    def cancel(self, request_id: str) -> bool:
        """Remove a request in any state. Return False for an unknown request."""
        job = self._jobs.get(request_id)
        if job is None:
            return False
        self._drop(job)
        return True

    # ---- fetching ----

    def fetch(self, group: str, reports: Iterable[EngineReport] = ()) -> FetchResult:
        """Apply the reports of a group's engines, and assign waiting requests to them.

        Raises:
            NotFound: no such group.
        """
        known = self._groups.get(group)
        if known is None:
            raise NotFound("group is not known", group=group)
        self.report(reports)
        return self._fetch_prefill(known) if known.role is EngineKind.PREFILL else self._fetch_decode(known)

    def _fetch_prefill(self, group: EngineGroup) -> FetchResult:
        queue = self._prefill_queue
        lengths = (job.ask.tokens for job in _heads(queue))
        assigned: list[EngineAssignment] = []
        pairs: list[PairedRequest] = []
        cached = (job.ask.cached_tokens for job in _heads(queue))
        for index in assign_prefill(group, lengths, self.limits.alpha_tokens, self.limits.beta_tokens, cached):
            _, job = queue.popitem(last=False)
            job.prefill = group.engines[index]
            assigned.append(self._assigned(job, job.prefill, pairs))
        return FetchResult(tuple(assigned), tuple(pairs))

    def _fetch_decode(self, group: EngineGroup) -> FetchResult:
        self._route()
        queue = self._private[group.name]
        assigned: list[EngineAssignment] = []
        pairs: list[PairedRequest] = []
        if not queue or not len(group):
            return FetchResult((), ())
        watermark = decode_watermark(group, (_cost(job) for job in queue.values()), self.limits.z)
        for index in assign_decode(group, (_cost(job) for job in _heads(queue)), watermark):
            _, job = queue.popitem(last=False)
            self._private_tokens[group.name] -= job.ask.tokens
            job.group = None
            job.decode = group.engines[index]
            assigned.append(self._assigned(job, job.decode, pairs))
        self._refresh(group)
        return FetchResult(tuple(assigned), tuple(pairs))

    def _assigned(self, job: _Job, engine: Engine, pairs: list[PairedRequest]) -> EngineAssignment:
        name = job.ask.request_id
        self._engines[engine.engine].jobs[name] = job
        if job.prefill is not None and job.decode is not None:
            pairs.append(PairedRequest(name, job.generation, job.prefill, job.decode))
        return EngineAssignment(name, job.generation, engine.engine)

    def _route(self) -> None:
        """Phase 1: move the global decode queue to the private queues.

        A request that is too large for every group stays in the global queue and does not block others.
        """
        stuck: _Queue = OrderedDict()
        while self._decode_queue:
            name, job = self._decode_queue.popitem(last=False)
            chosen = self._decode_groups.choose(job.ask.hbm_units)
            if chosen is None:
                stuck[name] = job
                continue
            job.group = chosen
            self._private[chosen][name] = job
            self._private_tokens[chosen] += job.ask.tokens
            self._decode_groups.add(chosen, job.ask.tokens)
        self._decode_queue = stuck

    # ---- within ----

    def _job(self, request_id: str, generation: int) -> _Job | None:
        job = self._jobs.get(request_id)
        return job if job is not None and job.generation == generation else None

    def _refresh(self, group: EngineGroup) -> None:
        if group.role is EngineKind.DECODE:
            self._decode_groups.refresh(group.name, self._private_tokens[group.name])

    def _take_off(self, engine: Engine, job: _Job) -> None:
        """Remove a request from an engine, and subtract it from the tracked numbers."""
        state = self._engines[engine.engine]
        del state.jobs[job.ask.request_id]
        group = self._groups[engine.group]
        index = group.index_of(engine.engine)
        if state.tracks_load:
            group.tok[index] -= job.ask.cost(engine)
            group.seq[index] -= 1
            if engine.role is EngineKind.DECODE:
                self._decode_groups.add(engine.group, -job.ask.tokens)
        if state.tracks_hbm and engine.role is EngineKind.DECODE:
            group.free[index] += job.ask.hbm_units

    def _drop(self, job: _Job) -> None:
        """Remove a request from its queues and engines."""
        name = job.ask.request_id
        del self._jobs[name]
        self._prefill_queue.pop(name, None)
        if job.group is not None:
            del self._private[job.group][name]
            self._private_tokens[job.group] -= job.ask.tokens
            self._decode_groups.add(job.group, -job.ask.tokens)
        else:
            self._decode_queue.pop(name, None)
        if job.prefill is not None and not job.prefilled:
            self._take_off(job.prefill, job)
        if job.decode is not None:
            self._take_off(job.decode, job)

    def _reroute(self, group: EngineGroup) -> None:
        """Return requests that are larger than any idle engine of the group to the head of the global queue."""
        queue = self._private[group.name]
        for job in [job for job in reversed(queue.values()) if job.ask.hbm_units > group.most_hbm]:
            del queue[job.ask.request_id]
            self._private_tokens[group.name] -= job.ask.tokens
            job.group = None
            self._to_head(self._decode_queue, job)

    @staticmethod
    def _to_head(queue: _Queue, job: _Job) -> None:
        queue[job.ask.request_id] = job
        queue.move_to_end(job.ask.request_id, last=False)


def _heads(queue: _Queue) -> Iterator[_Job]:
    """Iterate over the head of a queue; the caller pops it before drawing again."""
    while queue:
        yield next(iter(queue.values()))


def _check_hbm(engine: str, hbm_units: int) -> None:
    if not 0 <= hbm_units <= MAX_HBM_UNITS:
        raise InvalidArgument("hbm_units out of bounds", engine=engine, hbm_units=hbm_units)


def _cost(job: _Job) -> tuple[int, int]:
    return job.ask.tokens, job.ask.hbm_units
