"""The movers of the vLLM connector against a real store, without vLLM: pages in tensors, tensor-parallel ranks in processes."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_requests import Pool, Request

from kvclient import BlockKey, CacheSpec, ClientOptions, KVClient, Lookup
from kvclient.call.request_hint import RequestHint
from kvclient.engines.options import HookOptions
from kvclient.engines.vllm.counters import ConnectorCounters
from kvclient.engines.vllm.identity.keys import RequestKeys
from kvclient.engines.vllm.identity.kv_groups import GroupBlocks
from kvclient.engines.vllm.memory.pages import GroupPages
from kvclient.engines.vllm.options import ConnectorOptions
from kvclient.engines.vllm.plan import GroupLoad, HintJob, LoadJob, StepPlan, StoreJob, WorkerOutput
from kvclient.engines.vllm.scheduler.prefix_lookup import BackgroundLookup, PrefixMatch
from kvclient.engines.vllm.scheduler.scheduler_connector import SchedulerConnector
from kvclient.engines.vllm.worker import worker_connector as worker_side
from kvclient.engines.vllm.worker.store_worker import StoreWorker
from kvclient.engines.vllm.worker.worker_connector import LoadCompletions, WorkerConnector
from kvclient.nodes.hints import HintSender
from kvstore.core.keys import NamespaceKeyMask
from kvstore.embedded.cluster import LocalCluster, NodeSpec

BLOCK, LAYERS, PAGES = 4, 3, 32
PAGE = (2, BLOCK, 64)
PAGE_BYTES = 2 * BLOCK * 64 * 4
NAMES = ["l0", "l1", "l2"]
WAIT_S = 20.0
TOKENS = list(range(100, 100 + 8 * BLOCK))


def spec(group: int = 0, rank: int = 0, ranks: int = 1) -> CacheSpec:
    return CacheSpec(
        model="m",
        block_tokens=BLOCK,
        layers=LAYERS,
        layer_block_bytes=PAGE_BYTES,
        dtype="float32",
        layout=f"g{group}",
        shard_rank=rank,
        shard_count=ranks,
    )


class Rank:
    """A worker and its pages."""

    def __init__(
        self,
        cluster: LocalCluster,
        specs: Sequence[CacheSpec],
        *,
        seed: int | None = None,
        stores: bool = True,
        store_s: float = 5.0,
        node: str = "n",
    ) -> None:
        generator = torch.Generator().manual_seed(seed or 0)
        make = torch.rand if seed is not None else torch.zeros
        how = {"generator": generator} if seed is not None else {}
        self.caches = [make(LAYERS, PAGES, *PAGE, **how) for _ in specs]  # type: ignore[operator]
        self.specs = specs
        self.hook = HookOptions(
            metadata=cluster.metadata_address, node=cluster.node(node).local_socket, load_deadline_s=5.0, store_deadline_s=store_s
        )

        def connect(weights_epoch: str) -> list[KVClient]:
            options = ClientOptions(client_name="rank")
            return [
                KVClient.connect(
                    cluster.metadata_address, replace(one, weights_epoch=weights_epoch), node=self.hook.node, options=options
                )
                for one in specs
            ]

        pages = [GroupPages(list(cache), PAGES) for cache in self.caches]
        self.side = WorkerConnector(ConnectorOptions(hook=self.hook), connect, "", pages, [NAMES] * len(specs), stores=stores)

    def save(self, ids: Sequence[Sequence[int]], keys: RequestKeys, first: int = 0, job_id: int = 1) -> set[int]:
        """Store pages as the first blocks of ``TOKENS``; return the failed jobs."""
        chain = keys.upto(TOKENS, first + len(ids[0]))
        parent = chain[first - 1] if first else None
        job = StoreJob(job_id, "r", first, parent, chain[first:], [list(one) for one in ids])
        self.side.end_forward(StepPlan(chain=self.chain, stores=[job]))
        return self.until_stored(job_id)

    def until_stored(self, job_id: int) -> set[int]:
        """Wait for the end of a store; return the failed jobs."""
        end_s = time.monotonic() + WAIT_S
        done: dict[int, int] = {}
        while job_id not in done:
            assert time.monotonic() < end_s
            self.side.take_completions(StepPlan(), set())  # waits a moment
            answer = self.side.take_output() or WorkerOutput()
            done |= answer.stores_done
        assert done == {job_id: 1}
        return answer.stores_failed

    @property
    def chain(self) -> bytes:
        return replace(self.specs[0], shard_rank=0).namespace

    def load(
        self, found: PrefixMatch, ids: Sequence[Sequence[int]], *, layerwise: bool = False, start: int = 0
    ) -> LoadCompletions:
        parts = [
            GroupLoad(group, list(one), start, {name: lookup.part(start, start + len(one)) for name, lookup in lookups.items()})
            for group, (one, lookups) in enumerate(zip(ids, found.by_group, strict=True))
        ]
        plan = StepPlan(chain=self.chain, loads=[LoadJob("r", parts, layerwise)])
        self.side.begin_loads(plan)
        if layerwise:
            for name in NAMES:
                self.side.wait_layer(name)
            self.side.end_forward(StepPlan())
            return self.side.take_completions(StepPlan(has_tokens=True), set())
        return self.until_received()

    def until_received(self) -> LoadCompletions:
        total = LoadCompletions()
        end_s = time.monotonic() + WAIT_S
        while not total.received:
            assert time.monotonic() < end_s
            some = self.side.take_completions(StepPlan(), set())
            total.received |= some.received
            total.failed |= some.failed
            total.missing |= some.missing
        return total


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster([NodeSpec("n", dram_bytes=64 << 20)], tmp_path) as started:
        yield started


@pytest.fixture
def find(cluster: LocalCluster) -> Iterator[Callable[..., tuple[PrefixMatch, RequestKeys]]]:
    finders: list[BackgroundLookup] = []

    def look_up(groups: Sequence[Sequence[CacheSpec]], least: int = 0) -> tuple[PrefixMatch, RequestKeys]:
        finders.append(BackgroundLookup(HookOptions(metadata=cluster.metadata_address), groups, ConnectorCounters()))
        end_s = time.monotonic() + WAIT_S
        while True:
            keys = RequestKeys(finders[-1].chain, {})
            future = finders[-1].begin(keys, TOKENS, 8)
            wait((future,), WAIT_S)
            found = future.result()
            if found.hit_blocks >= least:
                return found, keys
            assert time.monotonic() < end_s, found.hit_blocks

    yield look_up
    for finder in finders:
        finder.close()


Find = Callable[..., tuple[PrefixMatch, RequestKeys]]


@pytest.mark.parametrize("layerwise", [False, True])
def test_load_into_other_pages_is_bit_exact(cluster: LocalCluster, find: Find, layerwise: bool) -> None:
    writer, reader = Rank(cluster, [spec()], seed=1), Rank(cluster, [spec()])
    _, keys = find([[spec()]])
    assert writer.save([[3, 9, 4]], keys) == set()
    assert writer.save([[1, 30]], keys, first=3, job_id=2) == set()
    found, _ = find([[spec()]], 5)
    assert found.hit_blocks == 5
    arrivals = reader.load(found, [[20, 21, 5]], layerwise=layerwise, start=2)
    assert arrivals == (LoadCompletions() if layerwise else LoadCompletions({"r"}))
    assert torch.equal(reader.caches[0][:, [20, 21, 5]], writer.caches[0][:, [4, 1, 30]])
    others = [page for page in range(PAGES) if page not in {20, 21, 5}]
    assert not reader.caches[0][:, others].any(), "nothing else was touched"
    assert reader.side.counters.totals()["load_blocks"] == 3
    writer.side.close()
    reader.side.close()


def test_groups_have_separate_keys(cluster: LocalCluster, find: Find) -> None:
    specs = [spec(0), spec(1)]
    writer, reader = Rank(cluster, specs, seed=2), Rank(cluster, specs)
    groups = [[one] for one in specs]
    _, keys = find(groups)
    writer.save([[1, 2], [3, 4]], keys)
    found, _ = find(groups, 2)
    reader.load(found, [[5, 6], [7, 8]])
    assert torch.equal(reader.caches[0][:, [5, 6]], writer.caches[0][:, [1, 2]])
    assert torch.equal(reader.caches[1][:, [7, 8]], writer.caches[1][:, [3, 4]])
    writer.side.close()
    reader.side.close()


@pytest.mark.parametrize("layerwise", [False, True])
def test_load_failed_names_pages_and_stores_nothing_of_step(cluster: LocalCluster, find: Find, layerwise: bool) -> None:
    writer = Rank(cluster, [spec()], seed=3)
    _, keys = find([[spec()]])
    writer.save([[1, 2, 3]], keys)
    found, _ = find([[spec()]], 3)
    cluster.kill("n")
    reader = writer
    writer.caches[0][:, 10:15] = float("nan")  # bytes that are not KV may decode to this
    parts = [GroupLoad(0, [10, 11, 12], 0, {name: one.part(0, 3) for name, one in found.by_group[0].items()}, [13])]
    chain = keys.upto(TOKENS, 4)
    plan = StepPlan(
        chain=writer.chain,
        loads=[LoadJob("r", parts, layerwise)],
        stores=[StoreJob(7, "r", 3, chain[2], chain[3:], [[13]])],
    )
    reader.side.begin_loads(plan)
    for name in NAMES:
        reader.side.wait_layer(name)
    reader.side.end_forward(plan)
    arrivals = reader.side.take_completions(StepPlan(has_tokens=True), set()) if layerwise else reader.until_received()
    assert arrivals.missing == {10, 11, 12}
    assert not writer.caches[0][:, 10:14].any(), "nothing of a load that failed is left for who gets the pages next"
    assert writer.caches[0][:, 14].isnan().all()
    assert arrivals.failed == (set() if layerwise else {"r"})
    if layerwise:
        answer = reader.side.take_output()
        assert answer is not None
        assert (answer.stores_done, answer.stores_failed) == ({7: 1}, {7}), "it may have been computed from garbage"
    writer.side.close()


def test_rank_with_replicated_pages_stores_nothing(cluster: LocalCluster, find: Find) -> None:
    second = Rank(cluster, [spec()], seed=4, stores=False)
    _, keys = find([[spec()]])
    assert second.save([[1, 2]], keys) == set()
    assert second.side.counters.totals().get("stores", 0) == 0
    second.side.close()


def test_hints_of_changed_weights_are_counted(cluster: LocalCluster, find: Find) -> None:
    rank = Rank(cluster, [spec()], stores=False)
    _, keys = find([[spec()]])
    jobs = [HintJob(RequestHint("chat"), keys.upto(TOKENS, 4)), HintJob(RequestHint("other"), keys.upto(TOKENS, 2))]
    rank.side.begin_step(StepPlan(chain=rank.chain, hints=jobs))
    assert rank.side.counters.totals().get("hints_refused", 0) == 0
    rank.side.digest_weights = lambda: "other weights"
    rank.side.begin_step(StepPlan(chain=rank.chain, hints=jobs, weights_check=1))
    assert rank.side.counters.totals()["hints_refused"] == 2
    assert rank.side.clients[0].stats()["client_hints_total"] == 2, "those of the step before"
    rank.side.close()


def test_step_continues_after_hint_that_raises(cluster: LocalCluster, find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    rank = Rank(cluster, [spec()], stores=False)
    _, keys = find([[spec()]])
    monkeypatch.setattr(HintSender, "give", fail)
    rank.side.begin_step(StepPlan(chain=rank.chain, hints=[HintJob(RequestHint("chat"), keys.upto(TOKENS, 4))]))
    assert rank.side.counters.totals()["bugs"] == 1
    rank.side.close()


def test_store_queued_too_long_releases_its_pages(cluster: LocalCluster, find: Find) -> None:
    rank = Rank(cluster, [spec()], seed=6, store_s=1e-9)
    _, keys = find([[spec()]])
    assert rank.save([[1, 2]], keys) == {1}
    assert rank.side.counters.totals()["stores_late"] == 1
    assert rank.side.counters.totals().get("stores", 0) == 0
    rank.side.close()


@pytest.mark.parametrize("elsewhere", [False, True], ids=["asked at once", "asked by a plan"])
def test_pages_reclaimed_do_not_wait_for_hung_node(cluster: LocalCluster, find: Find, elsewhere: bool) -> None:
    """The node hangs, and a store may last ten minutes. Giving it up answers it and the stores queued after it."""
    rank = Rank(cluster, [spec()], seed=7, store_s=600.0)
    _, keys = find([[spec()]])
    chain = keys.upto(TOKENS, 4)
    jobs = [StoreJob(at + 1, "r", at, chain[at - 1] if at else None, chain[at : at + 1], [[at + 1]]) for at in range(4)]
    process = cluster.node("n").process
    process.send_signal(signal.SIGSTOP)
    try:
        rank.side.end_forward(StepPlan(chain=rank.chain, stores=jobs))
        total = WorkerOutput()
        if elsewhere:
            rank.side.begin_step(StepPlan(cancel_stores=True))
        else:
            total.merge(rank.side.release_pages(0.0, WAIT_S))
        end_s = time.monotonic() + WAIT_S
        while len(total.stores_done) < len(jobs):
            assert time.monotonic() < end_s
            rank.side.take_completions(StepPlan(), set())  # waits a moment
            total.merge(rank.side.take_output() or WorkerOutput())
        assert total.stores_failed == {1, 2, 3, 4}
        rank.caches[0].fill_(float("nan"))  # another request has the pages
    finally:
        process.send_signal(signal.SIGCONT)
    end_s = time.monotonic() + WAIT_S
    later = itertools.count(5)
    while rank.save([[9, 10]], keys, job_id=next(later)):  # the node counts as hung until it has answered a probe
        assert time.monotonic() < end_s, "later ones are stored"
    found, _ = find([[spec()]], 2)
    assert found.hit_blocks == 2
    assert rank.load(found, [[20, 21]]) == LoadCompletions({"r"})
    assert rank.caches[0][:, 20:22].isnan().all(), "as they were when they were stored, not what had been there before"
    assert rank.side.counters.totals()["stores_dropped"] == 4
    rank.side.close()


def test_pages_reclaimed_are_stored_if_node_is_only_slow(
    cluster: LocalCluster, find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step requests the pages while the node is slow."""
    monkeypatch.setattr(worker_side, "RESET_GRACE_S", WAIT_S)
    rank = Rank(cluster, [spec()], seed=8)
    _, keys = find([[spec()]])
    job = StoreJob(1, "r", 0, None, keys.upto(TOKENS, 4), [[1, 2, 3, 4]])
    process = cluster.node("n").process
    process.send_signal(signal.SIGSTOP)
    goes_on = threading.Timer(0.2, process.send_signal, (signal.SIGCONT,))
    goes_on.start()
    rank.side.end_forward(StepPlan(chain=rank.chain, stores=[job]))
    rank.side.begin_step(StepPlan(cancel_stores=True))
    goes_on.join()
    assert rank.side.take_output() == WorkerOutput({1: 1}, set())
    assert rank.side.counters.totals().get("stores_dropped", 0) == 0
    rank.side.close()


