"""Load or recompute in the scheduler's half of the vLLM connector: samples of loads and steps in, tokens to load out."""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import Future
from typing import Any

import pytest
from engine_requests import BLOCK, SPEC, request

from kvclient import KeyChain, Lookup, NodeRef, Run, Tier
from kvclient.engines.vllm.counters import ConnectorCounters
from kvclient.engines.vllm.identity.kv_groups import GroupBlocks
from kvclient.engines.vllm.options import ConnectorOptions
from kvclient.engines.vllm.plan import LoadJob, LoadSample, StepPlan, WorkerOutput
from kvclient.engines.vllm.scheduler import verdicts as verdicts_module
from kvclient.engines.vllm.scheduler.load_prices import PriceQuery, QuotedPrice
from kvclient.engines.vllm.scheduler.prefix_lookup import NOTHING, PrefixMatch
from kvclient.engines.vllm.scheduler.scheduler_connector import SchedulerConnector
from kvclient.engines.vllm.scheduler.verdicts import PRICE_VALID_S, Verdicts
from kvclient.load.accounting import STORAGE_LINKS
from kvstore.core.types import NodeId, VolumeId
from kvstore.recompute.decisions import PROBE_TIME, LoadDecisions
from kvstore.recompute.link_price import LinkPrice

BLOCK_BYTES = 1000
NODE = NodeRef(NodeId("n"), "c", "d")
OTHER = NodeRef(NodeId("s"), "c", "d")
DRAM, NVME = ("n", Tier.DRAM), ("n", Tier.NVME)
PROMPT = 16 * BLOCK


class Shelf:
    """A store that holds the first blocks of every prompt in DRAM, and the next ones on NVMe, also of another node."""

    def __init__(self, dram: int, nvme: int = 0, node: NodeRef = NODE) -> None:
        self.chain = KeyChain(SPEC)
        self.runs = [(0, dram, Tier.DRAM), (dram, nvme, Tier.NVME)]
        self.node = node
        self.queries: list[PriceQuery | None] = []
        self.price: QuotedPrice | None = None
        """The planner's answer."""

    def begin(self, keys: Any, tokens: Any, blocks: int, query: PriceQuery | None = None) -> Future[PrefixMatch]:
        self.queries.append(query)
        wanted = keys.upto(tokens, blocks)
        runs = tuple(Run(start, count, self.node, tier, VolumeId(tier.name)) for start, count, tier in self.runs if count)
        hit = min(len(wanted), sum(run.count for run in runs))
        future: Future[PrefixMatch] = Future()
        match = PrefixMatch(hit, [{b"n" * 16: Lookup(wanted, hit, runs)}], self.price if query is not None else None)
        future.set_result(match)
        return future

    def close(self) -> None:
        pass


