"""Which described engines share chunks in the store, and that all others find nothing of each other."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from tier_namespaces import HEAD_SIZE, HEADS, Described

from kvclient import CacheSpec, KVClient
from kvclient.engines.vllm.tier.chunks import Chunk, ChunkStore
from kvclient.engines.vllm.tier.counters import TierCounters
from kvclient.engines.vllm.tier.requests import TierRequests
from kvclient.engines.vllm.versions import vllm_imports
from kvstore.testing.connector.driver import StoreAddress
from kvstore.testing.tiny_models import Family, TinyModel, make_model

DEADLINE_S = 10.0
CHANGES: dict[str, Callable[[Described], Described]] = {
    "weights": lambda one: replace(one, weights="w1"),
    "dtype": lambda one: one.changed(dtype="bfloat16"),
    "quantized KV": lambda one: one.changed(kv_cache_dtype="fp8"),
    "block": lambda one: one.changed(block_size=64),
    "configuration": lambda one: one.changed(hf_overrides='{"rms_norm_eps": 0.5}'),
    "hash": lambda one: one.changed(prefix_caching_hash_algo="sha256_cbor"),
    "hash seed": lambda one: replace(one, hash_seed="7"),
    "order in pages": lambda one: replace(one, heads_first=not one.heads_first),
    "windows": lambda one: replace(one, window=64),
    "chunk": lambda one: replace(one, offloading=(("blocks_per_chunk", 2),)),
    "layout": lambda one: replace(one, canonical=not one.canonical),
    "tensor parallelism": lambda one: replace(one, ranks=2 if one.ranks == 1 else 1, canonical=False),
    "unnamed weights": lambda one: replace(one, ranks=2 if one.ranks == 1 else 1, named=False),
    "tenant": lambda one: replace(one, hook=(("tenant", "t"),)),
    "salt": lambda one: replace(one, hook=(("salt", "s"),)),
}
"""Each makes an engine that must not share KV with the one before."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose configuration the engines read."""
    shape = TinyModel(Family.LLAMA, hidden=128, heads=2 * HEADS, kv_heads=HEADS, head_dim=HEAD_SIZE, max_tokens=4096)
    return make_model(tmp_path_factory.mktemp("namespaces") / "llama", shape)


@cache
def specs_of(engine: Described, model: Path) -> dict[int, CacheSpec]:
    return engine.specs(model)


def pair(seed: int) -> tuple[Described, Described, list[str]]:
    """Two engines that must not share KV, and how they differ."""
    dice = random.Random(seed)
    first = Described(ranks=dice.choice([1, 2]), canonical=dice.random() < 0.5)
    for name in dice.sample(sorted(CHANGES), dice.randint(0, 2)):  # what both have in common
        first = CHANGES[name](first)
    second, names = first, []
    while second.like == first.like:  # some changes have no effect, or undo each other
        second, names = first, dice.sample(sorted(CHANGES), dice.randint(1, 3))
        for name in names:
            second = CHANGES[name](second)
    return first, second, names


def held(storing: CacheSpec, finding: CacheSpec, store: StoreAddress, seed: int) -> tuple[int, int]:
    """Store chunks in one namespace; return how many of them that one and another one find."""
    hashes = [sha256(bytes([seed, at])).digest() for at in range(3)]
    rows = np.ones((3, storing.layer_block_bytes), np.uint8)
    chunks = [Chunk(one + bytes(4), one, at, row) for at, (one, row) in enumerate(zip(hashes, rows, strict=True))]
    found = []
    with KVClient.connect(store.metadata, storing, node=store.node) as client:
        kept, *_ = ChunkStore(client).store(chunks, hashes, time.monotonic() + DEADLINE_S)
        assert len(kept) == len(chunks)
        for spec in (storing, finding):
            with KVClient.connect(store.metadata, spec, node=store.node) as other:
                end_s = time.monotonic() + (DEADLINE_S if spec is storing else 0)
                tier = ChunkStore(other)
                while (hits := tier.find_chain(hashes).hit_blocks) < len(hashes) and time.monotonic() < end_s:
                    time.sleep(0.005)
                found.append(hits)
    return found[0], found[1]


@pytest.mark.parametrize("seed", range(50))
def test_tier_incompatible_engines_find_nothing(seed: int, model: Path, store: StoreAddress) -> None:
    first, second, names = pair(seed)
    one, other = specs_of(first, model), specs_of(second, model)
    assert not {spec.namespace for spec in one.values()} & {spec.namespace for spec in other.values()}, names
    for storing in one.values():
        for finding in other.values():
            assert held(storing, finding, store, seed) == (3, 0), names


@pytest.mark.parametrize("window", [0, 64])
@pytest.mark.parametrize("heads_first", [True, False])
def test_tier_canonical_namespaces_ignore_ranks(window: int, heads_first: bool, model: Path) -> None:
    engines = [Described(ranks=ranks, canonical=True, window=window, heads_first=heads_first) for ranks in (1, 2, 4, 8)]
    one, *others = [specs_of(engine, model) for engine in engines]
    assert all(other == one for other in others)
    assert all("canonical=v1-hnd" in spec.layout for spec in one.values())
    assert len(one) == (2 if window else 1)


def test_tier_direct_namespaces_depend_on_ranks(model: Path) -> None:
    spaces = [specs_of(Described(ranks=ranks), model)[0].namespace for ranks in (1, 2, 4)]
    assert len(set(spaces)) == len(spaces)


def test_tier_canonical_weights_without_name_depend_on_ranks(model: Path) -> None:
    known, unknown = (Described(canonical=True, named=named) for named in (True, False))
    epochs = {specs_of(replace(engine, ranks=ranks), model)[0].weights_epoch for engine in (known, unknown) for ranks in (1, 2)}
    assert len(epochs) == 3, "one name, and one digest for each number of ranks"