def test_step_without_end_stores_nothing(cluster: LocalCluster, find: Find) -> None:
    rank = Rank(cluster, [spec()], seed=8)
    _, keys = find([[spec()]])
    job = StoreJob(1, "r", 0, None, keys.upto(TOKENS, 4), [[1, 2, 3, 4]])
    rank.side.begin_step(StepPlan(chain=rank.chain, stores=[job]))
    assert rank.side.take_output() is None
    rank.side.begin_step(StepPlan(chain=rank.chain))
    assert rank.side.take_output() == WorkerOutput({1: 1}, {1})
    rank.side.end_forward(StepPlan(chain=rank.chain))
    assert rank.side.counters.totals()["stores_not_begun"] == 1
    assert rank.save([[1, 2, 3, 4]], keys, job_id=2) == set()
    rank.side.close()


@pytest.mark.parametrize("calls", ["begin begin end", "begin end end", "begin end begin end"])
def test_step_begun_or_ended_twice_stores_once(cluster: LocalCluster, find: Find, calls: str) -> None:
    """The pages of a store that was answered may have other content."""
    rank = Rank(cluster, [spec()], seed=8)
    _, keys = find([[spec()]])
    plan = StepPlan(chain=rank.chain, stores=[StoreJob(1, "r", 0, None, keys.upto(TOKENS, 4), [[1, 2, 3, 4]])])
    for call in calls.split():
        (rank.side.begin_step if call == "begin" else rank.side.end_forward)(plan)
    assert rank.until_stored(1) == set()
    rank.side.begin_step(StepPlan(chain=rank.chain))
    assert rank.save([[5]], keys, first=4, job_id=2) == set(), "the first store was answered once"
    rank.side.close()


