"""The decisions of the vLLM connector, without vLLM: matches, loads, stores, pins and failures, with a simple pool and store."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_requests import BLOCK, SPEC, Pool, Request, request
from hypothesis import given
from hypothesis import strategies as st

from kvclient import BlockKey, KeyChain, Lookup
from kvclient.engines.options import HookOptions
from kvclient.engines.vllm.identity.keys import RequestKeys, request_extras
from kvclient.engines.vllm.identity.kv_groups import GroupBlocks
from kvclient.engines.vllm.identity.weights_check import combined_digest
from kvclient.engines.vllm.options import ConnectorOptions
from kvclient.engines.vllm.plan import StepPlan, StoreJob, WorkerOutput
from kvclient.engines.vllm.scheduler.pinned_pages import FREES_WAIT_S, PinnedPages
from kvclient.engines.vllm.scheduler.prefix_lookup import PrefixMatch
from kvclient.engines.vllm.scheduler.scheduler_connector import SchedulerConnector


class Shelf:
    """A store with a fixed number of hits, which answers lookups when the test lets it."""

    def __init__(self, hits: int = 0, groups: int = 1, *, at_once: bool = True) -> None:
        self.chain = KeyChain(SPEC)
        self.hits = hits
        self.groups = groups
        self.at_once = at_once
        self.open: list[tuple[Future[PrefixMatch], RequestKeys, Sequence[int], int]] = []
        self.closed = False

    def begin(self, keys: RequestKeys, tokens: Sequence[int], blocks: int, query: object = None) -> Future[PrefixMatch]:
        self.open.append((Future(), keys, tokens, blocks))
        future = self.open[-1][0]
        if self.at_once:
            self.answer()
        return future

    def answer(self) -> None:
        for future, keys, tokens, blocks in self.open:
            wanted = keys.upto(tokens, blocks)
            hit = min(self.hits, len(wanted))
            lookup = Lookup(wanted, hit)
            future.set_result(PrefixMatch(hit, [{b"n" * 16: lookup} for _ in range(self.groups)]))
        self.open.clear()

    def close(self) -> None:
        self.closed = True


class Observed:
    """Notes which blocks were stored and found."""

    def __init__(self) -> None:
        self.stored_blocks: list[tuple[int, int]] = []
        self.found_blocks: list[int] = []

    def planned(self, _request: Any, first: int, keys: Sequence[BlockKey]) -> tuple[int, int]:
        return first, first + len(keys)

    def stored(self, plan: tuple[int, int]) -> None:
        self.stored_blocks.append(plan)

    def found(self, _request: Any, keys: Sequence[BlockKey]) -> None:
        self.found_blocks.append(len(keys))


def side(shelf: Shelf, pool: Pool | None = None, observer: Observed | None = None, **options: Any) -> SchedulerConnector:
    made = SchedulerConnector(
        ConnectorOptions(**{"lookup_wait_ms": 0.0, **options}), GroupBlocks([BLOCK] * shelf.groups), observer=observer
    )
    made.connect(shelf, 0, "")  # type: ignore[arg-type]
    if pool is not None:
        made.bind_pool(pool)
    return made


def plan(made: SchedulerConnector, one: Request, tokens: int, ids: list[list[int]], drafts: int = 0) -> StepPlan:
    found = made.build_step_plan({one.request_id: tokens}, {one.request_id: [0] * drafts}, lambda _: ids)
    one.num_computed_tokens += tokens - drafts
    return found


def test_request_with_unnamed_media_is_not_shared() -> None:
    made = side(Shelf(hits=3), Pool(9))
    made.media_named = False
    one = request(17)
    one.mm_features = [object()]
    made.on_new_request(one)
    assert made.get_num_new_matched_tokens(one, 0) == (0, False)
    assert plan(made, one, 17, [[1, 2, 3, 4, 5]]).stores == []
    assert made.counters.totals()["media_unnamed"] == 1


@pytest.mark.parametrize(("streamed", "keeps_drafts", "stores"), [(True, True, 0), (True, False, 1), (False, True, 1)])
def test_streamed_input_with_drafts_is_not_stored(streamed: bool, keeps_drafts: bool, stores: int) -> None:
    made = side(Shelf(), Pool(9))
    made.keeps_drafts = keeps_drafts
    one = request(17)
    one.resumable = streamed
    made.on_new_request(one)
    made.get_num_new_matched_tokens(one, 0)
    assert len(plan(made, one, 17, [[1, 2, 3, 4, 5]]).stores) == stores


def test_hit_is_offered_and_planned_once() -> None:
    observed = Observed()
    made = side(Shelf(hits=3), None, observed)
    one = request(17)
    made.on_new_request(one)
    assert made.get_num_new_matched_tokens(one, 0) == (12, True)
    assert observed.found_blocks == [3]
    assert made.get_num_new_matched_tokens(one, 0) == (12, True), "asked again, for the pool was full"
    assert made.get_num_new_matched_tokens(one, 4) == (8, True), "the engine has got the first block itself"
    made.update_state_after_alloc(one, [[7, 8, 9, 10, 11]], 8)
    first = made.build_step_plan({}, {}, lambda _: None)
    (load,) = first.loads
    assert (load.request_id, load.layerwise) == ("r", False)
    (part,) = load.groups
    assert (part.first_page, part.block_ids) == (1, [8, 9])
    assert [lookup.depth for lookup in part.lookups.values()] == [1]
    assert made.build_step_plan({}, {}, lambda _: None).loads == []


def test_hit_leaves_one_token_to_compute() -> None:
    made = side(Shelf(hits=100))
    one = request(12)
    made.on_new_request(one)
    assert made.get_num_new_matched_tokens(one, 0) == (8, True)
    two = request(3, "s")
    made.on_new_request(two)
    assert made.get_num_new_matched_tokens(two, 0) == (0, False)


def test_match_is_none_until_lookup_is_answered() -> None:
    shelf = Shelf(hits=2, at_once=False)
    made = side(shelf)
    one = request(17)
    made.on_new_request(one)
    assert made.get_num_new_matched_tokens(one, 0) == (None, False)
    assert made.get_num_new_matched_tokens(one, 0) == (None, False)
    shelf.answer()
    assert made.get_num_new_matched_tokens(one, 0) == (8, True)
    assert made.counters.totals()["lookups_asked_again"] == 2


def test_load_skips_pages_before_window() -> None:
    made = side(Shelf(hits=4, groups=2))
    one = request(20)
    made.on_new_request(one)
    made.get_num_new_matched_tokens(one, 0)
    made.update_state_after_alloc(one, [[1, 2, 3, 4, 5], [0, 0, 0, 6, 7]], 16)
    full, window = made.build_step_plan({}, {}, lambda _: None).loads[0].groups
    assert (full.first_page, full.block_ids) == (0, [1, 2, 3, 4])
    assert (window.group, window.first_page, window.block_ids) == (1, 3, [6])


@pytest.mark.parametrize("by_pages", [True, False])
def test_load_failed_is_not_offered_again(by_pages: bool) -> None:
    made = side(Shelf(hits=3), Pool(20))
    one = request(17)
    made.on_new_request(one)
    made.get_num_new_matched_tokens(one, 0)
    made.update_state_after_alloc(one, [[7, 8, 9, 10, 11]], 12)
    made.build_step_plan({}, {}, lambda _: None)
    assert made.on_loads_failed({9} if by_pages else set(), set() if by_pages else {"r"}) == {"r"}
    assert made.get_num_new_matched_tokens(one, 0) == (0, False)
    save = plan(made, one, 17, [[7, 8, 9, 10, 11]]).stores[0]
    assert (save.first_block, len(save.keys)) == (0, 4), "the store says itself what it lacks of it"


@pytest.mark.parametrize("mode", ["layerwise", "async"])
def test_layerwise_load_failed_evicts_its_and_later_blocks(mode: str) -> None:
    pool = Pool(40)
    made = side(Shelf(hits=3), pool, load_mode=mode)
    one, two, three = request(17), request(17, "s"), request(9, "t")
    for each in (one, two, three):
        made.on_new_request(each)
    made.get_num_new_matched_tokens(one, 0)
    made.update_state_after_alloc(one, [[7, 8, 9, 10, 11]], 12)
    pages = {"r": [[7, 8, 9, 10, 11]], "s": [[7, 8, 20, 21, 22]], "t": [[30, 31, 32]]}  # "s" shares pages of "r"
    made.build_step_plan({"r": 5, "s": 9, "t": 9}, {}, pages.__getitem__)
    made.on_loads_failed({8, 9}, set())
    assert pool.evicted == ({8, 9, 10, 11, 20, 21, 22} if mode == "layerwise" else set()), "async: the engine caches what came"
    made.build_step_plan({"r": 5}, {}, pages.__getitem__)
    pool.evicted.clear()
    assert made.on_loads_failed({30}, set()) == set()
    assert not pool.evicted, "no load of this step"


def test_layerwise_load_shared_prefix_waits_one_step() -> None:
    made = side(Shelf(hits=3), Pool(40), load_mode="layerwise")
    one = request(17)
    same, head, other = request(17, "same"), request(17, "head"), request(17, "other")
    same.all_token_ids = list(one.all_token_ids)
    head.all_token_ids = [*one.all_token_ids[:4], *head.all_token_ids[4:]]
    for each in (one, same, head, other):
        made.on_new_request(each)
    assert made.get_num_new_matched_tokens(one, 4) == (8, False)
    made.update_state_after_alloc(one, [[7, 8, 9, 10, 11]], 8)
    assert made.get_num_new_matched_tokens(same, 8) == (None, False), "the engine takes for computed what has not come yet"
    assert made.get_num_new_matched_tokens(head, 4) == (8, False), "it shares what was there before"
    assert made.get_num_new_matched_tokens(other, 4) == (8, False)
    made.build_step_plan({"r": 5}, {}, lambda _: [[7, 8, 9, 10, 11]])
    assert made.get_num_new_matched_tokens(same, 12) == (0, False)


def test_load_failure_concerns_only_owner_of_pages() -> None:
    made = side(Shelf(hits=3))
    one, two = request(17), request(17, "s")
    for each, ids in ((one, [1, 2, 3, 4, 5]), (two, [6, 7, 8, 9, 10])):
        made.on_new_request(each)
        made.get_num_new_matched_tokens(each, 0)
        made.update_state_after_alloc(each, [ids], 12)
    made.on_loads_failed({8}, set())
    assert made.get_num_new_matched_tokens(one, 0) == (12, True)
    assert made.get_num_new_matched_tokens(two, 0) == (0, False)
    made.on_loads_finished(["r"])
    made.on_loads_failed({1}, set())
    assert made.get_num_new_matched_tokens(one, 0) == (12, True), "what has been loaded is the engine's"


def test_request_preempted_is_looked_up_again() -> None:
    shelf = Shelf(hits=1)
    made = side(shelf)
    one = request(17)
    made.on_new_request(one)
    assert made.get_num_new_matched_tokens(one, 0) == (4, True)
    one.num_preemptions, shelf.hits = 1, 4
    one.all_token_ids += [1] * 8
    assert made.get_num_new_matched_tokens(one, 0) == (16, True)


def test_blocks_are_stored_when_full_and_confirmed() -> None:
    pool, observed = Pool(20), Observed()
    made = side(Shelf(), pool, observed)
    one = request(10)
    made.on_new_request(one)
    made.get_num_new_matched_tokens(one, 0)
    ids = [[1, 2, 3]]
    (save,) = plan(made, one, 6, ids).stores
    assert (save.first_block, save.parent, save.block_ids) == (0, None, [[1]])
    assert pool.pinned == {1}
    (save,) = plan(made, one, 4, ids).stores
    assert (save.first_block, save.parent, save.block_ids) == (1, made.prefix_lookup.chain.keys(one.all_token_ids)[0], [[2]])  # type: ignore[union-attr]
    one.all_token_ids.append(5)
    assert plan(made, one, 3, ids, drafts=2).stores == [], "drafts may be rejected"
    one.all_token_ids.append(6)
    (save,) = plan(made, one, 1, ids).stores
    assert save.first_block == 2
    assert made.has_pins
    made.request_finished(one)
    assert pool.pinned == {1, 2, 3}, "the end of a request frees nothing that is still read"
    made.on_worker_output(WorkerOutput({1: 1, 2: 1, 3: 1}))
    assert pool.pinned == set()
    assert not made.has_pins
    assert observed.stored_blocks == [(0, 1), (1, 2), (2, 3)]


def test_pages_are_pinned_until_all_workers_answer() -> None:
    pool = Pool(9)
    made = SchedulerConnector(ConnectorOptions(), GroupBlocks([BLOCK]), workers=3)
    made.connect(Shelf(), 0, "")  # type: ignore[arg-type]
    made.bind_pool(pool)
    one = request(4)
    made.on_new_request(one)
    plan(made, one, 4, [[5]])
    first = WorkerOutput({1: 1})
    first.merge(WorkerOutput({1: 1}, {1}))
    made.on_worker_output(first)
    assert pool.pinned == {5}
    made.on_worker_output(WorkerOutput({1: 1}))
    assert pool.pinned == set()
    assert made.counters.totals()["stores_failed"] == 1


@pytest.mark.parametrize("then", ["whole", "failed", "other weights", "pages wanted"])
def test_store_after_layerwise_load_waits_for_all_workers(then: str) -> None:
    pool = Pool(20)
    made = SchedulerConnector(ConnectorOptions(load_mode="layerwise", lookup_wait_ms=0.0), GroupBlocks([BLOCK]), workers=2)
    made.connect(Shelf(hits=3), 0, "")  # type: ignore[arg-type]
    made.bind_pool(pool)
    one, ids = request(25), [list(range(1, 8))]
    made.on_new_request(one)
    made.get_num_new_matched_tokens(one, 0)
    made.update_state_after_alloc(one, ids, 12)
    one.num_computed_tokens = 12
    first = plan(made, one, 8, ids)
    assert len(first.loads) == 1
    assert first.stores == [], "another worker's load may fail, and this one's part would be wrong and stored"
    assert pool.pinned == {4, 5}, "and nobody else gets the pages meanwhile"
    if then == "whole":
        saves = plan(made, one, 4, ids).stores
        assert [(save.first_block, save.block_ids) for save in saves] == [(3, [[4, 5]]), (5, [[6]])]
        made.on_worker_output(WorkerOutput({save.job_id: 2 for save in saves}))
    elif then == "failed":
        made.on_loads_failed({2}, set())
        assert pool.pinned == set()
        one.num_computed_tokens = 4
        (save,) = plan(made, one, 16, ids).stores
        assert (save.first_block, len(save.keys)) == (0, 5)
        made.on_worker_output(WorkerOutput({save.job_id: 2}))
    elif then == "other weights":
        made.connect(Shelf(), 1, "two")  # type: ignore[arg-type]
        assert plan(made, one, 4, ids).stores == []
    else:
        made.release_pins(None)
        assert pool.pinned == set()
        assert not made.build_step_plan({}, {}, lambda _: None).cancel_stores
    assert pool.pinned == set()


def test_store_answered_twice_is_counted() -> None:
    pool = Pool(20)
    made, one = side(Shelf(), pool), request(17)
    made.on_new_request(one)
    made.get_num_new_matched_tokens(one, 0)
    (job,) = plan(made, one, 17, [[1, 2, 3, 4, 5]]).stores
    for _ in range(2):
        made.on_worker_output(WorkerOutput({job.job_id: 1}, {job.job_id}))
    assert pool.pinned == set()
    assert made.counters.totals()["bugs"] == 1


def test_store_failed_is_retried_once_with_next_blocks() -> None:
    pool, observed = Pool(20), Observed()
    made = side(Shelf(), pool, observed)
    one = request(40)
    made.on_new_request(one)
    ids = [list(range(1, 11))]
    plan(made, one, 8, ids)
    made.on_worker_output(WorkerOutput({1: 1}, {1}))
    (save,) = plan(made, one, 4, ids).stores
    assert (save.first_block, len(save.keys)) == (0, 3)
    made.on_worker_output(WorkerOutput({2: 1}, {2}))
    assert plan(made, one, 8, ids).stores == []
    assert made.counters.totals()["stores_given_up"] == 1
    assert pool.pinned == set()
    assert observed.stored_blocks == []


def test_store_failed_children_of_it_are_no_failures() -> None:
    pool = Pool(20)
    made = side(Shelf(), pool)
    one = request(40)
    made.on_new_request(one)
    ids = [list(range(1, 11))]
    plan(made, one, 8, ids)
    plan(made, one, 4, ids)
    made.on_worker_output(WorkerOutput({1: 1, 2: 1}, {1, 2}))
    assert made.counters.totals().get("stores_given_up", 0) == 0
    (save,) = plan(made, one, 4, ids).stores
    assert (save.first_block, len(save.keys)) == (0, 4)
    made.on_worker_output(WorkerOutput({3: 1}, {3}))
    assert made.counters.totals()["stores_given_up"] == 1
    assert pool.pinned == set()


def test_pages_waiting_for_store_are_bounded() -> None:
    pool = Pool(10)
    made = side(Shelf(), pool, pinned_share=0.3)
    one, two = request(12), request(12, "s")
    made.on_new_request(one)
    made.on_new_request(two)
    assert len(plan(made, one, 12, [[1, 2, 3]]).stores) == 1
    assert plan(made, two, 12, [[4, 5, 6]]).stores == []
    assert made.counters.totals()["stores_skipped"] == 1


def test_store_of_chain_with_freed_window_pages_ends() -> None:
    made = side(Shelf(groups=2), Pool(10))
    one = request(12)
    made.on_new_request(one)
    assert plan(made, one, 12, [[1, 2, 3], [0, 0, 4]]).stores == []
    assert made.counters.totals()["stores_broken"] == 1


def test_prompt_of_embeddings_is_not_shared() -> None:
    made = side(Shelf(hits=3), Pool(10))
    one = request(17)
    one.prompt_embeds = object()
    made.on_new_request(one)
    assert made.get_num_new_matched_tokens(one, 0) == (0, False)
    assert plan(made, one, 17, [[1, 2, 3, 4, 5]]).stores == []


def test_changed_weights_drop_pending_work() -> None:
    pool = Pool(20)
    old, new = Shelf(hits=2), Shelf(hits=2)
    made = side(old, pool)
    running, waiting = request(17), request(17, "s")
    for one in (running, waiting):
        made.on_new_request(one)
        made.get_num_new_matched_tokens(one, 0)
    plan(made, running, 12, [[1, 2, 3, 4, 5]])
    made.connect(new, 1, "two")  # type: ignore[arg-type]
    assert old.closed
    assert plan(made, running, 4, [[1, 2, 3, 4, 5]]).stores == [], "a part of it is of the old weights"
    assert made.get_num_new_matched_tokens(waiting, 0) == (8, True), "what has not begun is looked up anew"
    assert (made.build_step_plan({}, {}, lambda _: None).epoch, made.build_step_plan({}, {}, lambda _: None).weights_epoch) == (
        1,
        "two",
    )
    assert made.has_pins
    made.on_worker_output(WorkerOutput({1: 1}))
    assert pool.pinned == set()


def test_check_of_weights_holds_back_loads_and_stores() -> None:
    made = side(Shelf(hits=2), Pool(20))
    running, waiting = request(17), request(17, "s")
    for one in (running, waiting):
        made.on_new_request(one)
    made.get_num_new_matched_tokens(running, 0)
    made.weights.start("one", combined_digest(["a"]))
    made.weights.reset_ended(cleared=False)
    assert made.get_num_new_matched_tokens(waiting, 0) == (None, False)
    first = plan(made, running, 12, [[1, 2, 3, 4, 5]])
    assert (first.weights_check, first.stores) == (1, [])
    made.on_worker_output(WorkerOutput(weights={(1, 0): "a"}))
    made.weights.end_checks()
    assert made.get_num_new_matched_tokens(waiting, 0) == (8, True)
    (job,) = plan(made, running, 4, [[1, 2, 3, 4, 5]]).stores
    assert (job.first_block, len(job.keys)) == (2, 2), "also what was computed during the check"


def test_images_of_a_later_input_chunk_are_in_the_keys() -> None:
    """vLLM appends them to a streamed request without a call of the connector."""
    keys = []
    for image in ("a", "b"):
        made, one = side(Shelf(), Pool(64)), request(8)
        one.mm_features = []
        made.on_new_request(one)
        made.get_num_new_matched_tokens(one, 0)
        (first,) = plan(made, one, 8, [[1, 2, 3, 4]]).stores
        one.all_token_ids += [77] * 8
        one.mm_features.append(SimpleNamespace(identifier=image, mm_position=SimpleNamespace(offset=8, length=8)))
        (second,) = plan(made, one, 8, [[1, 2, 3, 4]]).stores
        whole = RequestKeys(made.prefix_lookup.chain, request_extras(one, None, BLOCK))  # type: ignore[union-attr]
        assert [*first.keys, *second.keys] == whole.upto(one.all_token_ids, 4)
        keys.append((first.keys, second.keys))
    assert keys[0][0] == keys[1][0]
    assert keys[0][1] != keys[1][1]


def test_store_of_a_request_mixed_with_adapters_is_ended() -> None:
    made, one = side(Shelf(hits=0), Pool(64)), request(17)
    made.on_new_request(one)
    made.adapters.mixing.happened = True
    assert plan(made, one, 17, [list(range(1, 9))]).stores == []
    assert made.counters.totals()["stores_unsure"] == 1


def test_store_of_a_replaced_adapter_is_ended(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    (tmp_path / "adapter_config.json").write_text("{}")
    made, one = side(Shelf(hits=4), Pool(64)), request(17)
    one.lora_request = SimpleNamespace(lora_name="x", lora_int_id=1, lora_path=str(tmp_path))
    made.on_new_request(one)
    assert made.get_num_new_matched_tokens(one, 0) == (16, True)
    made.adapters.begin_replacement(SimpleNamespace(lora_name="x", lora_int_id=1, lora_path=str(tmp_path / "b")))
    assert made.get_num_new_matched_tokens(one, 0) == (0, False)
    one.all_token_ids += [1] * 8
    assert plan(made, one, 24, [list(range(1, 9))]).stores == []
    assert made.counters.totals()["stores_unsure"] == 1


def test_pins_let_the_engine_wait_only_for_pages_they_free() -> None:
    now_s = [0.0]
    pool, pinned = Pool(8), PinnedPages(lambda: now_s[0])
    mine, shared = pool.blocks[1:3], pool.blocks[3:4]
    pool.touch(shared)  # by its running request
    pinned.pin(pool, shared)
    assert not pinned.frees_soon(pool)
    pinned.pin(pool, mine)
    assert pinned.frees_soon(pool)
    now_s[0] = FREES_WAIT_S
    assert not pinned.frees_soon(pool), "a store may take long"
    pinned.unpin(pool, shared)
    assert not pinned.frees_soon(pool), "that freed no page"
    pinned.unpin(pool, mine[:1])
    assert pinned.frees_soon(pool)
    pinned.unpin(pool, mine[1:])
    assert not pinned.frees_soon(pool)
    assert pool.pinned == {3}


def test_closed_epoch_computes_and_stores_nothing() -> None:
    made = side(Shelf(hits=2), Pool(20))
    one = request(17)
    made.on_new_request(one)
    made.weights.reset_ended(cleared=False)
    made.weights.renew()
    assert made.get_num_new_matched_tokens(one, 0) == (0, False)
    assert plan(made, one, 12, [[1, 2, 3, 4, 5]]).stores == []


@given(st.data())
def test_any_history_stores_parents_first_and_unpins_all(data: st.DataObject) -> None:
    pool = Pool(64)
    made = side(Shelf(hits=data.draw(st.integers(0, 6))), pool)
    held: dict[str, set[int]] = {}
    flying: list[StoreJob] = []
    requests: dict[str, tuple[Request, list[int]]] = {}
    for number in range(data.draw(st.integers(5, 40))):
        choice = data.draw(st.sampled_from(["new", "step", "step", "answer", "finish", "preempt"]))
        if choice == "new" and len(requests) < 3:
            one = request(data.draw(st.integers(1, 30)), f"r{number}")
            made.on_new_request(one)
            tokens, _ = made.get_num_new_matched_tokens(one, 0)
            assert tokens is not None
            ids = data.draw(st.permutations(range(1, 64)))[:12]
            made.update_state_after_alloc(one, [ids], tokens)
            one.num_computed_tokens = tokens
            held[one.request_id] = set(range(tokens // BLOCK))
            requests[one.request_id] = (one, ids)
        elif choice == "step" and requests:
            one, ids = requests[data.draw(st.sampled_from(sorted(requests)))]
            if one.num_computed_tokens == one.num_tokens:
                one.all_token_ids.append(number)
            left = one.num_tokens - one.num_computed_tokens
            if one.num_tokens < len(ids) * BLOCK:
                saves = plan(made, one, data.draw(st.integers(1, left)), [ids]).stores
                flying += saves
                for save in saves:
                    keys = made.prefix_lookup.chain.keys(one.all_token_ids)  # type: ignore[union-attr]
                    last = save.first_block + len(save.keys)
                    assert last * BLOCK <= min(one.num_computed_tokens, one.num_tokens), "only what is computed"
                    assert save.keys == keys[save.first_block : last]
                    assert save.parent == (keys[save.first_block - 1] if save.first_block else None)
                    assert save.block_ids == [ids[save.first_block : last]]
                    assert set(ids[save.first_block : last]) <= pool.pinned
        elif choice == "answer" and flying:
            save = flying.pop(0)
            bad = data.draw(st.booleans()) and data.draw(st.booleans())
            made.on_worker_output(WorkerOutput({save.job_id: 1}, {save.job_id} if bad else set()))
            if not bad and save.request_id in held:
                held[save.request_id] |= set(range(save.first_block, save.first_block + len(save.keys)))
        elif choice == "finish" and requests:
            made.request_finished(requests.pop(data.draw(st.sampled_from(sorted(requests))))[0])
        elif choice == "preempt" and requests:
            one, _ = requests[data.draw(st.sampled_from(sorted(requests)))]
            one.num_preemptions += 1
            tokens, _ = made.get_num_new_matched_tokens(one, 0)
            one.num_computed_tokens = tokens or 0
    made.on_worker_output(WorkerOutput({save.job_id: 1 for save in flying}))
    assert pool.pinned == set()
    assert not made.has_pins


def test_blocks_computed_before_lookup_answer_are_stored() -> None:
    """vLLM does not wait for lookups of requests that read no prefix, for example with logprobs of the prompt."""
    shelf, pool = Shelf(hits=2, at_once=False), Pool(16)
    made = side(shelf, pool)
    one = request(6 * BLOCK)
    made.on_new_request(one)
    ids = [list(range(6))]
    assert plan(made, one, 4 * BLOCK, ids).stores == []
    shelf.answer()
    (job,) = plan(made, one, 2 * BLOCK, ids).stores
    assert job.keys == KeyChain(SPEC).keys(np.array(one.all_token_ids))[2:], "what the lookup found is not stored again"


def test_keys_of_two_threads_are_computed_once() -> None:
    both = threading.Barrier(2)

    class Slow(KeyChain):
        def keys(self, *given: Any, **named: Any) -> list[BlockKey]:
            with suppress(threading.BrokenBarrierError):
                both.wait(0.2)  # the other thread also gets here, unless a lock excludes it
            return super().keys(*given, **named)

    tokens = random.Random(1).choices(range(1000), k=12 * BLOCK)
    keys = RequestKeys(Slow(SPEC), {})
    with ThreadPoolExecutor(2) as threads:
        first, second = (threads.submit(keys.upto, tokens, 8) for _ in range(2))
        assert first.result() == second.result()
    assert keys.upto(tokens, 12) == KeyChain(SPEC).keys(np.array(tokens))


class Watch:
    """Notes which blocks may be in the engine's own cache."""

    def __init__(self, hashed: int) -> None:
        self.hashed = hashed
        self.abandoned = False
        self.seen: list[tuple[int, int]] = []
        self.steps = 0

    def bind_pool(self, pool: Any) -> None:
        self.pool = pool

    def computed(self, one: Request, first: int, parent: BlockKey | None, keys: Sequence[BlockKey]) -> int:
        chain = KeyChain(SPEC).keys(one.all_token_ids)
        assert list(keys) == chain[first : first + len(keys)]
        assert parent == (chain[first - 1] if first else None)
        count = min(len(keys), self.hashed - first)
        self.seen.append((first, first + count))
        return count

    def step(self) -> None:
        self.steps += 1

    def abandon(self) -> None:
        self.abandoned = True


