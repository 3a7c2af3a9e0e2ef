"""KV belongs to the weights that computed it: engines with different weights share none."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from adapters_bed import make_adapter
from vllm_bed import VllmDriver, VllmEngine, text, tiny

from kvclient.engines.file_stamps import mark_engine_start
from kvclient.engines.model_files import ModelFiles
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.testing.connector.driver import StoreAddress
from kvstore.testing.tiny_models import Family, TinyModel, make_model

MIB = 1 << 20
WEIGHTS = "model.safetensors"
PROMPTS = [text(seed, 400) for seed in range(2)]
LORA = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def driver(model_folder: Path) -> VllmDriver:
    return VllmDriver(tiny("llama", model_folder))


@pytest.fixture(scope="module")
def right(driver: VllmDriver) -> list[tuple[int, ...]]:
    """Return the model's answers without a store."""
    alone = driver.open(None)
    try:
        return alone.tokens(PROMPTS)
    finally:
        alone.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreAddress]:
    with LocalCluster([NodeSpec("n", dram_bytes=64 * MIB)], tmp_path / "store") as cluster:
        yield StoreAddress(cluster.metadata_address, cluster.node("n").local_socket)


def loaded(answers: Sequence[Any]) -> list[int]:
    return [one.loaded_tokens for one in answers]


@pytest.mark.parametrize("options", [{}, {"weights_epoch": "named"}], ids=["unnamed", "named"])
def test_weights_that_were_made_up_are_nobody_elses(
    options: dict[str, str], right: list[tuple[int, ...]], driver: VllmDriver, store: StoreAddress
) -> None:
    """``--load-format dummy`` before the folder of the real weights."""
    dummy = driver.open(store, options, load_format="dummy")
    assert dummy.tokens(PROMPTS) != right
    dummy.forget()
    assert all(loaded(dummy.generate(PROMPTS, 12))), "its own it finds"
    assert dummy.flush()
    dummy.close()
    engine = driver.open(store, options)
    answers = engine.generate(PROMPTS, 12)
    engine.close()
    assert ([one.tokens for one in answers], loaded(answers)) == (right, [0, 0])


