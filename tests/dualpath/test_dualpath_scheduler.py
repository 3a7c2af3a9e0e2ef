"""The scheduler against a naive one: plain lists, the rules transcribed literally, and books kept by counting."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.core.errors import CapacityExceeded, Conflict, InvalidArgument, NotFound
from kvstore.dualpath.groups import Engine, EngineKind
from kvstore.dualpath.scheduler import EngineReport, FetchResult, NewRequest, PairedRequest, Scheduler, SchedulerLimits

ALPHA, BETA, Z = 20, 30, 1.05
GROUPS = {"p0": EngineKind.PREFILL, "p1": EngineKind.PREFILL, "d0": EngineKind.DECODE, "d1": EngineKind.DECODE}
ENGINES = tuple(f"{group}-{number}" for group in GROUPS for number in range(3))


@dataclass
class Job:
    ask: NewRequest
    generation: int = 0
    prefill: str | None = None
    decode: str | None = None
    prefilled: bool = False


@dataclass
class EngineModel:
    engine: Engine
    jobs: list[Job] = field(default_factory=list)
    read: int = 0

    @property
    def tok(self) -> int:
        return sum(job.ask.tokens for job in self.jobs)

    @property
    def free(self) -> int:
        return self.engine.hbm_units - sum(job.ask.hbm_units for job in self.jobs)


class SchedulerMachine(RuleBasedStateMachine):
    """Engines come, fetch and die; requests are submitted, paired, finished and cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(SchedulerLimits(ALPHA, BETA, Z))
        self.groups: dict[str, dict[str, EngineModel]] = {}
        self.jobs: dict[str, Job] = {}
        self.prefill_queue: list[Job] = []
        self.decode_queue: list[Job] = []
        self.private: dict[str, list[Job]] = {"d0": [], "d1": []}
        self.submitted = 0

    def engines(self) -> dict[str, EngineModel]:
        return {name: model for group in self.groups.values() for name, model in group.items()}

    # ---- engines ----

    @rule(name=st.sampled_from(ENGINES), hbm=st.sampled_from([20, 40]))
    def join(self, name: str, hbm: int) -> None:
        group = name.split("-")[0]
        engine = Engine(name, GROUPS[group], group, f"node-{group}", hbm)
        if name in self.engines():
            with pytest.raises(Conflict):
                self.scheduler.join(engine)
            return
        self.scheduler.join(engine)
        self.groups.setdefault(group, {})[name] = EngineModel(engine)

    @rule(name=st.sampled_from(ENGINES), read=st.integers(0, 40))
    def report_queue(self, name: str, read: int) -> None:
        self.scheduler.report([EngineReport(name, read_tokens=read)])
        if name in self.engines():
            self.engines()[name].read = read

    @rule(name=st.sampled_from(ENGINES), said=st.integers(0, 40))
    def says_its_figures_once(self, name: str, said: int) -> None:
        """Figures that an engine omits later are tracked by the scheduler."""
        read = self.engines()[name].read if name in self.engines() else 0
        self.scheduler.report([EngineReport(name, seq=said, tok=said, hbm_free=said, read_tokens=said)])
        self.scheduler.report([EngineReport(name, read_tokens=read)])

    @rule(name=st.sampled_from(ENGINES), hbm=st.sampled_from([20, 40]))
    def resize(self, name: str, hbm: int) -> None:
        model = self.engines().get(name)
        if model is None:
            with pytest.raises(NotFound):
                self.scheduler.resize(name, hbm)
            return
        self.scheduler.resize(name, hbm)
        model.engine = replace(model.engine, hbm_units=hbm)
        if model.engine.role is EngineKind.DECODE:
            self.strand(model.engine.group)

    def strand(self, group: str) -> None:
        """Requests in a group's queue that fit none of its idle engines return to the global queue."""
        space = max((entry.engine.hbm_units for entry in self.groups[group].values()), default=-1)
        stranded = [job for job in self.private[group] if job.ask.hbm_units > space]
        self.private[group] = [job for job in self.private[group] if job.ask.hbm_units <= space]
        self.decode_queue = stranded + self.decode_queue

    @rule(name=st.sampled_from(ENGINES))
    def gone(self, name: str) -> None:
        model = self.engines().get(name)
        if model is None:
            with pytest.raises(NotFound):
                self.scheduler.remove_engine(name)
            return
        back = self.scheduler.remove_engine(name)
        group = model.engine.group
        del self.groups[group][name]
        assert [entry.request_id for entry in back] == [job.ask.request_id for job in model.jobs]
        prefill, decode = [], []
        for job, told in zip(model.jobs, back, strict=True):
            job.generation += 1
            if model.engine.role is EngineKind.PREFILL:
                job.prefill = None
                prefill.append(job)
            else:
                job.decode = None
                decode.append(job)
                if job.prefilled:
                    job.prefill, job.prefilled = None, False
                    prefill.append(job)
            left = job.prefill or job.decode
            assert told.generation == job.generation
            assert (told.remaining.engine if told.remaining else None) == left
        self.prefill_queue = prefill + self.prefill_queue
        self.decode_queue = decode + self.decode_queue
        if model.engine.role is EngineKind.DECODE:
            self.strand(group)

    @rule(group=st.sampled_from(sorted(GROUPS)))
    def remove_group(self, group: str) -> None:
        if group not in self.groups:
            with pytest.raises(NotFound):
                self.scheduler.remove_group(group)
        elif self.groups[group]:
            with pytest.raises(Conflict):
                self.scheduler.remove_group(group)
        else:
            self.scheduler.remove_group(group)
            del self.groups[group]
            assert not self.private.get(group)

    # ---- requests ----

    @rule(tokens=st.integers(1, 15), hbm=st.sampled_from([0, 5, 20, 30, 100]))
    def submit(self, tokens: int, hbm: int) -> None:
        ask = NewRequest(f"r{self.submitted}", tokens, hbm)
        self.submitted += 1
        self.scheduler.submit(ask)
        with pytest.raises(Conflict):
            self.scheduler.submit(ask)
        job = self.jobs[ask.request_id] = Job(ask)
        self.prefill_queue.append(job)
        self.decode_queue.append(job)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def prefill_done(self, data: st.DataObject) -> None:
        job = self.jobs[data.draw(st.sampled_from(list(self.jobs)))]
        paired = job.prefill is not None and job.decode is not None
        assert not self.scheduler.prefill_done(job.ask.request_id, job.generation + 1)
        assert self.scheduler.prefill_done(job.ask.request_id, job.generation) == (paired and not job.prefilled)
        if paired and not job.prefilled and job.prefill is not None:
            job.prefilled = True
            self.engines()[job.prefill].jobs.remove(job)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), cancel=st.booleans())
    def end(self, data: st.DataObject, cancel: bool) -> None:
        job = self.jobs[data.draw(st.sampled_from(list(self.jobs)))]
        name = job.ask.request_id
        if cancel:
            assert self.scheduler.cancel(name)
        else:
            paired = job.prefill is not None and job.decode is not None
            assert not self.scheduler.finish(name, job.generation - 1)
            assert self.scheduler.finish(name, job.generation) == paired
            if not paired:
                return
        assert not self.scheduler.cancel(name)
        assert not self.scheduler.finish(name, job.generation)
        del self.jobs[name]
        for queue in (self.prefill_queue, self.decode_queue, *self.private.values()):
            if job in queue:
                queue.remove(job)
        for engine in self.engines().values():
            if job in engine.jobs:
                engine.jobs.remove(job)

    # ---- fetching, a literal model ----

    @rule(group=st.sampled_from(sorted(GROUPS)))
    def fetch(self, group: str) -> None:
        if group not in self.groups:
            with pytest.raises(NotFound):
                self.scheduler.fetch(group)
            return
        fetched = self.scheduler.fetch(group)
        expected = self.literal_prefill(group) if GROUPS[group] is EngineKind.PREFILL else self.literal_decode(group)
        assert [(entry.request_id, entry.engine) for entry in fetched.assigned] == [
            (job.ask.request_id, engine) for job, engine in expected
        ]
        assert all(entry.generation == self.jobs[entry.request_id].generation for entry in fetched.assigned)
        assert [(pair.request_id, pair.prefill.engine, pair.decode.engine) for pair in fetched.pairs] == [
            (job.ask.request_id, job.prefill, job.decode) for job, _ in expected if job.prefill and job.decode
        ]

    def literal_prefill(self, group: str) -> list[tuple[Job, str]]:
        assigned = []
        engines = self.groups[group].values()
        while self.prefill_queue:
            job = self.prefill_queue[0]
            c2 = [e for e in engines if e.tok <= BETA and e.read <= ALPHA]
            c3 = [e for e in engines if e.tok <= BETA and e.read > ALPHA]
            if not c2 and not c3:
                break
            chosen = min(c2 or c3, key=lambda e: e.tok)
            job.prefill = chosen.engine.engine
            chosen.jobs.append(job)
            assigned.append((job, chosen.engine.engine))
            self.prefill_queue.pop(0)
        return assigned

    def literal_decode(self, group: str) -> list[tuple[Job, str]]:
        self.literal_phase_1()
        queue, engines = self.private[group], list(self.groups[group].values())
        if not engines:
            return []
        space, coming = sum(max(0, e.free) for e in engines), 0
        for job in queue:
            if job.ask.hbm_units > space:
                break
            space -= job.ask.hbm_units
            coming += job.ask.tokens
        watermark = Z * (coming + sum(e.tok for e in engines)) / len(engines)
        assigned = []
        while queue:
            job = queue[0]
            able = [e for e in engines if e.free >= job.ask.hbm_units]
            if not able:
                break
            low = [e for e in able if e.tok + job.ask.tokens <= watermark]
            chosen = min(low, key=lambda e: len(e.jobs)) if low else min(able, key=lambda e: e.tok)
            job.decode = chosen.engine.engine
            chosen.jobs.append(job)
            assigned.append((job, chosen.engine.engine))
            queue.pop(0)
        return assigned

    def literal_phase_1(self) -> None:
        stuck = []
        for job in self.decode_queue:
            able = [
                group
                for group, engines in self.groups.items()
                if GROUPS[group] is EngineKind.DECODE and any(e.engine.hbm_units >= job.ask.hbm_units for e in engines.values())
            ]
            if not able:
                stuck.append(job)
                continue
            self.private[min(able, key=self.tokens_of)].append(job)
        self.decode_queue = stuck

    def tokens_of(self, group: str) -> int:
        waiting = sum(job.ask.tokens for job in self.private[group])
        return sum(e.tok for e in self.groups[group].values()) + waiting

    # ---- invariants ----

    @invariant()
    def books_are_right(self) -> None:
        assert len(self.scheduler) == len(self.jobs)
        for load in self.scheduler.loads():
            model = self.engines()[load.engine.engine]
            assert (load.tok, load.seq, load.read_tokens) == (model.tok, len(model.jobs), model.read)
            if model.engine.role is EngineKind.DECODE:
                assert load.hbm_free == model.free
        waiting = self.scheduler.waiting()
        assert waiting.prefill == len(self.prefill_queue)
        assert waiting.decode == len(self.decode_queue) + sum(map(len, self.private.values()))


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