def test_cache_watch_gets_each_block_once_and_after_preemption() -> None:
    pool, watch, one = Pool(20), Watch(hashed=100), request(22)
    made = side(Shelf(), pool, hook=HookOptions(store=False))
    made.watch_cache(watch)
    assert watch.pool is pool
    made.on_new_request(one)
    for tokens in (10, 1, 1, 1, 4):
        plan(made, one, tokens, [list(range(6))])
    assert watch.seen == [(0, 2), (2, 3), (3, 4)]
    assert watch.steps == 5
    one.num_computed_tokens, one.num_preemptions = 0, 1
    plan(made, one, 22, [list(range(6))])
    assert watch.seen[3:] == [(0, 5)], "the pages may have been evicted"


def test_cache_watch_gets_blocks_once_they_are_hashed() -> None:
    watch, one = Watch(hashed=1), request(22)
    made = side(Shelf(), Pool(20), hook=HookOptions(store=False))
    made.watch_cache(watch)
    made.on_new_request(one)
    plan(made, one, 12, [list(range(6))], drafts=1)
    watch.hashed = 3
    plan(made, one, 2, [list(range(6))])
    assert watch.seen == [(0, 1), (1, 3)]


def test_cache_watch_leaves_keys_to_a_lookup_under_way() -> None:
    """The lookup's thread makes the keys of a prompt: the scheduler does not wait for them."""
    shelf, watch, one = Shelf(at_once=False), Watch(hashed=100), request(22)
    made = side(shelf, Pool(100))
    made.watch_cache(watch)
    made.on_new_request(one)
    plan(made, one, 10, [list(range(1, 7))])
    assert watch.seen == []
    shelf.answer()
    plan(made, one, 1, [list(range(1, 7))])
    assert watch.seen == [(0, 2)]