class Clock:
    """Time of the scheduler, which the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(verdicts_module, "time", made)
    return made


def side(shelf: Shelf, *, workers: int = 1, **options: Any) -> SchedulerConnector:
    made = SchedulerConnector(ConnectorOptions(lookup_wait_ms=0.0, **options), GroupBlocks([BLOCK]), counters=ConnectorCounters())
    made.connect(shelf, 0, "")  # type: ignore[arg-type]
    decisions = LoadDecisions(BLOCK, BLOCK_BYTES, step_tokens=1024, least_tokens=options.get("min_load_tokens", 0))
    made.use_verdicts(Verdicts(decisions, made.counters, workers, asks_planner=True))
    return made


def load(made: SchedulerConnector, name: str, tokens: int = PROMPT) -> int:
    """How many tokens of a new request are loaded."""
    one = request(tokens, name)
    made.on_new_request(one)
    found, later = made.get_num_new_matched_tokens(one, 0)
    assert found is not None
    assert later == bool(found)
    if found:
        made.update_state_after_alloc(one, [list(range(1, tokens // BLOCK + 2))], found)
        made.build_step_plan({}, {}, lambda _: None)
    return found


def ended(made: SchedulerConnector, name: str, seconds: float, **sources: int) -> None:
    """A load ended; its bytes by tier."""
    sizes: dict[Hashable, int] = {STORAGE_LINKS if tier == "LINKS" else ("n", Tier[tier]): sources[tier] for tier in sources}
    made.on_worker_output(WorkerOutput(loads={name: LoadSample(dict(sizes), seconds, layerwise=False, own_node="n")}))


def steps(made: SchedulerConnector, clock: Clock, token_s: float, count: int = 3) -> None:
    """The engine computes prompts."""
    for number in range(count):
        one = request(40 + number, f"s{number}")
        made.on_new_request(one)
        plan = made.build_step_plan({one.request_id: 40 + number}, {}, lambda _: None)
        clock.now_s += token_s * (40 + number)
        made.output_arrived(WorkerOutput(step=plan.step))
        made.request_finished(one)


def test_verdict_unmeasured_is_loaded(clock: Clock) -> None:
    made = side(Shelf(8))
    assert load(made, "a") == 8 * BLOCK
    steps(made, clock, 1e-3)
    assert load(made, "b") == 8 * BLOCK
    assert made.counters.totals()["verdicts_unmeasured"] == 2


def test_verdict_slow_link_is_computed_after_one_load(clock: Clock) -> None:
    made = side(Shelf(8))
    steps(made, clock, 1e-3)
    for name, seconds in (("a", 1e-3), ("b", 1e-3), ("c", 10.0)):
        assert load(made, name) == 8 * BLOCK
        clock.now_s += seconds
        ended(made, name, seconds, DRAM=8 * BLOCK_BYTES)
    assert load(made, "d") == 0
    counts = made.counters.totals()
    assert counts["verdicts_compute"] == 1
    assert counts["load_predictions"] == 2
    assert counts["load_prediction_error_seconds"] == pytest.approx(10.0, rel=0.01)
    assert counts["verdict_saved_seconds"] > 5


@pytest.mark.parametrize("order", [(1e-3, 10.0), (10.0, 1e-3)])
def test_verdict_counts_the_slowest_of_two_workers(clock: Clock, order: tuple[float, float]) -> None:
    made = side(Shelf(8), workers=2)
    steps(made, clock, 1e-3)
    assert load(made, "a") == 8 * BLOCK
    for seconds in order:  # in different steps
        ended(made, "a", seconds, DRAM=8 * BLOCK_BYTES)
    assert load(made, "b") == 0
    assert made.counters.totals()["verdicts_compute"] == 1


def test_verdict_cut_loads_the_near_blocks_only(clock: Clock) -> None:
    made = side(Shelf(4, 6))
    steps(made, clock, 1e-3)
    assert load(made, "a") == 10 * BLOCK
    ended(made, "a", 10.0, DRAM=4 * BLOCK_BYTES, NVME=6 * BLOCK_BYTES)
    one = request(PROMPT, "b")
    made.on_new_request(one)
    assert made.get_num_new_matched_tokens(one, 0) == (4 * BLOCK, True)
    assert made.get_num_new_matched_tokens(one, 0) == (4 * BLOCK, True), "asked again, for the pool was full"
    made.update_state_after_alloc(one, [list(range(1, 20))], 4 * BLOCK)
    (job,) = made.build_step_plan({}, {}, lambda _: None).loads
    assert job.groups[0].block_ids == [1, 2, 3, 4]
    assert made.counters.totals()["verdicts_cut"] == 1


def read_ahead(made: SchedulerConnector, name: str, *, asked: bool = True) -> list[int]:
    """How many blocks of a new request are read ahead that the engine passes over, after it ``asked`` about it or not."""
    one = request(PROMPT, name)
    made.on_new_request(one)
    if asked:
        made.get_num_new_matched_tokens(one, 0)
    jobs = [job for _ in range(3) for job in made.build_step_plan({}, {}, lambda _: None).ahead]
    return [lookup.hit_blocks for job in jobs for lookup in job.lookups.values()]


@pytest.mark.parametrize("asked", [True, False])
def test_verdict_bounds_what_is_read_ahead(clock: Clock, asked: bool) -> None:
    made = side(shelf := Shelf(4, 6))
    steps(made, clock, 1e-3)
    assert read_ahead(made, "unmeasured", asked=asked) == [10]
    assert load(made, "a") == 10 * BLOCK
    ended(made, "a", 10.0, DRAM=4 * BLOCK_BYTES, NVME=6 * BLOCK_BYTES)
    counted = dict(made.counters.totals())
    assert read_ahead(made, "cut", asked=asked) == [4]
    shelf.runs = [(0, 10, Tier.NVME)]
    assert read_ahead(made, "refused", asked=asked) == []
    assert asked or made.counters.totals() == counted, "a forecast is no verdict"


def test_verdict_after_read_ahead_counts_dram_prices(clock: Clock) -> None:
    made = side(shelf := Shelf(0, 8))
    steps(made, clock, 1e-3)
    for name, runs, seconds in (("dram", [(0, 8, Tier.DRAM)], 1e-3), ("nvme", [(0, 8, Tier.NVME)], 1e-2)):
        shelf.runs = runs
        assert load(made, name) == 8 * BLOCK
        ended(made, name, seconds, **{name.upper(): 8 * BLOCK_BYTES})
    assert read_ahead(made, "waits", asked=False) == [8]
    load(made, "hung")
    ended(made, "hung", 10.0, NVME=8 * BLOCK_BYTES)
    assert load(made, "other") == 0, "from NVMe, it would take too long"
    one = request(PROMPT, "waits")
    assert made.get_num_new_matched_tokens(one, 0) == (8 * BLOCK, True)


def measured(clock: Clock) -> tuple[SchedulerConnector, Shelf]:
    """An engine that has computed prompts and loaded from both tiers, equally fast. Its store has 8 blocks on NVMe."""
    made = side(shelf := Shelf(8))
    steps(made, clock, 1e-3)
    for tier in (Tier.DRAM, Tier.NVME):
        shelf.runs = [(0, 8, tier)]
        load(made, tier.name)
        ended(made, tier.name, 1e-3, **{tier.name: 8 * BLOCK_BYTES})
    return made, shelf


@pytest.mark.parametrize(
    ("asked", "tier", "counted"), [(False, "DRAM", True), (False, "NVME", False), (True, "DRAM", False), (True, "NVME", True)]
)
def test_prediction_of_other_tiers_is_not_counted(clock: Clock, asked: bool, tier: str, counted: bool) -> None:
    """A verdict before the read ahead predicts a load from NVMe. A later verdict predicts a load from DRAM."""
    made, _ = measured(clock)
    assert read_ahead(made, "waits", asked=asked) == [8]
    before = made.counters.totals().get("load_predictions", 0)
    assert made.get_num_new_matched_tokens(request(PROMPT, "waits"), 0) == (8 * BLOCK, True)
    ended(made, "waits", 1e-3, **{tier: 8 * BLOCK_BYTES})
    assert made.counters.totals().get("load_predictions", 0) - before == counted


def test_prediction_of_a_planned_read_ahead_is_not_counted(clock: Clock) -> None:
    made, shelf = beyond(clock)
    shelf.node, shelf.runs = NODE, [(0, 8, Tier.DRAM)]
    load(made, "dram")
    ended(made, "dram", 1e-3, DRAM=8 * BLOCK_BYTES)
    shelf.node, shelf.runs = OTHER, [(0, 8, Tier.NVME)]
    assert read_ahead(made, "waits", asked=False) == [8]
    assert made.get_num_new_matched_tokens(request(PROMPT, "waits"), 0) == (8 * BLOCK, True)
    ended(made, "waits", 1e-3, DRAM=8 * BLOCK_BYTES)
    assert "load_predictions" not in made.counters.totals()


def test_read_ahead_that_hangs_counts_against_the_disk(clock: Clock) -> None:
    made, shelf = measured(clock)
    assert read_ahead(made, "waits", asked=False) == [8]
    assert made.get_num_new_matched_tokens(request(PROMPT, "waits"), 0) == (8 * BLOCK, True)
    ended(made, "waits", 10.0)
    assert load(made, "disk") == 0
    shelf.runs = [(0, 8, Tier.DRAM)]
    assert load(made, "memory") == 8 * BLOCK


def test_failed_lookup_reads_nothing_ahead(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup that was late or failed names no source of its blocks: to price it would end the engine."""
    made = side(shelf := Shelf(8))
    steps(made, clock, 1e-3)
    failed: Future[PrefixMatch] = Future()
    failed.set_result(NOTHING)
    monkeypatch.setattr(shelf, "begin", lambda *_: failed)
    assert read_ahead(made, "asked") == []
    assert read_ahead(made, "not asked", asked=False) == []