def test_weights_files_replaced_after_load_keep_their_kv(
    driver: VllmDriver, store: StoreAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the files of a running engine are overwritten, its KV still belongs to the weights in memory."""
    from kvclient.engines.vllm.connector import KVStoreConnector

    others = make_model(tmp_path / "others", TinyModel(Family.LLAMA, hidden=128, head_dim=32, max_tokens=4096, seed=7))
    folder = shutil.copytree(driver.model, tmp_path / "model")
    alone = VllmDriver(others).open(None)
    right = alone.tokens(PROMPTS)
    alone.close()
    register = KVStoreConnector.register_kv_caches

    def overwrite_and_register(*args: Any) -> None:
        with (folder / WEIGHTS).open("r+b") as file, (others / WEIGHTS).open("rb") as other:
            shutil.copyfileobj(other, file)
        register(*args)

    monkeypatch.setattr(KVStoreConnector, "register_kv_caches", overwrite_and_register)
    engine = VllmDriver(folder).open(store, {"model": "m"})
    old = engine.tokens(PROMPTS)
    assert old != right, "it holds the old weights"
    assert engine.flush()
    engine.close()
    monkeypatch.undo()
    for model, tokens, hits in ((folder, right, [0, 0]), (driver.model, old, [384, 384])):
        engine = VllmDriver(model).open(store, {"model": "m"})
        answers = engine.generate(PROMPTS, 12)
        engine.close()
        assert ([one.tokens for one in answers], loaded(answers)) == (tokens, hits), "equal weights share, from any folder"


def scale_layer(factor: float) -> Callable[[Any], None]:
    """Change the weights of one norm in place."""

    def scale(model: Any) -> None:
        model.model.layers[1].input_layernorm.weight.data.mul_(factor)

    return scale


@pytest.mark.parametrize("options", [{}, {"weights_epoch": "named"}], ids=["unnamed", "named"])
def test_weights_changed_in_place_begin_an_epoch(
    options: dict[str, str], right: list[tuple[int, ...]], driver: VllmDriver, store: StoreAddress
) -> None:
    """As after ``collective_rpc("reload_weights")`` or a weight transfer, with no more than vLLM's own reset of its cache."""
    engine = driver.open(store, options)
    assert engine.tokens(PROMPTS) == right
    engine.forget()
    assert loaded(engine.generate(PROMPTS, 12)) == [384, 384], "a reset alone changes nothing"
    assert engine.flush()
    engine.llm.apply_model(scale_layer(2))
    assert engine.llm.reset_prefix_cache()
    answers = engine.generate(PROMPTS, 12)
    assert loaded(answers) == [0, 0]
    other = [one.tokens for one in answers]
    assert other != right
    engine.forget()
    assert loaded(engine.generate(PROMPTS, 12)) == [384, 384], "its new KV is found"
    assert engine.flush()
    engine.close()
    engine = driver.open(store, options)
    new = [text(seed, 400) for seed in range(7, 9)]
    assert engine.tokens(PROMPTS) == right
    engine.llm.apply_model(scale_layer(2))
    assert engine.llm.reset_prefix_cache()
    answers = engine.generate([*PROMPTS, *new], 12)
    assert loaded(answers)[:2] == ([0, 0] if options else [384, 384]), "engines that were updated equally share"
    assert [one.tokens for one in answers[:2]] == other
    assert engine.flush()
    engine.llm.apply_model(scale_layer(0.5))
    assert engine.llm.reset_prefix_cache()
    answers = engine.generate([*PROMPTS, *new], 12)
    assert loaded(answers) == [384, 384, 0, 0], "back to the first weights, and to their name"
    assert [one.tokens for one in answers[:2]] == right
    engine.close()


def compute(engine: VllmEngine, prompt: list[int], max_tokens: int, adapter: Any = None) -> None:
    """Begin a request, and step until it has computed its prompt."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    engine.llm.llm_engine.add_request("7", {"prompt_token_ids": prompt}, params, lora_request=adapter)
    while not engine.core.scheduler.running:  # until its lookup is answered, or late
        engine.llm.llm_engine.step()
    for _ in range(4):
        engine.llm.llm_engine.step()


def test_weights_after_pauses_and_failed_resets_are_named_right(
    right: list[tuple[int, ...]], driver: VllmDriver, store: StoreAddress, tmp_path: Path
) -> None:
    """vLLM resets its cache when it pauses, before the weights change. A reset that fails leaves KV of other weights in it."""
    name = tmp_path / "epoch"
    name.write_text("v1\n")
    engine = driver.open(store, {"weights_epoch_file": str(name)})
    assert engine.tokens(PROMPTS) == right
    assert engine.flush()
    for factor, epoch, hits in ((2, "v2", [0, 0]), (1, "v2", [384, 384])):
        engine.core.pause_scheduler("abort", True)
        engine.llm.llm_engine.abort_request(["nobody"])
        for _ in range(3):
            engine.llm.llm_engine.step()
        engine.llm.apply_model(scale_layer(factor))
        name.write_text(epoch)
        engine.core.resume_scheduler()
        answers = engine.generate(PROMPTS, 12)
        assert (loaded(answers), engine.scheduler_side.weights.name) == (hits, epoch)
        assert [one.tokens for one in answers] != right
        assert engine.flush()

    compute(engine, text(9, 100), 60)
    engine.llm.apply_model(scale_layer(0.5))
    name.write_text("v3")
    assert not engine.llm.reset_prefix_cache(reset_connector=True)
    engine.generate(PROMPTS, 1)  # from vLLM's cache, which has KV of the weights before
    while engine.llm.llm_engine.has_unfinished_requests():
        engine.llm.llm_engine.step()
    assert engine.flush()
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    answers = engine.generate(PROMPTS, 12)
    assert ([one.tokens for one in answers], loaded(answers)) == (right, [0, 0])
    assert engine.scheduler_side.weights.name == "v3"
    engine.close()


def test_weights_digest_sees_one_element_of_any_tensor(driver: VllmDriver, store: StoreAddress) -> None:
    """For linear layers, whose kernels keep the weights, the digest covers columns."""
    from vllm.model_executor.layers.linear import LinearBase

    engine = driver.open(store)
    digest = engine.worker_side.digest_weights
    (model,) = engine.llm.apply_model(lambda model: model)
    before = digest()
    assert digest() == before
    tensors = [one for one in (*model.parameters(), *model.buffers()) if one.numel()]
    linear = [one for one in model.modules() if isinstance(one, LinearBase)]
    assert len(tensors) > 10
    assert len(linear) >= 8
    seen = {before}
    for tensor in tensors:
        element = tensor.data.reshape(-1)[tensor.numel() // 3 :][:1]
        element += 1
        seen.add(digest())
        element -= 1
    for layer in linear:
        compute = layer.quant_method.apply
        layer.quant_method.apply = lambda of, x, layer=layer, compute=compute: compute(of, x) * (1 + (of is layer))
        seen.add(digest())
        layer.quant_method.apply = compute
    assert len(seen) == 1 + len(tensors) + len(linear)
    engine.close()


def ask(engine: VllmEngine, adapter: Any, prompts: Sequence[Sequence[int]] = PROMPTS) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return answers with an adapter, and how many tokens of each prompt were loaded."""
    answers = engine.generate(prompts, 12, adapter)
    return [one.tokens for one in answers], loaded(answers)


def test_requests_mixed_with_an_adapter_are_not_stored(driver: VllmDriver, store: StoreAddress, tmp_path: Path) -> None:
    """On a CPU, vLLM computes a request without an adapter with the weights of one in the same step."""
    from vllm.lora.request import LoRARequest

    make_adapter(driver.model, tmp_path / "a", 1)
    adapter = LoRARequest("a", 1, str(tmp_path / "a"))
    before, mixed, after = ([text(seed, 400)] for seed in range(20, 23))
    alone = driver.open(None, **LORA)
    right = ask(alone, None, [*before, *mixed, *after])[0]
    alone.close()

    engine = driver.open(store, **LORA)
    assert ask(engine, None, before) == ([right[0]], [0])
    wrong = ask(engine, [adapter, None], mixed * 2)[0][1]
    assert wrong != right[1], "vLLM computes right tokens now: remove AdapterMixing"
    assert ask(engine, None, after) == ([right[2]], [0])
    assert engine.flush()
    engine.forget()
    assert ask(engine, None, [*before, *mixed, *after]) == (right, [384, 0, 0])
    counts = engine.counters()
    assert counts["stores_unsure"] >= 2
    engine.close()


def test_an_adapter_that_was_read_anew_is_another(driver: VllmDriver, store: StoreAddress, tmp_path: Path) -> None:
    """An adapter's files change while it is evicted: vLLM reads the new files, whose KV differs."""
    from vllm.lora.request import LoRARequest

    folders = [tmp_path / name for name in ("a", "b", "c")]
    for seed, folder in enumerate(folders):
        make_adapter(driver.model, folder, seed)
    first, other, early = (LoRARequest(folder.name, number, str(folder)) for number, folder in enumerate(folders, 1))
    alone = driver.open(None, **LORA)
    right = ask(alone, first)[0]
    assert ask(alone, None)[0] != right != ask(alone, other)[0]
    alone.close()

    engine = driver.open(store, **LORA)
    assert ask(engine, first) == (right, [0, 0])
    engine.forget()
    assert ask(engine, first) == (right, [384, 384]), "an adapter's KV is found"
    assert engine.llm.llm_engine.add_lora(early), "read before any request asks for it"
    make_adapter(driver.model, folders[2], 9)
    kept = {path.name: path.read_bytes() for path in folders[0].iterdir()}
    make_adapter(driver.model, folders[0], 8)
    engine.forget()
    stored = engine.counters()["store_blocks"]
    ask(engine, early)
    assert engine.flush()
    new = [text(seed, 400) for seed in range(5, 7)]
    spoiled = ask(engine, first, new)
    counts = engine.counters()
    assert spoiled[1] == [0, 0]
    assert (counts["adapters_unknown"], counts["store_blocks"]) == (4, stored), "neither is stored"
    engine.close()

    for name, content in kept.items():  # another host still has the old files at the same path
        (folders[0] / name).write_bytes(content)
    alone = driver.open(None, **LORA)
    right = ask(alone, first, new)[0]
    alone.close()
    assert spoiled[0] != right
    engine = driver.open(store, **LORA)
    answers = ask(engine, first, new), ask(engine, first)[1]
    engine.close()
    assert answers == ((right, [0, 0]), [384, 384])


def test_vllm_adapter_changed_before_its_step_is_not_stored(driver: VllmDriver, store: StoreAddress, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    make_adapter(driver.model, tmp_path / "a", 1)
    engine = driver.open(store, **LORA)
    begin = engine.worker_side.begin_loads

    def begin_loads(plan: Any) -> None:
        if plan.stores:
            make_adapter(driver.model, tmp_path / "a", 2)
        begin(plan)

    engine.worker_side.begin_loads = begin_loads  # type: ignore[method-assign]
    ask(engine, LoRARequest("a", 1, str(tmp_path / "a")))
    assert engine.flush()
    counts = engine.counters()
    engine.close()
    assert counts["stores_unsure"] >= 1
    assert counts.get("stores", 0) == 0


def test_adapter_replaced_in_place_ends_stores_of_its_requests(driver: VllmDriver, store: StoreAddress, tmp_path: Path) -> None:
    """A request that runs meanwhile goes on with the new weights. Its keys name the old ones."""
    from vllm.lora.request import LoRARequest

    for seed, name in enumerate("ab"):
        make_adapter(driver.model, tmp_path / name, seed)
    old, new = (LoRARequest("x", 1, str(tmp_path / name), load_inplace=name == "b") for name in "ab")
    engine = driver.open(store, **LORA)
    compute(engine, text(3, 100), 150, old)
    assert engine.llm.llm_engine.add_lora(new)
    while engine.llm.llm_engine.has_unfinished_requests():
        engine.llm.llm_engine.step()
    assert engine.flush()
    counts = engine.counters()
    assert (counts["store_blocks"], counts["stores_unsure"]) == (100 // 32, 1)
    asked = LoRARequest("x", 1, str(tmp_path / "b"))
    right = ask(engine, asked)[0]
    engine.forget()
    assert ask(engine, asked) == (right, [384, 384]), "the new weights are known"
    ask(engine, LoRARequest("x", 2, str(tmp_path / "a")))
    assert engine.counters()["adapters_unknown"] == 2, "vLLM's cache has KV of both under the old path"
    engine.close()


OLD, NEW = "1" * 40, "2" * 40


def test_model_files_of_a_hub_are_identified_by_commit(tmp_path: Path) -> None:
    """The commit is unknown even if this engine fetched the files: transformers does not report which commit it read."""
    hub = tmp_path / "models--user--model"
    drawn = iter(range(9))

    def text(revision: str = "") -> str:
        files = ModelFiles("user/model", requested_revision=revision, cache=str(tmp_path))
        return files.weights_digest(lambda: f"own {next(drawn)}")

    def fetch(commit: str) -> None:
        (hub / "snapshots" / commit).mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (hub / "snapshots" / commit / name).write_text(commit)
        (hub / "refs").mkdir(exist_ok=True)
        (hub / "refs" / "main").write_text(commit)

    assert text() == "own 0:", "nothing is there"
    mark_engine_start()
    fetch(OLD)
    assert text() == f"{OLD}:", "the only commit there is, also if this engine fetched it"
    fetch(NEW)
    assert text() == "own 1:", "it may have read the one before"
    assert text(OLD) == f"{OLD}:"
    mark_engine_start()
    assert text() == f"{NEW}:"