def test_epoch_without_clients_is_tried_again_each_step(
    cluster: LocalCluster, find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    rank = Rank(cluster, [spec()], seed=8)
    rank.specs = [replace(spec(), weights_epoch="two")]
    _, keys = find([rank.specs])
    later = StepPlan(epoch=1, weights_epoch="two", weights_check=1)
    with monkeypatch.context() as patch:
        patch.setattr(KVClient, "connect", fail)
        for _ in range(2):
            rank.side.begin_step(later)
            assert rank.save([[1, 2]], keys) == {1}
    assert rank.side.counters.totals()["bugs"] == 2
    rank.side.begin_step(later)
    assert rank.save([[1, 2]], keys) == set()
    assert find([rank.specs], 2)[0].hit_blocks == 2
    assert find([[spec()]])[0].hit_blocks == 0
    rank.side.close()


def test_store_thread_survives_a_client_that_cannot_close(
    cluster: LocalCluster, find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(client: KVClient) -> None:
        close(client)
        raise OSError("closed twice")

    close = KVClient.close
    rank = Rank(cluster, [spec()], seed=8)
    with monkeypatch.context() as patch:
        patch.setattr(KVClient, "close", fail)
        rank.side.begin_step(StepPlan(epoch=1, weights_epoch="two"))
        end_s = time.monotonic() + WAIT_S
        while rank.side.counters.totals().get("bugs") != 1:
            assert time.monotonic() < end_s, "the clients were closed"
            time.sleep(0.01)
    _, keys = find([[replace(spec(), weights_epoch="two")]])
    assert rank.save([[1, 2]], keys) == set()
    rank.side.close()


def test_load_that_cannot_begin_is_computed(cluster: LocalCluster, find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    rank = Rank(cluster, [spec()], seed=8)
    _, keys = find([[spec()]])
    rank.save([[1, 2]], keys)
    found, _ = find([[spec()]], 2)
    monkeypatch.setattr(KVClient, "start_load", fail)
    assert rank.load(found, [[5, 6]]) == LoadCompletions({"r"}, {"r"}, {5, 6})
    rank.side.close()


def test_lookup_that_waits_too_long_finds_nothing(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    def slow(_client: KVClient, keys: Sequence[BlockKey], *_: object) -> Lookup:
        assert answers.wait(WAIT_S)
        return Lookup(keys)

    monkeypatch.setattr(KVClient, "lookup", slow)
    counters = ConnectorCounters()
    finder = BackgroundLookup(HookOptions(metadata=cluster.metadata_address, lookup_deadline_s=0.1), [[spec()]], counters)
    futures = [finder.begin(RequestKeys(finder.chain, {}), TOKENS, 8) for _ in range(8)]
    time.sleep(0.2)
    answers.set()
    assert all(future.result(WAIT_S).hit_blocks == 0 for future in futures)
    assert counters.totals()["lookups_late"] == 6, "two threads look up"
    answers.clear()
    futures = [finder.begin(RequestKeys(finder.chain, {}), TOKENS, 8) for _ in range(8)]
    threading.Timer(0.2, answers.set).start()
    finder.close()
    assert all(future.done() for future in futures)


def test_lookup_without_a_thread_is_a_miss_and_never_runs(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    counters = ConnectorCounters()
    finder = BackgroundLookup(HookOptions(metadata=cluster.metadata_address), [[spec(0)], [spec(1)]], counters)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        assert finder.begin(RequestKeys(finder.chain, {}), TOKENS, 8).result(0).hit_blocks == 0
    assert finder.begin(RequestKeys(finder.chain, {}), TOKENS, 8).result(WAIT_S).hit_blocks == 0
    finder.close()
    totals = counters.totals()
    assert (totals["lookup_failures"], totals["lookups"]) == (1, 1)
    assert finder.begin(RequestKeys(finder.chain, {}), TOKENS, 8).result(0).hit_blocks == 0


def test_pages_reclaimed_are_awaited_once_per_step(cluster: LocalCluster, find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(cluster, [spec()], seed=9)
    waits: list[float] = []
    monkeypatch.setattr(StoreWorker, "drain", lambda _, timeout_s: bool(waits.append(timeout_s)))
    plan = StepPlan(cancel_stores=True)
    rank.side.begin_step(plan)
    rank.side.begin_loads(plan)
    rank.side.end_forward(plan)
    assert waits == [worker_side.RESET_GRACE_S]
    rank.side.close()


def test_changed_weights_change_namespace(cluster: LocalCluster, find: Find) -> None:
    rank = Rank(cluster, [spec()], seed=5)
    _, keys = find([[spec()]])
    rank.save([[1, 2]], keys)
    old = list(rank.side.clients)
    rank.side.begin_step(StepPlan(epoch=1, weights_epoch="two"))
    assert rank.side.clients[0].spec.weights_epoch == "two"
    later = replace(spec(), weights_epoch="two")
    assert find([[later]])[0].hit_blocks == 0
    assert find([[spec()]], 2)[0].hit_blocks == 2
    end_s = time.monotonic() + WAIT_S
    while old[0].stats()["client_session_open"]:
        assert time.monotonic() < end_s, "clients that nobody needs are closed"
        time.sleep(0.01)
    rank.side.close()


def test_weights_other_than_those_of_the_epoch_are_not_stored(cluster: LocalCluster, find: Find) -> None:
    rank = Rank(cluster, [spec()], seed=5)
    _, keys = find([[spec()]])
    job = StoreJob(1, "r", 0, None, list(keys.upto(TOKENS, 2)), [[1, 2]])
    weights = ["", "other", "", "other"]
    rank.side.digest_weights = lambda: weights[check]
    for check, plan, failed in (
        (1, StepPlan(weights_check=1), {1}),
        (2, StepPlan(weights_check=2), set()),
        (3, StepPlan(weights_check=3), {1}),
        (3, StepPlan(epoch=1, weights_epoch="two"), set()),
    ):
        plan.chain, plan.stores = rank.chain, [job]
        rank.side.begin_step(plan)
        rank.side.end_forward(plan)
        assert rank.until_stored(1) == failed, check
    rank.side.close()


def test_hit_requires_shards_of_both_ranks(cluster: LocalCluster, find: Find) -> None:
    """Each rank is a separate process, as with tensor parallelism. Ranks have different heads, so different bytes."""
    shards = [spec(0, rank, 2) for rank in range(2)]

    def run(rank: int, blocks: int) -> None:
        place = [cluster.metadata_address, cluster.node("n").local_socket, str(cluster.base_dir), str(rank), str(blocks)]
        done = subprocess.run([sys.executable, __file__, *place], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == []

    run(0, 6)
    assert find([shards])[0].hit_blocks == 0, "the other rank's part is not there"
    run(1, 4)
    found, _ = find([shards], 4)
    assert found.hit_blocks == 4, "as far as both have it"
    for rank, one in enumerate(shards):
        reader = Rank(cluster, [one])
        assert reader.load(found, [[9, 8, 7, 6]]) == LoadCompletions({"r"})
        writer = torch.rand(LAYERS, PAGES, *PAGE, generator=torch.Generator().manual_seed(10 + rank))
        assert torch.equal(reader.caches[0][:, [9, 8, 7, 6]], writer[:, :4])
        reader.side.close()


@pytest.mark.parametrize("whole", [True, False])
def test_load_failed_in_one_rank_stores_nothing_in_others(tmp_path: Path, whole: bool) -> None:
    """A layer-wise load fails in one rank. Ranks exchange hidden states, so the results of the other rank are wrong, too."""
    shards = [spec(0, rank, 2) for rank in range(2)]
    tokens, pages = TOKENS[: 5 * BLOCK], [9, 8, 7, 6, 5]
    with LocalCluster([NodeSpec(name, dram_bytes=16 << 20) for name in "ab"], tmp_path) as cluster:
        ranks = [Rank(cluster, [one], seed=rank, node=node) for rank, (one, node) in enumerate(zip(shards, "ab", strict=True))]
        finder = BackgroundLookup(
            HookOptions(metadata=cluster.metadata_address, lookup_deadline_s=5.0), [shards], ConnectorCounters()
        )
        keys = RequestKeys(finder.chain, {})
        for rank in ranks:
            assert rank.save([[1, 2, 3]], keys) == set()
        decides = SchedulerConnector(ConnectorOptions(load_mode="layerwise"), GroupBlocks([BLOCK]), workers=2)
        decides.connect(finder, 0, "")
        decides.bind_pool(Pool(PAGES))
        one = Request("r", tokens)
        end_s = time.monotonic() + WAIT_S
        while decides.get_num_new_matched_tokens(one, 0) != (3 * BLOCK, False):
            assert time.monotonic() < end_s
            decides.on_new_request(one)
            time.sleep(0.02)
        decides.update_state_after_alloc(one, [pages], 3 * BLOCK)
        if not whole:
            cluster.kill("a")
        one.num_computed_tokens = 3 * BLOCK

        def step(scheduled: dict[str, int]) -> None:
            plan = decides.build_step_plan(scheduled, {}, lambda _: [pages])
            missing: set[int] = set()
            for rank in ranks:
                rank.side.begin_loads(plan)
                for name in NAMES:
                    rank.side.wait_layer(name)
                rank.side.end_forward(plan)
            for rank in ranks:
                missing |= rank.side.take_completions(plan, set()).missing
                if (answer := rank.side.take_output()) is not None:
                    decides.on_worker_output(answer)
            if missing:
                assert not whole
                decides.on_loads_failed(missing, set())

        step({"r": 2 * BLOCK})
        while decides.has_pins:
            assert time.monotonic() < end_s
            step({})
        stored = ranks[1].side.counters.totals()["stores"]
        held = (
            ranks[1]
            .side.clients[0]
            .load(
                NamespaceKeyMask(ranks[1].chain, shards[1].namespace).keys(keys.upto(tokens, 5)),
                torch.zeros(5, LAYERS, PAGE_BYTES, dtype=torch.uint8).numpy(),
            )
        )
        assert (stored, held.hit_blocks) == ((2, 5) if whole else (1, 3))
        for rank in ranks:
            rank.side.close()
        decides.close()


class _Elsewhere:
    """The part of a cluster that ``Rank`` uses, built from addresses."""

    def __init__(self, metadata: str, node: str) -> None:
        self.metadata_address = metadata
        self.local_socket = node

    def node(self, _: str) -> _Elsewhere:
        return self


def _rank_process(metadata: str, node: str, rank: int, blocks: int) -> None:
    from kvclient import KeyChain

    shard = spec(0, rank, 2)
    worker = Rank(_Elsewhere(metadata, node), [shard], seed=10 + rank)  # type: ignore[arg-type]
    keys = RequestKeys(KeyChain(replace(shard, shard_rank=0)), {})
    print(json.dumps(sorted(worker.save([list(range(blocks))], keys))))
    worker.side.close()


if __name__ == "__main__":
    _rank_process(sys.argv[1], sys.argv[2], int(sys.argv[4]), int(sys.argv[5]))