# ---- single cases ----


def small_cluster(**limits: int) -> Scheduler:
    scheduler = Scheduler(SchedulerLimits(ALPHA, BETA, **limits))  # type: ignore[arg-type]
    scheduler.join(Engine("p", EngineKind.PREFILL, "P", "node-p"))
    scheduler.join(Engine("d", EngineKind.DECODE, "D", "node-d", 100))
    return scheduler


def paired(*answers: FetchResult) -> list[PairedRequest]:
    return [pair for answer in answers for pair in answer.pairs]


def test_request_is_paired_by_the_second_fetch() -> None:
    scheduler = small_cluster()
    scheduler.submit(NewRequest("r", 10, 10))
    assert paired(scheduler.fetch("P")) == []
    (pair,) = paired(scheduler.fetch("D"))
    assert (pair.request_id, pair.prefill.node, pair.decode.node) == ("r", "node-p", "node-d")


def test_dead_decode_engine_requeues_and_voids_reports() -> None:
    scheduler = small_cluster()
    scheduler.submit(NewRequest("r", 10, 10))
    (pair,) = paired(scheduler.fetch("P"), scheduler.fetch("D"))
    assert scheduler.prefill_done("r", pair.generation)
    (back,) = scheduler.remove_engine("d")
    assert back.remaining is None
    assert not scheduler.finish("r", pair.generation)
    scheduler.join(Engine("d2", EngineKind.DECODE, "D", "node-d", 100))
    (again,) = paired(scheduler.fetch("P"), scheduler.fetch("D"))
    assert again.generation == pair.generation + 1
    assert scheduler.finish("r", again.generation)
    assert len(scheduler) == 0