def test_prefix_below_min_load_tokens_is_not_read_ahead() -> None:
    made = side(Shelf(4), min_load_tokens=5 * BLOCK)
    assert read_ahead(made, "asked") == []
    made.on_new_request(request(PROMPT, "not asked"))
    assert [made.build_step_plan({}, {}, lambda _: None).ahead for _ in range(3)] == [[]] * 3


def test_verdict_keeps_min_load_tokens(clock: Clock) -> None:
    made = side(Shelf(4, 8), min_load_tokens=5 * BLOCK)
    steps(made, clock, 1e-3)
    assert load(made, "a") == 12 * BLOCK
    ended(made, "a", 10.0, DRAM=4 * BLOCK_BYTES, NVME=8 * BLOCK_BYTES)
    assert load(made, "b") == 0


def test_verdict_late_notice_is_part_of_the_price(clock: Clock) -> None:
    made = side(Shelf(8))
    steps(made, clock, 1e-3)
    assert load(made, "a") == 8 * BLOCK
    clock.now_s += 5.0
    ended(made, "a", 1e-4, DRAM=8 * BLOCK_BYTES)  # the load itself was fast
    assert load(made, "b") == 0


def test_verdict_failed_load_that_hung_counts(clock: Clock) -> None:
    made = side(Shelf(8))
    steps(made, clock, 1e-3)
    load(made, "a")
    ended(made, "a", 1e-4, DRAM=8 * BLOCK_BYTES)
    assert load(made, "b") == 8 * BLOCK
    ended(made, "b", 10.0)
    assert load(made, "c") == 0