def scheduler_with(request: Any, counters: TierCounters, **how: Any) -> Any:
    """vLLM's scheduler of offloading, as the tier uses it, with a request. It has a window and chunks of four pages."""
    with vllm_imports():
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as offloading

        from kvclient.engines.vllm.tier.connector import TierScheduler
    given: dict[str, Any] = {"tokens_per_block": 16, "tokens_per_chunk": 64, "hashes_per_chunk": 4, "kv_event_group_spec": None}
    manager = SimpleNamespace(reachable_block_mask=lambda **_: None)
    group = offloading.GroupOffloadConfig(0, **given, sliding_window_size_in_chunks=1, kv_cache_spec=None, manager_cls=manager)
    made: Any = object.__new__(offloading.OffloadingConnectorScheduler)
    vars(made).update(
        config=offloading.SchedulerOffloadConfig((group,), 4, 16, 1, offload_prompt_only=False, supports_partial_tail=False),
        manager=SimpleNamespace(
            on_new_request=lambda _: None,
            on_schedule_end=lambda _: None,
            prepare_store=lambda keys, _: SimpleNamespace(keys_to_store=list(keys), store_spec=None),
        ),
        _req_status={},
        _sliding_window_groups=(0,),
        _jobs={},
        _job_counter=0,
        _block_id_to_pending_jobs={},
        _current_batch_load_jobs={},
        _current_batch_jobs_to_flush=set(),
        _current_batch_allocated_block_ids=set(),
        _connector_stats=SimpleNamespace(increase_counter=lambda _: None),
        _events_tracker=SimpleNamespace(record_store=lambda *_: None),
    )
    scheduler = TierScheduler.of(made, counters, **how)
    scheduler.on_new_request(request)
    return scheduler


def long_request(*, resumable: bool = False) -> Any:
    """A request with 12 full pages, of which 8 are computed."""
    with vllm_imports():
        from vllm.v1.request import RequestStatus
    return SimpleNamespace(
        request_id="r",
        status=RequestStatus.RUNNING,
        is_finished=lambda: False,
        block_hashes=[bytes([at]) * 32 for at in range(12)],
        num_computed_tokens=128,
        num_tokens=200,
        num_prompt_tokens=200,
        resumable=resumable,
        kv_transfer_params=None,
        kv_hints=None,
    )


def stored_pages(scheduler: Any, *, new: list[int] | None = None, given_away: tuple[int, ...] = ()) -> list[list[int]]:
    """The pages that are stored after a step, by job. ``new``: of a request that begins."""
    scheduled: Any = SimpleNamespace(
        scheduled_new_reqs=[] if new is None else [SimpleNamespace(req_id="r", block_ids=(new,))],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set()),
        kv_cache_block_copies=[SimpleNamespace(dst_block_id=page) for page in given_away],
        preempted_req_ids=None,
        kv_connector_block_state=None,
        num_scheduled_tokens={"r": 16},
        finished_req_ids=(),
    )
    plan = scheduler.build_connector_meta(scheduled)
    return [job.src_spec.block_ids.tolist() for job in plan.store_jobs.values()]


def test_tier_chunk_that_lost_pages_is_not_stored() -> None:
    """Two chunks wait since host memory was full, and vLLM gave away two pages of the second one, which the window has passed."""
    counters = TierCounters()
    scheduler = scheduler_with(long_request(), counters)
    store, scheduler.manager.prepare_store = scheduler.manager.prepare_store, lambda *_: None
    assert not stored_pages(scheduler, new=[5, 6, 7, 8, 9, 10, 11, 12])
    scheduler.manager.prepare_store = store
    assert stored_pages(scheduler, given_away=(9, 10)) == [[5, 6, 7, 8]]
    assert counters.counts()["store_missing_chunks"] == 1


@pytest.mark.parametrize(("streamed", "keeps_drafts", "stores"), [(True, True, 0), (True, False, 1), (False, True, 1)])
def test_tier_streamed_input_with_drafts_is_not_stored(streamed: bool, keeps_drafts: bool, stores: int) -> None:
    """Neither in host memory, from which other requests go on, nor in the store."""
    request = long_request(resumable=streamed)
    scheduler = scheduler_with(request, TierCounters(), keeps_drafts=keeps_drafts)
    assert len(stored_pages(scheduler, new=[5, 6, 7, 8, 9, 10, 11, 12])) == stores
    assert TierRequests().add(request, keeps_drafts=keeps_drafts) is bool(stores)


def test_tier_without_a_thread_to_reconnect_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reset, between two steps of a running engine."""
    with vllm_imports():
        from kvclient.engines.vllm.tier.connector import KVStoreOffloadingConnector
    from kvclient.engines.vllm.tier.options import TierOptions

    class Weights:
        is_open, name = False, "w1"

        def end_checks(self) -> None:
            self.is_open = True

    counters, weights = TierCounters(), Weights()
    connector: Any = object.__new__(KVStoreOffloadingConnector)
    vars(connector).update(
        connector_scheduler=SimpleNamespace(update_connector_output=lambda _: None),
        _weights=weights,
        _tier=SimpleNamespace(counters=counters),
        _specs={0: CacheSpec(model="m", block_tokens=4, layers=1, layer_block_bytes=64)},
        _options=TierOptions.from_extra_config({"kvstore": {"metadata": "127.0.0.1:1"}}),
    )

    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    connector.update_connector_output(SimpleNamespace(kv_connector_worker_meta=None))
    assert weights.is_open