def test_returned_requests_precede_waiting_ones() -> None:
    scheduler = small_cluster()
    scheduler.submit(NewRequest("first", 10))
    scheduler.submit(NewRequest("second", 10))
    scheduler.fetch("P")
    scheduler.submit(NewRequest("third", 10))
    assert [entry.request_id for entry in scheduler.remove_engine("p")] == ["first", "second"]
    scheduler.join(Engine("p2", EngineKind.PREFILL, "P", "node-p"))
    assert [entry.request_id for entry in scheduler.fetch("P").assigned] == ["first", "second", "third"]


def test_engine_reported_figures_are_not_counted_twice() -> None:
    scheduler = small_cluster()
    scheduler.submit(NewRequest("r", 10, 10))
    (pair,) = paired(scheduler.fetch("P"), scheduler.fetch("D"))
    # both engines finish before they report it
    scheduler.report([EngineReport("p", seq=0, tok=0), EngineReport("d", seq=0, tok=0, hbm_free=100), EngineReport("nobody")])
    assert scheduler.finish("r", pair.generation)
    assert [(load.tok, load.seq, load.hbm_free) for load in scheduler.loads()] == [(0, 0, 0), (0, 0, 100)]


def test_missing_figures_do_not_starve_an_engine() -> None:
    scheduler = small_cluster()
    scheduler.report(
        [
            EngineReport("p", seq=9, tok=BETA + 1, read_tokens=ALPHA + 1),
            EngineReport("d", seq=9, tok=90, hbm_free=0),
        ]
    )
    scheduler.submit(NewRequest("r", 10, 100))
    assert [scheduler.fetch(group).assigned for group in ("P", "D")] == [(), ()]
    full, empty = [EngineReport("p"), EngineReport("d")], [(0, 0, 0, 0), (0, 0, 100, 0)]
    scheduler.report(full)
    assert [(load.tok, load.seq, load.hbm_free, load.read_tokens) for load in scheduler.loads()] == empty
    assert len(paired(scheduler.fetch("P", full), scheduler.fetch("D", full))) == 1
    scheduler.report([EngineReport("p", seq=5, tok=5), EngineReport("d", seq=5, tok=5)])
    scheduler.report(full)
    assert [(load.tok, load.seq, load.hbm_free) for load in scheduler.loads()] == [(10, 1, 0), (10, 1, 0)], "what it was given"