def probe(made: SchedulerConnector) -> tuple[str, LoadJob, bool]:
    """The first probe of a source that is not loaded from, and whether its request waits out of the batch."""
    for number in range(100):
        one = request(PROMPT, f"p{number}")
        made.on_new_request(one)
        found, later = made.get_num_new_matched_tokens(one, 0)
        if found:
            made.update_state_after_alloc(one, [list(range(1, 20))], found)
            (job,) = made.build_step_plan({}, {}, lambda _: None).loads
            return one.request_id, job, later
    raise AssertionError("no request was a probe")


@pytest.mark.parametrize("mode", ["async", "layerwise"])
def test_verdict_probe_ends_soon_out_of_the_batch(clock: Clock, mode: str) -> None:
    made = side(Shelf(8), load_mode=mode)
    steps(made, clock, 1e-3)
    made.on_new_request(first := request(PROMPT, "a"))
    assert made.get_num_new_matched_tokens(first, 0) == (8 * BLOCK, mode == "async")
    ended(made, "a", 10.0, DRAM=8 * BLOCK_BYTES)
    _, job, later = probe(made)
    assert (later, job.layerwise) == (True, False)
    assert job.limit_s == pytest.approx(PROBE_TIME * PROMPT * 1e-3, rel=0.1)
    assert made.counters.totals()["verdicts_probe"] == 1


def test_verdict_probe_that_ended_early_is_no_failed_load(clock: Clock) -> None:
    made, shelf = beyond(clock)
    shelf.price = QuotedPrice(LinkPrice(1e-4, 1e-3, 8), clock.now_s)
    assert load(made, "a") == 8 * BLOCK
    assert made.on_loads_failed(set(), {"a"}) == {"a"}
    ended(made, "a", 10.0)
    name, _, _ = probe(made)
    assert made.on_loads_failed(set(), {name}) == {name}
    assert made.counters.totals()["loads_failed"] == 1


@pytest.mark.parametrize("arrived", [0, 2])
def test_verdict_probe_that_ended_early_changes_nothing(clock: Clock, arrived: int) -> None:
    made, shelf = beyond(clock)
    shelf.price = QuotedPrice(LinkPrice(1e-4, 1e-3, 8), clock.now_s)
    assert load(made, "a") == 8 * BLOCK
    ended(made, "a", 10.0)
    for number in range(3):
        name, job, _ = probe(made)
        assert job.limit_s is not None
        ended(made, name, job.limit_s, **({"DRAM": arrived} if arrived else {}))
        made.request_finished(request(PROMPT, name))
        assert load(made, f"b{number}") == 0


