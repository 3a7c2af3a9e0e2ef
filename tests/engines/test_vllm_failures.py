"""After every failure of the store vLLM answers as without it; its pages are never freed while they are read."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.node_stats import evict
from support.wait import wait_until

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm_bed import BLOCK, SingleEngine, VllmDriver, VllmEngine, text, tiny

from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.testing.connector.driver import StoreAddress

MIB = 1 << 20
PROMPTS = [text(seed, 500) for seed in range(3)]
WAIT_S = 30.0
MOST_WAIT_S = 8.0
"""Bound of a request that meets a server as it hangs: below a load's deadline. On an idle machine it waits for a second."""
SOON_S = 0.5
"""Bound of the fastest later request: a connector that waits for the server each time waits for a second each time."""


class Bed:
    """One store and one engine."""

    def __init__(self, folder: Path, cluster: LocalCluster) -> None:
        self.folder = folder
        self.cluster = cluster
        self.store = StoreAddress(cluster.metadata_address, cluster.node("n").local_socket)
        self._single = SingleEngine()

    def open(self, family: str = "llama", *, mode: str = "async", policy: str = "recompute", **options: Any) -> VllmEngine:
        engine = options.pop("engine", {})
        driver = VllmDriver(tiny(family, self.folder), family, load_mode=mode, policy=policy)
        return self._single.open(driver, self.store, options, **engine)

    def close(self) -> None:
        self._single.close()


@pytest.fixture
def make_bed(folder: Path, tmp_path: Path) -> Iterator[Callable[..., Bed]]:
    beds: list[Bed] = []

    def make(**node: Any) -> Bed:
        spec = NodeSpec("n", **{"dram_bytes": 64 * MIB, **node})
        cluster = LocalCluster([spec], tmp_path / f"store{len(beds)}").__enter__()
        beds.append(Bed(folder, cluster))
        return beds[-1]

    yield make
    for bed in beds:
        bed.close()
        bed.cluster.close()


def kill_while_loading(bed: Bed, engine: VllmEngine) -> None:
    """The node is killed after the lookup has said that it holds the prefix, before the load begins."""
    begin = engine.worker_side.begin_loads

    def begin_loads(plan: Any) -> None:
        if plan.loads:
            engine.worker_side.begin_loads = begin  # type: ignore[method-assign]
            bed.cluster.kill("n")
        begin(plan)

    engine.worker_side.begin_loads = begin_loads  # type: ignore[method-assign]


@pytest.mark.parametrize(("family", "mode"), [("llama", "async"), ("llama", "layerwise"), ("gemma3", "async")])
def test_the_node_dies_between_lookup_and_load(family: str, mode: str, make_bed: Callable[..., Bed]) -> None:
    bed = make_bed()
    engine = bed.open(family, mode=mode, load_deadline_s=2.0, store_deadline_s=2.0)
    right = engine.tokens(PROMPTS)
    engine.forget()
    kill_while_loading(bed, engine)
    assert engine.tokens(PROMPTS) == right
    counts = engine.counters()
    assert counts["loads_failed"] >= 1
    assert counts["loads_failed"] <= len(PROMPTS), "each request fails once and is computed"
    assert counts.get("bugs", 0) == 0
    assert engine.flush()
    bed.cluster.start_node("n")
    wait_until(
        lambda: engine.counters()["client_session_open"] == (6 if family == "gemma3" else 1),
        "sessions",
        step=lambda: (engine.forget(), engine.tokens(PROMPTS), time.sleep(0.05)),
    )
    assert engine.tokens(PROMPTS) == right


@pytest.mark.parametrize("how", ["aborted", "computed in pieces"])
def test_vllm_failed_layerwise_load_leaves_no_prefix(how: str, make_bed: Callable[..., Bed]) -> None:
    bed = make_bed()
    tight: dict[str, Any] = {"max_num_batched_tokens": 256, "enable_chunked_prefill": True}
    if how != "aborted":
        tight["long_prefill_token_threshold"] = 64
    prompt = text(7, 500)
    branch = prompt[:440] + text(8, 40)
    engine = bed.open(mode="layerwise", load_deadline_s=2.0, store_deadline_s=2.0, engine=tight)
    right = {name: engine.tokens([each])[0] for name, each in (("same", prompt), ("branch", branch))}
    engine.forget()
    kill_while_loading(bed, engine)
    core, answers = engine.llm.llm_engine, {}
    how_many = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, output_kind=RequestOutputKind.CUMULATIVE)

    def step() -> None:
        for output in core.step():
            answers[output.request_id] = tuple(output.outputs[0].token_ids)

    core.add_request("first", {"prompt_token_ids": prompt}, how_many)
    wait_until(lambda: engine.counters().get("loads_failed", 0) == 1, "the load fails", step=step)
    if how == "aborted":
        core.abort_request(["first"])
    for name, each in (("same", prompt), ("branch", branch)):
        core.add_request(name, {"prompt_token_ids": each}, how_many)
    wait_until(lambda: not core.has_unfinished_requests(), "all are answered", step=step)
    assert {name: answers[name] for name in right} == right
    assert engine.counters()["pages_uncached"] > 0


