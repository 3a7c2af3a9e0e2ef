"""The request scheduler: assigns a prefill engine and a decode engine to each request (section 6 of the paper).

A request waits in two queues at once: a global one for a prefill engine, in order of arrival, and a global one for a decode
engine, from which it moves to the private queue of a decode group. It is *paired* when it has both engines; then the planner
decides which nodes read its blocks. If a request loses an engine, its generation increases: reports under an older generation
are ignored.

Engines may report their own numbers (``EngineReport`` with ``tok`` and ``seq``). The scheduler tracks all other numbers itself,
from its assignments and the reported completions, even if the engine reported them earlier: otherwise old figures would remain
valid. A report must include everything that earlier fetches answered.
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
    """Measured and chosen limits.

    Attributes:
        alpha_tokens: a node's reading queue above this is long: the tokens that its storage link reads in 3 s.
        beta_tokens: an engine with more tokens than this is overloaded: the tokens that it processes in 5 s.
        z: factor of the decode watermark.
        count_waiting: count the requests in a decode group's private queue as its tokens when groups are compared. False
            follows the paper literally: all requests of one drain go to one group.
        max_waiting: maximum number of requests in progress or waiting; more are rejected.
    """

    alpha_tokens: int
    beta_tokens: int
    z: float = 1.05
    count_waiting: bool = True
    max_waiting: int = 1_000_000

    def __post_init__(self) -> None:
        if not (0 <= self.alpha_tokens <= MAX_TOKENS and 0 <= self.beta_tokens <= MAX_TOKENS and self.z > 0):
            raise InvalidArgument("scheduler limits out of bounds", alpha=self.alpha_tokens, beta=self.beta_tokens, z=self.z)


@dataclass(slots=True)  # not frozen, as there are many: see the contract
class Ask:
    """A new request; immutable.

    Attributes:
        request_id: unique among the requests in progress.
        tokens: its length, used as its cost.
        hbm_units: KV memory that it needs on a decode engine, in the unit of ``Engine.hbm_units``.
        near: per prefill engine: how many of its tokens that engine already holds.
    """

    request_id: str
    tokens: int
    hbm_units: int = 0
    near: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (0 < self.tokens <= MAX_TOKENS and 0 <= self.hbm_units <= MAX_HBM_UNITS):
            raise InvalidArgument("request out of bounds", tokens=self.tokens, hbm_units=self.hbm_units)

    def spared(self, engine: Engine) -> int:
        """Tokens that an engine has at hand; of those that decode it is not asked."""
        return min(self.tokens, self.near.get(engine.engine, 0)) if engine.role is EngineKind.PREFILL else 0

    def cost(self, engine: Engine) -> int:
        """Tokens that an engine is charged."""
        return self.tokens - self.spared(engine)


@dataclass(slots=True)
class EngineReport:
    """An engine's own numbers when its group fetches; None: not reported. Immutable.

    Attributes:
        seq: assigned, unfinished requests; together with ``tok``.
        tok: their tokens. If an engine reports it, completions are not subtracted here; else the scheduler tracks it.
        hbm_free: HBM free for KV, in the same unit, decode engines only; tracked in the same way.
        read_tokens: disk reading queue of its node; None: no known reads.
    """

    engine: str
    seq: int | None = None
    tok: int | None = None
    hbm_free: int | None = None
    read_tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.seq is None) != (self.tok is None):
            raise InvalidArgument("seq and tok are reported together", engine=self.engine)
        for value in (self.seq, self.tok, self.hbm_free, self.read_tokens):
            if value is not None and not 0 <= value <= MAX_HBM_UNITS:
                raise InvalidArgument("engine report out of bounds", engine=self.engine, value=value)


class EngineAssignment(NamedTuple):
    """A request was given to an engine of the group that fetched."""

    request_id: str
    generation: int
    engine: str


class Pair(NamedTuple):
    """A request has both engines: its read can be planned."""

    request_id: str
    generation: int
    prefill: Engine
    decode: Engine


@dataclass(frozen=True, slots=True)
class Fetched:
    """Answer to a group's fetch, in the order of assignment."""

    assigned: tuple[EngineAssignment, ...]
    pairs: tuple[Pair, ...]