@pytest.mark.parametrize("fails", ["computed", "step"])
def test_cache_watch_failure_ends_the_watch_only(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, one = Watch(hashed=100), request(22)
    made = side(Shelf(), Pool(100))
    made.watch_cache(watch)
    made.on_new_request(one)
    made.get_num_new_matched_tokens(one, 0)
    monkeypatch.setattr(watch, fails, lambda *_: {}["renamed in another version"])
    stored = [job.first_block for _ in range(3) for job in plan(made, one, 4, [list(range(1, 7))]).stores]
    assert stored == [0, 1, 2]
    assert made.counters.totals()["bugs"] == 1
    assert watch.abandoned


@given(st.lists(st.sampled_from(["preempted", "store failed", 1, 1, 1, 3, 4, 9]), max_size=25))
def test_cache_watch_does_not_depend_on_stores(events: list[Any]) -> None:
    """The stores and reports of a connector equal those of two connectors that do only one of both."""

    def run(store: bool, watched: bool) -> tuple[list[tuple[int, int]], list[int]]:
        watch, one, jobs = Watch(hashed=100), request(200), list[StoreJob]()
        made = side(Shelf(), Pool(1_000), hook=HookOptions(store=store))
        if watched:
            made.watch_cache(watch)
        made.on_new_request(one)
        made.get_num_new_matched_tokens(one, 0)
        for event in events:
            if event == "preempted":
                one.num_computed_tokens, one.num_preemptions = 0, one.num_preemptions + 1
                made.get_num_new_matched_tokens(one, 0)
            elif event != "store failed":
                jobs += plan(made, one, event, [list(range(1, 80))]).stores
            elif jobs and made.has_pins:
                job = jobs[-1].job_id
                with suppress(KeyError):  # it was answered before
                    made.on_worker_output(WorkerOutput({job: 1}, {job}))
        return watch.seen, [job.first_block for job in jobs]

    seen, jobs = run(store=True, watched=True)
    assert seen == run(store=False, watched=True)[0]
    assert jobs == run(store=True, watched=False)[1]
