"""Tests of the scheduler service with a manual clock: events, retries, silent groups."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from kvproto.v1 import metadata_pb2 as pb
from kvstore.core.clock import ManualClock
from kvstore.core.errors import CapacityExceeded, Conflict, DeadlineExceeded, InvalidArgument, NotFound
from kvstore.dualpath.queues import ReadQueues
from kvstore.dualpath.scheduler import MAX_HBM_UNITS, SchedulerLimits
from kvstore.metadata.scheduling import groups
from kvstore.metadata.scheduling import scheduler_service as module
from kvstore.metadata.scheduling.scheduler_service import SchedulerService
from kvstore.observe.counters import Counters

ALPHA, BETA = 1_000, 100
TTL_S = 5.0
PREFILL, DECODE = pb.ENGINE_ROLE_PREFILL, pb.ENGINE_ROLE_DECODE


@dataclass
class Shell:
    """A scheduler service and its collaborators."""

    clock: ManualClock = field(default_factory=ManualClock)
    queues: ReadQueues = field(default_factory=ReadQueues)
    counters: Counters = field(default_factory=Counters)
    most: int = 1_000
    drained: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        limits = SchedulerLimits(ALPHA, BETA, max_waiting=self.most)
        self.service = SchedulerService(
            limits,
            self.queues,
            engine_ttl_s=TTL_S,
            request_ttl_s=1_000.0,
            counters=self.counters,
            clock=self.clock,
            draining_nodes=lambda: self.drained,
        )

    def ask(self, name: str, tokens: int = 10, **more: int | bytes | list[pb.CachedPrefix]) -> pb.AssignRequestRequest:
        operation = secrets.token_bytes(16)
        fields = {"operation_id": operation, "request_id": name, "prompt_tokens": tokens, "budget_ms": 60_000, **more}
        return pb.AssignRequestRequest(**fields)  # type: ignore[arg-type]

    async def asked(self, request: pb.AssignRequestRequest) -> asyncio.Task[pb.Assignment]:
        """A router that waits."""
        waits = asyncio.create_task(self.service.assign(request))
        await asyncio.sleep(0)
        return waits


class Leader:
    """Reports for a group, and applies its events as an engine would."""

    def __init__(self, shell: Shell, group: str, role: pb.EngineRole, *engines: pb.EngineState) -> None:
        self.shell, self.group, self.role = shell, group, role
        self.engines = list(engines)
        self.boot = secrets.token_bytes(16)
        self.sequence = self.acknowledged = 0
        self.membership = b""
        self.work: dict[str, pb.ScheduledRequest] = {}
        self.revoked: list[str] = []

    def request(self, prefilled: Iterable[int] = (), finished: Iterable[int] = ()) -> pb.ReportEnginesRequest:
        self.sequence += 1
        return pb.ReportEnginesRequest(
            group=self.group,
            boot_id=self.boot,
            role=self.role,
            sequence=self.sequence,
            engines=self.engines,
            prefilled=prefilled,
            finished=finished,
            membership=self.membership,
            acknowledged=self.acknowledged,
        )

    def take(self, answer: pb.ReportEnginesResponse) -> list[pb.ScheduledRequest]:
        """Apply an answer, and return the assigned requests."""
        if answer.membership != self.membership:
            self.membership, self.acknowledged = answer.membership, 0
            self.work.clear()
        told = []
        for event in answer.events:
            if event.number <= self.acknowledged:
                continue
            self.acknowledged = event.number
            if event.HasField("assigned"):
                self.work[event.assigned.request_id] = event.assigned
                told.append(event.assigned)
            else:
                self.work.pop(event.revoked.request_id, None)
                self.revoked.append(event.revoked.request_id)
        return told

    def report(self, prefilled: Iterable[int] = (), finished: Iterable[int] = ()) -> list[pb.ScheduledRequest]:
        return self.take(self.shell.service.report(self.request(prefilled, finished)))


def engine(name: str, node: str = "", **figures: int) -> pb.EngineState:
    return pb.EngineState(engine=name, node=node or f"node-{name}", address=f"{name}:80", **figures)


def pair_of_groups(shell: Shell) -> tuple[Leader, Leader]:
    prefill = Leader(shell, "P", PREFILL, engine("p"))
    decode = Leader(shell, "D", DECODE, engine("d", hbm_tokens=1_000))
    for leader in (prefill, decode):
        leader.report()
    return prefill, decode


async def test_assign_informs_both_groups_and_router() -> None:
    shell = Shell()
    prefill, decode = pair_of_groups(shell)
    router = await shell.asked(shell.ask("r", hit_tokens=7, expected_output_tokens=5))
    (alone,) = prefill.report()
    assert (alone.engine, alone.prompt_tokens, alone.hit_tokens, alone.expected_output_tokens) == ("p", 10, 7, 5)
    assert alone.prefill.engine == "p"
    assert not alone.HasField("decode")
    assert not router.done()
    (both,) = decode.report()
    assert (both.prefill.node, both.decode.node, both.prefill.address) == ("node-p", "node-d", "p:80")
    (told,) = prefill.report()  # from the engine that it lacked
    assert told.decode.engine == "d"
    answer = await router
    assert answer.generation == both.generation == told.generation == alone.generation != 0
    assert (answer.prefill, answer.decode) == (both.prefill, both.decode)
    prefill.report(prefilled=[answer.generation])
    assert shell.service.gauges()["metadata_scheduler_requests"] == 1
    decode.report(finished=[answer.generation])
    assert shell.service.gauges() == {
        "metadata_scheduler_engines": 2,
        "metadata_scheduler_requests": 0,
        "metadata_scheduler_bytes": 0,
        "metadata_scheduler_waiting_prefill": 0,
        "metadata_scheduler_waiting_decode": 0,
    }


async def test_report_lost_answer_is_repeated_and_counted() -> None:
    shell = Shell()
    leader = Leader(shell, "P", PREFILL, engine("p", sequences=0, tokens=0), engine("q", sequences=0, tokens=0))
    leader.report()
    for name in ("a", "b"):
        await shell.asked(shell.ask(name, 60))
    lost = leader.request()
    first = shell.service.report(lost)  # never taken
    assert [event.assigned.engine for event in first.events] == ["p", "q"]
    assert shell.service.report(lost) == first  # the retry
    await shell.asked(shell.ask("c", 30))
    # the engines still say that they have nothing; had they been believed, both would be far below beta
    await shell.asked(shell.ask("d", 30))
    await shell.asked(shell.ask("e", 90))
    told = leader.report()
    assert [(one.request_id, one.engine) for one in told] == [("a", "p"), ("b", "q"), ("c", "p"), ("d", "q"), ("e", "p")]
    leader.engines = [engine("p", sequences=3, tokens=180), engine("q", sequences=2, tokens=90)]
    await shell.asked(shell.ask("f"))
    await shell.asked(shell.ask("g"))
    assert [(one.request_id, one.engine) for one in leader.report()] == [("f", "q"), ("g", "q")]


async def test_fetch_uses_planned_and_reported_reads() -> None:
    shell = Shell()
    for node in ("node-p", "node-q"):
        shell.queues.join(node, 1e9, 1e9)
    leader = Leader(shell, "P", PREFILL, engine("p"), engine("q"))
    leader.report()
    charge = shell.queues.charge("node-p", None, 101, 1_000, 10, shell.clock.now_s())
    await shell.asked(shell.ask("a"))
    assert [one.engine for one in leader.report()] == ["q"]  # p has fewer or as many tokens, and a longer queue than alpha
    shell.queues.credit(charge, 101, shell.clock.now_s(), moved=False)
    leader.engines = [engine("p"), engine("q", read_tokens=ALPHA + 1)]
    await shell.asked(shell.ask("b"))
    await shell.asked(shell.ask("c"))
    assert [one.engine for one in leader.report()] == ["p", "p"]
    leader.engines = [engine("p", read_tokens=ALPHA + 1), engine("q", read_tokens=ALPHA + 1)]
    await shell.asked(shell.ask("d"))
    assert [one.engine for one in leader.report()] == ["q"]  # all are long: the fewest tokens


async def test_report_accepted_whatever_work_is_queued() -> None:
    shell = Shell()
    shell.queues.join("node-p", 1e9, 1e9)
    leader = Leader(shell, "P", PREFILL, engine("p", tokens=1, sequences=1))
    leader.report()
    for _ in range(3):
        shell.queues.charge("node-p", None, 1, 1, MAX_HBM_UNITS, 0.0)
        leader.report()


async def test_report_without_figures_keeps_engine_working() -> None:
    shell = Shell()
    prefill = Leader(shell, "P", PREFILL, engine("p", sequences=9, tokens=BETA + 1, read_tokens=ALPHA + 1))
    decode = Leader(shell, "D", DECODE, engine("d", hbm_tokens=100, sequences=9, tokens=90, free_hbm_tokens=0))
    prefill.report(), decode.report()
    router = await shell.asked(shell.ask("r"))
    assert [*prefill.report(), *decode.report()] == []
    prefill.engines, decode.engines = [engine("p")], [engine("d", hbm_tokens=100)]
    assert [one.engine for one in (*prefill.report(), *decode.report())] == ["p", "d"]
    assert (await router).decode.engine == "d"


async def test_report_resized_engine_keeps_requests() -> None:
    shell = Shell()
    prefill, decode = pair_of_groups(shell)
    router = await shell.asked(shell.ask("r"))
    prefill.report(), decode.report()
    generation = (await router).generation
    decode.engines = [engine("d", hbm_tokens=20)]
    assert decode.report() == []
    prefill.report()
    assert (prefill.revoked, decode.revoked) == ([], [])
    assert shell.counters.get("metadata_engines_lost_total") == 0
    assert shell.counters.get("metadata_engines_resized_total") == 1
    await shell.asked(shell.ask("large", 15))
    assert decode.report() == [], "the space that it has now is what counts"
    decode.engines = [engine("d", hbm_tokens=500)]
    assert [one.request_id for one in decode.report()] == ["large"]
    decode.report(finished=[generation])
    assert shell.counters.get("metadata_requests_finished_total") == 1


@pytest.mark.parametrize("moves", ["prefill", "decode"])
async def test_report_moved_engine_drops_its_requests(moves: str) -> None:
    shell = Shell()
    prefill, decode = pair_of_groups(shell)
    router = await shell.asked(shell.ask("r"))
    prefill.report(), decode.report()
    generation = (await router).generation
    moved, other = (prefill, decode) if moves == "prefill" else (decode, prefill)
    moved.engines = [engine(moved.engines[0].engine, "elsewhere", hbm_tokens=moved.engines[0].hbm_tokens)]
    again = moved.report()[-1]
    other.report()
    assert (moved.revoked, other.revoked) == (["r"], [])
    assert again.generation > generation
    assert moved.work["r"].generation == other.work["r"].generation == again.generation


async def test_finished_before_prefilled_revokes_prefill() -> None:
    shell = Shell()
    prefill, decode = pair_of_groups(shell)
    routers = [await shell.asked(shell.ask(name)) for name in ("early", "usual")]
    prefill.report(), decode.report()
    early, usual = [(await router).generation for router in routers]
    decode.report(finished=[early])
    prefill.report()
    assert prefill.revoked == ["early"]
    prefill.report(prefilled=[early, usual])  # the first comes too late, and is void
    decode.report(finished=[usual])
    prefill.report()
    assert (prefill.revoked, decode.revoked) == (["early"], [])
    assert shell.counters.get("metadata_requests_finished_total") == 2
    assert shell.counters.get("metadata_scheduler_void_reports_total") == 1


async def test_silent_group_requests_are_reassigned_first() -> None:
    shell = Shell()
    prefill, decode = pair_of_groups(shell)
    wanted = shell.ask("r")
    router = await shell.asked(wanted)
    prefill.report()
    (before,) = decode.report()
    answer = await router
    await shell.asked(shell.ask("later"))
    shell.clock.advance(TTL_S)
    prefill.report()
    shell.clock.advance(TTL_S / 2)
    shell.service.expire()  # the decode group is removed
    (again,) = prefill.report()
    assert again.request_id == "r"
    assert again.generation > before.generation
    assert not again.HasField("decode")
    waits = asyncio.create_task(shell.service.assign(pb.AssignRequestRequest.FromString(wanted.SerializeToString()), 60.0))
    follow = pb.AssignRequestRequest.FromString(wanted.SerializeToString())
    follow.after_generation = answer.generation
    follows = await shell.asked(follow)
    other = Leader(shell, "E", DECODE, engine("e", hbm_tokens=1_000))
    assert [one.request_id for one in other.report()] == ["r", "later"]
    for call in (waits, follows):
        assert (await call).decode.engine == "e"
        assert (await call).generation == again.generation
    # the removed group was only slow: its old reports are void, and it joins again
    membership = decode.membership
    decode.report(finished=[before.generation])
    assert decode.membership != membership
    assert decode.work == {}
    assert shell.counters.get("metadata_scheduler_void_reports_total") == 1
    assert shell.service.gauges()["metadata_scheduler_requests"] == 2


async def test_lost_decode_engine_restarts_request_prefill_does_not() -> None:
    shell = Shell()
    prefill, decode = pair_of_groups(shell)
    wanted = shell.ask("r")
    router = await shell.asked(wanted)
    (one,) = prefill.report()
    decode.report()
    await router
    prefill.engines = [engine("p2")]  # p leaves in the very report that says it is done
    prefill.report(prefilled=[one.generation])
    assert (await shell.service.assign(wanted)).prefill.engine == "p"  # a late retry gets the same engines
    assert shell.counters.get("metadata_requests_given_back_total") == 0
    decode.engines = []
    assert decode.report() == []
    assert [(again.request_id, again.engine) for again in prefill.report()] == [("r", "p2")]


async def test_restarted_leader_replaces_its_former_boot() -> None:
    shell = Shell()
    prefill, decode = pair_of_groups(shell)
    router = await shell.asked(shell.ask("r"))
    prefill.report()
    fresh = Leader(shell, "P", PREFILL, engine("p"))
    assert [one.request_id for one in fresh.report()] == ["r"]
    with pytest.raises(Conflict):
        prefill.report()
    (told,) = decode.report()
    assert told.generation == (await router).generation == fresh.work["r"].generation


async def test_cancel_drops_request_in_any_state() -> None:
    shell = Shell()
    prefill, decode = pair_of_groups(shell)
    waiting, running = shell.ask("waiting", 500), shell.ask("running")
    router = await shell.asked(running)
    prefill.report(), decode.report()
    await router
    waits = await shell.asked(waiting)
    for wanted in (waiting, running):
        cancel = pb.CancelRequestRequest(operation_id=wanted.operation_id, request_id=wanted.request_id)
        other = pb.CancelRequestRequest(operation_id=secrets.token_bytes(16), request_id=wanted.request_id)
        assert not shell.service.cancel(other)
        assert shell.service.cancel(cancel)
        assert not shell.service.cancel(cancel)
        with pytest.raises(NotFound):  # a retry that comes late begins nothing
            await shell.service.assign(wanted)
    with pytest.raises(NotFound):
        await waits
    prefill.report(), decode.report()
    assert (prefill.revoked, decode.revoked) == (["running"], ["running"])
    assert shell.service.gauges()["metadata_scheduler_requests"] == 0
    again = await shell.asked(shell.ask("running"))  # the name is free
    prefill.report(), decode.report()
    assert (await again).decode.engine == "d"


async def test_assign_timeout_drops_request() -> None:
    shell = Shell()
    prefill, _ = pair_of_groups(shell)
    wanted = shell.ask("r", budget_ms=1)
    with pytest.raises(DeadlineExceeded):
        await shell.service.assign(wanted)
    with pytest.raises(DeadlineExceeded):
        await shell.service.assign(wanted)
    gone = shell.ask("gone", budget_ms=2_000)
    router = await shell.asked(gone)
    router.cancel()  # its connection broke: it may come again until its time is up
    await asyncio.gather(router, return_exceptions=True)
    assert [one.request_id for one in prefill.report()] == ["gone"]
    shell.clock.advance(2.0)
    shell.service.expire()
    prefill.report()
    assert prefill.revoked == ["gone"]
    with pytest.raises(DeadlineExceeded):
        await shell.service.assign(gone)
    assert shell.service.gauges()["metadata_scheduler_requests"] == 0


async def test_request_without_end_is_forgotten() -> None:
    shell = Shell()
    prefill, decode = pair_of_groups(shell)
    wanted = shell.ask("r")
    router = await shell.asked(wanted)
    prefill.report(), decode.report()
    first = await router
    wanted.after_generation = first.generation
    follows = await shell.asked(wanted)
    for _ in range(500):
        shell.clock.advance(2.0)
        prefill.report(), decode.report()
        shell.service.expire()
    with pytest.raises(NotFound):
        await follows
    assert shell.counters.get("metadata_requests_forgotten_total") == 1
    assert decode.revoked == []


async def test_waiting_calls_and_groups_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = Shell(most=3)
    monkeypatch.setattr(module, "MAX_WAITING_CALLS", 4)
    calls = [await shell.asked(shell.ask(f"r{number}")) for number in range(3)]
    with pytest.raises(CapacityExceeded):
        await shell.service.assign(shell.ask("one more"))
    monkeypatch.setattr(module, "MAX_WAITING_CALLS", 3)
    with pytest.raises(CapacityExceeded):
        await shell.service.assign(shell.ask("and one"))
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    monkeypatch.setattr(groups, "MAX_GROUPS", 1)
    Leader(shell, "P", PREFILL, engine("p")).report()
    with pytest.raises(CapacityExceeded):
        Leader(shell, "Q", PREFILL, engine("q")).report()


async def test_requests_are_bounded_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = Shell()
    near = [pb.CachedPrefix(engine=f"{number:04}" + "x" * 60, tokens=1) for number in range(1_024)]
    monkeypatch.setattr(module.limits, "MAX_SCHEDULED_BYTES", 4 << 20)
    calls = [await shell.asked(shell.ask(f"r{number}", cached_prefixes=near)) for number in range(12)]
    refused = [call for call in calls if call.done()]
    assert 3 < len(calls) - len(refused) < 11
    for call in refused:
        with pytest.raises(CapacityExceeded, match="memory"):
            await call
    held = shell.service.gauges()["metadata_scheduler_bytes"]
    assert shell.ask("r", cached_prefixes=near).ByteSize() * (len(calls) - len(refused)) < held <= 4 << 20
    assert shell.counters.get("metadata_requests_refused_total") == len(refused)
    small = await shell.asked(shell.ask("small"))
    assert not small.done(), "there is space for others"
    for call in (*calls, small):
        call.cancel()
    await asyncio.gather(*calls, small, return_exceptions=True)
    after = shell.service.gauges()["metadata_scheduler_bytes"]
    assert after * 1.9 < held, "calls that left hold nothing; their requests wait for a while"
    shell.clock.advance(61.0)
    shell.service.expire()
    assert shell.service.gauges()["metadata_scheduler_bytes"] == 0
    with pytest.raises(InvalidArgument):
        await shell.service.assign(
            shell.ask("r", cached_prefixes=[pb.CachedPrefix(engine=f"{at}" + "x" * 200, tokens=1) for at in range(400)])
        )


async def test_group_without_acknowledgements_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = Shell()
    monkeypatch.setattr(module, "EVENTS_AT_ONCE", 2)
    monkeypatch.setattr(module, "MAX_UNREAD", 2)
    deaf = Leader(shell, "D", DECODE, engine("d", hbm_tokens=10_000))
    for number in range(6):
        await shell.asked(shell.ask(f"r{number}"))
    assert len(shell.service.report(deaf.request()).events) == 2
    await shell.asked(shell.ask("late"))
    assert len(shell.service.report(deaf.request()).events) == 2
    assert shell.counters.get("metadata_fetches_skipped_total") == 1
    shell.service.expire()
    assert shell.counters.get("metadata_groups_lost_total") == 1
    assert shell.service.gauges()["metadata_scheduler_waiting_decode"] == 7


async def test_malformed_reports_and_requests_are_refused() -> None:
    shell = Shell()
    prefill, _ = pair_of_groups(shell)
    stolen = Leader(shell, "Q", PREFILL, engine("p"))
    for leader in (stolen, Leader(shell, "D", PREFILL, engine("p"))):
        with pytest.raises(Conflict):
            leader.report()
    bad = [
        Leader(shell, "", PREFILL, engine("x")),
        Leader(shell, "X" * 600, PREFILL, engine("x")),
        Leader(shell, "X", pb.ENGINE_ROLE_UNSPECIFIED, engine("x")),
        Leader(shell, "X", PREFILL, engine("x", hbm_tokens=1)),
        Leader(shell, "X", PREFILL, engine("x", tokens=1)),
        Leader(shell, "X", DECODE, engine("x", hbm_tokens=2**63)),
        Leader(shell, "X", DECODE, engine("x", read_tokens=2**50)),
        Leader(shell, "X", DECODE, engine("x"), engine("x")),
        Leader(shell, "X", DECODE, engine("\n")),
        Leader(shell, "X", DECODE, *(engine(f"x{number}") for number in range(5_000))),
    ]
    for leader in bad:
        with pytest.raises(InvalidArgument):
            leader.report()
    with pytest.raises(InvalidArgument):
        prefill.report(finished=[1])
    prefill.acknowledged = 99
    with pytest.raises(InvalidArgument):
        prefill.report()
    for wanted in (
        shell.ask("r", 0),
        shell.ask("r", 5, hit_tokens=6),
        shell.ask("r", budget_ms=0),
        shell.ask("r", operation_id=b"short"),
        shell.ask(""),
        shell.ask("\x00"),
    ):
        with pytest.raises(InvalidArgument):
            await shell.service.assign(wanted)
    with pytest.raises(NotFound):
        await shell.service.assign(shell.ask("r", after_generation=7))
    await shell.asked(shell.ask("r"))
    with pytest.raises(Conflict):
        await shell.service.assign(shell.ask("r"))
    assert shell.service.gauges()["metadata_scheduler_engines"] == 2


async def test_deadlock_after_lost_engines_is_broken() -> None:
    shell = Shell()
    prefill, decode = (
        Leader(shell, "P", PREFILL, engine("p"), engine("q")),
        Leader(shell, "D", DECODE, engine("d", hbm_tokens=150)),
    )
    prefill.report(), decode.report()
    calls = [await shell.asked(shell.ask(name, 110)) for name in ("old", "young")]
    assert [one.engine for one in prefill.report()] == ["p", "q"]
    assert [one.request_id for one in decode.report()] == ["old"]
    await calls[0]
    prefill.engines = [engine("q")]  # old has space but no prefill engine; young has a prefill engine but no space
    prefill.report()
    for _ in range(3):
        shell.clock.advance(TTL_S * 0.6)
        prefill.report(), decode.report()
        shell.service.expire()
    assert (await calls[1]).prefill.engine == "q"
    assert decode.revoked == ["old"]
    assert shell.counters.get("metadata_requests_requeued_total") == 1
    generation = (await calls[1]).generation
    prefill.report(prefilled=[generation])
    decode.report(finished=[generation])
    prefill.report()
    assert prefill.work["old"].decode.engine == decode.work["old"].decode.engine == "d"


async def test_decode_finishes_after_prefill_engine_died() -> None:
    shell = Shell()
    prefill, decode = pair_of_groups(shell)
    router = await shell.asked(shell.ask("r"))
    prefill.report(), decode.report()
    generation = (await router).generation
    prefill.engines = [engine("p2")]
    prefill.report()  # which had not said that the prompt is computed
    assert prefill.work["r"].engine == "p2"
    assert prefill.work["r"].generation > generation
    decode.report(finished=[generation])
    prefill.report()
    assert prefill.revoked == ["r"]
    assert shell.service.gauges()["metadata_scheduler_requests"] == 0


async def test_draining_node_engines_keep_work_and_get_none() -> None:
    shell = Shell()
    prefill = Leader(shell, "P", PREFILL, engine("p"), engine("q"))
    old = Leader(shell, "D", DECODE, engine("d", hbm_tokens=30))
    for leader in (prefill, old):
        leader.report()
    await shell.asked(shell.ask("first", 30))
    assert [one.engine for one in prefill.report()] == ["p"]
    assert [one.engine for one in old.report()] == ["d"]
    await shell.asked(shell.ask("second", 30))
    assert old.report() == [], "it waits for space there"
    shell.drained = frozenset({"node-p", "node-d"})
    await shell.asked(shell.ask("third", 5))
    assert {one.engine for one in prefill.report() if one.request_id != "first"} == {"q"}
    new = Leader(shell, "E", DECODE, engine("e", hbm_tokens=1_000))
    assert {one.request_id for one in new.report()} == {"second", "third"}, "what waited for the group goes elsewhere"
    assert [one for one in old.report() if one.request_id != "first"] == []
    generation = old.work["first"].generation
    prefill.report(prefilled=[generation])
    old.report(finished=[generation])
    assert shell.counters.get("metadata_requests_finished_total") == 1, "what it had it ends"
    shell.drained = frozenset()
    await shell.asked(shell.ask("last", 5))
    assert [one.request_id for one in prefill.report()] == ["last"]
    assert [one.engine for one in old.report()] == ["d"], "it has space again, and least to do"