@dataclass(frozen=True, slots=True)
class GivenBack:
    """A request lost an engine and waits again, under a new generation; ``left`` is the engine that must drop the older one."""

    request_id: str
    generation: int
    left: Engine | None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Numbers that decisions use, per engine: for operators."""

    engine: Engine
    seq: int
    tok: int
    hbm_free: int
    read_tokens: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """Requests without a prefill engine, and requests without a decode engine."""

    prefill: int
    decode: int


@dataclass(slots=True)
class _Desk:
    """State of an engine: its unfinished requests, and the numbers that it does not report itself."""

    engine: Engine
    work: dict[str, _Job]
    counts: bool = True
    """Its tokens and sequences are counted here."""
    space: bool = True
    """Its free HBM is."""

    @property
    def tokens(self) -> int:
        """Of its unfinished requests, as the books have it."""
        return sum(job.ask.cost(self.engine) for job in self.work.values())

    @property
    def left(self) -> int:
        """HBM bytes left by the assigned requests; negative if they need more than the engine has."""
        used = sum(job.ask.hbm_units for job in self.work.values()) if self.engine.role is EngineKind.DECODE else 0
        return self.engine.hbm_units - used


@dataclass(slots=True)
class _Job:
    ask: Ask
    generation: int = 0
    prefill: Engine | None = None
    decode: Engine | None = None
    prefilled: bool = False
    group: str | None = None
    """Decode group in whose private queue it waits."""


_Queue = OrderedDict[str, _Job]


class Scheduler:
    """One instance per cluster. Nothing here waits: groups fetch whenever they like."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self._jobs: dict[str, _Job] = {}
        self._groups: dict[str, EngineGroup] = {}
        self._desks: dict[str, _Desk] = {}
        self._prefill_queue: _Queue = OrderedDict()
        self._decode_queue: _Queue = OrderedDict()
        self._private: dict[str, _Queue] = {}
        self._private_tokens: dict[str, int] = {}
        self._decode_groups = DecodeGroups()
        self._shut: frozenset[str] = frozenset()

    def __len__(self) -> int:
        """Requests waiting or under way."""
        return len(self._jobs)

    def waiting(self) -> Waiting:
        """How many requests wait for either kind of engine."""
        return Waiting(len(self._prefill_queue), len(self._decode_queue) + sum(map(len, self._private.values())))

    def loads(self) -> list[EngineLoad]:
        """All engines, group by group."""
        return [
            EngineLoad(engine, *(int(column[place]) for column in (group.seq, group.tok, group.free, group.read)))
            for group in self._groups.values()
            for place, engine in enumerate(group.engines)
        ]

    # ---- engines ----

    def join(self, engine: Engine) -> None:
        """A new engine with nothing to do.

        Raises:
            Conflict: its name is taken, or its group has the other role.
        """
        if engine.engine in self._desks:
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
        group.join(engine, self._shut)
        self._desks[engine.engine] = _Desk(engine, {})
        self._refresh(group)

    def resize(self, engine: str, hbm_units: int) -> None:
        """Change the idle capacity of an engine; its assigned requests remain.

        Requests in its group's queue that fit none of the group's engines any more return to the head of the global queue.

        Raises:
            NotFound: no such engine.
            InvalidArgument: an invalid size.
        """
        desk = self._desks.get(engine)
        if desk is None:
            raise NotFound("engine is not known", engine=engine)
        _check_hbm(engine, hbm_units)
        group, changed = self._groups[desk.engine.group], replace(desk.engine, hbm_units=hbm_units)
        group.resize(changed)
        desk.engine = changed
        if desk.space:
            group.free[group.place(engine)] = desk.left
        if group.role is EngineKind.DECODE:
            self._reroute(group)
            self._refresh(group)

    def shut(self, nodes: frozenset[str]) -> None:
        """Stop assigning requests to engines of these nodes; assigned requests remain. Engines of all other nodes are open.

        Requests in the queue of a decode group that can no longer hold them return to the head of the global queue.
        """
        if nodes == self._shut:
            return
        self._shut = nodes
        for group in self._groups.values():
            if group.shut(nodes) and group.role is EngineKind.DECODE:
                self._reroute(group)
                self._refresh(group)

    def remove_engine(self, engine: str) -> tuple[GivenBack, ...]:
        """An engine died or left: its unfinished requests go to the head of the queues they came from, in their order.

        A dead decode engine takes the prompt's KV with it: a prompt that was already computed waits for a prefill engine too.

        Raises:
            NotFound: no such engine.
        """
        desk = self._desks.pop(engine, None)
        if desk is None:
            raise NotFound("engine is not known", engine=engine)
        gone = desk.engine
        group = self._groups[gone.group]
        group.leave(engine)
        back = []
        for job in reversed(desk.work.values()):
            job.generation += 1
            if gone.role is EngineKind.PREFILL:
                job.prefill = None
            else:
                job.decode = None
                self._to_head(self._decode_queue, job)
            if job.prefilled or gone.role is EngineKind.PREFILL:
                job.prefill, job.prefilled = None, False
                self._to_head(self._prefill_queue, job)
            back.append(GivenBack(job.ask.request_id, job.generation, job.prefill or job.decode))
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
        for said in reports:
            desk = self._desks.get(said.engine)
            if desk is None:
                continue
            group = touched[desk.engine.group] = self._groups[desk.engine.group]
            place = group.place(said.engine)
            if said.tok is not None and said.seq is not None:
                group.tok[place], group.seq[place] = said.tok, said.seq
                desk.counts = False
            elif not desk.counts:  # no longer reported: use the tracked number
                group.tok[place], group.seq[place] = desk.tokens, len(desk.work)
                desk.counts = True
            if said.hbm_free is not None:
                group.free[place] = said.hbm_free
                desk.space = False
            elif not desk.space:
                group.free[place] = desk.left
                desk.space = True
            group.read[place] = said.read_tokens or 0
        for group in touched.values():
            self._refresh(group)

    # ---- requests ----

    def submit(self, ask: Ask) -> None:
        """A request waits for its engines from now on.

        Raises:
            Conflict: one of this name is under way.
            CapacityExceeded: too many are.
        """
        if ask.request_id in self._jobs:
            raise Conflict("request is under way", request=ask.request_id)
        if len(self._jobs) >= self.limits.max_waiting:
            raise CapacityExceeded("too many requests", requests=len(self._jobs))
        job = self._jobs[ask.request_id] = _Job(ask)
        self._prefill_queue[ask.request_id] = self._decode_queue[ask.request_id] = job

    def prefill_done(self, request_id: str, generation: int) -> bool:
        """The prompt is computed and with the decode engine. False: a report of an older generation, or of no request."""
        job = self._job(request_id, generation)
        if job is None or job.prefill is None or job.decode is None or job.prefilled:
            return False
        job.prefilled = True
        self._take_off(job.prefill, job)
        return True

    def finish(self, request_id: str, generation: int) -> bool:
        """The request is done. False: a report of an older generation, or of no request."""
        job = self._job(request_id, generation)
        if job is None or job.prefill is None or job.decode is None:
            return False
        self._drop(job)
        return True

    def cancel(self, request_id: str) -> bool:
        """Nobody wants the answer any more, at whatever state. False: no such request."""
        job = self._jobs.get(request_id)
        if job is None:
            return False
        self._drop(job)
        return True

    # ---- fetching ----

    def fetch(self, group: str, reports: Iterable[EngineReport] = ()) -> Fetched:
        """A group's leader reports for its engines and asks for work.

        Raises:
            NotFound: no such group.
        """
        known = self._groups.get(group)
        if known is None:
            raise NotFound("group is not known", group=group)
        self.report(reports)
        return self._fetch_prefill(known) if known.role is EngineKind.PREFILL else self._fetch_decode(known)

    def _fetch_prefill(self, group: EngineGroup) -> Fetched:
        queue = self._prefill_queue
        lengths = (job.ask.tokens for job in _heads(queue))
        assigned: list[EngineAssignment] = []
        pairs: list[Pair] = []
        near = (job.ask.near for job in _heads(queue))
        for place in assign_prefill(group, lengths, self.limits.alpha_tokens, self.limits.beta_tokens, near):
            _, job = queue.popitem(last=False)
            job.prefill = group.engines[place]
            assigned.append(self._assigned(job, job.prefill, pairs))
        return Fetched(tuple(assigned), tuple(pairs))

    def _fetch_decode(self, group: EngineGroup) -> Fetched:
        self._route()
        queue = self._private[group.name]
        assigned: list[EngineAssignment] = []
        pairs: list[Pair] = []
        if not queue or not len(group):
            return Fetched((), ())
        watermark = decode_watermark(group, (_cost(job) for job in queue.values()), self.limits.z)
        for place in assign_decode(group, (_cost(job) for job in _heads(queue)), watermark):
            _, job = queue.popitem(last=False)
            self._private_tokens[group.name] -= job.ask.tokens
            job.group = None
            job.decode = group.engines[place]
            assigned.append(self._assigned(job, job.decode, pairs))
        self._refresh(group)
        return Fetched(tuple(assigned), tuple(pairs))

    def _assigned(self, job: _Job, engine: Engine, pairs: list[Pair]) -> EngineAssignment:
        name = job.ask.request_id
        self._desks[engine.engine].work[name] = job
        if job.prefill is not None and job.decode is not None:
            pairs.append(Pair(name, job.generation, job.prefill, job.decode))
        return EngineAssignment(name, job.generation, engine.engine)

    def _route(self) -> None:
        """Phase 1: move the global decode queue to the private queues.

        A request that no group could ever hold stays without blocking others.
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
            if self.limits.count_waiting:
                self._decode_groups.add(chosen, job.ask.tokens)
        self._decode_queue = stuck

    # ---- within ----

    def _job(self, request_id: str, generation: int) -> _Job | None:
        job = self._jobs.get(request_id)
        return job if job is not None and job.generation == generation else None

    def _refresh(self, group: EngineGroup) -> None:
        if group.role is EngineKind.DECODE:
            waiting = self._private_tokens[group.name] if self.limits.count_waiting else 0
            self._decode_groups.refresh(group.name, waiting)

    def _take_off(self, engine: Engine, job: _Job) -> None:
        """The engine has nothing more to do for the request."""
        desk = self._desks[engine.engine]
        del desk.work[job.ask.request_id]
        group = self._groups[engine.group]
        place = group.place(engine.engine)
        if desk.counts:
            group.tok[place] -= job.ask.cost(engine)
            group.seq[place] -= 1
            if engine.role is EngineKind.DECODE:
                self._decode_groups.add(engine.group, -job.ask.tokens)
        if desk.space and engine.role is EngineKind.DECODE:
            group.free[place] += job.ask.hbm_units

    def _drop(self, job: _Job) -> None:
        """The request leaves queues and engines."""
        name = job.ask.request_id
        del self._jobs[name]
        self._prefill_queue.pop(name, None)
        if job.group is not None:
            del self._private[job.group][name]
            self._private_tokens[job.group] -= job.ask.tokens
            if self.limits.count_waiting:
                self._decode_groups.add(job.group, -job.ask.tokens)
        else:
            self._decode_queue.pop(name, None)
        if job.prefill is not None and not job.prefilled:
            self._take_off(job.prefill, job)
        if job.decode is not None:
            self._take_off(job.decode, job)

    def _reroute(self, group: EngineGroup) -> None:
        """Requests that the group can no longer hold even when idle go back to the global queue's head."""
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