def beyond(clock: Clock, **options: Any) -> tuple[SchedulerConnector, Shelf]:
    """The scheduler's half after one fast load of blocks that only another host's storage has."""
    shelf = Shelf(0, 8, OTHER)
    made = side(shelf, **options)
    steps(made, clock, 1e-3)
    assert load(made, "first") == 8 * BLOCK
    assert shelf.queries[-1] is None, "the workers' node is not known yet"
    ended(made, "first", 1e-3, LINKS=8 * BLOCK_BYTES)
    return made, shelf


def test_verdict_follows_the_planners_queues(clock: Clock) -> None:
    made, shelf = beyond(clock)
    shelf.price = QuotedPrice(LinkPrice(10.0, 10.001, 8), clock.now_s)
    assert load(made, "queue is long") == 0
    assert shelf.queries[-1] == PriceQuery("n", None)
    shelf.price = QuotedPrice(LinkPrice(1e-4, 1e-3, 8), clock.now_s)
    assert load(made, "queue is empty") == 8 * BLOCK
    assert made.counters.totals()["verdicts_priced"] == 2


def test_verdict_without_price_uses_measured_loads(clock: Clock) -> None:
    made, shelf = beyond(clock)
    shelf.price = QuotedPrice(LinkPrice(10.0, 10.001, 8), clock.now_s - PRICE_VALID_S - 1)
    assert load(made, "old price") == 8 * BLOCK
    shelf.price = None
    assert load(made, "no price") == 8 * BLOCK
    assert "verdicts_priced" not in made.counters.totals()


def test_verdict_wrong_prices_are_corrected_by_one_load(clock: Clock) -> None:
    made, shelf = beyond(clock)
    shelf.price = QuotedPrice(LinkPrice(1e-4, 1e-3, 8), clock.now_s)
    assert load(made, "a") == 8 * BLOCK
    ended(made, "a", 10.0, LINKS=8 * BLOCK_BYTES)
    assert load(made, "b") == 0


def test_verdict_hung_link_corrects_the_price(clock: Clock) -> None:
    made, shelf = beyond(clock)
    shelf.price = QuotedPrice(LinkPrice(1e-4, 1e-3, 8), clock.now_s)
    assert load(made, "a") == 8 * BLOCK
    ended(made, "a", 10.0)
    assert load(made, "b") == 0


def test_steps_are_timed_from_the_output_before(clock: Clock) -> None:
    made = side(Shelf(0))
    one, two = request(64, "a"), request(64, "b")
    for each in (one, two):
        made.on_new_request(each)
    first, second = (made.build_step_plan({each.request_id: 64}, {}, lambda _: None) for each in (one, two))
    assert (first.step, second.step) == (1, 2)
    clock.now_s += 2.0
    made.output_arrived(WorkerOutput(step=1))
    clock.now_s += 1.0
    made.output_arrived(None)
    clock.now_s += 1.0
    made.output_arrived(WorkerOutput(step=2))
    steps(made, clock, 1e-3, 1)
    made.output_arrived(WorkerOutput(step=1))  # unknown: it was reported before
    assert made.counters.totals().get("step_predictions", 0) == 0
    steps(made, clock, 1e-3, 1)
    assert made.counters.totals()["step_predictions"] == 1


def test_steps_that_do_more_than_compute_are_not_timed(clock: Clock) -> None:
    made = side(Shelf(0))
    one = request(64, "a")
    made.on_new_request(one)
    assert made.build_step_plan({"a": 1}, {}, lambda _: None).step == 0, "a decoding step"
    assert made.build_step_plan({"a": 64, "unknown": 64}, {}, lambda _: None).step == 0
    made.weights.reset_ended(cleared=True)
    assert made.build_step_plan({"a": 64}, {}, lambda _: None).step == 0
    assert made.build_step_plan({"a": 64}, {}, lambda _: None).step == 1


def test_output_of_several_workers_keeps_the_slowest_load() -> None:
    merged = WorkerOutput(loads={"a": LoadSample({DRAM: 1}, 1.0, layerwise=False)}, step=3)
    merged.merge(WorkerOutput(loads={"a": LoadSample({NVME: 1}, 2.0, layerwise=False)}, step=2))
    assert (merged.loads["a"].seconds, merged.step, bool(merged)) == (2.0, 3, True)
    assert not WorkerOutput()
    assert StepPlan().step == 0