@pytest.mark.parametrize(("family", "mode"), [("llama", "async"), ("llama", "layerwise"), ("gemma3", "async")])
def test_vllm_policy_fail_fails_the_request_alone(family: str, mode: str, make_bed: Callable[..., Bed]) -> None:
    bed = make_bed()
    engine = bed.open(family, mode=mode, policy="fail", load_deadline_s=2.0, store_deadline_s=2.0)
    right = engine.tokens(PROMPTS)
    engine.forget()
    kill_while_loading(bed, engine)
    answers = engine.run(PROMPTS, 12)
    reasons = {answer.outputs[0].finish_reason for answer in answers}
    assert "error" in reasons
    for answer, tokens in zip(answers, right, strict=True):
        if answer.outputs[0].finish_reason != "error":
            assert tuple(answer.outputs[0].token_ids) == tokens
    wait_until(lambda: engine.scheduler_side.prefix_lookup is not None)
    assert engine.flush()
    bed.cluster.start_node("n")
    wait_until(lambda: all(one.outputs[0].finish_reason == "length" for one in engine.run(PROMPTS, 12)), "the engine answers")
    assert engine.tokens(PROMPTS) == right


def test_the_metadata_server_dies_and_comes_back(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed()
    engine = bed.open(lookup_deadline_s=0.5)
    right = engine.tokens(PROMPTS)
    engine.forget()
    bed.cluster.kill("metadata")
    assert engine.tokens(PROMPTS) == right, "no lookups, no hits, the same answers"
    assert engine.counters()["lookup_failures"] >= 1
    engine.forget()
    bed.cluster.start_metadata()

    def loads() -> bool:
        engine.forget()
        answers = engine.generate(PROMPTS, 12)
        assert [one.tokens for one in answers] == right
        return all(one.loaded_tokens for one in answers)

    wait_until(loads, "hits once more")


def test_corrupt_blocks_are_computed(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed(nvme_bytes=64 * MIB)
    engine = bed.open()
    right = engine.tokens(PROMPTS)
    engine.forget()
    assert engine.worker_side.clients[0].flush()
    slab = max(bed.cluster.volume_path("n").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    (page,) = engine.worker_side.pages[0].layer_buffer(2, [5]).segments(0, 0, 1)
    at = slab.read_bytes().index(bytes(page[:512]))  # the fifth block of a prompt
    with slab.open("r+b") as file:
        file.seek(at)
        file.write(b"\x55\xaa")
        file.flush()
        os.fsync(file.fileno())
    evict(bed.cluster, "n")
    assert engine.tokens(PROMPTS) == right
    counts = engine.counters()
    assert counts["loads_failed"] == 1
    assert counts["load_missing_blocks"] >= 1
    assert counts["load_blocks"] >= 1, "blocks before the first bad one count"


@pytest.mark.parametrize("raises", [True, False])
def test_what_a_step_that_raises_has_not_computed_is_not_stored(raises: bool, make_bed: Callable[..., Bed]) -> None:
    """vLLM ends a step that raised like any other. A step inside an exception handler has not raised."""
    engine = make_bed().open()

    def no_space(*_: Any) -> None:
        raise RuntimeError("out of memory")

    try:
        int("another error")
    except ValueError:
        if raises:
            engine.llm.apply_model(lambda model: model.register_forward_hook(no_space) and None)
            with pytest.raises(RuntimeError, match="out of memory"):
                engine.tokens(PROMPTS[:1])
        else:
            engine.tokens(PROMPTS[:1])
    engine.worker_side.release_pages(grace_s=WAIT_S, timeout_s=0.0)
    totals = engine.worker_side.counters.totals()
    assert (totals.get("stores", 0) == 0) == raises
    assert "stores_dropped" not in totals, "the stores ended by themselves"


def test_a_store_without_space_skips(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed(dram_bytes=2 * MIB)
    engine = bed.open(store_deadline_s=0.5)
    prompts = [text(seed, 900) for seed in range(30, 38)]
    right = engine.tokens(prompts)
    assert engine.flush()
    engine.forget()
    assert engine.tokens(prompts) == right
    assert engine.flush()
    assert engine.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() > 0
    assert engine.counters().get("bugs", 0) == 0


class Gate:
    """Holds a method of the client's back until it is opened."""

    def __init__(self, client: Any, method: str) -> None:
        self.inside = threading.Event()
        self._open = threading.Event()
        self._client = client
        self._method = method
        real = getattr(client, method)

        def held(*given: Any, **named: Any) -> Any:
            self.inside.set()
            assert self._open.wait(WAIT_S)
            return real(*given, **named)

        setattr(client, method, held)

    def open(self) -> None:
        self._open.set()


def add(engine: VllmEngine, request_id: str, prompt: list[int], max_tokens: int = 12) -> None:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    engine.llm.llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, params)


def test_pages_are_not_free_while_they_are_stored(make_bed: Callable[..., Bed]) -> None:
    """The request ends, or is aborted, long before its pages are read: they stay as they are until then."""
    bed = make_bed()
    engine = bed.open(engine={"num_gpu_blocks_override": 80})
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    before = pool.get_num_free_blocks()
    gate = Gate(engine.worker_side.clients[0], "store_call")
    add(engine, "held", PROMPTS[0], max_tokens=200)
    wait_until(gate.inside.is_set, "a store began", step=engine.llm.llm_engine.step)
    engine.llm.llm_engine.abort_request(["held"])
    for _ in range(5):
        engine.llm.llm_engine.step()
    held = before - pool.get_num_free_blocks()
    assert held == len(PROMPTS[0]) // BLOCK, "full blocks are pinned, the rest of the request's pages are free"
    others = [text(seed, 400) for seed in range(50, 58)]
    right = engine.tokens(others), gate.open()
    assert engine.flush()
    assert pool.get_num_free_blocks() == before
    engine.forget()
    answers = engine.generate([PROMPTS[0]], 12)
    assert answers[0].loaded_tokens == (len(PROMPTS[0]) - 1) // BLOCK * BLOCK
    assert engine.tokens(others) == right[0]
    bed.close()
    alone = VllmDriver(tiny("llama", bed.folder)).open(None)
    try:
        assert alone.tokens([PROMPTS[0]]) == [answers[0].tokens]
    finally:
        alone.close()


def test_a_request_that_is_aborted_while_it_loads(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed()
    engine = bed.open()
    right = engine.tokens(PROMPTS)
    engine.forget()
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    before = pool.get_num_free_blocks()
    loads = Gate(engine.worker_side.clients[0], "start_load")
    loads.open()
    node = bed.cluster.node("n").process
    node.send_signal(signal.SIGSTOP)  # the node hangs: the load neither ends nor fails
    try:
        add(engine, "aborted", PROMPTS[0])
        wait_until(loads.inside.is_set, "a load began", step=engine.llm.llm_engine.step)
        assert pool.get_num_free_blocks() < before
        engine.llm.llm_engine.abort_request(["aborted"])
        wait_until(lambda: not engine.llm.llm_engine.has_unfinished_requests(), "gone", step=engine.llm.llm_engine.step)
        wait_until(lambda: pool.get_num_free_blocks() == before, "the load has ended", step=engine.llm.llm_engine.step)
    finally:
        node.send_signal(signal.SIGCONT)
    assert engine.counters()["loads_aborted"] == 1
    assert engine.tokens(PROMPTS) == right


@pytest.mark.parametrize("server", ["n", "metadata"])
def test_vllm_hung_server_delays_no_later_request(server: str, make_bed: Callable[..., Bed]) -> None:
    """One request waits for about a second; later ones are answered as without a store."""
    bed = make_bed()
    engine = bed.open()
    right = engine.tokens(PROMPTS)
    assert engine.flush()

    def answer(at: int) -> float:
        engine.forget()
        began_s = time.monotonic()
        assert engine.tokens([PROMPTS[at]]) == [right[at]]
        return time.monotonic() - began_s

    process = bed.cluster.node(server).process
    process.send_signal(signal.SIGSTOP)
    try:
        waits = [answer(at % len(PROMPTS)) for at in range(6)]
    finally:
        process.send_signal(signal.SIGCONT)
    counts = engine.counters()
    bed.close()
    plain = VllmDriver(tiny("llama", bed.folder)).open(None)
    try:
        computed = []
        for prompt in PROMPTS:
            plain.forget()
            began_s = time.monotonic()
            plain.tokens([prompt])
            computed.append(time.monotonic() - began_s)
    finally:
        plain.close()
    assert waits[0] <= max(computed) + MOST_WAIT_S, waits
    assert min(waits[2:]) <= max(computed) + SOON_S, (waits, computed)
    assert counts.get("bugs", 0) == 0


@pytest.mark.parametrize("connector_too", [False, True])
def test_a_reset_does_not_wait_for_a_node_that_hangs(connector_too: bool, make_bed: Callable[..., Bed]) -> None:
    """Pages that wait to be stored are given back at once: vLLM cannot reset its cache before."""
    bed = make_bed()
    engine = bed.open(store_deadline_s=600.0)
    process = bed.cluster.node("n").process
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    process.send_signal(signal.SIGSTOP)
    try:
        right = engine.tokens(PROMPTS)
        assert engine.scheduler_side.has_pins
        assert engine.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=connector_too)
        assert not engine.scheduler_side.has_pins
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert engine.tokens(PROMPTS) == right, "the engine answers"
        assert engine.llm.reset_prefix_cache()
    finally:
        process.send_signal(signal.SIGCONT)
    counts = engine.counters()
    assert counts["stores"] >= len(PROMPTS), "each store ended: dropped by the reset, or given up because the node hangs"
    assert counts.get("bugs", 0) == 0

    def stored_again() -> bool:
        engine.forget()
        answers = engine.generate(PROMPTS, 12)
        assert [one.tokens for one in answers] == right
        return all(one.loaded_tokens for one in answers)

    wait_until(stored_again, "the store is used once more")


def test_a_reset_that_fails_over_something_else_gives_nothing_up(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed()
    engine = bed.open()
    gate = Gate(engine.worker_side.clients[0], "store_call")
    add(engine, "running", PROMPTS[0], max_tokens=200)
    wait_until(gate.inside.is_set, "a store began", step=engine.llm.llm_engine.step)
    assert not engine.llm.reset_prefix_cache(), "a request runs"
    gate.open()
    wait_until(lambda: not engine.llm.llm_engine.has_unfinished_requests(), "it ends", step=engine.llm.llm_engine.step)
    assert engine.flush()
    assert "stores_dropped" not in engine.counters()


def test_a_reset_begins_an_epoch(make_bed: Callable[..., Bed], tmp_path: Path) -> None:
    bed = make_bed()
    name = tmp_path / "epoch"
    name.write_text("step-1\n")
    engine = bed.open(weights_epoch_file=str(name))
    right = engine.tokens(PROMPTS)
    engine.forget()
    assert all(one.loaded_tokens for one in engine.generate(PROMPTS, 12))
    name.write_text("step-2\n")
    assert engine.flush()
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    fresh = engine.generate(PROMPTS, 12)
    assert [one.loaded_tokens for one in fresh] == [0] * 3, "KV of the weights before is not found"
    assert [one.tokens for one in fresh] == right
    engine.forget()
    assert all(one.loaded_tokens for one in engine.generate(PROMPTS, 12)), "KV of these weights is"
    engine = bed.open(weights_epoch="step-2")
    assert all(one.loaded_tokens for one in engine.generate(PROMPTS, 12)), "and by another engine of the same epoch"
    assert engine.flush()
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    assert all(one.loaded_tokens for one in engine.generate(PROMPTS, 12)), "the same weights, so the same name"
    assert engine.flush()
    engine.llm.apply_model(lambda model: model.model.layers[1].input_layernorm.weight.data.mul_(2) is None)
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    assert not any(one.loaded_tokens for one in engine.generate(PROMPTS, 12)), "without a name, it is this engine's alone"


def test_events_salts_and_metrics(make_bed: Callable[..., Bed]) -> None:
    from vllm.config import KVEventsConfig

    bed = make_bed()
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    engine = bed.open(engine={"kv_events_config": events, "disable_log_stats": False})
    seen: list[Any] = []
    take = engine.connector.take_events
    engine.connector.take_events = lambda: [event for event in take() if not seen.append(event)]  # type: ignore[func-returns-value]
    engine.tokens(PROMPTS[:1])
    assert engine.flush()
    stored = [event for event in seen if type(event).__name__ == "BlockStored"]
    assert sum(len(event.block_hashes) for event in stored) == (500 + 12 - 1) // BLOCK, "the last token lacks KV"
    assert [token for event in stored for token in event.token_ids][: len(PROMPTS[0])] == PROMPTS[0][: 500 // BLOCK * BLOCK]
    assert {(event.medium, event.kv_cache_spec_kind, event.locality) for event in stored} == {("CPU", "full_attention", None)}
    engine.forget()
    prompts = [{"prompt_token_ids": PROMPTS[0], "cache_salt": salt} for salt in ("a", "b")]
    from vllm import SamplingParams

    for _ in range(2):
        for prompt in prompts:
            answer = engine.llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)[0]
            assert answer.num_cached_tokens == 0, "other salts share nothing"
        prompts = [{"prompt_token_ids": PROMPTS[0], "cache_salt": salt} for salt in ("c", "d")]
    metrics = {metric.name: metric for metric in engine.llm.get_metrics()}
    assert metrics["vllm:kvstore_store_bytes"].value > 0
    assert metrics["vllm:kvstore_lookups"].value >= 5
