"""Chunks of vLLM's host memory in the store, without vLLM: chains, heads, and missing chunks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from client_fakes import FakeNode
from hypothesis import given
from hypothesis import strategies as st

from kvclient import CacheSpec, KVClient
from kvclient.call.request_hint import RequestHint
from kvclient.engines.vllm.tier.chunks import GROUP_BYTES, Chunk, ChunkStore, hide_split_chunks, runs_of
from kvclient.engines.vllm.tier.counters import TierCounters
from kvclient.engines.vllm.tier.jobs import ChunkJobs, EndedJob, JobPart
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from support.node_stats import node_counter
from support.wait import wait_until

BYTES = 4096
DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster([NodeSpec("n", dram_bytes=32 << 20)]) as cluster:
        yield cluster


@pytest.fixture
def opened(cluster: LocalCluster) -> Iterator[list[ChunkStore]]:
    stores: list[ChunkStore] = []
    for group in range(2):
        spec = CacheSpec("m", block_tokens=32, layers=1, layer_block_bytes=BYTES, layout=f"group={group}")
        stores.append(ChunkStore(KVClient.connect(cluster.metadata_address, spec, node=cluster.node("n").local_socket)))
    yield stores
    for store in stores:
        store.close()


@pytest.fixture
def spec() -> CacheSpec:
    """Of clients of fakes."""
    return CacheSpec("m", block_tokens=32, layers=1, layer_block_bytes=BYTES)


def end_s() -> float:
    return time.monotonic() + DEADLINE_S


def hashes(seed: int, count: int) -> list[bytes]:
    draw = np.random.default_rng(seed)
    return [draw.bytes(32) for _ in range(count)]


def chunks(names: Sequence[bytes], positions: Sequence[int | None], seed: int = 0) -> list[Chunk]:
    """Chunks with rows of random bytes; seed 0: zeros."""
    draw = np.random.default_rng(seed)
    rows = [np.frombuffer(draw.bytes(BYTES), np.uint8).copy() if seed else np.zeros(BYTES, np.uint8) for _ in names]
    return [Chunk(name + bytes(4), name, position, row) for name, position, row in zip(names, positions, rows, strict=True)]


def held(store: ChunkStore, names: Sequence[bytes]) -> list[bool]:
    """Which heads the index shows."""
    keys = [name + bytes(GROUP_BYTES) for name in names]
    found, _, _ = store.find(dict.fromkeys(keys), [])
    return [found[key] for key in keys]


def test_chunks_of_a_chain_are_loaded_from_any_position(opened: list[ChunkStore]) -> None:
    store, chain = opened[0], hashes(1, 12)
    written = chunks(chain, range(12), seed=5)
    assert store.store(written[4:][::-1] + written[:4], chain, end_s())[1] == 12 * BYTES
    wait_until(lambda: store.find_chain(chain).hit_blocks == 12, "the index shows the chain")
    read = chunks(chain[3:9], range(3, 9))
    arrived, sizes, _ = store.load(read, chain[:9], None, end_s())
    assert (arrived, sizes.total()) == ([chunk.key for chunk in read], 6 * BYTES)
    assert all(np.array_equal(chunk.row, other.row) for chunk, other in zip(read, written[3:9], strict=True))
    assert opened[1].find_chain(chain).hit_blocks == 0, "groups do not share"


def test_hint_of_a_request_protects_its_chunks(opened: list[ChunkStore], cluster: LocalCluster) -> None:
    def counter(result: str) -> int:
        return node_counter(cluster, "n", f"node_hinted_{result}_blocks_total")

    store, chain = opened[0], hashes(7, 12)
    store.store(chunks(chain, range(12), seed=5), chain, end_s())
    store.give_hint(RequestHint("chat", 60.0), chain)
    wait_until(lambda: counter("protected") == 12)
    store.give_hint(RequestHint("chat", end=True), chain)
    wait_until(lambda: counter("dropped") == 12)


@pytest.mark.parametrize("position", [0, None])
def test_slow_lookup_leaves_less_time_to_its_load(position: int | None, cluster: LocalCluster, spec: CacheSpec) -> None:
    """Else one load of the tier may take twice as long as its deadline says."""
    deadlines_s: list[float] = []

    class SlowIndex(KVClient):
        def lookup(self, keys: Any, **how: Any) -> Any:
            time.sleep(0.5)
            return super().lookup(keys, **how)

        def lookup_heads(self, keys: Any, **how: Any) -> Any:
            time.sleep(0.5)
            return super().lookup_heads(keys, **how)

        def load(self, what: Any, buffer: object, *, deadline_s: float | None = None, **how: Any) -> Any:
            deadlines_s.append(deadline_s or DEADLINE_S)
            return super().load(what, buffer, deadline_s=deadline_s, **how)

    store = ChunkStore(SlowIndex.connect(cluster.metadata_address, spec, node=cluster.node("n").local_socket))
    name = hashes(11, 1)
    for left_s, longest_s in ((20.0, 19.5), (0.3, 0.01)):
        arrived, _, why = store.load(chunks(name, [position]), name, None, time.monotonic() + left_s)
        assert (arrived, bool(why)) == ([], True)
        assert deadlines_s.pop() <= longest_s
    store.close()


def test_chunks_missing_are_not_reported_as_loaded(opened: list[ChunkStore]) -> None:
    store, chain = opened[0], hashes(2, 6)
    store.store(chunks(chain[:4], range(4), seed=6), chain, end_s())
    wait_until(lambda: store.find_chain(chain).hit_blocks == 4, "the index shows the chain")
    read = chunks(chain[2:], range(2, 6))
    arrived, sizes, _ = store.load(read, chain, None, end_s())
    assert (arrived, sizes.total()) == ([chunk.key for chunk in read[:2]], 2 * BYTES)
    assert not any(chunk.row.any() for chunk in read[2:])


def test_chunks_lookup_of_another_chain_is_not_used(opened: list[ChunkStore]) -> None:
    """A lookup may be older than the weights epoch."""
    store, chain, other = opened[0], hashes(4, 3), hashes(5, 3)
    for one, seed in ((chain, 8), (other, 9)):
        store.store(chunks(one, range(3), seed=seed), one, end_s())
        wait_until(lambda one=one: store.find_chain(one).hit_blocks == 3, "the index shows the chain")
    read = chunks(chain, range(3))
    arrived, *_ = store.load(read, chain, store.find_chain(other), end_s())
    assert arrived == [chunk.key for chunk in read]
    assert all(np.array_equal(one.row, right.row) for one, right in zip(read, chunks(chain, range(3), seed=8), strict=True))
    assert store.load(read, other, None, end_s()) == ([], {}, "chunks of another prompt"), (
        "the request has other hashes than the job"
    )


def test_chunks_after_the_deadline_are_not_touched(opened: list[ChunkStore]) -> None:
    store, chain = opened[0], hashes(6, 2)
    assert store.store(chunks(chain, range(2), seed=3), chain, time.monotonic() - 1) == ([], 0, "")
    assert store.load(chunks(chain, range(2)), chain, None, time.monotonic() - 1) == ([], {}, "")


def test_heads_with_holes_are_found_and_loaded(opened: list[ChunkStore]) -> None:
    store, names = opened[1], hashes(3, 5)
    written = chunks([names[1], names[4]], [None, None], seed=7)
    assert store.store(written, [], end_s())[0] == [chunk.key for chunk in written]
    wait_until(lambda: held(store, names) == [False, True, False, False, True], "the index shows the heads")
    read = chunks(names, [None] * 5)
    arrived, *_ = store.load(read, [], None, end_s())
    assert arrived == [read[1].key, read[4].key]
    assert np.array_equal(read[4].row, written[1].row)


@given(st.lists(st.booleans(), max_size=24), st.integers(1, 4), st.integers(0, 3))
def test_chunks_are_stored_at_their_own_places(held: list[bool], per_chunk: int, first: int) -> None:
    """vLLM writes the pages of a job one after another, from the place of the first."""
    before = [at + 1 if there else 0 for at, there in enumerate(held)]
    pages = list(before)
    hidden = hide_split_chunks(pages, first, per_chunk)
    assert hidden == sum(one != two for one, two in zip(before, pages, strict=True))
    range_ = range(first * per_chunk, len(pages) - per_chunk + 1, per_chunk)
    stored = [pages[at : at + per_chunk] for at in range_ if pages[at + per_chunk - 1]]
    places = [at for chunk in stored for at, page in zip(range(chunk[-1] - per_chunk, chunk[-1]), chunk, strict=True) if page]
    job = [page for chunk in stored for page in chunk if page]
    start = places[0] % per_chunk if places else 0
    chunks_of_job = [chunk[-1] // per_chunk for chunk in stored]
    written = [(chunks_of_job[(start + at) // per_chunk] - 1) * per_chunk + (start + at) % per_chunk for at in range(len(job))]
    assert written == [page - 1 for page in job]
    whole = sum(all(before[at : at + per_chunk]) for at in range_)
    assert len(stored) >= whole, "a whole chunk is stored"


@given(st.lists(st.none() | st.integers(0, 30), max_size=30))
def test_runs_have_consecutive_positions(positions: list[int | None]) -> None:
    kept = list(dict.fromkeys(positions)) if None not in positions else [*dict.fromkeys(positions), None]
    given_chunks = chunks([bytes([at]) * 32 for at in range(len(kept))], kept)
    runs = runs_of(given_chunks)
    assert sorted(chunk.key for run in runs for chunk in run) == sorted(chunk.key for chunk in given_chunks)
    for run in runs:
        found = [chunk.position for chunk in run]
        assert set(found) == {None} or found == list(range(found[0] or 0, (found[0] or 0) + len(found)))


def test_chunks_not_stored_or_loaded_say_why() -> None:
    spec = CacheSpec("m", block_tokens=32, layers=1, layer_block_bytes=BYTES, layout="why")
    with LocalCluster([NodeSpec("gone", dram_bytes=16 << 20)]) as other:
        store = ChunkStore(KVClient.connect(other.metadata_address, spec, node=other.node("gone").local_socket))
        chain = hashes(20, 2)
        assert store.load(chunks(chain, range(2)), chain, None, end_s())[2] == "2 MISS"
        assert store.store(chunks(chain, range(2), seed=1), chain, end_s())[2] == ""
        other.kill("gone")
        why = store.store(chunks(hashes(21, 2), range(2), seed=1), hashes(21, 2), end_s())[2]
        assert why == "2 SKIPPED: no session with the local node at the moment"
        store.close()


@pytest.mark.parametrize("loads", [True, False])
def test_job_under_way_ends_when_its_store_closes(
    loads: bool, near: FakeNode, make_client: Callable[..., KVClient], caplog: pytest.LogCaptureFixture
) -> None:
    def hang(_request: object, context: grpc.ServicerContext) -> Iterator[Any]:
        ended = threading.Event()
        if context.add_callback(ended.set):
            assert ended.wait(DEADLINE_S)
        yield from ()

    resume = threading.Event()

    def hang_prepare(_request: object) -> None:
        assert resume.wait(DEADLINE_S)

    near.load_script, near.prepare_script = hang, hang_prepare
    store, names = ChunkStore(make_client(near)), hashes(9, 2)
    wanted = chunks(names, range(2))
    jobs = ChunkJobs(1, TierCounters(), lambda: None)
    jobs.submit(EndedJob(1, loads, tuple(chunk.key for chunk in wanted)), [JobPart(store, wanted, names, None)], DEADLINE_S)
    near.wait_called("Load" if loads else "Prepare")
    store.close()
    jobs.shutdown()
    resume.set()
    assert [job.arrived for job in jobs.ended()] == [()]
    assert any(cause in caplog.text for cause in ("cancelled by the caller", "the channel is closed")), "not at its deadline"