def test_resized_engine_keeps_its_requests() -> None:
    scheduler = small_cluster()
    scheduler.submit(NewRequest("r", 10, 80))
    (pair,) = paired(scheduler.fetch("P"), scheduler.fetch("D"))
    scheduler.submit(NewRequest("next", 10, 30))
    scheduler.fetch("P")
    assert scheduler.fetch("D").assigned == ()
    scheduler.resize("d", 50)
    assert [load.hbm_free for load in scheduler.loads()] == [0, -30]
    assert scheduler.fetch("D").assigned == ()
    scheduler.resize("d", 110)
    assert [entry.request_id for entry in scheduler.fetch("D").assigned] == ["next"]
    assert scheduler.finish("r", pair.generation)
    assert [load.hbm_free for load in scheduler.loads()] == [0, 80]
    with pytest.raises(InvalidArgument):
        scheduler.resize("d", -1)


def test_overloaded_engine_gets_no_request() -> None:
    scheduler = small_cluster()
    scheduler.join(Engine("q", EngineKind.PREFILL, "P", "node-q"))
    for number in range(3):
        scheduler.submit(NewRequest(f"r{number}", 10))
    report = [EngineReport("p", read_tokens=ALPHA + 1), EngineReport("q", seq=1, tok=BETA)]
    assert [entry.engine for entry in scheduler.fetch("P", report).assigned] == ["q", "p", "p"]


def test_request_too_large_for_all_engines_blocks_no_other() -> None:
    scheduler = small_cluster()
    scheduler.submit(NewRequest("large", 10, 101))
    scheduler.submit(NewRequest("small", 10, 100))
    assert [entry.request_id for entry in scheduler.fetch("D").assigned] == ["small"]
    scheduler.join(Engine("big", EngineKind.DECODE, "D", "node-d", 200))
    assert [entry.engine for entry in scheduler.fetch("D").assigned] == ["big"]


def test_scheduler_invalid_arguments_are_rejected() -> None:
    scheduler = small_cluster(max_waiting=1)
    with pytest.raises(Conflict):
        scheduler.join(Engine("x", EngineKind.DECODE, "P", "node-p"))
    with pytest.raises(InvalidArgument):
        scheduler.join(Engine("x", EngineKind.DECODE, "D", "node-d", -1))
    with pytest.raises(InvalidArgument):
        NewRequest("r", 0)
    with pytest.raises(InvalidArgument):
        EngineReport("p", seq=1)
    with pytest.raises(InvalidArgument):
        EngineReport("p", read_tokens=-1)
    with pytest.raises(InvalidArgument):
        SchedulerLimits(-1, 0)
    scheduler.submit(NewRequest("r", 1))
    with pytest.raises(CapacityExceeded):
        scheduler.submit(NewRequest("s", 1))
    assert not scheduler.prefill_done("r", 0)
    assert not scheduler.finish("nobody", 0)
